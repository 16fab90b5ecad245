//! KSM's knobs and counters in sysfs (Documentation/admin-guide/mm/ksm.rst).

mod member;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub use member::Member;

/// Where the kernel keeps them.
pub(crate) const FOLDER: &str = "/sys/kernel/mm/ksm";

/// KSM of this machine, or a folder that looks like it.
#[derive(Clone, Debug)]
pub struct Ksm {
    folder: PathBuf,
}

/// How KSM is to scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tuning {
    /// As the kernel does when no knob is turned: 100 pages, a pause of 20 ms.
    Defaults,
    /// From the defaults on as its own advisor says, whose goal is a time for a whole scan.
    Advisor,
    /// As fast as one core can.
    Fast,
}

/// Knobs as they were found: names and values, in the order in which they are put back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Knobs(Vec<(String, String)>);

impl Knobs {
    /// The knobs that tuning changes. The advisor comes after what it owns while it is on, and
    /// `run` last: KSM goes back to work with its own values.
    pub const NAMES: [&'static str; 4] =
        ["sleep_millisecs", "pages_to_scan", "advisor_mode", "run"];

    /// The value of `name`, if it was saved.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let found = self.0.iter().find(|(knob, _)| knob == name)?;
        Some(&found.1)
    }

    /// As `NAME=VALUE` words.
    pub fn words(&self) -> impl Iterator<Item = String> + '_ {
        self.0.iter().map(|(name, value)| format!("{name}={value}"))
    }

    /// From `NAME=VALUE` words; `None` when one names no knob that tuning changes.
    #[must_use]
    pub fn from_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let knob = |word: &'a str| {
            let (name, value) = word.split_once('=')?;
            let known = Self::NAMES.contains(&name) && !value.is_empty();
            known.then(|| (name.to_owned(), value.to_owned()))
        };
        words.into_iter().map(knob).collect::<Option<_>>().map(Self)
    }
}

impl Default for Ksm {
    fn default() -> Self {
        Self::at(FOLDER)
    }
}

impl Ksm {
    /// KSM's files in `folder`.
    #[must_use]
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
        }
    }

    /// Whether this kernel has KSM.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.folder.join("run").exists()
    }

    /// The file of the knob `run`.
    #[must_use]
    pub fn run_file(&self) -> PathBuf {
        self.folder.join("run")
    }

    /// Whether this user may turn knobs.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn may_turn(&self) -> io::Result<()> {
        let path = self.run_file();
        let opened = fs::File::options().write(true).open(&path);
        opened.map(drop).map_err(|error| named(&path, &error))
    }

    /// The value of `name`. Of a choice like `[none] scan-time`, the chosen word.
    ///
    /// # Errors
    /// Whatever reading gives, with the file's name.
    pub fn read(&self, name: &str) -> io::Result<String> {
        let path = self.folder.join(name);
        let text = fs::read_to_string(&path).map_err(|error| named(&path, &error))?;
        let chosen = text
            .split_once('[')
            .and_then(|(_, rest)| rest.split_once(']'));
        Ok(chosen.map_or(text.trim(), |(word, _)| word).to_owned())
    }

    /// Whether it merges.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.number("run").is_ok_and(|run| run == 1)
    }

    /// The number in `name`.
    ///
    /// # Errors
    /// As [`read`](Self::read); `InvalidData` when it is no number.
    pub fn number(&self, name: &str) -> io::Result<u64> {
        let value = self.read(name)?;
        value.parse().map_err(|_| {
            let why = format!(
                "{} holds {value:?}, not a number",
                self.folder.join(name).display()
            );
            io::Error::new(io::ErrorKind::InvalidData, why)
        })
    }

    /// Its saving, zero pages included, in bytes.
    ///
    /// # Errors
    /// As [`number`](Self::number).
    pub fn saved_bytes(&self) -> io::Result<u64> {
        // An older kernel does not count zero pages.
        let zeros = self.number("ksm_zero_pages").unwrap_or(0);
        Ok((self.number("pages_sharing")? + zeros) * crate::PAGE as u64)
    }

    /// Sets `name` to `value`.
    ///
    /// # Errors
    /// `PermissionDenied` for anyone but root; `InvalidInput` for a value the kernel refuses.
    pub fn write(&self, name: &str, value: &str) -> io::Result<()> {
        let path = self.folder.join(name);
        fs::write(&path, value).map_err(|error| named(&path, &error))
    }

    /// The knobs that tuning changes, as they are now. Older kernels lack some.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn save(&self) -> io::Result<Knobs> {
        let mut knobs = Vec::new();
        for name in Knobs::NAMES {
            if self.folder.join(name).exists() {
                knobs.push((name.to_owned(), self.read(name)?));
            }
        }
        Ok(Knobs(knobs))
    }

    /// Puts `knobs` back, all that can be; a knob that already has its value is not written.
    ///
    /// While the advisor is on the kernel refuses values for what it owns, so it goes off first.
    ///
    /// # Errors
    /// The first failure, after all were tried.
    pub fn restore(&self, knobs: &Knobs) -> io::Result<()> {
        let mut result = match knobs.get("advisor_mode") {
            Some("none") => self.advise("none"),
            _ => Ok(()),
        };
        for (name, value) in &knobs.0 {
            let done = self.read(name).and_then(|now| match now == *value {
                true => Ok(()),
                false => self.write(name, value),
            });
            result = result.and(done);
        }
        result
    }

    /// Makes it scan as `tuning` says, without starting or stopping it.
    ///
    /// # Errors
    /// As [`write`](Self::write); `NotFound` for the advisor on a kernel without one.
    pub fn tune(&self, tuning: Tuning) -> io::Result<()> {
        self.advise("none")?;
        let (sleep, pages) = match tuning {
            Tuning::Defaults | Tuning::Advisor => ("20", "100"),
            Tuning::Fast => ("0", "1000000"),
        };
        self.write("sleep_millisecs", sleep)?;
        self.write("pages_to_scan", pages)?;
        match tuning {
            Tuning::Advisor => self.write("advisor_mode", "scan-time"),
            _ => Ok(()),
        }
    }

    /// Makes it look at `pages` pages, sleep for `sleep` milliseconds, and so on. The advisor, which would set these itself, goes off.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn pace(&self, pages: u64, sleep: u64) -> io::Result<()> {
        self.advise("none")?;
        self.write("sleep_millisecs", &sleep.to_string())?;
        self.write("pages_to_scan", &pages.to_string())
    }

    /// Sets the advisor's mode, where there is an advisor and it has another.
    fn advise(&self, mode: &str) -> io::Result<()> {
        match self.folder.join("advisor_mode").exists() && self.read("advisor_mode")? != mode {
            true => self.write("advisor_mode", mode),
            false => Ok(()),
        }
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake(files: &[(&str, &str)]) -> (tempfile::TempDir, Ksm) {
        let folder = tempfile::tempdir().unwrap();
        for (name, value) in files {
            fs::write(folder.path().join(name), value).unwrap();
        }
        let ksm = Ksm::at(folder.path());
        (folder, ksm)
    }

    #[test]
    fn tuned_values_go_back() {
        let (_folder, ksm) = fake(&[
            ("run", "1\n"),
            ("sleep_millisecs", "20\n"),
            ("pages_to_scan", "100\n"),
            ("advisor_mode", "none [scan-time]\n"),
        ]);
        let saved = ksm.save().unwrap();
        assert_eq!(saved.get("advisor_mode"), Some("scan-time"));
        ksm.tune(Tuning::Fast).unwrap();
        ksm.write("run", "0").unwrap();
        assert_eq!(ksm.number("sleep_millisecs").unwrap(), 0);
        assert_eq!(ksm.read("advisor_mode").unwrap(), "none");
        ksm.restore(&saved).unwrap();
        assert_eq!(ksm.save().unwrap(), saved);
    }

    #[test]
    fn the_advisor_is_on_after_what_it_owns_was_written() {
        let (_folder, ksm) = fake(&[
            ("run", "0"),
            ("sleep_millisecs", "7"),
            ("pages_to_scan", "9"),
            ("advisor_mode", "[none] scan-time\n"),
        ]);
        let saved = ksm.save().unwrap();
        ksm.tune(Tuning::Advisor).unwrap();
        assert_eq!(ksm.read("advisor_mode").unwrap(), "scan-time");
        assert_eq!(ksm.number("pages_to_scan").unwrap(), 100);
        ksm.restore(&saved).unwrap();
        assert_eq!(ksm.save().unwrap(), saved);
    }

    #[test]
    fn words_carry_the_knobs_and_nothing_else() {
        let (_folder, ksm) = fake(&[("run", "1"), ("pages_to_scan", "100")]);
        let saved = ksm.save().unwrap();
        let words: Vec<String> = saved.words().collect();
        assert_eq!(words, ["pages_to_scan=100", "run=1"]);
        assert_eq!(
            Knobs::from_words(words.iter().map(String::as_str)),
            Some(saved)
        );
        assert_eq!(Knobs::from_words(["../../x=1"]), None);
        assert_eq!(Knobs::from_words(["run"]), None);
    }

    #[test]
    fn one_that_fails_does_not_keep_the_others_back() {
        let (folder, ksm) = fake(&[
            ("run", "1"),
            ("pages_to_scan", "100"),
            ("sleep_millisecs", "20"),
        ]);
        let saved = ksm.save().unwrap();
        ksm.tune(Tuning::Fast).unwrap();
        fs::remove_file(folder.path().join("sleep_millisecs")).unwrap();
        fs::create_dir(folder.path().join("sleep_millisecs")).unwrap();
        assert!(ksm.restore(&saved).is_err());
        assert_eq!(ksm.number("pages_to_scan").unwrap(), 100);
    }
}
