//! Whether the seccomp filters of a process let an agent come and work. They are read while its threads are held, and never tried: one
//! that kills would end the process.
//!
//! **What must hold**: when a thread of the process makes its first call for us, all filters of all its threads allow each call from
//! outside, and each call of the agent's table.
//!
//! | what could break it | what stops it |
//! |---|---|
//! | a filter comes after they were read, also from another thread | they are read while all threads stand, and none goes on before hooks see the next one |
//! | one thread alone has another filter | all are read; that differ they must not, for the agent's thread inherits from one |
//! | a filter allows a call with some arguments only | it counts as one that refuses, if the arguments are not known beforehand |
//! | the kernel shows no filter | the process is refused |
//! | memory has a policy, and no call for policies can be made | its mappings are looked at when all threads have the filters ([`nodes`](sys::filter::nodes)) |
//! | what was decided is another program's by now | the instructions themselves are the key |

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use sys::filter::calls::{ATTACH, CALLS, Call, first_needed};
use sys::filter::nodes::{Nodes, is_for_nodes};
use sys::seize::{Filters, Program, instructions};

/// What was found out about filters.
#[derive(Default)]
pub(super) struct Judge(BTreeMap<Program, Verdict>);

#[derive(Clone, Copy)]
struct Verdict {
    /// A call that is needed, but for those for nodes.
    refused: Option<&'static Call>,
    nodes: Nodes,
}

impl Verdict {
    fn of(program: &Program) -> Self {
        let filter = instructions(program);
        let all = CALLS.iter().chain(ATTACH);
        Self {
            refused: first_needed(&filter, all.filter(|call| !is_for_nodes(call))),
            nodes: Nodes::of(&filter),
        }
    }
}

/// The filters of all threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Judged {
    /// How many each thread has.
    pub(super) count: usize,
    /// Whether an agent can do its work only if no memory has a policy: it can neither ask for one nor give it.
    pub(super) bar_nodes: bool,
}

impl Judge {
    /// Refuses a thread whose filters do not let all calls be made. To find this out takes some time for each filter, the first time.
    ///
    /// # Errors
    /// The call, and what can be done.
    pub(super) fn one(&mut self, filters: &Filters) -> Result<Judged> {
        let mut nodes = Nodes::default();
        for program in &filters.programs {
            let verdict = match self.0.get(program) {
                Some(known) => *known,
                None => {
                    let verdict = Verdict::of(program);
                    self.0.insert(program.clone(), verdict);
                    verdict
                }
            };
            verdict.refused.map_or(Ok(()), refuse)?;
            nodes = nodes.and(&verdict.nodes);
        }
        nodes.needed().map_or(Ok(()), refuse)?;
        Ok(Judged {
            count: filters.programs.len(),
            bar_nodes: nodes.are_barred(),
        })
    }

    /// The same of all threads of a process, which stand still.
    ///
    /// # Errors
    /// As `one`; threads that differ.
    pub(super) fn all<E>(
        &mut self,
        own: &Filters,
        others: impl Iterator<Item = Result<(u32, Filters), E>>,
    ) -> Result<Judged>
    where
        anyhow::Error: From<E>,
    {
        let judged = self.one(own)?;
        for other in others {
            let (thread, filters) = other?;
            if filters != *own {
                self.one(&filters)?;
                bail!(
                    "its thread {thread} has other seccomp filters than another one (or no_new_privs), and no agent serves threads of different rights"
                );
            }
        }
        Ok(judged)
    }
}

fn refuse(Call { name, why, .. }: &Call) -> Result<()> {
    bail!(
        "a seccomp filter of its does not let {name}(2) be made in each way that the agent needs ({why}): allow that call \
         in its sandbox, or leave the process to the kernel's KSM"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWS: u64 = 0x7fff_0000_0000_0006;

    fn filters(programs: &[&[u64]]) -> Filters {
        Filters {
            no_new_privs: true,
            programs: programs.iter().map(|program| program.to_vec()).collect(),
        }
    }

    fn told(filters: &[(u32, Filters)]) -> impl Iterator<Item = Result<(u32, Filters)>> {
        filters.iter().cloned().map(Ok)
    }

    #[test]
    fn all_threads_must_have_the_same_filters_and_each_must_allow_all() {
        let mut judge = Judge::default();
        let well = filters(&[&[ALLOWS], &[ALLOWS]]);
        let same = [(7, well.clone()), (8, well.clone())];
        let judged = |count| Judged {
            count,
            bar_nodes: false,
        };
        assert_eq!(judge.all(&well, told(&same)).unwrap(), judged(2));
        let none = judge.all(&Filters::default(), told(&[])).unwrap();
        assert_eq!(none, judged(0));
        let refused = |judge: &mut Judge, own: &Filters, other: &Filters| {
            let told = judge.all(own, told(&[(7, well.clone()), (8, other.clone())]));
            format!("{:#}", told.unwrap_err())
        };
        // Strict mode, as `sys` shows it.
        let strict = filters(&[&[ALLOWS], &[6]]);
        assert!(refused(&mut judge, &well, &strict).contains("does not let wait4"));
        assert!(refused(&mut judge, &strict, &well).contains("does not let wait4"));
        for other in [filters(&[&[ALLOWS]]), Filters::default()] {
            let told = refused(&mut judge, &well, &other);
            assert!(told.contains("its thread 8 has other"), "{told}");
        }
        let privileged = Filters {
            no_new_privs: false,
            ..well.clone()
        };
        assert!(refused(&mut judge, &well, &privileged).contains("thread 8"));
    }

    #[test]
    fn the_code_of_the_agent_must_be_mapped() {
        // Refuses mmap that makes memory executable.
        let word = |code: u64, jt: u64, jf: u64, k: u64| code | jt << 16 | jf << 24 | k << 32;
        let program = [
            word(0x20, 0, 0, 0),
            word(0x15, 0, 3, 9),
            word(0x20, 0, 0, 32),
            word(0x45, 0, 1, 4),
            word(0x06, 0, 0, 0x8000_0000),
            ALLOWS,
        ];
        let told = Judge::default().one(&filters(&[&program]));
        let told = format!("{:#}", told.unwrap_err());
        assert!(
            told.contains("mmap(2)") && told.contains("room for"),
            "{told}"
        );
    }
}
