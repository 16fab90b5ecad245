//! The engine as its owner sees it: start, admit guests, read counters, turn knobs, stop.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use numa::{HeapView, NodeId};
use sys::closers::Late;
use sys::keeper::{Keeper, Kept};
use sys::process::{self, Cgroup};
use sys::stranger::Stranger;
use wire::{DomainMark, MergedNow, RunMode, Setting, Status, Viewer};

use crate::domain::Domain;
use crate::domain::lifelines::Lifeline;
use crate::domain::placement::Atlas;
use crate::domain::placement::Placement;
use crate::error::{EngineError, Refusal};
use crate::facilities::{self, Right};
use crate::guest::Newcomer;
use crate::guest::process::{Applicant, ProcessMemory};
use crate::guest::socket::SocketLink;
use crate::handover::restore::Restorer;
use crate::handover::saved_knobs::SavedKnobs;
use crate::merge::read::Hasher;
use crate::options::Options;
use crate::page::PAGE;
use crate::run::core::Core;
use crate::run::driver::{self, Driver};
use crate::run::knobs::Knobs;
use crate::run::wishes::Wish;
use crate::run::workers::{STUCK, Workers};
use crate::sync::{KNOBS, Ordered, lock};
use crate::users::CHEAP;
use crate::users::refusals::Refusals;

/// A running engine. Dropping it stops it, and ends the workers. Guests keep their merged memory: it lives as long as they map it.
#[derive(Debug)]
pub struct Engine {
    driver: Arc<Driver>,
    /// Where stores are made.
    placement: Placement,
    /// Where a guest's pages are.
    atlas: Arc<Atlas>,
    /// Held while knobs are turned.
    turned: Ordered<SavedKnobs, KNOBS>,
    /// The right to userfaultfd, to hand to guests.
    right: Right,
    thread: Option<JoinHandle<()>>,
}

/// What the engine has of a guest that was welcomed.
type Welcomed = (Arc<Domain>, ProcessMemory, Box<dyn Lifeline>);

/// What stands for a domain on the wire: of its name, so that it is the same for the next engine. An agent does
/// with it nothing that could harm another, so no user gains by two names with one mark.
#[must_use]
pub fn mark(domain: &str) -> DomainMark {
    let hash = twox_hash::XxHash3_128::oneshot(domain.as_bytes());
    #[allow(clippy::cast_possible_truncation)] // both halves
    let halves = [hash as u64, (hash >> 64) as u64];
    DomainMark(halves)
}

/// Says in the log where stores are.
fn tell_nodes(placement: &Placement, across: bool) {
    let real = |node: NodeId| placement.topology.real_node(node).unwrap_or(node).0;
    let nodes: Vec<_> = placement.nodes.iter().map(|&node| real(node)).collect();
    let count = nodes.len();
    tracing::info!(nodes = count, across, "a store a node: {nodes:?}");
}

/// Starts the driver's thread.
fn begin_to_drive(driver: &Arc<Driver>) -> std::io::Result<JoinHandle<()>> {
    let driver = Arc::clone(driver);
    #[cfg(debug_assertions)]
    let check = crate::check::check;
    #[cfg(not(debug_assertions))]
    let check = |_: &Core| ();
    let drive = move || {
        let workers = Workers::new(Arc::clone(&driver.core), STUCK);
        driver::drive(&driver, &workers, check);
    };
    let thread = std::thread::Builder::new().name("pageone-driver".to_owned());
    thread.spawn(drive)
}

impl Engine {
    /// Starts an engine: workers, and a driver that begins a round every period. With a keeper, the engine leaves its stores to it,
    /// and takes over what a former engine left there. What does not fit is named in the log, and starts afresh.
    ///
    /// # Errors
    /// [`EngineError::Missing`] names what the kernel lacks.
    pub fn start(
        mut options: Options,
        mut legacy: Option<(Arc<Keeper>, Vec<Kept>)>,
    ) -> Result<Self, EngineError> {
        options.check()?;
        let turned = match &mut legacy {
            Some((keeper, kept)) => {
                SavedKnobs::load(&mut options.knobs, Some(Arc::clone(keeper)), kept)
            }
            None => SavedKnobs::default(),
        };
        facilities::page_map()?;
        facilities::reading()?;
        let right = facilities::userfaultfd()?;
        facilities::lifelines()?;
        let system = |what| move |source| EngineError::System { what, source };
        let max_mappings = process::max_map_count().map_err(system("read vm.max_map_count"))?;
        let hasher = Hasher::new().map_err(system("get random numbers"))?;
        if let Err(error) = process::raise_descriptor_limit() {
            tracing::warn!(%error, "cannot raise the limit of open descriptors");
        }
        sys::pins::prepare();
        let knobs = Knobs::new(&options, max_mappings);
        let placement =
            facilities::placement(options.topology).map_err(system("read the NUMA topology"))?;
        let atlas = Arc::new(facilities::atlas(&placement)?);
        placement.place_indexes(&options.knobs);
        tell_nodes(&placement, options.knobs.merge_across_nodes);
        let restorer = Restorer {
            placement: placement.clone(),
            keeper: legacy.as_ref().map(|(keeper, _)| Arc::clone(keeper)),
        };
        let its = restorer.clone();
        let new_domain = Box::new(move |domain: &str| its.new_domain(domain));
        let core = Arc::new(Core::new(knobs, options.limits, hasher, new_domain));
        if let Some((keeper, kept)) = legacy {
            restorer.restore(&core, &keeper, kept);
        }
        let driver = Arc::new(Driver::new(core));
        let thread = begin_to_drive(&driver).map_err(system("start a thread"))?;
        Ok(Self {
            driver,
            placement,
            atlas,
            turned: Ordered::new(turned),
            right,
            thread: Some(thread),
        })
    }

    /// Takes a guest whose hello has been read, into `domain`. Waits for no agent longer than for a moment (I7): the rest of the
    /// handshake happens in the next round. A guest that cannot be admitted is told why, and so is the log. One whose
    /// domain rests on its `cgroup` leaves it with the cgroup.
    pub fn admit(&self, caller: Stranger, domain: &str, cgroup: Option<Cgroup>) {
        let (core, peer) = (&self.driver.core, caller.peer());
        // By number: that it was this process's is known when the applicant is.
        let answers = core.principal(peer);
        let principal = *answers.as_ref().unwrap_or(&peer.uid);
        let mut link = Box::new(SocketLink::new(caller, principal));
        // The kernel may take long to show even the first of its threads.
        let applicant = answers.and_then(|_| match core.users.pause(principal) {
            Some(left) => Err(Refusal::Haste {
                uid: principal,
                left,
            }),
            None => Applicant::new(link.socket(), principal, cgroup),
        });
        match applicant.and_then(|applicant| self.welcome(&mut link, applicant, domain)) {
            Ok((domain, memory, line)) => {
                let newcomer = Newcomer {
                    peer,
                    domain,
                    memory: Box::new(memory),
                    link,
                    line,
                };
                core.admit(principal, newcomer);
                self.driver.tell(|signal| signal.nudge = true);
            }
            Err(why) => {
                let mark = match why.is_about_the_process() {
                    true => DomainMark::NONE,
                    false => mark(domain),
                };
                if matches!(why, Refusal::Crowded { .. }) {
                    core.users.note_admission(principal, CHEAP);
                }
                let why = why.to_string();
                link.refuse(&why, mark);
                core.users.refusals.tell(peer.uid, peer.pid, &why);
            }
        }
    }

    fn welcome(
        &self,
        link: &mut SocketLink,
        applicant: Applicant,
        name: &str,
    ) -> Result<Welcomed, Refusal> {
        let core = &self.driver.core;
        let (pid, principal) = (applicant.pid(), applicant.principal());
        // Of two with this number one has ended, and the applicant lives.
        if !core.end_last_session(pid) {
            return Err(Refusal::Session { pid });
        }
        core.check_quota(principal, name)?;
        let domain = core.domain(name)?;
        domain.note_guest_of(&core.users.get(principal));
        // A description for each guest: locks of one go with it. It is closed late, as others may have locks on the store.
        let shared = domain.nodes.iter().map(|node| node.store.share());
        let late = |shared: std::io::Result<_>| shared.map(|store| Late::new(principal, store));
        let shared = shared.map(late).collect::<std::io::Result<Vec<_>>>()?;
        let stores: Vec<_> = shared.iter().map(|store| store.as_fd()).collect();
        let device = match &self.right {
            Right::Lends(device) => Some(device.as_fd()),
            Right::Own | Right::None => None,
        };
        let tie = domain.handover.tie()?;
        let (line, number) = link.welcome(mark(name), tie.as_fd(), &stores, device)?;
        let memory = ProcessMemory::new(
            applicant,
            link.socket().watch(),
            number,
            Arc::clone(&self.atlas),
            core.users.limits,
        );
        Ok((domain, memory, line))
    }

    /// Why processes are not served: what the log and the status tell.
    #[must_use]
    pub fn refusals(&self) -> Arc<Refusals> {
        Arc::clone(&self.driver.core.users.refusals)
    }

    /// The counters.
    #[must_use]
    pub fn status(&self) -> Status {
        crate::status::status(&self.driver.core)
    }

    /// The slots of all stores by node and zone, with their counters. A domain's last guest takes
    /// the domain's store along, and so its slots and counters, unless refs of former engines wait there.
    #[must_use]
    pub fn heap(&self) -> HeapView {
        let domains: Vec<_> = lock(&self.driver.core.domains).values().cloned().collect();
        let mut sum = self.placement.heap().view();
        for domain in domains {
            sum.add(&domain.slots.heap_view());
        }
        sum
    }

    /// Merges the memory of guests at once, as far as it lies in `range`: what equals other memory at this moment need not have
    /// been quiet. `tell` is called once with what came of it, by another thread or before this returns. It must not wait.
    ///
    /// A user may ask for guests that he sees, with `all` for those of all users. Of a `brief` one a part is done, in a fraction
    /// of a second.
    pub fn merge_now(
        &self,
        (viewer, all): (&Viewer, bool),
        pids: &[u32],
        range: Range<u64>,
        brief: bool,
        tell: impl FnOnce(Result<MergedNow, EngineError>) + Send + 'static,
    ) {
        let core = &self.driver.core;
        let run = core.knobs.values().run;
        if run != RunMode::Run {
            return tell(Err(EngineError::Halted { run: run.into() }));
        }
        match core.find_guests((viewer, all), pids) {
            Ok(guests) => {
                core.wishes.add(Wish {
                    uid: viewer.uid,
                    guests,
                    range,
                    brief,
                    tell: Box::new(tell),
                });
                self.driver.tell(|signal| signal.nudge = true);
            }
            Err(error) => tell(Err(error)),
        }
    }

    /// Turns knobs, all or none. `run = 2` returns when the last merged page is private.
    ///
    /// # Errors
    /// [`EngineError::Range`] for a value out of range, [`EngineError::NoMemory`] when private
    /// copies would not fit, [`EngineError::Shared`] for a knob that cannot turn while pages are
    /// shared; all before any knob is turned. [`EngineError::Unmerging`] when guests do not answer;
    /// their pages are unmerged as soon as they do.
    pub fn set(&self, settings: &[Setting]) -> Result<(), EngineError> {
        let mut turned = lock(&self.turned);
        self.turn(settings, &mut turned)
    }

    /// Gives all merged pages private copies, turns knobs, and goes on in the former mode, or in
    /// the one that `settings` name.
    ///
    /// # Errors
    /// As [`Self::set`]; then no knob is turned, and merging goes on as before.
    pub fn set_unmerged(&self, settings: &[Setting]) -> Result<(), EngineError> {
        let mut noted = lock(&self.turned);
        self.check(&[Setting::Run(RunMode::Unmerge)])?;
        self.check(settings)?;
        let knobs = &self.driver.core.knobs;
        let former = knobs.values().run;
        knobs.turn([Setting::Run(RunMode::Unmerge)]);
        let unmerged = self.driver.unmerge();
        let turned = unmerged.and_then(|()| self.turn(settings, &mut noted));
        if !settings
            .iter()
            .any(|setting| matches!(setting, Setting::Run(_)))
            || turned.is_err()
        {
            knobs.turn([Setting::Run(former)]);
        }
        self.driver.tell(|signal| signal.nudge = true);
        turned
    }

    fn turn(&self, settings: &[Setting], turned: &mut SavedKnobs) -> Result<(), EngineError> {
        self.check(settings)?;
        let knobs = &self.driver.core.knobs;
        self.driver.switch(settings)?;
        knobs.turn(settings.iter().copied());
        self.placement.place_indexes(&knobs.values());
        for setting in settings {
            tracing::info!(knob = setting.key(), value = %setting, "a knob is turned");
        }
        turned.note(settings);
        self.driver.core.queue.wake();
        self.driver.tell(|signal| signal.nudge = true);
        match settings.contains(&Setting::Run(RunMode::Unmerge)) {
            true => self.driver.unmerge(),
            false => Ok(()),
        }
    }

    fn check(&self, settings: &[Setting]) -> Result<(), EngineError> {
        for (at, setting) in settings.iter().enumerate() {
            setting.check()?;
            let knob = setting.key();
            if settings[..at].iter().any(|before| before.key() == knob) {
                return Err(EngineError::Twice { knob });
            }
        }
        if settings.contains(&Setting::Run(RunMode::Unmerge)) {
            let needed = driver::merged(&self.driver.core) * PAGE;
            let available = process::available_memory().unwrap_or(u64::MAX);
            if needed >= available {
                return Err(EngineError::NoMemory { needed, available });
            }
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.driver.tell(|signal| signal.stop = true);
        self.driver.core.queue.cut();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use wire::{KnobValues, Pace};

    fn engine() -> Option<Engine> {
        let options = Options {
            knobs: KnobValues {
                threads: 2,
                merge_period_ms: 10,
                ..KnobValues::default()
            },
            ..Options::default()
        };
        match Engine::start(options, None) {
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
        let twice = [Setting::UseZeroPages(false), Setting::UseZeroPages(false)];
        let refused = engine.set(&twice).unwrap_err().to_string();
        assert_eq!(refused, "use_zero_pages is named twice");
        assert!(engine.status().knobs.use_zero_pages, "nothing was turned");
        let right = [
            Setting::UseZeroPages(false),
            Setting::Threads(3),
            Setting::MergePeriodMs(50),
            Setting::CpuLimit(50),
            Setting::Pace(Pace::Auto),
            Setting::Run(RunMode::Unmerge),
        ];
        engine.set(&right).unwrap();
        let status = engine.status().knobs;
        assert_eq!((status.cpu_limit, status.pace), (50, Pace::Auto));
        assert_eq!((status.threads, status.merge_period_ms), (3, 50));
        assert_eq!(
            (status.use_zero_pages, status.run),
            (false, RunMode::Unmerge)
        );
    }

    #[test]
    fn a_limit_beyond_all_cpus_is_refused_and_a_fixed_pace_keeps_the_knob() {
        let Some(engine) = engine() else {
            return;
        };
        let refused = engine.set(&[Setting::CpuLimit(10_000_000)]).unwrap_err();
        assert!(refused.to_string().contains("cpu_limit"), "{refused}");
        let status = engine.status().knobs;
        assert_eq!((status.cpu_limit, status.pace), (0, Pace::Fixed));
        assert_eq!(engine.status().effective_period_ms, status.merge_period_ms);
    }

    #[test]
    fn a_guest_that_never_answers_is_no_obstacle() {
        let Some(engine) = engine() else {
            return;
        };
        let (ours, theirs) = sys::socket::pair().unwrap();
        engine.admit(Stranger::new(ours).unwrap(), "silent", None);
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
            knobs: KnobValues {
                merge_period_ms: 1,
                ..KnobValues::default()
            },
            ..Options::default()
        };
        let error = Engine::start(options, None).unwrap_err();
        assert!(
            error.to_string().contains("merge_period cannot be 1"),
            "{error}"
        );
    }
}
