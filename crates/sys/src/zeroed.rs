//! Big zeroed tables straight from the kernel: no page is there until a thread touches it.

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use zerocopy::FromZeros;

/// A fixed-length slice of `T`, all zero at first, in a private anonymous mapping of its own.
///
/// `T` may be atomic: then threads share the table by reference.
pub struct ZeroedSlice<T> {
    start: NonNull<T>,
    len: usize,
    len_bytes: usize,
    owns: PhantomData<T>,
}

// SAFETY: the slice owns its mapping alone, as a Vec<T> owns its allocation.
unsafe impl<T: Send> Send for ZeroedSlice<T> {}
// SAFETY: `&ZeroedSlice<T>` gives `&[T]` and nothing more.
unsafe impl<T: Sync> Sync for ZeroedSlice<T> {}

impl<T: FromZeros> ZeroedSlice<T> {
    const NEEDS_NO_DROP: () = assert!(!std::mem::needs_drop::<T>(), "elements are never dropped");
    const PAGE_ALIGNED: () = assert!(align_of::<T>() <= 4096, "a mapping is aligned to a page");

    /// Maps `len` zeroed elements. A length of 0 maps one page all the same.
    ///
    /// # Errors
    /// ENOMEM when there is no address space for it, or when `len` elements overflow it.
    pub fn new(len: usize) -> io::Result<Self> {
        let () = (Self::NEEDS_NO_DROP, Self::PAGE_ALIGNED).1;
        let page = rustix::param::page_size();
        let len_bytes = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.max(1).checked_next_multiple_of(page))
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: without MAP_FIXED the kernel picks a range that is not in use.
        let start = unsafe {
            mm::mmap_anonymous(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let start = NonNull::new(start.cast::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            start,
            len,
            len_bytes,
            owns: PhantomData,
        })
    }

    /// Says whether the kernel may back the table with huge pages. A kernel without them ignores it.
    pub fn allow_huge_pages(&self, allow: bool) {
        let advice = if allow {
            Advice::LinuxHugepage
        } else {
            Advice::LinuxNoHugepage
        };
        // SAFETY: the range is the mapping that `self` owns, and this advice changes no content.
        let _ = unsafe { mm::madvise(self.start.as_ptr().cast(), self.len_bytes, advice) };
    }

    /// Makes every page present, writable, under the range's memory policy.
    ///
    /// # Errors
    /// ENOMEM when the policy's nodes have too little; EINVAL before Linux 5.14.
    pub fn populate(&self) -> io::Result<()> {
        // SAFETY: the range is the mapping that `self` owns; the kernel faults pages in and keeps their content.
        let result = unsafe {
            mm::madvise(
                self.start.as_ptr().cast(),
                self.len_bytes,
                Advice::LinuxPopulateWrite,
            )
        };
        Ok(result?)
    }
}

impl<T> ZeroedSlice<T> {
    /// The length of the mapping in bytes, a multiple of the page size.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl<T> Deref for ZeroedSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new` mapped at least `len` elements, aligned to a page and so to T. The pages read as zeros
        // until written, and zeros are a valid T (FromZeros); the mapping lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for ZeroedSlice<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `deref`; `&mut self` is the only way to the mapping.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for ZeroedSlice<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and every borrow of it has ended. No element needs drop.
        let result = unsafe { mm::munmap(self.start.as_ptr().cast(), self.len_bytes) };
        debug_assert!(result.is_ok(), "unmapping a whole mapping of our own");
    }
}

impl<T> std::fmt::Debug for ZeroedSlice<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZeroedSlice")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn zeros_are_shared_by_reference() {
        let table = ZeroedSlice::<AtomicU64>::new(10_000).unwrap();
        assert!(table.iter().all(|word| word.load(Ordering::Relaxed) == 0));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let table = &table;
                scope.spawn(move || {
                    for word in table.iter().skip(thread).step_by(4) {
                        word.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(
            table
                .iter()
                .map(|word| word.load(Ordering::Relaxed))
                .sum::<u64>(),
            10_000
        );
    }

    #[test]
    fn lengths_are_checked() {
        assert_eq!(ZeroedSlice::<u64>::new(0).unwrap().len(), 0);
        assert_eq!(ZeroedSlice::<u8>::new(4097).unwrap().len_bytes(), 8192);
        assert!(ZeroedSlice::<u64>::new(usize::MAX / 8).is_err());
        assert!(ZeroedSlice::<u64>::new(usize::MAX).is_err());
    }
}
