//! The agent's thread: finds an engine, answers its questions, and outlives it.
//!
//! Everything here runs on the thread of `sys::thread`: no thread-local storage, no libc heap.
//! When the engine goes, the guest keeps its merged pages (the store lives as long as they do).
//! New offers are passed on, and the thread looks for an engine every second. While one is there and it fails, it
//! waits longer from time to time, up to a minute, and a new offer begins anew.

use std::cell::Cell;
use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::io::{Errno, Result};
use sys::rights::{Difference, Rights, Threads};
use sys::socket::Received;
use sys::uffd::{Freezer, Uffd};
use wire::{
    Answer, Changes, Hello, MAX_MESSAGE, MAX_STORES, Merged, PAGE_BYTES, PageBits, PageOutcome,
    Question, Ready, Reception, Role, Unmerge, Welcome,
};

use super::alone::Alone;
use super::domain;
use super::link::Link;
use super::report;
use crate::any::{self, Walks};
use crate::config::config;
use crate::filter::narrow::narrow;
use crate::lock::{ALONE, Guard, SEARCHING, SERVED, lock, lock_between_forks, per_process};
use crate::mappings::frames::make_private;
use crate::mappings::private::{self, give_back_all};
use crate::mappings::scarce::scarce;
use crate::mappings::tally;
use crate::mappings::whole::{self, Lent, whole_if_ample};
use crate::mappings::{lines, stores, strays};
use crate::thread::{self, Life, Why};
use crate::window::{self, Window};

/// The agent's thread.
pub(crate) extern "C" fn main() -> ! {
    // A hook's work lies on its thread's stack, which may have a protection key.
    sys::keys::open_all();
    if sys::thread::leave_descriptors().is_ok() {
        sys::thread::set_name(thread::NAME);
        if let Some(process) = per_process() {
            begin(&process.life);
        }
    }
    sys::thread::leave(0)
}

fn begin(life: &'static Life) {
    let alone = Alone::new();
    let has_lived = life.has_lived.load(Ordering::Relaxed);
    if let Some(after) = config().any.filter(|_| !has_lived) {
        // A short life costs no filter of the thread's own. What the program offers itself does not wait for it.
        life.nap(life.offers(), Duration::ZERO, after, || {
            alone.leave_if_last()
        });
        if life.must_end() {
            return;
        }
    }
    // Without /proc there is no session either. The rights of the program: without the filter that comes next.
    if let (Ok(rights), Ok(threads)) = (Rights::own(), Threads::open()) {
        // Filters may end a program for such calls, as QEMU's do (`resourcecontrol=deny`).
        if rights.filter_count() == 0 {
            sys::thread::be_ordinary();
        }
        let own = Own {
            life,
            rights,
            threads,
            narrowed: narrow(),
            freezer: Cell::default(),
            last_look: Cell::default(),
            next_look: Cell::default(),
        };
        run(&own, &alone);
        if let Some(mut guard) = lock() {
            whole::lend(&mut guard, Lent::default());
        }
    }
}

/// The shortest time between two attempts to find an engine.
const SECOND: Duration = Duration::from_secs(1);
/// The longest, while an engine is there and it fails.
const MINUTE: Duration = Duration::from_secs(60);

/// What this thread knows of itself.
struct Own {
    life: &'static Life,
    /// What it could do when it began, which is what the program could.
    rights: Rights,
    /// All of the program's.
    threads: Threads,
    /// Whether it has its own filter.
    narrowed: Result<()>,
    /// What froze in the last session.
    freezer: Cell<Option<Freezer>>,
    /// What the last comparison of all threads found while there was no engine, and when the next one is due.
    last_look: Cell<Option<Differ>>,
    next_look: Cell<Duration>,
}

/// How the program's threads differ from this one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Differ {
    /// One does: there is no session until it is gone. Another has the rights of this thread, so the program
    /// has no less of them while this thread waits.
    Odd,
    /// All do, or there is a filter that was not read: this thread must go.
    All,
}

impl Own {
    /// Why the agent may not serve, if threads of the program have changed their rights in a way that no hook saw. Or
    /// the program was not the same throughout when this thread was made. A filter that was not read may refuse anything.
    fn differs(&self) -> Option<(Differ, Why)> {
        let before = self.life.thread_before();
        match self.threads.differ_from(&self.rights, Some(before)) {
            Ok(None) => None,
            Ok(Some(Difference::Filters)) => {
                thread::bar(Why::filter(0));
                give_back_all();
                Some((Differ::All, Why::filter(0)))
            }
            Ok(Some(Difference::Alone)) => {
                self.life.want_another();
                Some((Differ::All, Why::THREADS))
            }
            Ok(Some(Difference::Credentials)) => Some((Differ::Odd, Why::THREADS)),
            Err(_) => Some((Differ::All, Why::THREADS)),
        }
    }

    /// Whether this thread must go.
    fn must_end(&self) -> bool {
        self.life.must_end() || matches!(self.differs(), Some((Differ::All, _)))
    }

    /// How they differ, where there is no engine. Of many threads it takes long to tell, so the last answer counts for a while.
    fn differ_by_now(&self) -> Option<Differ> {
        let begun = thread::now();
        if begun >= self.next_look.get() {
            self.last_look.set(self.differs().map(|found| found.0));
            let took = thread::now() - begun;
            let pause = (took * any::SPARING).min(MINUTE);
            self.next_look.set(begun + took + pause);
        }
        self.last_look.get()
    }
}

fn run(own: &Own, alone: &Alone) {
    let life = own.life;
    if life.is_hasty() {
        life.nap(life.offers(), thread::HASTE, thread::HASTE, || {
            alone.leave_if_last()
        });
    }
    let mut pause = SECOND;
    while !life.must_end() {
        let seen = life.offers();
        let ended = match own.differ_by_now() {
            None => meet(own, alone),
            Some(Differ::Odd) => Ok(Met::Nobody),
            Some(Differ::All) => break,
        };
        let must_end = match ended {
            Ok(Met::Nobody) => life.must_end(),
            _ => own.must_end(),
        };
        if must_end {
            break;
        }
        leave_alone();
        alone.leave_if_last();
        whole::thaw_left();
        let failed = ended.is_err();
        let more = life.nap(seen, SECOND, if failed { pause } else { SECOND }, || {
            alone.leave_if_last()
        });
        pause = match failed && !more {
            true => (pause * 2).min(MINUTE),
            false => SECOND,
        };
    }
    if !life.must_end() {
        leave_alone();
    } else if let Some(guard) = lock() {
        // The next thread may find an engine at once: what is offered meanwhile is not passed on.
        let serving = &guard.process().serving;
        let order = Ordering::Relaxed;
        let _ = serving.compare_exchange(SERVED, SEARCHING, order, order);
    }
}

/// Who was there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Met {
    Engine,
    Nobody,
}

/// Finds an engine, and serves it to its end, unless the program's threads differ.
fn meet(own: &Own, alone: &Alone) -> Result<Met> {
    let link = match connect(own.life, alone) {
        Ok(link) => link,
        // It costs little to ask whether there is one, and it shall not wait for its guests.
        Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) => return Ok(Met::Nobody),
        Err(errno) => return Err(errno),
    };
    if own.differs().is_none() {
        session(&link, own)?;
    }
    Ok(Met::Engine)
}

/// No engine serves now. What was offered before that was known is passed on to KSM.
///
/// The offers wait for this, because KSM is slow to let go: it looks at every page.
fn leave_alone() {
    let Some(guard) = lock() else { return };
    let before = guard.process().serving.swap(ALONE, Ordering::Relaxed);
    drop(guard);
    if before == SEARCHING {
        report::pass_on_to_ksm();
    }
}

/// Connects to the engine. While too many wait to be taken by it, this is tried again and again for a second. Another user
/// can fill that queue as fast as the engine empties it, but has no place in it for good: short pauses find a free one.
///
/// The tempting alternative, to wait in connect(2), cannot be ended: a call before which the agent must go would wait
/// for the engine.
fn connect<'a>(life: &'a Life, alone: &'a Alone) -> Result<Link<'a>> {
    let path = CStr::from_bytes_until_nul(&config().path).map_err(|_| Errno::NAMETOOLONG)?;
    if path.is_empty() {
        return Err(Errno::NOENT);
    }
    let began = thread::now();
    loop {
        let past = thread::now().saturating_sub(began);
        match Link::connect(path, life, alone) {
            Err(Errno::AGAIN) if past < SECOND && !life.must_end() => {
                let pause = until_next_try(past);
                life.nap(life.offers(), pause, pause, || {});
            }
            connected => return connected,
        }
    }
}

/// How long to wait for a free place after waiting for `past`: some milliseconds, ever more of them, and never the same
/// number, so that those who wait do not come all at once.
fn until_next_try(past: Duration) -> Duration {
    let most = Duration::from_millis(2) + past / 64;
    most / 2 + most * (past.subsec_nanos() % 1024) / 2048
}

/// What one connection to an engine holds.
struct Session<'a> {
    window: Window,
    stores: [Option<OwnedFd>; MAX_STORES],
    lifeline: usize,
    tie: usize,
    own: &'a Own,
    walks: Walks,
}

/// Says hello; gives the engine's answer, and what came with it.
///
/// # Errors
/// The engine refuses this process, or says something unintelligible.
fn hear_welcome(link: &Link<'_>, buffer: &mut [u8; MAX_MESSAGE]) -> Result<(Welcome, Received)> {
    let hello = Hello {
        role: Role::Agent,
        domain: config().domain,
    };
    let len = hello.encode(buffer);
    link.send(buffer.get(..len).unwrap_or_default())?;
    let received = link.receive(buffer)?;
    let packet = buffer.get(..received.len).unwrap_or_default();
    match Reception::decode(packet).map_err(|_| Errno::PROTO)? {
        Reception::Welcome(welcome) => Ok((welcome, received)),
        // What is not its own by then is tried again with the next refusal.
        Reception::Refused(reason) => {
            domain::settle(reason.domain, &[], link.life()).and(Err(Errno::ACCESS))
        }
    }
}

/// Serves until the engine closes the connection or says something unintelligible.
///
/// # Errors
/// The session did not begin.
fn session(link: &Link<'_>, own: &Own) -> Result<()> {
    let mut buffer = [0; MAX_MESSAGE];
    let (welcome, mut received) = hear_welcome(link, &mut buffer)?;
    // The program has one such word, which may be for its own handler of crashes: that one stays. Root's engine has the right by its
    // capability.
    if link.peer.uid != 0 && link.peer.pid != 0 && !thread::has_own_tracer() {
        sys::thread::allow_tracer(link.peer.pid);
    }
    let mut session = match Session::new(welcome, &mut received, own) {
        Ok(session) => session,
        Err((step, errno)) => {
            let number = u16::try_from(errno.raw_os_error()).unwrap_or_default();
            let failed = Answer::Failed {
                errno: number,
                step,
            };
            return link.answer(&mut buffer, &failed).and(Err(errno));
        }
    };
    drop(received);
    // Where there is no /proc, or no right to it, a dump lacks what is merged: a limit.
    let _ = sys::dump::include_private_files();
    if let Some(mut guard) = lock() {
        // A thread that was killed alone has left its line named, which may be let go of from here on.
        tally::count_in(&guard, 0);
        whole::lend(&mut guard, session.window.tools());
    }
    let its = [session.lifeline, session.tie];
    if let Err(errno) = domain::settle(welcome.domain, &its, link.life()) {
        // Nothing was merged in this domain.
        its.into_iter().for_each(lines::release);
        return_tools(&mut session);
        return Err(errno);
    }
    if let Some(mut guard) = lock() {
        report::everything(&mut guard);
        tally::count_in(&guard, tally::prepare(session.lifeline));
        guard.process().serving.store(SERVED, Ordering::Relaxed);
    }
    let ready = Ready {
        thread: sys::process::thread_id(),
        line: session.lifeline as u64,
        journal: session.window.journal() as u64,
        uffd: session.window.uffd().number(),
        attached: crate::config::is_attached(),
    };
    let ready = link.answer(&mut buffer, &Answer::Ready(ready));
    if ready.is_ok() {
        // However it ends, it had begun.
        if session.serve(link, &mut buffer) == Err(Errno::CANCELED) {
            farewell(link, &mut buffer, link.why());
        }
    }
    return_tools(&mut session);
    ready
}

fn return_tools(session: &mut Session) {
    if let Some(guard) = lock() {
        tally::count_in(&guard, 0);
    }
    // Hooks have the tools until the last moment: without them they cannot freeze what this session still tracks.
    session.end();
    let freezer = session.window.take_freezer();
    let freezer = freezer.or_else(|| session.own.freezer.take());
    if let Some(mut guard) = lock() {
        let lent = Lent {
            freezer: freezer.as_ref(),
            ..Lent::default()
        };
        whole::lend(&mut guard, lent);
    }
    session.own.freezer.set(freezer);
}

impl<'a> Session<'a> {
    fn new(
        welcome: Welcome,
        received: &mut Received,
        own: &'a Own,
    ) -> std::result::Result<Self, (u8, Errno)> {
        own.narrowed.map_err(|errno| (wire::STEP_NARROW, errno))?;
        let mut descriptors = received.descriptors.iter_mut().filter_map(Option::take);
        let missing = (wire::STEP_DESCRIPTORS, Errno::BADF);
        let lifeline = descriptors.next().ok_or(missing)?;
        let tie = descriptors.next().ok_or(missing)?;
        let mut stores = [const { None }; MAX_STORES];
        for place in stores.iter_mut().take(usize::from(welcome.stores)) {
            *place = Some(descriptors.next().ok_or(missing)?);
        }
        for store in stores.iter().flatten() {
            let noted = lock().map_or(Err(Errno::NOMEM), |mut guard| {
                stores::note(&mut guard, store.as_fd())
            });
            noted.map_err(|errno| (wire::STEP_MEMORY, errno))?;
        }
        let device = descriptors.next().filter(|_| welcome.device);
        let device = device.as_ref().map(AsFd::as_fd);
        let uffd = device.map_or_else(Uffd::open, Uffd::from_device);
        let uffd = uffd.map_err(|errno| (wire::STEP_USERFAULTFD, errno))?;
        let freezer = Freezer::open(device).ok();
        // Each session holds a line, and lets go of it when nothing is astray.
        private::find_strays().map_err(|errno| (wire::STEP_MEMORY, errno))?;
        sys::mapping::find_strict_counting();
        let window = Window::new(uffd, freezer).map_err(|errno| (wire::STEP_MEMORY, errno))?;
        let hold = |line| lines::hold(line).map_err(|errno| (wire::STEP_MEMORY, errno));
        let lifeline = hold(&lifeline)?;
        let tie = hold(&tie).inspect_err(|_| lines::release(lifeline))?;
        Ok(Self {
            window,
            stores,
            lifeline,
            tie,
            own,
            walks: Walks::default(),
        })
    }

    fn serve(&mut self, link: &Link<'_>, buffer: &mut [u8; MAX_MESSAGE]) -> Result<()> {
        loop {
            self.wait(link)?;
            let mut received = link.receive(buffer)?;
            if received.len == 0 {
                return Ok(());
            }
            let packet = buffer.get(..received.len).unwrap_or_default();
            match Question::decode(packet).map_err(|_| Errno::PROTO)? {
                Question::Sync { lifeline, adopted } => {
                    link.leave_if_last();
                    whole::thaw_left();
                    if lifeline {
                        let new = received.descriptors.iter_mut().find_map(Option::take);
                        self.renew(&new.ok_or(Errno::PROTO)?)?;
                    }
                    if adopted {
                        lines::keep_only(&[self.lifeline, self.tie]);
                    }
                    // Before the first window of a round: all is as it was when this thread began.
                    if let Some((_, why)) = self.own.differs() {
                        farewell(link, buffer, why);
                        return Ok(());
                    }
                    self.sync(link, buffer)?;
                }
                Question::Merge(question) => {
                    let merged = self.merge(&question);
                    link.answer(buffer, &Answer::Merged(merged))?;
                }
                Question::Unmerge(question) => {
                    let pages = unmerge(&question);
                    let cpu_ns = cpu_ns();
                    link.answer(buffer, &Answer::Unmerged { cpu_ns, pages })?;
                }
            }
        }
    }

    /// Waits for the next question, and does what is to be done besides.
    fn wait(&mut self, link: &Link<'_>) -> Result<()> {
        loop {
            let holds = self.window.is_holding();
            if link.wait(holds.then_some(&HELD_AGAIN))? {
                return Ok(());
            }
            self.window.let_held_go();
        }
    }

    /// Holds the new lifeline before it lets go of the old: a child forked at any moment has one. The old one goes when no page lies in a
    /// mapping of a store that the table does not know.
    fn renew(&mut self, lifeline: &OwnedFd) -> Result<()> {
        let new = lines::hold(lifeline)?;
        let place = tally::prepare(new);
        if let Some(guard) = lock() {
            tally::count_in(&guard, place);
        }
        strays::bring_home(self.window.maps())?;
        lines::release(std::mem::replace(&mut self.lifeline, new));
        Ok(())
    }

    /// Begins a round: tells what changed.
    fn sync(&mut self, link: &Link<'_>, buffer: &mut [u8; MAX_MESSAGE]) -> Result<()> {
        self.window.rest();
        // What cannot be read now is looked at again.
        let _ = self.walks.offer_all(self.window.maps());
        any::keep_words(&self.own.threads);
        if let Some(mut guard) = lock() {
            report::watch(&mut guard, self.window.uffd(), self.window.maps());
        }
        report::read_attributes();
        let (mut part, mut at) = (Answer::Changes(Changes::new()), 0);
        loop {
            let Answer::Changes(changes) = &mut part else {
                return Ok(());
            };
            changes.clear();
            changes.cpu_ns = cpu_ns();
            if let Some(mut guard) = lock() {
                report::tell_recycled(&mut guard, changes);
                report::fill(&mut guard, changes, &mut at);
                changes.memory_bytes = memory_bytes(&mut guard);
            }
            let more = changes.more;
            link.answer(buffer, &part)?;
            if !more {
                return Ok(());
            }
        }
    }

    fn merge(&mut self, question: &wire::Merge) -> Merged {
        let mut outcomes = [PageOutcome::NotAsked; wire::CHUNK_PAGES];
        self.window.longest_ns = 0;
        let store = self.stores.get(usize::from(question.store));
        let store = store.and_then(Option::as_ref).map(AsFd::as_fd);
        match (lock_between_forks(), store) {
            (Some(mut guard), Some(store)) => {
                let locks = sys::mapping::locks_future();
                self.window
                    .merge(&mut guard, question, store, locks, &mut outcomes);
            }
            _ => window::put_off(question, &mut outcomes),
        }
        Merged {
            outcomes,
            cpu_ns: cpu_ns(),
            window_ns: self.window.longest_ns,
        }
    }

    /// Lets go of all lines, unless pages of this process still map slots.
    fn end(&mut self) {
        let stored = || lock().is_none_or(|mut guard| guard.table().anything_stored());
        // What has strayed is stored, once it is found.
        if !stored() && strays::bring_home(self.window.maps()).is_ok() && !stored() {
            lines::keep_only(&[]);
        }
    }
}

/// Tells the engine why the agent leaves. If all memory has to be private, that is done first: the engine may
/// take it that nothing is merged.
fn farewell(link: &Link<'_>, buffer: &mut [u8; MAX_MESSAGE], why: Why) {
    if why.is_for_good() {
        give_back_all();
    }
    // What fails is tried again before the program's call, which then fails.
    let _ = private::settle(why);
    let Why { step, number } = why;
    let _ = link.answer(
        buffer,
        &Answer::Failed {
            errno: number,
            step,
        },
    );
}

/// How long until memory that could not be let go is tried again.
const HELD_AGAIN: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

/// Gives the named stored pages private frames, and tells which have them. They and what lies between them become anonymous, as before they
/// were merged. What cannot, such as pages that may be pinned, becomes private where it lies; so does all where mappings are few.
fn unmerge(question: &Unmerge) -> PageBits {
    #[allow(clippy::cast_possible_truncation)] // the decoder bounds addresses
    let address = question.chunk as usize;
    let mut private = PageBits::EMPTY;
    let Some(mut guard) = lock() else {
        return private;
    };
    let mut pages = question.pages.pages();
    if let Some(first) = pages.next() {
        let count = pages.last().unwrap_or(first) + 1 - first;
        let (start, len) = (address + first * PAGE_BYTES, count * PAGE_BYTES);
        // What is made aside, what is cut from it, and what it splits.
        if !scarce(&mut guard, 4) {
            // What fails leaves pages as they are: they become private below.
            let _ = whole_if_ample(&mut guard, start, len);
        }
    }
    let stored = guard
        .table()
        .get(address)
        .map_or(PageBits::EMPTY, |chunk| chunk.stored);
    for (first, count) in question.pages.runs() {
        for page in first..first + count {
            let start = address + page * PAGE_BYTES;
            if !stored.contains(page) || make_private(&mut guard, start, PAGE_BYTES).is_ok() {
                private.insert(page);
            }
        }
    }
    private
}

fn memory_bytes(guard: &mut Guard) -> u64 {
    /// The touched part of the thread's stack, and the lock's page, as measured.
    const FIXED: usize = 64 * 1024;
    (guard.table().memory_bytes() + FIXED) as u64
}

fn cpu_ns() -> u64 {
    u64::try_from(sys::clock::of_thread().as_nanos()).unwrap_or(u64::MAX)
}
