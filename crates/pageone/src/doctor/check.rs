//! A check and the report of all of them.

use std::fmt::Write as _;

use serde::Serialize;
use sys::foreign::Foreign;

use crate::head::Head;
use crate::human;

/// How a check ended. The numbers are exit codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Level {
    /// As it should be.
    #[default]
    Ok = 0,
    /// Less is merged than could be.
    Warn = 1,
    /// Nothing is merged.
    Fail = 2,
}

/// One thing that was found out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    pub(super) check: &'static str,
    pub(super) level: Level,
    /// What was found.
    pub(super) what: String,
    /// Why that matters.
    pub(super) why: Option<&'static str>,
    /// A command that mends it.
    pub(super) fix: Option<String>,
}

impl Check {
    pub(super) fn ok(check: &'static str, what: impl Into<String>) -> Self {
        Self {
            check,
            level: Level::Ok,
            what: what.into(),
            why: None,
            fix: None,
        }
    }

    pub(super) fn warn(check: &'static str, what: impl Into<String>, why: &'static str) -> Self {
        Self {
            level: Level::Warn,
            why: Some(why),
            ..Self::ok(check, what)
        }
    }

    pub(super) fn fail(check: &'static str, what: impl Into<String>, why: &'static str) -> Self {
        Self {
            level: Level::Fail,
            ..Self::warn(check, what, why)
        }
    }

    /// The same, with a command that mends it.
    pub(super) fn fix(self, command: impl Into<String>) -> Self {
        Self {
            fix: Some(command.into()),
            ..self
        }
    }
}

/// All checks, and the worst of their levels.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    head: Head,
    version: &'static str,
    pub(super) level: Level,
    pub(super) checks: Vec<Check>,
}

/// The columns before the text of a check.
const INDENT: usize = 20;
const WIDTH: usize = 80;

impl Report {
    pub(super) fn of(checks: Vec<Check>) -> Self {
        Self {
            head: Head::now(wire::SCHEMA),
            version: env!("CARGO_PKG_VERSION"),
            level: checks
                .iter()
                .map(|check| check.level)
                .max()
                .unwrap_or_default(),
            checks,
        }
    }

    /// For people, in 80 columns as far as commands allow.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for check in &self.checks {
            let level = match check.level {
                Level::Ok => "ok",
                Level::Warn => "warn",
                Level::Fail => "FAIL",
            };
            let mut head = format!("{level:<5} {:<13} ", check.check);
            let what = Foreign(&check.what).to_string();
            let lines = human::wrapped(&what, WIDTH - INDENT).into_iter();
            let why = check.why.map(|why| format!("why: {why}"));
            let why = why.map_or_else(Vec::new, |why| human::wrapped(&why, WIDTH - INDENT));
            let fix = check
                .fix
                .as_ref()
                .map(|fix| format!("fix: {}", Foreign(fix)));
            for line in lines.chain(why).chain(fix) {
                let _ = writeln!(text, "{head}{line}");
                head = " ".repeat(INDENT);
            }
        }
        let count = |level| {
            self.checks
                .iter()
                .filter(|check| check.level == level)
                .count()
        };
        let _ = match (count(Level::Fail), count(Level::Warn)) {
            (0, 0) => writeln!(text, "\nall is well"),
            (fails, warnings) => {
                let warnings = human::count(warnings, "warning");
                writeln!(text, "\n{fails} failed, {warnings}")
            }
        };
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_level_is_the_reports_and_lines_fit() {
        let long = "a text that goes on ".repeat(9);
        let checks = vec![
            Check::ok("kernel", "Linux"),
            Check::warn("daemon", long + "\x1b", "this is why").fix("pageone daemon"),
        ];
        let report = Report::of(checks.clone());
        assert_eq!(report.level, Level::Warn);
        let text = report.text();
        assert!(
            text.starts_with("ok    kernel        Linux\nwarn  daemon        a text"),
            "{text}"
        );
        assert!(
            text.contains("\n                    fix: pageone daemon\n"),
            "{text}"
        );
        assert!(!text.contains('\x1b'), "an escape sequence went through");
        assert!(
            text.lines().all(|line| line.chars().count() <= WIDTH),
            "{text}"
        );
        assert!(text.ends_with("\n0 failed, 1 warning\n"), "{text}");
        let failed = Check::fail("kernel", "old", "why");
        let report = Report::of(vec![failed.clone()]);
        assert!(report.text().ends_with("\n1 failed, 0 warnings\n"));
        assert_eq!(
            Report::of([checks, vec![failed]].concat()).level,
            Level::Fail
        );
        assert!(Report::of(Vec::new()).text().contains("all is well"));
    }
}
