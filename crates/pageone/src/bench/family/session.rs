//! One run of a case: the engine, its guests, and the samples.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use super::fill::Fill;
use super::growth::Growth;
use super::histogram::Histogram;
use super::machine::VmFiles;
use super::memory::Lap;
use super::meter::{Before, Reading};
use super::record::{Sample, Setting, Table};
use crate::bench::curve::{self, Curve};
use crate::bench::error::BenchError;
use crate::bench::guests::Guest;
use crate::bench::measure::{Contender, difference};

/// The longest wait for a guest.
const PATIENCE: Duration = Duration::from_secs(300);
/// The least time between two samples.
const SAMPLE: Duration = Duration::from_millis(50);
/// Sampling may take one part in so many of the time: the kernel holds the guests' mappings meanwhile.
const SHARE: u32 = 10;
/// So many of PageONE's periods the saving must not grow to count as settled, and half a second at least.
const FLAT_PERIODS: u64 = 3;
const FLAT_LEAST_MS: u64 = 500;
/// The order to a program to make a turn of its work.
const TURN: &str = "work";
/// The time between two looks at programs, which the kernel holds up meanwhile.
const LOOK: Duration = Duration::from_millis(200);
/// So long, and four of PageONE's periods, what programs use must not fall to count as settled.
const STILL: Duration = Duration::from_secs(1);
/// So long, and four periods, nothing has settled: an engine sees new memory at its second look.
const LATE: Duration = Duration::from_secs(3);

/// The percentiles of a curve, in accesses of a million.
const RANKS: [u64; 9] = [
    500_000, 750_000, 900_000, 950_000, 990_000, 995_000, 999_000, 999_900, 1_000_000,
];

/// How long to sample.
#[derive(Clone, Copy, Debug)]
pub(super) enum Until {
    /// Until the saving has settled, or the limit is over.
    Settled,
    /// For so long.
    Passed(Duration),
}

/// A guest, and what it had just before it offered its memory.
struct Member {
    guest: Guest,
    before: Before,
}

/// What a run has come to.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) figures: BTreeMap<String, f64>,
    pub(super) curves: BTreeMap<String, Vec<(u64, u64)>>,
    pub(super) samples: Vec<Sample>,
    pub(super) verified_bytes: u64,
    pub(super) errors: u64,
    pub(super) hindrance: Option<String>,
    pub(super) growth: Vec<Growth>,
    pub(super) tables: Vec<Table>,
}

/// A run in progress.
pub(super) struct Session<'a> {
    pub(super) setting: &'a Setting,
    /// What virtual machines are made of.
    pub(super) vm: &'a VmFiles,
    engine: &'a mut dyn Contender,
    /// A command that is this program.
    program: &'a dyn Fn() -> Command,
    interrupted: &'a dyn Fn() -> bool,
    members: Vec<Member>,
    fill: Option<Fill>,
    /// Guests that were ever started.
    started: u64,
    /// CPU time of the guests that have ended: their agents' and their work.
    ended: (Duration, Duration),
    begin: Reading,
    curve: Curve,
    pub(super) outcome: Outcome,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        setting: &'a Setting,
        vm: &'a VmFiles,
        engine: &'a mut dyn Contender,
        program: &'a dyn Fn() -> Command,
        interrupted: &'a dyn Fn() -> bool,
    ) -> Result<Self, BenchError> {
        let begin = Reading::take(engine.process(), &[])?;
        Ok(Self {
            setting,
            vm,
            engine,
            program,
            interrupted,
            members: Vec::new(),
            fill: None,
            started: 0,
            ended: (Duration::ZERO, Duration::ZERO),
            begin,
            curve: Curve::default(),
            outcome: Outcome::default(),
        })
    }

    /// The time of a phase of work.
    pub(super) fn phase(&self) -> Duration {
        Duration::from_millis(self.setting.phase_ms)
    }

    pub(super) fn limit(&self) -> Duration {
        Duration::from_millis(self.setting.limit_ms)
    }

    /// Pages of a guest.
    pub(super) fn pages(&self) -> u64 {
        self.setting.guest_mib * 256
    }

    /// Starts `count` guests with this content, and waits until their memory is filled.
    pub(super) fn start(&mut self, fill: Fill, count: u64) -> Result<(), BenchError> {
        let old = self.members.len();
        for _ in 0..count {
            let mut command = (self.program)();
            command
                .args(["guest", "work"])
                .args(fill.words(self.started));
            self.engine.equip(&mut command);
            let guest = Guest::start(&mut command)?;
            self.members.push(Member {
                guest,
                before: Before::default(),
            });
            self.started += 1;
        }
        self.fill = Some(fill);
        for member in &mut self.members[old..] {
            lap_of(&mut member.guest)?;
            member.before = Before::of(member.guest.pid())?;
        }
        Ok(())
    }

    /// Starts `count` programs by `words`, all memory of which may be merged, and waits until each is ready.
    pub(super) fn launch(&mut self, words: &[String], count: u64) -> Result<(), BenchError> {
        let launcher = self.engine.launcher();
        let old = self.members.len();
        for _ in 0..count {
            let mut command = match launcher.is_empty() {
                true => Command::new(&words[0]),
                false => {
                    let mut command = (self.program)();
                    command.args(&launcher).arg(&words[0]);
                    command
                }
            };
            let guest = Guest::start(command.args(&words[1..]))?;
            let before = Before::default();
            self.members.push(Member { guest, before });
        }
        for member in &mut self.members[old..] {
            ready(&mut member.guest)?;
        }
        Ok(())
    }

    /// Waits until what guests and engine take has stood still: that is the figure `name`.
    pub(super) fn rest(&mut self, name: &str) -> Result<(), BenchError> {
        let began = Instant::now();
        let period = Duration::from_millis(self.setting.merge_period_ms);
        let (mut least, mut since) = (u64::MAX, Instant::now());
        loop {
            let used = self.read()?.used();
            if used < least - least / 200 {
                (least, since) = (used, Instant::now());
            }
            let flat = since.elapsed() >= STILL + period * 4;
            let time = began.elapsed();
            if time >= self.limit() * 2 || (flat && time >= LATE + period * 4) {
                self.figure(name, mib(i64::try_from(used).unwrap_or(i64::MAX)));
                return Ok(());
            }
            std::thread::sleep(LOOK);
            if (self.interrupted)() {
                return Err(BenchError::Interrupted);
            }
        }
    }

    /// All programs make a turn of their work for each of the right answers; what differs is an error.
    pub(super) fn turns(&mut self, right: &[String]) -> Result<(), BenchError> {
        let mut seconds = 0.0;
        for right in right {
            let (answers, time) = self.turn()?;
            seconds += time;
            let wrong = answers.iter().filter(|answer| *answer != right).count();
            self.outcome.errors += wrong as u64;
        }
        self.figure(
            "turn_s",
            seconds / steps((right.len() * self.members.len()) as u64),
        );
        Ok(())
    }

    /// All programs make a turn of their work at once: what each answered, and the seconds that it took, in sum.
    fn turn(&mut self) -> Result<(Vec<String>, f64), BenchError> {
        for member in &mut self.members {
            member.guest.tell(TURN)?;
        }
        let (mut answers, mut seconds) = (Vec::new(), 0.0);
        for member in &mut self.members {
            let (answer, time) = answer(&mut member.guest)?;
            answers.push(answer);
            seconds += time;
        }
        Ok((answers, seconds))
    }

    /// Ends all programs. The CPU time of engine and agents from the begin on is a figure.
    pub(super) fn part(&mut self) -> Result<(), BenchError> {
        let last = self.read()?;
        (self.ended.0, self.ended.1) = (last.agents_cpu, last.work_cpu);
        self.members.clear();
        let cpu = last.merging().saturating_sub(self.begin.merging());
        self.figure("cpu_s", cpu.as_secs_f64());
        Ok(())
    }

    /// From now on memory and time count, and the engine may begin.
    pub(super) fn begin(&mut self) -> Result<(), BenchError> {
        self.begin = self.read()?;
        self.engine.allow()
    }

    /// Has the guests from number `from` on, in the order of their start, offer their memory.
    pub(super) fn offer_from(&mut self, from: usize) -> Result<(), BenchError> {
        for member in &mut self.members[from..] {
            member.guest.tell("offer")?;
        }
        for member in &mut self.members[from..] {
            lap_of(&mut member.guest)?;
        }
        Ok(())
    }

    /// All guests offer their memory, and the engine may begin.
    pub(super) fn offer(&mut self) -> Result<(), BenchError> {
        self.begin()?;
        self.offer_from(0)
    }

    /// How many guests live.
    pub(super) fn living(&self) -> usize {
        self.members.len()
    }

    /// Verifies and ends the guest that was started first.
    pub(super) fn end_first(&mut self) -> Result<(), BenchError> {
        let mut first = self.members.remove(0);
        first.guest.tell("verify")?;
        let lap = lap_of(&mut first.guest)?;
        self.count(&lap);
        let last = Reading::take(None, &[first.guest.pid()])?;
        self.ended.0 += last.agents_cpu;
        self.ended.1 += last.work_cpu;
        Ok(())
    }

    /// Gives all guests an order; their laps together.
    pub(super) fn order(&mut self, order: &str) -> Result<Lap, BenchError> {
        for member in &mut self.members {
            member.guest.tell(order)?;
        }
        let mut sum = Lap::default();
        for member in &mut self.members {
            sum.add(&lap_of(&mut member.guest)?);
        }
        Ok(sum)
    }

    /// Samples every now and then; gives the samples of this time.
    pub(super) fn follow(&mut self, until: Until) -> Result<Vec<Sample>, BenchError> {
        let (began, first) = (Instant::now(), self.outcome.samples.len());
        loop {
            let asked = Instant::now();
            let now = self.read()?;
            let sample = self.sample(&now);
            self.outcome.samples.push(sample);
            let done = match until {
                Until::Passed(time) => began.elapsed() >= time,
                Until::Settled => self.begin.at.elapsed() >= self.limit() || self.has_settled()?,
            };
            if done {
                return Ok(self.outcome.samples[first..].to_vec());
            }
            let mut pause = SAMPLE.max(asked.elapsed() * SHARE);
            if let Until::Passed(time) = until {
                pause = pause.min(time.saturating_sub(began.elapsed()));
            }
            std::thread::sleep(pause);
            if (self.interrupted)() {
                return Err(BenchError::Interrupted);
            }
        }
    }

    fn has_settled(&mut self) -> Result<bool, BenchError> {
        let ideal = self.ideal();
        let window = (self.setting.merge_period_ms * FLAT_PERIODS).max(FLAT_LEAST_MS);
        let flat = self.curve.is_flat(ideal, Duration::from_millis(window));
        // Without an engine there is nothing to wait for.
        let half = self.engine.process().is_none() || self.curve.reached(ideal, 50).is_some();
        Ok(flat && half && self.engine.is_done()?)
    }

    fn ideal(&self) -> u64 {
        self.fill
            .as_ref()
            .map_or(0, |fill| fill.ideal_bytes(self.members.len() as u64))
    }

    fn before(&self) -> Before {
        self.members.iter().map(|member| member.before).sum()
    }

    fn overhead(&self, now: &Reading) -> i64 {
        now.overhead(self.before(), &self.begin)
    }

    fn read(&self) -> Result<Reading, BenchError> {
        let mut guests = Vec::new();
        for member in &self.members {
            let pid = member.guest.pid();
            let children = sys::process::descendants(pid);
            guests.push(pid);
            guests.extend(children.map_err(BenchError::system("cannot list a guest's children"))?);
        }
        let mut now = Reading::take(self.engine.process(), &guests)?;
        now.agents_cpu += self.ended.0;
        now.work_cpu += self.ended.1;
        Ok(now)
    }

    fn sample(&mut self, now: &Reading) -> Sample {
        let saved = now.saved(self.before());
        let net = saved - self.overhead(now);
        let at = now.at.saturating_duration_since(self.begin.at);
        let cpu = now.merging().saturating_sub(self.begin.merging());
        self.curve.push(curve::Sample {
            at,
            saved: net,
            cpu,
        });
        Sample {
            at_s: at.as_secs_f64(),
            ideal_mib: mib(i64::try_from(self.ideal()).unwrap_or(i64::MAX)),
            saved_mib: mib(saved),
            net_mib: mib(net),
            cpu_s: cpu.as_secs_f64(),
        }
    }

    /// Sets a figure of the table.
    pub(super) fn figure(&mut self, name: &str, value: f64) {
        assert!(
            super::figures::named(name).is_some(),
            "no such figure: {name}"
        );
        self.outcome.figures.insert(name.to_owned(), value);
    }

    /// The figures of a saving that should have settled: how much, how soon, for how much CPU time.
    pub(super) fn saving(&mut self) -> Result<(), BenchError> {
        let ideal = self.ideal();
        let share =
            |part: f64| 100.0 * part / mib(i64::try_from(ideal).unwrap_or(i64::MAX)).max(1e-9);
        let last = self.outcome.samples.last().copied().unwrap_or_default();
        let now = self.read()?;
        if ideal > 0 {
            self.figure("saved_percent", share(last.saved_mib));
            self.figure("net_percent", share(last.net_mib));
            let gained = difference(now.available, self.begin.available);
            self.figure("available_percent", share(mib(gained)));
        }
        self.figure("metadata_mib", mib(self.overhead(&now)));
        self.figure("slab_mib", mib(difference(now.slab, self.begin.slab)));
        self.figure("cpu_s", last.cpu_s);
        let at = |sample: Option<&curve::Sample>| {
            sample.map(|s| (s.at.as_secs_f64(), s.cpu.as_secs_f64()))
        };
        let half = at(self.curve.reached(ideal, 50).filter(|_| ideal > 0));
        let most = at(self.curve.reached(ideal, 95).filter(|_| ideal > 0));
        if let Some((time, _)) = half {
            self.figure("t50_s", time);
        }
        if let Some((time, cpu)) = most {
            self.figure("t95_s", time);
            self.figure("cpu_t95_s", cpu);
        }
        Ok(())
    }

    /// How much of the guests' memory lies in huge pages: that is the figure `name`.
    pub(super) fn huge(&mut self, name: &str) -> Result<(), BenchError> {
        let of = |member: &Member| sys::usage::huge_bytes(member.guest.pid());
        let huge: std::io::Result<u64> = self.members.iter().map(of).sum();
        let huge = huge.map_err(BenchError::system("cannot read a guest's memory"))?;
        let all = self.setting.guest_mib * self.members.len() as u64;
        let huge = mib(i64::try_from(huge).unwrap_or(i64::MAX));
        self.figure(name, 100.0 * huge / steps(all));
        Ok(())
    }

    /// Percentiles of the accesses of `kind` in `phase`, as figures and as a curve.
    pub(super) fn times(&mut self, kind: &str, times: &Histogram) {
        let curve: Vec<_> = RANKS
            .iter()
            .filter_map(|&rank| Some((rank, times.at(rank)?)))
            .collect();
        for (rank, name) in [
            (500_000, "p50"),
            (990_000, "p99"),
            (999_000, "p999"),
            (1_000_000, "max"),
        ] {
            if let Some(ns) = times.at(rank) {
                self.figure(&format!("{kind}_{name}_us"), micros(ns));
            }
        }
        self.outcome.curves.insert(kind.to_owned(), curve);
    }

    /// All guests compare their bytes with what they should be, and the figures of the whole run are made.
    pub(super) fn finish(mut self) -> Result<Outcome, BenchError> {
        let now = self.read()?;
        let machine = now.machine.since(&self.begin.machine);
        let own = now.all().saturating_sub(self.begin.all());
        let others = machine.busy.saturating_sub(own).as_secs_f64();
        let time = (machine.busy + machine.idle + machine.stolen).as_secs_f64();
        self.figure("others_percent", 100.0 * others / time.max(1e-9));
        self.figure("stolen_percent", machine.stolen_percent());
        let most = self.outcome.samples.iter().map(|sample| sample.ideal_mib);
        let most = most.fold(0.0, f64::max);
        self.figure("ideal_mib", most);
        self.outcome.hindrance = self.engine.hindrance()?;
        let lap = self.order("verify")?;
        self.count(&lap);
        Ok(self.outcome)
    }

    fn count(&mut self, lap: &Lap) {
        self.outcome.verified_bytes += lap.verified_bytes;
        self.outcome.errors += lap.errors;
    }

    /// What the guests used since the begin: faults, and CPU time of engine and agents.
    pub(super) fn used(&self) -> Result<(u64, Duration), BenchError> {
        let now = self.read()?;
        Ok((now.faults, now.merging()))
    }
}

/// Whether a program is in one of the folders of PATH.
pub(super) fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// What the programs that speak in turns answer to `count` orders, alone: the right answers.
pub(super) fn right_answers(words: &[String], count: usize) -> Result<Vec<String>, BenchError> {
    let mut guest = Guest::start(Command::new(&words[0]).args(&words[1..]))?;
    ready(&mut guest)?;
    let ask = |_| {
        guest.tell(TURN)?;
        Ok(answer(&mut guest)?.0)
    };
    (0..count).map(ask).collect()
}

fn ready(guest: &mut Guest) -> Result<(), BenchError> {
    match guest.line(PATIENCE)?.as_str() {
        "ready" => Ok(()),
        other => Err(guest.failed(format!("said {other:?} in place of \"ready\""))),
    }
}

/// An answer, and the seconds that its turn took.
fn answer(guest: &mut Guest) -> Result<(String, f64), BenchError> {
    let line = guest.line(PATIENCE)?;
    let parts = line.rsplit_once(' ');
    let parts = parts.and_then(|(answer, ms)| Some((answer, ms.parse::<f64>().ok()?)));
    match parts {
        Some((answer, ms)) => Ok((answer.to_owned(), ms / 1000.0)),
        None => Err(guest.failed(format!("answered {line:?}"))),
    }
}

fn lap_of(guest: &mut Guest) -> Result<Lap, BenchError> {
    let line = guest.line(PATIENCE)?;
    serde_json::from_str(&line).map_err(|_| guest.failed(format!("answered {line:?}")))
}

/// A count to divide by.
#[expect(clippy::cast_precision_loss, reason = "2^53 steps are exact")]
pub(super) fn steps(steps: u64) -> f64 {
    steps.max(1) as f64
}

#[expect(clippy::cast_precision_loss, reason = "2^53 bytes are exact")]
pub(super) fn mib(bytes: i64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[expect(clippy::cast_precision_loss, reason = "half a microsecond in a year")]
pub(super) fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}
