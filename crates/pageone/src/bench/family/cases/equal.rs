//! One page everywhere: the most that sharing can be asked for. Then each page is written once.

use super::{Case, Variant};
use crate::bench::error::BenchError;
use crate::bench::family::fill::Fill;
use crate::bench::family::session::{Session, Until, micros, steps};

pub(super) const CASE: Case = Case {
    name: "equal",
    question: "All pages of all guests are equal: how soon are they one, and what does it cost to break them all?",
    variants: &[Variant::of("", run)],
};

fn run(session: &mut Session<'_>) -> Result<(), BenchError> {
    let fill = Fill::Equal {
        seed: session.setting.seed,
        pages: session.pages(),
    };
    session.start(fill, session.setting.guests)?;
    session.offer()?;
    session.follow(Until::Settled)?;
    session.saving()?;
    let lap = session.order("break")?;
    session.times("break", &lap.writes);
    session.figure("break_cpu_us", micros(lap.cpu_ns) / steps(lap.steps));
    Ok(())
}
