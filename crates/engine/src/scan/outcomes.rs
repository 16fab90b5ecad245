//! Outcomes: the states that the answers of an agent give the pages it was asked for.
//!
//! An answer is checked as a whole before any of it counts: it must speak of exactly the pages that were asked for, in
//! words that fit the question. One that does not condemns the guest, and all its refs then wait for its lifelines.

use std::sync::atomic::Ordering::Relaxed;

use wire::{Answer, Merged, PageBits, PageOutcome};

use crate::guest::agent::{Fault, Pending};
use crate::guest::change::Change;
use crate::page::Tag;
use crate::sync::lock;

/// Accounts the answer to a question about pages of a chunk.
///
/// # Errors
/// When the answer does not fit what was asked; none of it counts then.
pub(crate) fn take(change: &mut Change<'_>, asked: &Pending, answer: &Answer) -> Result<(), Fault> {
    let guest = change.guest;
    match (asked, answer) {
        (Pending::Merged(chunk, enclosed), Answer::Merged(merged)) => {
            take_merged(change, merged, *enclosed)?;
            let most = guest.user.common.limits.table_bytes_per_user();
            change.show(&guest.domain.patterns, chunk.place, most);
            Ok(())
        }
        (
            Pending::Unmerged(_, asked),
            Answer::Unmerged {
                cpu_ns,
                pages: private,
            },
        ) => {
            take_unmerged(change, *asked, *private)?;
            guest.counters.cpu_ns.fetch_max(*cpu_ns, Relaxed);
            Ok(())
        }
        (Pending::Merged(..), _) => Err(Fault::Contradiction("not the answer to a merge")),
        (Pending::Unmerged(..), _) => Err(Fault::Contradiction("not the answer to an unmerge")),
        _ => Err(Fault::Contradiction("an answer to another question")),
    }
}

/// Accounts a merge, with the pages that its answer may say are enclosed.
fn take_merged(change: &mut Change<'_>, merged: &Merged, enclosed: PageBits) -> Result<(), Fault> {
    let guest = change.guest;
    let outcomes = merged.outcomes.iter().copied().enumerate();
    if !outcomes.clone().all(|(page, outcome)| {
        let may_enclose = enclosed.contains(page) && outcome == PageOutcome::Enclosed;
        may_enclose || fits(change.tag(page), outcome)
    }) {
        return Err(Fault::Contradiction("outcomes that fit no question"));
    }
    let counters = &guest.counters;
    counters.cpu_ns.fetch_max(merged.cpu_ns, Relaxed);
    counters.window_ns.fetch_max(merged.window_ns, Relaxed);
    let view = guest.domain.slots.view();
    let slots = change.slots();
    let mut again = 0;
    let mut gains = lock(&guest.passes.gains);
    for (page, outcome) in outcomes.filter(|(_, outcome)| *outcome != PageOutcome::NotAsked) {
        match outcome {
            PageOutcome::Merged => {
                let slot = slots[page];
                let slot =
                    slot.unwrap_or_else(|| panic!("page {page} was asked for and has no slot"));
                view.join(slot);
                if let Some(gains) = &mut *gains {
                    gains.add(slot);
                }
                change.set(page, Tag::Merged);
                again += u64::from(change.stored.contains(page));
                change.stored.insert(page);
            }
            PageOutcome::Zeroed => {
                change.set(page, Tag::Zeroed);
                if let Some(gains) = &mut *gains {
                    gains.zeroed += 1;
                }
                again += u64::from(change.stored.contains(page));
                change.stored.remove(page); // it is anonymous memory again
            }
            // It is what it was, in another place, and the next scan finds it written. To read it before would
            // be in vain.
            PageOutcome::Enclosed => {
                change.stored.insert(page);
                if change.tag(page) == Tag::Settled {
                    change.set(page, Tag::Written);
                }
            }
            refused => refuse(change, page, refused),
        }
    }
    counters.merged_again.fetch_add(again, Relaxed);
    Ok(())
}

fn fits(tag: Tag, outcome: PageOutcome) -> bool {
    match tag {
        Tag::Asked => !matches!(
            outcome,
            PageOutcome::NotAsked | PageOutcome::Zeroed | PageOutcome::Enclosed
        ),
        Tag::AskedZero => !matches!(
            outcome,
            PageOutcome::NotAsked | PageOutcome::Merged | PageOutcome::Enclosed
        ),
        _ => outcome == PageOutcome::NotAsked,
    }
}

/// A page the agent did not merge: it never mapped its slot, so the ref goes at once.
fn refuse(change: &mut Change<'_>, page: usize, outcome: PageOutcome) {
    if change.tag(page) == Tag::Asked {
        let slot = change.slot(page);
        change.effects.unref.push(slot);
    }
    match outcome {
        PageOutcome::Differs => change.distrust(page),
        PageOutcome::Gone => change.set(page, Tag::Absent),
        PageOutcome::Pinned => change.back_off(page, Tag::Pinned),
        PageOutcome::Unsupported => change.give_up(page),
        _ => change.back_off(page, Tag::Skipped),
    }
}

/// Accounts an unmerge: of the pages `asked` for, these are `private`.
fn take_unmerged(change: &mut Change<'_>, asked: PageBits, private: PageBits) -> Result<(), Fault> {
    if !(private & !asked).is_empty() {
        return Err(Fault::Contradiction("pages that were not to be unmerged"));
    }
    for page in private.pages() {
        if change.tag(page) == Tag::Merged {
            change.turn(page, Tag::Broken);
        }
    }
    Ok(())
}
