//! QEMU takes a snapshot in the background and migrates by postcopy, both with a userfaultfd of its own on memory that
//! PageONE has merged. PageONE lets go of it, and no byte differs at the other side.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use common::{Place, Running, alone, count, daemon, json, need_agent, wait_for};
use serde_json::{Value, json};

/// What each machine has in its memory beside the firmware's own: 16 MiB that are the same in all.
const LOADED_PAGES: usize = 4096;
const MEMORY: usize = 64 << 20;

/// A machine that runs its firmware and finds nothing to boot, and the connection by which it is told what to do.
struct Machine {
    _process: Running,
    lines: BufReader<UnixStream>,
}

impl Machine {
    fn start(place: &Place, name: &str, options: &[&str]) -> Self {
        let socket = place.path().join(name);
        let loaded = place.path().join("loaded");
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-display", "none", "-m", "64"]);
        command.args(["-machine", "pc,accel=tcg,mem-merge=on", "-device"]);
        command.arg(format!(
            "loader,file={},addr=0x1000000,force-raw=on",
            loaded.display()
        ));
        command
            .arg("-qmp")
            .arg(format!("unix:{},server=on,wait=off", socket.display()));
        command.args(options).stdin(Stdio::null());
        command
            .env("LD_PRELOAD", support::agent())
            .env("PAGEONE_SOCKET", place.socket());
        let process = Running::start(&mut command);
        let stream = wait_for("QEMU", || UnixStream::connect(&socket).ok());
        let mut machine = Self {
            _process: process,
            lines: BufReader::new(stream),
        };
        machine.lines.read_line(&mut String::new()).unwrap();
        machine.ask("qmp_capabilities", json!({}));
        machine
    }

    /// Gives a command, and takes what it returns.
    #[track_caller]
    fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let order = json!({ "execute": command, "arguments": arguments });
        writeln!(self.lines.get_mut(), "{order}").unwrap();
        loop {
            let mut line = String::new();
            assert!(
                self.lines.read_line(&mut line).unwrap() > 0,
                "{command}: QEMU ended"
            );
            let answer: Value = serde_json::from_str(&line).unwrap();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if let Some(value) = answer.get("return") {
                return value.clone();
            }
        }
    }

    fn can(&mut self, capability: &str) {
        let capabilities = json!([{ "capability": capability, "state": true }]);
        self.ask(
            "migrate-set-capabilities",
            json!({ "capabilities": capabilities }),
        );
    }

    #[track_caller]
    fn wait_for_migration(&mut self, wanted: &str) {
        wait_for(wanted, || {
            let migration = self.ask("query-migrate", json!({}));
            let status = migration["status"].as_str().unwrap_or_default();
            assert_ne!(status, "failed", "{migration}");
            (status == wanted).then_some(())
        });
    }

    /// All bytes of its memory.
    fn memory(&mut self, place: &Place) -> Vec<u8> {
        let file = place.path().join("memory");
        self.ask(
            "pmemsave",
            json!({ "val": 0, "size": MEMORY, "filename": file }),
        );
        std::fs::read(file).unwrap()
    }
}

/// A daemon and two machines at rest that share what they have loaded; `None` where QEMU is not installed.
fn merged(place: &Place) -> Option<(Running, [Machine; 2])> {
    need_agent();
    if Command::new("qemu-system-x86_64")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        common::tools::lacks("qemu-system-x86_64 (Debian: qemu-system-x86)");
        return None;
    }
    let words =
        (0..(LOADED_PAGES * 512) as u64).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    std::fs::write(
        place.path().join("loaded"),
        words.flat_map(u64::to_le_bytes).collect::<Vec<_>>(),
    )
    .unwrap();
    let running = daemon(place, &["--merge-period", "100ms"]);
    let mut machines = ["one", "two"].map(|name| Machine::start(place, name, &[]));
    for machine in &mut machines {
        machine.ask("stop", json!({}));
    }
    let enough = LOADED_PAGES as u64 * 9 / 10;
    wait_for("what the machines loaded to be merged", || {
        (count(&json(place), "pages_sharing") >= enough).then_some(())
    });
    Some((running, machines))
}

#[test]
fn a_background_snapshot_has_every_byte() {
    let _alone = alone();
    let place = Place::new();
    let Some((_daemon, [mut machine, _other])) = merged(&place) else {
        return;
    };
    let before = machine.memory(&place);
    let snapshot: PathBuf = place.path().join("snapshot");
    machine.can("background-snapshot");
    machine.ask(
        "migrate",
        json!({ "uri": format!("exec:cat > {}", snapshot.display()) }),
    );
    machine.wait_for_migration("completed");
    let source = format!("exec:cat {}", snapshot.display());
    let mut again = Machine::start(&place, "again", &["-S", "-incoming", &source]);
    again.wait_for_migration("completed");
    assert!(again.memory(&place) == before, "the snapshot differs");
}

#[test]
fn a_machine_that_moves_by_postcopy_has_every_byte() {
    let _alone = alone();
    let place = Place::new();
    let Some((_daemon, [mut machine, _other])) = merged(&place) else {
        return;
    };
    let before = machine.memory(&place);
    let uri = format!("unix:{}", place.path().join("migration").display());
    let mut target = Machine::start(&place, "target", &["-S", "-incoming", "defer"]);
    target.can("postcopy-ram");
    target.ask("migrate-incoming", json!({ "uri": uri }));
    machine.can("postcopy-ram");
    // So slow that nearly everything is left for postcopy.
    machine.ask("migrate-set-parameters", json!({ "max-bandwidth": 65536 }));
    machine.ask("migrate", json!({ "uri": uri }));
    machine.wait_for_migration("active");
    machine.ask("migrate-start-postcopy", json!({}));
    machine.wait_for_migration("completed");
    target.wait_for_migration("completed");
    assert!(
        target.memory(&place) == before,
        "the machine that moved differs"
    );
}
