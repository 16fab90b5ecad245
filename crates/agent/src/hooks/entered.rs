//! System calls of a libc whose functions do more than enter the kernel: musl's round lengths, wait for robust mutexes and call
//! each other. A hook in the place of such a function would have to do all that, too. So `pageone attach` puts a jump over the instruction
//! that holds the call's number, and all before and behind it stays libc's own:
//!
//! ```text
//!   munmap:  push …                            munmap:  push …
//!            call __vm_wait                             call __vm_wait
//!            mov $11,%eax                               jmp ──▶ board: mov $11,%eax; mov %rbx,%rdi; call [`pageone_entered`]
//!            mov %rbx,%rdi                                       │
//!            syscall                                             │
//!            mov %rax,%rdi                              mov %rax,%rdi ◀──┘
//! ```
//!
//! So nothing may change but what the kernel changes: rax, rcx and r11. A result is the kernel's, with its negative error numbers.

use wire::attach::LEAVES;

use super::enter::enter;
use super::fork;
use super::rights;
use crate::lock::outlast_window;
use crate::passing;
use crate::table::touches;

// The number is in rax; the arguments are in rdi, rsi, rdx, r10, r8 and r9, as the kernel has them. The board has left the red
// zone behind. Code of this library uses the registers xmm0 to xmm15, whose upper halves it does not know.
/// Makes a system call as its hook would.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn pageone_entered() {
    core::arch::naked_asm!(
        "push %rbp",
        "mov %rsp, %rbp",
        "push %rdi",
        "push %rsi",
        "push %rdx",
        "push %r8",
        "push %r9",
        "push %r10",
        "sub $272, %rsp",
        "and $-16, %rsp",
        "movups %xmm0, 16(%rsp)",
        "movups %xmm1, 32(%rsp)",
        "movups %xmm2, 48(%rsp)",
        "movups %xmm3, 64(%rsp)",
        "movups %xmm4, 80(%rsp)",
        "movups %xmm5, 96(%rsp)",
        "movups %xmm6, 112(%rsp)",
        "movups %xmm7, 128(%rsp)",
        "movups %xmm8, 144(%rsp)",
        "movups %xmm9, 160(%rsp)",
        "movups %xmm10, 176(%rsp)",
        "movups %xmm11, 192(%rsp)",
        "movups %xmm12, 208(%rsp)",
        "movups %xmm13, 224(%rsp)",
        "movups %xmm14, 240(%rsp)",
        "movups %xmm15, 256(%rsp)",
        "mov %r9, (%rsp)",
        "mov %r8, %r9",
        "mov %r10, %r8",
        "mov %rdx, %rcx",
        "mov %rsi, %rdx",
        "mov %rdi, %rsi",
        "mov %rax, %rdi",
        "call {entered}",
        "movups 16(%rsp), %xmm0",
        "movups 32(%rsp), %xmm1",
        "movups 48(%rsp), %xmm2",
        "movups 64(%rsp), %xmm3",
        "movups 80(%rsp), %xmm4",
        "movups 96(%rsp), %xmm5",
        "movups 112(%rsp), %xmm6",
        "movups 128(%rsp), %xmm7",
        "movups 144(%rsp), %xmm8",
        "movups 160(%rsp), %xmm9",
        "movups 176(%rsp), %xmm10",
        "movups 192(%rsp), %xmm11",
        "movups 208(%rsp), %xmm12",
        "movups 224(%rsp), %xmm13",
        "movups 240(%rsp), %xmm14",
        "movups 256(%rsp), %xmm15",
        "lea -48(%rbp), %rsp",
        "pop %r10",
        "pop %r9",
        "pop %r8",
        "pop %rdx",
        "pop %rsi",
        "pop %rdi",
        "pop %rbp",
        "ret",
        entered = sym entered,
        options(att_syntax)
    )
}

extern "C" fn entered(
    number: i64,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    let args = [a, b, c, d, e, f];
    let made = match number {
        LEAVES => {
            leave(a, b);
            Ok(0)
        }
        libc::SYS_fork => fork::by_number(number, args),
        _ => enter(number, args).unwrap_or_else(|| rights::system_call(number, args)),
    };
    made.map_or_else(|errno| -(errno.raw_os_error() as isize), usize::cast_signed)
}

/// A thread is about to unmap its own stack, and to end, by libc's own instructions, which use no stack. No window takes a page of it out
/// until the thread is gone. The stack may be of one page, most of it used; libc has blocked all signals.
fn leave(start: usize, len: usize) {
    passing::note_of_leaving(start, len);
    if touches(start, len) {
        outlast_window();
    }
}
