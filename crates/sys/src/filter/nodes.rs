//! Whether filters keep a program from giving memory nodes of its own: then the agent can do without the two calls for them.
//!
//! Docker's own profile refuses `get_mempolicy(2)` and `mbind(2)` without `CAP_SYS_NICE`. The agent asks for a mapping's policy and gives
//! it to the mapping that takes its place, so that a merge loses none. It needs neither call where no mapping has a policy, and
//! none will.
//!
//! **What must hold** for a process that runs already: no mapping has a policy, from a moment on from which no thread can give it one.
//!
//! | what could break it | what stops it |
//! |---|---|
//! | a thread gives memory a policy later | all filters of all threads are read, and keep mbind from being made: by its number, by those of x32 and of 32-bit programs |
//! | a filter is taken off | the kernel takes none off, and a thread inherits all |
//! | a policy from before the filters | `/proc/PID/numa_maps` shows each mapping's, and is read when all threads have the filters |
//! | set_mempolicy(2) | it is about a thread's new pages, not about a mapping. numa_maps shows it for each mapping without a policy, and the process is refused |
//! | `set_mempolicy_home_node(2)` | it changes policies that are there alone |
//!
//! **The limit**: a process that shares the memory and is no thread of it (clone(2) with `CLONE_VM` alone), from before the filters.

use libc::sock_filter;

use super::calls::{CALLS, Call, worst};
use super::{ARCHITECTURE, Answer, Sample, bars};

/// The calls in all the ways that a process has to make them: the architecture, and the number there.
#[cfg(target_arch = "x86_64")]
const WAYS: [(u32, i64); 4] = [
    (ARCHITECTURE, NUMBERS[0]),
    (ARCHITECTURE, NUMBERS[1]),
    (ARCHITECTURE, libc::SYS_mbind | X32),
    (I386, I386_MBIND),
];
/// The same.
#[cfg(not(target_arch = "x86_64"))]
const WAYS: [(u32, i64); 2] = [(ARCHITECTURE, NUMBERS[0]), (ARCHITECTURE, NUMBERS[1])];

/// The bit of calls of x32 programs.
#[cfg(target_arch = "x86_64")]
const X32: i64 = 0x4000_0000;
/// 32-bit programs, as filters see them.
#[cfg(target_arch = "x86_64")]
const I386: u32 = 0x4000_0003;
#[cfg(target_arch = "x86_64")]
const I386_MBIND: i64 = 274;

/// The numbers of the two calls.
pub const NUMBERS: [i64; 2] = [libc::SYS_get_mempolicy, libc::SYS_mbind];

/// Whether it is one of the two calls.
#[must_use]
pub fn is_for_nodes(call: &Call) -> bool {
    NUMBERS.contains(&call.number)
}

/// What filters do with the two calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nodes {
    /// The first that they do not let be made.
    refused: Option<&'static Call>,
    /// Whether they do anything but have it fail.
    kill: bool,
    /// Which ways are barred, a bit each.
    barred: u8,
}

impl Nodes {
    /// Of one filter.
    #[must_use]
    pub fn of(filter: &[sock_filter]) -> Self {
        let mut nodes = Self::default();
        for call in CALLS.iter().filter(|call| is_for_nodes(call)) {
            let answer = worst(filter, call);
            if answer != Answer::Allows {
                nodes.refused = nodes.refused.or(Some(call));
                nodes.kill |= answer == Answer::Refuses;
            }
        }
        for (bit, &(architecture, number)) in WAYS.iter().enumerate() {
            let number = u32::try_from(number).unwrap_or(u32::MAX);
            let sample = Sample {
                number,
                args: [None; 6],
            };
            nodes.barred |= u8::from(bars(filter, architecture, &sample)) << bit;
        }
        nodes
    }

    /// Of both filters, which a thread has.
    #[must_use]
    pub fn and(self, other: &Self) -> Self {
        Self {
            refused: self.refused.or(other.refused),
            kill: self.kill || other.kill,
            barred: self.barred | other.barred,
        }
    }

    /// The call that is refused though an agent may need it.
    #[must_use]
    pub fn needed(&self) -> Option<&'static Call> {
        const ALL: u8 = (1 << WAYS.len()) - 1;
        self.refused.filter(|_| self.kill || self.barred != ALL)
    }

    /// Whether an agent can do without both calls, if no memory has a policy.
    #[must_use]
    pub fn are_barred(&self) -> bool {
        self.refused.is_some() && self.needed().is_none()
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::tests::code;
    use super::*;

    const ALLOW: u32 = 0x7fff_0000;
    const FAIL: u32 = 0x0005_0001;

    /// Does something with calls of a number, whatever the architecture, and allows the others.
    fn refuses(number: i64, answer: u32) -> Nodes {
        Nodes::of(&[
            code(0x20, 0, 0, 0),
            code(0x15, 0, 1, u32::try_from(number).expect("a small number")),
            code(0x06, 0, 0, answer),
            code(0x06, 0, 0, ALLOW),
        ])
    }

    /// All ways one after the other, each with its answer.
    fn all(answers: [u32; 4]) -> Nodes {
        let each = WAYS.iter().zip(answers);
        each.fold(Nodes::default(), |nodes, (&(_, number), answer)| {
            nodes.and(&refuses(number, answer))
        })
    }

    #[test]
    fn an_agent_does_without_calls_that_fail_in_each_way() {
        assert!(all([FAIL; 4]).are_barred());
        assert!(!Nodes::default().are_barred() && Nodes::default().needed().is_none());
        let name = |nodes: Nodes| nodes.needed().map(|call| call.name);
        for left in 0..4 {
            let mut answers = [FAIL; 4];
            answers[left] = ALLOW;
            assert!(name(all(answers)).is_some(), "{left}");
            // What asks another process may have it made; a signal for the agent's own calls is the end.
            answers[left] = 0x7fc0_0000;
            assert!(name(all(answers)).is_some(), "{left}");
            answers[left] = 0x8000_0000;
            assert_eq!(name(all(answers)).is_some(), left < 2, "{left}");
        }
        assert_eq!(
            name(refuses(libc::SYS_mbind, FAIL)),
            Some("mbind"),
            "policies can be read, and not be given again"
        );
    }

    #[test]
    fn a_call_that_is_made_with_some_arguments_is_not_barred() {
        // mbind with a mode of 0 alone.
        let filter = [
            code(0x20, 0, 0, 0),
            code(0x15, 0, 2, 237),
            code(0x20, 0, 0, 32),
            code(0x15, 0, 1, 0),
            code(0x06, 0, 0, ALLOW),
            code(0x06, 0, 0, FAIL),
        ];
        assert!(Nodes::of(&filter).needed().is_some());
        assert!(Nodes::of(&[code(0x06, 0, 0, FAIL)]).are_barred());
    }
}
