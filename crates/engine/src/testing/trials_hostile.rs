//! Guests that cost all they can: memory that does not answer, floods of tables, storms of words.

use std::time::{Duration, Instant};

use crate::page::CHUNK;
use crate::run::workers::Workers;
use crate::sync::lock;
use crate::testing::fake::Lab;
use crate::testing::trials::{fill, twins};

/// The threads whose reads have ended come back as soon as they get a processor, and none is counted any more.
fn all_come_back(lab: &Lab) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while lab.core.users.stuck_threads() > 0 {
        assert!(Instant::now() < deadline, "threads that do not come back");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A read that takes long, by a fork of a great process say, costs an honest guest the time and nothing else.
#[test]
fn a_store_that_is_slow_to_punch_holds_nobody_up() {
    let lab = Lab::new();
    let [a, b] = twins(&lab);
    lab.rounds(3);
    let frames = || {
        let status = lab.status();
        let held = lab.world(|world| world.frames("d"));
        assert_eq!(status.store_bytes, held as u64 * 4096, "they count");
        held
    };
    assert_eq!(frames(), 16);
    lab.world(|world| {
        world.punches_take = Duration::from_millis(6);
        for page in (100..116).step_by(2) {
            world.discard(a, page);
            world.discard(b, page);
        }
    });
    let mut seen = Vec::new();
    while seen.last() != Some(&8) {
        lab.round();
        seen.push(frames());
        assert!(seen.len() < 20, "{seen:?}");
    }
    let steps = seen.windows(2).map(|pair| pair[0] - pair[1]);
    assert!(steps.max() < Some(4), "a run or two a round: {seen:?}");
    // What still waits goes at once when it is fast again.
    lab.world(|world| (100..116).for_each(|page| world.discard(a, page)));
    lab.world(|world| (100..116).for_each(|page| world.discard(b, page)));
    lab.rounds(3);
    assert!(frames() > 0);
    lab.world(|world| world.punches_take = Duration::ZERO);
    lab.rounds(3);
    assert_eq!(frames(), 0);
}

#[test]
fn a_guest_whose_memory_is_slow_goes_on_afterwards() {
    let lab = Lab::with(crate::options::Options {
        knobs: wire::KnobValues {
            threads: 1,
            ..wire::KnobValues::default()
        },
        ..crate::options::Options::default()
    });
    let [_, slow] = twins(&lab);
    let hang = std::sync::Arc::new((std::sync::Mutex::new(true), std::sync::Condvar::new()));
    lab.world(|world| world.processes[slow].hangs = Some(hang.clone()));
    let crew = Workers::new(std::sync::Arc::clone(&lab.core), Duration::from_secs(3600));
    while lab.core.users.stuck_threads() == 0 {
        lab.round_by(&crew);
    }
    lab.round_by(&crew);
    assert_eq!(lab.status().pages_shared, 0);
    lab.world(|world| world.processes[slow].hangs = None);
    *lock(&hang.0) = false;
    hang.1.notify_all();
    while lab.status().pages_shared == 0 {
        lab.round_by(&crew);
    }
    all_come_back(&lab);
    assert_eq!(lab.status().guests.len(), 2);
    crew.stop();
}

/// The threads of a user who loses too many are not lent to his guests any more; others have theirs.
#[test]
fn threads_that_a_user_can_keep_are_few() {
    let lab = Lab::with(crate::options::Options {
        knobs: wire::KnobValues {
            threads: 1,
            ..wire::KnobValues::default()
        },
        ..crate::options::Options::default()
    });
    twins(&lab);
    let hang = std::sync::Arc::new((std::sync::Mutex::new(true), std::sync::Condvar::new()));
    let hostile: Vec<_> = (0..20).map(|_| lab.guest_of("h", 1, 666)).collect();
    for &guest in &hostile {
        fill(&lab, guest, 100..116, |page| page);
        lab.world(|world| world.processes[guest].hangs = Some(hang.clone()));
    }
    let crew = Workers::new(std::sync::Arc::clone(&lab.core), Duration::from_secs(3600));
    (0..12).for_each(|_| lab.round_by(&crew));
    let status = lab.status();
    assert_eq!((status.pages_shared, status.pages_sharing), (16, 16));
    let lost = lab.core.users.stuck_threads();
    // One a turn more may be on its way when the limit is reached.
    assert!((4..=7).contains(&lost), "{lost} threads");
    lab.world(|world| {
        for &guest in &hostile {
            world.kill(guest);
        }
    });
    *lock(&hang.0) = false;
    hang.1.notify_all();
    while lab.status().guests.len() > 2 {
        std::thread::sleep(Duration::from_millis(5));
        lab.round_by(&crew);
    }
    all_come_back(&lab);
    crew.stop();
}

/// A guest at a limit keeps what it has, and says at which.
#[test]
fn tables_end_at_a_limit() {
    let limits = crate::options::Limits {
        table_mib_per_user: 1,
        ..crate::options::Limits::default()
    };
    let lab = Lab::with(crate::options::Options {
        knobs: wire::KnobValues {
            threads: 1,
            ..wire::KnobValues::default()
        },
        patience: Duration::ZERO,
        limits,
        ..crate::options::Options::default()
    });
    twins(&lab);
    let hostile = [(); 2].map(|()| lab.guest_of("h", 600, 666));
    for guest in hostile {
        fill(&lab, guest, (0..600).map(|chunk| chunk * 512), |page| {
            page + 1
        });
    }
    lab.rounds(5);
    let status = lab.status();
    let of = |pid: usize| {
        let its = status.guests.iter().find(|g| g.pid as usize == pid);
        its.unwrap()
    };
    assert!(hostile.iter().any(|&guest| of(guest).pages > 100));
    let reason = hostile.iter().find_map(|&guest| of(guest).at_limit.clone());
    let reason = reason.expect("a guest is at its limit");
    assert!(reason.contains("table_mib_per_user = 1"), "{reason}");
    let tables = lab.core.users.get(666).table_bytes();
    assert!((1 << 19..5 << 18).contains(&tables), "{tables} bytes");
    assert_eq!((of(0).at_limit.clone(), of(0).pages_sharing), (None, 16));
    lab.world(|world| hostile.iter().for_each(|&guest| world.kill(guest)));
    lab.rounds(2);
    assert_eq!(lab.core.users.get(666).table_bytes(), 0);
}

/// Saying "everything" again and again costs no more than it takes to say it.
#[test]
fn a_storm_of_everything_costs_what_it_takes_to_send() {
    use crate::scan::offers::News;
    use wire::{Change, PageBits};
    let lab = Lab::new();
    lab.guest("d", 1);
    let guest = std::sync::Arc::clone(&lock(&lab.core.guests)[0]);
    let mut news = News::default();
    let mut offers = lock(&guest.offers);
    let base = crate::testing::fake::BASE;
    let mut one = PageBits::EMPTY;
    one.insert(1);
    let mut change = |change: &Change| offers.change(&guest, change, &mut news);
    for chunk in 0..20_000 {
        let stored = PageBits::EMPTY;
        let chunk = base + chunk * CHUNK;
        let offered = one;
        change(&Change::Chunk {
            chunk,
            offered,
            stored,
        });
    }
    let begin = std::time::Instant::now();
    let everything = Change::Whole {
        chunk: base,
        chunks: 20_000,
    };
    (0..4 * 119).for_each(|_| change(&everything));
    // 5.8 s when each went through all chunks.
    assert!(
        begin.elapsed() < Duration::from_millis(500),
        "{:?}",
        begin.elapsed()
    );
    let whole = offers
        .chunks
        .values()
        .all(|chunk| chunk.lock().offered == PageBits::FULL);
    assert!(whole && offers.chunks.len() == 20_000);
}

/// A hole makes two regions of one. At the limit the second goes, but not while it has merged pages: their slots would go too.
#[test]
fn a_hole_at_the_limit_of_regions_costs_no_page() {
    let limits = crate::options::Limits {
        regions_per_process: 1,
        ..crate::options::Limits::default()
    };
    let lab = Lab::with(crate::options::Options {
        knobs: wire::KnobValues {
            threads: 1,
            ..wire::KnobValues::default()
        },
        patience: Duration::ZERO,
        limits,
        ..crate::options::Options::default()
    });
    let guests = [(); 2].map(|()| lab.guest("d", 3));
    for guest in guests {
        fill(&lab, guest, 1024..1040, |page| page);
    }
    lab.rounds(8);
    assert_eq!(lab.status().pages_sharing, 16);
    for guest in guests {
        lab.world(|world| world.offer(guest, 1, false));
    }
    lab.rounds(12);
    assert_eq!(lab.status().pages_sharing, 16);
}

/// Every second page offered makes more ranges than one scan takes. All are scanned in turn, each once, and what they cost is in
/// the tables of their chunks.
#[test]
fn a_guest_of_many_pieces_is_scanned_in_parts() {
    use crate::scan::offers::News;
    use wire::{Change, PageBits};
    const CHUNKS: u64 = 200;
    let lab = Lab::new();
    lab.guest("d", 1);
    let guest = std::sync::Arc::clone(&lock(&lab.core.guests)[0]);
    let mut news = News::default();
    let mut offers = lock(&guest.offers);
    let mut offer = |offers: &mut crate::guest::regions::Offers, word: u64| {
        for chunk in 0..CHUNKS {
            let change = Change::Chunk {
                chunk: crate::testing::fake::BASE + chunk * CHUNK,
                offered: PageBits([word; 8]),
                stored: PageBits::EMPTY,
            };
            offers.change(&guest, &change, &mut news);
        }
    };
    let scanned = |offers: &mut crate::guest::regions::Offers| {
        let (mut all, mut looks, mut from) = (Vec::new(), 0, Some(0));
        while let Some(at) = from {
            let scan = offers.scans(at);
            all.extend(scan.ranges);
            (from, looks) = (scan.rest, looks + 1);
        }
        assert!(all.is_sorted_by(|a, b| a.end < b.start));
        (all.len(), looks)
    };
    offer(&mut offers, 0x5555_5555_5555_5555);
    let before = offers.memory_bytes();
    let (ranges, looks) = scanned(&mut offers);
    assert_eq!(ranges as u64, CHUNKS * 256);
    assert!(looks > 3, "{looks} looks");
    let list = offers.memory_bytes() - before;
    assert!(list < 64 * 1024, "{list} bytes of ranges");
    assert_eq!(offers.regions(), ranges);
    offer(&mut offers, 0x7777_7777_7777_7777);
    assert_eq!(
        scanned(&mut offers).0 as u64,
        CHUNKS * 128,
        "what came later"
    );
    offer(&mut offers, u64::MAX);
    assert_eq!(scanned(&mut offers), (1, 1), "they are one");
}

/// Where there is no room for a table, a chunk that is named alone leaves its range. Each such hole is a range more.
#[test]
fn holes_at_the_tables_limit_count() {
    use crate::scan::offers::News;
    use wire::{Change, PageBits};
    const REGIONS: u64 = 50;
    let limits = crate::options::Limits {
        table_mib_per_user: 0,
        regions_per_process: REGIONS,
        ..crate::options::Limits::default()
    };
    let lab = Lab::with(crate::options::Options {
        limits,
        ..crate::options::Options::default()
    });
    lab.guest_of("d", 1, 666);
    let guest = std::sync::Arc::clone(&lock(&lab.core.guests)[0]);
    let mut news = News::default();
    let mut offers = lock(&guest.offers);
    let base = crate::testing::fake::BASE;
    let mut change = |change: &Change| offers.change(&guest, change, &mut news);
    change(&Change::Whole {
        chunk: base,
        chunks: 10_000,
    });
    for hole in 0..5000 {
        change(&Change::Chunk {
            chunk: base + (2 * hole + 1) * CHUNK,
            offered: PageBits::FULL,
            stored: PageBits::EMPTY,
        });
    }
    offers.scans(0);
    assert!(
        offers.regions() as u64 <= REGIONS + 1,
        "{} ranges",
        offers.regions()
    );
}
