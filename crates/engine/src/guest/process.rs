//! The memory of a real guest: one address space, for as long as a witness vouches for it (I10).
//!
//! ```text
//!  hello   the caller: ids, pidfd              refused: several ids, a secret process, a second session
//!    ▼
//!  ready   "I am thread T, the lifeline lies at A" ──▶ T is a thread of that process, not its first
//!    │                                                 that process maps this lifeline at A
//!    ▼                                                 all its threads have the ids that connected
//!  looks   read by T's number ──▶ T lives ──▶ the bytes read are the guest's own
//! ```
//!
//! The witness is the agent's thread ([`sys::witness`] has the proof). The page map is opened once and bound to its
//! address space by the kernel. All else goes by number, and counts only if the witness lives *afterwards*.
//!
//! That the lifeline lies in this address space shows that the speaker lives there too, or that the process gave
//! its consent. Each session has a lifeline of its own, and only those to whom it was sent have it. So a
//! socket that was handed to another process opens no memory, neither the one's nor the other's.
//!
//! Before a process is admitted, only its ids and its command name are looked at.
//!
//! Work that takes the lock of a guest's memory map is done at ordinary priority, and in pieces. A
//! worker runs on idle CPUs only, and one that lost its CPU with that lock held would keep the guest
//! waiting (I7).

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Pid;
use sys::closers::{Kind, Late};
use sys::credentials::{Credentials, is_secret};
use sys::foreign::ForeignName;
use sys::pagemap::{Owner, PageRun, Pagemap};
use sys::priority::without_yielding;
use sys::process::{self, Cgroup, Remote};
use sys::socket::Peer;
use sys::stranger::{Stranger, Watch};
use sys::witness::{Witness, threads, threads_from};
use sys::{memfd, mempolicy, vma};
use wire::{PageBits, Ready};

use crate::domain::placement::Atlas;
use crate::domain::store::PageBytes;
use crate::error::{OverQuota, Refusal};
use crate::guest::memory::Mapped;
use crate::guest::memory::Memory;
use crate::guest::rescue::Guard;
use crate::options::Limits;
use crate::page::{PAGE, StoreId};
use crate::sync::lock;
use crate::users::check_unclosed;

/// Threads whose ids a look compares besides the first and the agent's: 15 µs each.
const THREADS_A_LOOK: usize = 8;
/// Threads a guest may have whose ids are to be compared at all.
const MOST_THREADS: usize = 1 << 15;
/// CPU time in which they are to be compared when it is admitted: four times what so many take, if each is in few groups.
const MOST_TIME: Duration = Duration::from_secs(2);

/// A process that connected.
#[derive(Debug)]
pub(crate) struct Applicant {
    peer: Peer,
    /// The user who answers for it, and whose share it takes.
    principal: u32,
    pidfd: Late<OwnedFd>,
    /// The cgroup on which its domain rests.
    cgroup: Option<Cgroup>,
}

impl Applicant {
    /// The process at the other end of `socket`, for which user `principal` answers, if it may be a guest as far as can be told
    /// without a look at its memory. It waits for the kernel alone.
    ///
    /// # Errors
    /// Why it may not.
    pub(crate) fn new(
        socket: &Stranger,
        principal: u32,
        cgroup: Option<Cgroup>,
    ) -> Result<Self, Refusal> {
        let peer = socket.peer();
        // The number 0 means another process in each call that takes one: the caller, its group, none.
        if peer.pid == 0 {
            return Err(Refusal::Hidden);
        }
        let pidfd = sys::socket::peer_pidfd(socket).map_err(std::io::Error::from)?;
        let pidfd = Late::new(principal, pidfd);
        let applicant = Self {
            peer,
            principal,
            pidfd,
            cgroup,
        };
        let pid = peer.pid;
        let checked = applicant.check(pid);
        let checked = checked.and_then(|()| applicant.check_secret());
        // By number: it was this process's only if that has not ended.
        match applicant.has_exited() {
            false => checked.map(|()| applicant),
            true => Err(Refusal::Gone { pid }),
        }
    }

    fn check_secret(&self) -> Result<(), Refusal> {
        let Peer { pid, uid, .. } = self.peer;
        match is_secret(pid, uid)? {
            true => Err(Refusal::Secret { pid }),
            false => Ok(()),
        }
    }

    /// Its number.
    pub(crate) fn pid(&self) -> u32 {
        self.peer.pid
    }

    /// The user who answers for it.
    pub(crate) fn principal(&self) -> u32 {
        self.principal
    }

    fn has_exited(&self) -> bool {
        process::has_exited(&*self.pidfd)
    }

    /// Whether it is still in the cgroup on which its domain rests.
    fn check_cgroup(&self) -> Result<(), Refusal> {
        let Some(admitted) = &self.cgroup else {
            return Ok(());
        };
        let pid = self.pid();
        match process::cgroup(pid)? {
            found if found.id == admitted.id => Ok(()),
            found => Err(Refusal::Moved {
                pid,
                from: admitted.clone(),
                to: found,
            }),
        }
    }

    /// Compares the ids of `thread` with those of the connection.
    fn check(&self, thread: u32) -> Result<(), Refusal> {
        let Peer { pid, uid, gid } = self.peer;
        let ids = Credentials::of(pid, thread).map_err(|error| crowded(pid, error))?;
        match ids == Credentials::plain(uid, gid) {
            true => Ok(()),
            false => Err(Refusal::Ids {
                peer: self.peer,
                thread,
                ids,
            }),
        }
    }

    /// The same of some threads; those that have ended meanwhile are passed over.
    fn check_all(&self, threads: impl IntoIterator<Item = u32>) -> Result<(), Refusal> {
        let begin = process::thread_time();
        let is_late = || process::thread_time().saturating_sub(begin) > MOST_TIME;
        let checked = threads.into_iter().map(|thread| match is_late() {
            true => Err(Refusal::Crowded {
                pid: self.pid(),
                why: format!("its threads took more than {MOST_TIME:?}"),
            }),
            false => self.check(thread),
        });
        checked.filter(|checked| !is_gone(checked)).collect()
    }
}

/// What a text says that cannot be understood or is too long: both are the process's own doing.
fn crowded(pid: u32, error: std::io::Error) -> Refusal {
    match error.kind() {
        std::io::ErrorKind::InvalidData => Refusal::Crowded {
            pid,
            why: error.to_string(),
        },
        _ => Refusal::System(error),
    }
}

fn is_gone(checked: &Result<(), Refusal>) -> bool {
    let Err(Refusal::System(error)) = checked else {
        return false;
    };
    error.kind() == std::io::ErrorKind::NotFound
        || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// The address space that was admitted.
#[derive(Debug)]
struct Space {
    witness: Late<Witness>,
    pagemap: Late<Pagemap>,
}

/// The memory of a process.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    applicant: Applicant,
    /// The connection to its agent.
    watch: Watch,
    /// Number of the lifeline that it got with the welcome.
    line: u64,
    /// Set by [`Memory::admit`], once.
    space: OnceLock<Space>,
    /// The place of the thread that is compared next.
    turn: AtomicU64,
    /// None where the kernel cannot give one.
    guard: Mutex<Option<Late<Guard>>>,
    atlas: Arc<Atlas>,
    limits: Limits,
}

impl ProcessMemory {
    /// The memory of a process that was welcomed with the lifeline of this number.
    pub(crate) fn new(
        applicant: Applicant,
        watch: Watch,
        line: u64,
        atlas: Arc<Atlas>,
        limits: Limits,
    ) -> Self {
        Self {
            applicant,
            watch,
            line,
            space: OnceLock::new(),
            turn: AtomicU64::new(0),
            guard: Mutex::default(),
            atlas,
            limits,
        }
    }

    fn pid(&self) -> u32 {
        self.applicant.pid()
    }

    fn space(&self) -> &Space {
        let Some(space) = self.space.get() else {
            panic!(
                "I10: process {} is looked at before it is admitted",
                self.pid()
            );
        };
        space
    }

    /// The user as whose one file more of `/proc` waits to be closed, if its mappings may be read.
    fn principal_for_text(&self) -> Result<u32, OverQuota> {
        let principal = self.applicant.principal;
        check_unclosed(&self.limits, principal, Kind::Text).map(|()| principal)
    }

    /// Finds the address space, and whether the speaker lives in it.
    fn find(&self, ready: Ready) -> Result<Space, Refusal> {
        let (pid, principal) = (self.pid(), self.principal_for_text()?);
        let no_witness = Refusal::NoWitness {
            pid,
            number: ready.thread,
        };
        let late = |witness| Late::new(principal, witness);
        let witness = Witness::find(pid, ready.thread).map_err(|error| crowded(pid, error))?;
        let witness = witness.map(late);
        let witness = witness.ok_or(no_witness)?;
        // From here on the witness is a thread of the process that connected, or that has ended.
        let thread = witness.thread();
        let pagemap = Pagemap::open(thread).map_err(std::io::Error::from)?;
        let pagemap = Late::new(principal, pagemap);
        let file = without_yielding(|| vma::shared_file(principal, thread, ready.line));
        let line = (memfd::device(), self.line);
        let maps_it = file
            .is_ok_and(|file| file.is_some_and(|(device, number)| (Ok(device), number) == line));
        self.applicant.check_all(threads(pid, MOST_THREADS)?)?;
        self.applicant.check_secret()?;
        if self.applicant.has_exited() || !witness.lives() {
            return Err(Refusal::Gone { pid });
        }
        match maps_it {
            true => Ok(Space { witness, pagemap }),
            false => Err(Refusal::Elsewhere { pid }),
        }
    }

    fn ask_nodes(&self, pages: &[usize]) -> std::io::Result<Vec<Option<StoreId>>> {
        let witness = &self.space().witness;
        let number = i32::try_from(witness.thread()).ok().and_then(Pid::from_raw);
        let number = number.ok_or(std::io::ErrorKind::NotFound)?;
        let mut nodes = vec![-1; pages.len()];
        witness.vouch(|| mempolicy::pages_to_nodes(Some(number), pages, &mut nodes))??;
        Ok(nodes.iter().map(|&node| self.atlas.of_node(node)).collect())
    }

    fn look_at_descriptors(
        &self,
        look: impl FnOnce(u32) -> std::io::Result<Option<sys::pins::Pin>>,
    ) -> Option<String> {
        let found = self.space().witness.vouch(|| look(self.pid()));
        match found.map_err(std::io::Error::from).and_then(|found| found) {
            Ok(pin) => pin.map(|pin| pin.to_string()),
            Err(error) => Some(format!("its descriptors cannot be looked at: {error}")),
        }
    }

    fn ask_frames(&self, pages: &[usize]) -> std::io::Result<Vec<Option<StoreId>>> {
        let (Some(&first), Some(&last)) = (pages.first(), pages.last()) else {
            return Ok(Vec::new());
        };
        let range = first as u64..(last + wire::PAGE_BYTES) as u64;
        let frames = self.space().pagemap.frames(range)?;
        let store = |&page: &usize| {
            let frame = frames.get(page.checked_sub(first)? / wire::PAGE_BYTES);
            frame.and_then(|&frame| self.atlas.of_frame(frame))
        };
        Ok(pages.iter().map(store).collect())
    }
}

impl Memory for ProcessMemory {
    fn admit(&self, ready: Ready) -> Result<(), Refusal> {
        let space = self.find(ready)?;
        let principal = self.applicant.principal;
        let guard = space
            .witness
            .vouch(|| Guard::stand(principal, space.witness.thread(), &ready));
        match guard.map_err(std::io::Error::from).and_then(|stood| stood) {
            Ok(guard) => *lock(&self.guard) = Some(Late::new(principal, guard)),
            Err(error) => {
                tracing::debug!(pid = self.pid(), %error, "no guard: its pages need its agent")
            }
        }
        let first = self.space.set(space).is_ok();
        assert!(first, "I10: process {} is admitted once", self.pid());
        Ok(())
    }

    fn compare(&self) -> Result<(), Refusal> {
        let (pid, witness) = (self.pid(), &self.space().witness);
        let skip = self.turn.load(Relaxed);
        let some = threads_from(pid, skip, THREADS_A_LOOK)?;
        // Behind the last one it begins again.
        let next = match some.len() {
            THREADS_A_LOOK => skip + THREADS_A_LOOK as u64,
            _ => 0,
        };
        self.turn.store(next, Relaxed);
        let checked = self
            .applicant
            .check_all([pid, witness.thread()].into_iter().chain(some));
        let checked = checked.and_then(|()| self.applicant.check_secret());
        let checked = checked.and_then(|()| self.applicant.check_cgroup());
        witness
            .vouch(|| checked)
            .map_err(|_| Refusal::Gone { pid })?
    }

    fn scan(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)> {
        Ok(without_yielding(|| self.space().pagemap.scan(range, runs))?)
    }

    fn peek(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)> {
        Ok(without_yielding(|| self.space().pagemap.peek(range, runs))?)
    }

    fn read(&self, ranges: &[Remote], pages: &mut [&mut PageBytes]) -> std::io::Result<usize> {
        let mut local: Vec<_> = pages
            .iter_mut()
            .map(|page| IoSliceMut::new(page.as_mut_slice()))
            .collect();
        let witness = &self.space().witness;
        let read = || process::read_memory(witness.thread(), ranges, &mut local);
        match witness.vouch(|| without_yielding(read))? {
            Ok(bytes) => Ok(bytes / wire::PAGE_BYTES),
            // Not there, or no memory to look at it just now: the pages are tried again.
            Err(Errno::FAULT | Errno::NOMEM | Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    fn shared(&self, range: Range<u64>) -> std::io::Result<PageBits> {
        let owners = without_yielding(|| self.space().pagemap.owners(range))?;
        let mut shared = PageBits::EMPTY;
        let several = owners
            .enumerate()
            .filter(|(_, owner)| matches!(owner, Owner::Several(_)));
        several.for_each(|(page, _)| shared.insert(page));
        Ok(shared)
    }

    fn stores(&self, pages: &[usize]) -> Vec<Option<StoreId>> {
        let stores = match &*self.atlas {
            Atlas::One => return vec![Some(StoreId::default()); pages.len()],
            // Frame numbers tell the node.
            Atlas::Ranges(_) => without_yielding(|| self.ask_frames(pages)),
            Atlas::Nodes(_) => without_yielding(|| self.ask_nodes(pages)),
        };
        // A process that is gone has its pages nowhere; the next look finds out.
        stores.unwrap_or_else(|_| vec![None; pages.len()])
    }

    fn pins(&self, most: u32) -> Option<String> {
        self.look_at_descriptors(|pid| sys::pins::find(pid, most))
    }

    fn borrows(&self, most: u32) -> Option<String> {
        self.look_at_descriptors(|pid| sys::pins::find_borrower(pid, most))
    }

    fn mapped(&self, stores: &[u64], each: &mut dyn FnMut(Mapped)) -> std::io::Result<bool> {
        let device = memfd::device()?;
        let mut none_else = true;
        let each_file = |file: vma::FileMapping| {
            let store = stores.iter().position(|&store| store == file.inode);
            let id = store.and_then(|store| u8::try_from(store).ok());
            let id = id.filter(|_| file.device == device).map(StoreId);
            let number = file.offset / PAGE;
            let pages = (file.range.end - file.range.start) / PAGE;
            match id.and_then(|id| id.slots(number, pages)) {
                Some(first) => each(Mapped {
                    range: file.range,
                    first,
                }),
                None => none_else &= !file.path.starts_with(crate::domain::store::PATH),
            }
        };
        let witness = &self.space().witness;
        let uid = self.principal_for_text().map_err(std::io::Error::other)?;
        let read = || vma::private_files(uid, witness.thread(), device, each_file);
        witness.vouch(|| without_yielding(read))??;
        Ok(none_else)
    }

    fn mappings(&self) -> Option<u64> {
        let witness = &self.space().witness;
        let uid = self.principal_for_text();
        let told = |why: &OverQuota| {
            tracing::debug!(pid = self.pid(), "its mappings are not counted: {why}")
        };
        let uid = uid.inspect_err(told).ok()?;
        let count = witness.vouch(|| process::count_mappings(uid, witness.thread()));
        count.ok()?.ok()
    }

    fn rescue(&self, last: bool) -> usize {
        // No thread waits for the lock while the guest's memory is read.
        let taken = lock(&self.guard).take_if(|guard| last || guard.may_rescue());
        let rescued = taken.map_or(Ok(0), |guard| guard.rescue(self));
        rescued.unwrap_or_else(|error| {
            // As a rule its memory is gone with it.
            tracing::debug!(pid = self.pid(), %error, "nothing to rescue");
            0
        })
    }

    fn is_guarded(&self) -> bool {
        lock(&self.guard).is_some()
    }

    fn has_exited(&self) -> bool {
        self.applicant.has_exited() || self.space.get().is_some_and(|space| !space.witness.lives())
    }

    fn has_left(&self) -> bool {
        self.has_exited() || self.watch.has_left()
    }

    fn name(&self) -> ForeignName {
        let name = process::comm(self.pid());
        match self.has_exited() {
            false => name,
            true => ForeignName::default(),
        }
    }

    fn parent(&self) -> Option<u32> {
        let parent = self.space().witness.vouch(|| process::parent(self.pid()));
        parent.ok()?
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn connected() -> (Stranger, OwnedFd, Applicant) {
        let (ours, theirs) = sys::socket::pair().unwrap();
        let ours = Stranger::new(ours).unwrap();
        let applicant = Applicant::new(&ours, ours.peer().uid, None).unwrap();
        (ours, theirs, applicant)
    }

    /// A thread that maps a lifeline, until it is told to end.
    fn speaker(
        line: &OwnedFd,
    ) -> (
        Ready,
        std::sync::mpsc::Sender<()>,
        std::thread::JoinHandle<()>,
    ) {
        let access = sys::mapping::Access::ReadWrite;
        let at = sys::mapping::share(line.as_fd(), 0, wire::PAGE_BYTES, access).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tell.send(process::thread_id()).unwrap();
            let _ = ended.recv();
        });
        let ready = Ready {
            thread: told.recv().unwrap(),
            line: at as u64,
            ..Ready::default()
        };
        (ready, end, thread)
    }

    /// On a machine with one node.
    fn memory_of(applicant: Applicant, ours: &Stranger, line: u64) -> ProcessMemory {
        let atlas = Arc::new(Atlas::One);
        ProcessMemory::new(applicant, ours.watch(), line, atlas, Limits::default())
    }

    #[test]
    fn memory_is_read_only_while_a_witness_lives() {
        let (ours, _theirs, applicant) = connected();
        let (line, held) = memfd::Lifeline::new().unwrap();
        let number = line.number();
        let memory = memory_of(applicant, &ours, number);
        let (ready, end, thread) = speaker(&held);
        memory.admit(ready).unwrap();
        memory.compare().unwrap();
        let source = vec![7u8; 3 * wire::PAGE_BYTES];
        let start = (source.as_ptr() as u64).next_multiple_of(PAGE);
        let there = Remote {
            start,
            len: wire::PAGE_BYTES,
        };
        let nowhere = Remote {
            start: 4096,
            ..there
        };
        let mut page = [0; wire::PAGE_BYTES];
        assert_eq!(memory.read(&[nowhere], &mut [&mut page]).unwrap(), 0);
        assert_eq!(memory.read(&[there], &mut [&mut page]).unwrap(), 1);
        assert_eq!(page, [7; wire::PAGE_BYTES]);
        assert!(memory.mappings().unwrap() > 0 && !memory.name().raw().is_empty());
        assert!(!memory.has_left());
        drop(end);
        thread.join().unwrap();
        while !memory.has_exited() {
            std::thread::yield_now();
        }
        assert!(memory.read(&[there], &mut [&mut page]).is_err());
        assert!(memory.mappings().is_none() && memory.name().raw().is_empty());
        assert!(memory.mapped(&[], &mut |_| {}).is_err());
        assert!(memory.compare().is_err());
    }

    #[test]
    fn a_speaker_elsewhere_is_refused() {
        let (line, held) = memfd::Lifeline::new().unwrap();
        let number = line.number();
        let (ready, _end, _thread) = speaker(&held);
        let refused = |ready, number| {
            let (ours, _theirs, applicant) = connected();
            let memory = memory_of(applicant, &ours, number);
            memory.admit(ready).unwrap_err().to_string()
        };
        let other = refused(ready, number + 1);
        assert!(other.contains("does not live"), "{other}");
        let beside = Ready {
            line: ready.line + 4096,
            ..ready
        };
        assert!(refused(beside, number).contains("does not live"));
        let first = Ready {
            thread: std::process::id(),
            ..ready
        };
        assert!(refused(first, number).contains("thread"));
        let (ours, _theirs, applicant) = connected();
        let memory = memory_of(applicant, &ours, number);
        memory.admit(ready).unwrap();
    }

    #[test]
    fn a_connection_that_is_closed_ends_the_session() {
        for engine_first in [true, false] {
            let (ours, theirs, applicant) = connected();
            let memory = ProcessMemory::new(
                applicant,
                ours.watch(),
                1,
                Arc::new(Atlas::One),
                Limits::default(),
            );
            assert!(!memory.has_left());
            match engine_first {
                true => drop(ours),
                false => drop(theirs),
            }
            assert!(memory.has_left() && !memory.has_exited());
        }
    }

    #[test]
    #[should_panic(expected = "I10")]
    fn nothing_is_looked_at_before() {
        let (ours, _theirs, applicant) = connected();
        let memory = ProcessMemory::new(
            applicant,
            ours.watch(),
            1,
            Arc::new(Atlas::One),
            Limits::default(),
        );
        let _ = memory.mappings();
    }
}
