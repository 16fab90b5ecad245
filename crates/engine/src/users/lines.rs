//! Parts of the log: lines that are said again and again neither drown the rest nor fill a disk.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::lock;

/// So many lines of one part may be written in a window.
pub(super) const MOST_LINES: u32 = 20;
pub(super) const WINDOW: Duration = Duration::from_secs(10);

/// What was said in one part.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pub(super) began: Option<Instant>,
    said: u32,
    left_out: u32,
}

impl Lines {
    /// Whether one more line may be written; gives how many were left out before.
    pub(super) fn take(&mut self, now: Instant) -> Option<u32> {
        if self.began.is_none_or(|began| now - began >= WINDOW) {
            (self.began, self.said) = (Some(now), 0);
        }
        if self.said >= MOST_LINES {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.said += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// Says a line that was taken. `before` says how many were left out, if any were.
pub(super) fn say(taken: Option<u32>, before: impl FnOnce(u32), line: impl FnOnce()) {
    let Some(left_out) = taken else {
        return;
    };
    if left_out > 0 {
        before(left_out);
    }
    line();
}

/// What fails for want of memory fails for each batch of pages: its part of the log.
#[derive(Debug, Default)]
pub(crate) struct Troubles(Mutex<Lines>);

impl Troubles {
    /// Has `line` say what failed, unless the part is used up.
    pub(crate) fn say(&self, line: impl FnOnce()) {
        let taken = lock(&self.0).take(Instant::now());
        let before = |left_out| {
            tracing::warn!(left_out, "warnings of this domain's memory are left out");
        };
        say(taken, before, line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_its_lines_in_each_window() {
        let (mut lines, now) = (Lines::default(), Instant::now());
        let taken = |lines: &mut Lines, at| (0..50).filter_map(|_| lines.take(at)).collect();
        let first: Vec<u32> = taken(&mut lines, now);
        let next: Vec<u32> = taken(&mut lines, now + WINDOW);
        assert_eq!((first.len(), first[0]), (MOST_LINES as usize, 0));
        assert_eq!((next.len(), next[0]), (first.len(), 50 - MOST_LINES));
    }

    #[test]
    fn what_fails_again_and_again_is_said_some_times() {
        let (troubles, mut said) = (Troubles::default(), 0);
        (0..500).for_each(|_| troubles.say(|| said += 1));
        assert_eq!(said, MOST_LINES);
    }
}
