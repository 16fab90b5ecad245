//! The memory of machines, as rust-vmm's `vm-memory` has it.

use std::ops::Range;

use vm_memory::bitmap::Bitmap;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

use crate::{Error, PAGE_BYTES, Region, api};

/// mmap(2)'s flag.
const MAP_SHARED: i32 = 1;

fn range_of<B: Bitmap>(region: &MmapRegion<B>) -> Range<usize> {
    let start = region.as_ptr().expose_provenance();
    start..start + region.size()
}

// SAFETY: a region keeps its mapping while it lives. Its bytes are volatile: the machine may write them at any time, so nothing
// refers to them as to a value.
unsafe impl<B: Bitmap> Region for &MmapRegion<B> {
    fn ranges(&mut self) -> Vec<Range<usize>> {
        vec![range_of(self)]
    }
}

// SAFETY: it holds its regions by counted references for as long as it lives, and never exchanges them; else as above.
unsafe impl<B: Bitmap + Send + Sync + 'static> Region for GuestMemoryMmap<B> {
    fn ranges(&mut self) -> Vec<Range<usize>> {
        self.iter()
            .map(|region: &GuestRegionMmap<B>| range_of(region))
            .collect()
    }
}

/// Says that the content of these bytes of a machine no longer matters, for a balloon or free page reporting: the pages go back to
/// the host now, and read as zeros. The memory of machines may be written by any thread, so this needs it not for itself.
///
/// # Errors
/// [`Error::Range`] when these are not whole pages of one region, [`Error::Shared`] when they are a file's or shared.
///
/// # Examples
/// ```
/// use pageone_guest::{Error, recycle};
/// use vm_memory::{GuestAddress, GuestMemoryMmap};
///
/// let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
/// assert!(matches!(recycle(&memory, GuestAddress(5), 4096), Err(Error::Range { .. })));
/// match recycle(&memory, GuestAddress(0x4000), 0x2000) {
///     Ok(()) | Err(Error::NoAgent) => {}
///     Err(error) => panic!("{error}"),
/// }
/// ```
pub fn recycle<B: Bitmap + Send + Sync + 'static>(
    memory: &GuestMemoryMmap<B>,
    address: GuestAddress,
    len: usize,
) -> Result<(), Error> {
    let named = || {
        let start = usize::try_from(address.0).unwrap_or(usize::MAX);
        Error::Range {
            start,
            end: start.saturating_add(len),
        }
    };
    let (region, at) = memory.to_region_addr(address).ok_or_else(named)?;
    let left = region.len().checked_sub(at.0).ok_or_else(named)?;
    let start = region.get_host_address(at).map_err(|_| named())?.addr();
    if region.file_offset().is_some() || region.flags() & MAP_SHARED != 0 {
        return Err(Error::Shared { start });
    }
    let whole = start.is_multiple_of(PAGE_BYTES) && len.is_multiple_of(PAGE_BYTES);
    match whole && len as u64 <= left {
        true => api::recycle(&(start..start + len)),
        false => Err(named()),
    }
}
