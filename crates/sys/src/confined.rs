//! Processes that have a user's number and not his rights: those of his in a container.
//!
//! Without a user namespace root of a container is root for the kernel's sockets. Yet it has few of root's rights, and reaches
//! none of the host's files. So its number alone is no word for it.
//!
//! Source: namespaces(7), capabilities(7), unix(7) (`SO_PEERCRED`).

use std::io;

use crate::namespace::Namespace;
use crate::text;

/// Whether a process has neither this process's mounts, nor the first one's, nor `CAP_SYS_ADMIN` in this user namespace.
///
/// # Errors
/// What reading /proc gives: it is gone.
pub fn is_confined(pid: u32) -> io::Result<bool> {
    let its = pid.to_string();
    if Namespace::of(&its, "user")? != Namespace::of("self", "user")? {
        return Ok(true);
    }
    if Namespace::of(&its, "mnt")?.has_hosts_mounts()? {
        return Ok(false);
    }
    let status = text::read(format!("/proc/{pid}/status"))?;
    Ok(!has_sys_admin(&status).ok_or(io::ErrorKind::InvalidData)?)
}

/// Whether a process has `CAP_SYS_ADMIN` in its user namespace, by the text of its status; none where that does not tell.
#[must_use]
pub fn has_sys_admin(status: &str) -> Option<bool> {
    const SYS_ADMIN: u64 = 1 << 21;
    let mut lines = status.lines();
    let held = lines.find_map(|line| line.strip_prefix("CapEff:"))?;
    let held = u64::from_str_radix(held.trim(), 16).ok()?;
    Some(held & SYS_ADMIN != 0)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    /// Whether a child is confined that these words of unshare(1) and setpriv(1) make; none where it cannot be made.
    fn is_child_confined(words: &[&str]) -> Option<bool> {
        let [first, rest @ ..] = words else {
            return None;
        };
        let mut child = Command::new(first);
        child.args(rest).args(["sh", "-c", "echo; read line"]);
        let mut child = child
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let said = BufReader::new(child.stdout.take()?).lines().next();
        let confined = said.map(|_| is_confined(child.id()).unwrap());
        drop(child.stdin.take());
        child.wait().unwrap();
        confined
    }

    #[test]
    fn root_without_rights_in_mounts_of_its_own_is_confined() {
        assert!(!is_confined(std::process::id()).unwrap());
        let least = ["setpriv", "--bounding-set", "-sys_admin"];
        let mounts = ["unshare", "-m"];
        for (words, expected) in [
            (mounts.to_vec(), false),
            ([mounts.as_slice(), &least].concat(), true),
            (least.to_vec(), false),
            (["unshare", "-Ur"].to_vec(), true),
        ] {
            match is_child_confined(&words) {
                Some(confined) => assert_eq!(confined, expected, "{words:?}"),
                None => eprintln!("skipped: no right to {words:?}"),
            }
        }
    }
}
