//! An engine inside this process, at a socket of its own. `run` uses it when there is no daemon,
//! and the demo shows it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use engine::Engine;

use super::folder::Folder;
use super::history::History;
use super::listener::Listener;
use super::server::Server;
use crate::policy::Policy;

/// An engine and the thread that admits guests to it.
pub(crate) struct Host {
    engine: Arc<Engine>,
    socket: PathBuf,
    /// The server stops when this end of a pipe is closed.
    stop: Option<OwnedFd>,
    server: Option<JoinHandle<std::io::Result<()>>>,
    _folder: Option<Folder>,
}

/// A socket in a folder of its own, which is removed with this.
pub(crate) struct Door {
    pub(crate) folder: Folder,
    pub(crate) socket: PathBuf,
    pub(crate) listener: Listener,
}

impl Host {
    /// Starts an engine at a socket, which this process's parent may have opened.
    pub(crate) fn start(
        options: engine::Options,
        socket: PathBuf,
        listener: Listener,
    ) -> Result<Self> {
        listener.take_over()?;
        let limits = options.limits;
        let engine = Arc::new(Engine::start(options, None).context("cannot start the engine")?);
        let policy = Policy::here();
        let server = Server::new(listener, policy, limits, &engine, History::default())?;
        let (end, stop) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let serve = move || server.serve(end.as_fd(), |_| Ok(true));
        let server = thread::Builder::new()
            .name("server".to_owned())
            .spawn(serve)?;
        Ok(Self {
            engine,
            socket,
            stop: Some(stop),
            server: Some(server),
            _folder: None,
        })
    }

    /// Where guests connect.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Starts an engine at a socket that only this user can reach. It is of no use where it gives guests no right to userfaultfd.
    ///
    /// # Errors
    /// As [`Self::start`]; this user has no right to it.
    pub(crate) fn start_able(options: engine::Options) -> Result<Self> {
        able()?;
        let door = Door::open(0o600)?;
        let mut host = Self::start(options, door.socket, door.listener)?;
        host._folder = Some(door.folder);
        Ok(host)
    }

    /// The engine's counters.
    pub(crate) fn status(&self) -> wire::Status {
        self.engine.status()
    }

    /// Ends the server, then the engine.
    pub(crate) fn stop(mut self) -> Result<()> {
        self.stop = None;
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        stop_engine(self.engine);
        Ok(())
    }
}

impl Door {
    /// Opens one as that of this user's daemon is open: root's to all users.
    ///
    /// A program that root starts often becomes another user's (nginx, gosu), and then connects as that user. So a stranger can connect,
    /// too, as to the daemon, and the same holds for him: his own domain, his share of the limits, no other user's counters.
    pub(crate) fn as_of_daemon() -> Result<Self> {
        Self::open(Policy::here().socket_mode())
    }

    /// Where temporary files belong, else where a socket's path is sure to be short enough.
    fn open(mode: u32) -> Result<Self> {
        let run = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
        let others = [Some(PathBuf::from("/tmp")), run.map(PathBuf::from)];
        let first = Self::open_below(&std::env::temp_dir(), mode);
        others.into_iter().flatten().fold(first, |found, folder| {
            // The first error tells of the place that was asked for.
            found.or_else(|error| Self::open_below(&folder, mode).map_err(|_| error))
        })
    }

    fn open_below(place: &Path, mode: u32) -> Result<Self> {
        let folder = Folder::make(place, "pageone-");
        let folder = folder.context("cannot make a folder for the socket")?;
        let socket = folder.path().join(Folder::SOCKET);
        let listener = Listener::bind(&socket, mode)?;
        if mode & 0o006 != 0 {
            // To reach the socket takes no right to list the folder.
            let opened = folder.allow(0o711);
            opened.context("cannot open the socket's folder")?;
        }
        Ok(Self {
            folder,
            socket,
            listener,
        })
    }
}

/// How long an engine may take to stop.
const FAREWELL: Duration = Duration::from_millis(700);

/// Stops an engine, if that can be done soon: else it ends with the process, which does no harm. Guests finish
/// alone what they are at, as when the process is killed.
pub(crate) fn stop_engine(engine: Arc<Engine>) {
    // For good: a process has ended when its last thread has, and one that yields needs a CPU for that, too.
    std::mem::forget(sys::priority::hurry());
    let (done, wait) = mpsc::channel();
    let stop = move || {
        // The lanes have ended, or are at something that does not end soon.
        let mut engine = Some(engine);
        while let Some(shared) = engine.take() {
            match Arc::try_unwrap(shared) {
                Ok(alone) => drop(alone),
                Err(shared) => {
                    thread::sleep(Duration::from_millis(1));
                    engine = Some(shared);
                }
            }
        }
        let _ = done.send(());
    };
    let stopping = thread::Builder::new().name("stop".to_owned()).spawn(stop);
    if stopping.is_err() || wait.recv_timeout(FAREWELL).is_err() {
        tracing::info!("the engine is busy and ends with the process");
    }
}

/// Whether this user's engine can merge the memory of his guests.
///
/// # Errors
/// It cannot, and why.
pub(crate) fn able() -> Result<()> {
    match engine::Facilities::tried().userfaultfd? {
        true => Ok(()),
        false => bail!(
            "this user has no right to userfaultfd, so nothing would be merged: run it as root, or set \
             vm.unprivileged_userfaultfd to 1"
        ),
    }
}
