//! The agent of a guest: the connection to it, and the question under way.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wire::{Answer, Changes, PageBits, Question};

use crate::domain::chunk::Chunk;
use crate::domain::lifelines::Lifeline;
use crate::error::Refusal;

/// The connection to a guest's agent.
pub(crate) trait Link: Send {
    /// Makes the lifeline that the next [`Question::Sync`] takes along.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    fn lifeline(&mut self) -> std::io::Result<Box<dyn Lifeline>>;

    /// Sends a question, without waiting.
    ///
    /// # Errors
    /// When the connection is broken.
    fn send(&mut self, question: &Question) -> Result<(), Fault>;

    /// What tells that an answer has come, to wait for many at once.
    fn bell(&self) -> Option<BorrowedFd<'_>>;

    /// Whether an answer has come, or the end of the connection.
    fn has_answer(&self) -> bool;

    /// Takes an answer, after waiting at most `wait` for it.
    ///
    /// # Errors
    /// When the connection is broken or the answer malformed.
    fn receive(&mut self, wait: Duration) -> Result<Option<Answer>, Fault>;
}

/// Why a guest is not served any longer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// The connection ended.
    #[error("the connection ended")]
    Closed,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(#[from] std::io::Error),
    /// A packet that is no answer.
    #[error("malformed answer: {0}")]
    Malformed(#[from] wire::DecodeError),
    /// An answer to something that was not asked.
    #[error("contradictory answer: {0}")]
    Contradiction(&'static str),
    /// The agent cannot work.
    #[error("{}", crate::guest::parting::words(*step, *errno))]
    Failed {
        /// The agent's step.
        step: u8,
        /// The operating system's error number.
        errno: u16,
    },
    /// The agent did not finish the handshake.
    #[error("no handshake within {0:?}")]
    Silent(Duration),
    /// Its memory cannot be looked at.
    #[error("its memory cannot be looked at: {0}")]
    Unreadable(std::io::Error),
    /// It may not be a guest.
    #[error(transparent)]
    Unfit(#[from] Refusal),
    /// It may no longer be in its domain.
    #[error("it has left its domain: {0}")]
    Left(String),
    /// Reading its memory does not return.
    #[error("reading its memory does not return")]
    Stuck,
}

/// What an agent still owes an answer to.
#[derive(Debug)]
pub(crate) enum Pending {
    /// The welcome, sent at this moment.
    Ready(Instant),
    /// A sync; of the part that was taken last, this is left.
    Changes(Option<Box<Rest>>),
    /// A merge of this chunk: its asked pages, and these, which may be enclosed between them.
    Merged(Arc<Chunk>, PageBits),
    /// An unmerge of these pages.
    Unmerged(Arc<Chunk>, PageBits),
}

/// A part of the answer to a sync that is taken.
#[derive(Debug)]
pub(crate) struct Rest {
    pub(crate) changes: Changes,
    /// Entries taken.
    pub(crate) taken: usize,
}

/// The conversation with the agent: at most one question is open.
pub(crate) struct Talk {
    /// `None` when the guest is retired.
    pub(crate) link: Option<Box<dyn Link>>,
    pub(crate) pending: Option<Pending>,
    /// The round of the last sync.
    pub(crate) synced: Option<u64>,
    /// Time that its answers took in this round.
    pub(crate) spent: Duration,
}
