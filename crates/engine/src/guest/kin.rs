//! Forks that are guests, too: the frames that they share with each other are not our saving.
//!
//! ```text
//!   parent   A B C D        A to D are merged with those of a stranger: 4 pages saved
//!   child    A B C D        inherited with the mappings, and claimed by the child's session: 0 more,
//!                           for without us parent and child would share these frames as well
//! ```
//!
//! A page that a guest claims was merged before its session. Either the guest itself had a session before, or it
//! inherited the page from its parent. The second is assumed where the parent is a guest of the same domain. Of a
//! family whose parent has ended, one child's claims count, for they share with each other alone.
//!
//! All this is for the counters, so it is estimated on the low side. A child's claims are taken to be those of its pages that
//! are merged, up to their number, though it may have written some and merged others since.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

/// What a guest may have inherited.
#[derive(Debug, Default)]
pub(crate) struct Kin {
    /// Pages that were merged before this session.
    claimed: AtomicU64,
    /// The process that it was a child of then; 0: none.
    parent: AtomicU32,
    /// Whether that was seen to be a guest.
    is_fork: AtomicBool,
}

impl Kin {
    /// Notes that `pages` more were claimed.
    pub(crate) fn add(&self, pages: u64, parent: impl FnOnce() -> Option<u32>) {
        if pages > 0 {
            self.parent.store(parent().unwrap_or(0), Relaxed);
            self.claimed.fetch_add(pages, Relaxed);
        }
    }
}

/// How many merged pages of each guest fork shares already. The guests of a domain come by number, with their merged pages.
pub(crate) fn shared_by_fork(guests: &[(u32, &Kin, u64)]) -> Vec<u64> {
    let numbers: HashSet<u32> = guests.iter().map(|&(pid, ..)| pid).collect();
    // By ended parent: the child whose claims count.
    let mut heirs: HashMap<u32, (usize, u64)> = HashMap::new();
    let mut shared = vec![0; guests.len()];
    for (at, &(_, kin, merged)) in guests.iter().enumerate() {
        let claimed = kin.claimed.load(Relaxed).min(merged);
        let parent = kin.parent.load(Relaxed);
        let lives = numbers.contains(&parent);
        if lives && claimed > 0 {
            kin.is_fork.store(true, Relaxed);
        }
        if !kin.is_fork.load(Relaxed) {
            continue;
        }
        shared[at] = claimed;
        let heir = heirs.entry(parent).or_insert((at, claimed));
        if !lives && claimed > heir.1 {
            *heir = (at, claimed);
        }
    }
    for (parent, (at, _)) in heirs {
        if !numbers.contains(&parent) {
            shared[at] = 0;
        }
    }
    shared
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kin(claimed: u64, parent: u32) -> Kin {
        let kin = Kin::default();
        kin.add(claimed, || Some(parent));
        kin
    }

    #[test]
    fn children_save_nothing_while_their_parent_does() {
        let (parent, one, two) = (kin(0, 1), kin(90, 7), kin(90, 7));
        let all = [(7, &parent, 100), (8, &one, 90), (9, &two, 120)];
        assert_eq!(shared_by_fork(&all), [0, 90, 90]);
        let written = [(7, &parent, 100), (8, &one, 30), (9, &two, 120)];
        assert_eq!(shared_by_fork(&written), [0, 30, 90]);
        assert_eq!(
            shared_by_fork(&written[1..]),
            [30, 0],
            "one of them is the heir"
        );
        assert_eq!(shared_by_fork(&written[1..2]), [0]);
    }

    #[test]
    fn guests_that_came_back_are_no_forks() {
        // Of the same shell, which is no guest.
        let (one, two) = (kin(90, 1), kin(90, 1));
        assert_eq!(shared_by_fork(&[(8, &one, 90), (9, &two, 90)]), [0, 0]);
        assert_eq!(shared_by_fork(&[]), [0; 0]);
    }
}
