//! A look at the mappings, without a descriptor in the program's table where an agent serves: see [`desk`](crate::desk).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rustix::io::Result;
use sys::process::thread_id;
use sys::vma::{Maps, Vma};

use crate::lock::Guard;

/// What is mapped, as the kernel tells.
pub(crate) struct Look {
    /// The list, where the caller has it open; else the agent's thread has.
    here: Option<Maps>,
}

/// So many mappings are told of at once: asking takes longer than telling.
pub(crate) const AT_ONCE: usize = 16;

impl Look {
    /// Begins to look.
    ///
    /// # Errors
    /// As [`Maps::open`], where no agent serves.
    pub(crate) fn open(guard: &Guard) -> Result<Self> {
        let here = match guard.is_served() {
            true => None,
            false => Some(Maps::open()?),
        };
        Ok(Self { here })
    }

    /// As [`Maps::find`].
    ///
    /// # Errors
    /// As [`Maps::find`] and [`Maps::open`].
    pub(crate) fn find(&self, guard: &mut Guard, at: usize) -> Result<Option<Vma>> {
        let [first, ..] = self.some(guard, at, at + 1)?;
        Ok(first)
    }

    /// The mapping that holds `at` or the next one above, and those behind it, up to the first that reaches `end`.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub(crate) fn some(
        &self,
        guard: &mut Guard,
        at: usize,
        end: usize,
    ) -> Result<[Option<Vma>; AT_ONCE]> {
        match &self.here {
            Some(maps) => guard.apart(|_| list(maps, at, end)),
            None => guard.at_desk(|guard| {
                let lent = guard.process().lent.each_ref();
                let [agent, _, _, maps] = lent.map(|number| number.load(Ordering::Relaxed));
                match i32::try_from(maps) {
                    Ok(maps) if agent == thread_id() && maps > 0 => {
                        // SAFETY: this is the agent's thread, which has lent it, and takes it back before it is closed.
                        let maps = unsafe { BorrowedFd::borrow_raw(maps - 1) };
                        list(&Maps::of(maps), at, end)
                    }
                    _ => list(&Maps::open()?, at, end),
                }
            }),
        }
    }
}

fn list<F: AsFd>(maps: &Maps<F>, at: usize, end: usize) -> Result<[Option<Vma>; AT_ONCE]> {
    let (mut found, mut at) = ([None; AT_ONCE], at);
    for place in &mut found {
        *place = maps.find(at)?;
        match place {
            Some(vma) if vma.end < end => at = vma.end,
            _ => break,
        }
    }
    Ok(found)
}
