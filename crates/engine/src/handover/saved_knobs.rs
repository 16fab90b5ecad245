//! Knobs turned by hand, for the next engine.
//!
//! A daemon's flags and configuration say how it starts. Changes by `pageone set` afterwards would be
//! lost with it. So each knob that was turned stands in a note in the keeper's hands, beside the value
//! that this engine was started with:
//!
//! ```text
//!  knobs.INODE.           pageone knobs 1
//!                         [[{"threads":2},{"threads":1}], …]      started with, turned to
//! ```
//!
//! The next engine turns a knob again if it was started with the same value: then the operator has
//! not decided otherwise meanwhile. If not, the operator has changed flags or configuration since. That is
//! the later word, and the knob is forgotten.

use std::mem::discriminant;
use std::os::fd::AsFd;
use std::sync::Arc;

use sys::keeper::{Keeper, Kept};
use sys::memfd::{self, Note};
use wire::{KnobValues, Setting};

use crate::domain::handover::{self, Kind};

const HEAD: &str = "pageone knobs 1\n";

/// A knob: what the engine was started with, and what it was turned to.
type Turn = (Setting, Setting);

/// What was turned, and who keeps it.
#[derive(Debug, Default)]
pub(crate) struct SavedKnobs {
    keeper: Option<Arc<Keeper>>,
    /// Made when there is something to write.
    note: Option<Note>,
    start: Vec<Setting>,
    turns: Vec<Turn>,
}

impl SavedKnobs {
    /// Of an engine that starts with `knobs`; what a former one left in `kept` is taken out of there,
    /// and changes them.
    pub(crate) fn load(
        knobs: &mut KnobValues,
        keeper: Option<Arc<Keeper>>,
        kept: &mut Vec<Kept>,
    ) -> Self {
        let mut turned = Self {
            keeper,
            start: knobs.settings(),
            ..Self::default()
        };
        for kept in kept.extract_if(.., |kept| Kind::of(&kept.name) == Some(Kind::Knobs)) {
            match read(kept) {
                Ok((note, turns)) => {
                    turned.turns = turns
                        .into_iter()
                        .filter(|turn| turned.holds(turn))
                        .collect();
                    turned.note = Some(note);
                }
                Err(why) => tracing::warn!("knobs turned by hand are not known any more: {why}"),
            }
        }
        for &(_, setting) in &turned.turns {
            tracing::info!(knob = setting.key(), value = %setting, "a knob is as it was turned by hand");
            knobs.turn(setting);
        }
        if turned.note.is_some() {
            turned.write();
        }
        turned
    }

    /// Whether a turn of former times still holds.
    fn holds(&self, &(start, setting): &Turn) -> bool {
        let now = self.start.contains(&start);
        if !now {
            tracing::info!(
                ?setting,
                "a knob's flag or configuration has changed since it was turned"
            );
        }
        now && setting
            .check()
            .inspect_err(|why| tracing::warn!("a knob is not turned again: {why}"))
            .is_ok()
    }

    /// Notes that knobs were turned.
    pub(crate) fn note(&mut self, settings: &[Setting]) {
        for &setting in settings {
            let same = |other: &Setting| discriminant(other) == discriminant(&setting);
            self.turns.retain(|(start, _)| !same(start));
            if let Some(&start) = self.start.iter().find(|start| same(start))
                && start != setting
            {
                self.turns.push((start, setting));
            }
        }
        self.write();
    }

    fn write(&mut self) {
        if let Err(error) = self.try_write() {
            tracing::warn!(%error, "the next engine will not know the knobs turned by hand");
        }
    }

    fn try_write(&mut self) -> std::io::Result<()> {
        let Some(keeper) = &self.keeper else {
            return Ok(());
        };
        let text = serde_json::to_string(&self.turns)?;
        let text = format!("{HEAD}{text}");
        if let Some(note) = &self.note {
            return Ok(note.write(&text)?);
        }
        let note = Note::new()?;
        note.write(&text)?;
        let name = handover::name(Kind::Knobs, memfd::number(&note)?, "");
        keeper.keep(&name, note.as_fd())?;
        self.note = Some(note);
        Ok(())
    }
}

fn read(kept: Kept) -> Result<(Note, Vec<Turn>), String> {
    let note = Note::adopt(kept.descriptor).map_err(|error| error.to_string())?;
    let text = note.read().map_err(|error| error.to_string())?;
    let turns = text
        .strip_prefix(HEAD)
        .ok_or("their note is of another version")?;
    let turns = serde_json::from_str(turns).map_err(|error| error.to_string())?;
    Ok((note, turns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sys::keeper::{Inbox, Note as Told};
    use wire::{Pace, RunMode, Thp};

    /// None as by default.
    fn others() -> KnobValues {
        KnobValues {
            run: RunMode::Stop,
            merge_period_ms: 1234,
            threads: 1000,
            use_zero_pages: false,
            merge_across_nodes: false,
            hashdist: false,
            max_page_sharing: 1_000_000,
            thp: Thp::Keep,
            merge_again: false,
            cpu_limit: 7,
            pace: Pace::Auto,
            store_limit_mib: u64::MAX >> 20,
        }
    }

    #[test]
    fn every_knob_is_turned_again_and_fits_the_note() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let inbox = Inbox::bind(&path).unwrap();
        let keeper = || Some(Arc::new(Keeper::at(path.as_os_str()).unwrap()));
        let take = |inbox: &Inbox| match inbox.next().unwrap() {
            Some(Told::Keep(name, mut descriptors)) => Kept {
                name,
                descriptor: descriptors.pop().unwrap(),
            },
            other => panic!("{other:?}"),
        };
        let copy = |kept: &Kept| Kept {
            name: kept.name.clone(),
            descriptor: kept.descriptor.try_clone().unwrap(),
        };
        let mut first = SavedKnobs::load(&mut KnobValues::default(), keeper(), &mut Vec::new());
        first.note(&others().settings());
        let kept = take(&inbox);
        assert_eq!(Kind::of(&kept.name), Some(Kind::Knobs));

        let (mut knobs, mut all) = (KnobValues::default(), vec![copy(&kept)]);
        let mut second = SavedKnobs::load(&mut knobs, keeper(), &mut all);
        assert!(
            all.is_empty() && inbox.next().unwrap().is_none(),
            "the same note"
        );
        assert_eq!(knobs, others());
        let default = KnobValues::default();
        let both = others().settings().into_iter().zip(default.settings());
        assert!(both.into_iter().all(|(other, default)| other != default));
        // Turned back by hand.
        let threads = Setting::Threads(KnobValues::default().threads);
        second.note(&[threads, Setting::CpuLimit(9)]);
        let mut knobs = KnobValues {
            pace: Pace::Auto,
            merge_again: false,
            ..KnobValues::default()
        };
        SavedKnobs::load(&mut knobs, keeper(), &mut vec![copy(&kept)]);
        assert!(knobs.settings().contains(&threads));
        assert_eq!((knobs.cpu_limit, knobs.run), (9, RunMode::Stop));
        // What was configured anew wins, and for good.
        let mut knobs = KnobValues::default();
        SavedKnobs::load(&mut knobs, keeper(), &mut vec![kept]);
        assert_eq!((knobs.pace, knobs.merge_again), (Pace::Fixed, true));
        assert_eq!((knobs.cpu_limit, knobs.thp), (9, Thp::Keep));
    }

    #[test]
    fn a_note_of_another_kind_changes_nothing() {
        let note = Note::new().unwrap();
        note.write("pageone knobs 2\n[]").unwrap();
        let mut kept = vec![Kept {
            name: handover::name(Kind::Knobs, 1, ""),
            descriptor: note.as_fd().try_clone_to_owned().unwrap(),
        }];
        let mut knobs = KnobValues::default();
        SavedKnobs::load(&mut knobs, None, &mut kept);
        assert_eq!(knobs, KnobValues::default());
    }
}
