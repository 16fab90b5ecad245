//! The obstacles to sharing, each with a command that mends it.

use serde::Serialize;

use super::course::{USUAL_COST, scan_seconds};
use super::facts::{Counters, Knobs, PAGE};
use crate::human::{size, time};

/// A finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Reason {
    pub(super) reason: &'static str,
    pub(super) what: String,
    /// What to do, where something can be done.
    pub(super) fix: Option<String>,
}

/// Two scans that take longer are slow: a program's memory is not shared in its first minutes.
const SLOW_SECONDS: f64 = 600.0;
/// Less than this is nothing that has to be shared.
const FEW_PAGES: u64 = 256;

fn reason(reason: &'static str, what: String, fix: impl Into<Option<&'static str>>) -> Reason {
    let fix = fix.into().map(str::to_owned);
    Reason { reason, what, fix }
}

/// What is found, what weighs most first. `offered` is in pages.
pub(super) fn reasons(knobs: &Knobs, now: &Counters, offered: u64) -> Vec<Reason> {
    let mut all = Vec::new();
    all.extend(stopped(knobs));
    if offered == 0 {
        all.push(reason(
            "nothing-offered",
            "no process has memory that KSM may share: programs have to offer it by \
             madvise(MADV_MERGEABLE), as QEMU does with `-machine mem-merge=on`"
                .to_owned(),
            "pageone run --backend ksm -- COMMAND (all its memory; units: `MemoryKSM=yes`)",
        ));
        return all;
    }
    if knobs.run == 1 {
        all.extend(slow(knobs, now, offered));
    }
    all.extend(content(knobs, now, offered));
    all
}

fn stopped(knobs: &Knobs) -> Option<Reason> {
    match knobs.run {
        0 => Some(reason(
            "stopped",
            "KSM is stopped (run=0): what is shared stays, nothing new is; processes that end are counted until it runs again"
                .to_owned(),
            "echo 1 > /sys/kernel/mm/ksm/run",
        )),
        2 => Some(reason(
            "unmerged",
            "KSM is stopped, and has given all processes their own copies (run=2)".to_owned(),
            "echo 1 > /sys/kernel/mm/ksm/run",
        )),
        _ => None,
    }
}

/// The time of two scans, and the advisor's part in it.
fn slow(knobs: &Knobs, now: &Counters, offered: u64) -> Option<Reason> {
    let two = 2.0 * scan_time(knobs, now, offered)?;
    let (pages, sleep) = (knobs.pages_to_scan, knobs.sleep_millisecs);
    let pace = format!("{pages} pages, then a sleep of {sleep} ms");
    let memory = size(offered * PAGE);
    let times = time(two);
    match &knobs.advisor {
        Some(advisor) if pages >= advisor.max_pages_to_scan && two > SLOW_SECONDS => Some(reason(
            "advisor-at-limit",
            format!(
                "KSM's advisor is at advisor_max_pages_to_scan ({pages}): two scans of {memory} take {times}"
            ),
            "pageone ksm tune --time-to-saving 60s",
        )),
        _ if two > SLOW_SECONDS => Some(reason(
            "slow-scan",
            format!(
                "memory is shared after two whole scans, which take {times} for {memory} ({pace})"
            ),
            "pageone ksm tune --time-to-saving 60s",
        )),
        _ => None,
    }
}

/// The seconds of a whole scan, as the knobs are.
pub(super) fn scan_time(knobs: &Knobs, now: &Counters, offered: u64) -> Option<f64> {
    let cost = now.seconds_a_page().unwrap_or(USUAL_COST);
    scan_seconds(offered, knobs.pages_to_scan, knobs.sleep_millisecs, cost)
}

/// What the pages themselves say.
fn content(knobs: &Knobs, now: &Counters, offered: u64) -> Vec<Reason> {
    let mut all = Vec::new();
    let known = now.pages_shared + now.pages_sharing + now.pages_unshared + now.pages_volatile;
    if knobs.run == 1 && offered > FEW_PAGES && known < offered / 2 {
        all.push(reason(
            "not-scanned-yet",
            format!(
                "KSM has looked at {} of {} since they were offered",
                size(known * PAGE),
                size(offered * PAGE)
            ),
            None,
        ));
    }
    if known > FEW_PAGES && now.pages_volatile > known / 2 {
        all.push(reason(
            "changing",
            format!(
                "{} changed between two scans: KSM leaves them alone; a faster scan finds more of them unchanged",
                size(now.pages_volatile * PAGE)
            ),
            "pageone ksm tune --time-to-saving 20s",
        ));
    }
    if known > FEW_PAGES && now.pages_unshared > known / 2 {
        all.push(reason(
            "unique",
            format!(
                "{} are unlike all others: there is nothing to share them with",
                size(now.pages_unshared * PAGE)
            ),
            "pageone analyze --all (tells what could be saved at all)",
        ));
    }
    if now.net_saved_bytes < 0 {
        all.push(reason(
            "loss",
            format!(
                "KSM's tables take {} more than it saves",
                size(now.net_saved_bytes.unsigned_abs())
            ),
            "echo 2 > /sys/kernel/mm/ksm/run (gives the tables back)",
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::facts::Advisor;
    use super::*;
    use std::time::Instant;

    fn knobs() -> Knobs {
        Knobs {
            run: 1,
            pages_to_scan: 100,
            sleep_millisecs: 20,
            ..Knobs::default()
        }
    }

    fn counters(shared: u64, unshared: u64, volatile: u64) -> Counters {
        Counters {
            at: Instant::now(),
            pages_shared: shared,
            pages_sharing: shared,
            pages_unshared: unshared,
            pages_volatile: volatile,
            pages_skipped: 0,
            zero_pages: 0,
            pages_scanned: 1_000_000,
            full_scans: 3,
            saved_bytes: shared * PAGE,
            net_saved_bytes: (shared * PAGE).cast_signed(),
            cpu_seconds: 2.0,
        }
    }

    fn found(knobs: &Knobs, now: &Counters, offered: u64) -> Vec<&'static str> {
        reasons(knobs, now, offered)
            .iter()
            .map(|reason| reason.reason)
            .collect()
    }

    #[test]
    fn each_reason_is_found_and_a_good_state_has_none() {
        let good = counters(5000, 100, 100);
        assert_eq!(found(&knobs(), &good, 10_000), [""; 0]);
        for (run, name) in [(0, "stopped"), (2, "unmerged")] {
            let knobs = Knobs { run, ..knobs() };
            assert_eq!(found(&knobs, &good, 10_000), [name]);
            assert_eq!(found(&knobs, &good, 0), [name, "nothing-offered"]);
        }
        // 40 GiB by 100 pages and 20 ms.
        let whole = counters(5 << 20, 0, 0);
        assert_eq!(found(&knobs(), &whole, 10 << 20), ["slow-scan"]);
        let advisor = Some(Advisor {
            max_pages_to_scan: 100,
            ..Advisor::default()
        });
        let advised = Knobs { advisor, ..knobs() };
        assert_eq!(found(&advised, &whole, 10 << 20), ["advisor-at-limit"]);
        assert_eq!(
            found(&knobs(), &counters(0, 1000, 0), 10_000),
            ["not-scanned-yet", "unique"]
        );
        assert_eq!(found(&knobs(), &counters(0, 0, 9000), 10_000), ["changing"]);
        let loss = Counters {
            net_saved_bytes: -4096,
            ..good
        };
        assert_eq!(found(&knobs(), &loss, 10_000), ["loss"]);
    }

    #[test]
    fn the_time_of_a_scan_has_sleeps_and_work() {
        let time = scan_time(&knobs(), &counters(0, 0, 0), 1 << 20).unwrap();
        // 10486 sleeps of 20 ms, and a million pages of 2 µs.
        assert!((211.0..213.0).contains(&time), "{time}");
    }
}
