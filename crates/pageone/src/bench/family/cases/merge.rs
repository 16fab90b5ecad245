//! Clones at rest: 70 % of the pages are the same in all guests.
//!
//! The runs of such pages are long or short, at the same places in all guests or shuffled. Two variants are the experiments of 2017:
//! pages that begin with zeros, and pages that differ in their last eight bytes alone. In the last one guests are children of one image, each with runs of its
//! own at other places and of other lengths.

use super::{Case, Run, Variant, clones};
use crate::bench::content::Content;
use crate::bench::error::BenchError;
use crate::bench::family::fill::Fill;
use crate::bench::family::session::{Session, Until};
use crate::bench::mappings;

pub(super) const CASE: Case = Case {
    name: "merge",
    question: "Guests at rest, 70 % of their pages the same in all: how much comes back, how soon, for how much CPU time?",
    variants: &[
        Variant::of("alike in place", |session| run(session, |content| content)),
        long("shuffled", |session| run(session, shuffled)),
        long("runs of 1", |session| run(session, runs::<1>)),
        scattered("runs of 1, shuffled"),
        scattered("runs of 1, shuffled, many mappings").with_mappings(mappings::PLENTY),
        long("runs of 4", |session| run(session, runs::<4>)),
        long("runs of 4, shuffled", |session| {
            run(session, |content| shuffled(runs::<4>(content)))
        }),
        long("runs of 64", |session| run(session, runs::<64>)),
        long("runs of 64, shuffled", |session| {
            run(session, |content| shuffled(runs::<64>(content)))
        }),
        long("runs of 512", |session| run(session, runs::<512>)),
        long("runs of 512, shuffled", |session| {
            run(session, |content| shuffled(runs::<512>(content)))
        }),
        long("128 zeros first", |session| run(session, zeros_first)),
        long("last 8 bytes", |session| run(session, last_bytes)),
        long("children of one image", |session| {
            let (seed, pages) = (session.setting.seed, session.pages());
            merge(session, Fill::Children { seed, pages })
        }),
    ],
};

/// A variant of the full scale.
const fn long(name: &'static str, run: Run) -> Variant {
    Variant::of(name, run).full()
}

/// Each merged page takes a mapping of its own.
const fn scattered(name: &'static str) -> Variant {
    long(name, |session| {
        run(session, |content| shuffled(runs::<1>(content)))
    })
}

fn shuffled(content: Content) -> Content {
    Content {
        shuffle: true,
        ..content
    }
}

fn runs<const PAGES: u64>(content: Content) -> Content {
    Content {
        run_pages: PAGES,
        ..content
    }
}

fn zeros_first(content: Content) -> Content {
    Content {
        zero_prefix: 128.0,
        ..content
    }
}

fn last_bytes(content: Content) -> Content {
    Content {
        zero_prefix: 1e12,
        ..content
    }
}

/// With what `change` makes of the usual content: runs of 16, at the same places.
fn run(session: &mut Session<'_>, change: fn(Content) -> Content) -> Result<(), BenchError> {
    let content = change(clones(session));
    merge(session, Fill::Runs(content))
}

fn merge(session: &mut Session<'_>, fill: Fill) -> Result<(), BenchError> {
    session.start(fill, session.setting.guests)?;
    session.offer()?;
    session.follow(Until::Settled)?;
    session.saving()
}
