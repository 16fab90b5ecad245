//! Questions of a process about itself, asked inside a hook: nothing here allocates or sets `errno`.

use std::ffi::CStr;

use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, Result};

/// `/proc/self/task/THREAD`, and what stands behind it, a number last, as a C string in a buffer.
pub(crate) fn path<'a>(
    buffer: &'a mut [u8; 48],
    thread: u32,
    folder: &str,
    number: Option<u32>,
) -> Result<&'a CStr> {
    let (mut some, mut others) = ([0u8; 10], [0u8; 10]);
    let number = match number {
        Some(number) => digits(&mut others, number)?,
        None => &[],
    };
    let parts = [
        &b"/proc/self/task/"[..],
        digits(&mut some, thread)?,
        folder.as_bytes(),
        number,
    ];
    let text = parts.iter().flat_map(|part| part.iter());
    buffer.fill(0);
    buffer
        .iter_mut()
        .zip(text)
        .for_each(|(to, from)| *to = *from);
    CStr::from_bytes_until_nul(buffer).map_err(|_| Errno::INVAL)
}

fn digits(buffer: &mut [u8; 10], number: u32) -> Result<&[u8]> {
    let (mut first, mut rest) = (buffer.len(), number);
    loop {
        first -= 1;
        *buffer.get_mut(first).ok_or(Errno::INVAL)? = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
        if rest == 0 {
            return buffer.get(first..).ok_or(Errno::INVAL);
        }
    }
}

/// Whether some memory of this process is locked, by mlock(2) in any of its forms. In doubt it is.
#[must_use]
pub fn has_locked_memory() -> bool {
    const NONE: &[u8] = b"\nVmLck:\t       0 kB\n";
    let mut status = [0u8; 4096];
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let read = rustix::fs::open(c"/proc/self/status", flags, Mode::empty())
        .and_then(|file| rustix::io::pread(&file, &mut status, 0));
    let status = status.get(..read.unwrap_or(0)).unwrap_or_default();
    !status.windows(NONE.len()).any(|line| line == NONE)
}

/// Whether what `thread`, of this process, has as descriptor `pidfd` stands for this process, or for one of its threads.
#[must_use]
pub fn is_own(thread: u32, pidfd: u32) -> bool {
    pid_of(thread, pidfd).is_ok_and(is_thread)
}

fn pid_of(thread: u32, pidfd: u32) -> Result<u32> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mut buffer = [0; 48];
    let info = rustix::fs::open(
        path(&mut buffer, thread, "/fdinfo/", Some(pidfd))?,
        flags,
        Mode::empty(),
    )?;
    let mut text = [0; 512];
    let len = rustix::io::pread(&info, &mut text, 0)?;
    let text = std::str::from_utf8(text.get(..len).unwrap_or_default());
    let pid = text.ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("Pid:"));
        line.and_then(|pid| pid.trim().parse().ok())
    });
    pid.ok_or(Errno::BADF)
}

fn is_thread(tid: u32) -> bool {
    let mut buffer = [0; 48];
    path(&mut buffer, tid, "", None).is_ok_and(|task| rustix::fs::stat(task).is_ok())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn locked_memory_is_noticed() {
        let area = crate::mapping::area(4096).unwrap();
        let at = std::ptr::with_exposed_provenance_mut(area);
        // SAFETY: the page was just made; locking changes no content.
        unsafe { rustix::mm::mlock(at, 4096) }.unwrap();
        assert!(has_locked_memory());
    }

    #[test]
    fn a_pidfd_of_ones_own_is_known() {
        let pidfd = |pid| pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let own = pidfd(rustix::process::getpid());
        let is_own = |pidfd| is_own(crate::process::thread_id(), pidfd);
        assert!(is_own(own.as_raw_fd().cast_unsigned()));
        let init = pidfd(Pid::INIT);
        assert!(!is_own(init.as_raw_fd().cast_unsigned()));
        assert!(!is_own(0) && !is_own(u32::MAX));
    }
}
