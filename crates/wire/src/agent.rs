//! The agent's side of the protocol: the handshake ([`hello`]), the engine's questions ([`question`])
//! and the agent's answers ([`answer`]). Here are the parts that they share.

mod answer;
mod hello;
mod journal;
mod question;
mod tally;

use crate::codec::{DecodeError, Reader, Writer};
use crate::page::{CHUNK_BYTES, PageBits};

pub use answer::{Answer, Change, Changes, Merged};
pub use hello::{
    DomainMark, Hello, MAX_STORES, Name, Ready, Reason, Reception, Role, STEP_DESCRIPTORS,
    STEP_DETACHED, STEP_ELSEWHERE, STEP_EXECUTABLE, STEP_FILTER, STEP_MEMORY, STEP_NARROW,
    STEP_RIGHTS, STEP_THREADS, STEP_USERFAULTFD, Welcome,
};
pub use journal::{Journal, MAX_OUT};
pub use question::{MAX_OPS, Merge, MergeOp, Question, Target, Unmerge};
pub use tally::{TALLY_BYTES, Tally};

/// Bytes of an answer before its list: kind, flags, counters.
pub const ANSWER_HEAD: usize = 32;

const KIND_HELLO: u8 = 1;
const KIND_WELCOME: u8 = 2;
const KIND_READY: u8 = 3;
const KIND_FAILED: u8 = 4;
const KIND_SYNC: u8 = 5;
const KIND_CHANGES: u8 = 6;
const KIND_MERGE: u8 = 7;
const KIND_MERGED: u8 = 8;
const KIND_UNMERGE: u8 = 9;
const KIND_UNMERGED: u8 = 10;
const KIND_REFUSED: u8 = 11;

/// Addresses above the user half of any 64-bit address space belong to no process.
const ADDRESS_LIMIT: u64 = 1 << 57;

fn chunk_address(r: &mut Reader<'_>) -> Result<u64, DecodeError> {
    match r.u64()? {
        at if at % CHUNK_BYTES as u64 == 0 && at < ADDRESS_LIMIT => Ok(at),
        value => Err(DecodeError::Range {
            field: "chunk",
            value,
        }),
    }
}

fn bits(r: &mut Reader<'_>) -> Result<PageBits, DecodeError> {
    let mut out = PageBits::EMPTY;
    for word in &mut out.0 {
        *word = r.u64()?;
    }
    Ok(out)
}

fn put_bits(w: &mut Writer<'_>, bits: &PageBits) {
    for word in bits.0 {
        w.u64(word);
    }
}

#[cfg(test)]
mod tests;
