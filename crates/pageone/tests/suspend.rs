//! What a suspended host does to a daemon and its guests: everything stands still for longer than any
//! patience lasts, and the time of day jumps. No guest is dropped, no byte lost, and merging goes on.
//!
//! The jump turns the clock of the whole machine for less than a second. So it happens only where
//! `PAGEONE_TEST_CLOCK` gives the seconds to jump by, as in a virtual machine: 86400.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use common::{Place, Running, alone, classed_and_present, count, daemon, json, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use support::{Guest, check};
use sys::signals::SIGTERM;

const PAGES: usize = 1024;
/// Thirty periods, seven times an agent's longest time to answer.
const STILL: Duration = Duration::from_millis(1500);

struct Stage {
    place: Place,
    daemon: Running,
    guests: [Guest; 2],
}

impl Stage {
    fn new() -> Self {
        let place = Place::new();
        let daemon = daemon(&place, &["--merge-period", "50ms"]);
        let guests = [(); 2].map(|()| Guest::start(&place.socket()));
        Self {
            place,
            daemon,
            guests,
        }
    }

    /// Equal content that is new to both guests.
    fn renew(&mut self, seed: u64) {
        for guest in &mut self.guests {
            match guest.memory {
                0 => guest.offer(PAGES, seed),
                _ => guest.renew(PAGES, seed),
            }
        }
    }

    fn wait_shared(&mut self) {
        let pages = PAGES as u64;
        wait_for("pages to be shared", || {
            let status = json(&self.place);
            let shared = ["pages_shared", "pages_sharing"].map(|name| count(&status, name));
            let (classed, present) = classed_and_present(&status);
            (shared == [pages; 2] && classed == present && present == 2 * pages).then_some(())
        });
        check(&mut self.guests);
    }

    fn pids(&self) -> [Pid; 3] {
        let [one, two] = &self.guests;
        [&self.daemon.0, &one.process, &two.process].map(Pid::from_child)
    }

    /// Ends the daemon: it has dropped no guest.
    fn end(mut self) {
        self.daemon.signal(SIGTERM);
        assert_eq!(self.daemon.end(), 0);
        let said = self.daemon.stderr();
        assert_eq!(said.matches("a guest joins").count(), 2, "{said}");
        assert!(!said.contains("dropped"), "{said}");
    }
}

#[test]
fn what_stood_still_goes_on() {
    let _alone = alone();
    let mut stage = Stage::new();
    stage.renew(1);
    stage.wait_shared();
    // In the middle of merging; who wakes first differs.
    for (round, pause) in (1..).zip([0, 60, 130, 170, 230]) {
        stage.renew(round * 10_000);
        std::thread::sleep(Duration::from_millis(pause));
        let mut pids = stage.pids();
        for pid in pids {
            kill_process(pid, Signal::STOP).unwrap();
        }
        std::thread::sleep(STILL);
        pids.rotate_left(usize::try_from(round % 3).unwrap());
        for pid in pids {
            kill_process(pid, Signal::CONT).unwrap();
            std::thread::sleep(Duration::from_millis(300 * (round % 2)));
        }
        stage.wait_shared();
    }
    stage.end();
}

/// Puts the time of day right again when it goes.
struct Clock {
    right: Duration,
    since: Instant,
}

impl Clock {
    fn new() -> Self {
        let now = clock_gettime(ClockId::Realtime);
        let nanoseconds = u32::try_from(now.tv_nsec).unwrap();
        Self {
            right: Duration::new(u64::try_from(now.tv_sec).unwrap(), nanoseconds),
            since: Instant::now(),
        }
    }

    /// Sets the clock off by so many seconds.
    fn set_off(&self, seconds: i64) -> rustix::io::Result<()> {
        let right = self.right + self.since.elapsed();
        let time = Timespec {
            tv_sec: i64::try_from(right.as_secs()).unwrap() + seconds,
            tv_nsec: right.subsec_nanos().into(),
        };
        clock_settime(ClockId::Realtime, time)
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        if let Err(error) = self.set_off(0) {
            eprintln!("the clock is not right: {error}");
        }
    }
}

#[test]
fn the_time_of_day_does_not_matter() {
    let _alone = alone();
    let seconds = std::env::var("PAGEONE_TEST_CLOCK").unwrap_or_default();
    let Ok(seconds) = seconds.parse::<i64>() else {
        return eprintln!("skipped: PAGEONE_TEST_CLOCK does not say by how many seconds to jump");
    };
    let mut stage = Stage::new();
    for (round, jump) in (1..).zip([seconds, -seconds]) {
        stage.renew(round * 10_000);
        let before = count(&json(&stage.place), "full_scans");
        {
            let clock = Clock::new();
            if let Err(error) = clock.set_off(jump) {
                return eprintln!("skipped: the clock cannot be set: {error}");
            }
            // Rounds go on at their pace, neither at once nor never.
            std::thread::sleep(Duration::from_millis(600));
            let rounds = count(&json(&stage.place), "full_scans") - before;
            assert!((2..40).contains(&rounds), "{rounds} rounds in 0.6 s");
        }
        stage.wait_shared();
    }
    stage.end();
}
