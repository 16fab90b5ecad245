//! A store of the fake world; its pages have the bytes of their content's number.

use std::time::Duration;

use wire::PAGE_BYTES;

use super::Shared;
use crate::domain::store::{PageBytes, Store};
use crate::page::{Slot, StoreId};
use crate::sync::lock;

pub(super) struct FakeStore {
    pub(super) world: Shared,
    pub(super) domain: String,
    pub(super) id: StoreId,
}

impl FakeStore {
    /// Every slot ever written, its content, and whether it still has it.
    fn slots(&self) -> Vec<(Slot, u64, bool)> {
        let world = lock(&self.world);
        let Some(shelf) = world.shelves.get(&self.domain) else {
            return Vec::new();
        };
        let own = shelf
            .written
            .iter()
            .map(|(&slot, &content)| (Slot(slot), content, !shelf.punched.contains(&slot)));
        own.filter(|(slot, _, _)| slot.store() == self.id).collect()
    }
}

/// The bytes of a page with this content.
pub(crate) fn bytes(content: u64) -> PageBytes {
    let mut page = [0; PAGE_BYTES];
    for (at, part) in (0u64..).zip(page.chunks_exact_mut(8)) {
        let word = if content == 0 {
            0
        } else {
            content.wrapping_mul(at * 2 + 1)
        };
        part.copy_from_slice(&word.to_le_bytes());
    }
    page
}

fn content(page: &PageBytes) -> u64 {
    let (first, _) = page.split_first_chunk().unwrap();
    let content = u64::from_le_bytes(*first);
    assert_eq!(*page, bytes(content), "a torn page reached the store");
    content
}

/// Takes so much CPU time of this thread.
fn spend(time: Duration) {
    let began = sys::process::thread_time();
    while sys::process::thread_time() - began < time {}
}

impl Store for FakeStore {
    fn write(&self, first: Slot, pages: &[&PageBytes]) -> std::io::Result<()> {
        let mut world = lock(&self.world);
        let elsewhere = world.full.filter(|(full, _)| *full == self.id.0);
        let elsewhere = elsewhere.map(|(_, other)| other);
        for (slot, page) in (first.0..).zip(pages) {
            let content = content(page);
            let known = world
                .seen
                .get(&self.domain)
                .is_some_and(|seen| seen.contains(&content));
            assert!(known, "I6: content {content} was never in {}", self.domain);
            assert_eq!(Slot(slot).store(), self.id, "a slot of another store");
            let shelf = world.shelves.entry(self.domain.clone()).or_default();
            if let Some(full) = elsewhere {
                shelf.moved.insert(slot, full);
            }
            let twice = shelf.written.insert(slot, content).is_some();
            assert!(!twice, "I3: slot {slot} is written twice");
        }
        Ok(())
    }

    fn punch(&self, first: Slot, count: u64) -> std::io::Result<()> {
        let mut world = lock(&self.world);
        for slot in first.0..first.0 + count {
            assert_eq!(
                world.mapped(&self.domain, slot),
                (0, 0),
                "I5: punching mapped slot {slot}"
            );
            let shelf = world.shelves.get_mut(&self.domain).unwrap();
            assert!(
                shelf.written.contains_key(&slot),
                "slot {slot} was never written"
            );
            assert!(shelf.punched.insert(slot), "slot {slot} is punched twice");
        }
        spend(world.punches_take);
        Ok(())
    }

    fn end(&self) -> std::io::Result<u64> {
        let last = self.slots().pop();
        Ok(last.map_or(0, |(slot, _, _)| slot.number() + 1))
    }

    fn each(&self, each: &mut dyn FnMut(Slot, &PageBytes)) -> std::io::Result<()> {
        let live = self.slots().into_iter().filter(|(_, _, live)| *live);
        live.for_each(|(slot, content, _)| each(slot, &bytes(content)));
        Ok(())
    }

    fn node(&self) -> Option<u32> {
        Some(self.id.0.into())
    }

    fn nodes(&self, slots: &[Slot]) -> std::io::Result<Vec<Option<u32>>> {
        let mut world = lock(&self.world);
        world.frame_queries += slots.len() as u64;
        spend(world.frame_queries_take);
        assert!(slots.is_sorted(), "slots that do not ascend: {slots:?}");
        let shelf = world.shelves.entry(self.domain.clone()).or_default();
        let node = |slot: &Slot| {
            let holds = shelf.written.contains_key(&slot.0) && !shelf.punched.contains(&slot.0);
            assert!(holds, "{slot} is a hole, and to ask for it would fill it");
            Some(shelf.node(slot.0).into())
        };
        Ok(slots.iter().map(node).collect())
    }

    fn number(&self) -> u64 {
        u64::from(self.id.0)
    }

    fn share(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}
