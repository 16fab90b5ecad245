//! Nodes that were unlinked, on their way to be freed.

#[cfg(loom)]
use crate::canary::Canary;
use crate::canary::Mortal;
use crate::counters::garbage;
use crate::pool::Owned;
#[cfg(loom)]
use std::ptr;

/// A node that was unlinked. Its holder is the only one that will free the node.
pub(crate) struct Garbage {
    node: *mut (),
    free: unsafe fn(*mut ()),
    #[cfg(loom)]
    canary: *const Canary,
}

// SAFETY: the node in it holds a `K` and a `V`, both `Send` (`Stored` and the bounds of `Edge` ask for it), and no other thread
// can reach the node when `free` is called.
unsafe impl Send for Garbage {}

impl Garbage {
    /// Something else that was unlinked.
    pub(crate) fn owned<T: Mortal + Send>(node: Owned<T>) -> Self {
        Self::new(Owned::into_raw(node))
    }

    /// The node of an unlinked word.
    pub(crate) fn new<T: Mortal>(node: *mut T) -> Self {
        garbage::retired(size_of::<T>());
        Self {
            node: node.cast(),
            free: free::<T>,
            // SAFETY: the node is alive until `free` is called.
            #[cfg(loom)]
            canary: unsafe { ptr::from_ref((*node).canary()) },
        }
    }

    /// Tells the model that no guard can lead to the node any more: a thread that touches it from now on errs.
    #[cfg(loom)]
    pub(crate) fn declare_dead(&self) {
        // SAFETY: the node is alive until `free` is called.
        unsafe { (*self.canary).declare_dead() }
    }

    /// Frees the node. The collector calls it when no guard can lead to the node any more.
    pub(crate) fn free(self) {
        // SAFETY: `node` came from an owner of the type that `free` is made for. Only the thread whose CAS unlinked the node made
        // this value (N4: a node is unlinked once), `self` is consumed, and the collector has waited for all guards under which
        // the node could be reached.
        unsafe { (self.free)(self.node) }
    }
}

/// # Safety
/// `node` came from [`Owned::into_raw`], and nothing else uses it.
unsafe fn free<T>(node: *mut ()) {
    // SAFETY: the caller's promise.
    drop(unsafe { Owned::from_raw(node.cast::<T>()) });
    garbage::freed(size_of::<T>());
}
