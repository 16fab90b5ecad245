//! The answers of an agent.

use super::{
    ADDRESS_LIMIT, ANSWER_HEAD, KIND_CHANGES, KIND_FAILED, KIND_MERGED, KIND_READY, KIND_UNMERGED,
    Ready, bits, chunk_address, put_bits,
};
use crate::codec::{DecodeError, MAX_MESSAGE, Reader, Writer};
use crate::page::{CHUNK_BYTES, CHUNK_PAGES, PageBits, PageOutcome};

/// One thing that changed in a guest since the last [`Question::Sync`](crate::Question::Sync).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The guest offers exactly these pages of this chunk; an empty set withdraws the chunk.
    /// `stored` tells which of the pages lie in mappings of a store.
    Chunk {
        /// Address of the chunk, aligned to [`CHUNK_BYTES`].
        chunk: u64,
        /// Pages the guest offers for merging.
        offered: PageBits,
        /// Pages that lie in a mapping of a store (merged or broken).
        stored: PageBits,
    },
    /// All `chunks` chunks from `chunk` on are offered whole, and nothing in them is stored.
    Whole {
        /// Address of the first chunk, aligned to [`CHUNK_BYTES`].
        chunk: u64,
        /// How many chunks.
        chunks: u32,
    },
    /// The guest told of so many pages that their content no longer matters (`pageone_recycle`).
    Recycled {
        /// How many pages.
        pages: u64,
    },
}

/// A part of the answer to [`Question::Sync`](crate::Question::Sync); `more` parts follow unless it is false.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// Whether another part follows.
    pub more: bool,
    /// CPU time of the agent so far, in nanoseconds.
    pub cpu_ns: u64,
    /// Bytes of memory the agent holds.
    pub memory_bytes: u64,
    entries: [Change; Self::MAX],
    len: u16,
}

const CHUNK_ENTRY_BYTES: usize = 1 + 8 + 64 + 64;

impl Changes {
    /// The most entries of a part.
    pub const MAX: usize = (MAX_MESSAGE - ANSWER_HEAD) / CHUNK_ENTRY_BYTES;

    /// An empty part.
    #[must_use]
    pub fn new() -> Self {
        let none = Change::Whole {
            chunk: 0,
            chunks: 0,
        };
        Self {
            more: false,
            cpu_ns: 0,
            memory_bytes: 0,
            entries: [none; Self::MAX],
            len: 0,
        }
    }

    /// Adds an entry; false when the part is full.
    pub fn push(&mut self, change: Change) -> bool {
        let Some(entry) = self.entries.get_mut(usize::from(self.len)) else {
            return false;
        };
        *entry = change;
        self.len += 1;
        true
    }

    /// The entries of this part.
    #[must_use]
    pub fn entries(&self) -> &[Change] {
        self.entries
            .get(..usize::from(self.len))
            .unwrap_or_default()
    }

    /// Forgets the entries.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut changes = Self::new();
        changes.more = r.u8()? != 0;
        changes.cpu_ns = r.u64()?;
        changes.memory_bytes = r.u64()?;
        for _ in 0..r.u16()? {
            let change = match r.u8()? {
                0 => Change::Chunk {
                    chunk: chunk_address(r)?,
                    offered: bits(r)?,
                    stored: bits(r)?,
                },
                1 => whole(r)?,
                2 => Change::Recycled { pages: r.u64()? },
                kind => {
                    return Err(DecodeError::Range {
                        field: "change",
                        value: kind.into(),
                    });
                }
            };
            if !changes.push(change) {
                let value = Self::MAX as u64 + 1;
                return Err(DecodeError::Range {
                    field: "changes",
                    value,
                });
            }
        }
        Ok(changes)
    }

    fn encode(&self, w: &mut Writer<'_>) {
        w.u8(KIND_CHANGES)
            .u8(self.more.into())
            .u64(self.cpu_ns)
            .u64(self.memory_bytes);
        w.u16(self.len);
        for change in self.entries() {
            match change {
                Change::Chunk {
                    chunk,
                    offered,
                    stored,
                } => {
                    w.u8(0).u64(*chunk);
                    put_bits(w, offered);
                    put_bits(w, stored);
                }
                Change::Whole { chunk, chunks } => {
                    w.u8(1).u64(*chunk).u32(*chunks);
                }
                Change::Recycled { pages } => {
                    w.u8(2).u64(*pages);
                }
            }
        }
    }
}

impl Default for Changes {
    fn default() -> Self {
        Self::new()
    }
}

/// The answer to [`Question::Merge`](crate::Question::Merge).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merged {
    /// What became of each page.
    pub outcomes: [PageOutcome; CHUNK_PAGES],
    /// CPU time of the agent so far, in nanoseconds.
    pub cpu_ns: u64,
    /// The longest time a page was out of reach of the guest, in nanoseconds.
    pub window_ns: u64,
}

/// What the agent answers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // encoded from place once an answer; the agent cannot box
pub enum Answer {
    /// The handshake is complete: userfaultfd works and has every feature needed.
    Ready(Ready),
    /// The agent cannot serve; it closes the connection after this.
    Failed {
        /// The operating system's error number.
        errno: u16,
        /// Which step failed: one of the `STEP_` numbers.
        step: u8,
    },
    /// To [`Question::Sync`](crate::Question::Sync).
    Changes(Changes),
    /// To [`Question::Merge`](crate::Question::Merge).
    Merged(Merged),
    /// To [`Question::Unmerge`](crate::Question::Unmerge): which of the pages have private frames now.
    Unmerged {
        /// CPU time of the agent so far, in nanoseconds.
        cpu_ns: u64,
        /// Pages that are private now.
        pages: PageBits,
    },
}

impl Answer {
    /// Writes the packet, gives its length in bytes.
    pub fn encode(&self, out: &mut [u8; MAX_MESSAGE]) -> usize {
        let mut w = Writer::new(out);
        match self {
            Self::Ready(ready) => {
                w.u8(KIND_READY);
                ready.encode(&mut w);
            }
            Self::Failed { errno, step } => {
                w.u8(KIND_FAILED).u16(*errno).u8(*step);
            }
            Self::Changes(changes) => changes.encode(&mut w),
            Self::Merged(merged) => {
                w.u8(KIND_MERGED).u64(merged.cpu_ns).u64(merged.window_ns);
                for outcome in merged.outcomes {
                    w.u8(outcome as u8);
                }
            }
            Self::Unmerged { cpu_ns, pages } => {
                w.u8(KIND_UNMERGED).u64(*cpu_ns);
                put_bits(&mut w, pages);
            }
        }
        w.len()
    }

    /// Reads the packet.
    ///
    /// # Errors
    /// Anything but a well-formed answer.
    pub fn decode(packet: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(packet);
        let answer = match r.u8()? {
            KIND_READY => Self::Ready(Ready::decode(&mut r)?),
            KIND_FAILED => Self::Failed {
                errno: r.u16()?,
                step: r.u8()?,
            },
            KIND_CHANGES => Self::Changes(Changes::decode(&mut r)?),
            KIND_MERGED => {
                let (cpu_ns, window_ns) = (r.u64()?, r.u64()?);
                let mut outcomes = [PageOutcome::NotAsked; CHUNK_PAGES];
                for outcome in &mut outcomes {
                    let number = r.u8()?;
                    let bad = DecodeError::Range {
                        field: "outcome",
                        value: number.into(),
                    };
                    *outcome = PageOutcome::from_wire(number).ok_or(bad)?;
                }
                Self::Merged(Merged {
                    outcomes,
                    cpu_ns,
                    window_ns,
                })
            }
            KIND_UNMERGED => Self::Unmerged {
                cpu_ns: r.u64()?,
                pages: bits(&mut r)?,
            },
            kind => return Err(DecodeError::Kind(kind)),
        };
        r.finish()?;
        Ok(answer)
    }
}

fn whole(r: &mut Reader<'_>) -> Result<Change, DecodeError> {
    let (chunk, chunks) = (chunk_address(r)?, r.u32()?);
    let end = chunk + u64::from(chunks) * CHUNK_BYTES as u64;
    if end > ADDRESS_LIMIT {
        return Err(DecodeError::Range {
            field: "chunks",
            value: chunks.into(),
        });
    }
    Ok(Change::Whole { chunk, chunks })
}

const _: () = assert!(ANSWER_HEAD + Changes::MAX * CHUNK_ENTRY_BYTES <= MAX_MESSAGE);
