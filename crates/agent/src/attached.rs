//! The agent in a process that runs already: put there from outside by `pageone attach`, without the loader.
//!
//! ```text
//!   pageone (crates/pageone/src/attach)            the process, whose threads a debugger's seize holds
//!   ─────────────────────────────────              ────────────────────────────────────────────────
//!   lays this library out, relocates it ──────────▶ the image, in memory of its own
//!   finds libc's functions, writes jumps ─────────▶ libc's entries ──▶ [`PAGEONE_HOOKS`]
//!   has a thread call ────────────────────────────▶ [`pageone_attached_begin`], `_start`, `_offer`
//! ```
//!
//! Nothing of the process's libraries serves this image but `errno`. The functions that the compiler calls to copy and compare memory,
//! and those by which std closes a descriptor, stand below, for a library that a loader sees, too (`build.rs`). All else that the
//! library is linked to is std's way to panic, and leads to [`pageone_missing`].
//!
//! The work that the constructor does otherwise is done from outside or here. The words of the environment come as
//! [`PAGEONE_WORDS`]; `pageone` notes libc's own functions. As libc's `_Fork` has a hook, no handlers of fork are needed.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::Ordering;

use crate::config;
use crate::errno::{c_result, fail};
use crate::hooks::entry::Hook;
use crate::hooks::{by_number, exports, fork, rights, takeover};
use crate::lock;
use crate::offer;
use crate::thread::is_barred;

/// The words that the environment holds elsewhere: `NAME=VALUE`, each ended by a zero, and one more at the end. Written before this image
/// is anywhere in a process.
#[repr(C)]
pub(crate) struct Words(UnsafeCell<[u8; wire::attach::WORDS_BYTES]>);

// SAFETY: nothing writes to it in the process.
unsafe impl Sync for Words {}

/// See [`Words`].
#[unsafe(no_mangle)]
pub(crate) static PAGEONE_WORDS: Words = Words(UnsafeCell::new([0; wire::attach::WORDS_BYTES]));

/// What is put at the entries of libc's functions.
const PARTS: [&[Hook]; 6] = [
    takeover::ATTACHED,
    exports::ATTACHED,
    rights::ATTACHED,
    rights::ATTACHED_BEFORE,
    fork::ATTACHED,
    by_number::ATTACHED,
];

/// One more for the end.
const COUNT: usize = {
    let (mut count, mut part) = (1, 0);
    while part < PARTS.len() {
        count += PARTS[part].len();
        part += 1;
    }
    count
};

/// All of them, one after the other.
const ALL: [Hook; COUNT] = {
    let mut all = [Hook::LAST; COUNT];
    let (mut at, mut part) = (0, 0);
    while part < PARTS.len() {
        let mut hook = 0;
        while hook < PARTS[part].len() {
            all[at] = PARTS[part][hook];
            at += 1;
            hook += 1;
        }
        part += 1;
    }
    all
};

/// All hooks; the last has no name. One without a hook is a variable of libc's, whose address is noted.
#[unsafe(no_mangle)]
pub(crate) static PAGEONE_HOOKS: [Hook; COUNT] = ALL;

/// What `pageone attach` is told: 0, or a negative error number.
fn told(done: rustix::io::Result<()>) -> isize {
    done.map_or_else(|errno| -(errno.raw_os_error() as isize), |()| 0)
}

/// Prepares the agent: a hook sees each of libc's calls from now on. It makes no thread and no memory, so it can be undone. So many seccomp
/// filters were read from outside, which allow all that the agent does. `unmapped` is 1 where root has no number. Gives 0, or an error number.
#[unsafe(no_mangle)]
extern "C" fn pageone_attached_begin(filters: usize, unmapped: usize) -> isize {
    crate::life::PAGEONE_OUTSIDE.store(crate::thread::process_number(), Ordering::Relaxed);
    crate::life::note_filters_from_outside(u32::try_from(filters).unwrap_or(0));
    if unmapped == 1 {
        crate::session::trust_unmapped();
    }
    // SAFETY: the image's own bytes, which nothing changes any more.
    let words = unsafe { &*PAGEONE_WORDS.0.get() };
    let variable = |name: &CStr| {
        let mut words = words.split(|&byte| byte == 0);
        words.find_map(|word| word.strip_prefix(name.to_bytes())?.strip_prefix(b"="))
    };
    // SAFETY: no other thread is in this image yet.
    unsafe { config::configure_by(variable) };
    config::note_attached();
    takeover::note_seen();
    let _ = sys::keys::exist();
    told(sys::mapping::find_locks_future())
}

/// Has the agent's thread begin, if all memory is to be offered. Gives 0, or an error number.
#[unsafe(no_mangle)]
extern "C" fn pageone_attached_start(_: usize, _: usize) -> isize {
    let Some(process) = lock::per_process() else {
        return -(libc::ENOMEM as isize);
    };
    process.life.has_lived.store(true, Ordering::Relaxed);
    crate::life::begin_for_all_memory();
    match is_barred() {
        true => -(libc::EPERM as isize),
        false => 0,
    }
}

/// Offers memory that the program offered to the kernel before. Gives 0, or an error number.
#[unsafe(no_mangle)]
extern "C" fn pageone_attached_offer(start: usize, len: usize) -> isize {
    match offer::take_over(start, len) {
        Ok(()) if is_barred() => -(libc::EPERM as isize),
        done => told(done),
    }
}

/// Ends the agent, before it is taken out; all memory is private then. Gives 0, or an error number, and then it goes on.
#[unsafe(no_mangle)]
extern "C" fn pageone_attached_end(_: usize, _: usize) -> isize {
    told(crate::life::end_for_detach())
}

/// Takes [`pageone_attached_end`] back. Gives 0.
#[unsafe(no_mangle)]
extern "C" fn pageone_attached_again(_: usize, _: usize) -> isize {
    crate::life::go_on_after_all();
    0
}

/// How many threads are in functions of libc's from where they come back to this image.
#[unsafe(no_mangle)]
extern "C" fn pageone_attached_beyond(_: usize, _: usize) -> isize {
    let page = lock::existing();
    let count = page.map_or(0, |page| page.beyond.load(Ordering::Relaxed));
    isize::try_from(count).unwrap_or(isize::MAX)
}

/// Unmaps all but the image, to which nothing leads any more. Gives 0.
///
/// # Safety
/// [`pageone_attached_end`] gave 0, the jumps are gone, and no other thread is in the image, nor will one come back to it.
#[unsafe(no_mangle)]
unsafe extern "C" fn pageone_attached_leave(_: usize, _: usize) -> isize {
    // SAFETY: as above.
    unsafe { crate::life::leave_nothing() };
    0
}

// rdi is the function, rsi and rdx its arguments. It never returns: a call with a mark tells the process that holds the
// thread that the function is done, with its result in rdi.
/// Where a thread is put that is to call a function of this image.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn pageone_attached_call(function: usize, a: usize, b: usize) -> ! {
    core::arch::naked_asm!(
        "xor %ebp, %ebp",
        "mov %rdi, %rax",
        "mov %rsi, %rdi",
        "mov %rdx, %rsi",
        "call *%rax",
        "mov %rax, %rdi",
        "2:",
        "mov ${done}, %eax",
        "movabs ${mark}, %rsi",
        "syscall",
        "jmp 2b",
        done = const wire::attach::DONE,
        mark = const wire::attach::DONE_MARK,
        options(att_syntax)
    )
}

/// Stands for every function of a library that this image does without.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn pageone_missing() -> ! {
    core::arch::naked_asm!("ud2")
}

/// memcpy(3), for memory of any length: the processor's own way.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn pageone_memcpy(
    to: *mut c_void,
    from: *const c_void,
    len: usize,
) -> *mut c_void {
    core::arch::naked_asm!(
        "mov %rdi, %rax",
        "mov %rdx, %rcx",
        "rep movsb",
        "ret",
        options(att_syntax)
    )
}

/// memmove(3). Backwards only where the target begins inside the source.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn pageone_memmove(
    to: *mut c_void,
    from: *const c_void,
    len: usize,
) -> *mut c_void {
    core::arch::naked_asm!(
        "mov %rdi, %rax",
        "mov %rdx, %rcx",
        "mov %rdi, %r8",
        "sub %rsi, %r8",
        "cmp %rdx, %r8",
        "jb 2f",
        "rep movsb",
        "ret",
        "2:",
        "lea -1(%rdi,%rdx), %rdi",
        "lea -1(%rsi,%rdx), %rsi",
        "std",
        "rep movsb",
        "cld",
        "ret",
        options(att_syntax)
    )
}

/// memset(3).
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn pageone_memset(at: *mut c_void, byte: i32, len: usize) -> *mut c_void {
    core::arch::naked_asm!(
        "mov %rdi, %r8",
        "mov %esi, %eax",
        "mov %rdx, %rcx",
        "rep stosb",
        "mov %r8, %rax",
        "ret",
        options(att_syntax)
    )
}

// 64 bytes at a time, then one by one from the place that differs.
/// memcmp(3), and bcmp(3).
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn pageone_memcmp(a: *const c_void, b: *const c_void, len: usize) -> i32 {
    core::arch::naked_asm!(
        "2:",
        "cmp $64, %rdx",
        "jb 3f",
        "movdqu (%rdi), %xmm0",
        "movdqu (%rsi), %xmm1",
        "movdqu 16(%rdi), %xmm2",
        "movdqu 16(%rsi), %xmm3",
        "pcmpeqb %xmm1, %xmm0",
        "pcmpeqb %xmm3, %xmm2",
        "movdqu 32(%rdi), %xmm4",
        "movdqu 32(%rsi), %xmm5",
        "movdqu 48(%rdi), %xmm6",
        "movdqu 48(%rsi), %xmm7",
        "pcmpeqb %xmm5, %xmm4",
        "pcmpeqb %xmm7, %xmm6",
        "pand %xmm2, %xmm0",
        "pand %xmm6, %xmm4",
        "pand %xmm4, %xmm0",
        "pmovmskb %xmm0, %eax",
        "cmp $0xffff, %eax",
        "jne 3f",
        "add $64, %rdi",
        "add $64, %rsi",
        "sub $64, %rdx",
        "jmp 2b",
        "3:",
        "test %rdx, %rdx",
        "jz 4f",
        "movzbl (%rdi), %eax",
        "movzbl (%rsi), %ecx",
        "inc %rdi",
        "inc %rsi",
        "dec %rdx",
        "sub %ecx, %eax",
        "jz 3b",
        "ret",
        "4:",
        "xor %eax, %eax",
        "ret",
        options(att_syntax)
    )
}

/// close(2), with which std lets go of a descriptor.
#[unsafe(no_mangle)]
extern "C" fn pageone_close(fd: u32) -> i32 {
    // SAFETY: the caller owns the descriptor.
    let closed = unsafe { sys::raw::call(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) };
    c_result(closed.map(drop))
}

/// fcntl(2), with which std asks in debug builds whether a descriptor that it closes is open.
#[unsafe(no_mangle)]
extern "C" fn pageone_fcntl(fd: u32, command: u32, argument: usize) -> i32 {
    let args = [fd as usize, command as usize, argument, 0, 0, 0];
    // SAFETY: the question changes nothing.
    match unsafe { sys::raw::call(libc::SYS_fcntl, args) } {
        Ok(told) => i32::try_from(told).unwrap_or(i32::MAX),
        Err(errno) => fail(errno),
    }
}

/// strlen(3).
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn pageone_strlen(text: *const c_char) -> usize {
    core::arch::naked_asm!(
        "xor %eax, %eax",
        "2:",
        "cmpb $0, (%rdi,%rax)",
        "je 3f",
        "inc %rax",
        "jmp 2b",
        "3:",
        "ret",
        options(att_syntax)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_copied_filled_and_compared_as_by_libc() {
        let source: Vec<u8> = (0..=250).chain(0..49).collect();
        for len in [0, 1, 15, 63, 64, 65, 128, 299] {
            let mut copy = vec![7_u8; 300];
            let (to, from) = (copy.as_mut_ptr().cast(), source.as_ptr().cast());
            // SAFETY: both have 300 bytes, and do not overlap.
            let back = unsafe { pageone_memcpy(to, from, len) };
            assert_eq!(back, to);
            assert_eq!(copy[..len], source[..len]);
            assert_eq!(copy[len], 7);
            // SAFETY: both have so many bytes.
            assert_eq!(unsafe { pageone_memcmp(to, from, len) }, 0);
            for at in 0..len {
                copy[at] = copy[at].wrapping_add(1);
                let to = copy.as_ptr().cast();
                // SAFETY: as above.
                let order = unsafe { pageone_memcmp(to, from, len) };
                assert_eq!(
                    order.signum(),
                    copy[..len].cmp(&source[..len]) as i32,
                    "{len} {at}"
                );
                copy[at] = source[at];
            }
        }
        for (to, from) in [(0, 10), (10, 0), (5, 5)] {
            let (mut ours, mut theirs) = (source.clone(), source.clone());
            theirs.copy_within(from..from + 200, to);
            let base = ours.as_mut_ptr();
            // SAFETY: 210 bytes lie there.
            unsafe { pageone_memmove(base.add(to).cast(), base.add(from).cast(), 200) };
            assert_eq!(ours, theirs);
        }
        let mut filled = vec![1_u8; 10];
        // SAFETY: 10 bytes lie there.
        unsafe { pageone_memset(filled.as_mut_ptr().cast(), 0x1fe, 9) };
        assert_eq!(
            filled,
            [0xfe, 0xfe, 0xfe, 0xfe, 0xfe, 0xfe, 0xfe, 0xfe, 0xfe, 1]
        );
        // SAFETY: the text is terminated.
        assert_eq!(unsafe { pageone_strlen(c"seven..".as_ptr()) }, 7);
    }
}
