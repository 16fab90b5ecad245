//! Discards between two rounds: frames that guests give up go back within a second, however long the period is.
//!
//! ```text
//!   rounds    ═════┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄═════
//!   glances        .    .    .    .    .    .    .    .           a word of each lifeline is read
//!   discards                  ▼
//!   looks                          ══                             evidence, a new lifeline, frames
//! ```
//!
//! A guest's agent counts discards of merged pages in its lifeline ([`wire::Tally`]). A *glance* reads the word of each guest
//! that has merged pages. Where it has changed, the guest is heard twice ([`Aim::Hear`]), as a round hears it. The first time
//! its agent tells the pages that it gave up. The second time it lets go of the old lifeline, and the frames go back.
//!
//! **Safe.** The word decides only when a guest is heard. Refs go by evidence, as in a round (I4), and frames by refs (I5): a
//! word that lies brings a look that finds nothing. No thread of the guest waits for this (I7): the hook writes a word of memory.
//!
//! **Fair.** A guest that writes the word without a pause shall get no more than others (I8):
//!
//! | a guest | so |
//! |---|---|
//! | counts on and on | its user rests for `REST` times the time of the workers' jobs for him and of the glance at him, a second at most |
//! | does not answer | it is heard again when its answer has come; its user rests, by the time that was waited for it |
//! | has its line swapped out, so that a glance waits | a glance ends after [`GLANCE_TIME`], and goes on with the next guest |
//!
//! Jobs have their user's lane here too, the CPU limit holds, and a round that is due waits for [`LOOKS`] patiences at most.
//! While nothing is merged there are no glances.
//!
//! The tempting alternative, that agents say it by their connection, needs a signal to the agent's thread for each discard.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::guest::{Guest, Standing};
use crate::page::Class;
use crate::run::core::{Core, Crew};
use crate::run::glances::Spent;
use crate::run::waiting::Timing;
use crate::scan::terms::Aim;
use crate::sync::lock;

/// Time between two glances.
const GLANCE: Duration = Duration::from_millis(250);
/// A glance takes no longer, but for the guest at which it is: one part in a hundred of the time.
const GLANCE_TIME: Duration = Duration::from_micros(2500);
/// Looks in a row: the evidence, and the lifeline that lets it go.
const LOOKS: usize = 2;

/// Whether the guest has something to give up, or has told of it in a round.
fn may_give(guest: &Guest) -> bool {
    let merged = guest.counters.pages(Class::Merged) > 0;
    guest.standing() == Standing::Served && (merged || lock(&guest.ledger).gives_back())
}

impl Core {
    /// When the next glance is due; `None` while nothing is merged.
    pub(crate) fn next_glance(&self, now: Instant) -> Option<Instant> {
        let any = lock(&self.guests).iter().any(|guest| may_give(guest));
        let due = lock(&self.glances.0).due;
        any.then(|| due.map_or(now, |due| due.min(now + GLANCE)))
    }

    /// Looks for discards of merged pages, and gives back what was discarded.
    pub(crate) fn glance(&self, crew: &dyn Crew) {
        let mut spent = Spent::new();
        let mut guests = self.find_discards(&mut spent);
        for _ in 0..LOOKS {
            if guests.is_empty() {
                break;
            }
            self.hear(crew, &guests, &mut spent);
            guests.retain(|guest| guest.is_responsive() && lock(&guest.ledger).gives_back());
        }
        let mut state = lock(&self.glances.0);
        state.rest(spent);
        state.due = Some(Instant::now() + GLANCE);
    }

    /// The guests that have discarded merged pages since they were heard, and those whose late answer has come.
    fn find_discards(&self, spent: &mut Spent) -> Vec<Arc<Guest>> {
        let begin = Instant::now();
        let mut merged = self.guests_that(may_give);
        // A plain mutex: it is not held over a ledger's.
        let (number, resting) = {
            let mut state = lock(&self.glances.0);
            (std::mem::take(&mut state.first), state.resting(begin))
        };
        let first = merged.partition_point(|guest| guest.number < number);
        merged.rotate_left(first);
        let mut found = Vec::new();
        let mut last = begin;
        for guest in merged {
            if last - begin > GLANCE_TIME {
                lock(&self.glances.0).first = guest.number;
                break;
            }
            if resting.contains(&guest.user.uid) || guest.is_held_up() {
                continue;
            }
            // A late answer may tell of discards: they were counted as heard when it was asked.
            let tells = match guest.is_responsive() {
                true => {
                    let ledger = lock(&guest.ledger);
                    ledger.gives_back() || ledger.has_discards()
                }
                false => guest.has_answer(),
            };
            let now = Instant::now();
            *spent.entry(guest.user.uid).or_default() += now - last;
            last = now;
            if tells {
                found.push(guest);
            }
        }
        found
    }

    /// Hears these guests, and settles what they gave up.
    fn hear(&self, crew: &dyn Crew, guests: &[Arc<Guest>], spent: &mut Spent) {
        let begin = Instant::now();
        let patience = self.knobs.patience;
        let looks = guests.iter().map(|guest| (Arc::clone(guest), Aim::Hear));
        let timing = Timing::new(patience, patience * 2, patience, patience);
        self.look_and_work(crew, looks.collect(), timing);
        for (uid, took) in self.queue.spent() {
            *spent.entry(uid).or_default() += took;
        }
        let took = begin.elapsed();
        for guest in guests.iter().filter(|guest| !guest.is_responsive()) {
            *spent.entry(guest.user.uid).or_default() += took;
        }
    }
}
