//! The daemon's use of the machine, and how long things last.

use std::fs;
use std::time::{Duration, Instant};

/// A daemon's memory, threads and descriptors at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Footprint {
    pub(crate) memory_kib: u64,
    pub(crate) threads: u64,
    pub(crate) descriptors: u64,
}

/// What it may take beyond what it took at ease while it is attacked.
const ATTACKED: Footprint = Footprint {
    memory_kib: 512 * 1024,
    threads: 64,
    descriptors: 8192,
};
/// The same when the attack is over: what allocator and thread pools keep.
const OVER: Footprint = Footprint {
    memory_kib: 96 * 1024,
    threads: 4,
    descriptors: 16,
};

impl Footprint {
    pub(crate) fn of(pid: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|rest| rest.split_whitespace().next());
            number.unwrap().parse().unwrap()
        };
        Self {
            memory_kib: field("RssAnon:"),
            threads: field("Threads:"),
            descriptors: fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as u64,
        }
    }

    fn within(&self, base: &Self, room: &Self) -> bool {
        self.memory_kib <= base.memory_kib + room.memory_kib
            && self.threads <= base.threads + room.threads
            && self.descriptors <= base.descriptors + room.descriptors
    }

    /// Whether this is bounded, for a daemon that is attacked.
    pub(crate) fn is_bounded(&self, base: &Self) -> bool {
        self.within(base, &ATTACKED)
    }

    /// Whether this is as before, once the attack is over.
    pub(crate) fn is_back(&self, base: &Self) -> bool {
        self.within(base, &OVER)
    }
}

/// What the kernel has done for the threads of a process that are not called `name`.
pub(crate) fn system_time_beside(pid: u32, name: &str) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let ticks = threads.filter_map(|thread| {
        // A thread that has ended meanwhile counts no more.
        let stat = fs::read_to_string(thread.path().join("stat")).ok()?;
        let (begin, rest) = stat.rsplit_once(") ")?;
        let is_it = begin.split_once('(')?.1 == name;
        let ticks: u64 = rest.split(' ').nth(12)?.parse().ok()?;
        (!is_it).then_some(ticks)
    });
    let per_second = rustix::param::clock_ticks_per_second();
    Duration::from_millis(ticks.sum::<u64>() * 1000 / per_second)
}

/// How long something takes.
pub(crate) fn time<T>(what: impl FnOnce() -> T) -> (Duration, T) {
    let begin = Instant::now();
    let result = what();
    (begin.elapsed(), result)
}
