//! Every system call of the stores and of the engine fails in its turn, in a daemon that serves. Guests
//! keep their bytes, the daemon lives, and once the calls work again pages are merged again and nothing
//! is left behind. The daemon checks its invariants after every round.
//!
//! Only builds with debug assertions have the faults in them. These tests need root and a kernel with
//! userfaultfd's WP_ASYNC and MOVE.
#![cfg(debug_assertions)]
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{
    Place, Running, classed_and_present, count, json, need_agent, output, pageone, status, text,
    wait_for,
};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::Guest;
use sys::fault::{Board, POINTS, Point};
use sys::signals::SIGTERM;

/// Pages of a guest.
const PAGES: usize = 256;
/// The longest a point is waited for to fail.
const CHAPTER: Duration = Duration::from_secs(20);

/// The time between two things that happen to guests.
const SCENE: Duration = Duration::from_millis(25);

/// Which calls fail: the first, every so-manieth, at most so many.
type Turns = (u32, u32, u32);
/// Once; all for a while; now and then.
const TURNS: [Turns; 3] = [(1, 0, 1), (1, 1, 6), (3, 4, 5)];

/// The calls of stores, and what the kernel may answer.
const STORES: &[(Point, &[Errno])] = &[
    (
        Point::StoreWrite,
        &[Errno::NOSPC, Errno::NOMEM, Errno::INTR],
    ),
    (Point::StorePunch, &[Errno::NOMEM, Errno::INTR, Errno::IO]),
    (Point::StoreShare, &[Errno::MFILE, Errno::NOMEM]),
    (Point::Memfd, &[Errno::MFILE, Errno::NFILE, Errno::NOMEM]),
    (Point::Duplicate, &[Errno::MFILE]),
    (Point::Seal, &[Errno::INTR]),
];
/// Those by which guests are looked at.
const GUESTS: &[(Point, &[Errno])] = &[
    (Point::Read, &[Errno::NOMEM, Errno::AGAIN, Errno::PERM]),
    (Point::Scan, &[Errno::NOMEM, Errno::INTR]),
    (Point::Proc, &[Errno::MFILE, Errno::NOMEM, Errno::IO]),
];
/// Those by which they are talked to.
const TALK: &[(Point, &[Errno])] = &[
    (
        Point::Accept,
        &[Errno::MFILE, Errno::CONNABORTED, Errno::INTR, Errno::NOMEM],
    ),
    (Point::Receive, &[Errno::NOMEM, Errno::CONNRESET]),
    (Point::Send, &[Errno::NOBUFS, Errno::PIPE, Errno::AGAIN]),
    (Point::Poll, &[Errno::NOMEM, Errno::INTR]),
    (Point::Pidfd, &[Errno::MFILE]),
];

/// Those by which one engine takes over from another.
const SUCCESSION: &[(Point, &[Errno])] = &[
    (Point::StoreRead, &[Errno::IO, Errno::NOMEM]),
    (Point::Note, &[Errno::NOSPC]),
    (Point::Duplicate, &[Errno::MFILE]),
    (Point::Memfd, &[Errno::MFILE]),
    (Point::Send, &[Errno::PIPE]),
    (Point::Proc, &[Errno::MFILE]),
    (Point::Scan, &[Errno::NOMEM]),
    (Point::Thread, &[Errno::AGAIN]),
];

fn name(point: Point) -> &'static str {
    POINTS.iter().find(|(known, _)| *known == point).unwrap().1
}

/// A daemon whose calls fail as the board says.
struct Stage {
    place: Place,
    board: Board,
    daemon: Running,
    guests: [Guest; 2],
    seed: u64,
    /// Descriptors of the daemon without guests.
    idle: usize,
}

fn command(place: &Place, board: &std::path::Path, args: &[&str]) -> Running {
    let mut command = pageone();
    command.args([
        "daemon",
        "--no-keep",
        "--merge-period",
        "20ms",
        "--broken-rest",
        "20ms",
    ]);
    command.args(args).arg("--socket").arg(place.socket());
    command
        .env("PAGEONE_FAULT", board)
        .env("PAGEONE_LOG", "error");
    Running::start(command.stderr(Stdio::inherit()))
}

impl Stage {
    fn new(args: &[&str]) -> Self {
        Self::begin(args, None)
    }

    /// With a fault from before the first guest on.
    fn begin(args: &[&str], fault: Option<&str>) -> Self {
        need_agent();
        let place = Place::new();
        let path = place.path().join("board");
        let board = Board::new(&path).unwrap();
        let daemon = command(&place, &path, args);
        wait_for("the daemon", || {
            status(&place).status.success().then_some(())
        });
        assert!(fault.is_none_or(|fault| board.arm(fault)));
        let idle = descriptors(daemon.0.id(), "").len();
        let guests = [(); 2].map(|()| Guest::start(&place.socket()));
        let mut stage = Self {
            place,
            board,
            daemon,
            guests,
            seed: 1,
            idle,
        };
        stage
            .guests
            .iter_mut()
            .for_each(|guest| guest.offer(PAGES, 1));
        stage.wait_shared();
        stage
    }

    fn alive(&mut self) {
        let end = self.daemon.0.try_wait().unwrap();
        assert!(end.is_none(), "the daemon ended: {end:?}");
    }

    fn check(&mut self) {
        for guest in &mut self.guests {
            guest.run("check");
        }
    }

    /// One of the things that happen to guests, with all that a daemon has to do for it.
    fn play(&mut self, third: &mut Option<Guest>, scene: usize) {
        self.seed += 1000;
        let seed = self.seed;
        let first = scene % 8 * 20;
        for guest in &mut self.guests {
            guest.run("check");
            guest.run(&format!("fill {first} 20 {seed}"));
        }
        match scene % 6 {
            0 => {
                let third = third.insert(Guest::start(&self.place.socket()));
                third.offer(PAGES, seed);
            }
            1 => drop(self.guests[0].run("fork")),
            2 => {
                for guest in &mut self.guests {
                    guest.run("advise 165 20 4");
                    guest.run("mapover 200 56");
                    guest.run(&format!("fill 200 56 {}", seed + 200));
                    guest.run("advise 200 56 12");
                }
            }
            3 => self.end_child(),
            4 => self.end_third(third),
            _ => {}
        }
    }

    fn end_child(&mut self) {
        assert_eq!(self.guests[0].run("childcheck"), "0");
        self.guests[0].run("childexit");
    }

    fn end_third(&mut self, third: &mut Option<Guest>) {
        if let Some(mut third) = third.take() {
            third.run("check");
        }
    }

    /// Waits until all that can be shared is; all counters add up then, and no frame is held in vain.
    fn wait_shared(&mut self) {
        let pages = PAGES as u64;
        wait_for("pages to be shared", || {
            self.alive();
            let status: Value = serde_json::from_slice(&status(&self.place).stdout).ok()?;
            let (classed, present) = classed_and_present(&status);
            let done =
                count(&status, "pages_shared") == pages && count(&status, "pages_sharing") == pages;
            (done && classed == 2 * pages && present == 2 * pages).then_some(())
        });
        wait_for("dead slots to be given back", || {
            let engine = self.child().unwrap_or(self.daemon.0.id());
            let stores = descriptors(engine, "/memfd:pageone-store");
            // A store has several descriptors.
            let of = |store: &PathBuf| std::fs::metadata(store).ok();
            let blocks: HashMap<_, _> = stores
                .iter()
                .filter_map(of)
                .map(|meta| (meta.ino(), meta.blocks()))
                .collect();
            let held = blocks.values().sum::<u64>() / 8;
            (held == pages).then_some(())
        });
    }

    /// Lets a point fail while much happens, then has all shared again.
    fn chapter(&mut self, point: Point, errno: Errno, (first, every, most): Turns) {
        let begin = Instant::now();
        let number = errno.raw_os_error();
        let fault = format!("{} {number} {first} {every} {most}", name(point));
        assert!(self.board.arm(&fault));
        let (mut third, mut scene) = (None, 0);
        while scene < 4 || self.board.failed() < most && begin.elapsed() < CHAPTER {
            self.alive();
            self.play(&mut third, scene);
            scene += 1;
            // Some calls are made for callers only.
            let _ = status(&self.place);
            std::thread::sleep(SCENE);
        }
        let failed = self.board.failed();
        self.check();
        if matches!(scene % 6, 2 | 3) {
            self.end_child();
        }
        self.end_third(&mut third);
        self.board.clear();
        self.alive();
        self.renew();
        self.wait_shared();
        self.check();
        println!("{fault}: failed {failed} times, {:?}", begin.elapsed());
        assert!(failed > 0, "{fault}: never came to its turn");
    }

    /// Has the keeper's daemon killed while a point fails, then has all shared again by the next one.
    fn succession(&mut self, point: Point, errno: Errno, (first, every, most): Turns) {
        let begin = Instant::now();
        let number = errno.raw_os_error();
        let fault = format!("{} {number} {first} {every} {most}", name(point));
        assert!(self.board.arm(&fault));
        let old = self.child();
        let killed = Pid::from_raw(i32::try_from(old.unwrap()).unwrap()).unwrap();
        kill_process(killed, Signal::KILL).unwrap();
        wait_for("the next daemon and both guests", || {
            self.alive();
            let status: Value = serde_json::from_slice(&status(&self.place).stdout).ok()?;
            let served = status["guests"].as_array()?.len() == 2;
            (served && self.child() != old && count(&status, "full_scans") > 3).then_some(())
        });
        self.check();
        let failed = self.board.failed();
        self.board.clear();
        self.renew();
        self.wait_shared();
        self.check();
        println!("{fault}: failed {failed} times, {:?}", begin.elapsed());
        assert!(failed > 0, "{fault}: never came to its turn");
    }

    /// The process id of the daemon that a keeper has started.
    fn child(&self) -> Option<u32> {
        let keeper = self.daemon.0.id();
        let children = format!("/proc/{keeper}/task/{keeper}/children");
        std::fs::read_to_string(children).ok()?.trim().parse().ok()
    }

    /// Other content, equal in both guests, in memory that was never merged.
    fn renew(&mut self) {
        self.seed += 1000;
        let seed = self.seed;
        for guest in &mut self.guests {
            guest.renew(PAGES, seed);
        }
    }

    /// Ends the guests, then the daemon: nothing is left.
    fn end(mut self) {
        for guest in &mut self.guests {
            guest.process.kill().unwrap();
            guest.process.wait().unwrap();
        }
        let idle = self.idle;
        wait_for("the daemon to let go of all", || {
            let child = self.child();
            let mut processes = std::iter::once(self.daemon.0.id()).chain(child);
            // The history stays as long as its keeper does.
            let files = |pid, name| descriptors(pid, name).len();
            let empty =
                processes.all(|pid| files(pid, "/memfd:") == files(pid, "/memfd:pageone-history"));
            let most = if child.is_some() { usize::MAX } else { idle };
            (empty && descriptors(self.daemon.0.id(), "").len() <= most).then_some(())
        });
        assert_eq!(json(&self.place)["guests"], serde_json::json!([]));
        self.daemon.signal(SIGTERM);
        assert_eq!(self.daemon.end(), 0);
    }
}

/// The descriptors of a process that lead to what begins like this.
fn descriptors(pid: u32, target: &str) -> Vec<PathBuf> {
    let folder = format!("/proc/{pid}/fd");
    let links = std::fs::read_dir(folder).unwrap().flatten();
    let leads = |link: &PathBuf| {
        let found = std::fs::read_link(link).unwrap_or_default();
        found.to_string_lossy().starts_with(target)
    };
    links.map(|entry| entry.path()).filter(leads).collect()
}

fn tell(faults: &[(Point, &[Errno])], args: &[&str]) {
    let mut stage = Stage::new(args);
    for &(point, errnos) in faults {
        for &errno in errnos {
            for turns in TURNS {
                stage.chapter(point, errno, turns);
            }
        }
    }
    stage.end();
}

#[test]
fn whatever_fails_of_the_stores_sharing_goes_on() {
    tell(STORES, &[]);
}

#[test]
fn whatever_fails_of_looking_at_guests_sharing_goes_on() {
    tell(GUESTS, &[]);
}

#[test]
fn whatever_fails_of_talking_to_guests_sharing_goes_on() {
    tell(TALK, &[]);
}

#[test]
fn whatever_fails_of_a_succession_guests_keep_their_bytes() {
    for &(point, errnos) in SUCCESSION {
        for &errno in errnos {
            // Another keeper each: its pause doubles with every daemon that does not last.
            let mut stage = Stage::new(&["--keep"]);
            for turns in [(1, 0, 1), (1, 1, 3)] {
                stage.succession(point, errno, turns);
            }
            stage.end();
        }
    }
}

#[test]
fn stores_whose_node_cannot_be_chosen_are_stores_all_the_same() {
    if !std::path::Path::new("/sys/devices/system/memory").exists() {
        return eprintln!("skipped: memory cannot be divided into nodes here");
    }
    for errno in [Errno::NOMEM, Errno::INVAL] {
        let fault = format!("store-node {} 1 1", errno.raw_os_error());
        let mut stage = Stage::begin(&["--numa", "fake=2"], Some(&fault));
        stage.check();
        assert!(stage.board.failed() > 0);
        stage.end();
    }
}

/// Without `PROCMAP_QUERY` (before Linux 6.11), and without the ids from a pidfd (before 6.13).
#[test]
fn a_daemon_on_an_older_kernel_serves_as_ever() {
    for fault in ["maps-query 25 1 1", "pidfd-info 25 1 1"] {
        let mut stage = Stage::begin(&[], Some(fault));
        let mut third = None;
        (0..12).for_each(|scene| stage.play(&mut third, scene));
        drop(third);
        stage.renew();
        stage.wait_shared();
        stage.check();
        assert!(stage.board.failed() > 0, "{fault}: no call was made");
        stage.end();
    }
}

#[test]
fn a_daemon_that_cannot_look_at_guests_at_all_says_so_at_its_start() {
    let place = Place::new();
    let mut command = pageone();
    command
        .args(["daemon", "--no-keep"])
        .arg("--socket")
        .arg(place.socket());
    let said = output(command.env("PAGEONE_FAULT", "scan 25 1 1"));
    assert_eq!(said.status.code(), Some(1));
    let said = text(&said.stderr);
    assert!(said.contains("PAGEMAP_SCAN is missing"), "{said}");
    assert!(!place.socket().exists(), "the socket is left behind");
}
