//! The types of file systems, by the number of the mount that a descriptor was opened in.
//!
//! A process may have descriptors from its own mount namespace, and from those of this process and of the first one, from
//! which both got some. The tables of the latter two stay open for good: poll(2) tells when there are other mounts than
//! were read. The process's own table is read only for a mount that is in none of them. So for most guests no file
//! of theirs is opened, on which a stranger may have locks ([`text`]).
//!
//! A number that is in no table counts as unknown, whatever the reason: a table that cannot be read, that is too long,
//! a mount that was detached.
//!
//! Source: proc(5) (`/proc/PID/mountinfo`), `mounts_poll()` in fs/namespace.c.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::priority;
use crate::text;

/// The most of a table that is read: a namespace may have 100 000 mounts.
const MOST_BYTES: u64 = 1 << 20;

/// Types by number.
type Table = HashMap<u64, String>;

/// The mounts from which a process may have descriptors.
pub(crate) struct Mounts {
    pid: u32,
    hosts: [Arc<Table>; 2],
    /// `None` before it is needed.
    own: Option<Table>,
}

impl Mounts {
    pub(crate) fn of(pid: u32) -> Self {
        Self {
            pid,
            hosts: hosts(),
            own: None,
        }
    }

    /// The type of a mount.
    pub(crate) fn kind(&mut self, mount: u64) -> Option<&str> {
        let Self { pid, hosts, own } = self;
        let known = hosts.iter().find_map(|table| table.get(&mount));
        let kind = match known {
            None => own
                .get_or_insert_with(|| read_own(*pid).unwrap_or_default())
                .get(&mount),
            known => known,
        };
        kind.map(String::as_str)
    }
}

/// A table that stays open.
struct Watched {
    path: &'static str,
    /// `None` before it was opened.
    file: Option<File>,
    table: Arc<Table>,
}

/// Those of this process and of the first one.
pub(crate) fn hosts() -> [Arc<Table>; 2] {
    static HOSTS: Mutex<Option<[Watched; 2]>> = Mutex::new(None);
    let mut hosts = priority::lock(&HOSTS);
    let hosts = hosts
        .get_or_insert_with(|| ["/proc/self/mountinfo", "/proc/1/mountinfo"].map(Watched::new));
    hosts.each_mut().map(|host| {
        // Of an old table the next look could believe that it is the present one.
        if host.renew().is_err() {
            *host = Watched::new(host.path);
        }
        host.table.clone()
    })
}

impl Watched {
    fn new(path: &'static str) -> Self {
        let (file, table) = Default::default();
        Self { path, file, table }
    }

    /// Reads it again if there are other mounts by now.
    fn renew(&mut self) -> io::Result<()> {
        let is_new = self.file.is_none();
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(File::open(self.path)?),
        };
        // Asked first: what changes while it is read is told the next time.
        let mut changes = [PollFd::new(&*file, PollFlags::PRI)];
        let changed = rustix::event::poll(&mut changes, Some(&Timespec::default()))? > 0;
        if is_new || changed {
            file.rewind()?;
            let mut bytes = Vec::new();
            file.take(MOST_BYTES).read_to_end(&mut bytes)?;
            self.table = Arc::new(table(&bytes));
        }
        Ok(())
    }
}

/// The table of a process's namespace, as far as it can be reached from its root.
fn read_own(pid: u32) -> io::Result<Table> {
    let folder = format!("/proc/{pid}");
    let link = |name| fs::read_link(Path::new(&folder).join(name));
    let mut name = OsString::from(link("ns/mnt")?);
    name.push(link("root")?);
    let path = format!("{folder}/mountinfo");
    let bytes = text::begin_of(Path::new(&name), Path::new(&path), MOST_BYTES)?;
    Ok(table(&bytes))
}

fn table(bytes: &[u8]) -> Table {
    let text = String::from_utf8_lossy(bytes);
    // The last line may be cut.
    let lines = text
        .split_inclusive('\n')
        .filter(|line| line.ends_with('\n'));
    lines.filter_map(mount).collect()
}

/// The number and the type of a line of mountinfo: `22 27 0:21 / /proc rw - proc proc rw`.
fn mount(line: &str) -> Option<(u64, String)> {
    let number = line.split(' ').next()?.parse().ok()?;
    let (_, system) = line.split_once(" - ")?;
    Some((number, system.split(' ').next()?.to_owned()))
}

/// The mounts of a table that show all of a file system of this kind: their numbers, and their places. Another mount may lie above one.
pub(crate) fn roots_of<'a>(
    kind: &'a str,
    table: &'a str,
) -> impl Iterator<Item = (u64, PathBuf)> + 'a {
    table.lines().filter_map(move |line| {
        let (number, its) = mount(line)?;
        let mut fields = line.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        (its == kind && root == "/").then(|| (number, plain(place)))
    })
}

/// A path of a table as it is: there a blank is `\040`.
fn plain(path: &str) -> PathBuf {
    let mut parts = path.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part
            .get(..3)
            .and_then(|code| u8::from_str_radix(code, 8).ok());
        bytes.extend(code);
        bytes.extend_from_slice(part.as_bytes().get(3..).unwrap_or_default());
    }
    OsString::from_vec(bytes).into()
}

/// The number of the mount that is seen at a place.
///
/// # Errors
/// What statx(2) gives.
pub(crate) fn number_of(place: &Path) -> io::Result<u64> {
    let told = rustix::fs::statx(CWD, place, AtFlags::empty(), StatxFlags::MNT_ID)?;
    Ok(told.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn mounts_are_told_by_their_numbers() {
        let line = "40 27 0:35 / /mnt/a\\040b rw,relatime shared:1 - fuse.x y rw";
        assert_eq!(mount(line), Some((40, "fuse.x".to_owned())));
        assert_eq!(mount("40 27 0:35 / /mnt"), None);
        let whole = b"22 27 0:21 / /proc rw - proc proc rw\n40 27 0:35 / /m rw - ext4 x";
        assert_eq!(table(whole), Table::from([(22, "proc".to_owned())]));
    }

    #[test]
    fn a_file_system_is_found_where_all_of_it_is_mounted() {
        let table = "33 25 0:28 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n\
            34 25 0:28 /part /m rw - cgroup2 none rw\n\
            35 25 0:29 / /sys rw - sysfs none rw\n\
            36 25 0:28 / /a\\040b\\134 rw - cgroup2 none rw\n";
        let found: Vec<_> = roots_of("cgroup2", table).collect();
        let expected = [(33, "/sys/fs/cgroup/unified"), (36, "/a b\\")];
        assert_eq!(
            found,
            expected.map(|(number, place)| (number, place.into()))
        );
    }

    #[test]
    fn the_mount_that_is_seen_at_a_place_is_the_one_above() {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let at_proc = roots_of("proc", &table).filter(|(_, place)| place == Path::new("/proc"));
        let (number, _) = at_proc.last().expect("/proc is mounted");
        assert_eq!(Ok(number), number_of(Path::new("/proc")).map_err(drop));
    }

    /// Mounts a file system in a namespace of its own when it is told, and says its number.
    const MOUNTS: &str = "echo begun; read line; mount -t tmpfs none /proc/sys && \
        grep ' /proc/sys ' /proc/self/mountinfo | head -1; read line";

    #[test]
    fn a_process_has_mounts_of_its_own_which_change() {
        let mut child = Command::new("unshare");
        child.args(["-m", "sh", "-c", MOUNTS]);
        let child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        if lines.next().is_none() {
            child.wait().unwrap();
            return eprintln!("skipped: no right to a mount namespace");
        }
        // What a search before has read is not what the next one sees.
        assert_eq!(Mounts::of(child.id()).kind(u64::MAX), None);
        let mut tell = child.stdin.take().unwrap();
        io::Write::write_all(&mut tell, b"mount\n").unwrap();
        let said = lines.next().expect("it has mounted").unwrap();
        let (number, kind) = mount(&said).unwrap();
        assert_eq!(Mounts::of(child.id()).kind(number), Some(&*kind));
        drop(tell);
        child.wait().unwrap();
        assert_eq!(
            Mounts::of(std::process::id()).kind(number),
            None,
            "it is not ours"
        );
    }

    #[test]
    fn a_mount_of_this_namespace_is_seen_when_it_comes() {
        const APART: &str = "MOUNTS_APART";
        if std::env::var_os(APART).is_some() {
            let mut file = Watched::new("/proc/self/mountinfo");
            file.renew().unwrap();
            let before = file.table.clone();
            file.renew().unwrap();
            assert!(Arc::ptr_eq(&before, &file.table), "it was read in vain");
            let done = Command::new("mount")
                .args(["-t", "tmpfs", "none", "/proc/sys"])
                .status();
            assert!(done.unwrap().success());
            file.renew().unwrap();
            assert_eq!(file.table.len(), before.len() + 1);
            return println!("all seen");
        }
        let name = "mounts::tests::a_mount_of_this_namespace_is_seen_when_it_comes";
        let mut apart = Command::new("unshare");
        let apart = apart.arg("-m").arg(std::env::current_exe().unwrap());
        let apart = apart
            .args(["--exact", name, "--nocapture"])
            .env(APART, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&apart.stdout);
        if said.is_empty() {
            return eprintln!("skipped: no right to a mount namespace");
        }
        assert!(
            said.contains("all seen"),
            "{said}{}",
            String::from_utf8_lossy(&apart.stderr)
        );
    }
}
