//! The reasons that the daemon gives why memory of a guest is not merged.

use sys::subject::Makeup;
use wire::{GuestStatus, KnobValues, PAGE_BYTES, RunMode, WhyNot, WhyNotCode};

use super::check::Check;
use crate::human;

const NOTHING: &str = "nothing of it is merged";
/// What there is to know of content that equals nothing.
const OWN: &str = "such content is its own, and pages of other domains do not count; `pageone analyze --all` tells what processes have in common";
/// No period shorter than this is advised: each costs guests faults and the engine time.
const SHORTEST_MS: u64 = 1000;

/// The checks that tell of a guest's, with the daemon's knobs.
pub(super) fn checks(guest: &GuestStatus, makeup: &Makeup, knobs: &KnobValues) -> Vec<Check> {
    use WhyNotCode as Code;
    let left = &makeup.left_alone;
    // The daemon counts these pages as written lately, or as put off. A check of their own tells of them.
    let mut told = left.unwritable() / PAGE_BYTES as u64;
    let mut is_told = |reason: &WhyNot| match reason.code {
        Code::Busy | Code::PutOff if reason.pages > 0 && reason.pages <= told => {
            told -= reason.pages;
            true
        }
        // That of the daemon's knob tells it.
        Code::Run => true,
        _ => false,
    };
    let most = sys::process::max_map_count().unwrap_or(u64::MAX);
    let is_cut = makeup.mappings.saturating_mul(2) >= most;
    let kept = guest.reasons.iter().filter(|reason| !is_told(reason));
    kept.map(|reason| match reason.code {
        Code::NoOffer if left.sum() > 0 => {
            let size = human::size(left.sum());
            let what = format!("all that it offers, {size}, is of kinds that PageONE leaves alone");
            let fix = "have it offer memory that may be read and written, not executed";
            Check::fail("no-offer", what, NOTHING).fix(fix)
        }
        _ => check(reason, guest, knobs, is_cut),
    })
    .collect()
}

/// The check that tells of one. `is_cut`: the guest has half of the mappings that it may have.
fn check(reason: &WhyNot, guest: &GuestStatus, knobs: &KnobValues, is_cut: bool) -> Check {
    use WhyNotCode as Code;
    let pid = guest.pid;
    let nothing = match guest.pages_stored + guest.pages_sharing + guest.zero_pages {
        0 => NOTHING,
        _ => "nothing new of it is merged",
    };
    let what = reason.why.clone();
    let part = "so much less is merged";
    let fail = |check, fix: String| Check::fail(check, reason.why.clone(), nothing).fix(fix);
    match reason.code {
        Code::Leaves => fail(
            "leaves",
            "pageone status  # it comes back in its new domain by itself".to_owned(),
        ),
        Code::Stuck => fail(
            "stuck",
            format!("ls -l /proc/{pid}/fd  # a file system that hangs, or pages without a pager"),
        ),
        Code::New => Check::ok("new", what),
        Code::Observing => Check::ok("observing", what),
        Code::NoAnswer => fail(
            "no-answer",
            format!("ps -o pid,stat,wchan {pid}  # is it stopped?"),
        ),
        Code::NoOffer => fail("no-offer", offers_all(guest)),
        Code::Limit => {
            let is_the_store = what.contains("store_limit");
            Check::warn("limit", what, part).fix(match is_the_store {
                true => "pageone set store_limit=SIZE  # or none",
                false => "sudoedit /etc/pageone/pageone.toml  # [limits], and restart the daemon",
            })
        }
        Code::Alone => {
            Check::warn("alone", what, part).fix("pageone status  # which domain have the others?")
        }
        Code::Busy => {
            let why = "pages are merged when they rest for two periods";
            Check {
                fix: shorter_period(knobs.merge_period_ms),
                ..Check::warn("busy", what, why)
            }
        }
        Code::Unique => Check::ok("unique", format!("{what}: {OWN}")),
        Code::Broken => Check {
            fix: merged_again(guest, knobs),
            ..Check::warn("broken", what, part)
        },
        Code::Pinned => Check::warn("pinned", what, part).fix(format!("ls -l /proc/{pid}/fd")),
        Code::Foreign => {
            Check::warn("foreign", what, part).fix(format!("grep pageone /proc/{pid}/maps"))
        }
        Code::Unfit => Check::warn("unfit", what, part)
            .fix(format!("grep VmFlags /proc/{pid}/smaps | sort | uniq -c")),
        Code::PutOff => Check::warn("put-off", what, part).fix(match is_cut {
            true => "sudo sysctl vm.max_map_count=1048576",
            false => "journalctl -u pageone  # is there room in the stores, and memory for them?",
        }),
        Code::Run | Code::Other => Check::warn("other", what, part).fix("pageone status"),
    }
}

/// The command by which a guest offers all its memory.
pub(super) fn offers_all(guest: &GuestStatus) -> String {
    offers(guest, "--any")
}

/// The same, with what is advised to be of huge pages.
pub(super) fn offers_huge(guest: &GuestStatus) -> String {
    let rule = "# in a rule of [[attach]]: any = true, any_huge = true";
    match guest.attached {
        true => format!("{}  {rule}", offers(guest, "--any --any-huge")),
        false => offers(guest, "--any --any-huge"),
    }
}

fn offers(guest: &GuestStatus, flags: &str) -> String {
    let pid = guest.pid;
    match guest.attached {
        true => format!("pageone detach {pid} && pageone attach {flags} {pid}"),
        false => format!("pageone run {flags} -- CMD"),
    }
}

/// Whether no look has come to its memory yet, or none comes: what it offers is not known.
pub(super) fn is_unseen(guest: &GuestStatus) -> bool {
    let has = |code| guest.reasons.iter().any(|reason| reason.code == code);
    has(WhyNotCode::Run) || has(WhyNotCode::New) || has(WhyNotCode::Observing)
}

/// How pages come to be merged again that were written; none where they do by themselves.
fn merged_again(guest: &GuestStatus, knobs: &KnobValues) -> Option<String> {
    match knobs.run {
        RunMode::Unmerge => Some("pageone set run=1".to_owned()),
        _ if !knobs.merge_again => Some("pageone set merge_again=true".to_owned()),
        _ => {
            let descriptors =
                || format!("ls -l /proc/{}/fd  # what may hold pages pinned", guest.pid);
            guest.pins.is_some().then(descriptors)
        }
    }
}

/// Half the period, in which pages count as resting sooner. None where that would be too short.
fn shorter_period(period_ms: u64) -> Option<String> {
    let half = period_ms / 2;
    let text = match half % 1000 {
        0 => format!("{}s", half / 1000),
        _ => format!("{half}ms"),
    };
    (half >= SHORTEST_MS).then(|| format!("pageone set merge_period={text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_alone_is_neither_busy_nor_put_off() {
        let reason = |code, pages| WhyNot {
            code,
            pages,
            why: "x".to_owned(),
        };
        let guest = GuestStatus {
            reasons: vec![reason(WhyNotCode::Busy, 6), reason(WhyNotCode::PutOff, 4)],
            ..GuestStatus::default()
        };
        let told = |pages: u64| {
            let mut makeup = Makeup::default();
            makeup.left_alone.read_only = pages * PAGE_BYTES as u64;
            let checks = checks(&guest, &makeup, &KnobValues::default());
            checks.iter().map(|check| check.check).collect::<Vec<_>>()
        };
        assert_eq!(told(10), Vec::<&str>::new());
        assert_eq!(told(9), ["put-off"]);
        assert_eq!(told(0), ["busy", "put-off"]);
    }

    #[test]
    fn more_mappings_are_advised_where_these_are_the_limit() {
        let put_off = WhyNot {
            code: WhyNotCode::PutOff,
            pages: 1,
            why: "x".to_owned(),
        };
        let guest = GuestStatus::default();
        let fix = |is_cut| check(&put_off, &guest, &KnobValues::default(), is_cut).fix;
        let advises = |is_cut| fix(is_cut).is_some_and(|fix| fix.contains("max_map_count"));
        assert_eq!((advises(true), advises(false)), (true, false));
    }

    #[test]
    fn each_cause_of_written_pages_has_its_own_remedy() {
        let broken = WhyNot {
            code: WhyNotCode::Broken,
            pages: 1,
            why: "x".to_owned(),
        };
        let fix = |pins: Option<&str>, run, merge_again| {
            let guest = GuestStatus {
                pid: 7,
                pins: pins.map(str::to_owned),
                ..GuestStatus::default()
            };
            let knobs = KnobValues {
                run,
                merge_again,
                ..KnobValues::default()
            };
            check(&broken, &guest, &knobs, false).fix
        };
        let told = |pins, run, again, word: &str| {
            fix(pins, run, again).is_some_and(|fix: String| fix.contains(word))
        };
        assert!(told(Some("VmPin"), RunMode::Run, true, "/proc/7/fd"));
        assert!(told(None, RunMode::Run, false, "merge_again=true"));
        assert!(told(Some("VmPin"), RunMode::Unmerge, true, "run=1"));
        assert_eq!(fix(None, RunMode::Run, true), None);
    }

    #[test]
    fn what_a_silent_guest_shares_stays_merged() {
        let silent = WhyNot {
            code: WhyNotCode::NoAnswer,
            pages: 0,
            why: "x".to_owned(),
        };
        let why = |pages_sharing| {
            let guest = GuestStatus {
                pages_sharing,
                ..GuestStatus::default()
            };
            check(&silent, &guest, &KnobValues::default(), false).why
        };
        assert_eq!(why(0), Some(NOTHING));
        assert_eq!(why(7), Some("nothing new of it is merged"));
    }

    #[test]
    fn a_guest_that_has_just_come_is_well() {
        let guest = |code, regions| GuestStatus {
            regions,
            reasons: vec![WhyNot {
                code,
                pages: 0,
                why: "x".to_owned(),
            }],
            ..GuestStatus::default()
        };
        let new = guest(WhyNotCode::New, 0);
        let told = checks(&new, &Makeup::default(), &KnobValues::default());
        assert_eq!(told, [Check::ok("new", "x")]);
        assert!(is_unseen(&new));
        // The check of the daemon tells of its knob.
        let halted = guest(WhyNotCode::Run, 0);
        assert_eq!(
            checks(&halted, &Makeup::default(), &KnobValues::default()),
            []
        );
        assert!(is_unseen(&halted));
        assert!(is_unseen(&guest(WhyNotCode::Run, 1)));
        assert!(!is_unseen(&guest(WhyNotCode::NoOffer, 0)));
        let observed = guest(WhyNotCode::Observing, 1);
        let told = checks(&observed, &Makeup::default(), &KnobValues::default());
        assert_eq!(told, [Check::ok("observing", "x")]);
        assert!(is_unseen(&observed));
    }

    #[test]
    fn content_that_is_a_guests_own_is_no_failure() {
        let unique = WhyNot {
            code: WhyNotCode::Unique,
            pages: 7,
            why: "x".to_owned(),
        };
        let told = check(
            &unique,
            &GuestStatus::default(),
            &KnobValues::default(),
            false,
        );
        assert_eq!(told, Check::ok("unique", format!("x: {OWN}")));
    }

    #[test]
    fn a_guest_offers_all_by_the_way_it_came() {
        let fix = |attached| {
            let guest = GuestStatus {
                pid: 7,
                attached,
                ..GuestStatus::default()
            };
            offers_all(&guest)
        };
        assert_eq!(fix(true), "pageone detach 7 && pageone attach --any 7");
        assert_eq!(fix(false), "pageone run --any -- CMD");
    }

    #[test]
    fn a_period_is_halved_down_to_a_second() {
        let fixes = [20_000, 2500, 2000, 1999, 1000, 10].map(shorter_period);
        let fixes = fixes
            .each_ref()
            .map(|fix| fix.as_deref().unwrap_or_default());
        let set = "pageone set merge_period";
        let periods = ["10s", "1250ms", "1s"].map(|half| format!("{set}={half}"));
        let [long, odd, least] = periods.each_ref().map(String::as_str);
        assert_eq!(fixes, [long, odd, least, "", "", ""]);
        for fix in &fixes[..3] {
            let pair = fix.strip_prefix("pageone set ").unwrap();
            assert!(crate::knobs::pair(pair).is_ok(), "{pair}");
        }
    }
}
