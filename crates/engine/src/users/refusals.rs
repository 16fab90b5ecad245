//! The words of log and status on refused guests and callers: an agent asks again and again, and is told of once.
//!
//! A user may have as many reasons as he makes up names. So each user has a bounded number of lines, and the log
//! says when they are used up; a user who fills his own lines takes none of another's.
//!
//! Apart from the lines, the last reasons of each user are remembered for the status, where he sees them ([`Refusals::list`]).

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use wire::Unserved;

use crate::sync::lock;

/// Reasons of one user that are remembered, and that the log tells in an hour.
const REASONS: usize = 16;
/// Users that are remembered. With more, all is forgotten: that takes as many user ids.
const USERS: usize = 1024;
/// After this time a reason is told again.
const FORGOTTEN: Duration = Duration::from_secs(3600);
/// Characters of a reason that are kept: some name paths, which have no bound.
const LONGEST: usize = 500;

/// Why processes are no guests, or not any longer.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    /// Since when lines are counted.
    since: Option<Instant>,
    users: BTreeMap<u32, Reasons>,
}

/// Those of one user.
#[derive(Debug, Default)]
struct Reasons {
    all: Vec<Reason>,
    /// Lines of the log.
    told: usize,
}

#[derive(Debug)]
struct Reason {
    /// Of the last one.
    pid: u32,
    why: String,
    times: u64,
    last: Instant,
    /// Whether the log has it.
    told: bool,
}

/// What becomes of a reason.
#[derive(Debug, PartialEq, Eq)]
enum Say {
    New,
    /// And it is the last one of this user.
    Last,
    Again,
}

impl Reasons {
    fn note(&mut self, pid: u32, why: &str, now: Instant) -> Say {
        let at = self.all.iter().position(|reason| reason.why == why);
        if at.is_none() && self.all.len() == REASONS {
            let oldest = (0..REASONS).min_by_key(|&at| self.all.get(at).map(|reason| reason.last));
            oldest.map(|oldest| self.all.swap_remove(oldest));
        }
        let mut reason = match at {
            Some(at) => self.all.swap_remove(at),
            None => Reason {
                pid,
                why: why.to_owned(),
                times: 0,
                last: now,
                told: false,
            },
        };
        let tell = !reason.told && self.told < REASONS;
        self.told += usize::from(tell);
        (reason.pid, reason.last, reason.told) = (pid, now, reason.told || tell);
        reason.times += 1;
        self.all.push(reason);
        match tell {
            false => Say::Again,
            true if self.told == REASONS => Say::Last,
            true => Say::New,
        }
    }

    /// An hour begins: what is told again is news. Tells whether anything is left.
    fn begin_anew(&mut self, now: Instant) -> bool {
        self.told = 0;
        self.all.retain(|reason| now - reason.last < FORGOTTEN);
        self.all.iter_mut().for_each(|reason| reason.told = false);
        !self.all.is_empty()
    }
}

impl Refusals {
    /// Logs why process `pid` of user `uid` is not served: as a warning when it is new, for those who look closely
    /// when it is not. The status tells it.
    pub fn tell(&self, uid: u32, pid: u32, why: &str) {
        match self.note(uid, pid, why, Instant::now()) {
            Say::Again => tracing::debug!(uid, pid, "refused again: {why}"),
            Say::New => tracing::warn!(uid, pid, "refused: {why}"),
            Say::Last => {
                tracing::warn!(uid, pid, "refused: {why}");
                tracing::warn!("further reasons for refusing user {uid} are not told for a while");
            }
        }
    }

    /// Forgets all: what comes is new.
    pub fn forget(&self) {
        *lock(&self.0) = Told::default();
    }

    /// Forgets why a process of user `uid` was not served: it is.
    pub(crate) fn forget_process(&self, uid: u32, pid: u32) {
        if let Some(his) = lock(&self.0).users.get_mut(&uid) {
            his.all.retain(|reason| reason.pid != pid);
        }
    }

    /// The last reasons, as far as their processes live.
    #[must_use]
    pub fn list(&self) -> Vec<Unserved> {
        let mut all = self.recent(Instant::now());
        // Without the lock: the poll loop waits for it.
        all.retain(|one| std::path::Path::new(&format!("/proc/{}", one.pid)).exists());
        all
    }

    fn recent(&self, now: Instant) -> Vec<Unserved> {
        let told = lock(&self.0);
        let all = told.users.iter();
        let all = all.flat_map(|(&uid, his)| his.all.iter().map(move |reason| (uid, reason)));
        let recent = all.filter(|(_, reason)| now - reason.last < FORGOTTEN);
        let describe = |(uid, reason): (u32, &Reason)| Unserved {
            pid: reason.pid,
            uid,
            why: reason.why.clone(),
            times: reason.times,
            seconds: (now - reason.last).as_secs(),
        };
        recent.map(describe).collect()
    }

    fn note(&self, uid: u32, pid: u32, why: &str, now: Instant) -> Say {
        let mut told = lock(&self.0);
        if told.since.is_none_or(|since| now - since >= FORGOTTEN) {
            told.since = Some(now);
            told.users.retain(|_, his| his.begin_anew(now));
        }
        if told.users.len() > USERS {
            told.users.clear();
        }
        let why: String = why.chars().take(LONGEST).collect();
        told.users.entry(uid).or_default().note(pid, &why, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_told_once_and_each_user_has_his_lines() {
        let refusals = Refusals::default();
        let now = Instant::now();
        let note = |uid, why: &str| refusals.note(uid, std::process::id(), why, now);
        assert_eq!(
            (note(1, "a"), note(1, "a"), note(2, "a")),
            (Say::New, Say::Again, Say::New)
        );
        let said: Vec<_> = (0..100).map(|n| note(1, &n.to_string())).collect();
        assert_eq!(
            said.iter().filter(|say| **say != Say::Again).count(),
            REASONS - 1
        );
        assert_eq!(said.iter().filter(|say| **say == Say::Last).count(), 1);
        assert_eq!(note(2, "b"), Say::New, "another user's lines");
        for uid in 0..3000 {
            let _ = note(uid, "x");
        }
        assert!(lock(&refusals.0).users.len() <= USERS + 1);
        assert_eq!(refusals.note(1, 7, "c", now + FORGOTTEN), Say::New);
        refusals.forget();
        assert_eq!(note(2, "b"), Say::New);
    }

    #[test]
    fn the_last_reasons_are_listed_while_their_processes_live() {
        let refusals = Refusals::default();
        let own = std::process::id();
        for n in 0..40 {
            refusals.tell(1, own, &format!("reason {n}"));
        }
        refusals.tell(1, own, "reason 39");
        refusals.tell(2, u32::MAX, "a process that has ended");
        let mut listed = refusals.list();
        listed.sort_by_key(|unserved| unserved.times);
        assert_eq!(listed.len(), REASONS);
        let last = listed.last().expect("reasons");
        assert_eq!((last.uid, last.pid, last.times), (1, own, 2));
        assert_eq!(last.why, "reason 39");
        refusals.forget_process(1, own);
        assert!(refusals.list().is_empty());
    }
}
