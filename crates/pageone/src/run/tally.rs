//! The saving of an engine of `run`'s own, for the line at the end.

use sys::foreign::Foreign;
use wire::Status;

use crate::human;

/// The saving over time.
#[derive(Debug, Default)]
pub(super) struct Tally {
    most: u64,
    last: u64,
    /// The most memory that guests offered, in pages.
    offered: u64,
    guests: usize,
    /// Why the last process that offered was no guest.
    refused: Option<String>,
}

impl Tally {
    /// Takes the counters of a moment.
    pub(super) fn add(&mut self, status: &Status) {
        let last = status.unserved.iter().min_by_key(|one| one.seconds);
        if let Some(unserved) = last {
            self.refused = Some(unserved.why.clone());
        }
        // Between the end of the last guest and that of the command nothing is left to count.
        if status.guests.is_empty() {
            return;
        }
        self.last = status.saved_bytes;
        self.most = self.most.max(self.last);
        self.guests = self.guests.max(status.guests.len());
        let offered = status.guests.iter().map(|guest| guest.pages);
        self.offered = self.offered.max(offered.sum());
    }

    /// All of it in words.
    pub(super) fn told(&self, cpu_seconds: f64, any: bool) -> String {
        let why = match self {
            Self {
                guests: 0,
                refused: Some(why),
                ..
            } => &format!("; no process became a guest: {}", Foreign(why)),
            Self { guests: 0, .. } if any => {
                "; no process became a guest, or none lived long enough"
            }
            Self { guests: 0, .. } => {
                "; no process became a guest, or none lived long enough, or none offered memory (`--any` offers all there is)"
            }
            Self { offered: 0, .. } if any => "; no memory was there that could be offered",
            Self { offered: 0, .. } => "; no memory was offered (`--any` offers all there is)",
            _ => "",
        };
        format!(
            "saved at most {}, {} at the end, {cpu_seconds:.2} s of CPU{why}; other runs share nothing with this \
             one (with `pageone daemon` all do)",
            human::size(self.most),
            human::size(self.last)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::{GuestStatus, Unserved};

    #[test]
    fn the_most_and_the_last_are_told() {
        let mut tally = Tally::default();
        for any in [false, true] {
            let told = tally.told(0.0, any);
            assert!(told.contains("or none lived long enough"), "{told}");
            assert_eq!(told.contains("`--any`"), !any, "{told}");
        }
        let unserved = vec![Unserved {
            pid: 7,
            uid: 0,
            why: "it keeps its memory secret".to_owned(),
            times: 1,
            seconds: 0,
        }];
        tally.add(&Status {
            unserved,
            ..Status::default()
        });
        let told = tally.told(0.0, true);
        assert!(
            told.contains("a guest: it keeps its memory secret; other"),
            "{told}"
        );
        let status = |saved_bytes, pages| Status {
            saved_bytes,
            guests: vec![GuestStatus {
                pages,
                ..GuestStatus::default()
            }],
            ..Status::default()
        };
        tally.add(&status(0, 0));
        assert!(
            tally
                .told(0.0, false)
                .contains("no memory was offered (`--any`")
        );
        assert!(!tally.told(0.0, true).contains("--any"));
        tally.add(&status(8 << 20, 5000));
        tally.add(&status(3 << 20, 4000));
        tally.add(&Status::default());
        let told = tally.told(1.25, false);
        assert!(
            told.starts_with("saved at most 8.0 MiB, 3.0 MiB at the end, 1.25 s of CPU; other"),
            "{told}"
        );
    }
}
