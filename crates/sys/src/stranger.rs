//! A connection to a process that is not trusted: nothing of it gets in but bytes.
//!
//! A packet may carry descriptors of any kind, and the last one to let go of a descriptor closes the file
//! behind it. That can take as long as the sender likes: a TCP socket with `SO_LINGER` and unsent data, a file of a
//! file system that does not answer. It is waited for by the thread whose call let go: recvmsg(2) that had no room for the
//! descriptors, as well as close(2) of a Unix socket in whose queue they lie. So:
//!
//! ```text
//!  sender ── with descriptors ──▶ EPERM       SO_PASSRIGHTS is off (Linux 6.16), from before the connection was made
//!                 │ older kernel
//!                 ▼ queue ──▶ looked at before it is taken ──▶ no descriptors: taken
//!                                │ descriptors: it stays, and the connection ends
//!                                ▼
//!                    the socket goes to a thread that does nothing but close
//! ```
//!
//! The tempting alternatives fail: to receive the descriptors and close them waits just the same, and so does giving recvmsg(2) no
//! room. To ask for the kind of a descriptor before it is closed needs it received, and many kinds can make one wait.
//!
//! The look is `MSG_PEEK` without room for descriptors: `MSG_CTRUNC` tells that there are some, and the references
//! that the look took are not the last ones, for the packet stays in the queue. One thread takes from the queue of a
//! [`Stranger`], so the packet that was looked at is the one that is taken. At the end the socket is shut down: then nothing more
//! arrives, and a queue that is found free of descriptors stays so and is closed at once.
//!
//! Source: unix(7); net/unix/af_unix.c (`unix_dgram_recvmsg`, `unix_release_sock`), net/core/scm.c.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::{Errno, Result};
use rustix::net::{Shutdown, SocketFlags, shutdown};

use crate::closers::{self, Kind};
use crate::fault::{self, Point};
use crate::socket::{self, Peer};

/// Packets looked at before a socket is closed; a thread that may wait closes one with more. The kernel's default
/// room for what one sender has under way is some 300 packets.
const LOOKED_AT: usize = 1024;

/// A connection to a process that is not trusted. Nothing here waits, dropping it included.
#[derive(Debug)]
pub struct Stranger {
    /// `None` only while it is dropped.
    socket: Option<OwnedFd>,
    peer: Peer,
    watch: Watch,
}

/// Tells from any thread whether a [`Stranger`] has left, also while another thread talks to him.
#[derive(Clone, Debug)]
pub struct Watch(Arc<Mutex<Option<RawFd>>>);

impl Watch {
    /// Whether either end of the connection is closed.
    #[must_use]
    pub fn has_left(&self) -> bool {
        let open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.is_none_or(|number| {
            // SAFETY: the number stands here only while the stranger holds the descriptor open; to let go of it he
            // needs the lock that is held here.
            socket::has_hung_up(&unsafe { BorrowedFd::borrow_raw(number) })
        })
    }
}

impl Stranger {
    /// Takes the next connection.
    ///
    /// # Errors
    /// Whatever accept4(2) and getsockopt(2) give.
    pub fn accept(listener: &impl AsFd) -> Result<Self> {
        fault::check(Point::Accept)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        Self::new(rustix::net::accept_with(listener, flags)?)
    }

    /// One end of a connection.
    ///
    /// # Errors
    /// Whatever ioctl(2) and getsockopt(2) give.
    pub fn new(socket: OwnedFd) -> Result<Self> {
        let ready = rustix::io::ioctl_fionbio(&socket, true)
            .and_then(|()| rustix::net::sockopt::set_socket_passcred(&socket, true));
        let peer = ready.and_then(|()| socket::peer(&socket));
        // Dropped with care also when there is no peer to name.
        let nobody = Peer {
            pid: 0,
            uid: u32::MAX,
            gid: u32::MAX,
        };
        let number = socket.as_raw_fd();
        let stranger = Self {
            watch: Watch(Arc::new(Mutex::new(Some(number)))),
            socket: Some(socket),
            peer: *peer.as_ref().unwrap_or(&nobody),
        };
        socket::refuse_descriptors(&stranger);
        peer.map(|_| stranger)
    }

    /// What tells whether he has left.
    #[must_use]
    pub fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// The process that made the connection.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Takes the next packet; 0 bytes when the peer has closed. For one thread at a time.
    ///
    /// # Errors
    /// `AGAIN` when nothing waits. `PERM` when the packet carries descriptors, which are not taken: the
    /// connection is to be dropped. `MSGSIZE` when the packet does not fit (it is lost); whatever else recvmsg(2)
    /// gives.
    pub fn recv(&self, buffer: &mut [u8]) -> Result<usize> {
        fault::check(Point::Receive)?;
        if receive(self, &mut [], libc::MSG_PEEK)?.has_descriptors() {
            return Err(Errno::PERM);
        }
        let taken = receive(self, buffer, 0)?;
        // One thread takes from the queue, so it is the packet that was looked at. But a look may have been refused the memory for
        // its descriptors.
        if taken.has_descriptors() {
            return Err(Errno::PERM);
        }
        match taken.flags & libc::MSG_TRUNC {
            0 => Ok(taken.len),
            _ => Err(Errno::MSGSIZE),
        }
    }
}

impl AsFd for Stranger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("it is not dropped").as_fd()
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        // Before another descriptor can have the number.
        *self.watch.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Some(socket) = self.socket.take()
            && !is_harmless(&socket)
        {
            closers::give(self.peer.uid, Kind::Connection, socket);
        }
    }
}

/// Ends the connection; true when nothing in its queue could make close(2) wait.
fn is_harmless(socket: &OwnedFd) -> bool {
    if shutdown(socket, Shutdown::Both).is_err() {
        return false;
    }
    for _ in 0..LOOKED_AT {
        match receive(socket, &mut [], libc::MSG_PEEK) {
            Ok(seen) if !seen.is_packet => return true,
            Ok(seen) if !seen.has_descriptors() => {}
            _ => return false,
        }
        if receive(socket, &mut [], 0).is_err() {
            return false;
        }
    }
    false
}

/// What a look at a queue found.
struct Seen {
    len: usize,
    flags: libc::c_int,
    /// A packet, if an empty one, and not the end of the connection.
    is_packet: bool,
}

impl Seen {
    fn has_descriptors(&self) -> bool {
        self.flags & libc::MSG_CTRUNC != 0
    }
}

/// recvmsg(2) without waiting and without room for descriptors.
///
/// There is room for the sender's credentials alone, which come first (`SO_PASSCRED`): an end has none, which tells it from an
/// empty packet. They are not read: the socket's peer is known already.
fn receive(socket: &impl AsFd, buffer: &mut [u8], flags: libc::c_int) -> Result<Seen> {
    /// `CMSG_SPACE` of a `ucred`: 16 bytes of head and 12 of content, filled up to a multiple of 8.
    type Room = [u64; 4];
    let mut room: Room = [0; 4];
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    loop {
        // SAFETY: plain numbers and pointers, for which zero is valid and means: none.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut room).cast();
        message.msg_controllen = size_of::<Room>();
        let flags = flags | libc::MSG_DONTWAIT;
        // SAFETY: the kernel writes at most `iov_len` bytes to `buffer` and `msg_controllen` bytes to `room`, both
        // borrowed exclusively, and numbers to `message`. Credentials fill the room, so no descriptor is made.
        let got = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
        match usize::try_from(got) {
            Ok(len) => {
                return Ok(Seen {
                    len,
                    flags: message.msg_flags,
                    is_packet: message.msg_controllen > 0,
                });
            }
            Err(_) => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::INTR) => {}
                error => return Err(error.unwrap_or(Errno::IO)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    fn unclosed(uid: u32) -> usize {
        closers::unclosed(uid, Kind::Connection).0
    }

    /// A connection as a kernel before 6.16 makes it: the stranger may send descriptors.
    fn pair() -> (Stranger, OwnedFd) {
        let (ours, theirs) = socket::pair().unwrap();
        let stranger = Stranger::new(ours).unwrap();
        let on: libc::c_int = 1;
        // SAFETY: the kernel reads 4 bytes of `on`, an int.
        unsafe {
            let at = stranger.as_fd().as_raw_fd();
            libc::setsockopt(
                at,
                libc::SOL_SOCKET,
                socket::PASS_RIGHTS,
                (&raw const on).cast(),
                4,
            );
        }
        (stranger, theirs)
    }

    /// A TCP connection whose close waits for `LINGER`, and its other end, which reads nothing.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        rustix::net::sockopt::set_socket_linger(&stream, Some(LINGER)).unwrap();
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 20]).is_ok() {}
        (stream, other)
    }

    const LINGER: Duration = Duration::from_secs(3);
    const AT_ONCE: Duration = Duration::from_millis(500);

    #[track_caller]
    fn wait_for(mut done: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < 10 * LINGER, "waited in vain");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn bytes_go_both_ways_and_an_end_is_an_end() {
        let (stranger, theirs) = pair();
        let mut buffer = [0; 8];
        assert_eq!(stranger.recv(&mut buffer), Err(Errno::AGAIN));
        for packet in [&b"hello"[..], b"", b"four"] {
            socket::send(&theirs, packet, &[]).unwrap();
            assert_eq!(stranger.recv(&mut buffer), Ok(packet.len()));
            assert_eq!(&buffer[..packet.len()], packet);
        }
        socket::send(&theirs, &[1; 9], &[]).unwrap();
        assert_eq!(stranger.recv(&mut buffer), Err(Errno::MSGSIZE));
        socket::send(&stranger, b"back", &[]).unwrap();
        assert_eq!(socket::recv(&theirs, &mut buffer).unwrap().len, 4);
        drop(theirs);
        assert_eq!(stranger.recv(&mut buffer), Ok(0));
    }

    #[test]
    fn the_kernel_refuses_descriptors_where_it_can() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = socket::listen(&path).unwrap();
        if !socket::refuse_descriptors(&listener) {
            return eprintln!("skipped: SO_PASSRIGHTS needs Linux 6.16");
        }
        let client = socket::connect(&path).unwrap();
        // Before the connection is taken.
        let sent = socket::send(&client, b"x", &[client.as_fd()]);
        assert_eq!(sent, Err(Errno::PERM));
        let stranger = Stranger::accept(&listener).unwrap();
        assert_eq!(stranger.peer().pid, std::process::id());
        let sent = socket::send(&client, b"x", &[client.as_fd()]);
        assert_eq!(sent, Err(Errno::PERM));
        socket::send(&client, b"x", &[]).unwrap();
        assert_eq!(stranger.recv(&mut [0; 8]), Ok(1));
    }

    #[test]
    fn a_descriptor_that_does_not_close_holds_up_nobody() {
        let begin = Instant::now();
        let (stranger, theirs) = pair();
        let uid = stranger.peer().uid;
        socket::send(&theirs, b"", &[]).unwrap();
        let (stream, mut other) = lingering();
        socket::send(&theirs, b"x", &[stream.as_fd()]).unwrap();
        drop(stream);
        let mut buffer = [0; 8];
        assert_eq!(stranger.recv(&mut buffer), Ok(0));
        for _ in 0..2 {
            assert_eq!(stranger.recv(&mut buffer), Err(Errno::PERM));
        }
        let closing = Instant::now();
        drop(stranger);
        assert!(closing.elapsed() < AT_ONCE, "{:?}", closing.elapsed());
        assert!(unclosed(uid) > 0);
        // A second one of the same user waits for the first, and one that has nothing is closed at once.
        let (second, theirs) = pair();
        socket::send(&theirs, b"x", &[theirs.as_fd()]).unwrap();
        drop(second);
        let (third, theirs) = pair();
        socket::send(&theirs, b"x", &[]).unwrap();
        drop(third);
        assert_eq!(socket::send(&theirs, b"x", &[]), Err(Errno::PIPE));
        assert!(closing.elapsed() < AT_ONCE, "{:?}", closing.elapsed());
        wait_for(|| unclosed(uid) == 0);
        assert!(
            begin.elapsed() >= LINGER,
            "the socket did not linger: nothing was tested"
        );
        other.set_nonblocking(true).unwrap();
        let _ = other.read(&mut buffer);
    }
}
