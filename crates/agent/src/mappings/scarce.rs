//! Mappings are few: how many more the agent may make before the program's own run out.

use std::sync::atomic::{AtomicUsize, Ordering};

use sys::mapping;

use crate::lock::Guard;

/// Mappings that may be made before they must be counted again. They are few, for the program makes its own meanwhile, which are
/// not counted.
static LEFT: AtomicUsize = AtomicUsize::new(4096);
/// How often nothing was left, since they were counted.
static REFUSED: AtomicUsize = AtomicUsize::new(0);
/// So often it takes to count them again: a count takes as long as some thousand discards.
const COUNT_AGAIN: usize = 16384;

/// The kernel's default, for where it does not tell: a /proc with processes only has no `sys`.
const USUAL: usize = 65_530;

/// Whether `more` mappings would be too many: an eighth of what the kernel allows is the guest's own.
/// Under the lock, so that nothing is counted twice.
pub(crate) fn scarce(guard: &mut Guard, more: usize) -> bool {
    let left = LEFT.load(Ordering::Relaxed);
    if left >= more {
        LEFT.store(left - more, Ordering::Relaxed);
        REFUSED.store(0, Ordering::Relaxed);
        return false;
    }
    let refused = REFUSED.fetch_add(1, Ordering::Relaxed);
    if !refused.is_multiple_of(COUNT_AGAIN) {
        return true;
    }
    let (limit, used) = guard.at_desk(|_| {
        let used = sys::vma::count();
        (
            mapping::limit().unwrap_or(USUAL),
            used.unwrap_or(usize::MAX),
        )
    });
    let left = (limit - limit / 8).saturating_sub(used);
    let fits = left >= more;
    let rest = if fits { left - more } else { left };
    // So half of what is the guest's own is left when the other half was counted on in vain.
    LEFT.store(rest.min(limit / 16), Ordering::Relaxed);
    !fits
}
