//! A thread that works for us.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use libc::user_regs_struct;
use rustix::io::Errno;

use super::calls::{self, CONT, SYSCALL, Stop, surely, wait};
use super::filters::Status;
use super::{Filters, Held, Place, Result, SeizeError};

/// The longest that a call may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest that a function may take. It may hold a lock of the process's, so to take a thread out of it breaks the process.
const LONG: Duration = Duration::from_secs(600);
/// The longest wait until a thread can be put back. It is lost otherwise, so this is long.
const LAST_PATIENCE: Duration = Duration::from_secs(120);

/// What is known of the thread. A stop that wait(2) has not told of yet may be that before another program's first instruction. So
/// a thread that is not known to stand is not told to go on, and its registers are not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Stands,
    Runs,
    /// It has ended, or runs another program: nothing more is done to it.
    Gone,
}

/// A stopped thread that makes calls. It goes on as if nothing had happened, by [`finish`](Self::finish), or on drop.
pub struct Remote {
    held: Held,
    /// The memory of its process.
    memory: File,
    /// Where a `syscall` instruction stands in it.
    entry: u64,
    registers: user_regs_struct,
    vectors: Vec<u8>,
    mask: u64,
    /// The pointer to a restartable sequence: where it is, and its value.
    sequence: Option<(u64, [u8; 8])>,
    /// Where it is, as far as wait(2) has told.
    state: State,
    /// Whether it has made a call.
    used: bool,
    /// Whether it was put back already.
    is_back: bool,
}

impl Remote {
    /// A stopped thread, of a process whose memory `memory` is and which has a `syscall` instruction at `entry`.
    ///
    /// # Errors
    /// As [`Held::stop`].
    pub fn new(held: Held, memory: File, entry: u64) -> Result<Self> {
        let thread = held.thread();
        let sequence = calls::sequence(thread).and_then(|at| {
            let mut value = [0; 8];
            let read = memory.read_exact_at(&mut value, at);
            read.ok().map(|()| (at, value))
        });
        let (registers, vectors) = (calls::registers(thread)?, calls::vectors(thread)?);
        let mask = calls::mask(thread)?;
        // Nothing was changed if this fails.
        calls::set_mask(thread, u64::MAX)?;
        Ok(Self {
            held,
            memory,
            entry,
            registers,
            vectors,
            mask,
            sequence,
            state: State::Stands,
            used: false,
            is_back: false,
        })
    }

    /// Its number.
    #[must_use]
    pub fn thread(&self) -> u32 {
        self.held.thread()
    }

    /// Where it stopped first.
    #[must_use]
    pub fn place(&self) -> Place {
        Place::of(self.thread(), &self.registers)
    }

    /// What judges its calls. Other threads may change it unless they stand.
    ///
    /// # Errors
    /// [`SeizeError::Unread`]; it has ended.
    pub fn filters(&self) -> Result<Filters> {
        self.stands()?;
        Filters::of(&Status::of(self.thread()))
    }

    /// Lets the thread go on as if nothing had happened.
    ///
    /// # Errors
    /// [`SeizeError::Lost`]: it goes on somewhere else.
    pub fn finish(mut self) -> Result<()> {
        self.put_back()
    }

    /// Makes a system call in the process.
    ///
    /// # Errors
    /// The call's own within; without, as [`Held::stop`].
    pub fn call(&mut self, number: i64, args: [u64; 6]) -> Result<rustix::io::Result<u64>> {
        let [rdi, rsi, rdx, r10, r8, r9] = args;
        self.put(&user_regs_struct {
            rip: self.entry,
            rax: number.cast_unsigned(),
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..self.registers
        })?;
        let deadline = Instant::now() + PATIENCE;
        self.reach_call(deadline)?;
        self.reach_call(deadline)?;
        let result = self.now()?.rax.cast_signed();
        Ok(match i32::try_from(result) {
            Ok(code @ -4095..=-1) => Err(Errno::from_raw_os_error(-code)),
            _ => Ok(result.cast_unsigned()),
        })
    }

    /// Has the thread run code at `at` on the stack that ends at `stack`, with three arguments, until it makes the call `done`: by its
    /// number and its second argument. Gives the first argument of that.
    ///
    /// # Errors
    /// As [`Held::stop`].
    pub fn run(&mut self, at: u64, args: [u64; 3], stack: u64, done: (u32, u64)) -> Result<i64> {
        const DIRECTION: u64 = 0x400;
        const TRAP: u64 = 0x100;
        let [rdi, rsi, rdx] = args;
        self.put(&user_regs_struct {
            rip: at,
            rsp: stack & !15,
            rdi,
            rsi,
            rdx,
            eflags: self.registers.eflags & !(DIRECTION | TRAP),
            ..self.registers
        })?;
        let deadline = Instant::now() + LONG;
        loop {
            // Before a call, and after it.
            self.reach_call(deadline)?;
            let registers = self.now()?;
            let is_done = (registers.orig_rax, registers.rsi) == (u64::from(done.0), done.1);
            self.reach_call(deadline)?;
            if is_done {
                return Ok(registers.rdi.cast_signed());
            }
        }
    }

    fn put(&mut self, registers: &user_regs_struct) -> Result<()> {
        // No call of the thread's own is begun again from here.
        let registers = user_regs_struct {
            orig_rax: u64::MAX,
            ..*registers
        };
        self.stands()?;
        self.used = true;
        calls::set_registers(self.held.thread(), &registers)
    }

    fn now(&self) -> Result<user_regs_struct> {
        self.stands()?;
        surely(|| calls::registers(self.held.thread()))
    }

    fn stands(&self) -> Result<()> {
        match self.state {
            State::Stands => Ok(()),
            State::Runs => Err(SeizeError::Late),
            State::Gone => Err(SeizeError::Gone),
        }
    }

    /// Has the thread go on in the way named, with a signal or 0.
    fn go(&mut self, way: i64, signal: i32) -> Result<()> {
        self.stands()?;
        let thread = self.thread();
        surely(|| calls::go(thread, way, signal))?;
        self.state = State::Runs;
        Ok(())
    }

    /// Waits for its next stop.
    fn wait(&mut self, deadline: Instant) -> Result<Stop> {
        let stop = wait(self.thread(), deadline)?;
        if matches!(stop, Stop::Gone | Stop::Exec) {
            self.state = State::Gone;
            return Err(SeizeError::Gone);
        }
        self.state = State::Stands;
        Ok(stop)
    }

    /// Goes on to the next stop at a call. Once a call has begun, nothing may keep its result from being known.
    fn reach_call(&mut self, deadline: Instant) -> Result<()> {
        let mut signal = 0;
        loop {
            self.go(SYSCALL, signal)?;
            signal = 0;
            match self.wait(deadline) {
                Ok(Stop::Call) => return Ok(()),
                Ok(Stop::Event) => {}
                // It stops the process, and this thread when we are done.
                Ok(Stop::Signal(libc::SIGSTOP)) => signal = libc::SIGSTOP,
                Ok(Stop::Signal(signal)) => return Err(SeizeError::Fault(signal)),
                Ok(Stop::Gone | Stop::Exec) => return Err(SeizeError::Gone),
                Err(SeizeError::Asleep(_)) => return Err(SeizeError::Late),
                Err(error) => return Err(error),
            }
        }
    }

    /// Puts the thread where it stopped first, whatever it does, and holds it there. It may work again.
    ///
    /// # Errors
    /// [`SeizeError::Lost`]: it is somewhere else.
    pub fn back(&mut self) -> Result<()> {
        let back = self.restore();
        self.lost(back)
    }

    fn put_back(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.is_back, true) {
            return Ok(());
        }
        self.back()?;
        if self.state == State::Gone {
            return Ok(());
        }
        let (thread, mask) = (self.thread(), self.mask);
        let unblocked = surely(|| calls::set_mask(thread, mask));
        self.lost(unblocked)
    }

    /// A thread that has ended needs nothing.
    fn lost(&self, back: Result<()>) -> Result<()> {
        match back {
            Ok(()) | Err(SeizeError::Gone) => Ok(()),
            Err(error) => Err(SeizeError::Lost(self.thread(), Box::new(error))),
        }
    }

    fn restore(&mut self) -> Result<()> {
        let thread = self.thread();
        if !self.used {
            return Ok(());
        }
        self.reach_event()?;
        if let Some((at, value)) = &self.sequence {
            // Memory that is gone was none of its sequence's.
            let _ = self.memory.write_all_at(value, *at);
        }
        surely(|| calls::set_vectors(thread, &self.vectors))?;
        surely(|| calls::set_registers(thread, &self.registers))?;
        self.used = false;
        Ok(())
    }

    /// Goes on to the place in the kernel where a call is begun again or not.
    fn reach_event(&mut self) -> Result<()> {
        let thread = self.thread();
        if self.state == State::Gone {
            return Err(SeizeError::Gone);
        }
        surely(|| {
            let asked = calls::interrupt(thread);
            asked.map_err(calls::named("PTRACE_INTERRUPT"))
        })?;
        let deadline = Instant::now() + LAST_PATIENCE;
        let mut signal = 0;
        loop {
            // One that was late goes on already.
            if self.state == State::Stands {
                self.go(CONT, signal)?;
            }
            signal = 0;
            match self.wait(deadline)? {
                Stop::Event => return Ok(()),
                Stop::Signal(libc::SIGSTOP) => signal = libc::SIGSTOP,
                Stop::Call | Stop::Signal(_) | Stop::Gone | Stop::Exec => {}
            }
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // A caller that has to know of an error calls `finish`. `held` goes on after this.
        let _ = self.put_back();
    }
}
