//! Users: the share that all guests of one user id take of the engine together, and its limits.
//!
//! A guest is a process of a user, and a user who may start one may start many. The maker of a process's user namespace answers for
//! it ([`sys::principal`]): a user may have many ids inside. So each limit by process has one by user
//! beside it ([`Limits`]). At a limit a guest keeps what it has, and the rest is left alone with a reason:
//! to drop it would let a neighbour of the same user do harm by growing.
//!
//! **Admission takes time by the thread**, for each is looked at, and a process may have tens of thousands. A user whose process took long
//! gets no guest for four times as long ([`Users::note_admission`]). The time counts for the user, not for the process: else a new process
//! would avoid the pause.

pub(crate) mod lines;
pub(crate) mod refusals;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use sys::closers::{self, Kind};

use crate::error::OverQuota;
use crate::options::Limits;
use crate::sync::lock;
use crate::users::lines::Lines;
use crate::users::refusals::Refusals;

/// All guests for which one user answers.
#[derive(Debug)]
pub(crate) struct User {
    pub(crate) uid: u32,
    /// Bytes of the engine's tables.
    tables: AtomicU64,
    /// Threads that sleep in looks at the memory of his guests.
    stuck: AtomicU32,
    /// What is his of the domains that he began.
    pub(crate) holdings: Arc<Holdings>,
    pub(crate) common: Arc<Users>,
}

/// The users who have guests, and what all users have in common. That lasts longer than a user's guests: who comes and goes begins nothing
/// anew.
#[derive(Debug)]
pub(crate) struct Users {
    each: Mutex<BTreeMap<u32, Weak<User>>>,
    pub(crate) limits: Limits,
    /// Bytes of the engine's tables, and the most that they had since freed memory was given back.
    tables: AtomicU64,
    most_tables: AtomicU64,
    /// Threads that sleep in looks at guests' memory.
    stuck: AtomicU32,
    /// Until when users get no more guests.
    pauses: Mutex<BTreeMap<u32, Instant>>,
    /// Each user's part of the log.
    lines: Mutex<BTreeMap<u32, Lines>>,
    /// Why processes of users are not served.
    pub(crate) refusals: Arc<Refusals>,
}

/// Parts of the domains that are a user's.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    /// Slots with refs, and those whose frames are not given back yet.
    pub(crate) slots: AtomicU64,
    /// Bytes of the segments of slots. One slot that lives keeps a whole segment.
    pub(crate) segments: AtomicU64,
    /// Bytes of patterns.
    pub(crate) patterns: AtomicU64,
}

/// So long it is known what was left out.
const REMEMBERED: Duration = Duration::from_secs(60);

impl OverQuota {
    /// Whether a user may have one more.
    pub(crate) fn check(self) -> Result<(), Self> {
        let free = self.total.saturating_sub(self.all);
        match self.own < self.per_user && self.own < GREED * free {
            true => Ok(()),
            false => Err(self),
        }
    }
}

/// Whether one more may wait to be closed of user `uid`: what does not close is a descriptor of the engine's.
pub(crate) fn check_unclosed(limits: &Limits, uid: u32, kind: Kind) -> Result<(), OverQuota> {
    let (what, per_user, total) = match kind {
        // The server bounds them.
        Kind::Connection => return Ok(()),
        Kind::Session => (
            "unclosed_descriptors",
            limits.unclosed_descriptors_per_user,
            limits.unclosed_descriptors,
        ),
        Kind::Text => (
            "unclosed_texts",
            limits.unclosed_texts_per_user,
            limits.unclosed_texts,
        ),
    };
    if is_master(uid) {
        return Ok(());
    }
    let (own, all) = closers::unclosed(uid, kind);
    let unclosed = OverQuota {
        what,
        uid,
        own: own as u64,
        all: all as u64,
        per_user,
        total,
    };
    unclosed.check()
}

/// What looking at a process may take before a pause follows. One with a thousand threads takes less. To find that threads or groups
/// are too many counts as taking as long.
pub(crate) const CHEAP: Duration = Duration::from_millis(50);
/// Bytes by which the tables shrink before freed memory is given back.
const SHRUNK: u64 = 32 << 20;
/// Times that the pause is as long.
const PAUSE: u32 = 4;

impl User {
    /// How many more slots he may have while `free` are free for all: at no time more than [`GREED`] times what is free
    /// afterwards. None while the segments of his slots take more than his other tables may: where one slot lives of 512, a segment
    /// takes three times what the store does.
    pub(crate) fn room(&self, free: u64) -> u64 {
        if is_master(self.uid) {
            return u64::MAX;
        }
        if self.holdings.segments.load(Relaxed) > self.common.limits.table_bytes_per_user() as u64 {
            return 0;
        }
        let most = GREED.saturating_mul(free);
        most.saturating_sub(self.holdings.slots.load(Relaxed)) / (GREED + 1)
    }

    /// Has `line` say something about his guests, unless his part of the log is used up: what one user's guests do must not
    /// drown what is said of others.
    pub(crate) fn say(&self, line: impl FnOnce()) {
        if is_master(self.uid) {
            return line();
        }
        let now = Instant::now();
        let mut all = lock(&self.common.lines);
        all.retain(|_, its| its.began.is_some_and(|began| now - began < REMEMBERED));
        let taken = all.entry(self.uid).or_default().take(now);
        drop(all);
        let uid = self.uid;
        let before =
            |left_out| tracing::info!(uid, left_out, "lines about a user's guests are left out");
        lines::say(taken, before, line);
    }

    /// Notes that his tables take `now` bytes for a guest for which they took `before`.
    pub(crate) fn note_tables(&self, before: u64, now: u64) {
        for tables in [&self.tables, &self.common.tables] {
            tables.fetch_add(now.wrapping_sub(before), Relaxed);
        }
    }

    /// Bytes of the engine's tables.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.tables.load(Relaxed)
    }

    /// Notes that a thread sleeps in a look at a guest's memory; false when there are too many in all.
    pub(crate) fn lose_thread(&self) -> bool {
        self.stuck.fetch_add(1, Relaxed);
        self.common.stuck.fetch_add(1, Relaxed) < self.common.limits.stuck_threads
    }

    /// Notes that one is back.
    pub(crate) fn regain_thread(&self) {
        for count in [&self.stuck, &self.common.stuck] {
            let before = count.fetch_sub(1, Relaxed);
            assert!(before > 0, "a thread came back that was not lost");
        }
    }

    /// Whether as many threads sleep in looks at his guests' memory as may.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck.load(Relaxed) >= self.common.limits.stuck_threads_per_user
    }
}

impl Users {
    /// No user yet.
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            each: Mutex::default(),
            limits,
            tables: AtomicU64::default(),
            most_tables: AtomicU64::default(),
            stuck: AtomicU32::default(),
            pauses: Mutex::default(),
            lines: Mutex::default(),
            refusals: Arc::default(),
        })
    }

    /// Notes what it took of a processor to look whether a process of a user may be a guest. He gets none for so many times as long.
    pub(crate) fn note_admission(&self, uid: u32, took: Duration) {
        if is_master(uid) || took < CHEAP {
            return;
        }
        let now = Instant::now();
        let mut pauses = lock(&self.pauses);
        pauses.retain(|_, until| *until > now);
        let until = pauses.entry(uid).or_insert(now);
        *until += took * PAUSE;
    }

    /// For how long a user gets no more guests.
    pub(crate) fn pause(&self, uid: u32) -> Option<Duration> {
        let until = *lock(&self.pauses).get(&uid)?;
        let left = until.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// The user with this id.
    pub(crate) fn get(self: &Arc<Self>, uid: u32) -> Arc<User> {
        let mut each = lock(&self.each);
        if let Some(user) = each.get(&uid).and_then(Weak::upgrade) {
            return user;
        }
        each.retain(|_, user| user.strong_count() > 0);
        let user = Arc::new(User {
            uid,
            tables: AtomicU64::default(),
            stuck: AtomicU32::default(),
            holdings: Arc::default(),
            common: Arc::clone(self),
        });
        each.insert(uid, Arc::downgrade(&user));
        user
    }

    /// Whether the tables have shrunk by so much that the host should have the memory. The allocator would keep it for this
    /// process, and a guest that came with great tables and left would have taken it for good. One caller at a time.
    pub(crate) fn tables_have_shrunk(&self) -> bool {
        let now = self.tables.load(Relaxed);
        let most = self.most_tables.fetch_max(now, Relaxed).max(now);
        let shrunk = most - now >= SHRUNK;
        if shrunk {
            self.most_tables.store(now, Relaxed);
        }
        shrunk
    }

    /// Threads that sleep in looks at guests' memory.
    #[cfg(test)]
    pub(crate) fn stuck_threads(&self) -> u32 {
        self.stuck.load(Relaxed)
    }
}

/// Times what is free for all that a user may have: see [`quota`](crate::run::quota).
pub(crate) const GREED: u64 = 3;

/// Root and the user of the engine may what the machine can.
pub(crate) fn is_master(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_is_given_back_once_after_tables_shrank() {
        let users = Users::new(Limits::default());
        let user = users.get(61_001);
        user.note_tables(0, 2 * SHRUNK);
        assert!(!users.tables_have_shrunk(), "they grew");
        user.note_tables(2 * SHRUNK, SHRUNK + 1);
        assert!(!users.tables_have_shrunk(), "not by enough");
        user.note_tables(SHRUNK + 1, SHRUNK);
        assert!(users.tables_have_shrunk() && !users.tables_have_shrunk());
    }

    #[test]
    fn a_user_has_his_part_of_the_log() {
        let users = Users::new(Limits::default());
        let (loud, other) = (users.get(61_001), users.get(61_002));
        let said = |user: &User, times| {
            let mut said = 0;
            (0..times).for_each(|_| user.say(|| said += 1));
            said
        };
        assert_eq!(said(&loud, 500), lines::MOST_LINES);
        assert_eq!(said(&other, 5), 5);
        drop(loud);
        assert_eq!(
            said(&users.get(61_001), 5),
            0,
            "his guests were gone for a moment"
        );
    }

    #[test]
    fn a_user_leaves_slots_for_others() {
        let users = Users::new(Limits::default());
        let (first, second) = (users.get(61_001), users.get(61_002));
        let mut free = 1000;
        for (user, his) in [(&first, 750), (&second, 187)] {
            let room = user.room(free);
            assert_eq!(room, his);
            user.holdings.slots.fetch_add(room, Relaxed);
            free -= room;
            assert_eq!(user.room(free), 0);
        }
        assert_eq!(
            (users.get(0).room(0), first.room(u64::MAX) > 1 << 60),
            (u64::MAX, true)
        );
        let most = first.common.limits.table_bytes_per_user();
        first.holdings.segments.fetch_add(most as u64, Relaxed);
        assert!(first.room(u64::MAX) > 0);
        first.holdings.segments.fetch_add(1, Relaxed);
        assert_eq!(first.room(u64::MAX), 0, "tables are memory, too");
        assert_eq!(users.get(0).room(0), u64::MAX);
    }

    #[test]
    fn a_user_whose_processes_take_long_pauses_and_no_other() {
        let users = Users::new(Limits::default());
        let (user, other) = (users.get(61_001), users.get(61_002));
        users.note_admission(61_001, CHEAP / 2);
        assert_eq!(users.pause(61_001), None);
        // However many of his processes come at once.
        (0..3).for_each(|_| users.note_admission(61_001, Duration::from_secs(100)));
        drop(user);
        let left = users.pause(61_001).expect("a pause, also without guests");
        assert!(left > Duration::from_secs(1100), "{left:?}");
        assert_eq!(users.pause(other.uid), None);
        users.note_admission(other.uid, CHEAP);
        let left = users
            .pause(other.uid)
            .expect("a pause of the other one's own");
        assert!(left <= CHEAP * PAUSE, "{left:?}");
        users.note_admission(0, Duration::from_secs(100));
        assert_eq!(users.pause(0), None);
    }
}
