//! Packets and descriptors over `SOCK_SEQPACKET` Unix sockets (unix(7)).
//!
//! A packet arrives whole or not at all, so the protocol needs no framing, and a peer that dies is
//! an end of file. Nothing here allocates: descriptors travel through fixed buffers, and
//! [`Received`] closes those that were not taken.

use std::ffi::OsStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::{Errno, Result};
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::time::Timespec;

use crate::fault::{self, Point};

/// The most descriptors one packet carries here.
pub const MAX_DESCRIPTORS: usize = 68;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Who is at the other end, as the kernel recorded it when the connection was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// A packet that arrived.
pub struct Received {
    /// Bytes in the caller's buffer; 0 when the peer has closed.
    pub len: usize,
    /// Descriptors that came along, in order, then `None`.
    pub descriptors: [Option<OwnedFd>; MAX_DESCRIPTORS],
}

fn seqpacket(flags: SocketFlags) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | flags;
    net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Listens at `path`, which must not exist yet. Connections bring no descriptors
/// ([`refuse_descriptors`]).
///
/// # Errors
/// `ADDRINUSE` when the path exists; whatever socket(2), bind(2) and listen(2) give.
pub fn listen(path: &Path) -> Result<OwnedFd> {
    let socket = seqpacket(SocketFlags::empty())?;
    // Before the first connection can be made. Where the kernel cannot, `Stranger` takes care.
    refuse_descriptors(&socket);
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// The path at which `socket` listens.
///
/// # Errors
/// `INVAL` for what is no listening socket of this kind, or has no path; what getsockname(2) and
/// getsockopt(2) give.
pub fn listening_path(socket: &impl AsFd) -> Result<PathBuf> {
    let listens = net::sockopt::socket_type(socket)? == SocketType::SEQPACKET
        && net::sockopt::socket_acceptconn(socket)?;
    let address = SocketAddrUnix::try_from(net::getsockname(socket)?)?;
    let path = address.path().filter(|_| listens).ok_or(Errno::INVAL)?;
    Ok(OsStr::from_bytes(path.to_bytes()).into())
}

/// Makes this process the one that those who connect to `listener` see as their peer, though
/// another made it.
///
/// # Errors
/// What listen(2) gives.
pub fn take_over(listener: &impl AsFd) -> Result<()> {
    refuse_descriptors(listener);
    net::listen(listener, BACKLOG)
}

/// `SO_PASSRIGHTS`, which libc does not name.
pub(crate) const PASS_RIGHTS: libc::c_int = 83;

/// Has the kernel refuse descriptors for `socket`: a process that sends some gets EPERM. Connections inherit it from
/// the socket that listens. False where the kernel cannot.
pub fn refuse_descriptors(socket: &impl AsFd) -> bool {
    let off: libc::c_int = 0;
    // SAFETY: the kernel reads 4 bytes of `off`, an int.
    let done = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            PASS_RIGHTS,
            (&raw const off).cast(),
            4,
        )
    };
    done == 0
}

/// Takes the next connection, of a peer that is trusted: see [`Stranger`](crate::stranger::Stranger) for others.
///
/// # Errors
/// Whatever accept4(2) gives.
pub fn accept(listener: &impl AsFd) -> Result<OwnedFd> {
    fault::check(Point::Accept)?;
    net::accept_with(listener, SocketFlags::CLOEXEC)
}

/// Connects to the socket at `path`.
///
/// # Errors
/// `NOENT` when there is no socket, `CONNREFUSED` when no process listens at it (a stale one), and
/// whatever else connect(2) gives.
pub fn connect<P: rustix::path::Arg>(path: P) -> Result<OwnedFd> {
    let socket = seqpacket(SocketFlags::empty())?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// As [`connect`], but the socket never blocks, not even here.
///
/// # Errors
/// As [`connect`]; `AGAIN` when too many wait to be accepted.
pub fn connect_at_once<P: rustix::path::Arg>(path: P) -> Result<OwnedFd> {
    let socket = seqpacket(SocketFlags::NONBLOCK)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// As [`connect`], but where too many wait to be accepted it waits for `time` at most. To try again now and then would find no
/// place where strangers connect as fast as they can.
///
/// # Errors
/// As [`connect`]; `AGAIN` when the time is up.
pub fn connect_within<P: rustix::path::Arg>(path: P, time: Duration) -> Result<OwnedFd> {
    let socket = seqpacket(SocketFlags::empty())?;
    net::sockopt::set_socket_timeout(&socket, net::sockopt::Timeout::Send, Some(time))?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Two connected sockets.
///
/// # Errors
/// Whatever socketpair(2) gives.
pub fn pair() -> Result<(OwnedFd, OwnedFd)> {
    net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
}

/// Who is at the other end of `socket`. A process that cannot be seen from here, as the host's from the PID namespace of a
/// container, has the number 0.
///
/// # Errors
/// Whatever getsockopt(2) gives.
pub fn peer(socket: &impl AsFd) -> Result<Peer> {
    // Not by rustix, whose type has no room for the number 0.
    let mut found = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len: libc::socklen_t = 12;
    // Nor by libc's function, which an agent that was attached does without.
    let args = [
        socket.as_fd().as_raw_fd().unsigned_abs() as usize,
        libc::SOL_SOCKET.unsigned_abs() as usize,
        libc::SO_PEERCRED.unsigned_abs() as usize,
        (&raw mut found).expose_provenance(),
        (&raw mut len).expose_provenance(),
        0,
    ];
    // SAFETY: the kernel writes at most `len` bytes into `found`, which has 12, and for which any bytes are valid.
    unsafe { crate::raw::call(libc::SYS_getsockopt, args) }?;
    match len {
        12 => Ok(Peer {
            pid: found.pid.unsigned_abs(),
            uid: found.uid,
            gid: found.gid,
        }),
        _ => Err(Errno::INVAL),
    }
}

/// A descriptor that refers to the process that made the connection at the other end of `socket`
/// for good, however its number is used again (`SO_PEERPIDFD`, Linux 6.5).
///
/// # Errors
/// Whatever getsockopt(2) gives; where the process has ended, that is an error of its own.
pub fn peer_pidfd(socket: &impl AsFd) -> Result<OwnedFd> {
    fault::check(Point::Pidfd)?;
    let mut descriptor: libc::c_int = -1;
    let mut len: libc::socklen_t = 4;
    // SAFETY: the kernel writes at most `len` bytes into `descriptor`, an int of 4 bytes.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut descriptor).cast(),
            &raw mut len,
        )
    };
    match done {
        // SAFETY: the call has just made this descriptor, and no other thread knows it.
        0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}

/// Whether the other end of `socket` is closed. What it sent before can still be received.
#[must_use]
pub(crate) fn has_hung_up(socket: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(socket, PollFlags::empty())];
    let now = Timespec::default();
    let _ = rustix::event::poll(&mut fds, Some(&now));
    fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
}

/// How long sending is tried when the kernel has no memory for it, and how often.
const TRYING: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);

/// Sends one packet, with `descriptors`. It waits while the peer's queue is full, unless the socket
/// is non-blocking, and up to two seconds while there is no memory for the packet: a full control
/// group is no reason to part.
///
/// # Errors
/// `PIPE` when the peer has closed (no signal is raised); `INVAL` for more than
/// [`MAX_DESCRIPTORS`]; whatever else sendmsg(2) gives.
pub fn send(socket: &impl AsFd, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
    send_within(socket, packet, descriptors, TRYING)
}

/// As [`send`], but tries for about `trying` only while there is no memory for the packet.
///
/// # Errors
/// As [`send`].
pub fn send_within(
    socket: &impl AsFd,
    packet: &[u8],
    descriptors: &[BorrowedFd<'_>],
    trying: Duration,
) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    let parts = [std::io::IoSlice::new(packet)];
    let mut send = || {
        fault::check(Point::Send)?;
        net::sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)
    };
    let pause = Timespec {
        tv_sec: 0,
        tv_nsec: PAUSE.subsec_nanos().into(),
    };
    for _ in 0..trying.as_millis() / PAUSE.as_millis() {
        match retry(&mut send) {
            Err(Errno::NOBUFS | Errno::NOMEM) => {
                let _ = rustix::thread::nanosleep(&pause);
            }
            sent => return sent.map(drop),
        }
    }
    retry(send).map(drop)
}

/// Receives one packet into `buffer`.
///
/// # Errors
/// `MSGSIZE` when the packet or its descriptors do not fit (the packet is lost); `AGAIN` when the
/// socket is non-blocking and nothing waits; whatever else recvmsg(2) gives.
pub fn recv(socket: &impl AsFd, buffer: &mut [u8]) -> Result<Received> {
    fault::check(Point::Receive)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [std::io::IoSliceMut::new(buffer)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let message = retry(|| net::recvmsg(socket, &mut parts, &mut ancillary, flags))?;
    let mut received = Received {
        len: message.bytes,
        descriptors: [const { None }; MAX_DESCRIPTORS],
    };
    let arrived = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    for (place, descriptor) in received.descriptors.iter_mut().zip(arrived.flatten()) {
        *place = Some(descriptor);
    }
    if message
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(Errno::MSGSIZE);
    }
    Ok(received)
}

fn retry<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_carries_bytes_and_descriptors() {
        let (a, b) = pair().unwrap();
        let (pipe_out, pipe_in) = rustix::pipe::pipe().unwrap();
        send(&a, b"hello", &[pipe_in.as_fd(), pipe_out.as_fd()]).unwrap();
        let mut buffer = [0; 16];
        let mut received = recv(&b, &mut buffer).unwrap();
        assert_eq!((received.len, &buffer[..5]), (5, &b"hello"[..]));
        let came = received.descriptors[0].take().unwrap();
        rustix::io::write(&came, b"x").unwrap();
        assert_eq!(rustix::io::read(&pipe_out, &mut buffer).unwrap(), 1);
        assert!(received.descriptors[1].is_some() && received.descriptors[2].is_none());
    }

    #[test]
    fn a_packet_too_long_is_an_error_and_a_closed_peer_an_end() {
        let (a, b) = pair().unwrap();
        send(&a, &[7; 100], &[]).unwrap();
        send(&a, &[8; 4], &[]).unwrap();
        let mut buffer = [0; 16];
        assert_eq!(recv(&b, &mut buffer).err(), Some(Errno::MSGSIZE));
        assert_eq!(recv(&b, &mut buffer).unwrap().len, 4);
        send(&a, &[9; 5], &[]).unwrap();
        assert!(!has_hung_up(&b));
        drop(a);
        assert!(has_hung_up(&b));
        assert_eq!(recv(&b, &mut buffer).unwrap().len, 5);
        assert_eq!(recv(&b, &mut buffer).unwrap().len, 0);
        assert_eq!(send(&b, b"x", &[]).err(), Some(Errno::PIPE));
    }

    #[test]
    fn a_listener_knows_its_peer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        assert_eq!(connect(&path).err(), Some(Errno::NOENT));
        let listener = listen(&path).unwrap();
        let client = connect(&path).unwrap();
        let server = accept(&listener).unwrap();
        assert_eq!(peer(&server).unwrap().pid, std::process::id());
        let pidfd = peer_pidfd(&server).unwrap();
        assert!(!crate::process::has_exited(&pidfd));
        assert_eq!(listen(&path).err(), Some(Errno::ADDRINUSE));
        drop((listener, server, client));
        // A child that another test has just forked has the listener too, until its exec.
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let mut refused = connect(&path).err();
        while refused.is_none() && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
            refused = connect(&path).err();
        }
        assert_eq!(refused, Some(Errno::CONNREFUSED), "a stale socket");
    }
}
