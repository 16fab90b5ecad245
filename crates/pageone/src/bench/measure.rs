//! One run: guests, one contender, the clock.
//!
//! ```text
//!  fill ─▶ baseline ─▶ offer ─▶ [observe] ─▶ merging may start ─▶ t50 ─▶ t95 ─▶ flat ─▶ steady ─▶ verify
//!          memory, CPU                       t = 0                                     CPU only
//! ```
//!
//! Memory and CPU time count from the baseline, before the offer, so all preparation is charged to
//! the contender. The time of t50 and t95 counts from the moment merging may start.

use std::cell::Cell;
use std::ffi::OsString;
use std::process::Command;
use std::time::{Duration, Instant};

use sys::meminfo::{self, MemInfo};
use sys::signals::{self, Signals};
use sys::usage;

use super::content::Content;
use super::curve::{Curve, Sample};
use super::error::BenchError;
use super::guests::Guest;
use super::report::Row;

const MIB: u64 = 1 << 20;
/// Time between two samples.
const SAMPLE: Duration = Duration::from_millis(50);
/// How long the saving must not grow before the run counts as settled.
const FLAT: Duration = Duration::from_secs(2);
/// Longest wait for the guests to fill or verify their memory.
const PATIENCE: Duration = Duration::from_secs(300);

/// What merges: KSM or PageONE, one at a time.
pub(super) trait Contender {
    /// Its name in the rows.
    fn name(&self) -> &'static str;
    /// Its worker threads.
    fn threads(&self) -> u16;
    /// Prepares the command of a guest, before any is started.
    fn equip(&self, guest: &mut Command);
    /// The words of this program's command line that start another, all of whose memory may be merged. None: it is started as it is.
    fn launcher(&self) -> Vec<OsString> {
        Vec::new()
    }
    /// All guests have offered their memory: it may begin.
    ///
    /// # Errors
    /// It cannot.
    fn allow(&mut self) -> Result<(), BenchError>;
    /// Whether it has begun to merge: its observing time, if it has one, is over.
    ///
    /// # Errors
    /// It does not answer.
    fn has_begun(&mut self) -> Result<bool, BenchError>;
    /// Whether it has looked at all that was offered; true if it cannot tell.
    ///
    /// # Errors
    /// It does not answer.
    fn is_done(&mut self) -> Result<bool, BenchError>;
    /// What kept it from merging more, if it tells.
    ///
    /// # Errors
    /// It does not answer.
    fn hindrance(&mut self) -> Result<Option<String>, BenchError> {
        Ok(None)
    }
    /// The process or kernel thread that works for it, if there is one. The guests' own CPU time and
    /// memory are counted as its agents'.
    fn process(&self) -> Option<u32>;
    /// Merging is done: from now on it runs as in daily life.
    ///
    /// # Errors
    /// It refuses.
    fn relax(&mut self) -> Result<(), BenchError>;
}

/// What to run.
pub(super) struct Plan<'a> {
    /// Number of guests.
    pub guests: u64,
    /// What is in them.
    pub content: Content,
    /// How long to measure the steady state.
    pub steady: Duration,
    /// Longest time from the offer to a settled saving.
    pub limit: Duration,
    /// A command that runs [`serve_guest`](super::guests::serve_guest) as the guest of this number.
    pub guest: &'a dyn Fn(u64) -> Command,
    /// Whether the user has broken it off.
    pub interrupted: &'a dyn Fn() -> bool,
    /// Is told what happens, for a person.
    pub progress: &'a dyn Fn(&str),
}

/// The memory that `guests` guests of `guest_mib` MiB take, in bytes: their pages, 2 % for page
/// tables and whatever a merger keeps per page, and room for everything else to go on.
#[must_use]
pub(super) fn memory_needed(guests: u64, guest_mib: u64) -> u64 {
    let own = guests.saturating_mul(guest_mib).saturating_mul(MIB);
    own.saturating_add(own / 50).saturating_add(512 * MIB)
}

/// Checks that the machine has the memory for `guests` guests of `guest_mib` MiB.
///
/// # Errors
/// [`BenchError::Memory`] with the figures.
pub(super) fn check_memory(guests: u64, guest_mib: u64) -> Result<(), BenchError> {
    let need = memory_needed(guests, guest_mib);
    let now = MemInfo::read().map_err(BenchError::system("cannot read memory"))?;
    if need <= now.available {
        return Ok(());
    }
    Err(BenchError::Memory {
        guests,
        guest_mib,
        need_mib: need / MIB,
        have_mib: now.available / MIB,
    })
}

impl Plan<'_> {
    /// Checks that the machine has the memory.
    ///
    /// # Errors
    /// [`BenchError::Memory`] with the figures.
    pub(super) fn check_memory(&self) -> Result<(), BenchError> {
        check_memory(self.guests, self.content.pages / 256)
    }

    fn pause(&self, time: Duration) -> Result<(), BenchError> {
        std::thread::sleep(time);
        match (self.interrupted)() {
            true => Err(BenchError::Interrupted),
            false => Ok(()),
        }
    }
}

/// Lets `contender` merge the guests of `plan`, and measures it.
///
/// # Errors
/// Too little memory, a guest or the contender failed, or the user broke it off. Bytes that are
/// not what they should be are no error here but a figure of the row.
pub(super) fn measure(plan: &Plan<'_>, contender: &mut dyn Contender) -> Result<Row, BenchError> {
    plan.check_memory()?;
    let title = format!("{}, {} threads", contender.name(), contender.threads());
    (plan.progress)(&format!("{title}: filling {} guests", plan.guests));
    let mut guests = start_guests(plan, contender)?;
    plan.pause(Duration::from_secs(1))?;
    let result = Run::begin(plan, contender, &mut guests).and_then(|run| run.finish(&title));
    // Broken off by Ctrl-C, the guests get the signal too: say what really happened.
    result.map_err(|error| match (plan.interrupted)() {
        true => BenchError::Interrupted,
        false => error,
    })
}

fn start_guests(plan: &Plan<'_>, contender: &dyn Contender) -> Result<Vec<Guest>, BenchError> {
    let mut guests = Vec::new();
    for number in 0..plan.guests {
        let mut command = (plan.guest)(number);
        contender.equip(&mut command);
        guests.push(Guest::start(&mut command)?);
    }
    for guest in &mut guests {
        guest.answer(PATIENCE)?;
    }
    Ok(guests)
}

/// A run in progress.
struct Run<'a> {
    plan: &'a Plan<'a>,
    contender: &'a mut dyn Contender,
    guests: &'a mut [Guest],
    ideal: u64,
    memory: MemInfo,
    content: u64,
    own: u64,
    cpu: Duration,
    offered: Instant,
}

impl<'a> Run<'a> {
    fn begin(
        plan: &'a Plan<'a>,
        contender: &'a mut dyn Contender,
        guests: &'a mut [Guest],
    ) -> Result<Self, BenchError> {
        let own = own_bytes(contender);
        let ideal = plan.content.ideal_saved_bytes(plan.guests);
        let mut run = Self {
            plan,
            contender,
            guests,
            ideal,
            memory: MemInfo::default(),
            content: 0,
            own,
            cpu: Duration::ZERO,
            offered: Instant::now(),
        };
        run.content = run.content_now()?;
        run.memory = memory_now()?;
        run.cpu = run.cpu_now()?;
        run.offered = Instant::now();
        Ok(run)
    }

    /// CPU time of the contender and of all guests, whose only work now is the agents'.
    fn cpu_now(&self) -> Result<Duration, BenchError> {
        let engine = self.contender.process().into_iter();
        let all = engine.chain(self.guests.iter().map(Guest::pid));
        let times = all.map(usage::cpu_time);
        let sum = times.sum::<std::io::Result<Duration>>();
        sum.map_err(BenchError::system("cannot read CPU times"))
    }

    fn finish(mut self, title: &str) -> Result<Row, BenchError> {
        self.tell_all("offer")?;
        self.contender.allow()?;
        let start = self.observe()?;
        let observe = start.saturating_duration_since(self.offered);
        (self.plan.progress)(&format!("{title}: merging"));
        let curve = self.follow(start)?;
        (self.plan.progress)(&format!(
            "{title}: {} s of steady state",
            self.plan.steady.as_secs()
        ));
        let memory = memory_now()?;
        let cpu_total = self.cpu_now()?.saturating_sub(self.cpu);
        let hindrance = self.contender.hindrance()?;
        let steady = self.steady()?;
        (self.plan.progress)(&format!("{title}: verifying"));
        let (verified_bytes, errors) = self.verify()?;
        let t95 = curve.reached(self.ideal, 95);
        let row = Row {
            engine: self.contender.name().to_owned(),
            threads: self.contender.threads(),
            ideal_saved_bytes: self.ideal,
            // Now that all was read, every merged page is mapped again and counts.
            saved_bytes: difference(self.content, self.content_now()?),
            net_saved_bytes: curve.settled(Duration::from_secs(1)),
            observe_s: observe.as_secs_f64(),
            t50_s: curve.reached(self.ideal, 50).map(|s| s.at.as_secs_f64()),
            t95_s: t95.map(|s| s.at.as_secs_f64()),
            cpu_s: t95.map(|s| s.cpu.as_secs_f64()),
            cpu_total_s: cpu_total.as_secs_f64(),
            steady_cpu_percent: steady,
            metadata_bytes: self.metadata(&memory),
            verified_bytes,
            errors,
            hindrance,
            disturbed: false,
        };
        Ok(row.judged())
    }

    fn tell_all(&mut self, order: &str) -> Result<(), BenchError> {
        for guest in self.guests.iter_mut() {
            guest.tell(order)?;
        }
        for guest in self.guests.iter_mut() {
            guest.answer(PATIENCE)?;
        }
        Ok(())
    }

    /// Waits until the contender begins; gives the last moment at which it had not.
    fn observe(&mut self) -> Result<Instant, BenchError> {
        loop {
            let before = Instant::now();
            if self.contender.has_begun()? {
                return Ok(before);
            }
            if self.offered.elapsed() > self.plan.limit {
                let why = format!("did not begin within {:?}", self.plan.limit);
                let name = self.contender.name();
                return Err(BenchError::Contender { name, why });
            }
            self.plan.pause(SAMPLE)?;
        }
    }

    /// Samples until nothing more is gained, or the time is over.
    fn follow(&mut self, start: Instant) -> Result<Curve, BenchError> {
        let mut curve = Curve::default();
        loop {
            let memory = memory_now()?;
            curve.push(Sample {
                at: start.elapsed(),
                saved: difference(memory.available, self.memory.available),
                cpu: self.cpu_now()?.saturating_sub(self.cpu),
            });
            let settled =
                curve.is_flat(self.ideal, FLAT) && curve.reached(self.ideal, 50).is_some();
            if settled && self.contender.is_done()? || self.offered.elapsed() > self.plan.limit {
                return Ok(curve);
            }
            self.plan.pause(SAMPLE)?;
        }
    }

    /// Percent of one core that the contender takes when nothing changes any more.
    fn steady(&mut self) -> Result<f64, BenchError> {
        self.contender.relax()?;
        self.wait(Duration::from_secs(1))?;
        let (begin, cpu) = (Instant::now(), self.cpu_now()?);
        self.wait(self.plan.steady)?;
        let used = self.cpu_now()?.saturating_sub(cpu);
        Ok(100.0 * used.as_secs_f64() / begin.elapsed().as_secs_f64().max(1e-9))
    }

    fn wait(&self, time: Duration) -> Result<(), BenchError> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            self.plan.pause(left.min(SAMPLE))?;
        }
        Ok(())
    }

    fn verify(&mut self) -> Result<(u64, u64), BenchError> {
        for guest in self.guests.iter_mut() {
            guest.tell("verify")?;
        }
        let mut sum = (0, 0);
        for guest in self.guests.iter_mut() {
            let answer = guest.answer(PATIENCE)?;
            sum = (sum.0 + answer.verified_bytes, sum.1 + answer.errors);
        }
        Ok(sum)
    }

    /// Memory of all guests; a frame that n of them map counts 1/n in each.
    fn content_now(&self) -> Result<u64, BenchError> {
        let each = self
            .guests
            .iter()
            .map(|guest| usage::proportional_bytes(guest.pid()));
        let sum = each.sum::<std::io::Result<u64>>();
        sum.map_err(BenchError::system("cannot read the guests' memory"))
    }

    fn own_growth(&self) -> i64 {
        difference(own_bytes(self.contender), self.own)
    }

    fn metadata(&self, now: &MemInfo) -> i64 {
        difference(now.bookkeeping(), self.memory.bookkeeping()) + self.own_growth()
    }
}

/// What is available counts the CPUs' own free lists too: merging frees in bulk, and the kernel
/// takes minutes to empty them.
///
/// # Errors
/// /proc cannot be read.
pub(super) fn memory_now() -> Result<MemInfo, BenchError> {
    let read = || {
        let info = MemInfo::read()?;
        Ok(MemInfo {
            available: info.available + meminfo::cpu_lists()?,
            ..info
        })
    };
    read().map_err(BenchError::system("cannot read memory"))
}

/// Memory of the contender's own process; a kernel thread has none.
fn own_bytes(contender: &dyn Contender) -> u64 {
    let process = contender.process();
    process.map_or(0, |pid| usage::anonymous_bytes(pid).unwrap_or(0))
}

pub(super) fn difference(a: u64, b: u64) -> i64 {
    let bytes = i128::from(a) - i128::from(b);
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Tells whether a signal has asked this process to end: once it was so, it stays so. The signals that ask end nothing by
/// themselves any more.
///
/// # Errors
/// The kernel does not let signals be waited for.
pub(super) fn interrupted() -> Result<impl Fn() -> bool, BenchError> {
    let waited = [signals::SIGINT, signals::SIGTERM, signals::SIGHUP];
    let signals = Signals::block(&waited).map_err(BenchError::system("cannot wait for signals"))?;
    let broken_off = Cell::new(false);
    Ok(move || {
        let now = signals.next().is_ok_and(|arrived| arrived.is_some());
        broken_off.set(broken_off.get() || now);
        broken_off.get()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twelve_guests_of_a_gibibyte_fit_24_gib_and_200_do_not() {
        let available = 23 << 30;
        assert!(memory_needed(12, 1024) < available);
        assert!(memory_needed(200, 1024) > available);
        assert_eq!(memory_needed(u64::MAX, u64::MAX), u64::MAX);
    }

    #[test]
    fn differences_have_a_sign() {
        assert_eq!(difference(3, 5), -2);
        assert_eq!(difference(u64::MAX, 0), i64::MAX);
    }
}
