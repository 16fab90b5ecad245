//! The command line's side of a control connection.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use sys::foreign::Foreign;
use wire::{Hello, MAX_MESSAGE, Name, Reply, ReplyReader, Request, Role};

/// Asks the daemon at `socket`, and waits for its reply for `patience` at most.
///
/// # Errors
/// No daemon, no reply in time, or not one of this protocol.
pub(crate) fn ask(socket: &Path, request: &Request, patience: Duration) -> Result<Reply> {
    let connection = sys::socket::connect(socket).map_err(|error| absent(socket, error))?;
    set_socket_timeout(&connection, Timeout::Recv, Some(patience))?;
    set_socket_timeout(&connection, Timeout::Send, Some(patience))?;
    let hello = Hello {
        role: Role::Control,
        domain: Name::default(),
    };
    let mut packet = [0; MAX_MESSAGE];
    let len = hello.encode(&mut packet);
    let talk = || -> Result<Reply> {
        sys::socket::send(&connection, &packet[..len], &[])?;
        sys::socket::send(&connection, &serde_json::to_vec(request)?, &[])?;
        let reply = receive(&connection)?;
        // A reason may quote names that others chose.
        Ok(match serde_json::from_slice(&reply)? {
            Reply::Refused(why) => Reply::Refused(Foreign(&why).to_string()),
            Reply::Crowded(why) => Reply::Crowded(Foreign(&why).to_string()),
            reply => reply,
        })
    };
    talk().with_context(|| format!("no reply from the daemon at {}", socket.display()))
}

fn receive(connection: &impl std::os::fd::AsFd) -> Result<Vec<u8>> {
    let mut reader = ReplyReader::default();
    let mut packet = vec![0; MAX_MESSAGE];
    loop {
        let got = match sys::socket::recv(connection, &mut packet) {
            Err(Errno::AGAIN) => bail!("it did not answer in time"),
            other => other?.len,
        };
        if let Some(reply) = reader.push(&packet[..got])? {
            return Ok(reply);
        }
    }
}

/// Why no daemon was reached at `socket`.
pub(crate) fn absent(socket: &Path, error: Errno) -> anyhow::Error {
    use std::os::unix::fs::FileTypeExt;
    let at = socket.display();
    let other = |meta: std::fs::Metadata| !meta.file_type().is_socket();
    match error {
        _ if std::fs::metadata(socket).is_ok_and(other) => anyhow::anyhow!("{at} is no socket"),
        Errno::NOENT => anyhow::anyhow!("no daemon at {at}: start one with `pageone daemon`"),
        Errno::CONNREFUSED => anyhow::anyhow!(
            "no daemon at {at}: the one that made this socket has ended; start one with `pageone \
             daemon`"
        ),
        Errno::ACCESS => anyhow::anyhow!("this user may not talk to the daemon at {at}"),
        other => anyhow::Error::new(io::Error::from(other))
            .context(format!("cannot connect to the daemon at {at}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_no_socket_and_no_daemon_that_ended() {
        let folder = tempfile::tempdir().unwrap();
        let said = absent(folder.path(), Errno::CONNREFUSED).to_string();
        assert!(said.contains("is no socket"), "{said}");
        let said = absent(&folder.path().join("x"), Errno::NOENT).to_string();
        assert!(said.contains("no daemon at"), "{said}");
    }
}
