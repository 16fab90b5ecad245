//! Processes that have a user's number and not his rights: those of his in a container.
//!
//! Without a user namespace root of a container is root for the kernel's sockets. Yet it may do little of what root may, and reach none of
//! the host's files. So its number alone is no word for it.
//!
//! Source: namespaces(7), capabilities(7), unix(7) (`SO_PEERCRED`).

use std::io;
use std::os::unix::fs::MetadataExt;

use crate::text;

/// Bit 21 of capabilities.
const SYS_ADMIN: u64 = 1 << 21;

/// Whether a process has neither this process's mounts, nor the first one's, nor `CAP_SYS_ADMIN` in this user namespace.
///
/// # Errors
/// What reading /proc gives: it is gone.
pub fn is_confined(pid: u32) -> io::Result<bool> {
    let namespace = |pid: &str, kind: &str| {
        let found = std::fs::metadata(format!("/proc/{pid}/ns/{kind}"))?;
        Ok::<_, io::Error>((found.dev(), found.ino()))
    };
    let its = pid.to_string();
    if namespace(&its, "user")? != namespace("self", "user")? {
        return Ok(true);
    }
    let mounts = namespace(&its, "mnt")?;
    for host in ["self", "1"] {
        // In a container the first process may be hidden.
        if namespace(host, "mnt").is_ok_and(|host| host == mounts) {
            return Ok(false);
        }
    }
    let status = text::read(format!("/proc/{pid}/status"))?;
    let held = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let held = held.and_then(|held| u64::from_str_radix(held.trim(), 16).ok());
    let held = held.ok_or(io::ErrorKind::InvalidData)?;
    Ok(held & SYS_ADMIN == 0)
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
