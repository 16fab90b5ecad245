//! `pageone doctor [PID | -- CMD]`: what keeps memory from being merged, why, and what to do about it.
//!
//! Each check finds one thing out and changes nothing. Facts come from where the engine and `run` have them:
//! [`engine::Facilities`], the daemon's status with its reasons, [`crate::run::program`], `/proc`.

mod check;
mod command;
mod host;
mod process;
mod reasons;
mod service;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use sys::foreign::plain_json;

use crate::human;
use crate::view::print;
use check::Report;
use service::Service;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The daemon's socket
    #[arg(long)]
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
            eprintln!("pageone: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn examine(args: &Args) -> Report {
    let service = Service::at(args.socket.as_deref());
    let mut checks = host::checks(service.is_roots);
    checks.extend(service.checks.iter().cloned());
    if let Some(pid) = args.pid {
        checks.extend(process::checks(pid, &service));
    }
    if let Some(name) = args.command.first() {
        checks.push(command::check(name));
    }
    Report::of(checks)
}

fn show(args: &Args, report: &Report) -> Result<()> {
    print(&match args.json {
        true => plain_json(&serde_json::to_string(report)?) + "\n",
        false => report.text(),
    })
}
