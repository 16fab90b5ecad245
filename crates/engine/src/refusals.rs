//! What the log says of refused guests and callers: an agent asks again and again, and is told of once.
//!
//! A user may have as many reasons as he makes up names. So each user has a bounded number of lines, and the log
//! says when they are used up; a user who fills his own lines takes none of another's.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Reasons of one user that the log tells.
const REASONS: usize = 16;
/// Users that are remembered. With more, all is forgotten: that takes as many user ids.
const USERS: usize = 1024;
/// After this time a reason is told again.
const FORGOTTEN: Duration = Duration::from_secs(3600);

/// The refusals that the log has already.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    since: Option<Instant>,
    users: BTreeMap<u32, Vec<String>>,
}

/// What becomes of a reason.
#[derive(Debug, PartialEq, Eq)]
enum Say {
    New,
    /// And it is the last one of this user.
    Last,
    Again,
}

impl Refusals {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(Told {
            since: None,
            users: BTreeMap::new(),
        }))
    }

    /// Logs why a process of user `uid` is refused: as a warning when it is new, for those who look closely
    /// when it is not.
    pub fn tell(&self, uid: u32, why: &str) {
        match self.note(uid, why, Instant::now()) {
            Say::Again => tracing::debug!("refused again: {why}"),
            Say::New => tracing::warn!("refused: {why}"),
            Say::Last => {
                tracing::warn!("refused: {why}");
                tracing::warn!("further reasons for refusing user {uid} are not told for a while");
            }
        }
    }

    /// Forgets all: what comes is new.
    pub fn forget(&self) {
        *self.lock() = Told::default();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, uid: u32, why: &str, now: Instant) -> Say {
        let mut told = self.lock();
        if told.since.is_none_or(|since| now - since >= FORGOTTEN) || told.users.len() > USERS {
            *told = Told {
                since: Some(now),
                users: BTreeMap::new(),
            };
        }
        let reasons = told.users.entry(uid).or_default();
        if reasons.len() == REASONS || reasons.iter().any(|reason| reason == why) {
            return Say::Again;
        }
        reasons.push(why.to_owned());
        match reasons.len() {
            REASONS => Say::Last,
            _ => Say::New,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_told_once_and_each_user_has_his_lines() {
        let refusals = Refusals::default();
        let now = Instant::now();
        let note = |uid, why: &str| refusals.note(uid, why, now);
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
        assert!(refusals.lock().users.len() <= USERS + 1);
        assert_eq!(refusals.note(1, "c", now + FORGOTTEN), Say::New);
        refusals.forget();
        assert_eq!(note(2, "b"), Say::New);
    }
}
