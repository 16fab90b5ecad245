//! Priorities for systemd's journal, as sd-daemon(3) has them: `<3>` at the head of a line.
//!
//! systemd names the stream of the journal in `JOURNAL_STREAM`, by device and inode. A program that has another standard
//! error than the service may inherit the variable, so both are compared.

use std::os::fd::AsFd;

use rustix::fs::fstat;
use tracing::Level;

/// The head of an error's line where standard error is the journal; nothing elsewhere.
pub(crate) fn error() -> &'static str {
    match is_stderr() {
        true => priority(Level::ERROR),
        false => "",
    }
}

/// Whether standard error is the journal.
pub(crate) fn is_stderr() -> bool {
    let named = std::env::var("JOURNAL_STREAM");
    named.is_ok_and(|named| names(&named, std::io::stderr()))
}

/// Whether `named`, as `DEVICE:INODE`, is this file.
fn names(named: &str, file: impl AsFd) -> bool {
    fstat(file).is_ok_and(|file| named == format!("{}:{}", file.st_dev, file.st_ino))
}

/// The head of a line of this level.
pub(crate) fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "<3>",
        Level::WARN => "<4>",
        Level::INFO => "<6>",
        Level::DEBUG | Level::TRACE => "<7>",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_known_by_device_and_inode() {
        let (reader, writer) = std::io::pipe().unwrap();
        let stat = fstat(&writer).unwrap();
        let named = format!("{}:{}", stat.st_dev, stat.st_ino);
        assert!(names(&named, &writer));
        let other = tempfile::tempfile().unwrap();
        assert!(!names(&named, &other));
        let next = format!("{}:{}", stat.st_dev, stat.st_ino + 1);
        for wrong in ["", ":", "1", next.as_str(), &format!("{named}:")] {
            assert!(!names(wrong, &writer), "{wrong}");
        }
        drop(reader);
    }
}
