//! `pageone attach` for the daemon: the process that does it, the questions to it, and its answers.
//!
//! ```text
//!               ┌── a service listens beside the daemon's socket ──▶ `pageone attach --asked`, a process for each wish
//!   daemon ─────┤
//!               └── none does ──▶ a child: `pageone attach PID`
//! ```
//!
//! The service exists for processes with seccomp filters. The kernel shows filters to no process that has one itself, and the daemon's
//! unit has some, which its children inherit. The unit of the service has none (`packaging/pageone-attach@.service`).
//!
//! **What the service believes.** Its socket is root's, with mode 0600, and it asks the kernel who has connected: its own user alone is
//! served. A wish names a process, when that began, and the words of its rule. It names no file: agent and socket are the service's own.
//! **What the daemon believes.** It asks the kernel who listens: its own user.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// What is kept of what the other process says.
const SAID_BYTES: usize = 4096;
/// The daemon sends its wish when it has connected.
const PATIENCE: Duration = Duration::from_secs(5);

/// A process that is to be attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Wish {
    pub(crate) pid: u32,
    /// In ticks since boot.
    pub(crate) began: u64,
    pub(crate) domain: Option<String>,
    pub(crate) any: bool,
    /// A daemon that was started before an upgrade does not know this, nor what follows.
    #[serde(default)]
    pub(crate) mount: bool,
    #[serde(default)]
    pub(crate) any_huge: bool,
    /// In bytes.
    #[serde(default)]
    pub(crate) need: Option<u64>,
}

/// Where the service of this daemon listens: `/run/pageone-attach.sock` beside `/run/pageone.sock`. For `/run/pageone/pageone.sock` it is
/// `/run/pageone-pageone-attach.sock`, beside the folder: containers have that folder, and must not reach the service.
fn beside(socket: &Path) -> Option<PathBuf> {
    let stem = socket.file_stem()?;
    let folder = socket.parent().filter(|at| at.file_name() == Some(stem));
    let mut name = stem.to_owned();
    if folder.is_some() {
        name.push("-");
        name.push(stem);
    }
    name.push("-attach.sock");
    Some(folder.unwrap_or(socket).with_file_name(name))
}

/// The service has ended before it was done, or takes no more: it may be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the service that attaches does not answer: it ended, or has too much to do")]
pub(crate) struct NoAnswer;

/// A process that attaches another one.
pub(crate) enum Work {
    Child(Child),
    /// A connection to the service, which answers when it is done.
    Service(OwnedFd),
}

impl Work {
    /// Has `wish` fulfilled, for the daemon at `socket`. `agent` is for a child alone.
    ///
    /// # Errors
    /// No process can be started, or the service is of another user.
    pub(crate) fn begin(socket: &Path, agent: Option<&Path>, wish: &Wish) -> Result<Self> {
        let service = beside(socket).map(sys::socket::connect_at_once);
        match service {
            Some(Ok(connection)) => ask(connection, wish).map(Self::Service),
            // No service, or one that has ended.
            None | Some(Err(Errno::NOENT | Errno::CONNREFUSED)) => {
                child(socket, agent, wish).map(Self::Child)
            }
            Some(Err(error)) => Err(error).context("cannot ask the service that attaches"),
        }
    }

    /// Whether it is over. Waits for nothing.
    ///
    /// # Errors
    /// What the kernel says.
    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        match self {
            Self::Child(child) => {
                let ended = child.try_wait();
                Ok(ended.context("cannot wait for `pageone attach`")?.is_some())
            }
            Self::Service(connection) => Ok(is_readable(connection, Duration::ZERO)?),
        }
    }

    /// Ends it: a child; a service ends itself.
    pub(crate) fn end(&mut self) {
        if let Self::Child(child) = self {
            // One that has ended by itself needs nothing.
            let _ = child.kill();
        }
    }

    /// What it says of the process that is attached now.
    ///
    /// # Errors
    /// Why it is not.
    pub(crate) fn outcome(self) -> Result<String> {
        match self {
            Self::Child(child) => said(child).map(|(told, _)| told),
            Self::Service(connection) => {
                let mut packet = [0; SAID_BYTES];
                let got = match sys::socket::recv(&connection, &mut packet) {
                    Err(Errno::CONNRESET) => 0,
                    received => received?.len,
                };
                let answer = packet.get(..got).filter(|answer| !answer.is_empty());
                let answer = answer.ok_or(NoAnswer)?;
                let answer: Result<String, String> = serde_json::from_slice(answer)?;
                answer.map_err(anyhow::Error::msg)
            }
        }
    }
}

pub(super) fn is_readable(socket: &impl AsFd, patience: Duration) -> std::io::Result<bool> {
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    let patience = Timespec::try_from(patience).map_err(std::io::Error::other)?;
    Ok(poll(&mut fds, Some(&patience))? > 0)
}

/// That the other side is of this process's user.
fn check(socket: &impl AsFd) -> Result<()> {
    let (own, peer) = (
        rustix::process::geteuid().as_raw(),
        sys::socket::peer(socket)?.uid,
    );
    match peer == own {
        true => Ok(()),
        false => bail!("user {peer} is at the other end, and user {own} is expected there"),
    }
}

fn ask(connection: OwnedFd, wish: &Wish) -> Result<OwnedFd> {
    check(&connection).context("the service that attaches is not asked")?;
    let packet = serde_json::to_vec(wish)?;
    match sys::socket::send_within(&connection, &packet, &[], Duration::ZERO) {
        Err(Errno::PIPE | Errno::CONNRESET) => return Err(NoAnswer.into()),
        sent => sent?,
    }
    Ok(connection)
}

fn child(socket: &Path, agent: Option<&Path>, wish: &Wish) -> Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    command.arg("attach").arg("--socket").arg(socket);
    command.args(["--alone", "--began", &wish.began.to_string()]);
    if let Some(domain) = &wish.domain {
        command.args(["--domain", domain]);
    }
    if wish.any {
        command.arg("--any");
    }
    if wish.mount {
        command.arg("--mount");
    }
    if wish.any_huge {
        command.arg("--any-huge");
    }
    if let Some(need) = wish.need {
        command.arg("--need").arg(crate::human::as_flag(need));
    }
    if let Some(agent) = agent {
        command.env("PAGEONE_AGENT", agent);
    }
    command.arg(wish.pid.to_string()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // A fault that is tried in the daemon is the daemon's. A domain in its own environment is no rule's: each process's wish counts.
    command.env_remove("PAGEONE_FAULT");
    command.env_remove("PAGEONE_DOMAIN");
    command.spawn().context("cannot start `pageone attach`")
}

/// What a child has said that has ended, and of what it has warned.
///
/// # Errors
/// Why it did not succeed.
pub(super) fn said(mut child: Child) -> Result<(String, String)> {
    // It is short: it fits into the pipes.
    let (mut told, mut said) = (String::new(), String::new());
    let out = child.stdout.take().context("its output")?;
    out.take(SAID_BYTES as u64).read_to_string(&mut told)?;
    let errors = child.stderr.take().context("its errors")?;
    errors.take(SAID_BYTES as u64).read_to_string(&mut said)?;
    let status = child.wait()?;
    if status.success() {
        return Ok((told, said));
    }
    let first = said.lines().find(|line| !line.is_empty());
    let why = first.map(|first| first.split_once("tached: ").map_or(first, |(_, why)| why));
    // Its first line is the reason, unless a signal ended it, as a panic does.
    match why.filter(|_| status.code().is_some()) {
        Some(why) => bail!("{why}"),
        None => bail!(
            "it has ended ({status}): {}",
            why.unwrap_or("it does not say why")
        ),
    }
}

/// The service's side: takes a wish from the connection at standard input, has it fulfilled, and answers.
///
/// # Errors
/// No wish comes, or one of another user.
pub(super) fn serve(attach: impl FnOnce(&Wish) -> Result<String>) -> Result<()> {
    let connection = std::io::stdin();
    check(&connection).context("standard input is to be the daemon's connection")?;
    anyhow::ensure!(is_readable(&connection, PATIENCE)?, "no wish comes");
    let mut packet = [0; SAID_BYTES];
    let got = sys::socket::recv(&connection, &mut packet)?.len;
    let wish: Wish = serde_json::from_slice(packet.get(..got).unwrap_or_default())?;
    let mut answer = attach(&wish).map_err(|error| format!("{error:#}"));
    let text = match &mut answer {
        Ok(text) | Err(text) => text,
    };
    // Each byte takes six in JSON at most.
    let most = (0..=SAID_BYTES / 8)
        .rev()
        .find(|&at| text.is_char_boundary(at));
    text.truncate(most.unwrap_or(0));
    sys::socket::send(&connection, &serde_json::to_vec(&answer)?, &[])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_listens_beside_the_daemon() {
        let place = |socket: &str| beside(Path::new(socket)).unwrap();
        assert_eq!(
            place("/run/pageone.sock"),
            Path::new("/run/pageone-attach.sock")
        );
        assert_eq!(place("/a/b"), Path::new("/a/b-attach.sock"));
        assert_eq!(
            place("/run/pageone/pageone.sock"),
            Path::new("/run/pageone-pageone-attach.sock")
        );
    }

    #[test]
    fn a_wish_names_no_file() {
        let wish = r#"{"pid":1,"began":2,"domain":null,"any":false"#;
        let read = |more: &str| serde_json::from_str::<Wish>(&format!("{wish}{more}}}"));
        let wish = read("").unwrap();
        assert_eq!(
            (wish.pid, wish.any_huge, wish.mount, wish.need),
            (1, false, false, None)
        );
        assert!(read(r#","any_huge":true"#).unwrap().any_huge);
        assert!(read(r#","mount":true"#).unwrap().mount);
        assert_eq!(read(r#","need":4096"#).unwrap().need, Some(4096));
        assert!(read(r#","agent":"/tmp/evil.so""#).is_err());
    }

    #[test]
    fn a_service_that_ends_without_an_answer_is_an_error() {
        let (ours, theirs) = sys::socket::pair().unwrap();
        let mut work = Work::Service(ours);
        assert!(!work.has_ended().unwrap());
        drop(theirs);
        assert!(work.has_ended().unwrap());
        assert!(work.outcome().unwrap_err().is::<NoAnswer>());
    }
}
