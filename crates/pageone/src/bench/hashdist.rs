//! `pageone bench hashdist`: the demonstration of the 2004 series on boot hash distribution, with the table that the engine has.
//!
//! The table is the directory of an index, as large as asked for. It is made on one node, then over all nodes with memory. Each time
//! the nodes' memory is shown before and after, and threads on all CPUs look up random keys. Of these an eighth of what the
//! directory has slots is in the index, so that each of its pages is there. The first index stays while the second is
//! made: pages that a process gives back wait on its CPU's own lists, and taking them again would not show. The largest table of the
//! mail, 512 MiB for TCP's established connections on 16 nodes with 62 097 440 kB, sets the default size for any machine.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use numa::placement::IndexMemory;
use numa::{MemoryReport, NodeId, Topology};
use sdtree::SdTree;
use serde::Serialize;

use crate::head;
use crate::human;
use crate::output::print;

const MAIL_TABLE_KIB: u64 = 512 << 10;
const MAIL_MEMORY_KIB: u64 = 62_097_440;
/// Lookups between two looks at the clock's flag.
const BURST: u64 = 1024;
/// Slots of the directory for each key.
const SLOTS_A_KEY: u64 = 8;

/// Puts the index's directory on one node, then spreads it: memory by node, lookups per second
#[derive(Args)]
pub(crate) struct Hashdist {
    /// The directory's size: MiB, or with a unit, as 2G, rounded down to a power of two [default: 512 MiB for each 59 GiB of memory, as in
    /// 2004]
    #[arg(long, value_name = "SIZE", value_parser = human::mib::<{ 1 << 44 }>)]
    size_mib: Option<u64>,
    /// How long to look up, each time, in seconds
    #[arg(long, value_name = "S", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=86400))]
    seconds: u64,
    /// Rounds, at most 1000; the median of the lookup rates counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints: a row for each way.
#[derive(Serialize)]
struct Report {
    rows: Vec<Measurement>,
}

/// One way to place the table.
#[derive(Serialize)]
struct Measurement {
    hashdist: u8,
    /// Of the directory.
    table_bytes: u64,
    keys: u64,
    /// Of the directory, branches and leaves.
    index_bytes: usize,
    pages_by_node: BTreeMap<NodeId, u64>,
    before: MemoryReport,
    after: MemoryReport,
    threads: usize,
    /// Of the rounds, by node of the threads; median.
    lookups_per_second: u64,
}

impl Hashdist {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let topology = Arc::new(Topology::live()?);
        let memory_kib = MemoryReport::live()?.totals_kib().0;
        let default_kib = memory_kib.saturating_mul(MAIL_TABLE_KIB) / MAIL_MEMORY_KIB;
        let size_kib = self
            .size_mib
            .map_or(default_kib, |mib| mib.saturating_mul(1024));
        let bits = size_kib.saturating_mul(128).max(1).ilog2();
        anyhow::ensure!(
            bits <= sdtree::MAX_DIRECTORY_BITS,
            "a directory has at most {} MiB: give less with --size-mib",
            (8_u64 << sdtree::MAX_DIRECTORY_BITS) >> 20
        );
        let all = topology.memory_nodes().map(|node| node.id).collect();
        let (mut results, mut tables) = (Vec::new(), Vec::new());
        for (number, nodes) in [(0, Vec::new()), (1, all)] {
            let memory = IndexMemory::new(Arc::clone(&topology), nodes);
            let (result, table) = self.measure(&memory, bits, number)?;
            results.push(result);
            tables.push(table);
        }
        if self.json {
            return print(&head::line(&Report { rows: results })?);
        }
        print(&results.iter().map(text).collect::<String>())
    }

    fn measure(
        &self,
        memory: &IndexMemory,
        bits: u32,
        number: u8,
    ) -> anyhow::Result<(Measurement, SdTree<u64>)> {
        let before = counted_memory()?;
        // So many keys would get more slots than one each: the greatest number of bits decides.
        let builder = sdtree::Builder::new().max_directory_bits(bits);
        let slots = 1_u64 << bits;
        let capacity = usize::try_from(slots).context("a table beyond the address space")?;
        let index: SdTree<u64> = builder.capacity(capacity).memory(memory.hook()).build()?;
        let keys = slots / SLOTS_A_KEY;
        for at in 0..keys {
            index.get_or_insert(key(at * SLOTS_A_KEY, bits), at);
        }
        let after = counted_memory()?;
        let cpus = sys::mempolicy::allowed_cpus()?;
        let mut rates: Vec<u64> = Vec::new();
        for _ in 0..self.rounds {
            rates.push(look_up(
                &index,
                bits,
                &cpus,
                Duration::from_secs(self.seconds),
            )?);
        }
        rates.sort_unstable();
        let result = Measurement {
            hashdist: number,
            table_bytes: slots * 8,
            keys,
            index_bytes: index.memory_bytes(),
            pages_by_node: memory.pages_by_node()?,
            before,
            after,
            threads: cpus.len(),
            lookups_per_second: rates[rates.len() / 2],
        };
        Ok((result, index))
    }
}

/// The key whose leading bits name this slot of the directory.
fn key(slot: u64, bits: u32) -> u128 {
    match bits {
        0 => 0,
        _ => u128::from(slot) << (128 - bits),
    }
}

/// Memory by node, with what the CPUs have counted for themselves so far.
fn counted_memory() -> anyhow::Result<MemoryReport> {
    // Reading it folds the CPUs' counts into the nodes'; only root may, and others get slightly older figures.
    let _ = std::fs::read("/proc/sys/vm/stat_refresh");
    Ok(MemoryReport::live()?)
}

/// A thread on each CPU looks up random keys; returns lookups per second, all together.
fn look_up(index: &SdTree<u64>, bits: u32, cpus: &[u32], time: Duration) -> anyhow::Result<u64> {
    let stop = AtomicBool::new(false);
    let start = Instant::now();
    let lookups = std::thread::scope(|scope| {
        let start = |cpu: u32| {
            let stop = &stop;
            scope.spawn(move || -> anyhow::Result<u64> {
                sys::mempolicy::run_on_cpus(&[cpu])?;
                Ok(look_up_until(index, bits, u64::from(cpu), stop))
            })
        };
        let threads: Vec<_> = cpus.iter().map(|&cpu| start(cpu)).collect();
        std::thread::sleep(time);
        // Relaxed: nothing hangs on it but the end.
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().try_fold(0_u64, |sum, thread| {
            let lookups = thread
                .join()
                .map_err(|_| anyhow::anyhow!("a thread of the benchmark ended early"))??;
            anyhow::Ok(sum + lookups)
        })
    })?;
    let micros = u64::try_from(start.elapsed().as_micros())
        .unwrap_or(u64::MAX)
        .max(1);
    Ok(lookups.saturating_mul(1_000_000) / micros)
}

fn look_up_until(index: &SdTree<u64>, bits: u32, seed: u64, stop: &AtomicBool) -> u64 {
    let (mut state, mut lookups) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, 0);
    let slots = 1_u128 << bits;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..BURST {
            // xorshift64; the product's upper half spreads over the table without a division.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let slot = u64::try_from((u128::from(state) * slots) >> 64).unwrap_or(0);
            black_box(index.get(key(slot, bits)));
        }
        lookups += BURST;
    }
    lookups
}

fn text(result: &Measurement) -> String {
    let name = if result.hashdist == 0 {
        "on one node"
    } else {
        "spread over the nodes"
    };
    let mut text = format!(
        "hashdist={}: an index of {} keys in {} kB; its directory of {} kB {name}\n\n\
         Before\n{}\nAfter\n{}\n Nid  MemUsed grew by (kB)  Pages of the directory\n",
        result.hashdist,
        result.keys,
        result.index_bytes / 1024,
        result.table_bytes / 1024,
        result.before,
        result.after
    );
    for (before, after) in result.before.nodes.iter().zip(&result.after.nodes) {
        let grown = i128::from(after.used_kib) - i128::from(before.used_kib);
        let pages = result.pages_by_node.get(&after.node).copied().unwrap_or(0);
        text += &format!(" {:>3} {grown:>21} {pages:>23}\n", after.node);
    }
    text + &format!(
        "\n{} lookups/s on {} threads\n\n",
        result.lookups_per_second, result.threads
    )
}
