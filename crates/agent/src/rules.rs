//! Which memory is offered for programs that offer nothing.

use sys::mapping::{Access, Attributes};
use sys::vma::{Told, Vma};

use crate::config::config;

/// The smallest mapping that is offered.
const LEAST: usize = 64 << 10;

/// Memory that is left alone.
struct Rule {
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "it is for readers; a test reads it")
    )]
    what: &'static str,
    is: Is,
}

/// How it is known.
enum Is {
    /// By the mapping.
    Mapping(fn(&Vma) -> bool),
    /// By the mapping, if no other of its kind lies beside it without a gap.
    Lone(fn(&Vma) -> bool),
    /// By a flag that is not known to survive a replacement, or a protection key.
    Strange,
    /// By the flags that are known.
    Flagged(fn(&Attributes) -> bool),
}

use Is::{Flagged, Lone, Mapping, Strange};

const fn rule(what: &'static str, is: Is) -> Rule {
    Rule { what, is }
}

/// The rules: what one of them says is not offered.
const RULES: &[Rule] = &[
    rule("shared, or of a file", Mapping(|vma| !vma.is_anonymous())),
    rule(
        "not to be read and written, or executable",
        Mapping(|vma| vma.access() != Access::ReadWrite),
    ),
    rule(
        "smaller than 64 KiB, and no part of a greater one that was divided",
        Lone(|vma| vma.end - vma.start < LEAST),
    ),
    rule(
        "growing stacks; wiped on fork; sealed; droppable; with a key; the agent's own",
        Strange,
    ),
    rule("locked", Flagged(|told| told.locked)),
    rule(
        "stacks of threads: no huge pages",
        Flagged(|told| told.nohuge),
    ),
    rule(
        "advised to be of huge pages, unless --any-huge",
        Flagged(|told| told.huge && !config().any_huge),
    ),
];

/// Whether a mapping may be offered as far as its flags are not needed to tell; `beside`: whether it [`touch`]es another one.
pub(crate) fn looks_fit(vma: &Vma, beside: bool) -> bool {
    is_of_kind(vma)
        && !RULES
            .iter()
            .any(|rule| matches!(rule.is, Lone(is) if !beside && is(vma)))
}

fn is_of_kind(vma: &Vma) -> bool {
    !RULES
        .iter()
        .any(|rule| matches!(rule.is, Mapping(is) if is(vma)))
}

/// Whether two mappings of a kind that is offered lie side by side: a greater one was divided. What was merged, and is whole again, has an
/// `anon_vma` of its own, and the kernel never joins it to what was beside it.
pub(crate) fn touch(one: &Vma, next: &Vma) -> bool {
    one.end == next.start && is_of_kind(one) && is_of_kind(next)
}

/// Whether a mapping with these attributes, and no strange flag, may be offered.
pub(crate) fn admits(told: &Attributes) -> bool {
    !RULES
        .iter()
        .any(|rule| matches!(rule.is, Flagged(is) if is(told)))
}

/// Whether a mapping may be offered.
pub(crate) fn fits(vma: &Vma, beside: bool, told: Option<&Told>) -> bool {
    let strange = RULES.iter().any(|rule| matches!(rule.is, Strange)) && told.is_none();
    looks_fit(vma, beside) && !strange && told.is_none_or(|told| admits(&told.attributes))
}

#[cfg(test)]
pub(super) mod tests {
    use std::ops::Range;

    use wire::PAGE_BYTES;

    use super::*;

    /// A mapping that no rule leaves out.
    pub(crate) fn anonymous(range: Range<usize>) -> Vma {
        Vma {
            start: range.start,
            end: range.end,
            read: true,
            write: true,
            execute: false,
            shared: false,
            file: false,
            id: sys::vma::FileId::default(),
        }
    }

    #[test]
    fn each_rule_leaves_something_out_that_the_others_admit() {
        let vma = anonymous(0x10_0000..0x20_0000);
        let told = Told {
            attributes: Attributes::default(),
            tracked: false,
        };
        let flagged = |change: fn(&mut Attributes)| {
            let mut told = told;
            change(&mut told.attributes);
            (vma, Some(told))
        };
        let mapped = |change: fn(&mut Vma)| {
            let mut vma = vma;
            change(&mut vma);
            (vma, Some(told))
        };
        assert!(fits(&vma, false, Some(&told)));
        let left_out = [
            mapped(|vma| vma.file = true),
            mapped(|vma| vma.execute = true),
            mapped(|vma| vma.end = vma.start + LEAST - PAGE_BYTES),
            (vma, None),
            flagged(|told| told.locked = true),
            flagged(|told| told.nohuge = true),
            flagged(|told| told.huge = true),
        ];
        assert_eq!(left_out.len(), RULES.len());
        for ((vma, told), rule) in left_out.iter().zip(RULES) {
            assert!(!fits(vma, false, told.as_ref()), "{}", rule.what);
        }
    }
    #[test]
    fn a_part_of_a_mapping_that_was_divided_may_be_small() {
        let part = |from: usize, pages: usize| anonymous(from..from + pages * PAGE_BYTES);
        let (one, next) = (part(0x10_0000, 1), part(0x10_1000, 2));
        assert!(touch(&one, &next) && !touch(&next, &one));
        assert!(!touch(&one, &part(0x10_2000, 1)), "a gap");
        let mut file = next;
        file.file = true;
        assert!(!touch(&one, &file));
        assert!(looks_fit(&next, true) && !looks_fit(&next, false));
        assert!(!looks_fit(&file, true));
    }
}
