//! Knobs turned by hand, for the next engine.
//!
//! A daemon's flags and configuration say how it starts; what `pageone set` changed afterwards would be
//! lost with it. So each knob that was turned stands in a note in the keeper's hands, beside the value
//! that this engine was started with:
//!
//! ```text
//!  knobs.INODE.           pageone knobs 1
//!                         [[{"threads":2},{"threads":1}], …]      started with, turned to
//! ```
//!
//! The next engine turns a knob again if it was started with the same value: then nobody has
//! decided otherwise meanwhile. If not, the operator has changed flags or configuration since, which is
//! the later word, and that knob is forgotten.

use std::mem::discriminant;
use std::os::fd::AsFd;
use std::sync::Arc;

use sys::keeper::{Keeper, Kept};
use sys::memfd::{self, Note};
use wire::Setting;

use crate::handover::manifest::{self, Kind};
use crate::options::Options;
use crate::options::check_value;

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
    /// Of an engine that starts with `options`; what a former one left in `kept` is taken out of there,
    /// and changes them.
    pub(crate) fn load(
        options: &mut Options,
        keeper: Option<Arc<Keeper>>,
        kept: &mut Vec<Kept>,
    ) -> Self {
        let mut turned = Self {
            keeper,
            start: settings(options),
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
            tracing::info!(?setting, "a knob is as it was turned by hand");
            apply(options, setting);
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
        now && check_value(&setting)
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
        let Some(keeper) = self.keeper.clone() else {
            return;
        };
        if let Err(error) = self.try_write(&keeper) {
            tracing::warn!(%error, "the next engine will not know the knobs turned by hand");
        }
    }

    fn try_write(&mut self, keeper: &Keeper) -> std::io::Result<()> {
        let text = serde_json::to_string(&self.turns)?;
        let text = format!("{HEAD}{text}");
        if let Some(note) = &self.note {
            return Ok(note.write(&text)?);
        }
        let note = Note::new()?;
        note.write(&text)?;
        let name = manifest::name(Kind::Knobs, memfd::number(&note)?, "");
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

/// All knobs as `options` has them.
fn settings(options: &Options) -> Vec<Setting> {
    let period = u64::try_from(options.merge_period.as_millis());
    vec![
        Setting::Run(options.run),
        Setting::MergePeriodMs(period.unwrap_or(u64::MAX)),
        Setting::Threads(options.threads),
        Setting::UseZeroPages(options.use_zero_pages),
        Setting::MergeAcrossNodes(options.merge_across_nodes),
        Setting::MaxPageSharing(options.max_page_sharing),
        Setting::Thp(options.thp),
        Setting::MergeAgain(options.merge_again),
        Setting::CpuLimit(options.cpu_limit),
        Setting::Pace(options.pace),
        Setting::StoreLimitMib(options.store_limit_mib),
    ]
}

fn apply(options: &mut Options, setting: Setting) {
    match setting {
        Setting::Run(mode) => options.run = mode,
        Setting::MergePeriodMs(ms) => options.merge_period = std::time::Duration::from_millis(ms),
        Setting::Threads(threads) => options.threads = threads,
        Setting::UseZeroPages(on) => options.use_zero_pages = on,
        Setting::MergeAcrossNodes(on) => options.merge_across_nodes = on,
        Setting::MaxPageSharing(pages) => options.max_page_sharing = pages,
        Setting::Thp(thp) => options.thp = thp,
        Setting::MergeAgain(on) => options.merge_again = on,
        Setting::CpuLimit(percent) => options.cpu_limit = percent,
        Setting::Pace(pace) => options.pace = pace,
        Setting::StoreLimitMib(mib) => options.store_limit_mib = mib,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sys::keeper::{Inbox, Note as Told};
    use wire::{Pace, RunMode, Thp};

    /// One of each kind, none as by default.
    fn others() -> Vec<Setting> {
        vec![
            Setting::Run(RunMode::Stop),
            Setting::MergePeriodMs(1234),
            Setting::Threads(1000),
            Setting::UseZeroPages(false),
            Setting::MergeAcrossNodes(false),
            Setting::MaxPageSharing(1_000_000),
            Setting::Thp(Thp::Keep),
            Setting::MergeAgain(false),
            Setting::CpuLimit(7),
            Setting::Pace(Pace::Auto),
            Setting::StoreLimitMib(u64::MAX),
        ]
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
        let mut first = SavedKnobs::load(&mut Options::default(), keeper(), &mut Vec::new());
        first.note(&others());
        let kept = take(&inbox);
        assert_eq!(Kind::of(&kept.name), Some(Kind::Knobs));

        let (mut options, mut all) = (Options::default(), vec![copy(&kept)]);
        let mut second = SavedKnobs::load(&mut options, keeper(), &mut all);
        assert!(
            all.is_empty() && inbox.next().unwrap().is_none(),
            "the same note"
        );
        assert_eq!(settings(&options), others());
        // Turned back by hand.
        let threads = Setting::Threads(Options::default().threads);
        second.note(&[threads, Setting::CpuLimit(9)]);
        let mut options = Options {
            pace: Pace::Auto,
            merge_again: false,
            ..Options::default()
        };
        SavedKnobs::load(&mut options, keeper(), &mut vec![copy(&kept)]);
        assert!(settings(&options).contains(&threads));
        assert_eq!((options.cpu_limit, options.run), (9, RunMode::Stop));
        // What was configured anew wins, and for good.
        let mut options = Options::default();
        SavedKnobs::load(&mut options, keeper(), &mut vec![kept]);
        assert_eq!((options.pace, options.merge_again), (Pace::Fixed, true));
        assert_eq!((options.cpu_limit, options.thp), (9, Thp::Keep));
    }

    #[test]
    fn a_note_of_another_kind_changes_nothing() {
        let note = Note::new().unwrap();
        note.write("pageone knobs 2\n[]").unwrap();
        let mut kept = vec![Kept {
            name: manifest::name(Kind::Knobs, 1, ""),
            descriptor: note.as_fd().try_clone_to_owned().unwrap(),
        }];
        let mut options = Options::default();
        SavedKnobs::load(&mut options, None, &mut kept);
        assert_eq!(settings(&options), settings(&Options::default()));
    }
}
