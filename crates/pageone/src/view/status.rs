//! `pageone status`: the counters of a running daemon, as a table or as JSON.

mod table;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use sys::foreign::plain_json;
use sys::ksm::Ksm;
use wire::{GuestStatus, Reply, Request, Status};

use crate::output::print;
use crate::{client, human, names, paths};

/// The longest wait for the daemon.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// Print JSON, one object a look
    #[arg(long)]
    json: bool,
    /// Look again and again, this far apart
    #[arg(long, value_name = "TIME", value_parser = human::period)]
    watch: Option<Duration>,
    /// Show the saving over the past TIME, like 1h (the daemon keeps a month)
    #[arg(long, value_name = "TIME", value_parser = human::span, conflicts_with = "watch")]
    since: Option<Duration>,
    /// Draw that saving as a chart of 80 columns
    #[arg(long, requires = "since", conflicts_with = "json")]
    plot: bool,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let socket = paths::served(args.socket.as_deref())?;
    if let Some(since) = args.since {
        return print(&super::history::text(&socket, since, args.plot, args.json)?);
    }
    loop {
        let status = ask(&socket)?;
        show(args, &status)?;
        let Some(pause) = args.watch else {
            return Ok(());
        };
        std::thread::sleep(pause);
    }
}

/// A daemon that tells this user nothing, and why.
#[derive(Debug, thiserror::Error)]
#[error("no status: {0}")]
pub(crate) struct Refused(pub(crate) String);

/// The counters of the daemon at `socket`, with the names of its guests.
///
/// # Errors
/// No daemon, or it refuses.
pub(crate) fn ask(socket: &Path) -> Result<Status> {
    answered(client::ask(socket, &Request::Status, PATIENCE)?)
}

/// As [`ask`], without words while the daemon is silent.
///
/// # Errors
/// As [`ask`].
pub(crate) fn ask_quietly(socket: &Path) -> Result<Status> {
    let reply = client::ask_quietly(socket, &Request::Status, PATIENCE)?;
    answered(reply)
}

fn answered(reply: Reply) -> Result<Status> {
    match reply {
        Reply::Status(mut status) => {
            complete(&mut status);
            Ok(*status)
        }
        Reply::Refused(why) => Err(Refused(why).into()),
        _ => bail!(client::UNEXPECTED),
    }
}

/// Sorts a status by the numbers of its guests, and adds to it what the daemon does not look at: their names, and the saving of KSM.
pub(crate) fn complete(status: &mut Status) {
    status.guests.sort_by_key(|guest| guest.pid);
    let guests = status.guests.iter();
    let guests = guests.map(|guest| (guest.pid, guest.uid, &guest.comm));
    let names = names::of(&guests.collect::<Vec<_>>());
    for (guest, name) in status.guests.iter_mut().zip(names) {
        guest.name = name;
    }
    status.ksm_saved_bytes = Ksm::default().saved_bytes().unwrap_or(0);
}

/// The name of a guest for people: that of its machine, if it has one.
pub(crate) fn shown(guest: &GuestStatus) -> String {
    let name = guest.name.as_ref().unwrap_or(&guest.comm).to_string();
    match name.is_empty() {
        true => "(no name)".to_owned(),
        false => name,
    }
}

fn show(args: &Args, status: &Status) -> Result<()> {
    let text = match args.json {
        true => plain_json(&serde_json::to_string(status)?) + "\n",
        false => table::table(status),
    };
    let clear = args.watch.is_some() && !args.json && std::io::stdout().is_terminal();
    let begin = if clear { "\x1b[H\x1b[2J" } else { "" };
    print(&format!("{begin}{text}"))
}
