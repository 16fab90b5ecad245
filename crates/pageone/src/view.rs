//! Views: questions to a daemon and to the kernel, answered as a table or as JSON.

pub(crate) mod history;
mod numa;
pub(crate) mod set;
pub(crate) mod status;
pub(crate) mod top;

use std::io::Write;

use anyhow::Context as _;

pub(crate) use numa::NumaCommand;

/// Writes `text` to standard output. Whoever reads there may have read enough: `pageone status | head`.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => other.context("cannot write to standard output"),
    }
}
