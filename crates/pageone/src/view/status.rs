//! `pageone status`: the counters of a running daemon, as a table or as JSON.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use sys::foreign::{Foreign, plain_json};
use wire::{GuestStatus, Reply, Request, RunMode, Status, Unserved};

use crate::{client, human, paths};

const PATIENCE: Duration = Duration::from_secs(30);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The daemon's socket
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Print JSON, one object a look
    #[arg(long)]
    json: bool,
    /// Look again and again, this far apart
    #[arg(long, value_name = "TIME", value_parser = human::period)]
    watch: Option<Duration>,
}

pub(crate) fn main(args: &Args) -> Result<()> {
    let socket = paths::served(args.socket.as_deref())?;
    loop {
        let status = ask(&socket)?;
        show(args, &status)?;
        let Some(pause) = args.watch else {
            return Ok(());
        };
        std::thread::sleep(pause);
    }
}

/// The counters of the daemon at `socket`.
///
/// # Errors
/// No daemon, or it refuses.
pub(crate) fn ask(socket: &Path) -> Result<Status> {
    match client::ask(socket, &Request::Status, PATIENCE)? {
        Reply::Status(status) => Ok(*status),
        Reply::Refused(why) => bail!("no status: {why}"),
        _ => bail!("the daemon replied with something else"),
    }
}

fn show(args: &Args, status: &Status) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let text = match args.json {
        true => plain_json(&serde_json::to_string(status)?) + "\n",
        false => table(status),
    };
    let clear = args.watch.is_some() && !args.json && out.is_terminal();
    let begin = if clear { "\x1b[H\x1b[2J" } else { "" };
    let written = write!(out, "{begin}{text}").and_then(|()| out.flush());
    // Whoever reads has read enough: `pageone status | head`.
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        other => Ok(other?),
    }
}

fn table(status: &Status) -> String {
    let mode = match status.knobs.run {
        RunMode::Stop => "stopped",
        RunMode::Run => "running",
        RunMode::Unmerge => "unmerging",
    };
    let period = Duration::from_millis(status.effective_period_ms);
    let limit = match status.knobs.cpu_limit {
        0 => String::new(),
        percent => format!(", at most {percent} % of a core"),
    };
    let mut text = format!(
        "{mode}, {} threads{limit}, a look every {}, {} rounds, {:.1} s of CPU{}\n\n",
        status.knobs.threads,
        humantime::format_duration(period),
        status.full_scans,
        status.cpu_seconds,
        if status.knobs.merge_across_nodes {
            ""
        } else {
            ", no merging across nodes"
        }
    );
    if status.only_user.is_some() {
        text.push_str("only the guests of your own are counted\n\n");
    }
    let mut line = |name: &str, value: String, note: &str| {
        let _ = writeln!(text, "{name:<14} {value:>12}  {note}");
    };
    line("saved", human::size(status.saved_bytes), "");
    line(
        "net saved",
        human::bytes(status.net_saved_bytes),
        "less all overhead",
    );
    line("metadata", human::size(status.metadata_bytes), "");
    let note = match status.knobs.store_limit_mib {
        0 => "canonical pages".to_owned(),
        mib => format!(
            "canonical pages, at most {}; {} pages got none",
            human::size(mib.saturating_mul(1 << 20)),
            status.pages_over_limit
        ),
    };
    line("stored", human::size(status.store_bytes), &note);
    let wire::Recycled {
        discarded,
        zeroed,
        told,
    } = status.pages_recycled;
    line(
        "recycled",
        status.pages_recycled.pages().to_string(),
        &format!("pages given up so far: {discarded} discarded, {zeroed} zeroed, {told} told"),
    );
    for (name, pages, note) in classes(status) {
        line(name, pages.to_string(), note);
    }
    text.push('\n');
    guests(&mut text, &status.guests);
    left_alone(&mut text, &status.guests);
    unserved(&mut text, &status.unserved);
    text
}

/// Why memory of guests is left alone, a line a reason.
fn left_alone(text: &mut String, guests: &[GuestStatus]) {
    let all = guests.iter().flat_map(|guest| {
        let leaves = guest.leaves.as_ref();
        let pins = guest.pins.as_ref();
        let stuck = guest
            .stuck
            .then(|| "a look at its memory does not return".to_owned());
        let reasons = [
            leaves.map(|why| format!("it leaves its domain: {why}")),
            stuck,
            guest.at_limit.clone(),
            pins.map(|why| format!("written pages are not merged again: {why}")),
        ];
        reasons.into_iter().flatten().map(|why| (guest.pid, why))
    });
    for (n, (pid, why)) in all.enumerate() {
        let head = if n == 0 {
            "\nleft alone, in part or whole:\n"
        } else {
            ""
        };
        let _ = writeln!(text, "{head}{pid:>8} {}", Foreign(&why));
    }
}

/// Processes that are no guests.
fn unserved(text: &mut String, unserved: &[Unserved]) {
    for (n, one) in unserved.iter().enumerate() {
        let head = if n == 0 { "\nnot served:\n" } else { "" };
        let ago = humantime::format_duration(Duration::from_secs(one.seconds));
        let times = match one.times {
            1 => String::new(),
            times => format!(", {times} times"),
        };
        let (pid, uid, why) = (one.pid, one.uid, Foreign(&one.why));
        let _ = writeln!(text, "{head}{pid:>8} user {uid}: {why} ({ago} ago{times})");
    }
}

/// The classes of pages, each page in exactly one of the first six.
fn classes(status: &Status) -> [(&'static str, u64, &'static str); 8] {
    [
        (
            "shared",
            status.pages_shared,
            "pages: canonical copies in use",
        ),
        (
            "sharing",
            status.pages_sharing,
            "pages that share one of them beyond its first: saved",
        ),
        (
            "unshared",
            status.pages_unshared,
            "pages: settled, seen once",
        ),
        (
            "volatile",
            status.pages_volatile,
            "pages: written lately, or not yet observed",
        ),
        ("zero", status.zero_pages, "pages of zeros without a frame"),
        (
            "skipped",
            status.pages_skipped,
            "pages left alone, of these:",
        ),
        (
            "  broken",
            status.pages_broken,
            "written after they were merged, not to be merged again",
        ),
        (
            "  pinned",
            status.pages_pinned,
            "in use for I/O, or shared by fork",
        ),
    ]
}

fn guests(text: &mut String, guests: &[GuestStatus]) {
    if guests.is_empty() {
        text.push_str("no guests\n");
        return;
    }
    let _ = writeln!(
        text,
        "{:>8} {:<16} {:<20} {:>7} {:>10} {:>10} {:>10} {:>8} {:>8} {:>10} {:>7}",
        "PID",
        "COMMAND",
        "DOMAIN",
        "REGIONS",
        "PAGES",
        "SHARING",
        "ZERO",
        "BROKEN",
        "PINNED",
        "SAVED",
        "VMAS"
    );
    for guest in guests {
        let _ = writeln!(
            text,
            "{:>8} {:<16} {:<20} {:>7} {:>10} {:>10} {:>10} {:>8} {:>8} {:>10} {:>7}{}",
            guest.pid,
            guest.comm,
            guest.domain,
            guest.regions,
            guest.pages,
            guest.pages_sharing,
            guest.zero_pages,
            guest.pages_broken,
            guest.pages_pinned,
            human::size(guest.saved_bytes),
            guest.vmas,
            if guest.responsive {
                ""
            } else {
                "  does not answer"
            }
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::KnobValues;

    fn status() -> Status {
        let guest = GuestStatus {
            pid: 77,
            comm: "qemu\x1b[2J".into(),
            domain: "uid:0".into(),
            responsive: false,
            leaves: Some("it is\x1b somebody else".to_owned()),
            ..GuestStatus::default()
        };
        Status {
            knobs: KnobValues {
                threads: 3,
                cpu_limit: 25,
                ..KnobValues::default()
            },
            effective_period_ms: 20_000,
            saved_bytes: 5 << 20,
            net_saved_bytes: -4096,
            guests: vec![guest],
            unserved: vec![Unserved {
                pid: 78,
                uid: 1000,
                why: "it has \x1b no place".to_owned(),
                times: 3,
                seconds: 5,
            }],
            ..Status::default()
        }
    }

    #[test]
    fn the_table_shows_the_saving_and_each_guest() {
        let text = table(&status());
        assert!(
            text.starts_with("running, 3 threads, at most 25 % of a core, a look every 20s"),
            "{text}"
        );
        assert!(
            text.contains("5.0 MiB") && text.contains("-4.0 KiB"),
            "{text}"
        );
        assert!(
            text.contains("77") && text.contains("does not answer"),
            "{text}"
        );
        assert!(
            text.contains("      77 it leaves its domain: it is"),
            "{text}"
        );
        assert!(
            text.contains("78 user 1000: it has") && text.contains("(5s ago, 3 times)"),
            "{text}"
        );
        assert!(!text.contains('\x1b'), "an escape sequence went through");
        assert!(table(&Status::default()).contains("no guests"));
    }
}
