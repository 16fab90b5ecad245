//! Pages that the kernel's own merging shares are found. A program of its own: it offers all its memory to KSM.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

mod common;

use std::fs;
use std::path::Path;

use common::{end, holder, in_guest, merged, report_of};

/// Not a test of its own: the child of the next one.
#[test]
fn hold_pages() {
    common::hold_pages();
}

#[test]
fn pages_that_the_kernel_merged_count_as_merged() {
    const HELD: u64 = 3000;
    let ksm = |name: &str| Path::new("/sys/kernel/mm/ksm").join(name);
    if !in_guest() {
        println!("skipped: it turns on KSM for the whole machine");
        return;
    }
    fs::write(ksm("pages_to_scan"), "20000").unwrap();
    fs::write(ksm("sleep_millisecs"), "10").unwrap();
    fs::write(ksm("run"), "1").unwrap();
    // Started before the offer: KSM may not touch it, though all its pages are alike.
    let untouched = holder(&std::env::current_exe().unwrap(), HELD);
    // Whatever this process starts from now on inherits it.
    sys::residence::offer_memory_to_ksm().unwrap();
    let child = holder(&std::env::current_exe().unwrap(), HELD);
    let pid = child.id();
    let merging = || -> u64 {
        let text = fs::read_to_string(format!("/proc/{pid}/ksm_merging_pages")).unwrap();
        text.trim().parse().unwrap()
    };
    while merging() < HELD {
        std::thread::sleep(std::time::Duration::from_millis(50)); // the guest's own time limit ends this
    }
    let report = report_of(&child);
    assert!(merged(&report) >= HELD, "{report:?}");
    let other = report_of(&untouched);
    assert_eq!(merged(&other), 0, "{other:?}");
    end(child);
    end(untouched);
    fs::write(ksm("run"), "2").unwrap(); // and everything is as before
}
