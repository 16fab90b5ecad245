//! Where in a function of libc a jump to a hook may stand.
//!
//! A jump is five bytes. It replaces the beginning of **one instruction that is as long at least**. So no thread can
//! stand inside it: not one that is stopped there, not one whose signal handler will come back there. A thread before it
//! meets the jump, a thread behind it goes on as ever. What the function did before is undone on the way to the hook:
//!
//! ```text
//!   setuid:  sub $0x38,%rsp            setuid:  sub $0x38,%rsp            to the hook:  add $0x38,%rsp
//!            mov %fs:0x28,%rax                  jmp ──────────────────────────────────▶ jmp hook
//!            …                                  (rest of it)
//!                                               … ◀──────────────────────┐
//!                                      as it was:  sub $0x38,%rsp        │
//!                                                  mov %fs:0x28,%rax     │
//!                                                  jmp ──────────────────┘
//! ```
//!
//! The tempting alternative, to jump at the function's first byte and to look where each thread stands, has to find the
//! frames of signal handlers too. Nothing is written that is not understood: instructions that are not in the list below end the search.

/// How far into a function is looked.
pub(super) const SEEN: usize = 128;
/// Instructions that are looked at, along all ways: each condition doubles their number, and a stranger's code is what he made of it.
const MOST_STEPS: u32 = 1024;
/// A jump's length.
pub(super) const JUMP: usize = 5;

/// A place for a jump in a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Site {
    /// How far into the function.
    pub(super) at: usize,
    /// How long the instruction is that stands there.
    pub(super) len: usize,
    /// Code that undoes what the function has done before.
    pub(super) undo: Vec<u8>,
}

/// An instruction.
enum Step {
    /// It does nothing that a hook would see.
    Harmless(usize),
    /// It has to be undone.
    Undone(usize, Vec<u8>),
    /// A jump ahead, if a condition holds: how far behind it.
    Ahead(usize, usize),
    /// The function ends here, or goes on in another one.
    End,
}

/// The places in the function with this code; empty if it is not understood. There are several where it has several ways.
pub(super) fn sites(code: &[u8]) -> Vec<Site> {
    if let Some(site) = by_number(code).or_else(|| for_all_threads(code)) {
        return vec![site];
    }
    let mut found = Vec::new();
    let mut ways = vec![(0, Vec::new())];
    let mut left = MOST_STEPS;
    while let Some((mut at, mut undo)) = ways.pop() {
        loop {
            if left == 0 {
                return Vec::new();
            }
            left -= 1;
            let Some(step) = code.get(at..).and_then(step) else {
                return Vec::new();
            };
            let len = match step {
                Step::End => break,
                Step::Harmless(len) => len,
                // What the instruction itself does has not been done where it gives way to the jump.
                Step::Undone(len, back) => {
                    if len < JUMP {
                        undo.splice(0..0, back);
                    }
                    len
                }
                Step::Ahead(len, by) => {
                    ways.push((at + len + by, undo.clone()));
                    len
                }
            };
            if len >= JUMP {
                let site = Site { at, len, undo };
                if !found.contains(&site) {
                    found.push(site);
                }
                break;
            }
            at += len;
        }
    }
    found
}

/// syscall(2) moves all its arguments before its first long instruction.
fn by_number(code: &[u8]) -> Option<Site> {
    const MOVES: [u8; 18] = [
        0x48, 0x89, 0xf8, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6, 0x48, 0x89, 0xca, 0x4d, 0x89, 0xc2,
        0x4d, 0x89, 0xc8,
    ];
    const BACK: [u8; 18] = [
        0x4d, 0x89, 0xc1, // mov %r8, %r9
        0x4d, 0x89, 0xd0, // mov %r10, %r8
        0x48, 0x89, 0xd1, // mov %rdx, %rcx
        0x48, 0x89, 0xf2, // mov %rsi, %rdx
        0x48, 0x89, 0xfe, // mov %rdi, %rsi
        0x48, 0x89, 0xc7, // mov %rax, %rdi
    ];
    const SEVENTH: [u8; 5] = [0x4c, 0x8b, 0x4c, 0x24, 0x08]; // mov 8(%rsp), %r9
    let skip = if code.starts_with(&ENDBR64) { 4 } else { 0 };
    let body = code.get(skip..)?;
    let is_it = body.starts_with(&MOVES) && body.get(18..)?.starts_with(&SEVENTH);
    is_it.then(|| Site {
        at: skip + 18,
        len: 5,
        undo: BACK.to_vec(),
    })
}

/// musl's functions that set users and groups put the call's number before the arguments, and go on in one function for all of them. What
/// they write to registers in which the caller passed nothing needs no undoing.
fn for_all_threads(code: &[u8]) -> Option<Site> {
    // The moves of an argument, and the ones that move it back.
    const MOVES: [([u8; 2], [u8; 2]); 4] = [
        ([0x89, 0xfe], [0x89, 0xf7]), // mov %edi, %esi
        ([0x89, 0xfa], [0x89, 0xd7]), // mov %edi, %edx
        ([0x89, 0xf2], [0x89, 0xd6]), // mov %esi, %edx
        ([0x89, 0xd1], [0x89, 0xca]), // mov %edx, %ecx
    ];
    // 0 or -1 into ecx, edx or esi.
    const FILLS: [&[u8]; 6] = [
        &[0x31, 0xc9],
        &[0x31, 0xd2],
        &[0x83, 0xc9, 0xff],
        &[0x83, 0xce, 0xff],
        &[0xb9, 0xff, 0xff, 0xff, 0xff],
        &[0xbe, 0xff, 0xff, 0xff, 0xff],
    ];
    let (mut at, mut undo) = (0, Vec::new());
    loop {
        let rest = code.get(at..)?;
        if let Some((_, back)) = MOVES.iter().find(|(bytes, _)| rest.starts_with(bytes)) {
            undo.splice(0..0, *back);
            at += 2;
        } else if let Some(fill) = FILLS.iter().find(|bytes| rest.starts_with(bytes)) {
            at += fill.len();
        } else {
            // mov $number, %edi; jmp
            let is_last = matches!(rest, [0xbf, _, _, 0, 0, 0xe9 | 0xeb, ..]) && at > 0;
            return is_last.then_some(Site { at, len: 5, undo });
        }
    }
}

pub(super) const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

/// The instruction at the beginning of some code. All of them mean the same wherever they stand, but for the jumps.
fn step(code: &[u8]) -> Option<Step> {
    let starts = |bytes: &[u8]| code.starts_with(bytes);
    if starts(&ENDBR64) {
        return Some(Step::Harmless(4));
    }
    Some(match *code {
        [0xc3, ..] | [0xe9, ..] => Step::End,
        // A condition, as equal, not equal or above.
        [0x74 | 0x75 | 0x77, by @ 0..0x80, ..] => Step::Ahead(2, usize::from(by)),
        [0x0f, 0x84 | 0x85, by, next @ 0..4, 0, 0, ..] => {
            Step::Ahead(6, usize::from(by) | usize::from(next) << 8)
        }
        // push of a register that a function keeps
        [register @ (0x53 | 0x55), ..] => Step::Undone(1, vec![register + 8]),
        [0x41, register @ 0x54..=0x57, ..] => Step::Undone(2, vec![0x41, register + 8]),
        // push %rax, for its room alone
        [0x50, ..] => Step::Undone(1, vec![0x58]),
        // sub $byte, %rsp; sub $number, %rsp
        [0x48, 0x83, 0xec, by, ..] => Step::Undone(4, vec![0x48, 0x83, 0xc4, by]),
        [0x48, 0x81, 0xec, a, b, c, d, ..] => Step::Undone(7, vec![0x48, 0x81, 0xc4, a, b, c, d]),
        // mov $number, %eax; into another register only as the long instruction itself
        [0xb8..=0xbf, _, _, _, _, ..] => Step::Harmless(5),
        [0x48, 0xc7, 0xc0, _, _, _, _, ..] => Step::Harmless(7),
        // mov %fs:…, %rax
        [0x64, 0x48, 0x8b, 0x04, 0x25, _, _, _, _, ..] => Step::Harmless(9),
        // mov to 8-bit distances of %rsp: the function's own frame
        [
            0x48 | 0x4c,
            0x89,
            0x44 | 0x4c | 0x54 | 0x74 | 0x7c,
            0x24,
            0..0x80,
            ..,
        ] => Step::Harmless(5),
        [0x48, 0x89, 0x3c, 0x24, ..] => Step::Harmless(4),
        // lea of a place in the frame, or in the library, as the long instruction itself
        [0x48, 0x8d, 0x44, 0x24, _, ..] => Step::Harmless(5),
        [0x48, 0x8d, 0x3d, _, _, _, _, ..] => Step::Harmless(7),
        // mov between registers, to one that a function keeps (and has pushed), or %r10, %rax; mov %edi, %edi
        [
            0x48,
            0x89,
            0xfd | 0xf5 | 0xe5 | 0xfb | 0xf3 | 0xc8 | 0xf8,
            ..,
        ] => Step::Harmless(3),
        [0x49, 0x89, 0xca | 0xf4 | 0xfc, ..] | [0x4d, 0x89, 0xc2, ..] => Step::Harmless(3),
        [0x41, 0x89, 0xca | 0xf4 | 0xfc | 0xf5 | 0xfd, ..] => Step::Harmless(3),
        [0x89, 0xfd | 0xf5 | 0xfb | 0xf3 | 0xff, ..] => Step::Harmless(2),
        // xor %eax, %eax
        [0x31, 0xc0, ..] => Step::Harmless(2),
        // test and compare
        [0x85, 0xd2 | 0xff | 0xf6, ..] => Step::Harmless(2),
        [0x48, 0x85, 0xff | 0xd2 | 0xf6, ..] => Step::Harmless(3),
        [0x83, 0xf9 | 0xfa | 0xff | 0xfe, _, ..] => Step::Harmless(3),
        [0x41, 0xf7, 0xc1, _, _, _, _, ..] => Step::Harmless(7),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(code: &[u8]) -> Site {
        let mut all = sites(code);
        assert_eq!(all.len(), 1, "{code:x?}");
        all.remove(0)
    }

    #[test]
    fn a_jump_takes_the_place_of_one_instruction() {
        let munmap = [0xb8, 11, 0, 0, 0, 0x0f, 0x05];
        let site = Site {
            at: 0,
            len: 5,
            undo: vec![],
        };
        assert_eq!(only(&munmap), site);
        let marked: Vec<u8> = ENDBR64.iter().chain(&munmap).copied().collect();
        assert_eq!(only(&marked), Site { at: 4, ..site });
        let setuid = [
            0x48, 0x83, 0xec, 0x38, 0x64, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0,
        ];
        let site = Site {
            at: 4,
            len: 9,
            undo: vec![0x48, 0x83, 0xc4, 0x38],
        };
        assert_eq!(only(&setuid), site);
        let initgroups = [
            0x41, 0x54, 0x41, 0x89, 0xf4, 0x55, 0x48, 0x89, 0xfd, 0xbf, 3, 0, 0, 0,
        ];
        let site = Site {
            at: 9,
            len: 5,
            undo: vec![0x5d, 0x41, 0x5c],
        };
        assert_eq!(only(&initgroups), site);
    }

    #[test]
    fn each_way_of_a_function_gets_a_jump() {
        let mlock2 = [0x85, 0xd2, 0x74, 5, 0xb8, 1, 1, 0, 0, 0xb8, 2, 2, 0, 0, 0];
        let places: Vec<usize> = sites(&mlock2).iter().map(|site| site.at).collect();
        assert_eq!(places, [4, 9]);
        let advise = [
            0x31, 0xc0, 0x83, 0xfa, 4, 0x74, 7, 0xb8, 28, 0, 0, 0, 0x0f, 5, 0xc3,
        ];
        let places: Vec<usize> = sites(&advise).iter().map(|site| site.at).collect();
        assert_eq!(places, [7], "the other way ends");
    }

    #[test]
    fn an_instruction_that_gives_way_to_the_jump_is_not_undone() {
        // push %rbx; sub $0x90,%rsp
        let initgroups = [0x53, 0x48, 0x81, 0xec, 0x90, 0, 0, 0];
        let site = Site {
            at: 1,
            len: 7,
            undo: vec![0x5b],
        };
        assert_eq!(only(&initgroups), site);
    }

    #[test]
    fn what_musls_functions_moved_is_moved_back() {
        // setresuid, seteuid and setuid
        let number = [0xbf, 0x75, 0, 0, 0, 0xe9, 1, 2, 3, 4];
        for (moves, undo) in [
            (
                &[0x89, 0xd1, 0x89, 0xf2, 0x89, 0xfe][..],
                &[0x89, 0xf7, 0x89, 0xd6, 0x89, 0xca][..],
            ),
            (
                &[0x89, 0xfa, 0x83, 0xc9, 0xff, 0x83, 0xce, 0xff],
                &[0x89, 0xd7],
            ),
            (&[0x89, 0xfe, 0x31, 0xc9, 0x31, 0xd2], &[0x89, 0xf7]),
        ] {
            let site = only(&[moves, &number].concat());
            assert_eq!((site.at, site.len), (moves.len(), 5));
            assert_eq!(site.undo, undo);
        }
        assert_eq!(sites(&[0x89, 0xd1, 0xbf, 1, 0, 0, 0, 0xc3]), []);
    }

    #[test]
    fn code_whose_ways_have_no_end_is_not_understood() {
        let doubles = [0x74, 0].repeat(SEEN / 2);
        assert_eq!(sites(&doubles), []);
    }

    #[test]
    fn what_is_not_understood_has_no_place() {
        let others: [&[u8]; 5] = [
            &[],
            &[0xe8, 1, 2, 3, 4],
            &[0x48, 0x83],
            &[0x74, 0x7f, 0xb8, 1, 0, 0, 0],
            &[0x80, 0x3d, 1, 2, 3, 4, 0],
        ];
        for code in others {
            assert_eq!(sites(code), [], "{code:x?}");
        }
    }
}
