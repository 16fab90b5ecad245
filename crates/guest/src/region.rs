//! Memory that can be offered.

use std::ops::Range;

/// Memory that can be offered.
///
/// # Safety
/// The ranges are mapped for as long as the value lives, wherever it is moved. They are the same each time, and disjoint. A
/// caller that has the value for itself (`&mut`) may set their bytes to zero.
pub unsafe trait Region {
    /// The addresses.
    fn ranges(&mut self) -> Vec<Range<usize>>;
}

// SAFETY: a slice is mapped while it is borrowed, is one range, and may be written by who has borrowed it alone. All of its bytes
// may be zero.
unsafe impl Region for &mut [u8] {
    fn ranges(&mut self) -> Vec<Range<usize>> {
        let range = self.as_mut_ptr_range();
        let all = range.start.expose_provenance()..range.end.addr();
        vec![all]
    }
}
