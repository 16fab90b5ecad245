//! Clones at rest: 70 % of the pages are the same in all guests.

use super::{Case, Variant, clones};
use crate::bench::error::BenchError;
use crate::bench::family::fill::Fill;
use crate::bench::family::session::{Session, Until};

pub(super) const CASE: Case = Case {
    name: "merge",
    question: "Guests at rest, 70 % of their pages the same in all, in runs of 16: how much comes back, how soon, for how much CPU time?",
    variants: &[
        Variant {
            name: "alike in place",
            full: false,
            run: |session| run(session, false),
        },
        Variant {
            name: "shuffled",
            full: true,
            run: |session| run(session, true),
        },
    ],
};

fn run(session: &mut Session<'_>, shuffle: bool) -> Result<(), BenchError> {
    let content = clones(session, shuffle);
    session.start(Fill::Runs(content), session.setting.guests)?;
    session.offer()?;
    session.follow(Until::Settled)?;
    session.saving()
}
