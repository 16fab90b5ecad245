//! The page map and memory of a fake guest.

use std::ops::Range;
use std::sync::Arc;

use sys::pagemap::{Categories, PageRun};
use sys::process::Remote;
use wire::{PAGE_BYTES, PageBits, Ready};

use super::store::bytes;
use super::{BASE, Place, Process, Shared, Touch};
use crate::domain::store::PageBytes;
use crate::error::Refusal;
use crate::guest::memory::Mapped;
use crate::guest::memory::Memory;
use crate::page::{PAGE, Slot, StoreId};
use crate::sync::lock;

/// Memory of a process of the fake world.
pub(crate) struct FakeMemory {
    world: Shared,
    process: usize,
}

impl FakeMemory {
    pub(crate) fn new(world: &Shared, process: usize) -> Self {
        Self {
            world: Arc::clone(world),
            process,
        }
    }
}

/// What the page map says of a page; with `arm`, as a scan, which arms it and tells of no files.
fn look(process: &mut Process, page: u64, arm: bool) -> Option<Categories> {
    let present = Categories::PRESENT;
    let frame = match process.huge.contains(&(page / 512)) {
        true => present.and(Categories::HUGE),
        false => present,
    };
    match process.pages.get_mut(&page)? {
        Place::Frame { written, .. } => {
            let shown = if *written {
                frame.and(Categories::WRITTEN)
            } else {
                frame
            };
            *written &= !arm;
            Some(shown)
        }
        Place::Slot {
            touch: Touch::Never,
            ..
        } => None,
        Place::Slot { touch, .. } => {
            let file = if arm {
                present
            } else {
                present.and(Categories::FILE)
            };
            let lately = *touch == Touch::Lately;
            if arm {
                *touch = Touch::Before;
            }
            Some(if lately {
                file.and(Categories::WRITTEN)
            } else {
                file
            })
        }
        Place::Zero => Some(present.and(Categories::ZERO)),
    }
}

impl FakeMemory {
    fn walk(
        &self,
        range: Range<u64>,
        runs: &mut [PageRun],
        arm: bool,
    ) -> std::io::Result<(usize, u64)> {
        let mut world = lock(&self.world);
        let process = &mut world.processes[self.process];
        if process.dead {
            return Ok((0, range.end));
        }
        let page = |at: u64| (at - BASE) / PAGE;
        let there: Vec<_> = process
            .pages
            .range(page(range.start)..page(range.end))
            .map(|(&at, _)| at)
            .collect();
        let mut filled: usize = 0;
        for at in there {
            let (start, end) = (super::address(at), super::address(at + 1));
            let full = filled == runs.len();
            if full {
                return Ok((filled, start));
            }
            let Some(categories) = look(process, at, arm) else {
                continue;
            };
            match filled.checked_sub(1).map(|last| &mut runs[last]) {
                Some(last) if last.end == start && last.categories == categories => last.end = end,
                _ => {
                    runs[filled] = PageRun {
                        start,
                        end,
                        categories,
                    };
                    filled += 1;
                }
            }
        }
        Ok((filled, range.end))
    }
}

impl Memory for FakeMemory {
    fn admit(&self, _ready: Ready) -> Result<(), Refusal> {
        Ok(())
    }

    fn compare(&self) -> Result<(), Refusal> {
        Ok(())
    }

    fn scan(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)> {
        let takes = {
            let process = &mut lock(&self.world).processes[self.process];
            process.scans += 1;
            process.scan_takes
        };
        std::thread::sleep(takes);
        self.walk(range, runs, true)
    }

    fn peek(&self, range: Range<u64>, runs: &mut [PageRun]) -> std::io::Result<(usize, u64)> {
        self.walk(range, runs, false)
    }

    fn read(&self, ranges: &[Remote], pages: &mut [&mut PageBytes]) -> std::io::Result<usize> {
        let mut world = lock(&self.world);
        if let Some(hang) = world.processes[self.process].hangs.clone() {
            drop(world);
            let (asleep, wake) = &*hang;
            drop(lock(asleep).wait_while(wake, |asleep| *asleep));
            world = lock(&self.world);
        }
        let process = &mut world.processes[self.process];
        if process.dead {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        let starts = ranges
            .iter()
            .flat_map(|r| (r.start..r.start + r.len as u64).step_by(PAGE_BYTES));
        for (at, (start, page)) in starts.zip(pages).enumerate() {
            match process.pages.get(&((start - BASE) / PAGE)) {
                Some(Place::Frame { content, .. }) => **page = bytes(*content),
                Some(Place::Zero) => **page = bytes(0),
                _ => return Ok(at),
            }
            process.reads += 1;
        }
        Ok(ranges.iter().map(|range| range.len / PAGE_BYTES).sum())
    }

    fn shared(&self, range: Range<u64>) -> std::io::Result<PageBits> {
        let process = &lock(&self.world).processes[self.process];
        let mut shared = PageBits::EMPTY;
        for (at, address) in range.step_by(PAGE_BYTES).enumerate() {
            if process.forked.contains(&((address - BASE) / PAGE)) {
                shared.insert(at);
            }
        }
        Ok(shared)
    }

    fn stores(&self, pages: &[usize]) -> Vec<Option<StoreId>> {
        let mut world = lock(&self.world);
        world.queries += pages.len() as u64;
        assert!(pages.is_sorted(), "pages that do not ascend: {pages:x?}");
        let process = &world.processes[self.process];
        let store = |&address: &usize| {
            let page = (address as u64 - BASE) / PAGE;
            let node = process.nodes.get(&page).copied().unwrap_or(0);
            let there = matches!(process.pages.get(&page), Some(Place::Frame { .. }));
            (there && !process.dead).then_some(StoreId(node))
        };
        pages.iter().map(store).collect()
    }

    fn pins(&self, _most: u32) -> Option<String> {
        let pinned = &lock(&self.world).processes[self.process].pinned;
        (!pinned.is_empty()).then(|| format!("{} pages", pinned.len()))
    }

    fn borrows(&self, _most: u32) -> Option<String> {
        lock(&self.world).processes[self.process].borrows.clone()
    }

    fn mapped(&self, _stores: &[u64], each: &mut dyn FnMut(Mapped)) -> std::io::Result<bool> {
        let world = lock(&self.world);
        let process = &world.processes[self.process];
        if process.dead {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        for (&page, place) in &process.pages {
            let first = match place {
                Place::Slot { slot, .. } => *slot,
                Place::Frame { stored: true, .. } => process.beneath[&page],
                _ => continue,
            };
            let range = super::address(page)..super::address(page + 1);
            let first = Slot(first);
            each(Mapped { range, first });
        }
        Ok(!process.elsewhere)
    }

    fn mappings(&self) -> Option<u64> {
        Some(lock(&self.world).processes[self.process].vmas)
    }

    fn rescue(&self, _last: bool) -> usize {
        0
    }

    fn is_guarded(&self) -> bool {
        false
    }

    fn has_exited(&self) -> bool {
        lock(&self.world).processes[self.process].dead
    }

    fn has_left(&self) -> bool {
        self.has_exited()
    }

    fn name(&self) -> sys::foreign::ForeignName {
        "fake".into()
    }
}
