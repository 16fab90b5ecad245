//! Drives the test guest (`tests/guest/guest.c`): builds it once, speaks to it line by line.

// Each test binary uses its part; a helper that fails is a test that fails.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

/// The root of the checkout.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folder of the built binaries: this test lies in its `deps`.
pub fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().to_path_buf()
}

/// The agent's library, as `cargo build` leaves it: `cargo test` alone does not renew it.
pub fn agent() -> PathBuf {
    let library = std::env::var_os("PAGEONE_AGENT")
        .map_or_else(|| built().join("libpageone_agent.so"), PathBuf::from);
    assert!(
        library.exists(),
        "build the agent first: cargo build -p agent"
    );
    library
}

/// A program, or a library, that a machine without a compiler, such as a test guest, brings along.
pub fn brought(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from)
}

/// Compiles the guest; `linked` links it with the agent's static library instead of preloading.
pub fn guest_program(linked: bool) -> &'static Path {
    static PRELOADED: OnceLock<PathBuf> = OnceLock::new();
    static LINKED: OnceLock<PathBuf> = OnceLock::new();
    let place = if linked { &LINKED } else { &PRELOADED };
    place.get_or_init(|| {
        let name = if linked {
            "PAGEONE_GUEST_LINKED"
        } else {
            "PAGEONE_GUEST"
        };
        if let Some(program) = brought(name) {
            return program;
        }
        let source = root().join("tests/guest/guest.c");
        let name = format!("guest-{}-{linked}", std::process::id());
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let mut cc = Command::new("cc");
        cc.args(["-O2", "-Wall", "-Wextra", "-pthread", "-o"])
            .arg(&program)
            .arg(source);
        if linked {
            cc.arg(agent().with_extension("a")).args(["-ldl", "-lm"]);
        }
        assert!(cc.status().expect("a C compiler is installed").success());
        program
    })
}

/// A running guest.
pub struct Guest {
    pub process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    pub pid: u32,
    pub memory: usize,
}

impl Guest {
    /// Starts a guest that looks for its engine at `socket`.
    pub fn start(socket: &Path) -> Self {
        Self::start_as(socket, false, None)
    }

    /// Starts a guest; `linked`: with the agent linked in; `domain`: what it asks for.
    pub fn start_as(socket: &Path, linked: bool, domain: Option<&str>) -> Self {
        let mut command = Command::new(guest_program(linked));
        if !linked {
            command.env("LD_PRELOAD", agent());
        }
        if let Some(domain) = domain {
            command.env("PAGEONE_DOMAIN", domain);
        }
        Self::from(command.env("PAGEONE_SOCKET", socket))
    }

    /// Starts a guest with one more environment variable.
    pub fn start_with(socket: &Path, name: &str, value: &str) -> Self {
        let mut command = Command::new(guest_program(false));
        command.env("LD_PRELOAD", agent()).env(name, value);
        Self::from(command.env("PAGEONE_SOCKET", socket))
    }

    /// Starts a guest by a command of the caller's.
    pub fn from(command: &mut Command) -> Self {
        Self::try_from(command).unwrap()
    }

    /// The same, unless the command cannot be run.
    pub fn try_from(command: &mut Command) -> std::io::Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let to = process.stdin.take().unwrap();
        let from = BufReader::new(process.stdout.take().unwrap());
        let pid = process.id();
        Ok(Self {
            process,
            to,
            from,
            pid,
            memory: 0,
        })
    }

    /// Gives a command, and takes the answer of a guest that may have ended.
    pub fn ask_if_it_lives(&mut self, command: &str) -> Option<String> {
        writeln!(self.to, "{command}")
            .and_then(|()| self.to.flush())
            .ok()?;
        let mut line = String::new();
        self.from.read_line(&mut line).ok()?;
        line.trim_end().strip_prefix("ok ").map(str::to_owned)
    }

    /// Gives a command, takes the answer.
    pub fn ask(&mut self, command: &str) -> Result<String, String> {
        self.tell(command);
        self.answer()
    }

    /// Gives a command whose answer is taken later.
    pub fn tell(&mut self, command: &str) {
        writeln!(self.to, "{command}").unwrap();
        self.to.flush().unwrap();
    }

    /// Takes the next answer.
    pub fn answer(&mut self) -> Result<String, String> {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        let line = line.trim_end();
        match line.split_once(' ') {
            Some(("ok", rest)) => Ok(rest.to_owned()),
            _ => Err(line.to_owned()),
        }
    }

    /// Gives a command that must succeed.
    #[track_caller]
    pub fn run(&mut self, command: &str) -> String {
        self.ask(command)
            .unwrap_or_else(|why| panic!("`{command}`: {why}"))
    }

    /// Maps and fills `pages` pages, and offers them.
    #[track_caller]
    pub fn offer(&mut self, pages: usize, seed: u64) {
        self.map(pages);
        self.run(&format!("fill 0 {pages} {seed}"));
        self.run(&format!("advise 0 {pages} 12"));
    }

    /// Maps `pages` pages over those it has, fills them with other content, and offers them.
    #[track_caller]
    pub fn renew(&mut self, pages: usize, seed: u64) {
        self.run(&format!("mapover 0 {pages}"));
        self.run(&format!("fill 0 {pages} {seed}"));
        self.run(&format!("advise 0 {pages} 12"));
    }

    /// Maps `pages` pages.
    #[track_caller]
    pub fn map(&mut self, pages: usize) {
        self.memory = self.run(&format!("map {pages}")).parse().unwrap();
    }

    /// The frame number behind a page; `None` when it is not present. Needs root.
    pub fn frame(&self, page: usize) -> Option<u64> {
        use std::os::unix::fs::FileExt;
        let pagemap = std::fs::File::open(format!("/proc/{}/pagemap", self.pid)).unwrap();
        let mut entry = [0; 8];
        let at = (self.memory / 4096 + page) as u64 * 8;
        pagemap.read_exact_at(&mut entry, at).unwrap();
        let entry = u64::from_le_bytes(entry);
        (entry >> 63 == 1).then_some(entry & ((1 << 55) - 1))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Each guest compares its memory with what it wrote there.
#[track_caller]
pub fn check(guests: &mut [Guest]) {
    for guest in guests {
        guest.run("check");
    }
}
