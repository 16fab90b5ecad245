//! Rescue: an agent that dies in a merge window leaves pages out of reach; the engine brings them back.
//!
//! ```text
//!   home      A  .  .  D        the agent took B and C out, and was killed
//!   staging      B  C           its process is gone, but another one shares the memory
//!                │  └─ read by /proc/PID/mem ─▶ UFFDIO_COPY ─▶ home of C, its sleepers wake
//!                └──── read …
//! ```
//!
//! A process takes its memory along when it ends. Not if another process shares it (clone(2) with `CLONE_VM`), and not
//! if the agent's thread is killed alone, by a seccomp filter. A thread that touches a page that is out sleeps, for
//! the engine holds the userfaultfd too ([`Guardian`]). So no thread reads zeros in its place.
//!
//! Why this is safe at any instruction of the window:
//! - the agent notes where each page belongs before it takes one out ([`Journal`]), and clears that when each is back or
//!   replaced;
//! - a page is filled only where it is absent, registered, and present in the staging area. One that never
//!   left is present. One that was replaced by a mapping of the store lies in a mapping that is not
//!   registered yet. In both cases the kernel refuses;
//! - a journal that a hostile guest has written names places in memory that its own userfaultfd serves.
//!
//! The journal and the staging area are a stranger's memory, and reading them may take for ever. So workers do it, in
//! looks at guests that have left; before a process has its next session, a thread of its own does ([`let_go`]).
//!
//! The case that is left: an engine that dies together with the agent.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::io::Errno;
use sys::guardian::Guardian;
use sys::pagemap::{Categories, PageRun};
use wire::{Journal, MAX_OUT, PAGE_BYTES, Ready};

use crate::domain::store::PageBytes;
use crate::guest::Guest;
use crate::guest::memory::Memory;
use crate::page::PAGE;

/// How often a page is tried while the guest changes its mappings.
const PATIENCE: u32 = 1000;

/// How long a process that wants its next session is kept waiting for what it left in the last one.
const NEXT_SESSION: Duration = Duration::from_millis(50);

/// Ends the guard of a guest that has left, so that its process may have its next session; false when that takes long.
/// Until it is done its thread counts as one that the guest keeps.
pub(crate) fn let_go(guest: &Arc<Guest>) -> bool {
    if !guest.memory.is_guarded() {
        return true;
    }
    if guest.is_held_up() {
        return false;
    }
    guest.lose_thread();
    let (tell, told) = mpsc::channel();
    let its = Arc::clone(guest);
    let rescue = move || {
        bring_back(&its, true);
        its.regain_thread();
        let _ = tell.send(()); // or the caller waits no more
    };
    let begun = std::thread::Builder::new()
        .name("pageone-rescue".into())
        .spawn(rescue);
    if begun.is_err() {
        guest.regain_thread();
        return false;
    }
    told.recv_timeout(NEXT_SESSION).is_ok()
}

/// Brings back what a dead agent of this guest has left out of reach, the `last` time in any case.
pub(crate) fn bring_back(guest: &Guest, last: bool) {
    let (pid, pages) = (guest.pid, guest.memory.rescue(last));
    // The journal is the guest's word: it may be made up.
    let told = || tracing::warn!(pid, pages, "the agent died in a window: its pages are back");
    if pages > 0 {
        guest.user.say(told);
    }
}

/// What is needed to bring a guest's pages back.
#[derive(Debug)]
pub(crate) struct Guard {
    guardian: Guardian,
    memory: File,
    /// Address of the journal; the staging area is behind it.
    journal: u64,
}

impl Guard {
    /// Gets ready to rescue the pages of an agent that has said `ready`, and is number `thread` here. The caller has to
    /// know that the thread lives *after* this call. `principal` answers for it.
    ///
    /// # Errors
    /// When the thread is gone, or the kernel is older than 6.9.
    pub(crate) fn stand(principal: u32, thread: u32, ready: &Ready) -> std::io::Result<Self> {
        Ok(Self {
            guardian: Guardian::fetch(principal, thread, ready.uffd)?,
            memory: sys::text::open(format!("/proc/{thread}/mem"))?,
            journal: ready.journal,
        })
    }

    /// Whether the agent's thread has ended. It closes its connection a moment before.
    pub(crate) fn may_rescue(&self) -> bool {
        self.guardian.has_ended()
    }

    /// Brings back what a dead agent has left out of reach; tells how many pages. An agent that lives brings its pages
    /// back by itself, and must not find them filled.
    ///
    /// # Errors
    /// When the guest cannot be looked at: as a rule, because no process has its memory any more.
    pub(crate) fn rescue(&self, memory: &dyn Memory) -> std::io::Result<usize> {
        if !self.may_rescue() {
            return Ok(0);
        }
        let (mut journal, mut page) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        self.memory.read_exact_at(&mut journal, self.journal)?;
        let staged = self.staged(memory)?;
        let mut rescued = 0;
        for (home, here) in Journal::homes(&journal).zip(self.places()) {
            if staged.iter().any(|run| run.start <= here && here < run.end) {
                self.memory.read_exact_at(&mut page, here)?;
                rescued += usize::from(self.fill(home, &page)?);
            }
        }
        Ok(rescued)
    }

    /// The addresses of the staging area's places.
    fn places(&self) -> impl Iterator<Item = u64> {
        let begin = self.journal + PAGE;
        (0..MAX_OUT as u64).map(move |place| begin + place * PAGE)
    }

    /// Where the staging area has pages.
    fn staged(&self, memory: &dyn Memory) -> std::io::Result<Vec<PageRun>> {
        let mut runs = vec![PageRun::default(); MAX_OUT];
        let begin = self.journal + PAGE;
        let range = begin..begin + MAX_OUT as u64 * PAGE;
        let (filled, _) = memory.peek(range, &mut runs)?;
        runs.truncate(filled);
        runs.retain(|run| {
            run.categories.has(Categories::PRESENT) || run.categories.has(Categories::SWAPPED)
        });
        Ok(runs)
    }

    /// Fills a page; false where none is missing.
    fn fill(&self, home: u64, page: &PageBytes) -> std::io::Result<bool> {
        for _ in 0..PATIENCE {
            match self.guardian.fill(home, page) {
                Ok(()) => return Ok(true),
                Err(Errno::EXIST | Errno::NOENT | Errno::INVAL) => return Ok(false),
                Err(Errno::AGAIN | Errno::NOMEM) => std::thread::yield_now(),
                Err(error) => return Err(error.into()),
            }
        }
        Err(Errno::AGAIN.into())
    }
}
