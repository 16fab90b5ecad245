//! The engine alone, among simulated guests: how its cost grows, and the places where many workers would meet.
//!
//! This machine has few processors. So nothing is concluded from how fast 64 threads are on them. Instead each lock is counted: how
//! often it is taken for a page, and for how long. A lock that keeps others off for `D` of the time `T` that a page takes is taken all the
//! time by `T / D` workers. More of them merge no more (the utilisation law). With fewer, a worker waits for the lock now and then:
//! that is the closed model of one server, worker by worker (mean value analysis).

use std::time::Duration;

use engine::scale::{self, Crowd, LockUse, Size};

use super::{Case, Means, Scale, Variant};
use crate::bench::error::BenchError;
use crate::bench::family::growth::{Growth, count};
use crate::bench::family::session::{Outcome, steps as float};
use crate::bench::measure::check_memory;

/// Pages of 4 TiB and of 38 TiB.
const FAR: [f64; 2] = [1e9, 1e10];
const CROWDS: [u16; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Runs with one worker; the least time of each lock counts.
const TRIALS: usize = 3;
/// Bytes of a simulated page, at most: what the engine keeps of it, and its guest's part of what guests have.
const PAGE_BYTES: u64 = 80;
/// Locks of a table.
const SHOWN: usize = 8;
/// What stands in the column of engines.
const PART: &[&str] = &["simulated"];

pub(super) const CASE: Case = Case {
    name: "scale",
    question: "The engine alone, among simulated guests: how do its time and its tables grow with pages, and how many workers does its busiest lock serve?",
    variants: &[
        Variant::parts("pages", PART, pages),
        Variant::parts("workers", PART, workers),
    ],
};

fn pages(_: &str, means: &Means<'_>) -> Result<Outcome, BenchError> {
    let sizes: &[(u64, u32)] = match means.scale {
        Scale::Short => &[(48, 2), (96, 2), (192, 2)],
        Scale::Normal => &[(50, 20), (150, 20), (500, 20)],
        Scale::Full => &[(100, 20), (100, 200), (1000, 20), (3000, 20), (10_000, 20)],
    };
    let (mut merge, mut quiet, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    let mut outcome = Outcome::default();
    let mut table = vec![
        [
            "guests",
            "pages",
            "merge s",
            "ns/page",
            "questions",
            "quiet ms",
            "ns/page",
            "questions",
            "B/page",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for &(guests, chunks) in sizes {
        means.go_on()?;
        let nodes = 16;
        let size = Size {
            guests,
            chunks,
            nodes,
        };
        let pages = size.pages();
        check_memory(1, (pages * PAGE_BYTES) >> 20)?;
        let cost = scale::grow(size).map_err(BenchError::system("cannot simulate"))?;
        let (merging, resting) = (cost.merge.as_secs_f64(), cost.quiet.as_secs_f64());
        merge.push((float(pages), merging));
        quiet.push((float(pages), resting));
        bytes.push((float(pages), float(cost.metadata_bytes)));
        let per_page = [1e9 * merging, 1e9 * resting, float(cost.metadata_bytes)];
        let [merge_ns, quiet_ns, page_bytes] = per_page.map(|all| all / float(pages));
        table.push(vec![
            guests.to_string(),
            pages.to_string(),
            format!("{merging:.1}"),
            format!("{merge_ns:.0}"),
            cost.merge_questions.to_string(),
            format!("{:.0}", 1e3 * resting),
            format!("{quiet_ns:.2}"),
            cost.quiet_questions.to_string(),
            format!("{page_bytes:.1}"),
        ]);
        // Those of the largest stay.
        for (name, value) in [
            ("merge_ns", merge_ns),
            ("quiet_ns", quiet_ns),
            ("page_bytes", page_bytes),
        ] {
            outcome.figures.insert(name.to_owned(), value);
        }
    }
    let all = [
        ("all pages merged once", "s", merge),
        ("a quiet round", "s", quiet),
        ("tables", "bytes", bytes),
    ];
    let growth = all.map(|(name, unit, points)| Growth::new(name, "pages", unit, points));
    outcome.growth = growth.map(|growth| growth.extrapolated(&FAR)).to_vec();
    outcome.tables = vec![table];
    Ok(outcome)
}

fn workers(_: &str, means: &Means<'_>) -> Result<Outcome, BenchError> {
    let (guests, chunks) = match means.scale {
        Scale::Short => (16, 4),
        Scale::Normal => (256, 4),
        Scale::Full => (256, 32),
    };
    let nodes = 1;
    let size = Size {
        guests,
        chunks,
        nodes,
    };
    check_memory(1, (size.pages() * PAGE_BYTES) >> 20)?;
    let crowd = |workers| {
        means.go_on()?;
        scale::crowd(size, workers).map_err(BenchError::system("cannot simulate"))
    };
    let mut alone = crowd(1)?;
    for _ in 1..TRIALS {
        alone = least(alone, crowd(1)?);
    }
    let mut crowds = vec![(1, alone.clone())];
    for workers in CROWDS.into_iter().skip(1) {
        crowds.push((workers, crowd(workers)?));
    }
    let pages = float(size.pages());
    let per_page = |time: Duration| 1e9 * time.as_secs_f64() / pages;
    let page_ns = per_page(alone.cpu);
    let first_ns = alone
        .locks
        .first()
        .map_or(0.0, |first| per_page(first.demand));
    let served = page_ns / first_ns.max(1e-9);
    let mut outcome = Outcome::default();
    outcome.figures.insert("merge_ns".to_owned(), page_ns);
    outcome.figures.insert("served_workers".to_owned(), served);
    let rate =
        |(workers, crowd): &(u16, Crowd)| (f64::from(*workers), pages / crowd.wall.as_secs_f64());
    let measured = crowds
        .iter()
        .filter(|(workers, _)| u64::from(*workers) <= means.cpus());
    let model = CROWDS.map(|workers| {
        (
            f64::from(workers),
            1e9 * throughput(page_ns, first_ns, workers),
        )
    });
    let growth = Growth::new(
        "pages merged",
        "workers",
        "pages/s",
        measured.map(rate).collect(),
    );
    let first = alone.locks.first();
    let first = first.map_or("no lock".to_owned(), |first| short(first.name));
    let by = format!("modelled, a processor a worker, {first} first");
    outcome.growth = vec![growth.modelled(&by, model.to_vec())];
    let most = crowds.last().map_or(&alone, |(_, crowd)| crowd);
    outcome.tables = vec![
        by_lock(&alone, most, &per_page, page_ns, pages),
        by_crowd(&crowds, &per_page, pages),
    ];
    Ok(outcome)
}

/// The least of two runs: what disturbs makes each time longer.
fn least(one: Crowd, other: Crowd) -> Crowd {
    let lock = |its: LockUse| {
        let same = other.locks.iter().find(|lock| lock.name == its.name);
        let demand = same.map_or(its.demand, |lock| lock.demand.min(its.demand));
        LockUse { demand, ..its }
    };
    let mut locks: Vec<_> = one.locks.into_iter().map(lock).collect();
    locks.sort_by_key(|class| std::cmp::Reverse(class.demand));
    Crowd {
        wall: one.wall.min(other.wall),
        cpu: one.cpu.min(other.cpu),
        locks,
    }
}

/// Pages in a nanosecond, with a page of `page_ns` of which `first_ns` are at the lock that serves the fewest.
fn throughput(page_ns: f64, first_ns: f64, workers: u16) -> f64 {
    let elsewhere = (page_ns - first_ns).max(0.0);
    let (mut queue, mut rate) = (0.0, 0.0);
    for worker in 1..=workers {
        let at_lock = first_ns * (1.0 + queue);
        rate = f64::from(worker) / (elsewhere + at_lock).max(1e-9);
        queue = rate * at_lock;
    }
    rate
}

/// The name of a type without the modules that it comes from.
fn short(name: &str) -> String {
    let parts = name.split_inclusive(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
    parts.filter_map(|part| part.rsplit("::").next()).collect()
}

fn by_lock(
    alone: &Crowd,
    most: &Crowd,
    per_page: &dyn Fn(Duration) -> f64,
    page_ns: f64,
    pages: f64,
) -> Vec<Vec<String>> {
    let head = [
        "lock",
        "taken per 1000 pages",
        "the busiest keeps off, ns/page",
        "serves workers",
        "busy with 64, of 1000",
    ];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    for lock in alone.locks.iter().take(SHOWN) {
        let demand = per_page(lock.demand);
        let crowded = most.locks.iter().find(|other| other.name == lock.name);
        let busy = crowded.map_or(0.0, |its| 1e3 * float(its.busy) / float(its.taken));
        table.push(vec![
            short(lock.name),
            format!("{:.1}", 1e3 * float(lock.taken) / pages),
            format!("{demand:.2}"),
            count((page_ns / demand.max(1e-9)).round()),
            format!("{busy:.2}"),
        ]);
    }
    table
}

fn by_crowd(
    crowds: &[(u16, Crowd)],
    per_page: &dyn Fn(Duration) -> f64,
    pages: f64,
) -> Vec<Vec<String>> {
    let head = [
        "workers",
        "CPU time, ns/page",
        "locks taken per 1000 pages",
        "of them busy, of 1000",
    ];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    for (workers, crowd) in crowds {
        let taken: u64 = crowd.locks.iter().map(|lock| lock.taken).sum();
        let busy: u64 = crowd.locks.iter().map(|lock| lock.busy).sum();
        table.push(vec![
            workers.to_string(),
            format!("{:.0}", per_page(crowd.cpu)),
            format!("{:.1}", 1e3 * float(taken) / pages),
            format!("{:.2}", 1e3 * float(busy) / float(taken)),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_types_are_short() {
        assert_eq!(short("QUEUE"), "QUEUE");
        assert_eq!(
            short("alloc::vec::Vec<core::ops::Range<u64>>"),
            "Vec<Range<u64>>"
        );
    }

    #[test]
    fn a_lock_bounds_what_workers_do_and_one_alone_never_waits() {
        assert!((throughput(100.0, 1.0, 1) - 0.01).abs() < 1e-12);
        let few = throughput(100.0, 1.0, 10);
        assert!(few > 0.099 && few < 0.1, "{few}");
        let many = throughput(100.0, 1.0, 1000);
        assert!(many > 0.99 && many <= 1.0, "{many}");
        assert!((throughput(100.0, 0.0, 64) - 0.64).abs() < 1e-9);
    }
}
