//! Nothing to share: what remains is the price.

use super::{Case, Variant, clones};
use crate::bench::content::Content;
use crate::bench::error::BenchError;
use crate::bench::family::fill::Fill;
use crate::bench::family::session::{Session, Until, steps};

pub(super) const CASE: Case = Case {
    name: "unique",
    question: "No two pages are equal, and the guests read all their memory and write a sixteenth of it, again and again: what does it cost, and how much slower are they?",
    variants: &[Variant::of("", run)],
};

fn run(session: &mut Session<'_>) -> Result<(), BenchError> {
    let content = Content {
        dup: 0.0,
        ..clones(session)
    };
    session.start(Fill::Runs(content), session.setting.guests)?;
    session.order("work batch")?;
    std::thread::sleep(session.phase());
    let before = session.order("lap")?;
    session.offer()?;
    session.follow(Until::Passed(session.phase() * 2))?;
    session.saving()?;
    let during = session.order("work idle")?;
    for (name, lap) in [("work_before_ns", before), ("work_ns", during)] {
        session.figure(name, steps(lap.cpu_ns) / steps(lap.steps));
    }
    Ok(())
}
