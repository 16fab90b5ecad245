//! `pageone run --any`: programs that offer nothing are merged as they are.

mod common;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{Place, count, daemon, guests_of, json, need_agent, output, pageone, text, wait_for};

/// `tests/guest/any.c`, built.
fn program(place: &Place) -> PathBuf {
    let program = place.path().join("any");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/guest/any.c");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-pthread", "-o"]).arg(&program).arg(source);
    assert!(cc.status().expect("a C compiler").success());
    program
}

struct Guest(Child, BufReader<std::process::ChildStdout>);

impl Guest {
    fn start(place: &Place, program: &Path, flags: &[&str]) -> Self {
        Self::start_by(place, flags, &[program.as_os_str()])
    }

    /// The program may begin as another one, which executes it.
    fn start_by(place: &Place, flags: &[&str], words: &[&OsStr]) -> Self {
        need_agent();
        let mut command = pageone();
        command.arg("run").arg("--socket").arg(place.socket());
        command.args(flags).arg("--").args(words);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a guest");
        let lines = BufReader::new(child.stdout.take().expect("stdout"));
        let mut guest = Self(child, lines);
        guest.listen();
        guest
    }

    fn listen(&mut self) {
        let mut line = String::new();
        while !line.starts_with("ok end") {
            line.clear();
            assert!(self.1.read_line(&mut line).expect("a line") > 0);
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.0.stdin.as_ref().expect("stdin"), "{line}").expect("told");
        self.listen();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Pages of one mapping of the program.
const PAGES: u64 = 1024;

fn wait_for_sharing(place: &Place, least: u64) {
    wait_for("merging", || {
        (count(&json(place), "pages_sharing") >= least).then_some(())
    });
}

#[test]
fn programs_that_offer_nothing_are_merged_as_they_are() {
    let place = Place::new();
    let program = program(&place);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let flags = ["--any", "--any-after", "200ms"];
    let mut guests = [(); 2].map(|()| Guest::start(&place, &program, &flags));
    let sharing = |least: u64| wait_for_sharing(&place, least);
    // The mapping, the heap, and the memory in which a thread has its stack, but for some pages.
    sharing(3 * PAGES - 64);
    guests.iter_mut().for_each(|guest| guest.tell("more"));
    sharing(4 * PAGES - 64);
    guests.iter_mut().for_each(|guest| guest.tell("join"));
}

#[test]
fn without_the_flag_nothing_is_offered() {
    let place = Place::new();
    let program = program(&place);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let _plain = Guest::start(&place, &program, &[]);
    let _any = Guest::start(&place, &program, &["--any", "--any-after", "200ms"]);
    wait_for("the other", || {
        (guests_of(&json(&place)) == 1).then_some(())
    });
}

/// The agent comes with the environment: over an exec, and not where the environment is emptied. There `attach` brings it.
#[test]
fn a_program_behind_others_is_merged_if_they_leave_its_environment() {
    const FLAGS: [&str; 3] = ["--any", "--any-after", "200ms"];
    let place = Place::new();
    let program = program(&place);
    let _daemon = daemon(&place, &["--merge-period", "50ms"]);
    let script = format!("exec '{}'", program.display());
    let by = |words: &[&OsStr]| Guest::start_by(&place, &FLAGS, words);
    let sh = ["sh", "-c", &script].map(OsStr::new);
    let mut guests = vec![by(&sh), by(&sh)];
    // The mapping and the heap, but for some pages.
    wait_for_sharing(&place, 2 * PAGES - 64);
    let env = ["env".as_ref(), "-i".as_ref(), program.as_os_str()];
    guests.push(by(&env));
    let pid = guests[2].0.id();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("mappings");
    assert!(
        maps.contains("libc.so.6") && !maps.contains("pageone"),
        "{maps}"
    );
    assert_eq!(guests_of(&json(&place)), 2);
    if cfg!(target_arch = "x86_64") && attached(&place, pid) {
        wait_for_sharing(&place, 4 * PAGES - 128);
        assert_eq!(guests_of(&json(&place)), 3);
    }
    guests.iter_mut().for_each(|guest| guest.tell("join"));
}

/// Attaches a process with all its memory; false where this user may not trace it.
fn attached(place: &Place, pid: u32) -> bool {
    let mut command = pageone();
    command.args(["attach", "--any", "--socket"]);
    let done = output(command.arg(place.socket()).arg(pid.to_string()));
    let said = text(&done.stderr);
    let may_not = said.contains("does not let this user trace");
    assert!(done.status.success() || may_not, "{said}");
    if may_not {
        eprintln!("skipped: {said}");
    }
    !may_not
}
