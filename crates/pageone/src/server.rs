//! The front of the engine: takes connections, learns who calls, hands guests to the engine and
//! answers the command line.
//!
//! ```text
//!              ┌── poll loop, one thread ──┐
//!  connect ───▶│ pending: Hello, in 5 s    │── agent ──▶ policy ──▶ engine.admit
//!              │          request, in 5 s  │── status, heap ─▶ lane (a thread) ─▶ reply
//!              └───────────────────────────┘── set ──────────▶ lane (a thread) ─▶ reply
//! ```
//!
//! Everything is bounded (I8): the connections that have not said who they are, those of one user
//! among them, the time they have for it, the requests that wait, and the time a caller has to take
//! its reply. Two lanes, because unmerging everything takes long and must not hide the counters.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use engine::Engine;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use sys::fault::{self, Point};
use sys::process;
use sys::socket::{self, Peer};
use sys::stranger::{self, Stranger};
use wire::{Hello, MAX_MESSAGE, Reply, Request, Role};

use crate::listener::Listener;
use crate::policy::{Policy, Who};
use crate::refusals::Refusals;

/// Connections that have not said who they are.
const MAX_PENDING: usize = 256;
/// Those of one user among them, so that one user cannot keep all others out.
const MAX_PENDING_OF_USER: usize = 64;
/// Requests that wait in a lane.
const MAX_WAITING: usize = 16;
/// Time to say who one is, to send a request, or to take a reply.
const PATIENCE: Duration = Duration::from_secs(5);
/// After a failed accept (no descriptors left), time before the next one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection between its first byte and the engine or a lane.
struct Pending {
    socket: Stranger,
    deadline: Instant,
    control: bool,
}

/// What became of a pending connection.
enum Step {
    Done,
    Wait(Pending),
}

/// The poll loop's state.
pub(crate) struct Server {
    listener: Listener,
    policy: Policy,
    refusals: Refusals,
    engine: Arc<Engine>,
    pending: Vec<Pending>,
    accept_after: Option<Instant>,
    status: Lane,
    set: Lane,
}

impl Server {
    /// Serves `engine` at `listener`, once [`serve`](Self::serve) is called.
    pub(crate) fn new(listener: Listener, policy: Policy, engine: Arc<Engine>) -> Self {
        let (status, set) = (Lane::new("status", &engine), Lane::new("set", &engine));
        Self {
            listener,
            policy,
            refusals: Refusals::default(),
            engine,
            pending: Vec::new(),
            accept_after: None,
            status,
            set,
        }
    }

    /// Serves until `heed`, called when `told` is readable, says that it is over; then closes the socket
    /// and waits for the lanes.
    ///
    /// # Errors
    /// Waiting fails, or `heed`: nothing else stops it.
    pub(crate) fn serve(
        mut self,
        told: BorrowedFd<'_>,
        heed: impl Fn(&mut Self) -> std::io::Result<bool>,
    ) -> std::io::Result<()> {
        loop {
            let (is_told, accept, ready) = self.wait(told)?;
            if is_told && heed(&mut self)? {
                return Ok(());
            }
            self.advance(&ready);
            if accept {
                self.accept();
            }
        }
    }

    /// Reads the policy again from `file`. With a mistake in it the policy stays as it was. Guests that are
    /// served keep their domain.
    pub(crate) fn read_policy(&mut self, file: &Path) {
        match Policy::read(file) {
            Ok(policy) => {
                self.policy = policy;
                self.refusals = Refusals::default();
                tracing::info!("the policy {} is read again", file.display());
            }
            Err(error) => tracing::error!("the policy stays as it was: {error}"),
        }
    }

    /// Sleeps until something is to be done: what is told, a new connection, which pending ones are ready.
    fn wait(&self, told: BorrowedFd<'_>) -> std::io::Result<(bool, bool, Vec<bool>)> {
        let now = Instant::now();
        let accepting =
            self.pending.len() < MAX_PENDING && self.accept_after.is_none_or(|after| after <= now);
        let mut fds = vec![PollFd::from_borrowed_fd(told, PollFlags::IN)];
        let pending = self.pending.iter().map(|p| p.socket.as_fd());
        fds.extend(pending.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        if accepting {
            fds.push(PollFd::from_borrowed_fd(
                self.listener.as_fd(),
                PollFlags::IN,
            ));
        }
        let deadlines = self.pending.iter().map(|p| p.deadline);
        let next = deadlines
            .chain(self.accept_after.filter(|_| !accepting))
            .min();
        let wait = next.map(|next| next.saturating_duration_since(now));
        let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
        match fault::check(Point::Poll).and_then(|()| poll(&mut fds, wait.as_ref())) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok((false, false, vec![])),
            Err(error @ (Errno::NOMEM | Errno::AGAIN)) => {
                tracing::warn!("cannot wait for connections: {error}");
                thread::sleep(ACCEPT_PAUSE);
                return Ok((false, false, vec![]));
            }
            Err(error) => return Err(error.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (is_told, rest) = (ready[0], &ready[1..]);
        let (pending, listener) = rest.split_at(self.pending.len());
        Ok((is_told, listener.first() == Some(&true), pending.to_vec()))
    }

    fn accept(&mut self) {
        self.accept_after = None;
        let socket = match Stranger::accept(&self.listener) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!("cannot take a connection: {error}");
                self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                return;
            }
        };
        let uid = socket.peer().uid;
        let same = self.pending.iter().filter(|p| p.socket.peer().uid == uid);
        if same.count() + stranger::unclosed(uid) >= MAX_PENDING_OF_USER {
            let why = format!("user {uid} has {MAX_PENDING_OF_USER} unfinished connections");
            return self.refusals.tell(&why);
        }
        let deadline = Instant::now() + PATIENCE;
        self.pending.push(Pending {
            socket,
            deadline,
            control: false,
        });
    }

    /// Takes each pending connection that is ready or late one step further.
    fn advance(&mut self, ready: &[bool]) {
        let now = Instant::now();
        let ready = ready.iter().copied().chain(std::iter::repeat(false));
        for (pending, ready) in std::mem::take(&mut self.pending).into_iter().zip(ready) {
            let step = match ready {
                true => self.read(pending),
                false if pending.deadline <= now => Step::Done,
                false => Step::Wait(pending),
            };
            if let Step::Wait(pending) = step {
                self.pending.push(pending);
            }
        }
    }

    fn read(&mut self, mut pending: Pending) -> Step {
        let mut packet = [0; MAX_MESSAGE];
        let len = match pending.socket.recv(&mut packet) {
            Ok(len) => len,
            Err(Errno::AGAIN) => return Step::Wait(pending),
            Err(Errno::PERM) => {
                let peer = pending.socket.peer();
                let why = format!(
                    "process {} of user {} sends descriptors",
                    peer.pid, peer.uid
                );
                self.refusals.tell(&why);
                return Step::Done;
            }
            Err(_) => return Step::Done,
        };
        match packet.get(..len).unwrap_or_default() {
            [] => Step::Done,
            request if pending.control => {
                self.request(pending, request);
                Step::Done
            }
            hello => self.hello(pending, hello),
        }
    }

    fn hello(&mut self, pending: Pending, packet: &[u8]) -> Step {
        let hello = match Hello::decode(packet) {
            Ok(hello) => hello,
            Err(error) => {
                tracing::warn!("process {} is refused: {error}", pending.socket.peer().pid);
                return Step::Done;
            }
        };
        if hello.role == Role::Control {
            return Step::Wait(Pending {
                control: true,
                ..pending
            });
        }
        let who = self.who(&pending);
        match self.policy.domain(&who, hello.domain.as_str()) {
            Ok(domain) => self.engine.admit(pending.socket, &domain),
            Err(refusal) => self.refusals.tell(&refusal.to_string()),
        }
        Step::Done
    }

    /// What the kernel says of the peer. Its cgroup is that of the process that connected: it is read
    /// by number, and counts only if that process is still there afterwards.
    fn who(&self, pending: &Pending) -> Who {
        let Peer { pid, uid, gid } = pending.socket.peer();
        let look = || {
            let pidfd = socket::peer_pidfd(&pending.socket)?;
            let path = process::cgroup(pid)?;
            match process::has_exited(&pidfd) {
                false => Ok(path),
                true => Err(std::io::Error::from(std::io::ErrorKind::NotFound)),
            }
        };
        let cgroup = self.policy.asks_for_cgroups().then(look);
        let cgroup = cgroup.and_then(|read| {
            read.inspect_err(|error| tracing::debug!(pid, %error, "cannot read the cgroup"))
                .ok()
        });
        Who { uid, gid, cgroup }
    }

    fn request(&self, pending: Pending, packet: &[u8]) {
        let who = self.who(&pending);
        let socket = pending.socket;
        let request = serde_json::from_slice(packet);
        if let Ok(Request::Domain(name)) = &request {
            let answer = match self.policy.domain(&who, name) {
                Ok(domain) => Reply::Domain(domain),
                Err(refusal) => Reply::Refused(refusal.to_string()),
            };
            return reply(&socket, &answer);
        }
        if !self.policy.may_control(&who) {
            let why = format!("user {} may not control this daemon", who.uid);
            return reply(&socket, &Reply::Refused(why));
        }
        match request {
            Ok(look @ (Request::Status | Request::Heap)) => self.status.push(socket, look),
            Ok(request) => self.set.push(socket, request),
            Err(error) => {
                let why = format!("the request is not understood: {error}");
                reply(&socket, &Reply::Refused(why));
            }
        }
    }
}

type Waiting = (Stranger, Request);

/// A thread that answers one kind of request, in order.
struct Lane {
    queue: Option<SyncSender<Waiting>>,
    thread: Option<JoinHandle<()>>,
}

impl Lane {
    fn new(name: &str, engine: &Arc<Engine>) -> Self {
        let (queue, requests) = sync_channel(MAX_WAITING);
        let engine = Arc::clone(engine);
        let work = move || answer(&engine, &requests);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
        if let Err(error) = &thread {
            tracing::error!("cannot start the thread for {name} requests: {error}");
        }
        Self {
            queue: Some(queue),
            thread: thread.ok(),
        }
    }

    fn push(&self, socket: Stranger, request: Request) {
        let Some(queue) = &self.queue else { return };
        if let Err(full) = queue.try_send((socket, request)) {
            let (std::sync::mpsc::TrySendError::Full((socket, _))
            | std::sync::mpsc::TrySendError::Disconnected((socket, _))) = full;
            reply(
                &socket,
                &Reply::Refused("too many requests wait".to_owned()),
            );
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(engine: &Engine, requests: &Receiver<Waiting>) {
    for (socket, request) in requests {
        let answer = match request {
            Request::Status => Reply::Status(Box::new(engine.status())),
            Request::Heap => match serde_json::to_value(engine.heap()) {
                Ok(heap) => Reply::Heap(heap),
                Err(error) => Reply::Refused(format!("the heap cannot be written: {error}")),
            },
            // The poll loop has answered it: it is not for those who control alone.
            Request::Domain(_) => Reply::Refused("this is not the place to ask".to_owned()),
            Request::Set(settings) => done(engine.set(&settings)),
            Request::SetUnmerged(settings) => done(engine.set_unmerged(&settings)),
        };
        reply(&socket, &answer);
    }
}

fn done(turned: Result<(), engine::EngineError>) -> Reply {
    match turned {
        Ok(()) => Reply::Done,
        Err(error) => Reply::Refused(format!("{:#}", anyhow::Error::new(error))),
    }
}

/// Sends a reply. A caller that has gone, or does not take it in time, has lost it.
fn reply(socket: &Stranger, reply: &Reply) {
    let Ok(json) = serde_json::to_vec(reply) else {
        return;
    };
    let waits = rustix::io::ioctl_fionbio(socket, false)
        .and_then(|()| set_socket_timeout(socket, Timeout::Send, Some(PATIENCE)));
    if waits.is_err() {
        return;
    }
    for part in wire::reply_parts(&json) {
        if socket::send(socket, &part, &[]).is_err() {
            return;
        }
    }
}
