//! Restore: domains out of the descriptors that a keeper held, and new ones.
//!
//! ```text
//!  at start      stores ──▶ numbers begin behind the last     manifest ──▶ stores, ties
//!                       └─▶ live slots: fingerprint, index, one ref each ("the predecessor's")
//!  a guest       comes back ─▶ its pages are claimed: see `scan::claim`
//!  every round   all old ties free? ─▶ the predecessor's refs end
//! ```
//!
//! Every domain is restored whole or not at all. One that does not fit is named in a warning and taken back from the
//! keeper. It then starts afresh with its first guest, and no guest's memory changes.
//!
//! The invariants, over the change of engines:
//!
//! * I3 A number that was ever given to an agent had been written, so it lies below the store's end, and numbers
//!   begin behind that. A slot is not written again. An old engine that still runs could do it, so a keeper starts
//!   a new one only when the old one is gone.
//! * I4 A process that may map a slot of an old store holds an old tie. Agents map it before their first window,
//!   fork passes both on, and an agent unmaps it only when told that its pages are adopted. Until all old ties are
//!   free the predecessor's ref stands for all those mappings, known or not.
//! * I5 The predecessor's refs end all at once, when no process is left that could have inherited from its time.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use sys::keeper::{Keeper, Kept};
use sys::memfd::{self, Lifeline, Note};

use crate::domain::handover::{self, Handover, Kind, MAX_TIES, Manifest};
use crate::domain::index::Index;
use crate::domain::lifelines::{Epoch, Line};
use crate::domain::placement::Placement;
use crate::domain::store::Memfd;
use crate::domain::{Domain, PerNode};
use crate::error::OverQuota;
use crate::merge::read::Hasher;
use crate::options::Rules;
use crate::page::{Entry, Fingerprint, Slot, StoreId};
use crate::run::core::Core;
use crate::sync::lock;

/// Makes domains with stores on each node.
#[derive(Clone, Debug)]
pub(crate) struct Restorer {
    pub(crate) placement: Placement,
    pub(crate) keeper: Option<Arc<Keeper>>,
}

/// Why a domain is not taken over.
#[derive(Debug, thiserror::Error)]
enum Misfit {
    #[error("its note is not whole, or of another version")]
    Note,
    #[error("the keeper has lost a store or a tie of it ({0})")]
    Lost(u64),
    #[error("its stores are on nodes {found:?}, and this machine has {wanted:?}")]
    Nodes { found: Vec<u32>, wanted: Vec<u32> },
    #[error("{0} former engines have not seen the end of their guests")]
    Ties(usize),
    #[error("another note names it too")]
    Twice,
    #[error(transparent)]
    Quota(#[from] OverQuota),
    #[error(transparent)]
    Adopt(#[from] memfd::AdoptError),
    #[error(transparent)]
    System(#[from] std::io::Error),
}

/// What was kept beside the notes, by number.
type Pool = HashMap<u64, Kept>;

impl Restorer {
    /// An empty domain.
    ///
    /// # Errors
    /// When its memory files cannot be made.
    pub(crate) fn new_domain(&self, name: &str) -> std::io::Result<Domain> {
        let stores = self.placement.stores();
        let stores = stores.map(|(id, _)| Memfd::new(id, self.real_node(id)));
        let stores = stores.collect::<std::io::Result<Vec<_>>>()?;
        let nodes = self.placement.stores().map(|(_, node)| node.0);
        let kept: Vec<_> = nodes.zip(stores.iter().map(Memfd::as_fd)).collect();
        let handover = Handover::new(name, &kept, self.keeper.clone())?;
        Ok(self.domain(name, stores, handover))
    }

    /// The kernel's node for a store's pages; on a machine with one there is nothing to tell it.
    fn real_node(&self, id: StoreId) -> Option<u32> {
        let nodes = &self.placement.nodes;
        let node = nodes.get(id.index()).filter(|_| nodes.len() > 1)?;
        self.placement.topology.real_node(*node).map(|node| node.0)
    }

    fn domain(&self, name: &str, stores: Vec<Memfd>, handover: Handover) -> Domain {
        let mut stores = stores.into_iter();
        Domain::new(name, self.placement.clone(), handover, |id| PerNode {
            index: Index(self.placement.index(id)),
            store: Box::new(stores.next().expect("a store for each node")),
        })
    }

    /// Restores every domain that `kept` has whole, and has the keeper forget the rest.
    pub(crate) fn restore(&self, core: &Core, keeper: &Arc<Keeper>, kept: Vec<Kept>) {
        let (mut notes, mut pool) = (Vec::new(), Pool::new());
        for kept in kept {
            match (Kind::of(&kept.name), memfd::number(&kept.descriptor)) {
                (Some(Kind::Note), _) => notes.push(kept),
                (Some(_), Ok(number)) => drop(pool.insert(number, kept)),
                _ => forget(keeper, &kept.name, &"it is nothing of pageone's"),
            }
        }
        for note in notes {
            match read(note.descriptor) {
                Ok((old, manifest)) => {
                    let restored = self.restore_one(core, keeper, (&old, &manifest), &mut pool);
                    if let Err(misfit) = restored {
                        tracing::warn!(
                            domain = manifest.domain,
                            "a former engine's pages are not taken over: {misfit}"
                        );
                        handover::forget(keeper, &manifest);
                        // Void, should the keeper not hear of it.
                        let _ = old.write("");
                        forget(keeper, &note.name, &"it says nothing any more");
                    }
                }
                Err(misfit) => forget(keeper, &note.name, &misfit),
            }
        }
        for kept in pool.into_values() {
            forget(keeper, &kept.name, &"no domain that goes on names it");
        }
    }

    fn restore_one(
        &self,
        core: &Core,
        keeper: &Arc<Keeper>,
        (note, manifest): (&Note, &Manifest),
        pool: &mut Pool,
    ) -> Result<(), Misfit> {
        let stores = self.take_stores(core, manifest, pool)?;
        let ties = take_ties(manifest, pool)?;
        if let Some(owner) = manifest.owner {
            // And this engine's tie.
            core.check_kept(owner, manifest.descriptors() + 1)?;
        }
        // From here on the next engine gets this one's tie too, or nothing.
        let handover = Handover::go_on(note.try_clone()?, manifest.clone(), Arc::clone(keeper))?;
        let domain = self.domain(&manifest.domain, stores, handover);
        if let Some(owner) = manifest.owner {
            domain.own(&core.users.get(owner));
        }
        Ok(resume(core, domain, ties)?)
    }

    fn take_stores(
        &self,
        core: &Core,
        manifest: &Manifest,
        pool: &mut Pool,
    ) -> Result<Vec<Memfd>, Misfit> {
        if core.has_domain(&manifest.domain) {
            return Err(Misfit::Twice);
        }
        let wanted: Vec<_> = self.placement.stores().map(|(_, node)| node.0).collect();
        let found: Vec<_> = manifest.stores.iter().map(|&(node, _)| node).collect();
        if wanted != found {
            return Err(Misfit::Nodes { found, wanted });
        }
        let take = |((id, _), &(_, number)): ((StoreId, _), &(u32, u64))| {
            let store = take(pool, number)?;
            Ok(Memfd::restore(store, id, self.real_node(id))?)
        };
        self.placement
            .stores()
            .zip(&manifest.stores)
            .map(take)
            .collect()
    }
}

fn read(note: OwnedFd) -> Result<(Note, Manifest), Misfit> {
    let note = Note::adopt(note)?;
    let text = note.read().map_err(std::io::Error::from)?;
    let manifest = Manifest::parse(&text).ok_or(Misfit::Note)?;
    Ok((note, manifest))
}

/// All its ties. Those that no process holds go at the first settling of former engines' refs.
fn take_ties(manifest: &Manifest, pool: &mut Pool) -> Result<Vec<Line>, Misfit> {
    if manifest.ties.len() >= MAX_TIES {
        return Err(Misfit::Ties(manifest.ties.len()));
    }
    let adopt = |&number: &u64| -> Result<Line, Misfit> {
        let tie = Lifeline::adopt(take(pool, number)?)?;
        Ok((Some(number), Box::new(tie)))
    };
    manifest.ties.iter().map(adopt).collect()
}

fn take(pool: &mut Pool, number: u64) -> Result<OwnedFd, Misfit> {
    let kept = pool.remove(&number).ok_or(Misfit::Lost(number))?;
    Ok(kept.descriptor)
}

fn forget(keeper: &Keeper, name: &str, why: &dyn std::fmt::Display) {
    tracing::warn!("{name} is not taken over: {why}");
    if let Err(error) = keeper.forget(name) {
        tracing::warn!("the keeper goes on holding {name}: {error}");
    }
}

/// Reads what the stores of a new domain hold. Gives how many slots are live.
///
/// # Errors
/// When a store cannot be read; the domain must not be used then.
fn load(domain: &Domain, ties: Vec<Line>, hasher: &Hasher, rules: Rules) -> std::io::Result<usize> {
    let mut slots = Vec::new();
    for home in domain.stores() {
        let store = domain.store(home);
        let mut live: Vec<(Slot, Fingerprint)> = Vec::new();
        store.each(&mut |slot, page| live.push((slot, hasher.fingerprint_any(page))))?;
        let taken = domain.slots.restore(home, store.end()?, &live);
        taken.map_err(std::io::Error::other)?;
        let named = match rules.across_nodes {
            true => StoreId::default(),
            false => home,
        };
        live.iter().for_each(|&entry| enter(domain, named, entry));
        slots.extend(live.iter().map(|&(slot, _)| slot));
    }
    let live = slots.len();
    *lock(&domain.former) = Epoch::new(ties, slots);
    Ok(live)
}

/// Enters an old slot into an index. Of two with the same content one is a copy beside the other,
/// with room for more pages.
fn enter(domain: &Domain, home: StoreId, (slot, key): (Slot, Fingerprint)) {
    if let Some(Entry::Canonical(first)) = domain
        .index(home)
        .get_or_insert(key, Entry::Canonical(slot))
    {
        let chains = &domain.slots.chains;
        chains.add((home, key), first, slot, |_| true);
        chains.note_room(key, slot);
    }
}

/// Puts a domain of a former engine among those of this one.
///
/// # Errors
/// When its stores cannot be read.
pub(crate) fn resume(core: &Core, domain: Domain, ties: Vec<Line>) -> std::io::Result<()> {
    domain.slots.set_limit(core.knobs.rules().max_sharing);
    let slots = load(&domain, ties, &core.hasher, core.knobs.rules());
    // The keeper has this engine's tie by now.
    let slots = slots.inspect_err(|_| domain.handover.end())?;
    tracing::info!(domain = domain.name, slots, "a domain goes on");
    lock(&core.domains).insert(domain.name.clone(), Arc::new(domain));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use rustix::fs::{SealFlags, fcntl_add_seals};
    use sys::keeper::{Inbox, Note as Told};

    use super::*;
    use crate::merge::read::Hasher;
    use crate::page::Slot;
    use crate::run::knobs::Knobs;
    use crate::sync::lock;

    /// What becomes of descriptors in a keeper's hands.
    type Harm = Box<dyn Fn(&mut Vec<Kept>)>;

    struct Post {
        _folder: tempfile::TempDir,
        inbox: Inbox,
        keeper: Arc<Keeper>,
    }

    impl Post {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("notify");
            let inbox = Inbox::bind(&path).unwrap();
            let keeper = Arc::new(Keeper::at(path.as_os_str()).unwrap());
            Self {
                _folder: folder,
                inbox,
                keeper,
            }
        }

        fn restorer(&self, nodes: usize) -> Restorer {
            let spec = format!("fake={nodes}").parse().unwrap();
            let topology = numa::Topology::live().unwrap().emulate(&spec).unwrap();
            Restorer {
                placement: Placement::new(topology).unwrap(),
                keeper: Some(Arc::clone(&self.keeper)),
            }
        }

        /// What the keeper was given, and the names it was told to forget.
        fn take(&self) -> (Vec<Kept>, Vec<String>) {
            let (mut kept, mut forgotten) = (Vec::new(), Vec::new());
            while let Some(told) = self.inbox.next().unwrap() {
                match told {
                    Told::Keep(name, mut descriptors) => kept.push(Kept {
                        name,
                        descriptor: descriptors.pop().unwrap(),
                    }),
                    Told::Forget(name) => forgotten.push(name),
                    other => panic!("{other:?}"),
                }
            }
            (kept, forgotten)
        }

        /// What an engine leaves that wrote two pages, and whose tie a process maps.
        fn legacy(&self) -> Vec<Kept> {
            let domain = self.restorer(1).new_domain("uid:0/x").unwrap();
            let users = crate::users::Users::new(crate::options::Limits::default());
            domain.note_guest_of(&users.get(61_001));
            let pages = [[1; wire::PAGE_BYTES], [2; wire::PAGE_BYTES]];
            let store = domain.store(StoreId::default());
            store.write(Slot(5), &[&pages[0], &pages[1]]).unwrap();
            let tie = domain.handover.tie().unwrap();
            let access = sys::mapping::Access::ReadWrite;
            sys::mapping::share(tie.as_fd(), 0, wire::PAGE_BYTES, access).unwrap();
            let (kept, forgotten) = self.take();
            assert_eq!((kept.len(), forgotten.len()), (3, 0));
            kept
        }

        fn succeed(&self, nodes: usize, kept: Vec<Kept>) -> Core {
            self.succeed_within(crate::options::Limits::default(), nodes, kept)
        }

        fn succeed_within(
            &self,
            limits: crate::options::Limits,
            nodes: usize,
            kept: Vec<Kept>,
        ) -> Core {
            let restorer = self.restorer(nodes);
            let options = crate::options::Options::default();
            let knobs = Knobs::new(&options, 65530);
            let new_domain = |_: &str| Err(std::io::ErrorKind::Unsupported.into());
            let core = Core::new(knobs, limits, Hasher::new().unwrap(), Box::new(new_domain));
            restorer.restore(&core, &self.keeper, kept);
            core
        }
    }

    fn find(kept: &[Kept], kind: Kind) -> usize {
        let of_kind = |kept: &Kept| Kind::of(&kept.name) == Some(kind);
        kept.iter().position(of_kind).unwrap()
    }

    #[test]
    fn a_domain_goes_on_with_all_that_was_kept() {
        let post = Post::new();
        let kept = post.legacy();
        let core = post.succeed(1, kept);
        let domain = Arc::clone(&lock(&core.domains)["uid:0/x"]);
        let live: Vec<_> = domain.slots.view().live().collect();
        assert_eq!((live.len(), domain.index(StoreId::default()).len()), (2, 2));
        assert_eq!(
            domain.slots.take_run(StoreId::default()).unwrap().start,
            512
        );
        domain.settle_former();
        assert_eq!(domain.slots.live(), 2, "a process holds the tie");
        let (kept, forgotten) = post.take();
        assert_eq!((kept.len(), forgotten.len()), (1, 0), "another tie");
    }

    #[test]
    fn what_is_not_whole_starts_afresh() {
        let lose = |kind| move |kept: &mut Vec<Kept>| drop(kept.remove(find(kept, kind)));
        let seal = |kind, seal| {
            move |kept: &mut Vec<Kept>| {
                fcntl_add_seals(&kept[find(kept, kind)].descriptor, seal).unwrap();
            }
        };
        let swap = |kind| {
            move |kept: &mut Vec<Kept>| {
                let other = std::fs::File::open("/proc/self/exe").unwrap();
                let at = find(kept, kind);
                kept[at].descriptor = other.into();
            }
        };
        let open_to_write = |kept: &mut Vec<Kept>| {
            let at = find(kept, Kind::Tie);
            let path = format!("/proc/self/fd/{}", kept[at].descriptor.as_raw_fd());
            let mut options = std::fs::OpenOptions::new();
            kept[at].descriptor = options.read(true).write(true).open(path).unwrap().into();
        };
        let harms: [(&str, usize, Harm); 9] = [
            ("no store", 1, Box::new(lose(Kind::Store))),
            ("no tie", 1, Box::new(lose(Kind::Tie))),
            ("no note", 1, Box::new(lose(Kind::Note))),
            ("a tie that can write", 1, Box::new(open_to_write)),
            (
                "a sealed store",
                1,
                Box::new(seal(Kind::Store, SealFlags::GROW)),
            ),
            ("another tie", 1, Box::new(swap(Kind::Tie))),
            ("another store", 1, Box::new(swap(Kind::Store))),
            ("another note", 1, Box::new(swap(Kind::Note))),
            ("other nodes", 2, Box::new(|_: &mut Vec<Kept>| ())),
        ];
        for (what, nodes, harm) in harms {
            let post = Post::new();
            let mut kept = post.legacy();
            harm(&mut kept);
            let mut names: Vec<_> = kept.iter().map(|kept| kept.name.clone()).collect();
            let core = post.succeed(nodes, kept);
            assert!(lock(&core.domains).is_empty(), "{what}");
            let (kept, forgotten) = post.take();
            assert!(kept.is_empty(), "{what}: {kept:?}");
            names.retain(|name| !forgotten.contains(name));
            assert!(names.is_empty(), "{what}: {names:?} are kept for ever");
        }
    }

    #[test]
    fn a_user_has_his_share_of_the_keeper() {
        // Store, note and two ties.
        for (share, taken) in [(4, true), (3, false)] {
            let post = Post::new();
            let limits = crate::options::Limits {
                kept_descriptors_per_user: share,
                ..crate::options::Limits::default()
            };
            let core = post.succeed_within(limits, 1, post.legacy());
            assert_eq!(core.has_domain("uid:0/x"), taken, "{share}");
            let another = core.check_quota(61_001, "uid:61001/y");
            assert_eq!(another.is_ok(), !taken, "the next engine knows whose it is");
            assert!(core.check_quota(61_002, "uid:61002").is_ok());
        }
    }

    #[test]
    fn a_tie_that_was_free_before_is_no_obstacle() {
        let post = Post::new();
        let kept = post.legacy();
        // As an engine leaves it that had no guest.
        let domain = post.restorer(1).new_domain("uid:1").unwrap();
        drop(domain);
        let (mut others, _) = post.take();
        others.extend(kept);
        let core = post.succeed(1, others);
        assert_eq!(lock(&core.domains).len(), 2);
        core.tidy();
        assert_eq!(lock(&core.domains).len(), 1, "no guest needs it");
    }
}
