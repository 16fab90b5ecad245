//! Priorities for systemd's journal, as sd-daemon(3) has them: `<3>` at the head of a line.
//!
//! systemd names the stream of the journal in `JOURNAL_STREAM`, by device and inode. A program that has another standard
//! error than the service may inherit the variable, so both are compared.

use std::fmt::{self, Write as _};
use std::io::Write;
use std::os::fd::AsFd;

use rustix::fs::fstat;
use tracing::Level;

/// Says an error on standard error. Where that is the journal, each line has its priority: a mistake in a TOML file is told in several.
pub(crate) fn tell_error(text: &str) {
    // The caller may have gone: then no process reads it.
    let _ = std::io::stderr().write_all(headed(head_of_errors(), text).as_bytes());
}

/// The head of an error's lines on standard error: none but in the journal.
fn head_of_errors() -> &'static str {
    match is_stderr() {
        true => priority(Level::ERROR),
        false => "",
    }
}

/// `text` with `head` before each of its lines.
fn headed(head: &str, text: &str) -> String {
    let lines = text.trim_end_matches('\n').split('\n');
    lines.map(|line| format!("{head}{line}\n")).collect()
}

/// Has panics tell of themselves with priorities, where standard error is the journal; and end the program, also in a build that unwinds.
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
    if cfg!(panic = "unwind") {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            tell(panic);
            std::process::abort();
        }));
    }
}

/// Has panics of the daemon end it with one line, so that its keeper starts the next one at once. There is no backtrace: where
/// memory is refused, an allocation in it fails, and waits for ever for a lock that the thread has itself.
pub(crate) fn end_by_panics() {
    let head = head_of_errors();
    std::panic::set_hook(Box::new(move |panic| {
        let name = sys::thread::name();
        let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
        let name = str::from_utf8(name).unwrap_or("?");
        let mut last = Last::default();
        let _ = write!(last, "{head}pageone: thread '{name}' {panic}");
        last.tell();
        std::process::abort();
    }));
}

/// A last line, which needs no memory and takes no lock. Only std may: it formats some messages before it calls the hook.
struct Last {
    text: [u8; 1024],
    len: usize,
}

impl Default for Last {
    fn default() -> Self {
        Self {
            text: [0; 1024],
            len: 0,
        }
    }
}

impl fmt::Write for Last {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        for letter in part.chars() {
            let letter = if letter.is_control() { ' ' } else { letter };
            let end = self.len + letter.len_utf8();
            // The last place is for the end of the line.
            if end >= self.text.len() {
                break;
            }
            letter.encode_utf8(&mut self.text[self.len..end]);
            self.len = end;
        }
        Ok(())
    }
}

impl Last {
    fn tell(mut self) {
        self.text[self.len] = b'\n';
        let _ = rustix::io::write(std::io::stderr().as_fd(), &self.text[..=self.len]);
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

    /// It runs itself once more, as a process that panics.
    #[test]
    fn a_panic_of_the_daemon_is_one_line_and_the_end() {
        use std::os::unix::process::ExitStatusExt;
        const SELF: &str = "journal::tests::a_panic_of_the_daemon_is_one_line_and_the_end";
        if std::env::var_os("PAGEONE_TEST_PANICS").is_some() {
            end_by_panics();
            let thread = std::thread::Builder::new().name("closer".to_owned());
            let panics = || panic!("no memory,\nnot {}", "at all");
            let _ = thread.spawn(panics).unwrap().join();
            return;
        }
        let mut again = std::process::Command::new("/proc/self/exe");
        again.args(["--exact", SELF, "--nocapture"]);
        again
            .env("PAGEONE_TEST_PANICS", "1")
            .env("RUST_BACKTRACE", "1");
        let output = again.env_remove("JOURNAL_STREAM").output().unwrap();
        assert_eq!(output.status.signal(), Some(6), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        let line = "pageone: thread 'closer' panicked at crates/pageone/src/journal.rs:";
        assert!(said.starts_with(line), "{said}");
        assert!(said.ends_with(": no memory, not at all\n"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }

    #[test]
    fn a_long_last_line_is_cut() {
        let mut last = Last::default();
        let _ = write!(last, "{}", "x".repeat(3000));
        assert_eq!(last.len, 1023);
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
