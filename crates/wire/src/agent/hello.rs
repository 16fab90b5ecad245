//! The handshake: a caller names itself, and the engine consents.

use super::{ADDRESS_LIMIT, KIND_HELLO, KIND_REFUSED, KIND_WELCOME};
use crate::codec::{DecodeError, MAX_MESSAGE, Reader, Writer};
use crate::page::PAGE_BYTES;

/// The most stores (one a node) a [`Welcome`] can hand over.
pub const MAX_STORES: usize = 64;

/// [`Answer::Failed`](crate::Answer::Failed): userfaultfd could not be opened, or lacks a feature.
pub const STEP_USERFAULTFD: u8 = 0;
/// [`Answer::Failed`](crate::Answer::Failed): memory or /proc was refused to the agent.
pub const STEP_MEMORY: u8 = 1;
/// [`Answer::Failed`](crate::Answer::Failed): the welcome came without its descriptors.
pub const STEP_DESCRIPTORS: u8 = 2;
/// [`Answer::Failed`](crate::Answer::Failed): the program changes its rights; a new agent comes.
pub const STEP_RIGHTS: u8 = 3;
/// [`Answer::Failed`](crate::Answer::Failed): a seccomp filter refuses the call whose number stands for the error, or
/// is not known (0). Nothing is merged any more, and no agent comes.
pub const STEP_FILTER: u8 = 4;
/// [`Answer::Failed`](crate::Answer::Failed): the program's threads have different rights.
pub const STEP_THREADS: u8 = 5;
/// [`Answer::Failed`](crate::Answer::Failed): the agent's thread could not be given its own filter.
pub const STEP_NARROW: u8 = 6;
/// [`Answer::Failed`](crate::Answer::Failed): the program goes to another root directory or namespace; a new agent comes
/// if it finds /proc and an engine there.
pub const STEP_ELSEWHERE: u8 = 7;
/// [`Answer::Failed`](crate::Answer::Failed): the program has the kernel make all that it reads executable
/// (`READ_IMPLIES_EXEC`). Nothing is merged any more, and no agent comes.
pub const STEP_EXECUTABLE: u8 = 8;
/// [`Answer::Failed`](crate::Answer::Failed): `pageone detach` takes the agent out of the process, all memory of which is private.
pub const STEP_DETACHED: u8 = 9;

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

/// Stands for a trust domain. It is the same for all engines, so an agent that comes from one to another can tell
/// whether what it has merged is its new domain's too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DomainMark(pub [u64; 2]);

impl DomainMark {
    /// No domain.
    pub const NONE: Self = Self([0; 2]);

    fn encode(self, w: &mut Writer<'_>) {
        self.0.iter().for_each(|&half| {
            w.u64(half);
        });
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self([r.u64()?, r.u64()?]))
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
        expect_head(&mut r, KIND_HELLO)?;
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

/// The engine's consent. The packet carries descriptors: the lifeline, the domain's tie, then `stores` stores (read-only), then,
/// when `device` is set, `/dev/userfaultfd`. The lifeline begins with a [`Tally`](crate::Tally). The tie is mapped as a lifeline
/// is, until a later session has adopted what this one merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// How many stores follow, one a node; at least 1, at most [`MAX_STORES`].
    pub stores: u16,
    /// Whether the userfaultfd device comes along.
    pub device: bool,
    /// The domain in which the guest is served from here on.
    pub domain: DomainMark,
}

impl Welcome {
    /// Writes the packet, gives its length in bytes.
    pub fn encode(&self, out: &mut [u8; MAX_MESSAGE]) -> usize {
        let mut w = Writer::new(out);
        w.u8(KIND_WELCOME)
            .u16(crate::VERSION)
            .u16(self.stores)
            .u8(self.device.into());
        self.domain.encode(&mut w);
        w.len()
    }

    /// Reads the packet.
    ///
    /// # Errors
    /// Anything but a well-formed welcome of this version.
    pub fn decode(packet: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(packet);
        expect_head(&mut r, KIND_WELCOME)?;
        let stores = r.u16()?;
        if stores == 0 || usize::from(stores) > MAX_STORES {
            return Err(DecodeError::Range {
                field: "stores",
                value: stores.into(),
            });
        }
        let device = r.u8()? != 0;
        let domain = DomainMark::decode(&mut r)?;
        r.finish()?;
        Ok(Self {
            stores,
            device,
            domain,
        })
    }
}

/// What the agent says of itself when it is ready. The engine asks the kernel whether it is true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// Number of the thread that speaks, in its own namespace of processes. It is not its process's first: as
    /// long as it lives its process runs no other program.
    pub thread: u32,
    /// Where it has mapped the lifeline of the [`Welcome`].
    pub line: u64,
    /// Where its [`Journal`](crate::Journal) is.
    pub journal: u64,
    /// Its userfaultfd, a number in the table of the thread that speaks.
    pub uffd: u32,
    /// Whether it came into a process that ran already. That is for people alone, and no engine asks whether it is true.
    pub attached: bool,
}

impl Ready {
    pub(super) fn encode(&self, w: &mut Writer<'_>) {
        w.u32(self.thread).u32(self.uffd);
        w.u64(self.line).u64(self.journal);
        w.u8(self.attached.into());
    }

    pub(super) fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            thread: r.u32()?,
            uffd: r.u32()?,
            line: page_address(r, "line")?,
            journal: page_address(r, "journal")?,
            attached: r.u8()? != 0,
        })
    }
}

/// An address of a page; 0 for none.
fn page_address(r: &mut Reader<'_>, field: &'static str) -> Result<u64, DecodeError> {
    match r.u64()? {
        at if at % PAGE_BYTES as u64 == 0 && at < ADDRESS_LIMIT => Ok(at),
        value => Err(DecodeError::Range { field, value }),
    }
}

/// The engine's answer to an agent's [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant)] // decoded into place once a connection; the agent cannot box
pub enum Reception {
    /// The guest is welcome.
    Welcome(Welcome),
    /// It is not, for this reason; the connection ends. What it has merged in another domain than the one
    /// named it is to make its own.
    Refused(Reason),
}

impl Reception {
    /// Reads the packet.
    ///
    /// # Errors
    /// Anything but a well-formed answer to a hello, of this version.
    pub fn decode(packet: &[u8]) -> Result<Self, DecodeError> {
        match packet.first() {
            Some(&KIND_REFUSED) => Reason::decode(packet).map(Self::Refused),
            _ => Welcome::decode(packet).map(Self::Welcome),
        }
    }
}

/// Why a guest is refused, in words; and which domain it would be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason {
    /// The domain, [`DomainMark::NONE`] where it may be in none.
    pub domain: DomainMark,
    bytes: [u8; Self::MAX],
    len: u16,
}

impl Reason {
    /// The longest reason, in bytes.
    pub const MAX: usize = 500;

    /// A reason from text: what is too long is cut, and control characters become spaces.
    #[must_use]
    pub fn new(text: &str, domain: DomainMark) -> Self {
        let mut reason = Self {
            domain,
            bytes: [0; Self::MAX],
            len: 0,
        };
        let mut len = 0;
        for char in text.chars() {
            let char = if char.is_control() { ' ' } else { char };
            let Some(place) = reason.bytes.get_mut(len..len + char.len_utf8()) else {
                break;
            };
            len += char.encode_utf8(place).len();
        }
        reason.len = u16::try_from(len).unwrap_or(0);
        reason
    }

    /// The reason's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let used = self.bytes.get(..usize::from(self.len)).unwrap_or_default();
        core::str::from_utf8(used).unwrap_or_default()
    }

    /// Writes the packet, gives its length in bytes.
    pub fn encode(&self, out: &mut [u8; MAX_MESSAGE]) -> usize {
        let mut w = Writer::new(out);
        w.u8(KIND_REFUSED).u16(crate::VERSION);
        self.domain.encode(&mut w);
        w.u16(self.len).put(self.as_str().as_bytes());
        w.len()
    }

    /// Reads the packet.
    ///
    /// # Errors
    /// Anything but a well-formed refusal of this version.
    pub fn decode(packet: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(packet);
        expect_head(&mut r, KIND_REFUSED)?;
        let domain = DomainMark::decode(&mut r)?;
        let len = r.u16()?;
        let bad = DecodeError::Range {
            field: "reason",
            value: len.into(),
        };
        let text = match usize::from(len) {
            len @ ..=Self::MAX => r.take(len)?,
            _ => return Err(bad),
        };
        r.finish()?;
        let text = core::str::from_utf8(text).map_err(|_| bad)?;
        let plain = !text.chars().any(char::is_control);
        plain.then(|| Self::new(text, domain)).ok_or(bad)
    }
}

/// What both packets begin with: their kind, and the version.
fn expect_head(r: &mut Reader<'_>, want: u8) -> Result<(), DecodeError> {
    match r.u8()? {
        kind if kind == want => {}
        kind => return Err(DecodeError::Kind(kind)),
    }
    match r.u16()? {
        crate::VERSION => Ok(()),
        other => Err(DecodeError::Version(other)),
    }
}
