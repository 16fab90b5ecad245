//! The errors when an engine starts, a knob is turned, or a process would be a guest.

use sys::credentials::Credentials;
use sys::process::Cgroup;
use sys::socket::Peer;

/// Why a user may not have one more of what is limited: guests, domains, connections, descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "user {uid} has {own} {what}: one more is beyond his share (limits: {what}_per_user = \
     {per_user}, {what} = {total})"
)]
pub struct OverQuota {
    pub(crate) what: &'static str,
    pub(crate) uid: u32,
    pub(crate) own: u64,
    pub(crate) all: u64,
    pub(crate) per_user: u64,
    pub(crate) total: u64,
}

/// Why the engine cannot start or a knob cannot turn.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The kernel or the machine's policy lacks something the engine needs.
    #[error("{what} is missing: {needs}")]
    Missing {
        /// The facility.
        what: &'static str,
        /// What would provide it.
        needs: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// What the engine needs of the kernel could not be tried.
    #[error("{what} cannot be tried: {remedy}")]
    Untried {
        /// The facility.
        what: &'static str,
        /// What is short, and what to do about it.
        remedy: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A setting lies outside its range.
    #[error(transparent)]
    Range(#[from] wire::OutOfRange),
    /// A knob stands twice among those to turn.
    #[error("{knob} is named twice")]
    Twice {
        /// The knob's name.
        knob: &'static str,
    },
    /// Private copies of all merged pages would not fit memory.
    #[error("unmerging needs {needed} bytes of memory, {available} are available")]
    NoMemory {
        /// Bytes that private copies take.
        needed: u64,
        /// Bytes available.
        available: u64,
    },
    /// What may be shared with what cannot change under shared pages.
    #[error(
        "{pages} pages are shared, and {knob} cannot change under them: unmerge them first \
         (pageone set --unmerge {knob}=…)"
    )]
    Shared {
        /// The knob's name.
        knob: &'static str,
        /// Pages that share a copy, or are about to.
        pages: u64,
    },
    /// A process whose memory is to be merged now is no guest, or another user's.
    #[error(
        "process {pid} is no guest of this daemon, or another user's: `pageone status` lists yours"
    )]
    NoGuest {
        /// The process.
        pid: u32,
    },
    /// The engine is told not to merge.
    #[error("nothing is merged now: run is {run} (pageone set run=1)")]
    Halted {
        /// The knob's value.
        run: u8,
    },
    /// More wait for merging than may.
    #[error(
        "too many wait to have memory merged now, of one user at most {most}: ask again in a while"
    )]
    Crowd {
        /// How many may.
        most: usize,
    },
    /// The engine ends.
    #[error("the engine ends")]
    Ends,
    /// Some guests did not give their merged pages private copies in time.
    #[error("{left} pages are still merged: {}", late(.pids))]
    Unmerging {
        /// Pages still merged.
        left: u64,
        /// The processes that have them.
        pids: Vec<u32>,
    },
    /// A system call failed.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

/// Of guests that were waited for in vain.
fn late(pids: &[u32]) -> String {
    const MOST_NAMED: usize = 3;
    match pids {
        [] => "their guests do not answer in time".to_owned(),
        [pid] => format!("process {pid} does not answer in time (is it stopped?)"),
        _ => {
            let named: Vec<_> = pids.iter().take(MOST_NAMED).map(u32::to_string).collect();
            let named = named.join(", ");
            let others = match pids.len().saturating_sub(MOST_NAMED) {
                0 => String::new(),
                others => format!(" and {others} more"),
            };
            format!("processes {named}{others} do not answer in time (are they stopped?)")
        }
    }
}

/// Why a process may not be a guest, or not any longer.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// Its ids are not all those with which it connected.
    #[error(
        "thread {thread} of process {} runs as {ids}, and all have to be of user {} and group {}, as it \
         connected",
        peer.pid, peer.uid, peer.gid
    )]
    Ids {
        /// With which ids it connected.
        peer: Peer,
        /// The thread that has others.
        thread: u32,
        /// These.
        ids: Credentials,
    },
    /// To compare the ids of its threads takes the kernel too long.
    #[error(
        "the ids of process {pid} take too long to compare: {why}; start it with fewer groups (setgroups) or threads"
    )]
    Crowded {
        /// The process.
        pid: u32,
        /// What there is too much of.
        why: String,
    },
    /// It has no number where the engine runs.
    #[error(
        "a process that connected cannot be seen from here: a daemon in a container needs the PID namespace of the host \
         (hostPID, --pid=host)"
    )]
    Hidden,
    /// Its memory is a secret.
    #[error(
        "the memory of process {pid} is a secret (PR_SET_DUMPABLE, as after a change of user or without the \
         right to read its program)"
    )]
    Secret {
        /// The process.
        pid: u32,
    },
    /// Its agent named a thread that cannot vouch for it.
    #[error(
        "process {pid} has no thread {number} besides its first, by which its agent could be known"
    )]
    NoWitness {
        /// The process.
        pid: u32,
        /// The thread's number as the agent knows it.
        number: u32,
    },
    /// The speaker is another process.
    #[error("the agent that speaks for process {pid} does not live in its memory")]
    Elsewhere {
        /// The process that connected.
        pid: u32,
    },
    /// It is served already.
    #[error("process {pid} has a session already")]
    Session {
        /// The process.
        pid: u32,
    },
    /// It has another cgroup than the one by which it has its domain.
    #[error(
        "process {pid} has gone from cgroup {} (number {}) to {} ({})",
        from.path, from.id, to.path, to.id
    )]
    Moved {
        /// The process.
        pid: u32,
        /// Where it connected.
        from: Cgroup,
        /// Where it is.
        to: Cgroup,
    },
    /// To look at its user's processes took long.
    #[error(
        "processes of user {uid} have many threads or groups, all of which are looked at: for {left:?} no more are"
    )]
    Haste {
        /// The user.
        uid: u32,
        /// How long from now.
        left: std::time::Duration,
    },
    /// Its user has as much as he may.
    #[error(transparent)]
    Quota(#[from] OverQuota),
    /// It is no more what it was.
    #[error("process {pid} has ended, or runs another program")]
    Gone {
        /// The process.
        pid: u32,
    },
    /// The system refuses.
    #[error(transparent)]
    System(#[from] std::io::Error),
}

impl Refusal {
    /// Whether it says that this process may be in no domain at all, and not that there is no place or time for it.
    pub(crate) fn is_about_the_process(&self) -> bool {
        match self {
            Self::Ids { .. }
            | Self::Crowded { .. }
            | Self::Hidden
            | Self::Secret { .. }
            | Self::NoWitness { .. }
            | Self::Elsewhere { .. }
            | Self::Moved { .. }
            | Self::Gone { .. } => true,
            Self::Session { .. } | Self::Haste { .. } | Self::Quota(_) | Self::System(_) => false,
        }
    }
}
