//! The driver: a thread that begins a round every period, passes and early looks in between, and the signals to it.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use wire::{Pace, Setting};

use crate::error::EngineError;
use crate::guest::{Guest, Standing};
use crate::options::Rules;
use crate::page::Class;
use crate::run::core::Core;
use crate::run::knobs::Knobs;
use crate::run::pace::{Pacer, Supply};
use crate::run::workers::Workers;
use crate::sync::lock;

/// How often ended guests are looked for between rounds.
const REAP: Duration = Duration::from_secs(1);
/// How long unmerging goes on without any progress.
const UNMERGE_PATIENCE: Duration = Duration::from_millis(700);
/// Progress: the time that a page may take to come back, at 64 MiB/s. Agents that take longer are not waited for.
const UNMERGE_PACE: Duration = Duration::from_micros(61);

/// Where the driver takes its orders.
pub(crate) struct Driver {
    pub(crate) core: Arc<Core>,
    signal: Mutex<Signal>,
    /// The signal changed.
    changed: Condvar,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

/// What the driver is told and tells.
#[derive(Default)]
pub(crate) struct Signal {
    pub(crate) stop: bool,
    /// Guests or knobs changed: look at the clock again.
    pub(crate) nudge: bool,
    task: Option<Task>,
    /// How many pages stand in the way of the last task, once it is done.
    left: Option<u64>,
}

/// What an operator waits for. One at a time: the knobs are locked meanwhile.
enum Task {
    /// All merged pages get private copies.
    Unmerge,
    /// The rules change.
    Switch(Rules),
}

impl Driver {
    /// The driver of `core`, with nothing told yet.
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            signal: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn tell(&self, change: impl FnOnce(&mut Signal)) {
        change(&mut lock(&self.signal));
        self.changed.notify_all();
    }

    /// Has the driver do a task, after the round that is under way, and waits for it; gives how many pages stand in the way.
    fn ask(&self, task: Task) -> Result<u64, EngineError> {
        let _haste = sys::priority::hurry();
        let mut signal = lock(&self.signal);
        (signal.task, signal.left) = (Some(task), None);
        self.changed.notify_all();
        let waits = |signal: &mut Signal| !signal.stop && signal.left.is_none();
        let left = signal.wait_while(&self.changed, waits).left.take();
        left.ok_or(EngineError::Ends)
    }

    /// Waits until the driver has unmerged what can be.
    pub(crate) fn unmerge(&self) -> Result<(), EngineError> {
        match self.ask(Task::Unmerge)? {
            0 => Ok(()),
            left => Err(EngineError::Unmerging {
                left,
                pids: sharers(&self.core).iter().map(|guest| guest.pid).collect(),
            }),
        }
    }

    /// Has the driver change the rules as `settings` say; waits for it.
    pub(crate) fn switch(&self, settings: &[Setting]) -> Result<(), EngineError> {
        let now = self.core.knobs.rules();
        let mut rules = now;
        let mut knob = "";
        for setting in settings {
            match *setting {
                Setting::MergeAcrossNodes(on) if on != rules.across_nodes => {
                    rules.across_nodes = on;
                    knob = "merge_across_nodes";
                }
                Setting::MaxPageSharing(pages) if pages != rules.max_sharing => {
                    rules.max_sharing = pages;
                    knob = "max_page_sharing";
                }
                _ => {}
            }
        }
        if rules == now {
            return Ok(());
        }
        match self.ask(Task::Switch(rules))? {
            0 => Ok(()),
            pages => Err(EngineError::Shared { knob, pages }),
        }
    }

    /// Waits until something is told, at most until `due`; whether something was.
    fn wait(&self, due: Instant) -> bool {
        let quiet = |signal: &mut Signal| !signal.stop && !signal.nudge && signal.task.is_none();
        let left = due.saturating_duration_since(Instant::now());
        let signal = lock(&self.signal);
        let mut signal = signal.wait_at_most_while(&self.changed, left, quiet);
        let told = !quiet(&mut signal);
        signal.nudge = false;
        told
    }

    /// The same; discards of merged pages are looked for meanwhile. Nothing else is done for it: at rest no worker wakes.
    fn wait_and_glance(&self, workers: &Workers, due: Instant) {
        loop {
            let glance = self.core.next_glance(Instant::now());
            let Some(glance) = glance.filter(|&glance| glance < due) else {
                self.wait(due);
                return;
            };
            if self.wait(glance) {
                return;
            }
            self.core.glance(workers);
        }
    }

    fn is_stopped(&self) -> bool {
        lock(&self.signal).stop
    }
}

/// Pages that guests in service map from stores.
pub(crate) fn merged(core: &Core) -> u64 {
    let pages = |guest: &Arc<Guest>| guest.counters.pages(Class::Merged);
    sharers(core).iter().map(pages).sum()
}

/// The guests in service that have such pages.
fn sharers(core: &Core) -> Vec<Arc<Guest>> {
    core.guests_that(|guest| {
        guest.standing() == Standing::Served && guest.counters.pages(Class::Merged) > 0
    })
}

/// A newly admitted guest needs a moment for the handshake before its first look is of use.
const GREETING: Duration = Duration::from_millis(20);

/// How the period follows the host's memory, looked at as often as ended guests are.
#[derive(Default)]
struct Tempo {
    pacer: Pacer,
    looked: Option<Instant>,
}

impl Tempo {
    fn keep(&mut self, knobs: &Knobs) {
        if knobs.values().pace == Pace::Fixed {
            (self.pacer, self.looked) = (Pacer::default(), None);
            return knobs.set_step(0);
        }
        if self.looked.is_some_and(|looked| looked.elapsed() < REAP) {
            return;
        }
        self.looked = Some(Instant::now());
        match Supply::read() {
            Ok(supply) => knobs.set_step(self.pacer.observe(supply)),
            Err(error) => tracing::debug!(%error, "cannot tell how much memory there is"),
        }
    }
}

/// When the counts are checked, in builds with assertions. The check walks all tables, and guests can fill these. So it gets a fifth of
/// the time at most.
#[derive(Default)]
struct Audit {
    due: Option<Instant>,
}

impl Audit {
    /// At most this part of the time.
    const PART: u32 = 5;

    fn after_a_round(&mut self, core: &Core, check: fn(&Core)) {
        let begin = Instant::now();
        if self.due.is_none_or(|due| due <= begin) {
            check(core);
            let end = Instant::now();
            self.due = Some(end + (end - begin) * (Self::PART - 1));
        }
    }
}

/// Begins a round every period, each followed by `after_round`; in between, does what cannot wait.
pub(crate) fn drive(driver: &Driver, workers: &Workers, after_round: fn(&Core)) {
    let core = &driver.core;
    let mut last: Option<Instant> = None;
    let mut tempo = Tempo::default();
    let mut audit = Audit::default();
    let (mut passed, mut reaped) = (false, Instant::now());
    while !driver.is_stopped() {
        core.meter.count();
        workers.resize();
        tempo.keep(&core.knobs);
        heed(driver, workers);
        let now = Instant::now();
        let empty = lock(&core.guests).is_empty();
        // Without guests there is no period to keep: the first guest begins one.
        last = last.filter(|_| !empty);
        let due = match last {
            Some(last) => last + core.knobs.period(),
            None if empty => now + core.knobs.period().max(REAP),
            None => now,
        };
        let early = core.next_early(now, due);
        // Of two passes one waits for the look that is due: a user that asks without pause takes half of the time at most.
        let look = due.min(early.unwrap_or(due));
        if (!passed || look > now) && core.wishes.due(now).is_some_and(|wish| wish <= now) {
            core.grant(workers);
            // That looks at all guests: not as often as a pass is wished for.
            if reaped.elapsed() >= REAP {
                core.reap(workers);
                reaped = Instant::now();
            }
            audit.after_a_round(core, after_round);
            passed = true;
            continue;
        }
        passed = false;
        if due <= now {
            if last.is_none() {
                std::thread::sleep(GREETING);
            }
            last = Some(Instant::now());
            ask_for_moves(core);
            core.round(workers, true);
            audit.after_a_round(core, after_round);
            continue;
        }
        if early.is_some_and(|early| early <= now) {
            core.look_early(workers);
            core.reap(workers);
            audit.after_a_round(core, after_round);
            continue;
        }
        let wish = core.wishes.due(now).unwrap_or(due);
        driver.wait_and_glance(workers, look.min(wish).min(now + REAP));
        workers.watch();
        core.reap(workers);
        reaped = Instant::now();
    }
    workers.stop();
    core.wishes.close();
    lock(&core.guests).clear();
    lock(&core.domains).clear();
}

/// Does the task that the driver was given, and a glance if one is due.
fn heed(driver: &Driver, workers: &Workers) {
    let core = &driver.core;
    let task = lock(&driver.signal).task.take();
    if let Some(task) = task {
        let left = match task {
            Task::Unmerge => unmerge_all(driver, workers),
            Task::Switch(rules) => core.switch(rules),
        };
        driver.tell(|signal| signal.left = Some(left));
    }
    // Rounds may follow each other without a pause.
    let now = Instant::now();
    if core.next_glance(now).is_some_and(|glance| glance <= now) {
        core.glance(workers);
    }
}

/// Asks the kernel how many pages it has moved, where that matters. A kernel that does not tell leaves it to the walks of
/// each round.
fn ask_for_moves(core: &Core) {
    if !core.knobs.rules().across_nodes
        && let Ok(pages) = sys::node::pages_moved()
    {
        core.note_moved(pages);
    }
}

/// How long unmerging goes on. Each page that comes back earns [`UNMERGE_PACE`], and no more is put by than
/// [`UNMERGE_PATIENCE`]. A page comes back where fewer are merged than ever before: guests that come, claim pages and leave earn
/// nothing. So in all it is one patience, and the pace of the pages that were merged at the beginning.
struct Credit {
    lowest: u64,
    end: Instant,
}

impl Credit {
    fn new(merged: u64, now: Instant) -> Self {
        Self {
            lowest: merged,
            end: now + UNMERGE_PATIENCE,
        }
    }

    /// Notes how many pages are merged; gives how many have come back.
    fn note(&mut self, merged: u64, now: Instant) -> u64 {
        let back = self.lowest.saturating_sub(merged);
        self.lowest -= back;
        let earned = UNMERGE_PACE.saturating_mul(u32::try_from(back).unwrap_or(u32::MAX));
        self.end = (self.end + earned).min(now + UNMERGE_PATIENCE);
        back
    }
}

/// Unmerges until nothing is merged or the [`Credit`] is spent. What is left comes back in later rounds.
fn unmerge_all(driver: &Driver, workers: &Workers) -> u64 {
    let core = &driver.core;
    let mut left = merged(core);
    let mut credit = Credit::new(left, Instant::now());
    while left > 0 && Instant::now() < credit.end && !driver.is_stopped() {
        core.round(workers, false);
        left = merged(core);
        if credit.note(left, Instant::now()) == 0 {
            std::thread::sleep(core.knobs.patience.max(Duration::from_millis(1)));
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_come_and_go_earn_no_time() {
        const FIRST: u64 = 10_000;
        const STEP: Duration = Duration::from_millis(50);
        let begin = Instant::now();
        let mut credit = Credit::new(FIRST, begin);
        let mut now = begin;
        // Each time 5000 are claimed and given up, and one more has come back.
        let mut merged = FIRST;
        while now < credit.end {
            now += STEP;
            credit.note(merged + 5000, now);
            merged -= 1;
            assert_eq!(credit.note(merged, now), 1);
        }
        let most = UNMERGE_PATIENCE + STEP;
        assert!(now - begin <= most, "{:?}", now - begin);
    }

    #[test]
    fn pages_that_come_back_earn_time_and_nothing_is_put_by() {
        let begin = Instant::now();
        let mut credit = Credit::new(1 << 20, begin);
        assert_eq!(credit.note(1 << 19, begin), 1 << 19);
        assert_eq!(credit.end, begin + UNMERGE_PATIENCE);
        let later = begin + UNMERGE_PATIENCE / 2;
        credit.note(1 << 18, later);
        assert_eq!(credit.end, later + UNMERGE_PATIENCE);
    }
}
