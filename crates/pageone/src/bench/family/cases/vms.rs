//! Virtual machines with a system of their own, booted one after another.
//!
//! ```text
//!  bench ── work ───────▶ third serial line ▶ the guest's /init
//!        ◀─ ready, once ─                     boots, fills files
//!        ◀─ DIGEST MS ───                     verifies all, rewrites some, writes more and deletes it
//! ```
//!
//! The digest follows from the number of the turn, so one machine alone, without any engine, tells what is right.

use super::{Case, Variant};
use crate::bench::error::BenchError;
use crate::bench::family::machine::{QEMU, Reporting};
use crate::bench::family::session::{Session, is_installed, right_answers};

/// Turns of work that each machine makes.
const TURNS: usize = 3;

pub(in crate::bench::family) const CASE: Case = Case {
    name: "vms",
    question: "QEMU machines that boot one after another and hold the same files: what do they take, what does it cost, how fast do they work, and what is left when they have freed memory?",
    variants: &[
        Variant::of("plain", |session| run(session, Reporting::Off)).full(),
        Variant::of("free page reporting", |session| run(session, Reporting::On)).full(),
    ],
};

fn run(session: &mut Session<'_>, reporting: Reporting) -> Result<(), BenchError> {
    let words = session.vm.words(session.setting.guest_mib, reporting)?;
    session.vm.check()?;
    if !is_installed(QEMU) {
        return Err(BenchError::NoProgram(QEMU));
    }
    let right = right_answers(&words, TURNS)?;
    session.begin()?;
    for _ in 0..session.setting.guests {
        session.launch(&words, 1)?;
    }
    session.rest("used_mib")?;
    session.turns(&right)?;
    session.rest("left_mib")?;
    session.part()
}
