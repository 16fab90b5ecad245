//! The stores this process may map, by device and inode: how a mapping is known to be of a store.
//!
//! A list that only grows while anything is merged. A fork child inherits it, as it inherits the
//! mappings. It is written by the agent's thread under the lock, before a store is mapped for the first time.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::{Errno, Result};
use sys::vma::{FileId, Vma};

use crate::lock::Guard;

/// Engines that die and come back without their stores bring new ones.
const MOST: usize = 256;

struct Place {
    device: AtomicU64,
    /// 0: nothing here.
    inode: AtomicU64,
}

static STORES: [Place; MOST] = [const {
    Place {
        device: AtomicU64::new(0),
        inode: AtomicU64::new(0),
    }
}; MOST];

fn device(id: FileId) -> u64 {
    u64::from(id.device.0) << 32 | u64::from(id.device.1)
}

impl Place {
    fn is(&self, id: FileId) -> bool {
        self.inode.load(Ordering::Relaxed) == id.inode
            && self.device.load(Ordering::Relaxed) == device(id)
    }
}

/// Whether the mapping is a store's.
pub(crate) fn is_store(vma: &Vma) -> bool {
    let used = |place: &&Place| place.inode.load(Ordering::Relaxed) != 0;
    let known = |mut places: std::slice::Iter<'_, Place>| places.any(|place| place.is(vma.id));
    let used = STORES.iter().take_while(used).count();
    vma.file && !vma.shared && known(STORES.get(..used).unwrap_or_default().iter())
}

/// Notes a store that will be mapped.
///
/// # Errors
/// `NOMEM` when too many stores are mapped already; what fstat(2) gives.
pub(crate) fn note(guard: &mut Guard, store: std::os::fd::BorrowedFd<'_>) -> Result<()> {
    let id = FileId::of(store)?;
    if STORES.iter().any(|place| place.is(id)) {
        return Ok(());
    }
    let free = || {
        let free = |place: &&Place| place.inode.load(Ordering::Relaxed) == 0;
        STORES.iter().find(free)
    };
    if free().is_none() && !guard.table().anything_stored() {
        // Nothing is mapped of any of them.
        for place in &STORES {
            place.inode.store(0, Ordering::Relaxed);
        }
    }
    let place = free().ok_or(Errno::NOMEM)?;
    place.device.store(device(id), Ordering::Relaxed);
    place.inode.store(id.inode, Ordering::Relaxed);
    Ok(())
}
