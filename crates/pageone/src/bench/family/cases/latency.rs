//! What a guest feels: the time of single reads and writes before, while and after its memory is merged.

use super::{Case, Variant, clones, work};
use crate::bench::error::BenchError;
use crate::bench::family::fill::Fill;
use crate::bench::family::memory::Lap;
use crate::bench::family::session::{Session, Until};

pub(super) const CASE: Case = Case {
    name: "latency",
    question: "Clones read ten pages anywhere and write one of the first eighth each millisecond: how long do reads and writes take before, while and after memory is merged?",
    variants: &[
        Variant::of("", run),
        Variant::of("throughput of these", |session| {
            pace(session, "access 10 1 0")
        })
        .full(),
        Variant::of("throughput of a batch", |session| pace(session, "batch")).full(),
    ],
};

/// How fast guests work by `job` before their memory is merged, and when it was.
fn pace(session: &mut Session<'_>, job: &str) -> Result<(), BenchError> {
    let content = clones(session);
    session.start(Fill::Runs(content), session.setting.guests)?;
    work(session, job, "work_before_ns")?;
    session.offer()?;
    session.follow(Until::Settled)?;
    session.saving()?;
    work(session, job, "work_ns")
}

fn run(session: &mut Session<'_>) -> Result<(), BenchError> {
    let content = clones(session);
    session.start(Fill::Runs(content), session.setting.guests)?;
    session.order("work access 10 1 1000")?;
    std::thread::sleep(session.phase());
    let before = session.order("lap")?;
    session.offer()?;
    session.follow(Until::Settled)?;
    let during = session.order("lap")?;
    session.saving()?;
    session.follow(Until::Passed(session.phase()))?;
    let after = session.order("work idle")?;
    let phases: [(&str, &str, &Lap); 3] = [
        ("read_before", "write_before", &before),
        ("read_during", "write_during", &during),
        ("read_after", "write_after", &after),
    ];
    for (read, write, lap) in phases {
        session.times(read, &lap.reads);
        session.times(write, &lap.writes);
    }
    Ok(())
}
