//! The engine's questions to an agent.

use super::{ANSWER_HEAD, KIND_MERGE, KIND_SYNC, KIND_UNMERGE, bits, chunk_address, put_bits};
use crate::codec::{DecodeError, MAX_MESSAGE, Reader, Writer};
use crate::page::{CHUNK_PAGES, PAGE_BYTES, PageBits};

/// The most operations a [`Merge`] question can carry: one a page.
pub const MAX_OPS: usize = CHUNK_PAGES;

/// What the pages of a run are to become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Views of slots: the first page's, the others follow it.
    Slot(u64),
    /// The kernel's zero page.
    Zeros,
    /// What they are, private, but inside the mapping of the store that their neighbours get.
    Enclosed,
}

impl Target {
    /// What the `n`th page of a run with this target is to become.
    #[must_use]
    pub fn nth(self, n: u16) -> Self {
        match self {
            Self::Slot(first) => Self::Slot(first + u64::from(n)),
            other => other,
        }
    }

    fn to_wire(self) -> u64 {
        match self {
            Self::Slot(slot) => slot,
            Self::Zeros => SLOT_ZERO,
            Self::Enclosed => SLOT_ENCLOSED,
        }
    }

    fn from_wire(value: u64) -> Result<Self, DecodeError> {
        match value {
            SLOT_ZERO => Ok(Self::Zeros),
            SLOT_ENCLOSED => Ok(Self::Enclosed),
            slot if slot <= SLOT_LIMIT => Ok(Self::Slot(slot)),
            value => Err(DecodeError::Range {
                field: "slot",
                value,
            }),
        }
    }
}

/// One step of a [`Merge`]: a run of pages and what they should map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeOp {
    /// First page of the run, 0 to 511.
    pub first: u16,
    /// Pages in the run; the run ends inside the chunk.
    pub pages: u16,
    /// What becomes of them.
    pub target: Target,
}

pub(super) const OP_BYTES: usize = 12;
const SLOT_ZERO: u64 = u64::MAX;
const SLOT_ENCLOSED: u64 = u64::MAX - 1;
/// Slots whose byte offset still fits a file offset.
pub(super) const SLOT_LIMIT: u64 = i64::MAX as u64 / PAGE_BYTES as u64;

/// Asks the agent to run the merge window over one chunk. Runs ascend and do not overlap.
///
/// [`Target::Enclosed`] runs stand between runs of slots, at the distance of the slots' numbers, so that all map with
/// one call: a *span*. The numbers they would have belong to no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Address of the chunk, aligned to [`CHUNK_BYTES`](crate::CHUNK_BYTES).
    pub chunk: u64,
    /// Which of the stores of the [`Welcome`](crate::Welcome) the slots are in.
    pub store: u16,
    ops: [MergeOp; MAX_OPS],
    len: u16,
}

impl Merge {
    /// An empty question for the chunk at `chunk`.
    #[must_use]
    pub fn new(chunk: u64, store: u16) -> Self {
        let none = MergeOp {
            first: 0,
            pages: 0,
            target: Target::Zeros,
        };
        Self {
            chunk,
            store,
            ops: [none; MAX_OPS],
            len: 0,
        }
    }

    /// The runs, in ascending order.
    #[must_use]
    pub fn ops(&self) -> &[MergeOp] {
        self.ops.get(..usize::from(self.len)).unwrap_or_default()
    }

    /// Adds page `page` mapping `slot` (`None`: zero page), joining the last run where it follows
    /// it in both page and slot. Pages must come in ascending order; others are refused.
    pub fn push(&mut self, page: u16, slot: Option<u64>) -> bool {
        self.push_as(page, slot.map_or(Target::Zeros, Target::Slot))
    }

    /// Adds page `page` with this target, as [`Self::push`].
    pub fn push_as(&mut self, page: u16, target: Target) -> bool {
        let beyond = matches!(target, Target::Slot(slot) if slot > SLOT_LIMIT);
        let len = usize::from(self.len);
        let last = len.checked_sub(1).and_then(|at| self.ops.get_mut(at));
        let end = last.as_ref().map_or(0, |op| op.first + op.pages);
        if page < end || usize::from(page) >= CHUNK_PAGES || beyond {
            return false;
        }
        if let Some(op) = last
            && op.first + op.pages == page
            && op.target.nth(op.pages) == target
        {
            op.pages += 1;
            return true;
        }
        let Some(op) = self.ops.get_mut(len) else {
            return false;
        };
        *op = MergeOp {
            first: page,
            pages: 1,
            target,
        };
        self.len += 1;
        true
    }

    fn decode_ops(&mut self, r: &mut Reader<'_>, count: u16) -> Result<(), DecodeError> {
        let ops = self.ops.get_mut(..usize::from(count));
        let ops = ops.ok_or(DecodeError::Range {
            field: "ops",
            value: count.into(),
        })?;
        let mut end = 0u16;
        for op in ops {
            let (first, pages, slot) = (r.u16()?, r.u16()?, r.u64()?);
            let last = usize::from(first) + usize::from(pages);
            if first < end || pages == 0 || last > CHUNK_PAGES {
                return Err(DecodeError::Range {
                    field: "run",
                    value: first.into(),
                });
            }
            let target = Target::from_wire(slot)?;
            end = first + pages;
            *op = MergeOp {
                first,
                pages,
                target,
            };
        }
        self.len = count;
        Ok(())
    }
}

/// Asks the agent to give every page of `pages` that maps a slot a private copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmerge {
    /// Address of the chunk, aligned to [`CHUNK_BYTES`](crate::CHUNK_BYTES).
    pub chunk: u64,
    /// Which pages.
    pub pages: PageBits,
}

/// What the engine asks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // decoded into place once a question; the agent cannot box
pub enum Question {
    /// What changed since the last time? A new lifeline comes along when `lifeline` is set.
    Sync {
        /// Whether the packet carries a descriptor of a new lifeline.
        lifeline: bool,
        /// Whether every page of the guest that maps a slot is accounted for in this session: what
        /// former sessions left in the guest as evidence of theirs may go.
        adopted: bool,
    },
    /// Run the merge window.
    Merge(Merge),
    /// Give pages private copies again.
    Unmerge(Unmerge),
}

impl Question {
    /// Writes the packet, gives its length in bytes.
    pub fn encode(&self, out: &mut [u8; MAX_MESSAGE]) -> usize {
        let mut w = Writer::new(out);
        match self {
            Self::Sync { lifeline, adopted } => {
                w.u8(KIND_SYNC).u8((*lifeline).into()).u8((*adopted).into());
            }
            Self::Merge(merge) => {
                w.u8(KIND_MERGE)
                    .u64(merge.chunk)
                    .u16(merge.store)
                    .u16(merge.len);
                for op in merge.ops() {
                    w.u16(op.first).u16(op.pages).u64(op.target.to_wire());
                }
            }
            Self::Unmerge(unmerge) => {
                w.u8(KIND_UNMERGE).u64(unmerge.chunk);
                put_bits(&mut w, &unmerge.pages);
            }
        }
        w.len()
    }

    /// Reads the packet.
    ///
    /// # Errors
    /// Anything but a well-formed question.
    pub fn decode(packet: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(packet);
        let question = match r.u8()? {
            KIND_SYNC => Self::Sync {
                lifeline: r.u8()? != 0,
                adopted: r.u8()? != 0,
            },
            KIND_MERGE => {
                let mut merge = Merge::new(chunk_address(&mut r)?, r.u16()?);
                let count = r.u16()?;
                merge.decode_ops(&mut r, count)?;
                Self::Merge(merge)
            }
            KIND_UNMERGE => {
                let chunk = chunk_address(&mut r)?;
                Self::Unmerge(Unmerge {
                    chunk,
                    pages: bits(&mut r)?,
                })
            }
            kind => return Err(DecodeError::Kind(kind)),
        };
        r.finish()?;
        Ok(question)
    }
}

const _: () = assert!(ANSWER_HEAD + MAX_OPS * OP_BYTES <= MAX_MESSAGE);
