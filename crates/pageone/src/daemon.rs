//! `pageone daemon`: the engine of the machine, until SIGTERM; started again by [`keep`] when it ends otherwise.

mod attacher;
mod check;
pub mod config;
pub(crate) mod folder;
mod history;
pub(crate) mod host;
mod keep;
mod lane;
pub(crate) mod listener;
mod log;
mod server;

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use engine::Engine;
use numa::placement::NodeRequest;
use numa::{FakeSpec, Topology};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sys::keeper::{Keeper, Kept};
use sys::signals::{SIGHUP, SIGINT, SIGTERM, Signals};

use attacher::Attacher;
pub(crate) use check::{ConfigCommand, default_policy, policy_of};
use config::Config;
use history::History;
use listener::Listener;
use server::Server;

use crate::knobs::KnobFlags;
use crate::policy::Policy;
use crate::{human, node, paths};

/// The user that stands for all users who have no number in this user namespace.
pub(crate) const OVERFLOW: u32 = 65534;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to listen, whatever PAGEONE_SOCKET says [default: /run/pageone.sock as root, else $XDG_RUNTIME_DIR/pageone.sock]
    #[arg(long)]
    socket: Option<PathBuf>,
    /// The least time in which written pages grow older, for tests that write without pause
    #[arg(long, hide = true, value_name = "TIME", value_parser = humantime::parse_duration)]
    broken_rest: Option<Duration>,
    /// Keep the daemon: start it again when it ends, with the stores of the one before [default: unless systemd does]
    #[arg(long, overrides_with = "no_keep")]
    keep: bool,
    /// Do not keep the daemon: what it merged stays merged when it ends, and the next one starts afresh
    #[arg(long, overrides_with = "keep")]
    no_keep: bool,
    /// Treat parts of memory as NUMA nodes: fake=4, fake=2U, fake=512M
    #[arg(long, value_name = "SPEC")]
    numa: Option<FakeSpec>,
    /// CPUs and memory of this NUMA node, or of the one that fits best by free memory and distance, for the daemon itself
    #[arg(long, value_name = "N|auto")]
    node: Option<NodeRequest>,
    #[command(flatten)]
    files: check::Files,
    #[command(flatten)]
    knobs: KnobFlags,
}

impl Args {
    /// Whether this process is to be the daemon's keeper: where no other one waits for its notes, or by its word.
    fn is_kept_here(&self) -> bool {
        let has_keeper = std::env::var_os("NOTIFY_SOCKET").is_some_and(|name| !name.is_empty());
        self.keep || !self.no_keep && !has_keeper
    }
}

/// Makes system calls of this process fail as `PAGEONE_FAULT` says, in builds with debug assertions.
pub(crate) fn arm_faults() -> Result<()> {
    #[cfg(debug_assertions)]
    if let Some(text) = std::env::var_os("PAGEONE_FAULT") {
        let armed = sys::fault::arm(text.to_str().unwrap_or_default());
        anyhow::ensure!(armed, "PAGEONE_FAULT is not understood");
    }
    Ok(())
}

pub(crate) fn main(args: &Args) -> Result<()> {
    // Before anything else is opened.
    let inherited = sys::keeper::inherited();
    let (config, named) = args.files.config()?;
    start_log(config.log.as_deref())?;
    crate::journal::end_by_panics();
    if args.is_kept_here() {
        match keep::Keeper::new() {
            Ok(keeper) => return keeper.main(&|| args.files.check().map(drop)),
            Err(error) if args.keep => return Err(error),
            Err(error) => tracing::warn!("nothing is kept for the next daemon: {error:#}"),
        }
    }
    arm_faults()?;
    // Before the first thread: each inherits the CPUs, the memory's policy and the mask.
    if let Some(node) = args.node.or(config.node) {
        node::place(node, 0, None).context("cannot run on that node")?;
    }
    let signals = Signals::block(&[SIGTERM, SIGINT, SIGHUP]).context("cannot wait for signals")?;
    let path = paths::socket(args.socket.as_deref().or(config.socket.as_deref()))?;
    let file = args.files.policy(&config);
    let file = file.as_deref();
    let policy = match file {
        Some(path) => Policy::read(path)?,
        None => Policy::here(),
    };
    for path in named.iter().map(PathBuf::as_path).chain(file) {
        tracing::info!("reads {}", path.display());
    }
    let keeper = find_keeper();
    let (listener, mut stores) = listen(inherited, &path, policy.socket_mode(), keeper.as_deref())?;
    let history = History::load(keeper.as_ref(), &mut stores);
    raise_descriptor_limit();
    let options = options(args, &config)?;
    let limits = options.limits;
    let engine = Engine::start(options, keeper.clone().map(|keeper| (keeper, stores)));
    let engine = Arc::new(engine.context("cannot start the engine")?);
    tracing::info!("serving at {}", path.display());
    if let Some(other) = named_elsewhere(&path, std::env::var_os("PAGEONE_SOCKET")) {
        tracing::warn!(
            "PAGEONE_SOCKET names {}, where this daemon does not listen: commands with that variable ask there. Name it by --socket, or \
             unset the variable",
            other.display()
        );
    }
    if rustix::process::geteuid().as_raw() == OVERFLOW {
        tracing::warn!(
            "no agent trusts a daemon of user {OVERFLOW}, which stands for unknown users"
        );
    }
    if let Some(keeper) = &keeper
        && let Err(error) = keeper.ready()
    {
        tracing::warn!("cannot tell that this daemon serves: {error}");
    }
    let server = Server::new(listener, policy, limits, &engine, history);
    let server = server.context("cannot serve")?;
    let attacher = Attacher::start(&path, config.attach)?;
    let mut last = file.map(Path::to_owned);
    let mut again = |server: &mut Server| reload(&args.files, &mut last, server, &attacher);
    server.serve(signals.as_fd(), |server| heed(&signals, server, &mut again))?;
    tracing::info!("stopping");
    host::stop_engine(engine);
    // Its keeper hears of its end before what strangers have locks on is closed.
    if let Err(error) = sys::heir::appoint() {
        tracing::warn!("what is open is closed before this daemon ends: {error}");
    }
    Ok(())
}

/// The socket that a variable names for commands, if it is not the one at which the daemon listens.
fn named_elsewhere(path: &Path, variable: Option<OsString>) -> Option<PathBuf> {
    let named = variable.filter(|named| !named.is_empty())?;
    // The same folder may have several names, as /var/run has.
    let whole = |path: &Path| {
        let path = std::path::absolute(path).ok()?;
        let folder = std::fs::canonicalize(path.parent()?).ok()?;
        Some(folder.join(path.file_name()?))
    };
    let is_same = whole(Path::new(&named)) == whole(path);
    (!is_same).then(|| named.into())
}

/// Reads the policy again, whose file was `last`, and the rules of `[[attach]]`.
fn reload(
    files: &check::Files,
    last: &mut Option<PathBuf>,
    server: &mut Server,
    attacher: &Attacher,
) {
    let config = files.config().map(|(config, _)| config);
    // A file may have been made since, or another be named.
    let named = config.as_ref().ok().and_then(|config| files.policy(config));
    *last = named.or(last.take());
    match last {
        Some(file) => server.read_policy(file),
        None => tracing::warn!("there is no policy file to read: the policy stays as it was"),
    }
    match config {
        Ok(config) => attacher.take(config.attach),
        Err(error) => {
            let why = human::in_a_line(&format!("{error:#}"));
            tracing::error!("the rules of [[attach]] stay as they were: {why}");
        }
    }
}

/// Takes the signals that wait: SIGHUP reads files again. True when another one ends this daemon.
fn heed(
    signals: &Signals,
    server: &mut Server,
    reload: &mut impl FnMut(&mut Server),
) -> std::io::Result<bool> {
    while let Some(arrived) = signals.next()? {
        if arrived.signal != SIGHUP {
            return Ok(true);
        }
        reload(server);
    }
    Ok(false)
}

fn find_keeper() -> Option<Arc<Keeper>> {
    match Keeper::from_env() {
        Ok(keeper) => keeper.map(Arc::new),
        Err(error) => {
            tracing::warn!("nothing is kept for the next daemon: NOTIFY_SOCKET: {error}");
            None
        }
    }
}

/// The former daemon's socket, or a new one; and what else was inherited.
fn listen(
    inherited: Vec<Kept>,
    path: &Path,
    mode: u32,
    keeper: Option<&Keeper>,
) -> Result<(Listener, Vec<Kept>)> {
    let is_listener = |kept: &Kept| kept.name == listener::NAME;
    let (sockets, stores): (Vec<_>, Vec<_>) = inherited.into_iter().partition(is_listener);
    let old = !sockets.is_empty();
    let adopt = |kept: Kept| Listener::adopt(kept.descriptor, path);
    if let Some(listener) = sockets.into_iter().find_map(adopt) {
        return Ok((listener, stores));
    }
    let mut listener = Listener::bind(path, mode)?;
    if let Some(keeper) = keeper {
        let forgotten = if old {
            keeper.forget(listener::NAME)
        } else {
            Ok(())
        };
        match forgotten.and_then(|()| keeper.keep(listener::NAME, listener.as_fd())) {
            Ok(()) => listener.set_kept(),
            Err(error) => tracing::warn!("the socket is not kept: {error}"),
        }
    }
    Ok((listener, stores))
}

fn options(args: &Args, config: &Config) -> Result<engine::Options> {
    let default = engine::Options::default();
    let fake = args.numa.as_ref().or(config.numa.as_ref());
    let emulate = |spec| Topology::live().and_then(|live| live.emulate(spec));
    let topology = fake.map(emulate).transpose();
    Ok(engine::Options {
        knobs: args.knobs.over(config.knobs),
        broken_rest: args.broken_rest.unwrap_or(default.broken_rest),
        limits: config.limits.over_defaults(),
        topology: topology.context("cannot emulate these nodes")?,
        ..default
    })
}

/// Logs to standard error: what the configuration says, else `PAGEONE_LOG`, else `info`.
fn start_log(filter: Option<&str>) -> Result<()> {
    let filter = match filter {
        Some(filter) => config::log_filter(filter),
        None => match std::env::var("PAGEONE_LOG") {
            Ok(filter) => config::log_filter(&filter).map_err(|why| format!("PAGEONE_LOG: {why}")),
            Err(_) => config::log_filter("info"),
        },
    };
    let filter = filter.map_err(anyhow::Error::msg)?;
    let to = log::Log::here();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(to)
        .log_internal_errors(false) // they go by eprintln!, which panics
        .with_ansi(false);
    match to.is_journal() {
        // It notes the time itself.
        true => log.without_time().init(),
        false => log.init(),
    }
    Ok(())
}

/// A guest costs a few descriptors; the usual soft limit of 1024 ends at some hundred guests.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("cannot raise the limit of descriptors: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_names_another_socket_is_found() {
        let named = |variable: &str| named_elsewhere(Path::new("/run/x"), Some(variable.into()));
        assert_eq!(named("/run/y"), Some("/run/y".into()));
        assert_eq!((named("/run/x"), named("")), (None, None));
        assert_eq!(named_elsewhere(Path::new("/run/x"), None), None);
    }
}
