//! The counters, as the command line sees them: JSON, with KSM's names where KSM has the thing.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sys::foreign::ForeignName;

use crate::knobs::KnobValues;
use crate::why::{WhyNot, WhyNotCode};

/// The number of the form in which [`Status`] is written. It grows when a field goes or changes its meaning; a field that is
/// new leaves it.
pub const SCHEMA: u32 = 1;

/// The engine's counters at one moment.
///
/// For every status, `pages_shared + pages_sharing + pages_unshared + pages_volatile + zero_pages +
/// pages_skipped` is the number of pages present in all regions (I9).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// [`SCHEMA`] of the daemon that wrote it; 0 for one that had none yet.
    pub schema: u32,
    /// The daemon's version.
    pub version: String,
    /// The machine's name.
    pub host: ForeignName,
    /// When it was written, in seconds since 1970.
    pub time: u64,
    /// Seconds since the engine started.
    pub uptime_seconds: u64,
    /// Milliseconds until the first pages can be merged, about; none once some are, while no guest offers memory, and where
    /// [`only_user`](Self::only_user) is set.
    pub first_merges_ms: Option<u64>,
    /// The user whose guests alone are counted; none: those of all users are.
    pub only_user: Option<u32>,
    /// The knobs.
    #[serde(flatten)]
    pub knobs: KnobValues,
    /// Milliseconds between two looks at present: `merge_period_ms` times 1/4 to 4, by the pace.
    pub effective_period_ms: u64,
    /// Canonical pages that stores hold, in bytes: those shared, and those that fork children or guests
    /// with old lifelines may still map.
    pub store_bytes: u64,
    /// Pages that got no canonical copy so far because stores were at `store_limit_mib`. Each is tried
    /// again, and counted again.
    pub pages_over_limit: u64,
    /// Chunks left alone, at present, because they are one huge page.
    pub huge_pages_kept: u64,
    /// Completed rounds over all regions.
    pub full_scans: u64,
    /// Canonical pages with at least one sharer.
    pub pages_shared: u64,
    /// Pages that share a canonical page beyond its first sharer: the frames saved.
    pub pages_sharing: u64,
    /// Contents that have several copies, for more pages than `max_page_sharing`.
    pub stable_node_chains: u64,
    /// Copies of these contents.
    pub stable_node_dups: u64,
    /// Settled pages seen once: candidates.
    pub pages_unshared: u64,
    /// Pages written lately, or not yet observed for two periods.
    pub pages_volatile: u64,
    /// Pages that map the kernel's zero page.
    pub zero_pages: u64,
    /// Pages left alone: pinned, broken, unsupported, or refused for want of mappings.
    pub pages_skipped: u64,
    /// Of the skipped ones, pages written after they were merged, and not to be merged again: it is
    /// switched off, or the guest holds something that may pin memory.
    pub pages_broken: u64,
    /// Of the skipped ones, pages the kernel would not move (pinned, or shared by fork or KSM).
    pub pages_pinned: u64,
    /// Of the skipped ones, pages that lie in a mapping of a file, or in a store of another engine.
    pub pages_foreign: u64,
    /// Of the skipped ones, pages in mappings of a kind that is not merged. The rest of the skipped ones got no room, or merging them
    /// failed; they are tried again.
    pub pages_unfit: u64,
    /// Pages merged so far that had been merged and written before.
    pub pages_merged_again: u64,
    /// Pages recycled so far: their guests gave them up.
    pub pages_recycled: Recycled,
    /// Frames given back so far and still saved, in bytes: `pages_sharing` and our zero pages.
    pub saved_bytes: u64,
    /// `saved_bytes` less kernel slab, page tables and our own memory; may be negative.
    pub net_saved_bytes: i64,
    /// Memory the engine and the agents hold for their work, in bytes.
    pub metadata_bytes: u64,
    /// CPU time of the engine and of all agents, in seconds.
    pub cpu_seconds: f64,
    /// The saving of the kernel's KSM beside, in bytes; it is no part of the sums. The reader finds it, not the daemon.
    pub ksm_saved_bytes: u64,
    /// The longest time a page was out of its guest's reach in a window, in microseconds.
    pub window_max_us: u64,
    /// Canonical pages by domain and node, where they are by the kernel's word; empty on a machine with one node.
    pub store_nodes: Vec<StoreNode>,
    /// The guests.
    pub guests: Vec<GuestStatus>,
    /// Processes that are no guests, or not any longer, and why; of the last hour, as far as they live.
    pub unserved: Vec<Unserved>,
}

/// A user who asks without the right to know of all guests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Viewer {
    /// User id.
    pub uid: u32,
    /// The domain that the policy gives to the process that asks; empty when none.
    pub domain: String,
}

impl Viewer {
    /// Whether he may know of a guest: it is of his user id. Where the policy keeps processes apart by cgroup, whatever their
    /// user, it is of his cgroup, too.
    #[must_use]
    pub fn sees(&self, uid: u32, domain: &str) -> bool {
        self.uid == uid && (!is_by_cgroup(domain) || domain == self.domain)
    }
}

/// Whether a domain is of one cgroup alone.
fn is_by_cgroup(domain: &str) -> bool {
    domain.starts_with("cgroup:")
}

impl Status {
    /// Of the skipped pages those that no count names a reason of: there was no room, or it failed, and they are tried again.
    #[must_use]
    pub fn pages_put_off(&self) -> u64 {
        let unfit = self.pages_foreign + self.pages_unfit;
        let known = self.pages_broken + self.pages_pinned + unfit;
        self.pages_skipped.saturating_sub(known)
    }

    /// What a user may know: the knobs, his guests, and the sums over these. Whatever else is counted tells of
    /// others, and is 0. All his sharers count as `pages_sharing`: a canonical page belongs to no user.
    #[must_use]
    pub fn of_user(&self, viewer: &Viewer) -> Self {
        let uid = viewer.uid;
        let mut guests: Vec<_> = self
            .guests
            .iter()
            .filter(|guest| viewer.sees(guest.uid, guest.domain.raw()))
            .cloned()
            .collect();
        // Whether others are in a domain is theirs to know; only a user's own domain has no others.
        for guest in guests
            .iter_mut()
            .filter(|guest| !guest.domain.raw().starts_with("uid:"))
        {
            guest
                .reasons
                .retain(|reason| reason.code != WhyNotCode::Alone);
        }
        let sum = |count: fn(&GuestStatus) -> u64| guests.iter().map(count).sum::<u64>();
        let saved_bytes = sum(|guest| guest.saved_bytes);
        Self {
            schema: self.schema,
            version: self.version.clone(),
            host: self.host.clone(),
            time: self.time,
            uptime_seconds: self.uptime_seconds,
            // That there is none tells that pages of some other guest are merged.
            first_merges_ms: None,
            only_user: Some(uid),
            knobs: self.knobs,
            effective_period_ms: self.effective_period_ms,
            store_bytes: 0,
            pages_over_limit: 0,
            huge_pages_kept: 0,
            full_scans: self.full_scans,
            pages_shared: 0,
            pages_sharing: sum(|guest| guest.pages_sharing),
            stable_node_chains: 0,
            stable_node_dups: 0,
            pages_unshared: sum(|guest| guest.pages_unshared),
            pages_volatile: sum(|guest| guest.pages_volatile),
            zero_pages: sum(|guest| guest.zero_pages),
            pages_skipped: sum(|guest| guest.pages_skipped),
            pages_broken: sum(|guest| guest.pages_broken),
            pages_pinned: sum(|guest| guest.pages_pinned),
            pages_foreign: sum(|guest| guest.pages_foreign),
            pages_unfit: sum(|guest| guest.pages_unfit),
            pages_merged_again: 0,
            pages_recycled: guests.iter().map(|guest| guest.pages_recycled).sum(),
            saved_bytes,
            net_saved_bytes: i64::try_from(saved_bytes).unwrap_or(i64::MAX),
            metadata_bytes: 0,
            cpu_seconds: 0.0,
            ksm_saved_bytes: 0,
            window_max_us: 0,
            store_nodes: Vec::new(),
            guests,
            unserved: self
                .unserved
                .iter()
                .filter(|unserved| viewer.sees(unserved.uid, &viewer.domain))
                // The cgroup of one that is no guest is not known.
                .filter(|_| !is_by_cgroup(&viewer.domain))
                .cloned()
                .collect(),
        }
    }
}

/// Pages that were given back because their content no longer mattered, each counted once, when a scan finds it so. What a
/// guest uses again before the next scan is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Recycled {
    /// Discarded by the guest: `MADV_DONTNEED` of a VMM for its guest's balloon or free page reports, or of an allocator.
    pub discarded: u64,
    /// Filled with zeros by the guest, and merged with the kernel's zero page.
    pub zeroed: u64,
    /// Discarded by `pageone_recycle`.
    pub told: u64,
}

impl Recycled {
    /// The pages of all ways.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.discarded + self.zeroed + self.told
    }
}

impl std::iter::Sum for Recycled {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            discarded: sum.discarded + one.discarded,
            zeroed: sum.zeroed + one.zeroed,
            told: sum.told + one.told,
        })
    }
}

/// Canonical pages of a domain on a node, as the last walk over all of them found them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreNode {
    /// The trust domain.
    pub domain: ForeignName,
    /// The kernel's number of the node.
    pub node: u32,
    /// Canonical pages whose frames are on it.
    pub pages: u64,
    /// Those of them that belong to the store of another node.
    pub astray: u64,
}

impl StoreNode {
    /// Canonical pages by node, of all domains together, and those of them that belong to the store of another node.
    #[must_use]
    pub fn by_node(all: &[Self]) -> BTreeMap<u32, (u64, u64)> {
        let mut nodes = BTreeMap::<u32, (u64, u64)>::new();
        for one in all {
            let (pages, astray) = nodes.entry(one.node).or_default();
            (*pages, *astray) = (*pages + one.pages, *astray + one.astray);
        }
        nodes
    }
}

/// A process that is no guest, or not any longer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Unserved {
    /// Process id: of the last one for which the reason was given.
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// Why, in words.
    pub why: String,
    /// How often.
    pub times: u64,
    /// Seconds since the last time.
    pub seconds: u64,
}

/// One guest's counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestStatus {
    /// Process id.
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// The command name, as in `/proc/PID/comm`.
    pub comm: ForeignName,
    /// The command name that it had when it became a guest; it stays, whatever name the process takes since.
    pub joined_as: ForeignName,
    /// What people know it by: a virtual machine, a container, a unit. None where only the command is known.
    pub name: Option<ForeignName>,
    /// The trust domain its pages are shared in.
    pub domain: ForeignName,
    /// Whether its agent came into it while it ran (`pageone attach`), so that `pageone detach` can take it out.
    pub attached: bool,
    /// Contiguous ranges the guest offers.
    pub regions: u64,
    /// Pages present in its regions.
    pub pages: u64,
    /// Pages that map a canonical page, the first sharer included.
    pub pages_sharing: u64,
    /// Pages that map the kernel's zero page.
    pub zero_pages: u64,
    /// Settled pages seen once.
    pub pages_unshared: u64,
    /// Pages written lately, or not yet observed for two periods.
    pub pages_volatile: u64,
    /// Pages left alone.
    pub pages_skipped: u64,
    /// Pages that lie in mappings of a store: those that share, and those written since.
    pub pages_stored: u64,
    /// Pages written after they were merged, and not to be merged again.
    pub pages_broken: u64,
    /// Pages the kernel would not move.
    pub pages_pinned: u64,
    /// Pages in a mapping of a file, or in a store of another engine.
    pub pages_foreign: u64,
    /// Pages in mappings of a kind that is not merged.
    pub pages_unfit: u64,
    /// Pages recycled so far.
    pub pages_recycled: Recycled,
    /// Merged pages that the guest has not read since they were merged.
    pub pages_unread: u64,
    /// How it could give memory back that it seems not to need, in words.
    pub hint: Option<String>,
    /// What may hold pages pinned for long, so that written pages are not merged again.
    pub pins: Option<String>,
    /// The limit at which the guest is, so that a part of its memory is left alone, in words.
    pub at_limit: Option<String>,
    /// Why it may no longer be in its domain: its pages are unmerged, and it has to come back elsewhere.
    pub leaves: Option<String>,
    /// A look at its memory does not return, so that no thread looks any more.
    pub stuck: bool,
    /// The guest's part of the saving, in bytes; the parts add up to the whole.
    pub saved_bytes: u64,
    /// The same less what the guest alone costs: its tables, its agent, its mappings; may be negative.
    pub net_saved_bytes: i64,
    /// CPU time of its agent, in seconds.
    pub cpu_seconds: f64,
    /// Why memory of it is not merged.
    pub reasons: Vec<WhyNot>,
    /// Mappings of the process, as counted against `vm.max_map_count`.
    pub vmas: u64,
    /// Whether the agent answers in time.
    pub responsive: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knobs() -> KnobValues {
        KnobValues {
            threads: 3,
            ..KnobValues::default()
        }
    }

    #[test]
    fn a_user_sees_his_guests_and_their_sums_alone() {
        let guest = |uid, pages| GuestStatus {
            uid,
            pages,
            pages_sharing: pages / 2,
            pages_unshared: pages / 2,
            saved_bytes: pages,
            ..GuestStatus::default()
        };
        let unserved = |uid| Unserved {
            uid,
            ..Unserved::default()
        };
        let all = Status {
            knobs: knobs(),
            pages_shared: 100,
            pages_sharing: 100,
            pages_volatile: 9,
            store_bytes: 1,
            metadata_bytes: 1,
            cpu_seconds: 1.0,
            window_max_us: 1,
            guests: vec![guest(7, 40), guest(8, 100), guest(7, 60)],
            unserved: vec![unserved(8), unserved(7)],
            ..Status::default()
        };
        let viewer = |uid, domain: &str| Viewer {
            uid,
            domain: domain.to_owned(),
        };
        let own = all.of_user(&viewer(7, "uid:7"));
        let expected = Status {
            only_user: Some(7),
            knobs: knobs(),
            pages_sharing: 50,
            pages_unshared: 50,
            saved_bytes: 100,
            net_saved_bytes: 100,
            guests: vec![guest(7, 40), guest(7, 60)],
            unserved: vec![unserved(7)],
            ..Status::default()
        };
        assert_eq!(own, expected);
        let mut shared = guest(7, 1);
        let alone = |code| WhyNot {
            code,
            pages: 0,
            why: String::new(),
        };
        shared.reasons = vec![alone(WhyNotCode::Alone), alone(WhyNotCode::Busy)];
        for (domain, seen) in [("uid:7", 2), ("name:team", 1)] {
            shared.domain = domain.into();
            let all = Status {
                guests: vec![shared.clone()],
                ..Status::default()
            };
            assert_eq!(
                all.of_user(&viewer(7, "uid:7")).guests[0].reasons.len(),
                seen,
                "{domain}"
            );
        }
        let none = Status {
            only_user: Some(9),
            knobs: knobs(),
            ..Status::default()
        };
        assert_eq!(all.of_user(&viewer(9, "uid:9")), none);
        let tenant = |domain: &str| GuestStatus {
            domain: domain.into(),
            ..guest(7, 1)
        };
        let all = Status {
            guests: vec![tenant("cgroup:1/a"), tenant("cgroup:2/b"), tenant("uid:7")],
            unserved: vec![unserved(7)],
            ..Status::default()
        };
        for (domain, guests, unserved) in [
            ("cgroup:1/a", 2, 0),
            ("cgroup:3/a", 1, 0),
            ("uid:7", 1, 1),
            ("", 1, 1),
        ] {
            let seen = all.of_user(&viewer(7, domain));
            let counts = (seen.guests.len(), seen.unserved.len());
            assert_eq!(
                counts,
                (guests, unserved),
                "a tenant of one uid in {domain:?}"
            );
        }
    }
}
