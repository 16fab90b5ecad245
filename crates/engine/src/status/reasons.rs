//! The reasons for which memory of guests is not merged, as codes and in words.

use std::collections::BTreeMap;
use std::time::Duration;

use wire::{GuestStatus, KnobValues, RunMode, WhyNot, WhyNotCode};

/// What is known of a guest so early that no advice can be given.
#[derive(Clone, Copy, Debug)]
pub(super) enum Early {
    /// Nothing is.
    New,
    /// It offers memory, and none can be merged yet.
    Observed {
        /// Until some can, about.
        left: Duration,
        /// Whether its agent answers, or may be late.
        answers: bool,
    },
}

/// Gives each guest its reasons, and no advice to the `early` ones, by process.
pub(super) fn give(guests: &mut [GuestStatus], early: &BTreeMap<u32, Early>, knobs: &KnobValues) {
    let mut members = BTreeMap::<String, usize>::new();
    for guest in guests.iter() {
        *members.entry(guest.domain.raw().to_owned()).or_default() += 1;
    }
    for guest in guests {
        let alone = members.get(guest.domain.raw()) == Some(&1);
        let early = early.get(&guest.pid).copied();
        guest.reasons = reasons(guest, (alone, early), knobs);
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

/// Why nothing new is looked at; none where it is.
fn halted(knobs: &KnobValues) -> Option<&'static str> {
    match knobs.run {
        RunMode::Run => None,
        RunMode::Stop => Some("run is 0: nothing new of it is looked at, or merged"),
        RunMode::Unmerge => Some("run is 2: nothing of it is merged"),
    }
}

fn reasons(
    guest: &GuestStatus,
    (alone, early): (bool, Option<Early>),
    knobs: &KnobValues,
) -> Vec<WhyNot> {
    // While nothing is looked at, whatever else is known may be old, and no remedy of it works.
    if let (RunMode::Stop, Some(why)) = (knobs.run, halted(knobs)) {
        return vec![because(WhyNotCode::Run, 0, why.to_owned())];
    }
    let whole = of_the_guest(guest, (alone, early), knobs).into_iter();
    let of_pages = of_pages(guest, knobs).into_iter();
    let is_early = |code| matches!(code, WhyNotCode::Busy | WhyNotCode::Unique);
    let of_pages = of_pages.filter(|reason| early.is_none() || !is_early(reason.code));
    whole.chain(of_pages).collect()
}

/// Why nothing of it is merged, or nothing more.
fn of_the_guest(
    guest: &GuestStatus,
    (alone, early): (bool, Option<Early>),
    knobs: &KnobValues,
) -> Vec<WhyNot> {
    use WhyNotCode as Code;
    let halted = halted(knobs);
    let new = matches!(early, Some(Early::New));
    let is_silent = match early {
        Some(Early::New) => false,
        Some(Early::Observed { answers, .. }) => !answers,
        None => !guest.responsive,
    };
    let observed = early.filter(|_| halted.is_none() && !is_silent);
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
            Code::New,
            is(
                new && halted.is_none(),
                "it has just come: its first look is due",
            ),
        ),
        (Code::Observing, observed.and_then(observing)),
        (Code::Run, halted.map(str::to_owned)),
        (Code::NoAnswer, is(is_silent, "its agent does not answer")),
        (Code::Limit, guest.at_limit.clone()),
        (
            Code::NoOffer,
            is(
                guest.regions == 0 && early.is_none() && halted.is_none(),
                "it had offered no memory at the last look (`--any` of `pageone run` and `attach` offers all there is)",
            ),
        ),
        (
            Code::Alone,
            is(
                alone && early.is_none(),
                "no other guest is in its domain: only its own pages can be equal",
            ),
        ),
    ];
    let all = all.into_iter();
    all.filter_map(|(code, why)| Some(because(code, 0, why?)))
        .collect()
}

/// How long it is observed, as the head of `status` has it: whole seconds, and never none.
fn observing(early: Early) -> Option<String> {
    let Early::Observed { left, .. } = early else {
        return None;
    };
    let seconds = left.as_millis().div_ceil(1000).max(1);
    Some(format!("observing: first merges in about {seconds} s"))
}

/// Its pages that are in motion, where these are half of all or more.
fn busy(guest: &GuestStatus) -> u64 {
    match guest.pages_volatile >= guest.pages.div_ceil(2) {
        true => guest.pages_volatile,
        false => 0,
    }
}

/// Why some of its pages are not.
fn of_pages(guest: &GuestStatus, knobs: &KnobValues) -> Vec<WhyNot> {
    use WhyNotCode as Code;
    let again = private_again(knobs);
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
    // A page that no look comes to seems to be in motion for ever.
    let busy = match knobs.run {
        RunMode::Run => busy(guest),
        _ => 0,
    };
    // Fewer are no reason: each program has some.
    let unique = match knobs.run {
        RunMode::Run if guest.pages_unshared >= guest.pages.div_ceil(2) => guest.pages_unshared,
        _ => 0,
    };
    // With the words for one page, and for many.
    let all = [
        (
            (Code::Busy, busy, ["was", "were"]),
            "written lately, or not yet observed for two periods",
        ),
        (
            (Code::Unique, unique, ["equals", "equal"]),
            "no other page of its domain",
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
        give(&mut all, &BTreeMap::new(), &KnobValues::default());
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
            give(&mut one, &BTreeMap::new(), &knobs);
            let why = one[0].reasons.iter().find(|r| r.code == WhyNotCode::Broken);
            why.unwrap().why.clone()
        };
        assert!(words(RunMode::Run, false).contains("merge_again is off"));
        assert!(words(RunMode::Unmerge, true).contains("run is 2"));
        assert!(words(RunMode::Run, true).contains("looked at anew"));
    }

    #[test]
    fn of_a_guest_that_no_look_has_come_to_nothing_else_is_told() {
        use WhyNotCode as Code;
        let codes = |run, new: &[u32], guest: GuestStatus| {
            let knobs = KnobValues {
                run,
                ..KnobValues::default()
            };
            let mut both = [guest.clone(), guest];
            let new = new.iter().map(|&pid| (pid, Early::New));
            give(&mut both, &new.collect(), &knobs);
            let reasons = both[0].reasons.iter();
            reasons.map(|reason| reason.code).collect::<Vec<_>>()
        };
        let new = GuestStatus {
            pid: 7,
            ..GuestStatus::default()
        };
        let of_new = |run| codes(run, &[7], new.clone());
        assert_eq!(of_new(RunMode::Run), [Code::New]);
        assert_eq!(of_new(RunMode::Stop), [Code::Run]);
        let known = codes(RunMode::Run, &[8], new.clone());
        assert_eq!(known, [Code::NoAnswer, Code::NoOffer]);
        let busy = GuestStatus {
            responsive: true,
            regions: 1,
            pages: 10,
            pages_volatile: 10,
            ..new.clone()
        };
        assert_eq!(codes(RunMode::Run, &[], busy.clone()), [Code::Busy]);
        assert_eq!(codes(RunMode::Unmerge, &[], busy), [Code::Run]);
        let unmerged = codes(RunMode::Unmerge, &[], new.clone());
        assert_eq!(
            unmerged,
            [Code::Run, Code::NoAnswer],
            "no offer is asked for"
        );
    }

    #[test]
    fn of_a_guest_that_is_observed_no_advice_is_given() {
        use WhyNotCode as Code;
        let reasons = |ms, answers, run| {
            let guest = GuestStatus {
                pid: 7,
                regions: 1,
                pages: 10,
                pages_volatile: 10,
                ..GuestStatus::default()
            };
            let left = Duration::from_millis(ms);
            let early = BTreeMap::from([(7, Early::Observed { left, answers })]);
            let mut one = [guest];
            let knobs = KnobValues {
                run,
                ..KnobValues::default()
            };
            give(&mut one, &early, &knobs);
            let [guest] = one;
            let reasons = guest.reasons.into_iter();
            reasons.map(|one| (one.code, one.why)).collect::<Vec<_>>()
        };
        let observing = |why: &str| vec![(Code::Observing, why.to_owned())];
        let told = reasons(6001, true, RunMode::Run);
        assert_eq!(told, observing("observing: first merges in about 7 s"));
        let told = reasons(0, true, RunMode::Run);
        assert_eq!(told, observing("observing: first merges in about 1 s"));
        let code = |answers, run| reasons(5, answers, run)[0].0;
        assert_eq!(code(false, RunMode::Run), Code::NoAnswer);
        assert_eq!(code(true, RunMode::Unmerge), Code::Run);
        assert_eq!(code(true, RunMode::Stop), Code::Run);
    }

    #[test]
    fn pages_that_equal_nothing_are_told_of_when_they_are_half_of_all() {
        let why = |pages_unshared, run| {
            let mut one = [GuestStatus {
                responsive: true,
                regions: 1,
                pages: 11,
                pages_unshared,
                ..GuestStatus::default()
            }];
            let knobs = KnobValues {
                run,
                ..KnobValues::default()
            };
            give(&mut one, &BTreeMap::new(), &knobs);
            let mut reasons = one[0].reasons.iter();
            let unique = reasons.find(|reason| reason.code == WhyNotCode::Unique);
            unique.map(|reason| reason.why.clone())
        };
        let told = why(6, RunMode::Run);
        assert_eq!(
            told.as_deref(),
            Some("6 pages equal no other page of its domain")
        );
        assert_eq!(
            [why(5, RunMode::Run), why(6, RunMode::Unmerge)],
            [None, None]
        );
    }

    #[test]
    fn with_run_0_nothing_else_is_told() {
        let knobs = KnobValues {
            run: RunMode::Stop,
            ..KnobValues::default()
        };
        let ill = GuestStatus {
            pages: 10,
            pages_volatile: 10,
            pages_skipped: 3,
            ..GuestStatus::default()
        };
        let mut one = [ill];
        give(&mut one, &BTreeMap::new(), &knobs);
        let codes: Vec<_> = one[0].reasons.iter().map(|reason| reason.code).collect();
        assert_eq!(
            codes,
            [WhyNotCode::Run],
            "neither an offer, nor an answer, nor others"
        );
    }
}
