//! Anonymous memory of this process that it offers for merging, as PageONE's own guests use it.
//!
//! The calls go through libc's symbols, not straight to the kernel: an agent loaded by `LD_PRELOAD`
//! has to see them, exactly as it sees those of a foreign program.

use std::io;
use std::ops::{Deref, DerefMut};

/// A private anonymous mapping, zero-filled at first, page-aligned.
#[derive(Debug)]
pub struct Anonymous {
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone; `&self` only reads it, `&mut self` writes it.
unsafe impl Send for Anonymous {}
// SAFETY: as above.
unsafe impl Sync for Anonymous {}

impl Anonymous {
    /// Maps `len` bytes, aligned to 2 MiB like the memory of a virtual machine.
    ///
    /// # Errors
    /// Whatever mmap(2) gives.
    pub fn new(len: usize) -> io::Result<Self> {
        const ALIGN: usize = 2 << 20;
        let padded = len.checked_add(ALIGN).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let whole = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                padded,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if whole == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let whole = whole.cast::<u8>();
        let head = whole.align_offset(ALIGN);
        let tail = padded - head - len;
        // SAFETY: head < ALIGN, so both ends lie in the mapping just made and no other thread knows them.
        // A failure to unmap only leaves unused address space.
        let start = unsafe {
            let start = whole.add(head);
            if head > 0 {
                libc::munmap(whole.cast(), head);
            }
            if tail > 0 {
                libc::munmap(start.add(len).cast(), tail);
            }
            start
        };
        Ok(Self { start, len })
    }

    fn advise(&self, advice: i32) -> io::Result<()> {
        // SAFETY: the range is this value's own, and the advices below change no content.
        match unsafe { libc::madvise(self.start.cast(), self.len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Has the kernel put the memory into huge pages, as far as it has any: `MADV_HUGEPAGE` and, of what is there already,
    /// `MADV_COLLAPSE` (Linux 6.1).
    ///
    /// # Errors
    /// `EINVAL` on a kernel without transparent huge pages.
    pub fn collapse(&self) -> io::Result<()> {
        self.advise(libc::MADV_HUGEPAGE)?;
        match self.advise(libc::MADV_COLLAPSE) {
            // Not all of it fits: the rest may follow later.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    }

    /// Offers the memory for merging: `madvise(MADV_MERGEABLE)`.
    ///
    /// # Errors
    /// `EINVAL` on a kernel without KSM when no agent takes the call.
    pub fn offer(&self) -> io::Result<()> {
        self.advise(libc::MADV_MERGEABLE)
    }

    /// Withdraws the memory: `madvise(MADV_UNMERGEABLE)`.
    ///
    /// # Errors
    /// As for [`offer`](Self::offer); `ENOMEM` when there is no memory for private copies.
    pub fn withdraw(&self) -> io::Result<()> {
        self.advise(libc::MADV_UNMERGEABLE)
    }
}

impl Deref for Anonymous {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` and `len` name this value's live mapping. Mergers put other frames and
        // other mappings under it, but never other bytes.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl DerefMut for Anonymous {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; `&mut self` makes it the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own and no reference outlives it.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_zero_aligned_and_writable() {
        let mut memory = Anonymous::new(3 * 4096).unwrap();
        assert_eq!(memory.as_ptr() as usize % (2 << 20), 0);
        assert_eq!(memory.len(), 3 * 4096);
        assert!(memory.iter().all(|&byte| byte == 0));
        memory.fill(7);
        assert!(memory.iter().all(|&byte| byte == 7));
    }

    #[test]
    fn a_size_beyond_the_address_space_is_refused() {
        assert!(Anonymous::new(usize::MAX - 4096).is_err());
        assert!(Anonymous::new(usize::MAX).is_err());
    }
}
