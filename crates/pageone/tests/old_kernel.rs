//! A kernel before Linux 6.8: each command says what is missing and what to do, and programs with the agent work unmerged. Other kernels
//! try nothing here; `make test-kernels` has a guest with Linux 6.1.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::process::Command;

use common::{Place, output, pageone, text};
use support::{Guest, agent, guest_program};

/// Whether this kernel is one of those.
fn is_old() -> bool {
    let release = sys::host::kernel_release();
    let old = sys::host::version_of(&release).is_some_and(|version| version < (6, 7));
    if !old {
        println!("skipped: Linux {release} has PAGEMAP_SCAN");
    }
    old
}

#[track_caller]
fn says(command: &mut Command, code: i32, words: &[&str]) {
    let output = output(command);
    let said = text(&output.stdout) + &text(&output.stderr);
    println!("{said}");
    assert_eq!(output.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "no `{word}` in: {said}");
    }
}

#[test]
fn each_command_says_what_an_old_kernel_lacks_and_what_to_do() {
    if !is_old() {
        return;
    }
    let place = Place::new();
    let socket = place.socket();
    says(
        pageone().arg("doctor").arg("--socket").arg(&socket),
        2,
        &[
            "since Linux 6.8",
            "PAGEMAP_SCAN is missing",
            "userfaultfd with WP_ASYNC and MOVE is missing",
            "boot Linux 6.8 or newer",
        ],
    );
    let mut daemon = pageone();
    daemon
        .args(["daemon", "--no-keep", "--socket"])
        .arg(&socket);
    says(
        &mut daemon,
        1,
        &["PAGEMAP_SCAN is missing", "Linux 6.8 or newer"],
    );
    let mut run = pageone();
    run.arg("run").arg("--socket").arg(&socket);
    run.args(["--", "echo", "it ran"]);
    says(
        &mut run,
        125,
        &[
            "userfaultfd with WP_ASYNC and MOVE is missing",
            "Linux 6.8 or newer",
        ],
    );
}

/// The agent finds no engine, and its hooks pass all calls on.
#[test]
fn a_program_with_the_agent_works_unmerged() {
    if !is_old() {
        return;
    }
    let place = Place::new();
    let mut command = Command::new(guest_program(false));
    command.env("LD_PRELOAD", agent());
    let mut guest = Guest::from(command.env("PAGEONE_SOCKET", place.socket()));
    guest.offer(512, 5);
    for line in [
        "advise 0 8 4",
        "advise 8 8 10",
        "advise 8 8 11",
        "protect 16 8 1",
        "protect 16 8 3",
        "lock 32 8",
        "unlock 32 8",
        "fork",
        "fill 90 20 8",
        "childcheck",
        "childwrite",
        "childdiscard",
        "childexit",
        "remap 1024 1",
        "advise 0 1024 13",
    ] {
        guest.run(line);
    }
    guest.run("check");
    assert_eq!(guest.run("served"), "0");
}
