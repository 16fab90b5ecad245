//! A look at the memory of processes by several threads, twice.

use std::cell::Cell;
use std::collections::HashMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::parts::{self, Before, Looked, Part};
use super::read::{Call, Counts, Reader, Room, read_again, read_all};
use super::targets::{Source, Target};
use crate::within::{LISTING, within};

/// So long may a call take before its process is given up: its memory may be served by a program that sleeps.
const PATIENCE: Duration = Duration::from_secs(20);
const NO_THREAD: &str = "cannot start a thread that reads";

/// How to look.
pub(crate) struct Looker {
    pub(crate) threads: usize,
    /// Percent of a core.
    pub(crate) cpu_limit: Option<NonZero<u32>>,
    /// One content of this many is kept.
    pub(crate) one_of: NonZero<u64>,
    /// What fingerprints depend on: no program can aim at two contents with one.
    pub(crate) seed: u64,
    pub(crate) quiet: bool,
}

impl Looker {
    /// The first look: all pages. Also the pages of PageONE's stores that are mapped, each once.
    ///
    /// # Errors
    /// None of the processes could be looked at.
    pub(crate) fn first(&self, targets: &[Target]) -> Result<(Vec<Looked>, Vec<Part>, u64)> {
        let mut before = Before::default();
        let (mut looked, mut parts) = (Vec::new(), Vec::new());
        // After the first that is given up less is enough.
        let mut patience = LISTING;
        for (index, target) in (0..).zip(targets) {
            let listed = list(index, target.source.clone(), &mut before, patience);
            let (seen, its) = listed.unwrap_or_else(|error| {
                let error = Some(format!("cannot list its memory: {error}"));
                patience = PATIENCE;
                let seen = Looked {
                    error,
                    ..Looked::default()
                };
                (seen, Vec::new())
            });
            looked.push(seen);
            parts.extend(its);
        }
        if let Some(error) = looked.iter().find_map(|seen| seen.error.as_deref())
            && looked.iter().all(|seen| seen.error.is_some())
        {
            let are_dumps = |target: &Target| matches!(target.source, Source::Dump(..));
            let rights = match targets.iter().all(are_dumps) {
                true => "",
                false => " (root may look at all processes, a user at his own)",
            };
            bail!("nothing can be looked at: {error}{rights}");
        }
        let copies = before.stores.copies();
        drop(before.frames);
        let parts = self.read(
            "the first look",
            targets,
            &mut looked,
            parts,
            |reader, calls, room, source, part| read_all(reader, calls, room, source, part),
        )?;
        Ok((looked, parts, copies))
    }

    /// The second look: what the first one kept, where it is still the same.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(crate) fn second(
        &self,
        targets: &[Target],
        looked: &mut [Looked],
        parts: Vec<Part>,
    ) -> Result<Vec<Part>> {
        self.read(
            "the second look",
            targets,
            looked,
            parts,
            |reader, calls, room, source, part| read_again(reader, calls, room, source, part),
        )
    }

    /// Reads parts with all threads. A thread may sleep in the kernel for as long as another program wants: so
    /// they are waited for with a limit, and such a process is left out. With fewer threads than are wanted it takes longer.
    fn read(
        &self,
        what: &str,
        targets: &[Target],
        looked: &mut [Looked],
        parts: Vec<Part>,
        act: Act,
    ) -> Result<Vec<Part>> {
        let bar = self.bar(what, &parts);
        let mut outstanding = parts.len();
        let crew = Arc::new(Crew {
            sources: targets.iter().map(|target| target.source.clone()).collect(),
            work: Mutex::new(parts),
            busy: Mutex::default(),
            stuck: targets.iter().map(|_| AtomicBool::new(false)).collect(),
            reader: Reader::new(self.seed, self.one_of, self.cpu_limit),
            act,
        });
        let (sender, results) = mpsc::channel();
        let spawn = || {
            let (crew, sender) = (Arc::clone(&crew), sender.clone());
            std::thread::Builder::new().spawn(move || crew.work(&sender))
        };
        let mut threads = 0;
        for _ in 0..self.threads.min(outstanding) {
            match spawn() {
                Ok(_) => threads += 1,
                Err(error) if threads == 0 => return Err(error).context(NO_THREAD),
                Err(_) => break,
            }
        }
        let mut done = Vec::with_capacity(outstanding);
        while outstanding > 0 {
            if let Ok((part, counts)) = results.recv_timeout(PATIENCE / 20) {
                let seen = &mut looked[part.target as usize];
                seen.changed += counts.changed;
                seen.unread += counts.unread;
                for (node, pages) in counts.nodes {
                    *seen.nodes.entry(node).or_default() += pages;
                }
                bar.inc(part.pages.into());
                done.push(part);
                outstanding -= 1;
            }
            for target in crew.give_up() {
                let longest = PATIENCE.as_secs();
                looked[target].error =
                    Some(format!("reading its memory took more than {longest} s"));
                outstanding -= 1;
                // The thread sleeps until that process answers or ends; another one takes its place.
                if outstanding > 0
                    && let Err(error) = spawn()
                {
                    threads -= 1;
                    if threads == 0 {
                        return Err(error).context(NO_THREAD);
                    }
                }
            }
        }
        bar.finish_and_clear();
        done.retain(|part| looked[part.target as usize].error.is_none());
        done.sort_unstable_by_key(|part| (part.target, part.start));
        Ok(done)
    }

    fn bar(&self, what: &str, parts: &[Part]) -> indicatif::ProgressBar {
        if self.quiet {
            return indicatif::ProgressBar::hidden();
        }
        let pages = parts.iter().map(|part| u64::from(part.pages)).sum();
        let style = indicatif::ProgressStyle::with_template("{msg} {wide_bar} {percent} % {eta}");
        let bar = indicatif::ProgressBar::new(pages).with_message(what.to_owned());
        bar.with_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()))
    }
}

/// What there is of a process, and its parts; an error where the lists do not come. With them goes what is known of those before: what the
/// next ones share with them counts twice.
fn list(
    index: u32,
    source: Source,
    before: &mut Before,
    patience: Duration,
) -> std::io::Result<(Looked, Vec<Part>)> {
    let mut known = std::mem::take(before);
    let listed = within(patience, move || {
        let (mut seen, mut parts) = (Looked::default(), Vec::new());
        let listed = parts::list(index, &source, &mut known, &mut seen, &mut parts);
        seen.error = listed.err().map(|error| format!("{error:#}"));
        (known, seen, parts)
    });
    let (known, seen, parts) = listed?;
    *before = known;
    Ok((seen, parts))
}

/// Threads that read parts, and what each reads since when.
struct Crew {
    sources: Vec<Source>,
    work: Mutex<Vec<Part>>,
    /// The process that a thread asks the kernel about, and since when.
    busy: Mutex<HashMap<ThreadId, (usize, Instant)>>,
    stuck: Vec<AtomicBool>,
    reader: Reader,
    act: Act,
}

type Act = fn(&Reader, &Calls, &mut Room, &Source, &mut Part) -> Counts;

/// A thread's calls that may last for as long as another program likes.
struct Calls<'a> {
    crew: &'a Crew,
    target: usize,
    given_up: Cell<bool>,
}

impl Call for Calls<'_> {
    fn make<T>(&self, call: impl FnOnce() -> T) -> T {
        let me = std::thread::current().id();
        sys::priority::without_yielding(|| {
            lock(&self.crew.busy).insert(me, (self.target, Instant::now()));
            let result = call();
            if lock(&self.crew.busy).remove(&me).is_none() {
                self.given_up.set(true);
            }
            result
        })
    }
}

impl Crew {
    fn work(&self, results: &mpsc::Sender<(Part, Counts)>) {
        // Programs are to be served first. Without the right to it the thread has ordinary priority.
        let _ = sys::priority::yield_to_everyone();
        let mut room = Room::new();
        loop {
            let Some(mut part) = lock(&self.work).pop() else {
                return;
            };
            let target = part.target as usize;
            let mut counts = Counts::default();
            if !self.stuck[target].load(Relaxed) {
                let calls = Calls {
                    crew: self,
                    target,
                    given_up: Cell::new(false),
                };
                let source = &self.sources[target];
                counts = (self.act)(&self.reader, &calls, &mut room, source, &mut part);
                if calls.given_up.get() {
                    return; // another thread has taken the place of this one
                }
            }
            // The receiver is gone: the end is near.
            if results.send((part, counts)).is_err() {
                return;
            }
            self.reader.pause();
        }
    }

    /// The processes of threads that have waited too long; each is given up once.
    fn give_up(&self) -> Vec<usize> {
        let late = |(_, since): &(usize, Instant)| since.elapsed() > PATIENCE;
        let mut busy = lock(&self.busy);
        let late: Vec<_> = busy
            .iter()
            .filter(|(_, at)| late(at))
            .map(|(&thread, &(target, _))| (thread, target))
            .collect();
        late.into_iter()
            .map(|(thread, target)| {
                busy.remove(&thread);
                self.stuck[target].store(true, Relaxed);
                target
            })
            .collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
