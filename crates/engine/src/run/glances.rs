//! The state between two glances at discards: the users that rest, and where the next glance begins. `discards.rs` has the
//! glances.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[cfg(test)]
use crate::sync::lock;

/// A user rests so many times as long as his guests took, and no longer than [`LONGEST_REST`]: a busy host makes each
/// look slow. A pass is cut, so with this bound a user has a tenth of the time at most.
const REST: u32 = 8;
const LONGEST_REST: Duration = Duration::from_secs(1);

/// What is known from one glance to the next.
#[derive(Default)]
pub(crate) struct Glances(pub(super) Mutex<State>);

#[derive(Default)]
pub(super) struct State {
    /// When users are looked at again.
    rests: BTreeMap<u32, Instant>,
    /// When the next glance is due.
    pub(super) due: Option<Instant>,
    /// The number of the guest with which it begins.
    pub(super) first: u64,
}

/// What was done for each user.
pub(super) type Spent = BTreeMap<u32, Duration>;

#[cfg(test)]
impl Glances {
    /// What was done for a user took so long.
    pub(crate) fn note_spent(&self, uid: u32, took: Duration) {
        lock(&self.0).rest(Spent::from([(uid, took)]));
    }

    pub(crate) fn rests(&self, uid: u32) -> bool {
        lock(&self.0).resting(Instant::now()).contains(&uid)
    }

    /// No user rests any more.
    pub(crate) fn end_rests(&self) {
        lock(&self.0).rests.clear();
    }
}

impl State {
    /// The users that rest.
    pub(super) fn resting(&self, now: Instant) -> BTreeSet<u32> {
        let rests = self.rests.iter().filter(|(_, until)| **until > now);
        rests.map(|(&uid, _)| uid).collect()
    }

    pub(super) fn rest(&mut self, spent: Spent) {
        let now = Instant::now();
        self.rests.retain(|_, until| *until > now);
        for (uid, its) in spent {
            self.rests.insert(uid, now + (its * REST).min(LONGEST_REST));
        }
    }
}
