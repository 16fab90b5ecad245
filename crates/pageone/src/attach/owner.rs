//! How the agent in a process knows its server: it gives its program's memory to root's daemon, or to its own user's.
//!
//! The kernel tells it the user at the other end (`SO_PEERCRED`), by the numbers of its own user namespace. There root outside has none:
//! it looks like every other user without a number. So `pageone` looks at the path of the socket from outside:
//!
//! | the daemon's user, in the process's namespace | the agent |
//! |---|---|
//! | is root, or the process's own user | knows by itself |
//! | is another one | would not trust it: refused |
//! | has no number, and is root outside | trusts a server at the path that has no number |
//!
//! **What must hold** in the last case: now and later, the server at that path is run by root outside or by root of the namespace.
//! The agent trusts the second anyway, and he can trace the process; he also makes the mounts that it sees. So each folder on the way
//! belongs to one of these and no other user may write to it; links are not followed. In a folder with the sticky bit others may make
//! new names, but not move the next folder: that will do everywhere but in the socket's own.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::target::{Target, no_right};

/// The user that stands for all those who have no number in a user namespace.
const OVERFLOW: u32 = 65534;

/// How an agent knows who serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    /// By the kernel's word.
    Known,
    /// By the path alone.
    Unmapped,
}

impl Server {
    /// How the agent in this process knows a daemon of user `user` at `socket`.
    ///
    /// # Errors
    /// It could not.
    pub(super) fn of(target: &Target, user: u32, socket: &Path) -> Result<Self> {
        let map = sys::text::read(format!("/proc/{}/uid_map", target.pid)).map_err(no_right)?;
        let (server, own) = (inside(&map, user), inside(&map, target.user));
        match server {
            Some(0) => Ok(Self::Known),
            Some(OVERFLOW) => {
                bail!("its agent cannot tell the daemon's user from those without a number there")
            }
            Some(_) if server == own => Ok(Self::Known),
            None if user == 0 => {
                let root = PathBuf::from(format!("/proc/{}/root", target.pid));
                let socket = std::path::absolute(socket)?;
                let masters = [Some(0), outside(&map, 0)];
                way_is_kept(&root, &socket, &masters)?;
                Ok(Self::Unmapped)
            }
            _ => bail!(
                "its agent trusts root's daemon or its own user's: this one is of user {user}"
            ),
        }
    }

    /// Whether the daemon's user has no number in the process's user namespace.
    pub(super) fn is_unmapped(self) -> bool {
        self == Self::Unmapped
    }
}

/// The ranges of a map: the first number inside, the first outside, how many.
fn ranges(map: &str) -> impl Iterator<Item = [u32; 3]> + '_ {
    map.lines().filter_map(|line| {
        let mut numbers = line.split_ascii_whitespace().map(|word| word.parse().ok());
        Some([numbers.next()??, numbers.next()??, numbers.next()??])
    })
}

/// A user's number inside a namespace.
fn inside(map: &str, user: u32) -> Option<u32> {
    let mut ranges = ranges(map);
    ranges.find_map(|[inside, outside, count]| across(user, [outside, inside], count))
}

/// The number outside of a user of a namespace.
fn outside(map: &str, user: u32) -> Option<u32> {
    let mut ranges = ranges(map);
    ranges.find_map(|[inside, outside, count]| across(user, [inside, outside], count))
}

/// A user's number on the other side of a range of `count` users, whose first has these numbers here and there.
fn across(user: u32, [here, there]: [u32; 2], count: u32) -> Option<u32> {
    let distance = user.checked_sub(here);
    there.checked_add(distance.filter(|&distance| distance < count)?)
}

/// Refuses a way to the socket on which others than its masters could put something else in a folder's place, or in the socket's.
fn way_is_kept(root: &Path, socket: &Path, masters: &[Option<u32>]) -> Result<()> {
    const OTHERS_WRITE: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    let folder = socket.parent().context("the socket has no folder")?;
    let mut way = root.to_owned();
    let mut parts = folder.components().peekable();
    while let Some(part) = parts.next() {
        match part {
            Component::RootDir => {}
            Component::Normal(name) => way.push(name),
            _ => bail!("the path of the daemon's socket is not a plain one"),
        }
        // What /proc leads to is looked at, not the link to it.
        let about = match part {
            Component::RootDir => fs::metadata(&way),
            _ => fs::symlink_metadata(&way),
        };
        let about = about.map_err(no_right)?;
        let is_last = parts.peek().is_none();
        let written = match about.mode() & (OTHERS_WRITE | STICKY) {
            mode if mode & OTHERS_WRITE == 0 => false,
            mode => is_last || mode & STICKY == 0,
        };
        let is_kept = about.is_dir() && !written && masters.contains(&Some(about.uid()));
        if !is_kept {
            let shown = way.strip_prefix(root).unwrap_or(&way);
            bail!(
                "it lives in another user namespace, where its agent could not tell who serves it: /{} on the way to the daemon's \
                 socket must be a folder that root alone can write to",
                shown.display()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn numbers_are_those_of_the_map() {
        let map = "         0     100000      65536\n     70000       1000          1\n";
        assert_eq!(inside(map, 100_000), Some(0));
        assert_eq!(inside(map, 165_535), Some(65_535));
        assert_eq!(inside(map, 165_536), None);
        assert_eq!(inside(map, 1000), Some(70_000));
        assert_eq!(inside(map, 0), None);
        assert_eq!(outside(map, 0), Some(100_000));
        assert_eq!(outside(map, 65_536), None);
        // All numbers, as on a host.
        let all = "         0          0 4294967295\n";
        assert_eq!(inside(all, 61_004), Some(61_004));
        assert_eq!(inside("", 0), None);
    }

    #[test]
    fn a_way_that_others_could_change_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let own = fs::metadata(place.path()).unwrap().uid();
        let inner = place.path().join("run/pageone");
        fs::create_dir_all(&inner).unwrap();
        let set = |path: &Path, mode: u32| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        let outer = place.path().join("run");
        let kept = |socket: &str, user: u32| {
            way_is_kept(place.path(), Path::new(socket), &[Some(user), None]).is_ok()
        };
        let socket = "/run/pageone/pageone.sock";
        for (folders, is_kept) in [
            ([0o755, 0o755], true),
            ([0o755, 0o775], false),
            ([0o755, 0o1777], false),
            ([0o1777, 0o755], true),
            ([0o777, 0o755], false),
            ([0o755, 0o700], true),
        ] {
            set(&outer, folders[0]);
            set(&inner, folders[1]);
            assert_eq!(kept(socket, own), is_kept, "{folders:?}");
        }
        set(&outer, 0o755);
        set(&inner, 0o755);
        assert!(kept("/sock", own));
        assert!(!kept(socket, own + 1), "another user's");
        assert!(!kept("/run/none/sock", own));
        symlink(&inner, outer.join("link")).unwrap();
        assert!(!kept("/run/link/sock", own));
        assert!(!kept("/run/../run/pageone/sock", own));
    }
}
