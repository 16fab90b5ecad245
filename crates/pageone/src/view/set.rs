//! `pageone set KEY=VALUE…`: turns knobs of a running daemon, all or none.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use wire::{Reply, Request, Setting};

use crate::{client, knobs, paths};

/// `run=2` copies every merged page: that takes as long as the memory is large.
const PATIENCE: Duration = Duration::from_secs(3600);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The daemon's socket
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Give all merged pages private copies first, and go on as before afterwards: what may be
    /// shared with what cannot change while pages are shared
    #[arg(long)]
    unmerge: bool,
    #[arg(required = true, value_name = "KEY=VALUE", value_parser = knobs::pair, help = knobs::pairs())]
    settings: Vec<Setting>,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let socket = paths::served(args.socket.as_deref())?;
    let request = match args.unmerge {
        true => Request::SetUnmerged(args.settings.clone()),
        false => Request::Set(args.settings.clone()),
    };
    match client::ask(&socket, &request, PATIENCE)? {
        Reply::Done => Ok(()),
        Reply::Refused(why) => bail!("not set: {why}"),
        _ => bail!("the daemon replied with something else"),
    }
}
