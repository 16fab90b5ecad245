//! Standard output and standard error. `println!` and `eprintln!` panic where the reader has left, as in `pageone status | head`, and
//! where a disk is full: a message would end `pageone run`, and its command with it.

use std::io::Write;

use anyhow::Context as _;

/// Writes `text` to standard output. A reader that has read enough ends the command, and that is no failure.
///
/// # Errors
/// What write(2) gives, such as a full disk.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => other.context("cannot write to standard output"),
    }
}

/// Writes a line to standard error, if it can be written.
pub(crate) fn say(line: &str) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}
