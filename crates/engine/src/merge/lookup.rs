//! Lookup: one fingerprint is looked up, and its page entered as candidate or given a ref of a slot.
//!
//! Other workers change the index meanwhile, and slots die: an exchange that is lost starts the lookup over.

use crate::domain::Domain;
use crate::domain::refs::{Taken, View};
use crate::page::{Entry, Fingerprint, Site, Slot, StoreId};

/// Where a page looks for its equals.
#[derive(Clone, Copy)]
pub(super) struct Scope {
    pub(super) index: StoreId,
    /// Whether only slots of that node count: what else the index names is from before a change of
    /// the rules.
    pub(super) bound: bool,
}

impl Scope {
    pub(super) fn takes(self, slot: Slot) -> bool {
        !self.bound || slot.store() == self.index
    }
}

/// What the index knows of a fingerprint.
pub(super) enum Found {
    /// The page itself is the candidate now.
    Own,
    /// A slot, with a ref for the page.
    Canonical(Slot),
    /// Another page is the candidate, or a slot is full: this entry is to be replaced.
    Twin(Entry),
    /// Others were faster, several times: try in the next round.
    Lost,
}

/// How often a lookup starts over before it gives way to others.
const ATTEMPTS: usize = 16;

pub(super) fn resolve(
    domain: &Domain,
    view: &View<'_>,
    scope: Scope,
    key: Fingerprint,
    site: Site,
) -> Found {
    let own = Entry::Candidate(site);
    let index = domain.index(scope.index);
    for _ in 0..ATTEMPTS {
        match index.get_or_insert(key, own) {
            None => return Found::Own,
            Some(Entry::Candidate(other)) if other == site => return Found::Own,
            Some(other @ Entry::Candidate(_)) => return Found::Twin(other),
            Some(named @ Entry::Canonical(slot)) => {
                let taken = match scope.takes(slot) {
                    true => view.try_ref(slot),
                    false => Taken::Dead, // for these pages
                };
                match taken {
                    Taken::Won => return Found::Canonical(slot),
                    Taken::Full => return find_room(domain, view, scope, key, slot),
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
fn find_room(
    domain: &Domain,
    view: &View<'_>,
    scope: Scope,
    key: Fingerprint,
    full: Slot,
) -> Found {
    let chains = &domain.slots.chains;
    let named = Entry::Canonical(full);
    match chains.take_roomy((scope.index, key), full) {
        Some(slot) if scope.takes(slot) && view.try_ref(slot) == Taken::Won => {
            let index = domain.index(scope.index);
            let _ = index.compare_exchange(key, named, Entry::Canonical(slot));
            Found::Canonical(slot)
        }
        _ => Found::Twin(named),
    }
}
