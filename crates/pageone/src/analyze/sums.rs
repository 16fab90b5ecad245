//! Copies of each content, added up.

use std::collections::BTreeMap;
use std::num::NonZero;

use serde::Serialize;
use sys::foreign::ForeignName;

use crate::head::Head;

use super::engines::{Engine, Engines};
use super::merged::Merged;
use super::pages::{self, Page, REFUSED};
use super::parts::{Kind, Looked, Part};
use super::print::{PAGE, Print, ZEROS};
use super::quick::{QuickMap, QuickSet};
use super::rules::Origin;
use super::savable::{ByNode, OnNode, Savable};
use super::targets::{Found, Target};

/// Groups and pairs that are told.
const TOLD: usize = 10;
/// A content that more processes have is in no pair and no group: the number of pairs grows by its square.
pub(crate) const MOST_IN_PAIRS: usize = 64;
/// Pairs, and groups, that are added up at most.
const MOST_NOTED: usize = 100_000;

/// Processes that have the same contents.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Group {
    pub(crate) pids: Vec<u32>,
    /// Their names, in the same order.
    pub(crate) names: Vec<ForeignName>,
    /// Bytes that these processes, and no others, have in common: what merging them saves.
    pub(crate) bytes: u64,
}

/// Two processes, and the bytes of contents that both have.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Pair {
    pub(crate) pids: [u32; 2],
    /// Their names, in the same order.
    pub(crate) names: [ForeignName; 2],
    pub(crate) bytes: u64,
}

/// A process, what was seen of it, and its share.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) target: Target,
    #[serde(flatten)]
    pub(crate) looked: Looked,
    /// Bytes of pages that merging would replace or share, zeros included.
    pub(crate) shareable: u64,
    /// Of these, bytes that `--any` leaves out: they are advised to be of huge pages.
    #[serde(skip)]
    pub(crate) huge_advised: u64,
    /// Runs of such pages: each is a mapping of its own, and cuts another in two.
    /// Unknown of a sample.
    pub(crate) runs: Option<u64>,
    /// Mappings that it has then, at most: two more for each run, but for zeros. Where private pages of its own lie between runs, one
    /// mapping does for several.
    pub(crate) mappings_needed: Option<u64>,
}

/// The answer.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    #[serde(flatten)]
    pub(crate) head: Head,
    /// Bytes of present private anonymous pages.
    pub(crate) present: u64,
    /// Bytes that are merged already, and no part of the savable ones.
    pub(crate) merged: Merged,
    /// Bytes in memory that PageONE leaves alone: locked, executable, written parts of files' mappings, and so on.
    pub(crate) left_alone: u64,
    /// Bytes of copies that changed between the looks.
    pub(crate) changed: u64,
    /// Bytes that fork or an engine shares already.
    pub(crate) shared_already: u64,
    /// Bytes among them that may be savable: it takes CAP_SYS_ADMIN to know with whom they are shared.
    pub(crate) shared_unknown: u64,
    /// Processes that fit, and that this user may not read.
    pub(crate) unreadable: usize,
    /// By what the domains are.
    pub(crate) policy: Origin,
    /// Inside these domains.
    pub(crate) savable: Savable,
    /// One content of this many was counted.
    pub(crate) sampled: u64,
    /// With 95 % certainty the savable bytes are at most this far off.
    pub(crate) error: u64,
    pub(crate) kinds: BTreeMap<Kind, Savable>,
    /// By trust domain, as the policy gives it.
    pub(crate) domains: BTreeMap<ForeignName, Savable>,
    /// By the NUMA node that pages are on.
    pub(crate) nodes: BTreeMap<u32, OnNode>,
    pub(crate) engines: Vec<Engine>,
    pub(crate) groups: Vec<Group>,
    pub(crate) pairs: Vec<Pair>,
    /// Bytes that contents save between processes that are in no pair and no group, since too many hold them.
    pub(crate) in_many_processes: u64,
    pub(crate) processes: Vec<Row>,
}

impl Report {
    pub(crate) fn new(
        found: &Found,
        looked: Vec<Looked>,
        parts: &[Part],
        copies: u64,
        one_of: NonZero<u64>,
        engines: &Engines,
    ) -> Self {
        let scale = one_of.get();
        let domains = pages::domains(&found.targets);
        let pages = pages::in_order(parts, &domains);
        let mut sums = Sums::default();
        for copies in pages.chunk_by(|a, b| (a.domain, a.print) == (b.domain, b.print)) {
            sums.add(copies, scale);
        }
        let sum = |of: fn(&Looked) -> u64| looked.iter().map(of).sum::<u64>() * PAGE;
        let (present, changed) = (sum(|seen| seen.pages), sum(|seen| seen.changed));
        let shared_already = sum(|seen| seen.shared_already);
        let shared_unknown = sum(|seen| seen.shared_unknown);
        let left_alone = sum(|seen| seen.left_alone);
        let merged = sum(|seen| seen.merged_pageone);
        let merged = Merged {
            pageone: merged,
            pageone_copies: copies * PAGE,
            pageone_saved: merged.saturating_sub(copies * PAGE),
            ksm: sum(|seen| seen.merged_ksm),
        };
        let groups = sums.groups(&found.targets, scale);
        let pairs = sums.pairs(&found.targets, scale);
        let mut named = BTreeMap::new();
        for (target, domain) in found.targets.iter().zip(&domains) {
            if let (Some(name), Some(sum)) = (target.domain.domain(), sums.domains.get(domain)) {
                named.insert(name.clone(), *sum);
            }
        }
        let read = looked.iter().flat_map(|seen| &seen.nodes);
        let read = read.map(|(&node, &pages)| (node, pages));
        let nodes = std::mem::take(&mut sums.nodes).with_read(read);
        let engines = engines.saving(&pages, &found.origin, nodes.len() > 1, scale);
        let rows = rows(found, looked, parts, &domains, &sums.shared, scale);
        Self {
            head: Head::now(1),
            present,
            merged,
            left_alone,
            changed,
            shared_already,
            shared_unknown,
            unreadable: found.unreadable,
            policy: found.origin.clone(),
            savable: sums.all,
            sampled: scale,
            error: sums.error(scale),
            kinds: sums.kinds,
            domains: named,
            nodes,
            engines,
            groups,
            pairs,
            in_many_processes: sums.in_many * PAGE * scale,
            processes: rows,
        }
    }
}

/// Leaves out what the first look has found once only: the second look need not read it.
pub(crate) fn keep_copies(parts: &mut [Part]) {
    let prints = parts.iter().flat_map(|part| &part.prints);
    let mut prints: Vec<_> = prints.map(|print| print.print).collect();
    prints.sort_unstable();
    let copied = |copies: &&[u64]| copies.len() > 1 || copies[0] == ZEROS;
    let copied: QuickSet<_> = prints
        .chunk_by(|a, b| a == b)
        .filter(copied)
        .map(|copies| copies[0])
        .collect();
    for part in parts {
        part.prints.retain(|print| copied.contains(&print.print));
    }
}

/// What is added up over the contents of all domains.
#[derive(Default)]
struct Sums {
    all: Savable,
    kinds: BTreeMap<Kind, Savable>,
    /// By the number of a domain.
    domains: BTreeMap<u32, Savable>,
    nodes: ByNode,
    /// Squares of what each content saves, in pages.
    squares: f64,
    shared: QuickSet<(u32, u64)>,
    groups: QuickMap<Vec<u32>, u64>,
    pairs: QuickMap<[u32; 2], u64>,
    /// Pages that contents save which more processes have.
    in_many: u64,
    /// The processes of a content.
    targets: Vec<u32>,
}

impl Sums {
    /// All copies of one content in one domain, in the order of their processes.
    fn add(&mut self, copies: &[Page], scale: u64) {
        let Some(&Page { domain, print, .. }) = copies.first() else {
            return;
        };
        if domain == REFUSED {
            return;
        }
        let on = copies.iter().map(|page| page.node);
        self.nodes.add_inside(print, on, scale);
        if print == ZEROS {
            for page in copies {
                let kind = self.kinds.entry(page.kind).or_default();
                let domain = self.domains.entry(domain).or_default();
                let node = self.nodes.savable(page.node);
                for sum in [kind, domain, node, &mut self.all] {
                    sum.bytes += PAGE;
                    sum.zeros += PAGE;
                }
            }
            return;
        }
        if copies.len() == 1 {
            return;
        }
        self.shared.insert((domain, print));
        let saved = (copies.len() - 1) as f64;
        self.squares += saved * saved;
        for two in copies.windows(2) {
            let [before, page] = two else { continue };
            let kind = self.kinds.entry(page.kind).or_default();
            let domain = self.domains.entry(domain).or_default();
            let node = self.nodes.savable(page.node);
            for sum in [kind, domain, node, &mut self.all] {
                sum.bytes += PAGE * scale;
                match before.target == page.target {
                    true => sum.within += PAGE * scale,
                    false => sum.between += PAGE * scale,
                }
            }
        }
        let mut targets = std::mem::take(&mut self.targets);
        targets.clear();
        targets.extend(copies.iter().map(|page| page.target));
        targets.dedup();
        match targets.len() {
            0 | 1 => {}
            2..=MOST_IN_PAIRS => self.note(&targets),
            many => self.in_many += many as u64 - 1,
        }
        self.targets = targets;
    }

    /// Notes the processes that have a content in common.
    fn note(&mut self, targets: &[u32]) {
        for (at, &a) in targets.iter().enumerate() {
            for &b in &targets[at + 1..] {
                if self.pairs.len() < MOST_NOTED || self.pairs.contains_key(&[a, b]) {
                    *self.pairs.entry([a, b]).or_default() += 1;
                }
            }
        }
        let saved = targets.len() as u64 - 1;
        if let Some(sum) = self.groups.get_mut(targets) {
            *sum += saved;
        } else if self.groups.len() < MOST_NOTED {
            self.groups.insert(targets.to_vec(), saved);
        }
    }

    /// The half width of the interval of 95 %, in bytes: contents are drawn independently, each with 1/`scale`.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an estimate of an estimate"
    )]
    fn error(&self, scale: u64) -> u64 {
        let scale = scale as f64;
        let deviation = (scale * (scale - 1.0) * self.squares).sqrt();
        (1.96 * deviation) as u64 * PAGE
    }

    fn groups(&mut self, targets: &[Target], scale: u64) -> Vec<Group> {
        let target = |&at: &u32| &targets[at as usize];
        let group = |(members, pages): (Vec<u32>, u64)| Group {
            pids: members.iter().map(target).map(|one| one.pid).collect(),
            names: (members.iter().map(target).map(Target::shown))
                .cloned()
                .collect(),
            bytes: pages * PAGE * scale,
        };
        most(self.groups.drain()).map(group).collect()
    }

    fn pairs(&mut self, targets: &[Target], scale: u64) -> Vec<Pair> {
        let target = |at: u32| &targets[at as usize];
        let pair = |(members, pages): ([u32; 2], u64)| Pair {
            pids: members.map(|at| target(at).pid),
            names: members.map(|at| target(at).shown().clone()),
            bytes: pages * PAGE * scale,
        };
        most(self.pairs.drain()).map(pair).collect()
    }
}

/// Those with most pages that are told; of equal ones those of the first processes.
fn most<M: Ord>(all: impl Iterator<Item = (M, u64)>) -> impl Iterator<Item = (M, u64)> {
    let mut all: Vec<_> = all.collect();
    all.sort_unstable_by(|(one, some), (other, more)| more.cmp(some).then_with(|| one.cmp(other)));
    all.into_iter().take(TOLD)
}

fn rows(
    found: &Found,
    looked: Vec<Looked>,
    parts: &[Part],
    domains: &[u32],
    shared: &QuickSet<(u32, u64)>,
    scale: u64,
) -> Vec<Row> {
    let row = |(target, looked): (&Target, Looked)| Row {
        target: target.clone(),
        mappings_needed: (scale == 1).then_some(looked.mappings),
        looked,
        shareable: 0,
        huge_advised: 0,
        runs: (scale == 1).then_some(0),
    };
    let mut rows: Vec<_> = found.targets.iter().zip(looked).map(row).collect();
    // Where the last of these pages ended, and the last of those that are no zeros.
    let (mut last, mut last_mapped) = (None, None);
    for part in parts {
        let (row, domain) = (
            &mut rows[part.target as usize],
            domains[part.target as usize],
        );
        for &Print { place, print, .. } in &part.prints {
            if domain == REFUSED || print != ZEROS && !shared.contains(&(domain, print)) {
                continue;
            }
            let bytes = if print == ZEROS { PAGE } else { PAGE * scale };
            row.shareable += bytes;
            row.huge_advised += if part.huge_advised { bytes } else { 0 };
            let at = part.start + u64::from(place) * PAGE;
            if let Some(runs) = &mut row.runs
                && last != Some((part.target, at))
            {
                *runs += 1;
            }
            last = Some((part.target, at + PAGE));
            // Zeros are put where they are, without a mapping.
            if print != ZEROS {
                if let Some(needed) = &mut row.mappings_needed
                    && last_mapped != Some((part.target, at))
                {
                    *needed += 2;
                }
                last_mapped = last;
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use sys::ksm::Ksm;
    use wire::KnobValues;

    use super::super::rules::Ruling;
    use super::super::targets::Source;
    use super::*;

    fn found(domains: &[&str]) -> Found {
        let target = |(pid, domain): (u32, &&str)| Target {
            source: Source::Process(pid),
            pid,
            command: "x".into(),
            name: (pid == 2).then(|| "web".into()),
            domain: match *domain {
                "" => Ruling::Refused,
                name => Ruling::Domain(name.into()),
            },
        };
        Found {
            targets: (1..).zip(domains).map(target).collect(),
            unreadable: 0,
            origin: Origin::Users,
        }
    }

    fn part(target: u32, prints: &[u64]) -> Part {
        Part {
            target,
            kind: Kind::Anonymous,
            mergeable: target == 0,
            huge_advised: target == 1,
            shared: false,
            start: 0x10_0000,
            pages: u32::try_from(prints.len()).unwrap(),
            prints: (0..)
                .zip(prints)
                .map(|(place, &print)| Print {
                    place,
                    node: place % 2,
                    print,
                })
                .collect(),
        }
    }

    fn report(domains: &[&str], prints: &[&[u64]], one_of: u64) -> Report {
        let parts: Vec<_> = (0..)
            .zip(prints)
            .map(|(at, prints)| part(at, prints))
            .collect();
        let looked = vec![Looked::default(); domains.len()];
        Report::new(
            &found(domains),
            looked,
            &parts,
            0,
            NonZero::new(one_of).unwrap(),
            &Engines::new(&KnobValues::default(), &Ksm::at("/dev/null")),
        )
    }

    #[test]
    fn copies_within_and_between() {
        // Two zeros; 5 three times in the first process and once in the second; 7 in both; 8 and 9 alone.
        let report = report(&["a", "a"], &[&[0, 5, 5, 5, 8, 7], &[5, 0, 7, 9]], 1);
        let savable = Savable {
            bytes: 6 * PAGE,
            zeros: 2 * PAGE,
            within: 2 * PAGE,
            between: 2 * PAGE,
        };
        assert_eq!(report.savable, savable);
        assert_eq!(report.kinds[&Kind::Anonymous], savable);
        assert_eq!(report.error, 0);
        assert_eq!(report.pairs.len(), 1);
        assert_eq!(
            (report.pairs[0].pids, report.pairs[0].bytes),
            ([1, 2], 2 * PAGE)
        );
        assert_eq!(
            (report.groups[0].pids.as_slice(), report.groups[0].bytes),
            (&[1, 2][..], 2 * PAGE)
        );
        // The name that people know, else the command.
        let names = ["x", "web"].map(ForeignName::from);
        assert_eq!(report.pairs[0].names, names);
        assert_eq!(report.groups[0].names, names);
        // Places are on node 0 and node 1 in turn. Inside nodes the 7 and one 5 save nothing.
        let nodes = [0, 1].map(|node| report.nodes[&node]);
        assert_eq!(nodes.map(|node| node.savable.bytes), [3 * PAGE; 2]);
        assert_eq!(nodes.map(|node| node.inside), [2 * PAGE; 2]);
        assert_eq!(report.engines[1].bytes, 4 * PAGE, "{:?}", report.engines);
        let huge_advised = report.processes.iter().map(|row| row.huge_advised);
        assert_eq!(huge_advised.collect::<Vec<_>>(), [0, 3 * PAGE]);
        let rows: Vec<_> = report
            .processes
            .iter()
            .map(|row| (row.shareable, row.runs))
            .collect();
        // Runs: 0 5 5 5, then 7; and 5 0 7.
        assert_eq!(rows, [(5 * PAGE, Some(2)), (3 * PAGE, Some(1))]);
    }

    #[test]
    fn domains_share_nothing() {
        let report = report(&["a", "b", ""], &[&[5, 6], &[5, 5], &[6, 6]], 1);
        assert_eq!(report.savable.bytes, PAGE);
        assert_eq!(report.savable.within, PAGE);
        let domains: Vec<_> = report
            .domains
            .iter()
            .map(|(name, sum)| (name.raw(), sum.bytes))
            .collect();
        assert_eq!(domains, [("b", PAGE)], "the first has nothing to share");
        assert!(report.pairs.is_empty() && report.groups.is_empty());
        let saved: Vec<_> = report.engines.iter().map(|engine| engine.bytes).collect();
        assert_eq!(saved[..3], [PAGE, 0, 4 * PAGE], "{:?}", report.engines);
        // The policy refuses the third: nothing of it is shared.
        assert_eq!(report.processes[2].shareable, 0);
    }

    #[test]
    fn a_sample_stands_for_all_and_says_how_well() {
        let prints: Vec<_> = (1..=100).collect();
        let report = report(&["a", "a"], &[&prints, &prints], 16);
        assert_eq!(report.savable.bytes, 100 * 16 * PAGE);
        // 1.96 times the root of 16 · 15 · 100.
        assert_eq!(report.error, 303 * PAGE);
        assert_eq!(report.processes[0].runs, None);
    }

    #[test]
    fn tables_are_bounded() {
        let domains = vec!["a"; MOST_IN_PAIRS + 1];
        let prints: Vec<&[u64]> = vec![&[5]; domains.len()];
        let report = report(&domains, &prints, 1);
        assert_eq!(report.savable.between, MOST_IN_PAIRS as u64 * PAGE);
        assert!(report.pairs.is_empty() && report.groups.is_empty());
        assert_eq!(report.in_many_processes, report.savable.between);
        let fewer = self::report(&domains[1..], &prints[1..], 1);
        assert_eq!((fewer.in_many_processes, fewer.groups.len()), (0, 1));
        assert_eq!(fewer.groups[0].pids.len(), MOST_IN_PAIRS);
    }
}
