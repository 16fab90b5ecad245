//! The front of the engine: takes connections, learns the callers, hands guests to the engine and
//! answers the command line.
//!
//! ```text
//!              ┌───────────── poll loop, one thread ─────────────┐
//!  connect ───▶│ Hello, in 5 s ─▶ policy ─ agent ────────────────┼──▶ door ─▶ engine.admit
//!              │    └─▶ Request, in 5 s ─▶ policy ─▶ Asked ──────┼──▶ monitor, own, control, merger, ruler
//!              │                            Reply, in 10 s ◀─────┼─────────┘ packets
//!              └─────────────────────────────────────────────────┘
//! ```
//!
//! Everything is bounded (I8): the connections that are no guests', those of one user among them, the
//! time they have, and the requests that wait. When all places are taken, the user who has most loses the oldest
//! of his (the queues' rule of dropping from the longest), also where each has but one. So no user is kept out by any
//! number of others. A master always gets a place, and containers' roots, who have a master's number alone, are a user of their own ([`Party`]).
//!
//! **The loop waits for no peer.** Its thread reads and writes without waiting, and lets go of a connection without
//! waiting ([`Stranger`]). A reply that its caller does not take stays here, not in a thread. What may take its time has
//! a thread of its own ([`lane`]). That is for looks that see all users' guests, looks at a user's own, and knobs (unmerging takes
//! long). It is for the door, too, because a new domain has to be told to a keeper that may be slow.
//!
//! | thread | may wait for | at most |
//! |---|---|---|
//! | poll loop | something to do: ppoll(2) | – |
//! | | `/proc/PID/cgroup`, if the policy asks for cgroups: the kernel's own lock | no stranger holds it |
//! | | `/proc/PID/ns`, of root's connections and if a request names processes: the same | the same |
//! | | the policy's file and the users that it names, at SIGHUP | its file system and name service: the administrator's |
//! | | standard error | nothing: a line that does not fit at once is left out |
//! | door | the keeper's queue | 2 s a message; domains are bounded by user |
//! | | memory for a packet | 200 ms |
//! | monitor, own | the engine's short locks | a worker holds none while it waits for a guest |
//! | merger | the engine's short locks | |
//! | ruler | files in `/proc` of the process that it is asked about | as long as that process's user likes: others wait who ask the same |
//! | control | the driver: the end of a round, unmerging | 5 s without any progress |
//! | closers | descriptors of strangers, locks on files of guests | as long as they like: one thread a user, 32 in all |
//! | keeper | ppoll(2); it receives from the daemon alone | – |
//!
//! At the end none but the poll loop is waited for.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use engine::{Engine, Limits, Refusals};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use sys::closers::{self, Kind, Late};
use sys::fault::{self, Point};
use sys::process::{self, Cgroup};
use sys::socket::{self, Peer};
use sys::stranger::Stranger;
use wire::{DomainMark, Hello, MAX_MESSAGE, Reason, Reply, Request, Role, Viewer};

use super::history::History;
use super::lane::{self, Answer, Answers, Asked, Lane, Merging, Ruling};
use super::listener::Listener;
use crate::policy::{Policy, Who};
use crate::{client, human};

/// Connections taken before others get their turn.
const MAX_ACCEPTS: usize = 16;
/// The most descriptors that wait to be closed of a user who is looked at.
const MOST_UNCLOSED: usize = 1024;
/// Time to say who one is, or to send a request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time to take a reply.
const TAKING: Duration = Duration::from_secs(10);
/// After a failed accept (no descriptors left), time before the next one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection that is no guest's.
struct Caller {
    number: u64,
    socket: Stranger,
    /// It has a master's number, and not his rights.
    confined: bool,
    stage: Stage,
    /// When the present stage is to be over.
    deadline: Option<Instant>,
}

/// How far a caller has come.
enum Stage {
    /// It is to say who it is.
    Hello,
    /// It is to send a request.
    Request,
    /// A lane has its request.
    Asked,
    /// It is to take these packets.
    Reply(std::vec::IntoIter<Vec<u8>>),
}

/// What became of a caller.
enum Step {
    Done,
    Wait(Caller),
}

/// Those whose connections are counted together: a user's. Root of a container has root's number, and would keep the host's root out by it.
/// So all of them are one of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Party {
    uid: u32,
    confined: bool,
}

/// A place among the connections that are no guests'.
#[derive(Clone, Copy)]
struct Taken {
    by: Party,
    /// It has asked for nothing yet.
    silent: bool,
}

impl Caller {
    fn party(&self) -> Party {
        Party {
            uid: self.socket.peer().uid,
            confined: self.confined,
        }
    }

    fn place(&self) -> Taken {
        Taken {
            by: self.party(),
            silent: matches!(self.stage, Stage::Hello | Stage::Request),
        }
    }

    fn waits_for(&self) -> PollFlags {
        match self.stage {
            Stage::Hello | Stage::Request => PollFlags::IN,
            // Its end is told in any case.
            Stage::Asked => PollFlags::empty(),
            Stage::Reply(_) => PollFlags::OUT,
        }
    }

    /// Gives it the packets of a reply, as far as it takes them.
    fn reply(mut self, packets: Vec<Vec<u8>>) -> Step {
        self.stage = Stage::Reply(packets.into_iter());
        self.deadline = Some(Instant::now() + TAKING);
        self.write()
    }

    fn refuse(self, why: String) -> Step {
        self.reply(lane::packets(&Reply::Refused(why)))
    }

    fn write(mut self) -> Step {
        let Stage::Reply(packets) = &mut self.stage else {
            return Step::Wait(self);
        };
        while let Some(packet) = packets.as_slice().first() {
            match socket::send_within(&self.socket, packet, &[], Duration::ZERO) {
                Ok(()) => drop(packets.next()),
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return Step::Wait(self),
                Err(_) => return Step::Done,
            }
        }
        Step::Done
    }
}

/// A guest on its way to the engine.
struct Joining {
    socket: Stranger,
    domain: String,
    /// The cgroup on which the domain rests.
    cgroup: Option<Cgroup>,
}

/// The poll loop's state.
pub(crate) struct Server {
    listener: Listener,
    policy: Arc<Policy>,
    limits: Limits,
    refusals: Arc<Refusals>,
    callers: Vec<Caller>,
    next_caller: u64,
    accept_after: Option<Instant>,
    answers: Receiver<Answer>,
    /// Where the lanes give them.
    to: Answers,
    monitor: Lane<Asked>,
    own: Lane<Asked>,
    control: Lane<Asked>,
    merger: Lane<Merging>,
    ruler: Lane<Ruling>,
    door: Lane<Joining>,
}

/// What a wait has found.
#[derive(Default)]
struct Ready {
    told: bool,
    accept: bool,
    answers: bool,
    callers: Vec<bool>,
}

impl Server {
    /// Serves `engine` at `listener`, once [`serve`](Self::serve) is called.
    ///
    /// # Errors
    /// What eventfd(2) gives.
    pub(crate) fn new(
        listener: Listener,
        policy: Policy,
        limits: Limits,
        engine: &Arc<Engine>,
        history: History,
    ) -> std::io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let (to, answers) = channel();
        let to = Answers {
            to,
            wake: Arc::new(wake),
        };
        Ok(Self {
            listener,
            policy: Arc::new(policy),
            limits,
            callers: Vec::new(),
            next_caller: 0,
            accept_after: None,
            answers,
            monitor: lane::monitor(engine, history, &to),
            own: lane::own(engine, &to),
            control: lane::control(engine, &to),
            merger: lane::merger(engine, &to),
            ruler: lane::ruler(&to),
            door: door(engine),
            to,
            refusals: engine.refusals(),
        })
    }

    /// Serves until `heed`, called when `told` is readable, says that it is over; then closes the socket.
    ///
    /// # Errors
    /// Waiting fails, or `heed`: nothing else stops it.
    pub(crate) fn serve(
        mut self,
        told: BorrowedFd<'_>,
        mut heed: impl FnMut(&mut Self) -> std::io::Result<bool>,
    ) -> std::io::Result<()> {
        loop {
            let ready = self.wait(told)?;
            if ready.told && heed(&mut self)? {
                return Ok(());
            }
            self.advance(&ready.callers);
            if ready.answers {
                self.take_answers();
            }
            if ready.accept {
                self.accept();
            }
        }
    }

    /// Reads the policy again from `file`. With a mistake in it the policy stays as it was. Guests that are
    /// served keep their domain.
    pub(crate) fn read_policy(&mut self, file: &Path) {
        match Policy::read(file) {
            Ok(policy) => {
                self.policy = Arc::new(policy);
                self.refusals.forget();
                tracing::info!("the policy {} is read again", file.display());
            }
            Err(error) => {
                let why = human::in_a_line(&error.to_string());
                tracing::error!("the policy stays as it was: {why}");
            }
        }
    }

    /// Sleeps until something is to be done.
    fn wait(&self, told: BorrowedFd<'_>) -> std::io::Result<Ready> {
        let now = Instant::now();
        let accepting = self.accept_after.is_none_or(|after| after <= now);
        let mut fds = vec![
            PollFd::from_borrowed_fd(told, PollFlags::IN),
            PollFd::new(&*self.to.wake, PollFlags::IN),
            PollFd::new(
                &self.listener,
                [PollFlags::empty(), PollFlags::IN][usize::from(accepting)],
            ),
        ];
        let callers = self.callers.iter();
        fds.extend(callers.map(|caller| PollFd::new(&caller.socket, caller.waits_for())));
        let deadlines = self.callers.iter().filter_map(|caller| caller.deadline);
        let next = deadlines
            .chain(self.accept_after.filter(|_| !accepting))
            .min();
        let wait = next.map(|next| next.saturating_duration_since(now));
        let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
        match fault::check(Point::Poll).and_then(|()| poll(&mut fds, wait.as_ref())) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Ready::default()),
            Err(error @ (Errno::NOMEM | Errno::AGAIN)) => {
                tracing::warn!("cannot wait for connections: {error}");
                thread::sleep(ACCEPT_PAUSE);
                return Ok(Ready::default());
            }
            Err(error) => return Err(error.into()),
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        Ok(Ready {
            told: next(),
            answers: next(),
            accept: next() && accepting,
            callers: ready.collect(),
        })
    }

    fn accept(&mut self) {
        self.accept_after = None;
        for _ in 0..MAX_ACCEPTS {
            match Stranger::accept(&self.listener) {
                Ok(socket) => self.welcome(socket),
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    tracing::warn!("cannot take a connection: {error}");
                    self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    /// Takes a connection in, if its user has a place.
    fn welcome(&mut self, socket: Stranger) {
        let mut caller = Caller {
            number: self.next_caller + 1,
            socket,
            confined: false,
            stage: Stage::Hello,
            deadline: Some(Instant::now() + PATIENCE),
        };
        caller.confined = self.is_confined_master(&caller);
        let (Peer { pid, uid, .. }, party) = (caller.socket.peer(), caller.party());
        let same = self.callers.iter().filter(|other| other.party() == party);
        let (his, all) = closers::unclosed(uid, Kind::Connection);
        // One with subordinate ids is many users.
        let most = match (all as u64) < sys::process::descriptor_limit() / 8 {
            true => self.limits.connections_per_user,
            false => 1,
        };
        // What waits at the door has not been answered either.
        let taken = same.count() + his + self.door.waiting(uid);
        let over = taken >= most && !self.is_free_master(party);
        if over || !self.make_room(party) {
            let where_from = if party.confined { " of containers" } else { "" };
            let why = format!(
                "user {uid}{where_from} has {taken} unfinished connections, and may have {most} (limits: connections_per_user = {}, \
                 connections = {}; {all} are being closed)",
                self.limits.connections_per_user, self.limits.connections
            );
            return self.refusals.tell(uid, pid, &why);
        }
        self.next_caller += 1;
        self.callers.push(caller);
    }

    /// Whether it has a master's number, and not his rights. A daemon that is not root's has no container's root for a client.
    fn is_confined_master(&self, caller: &Caller) -> bool {
        let may_be = self.policy.is_master(caller.socket.peer().uid);
        let looked = || look_at(caller, sys::confined::is_confined);
        may_be && rustix::process::geteuid().is_root() && looked().unwrap_or(true)
    }

    fn is_free_master(&self, party: Party) -> bool {
        self.policy.is_master(party.uid) && !party.confined
    }

    /// Whether there is a place for one more of these: if all are taken, another connection ends ([`gives_place`]).
    fn make_room(&mut self, newcomer: Party) -> bool {
        if self.callers.len() < self.limits.connections {
            return true;
        }
        let places: Vec<_> = self.callers.iter().map(Caller::place).collect();
        let lost = gives_place(&places, newcomer, |party| self.is_free_master(party));
        lost.is_some_and(|lost| {
            drop(self.callers.remove(lost));
            true
        })
    }

    /// Takes each caller that is ready or late one step further.
    fn advance(&mut self, ready: &[bool]) {
        let now = Instant::now();
        let ready = ready.iter().copied().chain(std::iter::repeat(false));
        for (caller, ready) in std::mem::take(&mut self.callers).into_iter().zip(ready) {
            let late = caller.deadline.is_some_and(|deadline| deadline <= now);
            let step = match (&caller.stage, ready) {
                (Stage::Hello | Stage::Request, true) => self.read(caller),
                (Stage::Reply(_), true) => caller.write(),
                // It is gone.
                (Stage::Asked, true) => Step::Done,
                (_, false) if late => Step::Done,
                (_, false) => Step::Wait(caller),
            };
            if let Step::Wait(caller) = step {
                self.callers.push(caller);
            }
        }
    }

    fn take_answers(&mut self) {
        let _ = rustix::io::read(&*self.to.wake, &mut [0; 8]);
        while let Ok((number, packets)) = self.answers.try_recv() {
            let at = self
                .callers
                .iter()
                .position(|caller| caller.number == number);
            // Without a place, the caller has gone meanwhile.
            let Some(at) = at else { continue };
            if let Step::Wait(caller) = self.callers.remove(at).reply(packets) {
                self.callers.push(caller);
            }
        }
    }

    fn read(&mut self, caller: Caller) -> Step {
        let mut packet = [0; MAX_MESSAGE];
        let len = match caller.socket.recv(&mut packet) {
            Ok(0) => return Step::Done,
            Ok(len) => len,
            Err(Errno::AGAIN) => return Step::Wait(caller),
            Err(Errno::PERM) => {
                let Peer { pid, uid, .. } = caller.socket.peer();
                let why = format!("process {pid} of user {uid} sends descriptors");
                self.refusals.tell(uid, pid, &why);
                return Step::Done;
            }
            Err(_) => return Step::Done,
        };
        let packet = packet.get(..len).unwrap_or_default();
        match caller.stage {
            Stage::Hello => self.hello(caller, packet),
            _ => self.request(caller, packet),
        }
    }

    fn hello(&mut self, caller: Caller, packet: &[u8]) -> Step {
        let Peer { pid, uid, .. } = caller.socket.peer();
        let hello = match Hello::decode(packet) {
            Ok(hello) => hello,
            Err(error) => {
                let why = format!("process {pid} of user {uid}: {error}");
                self.refusals.tell(uid, pid, &why);
                return Step::Done;
            }
        };
        if hello.role == Role::Control {
            return Step::Wait(Caller {
                stage: Stage::Request,
                ..caller
            });
        }
        let who = self.who(&caller);
        let joining = match self.policy.domain(&who, hello.domain.as_str()) {
            Ok(domain) => Joining {
                socket: caller.socket,
                domain,
                cgroup: who.cgroup,
            },
            Err(refusal) => {
                let why = refusal.to_string();
                refuse_guest(&caller.socket, &why, DomainMark::NONE);
                self.refusals.tell(uid, pid, &why);
                return Step::Done;
            }
        };
        // How many wait of a user is bounded where his connections are.
        if let Some(Joining { socket, domain, .. }) = self.door.push(uid, usize::MAX, joining) {
            let mark = engine::mark(&domain);
            refuse_guest(&socket, "too many processes wait to be guests", mark);
        }
        Step::Done
    }

    /// What the kernel says of the peer.
    fn who(&self, caller: &Caller) -> Who {
        let Peer { pid, uid, gid } = caller.socket.peer();
        let asks = self.policy.looks_at_cgroups();
        let cgroup = asks.then(|| look_at(caller, process::cgroup));
        let cgroup = cgroup.and_then(|read| {
            read.inspect_err(|error| tracing::debug!(pid, %error, "cannot read the cgroup"))
                .ok()
        });
        Who {
            uid,
            gid,
            cgroup,
            confined: false,
        }
    }

    /// The same of one who asks for something: whether it has its number alone. A daemon that is not root's cannot look at root's processes,
    /// and has no container's root for a client.
    ///
    /// A service may have mounts of its own, as `pageone-serve` has. So other numbers than a master's count as a container's by its PID
    /// namespace. **The limit**: one that has the host's (`--pid=host`).
    fn who_asks(&self, caller: &Caller) -> Who {
        let who = self.who(caller);
        let is_master = self.policy.is_master(who.uid);
        // Of all others nothing depends on it.
        let looks = is_master || self.policy.names(&who);
        let looked = || match is_master {
            true => look_at(caller, sys::confined::is_confined),
            false => shares_numbers(caller).map(|shares| shares == Some(false)),
        };
        let confined = rustix::process::geteuid().is_root() && looks && looked().unwrap_or(true);
        Who { confined, ..who }
    }

    fn request(&mut self, caller: Caller, packet: &[u8]) -> Step {
        let request = match serde_json::from_slice(packet) {
            Ok(request) => request,
            Err(error) => return caller.refuse(format!("the request is not understood: {error}")),
        };
        let who = self.who_asks(&caller);
        let lane = match &request {
            Request::Domain(name) => {
                let reply = lane::domain(&self.policy, &who, name);
                return caller.reply(lane::packets(&reply));
            }
            Request::DomainOf(_) => return self.rule(caller, who, request),
            Request::Status if !self.policy.may_monitor(&who) => &self.own,
            Request::Heap | Request::History { .. } if !self.policy.may_monitor(&who) => {
                return caller.refuse(format!(
                    "{} may not see what all guests have: [monitor] in the policy gives that",
                    named(&who)
                ));
            }
            Request::Status | Request::Heap | Request::History { .. } => &self.monitor,
            Request::Set(_) | Request::SetUnmerged(_) if !self.policy.may_control(&who) => {
                return caller.refuse(format!(
                    "{} may not control this daemon: [control] in the policy gives that",
                    named(&who)
                ));
            }
            Request::Set(_) | Request::SetUnmerged(_) => &self.control,
            Request::Merge(_) => return self.merge(caller, &who, request),
        };
        let asked = self.asked(&caller, &who, request);
        self.hand(lane, asked, caller)
    }

    fn asked(&self, caller: &Caller, who: &Who, request: Request) -> Asked {
        Asked {
            caller: caller.number,
            viewer: self.viewer(who),
            request,
        }
    }

    /// Hands work to a lane, which answers the caller.
    fn hand<T>(&self, lane: &Lane<T>, work: T, mut caller: Caller) -> Step
    where
        T: AsRef<Asked> + Send + 'static,
    {
        let is_master = self.is_free_master(caller.party());
        lane.ask(work, is_master, &self.to);
        (caller.stage, caller.deadline) = (Stage::Asked, None);
        Step::Wait(caller)
    }

    fn viewer(&self, who: &Who) -> Viewer {
        Viewer {
            uid: who.uid,
            domain: self.policy.domain(who, "").unwrap_or_default(),
        }
    }

    /// Which domain another process has is found out elsewhere: that takes a look at its files.
    fn rule(&self, caller: Caller, who: Who, request: Request) -> Step {
        let asked = self.asked(&caller, &who, request);
        let policy = Arc::clone(&self.policy);
        self.hand(&self.ruler, Ruling { asked, who, policy }, caller)
    }

    /// A user may have the memory of his own guests merged now, the masters that of all.
    fn merge(&self, caller: Caller, who: &Who, request: Request) -> Step {
        let names_some = matches!(&request, Request::Merge(wish) if !wish.pids.is_empty());
        if names_some && matches!(shares_numbers(&caller), Ok(Some(false))) {
            return caller.refuse(client::OTHER_NUMBERS.to_owned());
        }
        let merging = Merging {
            asked: self.asked(&caller, who, request),
            pid: caller.socket.peer().pid,
            all: self.policy.is_free_master(who),
        };
        self.hand(&self.merger, merging, caller)
    }
}

/// Which of the `places`, the oldest first, a newcomer gets where all are taken: the oldest of the user who has most
/// ([`lane::gives_way`]). A master gets one in any case: of those that are no master's, and that have asked for nothing yet, if there are such.
fn gives_place(
    places: &[Taken],
    newcomer: Party,
    is_master: impl Fn(Party) -> bool,
) -> Option<usize> {
    let mut counts = BTreeMap::<Party, usize>::new();
    for place in places {
        *counts.entry(place.by).or_default() += 1;
    }
    let counts = counts.iter().map(|(&party, &count)| (party, count));
    let find = |fits: &dyn Fn(&Taken) -> bool| places.iter().position(fits);
    if let Some(loser) = lane::gives_way(counts, &newcomer) {
        return find(&|place| place.by == loser);
    }
    let masters = || {
        find(&|place| place.silent && !is_master(place.by))
            .or_else(|| find(&|place| !is_master(place.by)))
            .or_else(|| find(&|place| place.silent))
    };
    is_master(newcomer).then(masters).flatten()
}

/// What is read of the process that connected, by its number: it counts only if that process is still there afterwards.
fn look_at<T>(caller: &Caller, read: impl FnOnce(u32) -> io::Result<T>) -> io::Result<T> {
    let Peer { pid, uid, .. } = caller.socket.peer();
    // They are bounded with the connections of a user. A master's are here: the root of a container is one by its number.
    if closers::unclosed(uid, Kind::Connection).0 > MOST_UNCLOSED {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    let pidfd = Late::of(Kind::Connection, uid, socket::peer_pidfd(&caller.socket)?);
    let found = read(pid)?;
    match process::has_exited(&*pidfd) {
        false => Ok(found),
        true => Err(io::ErrorKind::NotFound.into()),
    }
}

/// Whether the numbers that a caller gives are ones of this process's namespace; `None` where the kernel does not tell.
fn shares_numbers(caller: &Caller) -> io::Result<Option<bool>> {
    match caller.socket.peer().pid {
        0 => Ok(Some(false)),
        _ => look_at(caller, |pid| Ok(process::shares_numbers(pid))),
    }
}

/// One who asks, for people.
fn named(who: &Who) -> String {
    let uid = who.uid;
    match (who.confined, uid) {
        (true, 0) => format!("user {uid}, with mounts of its own and without CAP_SYS_ADMIN,"),
        (true, _) => format!("user {uid} of another PID namespace"),
        (false, _) => format!("user {uid}"),
    }
}

/// Tells a process why it is no guest, and which domain it would be in. What is not taken at once is lost.
fn refuse_guest(socket: &Stranger, why: &str, domain: DomainMark) {
    let mut packet = [0; MAX_MESSAGE];
    let len = Reason::new(why, domain).encode(&mut packet);
    let packet = packet.get(..len).unwrap_or_default();
    let _ = socket::send_within(socket, packet, &[], Duration::ZERO);
}

/// The thread that hands guests to the engine.
fn door(engine: &Arc<Engine>) -> Lane<Joining> {
    let engine = Arc::clone(engine);
    lane::door(move |joining: Joining| {
        engine.admit(joining.socket, &joining.domain, joining.cgroup);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: Party = Party {
        uid: 0,
        confined: false,
    };
    const CONTAINERS: Party = Party {
        uid: 0,
        confined: true,
    };

    fn user(uid: u32) -> Party {
        Party { uid, ..ROOT }
    }

    fn taken(by: Party, silent: bool) -> Taken {
        Taken { by, silent }
    }

    fn lost(places: &[Taken], newcomer: Party) -> Option<usize> {
        gives_place(places, newcomer, |party| party == ROOT)
    }

    #[test]
    fn roots_of_containers_keep_no_root_out() {
        let all = [taken(CONTAINERS, true); 8];
        assert_eq!(lost(&all, ROOT), Some(0));
        assert_eq!(lost(&all, user(7)), Some(0));
        assert_eq!(lost(&all, CONTAINERS), None);
        // With most of the places a root of the host's still gets one more, and none asked for is lost.
        let mut mixed = [taken(ROOT, true); 8];
        (mixed[2], mixed[3]) = (taken(CONTAINERS, false), taken(CONTAINERS, true));
        assert_eq!(lost(&mixed, ROOT), Some(3));
        mixed[3].silent = false;
        assert_eq!(lost(&mixed, ROOT), Some(2));
    }

    #[test]
    fn a_master_gets_a_place_where_each_user_has_one() {
        let mut places: Vec<_> = (1..8).map(|uid| taken(user(uid), uid > 2)).collect();
        places.insert(0, taken(ROOT, false));
        assert_eq!(lost(&places, ROOT), Some(3), "the oldest silent one");
        assert_eq!(lost(&places, user(1)), None, "he has as many as all");
        let asked = [taken(ROOT, false); 4];
        assert_eq!(lost(&asked, ROOT), None, "masters alone, all at work");
    }
}
