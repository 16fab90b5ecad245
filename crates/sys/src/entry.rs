//! The entry of a function of libc, where a jump to another function fits.
//!
//! libc's own calls reach the kernel through the bodies of its exported functions. Such a body is a few
//! instructions around one system call. Code that makes that system call by itself needs nothing of it, so five bytes at the
//! entry become a jump, and the rest is never reached again:
//!
//! ```text
//!   endbr64                     endbr64
//!   mov  $11, %eax              jmp  hook
//!   syscall                     syscall
//!   …                           …
//! ```
//!
//! Nothing is written that is not understood. The first instructions must be ones of a list. None of them is the target of a jump, and
//! the right system call must follow. The list is meant for glibc 2.31 to 2.41. It was tried with 2.36, and a test looks at this machine's.
//!
//! The bytes are written through `/proc/self/mem`. The tempting alternative, to make the page writable for a moment,
//! takes its right to be executed away: a policy that does not give it back would leave libc without a page.

use rustix::io::{Errno, Result};

use crate::mapping::OwnMemory;

/// Bytes of a function that are looked at.
const SEEN: usize = 128;
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// A place for a jump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(usize);

impl Entry {
    /// The entry of the function at `address`, if it begins as a function does that makes the system call `number`.
    ///
    /// # Safety
    /// `address` must be that of a function in a library's code, not its last.
    #[must_use]
    pub unsafe fn of(address: usize, number: u32) -> Option<Self> {
        let code = std::ptr::with_exposed_provenance::<[u8; SEEN]>(address);
        // SAFETY: the caller's promise: code is readable, and more of it follows.
        let at = place(unsafe { &*code }, number)?;
        Some(Self(address + at))
    }

    /// Whether a jump from here reaches `target`.
    #[must_use]
    pub fn reaches(self, target: usize) -> bool {
        jump(self.0, target).is_some()
    }

    /// Makes the function jump to `target`.
    ///
    /// # Errors
    /// `RANGE` when the target is farther away than a jump reaches; what opening and writing `/proc/self/mem` give, and
    /// then nothing has changed.
    ///
    /// # Safety
    /// No other thread may run, and `target` must do what the function does, for good.
    pub unsafe fn jump_to(self, memory: &OwnMemory, target: usize) -> Result<()> {
        let code = jump(self.0, target).ok_or(Errno::RANGE)?;
        memory.write(self.0, &code)
    }
}

/// Where in the code a jump may begin.
fn place(code: &[u8; SEEN], number: u32) -> Option<usize> {
    let at = if code.starts_with(&ENDBR64) { 4 } else { 0 };
    let body = code.get(at..)?;
    let [a, b, c, d] = number.to_le_bytes();
    let enters = [0xb8, a, b, c, d, 0x0f, 0x05]; // mov $number, %eax; syscall
    let begins = [
        enters.as_slice(),
        &[0x49, 0x89, 0xca, 0xb8, a, b, c, d, 0x0f, 0x05], // mov %rcx, %r10 before it
        &[0x41, 0x89, 0xca, 0x41, 0xf7, 0xc1, 0xff, 0x0f, 0, 0, 0x75], // mmap: mov %ecx, %r10d; test $0xfff, %r9d
        &[0x41, 0xf7, 0xc1, 0xff, 0x0f, 0, 0, 0x75],                   // mmap: test $0xfff, %r9d
        &[0x48, 0x83, 0xec, 0x58, 0x4c, 0x89, 0x44, 0x24, 0x40], // mremap: a frame for its variable argument
    ];
    let known = begins.iter().any(|begin| body.starts_with(begin));
    let makes = body.windows(enters.len()).any(|window| window == enters);
    (known && makes).then_some(at)
}

/// A jump from `from` to `to`.
fn jump(from: usize, to: usize) -> Option<[u8; 5]> {
    let distance = to.wrapping_sub(from + 5).cast_signed();
    let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
    Some([0xe9, a, b, c, d])
}

/// A place near libraries from which functions far away are reached.
#[derive(Debug)]
pub struct Springboard {
    start: usize,
    used: usize,
}

impl Springboard {
    const STEP: usize = 16;
    const ROOM: usize = 4096;

    /// Makes one, where the kernel puts new mappings: close to libraries that it has just mapped.
    ///
    /// # Errors
    /// What mmap gives.
    pub fn new() -> Result<Self> {
        let start = crate::mapping::area_near_libraries(Self::ROOM)?;
        Ok(Self { start, used: 0 })
    }

    /// A place that jumps to `target`; nothing may jump there before [`Springboard::finish`].
    ///
    /// # Errors
    /// `NOMEM` when it is full.
    pub fn to(&mut self, target: usize) -> Result<usize> {
        if self.used + Self::STEP > Self::ROOM {
            return Err(Errno::NOMEM);
        }
        let at = self.start + self.used;
        self.used += Self::STEP;
        let mut code = [0xff, 0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]; // jmp *0(%rip)
        code.iter_mut()
            .skip(6)
            .zip(target.to_le_bytes())
            .for_each(|(to, from)| *to = from);
        let place = std::ptr::with_exposed_provenance_mut::<[u8; 14]>(at);
        // SAFETY: the area was made by `new`, has room, and no other thread knows it; bytes need no alignment.
        unsafe { place.write_unaligned(code) };
        Ok(at)
    }

    /// Makes it executable, and no longer writable.
    ///
    /// # Errors
    /// What mprotect(2) gives: some policies forbid it.
    pub fn finish(self) -> Result<()> {
        let args = [
            self.start,
            Self::ROOM,
            (libc::PROT_READ | libc::PROT_EXEC).cast_unsigned() as usize,
            0,
            0,
            0,
        ];
        // SAFETY: the area is this object's own.
        unsafe { crate::raw::call(libc::SYS_mprotect, args) }.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(bytes: &[u8]) -> [u8; SEEN] {
        let mut code = [0x90; SEEN];
        code[..bytes.len()].copy_from_slice(bytes);
        code
    }

    const MUNMAP: [u8; 7] = [0xb8, 11, 0, 0, 0, 0x0f, 0x05];

    #[test]
    fn what_is_not_understood_is_left_alone() {
        assert_eq!(place(&code(&MUNMAP), 11), Some(0));
        let marked: Vec<u8> = ENDBR64.iter().chain(&MUNMAP).copied().collect();
        assert_eq!(place(&code(&marked), 11), Some(4));
        assert_eq!(place(&code(&MUNMAP), 10), None, "another call");
        let patched = [0xe9, 1, 2, 3, 4, 0x0f, 0x05];
        assert_eq!(place(&code(&patched), 11), None, "another's jump");
        let first = [0x55, 0xb8, 11, 0, 0, 0, 0x0f, 0x05];
        assert_eq!(place(&code(&first), 11), None, "another first instruction");
        let mremap = [0x48, 0x83, 0xec, 0x58, 0x4c, 0x89, 0x44, 0x24, 0x40];
        assert_eq!(place(&code(&mremap), 25), None, "no system call follows");
    }

    #[test]
    fn jumps_reach_two_gibibytes() {
        assert_eq!(jump(0x1000, 0x1005), Some([0xe9, 0, 0, 0, 0]));
        assert_eq!(jump(0x2000, 0x1000), Some([0xe9, 0xfb, 0xef, 0xff, 0xff]));
        assert!(jump(0x7fff_0000_0000, 0x5555_0000_0000).is_none());
    }

    #[test]
    fn this_machines_libc_is_understood() {
        let names = [
            (c"munmap", 11),
            (c"madvise", 28),
            (c"mprotect", 10),
            (c"mmap", 9),
            (c"mremap", 25),
            (c"brk", 12),
        ];
        for (name, number) in names {
            // SAFETY: the name is terminated.
            let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
            // SAFETY: the function is one of libc's, which has others behind it.
            let entry = unsafe { Entry::of(found.expose_provenance(), number) };
            assert!(entry.is_some(), "{name:?}");
        }
    }

    #[test]
    fn a_springboard_leads_far() {
        extern "C" fn seven() -> i32 {
            7
        }
        let mut board = Springboard::new().unwrap();
        board.to(0).unwrap();
        let at = board.to(seven as *const () as usize).unwrap();
        board.finish().unwrap();
        // SAFETY: the place jumps to a function of this type.
        let function: extern "C" fn() -> i32 =
            unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<()>(at)) };
        assert_eq!(function(), 7);
    }
}
