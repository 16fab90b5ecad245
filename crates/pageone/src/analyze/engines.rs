//! The saving of each engine as it is configured: PageONE by its daemon's knobs, KSM by the kernel's.
//!
//! ```text
//! use_zero_pages      on: zeros take no frame; off: they are a content like any other
//! merge_across_nodes  off: each node has a frame of its own for a content
//! max_page_sharing    so many pages share one frame: n equal pages keep ⌈n / max⌉
//! ```
//!
//! The savable bytes know none of these: they are all that there is to save in the domains.

use serde::Serialize;
use sys::ksm::Ksm;
use wire::KnobValues;

use super::pages::{Page, REFUSED};
use super::print::{PAGE, ZEROS};
use super::rules::Origin;

/// What an engine would save.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Engine {
    pub(crate) name: String,
    pub(crate) bytes: u64,
}

/// How an engine merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Knobs {
    use_zero_pages: bool,
    merge_across_nodes: bool,
    max_page_sharing: u64,
}

impl From<&KnobValues> for Knobs {
    fn from(values: &KnobValues) -> Self {
        Self {
            use_zero_pages: values.use_zero_pages,
            merge_across_nodes: values.merge_across_nodes,
            max_page_sharing: values.max_page_sharing.into(),
        }
    }
}

impl From<&Ksm> for Knobs {
    /// A kernel without NUMA lacks a knob, and so do older ones: then it is as the kernel begins.
    fn from(ksm: &Ksm) -> Self {
        let value = |name, default| ksm.number(name).unwrap_or(default);
        Self {
            use_zero_pages: value("use_zero_pages", 0) == 1,
            merge_across_nodes: value("merge_across_nodes", 1) == 1,
            max_page_sharing: value("max_page_sharing", 256),
        }
    }
}

impl Knobs {
    /// Bytes saved of pages in order: of those that `may`, and share where they are the `same`. Each content stands for `scale` of
    /// them, but for zeros.
    fn saved(
        self,
        pages: &[Page],
        scale: u64,
        same: fn(&Page, &Page) -> bool,
        may: fn(&Page) -> bool,
    ) -> u64 {
        let mut nodes = Vec::new();
        let contents = pages.chunk_by(same);
        let saved = |copies: &[Page]| {
            let print = copies.first().map_or(ZEROS, |page| page.print);
            nodes.clear();
            nodes.extend(copies.iter().filter(|page| may(page)).map(|page| page.node));
            let times = if print == ZEROS { 1 } else { scale };
            self.saved_of(print, &mut nodes) * PAGE * times
        };
        contents.map(saved).sum()
    }

    /// Frames saved of the copies of one content, by the nodes that these are on.
    fn saved_of(self, print: u64, nodes: &mut [u32]) -> u64 {
        let all = nodes.len() as u64;
        if print == ZEROS && self.use_zero_pages {
            return all;
        }
        if self.merge_across_nodes {
            nodes.fill(0);
        }
        nodes.sort_unstable();
        let frames = |same: &[u32]| (same.len() as u64).div_ceil(self.max_page_sharing.max(1));
        all - nodes.chunk_by(|a, b| a == b).map(frames).sum::<u64>()
    }
}

/// The engines of this machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Engines {
    pageone: Knobs,
    ksm: Knobs,
    ksm_runs: bool,
}

impl Engines {
    /// PageONE with these knobs, and KSM as it is.
    pub(crate) fn new(pageone: &KnobValues, ksm: &Ksm) -> Self {
        Self {
            pageone: pageone.into(),
            ksm: ksm.into(),
            ksm_runs: ksm.runs(),
        }
    }

    /// What they would save of pages in order. With several nodes PageONE is also told of inside them.
    pub(crate) fn saving(
        &self,
        pages: &[Page],
        origin: &Origin,
        has_nodes: bool,
        scale: u64,
    ) -> Vec<Engine> {
        let in_domains = |knobs: Knobs| {
            let same = |a: &Page, b: &Page| (a.domain, a.print) == (b.domain, b.print);
            knobs.saved(pages, scale, same, |page| page.domain != REFUSED)
        };
        let of_all = |knobs: Knobs, may| {
            let same = |a: &Page, b: &Page| a.print == b.print;
            knobs.saved(pages, scale, same, may)
        };
        let engine = |name: &str, bytes| Engine {
            name: name.to_owned(),
            bytes,
        };
        let mut engines = vec![engine(&origin.engine(), in_domains(self.pageone))];
        if has_nodes && self.pageone.merge_across_nodes {
            let inside = Knobs {
                merge_across_nodes: false,
                ..self.pageone
            };
            let bytes = in_domains(inside);
            engines.push(engine("PageONE, the same, inside NUMA nodes", bytes));
        }
        let (name, offered) = match self.ksm_runs {
            true => (
                "KSM as it runs now",
                of_all(self.ksm, |page| page.mergeable),
            ),
            false => ("KSM as it is now: off", 0),
        };
        engines.extend([
            engine(
                "PageONE, one domain for all",
                of_all(self.pageone, |_| true),
            ),
            engine(name, offered),
            engine(
                "KSM, if all programs offered all memory",
                of_all(self.ksm, |_| true),
            ),
        ]);
        engines
    }
}

#[cfg(test)]
mod tests {
    use super::super::parts::Kind;
    use super::*;

    /// KSM's folder with these files.
    fn ksm(files: &[(&str, &str)]) -> Engines {
        let folder = tempfile::tempdir().unwrap();
        for (name, value) in files {
            std::fs::write(folder.path().join(name), value).unwrap();
        }
        Engines::new(&KnobValues::default(), &Ksm::at(folder.path()))
    }

    /// Pages by content, domain and node; those of domain 0 are offered to KSM.
    fn pages(all: &[(u64, u32, u32)]) -> Vec<Page> {
        let page = |&(print, domain, node): &(u64, u32, u32)| Page {
            print,
            domain,
            target: domain,
            node,
            kind: Kind::Anonymous,
            mergeable: domain == 0,
        };
        let mut pages: Vec<_> = all.iter().map(page).collect();
        pages.sort_unstable();
        pages
    }

    fn saving(engines: &Engines, all: &[(u64, u32, u32)]) -> Vec<(String, u64)> {
        let told = engines.saving(&pages(all), &Origin::Users, true, 1);
        told.into_iter()
            .map(|engine| (engine.name, engine.bytes / PAGE))
            .collect()
    }

    fn of(saving: &[(String, u64)], begin: &str) -> u64 {
        let found = saving.iter().find(|(name, _)| name.starts_with(begin));
        found.unwrap_or_else(|| panic!("no {begin}: {saving:?}")).1
    }

    /// Five equal pages on two nodes, three pages of zeros on one, in two domains.
    const PAGES: [(u64, u32, u32); 8] = [
        (7, 0, 0),
        (7, 0, 0),
        (7, 0, 1),
        (7, 1, 0),
        (7, 1, 1),
        (ZEROS, 0, 1),
        (ZEROS, 0, 1),
        (ZEROS, 1, 1),
    ];

    #[test]
    fn ksm_is_taken_as_it_is_configured() {
        const ALL: &str = "KSM, if all";
        for (files, offered, all) in [
            // As the kernel begins: zeros are a content like any other.
            (&[("run", "1")][..], 3, 6),
            (&[("run", "1"), ("use_zero_pages", "1")], 4, 7),
            (&[("run", "1"), ("merge_across_nodes", "0")], 2, 5),
            (&[("run", "1"), ("max_page_sharing", "2")], 2, 3),
            (
                &[
                    ("run", "1"),
                    ("merge_across_nodes", "0"),
                    ("max_page_sharing", "2"),
                ],
                2,
                3,
            ),
            // A frame that no two share is no frame less.
            (&[("run", "1"), ("max_page_sharing", "1")], 0, 0),
        ] {
            let saving = saving(&ksm(files), &PAGES);
            let told = (of(&saving, "KSM as it runs"), of(&saving, ALL));
            assert_eq!(told, (offered, all), "{files:?}");
        }
        let saving = saving(&ksm(&[("run", "0"), ("use_zero_pages", "1")]), &PAGES);
        assert_eq!(
            (of(&saving, "KSM as it is now: off"), of(&saving, ALL)),
            (0, 7)
        );
    }

    #[test]
    fn pageone_is_taken_as_its_daemon_is_configured() {
        let default = KnobValues::default();
        let told = |knobs: KnobValues| {
            let mut engines = ksm(&[]);
            engines.pageone = (&knobs).into();
            let saving = saving(&engines, &PAGES);
            let [domains, one] = ["PageONE, a domain", "PageONE, one domain"];
            (of(&saving, domains), of(&saving, one))
        };
        // Three zeros; of the five pages two and one in their domains, four in one.
        assert_eq!(told(default), (6, 7));
        let zeros = KnobValues {
            use_zero_pages: false,
            ..default
        };
        assert_eq!(told(zeros), (4, 6));
        let across = KnobValues {
            merge_across_nodes: false,
            ..default
        };
        assert_eq!(told(across), (4, 6));
        let sharing = KnobValues {
            max_page_sharing: 2,
            ..default
        };
        assert_eq!(told(sharing), (5, 5));
    }

    #[test]
    fn inside_nodes_is_told_where_that_is_another_figure() {
        let mut engines = ksm(&[]);
        let inside = "PageONE, the same, inside";
        assert_eq!(of(&saving(&engines, &PAGES), inside), 4);
        let of_one = engines.saving(&pages(&PAGES), &Origin::Users, false, 1);
        assert_eq!(of_one.len(), 4);
        engines.pageone.merge_across_nodes = false;
        assert_eq!(saving(&engines, &PAGES).len(), 4);
    }

    #[test]
    fn contents_of_a_sample_stand_for_others_and_zeros_for_themselves() {
        let told = ksm(&[]).saving(&pages(&PAGES), &Origin::Users, false, 16);
        assert_eq!(told[0].bytes, (3 + 16 * 3) * PAGE);
    }
}
