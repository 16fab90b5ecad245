//! syscall(2), which makes any call by its number.
//!
//! Calls that change the rights of the program go the way of all such calls ([`rights`]), and calls over memory that of
//! theirs ([`enter`](fn@enter)); a table for either has a bit for each. Forks by number go the way of all forks
//! ([`fork`](super::fork)). Everything else enters the kernel as in libc's own function: from a leaf that touches
//! no stack, because there are calls that come back on another one. So does a fork that brings a stack of its own along:
//! windows wait for it, but its child returns at once, with the content of its stack. The code of a thread that
//! ends by number is noted, for the agent's thread may have to end the process with it (see `session/alone.rs`).

use std::ffi::{c_long, c_void};
use std::sync::atomic::AtomicPtr;

use super::call::{BITS, Bits, bits_of, is_readable};
use super::enter::{MEMORY, MEMORY_BITS, enter};
use super::entry::Hook;
use super::rights;
use crate::errno::fail;
use crate::lock::{begin_fork, end_fork};
use crate::thread::{self, is_barred};

/// For a libc that knows nothing of it.
pub(crate) const ATTACHED: &[Hook] = &[Hook::before(c"syscall", syscall as *const c_void, &OWN)];

/// libc's own, where this one stands before it.
static OWN: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// All that does not go to the kernel at once, for [`attached`](crate::attached): a thread that is about to make one of these calls is
/// not seen any more.
#[unsafe(no_mangle)]
static PAGEONE_NUMBERS: Bits = {
    const FORKS: &[i64] = &[libc::SYS_clone, libc::SYS_fork, libc::SYS_clone3];
    let parts = [bits_of(MEMORY), bits_of(rights::HOOKED), bits_of(FORKS)];
    let (mut all, mut word) = ([0; BITS / 64], 0);
    while word < all.len() {
        all[word] = parts[0][word] | parts[1][word] | parts[2][word];
        word += 1;
    }
    all
};

// The number is in rdi; the arguments are in rsi, rdx, rcx, r8, r9 and one on the stack. 56 is clone: its flags
// come first, its stack second. 57 is fork, 60 is exit. 435 is clone3: its structure has its flags at 0 and its
// stack at 40. With 0x100 (CLONE_VM) a child uses the parent's memory, and misses nothing. 8 begins a fork on
// another stack: six arguments, and the stack on its 16 bytes again for a call. Its child finds nothing of this
// stack; what `begin_fork` counted is zero there.
/// syscall(2).
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn syscall(number: c_long) -> c_long {
    core::arch::naked_asm!(
        "endbr64",
        "cmp $56, %rdi",
        "je 3f",
        "cmp $57, %rdi",
        "je 5f",
        "cmp $435, %rdi",
        "je 4f",
        "cmp $60, %rdi",
        "je 7f",
        "cmp ${bits}, %rdi",
        "jae 2f",
        "lea {rights_bits}(%rip), %rax",
        "bt %rdi, (%rax)",
        "jc {rights}",
        "lea {memory_bits}(%rip), %rax",
        "bt %rdi, (%rax)",
        "jc {memory}",
        // A thread may wait for long, as for a futex: not in the agent, which could not be taken out then.
        "2:",
        "mov {own}(%rip), %rax",
        "test %rax, %rax",
        "jz 22f",
        "jmp *%rax",
        "22:",
        "mov %rdi, %rax",
        "mov %rsi, %rdi",
        "mov %rdx, %rsi",
        "mov %rcx, %rdx",
        "mov %r8, %r10",
        "mov %r9, %r8",
        "mov 8(%rsp), %r9",
        "syscall",
        "cmp $-4095, %rax",
        "jae 6f",
        "ret",
        "3:",
        "mov %esi, %eax",
        "and ${files_mask}, %eax",
        "cmp ${shares}, %eax",
        "jne 32f",
        "movb $1, {own_files}(%rip)",
        "32:",
        "mov %esi, %eax",
        "and ${kin_mask}, %eax",
        "cmp ${shares}, %eax",
        "jne 33f",
        "movb $1, {siblings}(%rip)",
        "33:",
        "test $0x100, %esi",
        "jnz 2b",
        "test %rdx, %rdx",
        "jnz 8f",
        "jmp {fork}",
        "4:",
        "cmp $64, %rdx",
        "jb 2b",
        "test %rsi, %rsi",
        "jz 2b",
        "push %rdi",
        "push %rsi",
        "push %rdx",
        "push %rcx",
        "push %r8",
        "push %r9",
        "sub $8, %rsp",
        "mov %rsi, %rdi",
        "call {kind}",
        "add $8, %rsp",
        "pop %r9",
        "pop %r8",
        "pop %rcx",
        "pop %rdx",
        "pop %rsi",
        "pop %rdi",
        "cmp $1, %eax",
        "jb 2b",
        "ja 8f",
        "5:",
        "jmp {fork}",
        "6:",
        "mov %rax, %rdi",
        "jmp {failed}",
        "7:",
        "mov %esi, %edi",
        "jmp {exit}",
        "8:",
        "push %rdi",
        "push %rsi",
        "push %rdx",
        "push %rcx",
        "push %r8",
        "push %r9",
        "sub $8, %rsp",
        "call {begin}",
        "add $8, %rsp",
        "pop %r9",
        "pop %r8",
        "pop %r10",
        "pop %rdx",
        "pop %rsi",
        "pop %rax",
        "mov %rsi, %rdi",
        "mov %rdx, %rsi",
        "mov %r10, %rdx",
        "mov %r8, %r10",
        "mov %r9, %r8",
        "mov 8(%rsp), %r9",
        "syscall",
        "test %rax, %rax",
        "jz 9f",
        "push %rax",
        "call {end}",
        "pop %rax",
        "cmp $-4095, %rax",
        "jae 6b",
        "9:",
        "ret",
        own = sym OWN,
        fork = sym fork,
        begin = sym begin,
        end = sym end,
        kind = sym kind,
        failed = sym failed,
        exit = sym exit,
        memory = sym memory,
        bits = const BITS,
        files_mask = const thread::FILES_MASK,
        kin_mask = const thread::KIN_MASK,
        shares = const thread::SHARES,
        own_files = sym thread::OWN_FILES,
        siblings = sym thread::SIBLINGS,
        rights_bits = sym rights::HOOKED_BITS,
        memory_bits = sym MEMORY_BITS,
        rights = sym rights::by_number,
        options(att_syntax)
    )
}

extern "C" fn fork(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize) -> c_long {
    match super::fork::by_number(number, [a, b, c, d, e, 0]) {
        Ok(child) => child.cast_signed() as c_long,
        Err(errno) => fail(errno).into(),
    }
}

/// What clone3(2) makes of the structure at an address: 0 for a thread, what shares memory, or an error; 1 for a child
/// on a copy of this stack; 2 for one on another stack.
extern "C" fn kind(structure: usize) -> u32 {
    const STACK: usize = 5;
    if is_barred() || !is_readable(structure, 48) {
        return 0;
    }
    // SAFETY: the program hands the kernel these words, and they can be read.
    let words = unsafe {
        std::ptr::with_exposed_provenance::<[u64; STACK + 1]>(structure).read_unaligned()
    };
    #[allow(clippy::cast_possible_truncation)] // the flags that matter are low ones
    thread::note_clone(words[0] as u32);
    match (
        words[0] & libc::CLONE_VM.unsigned_abs() as u64,
        words[STACK],
    ) {
        (0, 0) => 1,
        (0, _) => 2,
        _ => 0,
    }
}

extern "C" fn begin() {
    begin_fork();
}

extern "C" fn end() {
    end_fork();
}

/// Calls over memory.
extern "C" fn memory(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    match enter(number, [a, b, c, d, e, f]) {
        Some(Ok(result)) => result.cast_signed() as c_long,
        Some(Err(errno)) => fail(errno).into(),
        None => fail(rustix::io::Errno::NOSYS).into(),
    }
}

extern "C" fn exit(code: i32) -> ! {
    // Where no agent may be, no thread reads it, and a filter may allow no call but this one.
    if !is_barred()
        && let Some(process) = crate::lock::existing()
        && !process.life.is_anothers()
    {
        process.note_exit(code);
    }
    sys::thread::leave(code)
}

extern "C" fn failed(result: c_long) -> c_long {
    let code = i32::try_from(-result).unwrap_or(0);
    fail(rustix::io::Errno::from_raw_os_error(code)).into()
}
