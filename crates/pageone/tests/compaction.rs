//! The kernel compacts memory while pages are merged: it takes pages away from under UFFDIO_MOVE, which then
//! does not always say what it moved (see `sys::uffd::Moved`).

mod common;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use common::{compact_memory, count, need_agent, output, pageone, text};

/// Of the agent that took MOVE's word, three merges in four lost pages.
const MERGES: &str = "2,2,2";

#[test]
fn pages_that_the_kernel_moves_meanwhile_are_not_lost() {
    need_agent();
    if !compact_memory() {
        return eprintln!("skipped: memory cannot be compacted: needs root");
    }
    let merged = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !merged.load(Relaxed) {
                compact_memory();
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let mut command = pageone();
        command.args(["bench", "merge", "--engines", "pageone", "--json"]);
        command.args(["--guests", "6", "--guest-mib", "128", "--run-pages", "64"]);
        command.args(["--dup", "0.9", "--merge-period", "100ms", "--steady", "1s"]);
        let done = output(command.args(["--threads", MERGES]));
        merged.store(true, Relaxed);
        done
    });
    let said = text(&report.stderr);
    assert!(report.status.success(), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).expect("JSON");
    common::assert_head(&report);
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 3, "{report}");
    for row in rows {
        assert!(count(row, "saved_bytes") > 300 << 20, "{row}");
        assert_eq!(count(row, "errors"), 0, "pages were lost: {row}");
    }
}
