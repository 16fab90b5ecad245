//! Threads that do what may take its time, so that the poll loop does not.
//!
//! Each has a queue of its own, of bounded length: what waits in one holds up nothing in another. None is
//! waited for at the end: what such a thread does is done by the process that ends, or not at all.

use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use engine::Engine;
use rustix::fd::OwnedFd;
use wire::{Reply, Request, Status};

/// Requests that wait in a lane.
const MAX_WAITING: usize = 16;
/// Guests that wait to be admitted. A guest that is turned away comes again.
const MAX_JOINING: usize = 1024;
/// For so long the same counters serve all who see a part of them.
const FRESH: Duration = Duration::from_millis(250);

/// A thread that does one kind of work, in order.
pub(crate) struct Lane<T> {
    queue: SyncSender<T>,
}

impl<T: Send + 'static> Lane<T> {
    fn new(name: &str, most: usize, mut work: impl FnMut(T) + Send + 'static) -> Self {
        let (queue, waiting) = sync_channel(most);
        let thread = thread::Builder::new().name(name.to_owned());
        if let Err(error) = thread.spawn(move || waiting.into_iter().for_each(&mut work)) {
            tracing::error!("cannot start the thread for {name}: {error}");
        }
        Self { queue }
    }

    /// Gives `work` to the thread.
    ///
    /// # Errors
    /// Too much waits: the work comes back.
    pub(crate) fn push(&self, work: T) -> Result<(), T> {
        self.queue.try_send(work).map_err(|refused| match refused {
            TrySendError::Full(work) | TrySendError::Disconnected(work) => work,
        })
    }
}

/// A request of a caller, who is known by a number.
pub(crate) struct Asked {
    pub(crate) caller: u64,
    pub(crate) request: Request,
}

/// A caller that asks for the counters of the guests of his own.
pub(crate) struct AskedOwn {
    pub(crate) caller: u64,
    pub(crate) uid: u32,
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

/// Counters of everybody, for those who may see them.
pub(crate) fn monitor(engine: &Arc<Engine>, answers: &Answers) -> Lane<Asked> {
    let (engine, answers) = (Arc::clone(engine), answers.clone());
    Lane::new("monitor", MAX_WAITING, move |Asked { caller, request }| {
        let reply = match request {
            Request::Status => Reply::Status(Box::new(engine.status())),
            Request::Heap => match serde_json::to_value(engine.heap()) {
                Ok(heap) => Reply::Heap(heap),
                Err(error) => Reply::Refused(format!("the heap cannot be written: {error}")),
            },
            _ => unreachable!("the poll loop sends looks only"),
        };
        answers.give(caller, &reply);
    })
}

/// Each user's own counters.
pub(crate) fn own(engine: &Arc<Engine>, answers: &Answers) -> Lane<AskedOwn> {
    let (engine, answers) = (Arc::clone(engine), answers.clone());
    let mut last: Option<(Instant, Status)> = None;
    Lane::new("own", MAX_WAITING, move |AskedOwn { caller, uid }| {
        let fresh = last.take_if(|(at, _)| at.elapsed() < FRESH);
        let (at, status) = fresh.unwrap_or_else(|| (Instant::now(), engine.status()));
        let reply = Reply::Status(Box::new(status.of_user(uid)));
        last = Some((at, status));
        answers.give(caller, &reply);
    })
}

/// Turns knobs.
pub(crate) fn control(engine: &Arc<Engine>, answers: &Answers) -> Lane<Asked> {
    let (engine, answers) = (Arc::clone(engine), answers.clone());
    Lane::new("control", MAX_WAITING, move |Asked { caller, request }| {
        let turned = match request {
            Request::Set(settings) => engine.set(&settings),
            Request::SetUnmerged(settings) => engine.set_unmerged(&settings),
            _ => unreachable!("the poll loop sends knobs only"),
        };
        let reply = match turned {
            Ok(()) => Reply::Done,
            Err(error) => Reply::Refused(format!("{:#}", anyhow::Error::new(error))),
        };
        answers.give(caller, &reply);
    })
}

/// Hands guests to the engine: a new domain has to be told to the keeper, which may be slow.
pub(crate) fn door<T: Send + 'static>(work: impl FnMut(T) + Send + 'static) -> Lane<T> {
    Lane::new("door", MAX_JOINING, work)
}
