//! QEMU in its own sandbox, and as another user: its agent works as it would without, or says why it does not.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "../../../tests/support/tools.rs"]
mod tools;

mod common;

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Engine, count};
use wire::{Answer, CHUNK_BYTES, Change, PageOutcome};

/// A virtual machine that runs its firmware and finds nothing to boot.
struct Machine(Child);

impl Machine {
    /// `None` where QEMU is not installed.
    fn start(engine: &Engine, options: &[&str]) -> Option<Self> {
        for path in [engine.folder.path(), &engine.socket()] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        }
        let started = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-display", "none", "-m", "64"])
            .args(["-machine", "accel=tcg,mem-merge=on"])
            .args(options)
            .env("LD_PRELOAD", support::agent())
            .env("PAGEONE_SOCKET", engine.socket())
            .stdin(Stdio::null())
            .spawn();
        match started {
            Ok(child) => Some(Self(child)),
            Err(error) => {
                tools::lacks(&format!(
                    "qemu-system-x86_64 (Debian: qemu-system-x86): {error}"
                ));
                None
            }
        }
    }

    fn status(&self, name: &str) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim().to_owned()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Accepts agents until one says what is wanted.
#[track_caller]
fn accept_until(engine: &mut Engine, machine: &Machine, wanted: impl Fn(&Answer) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !engine.try_accept().is_some_and(|answer| wanted(&answer)) {
        assert!(Instant::now() < deadline, "uid {}", machine.status("Uid:"));
    }
}

#[test]
fn a_sandbox_with_all_that_libvirt_denies_is_merged() {
    const DENY: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let mut engine = Engine::new();
    let Some(mut machine) = Machine::start(&engine, &["-sandbox", DENY]) else {
        return;
    };
    accept_until(&mut engine, &machine, |answer| {
        matches!(answer, Answer::Ready(_))
    });
    assert_eq!(machine.status("Seccomp:"), "2");
    // The firmware has been somewhere in the machine's memory. Where, and when QEMU offers it, is QEMU's affair.
    let mut chunks = BTreeSet::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    'merged: loop {
        for change in engine.sync() {
            match change {
                Change::Whole { chunk, chunks: run } => {
                    chunks.extend((0..u64::from(run)).map(|nth| chunk + nth * CHUNK_BYTES as u64));
                }
                Change::Chunk { chunk, .. } => _ = chunks.insert(chunk),
                Change::Recycled { .. } => {}
            }
        }
        let mut outcomes = Vec::new();
        for &chunk in &chunks {
            let merged = engine.merge(usize::try_from(chunk).unwrap(), 0, 512, None);
            let done = |outcome| count(&merged, outcome);
            if done(PageOutcome::Zeroed) + done(PageOutcome::Differs) > 0 {
                break 'merged;
            }
            outcomes.push((chunk, merged.outcomes[0]));
        }
        assert!(Instant::now() < deadline, "{outcomes:x?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(machine.0.try_wait().unwrap().is_none(), "QEMU ended");
}

#[test]
fn another_user_has_an_agent_of_its_own_that_says_why_it_cannot() {
    let mut engine = Engine::new();
    let Some(mut machine) = Machine::start(&engine, &["-runas", "nobody"]) else {
        return;
    };
    // A process that changed its user hides from its own /proc.
    let step = wire::STEP_MEMORY;
    accept_until(
        &mut engine,
        &machine,
        |answer| matches!(answer, Answer::Failed { step: said, .. } if *said == step),
    );
    assert!(machine.status("Uid:").starts_with("65534"));
    let tasks = std::fs::read_dir(format!("/proc/{}/task", machine.0.id())).unwrap();
    for task in tasks {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let line = |name: &str| {
            status
                .lines()
                .find(|line| line.starts_with(name))
                .unwrap()
                .to_owned()
        };
        assert_eq!(line("Uid:"), "Uid:\t65534\t65534\t65534\t65534");
        assert_eq!(line("CapEff:"), "CapEff:\t0000000000000000");
    }
    assert!(machine.0.try_wait().unwrap().is_none(), "QEMU ended");
}
