//! Ranges that a window could not let go of.
//!
//! Letting go splits mappings, which fails when the kernel has no memory or the process no mappings
//! left. Then a thread still sleeps that touches such pages while absent, or writes them while frozen,
//! and no other thread would ever wake it. So these ranges are remembered, tried again until it works,
//! and given up only together with the whole userfaultfd, whose end wakes all threads.

use super::{Watch, Window};

/// How many ranges are remembered one by one.
const RANGES: usize = 32;

#[derive(Clone, Copy, Debug, Default)]
struct Range {
    start: usize,
    /// 0: nothing.
    len: usize,
    /// Frozen, rather than held while absent.
    frozen: bool,
}

/// Ranges that could not be let go.
#[derive(Debug, Default)]
pub(super) struct Held([Range; RANGES]);

impl Held {
    /// Remembers a range; when there are too many, as one over all of its kind.
    pub(super) fn remember(&mut self, start: usize, len: usize, frozen: bool) {
        let new = Range { start, len, frozen };
        if let Some(free) = self.0.iter_mut().find(|range| range.len == 0) {
            *free = new;
        } else if let Some(known) = self.0.iter_mut().find(|range| range.frozen == frozen) {
            let end = (known.start + known.len).max(start + len);
            known.start = known.start.min(start);
            known.len = end - known.start;
        }
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(|range| range.len == 0)
    }
}

impl Window {
    /// Whether a window could not let go of everything.
    pub(crate) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Tries again to let go of what a window could not.
    pub(crate) fn let_held_go(&mut self) {
        for range in &mut self.held.0 {
            let Range { start, len, frozen } = *range;
            let freezer = self.freezer.as_ref().filter(|_| frozen);
            let let_go = match freezer {
                _ if len == 0 => continue,
                Some(freezer) => freezer.thaw(start, len),
                None => self.uffd.unregister(start, len),
            };
            if let_go.is_ok() {
                let _ = self.uffd.register(start, len, Watch::Track);
                // Letting go wakes those who miss a page, not those who want to write a frozen one.
                let _ = freezer.map_or(Ok(()), |freezer| freezer.wake(start, len));
                range.len = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_held_is_forgotten() {
        let mut held = Held::default();
        assert!(held.is_empty());
        for at in 0..RANGES + 3 {
            held.remember(0x1000 * (at + 1), 0x1000, at % 2 == 1);
        }
        let covers = |page: usize, frozen| {
            let mut all = held.0.iter();
            all.any(|r| r.frozen == frozen && r.start <= page && page < r.start + r.len)
        };
        assert!((0..RANGES + 3).all(|at| covers(0x1000 * (at + 1), at % 2 == 1)));
    }
}
