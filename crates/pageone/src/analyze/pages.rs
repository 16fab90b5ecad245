//! The pages of all processes in one list, in which equal ones are neighbours.

use std::collections::BTreeMap;

use super::parts::{Kind, Part};
use super::print::Print;
use super::targets::Target;

/// The number of a process that the rules refuse.
pub(crate) const REFUSED: u32 = u32::MAX;

/// A page of a process. In order, all copies of a content are neighbours, and among them those of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Page {
    pub(crate) print: u64,
    pub(crate) domain: u32,
    pub(crate) target: u32,
    pub(crate) node: u32,
    pub(crate) kind: Kind,
    /// Whether KSM may merge it.
    pub(crate) mergeable: bool,
}

/// A number for each process's domain.
pub(crate) fn domains(targets: &[Target]) -> Vec<u32> {
    let mut names = BTreeMap::new();
    let mut number = |target: &Target| {
        let next = u32::try_from(names.len()).unwrap_or(REFUSED);
        let name = target.domain.domain()?;
        Some(*names.entry(name.clone()).or_insert(next))
    };
    targets
        .iter()
        .map(|target| number(target).unwrap_or(REFUSED))
        .collect()
}

/// The pages that were read, in order.
pub(crate) fn in_order(parts: &[Part], domains: &[u32]) -> Vec<Page> {
    let of = |part: &Part| {
        let (target, kind, mergeable) = (part.target, part.kind, part.mergeable);
        let domain = domains[target as usize];
        let page = move |&Print { node, print, .. }: &Print| Page {
            domain,
            print,
            target,
            node,
            kind,
            mergeable,
        };
        part.prints.iter().map(page).collect::<Vec<_>>()
    };
    let mut pages: Vec<_> = parts.iter().flat_map(of).collect();
    pages.sort_unstable();
    pages
}
