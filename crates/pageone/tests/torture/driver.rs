//! Random events for guests and daemon.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::Random;
use crate::common::{
    Place, Running, classed_and_present, compact_memory, count, output, pageone, wait_for,
};
use crate::counts::{Counts, Summary};
use crate::guests::{self, Guest};
use crate::knobs::Turning;

/// Guests alive at a time. Each has at most 10 MiB, as much for the shadow, and a few children.
const GUESTS: usize = 4;
/// How long the daemon may take for a status, with all the rest going on.
const STATUS_PATIENCE: Duration = Duration::from_secs(30);

/// How long memory is compacted at a time.
const COMPACTION: Duration = Duration::from_millis(300);

/// Pages merged and broken of one guest, as the last status told.
type Seen = BTreeMap<u64, (u64, u64)>;

pub(crate) struct Driver {
    random: Random,
    place: Place,
    program: PathBuf,
    seed: u64,
    daemon: Running,
    guests: Vec<Guest>,
    /// Children of killed guests live on.
    killed: Vec<Guest>,
    next_guest: u32,
    turning: Option<Turning>,
    seen: Seen,
    /// Pages merged again, as the last status told.
    seen_again: u64,
    summary: Summary,
}

fn start_daemon(place: &Place) -> Running {
    let mut command = pageone();
    // The guests write all the time: pages that rest half a second are few.
    command.args([
        "daemon",
        "--no-keep",
        "--merge-period",
        "30ms",
        "--broken-rest",
        "30ms",
    ]);
    let command = command
        .arg("--socket")
        .arg(place.socket())
        .env("PAGEONE_LOG", "error");
    Running::start(command.stderr(Stdio::inherit()))
}

impl Driver {
    pub(crate) fn new(seed: u64) -> Self {
        let place = Place::new();
        let program = guests::build(&place);
        let mut driver = Self {
            random: Random(seed),
            daemon: start_daemon(&place),
            place,
            program,
            seed,
            guests: Vec::new(),
            killed: Vec::new(),
            next_guest: 0,
            turning: None,
            seen: Seen::new(),
            seen_again: 0,
            summary: Summary::default(),
        };
        driver.await_daemon();
        (0..GUESTS).for_each(|_| driver.start_guest());
        driver
    }

    /// Torments until the time is over, or something is wrong.
    pub(crate) fn run(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end && !self.something_is_wrong() {
            let pause = 50 + self.random.below(250);
            std::thread::sleep(Duration::from_millis(u64::try_from(pause).unwrap()));
            self.look();
            self.act();
        }
    }

    /// Lets all guests compare everything and end, then the daemon.
    pub(crate) fn finish(mut self) -> Summary {
        self.turning = None;
        let ended: Vec<(Guest, bool)> = self.guests.drain(..).map(|guest| (guest, false)).collect();
        let killed = self.killed.drain(..).map(|guest| (guest, true));
        let mut all: Vec<(Guest, bool)> = ended.into_iter().chain(killed).collect();
        all.iter_mut().for_each(|(guest, _)| guest.ask_to_end());
        for (guest, was_killed) in all {
            match guest.end(was_killed) {
                Ok(_) => {}
                Err(why) => self.summary.complaints.push(why),
            }
        }
        for number in 0..self.next_guest {
            let file = self.place.path().join(format!("counts-{number}"));
            self.summary.counts.add(Counts::read(&file));
        }
        self.daemon.signal(15);
        let code = self.daemon.end();
        if code != 0 {
            self.complain(format!("the daemon ended with {code}"));
        }
        self.summary
    }

    fn complain(&mut self, what: String) {
        println!("torture: {what}");
        self.summary.complaints.push(what);
    }

    fn something_is_wrong(&mut self) -> bool {
        if let Some(status) = self.daemon.0.try_wait().unwrap() {
            self.complain(format!("the daemon ended by itself: {status}"));
        }
        let ended: Vec<String> = self.guests.iter_mut().filter_map(Guest::ended).collect();
        ended.into_iter().for_each(|what| self.complain(what));
        if let Some(Err(why)) = self.turned() {
            self.complain(why);
        }
        let guests = self.guests.iter().chain(&self.killed);
        let wrong = guests
            .map(Guest::counts)
            .any(|counts| counts.mismatches() + counts.failures() > 0);
        wrong || !self.summary.complaints.is_empty()
    }

    /// What became of the knob that was being turned.
    fn turned(&mut self) -> Option<Result<(), String>> {
        let result = self.turning.as_mut()?.poll()?;
        self.turning = None;
        Some(result)
    }

    fn await_daemon(&self) {
        wait_for("the daemon", || self.status().map(drop));
    }

    fn status(&self) -> Option<Value> {
        let socket = self.place.socket();
        let mut command = pageone();
        let done = output(command.args(["status", "--json", "--socket"]).arg(socket));
        let text = done.status.success().then_some(done.stdout)?;
        Some(serde_json::from_slice(&text).expect("JSON"))
    }

    /// Reads the counters: they add up, and tell what was merged and broken since the last time.
    fn look(&mut self) -> Option<Value> {
        let began = Instant::now();
        let Some(status) = self.status() else {
            self.complain("the daemon gives no status".to_owned());
            return None;
        };
        if began.elapsed() > STATUS_PATIENCE {
            self.complain(format!("a status took {:?}", began.elapsed()));
        }
        let (sum, present) = classed_and_present(&status);
        let guests = status["guests"].as_array().unwrap();
        if sum != present {
            self.complain(format!("I9: {sum} is not {present}: {status}"));
        }
        let mut seen = Seen::new();
        for guest in guests {
            let pid = count(guest, "pid");
            let merged = count(guest, "pages_sharing") + count(guest, "zero_pages");
            let private =
                count(guest, "pages_stored").saturating_sub(count(guest, "pages_sharing"));
            let now = (merged, private);
            let before = self.seen.get(&pid).copied().unwrap_or_default();
            self.summary.merged += now.0.saturating_sub(before.0);
            self.summary.broken += now.1.saturating_sub(before.1);
            seen.insert(pid, now);
        }
        self.seen = seen;
        let again = count(&status, "pages_merged_again");
        // A new daemon counts from zero.
        let before = if again < self.seen_again {
            0
        } else {
            self.seen_again
        };
        self.summary.merged_again += again - before;
        self.seen_again = again;
        Some(status)
    }

    fn act(&mut self) {
        match self.random.below(100) {
            0..30 => self.turn_a_knob(),
            30..45 => self.stop_or_continue(),
            45..55 => self.replace_a_guest(),
            55..58 => self.kill_the_daemon(),
            58..70 => self.run_again(),
            70..80 => self.compact(),
            _ => {}
        }
    }

    fn turn_a_knob(&mut self) {
        let Some(status) = self.look().filter(|_| self.turning.is_none()) else {
            return;
        };
        self.turning = Some(Turning::draw(&mut self.random, &self.place, &status));
        self.summary.knobs += 1;
    }

    /// Stopped and unmerged engines test nothing: most of the time this one runs.
    fn run_again(&mut self) {
        if self.turning.is_none() {
            self.turning = Some(Turning::begin(&self.place, "run=1", false));
        }
    }

    /// The kernel moves all pages about, those that are just being merged too.
    fn compact(&mut self) {
        let end = Instant::now() + COMPACTION;
        while Instant::now() < end && compact_memory() {
            self.summary.compactions += 1;
        }
    }

    fn draw_guest(&mut self) -> usize {
        self.random.below(self.guests.len())
    }

    fn stop_or_continue(&mut self) {
        let at = self.draw_guest();
        let stopped = self.guests.iter().position(|guest| guest.stopped);
        match stopped {
            Some(at) => self.guests[at].stop(false),
            None => self.guests[at].stop(true),
        }
    }

    /// One guest is killed or ends, another takes its place.
    fn replace_a_guest(&mut self) {
        let at = self.draw_guest();
        let mut guest = self.guests.swap_remove(at);
        if self.random.below(2) == 0 {
            guest.kill();
            self.summary.guests_killed += 1;
            self.killed.push(guest);
        } else {
            guest.ask_to_end();
            if let Err(why) = guest.end(false) {
                self.complain(why);
            }
        }
        self.start_guest();
    }

    fn start_guest(&mut self) {
        let number = self.next_guest;
        self.next_guest += 1;
        let guest = Guest::start(&self.program, &self.place, self.seed, number);
        self.guests.push(guest);
    }

    /// The next daemon comes at once or after a while.
    fn kill_the_daemon(&mut self) {
        self.daemon.signal(9);
        self.daemon.end();
        // Who was turning a knob has lost its daemon.
        self.turning = None;
        self.seen.clear();
        self.summary.daemons_killed += 1;
        let pause = self.random.below(3) * 400;
        std::thread::sleep(Duration::from_millis(u64::try_from(pause).unwrap()));
        self.daemon = start_daemon(&self.place);
        self.await_daemon();
    }
}
