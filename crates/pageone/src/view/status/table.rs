//! The counters as a table, 80 columns wide.

use std::fmt::Write as _;
use std::time::Duration;

use sys::foreign::Foreign;
use wire::{GuestStatus, Recycled, RunMode, Status, StoreNode, Unserved};

use super::shown;
use crate::human::{self, cut};

const WIDTH: usize = 80;

/// All of it.
pub(super) fn table(status: &Status) -> String {
    let mut text = head(status);
    for (name, value, note) in sizes(status).iter().chain(&classes(status)) {
        let _ = writeln!(
            text,
            "{}",
            format!("{name:<14} {value:>12}  {note}").trim_end()
        );
    }
    text.push('\n');
    guests(&mut text, &by_saving(&status.guests));
    attached(&mut text, &status.guests);
    left_alone(&mut text, &status.guests);
    hints(&mut text, &status.guests);
    unserved(&mut text, &status.unserved);
    text
}

/// The guests that save most first.
fn by_saving(guests: &[GuestStatus]) -> Vec<&GuestStatus> {
    let mut guests: Vec<_> = guests.iter().collect();
    guests.sort_by_key(|guest| (std::cmp::Reverse(guest.saved_bytes), guest.pid));
    guests
}

fn time(ms: u64) -> String {
    humantime::format_duration(Duration::from_millis(ms)).to_string()
}

fn head(status: &Status) -> String {
    let mode = match status.knobs.run {
        RunMode::Stop => "stopped",
        RunMode::Run => "running",
        RunMode::Unmerge => "unmerging",
    };
    let limit = match status.knobs.cpu_limit {
        0 => String::new(),
        percent => format!(", at most {percent} % of a core"),
    };
    let across = match status.knobs.merge_across_nodes {
        true => "",
        false => ", no merging across nodes",
    };
    // That of all guests together, which no user is told alone.
    let cpu = match status.only_user {
        Some(_) => String::new(),
        None => format!(", {:.1} s of CPU", status.cpu_seconds),
    };
    let line = format!(
        "{mode}, {}{limit}, a look every {}, {}{cpu}{across}",
        human::count(status.knobs.threads, "thread"),
        time(status.effective_period_ms),
        human::count(status.full_scans, "round"),
    );
    let mut lines = human::wrapped(&line, WIDTH);
    if let Some(ms) = status.first_merges_ms {
        // Whole seconds, and never none: it is an estimate.
        let seconds = ms.div_ceil(1000).max(1);
        lines.push(format!(
            "observing: first merges in about {}",
            time(seconds * 1000)
        ));
    }
    if status.only_user.is_some() {
        lines.push("only your own guests are counted; root sees all".to_owned());
    }
    lines.join("\n") + "\n\n"
}

type Row = (String, String, String);

fn row(name: &str, value: String, note: impl Into<String>) -> Row {
    (name.to_owned(), value, note.into())
}

fn sizes(status: &Status) -> Vec<Row> {
    let mut rows = vec![row("saved", human::size(status.saved_bytes), "")];
    if status.only_user.is_none() {
        rows.extend(overhead(status));
    }
    rows.extend(nodes(status));
    let Recycled {
        discarded,
        zeroed,
        told,
    } = status.pages_recycled;
    let pages = status.pages_recycled.pages().to_string();
    let recycled = format!("pages: {discarded} discarded, {zeroed} zeroed, {told} told");
    rows.push(row("recycled", pages, recycled));
    if status.ksm_saved_bytes > 0 {
        let note = "by the kernel's KSM, on the whole machine";
        rows.push(row("KSM", human::size(status.ksm_saved_bytes), note));
    }
    rows
}

/// The cost of the engine, which is of all guests together.
fn overhead(status: &Status) -> [Row; 3] {
    let stored = match status.knobs.store_limit_mib {
        0 => "canonical pages".to_owned(),
        mib => format!(
            "canonical pages, at most {}; {} got none",
            human::size(mib.saturating_mul(1 << 20)),
            status.pages_over_limit
        ),
    };
    let net = human::bytes(status.net_saved_bytes);
    [
        row("net saved", net, "less all overhead"),
        row("metadata", human::size(status.metadata_bytes), ""),
        row("stored", human::size(status.store_bytes), stored),
    ]
}

/// Canonical pages by node, where the last walk found them; none on a machine with one node.
fn nodes(status: &Status) -> impl Iterator<Item = Row> {
    let by_node = |(node, (pages, astray)): (u32, (u64, u64))| {
        let note = match astray {
            0 => format!("{pages} pages"),
            astray => format!("{pages} pages, {astray} of them astray"),
        };
        let bytes = human::size(pages.saturating_mul(4096));
        (format!("  node {node}"), bytes, note)
    };
    StoreNode::by_node(&status.store_nodes)
        .into_iter()
        .map(by_node)
}

/// The classes of pages, each page in exactly one of the first six.
fn classes(status: &Status) -> Vec<Row> {
    // A canonical page is of no user: all his sharers count, the first too.
    let shared = match status.only_user {
        Some(_) => vec![(
            "sharing",
            status.pages_sharing,
            "pages that share a canonical page",
        )],
        None => vec![
            (
                "shared",
                status.pages_shared,
                "pages: canonical copies in use",
            ),
            (
                "sharing",
                status.pages_sharing,
                "pages that share one beyond its first: saved",
            ),
        ],
    };
    let all = shared.into_iter().chain(apart(status));
    all.map(|(name, pages, note)| row(name, pages.to_string(), note))
        .collect()
}

/// The pages that share nothing.
fn apart(status: &Status) -> [(&'static str, u64, &'static str); 9] {
    [
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
            "written once merged, not to be merged again",
        ),
        (
            "  pinned",
            status.pages_pinned,
            "in use for I/O, or shared by fork or KSM",
        ),
        (
            "  foreign",
            status.pages_foreign,
            "in mappings of files or of other engines",
        ),
        (
            "  unfit",
            status.pages_unfit,
            "in mappings of a kind that is not merged",
        ),
        (
            "  put off",
            status.pages_put_off(),
            "no room, or it failed: tried again",
        ),
    ]
}

fn guests(text: &mut String, guests: &[&GuestStatus]) {
    if guests.is_empty() {
        text.push_str(
            "no guests\n  \
             pageone run --any -- COMMAND   starts one\n  \
             pageone attach --any PID       makes one of a running process\n",
        );
        return;
    }
    let _ = writeln!(
        text,
        "{:>8} {:<17} {:<15} {:>9} {:>9} {:>10} {:>6}",
        "PID", "NAME", "DOMAIN", "MEMORY", "SAVED", "NET", "CPU s"
    );
    for guest in guests {
        let name = shown(guest);
        let _ = writeln!(
            text,
            "{:>8} {:<17} {:<15} {:>9} {:>9} {:>10} {:>6}",
            guest.pid,
            cut(&name, 17),
            cut(&guest.domain.to_string(), 15),
            human::size(guest.pages.saturating_mul(4096)),
            human::size(guest.saved_bytes),
            human::bytes(guest.net_saved_bytes),
            format!("{:.1}", guest.cpu_seconds),
        );
    }
}

/// Guests whose agents came into them while they ran.
fn attached(text: &mut String, guests: &[GuestStatus]) {
    let attached = guests.iter().filter(|guest| guest.attached);
    let pids: Vec<_> = attached.map(|guest| guest.pid.to_string()).collect();
    if !pids.is_empty() {
        let line = format!("attached while they ran: {}", pids.join(" "));
        let _ = writeln!(text, "\n{}", human::wrapped(&line, WIDTH).join("\n"));
    }
}

/// A reason beside its process, in as many lines as it takes.
fn reason(text: &mut String, pid: u32, why: &str) {
    for (n, line) in human::wrapped(why, WIDTH - 9).iter().enumerate() {
        let pid = if n == 0 {
            pid.to_string()
        } else {
            String::new()
        };
        let _ = writeln!(text, "{pid:>8} {line}");
    }
}

/// Why memory of guests is not merged, a line a reason.
fn left_alone(text: &mut String, guests: &[GuestStatus]) {
    let all = guests.iter().flat_map(|guest| {
        let reasons = guest.reasons.iter();
        reasons.map(|reason| (guest.pid, &reason.why))
    });
    for (n, (pid, why)) in all.enumerate() {
        if n == 0 {
            text.push_str("\nnot merged, in part or whole:\n");
        }
        reason(text, pid, &Foreign(why).to_string());
    }
}

/// Memory that guests could give back.
fn hints(text: &mut String, guests: &[GuestStatus]) {
    let all = guests
        .iter()
        .filter_map(|guest| Some((guest.pid, guest.hint.as_ref()?)));
    // The first sentence is of the guest, the advice behind it of all.
    let mut advised: Vec<&str> = Vec::new();
    for (n, (pid, hint)) in all.enumerate() {
        if n == 0 {
            text.push_str("\nmerged, and seems to be free:\n");
        }
        let (own, advice) = hint.split_once(". ").unwrap_or((hint, ""));
        reason(text, pid, &Foreign(own).to_string());
        if !advice.is_empty() && !advised.contains(&advice) {
            advised.push(advice);
        }
    }
    for advice in advised {
        for line in human::wrapped(&Foreign(advice).to_string(), WIDTH - 9) {
            let _ = writeln!(text, "{:>8} {line}", "");
        }
    }
}

/// Processes that are no guests.
fn unserved(text: &mut String, unserved: &[Unserved]) {
    for (n, one) in unserved.iter().enumerate() {
        if n == 0 {
            text.push_str("\nnot served:\n");
        }
        let times = match one.times {
            1 => String::new(),
            times => format!(", {times} times"),
        };
        let why = human::without_process(one.pid, &one.why);
        let (uid, why, ago) = (
            one.uid,
            Foreign(&why),
            time(one.seconds.saturating_mul(1000)),
        );
        reason(
            text,
            one.pid,
            &format!("user {uid}: {why} ({ago} ago{times})"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::{KnobValues, WhyNot, WhyNotCode};

    fn status() -> Status {
        let guest = GuestStatus {
            pid: 77,
            comm: "qemu\x1b[2J".into(),
            domain: "cgroup:1234/machine.slice/x".into(),
            saved_bytes: 5 << 20,
            net_saved_bytes: -4096,
            cpu_seconds: 12.34,
            reasons: vec![WhyNot {
                code: WhyNotCode::Leaves,
                pages: 0,
                why: "it leaves its domain: it is\x1b another user's".to_owned(),
            }],
            ..GuestStatus::default()
        };
        let named = GuestStatus {
            pid: 4_194_304,
            attached: true,
            hint: Some("pages were \x1b not read".to_owned()),
            name: Some("a name that is longer than its place".into()),
            ..guest.clone()
        };
        Status {
            knobs: KnobValues {
                threads: 3,
                cpu_limit: 25,
                merge_across_nodes: false,
                store_limit_mib: 1 << 24,
                ..KnobValues::default()
            },
            first_merges_ms: Some(36_200),
            only_user: Some(7),
            effective_period_ms: 20_000,
            saved_bytes: 5 << 20,
            net_saved_bytes: -4096,
            pages_skipped: 518,
            pages_pinned: 18,
            guests: vec![guest, named],
            unserved: vec![Unserved {
                pid: 78,
                uid: 1000,
                why: "it has \x1b no place".to_owned() + &" and more of it".repeat(9),
                times: 3,
                seconds: 5,
            }],
            ..Status::default()
        }
    }

    #[test]
    fn the_table_shows_the_saving_and_each_guest_in_80_columns() {
        let text = table(&status());
        for part in [
            "running, 3 threads, at most 25 % of a core, a look every 20s",
            "observing: first merges in about 37s\n",
            "  put off               500  no room",
            "5.0 MiB   -4.0 KiB   12.3\n",
            "4194304 a name that is l…",
            "      77 it leaves its domain: it is",
            "\nattached while they ran: 4194304\n",
            "\nmerged, and seems to be free:\n 4194304 pages were ",
            "78 user 1000: it has",
            "(5s ago, 3 times)",
        ] {
            assert!(text.contains(part), "no {part}: {text}");
        }
        assert!(!text.contains('\x1b'), "an escape sequence went through");
        let wide = text.lines().find(|line| line.chars().count() > WIDTH);
        assert_eq!(wide, None);
        assert!(table(&Status::default()).contains("no guests"));
    }

    #[test]
    fn a_user_is_shown_no_figure_of_all_guests_together() {
        let mut status = status();
        let text = table(&status);
        assert!(text.contains("only your own guests are counted"), "{text}");
        let alone = " 0  pages that share a canonical page\n";
        assert!(text.contains(alone), "{text}");
        let of_all = ["\nnet saved ", "\nmetadata ", "\nstored ", "\nshared "];
        let has = |text: &str| of_all.map(|part| text.contains(part));
        // The head may be broken between any two words.
        let has_cpu = |text: &str| text.replace('\n', " ").contains(" s of CPU");
        assert_eq!((has(&text), has_cpu(&text)), ([false; 4], false), "{text}");
        status.only_user = None;
        let text = table(&status);
        assert_eq!((has(&text), has_cpu(&text)), ([true; 4], true), "{text}");
        assert!(text.contains("beyond its first: saved"), "{text}");
    }

    #[test]
    fn advice_that_is_the_same_for_all_stands_once() {
        let mut status = status();
        for (guest, unread) in status.guests.iter_mut().zip([5, 6]) {
            guest.hint = Some(format!("{unread} of 9 pages were not read. Give them back"));
        }
        let text = table(&status);
        let end = "      77 5 of 9 pages were not read\n 4194304 6 of 9 pages were not read\n         Give them back\n";
        assert!(text.contains(end), "{text}");
        assert_eq!(text.matches("Give them back").count(), 1, "{text}");
    }

    #[test]
    fn a_guest_without_a_name_has_ended() {
        let mut status = status();
        status.guests[0].comm = "".into();
        assert!(table(&status).contains("      77 (no name) "));
    }

    #[test]
    fn the_guests_that_save_most_come_first() {
        let guest = |pid, saved_bytes| GuestStatus {
            pid,
            saved_bytes,
            ..GuestStatus::default()
        };
        let guests = [guest(1, 0), guest(4, 7), guest(2, 7), guest(3, 9)];
        let order: Vec<_> = by_saving(&guests).iter().map(|guest| guest.pid).collect();
        assert_eq!(order, [3, 2, 4, 1]);
    }

    #[test]
    fn the_saving_of_ksm_is_shown_where_there_is_one() {
        let mut status = status();
        assert!(!table(&status).contains("\nKSM "));
        status.ksm_saved_bytes = 3 << 20;
        let text = table(&status);
        let row = text.lines().find(|line| line.starts_with("KSM "));
        let row = row.expect("a row of its own");
        assert!(
            row.contains("3.0 MiB  by the kernel's KSM, on the whole machine"),
            "{row}"
        );
        assert!(row.len() <= WIDTH, "{row}");
    }

    #[test]
    fn canonical_pages_are_shown_by_node_where_there_are_several() {
        let at = |domain: &str, node, pages, astray| StoreNode {
            domain: domain.into(),
            node,
            pages,
            astray,
        };
        let mut status = Status {
            only_user: None,
            ..status()
        };
        assert!(!table(&status).contains("node "), "one node");
        let many = 1 << 34;
        status.store_nodes = vec![
            at("a", 0, 1024, 0),
            at("a", 1023, many, many),
            at("b", 0, 512, 0),
        ];
        let text = table(&status);
        for part in [
            "canonical pages, at most",
            "\n  node 0            6.0 MiB  1536 pages\n",
            "\n  node 1023        64.0 TiB  17179869184 pages, 17179869184 of them astray\n",
            "\nrecycled ",
        ] {
            assert!(text.contains(part), "no {part}: {text}");
        }
        let wide = text.lines().find(|line| line.chars().count() > WIDTH);
        assert_eq!(wide, None);
    }
}
