//! The agent's side of the protocol: handshake, questions, answers.

use crate::codec::{DecodeError, MAX_MESSAGE, Reader, Writer};
use crate::page::{CHUNK_BYTES, CHUNK_PAGES, PAGE_BYTES, PageBits, PageOutcome};

/// The most operations a [`Merge`] question can carry: one a page.
pub const MAX_OPS: usize = CHUNK_PAGES;
/// The most stores (one a node) a [`Welcome`] can hand over.
pub const MAX_STORES: usize = 64;
/// Bytes of an answer before its list: kind, flags, counters.
pub const ANSWER_HEAD: usize = 32;

/// [`Answer::Failed`]: userfaultfd could not be opened, or lacks a feature.
pub const STEP_USERFAULTFD: u8 = 0;
/// [`Answer::Failed`]: memory or /proc was refused to the agent.
pub const STEP_MEMORY: u8 = 1;
/// [`Answer::Failed`]: the welcome came without its descriptors.
pub const STEP_DESCRIPTORS: u8 = 2;

/// Who opens a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An agent inside a guest.
    Agent,
    /// The command line.
    Control,
}

/// A short name: the domain a guest asks for. At most 63 bytes of UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl Name {
    /// The longest name, in bytes.
    pub const MAX: usize = 63;

    /// No name.
    pub const EMPTY: Self = Self {
        bytes: [0; Self::MAX],
        len: 0,
    };

    /// A name from text; `None` when it is too long or holds control characters.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let len = u8::try_from(text.len()).ok()?;
        let mut bytes = [0; Self::MAX];
        bytes
            .get_mut(..text.len())?
            .copy_from_slice(text.as_bytes());
        (!text.chars().any(char::is_control)).then_some(Self { bytes, len })
    }

    /// The name's text; empty when none was given.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let used = self.bytes.get(..usize::from(self.len)).unwrap_or_default();
        core::str::from_utf8(used).unwrap_or_default()
    }
}

impl Default for Name {
    fn default() -> Self {
        Self {
            bytes: [0; Self::MAX],
            len: 0,
        }
    }
}

/// The first packet of every connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Who calls.
    pub role: Role,
    /// The domain the guest would like inside the one its policy gives it. It can only narrow.
    pub domain: Name,
}

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

impl Hello {
    /// Writes the packet, gives its length in bytes.
    pub fn encode(&self, out: &mut [u8; MAX_MESSAGE]) -> usize {
        let mut w = Writer::new(out);
        let role = match self.role {
            Role::Agent => 0,
            Role::Control => 1,
        };
        w.u8(KIND_HELLO)
            .u16(crate::VERSION)
            .u8(role)
            .u8(self.domain.len)
            .put(&self.domain.bytes);
        w.len()
    }

    /// Reads the packet.
    ///
    /// # Errors
    /// Anything but a well-formed hello of this version.
    pub fn decode(packet: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(packet);
        expect_kind(&mut r, KIND_HELLO)?;
        match r.u16()? {
            crate::VERSION => {}
            other => return Err(DecodeError::Version(other)),
        }
        let role = match r.u8()? {
            0 => Role::Agent,
            1 => Role::Control,
            value => {
                return Err(DecodeError::Range {
                    field: "role",
                    value: value.into(),
                });
            }
        };
        let len = r.u8()?;
        let text = r.take(Name::MAX)?;
        let bad = DecodeError::Range {
            field: "domain",
            value: len.into(),
        };
        let text = text.get(..usize::from(len)).ok_or(bad)?;
        let domain = core::str::from_utf8(text)
            .ok()
            .and_then(Name::new)
            .ok_or(bad)?;
        r.finish()?;
        Ok(Self { role, domain })
    }
}

/// The engine's consent. The packet carries descriptors: the lifeline, the domain's tie (mapped as
/// a lifeline is, until a later session has adopted what this one merged), then `stores` stores
/// (read-only), then, when `device` is set, `/dev/userfaultfd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// How many stores follow, one a node; at least 1, at most [`MAX_STORES`].
    pub stores: u16,
    /// Whether the userfaultfd device comes along.
    pub device: bool,
}

impl Welcome {
    /// Writes the packet, gives its length in bytes.
    pub fn encode(&self, out: &mut [u8; MAX_MESSAGE]) -> usize {
        let mut w = Writer::new(out);
        w.u8(KIND_WELCOME)
            .u16(crate::VERSION)
            .u16(self.stores)
            .u8(self.device.into());
        w.len()
    }

    /// Reads the packet.
    ///
    /// # Errors
    /// Anything but a well-formed welcome of this version.
    pub fn decode(packet: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(packet);
        expect_kind(&mut r, KIND_WELCOME)?;
        match r.u16()? {
            crate::VERSION => {}
            other => return Err(DecodeError::Version(other)),
        }
        let stores = r.u16()?;
        if stores == 0 || usize::from(stores) > MAX_STORES {
            return Err(DecodeError::Range {
                field: "stores",
                value: stores.into(),
            });
        }
        let device = r.u8()? != 0;
        r.finish()?;
        Ok(Self { stores, device })
    }
}

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

const OP_BYTES: usize = 12;
const SLOT_ZERO: u64 = u64::MAX;
const SLOT_ENCLOSED: u64 = u64::MAX - 1;
/// Slots whose byte offset still fits a file offset.
const SLOT_LIMIT: u64 = i64::MAX as u64 / PAGE_BYTES as u64;

/// Asks the agent to run the merge window over one chunk. Runs ascend and do not overlap.
///
/// [`Target::Enclosed`] runs stand between runs of slots, at the distance of the slots' numbers, so that all map with
/// one call: a *span*. The numbers they would have belong to no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// Address of the chunk, aligned to [`CHUNK_BYTES`].
    pub chunk: u64,
    /// Which of the stores of the [`Welcome`] the slots are in.
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
    /// Address of the chunk, aligned to [`CHUNK_BYTES`].
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

/// One thing that changed in a guest since the last [`Question::Sync`].
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
}

/// A part of the answer to [`Question::Sync`]; `more` parts follow unless it is false.
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
            }
        }
    }
}

impl Default for Changes {
    fn default() -> Self {
        Self::new()
    }
}

/// The answer to [`Question::Merge`].
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
    Ready,
    /// The agent cannot serve; it closes the connection after this.
    Failed {
        /// The operating system's error number.
        errno: u16,
        /// Which step failed: one of the `STEP_` numbers.
        step: u8,
    },
    /// To [`Question::Sync`].
    Changes(Changes),
    /// To [`Question::Merge`].
    Merged(Merged),
    /// To [`Question::Unmerge`]: which of the pages have private frames now.
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
            Self::Ready => {
                w.u8(KIND_READY);
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
            KIND_READY => Self::Ready,
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

fn expect_kind(r: &mut Reader<'_>, want: u8) -> Result<(), DecodeError> {
    match r.u8()? {
        kind if kind == want => Ok(()),
        kind => Err(DecodeError::Kind(kind)),
    }
}

/// Addresses above the user half of any 64-bit address space are nobody's.
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

const _: () = assert!(ANSWER_HEAD + MAX_OPS * OP_BYTES <= MAX_MESSAGE);
const _: () = assert!(ANSWER_HEAD + Changes::MAX * CHUNK_ENTRY_BYTES <= MAX_MESSAGE);

#[cfg(test)]
mod tests;
