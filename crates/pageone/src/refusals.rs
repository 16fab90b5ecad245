//! What the log says of refused guests: an agent asks again every second, and is told of once.

use std::collections::VecDeque;

/// How many refusals are remembered. A user that makes up more reasons than that fills the log no
/// faster than it may connect.
const REMEMBERED: usize = 256;

/// The refusals that the log has already.
#[derive(Debug, Default)]
pub(crate) struct Refusals(VecDeque<String>);

impl Refusals {
    /// Logs `why`: as a warning when it is new, for those who look closely when it is not.
    pub(crate) fn tell(&mut self, why: &str) {
        match self.is_new(why) {
            true => tracing::warn!("a guest is refused: {why}"),
            false => tracing::debug!("a guest is refused again: {why}"),
        }
    }

    fn is_new(&mut self, why: &str) -> bool {
        if self.0.iter().any(|told| told == why) {
            return false;
        }
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(why.to_owned());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_told_once_and_memory_is_bounded() {
        let mut refusals = Refusals::default();
        assert!(refusals.is_new("a") && !refusals.is_new("a"));
        for n in 0..REMEMBERED {
            assert!(refusals.is_new(&n.to_string()));
        }
        assert_eq!(refusals.0.len(), REMEMBERED);
        assert!(refusals.is_new("a"), "forgotten by now");
    }
}
