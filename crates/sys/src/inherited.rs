//! The dispositions, the mask, the limits and the standard descriptors with which a process was started.
//!
//! A process that starts another in its own place changes some of them for itself, and gives the other what it was given:
//!
//! | | here | in the program that is started |
//! |---|---|---|
//! | SIGPIPE | ignored, by Rust's runtime | as inherited: Rust would set it to its default |
//! | SIGCHLD | its default: ignored, no end of a child could be told, and its number be another process's | as inherited |
//! | SIGXFSZ | ignored: a store that is full is an error, and no death | as inherited |
//! | mask | as set meanwhile | as inherited |
//! | input, output and error that are closed | the root directory, until exec: Rust's runtime would put `/dev/null` there for good, and abort where there is none | as inherited |
//! | `RLIMIT_FSIZE`, `RLIMIT_NOFILE` | the soft limit is raised to the hard one, for stores and guests | as inherited |
//!
//! Source: signal(7), execve(2), getrlimit(2).

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::signals;

/// Whether SIGPIPE was ignored before Rust's runtime began, and SIGCHLD before this process wanted to be told of its children.
static IGNORES_PIPE: AtomicBool = AtomicBool::new(false);
static IGNORES_CHILD: AtomicBool = AtomicBool::new(false);

/// Has a program note before `main` what it was started with, and change what Rust's runtime would change otherwise. A macro, because
/// a static of this crate would be in the agent, too.
#[macro_export]
macro_rules! note_inherited {
    () => {
        #[used]
        #[unsafe(link_section = ".init_array")]
        static NOTE_INHERITED: extern "C" fn() = $crate::inherited::note;
    };
}

/// For [`note_inherited!`]: runs while the process has one thread, and before its runtime.
pub extern "C" fn note() {
    IGNORES_PIPE.store(ignores(libc::SIGPIPE), Ordering::Relaxed);
    IGNORES_CHILD.store(ignores(libc::SIGCHLD), Ordering::Relaxed);
    set_ignored(libc::SIGCHLD, false);
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    for stream in [libc::STDIN_FILENO, libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: neither call touches memory but the constant path. The lowest free number is given out, which is this one.
        unsafe {
            if libc::fcntl(stream, libc::F_GETFD) < 0 {
                libc::open(c"/".as_ptr(), flags);
            }
        }
    }
}

/// What this process was given.
#[derive(Clone, Copy)]
pub struct Inherited {
    /// Signals, and whether they were ignored.
    ignored: [(libc::c_int, bool); 3],
    mask: libc::sigset_t,
    files: Rlimit,
    size: Rlimit,
}

impl Inherited {
    /// Takes note, and changes what this process needs otherwise. For before the first thread starts, and before this process changes its
    /// mask or its limits.
    ///
    /// # Errors
    /// What sigprocmask(2) gives.
    pub fn take() -> io::Result<Self> {
        let inherited = Self {
            ignored: [
                (libc::SIGPIPE, IGNORES_PIPE.load(Ordering::Relaxed)),
                (libc::SIGCHLD, IGNORES_CHILD.load(Ordering::Relaxed)),
                (libc::SIGXFSZ, ignores(libc::SIGXFSZ)),
            ],
            mask: mask()?,
            files: getrlimit(Resource::Nofile),
            size: getrlimit(Resource::Fsize),
        };
        set_ignored(libc::SIGXFSZ, true);
        let raised = Rlimit {
            current: inherited.size.maximum,
            ..inherited.size
        };
        // Lower, it bounds the stores, as the hard one does.
        let _ = setrlimit(Resource::Fsize, raised);
        Ok(inherited)
    }

    /// The bytes that a file of this process may have at most, if there is such a limit.
    #[must_use]
    pub fn largest_file(&self) -> Option<u64> {
        self.size.maximum
    }

    /// Gives `command` all of it, when it is started or takes this process's place.
    pub fn hand_on(&self, command: &mut Command) {
        let given = *self;
        let restore = move || given.restore();
        // SAFETY: between fork and exec only async-signal-safe calls are made (sigaction, sigprocmask, setrlimit), none of which
        // allocates or takes a lock.
        unsafe { command.pre_exec(restore) };
    }

    fn restore(&self) -> io::Result<()> {
        for (signal, is_ignored) in self.ignored {
            set_ignored(signal, is_ignored);
        }
        setrlimit(Resource::Nofile, self.files)?;
        setrlimit(Resource::Fsize, self.size)?;
        signals::mask(libc::SIG_SETMASK, &self.mask)
    }
}

fn mask() -> io::Result<libc::sigset_t> {
    let mut mask = MaybeUninit::uninit();
    // SAFETY: no new mask is given, and the kernel writes the old one to `mask`, which it fills if it succeeds.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr()) } {
        // SAFETY: it succeeded.
        0 => Ok(unsafe { mask.assume_init() }),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Whether this process ignores a signal.
#[must_use]
pub fn ignores(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: no new action is given; the kernel writes the old one to `action`, which is valid as zeros, too.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

fn set_ignored(signal: libc::c_int, is_ignored: bool) {
    let action = match is_ignored {
        true => libc::SIG_IGN,
        false => libc::SIG_DFL,
    };
    // SAFETY: neither action runs code of this process.
    unsafe { libc::signal(signal, action) };
}
