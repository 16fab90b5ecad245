//! Outcomes: the states that the answers of an agent give the pages it was asked for.
//!
//! An answer is checked as a whole before any of it counts: it must speak of exactly the pages that were asked for, in
//! words that fit the question. One that does not condemns the guest, and all its refs then wait for its lifelines.

use std::sync::atomic::Ordering::Relaxed;

use wire::{Answer, Merged, PageBits, PageOutcome};

use crate::domain::effects::Effects;
use crate::domain::pages::Pages;
use crate::guest::Guest;
use crate::guest::agent::{Fault, Pending};
use crate::page::Tag;
use crate::sync::lock;

/// Accounts the answer to a question about pages of a chunk.
///
/// # Errors
/// When the answer does not fit what was asked; none of it counts then.
pub(crate) fn take(
    guest: &Guest,
    pages: &mut Pages,
    effects: &mut Effects,
    (asked, answer): (&Pending, &Answer),
) -> Result<(), Fault> {
    match (asked, answer) {
        (Pending::Merged(chunk, enclosed), Answer::Merged(merged)) => {
            take_merged(guest, pages, effects, (merged, *enclosed))?;
            let most = guest.user.common.limits.table_bytes_per_user();
            pages.show(&guest.domain.patterns, chunk.place, most);
            Ok(())
        }
        (
            Pending::Unmerged(_, asked),
            Answer::Unmerged {
                cpu_ns,
                pages: private,
            },
        ) => {
            take_unmerged(pages, effects, *asked, *private)?;
            guest.counters.cpu_ns.fetch_max(*cpu_ns, Relaxed);
            Ok(())
        }
        (Pending::Merged(..), _) => Err(Fault::Contradiction("not the answer to a merge")),
        (Pending::Unmerged(..), _) => Err(Fault::Contradiction("not the answer to an unmerge")),
        _ => Err(Fault::Contradiction("an answer to another question")),
    }
}

/// Accounts a merge, with the pages that its answer may say are enclosed.
fn take_merged(
    guest: &Guest,
    pages: &mut Pages,
    effects: &mut Effects,
    (merged, enclosed): (&Merged, PageBits),
) -> Result<(), Fault> {
    let outcomes = merged.outcomes.iter().copied().enumerate();
    if !outcomes.clone().all(|(page, outcome)| {
        let may_enclose = enclosed.contains(page) && outcome == PageOutcome::Enclosed;
        may_enclose || fits(pages.tag(page), outcome)
    }) {
        return Err(Fault::Contradiction("outcomes that fit no question"));
    }
    let counters = &guest.counters;
    counters.cpu_ns.fetch_max(merged.cpu_ns, Relaxed);
    counters.window_ns.fetch_max(merged.window_ns, Relaxed);
    let view = guest.domain.slots.view();
    let slots = pages.slots();
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
                pages.set(page, Tag::Merged);
                again += u64::from(pages.stored.contains(page));
                pages.stored.insert(page);
            }
            PageOutcome::Zeroed => {
                pages.set(page, Tag::Zeroed);
                if let Some(gains) = &mut *gains {
                    gains.zeroed += 1;
                }
                again += u64::from(pages.stored.contains(page));
                pages.stored.remove(page); // it is anonymous memory again
            }
            // It is what it was, in another place, and the next scan finds it written. To read it before would
            // be in vain.
            PageOutcome::Enclosed => {
                pages.stored.insert(page);
                if pages.tag(page) == Tag::Settled {
                    pages.set(page, Tag::Written);
                }
            }
            refused => refuse(pages, page, refused, effects),
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
fn refuse(pages: &mut Pages, page: usize, outcome: PageOutcome, effects: &mut Effects) {
    if pages.tag(page) == Tag::Asked {
        effects.unref.push(pages.slot(page));
    }
    match outcome {
        PageOutcome::Differs => pages.distrust(page),
        PageOutcome::Gone => pages.set(page, Tag::Absent),
        PageOutcome::Pinned => pages.back_off(page, Tag::Pinned),
        PageOutcome::Unsupported => pages.give_up(page),
        _ => pages.back_off(page, Tag::Skipped),
    }
}

/// Accounts an unmerge: of the pages `asked` for, these are `private`.
fn take_unmerged(
    pages: &mut Pages,
    effects: &mut Effects,
    asked: PageBits,
    private: PageBits,
) -> Result<(), Fault> {
    if !(private & !asked).is_empty() {
        return Err(Fault::Contradiction("pages that were not to be unmerged"));
    }
    for page in private.pages() {
        if pages.tag(page) == Tag::Merged {
            pages.discard(page, effects);
            pages.set(page, Tag::Broken);
        }
    }
    Ok(())
}
