//! KSM at work: its counters, its knobs, the CPU time of ksmd, and the processes that take part.

use std::io;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use procfs::process::{Process, VmFlags, all_processes};
use serde::Serialize;
use sys::foreign::ForeignName;
use sys::ksm::{Ksm, Member};
use sys::{title, usage};

/// Bytes of a page.
pub(super) const PAGE: u64 = 4096;

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Counters {
    #[serde(skip)]
    pub(super) at: Instant,
    pub(super) pages_shared: u64,
    pub(super) pages_sharing: u64,
    pub(super) pages_unshared: u64,
    pub(super) pages_volatile: u64,
    pub(super) pages_skipped: u64,
    pub(super) zero_pages: u64,
    pub(super) pages_scanned: u64,
    pub(super) full_scans: u64,
    /// What is saved, in bytes.
    pub(super) saved_bytes: u64,
    /// The same less the entries of pages that were looked at.
    pub(super) net_saved_bytes: i64,
    /// CPU time of ksmd since boot, in seconds.
    pub(super) cpu_seconds: f64,
}

/// The knobs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Knobs {
    pub(super) run: u64,
    pub(super) pages_to_scan: u64,
    pub(super) sleep_millisecs: u64,
    pub(super) use_zero_pages: Option<u64>,
    pub(super) smart_scan: Option<u64>,
    pub(super) max_page_sharing: Option<u64>,
    pub(super) merge_across_nodes: Option<u64>,
    pub(super) advisor: Option<Advisor>,
}

/// The kernel's own advisor, where there is one and it is on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Advisor {
    pub(super) mode: String,
    pub(super) target_scan_seconds: u64,
    pub(super) max_cpu_percent: u64,
    pub(super) max_pages_to_scan: u64,
}

/// A process that takes part.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) pid: u32,
    pub(super) command: ForeignName,
    /// The container or the unit.
    pub(super) name: Option<ForeignName>,
    /// Memory that is there and that KSM may share.
    pub(super) offered_bytes: u64,
    /// Pages that KSM has looked at.
    pub(super) tracked_pages: u64,
    pub(super) merging_pages: u64,
    pub(super) zero_pages: u64,
    pub(super) net_saved_bytes: i64,
}

/// KSM, with the thread that does its work.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) ksm: Ksm,
    thread: Option<u32>,
}

impl Reader {
    /// Finds ksmd.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub(super) fn new(ksm: Ksm) -> Result<Self> {
        let thread = usage::kernel_thread("ksmd").context("cannot look for ksmd")?;
        Ok(Self { ksm, thread })
    }

    /// The counters now. Those that an older kernel lacks are zero.
    ///
    /// # Errors
    /// A file of KSM cannot be read.
    pub(super) fn counters(&self) -> io::Result<Counters> {
        let number = |name: &str| self.ksm.number(name);
        let newer = |name: &str| number(name).unwrap_or_default();
        let (sharing, zeros) = (number("pages_sharing")?, newer("ksm_zero_pages"));
        let saved_bytes = (sharing + zeros) * PAGE;
        let profit = self.ksm.read("general_profit").ok();
        let cpu = self.thread.map_or(Ok(Duration::ZERO), usage::cpu_time)?;
        Ok(Counters {
            at: Instant::now(),
            pages_shared: number("pages_shared")?,
            pages_sharing: sharing,
            pages_unshared: number("pages_unshared")?,
            pages_volatile: number("pages_volatile")?,
            pages_skipped: newer("pages_skipped"),
            zero_pages: zeros,
            pages_scanned: newer("pages_scanned"),
            full_scans: number("full_scans")?,
            saved_bytes,
            net_saved_bytes: profit
                .and_then(|profit| profit.parse().ok())
                .unwrap_or(saved_bytes.cast_signed()),
            cpu_seconds: cpu.as_secs_f64(),
        })
    }

    /// The knobs now.
    ///
    /// # Errors
    /// As [`counters`](Self::counters).
    pub(super) fn knobs(&self) -> io::Result<Knobs> {
        let number = |name: &str| self.ksm.number(name);
        let newer = |name: &str| number(name).ok();
        let mode = self.ksm.read("advisor_mode").ok();
        let advisor = mode.filter(|mode| mode != "none").map(|mode| Advisor {
            mode,
            target_scan_seconds: newer("advisor_target_scan_time").unwrap_or_default(),
            max_cpu_percent: newer("advisor_max_cpu").unwrap_or_default(),
            max_pages_to_scan: newer("advisor_max_pages_to_scan").unwrap_or_default(),
        });
        Ok(Knobs {
            run: number("run")?,
            pages_to_scan: number("pages_to_scan")?,
            sleep_millisecs: number("sleep_millisecs")?,
            use_zero_pages: newer("use_zero_pages"),
            smart_scan: newer("smart_scan"),
            max_page_sharing: newer("max_page_sharing"),
            merge_across_nodes: newer("merge_across_nodes"),
            advisor,
        })
    }
}

impl Counters {
    /// CPU seconds that ksmd takes for a page, since boot; unknown until it has looked at some.
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub(super) fn seconds_a_page(&self) -> Option<f64> {
        (self.pages_scanned >= 10_000 && self.cpu_seconds > 0.0)
            .then(|| self.cpu_seconds / self.pages_scanned as f64)
    }

    /// ksmd's share of one CPU since `earlier`.
    pub(super) fn share_since(&self, earlier: &Self) -> f64 {
        let time = self.at.saturating_duration_since(earlier.at).as_secs_f64();
        (self.cpu_seconds - earlier.cpu_seconds) / time.max(1e-3)
    }
}

/// The processes that take part, those with most memory first; and whether some could not be looked at.
///
/// # Errors
/// /proc cannot be read.
pub(super) fn members() -> Result<(Vec<Row>, bool)> {
    let (mut rows, mut hidden) = (Vec::new(), false);
    for process in all_processes().context("cannot list the processes")? {
        // A process that ends meanwhile takes no part.
        let Ok(process) = process else { continue };
        let pid = process.pid.cast_unsigned();
        match row(pid, &process) {
            Ok(row) => rows.extend(row),
            Err(error) => hidden |= error.kind() == io::ErrorKind::PermissionDenied,
        }
    }
    rows.sort_by_key(|row: &Row| (std::cmp::Reverse(row.offered_bytes), row.pid));
    Ok((rows, hidden))
}

fn row(pid: u32, process: &Process) -> io::Result<Option<Row>> {
    let member = Member::of(pid)?;
    if !member.may_take_part() {
        return Ok(None);
    }
    let offered_bytes = offered(process)?;
    let takes_part = offered_bytes > 0 || member.tracked > 0 || member.zeros > 0;
    Ok(takes_part.then(|| Row {
        pid,
        command: sys::process::comm(pid),
        name: title::of_cgroup(pid),
        offered_bytes,
        tracked_pages: member.tracked,
        merging_pages: member.merging,
        zero_pages: member.zeros,
        net_saved_bytes: member.profit,
    }))
}

/// Present anonymous memory in mappings that KSM may share.
fn offered(process: &Process) -> io::Result<u64> {
    let denied = |error| match error {
        procfs::ProcError::PermissionDenied(_) => io::ErrorKind::PermissionDenied.into(),
        error => io::Error::other(error),
    };
    let smaps = process.smaps().map_err(denied)?;
    let mergeable = smaps
        .iter()
        .filter(|mapping| mapping.extension.vm_flags.contains(VmFlags::MG));
    let bytes = mergeable.filter_map(|mapping| mapping.extension.map.get("Anonymous"));
    Ok(bytes.sum())
}

/// How much memory takes part, in pages, asked so rarely that asking costs at most a hundredth of a CPU.
#[derive(Debug, Default)]
pub(super) struct Offered {
    pages: u64,
    next: Option<Instant>,
}

impl Offered {
    /// # Errors
    /// As [`members`].
    pub(super) fn pages(&mut self) -> Result<u64> {
        let begin = Instant::now();
        if self.next.is_none_or(|next| next <= begin) {
            let (rows, _) = members()?;
            self.pages = rows.iter().map(|row| row.offered_bytes).sum::<u64>() / PAGE;
            self.next = Some(Instant::now() + begin.elapsed() * 100);
        }
        Ok(self.pages)
    }
}
