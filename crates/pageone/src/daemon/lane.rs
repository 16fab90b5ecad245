//! Threads for work that may take its time, so that the poll loop waits for none of it.
//!
//! Each has a queue of its own, of bounded length: work that waits in one holds up nothing in another. None is
//! waited for at the end: the work of such a thread is done by the process that ends, or not at all.
//!
//! **A queue is fair by user.** Users have turns, and each turn is one piece of work:
//!
//! ```text
//!   push ──▶ user 7:  a  b  c ──┐
//!            user 8:  d         ├─▶ a  d  e  b  f  c     at most so many of a user
//!            user 9:  e  f ─────┘                        full: the longest gives way
//! ```
//!
//! So a user who asks without pause waits behind himself. When the queue is full, the user who has most in it loses his last, and
//! a newcomer always finds a place ([`gives_way`]). One queue for all in the order of arrival, the tempting alternative, belongs to the
//! users who ask most.

use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::history::History;
use crate::policy::{Policy, Who};
use engine::{Engine, EngineError};
use rustix::fd::OwnedFd;
use sys::credentials::Credentials;
use sys::usage;
use wire::{DomainOf, MergeNow, Reply, Request, Status, Viewer};

/// Requests that wait in a lane, and those of one user among them.
const MAX_WAITING: usize = 256;
const MAX_WAITING_OF_USER: usize = 4;
/// Guests that wait to be admitted. Those of one user count as his connections. A guest that is turned away comes again.
const MAX_JOINING: usize = 1024;
/// For so long the same counters serve all who see a part of them.
const FRESH: Duration = Duration::from_millis(250);

/// Who has to make room for one more of user `own` where all places are taken: the user who has most, unless that is
/// this one. A newcomer gets a place in any case: one person may be many users (`/etc/subuid`), and those who mean it
/// well need theirs for a moment only.
pub(crate) fn gives_way<U: PartialEq>(
    counts: impl Iterator<Item = (U, usize)> + Clone,
    own: &U,
) -> Option<U> {
    let own = counts.clone().find(|(user, _)| user == own);
    let own = own.map_or(0, |(_, count)| count);
    let (user, most) = counts.max_by_key(|(_, count)| *count)?;
    (own == 0 || most > own + 1).then_some(user)
}

/// Work that waits, by user.
struct Waiting<T> {
    /// In the order of their turns. Each has some.
    users: VecDeque<(u32, VecDeque<T>)>,
    /// The most that may wait.
    most: usize,
    closed: bool,
}

impl<T> Waiting<T> {
    fn of(&self, uid: u32) -> usize {
        let his = self.users.iter().find(|(user, _)| *user == uid);
        his.map_or(0, |(_, work)| work.len())
    }

    fn push(&mut self, uid: u32, most_of_user: usize, work: T) -> Option<T> {
        let counts = self.users.iter().map(|(user, work)| (*user, work.len()));
        let full = counts.clone().map(|(_, count)| count).sum::<usize>() >= self.most;
        let loser = match full {
            true => gives_way(counts, &uid),
            false => None,
        };
        if self.closed || self.of(uid) >= most_of_user || full && loser.is_none() {
            return Some(work);
        }
        let lost = loser.and_then(|loser| self.take(loser, VecDeque::pop_back));
        match self.users.iter_mut().find(|(user, _)| *user == uid) {
            Some((_, his)) => his.push_back(work),
            None => self.users.push_back((uid, VecDeque::from([work]))),
        }
        lost
    }

    /// Takes something of a user's.
    fn take(&mut self, uid: u32, take: fn(&mut VecDeque<T>) -> Option<T>) -> Option<T> {
        let at = self.users.iter().position(|(user, _)| *user == uid)?;
        let (_, work) = self.users.get_mut(at)?;
        let taken = take(work);
        if work.is_empty() {
            self.users.remove(at);
        }
        taken
    }

    /// What is to be done next; its user has his next turn after all others.
    fn pop(&mut self) -> Option<T> {
        let (uid, mut work) = self.users.pop_front()?;
        let next = work.pop_front();
        if !work.is_empty() {
            self.users.push_back((uid, work));
        }
        next
    }
}

/// What a lane's thread and those who give it work share.
struct Line<T> {
    waiting: Mutex<Waiting<T>>,
    comes: Condvar,
}

impl<T> Line<T> {
    fn lock(&self) -> MutexGuard<'_, Waiting<T>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for work; `None` when no more comes.
    fn next(&self) -> Option<T> {
        let waits = |waiting: &mut Waiting<T>| waiting.users.is_empty() && !waiting.closed;
        let waited = self.comes.wait_while(self.lock(), waits);
        waited.unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// A thread that does one kind of work, users in turn.
pub(crate) struct Lane<T> {
    line: Arc<Line<T>>,
}

impl<T: Send + 'static> Lane<T> {
    fn new(name: &str, most: usize, mut work: impl FnMut(T) + Send + 'static) -> Self {
        let line = Arc::new(Line {
            waiting: Mutex::new(Waiting {
                users: VecDeque::new(),
                most,
                closed: false,
            }),
            comes: Condvar::new(),
        });
        let its = Arc::clone(&line);
        let thread = thread::Builder::new().name(name.to_owned());
        let spawned = thread.spawn(move || {
            while let Some(next) = its.next() {
                work(next);
            }
        });
        if let Err(error) = spawned {
            tracing::error!("cannot start the thread for {name}: {error}");
            line.lock().closed = true;
        }
        Self { line }
    }

    /// Gives `work` of user `uid` to the thread, if fewer than `most_of_user` pieces of his wait. What has no place comes
    /// back: this, or another's that makes room.
    pub(crate) fn push(&self, uid: u32, most_of_user: usize, work: T) -> Option<T> {
        let lost = self.line.lock().push(uid, most_of_user, work);
        self.line.comes.notify_one();
        lost
    }

    /// How many pieces of work of a user wait.
    pub(crate) fn waiting(&self, uid: u32) -> usize {
        self.line.lock().of(uid)
    }
}

impl<T: AsRef<Asked> + Send + 'static> Lane<T> {
    /// Gives a request to the thread. One that has no place is refused.
    pub(crate) fn ask(&self, work: T, is_master: bool, answers: &Answers) {
        let most = match is_master {
            true => usize::MAX,
            false => MAX_WAITING_OF_USER,
        };
        let uid = work.as_ref().viewer.uid;
        if let Some(lost) = self.push(uid, most, work) {
            let Asked { caller, viewer, .. } = lost.as_ref();
            let uid = viewer.uid;
            let why =
                format!("too many requests wait; of user {uid} at most {MAX_WAITING_OF_USER} may");
            let reply = match &lost.as_ref().request {
                Request::Merge(_) | Request::DomainOf(_) => Reply::Crowded(why),
                _ => Reply::Refused(why),
            };
            answers.give(*caller, &reply);
        }
    }
}

impl<T> Drop for Lane<T> {
    fn drop(&mut self) {
        self.line.lock().closed = true;
        self.line.comes.notify_one();
    }
}

/// A request of a caller, who is known by a number.
pub(crate) struct Asked {
    pub(crate) caller: u64,
    pub(crate) viewer: Viewer,
    pub(crate) request: Request,
}

impl AsRef<Self> for Asked {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// A request to merge memory now.
pub(crate) struct Merging {
    pub(crate) asked: Asked,
    /// The process that asks.
    pub(crate) pid: u32,
    /// Whether it may ask for other users' processes.
    pub(crate) all: bool,
}

impl AsRef<Asked> for Merging {
    fn as_ref(&self) -> &Asked {
        &self.asked
    }
}

/// A question for the domain of another process.
pub(crate) struct Ruling {
    pub(crate) asked: Asked,
    /// The process that asks.
    pub(crate) who: Who,
    /// The policy as it was then.
    pub(crate) policy: Arc<Policy>,
}

impl AsRef<Asked> for Ruling {
    fn as_ref(&self) -> &Asked {
        &self.asked
    }
}

/// The packets of the reply to a caller.
pub(crate) type Answer = (u64, Vec<Vec<u8>>);

/// Where answers go, and what wakes the one who waits for them.
#[derive(Clone)]
pub(crate) struct Answers {
    pub(crate) to: Sender<Answer>,
    pub(crate) wake: Arc<OwnedFd>,
}

impl Answers {
    fn give(&self, caller: u64, reply: &Reply) {
        if self.to.send((caller, packets(reply))).is_ok() {
            // Full: then it is awake already.
            let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        }
    }
}

/// The packets of a reply.
pub(crate) fn packets(reply: &Reply) -> Vec<Vec<u8>> {
    match serde_json::to_vec(reply) {
        Ok(json) => wire::reply_parts(&json).collect(),
        Err(error) => {
            tracing::error!("a reply cannot be written: {error}");
            Vec::new()
        }
    }
}

/// Counters of all guests, for the callers that may see them.
pub(crate) fn monitor(engine: &Arc<Engine>, history: History, answers: &Answers) -> Lane<Asked> {
    history.follow(engine);
    let (engine, answers) = (Arc::clone(engine), answers.clone());
    Lane::new(
        "monitor",
        MAX_WAITING,
        move |Asked {
                  caller, request, ..
              }| {
            let reply = match request {
                Request::Status => Reply::Status(Box::new(engine.status())),
                Request::Heap => match serde_json::to_value(engine.heap()) {
                    Ok(heap) => Reply::Heap(heap),
                    Err(error) => Reply::Refused(format!("the heap cannot be written: {error}")),
                },
                Request::History { seconds, most } => Reply::History(history.last(seconds, most)),
                _ => unreachable!("the poll loop sends looks only"),
            };
            answers.give(caller, &reply);
        },
    )
}

/// Each user's own counters.
pub(crate) fn own(engine: &Arc<Engine>, answers: &Answers) -> Lane<Asked> {
    let (engine, answers) = (Arc::clone(engine), answers.clone());
    let mut last: Option<(Instant, Status)> = None;
    Lane::new(
        "own",
        MAX_WAITING,
        move |Asked { caller, viewer, .. }| {
            let fresh = last.take_if(|(at, _)| at.elapsed() < FRESH);
            let (at, status) = fresh.unwrap_or_else(|| (Instant::now(), engine.status()));
            let reply = Reply::Status(Box::new(status.of_user(&viewer)));
            last = Some((at, status));
            answers.give(caller, &reply);
        },
    )
}

/// Has memory merged now. The engine replies when it is done, and meanwhile this thread takes the next request.
pub(crate) fn merger(engine: &Arc<Engine>, answers: &Answers) -> Lane<Merging> {
    let (engine, answers) = (Arc::clone(engine), answers.clone());
    Lane::new("merger", MAX_WAITING, move |merging: Merging| {
        let Merging { asked, pid, all } = merging;
        let Request::Merge(wish) = asked.request else {
            unreachable!("the poll loop sends wishes to merge only");
        };
        let MergeNow {
            pids,
            start,
            end,
            brief,
        } = wish;
        let own = [pid];
        let pids = if pids.is_empty() { &own[..] } else { &pids };
        let answers = answers.clone();
        engine.merge_now(
            (&asked.viewer, all),
            pids,
            start..end.max(start),
            brief,
            move |merged| {
                let reply = match merged {
                    Ok(merged) => Reply::Merged(merged),
                    Err(error @ EngineError::Crowd { .. }) => Reply::Crowded(error.to_string()),
                    Err(error) => Reply::Refused(error.to_string()),
                };
                answers.give(asked.caller, &reply);
            },
        );
    })
}

/// Says which domains other processes have.
pub(crate) fn ruler(answers: &Answers) -> Lane<Ruling> {
    let answers = answers.clone();
    Lane::new("ruler", MAX_WAITING, move |ruling: Ruling| {
        let Ruling { asked, who, policy } = ruling;
        let Request::DomainOf(of) = asked.request else {
            unreachable!("the poll loop sends questions for domains only");
        };
        let other = whom(&policy, &who, &of);
        let reply = other.map_or(Reply::Unseen, |other| domain(&policy, &other, &of.name));
        answers.give(asked.caller, &reply);
    })
}

/// What the policy has for a process that asks for `name`.
pub(crate) fn domain(policy: &Policy, who: &Who, name: &str) -> Reply {
    let any = policy.offers_any(who, name);
    match policy.domain(who, name) {
        Ok(domain) if any => Reply::DomainOfAny(domain),
        Ok(domain) => Reply::Domain(domain),
        Err(why) => Reply::Refused(why.to_string()),
    }
}

/// Another process, if it is the one that is meant, and of whose domain `who` may know.
fn whom(policy: &Policy, who: &Who, of: &DomainOf) -> Option<Who> {
    // Before and afterwards: so all of it was of the process that began then.
    let is_it = || usage::began(of.pid).is_ok_and(|began| began == of.began);
    if !is_it() {
        return None;
    }
    // Its user first: of a process that is not theirs, those who ask have nothing else read.
    let its = Credentials::of(of.pid, of.pid).ok()?;
    let may = its.effective_user() == who.uid || policy.may_monitor(who);
    let other = may.then(|| Who::with(of.pid, &its))?;
    is_it().then_some(other)
}

/// Turns knobs.
pub(crate) fn control(engine: &Arc<Engine>, answers: &Answers) -> Lane<Asked> {
    let (engine, answers) = (Arc::clone(engine), answers.clone());
    Lane::new(
        "control",
        MAX_WAITING,
        move |Asked {
                  caller, request, ..
              }| {
            let is_plain = matches!(request, Request::Set(_));
            let turned = match request {
                Request::Set(settings) => engine.set(&settings),
                Request::SetUnmerged(settings) => engine.set_unmerged(&settings),
                _ => unreachable!("the poll loop sends knobs only"),
            };
            let reply = match turned {
                Ok(()) => Reply::Done,
                Err(late @ EngineError::Unmerging { .. }) if is_plain => {
                    Reply::Turned(late.to_string())
                }
                Err(error) => Reply::Refused(format!("{:#}", anyhow::Error::new(error))),
            };
            answers.give(caller, &reply);
        },
    )
}

/// Hands guests to the engine: a new domain has to be told to the keeper, which may be slow.
pub(crate) fn door<T: Send + 'static>(work: impl FnMut(T) + Send + 'static) -> Lane<T> {
    Lane::new("door", MAX_JOINING, work)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(most: usize) -> Waiting<(u32, usize)> {
        Waiting {
            users: VecDeque::new(),
            most,
            closed: false,
        }
    }

    #[test]
    fn users_have_turns_and_each_a_bounded_number() {
        let mut all = waiting(100);
        let pushed: Vec<_> = (0..6).map(|n| all.push(7, 4, (7, n))).collect();
        assert_eq!(pushed.iter().flatten().count(), 2, "two too many");
        for n in 0..2 {
            assert_eq!(all.push(8, 4, (8, n)), None);
        }
        let order: Vec<_> = std::iter::from_fn(|| all.pop()).collect();
        let expected = [(7, 0), (8, 0), (7, 1), (8, 1), (7, 2), (7, 3)];
        assert_eq!(order, expected);
    }

    #[test]
    fn a_newcomer_finds_a_place_in_a_full_queue() {
        let mut all = waiting(8);
        for uid in 0..8 {
            assert_eq!(all.push(uid, 4, (uid, 0)), None);
        }
        let lost = all.push(9, 4, (9, 0)).expect("another makes room");
        assert_ne!(lost.0, 9);
        assert_eq!((all.of(9), all.of(lost.0)), (1, 0));
        // One who has as much as all others gets no more.
        assert_eq!(all.push(9, 4, (9, 1)), Some((9, 1)));
        let rest: Vec<_> = std::iter::from_fn(|| all.pop()).collect();
        assert_eq!(rest.len(), 8);
    }

    #[test]
    fn the_longest_gives_way() {
        let mut all = waiting(6);
        (0..4).for_each(|n| assert_eq!(all.push(1, 9, (1, n)), None));
        (0..2).for_each(|n| assert_eq!(all.push(2, 9, (2, n)), None));
        assert_eq!(all.push(3, 9, (3, 0)), Some((1, 3)));
        assert_eq!(all.push(1, 9, (1, 4)), Some((1, 4)), "no user has more");
        assert_eq!((all.of(1), all.of(2), all.of(3)), (3, 2, 1));
    }

    /// Who asks with another user's rights learns nothing, and no question is answered for a process that came later.
    #[test]
    fn domains_of_others_are_told_to_those_who_may_see_them() {
        let own = rustix::process::geteuid().as_raw();
        let text = format!("[monitor]\nuid = {}\n", own + 2);
        let policy = Policy::parse(&text, own).unwrap();
        let pid = std::process::id();
        let began = usage::began(pid).unwrap();
        for (user, began, told) in [
            (own, began, true),
            (own, began + 1, false),
            (own + 1, began, false),
            (own + 2, began, true),
            (own + 2, began + 1, false),
        ] {
            let who = Who {
                uid: user,
                gid: user,
                cgroup: None,
                confined: false,
            };
            let of = DomainOf {
                pid,
                began,
                name: String::new(),
            };
            let other = whom(&policy, &who, &of);
            assert_eq!(other.is_some(), told, "user {user}");
            let other = other.is_none_or(|other| other.uid == own);
            assert!(other, "it is the process that was asked for");
        }
    }

    #[test]
    fn the_thread_ends_with_its_lane() {
        let (tell, told) = std::sync::mpsc::channel();
        let lane = Lane::new("test", 4, move |n: u32| {
            let _ = tell.send(n);
        });
        assert_eq!(lane.push(1, 4, 5), None);
        assert_eq!(told.recv(), Ok(5));
        drop(lane);
        assert!(told.recv().is_err());
    }
}
