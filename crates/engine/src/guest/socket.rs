//! The connection to a real guest's agent, by socket.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use sys::closers::Late;
use sys::stranger::Stranger;
use sys::{memfd, process};
use wire::{Answer, DomainMark, MAX_MESSAGE, Question, Reason, Tally, Welcome};

use crate::domain::lifelines::Lifeline;
use crate::guest::agent::{Fault, Link};

impl Lifeline for memfd::Lifeline {
    fn is_free(&self) -> bool {
        memfd::Lifeline::is_free(self)
    }

    fn discards(&self) -> u64 {
        Tally::discards(self.head())
    }
}

/// A guest may have locks on its line.
impl Lifeline for Late<memfd::Lifeline> {
    fn is_free(&self) -> bool {
        memfd::Lifeline::is_free(self)
    }

    fn discards(&self) -> u64 {
        Tally::discards(self.head())
    }
}

/// How long a question is tried while the kernel has no memory for it. The worker that asks holds the
/// guest and a chunk meanwhile.
const SENDING: Duration = Duration::from_millis(200);

/// The connection to an agent.
pub(crate) struct SocketLink {
    socket: Stranger,
    /// The user who answers for the process.
    principal: u32,
    buffer: Box<[u8; MAX_MESSAGE]>,
    /// The lifeline that goes out with the next sync.
    line: Option<Late<OwnedFd>>,
}

impl SocketLink {
    /// Takes over a connection whose hello has been read, to a process for which user `principal` answers.
    pub(crate) fn new(socket: Stranger, principal: u32) -> Self {
        Self {
            socket,
            principal,
            buffer: Box::new([0; MAX_MESSAGE]),
            line: None,
        }
    }

    /// The connection.
    pub(crate) fn socket(&self) -> &Stranger {
        &self.socket
    }

    /// A line, the descriptor of it that goes to the agent, and its number.
    fn new_line(&self) -> std::io::Result<(Box<dyn Lifeline>, Late<OwnedFd>, u64)> {
        let (line, held) = memfd::Lifeline::new()?;
        let (number, principal) = (line.number(), self.principal);
        let held = Late::new(principal, held);
        Ok((Box::new(Late::new(principal, line)), held, number))
    }

    /// Tells the agent that its guest is refused, why, and which `domain` it would be in. An agent that does not take it
    /// has lost it.
    pub(crate) fn refuse(&mut self, why: &str, domain: DomainMark) {
        let len = Reason::new(why, domain).encode(&mut self.buffer);
        let packet = &self.buffer[..len];
        let _ = sys::socket::send_within(&self.socket, packet, &[], Duration::ZERO);
    }

    /// Welcomes the agent in `domain`: hands over a lifeline, the domain's tie, the stores, and the userfaultfd device if there
    /// is one. Gives the lifeline and its number.
    ///
    /// # Errors
    /// When the connection is broken or descriptors are exhausted.
    pub(crate) fn welcome(
        &mut self,
        domain: DomainMark,
        tie: BorrowedFd<'_>,
        stores: &[BorrowedFd<'_>],
        device: Option<BorrowedFd<'_>>,
    ) -> std::io::Result<(Box<dyn Lifeline>, u64)> {
        let (line, held, number) = self.new_line()?;
        let welcome = Welcome {
            stores: u16::try_from(stores.len()).unwrap_or(u16::MAX),
            device: device.is_some(),
            domain,
        };
        let len = welcome.encode(&mut self.buffer);
        let descriptors: Vec<_> = [held.as_fd(), tie]
            .into_iter()
            .chain(stores.iter().copied())
            .chain(device)
            .collect();
        let packet = &self.buffer[..len];
        sys::socket::send_within(&self.socket, packet, &descriptors, SENDING)?;
        Ok((line, number))
    }
}

impl Link for SocketLink {
    fn lifeline(&mut self) -> std::io::Result<Box<dyn Lifeline>> {
        let (line, held, _) = self.new_line()?;
        self.line = Some(held);
        Ok(line)
    }

    fn send(&mut self, question: &Question) -> Result<(), Fault> {
        let line = match question {
            Question::Sync { lifeline: true, .. } => self.line.take(),
            _ => None,
        };
        let len = question.encode(&mut self.buffer);
        let packet = &self.buffer[..len];
        let descriptors: Vec<_> = line.iter().map(|line| line.as_fd()).collect();
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

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn has_answer(&self) -> bool {
        // Where polling fails, receiving says why.
        process::wait_readable(&self.socket, Duration::ZERO).unwrap_or(true)
    }

    fn receive(&mut self, wait: Duration) -> Result<Option<Answer>, Fault> {
        let broken = |error: Errno| Fault::Broken(error.into());
        if !process::wait_readable(&self.socket, wait).map_err(broken)? {
            return Ok(None);
        }
        match self.socket.recv(&mut *self.buffer) {
            Ok(0) => Err(Fault::Closed),
            Ok(len) => {
                let packet = &self.buffer[..len];
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
        (SocketLink::new(Stranger::new(ours).unwrap(), 0), theirs)
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
        let stores = stores.each_ref().map(AsFd::as_fd);
        let (_, tie) = memfd::Lifeline::new().unwrap();
        let (line, told) = link
            .welcome(DomainMark([7, 8]), tie.as_fd(), &stores, None)
            .unwrap();
        let mut buffer = [0; MAX_MESSAGE];
        let mut received = sys::socket::recv(&agent, &mut buffer).unwrap();
        let welcome = Welcome::decode(&buffer[..received.len]).unwrap();
        assert_eq!((welcome.stores, welcome.device), (2, false));
        assert_eq!(welcome.domain, DomainMark([7, 8]));
        let theirs = received.descriptors[0].take().unwrap();
        assert_eq!(memfd::number(&theirs).unwrap(), told);
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
}
