//! An engine inside this process, at a private socket: what `run` uses when there is no daemon,
//! and what the demo shows.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use engine::Engine;

use crate::listener::Listener;
use crate::policy::Policy;
use crate::server::Server;

/// An engine and the thread that admits guests to it.
pub(crate) struct Host {
    engine: Arc<Engine>,
    socket: PathBuf,
    /// The server stops when this end of a pipe is closed.
    stop: Option<OwnedFd>,
    server: Option<JoinHandle<std::io::Result<()>>>,
    _folder: tempfile::TempDir,
}

impl Host {
    /// Starts an engine at a socket that only this user can reach.
    pub(crate) fn start(options: engine::Options) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("pageone-").tempdir();
        let folder = folder.context("cannot make a folder for the socket")?;
        let socket = folder.path().join("pageone.sock");
        let listener = Listener::bind(&socket, 0o600)?;
        let engine = Arc::new(Engine::start(options).context("cannot start the engine")?);
        let server = Server::new(listener, Policy::here(), Arc::clone(&engine));
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
            _folder: folder,
        })
    }

    /// Where guests connect.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
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

/// Stops an engine that nobody else uses any more.
pub(crate) fn stop_engine(engine: Arc<Engine>) {
    match Arc::try_unwrap(engine) {
        Ok(engine) => engine.stop(),
        Err(_) => tracing::error!("the engine is still in use and ends with the process"),
    }
}
