//! The legacy of a domain to the next engine, in a keeper's hands: its stores, its ties, and a note
//! that names them.
//!
//! ```text
//!  note.INODE.DOMAIN     pageone 1            a page of text only engines see
//!                        domain uid:0/web
//!                        owner 1000           the user whose guest began it
//!  store.INODE.DOMAIN    store 0 2071         a line for each node's store, by inode
//!  tie.INODE.DOMAIN      tie 2072             and for each tie that guests were ever given
//!                        end
//! ```
//!
//! A *tie* is a lifeline that all guests of a domain share as long as one engine lives. One
//! descriptor is enough for the next engine to learn that no process is left that could map a slot
//! of its predecessor's time. Handing over the lifelines of all guests instead would take thousands of
//! descriptors, and two messages to the keeper for every page that is written.
//!
//! A keeper may drop a descriptor that it is given, and does not tell. So the note decides. It is memory that
//! both engines see, and it names a tie *before* any guest is given it. The next engine adopts a
//! domain only if it has every store and every tie that the note names. Else it starts afresh, and
//! the guests keep their pages as if there had been no keeper.
//!
//! Guests have another description of a tie, one that can write. The keeper and the next engine have
//! only the one that asks whether a guest is left (see [`Lifeline`]).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use sys::fault::{self, Point};
use sys::keeper::Keeper;
use sys::memfd::{self, Lifeline, Note};

use crate::sync::{HANDOVER, Ordered, lock};

/// Ties a domain is handed over with. More gather only when engines die again and again before
/// they have adopted their guests.
pub(crate) const MAX_TIES: usize = 32;
/// About how long a descriptor's name gets. The domain in it is for people to read, and cut: the note has it
/// whole, and all names together must fit one variable of the environment (128 KiB).
const NAMED: usize = 48;

/// What kinds of descriptors are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// What belongs together.
    Note,
    /// Canonical pages.
    Store,
    /// What tells when a store's old mappings are gone.
    Tie,
    /// Knobs turned by hand: see [`crate::handover::saved_knobs`].
    Knobs,
}

impl Kind {
    const ALL: [(Self, &str); 4] = [
        (Self::Note, "note."),
        (Self::Store, "store."),
        (Self::Tie, "tie."),
        (Self::Knobs, "knobs."),
    ];

    /// The kind of a descriptor with this name.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let kind = Self::ALL.iter().find(|(_, mark)| name.starts_with(mark));
        kind.map(|(kind, _)| *kind)
    }

    fn mark(self) -> &'static str {
        let mark = Self::ALL.iter().find(|(kind, _)| *kind == self);
        mark.map_or("", |(_, mark)| mark)
    }
}

/// A descriptor's name: printable, without a colon, and bounded, whatever the domain is called.
pub(crate) fn name(kind: Kind, number: u64, domain: &str) -> String {
    let mut name = format!("{}{number}.", kind.mark());
    for byte in domain.bytes() {
        if name.len() >= NAMED {
            break;
        }
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' => {
                name.push(char::from(byte));
            }
            _ => name.push_str(&format!("%{byte:02x}")),
        }
    }
    name
}

/// What a note says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) domain: String,
    /// The user whose guest began it; none until there was a guest.
    pub(crate) owner: Option<u32>,
    /// Node and number of each store.
    pub(crate) stores: Vec<(u32, u64)>,
    /// Numbers of the ties.
    pub(crate) ties: Vec<u64>,
}

impl Manifest {
    fn text(&self) -> String {
        let mut text = format!("pageone 1\ndomain {}\n", self.domain);
        if let Some(owner) = self.owner {
            text.push_str(&format!("owner {owner}\n"));
        }
        for (node, number) in &self.stores {
            text.push_str(&format!("store {node} {number}\n"));
        }
        for number in &self.ties {
            text.push_str(&format!("tie {number}\n"));
        }
        text + "end\n"
    }

    /// Reads a note; `None` for one that is not of this version, or not whole.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let body = text.strip_prefix("pageone 1\n")?.strip_suffix("\nend\n")?;
        let mut lines = body.lines();
        let mut manifest = Self {
            domain: lines.next()?.strip_prefix("domain ")?.to_owned(),
            owner: None,
            stores: Vec::new(),
            ties: Vec::new(),
        };
        for line in lines {
            let (kind, rest) = line.split_once(' ')?;
            match kind {
                "store" => {
                    let (node, number) = rest.split_once(' ')?;
                    manifest
                        .stores
                        .push((node.parse().ok()?, number.parse().ok()?));
                }
                "tie" => manifest.ties.push(rest.parse().ok()?),
                "owner" if manifest.owner.is_none() => manifest.owner = Some(rest.parse().ok()?),
                _ => return None,
            }
        }
        Some(manifest)
    }

    /// Descriptors that a keeper holds for it: the note among them.
    pub(crate) fn descriptors(&self) -> u64 {
        (self.stores.len() + self.ties.len() + 1) as u64
    }
}

/// Takes the stores and ties of a manifest back from the keeper.
pub(crate) fn forget(keeper: &Keeper, manifest: &Manifest) {
    let stores = manifest
        .stores
        .iter()
        .map(|&(_, number)| (Kind::Store, number));
    let ties = manifest.ties.iter().map(|&number| (Kind::Tie, number));
    let mut all = stores.chain(ties);
    let forget = |(kind, number)| keeper.forget(&name(kind, number, &manifest.domain));
    if let Err(error) = all.try_for_each(forget) {
        tracing::warn!(domain = manifest.domain, %error, "the keeper keeps what no engine wants");
    }
}

/// The ties, the note, and who keeps them.
#[derive(Debug)]
pub(crate) struct Handover(Ordered<State, HANDOVER>);

#[derive(Debug)]
struct State {
    note: Note,
    manifest: Manifest,
    tie: Lifeline,
    /// By which guests hold it; so does this engine as long as it lives.
    held: OwnedFd,
    /// Who has it all; none where no next engine gets it.
    keeper: Option<Arc<Keeper>>,
}

impl Handover {
    /// A new domain's. Without a keeper its tie is a tie all the same, and no next engine gets it.
    ///
    /// # Errors
    /// When memory files cannot be made.
    pub(crate) fn new(
        domain: &str,
        stores: &[(u32, BorrowedFd<'_>)],
        keeper: Option<Arc<Keeper>>,
    ) -> std::io::Result<Self> {
        let number = |(node, store): &(u32, _)| Ok((*node, memfd::number(store)?));
        let manifest = Manifest {
            domain: domain.to_owned(),
            owner: None,
            stores: stores.iter().map(number).collect::<std::io::Result<_>>()?,
            ties: Vec::new(),
        };
        let state = State::tied(Note::new()?, manifest, keeper, stores)?;
        Ok(Self(Ordered::new(state)))
    }

    /// The domain of a former engine goes on, with its note and another tie.
    ///
    /// # Errors
    /// When the tie cannot be made.
    pub(crate) fn go_on(
        note: Note,
        manifest: Manifest,
        keeper: Arc<Keeper>,
    ) -> std::io::Result<Self> {
        let state = State::tied(note, manifest, Some(keeper), &[])?;
        Ok(Self(Ordered::new(state)))
    }

    /// The tie for a new guest.
    ///
    /// # Errors
    /// When descriptors are exhausted.
    pub(crate) fn tie(&self) -> std::io::Result<OwnedFd> {
        fault::check(Point::Duplicate)?;
        lock(&self.0).held.try_clone()
    }

    /// Notes whose guest began the domain: its descriptors count as this user's.
    pub(crate) fn own(&self, uid: u32) {
        let mut state = lock(&self.0);
        state.manifest.owner = Some(uid);
        if state.keeper.is_some() {
            let told = state.write();
            state.judge(told);
        }
    }

    /// Descriptors that the keeper holds.
    pub(crate) fn kept(&self) -> u64 {
        let state = lock(&self.0);
        let kept = state.keeper.as_ref();
        kept.map_or(0, |_| state.manifest.descriptors())
    }

    /// Notes that a former engine's tie is free.
    pub(crate) fn untie(&self, number: u64) {
        let mut state = lock(&self.0);
        state.manifest.ties.retain(|&tie| tie != number);
        if let Some(keeper) = &state.keeper {
            let old = name(Kind::Tie, number, &state.manifest.domain);
            let told = state.write().and_then(|()| keeper.forget(&old));
            state.judge(told);
        }
    }

    /// The domain ends: nothing of it is mapped any more.
    pub(crate) fn end(&self) {
        lock(&self.0).revoke();
    }
}

impl State {
    /// With a new tie. Of a new domain the keeper gets the `stores` and the note, too.
    fn tied(
        note: Note,
        mut manifest: Manifest,
        keeper: Option<Arc<Keeper>>,
        stores: &[(u32, BorrowedFd<'_>)],
    ) -> std::io::Result<Self> {
        let (tie, held) = Lifeline::new()?;
        manifest.ties.push(tie.number());
        let mut state = Self {
            note,
            manifest,
            tie,
            held,
            keeper,
        };
        let told = state.hand_over(stores);
        state.judge(told);
        Ok(state)
    }

    fn hand_over(&self, stores: &[(u32, BorrowedFd<'_>)]) -> std::io::Result<()> {
        let Some(keeper) = &self.keeper else {
            return Ok(());
        };
        let domain = &self.manifest.domain;
        let keep = |kind, number, descriptor| keeper.keep(&name(kind, number, domain), descriptor);
        for (&(_, number), (_, store)) in self.manifest.stores.iter().zip(stores) {
            keep(Kind::Store, number, *store)?;
        }
        if !stores.is_empty() {
            keep(Kind::Note, memfd::number(&self.note)?, self.note.as_fd())?;
        }
        keep(Kind::Tie, self.tie.number(), self.tie.as_fd())?;
        self.write()
    }

    fn write(&self) -> std::io::Result<()> {
        Ok(self.note.write(&self.manifest.text())?)
    }

    fn judge(&mut self, told: std::io::Result<()>) {
        if let Err(error) = told {
            let domain = &self.manifest.domain;
            tracing::warn!(domain, %error, "the next engine will not have this domain's pages");
            self.revoke();
        }
    }

    /// Takes everything back from the keeper: the next engine starts afresh here.
    fn revoke(&mut self) {
        let Some(keeper) = self.keeper.take() else {
            return;
        };
        // First the note: then nothing else of this matters.
        let emptied = self.note.write("").map_err(std::io::Error::from);
        forget(&keeper, &self.manifest);
        let note = memfd::number(&self.note).map_err(std::io::Error::from);
        let note = note.map(|number| name(Kind::Note, number, &self.manifest.domain));
        let forgotten = note.and_then(|note| keeper.forget(&note));
        for error in [emptied, forgotten].into_iter().filter_map(Result::err) {
            tracing::warn!(domain = self.manifest.domain, %error, "the keeper keeps a note");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sys::keeper::{Inbox, is_name};

    #[test]
    fn a_note_returns_what_was_written_and_only_whole() {
        let manifest = Manifest {
            domain: "uid:4294967295/some name: ä%".to_owned(),
            owner: Some(u32::MAX),
            stores: vec![(0, 12), (3, u64::MAX)],
            ties: vec![7, 8],
        };
        let text = manifest.text();
        assert_eq!(Manifest::parse(&text), Some(manifest.clone()));
        for end in 0..text.len() {
            if text.is_char_boundary(end) {
                assert_eq!(Manifest::parse(&text[..end]), None, "{end}");
            }
        }
        assert_eq!(
            Manifest::parse(&text.replace("pageone 1", "pageone 2")),
            None
        );
        assert_eq!(Manifest::parse(&text.replace("tie 8", "tie x")), None);
        // The largest note fits its page.
        let largest = Manifest {
            owner: Some(u32::MAX),
            domain: "ä".repeat(50),
            stores: vec![(u32::MAX, u64::from(u32::MAX)); wire::MAX_STORES],
            ties: vec![u64::from(u32::MAX); MAX_TIES + 1],
        };
        Note::new().unwrap().write(&largest.text()).unwrap();
    }

    #[test]
    fn any_domain_gives_a_name_a_keeper_takes() {
        let long = "ä:".repeat(63);
        for domain in ["", "uid:0/x y", "a\u{7f}\n", &long] {
            let name = name(Kind::Store, u64::MAX, domain);
            assert!(is_name(&name), "{name}");
            assert_eq!(Kind::of(&name), Some(Kind::Store));
        }
        assert_eq!(name(Kind::Tie, 5, "uid:0/web"), "tie.5.uid%3a0/web");
        assert_eq!(Kind::of("listener"), None);
    }

    #[test]
    fn guests_get_the_tie_that_can_write_and_the_keeper_the_one_that_asks() {
        use rustix::fs::{OFlags, fcntl_getfl};
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let inbox = Inbox::bind(&path).unwrap();
        let keeper = Arc::new(Keeper::at(path.as_os_str()).unwrap());
        let store = sys::memfd::Store::new("pageone-store").unwrap();
        let handover = Handover::new("d", &[(0, store.as_fd())], Some(keeper)).unwrap();
        let mut kept = None;
        while let Some(told) = inbox.next().unwrap() {
            if let sys::keeper::Note::Keep(name, mut files) = told
                && Kind::of(&name) == Some(Kind::Tie)
            {
                kept = files.pop();
            }
        }
        let (kept, given) = (kept.unwrap(), handover.tie().unwrap());
        assert_eq!(
            memfd::number(&kept).unwrap(),
            memfd::number(&given).unwrap()
        );
        let access = |file: &OwnedFd| fcntl_getfl(file).unwrap() & OFlags::ACCMODE;
        assert_eq!(
            (access(&kept), access(&given)),
            (OFlags::RDONLY, OFlags::RDWR)
        );
        let successors = Lifeline::adopt(kept).unwrap();
        drop(given);
        assert!(!successors.is_free(), "this engine lives");
        drop(handover);
        assert!(successors.is_free());
    }
}
