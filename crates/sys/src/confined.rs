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
    let own = Namespace::of("self", "user")?;
    let is_elsewhere = || Ok::<_, io::Error>(Namespace::of(&its, "user")? != own);
    if is_elsewhere()? {
        return Ok(true);
    }
    if Namespace::of(&its, "mnt")?.has_hosts_mounts()? {
        return Ok(false);
    }
    let status = text::read(format!("/proc/{pid}/status"))?;
    let may = has_sys_admin(&status).ok_or(io::ErrorKind::InvalidData)?;
    // In a namespace that it has made meanwhile it has all rights, and from there no process comes back.
    Ok(!may || is_elsewhere()?)
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
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

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

    /// It makes one while it is looked at, and has all rights there.
    #[test]
    fn who_goes_into_a_user_namespace_is_confined_all_the_time() {
        let goes = "echo; read line; exec unshare -U sh -c 'read line'";
        for _ in 0..20 {
            let mut child = Command::new("unshare");
            child.args(["-m", "setpriv", "--bounding-set", "-sys_admin", "sh", "-c"]);
            let (read, write) = (Stdio::piped(), Stdio::piped());
            let child = child.arg(goes).stdin(read).stdout(write).spawn();
            let Ok(mut child) = child else {
                return eprintln!("skipped: no unshare(1)");
            };
            let said = BufReader::new(child.stdout.take().unwrap()).lines().next();
            if said.is_none() {
                child.wait().unwrap();
                return eprintln!("skipped: no right to mounts of its own");
            }
            let mut tell = child.stdin.take().unwrap();
            tell.write_all(b"\n").unwrap();
            let end = Instant::now() + Duration::from_millis(50);
            let looks = std::iter::from_fn(|| {
                (Instant::now() < end).then(|| is_confined(child.id()).unwrap())
            });
            let always = { looks }.all(|confined| confined);
            drop(tell);
            child.wait().unwrap();
            assert!(always);
        }
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
