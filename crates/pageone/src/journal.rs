//! Priorities for systemd's journal, as sd-daemon(3) has them: `<3>` at the head of a line.
//!
//! systemd names the stream of the journal in `JOURNAL_STREAM`, by device and inode. A program that has another standard
//! error than the service may inherit the variable, so both are compared.

use std::io::Write;
use std::os::fd::AsFd;

use rustix::fs::fstat;
use tracing::Level;

/// Says an error on standard error. Where that is the journal, each line has its priority: a mistake in a TOML file is told in several.
pub(crate) fn tell_error(text: &str) {
    let head = match is_stderr() {
        true => priority(Level::ERROR),
        false => "",
    };
    // The one who asked may have gone: then nobody reads it.
    let _ = std::io::stderr().write_all(headed(head, text).as_bytes());
}

/// `text` with `head` before each of its lines.
fn headed(head: &str, text: &str) -> String {
    let lines = text.trim_end_matches('\n').split('\n');
    lines.map(|line| format!("{head}{line}\n")).collect()
}

/// Has panics tell of themselves with priorities, where standard error is the journal.
pub(crate) fn head_panics() {
    if is_stderr() {
        let backtrace = std::env::var_os("RUST_BACKTRACE").is_some_and(|on| on != "0");
        std::panic::set_hook(Box::new(move |panic| {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("<unnamed>");
            let mut text = format!("thread '{name}' {panic}");
            if backtrace {
                let trace = std::backtrace::Backtrace::force_capture();
                text = format!("{text}\n{trace}");
            }
            tell_error(&text);
        }));
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
    fn each_line_of_an_error_has_the_head() {
        assert_eq!(headed("<3>", "a\n  |\n1 | b\n"), "<3>a\n<3>  |\n<3>1 | b\n");
        assert_eq!(headed("", "a\n\nb"), "a\n\nb\n");
    }

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
