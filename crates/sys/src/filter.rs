//! Whether a seccomp filter lets the agent work: the program is read, not tried.
//!
//! A filter that kills ends the process that tries calls under it. To find out afterwards is too late: a window whose
//! mmap is refused loses the pages that it took out. The kernel runs a filter with nothing but the call's number, its
//! arguments, the architecture and the place of the instruction, so its answer can be worked out beforehand. Values that
//! are not known then (addresses, lengths, places) may be anything: a branch that rests on one goes both ways, and the worst
//! of all ways counts.
//!
//! The agent reads a filter that its program is about to install. `pageone attach` reads those that a process has.
//!
//! A filter has no loops. But it may branch on the unknown so often that there are too many ways: then it counts as
//! one that refuses.
//!
//! Source: `kernel/seccomp.c`, `Documentation/networking/filter.rst`.

pub mod calls;
pub mod nodes;

use libc::sock_filter;

/// A call, as far as it is known: `None` may be anything.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Its number.
    pub number: u32,
    /// Its arguments.
    pub args: [Option<u64>; 6],
}

/// What a filter does with a call, from the best to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Answer {
    /// The call is made.
    Allows,
    /// It fails with an error number, and nothing else happens.
    Fails,
    /// Anything else: a signal, an end, a tracer that is asked, a success that is none.
    Refuses,
}

/// The machine, as filters see it.
#[cfg(target_arch = "x86_64")]
pub const ARCHITECTURE: u32 = 0xC000_003E;
/// The machine, as filters see it.
#[cfg(target_arch = "aarch64")]
pub const ARCHITECTURE: u32 = 0xC000_00B7;

/// Bytes of what a filter can look at.
const DATA_BYTES: u32 = 64;
/// Instructions that are followed for one call. The longest filter has 4096.
const STEPS: usize = 65536;
/// Ways that wait to be followed.
const WAYS: usize = 24;
/// Words of a filter's memory.
const WORDS: usize = 16;

const KILL_PROCESS: u32 = 0x8000_0000;
const KILL_THREAD: u32 = 0;
const TRAP: u32 = 0x0003_0000;
const ERRNO: u32 = 0x0005_0000;
const LOG: u32 = 0x7ffc_0000;
const ALLOW: u32 = 0x7fff_0000;
/// The part of an answer that says what is done. The rest is an error's number, or says nothing.
const ACTION: u32 = 0xffff_0000;

#[derive(Clone, Copy, Default)]
struct State {
    at: usize,
    a: Option<u32>,
    x: Option<u32>,
    memory: [Option<u32>; WORDS],
}

/// Whether the filter lets the call through, whatever is not known of it.
#[must_use]
pub fn allows(filter: &[sock_filter], call: &Sample) -> bool {
    answer(filter, call) == Answer::Allows
}

/// The worst that the filter does with the call, whatever is not known of it.
#[must_use]
pub fn answer(filter: &[sock_filter], call: &Sample) -> Answer {
    let mut worst = Answer::Allows;
    let all = each_end(filter, ARCHITECTURE, call, |value| {
        worst = worst.max(Answer::of(value));
        worst != Answer::Refuses
    });
    if all { worst } else { Answer::Refuses }
}

/// Whether the filter keeps the call, of this architecture, from being made, whatever is not known of it. A tracer or another
/// process that is asked might have it made.
#[must_use]
pub fn bars(filter: &[sock_filter], architecture: u32, call: &Sample) -> bool {
    each_end(filter, architecture, call, |value| {
        let action = value.map(|value| value & ACTION);
        matches!(action, Some(KILL_PROCESS | KILL_THREAD | TRAP | ERRNO))
    })
}

/// Follows all ways and gives the value that each returns; `None` is not known. False as soon as `each` is, or where there are too many.
fn each_end(
    filter: &[sock_filter],
    architecture: u32,
    call: &Sample,
    mut each: impl FnMut(Option<u32>) -> bool,
) -> bool {
    let mut ways = [State::default(); WAYS];
    let mut waiting = 0;
    // The kernel begins with zeros.
    let mut state = State {
        a: Some(0),
        x: Some(0),
        ..State::default()
    };
    for _ in 0..STEPS {
        match step(filter, architecture, call, &mut state) {
            Next::On => {}
            Next::Both(other) => {
                let Some(way) = ways.get_mut(waiting) else {
                    return false;
                };
                (*way, waiting) = (other, waiting + 1);
            }
            Next::End(value) => {
                let goes_on = each(value);
                if waiting == 0 || !goes_on {
                    return goes_on;
                }
                waiting -= 1;
                state = ways.get(waiting).copied().unwrap_or_default();
            }
        }
    }
    false
}

impl Answer {
    /// Of what a filter returns; `None` is not known.
    fn of(value: Option<u32>) -> Self {
        match value.map(|value| (value & ACTION, value & !ACTION)) {
            Some((ALLOW | LOG, _)) => Self::Allows,
            // Without a number the call would seem to have been made.
            Some((ERRNO, 1..)) => Self::Fails,
            _ => Self::Refuses,
        }
    }
}

enum Next {
    On,
    /// And another way besides.
    Both(State),
    /// With this value, if it is known.
    End(Option<u32>),
}

impl Next {
    /// A filter that the kernel would not take, or that divides by nothing.
    const REFUSED: Self = Self::End(Some(KILL_THREAD));
}

fn step(filter: &[sock_filter], architecture: u32, call: &Sample, state: &mut State) -> Next {
    let Some(&sock_filter { code, jt, jf, k }) = filter.get(state.at) else {
        return Next::REFUSED;
    };
    state.at += 1;
    let word = usize::try_from(k).unwrap_or(WORDS);
    let source = if code & 0x08 == 0 { Some(k) } else { state.x };
    match code {
        0x20 => match load(architecture, call, k) {
            Ok(value) => state.a = value,
            Err(()) => return Next::REFUSED,
        },
        0x80 => state.a = Some(DATA_BYTES),
        0x81 => state.x = Some(DATA_BYTES),
        0x00 => state.a = Some(k),
        0x01 => state.x = Some(k),
        0x60 | 0x61 => match state.memory.get(word) {
            Some(&value) if code == 0x60 => state.a = value,
            Some(&value) => state.x = value,
            None => return Next::REFUSED,
        },
        0x02 | 0x03 => match state.memory.get_mut(word) {
            Some(place) => *place = if code == 0x02 { state.a } else { state.x },
            None => return Next::REFUSED,
        },
        0x07 => state.x = state.a,
        0x87 => state.a = state.x,
        0x06 | 0x16 => {
            return Next::End(if code == 0x06 { Some(k) } else { state.a });
        }
        0x05 => state.at += word_jump(k),
        0x15 | 0x1d | 0x25 | 0x2d | 0x35 | 0x3d | 0x45 | 0x4d => {
            return branch(code, (jt, jf), source, state);
        }
        0x84 => state.a = state.a.map(u32::wrapping_neg),
        _ => match compute(code, state.a, source) {
            Some(value) => state.a = value,
            None => return Next::REFUSED,
        },
    }
    Next::On
}

fn word_jump(k: u32) -> usize {
    usize::try_from(k).unwrap_or(usize::MAX / 2)
}

/// The word at an offset of what filters see.
fn load(architecture: u32, call: &Sample, offset: u32) -> Result<Option<u32>, ()> {
    if !offset.is_multiple_of(4) || offset >= DATA_BYTES {
        return Err(());
    }
    Ok(match offset {
        0 => Some(call.number),
        4 => Some(architecture),
        8 | 12 => None,
        _ => {
            let arg = usize::try_from((offset - 16) / 8).map_err(drop)?;
            let value = call.args.get(arg).copied().flatten();
            let shift = if offset.is_multiple_of(8) { 0 } else { 32 };
            #[allow(clippy::cast_possible_truncation)] // half of it is asked for
            value.map(|value| (value >> shift) as u32)
        }
    })
}

fn branch(code: u16, (jt, jf): (u8, u8), source: Option<u32>, state: &mut State) -> Next {
    let mut holds = *state;
    holds.at += usize::from(jt);
    state.at += usize::from(jf);
    let holds_if = |a: u32, b: u32| match code & 0xf0 {
        0x10 => a == b,
        0x20 => a > b,
        0x30 => a >= b,
        _ => a & b != 0,
    };
    match (state.a, source) {
        (Some(a), Some(b)) => {
            if holds_if(a, b) {
                *state = holds;
            }
            Next::On
        }
        _ => {
            if code & 0xf0 == 0x10 {
                holds.a = source;
            }
            Next::Both(holds)
        }
    }
}

/// `None` for what is no instruction of a filter; the inner one where the result is not known.
fn compute(code: u16, a: Option<u32>, b: Option<u32>) -> Option<Option<u32>> {
    // What the kernel does with a division by nothing is to refuse.
    let both = |f: fn(u32, u32) -> Option<u32>| match (a, b) {
        (Some(a), Some(b)) => f(a, b).map(Some),
        _ => Some(None),
    };
    match code & !0x08 {
        0x04 => both(|a, b| Some(a.wrapping_add(b))),
        0x14 => both(|a, b| Some(a.wrapping_sub(b))),
        0x24 => both(|a, b| Some(a.wrapping_mul(b))),
        0x34 if matches!(b, None | Some(0)) => None,
        0x34 => both(u32::checked_div),
        0x44 => both(|a, b| Some(a | b)),
        0x54 if b == Some(0) => Some(Some(0)),
        0x54 => both(|a, b| Some(a & b)),
        0x64 => both(|a, b| Some(a.wrapping_shl(b))),
        0x74 => both(|a, b| Some(a.wrapping_shr(b))),
        0xa4 => both(|a, b| Some(a ^ b)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An instruction of a filter.
    pub(super) fn code(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
        sock_filter { code, jt, jf, k }
    }

    fn sample(number: u32, first: Option<u64>) -> Sample {
        let mut args = [None; 6];
        args[0] = first;
        Sample { number, args }
    }

    /// Refuses call 9 unless the low half of its first argument has a bit of 6.
    fn picky() -> Vec<sock_filter> {
        vec![
            code(0x20, 0, 0, 0),
            code(0x15, 0, 3, 9),
            code(0x20, 0, 0, 16),
            code(0x45, 1, 0, 6),
            code(0x06, 0, 0, 0x0005_0001),
            code(0x06, 0, 0, ALLOW),
        ]
    }

    #[test]
    fn what_is_known_decides_and_what_is_not_may_be_anything() {
        let filter = picky();
        assert!(allows(&filter, &sample(8, None)));
        assert!(allows(&filter, &sample(9, Some(2))));
        assert!(allows(&filter, &sample(9, Some(0xffff_0004))));
        assert!(!allows(&filter, &sample(9, Some(1))));
        assert!(!allows(&filter, &sample(9, Some(6 << 32))));
        assert!(!allows(&filter, &sample(9, None)));
    }

    #[test]
    fn only_to_allow_is_to_allow() {
        for (answer, right) in [
            (ALLOW, true),
            (LOG, true),
            (ALLOW | 7, true),
            (0x7ff0_0000, false),
            (0x7fc0_0000, false),
            (0x0005_0026, false),
            (0x0003_0000, false),
            (0, false),
            (0x8000_0000, false),
        ] {
            let filter = [code(0x06, 0, 0, answer)];
            assert_eq!(allows(&filter, &sample(1, None)), right, "{answer:x}");
        }
    }

    #[test]
    fn the_worst_of_all_ways_counts() {
        for (number, wanted) in [
            (1, Answer::Fails),
            (0, Answer::Refuses),
            (0xffff, Answer::Fails),
        ] {
            let filter = [code(0x06, 0, 0, ERRNO | number)];
            assert_eq!(answer(&filter, &sample(1, None)), wanted);
        }
        // By an argument: an error, or the end.
        let filter = [
            code(0x20, 0, 0, 16),
            code(0x15, 1, 0, 6),
            code(0x06, 0, 0, ERRNO | 1),
            code(0x06, 0, 0, 0x8000_0000),
        ];
        assert_eq!(answer(&filter, &sample(1, Some(5))), Answer::Fails);
        assert_eq!(answer(&filter, &sample(1, Some(6))), Answer::Refuses);
        assert_eq!(answer(&filter, &sample(1, None)), Answer::Refuses);
    }

    #[test]
    fn programs_that_lead_nowhere_refuse() {
        assert!(!allows(&[], &sample(1, None)));
        assert!(!allows(&[code(0x05, 0, 0, 7)], &sample(1, None)));
        assert!(!allows(&[code(0x05, 0, 0, u32::MAX)], &sample(1, None)));
        assert!(!allows(&[code(0x20, 0, 0, 64)], &sample(1, None)));
        assert!(!allows(&[code(0x99, 0, 0, 0)], &sample(1, None)));
        assert!(!allows(
            &[code(0x34, 0, 0, 0), code(0x06, 0, 0, ALLOW)],
            &sample(1, None)
        ));
        // Forty branches on what is not known, one after the other.
        let mut many = vec![code(0x20, 0, 0, 24)];
        many.extend((0..40).map(|k| code(0x25, 0, 0, k)));
        many.push(code(0x06, 0, 0, ALLOW));
        assert!(!allows(&many, &sample(1, None)));
    }

    #[test]
    fn arithmetic_is_the_kernels() {
        let ends_with = |steps: &[sock_filter], wanted: u32| {
            let mut filter = steps.to_vec();
            filter.extend([
                code(0x15, 0, 1, wanted),
                code(0x06, 0, 0, ALLOW),
                code(0x06, 0, 0, 0),
            ]);
            allows(&filter, &sample(77, Some(5)))
        };
        let load = code(0x20, 0, 0, 16);
        assert!(ends_with(
            &[load, code(0x04, 0, 0, 3), code(0x24, 0, 0, 2)],
            16
        ));
        assert!(ends_with(&[load, code(0x84, 0, 0, 0)], 5u32.wrapping_neg()));
        assert!(ends_with(
            &[load, code(0x07, 0, 0, 0), code(0x0c, 0, 0, 0)],
            10
        ));
        assert!(ends_with(
            &[
                load,
                code(0x02, 0, 0, 3),
                code(0x00, 0, 0, 0),
                code(0x60, 0, 0, 3)
            ],
            5
        ));
        assert!(ends_with(&[code(0x80, 0, 0, 0), code(0x74, 0, 0, 2)], 16));
        assert!(ends_with(&[code(0x20, 0, 0, 24), code(0x54, 0, 0, 0)], 0));
    }
}
