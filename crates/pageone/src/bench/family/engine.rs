//! The engines that can be compared.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use sys::ksm::{Ksm, Tuning};

use super::fake::FakeEngine;
use crate::bench::error::BenchError;
use crate::bench::ksm::KsmContender;
use crate::bench::measure::Contender;
use crate::bench::pageone::PageOne;

/// An engine, as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Engine {
    /// Nothing: the guests alone
    None,
    /// KSM with the kernel's defaults: 100 pages every 20 ms
    Ksm,
    /// KSM with its advisor
    KsmAdvisor,
    /// KSM as fast as one core can
    KsmTuned,
    /// PageONE with one worker at work at a time
    #[value(name = "pageone-1")]
    Pageone1,
    /// PageONE with two
    #[value(name = "pageone-2")]
    Pageone2,
    /// Of known saving, time and CPU time
    #[value(hide = true)]
    Fake,
}

impl Engine {
    /// All that are measured at the full scale.
    pub(super) const ALL: [Self; 6] = [
        Self::None,
        Self::Ksm,
        Self::KsmAdvisor,
        Self::KsmTuned,
        Self::Pageone1,
        Self::Pageone2,
    ];
    /// Those that end within seconds.
    pub(super) const NORMAL: [Self; 3] = [Self::None, Self::KsmTuned, Self::Pageone2];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Ksm => "ksm",
            Self::KsmAdvisor => "ksm-advisor",
            Self::KsmTuned => "ksm-tuned",
            Self::Pageone1 => "pageone-1",
            Self::Pageone2 => "pageone-2",
            Self::Fake => "fake",
        }
    }

    pub(super) fn is_pageone(self) -> bool {
        matches!(self, Self::Pageone1 | Self::Pageone2)
    }

    pub(super) fn is_ksm(self) -> bool {
        matches!(self, Self::Ksm | Self::KsmAdvisor | Self::KsmTuned)
    }

    /// Starts it, at rest; PageONE with these `knobs`, as flags of the daemon. For KSM the caller holds the guard of its knobs.
    ///
    /// # Errors
    /// It is not there, or does not start.
    pub(super) fn start(
        self,
        exe: &Path,
        period: Duration,
        knobs: &[&str],
    ) -> Result<Box<dyn Contender>> {
        let ksm = |tuning| KsmContender::new(Ksm::default(), self.name(), tuning);
        Ok(match self {
            Self::None => Box::new(Nothing),
            Self::Ksm => Box::new(ksm(Tuning::Defaults)?),
            Self::KsmAdvisor => Box::new(ksm(Tuning::Advisor)?),
            Self::KsmTuned => Box::new(ksm(Tuning::Fast)?),
            Self::Pageone1 => Box::new(PageOne::start(exe, 1, period, knobs)?),
            Self::Pageone2 => Box::new(PageOne::start(exe, 2, period, knobs)?),
            Self::Fake => Box::new(FakeEngine::start(exe)?),
        })
    }
}

/// The guests alone.
struct Nothing;

impl Contender for Nothing {
    fn name(&self) -> &'static str {
        "none"
    }

    fn threads(&self) -> u16 {
        0
    }

    fn equip(&self, _: &mut Command) {}

    fn allow(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    fn has_begun(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    fn is_done(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    fn process(&self) -> Option<u32> {
        None
    }

    fn relax(&mut self) -> Result<(), BenchError> {
        Ok(())
    }
}
