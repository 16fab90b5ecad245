//! The connection to an engine, and the bell by which other threads call the agent away from it.
//!
//! The socket never blocks: whatever the thread waits for, it waits for the bell too. So a call before which the agent
//! must end waits for no engine, however slow it is.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, Result};
use sys::socket::{self, Peer, Received};
use sys::thread::Bell;
use wire::{Answer, MAX_MESSAGE};

use super::alone::Alone;
use crate::desk::{Desk, Place};
use crate::lock::per_process;
use crate::mappings::whole::thaw_left;
use crate::thread::{Life, Why};

/// A connection that no engine has answered on yet.
pub(crate) struct Link<'a> {
    socket: OwnedFd,
    bell: Bell,
    life: &'a Life,
    alone: &'a Alone,
    desk: &'static Desk,
    /// Who serves at the other end.
    pub(crate) peer: Peer,
}

/// The user that stands for all those who have no number in this user namespace.
const OVERFLOW: u32 = 65534;

/// Whether an engine may be that of a user who has no number here: see [`trust_unmapped`].
static UNMAPPED: AtomicBool = AtomicBool::new(false);

/// Notes that root outside this user namespace, who has no number in it, serves at the path, and that no other user can that is
/// not this process's master already. `pageone attach` knows, who has looked at the path from outside; no word of the environment
/// says so.
#[cfg(target_arch = "x86_64")]
pub(crate) fn trust_unmapped() {
    UNMAPPED.store(true, Ordering::Relaxed);
}

/// Whether an engine of this peer's may read the memory that is offered: root's, or one of the agent's own user.
pub(crate) fn is_trusted(peer: &Peer) -> bool {
    let own = rustix::process::geteuid().as_raw();
    match peer.uid {
        0 => true,
        OVERFLOW => UNMAPPED.load(Ordering::Relaxed),
        user => user == own,
    }
}

impl<'a> Link<'a> {
    /// Connects to the engine at `path`, if it is root's or of the agent's own user: it will read all the memory
    /// that is offered.
    ///
    /// # Errors
    /// `NOENT` and `CONNREFUSED` when no engine serves there, `AGAIN` when too many wait for it, `PERM` when it is
    /// another user's.
    pub(crate) fn connect(path: &CStr, life: &'a Life, alone: &'a Alone) -> Result<Self> {
        let (socket, bell) = (socket::connect_at_once(path)?, Bell::new()?);
        let desk = &per_process().ok_or(Errno::NOMEM)?.desk;
        let peer = socket::peer(&socket)?;
        let trusted = is_trusted(&peer);
        let link = Self {
            socket,
            bell,
            life,
            alone,
            desk,
            peer,
        };
        trusted.then_some(link).ok_or(Errno::PERM)
    }

    /// Waits for a packet, at most `wait`; whether there is one, or the other end is gone.
    ///
    /// # Errors
    /// `CANCELED` when the agent shall end.
    pub(crate) fn wait(&self, wait: Option<&Timespec>) -> Result<bool> {
        self.wait_for(PollFlags::IN, wait)
    }

    fn wait_for(&self, what: PollFlags, most: Option<&Timespec>) -> Result<bool> {
        loop {
            // A ring that was taken off may have been for this, too.
            if self.life.must_end() {
                return Err(Errno::CANCELED);
            }
            let mut ready = [
                PollFd::new(&self.socket, what),
                PollFd::new(&self.bell, PollFlags::IN),
            ];
            let slept = || poll(&mut ready, Some(most.unwrap_or(&SECOND)));
            let Some(mut polled) = self.desk.sleep(Place::Bell, slept) else {
                continue;
            };
            if self.life.must_end() {
                return Err(Errno::CANCELED);
            }
            if polled.is_ok_and(|ready| ready > 0) && ready[0].revents().is_empty() {
                if self.desk.hear(|| self.bell.hush()) {
                    continue;
                }
                // The program sent itself the signal. It is not ours to take, so the bell is no help.
                polled = poll(&mut ready[..1], Some(&DEAF));
            }
            match polled {
                Ok(0) if most.is_some() => return Ok(false),
                Ok(0) => {
                    self.alone.leave_if_last();
                    thaw_left();
                }
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Ends the calling thread when it is the only one left of its process.
    pub(crate) fn leave_if_last(&self) {
        self.alone.leave_if_last();
    }

    /// The life of the agent's thread.
    pub(crate) fn life(&self) -> &Life {
        self.life
    }

    /// Why the agent shall end.
    pub(crate) fn why(&self) -> Why {
        self.life.why()
    }

    /// Takes the next packet; of length 0 when the other end is gone.
    ///
    /// # Errors
    /// `CANCELED` when the agent shall end; what recvmsg(2) gives.
    pub(crate) fn receive(&self, buffer: &mut [u8; MAX_MESSAGE]) -> Result<Received> {
        loop {
            match socket::recv(&self.socket, buffer) {
                Err(Errno::AGAIN) => self.wait_for(PollFlags::IN, None).map(drop)?,
                received => return received,
            }
        }
    }

    /// Sends a packet.
    ///
    /// # Errors
    /// `CANCELED` when the agent shall end; what sendmsg(2) gives.
    pub(crate) fn send(&self, packet: &[u8]) -> Result<()> {
        loop {
            match socket::send(&self.socket, packet, &[]) {
                Err(Errno::AGAIN) => self.wait_for(PollFlags::OUT, None).map(drop)?,
                sent => return sent,
            }
        }
    }

    /// Sends an answer.
    ///
    /// # Errors
    /// As [`Link::send`].
    pub(crate) fn answer(&self, buffer: &mut [u8; MAX_MESSAGE], answer: &Answer) -> Result<()> {
        let len = answer.encode(buffer);
        self.send(buffer.get(..len).unwrap_or_default())
    }
}

impl AsFd for Link<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// How often an agent that waits looks whether its thread is the last, and whether a thread left something frozen.
const SECOND: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// How often an agent whose bell rings for nothing looks whether it shall end.
const DEAF: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};
