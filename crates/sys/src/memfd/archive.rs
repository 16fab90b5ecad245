//! A memory file of fixed size, for the process that comes after this one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals};
use rustix::io::{Errno, Result};

use super::{AdoptError, check, create, read_at};
use crate::fault::{self, Point};

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// So many bytes, zeros at first. Their frames are taken at once, so a write fails for no want of memory.
#[derive(Debug)]
pub struct Archive {
    file: OwnedFd,
    bytes: usize,
}

impl Archive {
    /// An archive of zeros; `name` tells what it is for.
    ///
    /// # Errors
    /// What memfd_create(2), fallocate(2) and fcntl(2) give.
    pub fn new(name: &str, bytes: usize) -> Result<Self> {
        let file = create(name, Mode::RUSR | Mode::WUSR)?;
        fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(Self { file, bytes })
    }

    /// The archive of a former process that called it `name`. It may be of another size.
    ///
    /// # Errors
    /// [`AdoptError`] tells what the descriptor is instead.
    pub fn adopt(file: OwnedFd, name: &str) -> std::result::Result<Self, AdoptError> {
        check(&file, name, OFlags::RDWR, SEALS)?;
        let bytes = rustix::fs::fstat(&file)?.st_size;
        let bytes = usize::try_from(bytes).map_err(|_| Errno::OVERFLOW)?;
        Ok(Self { file, bytes })
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes at byte `at`. A process killed meanwhile leaves the old bytes or the new ones, if they lie in one page: the
    /// kernel copies these without a break.
    ///
    /// # Errors
    /// `NOSPC` for bytes behind the end; what pwrite(2) gives.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        fault::check(Point::Note)?;
        match rustix::io::pwrite(&self.file, bytes, at as u64) {
            Ok(written) if written == bytes.len() => Ok(()),
            // The seals let no file grow.
            Ok(_) | Err(Errno::PERM) => Err(Errno::NOSPC),
            Err(error) => Err(error),
        }
    }

    /// All of it.
    ///
    /// # Errors
    /// `IO` when it is cut short; what pread(2) gives.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.bytes];
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match read_at(&self.file, done as u64, rest)? {
                0 => return Err(Errno::IO),
                read => done += read,
            }
        }
        Ok(bytes)
    }
}

impl AsFd for Archive {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_process_reads_what_was_written_and_nothing_grows() {
        let archive = Archive::new("pageone-trial", 10_000).unwrap();
        assert_eq!(archive.read().unwrap(), vec![0; 10_000]);
        archive.write(9_996, b"last").unwrap();
        assert_eq!(archive.write(9_997, b"over"), Err(Errno::NOSPC));
        assert_eq!(archive.write(10_000, b"over"), Err(Errno::NOSPC));
        let other = archive.as_fd().try_clone_to_owned().unwrap();
        let next = Archive::adopt(other, "pageone-trial").unwrap();
        assert_eq!(next.bytes(), 10_000);
        assert!(next.read().unwrap().ends_with(b"\0last"));
    }

    #[test]
    fn another_file_is_none() {
        let adopt = |file: OwnedFd| Archive::adopt(file, "pageone-trial");
        let named = Archive::new("pageone-other", 100).unwrap().file;
        assert!(matches!(adopt(named), Err(AdoptError::Other { .. })));
        let open = create("pageone-trial", Mode::RUSR | Mode::WUSR).unwrap();
        assert!(matches!(adopt(open), Err(AdoptError::Seals { .. })));
        let path = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(matches!(adopt(path.into()), Err(AdoptError::Other { .. })));
    }
}
