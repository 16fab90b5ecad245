//! Which hook stands at the entry of which of libc's functions, in a process that runs already ([`attached`](crate::attached)).

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::AtomicPtr;

/// A function of libc's, the hook at its entry, and where the hook finds what stood there.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Hook {
    name: *const c_char,
    hook: *const c_void,
    next: *const c_void,
}

// SAFETY: addresses of what stays.
unsafe impl Sync for Hook {}

impl Hook {
    /// Ends the table.
    pub(crate) const LAST: Self = Self {
        name: std::ptr::null(),
        hook: std::ptr::null(),
        next: std::ptr::null(),
    };

    /// A hook that enters the kernel itself.
    pub(crate) const fn alone(name: &'static CStr, hook: *const c_void) -> Self {
        let (name, next) = (name.as_ptr(), std::ptr::null());
        Self { name, hook, next }
    }

    /// A hook that goes on to libc's own function.
    pub(crate) const fn before(
        name: &'static CStr,
        hook: *const c_void,
        next: &'static AtomicPtr<c_void>,
    ) -> Self {
        let (name, next) = (name.as_ptr(), (&raw const *next).cast());
        Self { name, hook, next }
    }

    /// A variable of libc's.
    pub(crate) const fn variable<T>(name: &'static CStr, place: &'static AtomicPtr<T>) -> Self {
        let (name, hook, next) = (name.as_ptr(), std::ptr::null(), (&raw const *place).cast());
        Self { name, hook, next }
    }
}
