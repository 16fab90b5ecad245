//! Protection keys (pkeys(7)): the rights of the calling thread to memory that has one.
//!
//! Memory has a key, the same for all threads. Each thread has a register, PKRU, that says which keys are closed to it. A thread starts
//! with the register of the one that made it; for the first one all keys but 0 are closed, and `pkey_alloc(2)` opens one to its caller alone. A
//! key that is closed counts for the thread's own reads and writes, and for the memory that it gives to the kernel with a call. It does
//! not count for `/proc/PID/mem`, userfaultfd and process_vm_readv(2).
//!
//! So code that works on memory of others' for them opens all keys first: for good in a thread of its own ([`open_all`]), for a moment in
//! the program's ([`Open`]). The kernel makes a key by itself for memory that may be executed only.
//!
//! Source: pkeys(7), `Documentation/core-api/protection-keys.rst`.

use std::sync::atomic::{AtomicU8, Ordering};

/// Whether there is the register; 0 while no thread has looked.
static FOUND: AtomicU8 = AtomicU8::new(0);
const MISSING: u8 = 1;
const THERE: u8 = 2;

/// Whether the kernel gives keys to memory: by the processor, which is asked once. A process should ask as it begins: later it may have the
/// instruction end it (`ARCH_SET_CPUID` of arch_prctl(2)). No system call is made, which a filter might refuse.
pub fn exist() -> bool {
    // Relaxed: the answer is always the same.
    match FOUND.load(Ordering::Relaxed) {
        0 => {
            let there = registers::exist();
            FOUND.store(if there { THERE } else { MISSING }, Ordering::Relaxed);
            there
        }
        found => found == THERE,
    }
}

/// Opens all keys to the calling thread, for good.
pub fn open_all() {
    if exist() {
        // SAFETY: the register is there.
        unsafe { registers::write(0) };
    }
}

/// All keys are open to the calling thread until this goes. A handler of a signal has its own register, so it notices nothing.
#[derive(Debug)]
pub struct Open {
    before: Option<u32>,
    /// The register is this thread's.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Open {
    /// Opens all keys.
    #[must_use]
    #[allow(clippy::new_without_default)] // it has an effect
    pub fn new() -> Self {
        // SAFETY: where keys exist, there is the register.
        let before = exist().then(|| unsafe { registers::read() });
        open_all();
        Self {
            before,
            not_send: std::marker::PhantomData,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: the register is there, for it was read.
            unsafe { registers::write(before) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod registers {
    use core::arch::asm;
    use core::arch::x86_64::{__cpuid, __cpuid_count};

    /// Whether the kernel uses keys (`OSPKE`).
    pub(super) fn exist() -> bool {
        const OSPKE: u32 = 1 << 4;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx & OSPKE != 0
    }

    /// # Safety
    /// There must be the register.
    pub(super) unsafe fn read() -> u32 {
        let value: u32;
        // SAFETY: the caller's promise; nothing else changes but edx, which becomes 0.
        unsafe {
            asm!("rdpkru", in("ecx") 0, out("eax") value, out("edx") _, options(nomem, nostack, preserves_flags))
        };
        value
    }

    /// # Safety
    /// There must be the register.
    pub(super) unsafe fn write(value: u32) {
        // SAFETY: the caller's promise. Without `nomem`: no access to memory may pass it.
        unsafe {
            asm!("wrpkru", in("eax") value, in("ecx") 0, in("edx") 0, options(nostack, preserves_flags))
        };
    }
}

/// Other processors have no such register that is known here.
#[cfg(not(target_arch = "x86_64"))]
mod registers {
    pub(super) fn exist() -> bool {
        false
    }

    /// # Safety
    /// None is needed.
    pub(super) unsafe fn read() -> u32 {
        0
    }

    /// # Safety
    /// None is needed.
    pub(super) unsafe fn write(_value: u32) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_open_for_a_moment() {
        if !exist() {
            return eprintln!("skipped: this processor has no protection keys");
        }
        // SAFETY: there is the register.
        let now = || unsafe { registers::read() };
        let before = now();
        assert_ne!(before, 0, "a thread has all keys but one closed");
        let open = Open::new();
        assert_eq!(now(), 0);
        drop(open);
        assert_eq!(now(), before);
    }
}
