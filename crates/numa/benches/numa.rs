//! The figures this crate answers for: `cargo bench -p numa`.
//!
//! Each is the median of repeated rounds; the machine's other work shows in the spread between best and worst.

#![allow(clippy::unwrap_used, reason = "a benchmark that fails shows nothing")]

#[path = "../tests/common/encode.rs"]
mod encode;

use std::hint::black_box;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use encode::Encode;
use numa::acpi::{Affinity, ProximityDomain, Reading, Srat};
use numa::heap::{Heap, Request, ZoneId};
use numa::residence::NodePages;
use numa::{MemoryReport, NodeId, ProcessReport, Topology};
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};
use sys::zeroed::ZeroedSlice;

const ROUNDS: usize = 15;

const HOLD: &str = "PAGEONE_BENCH_HOLD_PAGES";

fn main() {
    if let Ok(pages) = std::env::var(HOLD) {
        return hold(pages.parse().unwrap());
    }
    srat();
    heap();
    node_query();
}

/// The other process: makes pages present, says where they are, and waits.
fn hold(pages: usize) {
    let mut memory = ZeroedSlice::<[u8; 4096]>::new(pages).unwrap();
    memory.allow_huge_pages(false);
    memory.iter_mut().for_each(|page| page[0] = 1);
    println!("{}", memory.as_ptr() as usize);
    let _ = std::io::stdin().read(&mut [0]);
}

/// The node of each of a million pages of another process. Where memory is short the other process has a quarter of
/// them, and is asked four times.
fn node_query() {
    const PAGES: usize = 1 << 20;
    let free = MemoryReport::live().unwrap().totals_kib().1;
    let held = if free > 6 << 20 { PAGES } else { PAGES / 4 };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(HOLD, held.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let start: usize = line.trim().parse().unwrap();
    let pages: Vec<usize> = (0..held).map(|page| start + page * 4096).collect();
    let pid = Pid::from_child(&child);
    let mut nodes = vec![-1; held];
    let (mut clock, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (begin, begin_cpu) = (Instant::now(), thread_time());
        for _ in 0..PAGES / held {
            sys::mempolicy::pages_to_nodes(Some(pid), &pages, &mut nodes).unwrap();
        }
        cpu.push((thread_time() - begin_cpu).as_secs_f64() * 1e9);
        clock.push(begin.elapsed().as_secs_f64() * 1e9);
        // One that the kernel moves at this moment is on no node.
        let there = nodes.iter().filter(|&&node| node >= 0).count();
        assert!(
            there * 100 >= held * 99,
            "{there} of {held} pages of the other process are there"
        );
    }
    let what = format!("nodes of {PAGES} pages ({held} held)");
    report(&format!("{what}, wall clock"), "300 000 000 ns", clock);
    report(&format!("{what}, CPU time"), "300 000 000 ns", cpu);
    let begin = Instant::now();
    let process = ProcessReport::read(&Topology::live().unwrap(), pid).unwrap();
    let found: u64 = process.nodes.values().map(NodePages::total).sum();
    println!(
        "the whole view of that process: {found} pages in {:?}",
        begin.elapsed()
    );
    drop(child.stdin.take());
    child.wait().unwrap();
}

/// Prints the median of the rounds, and returns it in nanoseconds.
fn report(what: &str, aim: &str, mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    let median = rounds[rounds.len() / 2];
    let (best, worst) = (rounds[0], rounds[rounds.len() - 1]);
    println!("{what:<44} {median:>10.1} ns   best {best:.1}, worst {worst:.1}   aim {aim}");
    median
}

fn per_operation(elapsed: Duration, operations: u32) -> f64 {
    elapsed.as_secs_f64() * 1e9 / f64::from(operations)
}

fn srat() {
    // 9 KiB: 368 CPU entries of 24 bytes, as many as a large machine has, and a few ranges of memory.
    let mut entries: Vec<Affinity> = (0..368)
        .map(|cpu| Affinity::X2Apic {
            domain: ProximityDomain(cpu % 8),
            x2apic_id: cpu,
            flags: 1,
            clock_domain: 0,
        })
        .collect();
    entries.extend((0..8).map(|node| Affinity::Memory {
        domain: ProximityDomain(node),
        base: u64::from(node) << 36,
        length: 1 << 36,
        flags: 1,
    }));
    let bytes = Srat {
        header: encode::header(3),
        entries,
        quirks: Vec::new(),
    }
    .encode()
    .unwrap();
    let rounds = (0..ROUNDS).map(|_| {
        let start = Instant::now();
        for _ in 0..200 {
            black_box(Srat::parse(black_box(&bytes), Reading::Field).unwrap());
        }
        per_operation(start.elapsed(), 200)
    });
    report(
        &format!("parse an SRAT of {} bytes", bytes.len()),
        "50 000 ns",
        rounds.collect(),
    );
}

const OPERATIONS: u32 = 1_000_000;

/// The CPU time of this thread: what others do on a shared machine does not count.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        u32::try_from(time.tv_nsec).unwrap(),
    )
}

fn alloc_and_free(heap: &Heap, node: NodeId) -> Duration {
    let request = Request::new(node, ZoneId(0));
    let start = thread_time();
    for _ in 0..OPERATIONS {
        let block = heap.alloc(black_box(request)).unwrap();
        heap.free(black_box(block)).unwrap();
    }
    thread_time() - start
}

fn in_batches(heap: &Heap) -> f64 {
    let request = Request::new(NodeId(0), ZoneId(0));
    let mut blocks = Vec::with_capacity(512);
    let start = thread_time();
    for _ in 0..OPERATIONS / 512 {
        blocks.extend((0..512).map(|_| heap.alloc(request).unwrap()));
        blocks.drain(..).for_each(|block| heap.free(block).unwrap());
    }
    per_operation(thread_time() - start, OPERATIONS / 512 * 512)
}

fn two_node_heap(topology: &Topology) -> Heap {
    let heap = Heap::new(topology, ["slots"]);
    for node in 0..2 {
        let start = u64::from(node) << 30;
        heap.grow(NodeId(node), ZoneId(0), start..start + (1 << 20))
            .unwrap();
    }
    heap
}

/// A thread on node 0 of one heap and a thread on node 1 of the other; the slower one's time.
fn two_threads(zero: &Heap, one: &Heap) -> Duration {
    let barrier = Barrier::new(2);
    let run = |heap: &Heap, node| {
        barrier.wait();
        alloc_and_free(heap, node)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run(one, NodeId(1)));
        run(zero, NodeId(0)).max(other.join().unwrap())
    })
}

fn heap() {
    let topology = Topology::live()
        .unwrap()
        .emulate(&"2".parse().unwrap())
        .unwrap();
    let heap = two_node_heap(&topology);
    // Two heaps that share nothing show what the machine itself makes of a second thread.
    let apart = [two_node_heap(&topology), two_node_heap(&topology)];
    // In turn, so that all meet the same weather.
    let (mut one, mut two, mut two_apart) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        one.push(per_operation(alloc_and_free(&heap, NodeId(0)), OPERATIONS));
        two.push(per_operation(two_threads(&heap, &heap), OPERATIONS));
        two_apart.push(per_operation(two_threads(&apart[0], &apart[1]), OPERATIONS));
    }
    let one = report("heap: alloc + free of a slot, one thread", "150 ns", one);
    let two = report(
        "heap: the same, two threads on two nodes",
        "1.3 x that",
        two,
    );
    let two_apart = report(
        "heap: two threads, two separate heaps",
        "(baseline)",
        two_apart,
    );
    println!("{:<44} {:>10.2}", "heap: two threads / one", two / one);
    println!(
        "{:<44} {:>10.2}",
        "heap: two threads / two separate heaps",
        two / two_apart
    );
    // 512 taken, then 512 given back: past the magazine, with all the splitting and merging.
    let rounds = (0..ROUNDS).map(|_| in_batches(&heap)).collect();
    report(
        "heap: alloc + free of a slot, 512 at a time",
        "150 ns",
        rounds,
    );
}
