//! Hostile guests beside honest ones, against a real daemon: agents that never answer, memory that is never read to its end,
//! storms of words, floods of tables, crowds of descriptors, a file system that hangs. The honest ones keep their rounds,
//! and new ones still merge.
//!
//! A stranger is this very program, run again with its part in the environment: it speaks the protocol itself.
#![allow(clippy::unwrap_used)] // a helper that fails is a test that fails

mod common;

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bench::{Content, Guest};
use common::{Place, Running, alone, bench_guest, count, daemon, json, need_agent, wait_for};
use sys::mapping::Access;
use sys::memory::Anonymous;
use sys::uffd::{Uffd, Watch};
use wire::{
    Answer, CHUNK_BYTES, Change, Changes, Hello, MAX_MESSAGE, Name, PAGE_BYTES, PageBits, Question,
    Ready, Role,
};

const CONTENT: Content = Content {
    pages: 1024,
    seed: 7,
    dup: 1.0,
    run_pages: 16,
    zero_prefix: 0.0,
    shuffle: false,
};

fn fast(place: &Place) -> Running {
    daemon(place, &["--merge-period", "50ms"])
}

fn pair(place: &Place) -> [Guest; 2] {
    [0, 1].map(|number| {
        let mut guest = bench_guest(place, number, &CONTENT);
        guest.tell("offer").expect("offer");
        guest.answer(Duration::from_secs(60)).expect("offered");
        guest
    })
}

/// Rounds in a second.
fn rounds(place: &Place) -> f64 {
    let rounds = || count(&json(place), "full_scans");
    let (begin, before) = (Instant::now(), rounds());
    std::thread::sleep(Duration::from_secs(3));
    let done = u32::try_from(rounds() - before).unwrap();
    f64::from(done) / begin.elapsed().as_secs_f64()
}

/// Asserts that honest guests keep half of the rounds they had, and that two more are merged.
fn assert_unharmed(place: &Place, before: f64) {
    // Other work on the machine makes single figures low.
    let most = (0..5).map(|_| rounds(place));
    let most = most.take_while(|_| true).find(|&now| now >= before / 2.0);
    assert!(most.is_some(), "less than half of {before} rounds a second");
    let merged = |status: &serde_json::Value| {
        let of = |name| count(status, name);
        of("pages_shared") + of("pages_sharing")
    };
    let had = merged(&json(place));
    let _more = [2, 3].map(|number| bench_guest(place, number, &CONTENT));
    wait_for("two more guests", || {
        (merged(&json(place)) >= had + CONTENT.pages).then_some(())
    });
}

/// The user whose the strangers are.
const STRANGER: u32 = 4321;

/// This program where each user can run it.
fn program(place: &Place) -> std::path::PathBuf {
    let path = place.path().join("stranger");
    if !path.exists() {
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(place.path(), open.clone()).unwrap();
        std::fs::copy(std::env::current_exe().unwrap(), &path).unwrap();
        std::fs::set_permissions(&path, open).unwrap();
    }
    path
}

/// A process of another user with this part.
fn stranger(place: &Place, part: &str) -> Running {
    let mut command = Command::new(program(place));
    command.uid(STRANGER).gid(STRANGER).current_dir("/");
    command.args(["--exact", "a_stranger", "--ignored", "--nocapture"]);
    command.env("STRANGER_PART", part);
    command.env("STRANGER_SOCKET", place.socket());
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null());
    Running::start(quiet.stderr(Stdio::null()))
}

/// Starts a daemon, two honest guests and so many strangers that all are admitted, and looks what they cost.
fn live_beside(part: &str, strangers: usize) -> (Place, Running, Vec<Running>) {
    need_agent();
    assert!(
        rustix::process::geteuid().is_root(),
        "only root can be several users"
    );
    let place = Place::new();
    let daemon = fast(&place);
    let _honest = pair(&place);
    wait_for("the honest guests", || {
        (count(&json(&place), "pages_sharing") >= CONTENT.pages / 2).then_some(())
    });
    let before = rounds(&place);
    let all: Vec<_> = (0..strangers).map(|_| stranger(&place, part)).collect();
    wait_for("the strangers", || {
        (common::guests_of(&json(&place)) >= 2 + strangers).then_some(())
    });
    assert_unharmed(&place, before);
    (place, daemon, all)
}

#[test]
#[ignore = "not tried with the latest agent as yet"]
fn agents_that_never_answer_cost_nobody_a_round() {
    let _alone = alone();
    live_beside("silent", 60);
}

#[test]
#[ignore = "not tried with the latest agent as yet"]
fn memory_that_is_never_read_to_its_end_costs_its_guest() {
    let _alone = alone();
    let (_place, daemon, _strangers) = live_beside("stuck", 12);
    let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.0.id())).unwrap();
    let threads = threads.count();
    assert!(threads < 40, "{threads} threads");
}

#[test]
#[ignore = "not tried with the latest agent as yet"]
fn storms_of_words_cost_what_they_take_to_send() {
    let _alone = alone();
    live_beside("storm", 4);
}

#[test]
#[ignore = "not tried with the latest agent as yet"]
fn floods_of_chunks_end_at_a_limit() {
    let _alone = alone();
    let (place, ..) = live_beside("flood", 1);
    let reason = wait_for("the limit", || {
        let status = json(&place);
        let guests = status["guests"].as_array().unwrap();
        let limit = |guest: &serde_json::Value| guest["at_limit"].as_str().map(str::to_owned);
        guests.iter().find_map(limit)
    });
    assert!(reason.contains("table_mib_per_process"), "{reason}");
}

#[test]
#[ignore = "not tried with the latest agent as yet"]
fn a_crowd_of_descriptors_counts_as_what_may_pin() {
    let _alone = alone();
    let (place, ..) = live_beside("crowd", 20);
    let status = json(&place);
    let guests = status["guests"].as_array().unwrap().iter();
    let crowds = guests.filter_map(|guest| guest["pins"].as_str());
    let crowds = crowds.filter(|pins| pins.contains("descriptors"));
    assert!(crowds.count() >= 20, "{status}");
}

/// A mount of a file system whose server never says a word; unmounted on drop.
struct Hung {
    folder: tempfile::TempDir,
    _server: OwnedFd,
}

impl Hung {
    fn new() -> Option<Self> {
        let server = std::fs::OpenOptions::new();
        let server = server.clone().read(true).write(true).open("/dev/fuse");
        let server: OwnedFd = server.ok()?.into();
        let folder = tempfile::tempdir().unwrap();
        let fd = server.as_raw_fd();
        let options = format!("fd={fd},rootmode=40000,user_id=0,group_id=0");
        let [path, options] = [folder.path().to_str().unwrap(), &options]
            .map(|text| std::ffi::CString::new(text).unwrap());
        // SAFETY: the strings live, and mount only reads them.
        let mounted = unsafe {
            let kind = c"fuse".as_ptr();
            libc::mount(
                c"hung".as_ptr(),
                path.as_ptr(),
                kind,
                0,
                options.as_ptr().cast(),
            )
        };
        (mounted == 0).then_some(Self {
            folder,
            _server: server,
        })
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        let path = std::ffi::CString::new(self.folder.path().to_str().unwrap()).unwrap();
        // SAFETY: the string lives, and umount2 only reads it.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
#[ignore = "not tried with the latest agent as yet"]
fn a_file_system_that_hangs_keeps_nobody_waiting() {
    let _alone = alone();
    need_agent();
    let Some(hung) = Hung::new() else {
        eprintln!("skipped: no right to mount, or no FUSE");
        return;
    };
    let place = Place::new();
    let _daemon = fast(&place);
    let path = std::ffi::CString::new(hung.folder.path().to_str().unwrap()).unwrap();
    // SAFETY: the string lives; the descriptor is nobody else's. It is inherited by the guests to come.
    let _held = unsafe { OwnedFd::from_raw_fd(libc::open(path.as_ptr(), libc::O_PATH)) };
    let _guests = pair(&place);
    let status = wait_for("a merge", || {
        let status = json(&place);
        (count(&status, "pages_sharing") >= CONTENT.pages / 2).then_some(status)
    });
    let guests = status["guests"].as_array().unwrap();
    let pins = guests.iter().filter_map(|guest| guest["pins"].as_str());
    assert!(pins.clone().all(|pins| pins.contains("fuse")), "{status}");
    assert_eq!(pins.count(), 2, "{status}");
}

// ---- The other side.

/// What a stranger does; not a test.
#[test]
#[ignore = "a part of the other tests"]
fn a_stranger() {
    let Ok(part) = std::env::var("STRANGER_PART") else {
        return;
    };
    let mut agent = Agent::connect();
    match part.as_str() {
        "silent" => loop {
            std::thread::sleep(Duration::from_secs(60));
        },
        "storm" => agent.storm(),
        "flood" => agent.flood(),
        "stuck" => agent.stick(),
        "crowd" => {
            let null = std::fs::File::open("/dev/null").unwrap();
            sys::process::raise_descriptor_limit().unwrap();
            let _crowd: Vec<_> = (0..5000).map(|_| null.try_clone().unwrap()).collect();
            agent.serve(|_| Vec::new())
        }
        other => panic!("no part is called {other}"),
    }
}

/// The agent of a stranger.
struct Agent {
    socket: OwnedFd,
    packet: [u8; MAX_MESSAGE],
    /// The userfaultfd device.
    device: OwnedFd,
}

impl Agent {
    fn connect() -> Self {
        let socket = sys::socket::connect(std::env::var("STRANGER_SOCKET").unwrap()).unwrap();
        let mut packet = [0; MAX_MESSAGE];
        let hello = Hello {
            role: Role::Agent,
            domain: Name::default(),
        };
        let len = hello.encode(&mut packet);
        sys::socket::send(&socket, &packet[..len], &[]).unwrap();
        let mut welcome = sys::socket::recv(&socket, &mut packet).unwrap();
        let line = welcome.descriptors[0].take().expect("a lifeline");
        let line = sys::mapping::share(line.as_fd(), 0, PAGE_BYTES, Access::ReadWrite).unwrap();
        let device = welcome.descriptors.iter_mut().rev().find_map(Option::take);
        let mut agent = Self {
            socket,
            packet,
            device: device.expect("a device"),
        };
        agent.say(&Answer::Ready(Ready {
            thread: sys::process::thread_id(),
            line: line as u64,
            ..Ready::default()
        }));
        agent
    }

    fn say(&mut self, answer: &Answer) {
        let len = answer.encode(&mut self.packet);
        let packet = &self.packet[..len];
        // The daemon may take its time for a storm.
        let sent = sys::socket::send_within(&self.socket, packet, &[], Duration::from_secs(60));
        if sent.is_err() {
            std::process::exit(0);
        }
    }

    fn hear(&mut self) -> Question {
        let got = sys::socket::recv(&self.socket, &mut self.packet);
        match got {
            Ok(got) if got.len > 0 => Question::decode(&self.packet[..got.len]).unwrap(),
            _ => std::process::exit(0),
        }
    }

    /// Answers each sync with the parts that `parts` gives for it.
    fn serve(&mut self, mut parts: impl FnMut(u64) -> Vec<Changes>) -> ! {
        for sync in 0.. {
            while !matches!(self.hear(), Question::Sync { .. }) {}
            let mut all = parts(sync);
            let last = all.pop().unwrap_or_default();
            for mut part in all {
                part.more = true;
                self.say(&Answer::Changes(part));
            }
            self.say(&Answer::Changes(last));
        }
        unreachable!("syncs end")
    }

    /// "Everything", again and again.
    fn storm(&mut self) -> ! {
        self.serve(|sync| match sync {
            0 => partial(20_000),
            _ => (0..4).map(|_| full(whole(20_000))).collect(),
        })
    }

    /// A page in each of so many chunks that no table is left.
    fn flood(&mut self) -> ! {
        self.serve(|sync| {
            if sync == 0 {
                partial(400_000)
            } else {
                Vec::new()
            }
        })
    }

    /// Takes its memory away between the look and the reading, and answers no fault.
    fn stick(&mut self) -> ! {
        let memory = Anonymous::new(8 * CHUNK_BYTES).unwrap();
        let (start, len) = (memory.as_ptr() as usize, memory.len());
        let hold = Uffd::from_device(self.device.as_fd()).unwrap();
        hold.register(start, len, Watch::TrackAndHold).unwrap();
        let fill = || {
            hold.unregister(start, len).unwrap();
            for page in (0..len).step_by(PAGE_BYTES) {
                let at = (start + page) as *mut u64;
                // SAFETY: a page of the memory, of which nobody else has a reference.
                unsafe { at.write_volatile((std::process::id() as u64) << 32 | page as u64) };
            }
            hold.register(start, len, Watch::TrackAndHold).unwrap();
        };
        fill();
        let mut offer = Changes::new();
        assert!(offer.push(Change::Whole {
            chunk: start as u64,
            chunks: u32::try_from(len / CHUNK_BYTES).unwrap(),
        }));
        let mut asked = 0;
        loop {
            while !matches!(self.hear(), Question::Sync { .. }) {}
            let answer = if asked == 0 {
                offer.clone()
            } else {
                Changes::new()
            };
            self.say(&Answer::Changes(answer));
            asked += 1;
            // By then the scan is done that finds it settled, and the reading is not.
            if asked % 5 >= 3 {
                std::thread::sleep(Duration::from_micros(300));
                // SAFETY: it is this function's memory, and plain numbers.
                unsafe { libc::madvise(start as *mut libc::c_void, len, libc::MADV_DONTNEED) };
            }
            if asked % 5 == 0 {
                fill();
            }
        }
    }
}

fn full(change: Change) -> Changes {
    let mut changes = Changes::new();
    while changes.push(change) {}
    changes
}

const BASE: u64 = 64 << 30;

fn whole(chunks: u32) -> Change {
    Change::Whole {
        chunk: BASE,
        chunks,
    }
}

/// One page offered in each of so many chunks.
fn partial(chunks: u64) -> Vec<Changes> {
    let mut offered = PageBits::EMPTY;
    offered.insert(1);
    let change = |chunk| Change::Chunk {
        chunk: BASE + chunk * CHUNK_BYTES as u64,
        offered,
        stored: PageBits::EMPTY,
    };
    let mut parts = vec![Changes::new()];
    for change in (0..chunks).map(change) {
        if !parts.last_mut().unwrap().push(change) {
            let mut next = Changes::new();
            next.push(change);
            parts.push(next);
        }
    }
    parts
}
