//! Making memory whole: the content of a mapping of a store becomes anonymous memory again, in place.
//!
//! ```text
//!   guest     a  b  c       mapped from a store; frozen: writers sleep, readers go on
//!   aside     a  b  c       anonymous memory with the same attributes, copied where no thread looks
//!   guest     a  b  c       mremap put it in place in one step; the sleepers wake
//! ```
//!
//! All copies of neighbouring mappings are cut from one mapping made aside, in the order in which they lie. So the kernel joins
//! them where they come to lie, and memory that windows had cut into many mappings is one again ([`Copy`]).
//!
//! Then the kernel's own calls act as on any anonymous memory, attributes and errors
//! included. So each call that has no answer of its own for merged memory asks for this first.
//!
//! Why no byte is lost:
//! - a thread, vCPU or system call that writes: its fault sleeps from before the copy until the new mapping is
//!   there, and is then repeated. Write-protecting ends with a flush, so writes that came before are in the copy;
//! - a pin that was taken to write: I/O goes on into its frame, and a copy would be another. Such a pin has made the page
//!   private, and a new one faults, and sleeps. So where the process may pin memory (`sys::pins`), private pages
//!   stay where they lie: islands of the store's mapping, whose numbers stay in the table;
//! - a mapping that was sealed as such an island, or by a call that no hook saw, stays as well. Its pages become private there;
//! - a thread that reads finds the old mapping or the new one, which hold the same;
//! - a window, or another hook: waits for the lock, which the caller holds;
//! - fork: waits for the lock. A process without an agent's descriptors and with a single thread needs no
//!   freeze: no other thread is there to write;
//! - whatever fails before the new mapping is in place leaves the old one there, thawed;
//! - the calling thread itself: see below;
//! - a thread that is killed in between, with a process that shares this memory: the agent's thread thaws what it left ([`thaw_left`]).
//!
//! **The ground it stands on.** Where an agent serves, its thread does it for the one that asks, which sleeps
//! ([`desk`](crate::desk)). Then it stands on nothing of the program's. Else it runs on the guest's own thread, which does not have the
//! agent's descriptors: `pidfd_getfd` copies them from the agent's thread, for as long as it takes.
//!
//! That thread may have its own stack and control block there, in a pool of stacks say. Frozen, its next push would sleep with the
//! lock held, for ever; so would the kernel's write to the area of restartable sequences, after a preemption. Where there is no
//! other thread and nothing is frozen, the words that it pushed between copy and mremap would be lost. So it works on a stack
//! apart ([`Guard::apart`]), and writes nothing to its own until memory is thawed. Pages around its control block ([`Footing`])
//! are never frozen and never copied. They get private frames where they lie, as those that may be pinned: the fault that does it
//! runs on this very thread, so no write comes between. Other threads may have stacks in frozen memory: they sleep and wake.
//! [`Still::begin`] asserts it. Pages with words that the kernel writes when a thread ends are treated alike ([`words_part`]).
//!
//! The tempting alternative, to write each page where it lies, gives it a frame of its own and leaves it in a
//! mapping of a file. Such a mapping is not taken by mbind, mseal, MADV_WIPEONFORK or another userfaultfd.

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rustix::io::{Errno, Result};
use sys::footing::{self, Footing};
use sys::mapping::{self, Access, Attributes, OwnMemory, Source, locks_future};
use sys::pagemap::{Categories, PageRun, Pagemap};
use sys::uffd::{Freezer, Uffd, Watch};
use sys::vma::Maps;
use wire::{CHUNK_BYTES, PAGE_BYTES, PageBits};

use super::frames::{make_private, populate, read_in};
use super::scarce::scarce;
use super::stores::is_store;
use super::tally;
use crate::any::Words;
use crate::lock::{Guard, PerProcess, existing, lock};
use crate::table::{ADDRESS_LIMIT, Chunk, pages_of, parts_by};
use crate::thread::{self, Life};

/// What the agent's thread lends to hooks.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lent<'a> {
    /// What tracks the memory; while an engine serves.
    pub(crate) uffd: Option<&'a Uffd>,
    /// What freezes it. Without an engine, too: a program may have no right to a userfaultfd of its own.
    pub(crate) freezer: Option<&'a Freezer>,
    pub(crate) maps: Option<&'a Maps>,
}

/// Lends hooks these descriptors of the caller's, and no others any more.
pub(crate) fn lend(guard: &mut Guard, lent: Lent<'_>) {
    let number = |fd: BorrowedFd<'_>| fd.as_raw_fd().cast_unsigned() + 1;
    let numbers = [
        lent.uffd.map_or(0, |uffd| number(uffd.as_fd())),
        lent.freezer.map_or(0, |freezer| number(freezer.as_fd())),
        lent.maps.map_or(0, |maps| maps.number() + 1),
    ];
    let lends = numbers.iter().any(|&number| number != 0);
    let [tid, places @ ..] = &guard.process().lent;
    let thread = if lends { sys::process::thread_id() } else { 0 };
    tid.store(thread, Ordering::Relaxed);
    for (place, number) in places.iter().zip(numbers) {
        place.store(number, Ordering::Relaxed);
    }
}

/// Makes all stored pages of `[start, start + len)` anonymous, with the content and the attributes they have.
/// What fails leaves the pages before it so, and the others as they were.
///
/// # Errors
/// `NOMEM` without room for the copies; what userfaultfd and /proc give where other threads cannot be
/// kept from writing. `PERM` for what can be executed, if this is the agent's thread: that is left to a thread of the program's, and
/// all else is done.
pub(crate) fn whole(guard: &mut Guard, start: usize, len: usize) -> Result<()> {
    at_desk(guard, start, len, Wish::All)
}

/// As [`whole`], where the program has asked for nothing: pages that may be pinned stay where they lie, and each run of them cuts
/// the rest in two. Where that would be too many mappings, the chunk is left as it is, and those behind it.
///
/// # Errors
/// As [`whole`]; `NOMEM` where mappings are few.
pub(crate) fn whole_if_ample(guard: &mut Guard, start: usize, len: usize) -> Result<()> {
    at_desk(guard, start, len, Wish::Ample)
}

/// Makes all memory whole after a call, if that is out of reach since, with what was opened before it. Else, as where
/// there was nothing to open, memory stays as it is.
pub(crate) fn whole_if_out_of_reach(guard: &mut Guard, tools: Tools) {
    guard.apart(|guard| {
        let caller = Some(sys::process::thread_id());
        let now = Tools::open(guard, asker(guard), caller);
        let lost = now.map_or(true, |mut now| now.pins.hide_some());
        if lost && tools.still.holds_on() {
            let _ = make(guard, 0, ADDRESS_LIMIT, None, tools);
        }
    });
}

/// As [`whole`], though only of pages that were not written since they were merged, in runs of [`SHORTEST`] and more.
/// The program did not ask for that, so pages stay that may be pinned: to pin a page for writing makes it private first.
///
/// # Errors
/// As [`whole`], and what reading the page map gives.
pub(crate) fn whole_unwritten(guard: &mut Guard, start: usize, len: usize) -> Result<()> {
    at_desk(guard, start, len, Wish::Unwritten)
}

/// What is to be made whole.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wish {
    All,
    /// All, as far as there are mappings for it.
    Ample,
    /// The pages that were not written.
    Unwritten,
}

/// A shorter run is not worth its calls.
const SHORTEST: usize = 4 * PAGE_BYTES;

/// What it takes to make memory whole.
pub(crate) struct Tools {
    maps: Maps,
    still: Still,
    pins: Pins,
    /// Where the kernel's words of threads are, if other threads are to be frozen; without those of the thread that made the call.
    words: Option<Words>,
}

impl Tools {
    /// For `asker`, in whose table the program's descriptors are. `caller` is the thread whose call this is; none where words of the kernel's
    /// do not stay where they lie.
    fn open(guard: &Guard, asker: u32, caller: Option<u32>) -> Result<Self> {
        let (maps, still) = (Maps::open()?, Still::of(guard)?);
        let pins = Pins::new(asker);
        let freezes = matches!(still, Still::Frozen { .. });
        let words = caller.filter(|_| freezes).map(Words::open).transpose()?;
        Ok(Self {
            maps,
            still,
            pins,
            words,
        })
    }

    /// For [`whole_if_out_of_reach`], when no agent runs; `None` where there is nothing to do for it.
    pub(crate) fn before_a_call(guard: &mut Guard) -> Option<Self> {
        if !thread::may_look() || !guard.table().may_be_stored(0, ADDRESS_LIMIT) {
            return None;
        }
        let asker = asker(guard);
        let caller = Some(sys::process::thread_id());
        let mut tools = Self::open(guard, asker, caller).ok()?;
        tools.pins.own = sys::pins::Own::open(asker).ok();
        Some(tools)
    }
}

fn at_desk(guard: &mut Guard, start: usize, len: usize, wish: Wish) -> Result<()> {
    if !thread::may_look() || !guard.table().may_be_stored(start, len) {
        return Ok(());
    }
    let (asker, caller) = (asker(guard), sys::process::thread_id());
    guard.at_desk_or_here(|guard| {
        let only_unwritten = wish == Wish::Unwritten;
        let pagemap = only_unwritten.then(Pagemap::own).transpose()?;
        let keeps_words = wish != Wish::Ample;
        let mut tools = Tools::open(guard, asker, keeps_words.then_some(caller))?;
        tools.pins.only_few = wish == Wish::Ample;
        make(guard, start, len, pagemap.as_ref(), tools)
    })
}

fn make(
    guard: &mut Guard,
    start: usize,
    len: usize,
    unwritten: Option<&Pagemap>,
    tools: Tools,
) -> Result<()> {
    if !thread::may_look() || !guard.table().may_be_stored(start, len) {
        return Ok(());
    }
    let mut copy = Copy::default();
    let made = make_each(guard, start, len, unwritten, tools, &mut copy);
    copy.close();
    made
}

/// Makes the mappings of a range whole, one by one, from memory aside that is `copy`'s.
fn make_each(
    guard: &mut Guard,
    start: usize,
    len: usize,
    unwritten: Option<&Pagemap>,
    tools: Tools,
    copy: &mut Copy,
) -> Result<()> {
    let Tools {
        maps,
        still,
        mut pins,
        words,
    } = tools;
    let footing = Footing::here();
    let is_agent = guard.process().life.is_callers();
    if let Some(words) = words {
        words.keep(guard)?;
    }
    let mut result = Ok(());
    // A call may name more than there is.
    let end = start.saturating_add(len).min(ADDRESS_LIMIT);
    let (mut at, end) = (start & !(PAGE_BYTES - 1), end.next_multiple_of(PAGE_BYTES));
    while at < end {
        let Some(vma) = maps.find(at)?.filter(|vma| vma.start < end) else {
            not_stored(guard, at..end);
            break;
        };
        let (first, stop) = (vma.start.max(at), vma.end.min(end));
        let stored = is_store(&vma);
        not_stored(guard, at..if stored { first } else { stop });
        at = first;
        // Nothing is executable that the agent's thread makes.
        if stored && vma.execute && is_agent {
            still.let_go(first, stop - first);
            (at, result) = (stop, Err(Errno::PERM));
        }
        while stored && at < stop {
            let (own, end) = footing.part(at, stop);
            // Nothing may stay where the agent goes, or the guest to another domain.
            let (own, end) = match own || pins.only_few {
                true => (own, end),
                false => words_part(guard, at, end),
            };
            // Memory that no thread may write is no ground to stand on.
            if own && vma.write {
                if unwritten.is_none() {
                    make_private(guard, at, end - at)?;
                }
            } else {
                copy.go_on(at, end, vma.access());
                copy.make_all(guard, &still, unwritten, &mut pins)?;
            }
            at = end;
        }
        at = stop;
    }
    result
}

/// Whether the kernel has words of a thread in the pages from `at` on, and up to where all are alike, in one chunk: such a page stays where it
/// lies ([`keep_words`](crate::any::keep_words)). A thread that ends does not wait for what is frozen, and its word would stay as it was.
fn words_part(guard: &mut Guard, at: usize, end: usize) -> (bool, usize) {
    let chunk = at & !(CHUNK_BYTES - 1);
    let end = end.min(chunk + CHUNK_BYTES);
    let mut table = guard.table();
    let known = table.get(chunk);
    let words = known.map_or(PageBits::EMPTY, |chunk| chunk.words & chunk.stored);
    let first = parts_by(words, at..end).next();
    first.map_or((false, end), |(part, has)| (has, part.end))
}

/// Notes that there is no mapping of a store in a range, whatever the table says.
fn not_stored(guard: &mut Guard, range: Range<usize>) {
    let mut table = guard.table();
    if table.may_be_stored(range.start, range.len()) {
        table.each_known(range.start, range.len(), |_, pages, chunk| {
            let stored = chunk.stored & PageBits::of(pages);
            stored.pages().for_each(|page| chunk.is_not_stored(page));
        });
    }
}

/// The thread whose descriptors are the program's: the caller, or the first one where the agent's thread asks, which has a table of its
/// own.
fn asker(guard: &Guard) -> u32 {
    match guard.process().life.is_callers() {
        true => thread::process_number(),
        false => sys::process::thread_id(),
    }
}

/// Which pages may be pinned.
struct Pins {
    /// The thread whose descriptors are looked through.
    asker: u32,
    /// Tells which pages are private; where there is none, all may be.
    pagemap: Option<Pagemap>,
    /// Where to ask whether the process may pin memory, where that was opened beforehand.
    own: Option<sys::pins::Own>,
    /// The process may pin memory. It is asked anew until that is so: another thread may begin at any time.
    may: bool,
    /// Whether they may cut only as many mappings as there is room for.
    only_few: bool,
}

impl Pins {
    fn new(asker: u32) -> Self {
        let pagemap = Pagemap::own().ok();
        Self {
            asker,
            pagemap,
            own: None,
            may: false,
            only_few: false,
        }
    }

    /// The pages of a frozen part of a chunk that may be pinned: private ones, if the process has what pins.
    fn of(&mut self, start: usize, len: usize) -> PageBits {
        let private = self.private(start, len).unwrap_or(PageBits::FULL);
        let may = !private.is_empty() && self.may_pin();
        if may { private } else { PageBits::EMPTY }
    }

    /// Whether what stays of a part of a chunk would cut the rest into more mappings than the program can spare. Asked before
    /// the part is frozen.
    fn cut_too_much(&mut self, guard: &mut Guard, start: usize, len: usize) -> bool {
        if !self.only_few {
            return false;
        }
        let kept = self.of(start, len);
        let cuts = parts_by(kept, start..start + len).count() - 1;
        cuts > 0 && scarce(guard, cuts)
    }

    fn may_pin(&mut self) -> bool {
        let ask = || sys::pins::own(self.asker);
        let own = self.own.as_ref();
        let ask = || thread::have_own_files() || own.map_or_else(ask, sys::pins::Own::may_pin);
        self.may = self.may || ask();
        self.may
    }

    /// Whether pages may be pinned, and nothing tells which.
    fn hide_some(&mut self) -> bool {
        self.pagemap.is_none() && self.may_pin()
    }

    /// Whether it leaves most pages of a part of a chunk to be copied.
    fn leaves_most(&self, start: usize, len: usize) -> bool {
        let private = || {
            self.private(start, len)
                .map_or(usize::MAX, |pages| pages.len())
        };
        !self.may || private() < len / PAGE_BYTES / 2
    }

    fn private(&self, start: usize, len: usize) -> Result<PageBits> {
        private_in(self.pagemap.as_ref().ok_or(Errno::NOENT)?, start, len)
    }
}

/// The pages of a part of a chunk that have frames of their own there.
///
/// # Errors
/// What reading the page map gives.
pub(super) fn private_in(pagemap: &Pagemap, start: usize, len: usize) -> Result<PageBits> {
    let (mut private, mut at) = (PageBits::EMPTY, start as u64);
    let (chunk, end) = (start & !(CHUNK_BYTES - 1), (start + len) as u64);
    while at < end {
        let mut runs = [PageRun::default(); 64];
        let (filled, stopped) = pagemap.peek(at..end, &mut runs)?;
        for run in runs.iter().take(filled) {
            let is_private =
                run.categories.has(Categories::PRESENT) && !run.categories.has(Categories::FILE);
            #[allow(clippy::cast_possible_truncation)] // addresses of this process
            let (first, last) = (run.start as usize, run.end as usize);
            let pages = pages_of(chunk, first, last).filter(|_| is_private);
            pages.for_each(|page| private.insert(page));
        }
        at = stopped;
    }
    Ok(private)
}

/// The pages of a part of a chunk that may be pinned.
pub(super) fn may_be_pinned(guard: &mut Guard, start: usize, len: usize) -> PageBits {
    let asker = asker(guard);
    guard.at_desk(|_| Pins::new(asker).of(start, len))
}

/// What must be told new memory in the place of a store's mapping at `at`: as it was when it was merged, or what the mapping
/// was given since, where it lies.
pub(crate) fn attributes_at(guard: &mut Guard, at: usize) -> Attributes {
    let mut table = guard.table();
    let Some(chunk) = table.get(at & !(CHUNK_BYTES - 1)) else {
        return Attributes::default();
    };
    let odd = chunk.odd;
    // A page that was merged elsewhere was told there what its mapping does not know.
    let known = match chunk.noted.contains(at % CHUNK_BYTES / PAGE_BYTES) {
        true => Attributes::default(),
        false => chunk.attributes,
    };
    match odd {
        true => guard.at_desk(|_| given_at(at, known)),
        false => known,
    }
}

/// The attributes that the kernel tells, and of `known` the policy, and what of huge pages the kernel does not tell. Also how memory
/// was locked before it was merged, for a store's mapping is always locked on fault.
fn given_at(at: usize, known: Attributes) -> Attributes {
    let mut all = known;
    let _ = sys::vma::given(at, at + PAGE_BYTES, |_, told| {
        let Some(given) = told.map(|told| told.attributes) else {
            return;
        };
        let size = if given.huge || given.nohuge {
            given
        } else {
            known
        };
        all = Attributes {
            huge: size.huge,
            nohuge: size.nohuge,
            policy: known.policy,
            on_fault: given.on_fault && (known.on_fault || !known.locked),
            ..given
        };
    });
    all
}

/// Which mappings of a range are no longer tracked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Untracked {
    Anonymous,
    /// And those of stores, in which only what may be pinned is left.
    All,
}

/// Stops tracking a range, in which no page is merged.
///
/// # Errors
/// What pidfd_getfd(2) and userfaultfd give.
pub(crate) fn untrack(guard: &mut Guard, start: usize, len: usize, which: Untracked) -> Result<()> {
    let lent = guard.process().lent.each_ref();
    let [tid, uffd, ..] = lent.map(|number| number.load(Ordering::Relaxed));
    let Some(uffd) = uffd.checked_sub(1) else {
        return Ok(()); // nothing tracks
    };
    guard.at_desk(|_| {
        let uffd = Uffd::of_thread(tid, uffd)?;
        untrack_by(&uffd, &Maps::open()?, start..start + len, which)
    })
}

/// As [`untrack`], by who has the descriptors.
pub(crate) fn untrack_by(
    uffd: &Uffd,
    maps: &Maps,
    range: Range<usize>,
    which: Untracked,
) -> Result<()> {
    let (mut at, end) = (range.start, range.end);
    while at < end {
        let Some(vma) = maps.find(at)?.filter(|vma| vma.start < end) else {
            break;
        };
        let (first, stop) = (vma.start.max(at), vma.end.min(end));
        // Another's registration is refused; what is not registered does not mind.
        if vma.is_anonymous() || which == Untracked::All && is_store(&vma) {
            let _ = uffd.unregister(first, stop - first);
        }
        at = stop;
    }
    Ok(())
}

/// Nothing may take the place of a sealed mapping.
const SEALED: Errno = Errno::PERM;

/// What keeps other threads from writing.
enum Still {
    /// There are none.
    Alone,
    Frozen {
        /// What tracks the memory, and has to let go of it first.
        uffd: Option<Uffd>,
        freezer: Freezer,
        /// Where the range stands that is frozen, for [`thaw_left`].
        process: &'static PerProcess,
        /// Whether some of it could not be thawed.
        stuck: Cell<bool>,
    },
}

/// Whether no thread but the caller's writes to this memory, of any process.
fn is_alone(life: &Life) -> Result<bool> {
    let is_shared = life.is_anothers() || thread::has_siblings();
    Ok(!is_shared && sys::task::threads()? <= life.idle_threads() + 1)
}

/// What the agent's thread lends, for the calling thread: what tracks, and what freezes.
///
/// # Errors
/// What pidfd_getfd(2) gives for what tracks.
fn borrow(process: &PerProcess) -> Result<(Option<Uffd>, Option<Freezer>)> {
    let lent = process.lent.each_ref();
    let [tid, uffd, freezer, _] = lent.map(|number| number.load(Ordering::Relaxed));
    // The thread that lent them may have been killed alone, and its number be another's.
    let lives = tid != 0 && process.life.number.load(Ordering::Relaxed) == tid;
    let [uffd, freezer] = [uffd, freezer].map(|fd| fd.checked_sub(1).filter(|_| lives));
    let uffd = uffd.map(|fd| Uffd::of_thread(tid, fd)).transpose()?;
    let freezer = freezer.and_then(|fd| Freezer::of_thread(tid, fd).ok());
    Ok((uffd, freezer))
}

/// Thaws what a thread left frozen. It was killed in a call, alone or with a process that shares this memory, and the lock was taken from it.
/// For the agent's thread, from time to time: who wants to write there sleeps, and makes no call.
///
/// Only a lent freezer is open still. One that the dead thread opened itself went with its process.
pub(crate) fn thaw_left() {
    let frozen = |process: &PerProcess| process.frozen[1].load(Ordering::Relaxed) != 0;
    if existing().is_some_and(frozen)
        && let Some(guard) = lock()
    {
        thaw_left_of(guard.process());
    }
}

/// The same, with the lock held: its holder has frozen nothing yet.
fn thaw_left_of(process: &PerProcess) {
    let [start, len] = process.frozen.each_ref();
    let [start, len] = [start, len].map(|word| word.load(Ordering::Relaxed));
    if len == 0 {
        return;
    }
    let thawed = match borrow(process) {
        Ok((uffd, Some(freezer))) => {
            let thawed = freezer.thaw(start, len);
            wake(uffd.as_ref(), &freezer, (start, len), thawed.is_ok());
            thawed
        }
        Ok((_, None)) => Ok(()),
        Err(errno) => Err(errno),
    };
    // With room for the kernel's own records, or for descriptors, it will be.
    if !matches!(thawed, Err(Errno::NOMEM | Errno::MFILE | Errno::NFILE)) {
        process.frozen[1].store(0, Ordering::Relaxed);
    }
}

/// Wakes the sleepers of a range, which is tracked again if it has thawed.
fn wake(uffd: Option<&Uffd>, freezer: &Freezer, (start, len): (usize, usize), thawed: bool) {
    if let Some(uffd) = uffd.filter(|_| thawed) {
        let _ = uffd.register(start, len, Watch::Track);
    }
    let _ = freezer.wake(start, len);
}

impl Still {
    fn of(guard: &Guard) -> Result<Self> {
        let process = guard.process();
        let (uffd, freezer) = borrow(process)?;
        if uffd.is_none() && is_alone(&process.life)? {
            return Ok(Self::Alone);
        }
        // The lent one first: the agent's thread can thaw by it, if this one is killed.
        let freezer = freezer.map_or_else(|| Freezer::open(None), Ok)?;
        thaw_left_of(process);
        let stuck = Cell::default();
        Ok(Self::Frozen {
            uffd,
            freezer,
            process,
            stuck,
        })
    }

    /// Whether it is as it was, after a call of the program's in which a handler of signals may have made a thread.
    fn holds_on(&self) -> bool {
        match self {
            Self::Alone => sys::task::threads() == Ok(1) && !thread::has_siblings(),
            Self::Frozen { .. } => true,
        }
    }

    /// The range is tracked no longer: a thread without this userfaultfd can make it whole.
    fn let_go(&self, start: usize, len: usize) {
        if let Self::Frozen {
            uffd: Some(uffd), ..
        } = self
        {
            let _ = uffd.unregister(start, len);
        }
    }

    /// From here no thread writes the range. With `touch` its pages are brought into the page table before, where the
    /// kernel brings their neighbours along as long as nothing tracks them.
    fn begin(&self, start: usize, len: usize, touch: bool) -> Result<()> {
        assert!(
            !footing::stands_on(start, len),
            "the thread would freeze itself"
        );
        if let Self::Frozen {
            uffd: Some(uffd), ..
        } = self
        {
            uffd.unregister(start, len)?;
        }
        if touch {
            // What cannot be read stays away, and is left alone.
            let _ = read_in(start, len);
        }
        let Self::Frozen { freezer, .. } = self else {
            return Ok(());
        };
        self.note(start, len);
        freezer.freeze(start, len).inspect_err(|_| {
            self.give_up(start, len);
            self.forget();
        })
    }

    /// The range is as it was: it thaws, is tracked again, and the sleepers wake. Tells whether it has thawed.
    fn give_up(&self, start: usize, len: usize) -> bool {
        /// Only memory for the kernel's own records can be missing, and its split mappings become fewer.
        const PATIENCE: usize = 10_000;
        let Self::Frozen {
            uffd,
            freezer,
            stuck,
            ..
        } = self
        else {
            return true;
        };
        let thawed = (0..PATIENCE).any(|_| {
            let thawed = freezer.thaw(start, len).is_ok();
            if !thawed {
                rustix::thread::sched_yield();
            }
            thawed
        });
        wake(uffd.as_ref(), freezer, (start, len), thawed);
        if !thawed {
            self.note(start, len);
            stuck.set(true);
        }
        thawed
    }

    /// Notes that a range is frozen from here on, unless another stays so.
    fn note(&self, start: usize, len: usize) {
        let Self::Frozen { process, stuck, .. } = self else {
            return;
        };
        if !stuck.get() {
            // In this order: the thread may be killed in between.
            process.frozen[0].store(start, Ordering::Relaxed);
            process.frozen[1].store(len, Ordering::Relaxed);
        }
    }

    /// Nothing of the range is frozen any more, but for what could not be thawed.
    fn forget(&self) {
        if let Self::Frozen { process, stuck, .. } = self
            && !stuck.get()
        {
            process.frozen[1].store(0, Ordering::Relaxed);
        }
    }

    /// Something else is there by now.
    fn end(&self, start: usize, len: usize) {
        if let Self::Frozen { freezer, .. } = self {
            let _ = freezer.wake(start, len);
        }
    }
}

/// A mapping of a store, or a part of one, and the memory that takes its place.
///
/// ```text
///   guest     a b c │ d e f g │ h …     mappings of stores, one after the other
///   aside             d e f g   +       the next copies, and a page more; `a b c` were cut from it before
///   later                       h …   + that page grows into what comes next
/// ```
///
/// The kernel joins neighbours whose pages are of one kind (`anon_vma`) and were made as far from each other as they lie
/// (`vm_pgoff`). Both hold for what is cut from one mapping in order. A part that is cut off takes the kind along, and so does a
/// mapping that grows in place. The page more, which no thread writes, hands it on. So the memory aside is never larger
/// than a chunk and that page, however much is made whole.
///
/// The tempting alternative, memory aside for all of it at once, would count twice against RLIMIT_AS, and against the memory
/// that the kernel promises: other threads would find none meanwhile.
///
/// **The limit**: other attributes, other memory between, and an earlier or later call begin a new mapping aside. What comes from it is
/// of another kind. So is what was never merged: it keeps the kind that it was made with.
#[derive(Default)]
struct Copy {
    at: usize,
    end: usize,
    access: Access,
    /// The memory made aside. The copy of the page at `at` will be its first.
    aside: Range<usize>,
    attributes: Attributes,
}

impl Copy {
    /// Turns to another mapping. Right behind the one before, the memory aside is that for it, too.
    fn go_on(&mut self, at: usize, end: usize, access: Access) {
        if at != self.at {
            self.close();
        }
        (self.at, self.end, self.access) = (at, end, access);
    }

    /// A chunk at a time: so long others wait.
    fn make_all(
        &mut self,
        guard: &mut Guard,
        still: &Still,
        unwritten: Option<&Pagemap>,
        pins: &mut Pins,
    ) -> Result<()> {
        while self.at < self.end {
            let chunk = self.at & !(CHUNK_BYTES - 1);
            let len = self.end.min(chunk + CHUNK_BYTES) - self.at;
            if pins.cut_too_much(guard, self.at, len) {
                return Err(Errno::NOMEM);
            }
            let attributes = attributes_at(guard, self.at);
            self.open(len, attributes)?;
            // Before others wait: that may take long, in a group at its limit. Where much may stay, little is copied.
            if unwritten.is_none() && pins.leaves_most(self.at, len) {
                populate(self.aside.start, len)?;
            }
            still.begin(self.at, len, unwritten.is_some())?;
            let made = match unwritten {
                None => {
                    let kept = pins.of(self.at, len);
                    self.put_but(guard, still, len, kept, attributes)
                }
                Some(pagemap) => self.put_unwritten(guard, still, pagemap, len),
            };
            // All of it is in place or given back by now.
            still.forget();
            self.at += len;
            self.aside.start += len;
            made?;
        }
        Ok(())
    }

    /// Puts copies in place of `[at, at + len)`, which thaws.
    ///
    /// # Errors
    /// [`SEALED`] mappings stay; what making and placing the copies gives.
    fn put_all(&self, guard: &mut Guard, still: &Still, at: usize, len: usize) -> Result<()> {
        if let Err(errno) = self.put(at, len) {
            let thawed = self.leave(still, at, len);
            // A write to what is frozen still would sleep for ever: to make it private is one.
            return Err(if thawed { errno } else { Errno::NOMEM });
        }
        still.end(at, len);
        guard.table().each_known(at, len, |_, pages, chunk| {
            pages.for_each(|page| Chunk::is_anonymous(chunk, page));
        });
        tally::note(guard);
        Ok(())
    }

    /// The same of the first `len` bytes, but for the pages that are `kept`: of those the mapping is told of huge pages
    /// what a store's mapping does not know, for it stays.
    fn put_but(
        &self,
        guard: &mut Guard,
        still: &Still,
        len: usize,
        kept: PageBits,
        attributes: Attributes,
    ) -> Result<()> {
        let mut result = Ok(());
        for (range, stays) in parts_by(kept, self.at..self.at + len) {
            let (at, part) = (range.start, range.len());
            if stays || result.is_err() {
                self.leave(still, at, part);
            } else {
                result = match self.put_all(guard, still, at, part) {
                    Err(SEALED) => make_private(guard, at, part),
                    result => result,
                };
            }
            if stays {
                // SAFETY: offered memory of the program's; its content is not touched.
                unsafe { mapping::describe_size(at, part, attributes) };
            }
        }
        result
    }

    /// The same of the first `len` bytes, where the frames are the store's. Asked when all is frozen: from here on no
    /// page becomes private.
    fn put_unwritten(
        &self,
        guard: &mut Guard,
        still: &Still,
        pagemap: &Pagemap,
        len: usize,
    ) -> Result<()> {
        const SHARED: Categories = Categories::PRESENT.and(Categories::FILE);
        let (mut at, end) = (self.at, self.at + len);
        let mut result = Ok(());
        while at < end && result.is_ok() {
            let mut run = [PageRun::default()];
            let seen = pagemap.peek(at as u64..end as u64, &mut run);
            let [run] = run;
            #[allow(clippy::cast_possible_truncation)] // addresses of this process
            let (first, stop) = match seen {
                Ok((0, _)) | Err(_) => (end, end),
                Ok(_) => (run.start as usize, run.end as usize),
            };
            result = seen.map(drop);
            let fits = run.categories.has(SHARED) && stop - first >= SHORTEST;
            let from = if fits { first } else { stop };
            self.leave(still, at, from - at);
            if result.is_ok() && from < stop {
                result = self.put_all(guard, still, from, stop - from);
                if result == Err(SEALED) {
                    result = Ok(());
                }
            }
            at = stop;
        }
        self.leave(still, at, end - at);
        result
    }

    /// Leaves `[at, at + len)` as it is, thawed, and drops the memory aside for it. Tells whether it has thawed.
    fn leave(&self, still: &Still, at: usize, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        let thawed = still.give_up(at, len);
        // SAFETY: memory made aside, which no other thread knows, and which nothing has taken away.
        let _ = unsafe { mapping::unmap(self.aside_of(at), len) };
        thawed
    }

    /// Where the copy of the page at `at` will be.
    fn aside_of(&self, at: usize) -> usize {
        let aside = self.aside.start + (at - self.at);
        assert!(aside < self.aside.end, "there is memory aside for it");
        aside
    }

    /// Sees to it that there is memory aside for the next `len` bytes.
    fn open(&mut self, len: usize, attributes: Attributes) -> Result<()> {
        let more = len + PAGE_BYTES;
        if self.attributes == attributes && self.grow(more) {
            return Ok(());
        }
        self.close();
        let locks = attributes.locked || locks_future();
        let make = |len| {
            let made = mapping::aside(len, Source::Anonymous, Access::ReadWrite, attributes, locks);
            made.map(|start| start..start + len)
        };
        // At a limit there may be room without the page more.
        self.aside = make(more).or_else(|_| make(len))?;
        self.attributes = attributes;
        Ok(())
    }

    /// The page that is left aside grows to `len` bytes, if there is one.
    fn grow(&mut self, len: usize) -> bool {
        let Range { start, end } = self.aside;
        // SAFETY: what is left of the memory made aside, which no other thread knows.
        let grown = start < end && unsafe { mapping::grow(start, end - start, len) }.is_ok();
        if grown {
            self.aside.end = start + len;
        }
        grown
    }

    /// Gives back what is left of the memory made aside.
    fn close(&mut self) {
        let Range { start, end } = std::mem::take(&mut self.aside);
        if start < end {
            // SAFETY: what is left of the memory made aside, which no other thread knows.
            let _ = unsafe { mapping::unmap(start, end - start) };
        }
    }

    /// Copies the `len` bytes at `at`, which no thread writes, and puts the copy in their place.
    fn put(&self, at: usize, len: usize) -> Result<()> {
        let aside = self.aside_of(at);
        populate(aside, len)?;
        // What may be executed only has a key, and so has what a call that no hook saw gave one.
        let _open = sys::keys::Open::new();
        // A guard, or a place behind the end of the store, that a call no hook saw has put there: no page to read.
        let readable = self.access != Access::None && read_in(at, len).is_ok();
        // SAFETY: the memory aside is ours, and writable; what is read is mapped by the caller's word. The place
        // holds what the copy holds.
        unsafe {
            match readable {
                false => OwnMemory::open()?.copy(at, aside, len)?,
                true => std::ptr::copy_nonoverlapping(
                    std::ptr::with_exposed_provenance::<u8>(at),
                    std::ptr::with_exposed_provenance_mut::<u8>(aside),
                    len,
                ),
            }
            if self.attributes.locked && !self.attributes.on_fault {
                // All its pages are there. What does not succeed stays locked on fault.
                let _ = mapping::lock_plainly(aside, len);
            }
            if self.access != Access::ReadWrite {
                mapping::protect(aside, len, self.access)?;
            }
            mapping::place(aside, at, len).or_else(|errno| self.mend(errno, aside, at, len))
        }
    }

    /// Where [`mapping::place`] failed after it had unmapped the place, it is filled before any other thread may touch it.
    fn mend(&self, errno: Errno, aside: usize, at: usize, len: usize) -> Result<()> {
        let locks = self.attributes.locked || locks_future();
        match mapping::mend(at, len, Source::Anonymous, self.attributes, locks) {
            // SAFETY: the place is ours to fill: the call that got us here asked for it.
            Ok(()) => unsafe {
                OwnMemory::open()?.copy(aside, at, len)?;
                mapping::protect(at, len, self.access)?;
                let _ = mapping::unmap(aside, len);
                Ok(())
            },
            Err(_) => Err(errno), // it is there still
        }
    }
}
