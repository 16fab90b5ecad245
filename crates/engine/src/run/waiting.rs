//! Waiting for many agents at once.
//!
//! A look asks its guest what changed, and ends when the answer is not there yet: no worker waits. The driver polls all
//! connections together and has those looked at again whose answers came:
//!
//! ```text
//!   looks    ask ask ask ask …   take,scan  take,scan │ take,scan
//!   driver   ┄┄┄┄┄┄┄┄┄ poll ┄┄┄┄┄┄┄┄┄┄┄┄┄┄ grace over  │ ┄┄ poll now and then
//!   chunks                                            │ chunk chunk chunk …
//! ```
//!
//! Work begins when the agents have answered that did so the last time. It begins at the latest after the *grace*: some patiences,
//! but at most half a period, and at most the least time of a round. So silent agents lengthen a round by half at most, and each of
//! them delays only every second round: work does not wait for an agent that was late. It loses only its place in the order. Its look comes
//! when its answer does: among the chunks of the others, or after them in the rest of the grace.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::run::queue::Job;
use crate::scan::terms::Aim;
use crate::sync::lock;

/// Time between two looks for answers while there is other work.
pub(crate) const GLIMPSE: Duration = Duration::from_millis(2);
/// The grace, in patiences: many agents share few processors, and their first answers take longest.
const GRACE: u32 = 5;
/// The part of a period that one user's looks may take before the chunks of the others are worked.
const FLOOR: u32 = 4;

/// The guests that owe answers, and what their looks are for.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<Vec<(Arc<Guest>, Aim)>>);

impl Waiting {
    /// Adds a guest whose look goes on when it has answered.
    pub(crate) fn add(&self, guest: &Arc<Guest>, aim: Aim) {
        lock(&self.0).push((Arc::clone(guest), aim));
    }

    /// Waits at most `wait` for answers; gives the looks at the guests that gave one.
    pub(crate) fn take_answers(&self, wait: Duration) -> impl Iterator<Item = Job> + use<> {
        let entries = std::mem::take(&mut *lock(&self.0));
        let ready = poll(&entries, wait);
        let mut ready = ready.into_iter();
        let (came, still): (Vec<_>, Vec<_>) = entries
            .into_iter()
            .partition(|_| ready.next() == Some(true));
        lock(&self.0).extend(still);
        came.into_iter().map(|(guest, aim)| Job::Look(guest, aim))
    }

    /// Whether work has to wait for one of them.
    pub(crate) fn awaits(&self) -> bool {
        let all = lock(&self.0);
        all.iter().any(|(guest, _)| guest.is_awaited())
    }

    /// Whether there are any.
    pub(crate) fn is_any(&self) -> bool {
        !lock(&self.0).is_empty()
    }

    /// Notes that all of them are late.
    pub(crate) fn note_late(&self) {
        let all = lock(&self.0);
        all.iter().for_each(|(guest, _)| guest.note_silence());
    }

    /// Ends the round for those that did not answer.
    pub(crate) fn give_up(&self) {
        self.note_late();
        lock(&self.0).clear();
    }
}

/// While there is work, a round lasts at least so many times as long as its looks.
const LOOK_SHARE: u32 = 64;

/// The times of a round: how long looks, and what follows from them, may take.
pub(crate) struct Timing {
    begin: Instant,
    /// When the grace is over: agents that are late are heard until then.
    pub(crate) grace: Instant,
    /// The time that each user's looks may take whatever the others' do.
    pub(crate) floor: Duration,
    /// From then on it is cut if jobs are left only to users for whom [`Self::floor`] and more than for all others was spent.
    pub(crate) fair: Instant,
    /// And then in any case.
    pub(crate) cut: Instant,
}

impl Timing {
    /// One that begins now. It lasts for `least`, and up to `most` where its looks take long. Agents are waited for in a part of
    /// the `period`.
    pub(crate) fn new(
        patience: Duration,
        period: Duration,
        least: Duration,
        most: Duration,
    ) -> Self {
        let begin = Instant::now();
        Self {
            begin,
            grace: begin + (patience * GRACE).min(period / 2).min(least),
            floor: period / FLOOR,
            fair: begin + least,
            cut: begin + most,
        }
    }

    /// Time since it began.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begin.elapsed()
    }

    /// The looks are done.
    pub(crate) fn end_looks(&mut self) {
        self.cut = (self.begin + self.elapsed() * LOOK_SHARE).clamp(self.fair, self.cut);
    }

    /// What is left of the grace.
    pub(crate) fn left(&self) -> Duration {
        self.grace.saturating_duration_since(Instant::now())
    }

    pub(crate) fn grace_is_over(&self) -> bool {
        self.left().is_zero()
    }
}

/// Which of the guests have answered, after waiting at most `wait`. No other thread talks to them meanwhile.
fn poll(entries: &[(Arc<Guest>, Aim)], wait: Duration) -> Vec<bool> {
    let talks = entries.iter().map(|(guest, _)| guest.talk.try_lock());
    let talks: Vec<_> = talks.collect();
    let bells = talks
        .iter()
        .map(|talk| talk.as_ref()?.link.as_ref()?.bell());
    let bells: Vec<_> = bells.collect();
    let there: Vec<_> = bells.iter().flatten().collect();
    if there.is_empty() {
        // Others talk to all of them.
        std::thread::sleep(if entries.is_empty() {
            Duration::ZERO
        } else {
            wait.min(GLIMPSE)
        });
        return Vec::new();
    }
    // Without memory for it the next glimpse finds the same answers.
    let ready = sys::process::wait_some(&there, wait).unwrap_or_default();
    let mut ready = ready.into_iter();
    let rings = |bell: &Option<_>| bell.is_some() && ready.next() == Some(true);
    bells.iter().map(rings).collect()
}
