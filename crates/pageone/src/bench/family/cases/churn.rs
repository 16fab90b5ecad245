//! Clones that rewrite pages at random, with the bytes that were there: the possible saving stays the same.

use super::{Case, Variant, clones};
use crate::bench::error::BenchError;
use crate::bench::family::fill::Fill;
use crate::bench::family::session::{Session, Until, steps};

pub(super) const CASE: Case = Case {
    name: "churn",
    question: "Clones rewrite some of their pages each period of PageONE, at random: how much of the saving holds, and for how much CPU time?",
    variants: &[
        Variant::of("1 %", |session| run(session, 1)).full(),
        Variant::of("5 %", |session| run(session, 5)),
        Variant::of("20 %", |session| run(session, 20)).full(),
        Variant::of("50 %", |session| run(session, 50)),
    ],
};

fn run(session: &mut Session<'_>, percent: u64) -> Result<(), BenchError> {
    let content = clones(session);
    session.start(Fill::Runs(content), session.setting.guests)?;
    session.offer()?;
    session.follow(Until::Settled)?;
    session.saving()?;
    session.order(&format!(
        "work churn {percent} {}",
        session.setting.merge_period_ms
    ))?;
    // The first half lets the saving fall to where it holds.
    session.follow(Until::Passed(session.phase()))?;
    session.order("lap")?;
    let (faults, cpu) = session.used()?;
    let samples = session.follow(Until::Passed(session.phase()))?;
    let (faults_then, cpu_then) = session.used()?;
    let lap = session.order("work idle")?;
    session.figure("held_percent", super::mean_percent(&samples));
    let time = samples.last().zip(samples.first());
    let time = time.map_or(0.0, |(last, first)| last.at_s - first.at_s);
    let used = cpu_then.saturating_sub(cpu).as_secs_f64();
    session.figure("cpu_percent", 100.0 * used / time.max(1e-9));
    session.figure("work_ns", steps(lap.cpu_ns) / steps(lap.steps));
    session.figure(
        "faults_per_write",
        steps(faults_then.saturating_sub(faults)) / steps(lap.steps),
    );
    Ok(())
}
