//! KSM as a contender, behind the guard of its knobs.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use sys::ksm::{Ksm, Tuning};
use sys::usage;

use super::error::BenchError;
use super::measure::Contender;
use crate::ksm::guard::{GuardError, KsmGuard, watchdog};
use crate::output::say;

/// Guards KSM's knobs, if this comparison has to turn any: KSM is to be measured, or it runs and
/// would merge beside PageONE.
///
/// # Errors
/// KSM is wanted and there is none, or the knobs cannot be turned.
pub(super) fn guard(wanted: bool, exe: &Path) -> anyhow::Result<Option<KsmGuard>> {
    guard_of(&Ksm::default(), wanted, &|| watchdog(exe))
}

/// The same where KSM may be left out: whether it can be measured, and the guard. A KSM that runs is stopped in any case: it would
/// merge the guests of the other engines too.
///
/// # Errors
/// Another bench turns the knobs, or KSM runs and cannot be stopped.
pub(super) fn guard_if_able(exe: &Path) -> anyhow::Result<(bool, Option<KsmGuard>)> {
    guard_of_able(&Ksm::default(), &|| watchdog(exe))
}

fn guard_of(
    ksm: &Ksm,
    wanted: bool,
    watchdog: &dyn Fn() -> Command,
) -> anyhow::Result<Option<KsmGuard>> {
    if !ksm.exists() {
        return match wanted {
            true => bail!("this kernel has no KSM: measure --engines pageone"),
            false => Ok(None),
        };
    }
    if !wanted && ksm.number("run")? == 0 {
        return Ok(None);
    }
    match KsmGuard::take(ksm.clone(), watchdog()) {
        Err(GuardError::Ksm(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
            bail!("turning KSM takes root: {error}")
        }
        guard => Ok(Some(guard?)),
    }
}

fn guard_of_able(
    ksm: &Ksm,
    watchdog: &dyn Fn() -> Command,
) -> anyhow::Result<(bool, Option<KsmGuard>)> {
    match guard_of(ksm, true, watchdog) {
        Ok(guard) => Ok((true, guard)),
        Err(error) if matches!(error.downcast_ref(), Some(GuardError::Taken)) => Err(error),
        Err(error) => {
            let guard = guard_of(ksm, false, watchdog)
                .context("KSM runs and would merge beside the engines")?;
            say(&format!("KSM is left out: {error:#}"));
            Ok((false, guard))
        }
    }
}

/// KSM, with knobs of the bench's choice.
#[derive(Debug)]
pub(super) struct KsmContender {
    ksm: Ksm,
    name: &'static str,
    thread: u32,
}

impl KsmContender {
    /// KSM of this machine, stopped and tuned; `name` is its name in the rows. The caller holds a [`KsmGuard`].
    ///
    /// # Errors
    /// The kernel has no KSM, or no advisor if that was asked for, or this user may not turn it.
    pub(super) fn new(ksm: Ksm, name: &'static str, tuning: Tuning) -> Result<Self, BenchError> {
        let thread = usage::kernel_thread("ksmd").map_err(BenchError::Ksm)?;
        let thread = thread.ok_or_else(|| {
            let why =
                "its thread ksmd cannot be seen from this PID namespace: run this on the host";
            BenchError::Ksm(io::Error::new(io::ErrorKind::NotFound, why))
        })?;
        ksm.write("run", "0").map_err(BenchError::Ksm)?;
        ksm.tune(tuning).map_err(BenchError::Ksm)?;
        Ok(Self { ksm, name, thread })
    }
}

impl Contender for KsmContender {
    fn name(&self) -> &'static str {
        self.name
    }

    fn threads(&self) -> u16 {
        1
    }

    fn equip(&self, _: &mut Command) {}

    fn launcher(&self) -> Vec<OsString> {
        ["run", "--backend", "ksm", "--"]
            .map(OsString::from)
            .to_vec()
    }

    fn allow(&mut self) -> Result<(), BenchError> {
        self.ksm.write("run", "1").map_err(BenchError::Ksm)
    }

    fn has_begun(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    fn is_done(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    fn process(&self) -> Option<u32> {
        Some(self.thread)
    }

    fn relax(&mut self) -> Result<(), BenchError> {
        Ok(())
    }
}

impl Drop for KsmContender {
    fn drop(&mut self) {
        let _ = self.ksm.write("run", "0");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ksm::guard::tests::fake;
    use crate::watchdog::tests::cat;
    use std::fs;

    #[test]
    fn ksm_is_left_out_only_where_it_stands_still() {
        let (folder, ksm) = fake();
        let (able, guard) = guard_of_able(&ksm, &cat).unwrap();
        assert!(able && guard.is_some());
        let taken = guard_of_able(&ksm, &cat).unwrap_err();
        assert!(taken.to_string().contains("another bench"), "{taken}");
        drop(guard);
        // A knob that no user can save, root neither.
        let knob = folder.path().join("pages_to_scan");
        fs::remove_file(&knob).unwrap();
        fs::create_dir(&knob).unwrap();
        let runs = guard_of_able(&ksm, &cat).unwrap_err();
        assert!(runs.to_string().contains("would merge beside"), "{runs}");
        ksm.write("run", "0").unwrap();
        let (able, guard) = guard_of_able(&ksm, &cat).unwrap();
        assert!(!able && guard.is_none());
    }
}
