//! The daemon's knobs, and turning them without waiting.
//!
//! A knob is drawn only if the daemon's status names it, so the list may name knobs that a daemon
//! does not have. `run=2` takes as long as the slowest guest, and guests are stopped here. So a knob
//! is turned by a process of its own, at most one at a time, and its end is asked for later.

use std::process::{Child, Stdio};

use serde_json::Value;

use crate::Random;
use crate::common::{Place, pageone};

struct Knob {
    key: &'static str,
    /// Its name in the status.
    field: &'static str,
    /// Values; one that is there more than once is drawn more often.
    values: &'static [&'static str],
    /// Whether the daemon may say no: some knobs cannot be turned while pages are shared.
    may_refuse: bool,
}

const KNOBS: &[Knob] = &[
    Knob {
        key: "merge_period",
        field: "merge_period_ms",
        values: &["10ms", "20ms", "20ms", "50ms", "50ms", "100ms", "300ms"],
        may_refuse: false,
    },
    Knob {
        key: "run",
        field: "run",
        values: &["1", "1", "1", "0", "2"],
        // run=2 without the memory for it.
        may_refuse: true,
    },
    Knob {
        key: "use_zero_pages",
        field: "use_zero_pages",
        values: &["true", "false"],
        may_refuse: false,
    },
    Knob {
        key: "threads",
        field: "threads",
        values: &["1", "2", "3"],
        may_refuse: false,
    },
    Knob {
        key: "merge_across_nodes",
        field: "merge_across_nodes",
        values: &["true", "false"],
        may_refuse: true,
    },
    Knob {
        key: "max_page_sharing",
        field: "max_page_sharing",
        values: &["2", "3", "16", "256"],
        may_refuse: true,
    },
];

/// A knob that is being turned.
pub(crate) struct Turning {
    child: Child,
    setting: String,
    may_refuse: bool,
}

impl Turning {
    /// Begins to turn a drawn knob of those in `status`.
    pub(crate) fn draw(random: &mut Random, place: &Place, status: &Value) -> Self {
        let known: Vec<&Knob> = KNOBS
            .iter()
            .filter(|knob| !status[knob.field].is_null())
            .collect();
        let knob = known[random.below(known.len())];
        let value = knob.values[random.below(knob.values.len())];
        Self::begin(place, &format!("{}={value}", knob.key), knob.may_refuse)
    }

    /// Begins to turn a knob.
    pub(crate) fn begin(place: &Place, setting: &str, may_refuse: bool) -> Self {
        let mut command = pageone();
        command.arg("set").arg("--socket").arg(place.socket());
        let command = command.arg(setting).stderr(Stdio::piped());
        Self {
            child: command.spawn().unwrap(),
            setting: setting.to_owned(),
            may_refuse,
        }
    }

    /// Whether it is done; a complaint when it was refused without the right to.
    pub(crate) fn poll(&mut self) -> Option<Result<(), String>> {
        let status = self.child.try_wait().unwrap()?;
        if status.success() || self.may_refuse {
            return Some(Ok(()));
        }
        let mut said = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        std::io::Read::read_to_string(&mut stderr, &mut said).unwrap();
        Some(Err(format!("set {}: {status}: {said}", self.setting)))
    }
}

impl Drop for Turning {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
