//! Guests in huge pages, whose work is bound by the table of translations (TLB): a page of 4 KiB that leaves a huge page splits it.

use super::{Case, Variant, clones, work};
use crate::bench::content::Content;
use crate::bench::error::BenchError;
use crate::bench::family::fill::Fill;
use crate::bench::family::session::{Session, Until};

pub(super) const CASE: Case = Case {
    name: "huge",
    question: "Guests whose memory lies in huge pages read a byte of any page, each time where the byte before has led: how much slower are they when pages are merged, and how much stays huge?",
    variants: &[
        Variant::of("a tenth alike, thp=auto", |session| run(session, 0.1))
            .with_knobs(&["--thp", "auto"]),
        Variant::of("a tenth alike", |session| run(session, 0.1)).full(),
        Variant::of("seven tenths alike", |session| run(session, 0.7)).full(),
    ],
};

fn run(session: &mut Session<'_>, dup: f64) -> Result<(), BenchError> {
    let content = Content {
        dup,
        run_pages: 1,
        ..clones(session)
    };
    session.start(Fill::Runs(content), session.setting.guests)?;
    session.order("collapse")?;
    session.huge("huge_before_percent")?;
    work(session, "walk", "work_before_ns")?;
    session.offer()?;
    session.follow(Until::Settled)?;
    session.saving()?;
    work(session, "walk", "work_ns")?;
    session.huge("huge_percent")
}
