//! The trust domain of the pages that this process maps: it does not go on sharing pages of one that it has left.
//!
//! ```text
//!   merged in A ──▶ the program changes its user, its cgroup, … ──▶ hello ──▶ welcome to B, or refused
//!                                                                                  │ not A
//!                              ready in B ◀── A's lifeline and tie go ◀── every page is the program's own
//! ```
//!
//! **Invariant**: when an agent says that it is ready in a domain, no page of its process shares a frame with another.
//! The engine of A has pages unmerged only if it sees its guest leave while the agent answers. A program that changes its rights takes
//! the agent away first. So each engine says with its answer to hello which domain the process is in, also where it refuses it,
//! and the agent compares. A page that it cannot make its own keeps it from being ready: it tries again with its next hello.
//!
//! The program writes on meanwhile. A page becomes anonymous only while no thread can write it ([`crate::mappings::whole`]).
//! Without a userfaultfd, as where it is refused and has no right to one, each page gets its frame where it lies, by a write
//! fault. It becomes anonymous then when a welcome brings the device.
//!
//! No page is merged in a window while this goes on, for the same thread does both. A fork child inherits
//! its parent's domain, as it does the pages. A child that never offers anything has no agent, and shares with its
//! parent's domain the pages that it shares by fork.
//!
//! The tempting alternatives: to compare users says nothing of cgroups and policies; to compare stores gives up the pages
//! that were merged in the same domain before an engine died without a keeper.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::{Errno, Result};
use wire::DomainMark;

use crate::lock::lock;
use crate::mappings::lines;
use crate::mappings::private::own_all;
use crate::thread::Life;

/// Of the domain in which this process or the parent that it inherited its memory from merged last. Only the agent's thread
/// writes it, while nothing is merged: a child that is forked in between has nothing of either.
static MERGED_IN: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Nothing was merged in any.
const NONE: DomainMark = DomainMark([0; 2]);

fn merged_in() -> DomainMark {
    DomainMark(
        MERGED_IN
            .each_ref()
            .map(|half| half.load(Ordering::Relaxed)),
    )
}

/// Makes everything the program's own that was merged in another domain than this, and lets go of all lines but
/// `these`. The same in this domain where more lines would soon be held than can be let go of.
///
/// # Errors
/// `NOMEM` where the copies do not fit; `CANCELED` when the agent shall end. Then some is still merged.
pub(crate) fn settle(domain: DomainMark, these: &[usize], life: &Life) -> Result<()> {
    let is_other = merged_in() != domain;
    if !is_other && !lines::are_many() {
        return Ok(());
    }
    if merged_in() != NONE {
        let owned = own_all(|| life.must_end());
        if !is_other && owned.is_err_and(|errno| errno != Errno::CANCELED) {
            // A line too many only keeps slots longer.
            return Ok(());
        }
        owned?;
    }
    let mut guard = lock().ok_or(Errno::NOMEM)?;
    // Pinned pages got frames of their own where they lie.
    if !guard.table().anything_stored() {
        lines::keep_only(these);
    }
    for (half, now) in MERGED_IN.iter().zip(domain.0) {
        half.store(now, Ordering::Relaxed);
    }
    Ok(())
}
