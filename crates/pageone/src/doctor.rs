//! `pageone doctor [PID | -- CMD]`: the obstacles to merging, their causes, and their remedies.
//!
//! Each check finds one thing out and changes nothing. Facts come from where the engine and `run` have them:
//! [`engine::Facilities`], the daemon's status with its reasons, [`crate::program`], `/proc`.

mod check;
mod command;
mod host;
mod process;
mod reasons;
mod service;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use sys::foreign::plain_json;

use crate::output::{print, say};
use crate::{client, human, paths};
use check::{Check, Report};
use service::Service;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Look at this process, too
    #[arg(value_name = "PID", value_parser = human::process, conflicts_with = "command")]
    pid: Option<u32>,
    /// Look at this command, too; it is not run
    #[arg(last = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// The exit code where there is no report: the others tell of merging.
const OWN_FAILURE: u8 = 3;

/// Looks, prints, and gives 0 where all is well, 1 for warnings, 2 where something fails.
pub(crate) fn main(args: &Args) -> ExitCode {
    let done = crate::daemon::arm_faults().and_then(|()| {
        let report = examine(args);
        show(args, &report)?;
        Ok(report.level)
    });
    match done {
        Ok(level) => ExitCode::from(level as u8),
        Err(error) => {
            say(&format!("pageone: {error:#}"));
            ExitCode::from(OWN_FAILURE)
        }
    }
}

fn examine(args: &Args) -> Report {
    let service = Arc::new(Service::at(args.socket.as_deref()));
    // `daemon` does not heed the variable, and sudo drops it.
    let variable = std::env::var_os("PAGEONE_SOCKET").filter(|path| !path.is_empty());
    let named = args.socket.clone().or(variable.map(PathBuf::from));
    let mut checks = host::checks(service.is_roots);
    checks.extend(service.checks.iter().cloned());
    let pid = args.pid.filter(|_| !service.has_other_numbers);
    if let Some(pid) = pid {
        checks.extend(process::checks_in_time(pid, &service));
    }
    if let Some(name) = args.command.first() {
        checks.push(command::check(name));
    }
    if let Some(socket) = &named {
        let fixes = checks.iter_mut().filter_map(|check| check.fix.as_mut());
        fixes.for_each(|fix| *fix = at_socket(fix, socket));
    }
    // Behind the socket's name, which is another one there.
    if args.pid.is_some() && pid.is_none() {
        let why = "what it tells of a process would be told of another one";
        let other = Check::fail("process", client::OTHER_NUMBERS, why);
        checks.push(other.fix("pageone doctor PID  # where the daemon runs; `ps -eo pid,pidns,comm` has the numbers there"));
    }
    Report::of(checks)
}

/// The commands of PageONE in a line, for the daemon at this socket.
fn at_socket(line: &str, socket: &Path) -> String {
    const VERBS: [&str; 6] = ["attach", "daemon", "doctor", "run", "set", "status"];
    if line.contains("--socket") {
        return line.to_owned();
    }
    let socket = paths::quoted(socket);
    let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
    for at in 1..words.len() {
        if words[at - 1] == "pageone" && VERBS.contains(&words[at].as_str()) {
            words[at].push_str(&format!(" --socket {socket}"));
        }
    }
    words.join(" ")
}

fn show(args: &Args, report: &Report) -> Result<()> {
    print(&match args.json {
        true => plain_json(&serde_json::to_string(report)?) + "\n",
        false => report.text(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_name_the_socket_that_was_named() {
        let at = |line| at_socket(line, Path::new("/tmp/a b"));
        assert_eq!(
            at("pageone detach 7 && pageone attach --any 7  # or: pageone run --any -- CMD"),
            "pageone detach 7 && pageone attach --socket '/tmp/a b' --any 7  # or: pageone run --socket '/tmp/a b' --any -- CMD"
        );
        let others = ["journalctl -u pageone", "pageone doctor --socket /run/x"];
        assert_eq!(others.map(at), others);
        let quoted = ["/a.b", "it's"].map(|path| paths::quoted(Path::new(path)));
        assert_eq!(quoted, ["/a.b", r"'it'\''s'"]);
    }
}
