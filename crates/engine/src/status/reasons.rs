//! The reasons for which memory of guests is not merged, as codes and in words.

use std::collections::BTreeMap;

use wire::{GuestStatus, KnobValues, RunMode, WhyNot, WhyNotCode};

/// Gives each guest its reasons.
pub(super) fn give(guests: &mut [GuestStatus], knobs: &KnobValues) {
    let mut members = BTreeMap::<String, usize>::new();
    for guest in guests.iter() {
        *members.entry(guest.domain.raw().to_owned()).or_default() += 1;
    }
    for guest in guests {
        let alone = members.get(guest.domain.raw()) == Some(&1);
        guest.reasons = reasons(guest, alone, private_again(knobs));
    }
}

/// Why pages are private again that were merged.
fn private_again(knobs: &KnobValues) -> &'static str {
    match (knobs.run, knobs.merge_again) {
        (RunMode::Unmerge, _) => "merged once, and made private again: run is 2",
        (_, false) => "written after merging, and merge_again is off",
        (_, true) => "merged once, and made private again, to be looked at anew",
    }
}

fn reasons(guest: &GuestStatus, alone: bool, again: &str) -> Vec<WhyNot> {
    let whole = of_the_guest(guest, alone).into_iter();
    whole.chain(of_pages(guest, again)).collect()
}

/// Why nothing of it is merged, or nothing more.
fn of_the_guest(guest: &GuestStatus, alone: bool) -> Vec<WhyNot> {
    use WhyNotCode as Code;
    let is = |is: bool, why: &str| is.then(|| why.to_owned());
    let leaves = guest.leaves.as_ref();
    let all = [
        (
            Code::Leaves,
            leaves.map(|why| format!("it leaves its domain: {why}")),
        ),
        (
            Code::Stuck,
            is(guest.stuck, "a look at its memory does not return"),
        ),
        (
            Code::NoAnswer,
            is(!guest.responsive, "its agent does not answer"),
        ),
        (Code::Limit, guest.at_limit.clone()),
        (
            Code::NoOffer,
            is(
                guest.regions == 0,
                "it had offered no memory at the last look (`--any` of `pageone run` and `attach` offers all there is)",
            ),
        ),
        (
            Code::Alone,
            is(
                alone,
                "no other guest is in its domain: only its own pages can be equal",
            ),
        ),
    ];
    let all = all.into_iter();
    all.filter_map(|(code, why)| Some(because(code, 0, why?)))
        .collect()
}

/// Why some of its pages are not.
fn of_pages(guest: &GuestStatus, again: &str) -> Vec<WhyNot> {
    use WhyNotCode as Code;
    let GuestStatus {
        pages_broken: broken,
        pages_pinned: pinned,
        pages_foreign: foreign,
        pages_unfit: unfit,
        ..
    } = *guest;
    let put_off = guest
        .pages_skipped
        .saturating_sub(broken + pinned + foreign + unfit);
    let busy = match guest.pages_volatile >= guest.pages.div_ceil(2) {
        true => guest.pages_volatile,
        false => 0,
    };
    // With the words for one page, and for many.
    let all = [
        (
            (Code::Busy, busy, ["was", "were"]),
            "written lately, or not yet observed for two periods",
        ),
        ((Code::Broken, broken, ["was", "were"]), again),
        (
            (Code::Pinned, pinned, ["is", "are"]),
            "in use for I/O, or shared by fork or KSM",
        ),
        (
            (Code::Foreign, foreign, ["lies", "lie"]),
            "in mappings of files, or in stores of another engine",
        ),
        (
            (Code::Unfit, unfit, ["lies", "lie"]),
            "in mappings of a kind that is not merged",
        ),
        (
            (Code::PutOff, put_off, ["waits", "wait"]),
            "for another try: there was no room, or merging failed",
        ),
    ];
    let words = |((code, pages, [one, many]), why): ((_, _, [&str; 2]), &str)| {
        let why = match (pages, &guest.pins) {
            (_, Some(pins)) if code == Code::Broken => {
                format!("written pages are not merged again: {pins}")
            }
            (0, _) => return None,
            (1, _) => format!("1 page {one} {why}"),
            _ => format!("{pages} pages {many} {why}"),
        };
        Some(because(code, pages, why))
    };
    all.into_iter().filter_map(words).collect()
}

fn because(code: WhyNotCode, pages: u64, why: String) -> WhyNot {
    WhyNot { code, pages, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_given_with_its_pages_and_they_add_up() {
        let well = GuestStatus {
            domain: "a".into(),
            responsive: true,
            regions: 1,
            pages: 100,
            ..GuestStatus::default()
        };
        let skips = GuestStatus {
            pages_skipped: 15,
            pages_broken: 1,
            pages_pinned: 2,
            pages_foreign: 3,
            pages_unfit: 4,
            pages_volatile: 50,
            ..well.clone()
        };
        let dumb = GuestStatus {
            domain: "b".into(),
            regions: 0,
            responsive: false,
            stuck: true,
            leaves: Some("x".to_owned()),
            at_limit: Some("y".to_owned()),
            pins: Some("z".to_owned()),
            ..GuestStatus::default()
        };
        let mut all = [well, skips, dumb];
        give(&mut all, &KnobValues::default());
        let codes = |guest: &GuestStatus| guest.reasons.iter().map(|r| r.code).collect::<Vec<_>>();
        use WhyNotCode as Code;
        assert_eq!(codes(&all[0]), []);
        let parts = [
            Code::Broken,
            Code::Pinned,
            Code::Foreign,
            Code::Unfit,
            Code::PutOff,
        ];
        assert_eq!(codes(&all[1]), [&[Code::Busy][..], &parts].concat());
        let pages: Vec<_> = all[1].reasons.iter().map(|reason| reason.pages).collect();
        assert_eq!(pages, [50, 1, 2, 3, 4, 5]);
        let said: Vec<_> = all[1].reasons.iter().map(|reason| &reason.why).collect();
        assert!(said[1].starts_with("1 page was merged"), "{said:?}");
        assert!(said[2].starts_with("2 pages are in use"), "{said:?}");
        let silent = [
            Code::Leaves,
            Code::Stuck,
            Code::NoAnswer,
            Code::Limit,
            Code::NoOffer,
            Code::Alone,
            Code::Broken,
        ];
        assert_eq!(codes(&all[2]), silent);
    }

    #[test]
    fn pages_that_a_knob_made_private_are_not_called_written() {
        let words = |run, merge_again| {
            let knobs = KnobValues {
                run,
                merge_again,
                ..KnobValues::default()
            };
            let mut one = [GuestStatus {
                regions: 1,
                responsive: true,
                pages_skipped: 3,
                pages_broken: 3,
                ..GuestStatus::default()
            }];
            give(&mut one, &knobs);
            let why = one[0].reasons.iter().find(|r| r.code == WhyNotCode::Broken);
            why.unwrap().why.clone()
        };
        assert!(words(RunMode::Run, false).contains("merge_again is off"));
        assert!(words(RunMode::Unmerge, true).contains("run is 2"));
        assert!(words(RunMode::Run, true).contains("looked at anew"));
    }
}
