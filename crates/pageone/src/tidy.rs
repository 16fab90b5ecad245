//! The end of a command that is interrupted: the folder of its engine does not stay behind.

use std::path::Path;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sys::signals::{SIGINT, SIGTERM, Signals, die_of};

/// SIGINT and SIGTERM wait from here on.
pub(crate) struct Tidy(Signals);

impl Tidy {
    /// To be called before the first thread is started. A signal that is ignored stays so, as in a shell's job in the background.
    ///
    /// # Errors
    /// What sigprocmask(2) and signalfd(2) give.
    pub(crate) fn begin() -> Result<Self> {
        let mut waited = vec![SIGINT, SIGTERM];
        waited.retain(|&signal| !sys::inherited::ignores(signal));
        let signals = Signals::block(&waited);
        signals.map(Self).context("cannot wait for signals")
    }

    /// From here on they remove the folder of an engine's socket, and end this process.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn remove_folder_of(self, socket: &Path) -> Result<()> {
        let folder = socket
            .parent()
            .context("the socket is in no folder")?
            .to_owned();
        let run = move || {
            let signal = self.wait();
            let _ = std::fs::remove_dir_all(&folder);
            die_of(signal);
        };
        let thread = std::thread::Builder::new().name("tidy".to_owned());
        thread.spawn(run).context("cannot start a thread")?;
        Ok(())
    }

    fn wait(&self) -> i32 {
        loop {
            if let Ok(Some(arrived)) = self.0.next() {
                return arrived.signal;
            }
            let mut ready = [PollFd::new(&self.0, PollFlags::IN)];
            if !matches!(poll(&mut ready, None), Ok(_) | Err(Errno::INTR)) {
                return SIGTERM;
            }
        }
    }
}
