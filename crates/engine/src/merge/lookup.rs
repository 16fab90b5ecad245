//! Lookup: one fingerprint is looked up, and its page entered as candidate or given a ref of a slot.
//!
//! Other workers change the index meanwhile, and slots die: an exchange that is lost starts the lookup over.

use crate::domain::refs::{Taken, View};
use crate::merge::plan::{Found, Plan};
use crate::page::{Entry, Fingerprint, Site, Slot, StoreId};

/// How often a lookup starts over before it gives way to others.
const ATTEMPTS: usize = 16;

impl Plan<'_> {
    /// Whether pages of the node of `home` may map a slot. What else an index names is from before a change of the rules.
    pub(super) fn takes(&self, home: StoreId, slot: Slot) -> bool {
        !self.is_bound() || slot.store() == home
    }

    pub(super) fn resolve(
        &self,
        view: &View<'_>,
        home: StoreId,
        key: Fingerprint,
        site: Site,
    ) -> Found {
        let own = Entry::Candidate(site);
        let index = self.domain().index(home);
        for _ in 0..ATTEMPTS {
            match index.get_or_insert(key, own) {
                None => return Found::Own,
                Some(Entry::Candidate(other)) if other == site => return Found::Own,
                Some(other @ Entry::Candidate(_)) => return Found::Twin(other),
                Some(named @ Entry::Canonical(slot)) => {
                    let taken = match self.takes(home, slot) {
                        true => view.try_ref(slot),
                        false => Taken::Dead, // for these pages
                    };
                    match taken {
                        Taken::Won => return Found::Canonical(slot),
                        Taken::Full => return self.find_room(view, home, key, slot),
                        Taken::Dead if index.compare_exchange(key, named, own).is_ok() => {
                            return Found::Own;
                        }
                        Taken::Dead => {}
                    }
                }
            }
        }
        Found::Lost
    }

    /// A copy that has room again is named instead of the full one. It has a ref of ours by then, so it
    /// does not die before the index names it. A lost exchange changes nothing: the copy serves.
    fn find_room(&self, view: &View<'_>, home: StoreId, key: Fingerprint, full: Slot) -> Found {
        let domain = self.domain();
        let named = Entry::Canonical(full);
        match domain.slots.chains.take_roomy((home, key), full) {
            Some(slot) if self.takes(home, slot) && view.try_ref(slot) == Taken::Won => {
                let index = domain.index(home);
                let _ = index.compare_exchange(key, named, Entry::Canonical(slot));
                Found::Canonical(slot)
            }
            _ => Found::Twin(named),
        }
    }
}
