//! The real thing: a guest's memory through `/proc` and process_vm_readv, its agent by socket.
//!
//! Whatever takes the lock of a guest's memory map is done at ordinary priority, and in pieces: a
//! worker runs on idle CPUs only, and one that lost its CPU with that lock held would keep the guest
//! waiting (I7).

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use sys::pagemap::{PageRun, Pagemap};
use sys::process::{self, Remote, without_yielding};
use sys::stranger::Stranger;
use sys::{memfd, mempolicy, vma};
use wire::{Answer, MAX_MESSAGE, Question, Welcome};

use crate::account::Lifeline;
use crate::adopt::Mapped;
use crate::guest::{Fault, Link, Memory};
use crate::nodes::Atlas;
use crate::page::{Slot, StoreId};
use crate::store::PageBytes;

/// The memory of a process.
#[derive(Debug)]
pub(crate) struct ProcessMemory {
    pid: u32,
    pidfd: OwnedFd,
    pagemap: Pagemap,
    atlas: Arc<Atlas>,
}

impl ProcessMemory {
    /// Opens the memory of `pid`.
    ///
    /// # Errors
    /// When the process is gone, or this one may not look into it.
    pub(crate) fn open(pid: u32, atlas: Arc<Atlas>) -> std::io::Result<Self> {
        let memory = Self {
            pid,
            pidfd: process::open_pidfd(pid)?,
            pagemap: Pagemap::open(pid)?,
            atlas,
        };
        match memory.has_exited() {
            // Then both descriptors were opened on the same process.
            false => Ok(memory),
            true => Err(std::io::ErrorKind::NotFound.into()),
        }
    }

    fn ask_nodes(&self, pages: &[usize]) -> std::io::Result<Vec<Option<StoreId>>> {
        let mut nodes = vec![-1; pages.len()];
        mempolicy::pages_to_nodes(raw_pid(self.pid), pages, &mut nodes)?;
        Ok(nodes.iter().map(|&node| self.atlas.of_node(node)).collect())
    }

    fn ask_frames(&self, pages: &[usize]) -> std::io::Result<Vec<Option<StoreId>>> {
        let (Some(&first), Some(&last)) = (pages.first(), pages.last()) else {
            return Ok(Vec::new());
        };
        let range = first as u64..(last + wire::PAGE_BYTES) as u64;
        let frames = self.pagemap.frames(range)?;
        let store = |&page: &usize| {
            let frame = frames.get(page.checked_sub(first)? / wire::PAGE_BYTES);
            frame.and_then(|&frame| self.atlas.of_frame(frame))
        };
        Ok(pages.iter().map(store).collect())
    }
}

fn raw_pid(pid: u32) -> Option<rustix::process::Pid> {
    i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw)
}

impl Memory for ProcessMemory {
    fn scan(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)> {
        Ok(without_yielding(|| self.pagemap.scan(range, runs))?)
    }

    fn peek(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)> {
        Ok(without_yielding(|| self.pagemap.peek(range, runs))?)
    }

    fn read(&self, ranges: &[Remote], pages: &mut [&mut PageBytes]) -> std::io::Result<usize> {
        let mut local: Vec<_> = pages
            .iter_mut()
            .map(|page| IoSliceMut::new(page.as_mut_slice()))
            .collect();
        let read = match without_yielding(|| process::read_memory(self.pid, ranges, &mut local)) {
            Ok(bytes) => bytes / wire::PAGE_BYTES,
            // Not there, or no memory to look at it just now: the pages are tried again.
            Err(Errno::FAULT | Errno::NOMEM | Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        // The number names whoever runs under it now: after an exec a program that offered
        // nothing, after an exit a stranger. What was read counts only if the address space of
        // the page map was still the process's own afterwards.
        match self.pagemap.is_alive() {
            true => Ok(read),
            false => Err(std::io::ErrorKind::NotFound.into()),
        }
    }

    fn stores(&self, pages: &[usize]) -> Vec<Option<StoreId>> {
        let stores = match &*self.atlas {
            Atlas::One => return vec![Some(StoreId::default()); pages.len()],
            // Frame numbers tell the node.
            Atlas::Ranges(_) => without_yielding(|| self.ask_frames(pages)),
            Atlas::Nodes(_) => without_yielding(|| self.ask_nodes(pages)),
        };
        // A process that is gone has its pages nowhere; the next look finds out.
        stores.unwrap_or_else(|_| vec![None; pages.len()])
    }

    fn pins(&self) -> Option<String> {
        match sys::pins::find(self.pid) {
            Ok(pin) => pin.map(|pin| pin.to_string()),
            Err(error) => Some(format!("its descriptors cannot be looked at: {error}")),
        }
    }

    fn mapped(&self, stores: &[u64], each: &mut dyn FnMut(Mapped)) -> std::io::Result<bool> {
        let device = memfd::device()?;
        let mut none_else = true;
        let each_file = |file: vma::FileMapping| {
            let store = stores.iter().position(|&store| store == file.inode);
            let id = store.and_then(|store| u8::try_from(store).ok());
            match id.filter(|_| file.device == device).map(StoreId) {
                Some(id) => {
                    let first = Slot(id.first_slot().0 + file.offset / wire::PAGE_BYTES as u64);
                    let range = file.range;
                    each(Mapped { range, first });
                }
                None => none_else &= !file.path.starts_with(crate::store::PATH),
            }
        };
        without_yielding(|| vma::private_files(self.pid, each_file))?;
        // As in `read`: the number may be another process's by now.
        match self.pagemap.is_alive() {
            true => Ok(none_else),
            false => Err(std::io::ErrorKind::NotFound.into()),
        }
    }

    fn mappings(&self) -> Option<u64> {
        process::count_mappings(self.pid).ok()
    }

    fn has_exited(&self) -> bool {
        process::has_exited(&self.pidfd)
    }

    fn name(&self) -> String {
        process::comm(self.pid)
    }

    fn parent(&self) -> Option<u32> {
        process::parent(self.pid)
    }
}

impl Lifeline for memfd::Lifeline {
    fn is_free(&self) -> bool {
        memfd::Lifeline::is_free(self)
    }

    fn is_lost(&self) -> bool {
        memfd::Lifeline::is_lost(self)
    }
}

/// How long a question is tried while the kernel has no memory for it. The worker that asks holds the
/// guest and a chunk meanwhile.
const SENDING: Duration = Duration::from_millis(200);

/// The connection to an agent.
pub(crate) struct SocketLink {
    socket: Stranger,
    buffer: Box<[u8; MAX_MESSAGE]>,
    /// The lifeline that goes out with the next sync.
    line: Option<OwnedFd>,
}

impl SocketLink {
    /// Takes over a connection whose hello has been read.
    pub(crate) fn new(socket: Stranger) -> Self {
        Self {
            socket,
            buffer: Box::new([0; MAX_MESSAGE]),
            line: None,
        }
    }

    /// Welcomes the agent: hands over a lifeline, the domain's tie, the stores, and the userfaultfd device if there
    /// is one.
    ///
    /// # Errors
    /// When the connection is broken or descriptors are exhausted.
    pub(crate) fn welcome(
        &mut self,
        tie: BorrowedFd<'_>,
        stores: &[OwnedFd],
        device: Option<BorrowedFd<'_>>,
    ) -> std::io::Result<Box<dyn Lifeline>> {
        let line = memfd::Lifeline::new()?;
        let welcome = Welcome {
            stores: u16::try_from(stores.len()).unwrap_or(u16::MAX),
            device: device.is_some(),
        };
        let len = welcome.encode(&mut self.buffer);
        let stores = stores.iter().map(AsFd::as_fd);
        let descriptors: Vec<_> = [line.as_fd(), tie]
            .into_iter()
            .chain(stores)
            .chain(device)
            .collect();
        let packet = self.buffer.get(..len).unwrap_or_default();
        sys::socket::send_within(&self.socket, packet, &descriptors, SENDING)?;
        Ok(Box::new(line))
    }
}

impl Link for SocketLink {
    fn lifeline(&mut self) -> std::io::Result<Box<dyn Lifeline>> {
        let line = memfd::Lifeline::new()?;
        self.line = Some(line.share()?);
        Ok(Box::new(line))
    }

    fn send(&mut self, question: &Question) -> Result<(), Fault> {
        let line = match question {
            Question::Sync { lifeline: true, .. } => self.line.take(),
            _ => None,
        };
        let len = question.encode(&mut self.buffer);
        let packet = self.buffer.get(..len).unwrap_or_default();
        let descriptors: Vec<_> = line.iter().map(AsFd::as_fd).collect();
        match sys::socket::send_within(&self.socket, packet, &descriptors, SENDING) {
            Ok(()) => Ok(()),
            // Perhaps the agent said why it left.
            Err(Errno::PIPE | Errno::CONNRESET) => match self.receive(Duration::ZERO) {
                Err(why @ Fault::Failed { .. }) => Err(why),
                _ => Err(Fault::Closed),
            },
            Err(error) => Err(Fault::Broken(error.into())),
        }
    }

    fn receive(&mut self, wait: Duration) -> Result<Option<Answer>, Fault> {
        let broken = |error: Errno| Fault::Broken(error.into());
        if !process::wait_readable(&self.socket, wait).map_err(broken)? {
            return Ok(None);
        }
        match self.socket.recv(&mut *self.buffer) {
            Ok(0) => Err(Fault::Closed),
            Ok(len) => {
                let packet = self.buffer.get(..len).unwrap_or_default();
                match Answer::decode(packet)? {
                    Answer::Failed { errno, step } => Err(Fault::Failed { step, errno }),
                    answer => Ok(Some(answer)),
                }
            }
            Err(Errno::AGAIN) => Ok(None),
            Err(Errno::PERM) => Err(Fault::Contradiction("it came with descriptors")),
            Err(Errno::CONNRESET) => Err(Fault::Closed),
            Err(error) => Err(broken(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn pair() -> (SocketLink, OwnedFd) {
        let (ours, theirs) = sys::socket::pair().unwrap();
        (SocketLink::new(Stranger::new(ours).unwrap()), theirs)
    }

    fn answer(socket: &OwnedFd, answer: &Answer) {
        let mut out = [0; MAX_MESSAGE];
        let len = answer.encode(&mut out);
        sys::socket::send(socket, &out[..len], &[]).unwrap();
    }

    #[test]
    fn a_welcome_brings_lifeline_and_stores() {
        let (mut link, agent) = pair();
        let store = memfd::Store::new("pageone-test").unwrap();
        let stores = [(); 2].map(|()| store.share().unwrap());
        let tie = memfd::Lifeline::new().unwrap();
        let line = link.welcome(tie.as_fd(), &stores, None).unwrap();
        let mut buffer = [0; MAX_MESSAGE];
        let mut received = sys::socket::recv(&agent, &mut buffer).unwrap();
        let welcome = Welcome::decode(&buffer[..received.len]).unwrap();
        assert_eq!((welcome.stores, welcome.device), (2, false));
        let theirs = received.descriptors[0].take().unwrap();
        let access = sys::mapping::Access::ReadWrite;
        sys::mapping::share(theirs.as_fd(), 0, 4096, access).unwrap();
        assert!(!line.is_free());
        let tied = received.descriptors[1].take().unwrap();
        let number = |file: BorrowedFd<'_>| memfd::number(file).unwrap();
        assert_eq!(number(tied.as_fd()), number(tie.as_fd()));
        for at in [2, 3] {
            let store = received.descriptors[at].take().unwrap();
            assert!(store.as_raw_fd() >= 0);
            assert!(rustix::io::pwrite(&store, b"x", 0).is_err());
        }
        assert!(received.descriptors[4].is_none());
    }

    #[test]
    fn answers_come_late_wrong_or_never() {
        let (mut link, agent) = pair();
        assert!(link.receive(Duration::from_millis(5)).unwrap().is_none());
        let ready = Answer::Ready(wire::Ready::default());
        answer(&agent, &ready);
        assert_eq!(link.receive(Duration::ZERO).unwrap(), Some(ready));
        sys::socket::send(&agent, &[99], &[]).unwrap();
        let fault = link.receive(Duration::ZERO).unwrap_err();
        assert!(matches!(fault, Fault::Malformed(_)), "{fault}");
        drop(agent);
        assert!(matches!(link.receive(Duration::ZERO), Err(Fault::Closed)));
        let sent = link.send(&Question::Sync {
            lifeline: false,
            adopted: false,
        });
        assert!(matches!(sent, Err(Fault::Closed)));
    }

    #[test]
    fn memory_is_read_only_while_it_is_the_same() {
        let child = std::process::Command::new("sleep").arg("60").spawn();
        let mut child = child.unwrap();
        let memory = ProcessMemory::open(child.id(), Arc::new(Atlas::One)).unwrap();
        let mut page = [0; wire::PAGE_BYTES];
        let nowhere = Remote {
            start: 4096,
            len: wire::PAGE_BYTES,
        };
        assert_eq!(memory.read(&[nowhere], &mut [&mut page]).unwrap(), 0);
        assert!(memory.mappings().unwrap() > 0 && !memory.name().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(memory.has_exited());
        assert!(memory.read(&[nowhere], &mut [&mut page]).is_err());
    }
}
