//! The floor under the CPU time of merging: the bytes and the calls without which no page is merged from user space. They are made one
//! after another, on one thread, with nothing decided and nothing checked.
//!
//! ```text
//!  every page      read     process_vm_readv, a chunk at a time, as from another process
//!                  hash     XXH3, 128 bits
//!  canonical ones  publish  pwrite to the store
//!  merged ones     copy     pread of the canonical page
//!                  hold     userfaultfd: the batch is registered, and let go behind
//!                  move     UFFDIO_MOVE of the batch
//!                  compare  with the copy
//!                  map      mmap of the store over each run, and its registration
//!                  free     of what was moved
//! ```
//!
//!     floor [MIB [RUN]]     MIB of memory (768), that lies in the store in other order, by runs of RUN pages (16)

use std::hint::black_box;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use sys::mapping::{self, Access, Attributes, Source};
use sys::memfd::Store;
use sys::memory::Anonymous;
use sys::process::{Remote, read_memory};
use sys::uffd::{Uffd, Watch};
use twox_hash::xxhash3_128;

const PAGE: usize = 4096;
/// As many as the agent takes out at a time.
const BATCH: usize = wire::MAX_OUT;
/// The least of so many is the floor.
const TIMES: usize = 3;
const STEPS: [&str; 9] = [
    "read", "hash", "publish", "copy", "hold", "move", "compare", "map", "free",
];

/// CPU time of this thread by steps.
#[derive(Default)]
struct Meter([Duration; STEPS.len()]);

impl Meter {
    fn step<T>(&mut self, name: &str, work: impl FnOnce() -> T) -> T {
        let now = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default();
        let begun = now();
        let result = work();
        let taken = now().saturating_sub(begun);
        let of_step = STEPS.iter().zip(&mut self.0).find(|step| *step.0 == name);
        *of_step.expect("a step").1 += taken;
        result
    }
}

/// A program's memory, and its pages as a store has them: the runs in the opposite order.
struct Scene {
    memory: Anonymous,
    pages: usize,
    run: usize,
}

impl Scene {
    fn new(mib: usize, run: usize) -> Result<Self> {
        let pages = (mib << 20) / PAGE;
        ensure!(
            run > 0 && BATCH.is_multiple_of(run) && pages > 0 && pages.is_multiple_of(BATCH),
            "RUN must divide {BATCH}, and MIB not be 0"
        );
        let mut memory = Anonymous::new(pages * PAGE).context("no memory")?;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for word in memory.as_chunks_mut::<8>().0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
        Ok(Self { memory, pages, run })
    }

    fn start(&self) -> usize {
        self.memory.as_ptr().expose_provenance()
    }

    /// The slot of a page.
    fn slot(&self, page: usize) -> u64 {
        let runs = self.pages / self.run;
        ((runs - 1 - page / self.run) * self.run + page % self.run) as u64
    }
}

/// What is done to every page, whether it has an equal or not.
fn look(scene: &Scene, meter: &mut Meter) -> Result<()> {
    let mut local = vec![0; wire::CHUNK_BYTES];
    for chunk in (0..scene.pages * PAGE).step_by(wire::CHUNK_BYTES) {
        let len = wire::CHUNK_BYTES.min(scene.pages * PAGE - chunk);
        let remote = Remote {
            start: (scene.start() + chunk) as u64,
            len,
        };
        let mut buffers = [std::io::IoSliceMut::new(&mut local[..len])];
        let read = meter.step("read", || {
            read_memory(std::process::id(), &[remote], &mut buffers)
        });
        ensure!(read? == len, "a part was not read");
        meter.step("hash", || {
            for page in local[..len].chunks_exact(PAGE) {
                black_box(xxhash3_128::Hasher::oneshot(page));
            }
        });
    }
    Ok(())
}

fn publish(scene: &Scene, store: &Store, meter: &mut Meter) -> Result<()> {
    let pages = scene.memory.as_chunks::<PAGE>().0;
    for (nth, run) in pages.chunks(scene.run).enumerate() {
        let run: Vec<_> = run.iter().collect();
        let slot = scene.slot(nth * scene.run);
        meter.step("publish", || store.write(slot, &run))?;
    }
    Ok(())
}

/// What is done to every page that an equal takes the place of.
fn merge(scene: &Scene, store: &Store, meter: &mut Meter) -> Result<()> {
    let uffd = Uffd::open().context("userfaultfd")?;
    let file = store.share()?;
    let staging = mapping::area(BATCH * PAGE)?;
    uffd.register(staging, BATCH * PAGE, Watch::Track)?;
    uffd.register(scene.start(), scene.pages * PAGE, Watch::Track)?;
    let mut copies = vec![0; BATCH * PAGE];
    for first in (0..scene.pages).step_by(BATCH) {
        let (at, len) = (scene.start() + first * PAGE, BATCH * PAGE);
        let run_bytes = scene.run * PAGE;
        for (nth, run) in copies.chunks_exact_mut(run_bytes).enumerate() {
            let from = scene.slot(first + nth * scene.run) * PAGE as u64;
            let read = meter.step("copy", || sys::memfd::read_at(&file, from, run));
            ensure!(read? == run_bytes, "a copy is short");
        }
        meter.step("hold", || uffd.register(at, len, Watch::TrackAndHold))?;
        // SAFETY: both are this program's own, and no other thread has either.
        let moved = meter.step("move", || unsafe { uffd.move_pages(staging, at, len) });
        ensure!(moved.bytes == len, "not moved: {:?}", moved.stopped);
        // SAFETY: the staging area was just filled, and is only read here.
        let staged: &[u8] =
            unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(staging), len) };
        ensure!(
            meter.step("compare", || staged == copies),
            "the store has other bytes"
        );
        for start in (at..at + len).step_by(run_bytes) {
            let slot = scene.slot((start - scene.start()) / PAGE);
            let source = Source::Store(file.as_fd(), slot * PAGE as u64);
            // SAFETY: the memory is this program's own, and its pages were moved away.
            let mapped = meter.step("map", || unsafe {
                mapping::replace(
                    start,
                    run_bytes,
                    source,
                    Access::ReadWrite,
                    Attributes::default(),
                    false,
                )
            });
            mapped.map_err(|(errno, _)| errno).context("mmap")?;
        }
        meter.step("map", || uffd.register(at, len, Watch::Track))?;
        meter.step("hold", || uffd.wake(at, len))?;
        // SAFETY: the staging area is this program's own.
        meter.step("free", || unsafe {
            mapping::advise(staging, len, libc::MADV_DONTNEED)
        })?;
    }
    // SAFETY: the area was made above.
    unsafe { mapping::unmap(staging, BATCH * PAGE) }?;
    Ok(())
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let mut number = |default| {
        args.next()
            .map_or(Ok(default), |text| text.parse::<usize>())
    };
    let (mib, run) = (number(768)?, number(16)?);
    let mut least = [f64::INFINITY; STEPS.len()];
    for _ in 0..TIMES {
        let scene = Scene::new(mib, run)?;
        let (store, mut meter) = (Store::new("floor")?, Meter::default());
        look(&scene, &mut meter)?;
        publish(&scene, &store, &mut meter)?;
        merge(&scene, &store, &mut meter)?;
        for (least, taken) in least.iter_mut().zip(meter.0) {
            *least = least.min(taken.as_secs_f64() * 1e9 / scene.pages as f64);
        }
    }
    println!("{mib} MiB in runs of {run} pages, CPU time a page, the least of {TIMES}:");
    for (name, ns) in STEPS.iter().zip(least) {
        println!("{name:>8} {ns:6.0} ns");
    }
    // The guests of `pageone bench merge` by default.
    let (guests, pages, equal) = (12.0, 262_144.0, 0.7);
    let [read, hash, publish, of_merged @ ..] = least;
    let read_all = guests * pages * (read + hash);
    let published = pages * equal * publish;
    let merged = guests * pages * equal * of_merged.iter().sum::<f64>();
    println!(
        "12 guests of 1 GiB, 70 % equal: {:.1} s to read and hash, {:.1} s to publish, {:.1} s to merge: {:.2} s",
        read_all / 1e9,
        published / 1e9,
        merged / 1e9,
        (read_all + published + merged) / 1e9
    );
    Ok(())
}
