//! Where a function of musl's enters the kernel. Its functions do more than that, so a hook takes the place of the system call alone
//! (the agent's `hooks/entered.rs`), and the jump stands where the function loads the call's number:
//!
//! ```text
//!   mov  $11,%eax     five bytes, one instruction: the jump
//!   mov  %rbx,%rdi    a few that only move: they are made on the board, too
//!   syscall
//! ```
//!
//! As at other [sites](super::site) no thread can stand inside the instruction. Nothing is written that is not understood: all of the
//! function is decoded, no jump of it may lead between the two, and what stands there may touch neither the stack nor the number.

use std::ops::Range;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};

use super::site::JUMP;

/// The functions of musl's whose system calls have hooks, and the calls' numbers. A function of musl's that is not here makes the same call
/// in a child of posix_spawn(3), for a file alone, or grows the heap of malloc, which takes nothing away.
pub(super) const GATES: [(&str, u32); 21] = [
    ("munmap", 11),
    ("madvise", 28),
    ("mprotect", 10),
    ("mmap", 9),
    ("mremap", 25),
    ("posix_madvise", 28),
    ("mlock", 149),
    ("mlock2", 325),
    ("munlock", 150),
    ("mlockall", 151),
    ("munlockall", 152),
    ("ioctl", IOCTL),
    ("capset", 126),
    ("setns", 308),
    ("unshare", 272),
    ("personality", 135),
    ("chroot", 161),
    ("pivot_root", 155),
    ("prctl", 157),
    ("_Fork", FORK),
    ("fork", FORK),
];
pub(super) const IOCTL: u32 = 16;
const FORK: u32 = 57;

/// How a thread of musl's ends that has to unmap its own stack: it makes two system calls, and uses none.
const END: [u8; 17] = [
    0xb8, 11, 0, 0, 0, 0x0f, 0x05, // mov $11,%eax; syscall
    0x48, 0x31, 0xff, // xor %rdi,%rdi
    0xb8, 60, 0, 0, 0, 0x0f, 0x05, // mov $60,%eax; syscall
];

/// A place in a function where it enters the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gate {
    /// The instruction that loads the number, of a jump's length.
    pub(super) at: usize,
    /// The `syscall` instruction.
    pub(super) enters: usize,
}

impl Gate {
    /// Behind the system call.
    pub(super) fn end(self) -> usize {
        self.enters + 2
    }
}

fn instructions(code: &[u8]) -> impl Iterator<Item = Instruction> {
    Decoder::with_ip(64, code, 0, DecoderOptions::NONE).into_iter()
}

/// Where this function makes the call with this number; `None` if that is not understood, or in several places.
pub(super) fn gate(code: &[u8], number: u32) -> Option<Gate> {
    let all: Vec<Instruction> = instructions(code).collect();
    if all.iter().any(Instruction::is_invalid) {
        return None;
    }
    let mut found = (0..all.len()).filter_map(|at| gate_at(all.get(at..)?, number));
    let gate = found.next().filter(|_| found.next().is_none())?;
    let leads_between = |instruction: &Instruction| {
        let is_near = matches!(instruction.op0_kind(), OpKind::NearBranch64);
        let to = usize::try_from(instruction.near_branch64()).ok();
        is_near && to.is_some_and(|to| gate.at < to && to <= gate.enters)
    };
    (!all.iter().any(leads_between)).then_some(gate)
}

fn gate_at(code: &[Instruction], number: u32) -> Option<Gate> {
    /// So many instructions stand between, at most.
    const MOST: usize = 8;
    let (load, behind) = code.split_first()?;
    let loads = load.code() == Code::Mov_r32_imm32
        && load.op0_register() == Register::EAX
        && load.immediate32() == number
        && load.len() == JUMP;
    let moves = behind
        .iter()
        .take_while(|instruction| only_moves(instruction));
    let enters = behind.get(moves.count().min(MOST))?;
    (loads && enters.code() == Code::Syscall).then(|| Gate {
        at: usize::try_from(load.ip()).unwrap_or(usize::MAX),
        enters: usize::try_from(enters.ip()).unwrap_or(usize::MAX),
    })
}

/// Whether an instruction means the same wherever it stands, goes on to the next one, and leaves rax and the stack alone.
fn only_moves(instruction: &Instruction) -> bool {
    let goes_on = instruction.flow_control() == FlowControl::Next;
    let is_far = instruction.is_ip_rel_memory_operand() || instruction.is_stack_instruction();
    let register = match instruction.op0_kind() {
        OpKind::Register => instruction.op0_register().full_register(),
        _ => Register::None,
    };
    goes_on
        && !is_far
        && instruction.code() != Code::Syscall
        && ![Register::RAX, Register::RSP].contains(&register)
}

/// Where libc's code ends a thread that unmaps its own stack: the place of its first system call.
pub(super) fn end_of_thread(libc: &[u8]) -> Option<Gate> {
    let found = libc.windows(END.len()).enumerate();
    let mut found = found.filter(|(_, code)| *code == END);
    let (at, _) = found.next()?;
    found.next().is_none().then_some(Gate {
        at,
        enters: at + JUMP,
    })
}

/// Where the first jump of a function leads that leaves `libc`; its code lies at `at`.
pub(super) fn leads_away(code: &[u8], at: u64, libc: &Range<u64>) -> Option<u64> {
    let jumps = instructions(code).filter(|one| one.code() == Code::Jmp_rel32_64);
    let mut targets = jumps.map(|jump| at.wrapping_add(jump.near_branch64()));
    targets.find(|to| !libc.contains(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// mov %rdi,%rbx; mov $11,%eax; mov %rbx,%rdi; syscall; mov %rax,%rdi; ret
    const MUNMAP: [u8; 17] = [
        0x48, 0x89, 0xfb, 0xb8, 11, 0, 0, 0, 0x48, 0x89, 0xdf, 0x0f, 0x05, 0x48, 0x89, 0xc7, 0xc3,
    ];

    #[test]
    fn a_gate_is_the_place_of_the_number() {
        let gate = gate(&MUNMAP, 11).unwrap();
        assert_eq!(gate, Gate { at: 3, enters: 11 });
        assert_eq!(gate.end(), 13);
    }

    #[test]
    fn what_is_not_understood_has_no_gate() {
        let with = |at: usize, bytes: &[u8]| {
            let mut code = MUNMAP.to_vec();
            code.splice(at..at, bytes.iter().copied());
            gate(&code, 11)
        };
        assert_eq!(gate(&MUNMAP, 10), None, "another call");
        assert_eq!(with(8, &[0x50]), None, "a push between");
        assert_eq!(with(8, &[0x89, 0xf8]), None, "another number between");
        assert_eq!(
            with(8, &[0x48, 0x8b, 0x3d, 0, 0, 0, 0]),
            None,
            "a distance between"
        );
        assert_eq!(
            with(0, &[0xeb, 13]),
            Some(Gate { at: 5, enters: 13 }),
            "a jump behind it"
        );
        assert_eq!(with(0, &[0xeb, 8]), None, "a jump between");
        assert_eq!(
            with(0, &[0x74, 3]),
            Some(Gate { at: 5, enters: 13 }),
            "a jump to it"
        );
        assert_eq!(with(16, &[0x06]), None, "no instruction");
        assert_eq!(gate(&[MUNMAP, MUNMAP].concat(), 11), None, "two");
    }

    #[test]
    fn the_end_of_a_thread_is_one_place() {
        let code = [&[0x90; 7], &END[..], &[0xc3]].concat();
        assert_eq!(end_of_thread(&code), Some(Gate { at: 7, enters: 12 }));
        assert_eq!(end_of_thread(&[&code[..], &code].concat()), None);
        assert_eq!(end_of_thread(&MUNMAP), None);
    }

    #[test]
    fn a_jump_out_of_libc_is_told_from_its_own() {
        // A jump of libc's own, and one that is far away.
        let code = [0xe9, 0x10, 0, 0, 0, 0xe9, 0, 0, 0x10, 0];
        let libc = 0x7000..0x8000;
        assert_eq!(
            leads_away(&code, 0x7100, &libc),
            Some(0x7100 + 10 + 0x10_0000)
        );
        assert_eq!(leads_away(&code[..5], 0x7100, &libc), None);
    }
}
