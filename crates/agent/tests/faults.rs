//! Every system call of the window fails in its turn, and no byte is lost, no thread hangs, and once the
//! calls work again pages are merged again.
//!
//! Agents built with debug assertions have the faults in them.
#![cfg(debug_assertions)]
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;

mod common;

use std::sync::mpsc;
use std::time::Duration;

use common::{Engine, count, scan, span};
use rustix::io::Errno;
use support::Guest;
use sys::fault::Point;
use wire::{Answer, Merge, PageBits, PageOutcome, Question, Unmerge};

/// The calls of an agent, and what the kernel may answer.
const FAULTS: &[(Point, &[Errno])] = &[
    (Point::Register, &[Errno::NOMEM, Errno::INVAL, Errno::BUSY]),
    (Point::Unregister, &[Errno::NOMEM]),
    (
        Point::Move,
        &[Errno::AGAIN, Errno::BUSY, Errno::NOMEM, Errno::INVAL],
    ),
    (Point::MoveUntold, &[Errno::EXIST, Errno::NOENT]),
    (Point::Zero, &[Errno::AGAIN, Errno::NOMEM]),
    (Point::Copy, &[Errno::AGAIN, Errno::NOMEM]),
    (Point::Freeze, &[Errno::AGAIN, Errno::NOMEM]),
    (Point::Replace, &[Errno::NOMEM, Errno::AGAIN]),
    (Point::Place, &[Errno::NOMEM]),
    (Point::PlaceHalf, &[Errno::NOMEM]),
    (Point::ReplaceHalf, &[Errno::NOMEM]),
    (Point::Grow, &[Errno::NOMEM]),
    (Point::Describe, &[Errno::NOMEM]),
    (Point::Share, &[Errno::NOMEM]),
    (Point::StoreRead, &[Errno::IO, Errno::NOMEM]),
    (Point::Advise, &[Errno::NOMEM, Errno::AGAIN]),
    (Point::Protect, &[Errno::NOMEM]),
    (Point::Lock, &[Errno::NOMEM, Errno::PERM]),
    (Point::Scan, &[Errno::NOMEM]),
    (Point::Maps, &[Errno::IO]),
    (Point::Send, &[Errno::PIPE, Errno::NOMEM]),
];

/// Which calls fail: the first of them, and then every so-manieth (0: no other).
const TURNS: [(u32, u32); 3] = [(1, 0), (1, 2), (2, 3)];
/// A guest that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(40);

/// Kills the guest when it hangs, so that the test fails instead.
fn watch(pid: u32) -> mpsc::Sender<()> {
    let (done, waits) = mpsc::channel::<()>();
    std::thread::spawn(move || {
        if waits.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("guest {pid} hangs");
            let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    });
    done
}

/// Calls over merged pages, and what they must leave behind: each may fail, and no byte may be wrong then. A discard that fails may have
/// discarded a part. What was guarded, closed or locked is as it was when the last of them has succeeded.
const CALLS: &[&[&str]] = &[
    &["advise 8 8 4", "settle 8 8"],
    &["lock 16 8", "unlock 16 8"],
    &["bind 40 8 0", "unbind 40 8"],
    &["protect 48 8 1", "protect 48 8 3"],
    &["shuttle 56 8"],
];
/// Guards, over pages that are merged at the end of a chapter. Fresh memory comes after them, so that each chapter begins alike.
const GUARDS: &[&str] = &["advise 400 4 102", "advise 400 4 103", "settle 400 4"];
/// What a kernel may refuse that has no guards, or no policy of memory.
const NOT_EVERYWHERE: [&str; 4] = [
    "advise 400 4 102",
    "advise 400 4 103",
    "bind 40 8 0",
    "unbind 40 8",
];

struct Story {
    engine: Engine,
    guest: Guest,
    locked: bool,
}

impl Story {
    /// A guest whose agent is connected; none where it cannot even begin.
    fn begin(fault: &str, locked: bool) -> Option<Self> {
        let engine = Engine::new();
        let socket = engine.socket();
        let mut guest = Guest::start_with(&socket, "PAGEONE_FAULT", fault);
        engine.write(1000, 512, 5);
        engine.write(3000, 100, 70);
        guest.map(512);
        guest.run("fill 0 512 5");
        if locked {
            let _ = guest.ask("lock 0 512");
        }
        guest.run("advise 0 512 12");
        let mut story = Self {
            engine,
            guest,
            locked,
        };
        story.try_connect().then_some(story)
    }

    /// Connects the agent, which comes again after a failure.
    fn try_connect(&mut self) -> bool {
        (0..3).any(|_| matches!(self.engine.try_accept(), Some(Answer::Ready(_))))
    }

    fn ask(&mut self, question: &Question) -> Option<Answer> {
        let answer = self.engine.try_ask(question);
        if answer.is_none() {
            assert!(self.try_connect(), "the agent does not get ready any more");
        }
        answer
    }

    fn sync(&mut self) {
        self.ask(&Question::Sync {
            lifeline: false,
            adopted: false,
        });
    }

    /// Asks for `pages` pages from `first` on; gives how many were merged.
    fn merge(&mut self, first: u16, pages: u16, slot: Option<u64>) -> usize {
        let mut question = Merge::new(self.guest.memory as u64, 0);
        for page in 0..pages {
            assert!(question.push(first + page, slot.map(|slot| slot + u64::from(page))));
        }
        self.ask_merge(question)
    }

    fn ask_merge(&mut self, question: Merge) -> usize {
        scan(&self.guest);
        match self.ask(&Question::Merge(question)) {
            Some(Answer::Merged(merged)) => {
                count(&merged, PageOutcome::Merged) + count(&merged, PageOutcome::Zeroed)
            }
            _ => 0,
        }
    }

    fn unmerge(&mut self, pages: PageBits) {
        let chunk = self.guest.memory as u64;
        self.ask(&Question::Unmerge(Unmerge { chunk, pages }));
    }

    /// Makes each of [`CALLS`] over merged pages; gives those that failed.
    fn calls(&mut self) -> Vec<String> {
        let failed = CALLS.iter().flat_map(|calls| self.try_all(calls)).collect();
        self.guest.run("fill 0 100 5");
        self.offer_again();
        failed
    }

    /// Makes the calls of [`GUARDS`], and begins anew with fresh memory; gives those that failed.
    fn guards(&mut self) -> Vec<String> {
        let failed = self.try_all(GUARDS);
        self.guest.run("mapover 0 512");
        self.guest.run("fill 0 512 5");
        self.offer_again();
        failed
    }

    /// Makes calls, and compares all bytes behind the last; gives those that failed.
    fn try_all(&mut self, calls: &[&str]) -> Vec<String> {
        let mut failed = Vec::new();
        for call in calls {
            if let Err(why) = self.guest.ask(call) {
                failed.push(format!("`{call}`: {why}"));
            }
        }
        self.guest.run("check");
        failed
    }

    fn offer_again(&mut self) {
        if self.locked {
            let _ = self.guest.ask("lock 0 512");
        }
        let _ = self.guest.ask("advise 0 512 12");
    }

    /// Merges, breaks, makes calls, merges again, zeroes and unmerges; gives how many pages were merged.
    fn chapter(&mut self) -> usize {
        self.sync();
        let mut merged = self.ask_merge(span(self.guest.memory, 0, 200, 1000));
        self.guest.run("check");
        merged += self.merge(200, 312, Some(1200));
        self.guest.run("check");
        merged += self.merge(0, 512, Some(1000));
        self.guest.run("check");
        self.calls();
        self.guest.run("fill 100 100 70");
        self.guest.run("zero 300 20");
        scan(&self.guest);
        self.sync();
        merged += self.merge(100, 100, Some(3000));
        merged += self.merge(300, 20, None);
        self.guest.run("check");
        self.guest.run("fill 150 1 9");
        self.guest.run("fork");
        merged += self.merge(100, 100, Some(3000));
        self.guest.run("childcheck");
        self.guest.run("childexit");
        let mut some = PageBits::EMPTY;
        (0..64).for_each(|page| some.insert(page));
        self.unmerge(some);
        self.guest.run("check");
        self.guards();
        self.guest.run("check");
        merged
    }

    /// When no call fails any more, none of the program's does.
    fn all_works(&mut self, fault: &str) {
        self.sync();
        let merged = self.merge(0, 512, Some(1000));
        assert!(merged > 0, "{fault}: nothing is merged afterwards");
        let mut failed = self.calls();
        failed.extend(self.guards());
        failed.retain(|one| !NOT_EVERYWHERE.iter().any(|call| one.contains(call)));
        // Locked memory is not discarded.
        assert!(self.locked || failed.is_empty(), "{fault}: {failed:?}");
    }
}

/// Pages that may be pinned divide memory, which then moves mapping by mapping: any step may fail, and so may a step of the way
/// back.
#[test]
fn a_move_that_fails_midway_brings_all_back() {
    const GROWS: &str = "remap 600 1";
    const TO_TARGET: &str = "remap 512 3";
    const NOMEM: i32 = Errno::NOMEM.raw_os_error();
    const FAULT: i32 = Errno::FAULT.raw_os_error();
    let plain = (1..=5).map(|first| (GROWS, format!("remap {NOMEM} {first} 0")));
    let all = plain.chain([
        (TO_TARGET, format!("remap {NOMEM} 1 0")),
        (TO_TARGET, format!("remap {FAULT} 1 0")),
        (TO_TARGET, format!("remap {FAULT} 1 1 2")),
        (TO_TARGET, format!("remap {FAULT} 1 2 2")),
        (TO_TARGET, format!("remap {FAULT} 1 3 2")),
    ]);
    let mut failed = 0;
    for (call, fault) in all {
        let mut story = Story::begin(&fault, false).unwrap();
        let watch = watch(story.guest.pid);
        story.sync();
        assert_eq!(story.merge(0, 512, Some(1000)), 512);
        story.guest.run("fill 16 8 9");
        story.guest.run("pin 16 8");
        let moved = story.guest.ask(call);
        println!("{call} with {fault}: {moved:?}");
        failed += usize::from(moved.is_err());
        story.guest.run("check");
        drop(watch);
    }
    assert!(failed >= 5, "{failed} moves failed");
}

fn tell(point: Point, errno: Errno, turns: (u32, u32), locked: bool) {
    let name = sys::fault::POINTS.iter().find(|(known, _)| *known == point);
    let (first, every) = turns;
    let fault = format!(
        "{} {} {first} {every}",
        name.unwrap().1,
        errno.raw_os_error()
    );
    let Some(mut story) = Story::begin(&fault, locked) else {
        // Without the lock's page, or with every other packet lost, or every other line (each session
        // maps two), there is no agent, and the guest goes on alone.
        let fine = first == 1 && matches!(point, Point::Advise | Point::Send | Point::Share);
        assert!(fine, "{fault}: no agent");
        return;
    };
    let (watch, began) = (watch(story.guest.pid), std::time::Instant::now());
    let merged: usize = (0..2).map(|_| story.chapter()).sum();
    println!(
        "{fault}{}: {merged} pages, {:?}",
        if locked { ", locked" } else { "" },
        began.elapsed()
    );
    // A call that fails once is no reason to merge nothing, and later nothing fails.
    if every == 0 {
        assert!(merged > 0, "{fault}");
        story.all_works(&fault);
    }
    drop(watch);
}

/// Every fourth of the faults: agents wait a second before they come again, so tests overlap.
fn tell_part(part: usize) {
    let errnos = |&(point, errnos): &(Point, &'static [Errno])| {
        errnos.iter().map(move |&errno| (point, errno))
    };
    for (point, errno) in FAULTS.iter().flat_map(errnos).skip(part).step_by(4) {
        for turns in TURNS {
            tell(point, errno, turns, false);
        }
    }
}

#[test]
fn whatever_fails_no_byte_is_lost() {
    tell_part(0);
}

#[test]
fn whatever_fails_no_byte_is_lost_second_part() {
    tell_part(1);
}

#[test]
fn whatever_fails_no_byte_is_lost_third_part() {
    tell_part(2);
}

#[test]
fn whatever_fails_no_byte_is_lost_last_part() {
    tell_part(3);
}

/// Before Linux 6.11 there is no `PROCMAP_QUERY`, and the text of the mappings tells all.
#[test]
fn an_agent_on_an_older_kernel_merges_as_ever() {
    let [now, before] = ["maps-query 25 0 0", "maps-query 25 1 1"].map(|fault| {
        let mut story = Story::begin(fault, false).expect("an agent");
        let (_watch, merged) = (watch(story.guest.pid), story.chapter());
        merged
    });
    assert!(
        before > 0 && before.abs_diff(now) < 64,
        "{before}, now {now}"
    );
}

#[test]
fn nor_in_locked_memory() {
    let points = [Point::Replace, Point::Lock, Point::Protect];
    for point in [
        &points[..],
        &[Point::Describe, Point::Place, Point::PlaceHalf],
    ]
    .concat()
    {
        for turns in TURNS {
            tell(point, Errno::NOMEM, turns, true);
        }
    }
}
