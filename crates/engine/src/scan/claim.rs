//! Claims: pages that a guest merged before its session.
//!
//! ```text
//!  a guest comes back ─▶ sync ─▶ claim: /proc/PID/maps ─▶ a ref for each page ─▶ Merged
//!                        next sync: adopted ─▶ the agent lets go of its old lines
//! ```
//!
//! It comes back to the next engine, or to the same one after it lost its connection. A page that is claimed gets a
//! ref of its own *before* its agent is told (I4). Pages that the guest breaks, discards or remaps between the
//! reading of its mappings and that moment end their new refs the ordinary way. A child that it forks in between holds
//! the old tie. Or the child came after the claim and holds the new lifeline: the refs it may need wait for that.
//!
//! The kernel tells the mappings of a guest. The agent only says in which pages it takes part: a page that it does
//! not report as stored is not claimed, and the agent is not told. A walk through the mappings shows each mapping that
//! exists all the time it takes (proc(5)), and none is added meanwhile. Only windows map stores, a window is asked
//! for by this guest's own jobs, and none runs during its look. Old windows ended before the agent connected again.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use sys::pagemap::Categories;
use wire::PageBits;

use crate::domain::Domain;
use crate::domain::chunk::Chunk;
use crate::domain::pages::Pages;
use crate::domain::refs::View;
use crate::guest::change::Change;
use crate::guest::memory::Mapped;
use crate::guest::{Claims, Guest};
use crate::page::{CHUNK, PAGE, Slot, Tag};
use crate::scan::offers::{peek, place};
use crate::sync::lock;

/// Finds the pages merged before this session, until it has all of them.
///
/// # Errors
/// When the guest cannot be looked at.
pub(crate) fn claim(guest: &Guest) -> std::io::Result<()> {
    let mut claims = lock(&guest.claims);
    if let Claims::Open(tries) = *claims {
        // A guest that never tells of all its pages is not looked at in each round.
        let due = tries == 0 || tries.is_power_of_two();
        *claims = match due && claim_all(guest)? {
            true => Claims::Done,
            false => Claims::Open(tries.saturating_add(1)),
        };
    }
    Ok(())
}

/// Takes a ref for each page of `guest` that maps a slot since before this session. True when all
/// are accounted for; else the agent has not told of all of them yet.
///
/// # Errors
/// When the guest's mappings or pages cannot be looked at.
fn claim_all(guest: &Guest) -> std::io::Result<bool> {
    let domain = &guest.domain;
    let stores = domain.nodes.iter().map(|node| &node.store);
    let numbers: Vec<_> = stores.map(|store| store.number()).collect();
    let mut mapped = Vec::new();
    // Pages of another domain's store, or of one that was not taken over, are not for this engine's
    // refs to count: then the agent keeps its old lines, and is not told.
    let mut all = guest
        .memory
        .mapped(&numbers, &mut |piece| mapped.push(piece))?;
    if !mapped.is_empty() {
        domain.has_claims.store(true, Relaxed);
    }
    let mut found: Vec<(Arc<Chunk>, PageBits)> = Vec::new();
    let mut claimed = 0;
    {
        let offers = lock(&guest.offers);
        let view = domain.slots.view();
        for mapped in mapped
            .iter()
            .filter_map(|mapped| that_has_slots(domain, mapped))
        {
            let chunks = mapped.range.start / CHUNK * CHUNK..mapped.range.end;
            let mut known = 0;
            for (&address, chunk) in offers.chunks.range(chunks.clone()) {
                known += 1;
                if found.last().is_none_or(|(last, _)| last.id != chunk.id) {
                    found.push((Arc::clone(chunk), PageBits::EMPTY));
                }
                let (Some(mut pages), Some((_, looks))) = (chunk.try_lock(), found.last_mut())
                else {
                    all = false;
                    continue;
                };
                let piece = in_chunk(&mapped, address);
                all &= claim_piece(&view, &mut pages, address, &piece, looks, &mut claimed);
            }
            // Chunks that the agent has not told of. The mapping may be as large as the address space.
            all &= known == (chunks.end - chunks.start).div_ceil(CHUNK);
        }
    }
    guest.kin.add(claimed, || guest.memory.parent());
    for (chunk, looks) in &found {
        if let Some(mut change) = guest.change(chunk) {
            find_broken(&mut change, looks)?;
        }
    }
    Ok(all)
}

/// What of a mapped part may have slots. A guest may map its store as far behind its end as it has addresses, 64 TiB say, and
/// offer all of that.
fn that_has_slots(domain: &Domain, mapped: &Mapped) -> Option<Mapped> {
    let end = domain.slots.end(mapped.first.store());
    let pages = end.checked_sub(mapped.first.number())?;
    let Range { start, end } = mapped.range;
    let range = start..end.min(start.saturating_add(pages.saturating_mul(PAGE)));
    let first = mapped.first;
    (!range.is_empty()).then_some(Mapped { range, first })
}

/// What of a mapped part lies in a chunk.
fn in_chunk(mapped: &Mapped, chunk: u64) -> Mapped {
    let Range { start, end } = mapped.range;
    let range = start.max(chunk)..end.min(chunk + CHUNK);
    let first = Slot(mapped.first.0 + (range.start - start) / PAGE);
    Mapped { range, first }
}

/// Claims what a chunk maps; notes in `looks` the pages that may be broken. False when the agent has
/// not told of all of it.
fn claim_piece(
    view: &View<'_>,
    pages: &mut Pages,
    chunk: u64,
    piece: &Mapped,
    looks: &mut PageBits,
    claimed: &mut u64,
) -> bool {
    let mut all = true;
    for (page, slot) in
        (place(chunk, piece.range.start)..place(chunk, piece.range.end)).zip(piece.first.0..)
    {
        let slot = Slot(slot);
        match pages.tag(page) {
            _ if !pages.stored.contains(page) => all = false,
            Tag::Absent | Tag::Foreign => {
                if view.claim(slot) {
                    view.join(slot);
                    pages.set_merged(page, slot);
                    *claimed += 1;
                }
                // A slot that is dead was broken here before it died.
                looks.insert(page);
            }
            // This session knows more of it than that it is mapped.
            _ => {}
        }
    }
    all
}

/// Finds the claimed pages that hold a private frame. A frame that is swapped out, or what looks
/// like it, may be a page of the store: it counts as merged, which costs a ref and no byte.
fn find_broken(change: &mut Change<'_>, looks: &PageBits) -> std::io::Result<()> {
    peek(change.guest, change.chunk, |places, told| {
        let elsewhere = told.has(Categories::FILE) || told.has(Categories::SWAPPED);
        for page in places.filter(|&page| !elsewhere && looks.contains(page)) {
            change.turn(page, Tag::Broken);
        }
    })
}
