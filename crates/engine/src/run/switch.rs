//! Changing the rules of sharing, while guests are served.
//!
//! The rules change between two rounds, when no worker is at work, and only while nothing is
//! shared: no page of a guest in service is merged, or asked for. Plans made under the old rules
//! are taken back. So a page never maps a slot that the new rules forbid (I6).
//!
//! Entries of indexes stay, and slots whose refs wait for lifelines. They are harmless:
//!
//! ```text
//!  1 → 0   first index: candidates of all nodes    ─▶ the patrol settles those of other nodes again
//!                       slots of other stores      ─▶ no scope takes them: a page that finds one
//!                                                     puts itself in its place
//!  0 → 1   other indexes: candidates               ─▶ the patrol settles them again
//!                         slots                    ─▶ no lookup goes there
//!  a slot that dies leaves the index of its store and the first: it never was in another
//! ```
//!
//! A copy with more refs than a new `max_page_sharing` allows is full, whatever its refs wait for.
//!
//! A worker that was given up may wake up with the old rules. Its guest is condemned by then, so
//! it asks nothing. Its entries are stale from the start, as above.
//!
//! The tempting alternative, to empty all indexes, would have to lock every chunk, and one of them
//! may be held by a worker that is stuck.

use std::sync::Arc;

use wire::Setting;

use crate::guest::agent::Fault;
use crate::guest::{Guest, Standing};
use crate::options::Rules;
use crate::page::{Class, Tag};
use crate::run::core::Core;
use crate::sync::lock;

impl Core {
    /// Changes the rules, unless pages are shared; gives how many are. Between rounds only.
    pub(crate) fn switch(&self, rules: Rules) -> u64 {
        if rules == self.knobs.rules() {
            return 0;
        }
        let guests = lock(&self.guests).clone();
        let is_served = |guest: &Arc<Guest>| guest.standing() == Standing::Served;
        // A thread that wakes up with the old rules must not find its guest in service.
        let stuck = guests
            .iter()
            .filter(|&guest| is_served(guest) && guest.is_stuck());
        stuck.for_each(|guest| guest.condemn(&Fault::Stuck));
        // One that the next look will retire has its pages until then. The switch does not wait for stuck guests.
        let mine = guests
            .iter()
            .filter(|guest| guest.standing() != Standing::Ghost && !guest.is_stuck());
        let mine: Vec<_> = mine.collect();
        let shared = mine.iter().map(|guest| count_shared(guest)).sum();
        if shared == 0 {
            let served = mine.into_iter().filter(|&guest| is_served(guest));
            served.for_each(withdraw);
            self.knobs.turn([
                Setting::MergeAcrossNodes(rules.across_nodes),
                Setting::MaxPageSharing(rules.max_sharing),
            ]);
            let domains = lock(&self.domains);
            let slots = domains.values().map(|domain| &domain.slots);
            slots.for_each(|slots| slots.set_limit(rules.max_sharing));
        }
        shared
    }
}

/// Pages that are merged, or asked for.
fn count_shared(guest: &Arc<Guest>) -> u64 {
    let offers = lock(&guest.offers);
    // A chunk that a stuck worker holds belongs to a guest that is being dropped.
    let all = offers.chunks.values().filter_map(|chunk| chunk.try_lock());
    let counts = all.map(|pages| {
        let still = pages.still.pages();
        let asked = still.filter(|&page| pages.tag(page) == Tag::Asked);
        pages.count(Class::Merged) + asked.count()
    });
    counts.sum::<usize>() as u64
}

fn withdraw(guest: &Arc<Guest>) {
    for chunk in lock(&guest.offers).chunks.values() {
        if let Some(mut change) = guest.change(chunk) {
            change.withdraw_all();
        }
    }
}
