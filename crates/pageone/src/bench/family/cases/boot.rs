//! Guests that start one after another and live shortly: the saving counts from the first second.

use std::time::{Duration, Instant};

use super::{Case, Variant, clones};
use crate::bench::error::BenchError;
use crate::bench::family::fill::Fill;
use crate::bench::family::session::{Session, Until};

/// So many guests live at a time, once the first is old.
const LIVES: u32 = 4;

/// How exactly the times of births and ends are kept.
const TICK: Duration = Duration::from_millis(100);

pub(super) const CASE: Case = Case {
    name: "boot",
    question: "Clones start one after another and live for two phases each, four at a time: how much of what they could share is shared over their lives?",
    variants: &[Variant::of("", run)],
};

fn run(session: &mut Session<'_>) -> Result<(), BenchError> {
    let content = clones(session);
    let life = session.phase() * 2;
    let births = u32::try_from(session.setting.guests)
        .unwrap_or(u32::MAX)
        .saturating_mul(2);
    // The first guest is filled before time counts: its offer is the begin.
    session.start(Fill::Runs(content), 1)?;
    session.begin()?;
    let began = Instant::now();
    let mut born: Vec<Instant> = Vec::new();
    while born.len() < births as usize || session.living() > 0 {
        let next = u32::try_from(born.len()).unwrap_or(u32::MAX);
        if next < births && began.elapsed() >= life * next / LIVES {
            if next > 0 {
                session.start(Fill::Runs(content), 1)?;
            }
            session.offer_from(session.living() - 1)?;
            born.push(Instant::now());
        }
        let first = born.len() - session.living();
        if born.get(first).is_some_and(|birth| birth.elapsed() >= life) {
            session.end_first()?;
        }
        session.follow(Until::Passed(TICK))?;
    }
    let samples = session.outcome.samples.clone();
    let most = samples
        .iter()
        .map(|sample| sample.ideal_mib)
        .fold(0.0, f64::max);
    session.figure("lived_percent", super::mean_percent(&samples));
    let first = samples
        .iter()
        .find(|sample| sample.saved_mib * 100.0 >= most && most > 0.0);
    if let Some(first) = first {
        session.figure("first_s", first.at_s);
    }
    let cpu = samples.last().map_or(0.0, |sample| sample.cpu_s);
    session.figure("cpu_s", cpu);
    Ok(())
}
