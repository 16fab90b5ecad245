//! The kernel's figures of a run at one moment, and the saved bytes that follow from them.
//!
//! No counter of an engine is asked. Each term of the sums is a reading of /proc:
//!
//! ```text
//!  saved = what the guests' memory was before they offered it  Σ Pss_Anon of each guest, at that moment
//!        − what it is now                                      Σ Pss_Anon of the guests
//!        − the stores                                          frames of all memory files of engine and guests, mapped or not
//!  net   = saved − growth of the guests' page tables           VmPTE, since the same moment
//!                − growth of slab                              SUnreclaim of the machine: KSM's items, mappings
//!                − the engine's own memory                     its Pss_Anon and VmPTE
//! ```
//!
//! KSM's pages are anonymous, and count by parts in Pss_Anon. Merged pages of PageONE are pages of a memory file. A frame that no process has
//! mapped is in no PSS, so the files are counted as a whole.
//!
//! An agent is a thread with a name of its own in each guest. So its CPU time is apart from that of the guest's work.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use sys::cpus::CpuTimes;
use sys::meminfo::MemInfo;
use sys::usage;
use wire::AGENT_THREAD;

use crate::bench::error::BenchError;
use crate::bench::measure::{difference, memory_now};

/// What guests had just before they offered their memory, each at its own time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Before {
    /// Anonymous memory, by parts.
    pub(super) memory: u64,
    /// Page tables.
    pub(super) page_tables: u64,
}

impl Before {
    /// What the guest `pid` has now.
    ///
    /// # Errors
    /// It has gone.
    pub(super) fn of(pid: u32) -> Result<Self, BenchError> {
        let read = || {
            Ok(Self {
                memory: usage::proportional_anonymous_bytes(pid)?,
                page_tables: usage::page_table_bytes(pid)?,
            })
        };
        read().map_err(BenchError::system("cannot read a guest's memory"))
    }
}

impl std::iter::Sum for Before {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            memory: sum.memory + one.memory,
            page_tables: sum.page_tables + one.page_tables,
        })
    }
}

/// One look at the machine, the engine and the guests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reading {
    pub(super) at: Instant,
    /// Anonymous memory of all guests, by parts.
    pub(super) guests: u64,
    /// Frames of all memory files.
    pub(super) stores: u64,
    /// Anonymous memory and page tables of the engine.
    pub(super) engine: u64,
    /// Page tables of all guests.
    pub(super) page_tables: u64,
    /// SUnreclaim.
    pub(super) slab: u64,
    /// MemAvailable, with the free lists of the processors.
    pub(super) available: u64,
    /// CPU time of the engine, daemon or kernel thread.
    pub(super) engine_cpu: Duration,
    /// CPU time of the agents.
    pub(super) agents_cpu: Duration,
    /// CPU time of the guests' other threads: their work, with the faults in it.
    pub(super) work_cpu: Duration,
    /// Page faults of the guests that needed no disk.
    pub(super) faults: u64,
    /// What all processors did.
    pub(super) machine: CpuTimes,
}

impl Reading {
    /// Looks at the `guests` and at the process or kernel thread of the engine.
    ///
    /// # Errors
    /// A process has gone, or its figures are not for this user.
    pub(super) fn take(engine: Option<u32>, guests: &[u32]) -> Result<Self, BenchError> {
        let memory = memory_now()?;
        let read = Self::read(memory, engine, guests);
        read.map_err(BenchError::system("cannot read what a run uses"))
    }

    fn read(memory: MemInfo, engine: Option<u32>, guests: &[u32]) -> io::Result<Self> {
        let mut this = Self {
            at: Instant::now(),
            guests: 0,
            stores: 0,
            engine: 0,
            page_tables: 0,
            slab: memory.slab_unreclaimable,
            available: memory.available,
            engine_cpu: Duration::ZERO,
            agents_cpu: Duration::ZERO,
            work_cpu: Duration::ZERO,
            faults: 0,
            machine: CpuTimes::read()?,
        };
        let mut files = HashMap::new();
        for &pid in guests {
            this.guests += usage::proportional_anonymous_bytes(pid)?;
            this.page_tables += usage::page_table_bytes(pid)?;
            let agent = usage::threads_cpu_time(pid, &AGENT_THREAD.to_string_lossy())?;
            this.agents_cpu += agent;
            this.work_cpu += usage::cpu_time(pid)?.saturating_sub(agent);
            this.faults += usage::minor_faults(pid)?;
            files.extend(usage::memory_files(pid)?);
        }
        if let Some(pid) = engine {
            this.engine_cpu = usage::cpu_time(pid)?;
            // A kernel thread has no memory of its own, and no page tables.
            if let Ok(own) = usage::proportional_anonymous_bytes(pid) {
                this.engine = own + usage::page_table_bytes(pid)?;
                files.extend(usage::memory_files(pid)?);
            }
        }
        this.stores = files.values().sum();
        Ok(this)
    }

    /// Bytes that guests and engine take of the machine. Slab is left out: it is not told by process.
    pub(super) fn used(&self) -> u64 {
        self.guests + self.stores + self.engine + self.page_tables
    }

    /// Bytes that the guests have less than `before`.
    pub(super) fn saved(&self, before: Before) -> i64 {
        difference(before.memory, self.guests.saturating_add(self.stores))
    }

    /// Bytes that it costs to have them: what the engine has for itself, and what the kernel has more than before, slab since `begin`.
    pub(super) fn overhead(&self, before: Before, begin: &Self) -> i64 {
        let own = i64::try_from(self.engine).unwrap_or(i64::MAX);
        let page_tables = difference(self.page_tables, before.page_tables);
        own + page_tables + difference(self.slab, begin.slab)
    }

    /// CPU time of the engine and the agents.
    pub(super) fn merging(&self) -> Duration {
        self.engine_cpu + self.agents_cpu
    }

    /// CPU time of engine, agents and the guests' work.
    pub(super) fn all(&self) -> Duration {
        self.merging() + self.work_cpu
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading() -> Reading {
        Reading {
            at: Instant::now(),
            guests: 1000,
            stores: 0,
            engine: 0,
            page_tables: 10,
            slab: 100,
            available: 5000,
            engine_cpu: Duration::ZERO,
            agents_cpu: Duration::ZERO,
            work_cpu: Duration::ZERO,
            faults: 0,
            machine: CpuTimes::default(),
        }
    }

    #[test]
    fn a_store_and_each_overhead_count_once() {
        let begin = reading();
        let now = Reading {
            guests: 400,
            stores: 100,
            engine: 30,
            page_tables: 15,
            slab: 107,
            ..begin
        };
        let before = |memory| Before {
            memory,
            page_tables: 10,
        };
        assert_eq!(now.saved(before(1000)), 500);
        assert_eq!(now.overhead(before(1000), &begin), 30 + 5 + 7);
        assert_eq!(now.saved(before(300)), -200, "more than before is a loss");
        assert_eq!(now.used(), 400 + 100 + 30 + 15);
    }

    #[test]
    fn a_file_of_two_descriptors_in_two_processes_counts_once() {
        let file = rustix::fs::memfd_create("twice", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = std::fs::File::from(file);
        let own = [std::process::id()];
        let before = Reading::take(None, &own).unwrap();
        rustix::io::pwrite(&file, &[1; 64 << 10], 0).unwrap();
        let twin = file.try_clone().unwrap();
        let now = Reading::take(Some(own[0]), &own).unwrap();
        // Other tests of this process have none, or leave theirs alone.
        assert_eq!(now.stores, before.stores + (64 << 10));
        drop(twin);
    }
}
