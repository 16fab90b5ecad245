//! Delta debugging: takes lines away from a list for as long as it still shows a difference.

use std::time::{Duration, Instant};

use crate::list::Line;

/// The shortest list found within `time` for which `fails` holds.
pub(crate) fn shrink(lines: &[Line], time: Duration, fails: impl Fn(&[Line]) -> bool) -> Vec<Line> {
    let end = Instant::now() + time;
    let mut kept = lines.to_vec();
    let mut step = kept.len().div_ceil(2);
    while step > 0 {
        let mut at = 0;
        let mut shorter = false;
        while at < kept.len() {
            if Instant::now() > end {
                return kept;
            }
            let mut fewer = kept.clone();
            fewer.drain(at..(at + step).min(kept.len()));
            if fails(&fewer) {
                kept = fewer;
                shorter = true;
            } else {
                at += step;
            }
        }
        if step > 1 || !shorter {
            step /= 2;
        }
    }
    kept
}
