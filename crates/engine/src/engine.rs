//! The engine as its owner sees it: start, admit guests, read counters, turn knobs, stop.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use numa::{HeapView, NodeId, Topology};
use sys::keeper::{Keeper, Kept};
use sys::process;
use wire::{Pace, RunMode, Setting, Status, Thp};

use crate::account::Home;
use crate::guest::Standing;
use crate::link::{ProcessMemory, SocketLink};
use crate::nodes::{Atlas, Rules};
use crate::pace::{Pacer, Supply};
use crate::page::Class;
use crate::read::Hasher;
use crate::realm::lock;
use crate::remember::Turned;
use crate::schedule::{Core, Knobs, Scratch};
use crate::succeed::Maker;
use crate::workers::{STUCK, Workers};

/// How an engine starts.
#[derive(Clone, Debug)]
pub struct Options {
    /// Worker threads; at least 1.
    pub threads: u16,
    /// The time between two looks at what was written.
    pub merge_period: Duration,
    /// Whether pages of zeros map the kernel's zero page.
    pub use_zero_pages: bool,
    /// Whether pages are merged again that the guest wrote since, where nothing can pin them.
    pub merge_again: bool,
    /// The least time in which such a page grows older by one of its two periods: longer than any
    /// system call keeps a page pinned for itself.
    pub broken_rest: Duration,
    /// Whether to merge from the start.
    pub run: RunMode,
    /// The most CPU time to use, in percent of a core; 0 for no limit.
    pub cpu_limit: u32,
    /// How the period is chosen.
    pub pace: Pace,
    /// What is done with chunks that are one huge page.
    pub thp: Thp,
    /// How long a worker waits for an agent's answer before it turns to other guests.
    pub patience: Duration,
    /// Whether pages of different nodes may share.
    pub merge_across_nodes: bool,
    /// Pages that may share one copy; at least 2.
    pub max_page_sharing: u32,
    /// The most canonical pages that all stores hold, in MiB; 0 for no limit.
    pub store_limit_mib: u64,
    /// The machine's nodes; `None`: as the kernel shows them. An emulated topology makes the engine
    /// treat parts of memory as nodes.
    pub topology: Option<Topology>,
}

impl Default for Options {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            threads: u16::try_from(cpus).unwrap_or(u16::MAX),
            merge_period: Duration::from_secs(20),
            use_zero_pages: true,
            merge_again: true,
            broken_rest: Duration::from_millis(500),
            run: RunMode::Run,
            cpu_limit: 0,
            pace: Pace::Fixed,
            thp: Thp::Split,
            patience: Duration::from_millis(50),
            merge_across_nodes: true,
            max_page_sharing: 256,
            store_limit_mib: 0,
            topology: None,
        }
    }
}

/// Why the engine cannot start or a knob cannot turn.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The kernel or the machine's policy lacks something the engine needs.
    #[error("{what} is missing: {needs}")]
    Missing {
        /// The facility.
        what: &'static str,
        /// What would provide it.
        needs: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A setting lies outside its range.
    #[error("{knob} cannot be {value}: it takes {range}")]
    Range {
        /// The knob's name.
        knob: &'static str,
        /// The value asked for.
        value: u64,
        /// What it takes.
        range: &'static str,
    },
    /// Private copies of all merged pages would not fit memory.
    #[error("unmerging needs {needed} bytes of memory, {available} are available")]
    NoMemory {
        /// Bytes that private copies take.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
    /// What may be shared with what cannot change under shared pages.
    #[error(
        "{pages} pages are shared, and {knob} cannot change under them: unmerge them first \
         (pageone set --unmerge {knob}=…)"
    )]
    Shared {
        /// The knob's name.
        knob: &'static str,
        /// Pages that share a copy, or are about to.
        pages: u64,
    },
    /// The engine ends.
    #[error("the engine ends")]
    Ends,
    /// Some guests did not give their merged pages private copies in time.
    #[error("{left} pages are still merged: their guests do not answer")]
    Unmerging {
        /// Pages still merged.
        left: u64,
    },
    /// A system call failed.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// Milliseconds a merge period may last: from 10 to a day.
const PERIODS_MS: std::ops::RangeInclusive<u64> = 10..=86_400_000;
const MAX_THREADS: u16 = 1024;
const MAX_SHARING: u32 = 1_000_000;
/// How often ended guests are looked for between rounds.
const REAP: Duration = Duration::from_secs(1);
/// How long unmerging goes on without any progress.
const UNMERGE_PATIENCE: Duration = Duration::from_secs(5);

/// A running engine. Dropping it stops it.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    driver: Option<JoinHandle<()>>,
}

struct Shared {
    core: Arc<Core>,
    /// Where stores are made.
    home: Home,
    /// Where a guest's pages are.
    atlas: Arc<Atlas>,
    /// Held while knobs are turned.
    turned: Mutex<Turned>,
    /// `/dev/userfaultfd`, to hand to guests; `None` when this process may not open it.
    device: Option<OwnedFd>,
    signal: Mutex<Signal>,
    /// The signal changed.
    changed: Condvar,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

/// What the driver is told and tells.
#[derive(Default)]
struct Signal {
    stop: bool,
    /// Guests or knobs changed: look at the clock again.
    nudge: bool,
    /// Unmerging: how often asked for, how often finished, and what was left the last time.
    wishes: u64,
    granted: u64,
    left: u64,
    /// New rules asked for, and what became of the last ones: how many pages are shared.
    rules: Option<Rules>,
    shared: Option<u64>,
}

impl Engine {
    /// Starts an engine: workers, and a driver that begins a round every period.
    ///
    /// # Errors
    /// [`EngineError::Missing`] names what the kernel lacks.
    pub fn start(options: Options) -> Result<Self, EngineError> {
        Self::begin(options, None)
    }

    /// Starts an engine that leaves its stores to `keeper`, and takes over those that a former
    /// engine left: `kept`. What does not fit is named in the log, and starts afresh.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn succeed(
        options: Options,
        keeper: Arc<Keeper>,
        kept: Vec<Kept>,
    ) -> Result<Self, EngineError> {
        Self::begin(options, Some((keeper, kept)))
    }

    fn begin(
        mut options: Options,
        mut legacy: Option<(Arc<Keeper>, Vec<Kept>)>,
    ) -> Result<Self, EngineError> {
        check_range(
            "merge_period_ms",
            millis(options.merge_period),
            PERIODS_MS,
            PERIODS,
        )?;
        check_threads(options.threads)?;
        check_cpu_limit(options.cpu_limit)?;
        check_sharing(options.max_page_sharing)?;
        let turned = match &mut legacy {
            Some((keeper, kept)) => Turned::take_over(&mut options, Some(Arc::clone(keeper)), kept),
            None => Turned::default(),
        };
        let device = check_facilities()?;
        let system = |what| move |source| EngineError::System { what, source };
        let max_mappings = process::max_map_count().map_err(system("read vm.max_map_count"))?;
        let hasher = Hasher::new().map_err(system("get random numbers"))?;
        if let Err(error) = process::raise_descriptor_limit() {
            tracing::warn!(%error, "cannot raise the limit of open descriptors");
        }
        let knobs = Knobs::new(&options, max_mappings);
        let home = find_home(options.topology).map_err(system("read the NUMA topology"))?;
        let atlas = Arc::new(find_atlas(&home)?);
        let real = |node: NodeId| home.topology.real_node(node).unwrap_or(node);
        tracing::info!(
            nodes = home.nodes.len(),
            across = options.merge_across_nodes,
            "a store a node: {:?}",
            home.nodes
                .iter()
                .map(|&node| real(node).0)
                .collect::<Vec<_>>()
        );
        let maker = Maker {
            home: home.clone(),
            keeper: legacy.as_ref().map(|(keeper, _)| Arc::clone(keeper)),
        };
        let new_realm = {
            let maker = maker.clone();
            move |domain: &str| maker.new_realm(domain)
        };
        let core = Arc::new(Core::new(knobs, hasher, Box::new(new_realm)));
        if let Some((keeper, kept)) = legacy {
            maker.take_over(&core, &keeper, kept);
        }
        let shared = Arc::new(Shared {
            core: Arc::clone(&core),
            home,
            atlas,
            turned: Mutex::new(turned),
            device,
            signal: Mutex::default(),
            changed: Condvar::new(),
        });
        let its_shared = Arc::clone(&shared);
        let driver = std::thread::Builder::new()
            .name("pageone-driver".to_owned())
            .spawn(move || drive(&its_shared, &Workers::new(core, STUCK)))
            .map_err(system("start a thread"))?;
        Ok(Self {
            shared,
            driver: Some(driver),
        })
    }

    /// Takes a guest whose hello has been read, into `domain`. Never blocks: the rest of the
    /// handshake happens in the next round. A guest that cannot be admitted is told by the end of
    /// its connection, the log by a warning.
    pub fn admit(&self, socket: OwnedFd, peer: sys::socket::Peer, domain: &str) {
        match self.welcome(socket, peer, domain) {
            Ok(()) => self.shared.tell(|signal| signal.nudge = true),
            Err(error) => tracing::warn!(pid = peer.pid, %error, "a guest cannot be admitted"),
        }
    }

    fn welcome(
        &self,
        socket: OwnedFd,
        peer: sys::socket::Peer,
        domain: &str,
    ) -> std::io::Result<()> {
        let core = &self.shared.core;
        let atlas = Arc::clone(&self.shared.atlas);
        let memory = Box::new(ProcessMemory::open(peer.pid, atlas)?);
        let mut link = Box::new(SocketLink::new(socket)?);
        let realm = core.realm(domain)?;
        let stores = realm.floors().map(|floor| floor.store.share());
        let stores = stores.collect::<std::io::Result<Vec<_>>>()?;
        let device = self.shared.device.as_ref().map(AsFd::as_fd);
        let no_tie = std::io::Error::from(std::io::ErrorKind::Unsupported);
        let tie = realm.bequest.as_ref().ok_or(no_tie)?.tie()?;
        let line = link.welcome(tie.as_fd(), &stores, device)?;
        core.admit(peer.pid, realm, memory, link, line);
        Ok(())
    }

    /// The counters.
    #[must_use]
    pub fn status(&self) -> Status {
        crate::status::status(&self.shared.core)
    }

    /// The slots of all stores by node and zone, with their counters. A domain's last guest takes
    /// the domain's store along, and so its slots and counters.
    #[must_use]
    pub fn heap(&self) -> HeapView {
        let realms: Vec<_> = lock(&self.shared.core.realms).values().cloned().collect();
        let mut sum = self.shared.home.heap().view();
        for realm in realms {
            sum.add(&realm.slots.heap_view());
        }
        sum
    }

    /// Turns knobs, all or none. `run = 2` returns when the last merged page is private.
    ///
    /// # Errors
    /// [`EngineError::Range`] for a value out of range, [`EngineError::NoMemory`] when private
    /// copies would not fit, [`EngineError::Shared`] for a knob that cannot turn while pages are
    /// shared; all before any knob is turned. [`EngineError::Unmerging`] when guests do not answer;
    /// their pages are unmerged as soon as they do.
    pub fn set(&self, settings: &[Setting]) -> Result<(), EngineError> {
        let mut turned = lock(&self.shared.turned);
        self.turn(settings, &mut turned)
    }

    /// Gives all merged pages private copies, turns knobs, and goes on in the former mode, or in
    /// the one that `settings` name.
    ///
    /// # Errors
    /// As [`Self::set`]; then no knob is turned, and merging goes on as before.
    pub fn set_unmerged(&self, settings: &[Setting]) -> Result<(), EngineError> {
        let mut noted = lock(&self.shared.turned);
        let all = [&[Setting::Run(RunMode::Unmerge)], settings].concat();
        all.iter().try_for_each(|setting| self.check(setting))?;
        let knobs = &self.shared.core.knobs;
        let former = knobs.mode();
        knobs.set_mode(RunMode::Unmerge);
        let unmerged = self.shared.unmerge();
        let turned = unmerged.and_then(|()| self.turn(settings, &mut noted));
        if !settings
            .iter()
            .any(|setting| matches!(setting, Setting::Run(_)))
            || turned.is_err()
        {
            knobs.set_mode(former);
        }
        self.shared.tell(|signal| signal.nudge = true);
        turned
    }

    fn turn(&self, settings: &[Setting], turned: &mut Turned) -> Result<(), EngineError> {
        settings
            .iter()
            .try_for_each(|setting| self.check(setting))?;
        let knobs = &self.shared.core.knobs;
        self.shared.switch(settings)?;
        for setting in settings {
            match *setting {
                Setting::Run(mode) => knobs.set_mode(mode),
                Setting::MergePeriodMs(period) => knobs.period_ms.store(period, Relaxed),
                Setting::Threads(threads) => knobs.threads.store(threads, Relaxed),
                Setting::UseZeroPages(on) => knobs.use_zero_pages.store(on, Relaxed),
                Setting::MergeAcrossNodes(_) | Setting::MaxPageSharing(_) => {} // rules, above
                Setting::MergeAgain(on) => knobs.merge_again.store(on, Relaxed),
                Setting::CpuLimit(percent) => knobs.cpu_limit.store(percent, Relaxed),
                Setting::Pace(pace) => knobs.set_pace(pace),
                Setting::Thp(thp) => knobs.set_thp(thp),
                Setting::StoreLimitMib(mib) => knobs.store_limit_mib.store(mib, Relaxed),
            }
            tracing::info!(?setting, "a knob is turned");
        }
        turned.note(settings);
        self.shared.core.queue.wake();
        self.shared.tell(|signal| signal.nudge = true);
        match settings.contains(&Setting::Run(RunMode::Unmerge)) && knobs.mode() == RunMode::Unmerge
        {
            true => self.shared.unmerge(),
            false => Ok(()),
        }
    }

    fn check(&self, setting: &Setting) -> Result<(), EngineError> {
        if let Setting::Run(RunMode::Unmerge) = setting {
            let needed = merged(&self.shared.core) * wire::PAGE_BYTES as u64;
            let available = process::available_memory().unwrap_or(u64::MAX);
            if needed >= available {
                return Err(EngineError::NoMemory { needed, available });
            }
        }
        check_value(setting)
    }

    /// Ends the workers. Guests keep their merged memory: it lives as long as they map it.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.shared.tell(|signal| signal.stop = true);
        self.shared.core.queue.clear();
        if let Some(driver) = self.driver.take() {
            let _ = driver.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.end();
    }
}

/// Whether a knob takes a value at all.
pub(crate) fn check_value(setting: &Setting) -> Result<(), EngineError> {
    match *setting {
        Setting::MergePeriodMs(period) => {
            check_range("merge_period_ms", period, PERIODS_MS, PERIODS)
        }
        Setting::Threads(threads) => check_threads(threads),
        Setting::CpuLimit(percent) => check_cpu_limit(percent),
        Setting::MaxPageSharing(pages) => check_sharing(pages),
        Setting::Run(_)
        | Setting::UseZeroPages(_)
        | Setting::MergeAgain(_)
        | Setting::MergeAcrossNodes(_)
        | Setting::Thp(_)
        | Setting::StoreLimitMib(_)
        | Setting::Pace(_) => Ok(()),
    }
}

const PERIODS: &str = "10 to 86400000 milliseconds";

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn check_threads(threads: u16) -> Result<(), EngineError> {
    check_range(
        "threads",
        threads.into(),
        1..=MAX_THREADS.into(),
        "1 to 1024",
    )
}

/// 0 is no limit; beyond all CPUs there is nothing to limit.
fn check_cpu_limit(percent: u32) -> Result<(), EngineError> {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let most = (cpus as u64).saturating_mul(100);
    let range = "1 to 100 for each CPU, or 0 for no limit";
    check_range("cpu_limit", percent.into(), 0..=most, range)
}

fn check_sharing(pages: u32) -> Result<(), EngineError> {
    check_range(
        "max_page_sharing",
        pages.into(),
        2..=MAX_SHARING.into(),
        "2 to 1000000",
    )
}

fn check_range(
    knob: &'static str,
    value: u64,
    allowed: std::ops::RangeInclusive<u64>,
    range: &'static str,
) -> Result<(), EngineError> {
    match allowed.contains(&value) {
        true => Ok(()),
        false => Err(EngineError::Range { knob, value, range }),
    }
}

/// Tries what the engine and its guests need of the kernel; gives the userfaultfd device where this
/// process may open it.
fn check_facilities() -> Result<Option<OwnedFd>, EngineError> {
    let missing = |what, needs| {
        move |error: rustix::io::Errno| EngineError::Missing {
            what,
            needs,
            source: error.into(),
        }
    };
    sys::pagemap::probe().map_err(missing(
        "PAGEMAP_SCAN",
        "Linux 6.7 or newer with /proc mounted",
    ))?;
    let device = sys::uffd::Uffd::device().ok();
    let tried = match &device {
        Some(device) => sys::uffd::Uffd::from_device(device.as_fd()),
        None => sys::uffd::Uffd::open(),
    };
    match tried {
        Ok(_) => Ok(device),
        // Guests may have a right of their own that this process lacks.
        Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => {
            tracing::warn!("no right to userfaultfd here: guests need one of their own");
            Ok(None)
        }
        Err(error) => Err(missing(
            "userfaultfd with WP_ASYNC and MOVE",
            "Linux 6.8 or newer built with CONFIG_USERFAULTFD",
        )(error)),
    }
}

/// Where stores are made: one on each node with memory.
fn find_home(topology: Option<Topology>) -> std::io::Result<Home> {
    let topology = match topology {
        Some(topology) => topology,
        None => Topology::live().map_err(std::io::Error::other)?,
    };
    Home::new(topology).ok_or_else(|| std::io::Error::other("no node has memory"))
}

/// How to tell where pages are, tried on a page of this process.
fn find_atlas(home: &Home) -> Result<Atlas, EngineError> {
    let missing = |what, needs, source| EngineError::Missing {
        what,
        needs,
        source,
    };
    let atlas = Atlas::new(home).ok_or_else(|| {
        missing(
            "the place of emulated nodes in physical memory",
            "a kernel with memory hot-plug (/sys/devices/system/memory)",
            std::io::ErrorKind::Unsupported.into(),
        )
    })?;
    if let Atlas::Ranges(_) = atlas {
        let page = std::hint::black_box([1u8; 1]);
        let at = page.as_ptr() as u64 / wire::PAGE_BYTES as u64 * wire::PAGE_BYTES as u64;
        let map = sys::pagemap::Pagemap::open(std::process::id());
        let frames = map.and_then(|map| map.frames(at..at + wire::PAGE_BYTES as u64));
        let frames = frames.map_err(std::io::Error::from);
        let needs = "CAP_SYS_ADMIN: run as root";
        let denied = |source| missing("the right to read frame numbers", needs, source);
        match frames.map_err(denied)?.first() {
            Some(&frame) if frame != 0 => {}
            _ => return Err(denied(std::io::ErrorKind::PermissionDenied.into())),
        }
    }
    Ok(atlas)
}

/// Pages that guests in service map from stores.
fn merged(core: &Core) -> u64 {
    let guests = lock(&core.guests);
    let served = guests
        .iter()
        .filter(|guest| guest.standing() == Standing::Served);
    served
        .map(|guest| guest.counters.pages(Class::Merged))
        .sum()
}

impl Shared {
    fn tell(&self, change: impl FnOnce(&mut Signal)) {
        change(&mut lock(&self.signal));
        self.changed.notify_all();
    }

    /// Waits until the driver has unmerged what can be.
    fn unmerge(&self) -> Result<(), EngineError> {
        let mut signal = lock(&self.signal);
        signal.wishes += 1;
        let ticket = signal.wishes;
        self.changed.notify_all();
        let waits = |signal: &mut Signal| signal.granted < ticket && !signal.stop;
        let signal = self
            .changed
            .wait_while(signal, waits)
            .unwrap_or_else(PoisonError::into_inner);
        match signal.left {
            0 => Ok(()),
            left => Err(EngineError::Unmerging { left }),
        }
    }

    /// Has the driver change the rules as `settings` say; waits for it.
    fn switch(&self, settings: &[Setting]) -> Result<(), EngineError> {
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
        let mut signal = lock(&self.signal);
        (signal.rules, signal.shared) = (Some(rules), None);
        self.changed.notify_all();
        let waits = |signal: &mut Signal| signal.shared.is_none() && !signal.stop;
        let mut signal = self
            .changed
            .wait_while(signal, waits)
            .unwrap_or_else(PoisonError::into_inner);
        match signal.shared.take() {
            Some(0) => Ok(()),
            Some(pages) => Err(EngineError::Shared { knob, pages }),
            None => Err(EngineError::Ends),
        }
    }

    /// Waits until something is told, at most until `due`.
    fn wait(&self, due: Instant) {
        let signal = lock(&self.signal);
        let quiet = |signal: &mut Signal| {
            let idle = signal.wishes == signal.granted && signal.rules.is_none();
            !signal.stop && !signal.nudge && idle
        };
        let left = due.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(signal, left, quiet);
        let (mut signal, _) = waited.unwrap_or_else(PoisonError::into_inner);
        signal.nudge = false;
    }

    fn wishes_unmerge(&self) -> bool {
        let signal = lock(&self.signal);
        signal.wishes > signal.granted
    }

    fn is_stopped(&self) -> bool {
        lock(&self.signal).stop
    }
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
        if knobs.pace() == Pace::Fixed {
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

/// Begins a round every period; in between, does what cannot wait.
fn drive(shared: &Shared, workers: &Workers) {
    let core = &shared.core;
    let mut scratch = Scratch::new();
    let mut last: Option<Instant> = None;
    let mut tempo = Tempo::default();
    while !shared.is_stopped() {
        workers.resize();
        tempo.keep(&core.knobs);
        if shared.wishes_unmerge() {
            unmerge_all(shared, workers);
        }
        let rules = lock(&shared.signal).rules.take();
        if let Some(rules) = rules {
            let left = core.switch(rules);
            shared.tell(|signal| signal.shared = Some(left));
        }
        let now = Instant::now();
        let empty = lock(&core.guests).is_empty();
        // Without guests there is no period to keep: the first guest begins one.
        let due = match last {
            _ if empty => now + core.knobs.period().max(REAP),
            None => now,
            Some(last) => last + core.knobs.period(),
        };
        if empty {
            last = None;
        } else if due <= now {
            if last.is_none() {
                std::thread::sleep(GREETING);
            }
            last = Some(Instant::now());
            core.round(workers, true);
            if cfg!(debug_assertions) {
                crate::check::check(core);
            }
            continue;
        }
        shared.wait(due.min(now + REAP));
        core.reap(&mut scratch);
    }
    workers.stop();
    lock(&core.guests).clear();
    lock(&core.realms).clear();
}

/// Unmerges until nothing is merged or nothing moves any more.
fn unmerge_all(shared: &Shared, workers: &Workers) {
    let core = &shared.core;
    let wishes = lock(&shared.signal).wishes;
    let (mut left, mut moved) = (merged(core), Instant::now());
    while left > 0 && moved.elapsed() < UNMERGE_PATIENCE && !shared.is_stopped() {
        core.round(workers, false);
        let now = merged(core);
        if now == left {
            std::thread::sleep(core.knobs.patience.max(Duration::from_millis(1)));
        } else {
            (left, moved) = (now, Instant::now());
        }
    }
    shared.tell(|signal| {
        signal.granted = wishes;
        signal.left = left;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine() -> Option<Engine> {
        let options = Options {
            threads: 2,
            merge_period: Duration::from_millis(10),
            ..Options::default()
        };
        match Engine::start(options) {
            Ok(engine) => Some(engine),
            Err(error @ EngineError::Missing { .. }) => {
                eprintln!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn knobs_turn_all_or_none() {
        let Some(engine) = engine() else {
            return;
        };
        let wrong = [Setting::UseZeroPages(false), Setting::Threads(0)];
        let refused = engine.set(&wrong).unwrap_err().to_string();
        assert_eq!(refused, "threads cannot be 0: it takes 1 to 1024");
        assert!(engine.status().use_zero_pages, "nothing was turned");
        let right = [
            Setting::UseZeroPages(false),
            Setting::Threads(3),
            Setting::MergePeriodMs(50),
            Setting::CpuLimit(50),
            Setting::Pace(Pace::Auto),
            Setting::Run(RunMode::Unmerge),
        ];
        engine.set(&right).unwrap();
        let status = engine.status();
        assert_eq!((status.cpu_limit, status.pace), (50, Pace::Auto));
        assert_eq!((status.threads, status.merge_period_ms), (3, 50));
        assert_eq!(
            (status.use_zero_pages, status.run),
            (false, RunMode::Unmerge)
        );
        engine.stop();
    }

    #[test]
    fn a_limit_beyond_all_cpus_is_refused_and_a_fixed_pace_keeps_the_knob() {
        let Some(engine) = engine() else {
            return;
        };
        let refused = engine.set(&[Setting::CpuLimit(10_000_000)]).unwrap_err();
        assert!(refused.to_string().contains("cpu_limit"), "{refused}");
        let status = engine.status();
        assert_eq!((status.cpu_limit, status.pace), (0, Pace::Fixed));
        assert_eq!(status.effective_period_ms, status.merge_period_ms);
    }

    #[test]
    fn a_guest_that_never_answers_is_no_obstacle() {
        let Some(engine) = engine() else {
            return;
        };
        let (ours, theirs) = sys::socket::pair().unwrap();
        let peer = sys::socket::peer(&ours).unwrap();
        engine.admit(ours, peer, "somebody");
        while engine.status().full_scans < 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let status = engine.status();
        assert_eq!(
            (status.guests.len(), status.guests[0].responsive),
            (1, false)
        );
        drop(theirs);
        while !engine.status().guests.is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        engine.set(&[Setting::Run(RunMode::Unmerge)]).unwrap();
    }

    #[test]
    fn a_period_out_of_range_is_refused_at_start() {
        let options = Options {
            merge_period: Duration::from_millis(1),
            ..Options::default()
        };
        let error = Engine::start(options).unwrap_err();
        assert!(
            matches!(error, EngineError::Range { value: 1, .. }),
            "{error}"
        );
    }
}
