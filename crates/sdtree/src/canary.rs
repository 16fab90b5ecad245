//! Canaries, by which a model notices a use of freed or unwritten memory. Outside of models they are nothing.
//!
//! Every node has a canary, and every access to the node touches it. In a model, touching fails if the collector has declared
//! the node dead, or if the access is not ordered after the node's creation.

#[cfg(not(loom))]
pub(crate) struct Canary;

#[cfg(not(loom))]
impl Canary {
    #[inline(always)]
    pub(crate) const fn new() -> Self {
        Self
    }

    #[inline(always)]
    #[allow(clippy::unused_self)]
    pub(crate) fn touch(&self) {}
}

#[cfg(loom)]
pub(crate) struct Canary {
    /// Stands for the node's plain content: written at its creation, read by every touch.
    content: loom::cell::UnsafeCell<()>,
    /// One that loom does not see, so that it orders nothing.
    dead: std::sync::atomic::AtomicBool,
}

#[cfg(loom)]
impl Canary {
    pub(crate) fn new() -> Self {
        let content = loom::cell::UnsafeCell::new(());
        content.with_mut(|_| ());
        Self {
            content,
            dead: std::sync::atomic::AtomicBool::new(false),
        }
    }

    pub(crate) fn touch(&self) {
        let dead = self.dead.load(std::sync::atomic::Ordering::SeqCst);
        assert!(!dead, "a node is touched that no guard protects");
        self.content.with(|_| ());
    }

    pub(crate) fn declare_dead(&self) {
        self.dead.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

/// A node with a canary.
pub(crate) trait Mortal {
    #[allow(dead_code)]
    fn canary(&self) -> &Canary;
}
