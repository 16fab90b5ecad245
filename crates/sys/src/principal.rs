//! The principal of a process answers for it: its own user, or the user outside that has made the user namespace that it is in.
//!
//! A user with subordinate ids (`/etc/subuid`) has processes of 65536 users, and they are all in namespaces of his. So where each user has
//! a share, these have one together. Namespaces that root has made are containers: there each user answers for himself.
//!
//! ```text
//!   the first namespace ◀── made by 1000 ── a namespace ◀── made by 100005 ── another ── a process of 100007: user 1000 answers
//! ```
//!
//! **Files of namespaces.** All may have locks on them, on that of the first one, too. So none is opened where that is not needed,
//! and each is closed by a closer ([`closers`](crate::closers)).
//!
//! Source: ioctl_nsfs(2), user_namespaces(7).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use rustix::io::Errno;

use crate::closers::Late;
use crate::fault::{self, Point};
use crate::namespace::{Namespace, parent_of};

const GET_OWNER: usize = 0xb704;
/// The kernel makes no deeper ones.
const DEEPEST: usize = 33;
/// Who is meant where a user has no number in this process's namespace.
const OVERFLOW: u32 = 65534;
const ROOT: u32 = 0;

/// The user who answers for process `pid` of user `uid`, by its number in this process's namespace: `uid` itself, where the process is
/// gone or may not be looked at.
///
/// # Errors
/// There is no descriptor left, or no memory.
pub fn of(pid: u32, uid: u32) -> io::Result<u32> {
    const TOLD_ELSEWHERE: [Errno; 4] = [Errno::NOENT, Errno::SRCH, Errno::ACCESS, Errno::PERM];
    match look(pid, uid) {
        Err(error)
            if Errno::from_io_error(&error)
                .is_some_and(|errno| TOLD_ELSEWHERE.contains(&errno)) =>
        {
            Ok(uid)
        }
        found => found,
    }
}

fn look(pid: u32, uid: u32) -> io::Result<u32> {
    fault::check(Point::Proc)?;
    let name = format!("/proc/{pid}/ns/user");
    let own = Namespace::of("self", "user")?;
    if Namespace::of(&pid.to_string(), "user")? == own {
        return Ok(uid);
    }
    let (mut space, mut answers) = (Late::new(uid, crate::text::open(name)?), uid);
    for _ in 0..DEEPEST {
        if Namespace::of_file(&*space)? == own {
            break;
        }
        // The one who has made the outermost, as far as it is not root.
        match owner_of(&space)? {
            ROOT | OVERFLOW => {}
            owner => answers = owner,
        }
        // The user that has made it may have locks on it, and on those above: they are his to close.
        space.belongs_to(answers);
        match parent_of(&*space) {
            Ok(parent) => space = Late::new(answers, parent.into()),
            // This process cannot see further.
            Err(Errno::PERM) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(answers)
}

fn owner_of(space: &File) -> rustix::io::Result<u32> {
    let mut owner = 0u32;
    let to = (&raw mut owner).expose_provenance();
    let args = [
        space.as_raw_fd().unsigned_abs() as usize,
        GET_OWNER,
        to,
        0,
        0,
        0,
    ];
    // SAFETY: the kernel fills the number.
    unsafe { crate::raw::call(libc::SYS_ioctl, args) }?;
    Ok(owner)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A user that no process has.
    const OTHER: u32 = 4_000_000;

    fn spawn(words: &[&str]) -> (Child, bool) {
        let script = "echo; exec sleep 60";
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args(["sh", "-c", script]);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut line).unwrap();
        (child, !line.is_empty())
    }

    fn principal(words: &[&str]) -> Option<u32> {
        let (mut child, runs) = spawn(words);
        let found = of(child.id(), OTHER);
        child.kill().unwrap();
        child.wait().unwrap();
        runs.then(|| found.unwrap())
    }

    #[test]
    fn the_maker_of_the_namespace_answers() {
        assert_eq!(of(std::process::id(), OTHER).unwrap(), OTHER);
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: users change by root's hand");
        }
        let user = [
            "setpriv",
            "--reuid=65533",
            "--regid=65533",
            "--clear-groups",
        ];
        let space = ["unshare", "--user", "--map-root-user"];
        let as_user = |spaces: usize| [&user[..], &space.repeat(spaces)].concat();
        if principal(&as_user(0)) != Some(OTHER) {
            return eprintln!("skipped: a namespace without user 65533");
        }
        match principal(&as_user(1)) {
            None => eprintln!("skipped: users have no namespaces here"),
            found => {
                assert_eq!(found, Some(65533));
                assert_eq!(principal(&as_user(3)), Some(65533));
                // A container of root's, and what its root makes inside.
                assert_eq!(principal(&space), Some(OTHER));
                assert_eq!(principal(&space.repeat(2)), Some(OTHER));
            }
        }
    }
}
