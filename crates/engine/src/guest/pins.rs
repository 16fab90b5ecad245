//! Things that may hold a guest's pages pinned: as long as there is one, written pages are not merged again.

use crate::guest::Guest;
use crate::sync::lock;

/// Clean looks in a row before broken pages are merged again. I/O of a descriptor that was closed before the first look ends before the
/// second.
const CLEAN_LOOKS: u32 = 2;

/// What is known of it.
#[derive(Debug, Default)]
pub(super) struct Pins {
    held: Option<String>,
    /// Looks in a row that found nothing.
    clean: u32,
}

impl Guest {
    /// Whether it is long enough ago that a look found something that may hold pages pinned. A look is taken when it is
    /// `due`, or may tell that.
    pub(crate) fn is_clean(&self, due: bool) -> bool {
        let may_tell = {
            let pins = lock(&self.pins);
            pins.held.is_none() && pins.clean < CLEAN_LOOKS
        };
        if due || may_tell {
            self.look_for_pins();
        }
        lock(&self.pins).clean >= CLEAN_LOOKS
    }

    fn look_for_pins(&self) {
        let most = self.user.common.limits.descriptors_per_process;
        let held = self.memory.pins(most);
        let mut pins = lock(&self.pins);
        pins.clean = match held {
            Some(_) => 0,
            None => pins.clean.saturating_add(1),
        };
        if let Some(held) = &held
            && pins.held.is_none()
        {
            let pid = self.pid;
            let held = || tracing::info!(pid, "written pages are not merged again: {held}");
            self.user.say(held);
        }
        pins.held = held;
    }

    /// What may hold pages pinned, as the last look found.
    pub(crate) fn pins(&self) -> Option<String> {
        lock(&self.pins).held.clone()
    }
}
