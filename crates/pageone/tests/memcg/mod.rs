//! A memory control group of a test's own, below the test's (version 1) or below the root (version 2).

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A group; removed on drop, when it is empty.
pub(crate) struct Memcg {
    folder: PathBuf,
    v2: bool,
}

impl Memcg {
    /// A group that may hold `limit` bytes; none, with a word, where this machine has no such thing.
    pub(crate) fn new(limit: u64) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pageone-test-{}-{number}", std::process::id());
        let Some((parent, v2)) = parent() else {
            eprintln!("skipped: no memory control groups");
            return None;
        };
        let folder = parent.join(name);
        if let Err(why) = fs::create_dir(&folder) {
            eprintln!("skipped: no control group of our own: {why}");
            return None;
        }
        let group = Self { folder, v2 };
        group.limit(limit);
        if group.v2 {
            // Without it the kernel would swap instead.
            let _ = group.write("memory.swap.max", "0");
        }
        Some(group)
    }

    fn write(&self, file: &str, text: &str) -> std::io::Result<()> {
        fs::write(self.folder.join(file), text)
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.folder.join(file)).unwrap()
    }

    fn number(&self, file: &str, name: &str) -> u64 {
        let text = self.read(file);
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim().parse().unwrap()
    }

    /// Sets what the group may hold.
    pub(crate) fn limit(&self, bytes: u64) {
        let file = if self.v2 {
            "memory.max"
        } else {
            "memory.limit_in_bytes"
        };
        self.write(file, &bytes.to_string()).unwrap();
    }

    /// What a shell does to enter the group.
    pub(crate) fn enter(&self) -> String {
        format!("echo $$ > {}", self.folder.join("cgroup.procs").display())
    }

    /// How many processes were killed because the group was full.
    pub(crate) fn kills(&self) -> u64 {
        let file = if self.v2 {
            "memory.events"
        } else {
            "memory.oom_control"
        };
        self.number(file, "oom_kill ")
    }

    /// Bytes charged to the group.
    pub(crate) fn usage(&self) -> u64 {
        let file = if self.v2 {
            "memory.current"
        } else {
            "memory.usage_in_bytes"
        };
        self.number(file, "")
    }

    /// Lets members' calls fail when the group is full; whether the kernel can.
    pub(crate) fn fail_instead_of_kill(&self) -> bool {
        !self.v2 && self.write("memory.oom_control", "1").is_ok()
    }

    /// How often the group was full, in version 1.
    pub(crate) fn failures(&self) -> u64 {
        self.number("memory.failcnt", "")
    }
}

impl Drop for Memcg {
    fn drop(&mut self) {
        // Members are gone a moment after they were waited for.
        for _ in 0..100 {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// Where a group can be made, and whether it is of version 2.
fn parent() -> Option<(PathBuf, bool)> {
    let root = Path::new("/sys/fs/cgroup");
    let controllers = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
    if controllers.split_whitespace().any(|name| name == "memory") {
        return Some((root.to_owned(), true));
    }
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let memory = own.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        controllers
            .split(',')
            .any(|name| name == "memory")
            .then_some(path)
    })?;
    let parent = root.join("memory").join(memory.trim_start_matches('/'));
    parent.is_dir().then_some((parent, false))
}
