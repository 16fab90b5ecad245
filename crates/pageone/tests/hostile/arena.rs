//! A daemon of root's, two honest guests of one user that merge with each other, and what must hold of them while
//! others attack.

use std::collections::HashSet;
use std::fs;
use std::io::BufRead;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use sys::process::thread_time;

use crate::attacker::Attacker;
use crate::common::{
    Place, Running, alone, count, held, install, json, once_in, output, pageone, status, text,
    wait_for,
};
use crate::figures::{Footprint, system_time_beside, time};
use crate::support::{self, Guest};
use crate::{programs, stores};

/// Users that no system has: the honest guests', one who comes later, one who has many guests, the attacker's.
pub(crate) const HONEST: u32 = 61_001;
pub(crate) const LATE: u32 = 61_002;
pub(crate) const CROWD: u32 = 61_003;
pub(crate) const ATTACKER: u32 = 61_004;

/// Pages that each honest guest offers.
pub(crate) const PAGES: usize = 512;
/// How long rounds are counted, and how often at most until enough are.
const WINDOW: Duration = Duration::from_secs(1);
const WINDOWS: usize = 6;
/// The daemon's period, and the CPU time of a round at ease.
const PERIOD: Duration = Duration::from_millis(100);
const WORK: Duration = Duration::from_millis(2);
/// How often something is tried that must be done within a second.
const TRIES: usize = 4;

/// Lets no work but this process's and its children's have much of the processors, where that can be done (the `cpu`
/// controller of cgroups version 1). Workers run on idle CPUs only, so other work on a busy machine makes them as slow as any
/// attack. The empty group stays for the next tests.
fn claim_processors() {
    let group = Path::new("/sys/fs/cgroup/cpu/pageone-hostile");
    let claim = || {
        fs::create_dir_all(group)?;
        fs::write(group.join("cpu.shares"), "20000")?;
        fs::write(group.join("cgroup.procs"), std::process::id().to_string())
    };
    if Path::new("/sys/fs/cgroup/cpu/cpu.shares").exists() {
        let _ = claim();
    }
}

/// A second; where other work keeps the processors busy, as many as threads share one.
pub(crate) fn a_second() -> Duration {
    static WHEN_QUIET: OnceLock<f64> = OnceLock::new();
    let seconds = WHEN_QUIET.get_or_init(|| {
        let load = fs::read_to_string("/proc/loadavg").unwrap();
        let load: f64 = load.split(' ').next().unwrap().parse().unwrap();
        let cpus = std::thread::available_parallelism().unwrap().get();
        1.0 + load / f64::from(u32::try_from(cpus).unwrap())
    });
    Duration::from_secs_f64(*seconds)
}

/// What was measured before the attack.
#[derive(Debug)]
pub(crate) struct Ease {
    footprint: Footprint,
    rounds: u64,
}

/// Rounds of the daemon in a window, and of the yardstick beside it.
#[derive(Debug)]
struct Pace {
    rounds: u64,
    yardstick: u64,
}

/// Rounds of a thread that gets CPUs as the daemon's workers do, those that are idle, and works as long in each. It waits for
/// processors alone, so it tells an attack on the daemon from an attacker that is busy.
fn rounds_of_a_yardstick(stop: &AtomicBool) -> u64 {
    sys::priority::yield_to_everyone().unwrap();
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(PERIOD);
        let begin = thread_time();
        while thread_time() - begin < WORK {
            if stop.load(Ordering::Relaxed) {
                return rounds;
            }
        }
        rounds += 1;
    }
    rounds
}

pub(crate) struct Arena {
    // In this order they end.
    pub(crate) pair: Vec<Guest>,
    daemon: Running,
    log: Arc<Mutex<String>>,
    pub(crate) place: Place,
    pub(crate) secret: Vec<u8>,
    seed: u64,
    /// SIGTERM goes to the process that was started, which keeps the daemon.
    is_kept: bool,
    /// The daemon was started with the usual arguments.
    is_usual: bool,
    alone: Option<MutexGuard<'static, ()>>,
}

/// A place that all users can reach, with copies of the programs; and the secret that root alone may read.
fn open_place() -> (Place, Vec<u8>) {
    let place = Place::new();
    let copy = |from: &Path, name: &str| {
        install(from, place.path().join(name));
    };
    copy(&support::agent(), "libpageone_agent.so");
    copy(support::guest_program(false), "guest");
    copy(Path::new(env!("CARGO_BIN_EXE_pageone")), "pageone");
    copy(programs::attackers(), "hostile");
    copy(programs::dropper(), "dropper");
    let secret = programs::install_setuid(place.path());
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    (place, secret)
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root can run attackers as users of their own");
    }
    root
}

impl Arena {
    /// A daemon with the policy of its own, and the honest pair merged; `None` where this is not root.
    pub(crate) fn new() -> Option<Self> {
        Self::with(&[])
    }

    /// The same, with more arguments for the daemon.
    pub(crate) fn with(args: &[&str]) -> Option<Self> {
        Self::empty(args, None).map(Self::with_pair)
    }

    /// The same, with a fault in the daemon's calls.
    pub(crate) fn with_fault(fault: &str) -> Option<Self> {
        Self::begin(&[], None, Some(fault)).map(Self::with_pair)
    }

    /// The same, with a policy.
    pub(crate) fn with_policy(policy: &str) -> Option<Self> {
        Self::empty(&[], Some(policy)).map(Self::with_pair)
    }

    fn with_pair(mut self) -> Self {
        self.pair = (0..2).map(|_| self.guest(HONEST)).collect();
        self.renew();
        self
    }

    /// The same without guests, with a policy.
    pub(crate) fn empty(args: &[&str], policy: Option<&str>) -> Option<Self> {
        Self::begin(args, policy, None)
    }

    fn begin(args: &[&str], policy: Option<&str>, fault: Option<&str>) -> Option<Self> {
        if !is_root() {
            return None;
        }
        let alone = alone();
        claim_processors();
        a_second();
        let (place, secret) = open_place();
        let mut command = pageone();
        command
            .args(["daemon", "--no-keep"])
            .arg("--socket")
            .arg(place.socket());
        if !args.contains(&"--merge-period") {
            command.args(["--merge-period", "100ms"]);
        }
        command.args(args);
        if let Some(text) = policy {
            command.arg("--policy").arg(place.file("policy.toml", text));
        }
        command.env_remove("PAGEONE_LOG");
        command.envs(fault.map(|fault| ("PAGEONE_FAULT", fault)));
        let mut daemon = Running::start(command.stderr(std::process::Stdio::piped()));
        let log = read_log(&mut daemon);
        wait_for("the daemon", || {
            status(&place).status.success().then_some(())
        });
        Some(Self {
            pair: Vec::new(),
            daemon,
            log,
            place,
            secret,
            seed: 0,
            is_kept: args.contains(&"--keep"),
            is_usual: args.is_empty() && policy.is_none() && fault.is_none(),
            alone: Some(alone),
        })
    }

    /// Other tests need not wait for this one any more: it measures nothing, and makes no load.
    pub(crate) fn let_others_run(&mut self) {
        self.alone = None;
    }

    /// The daemon's own process.
    pub(crate) fn pid(&self) -> u32 {
        let started = self.daemon.0.id();
        match self.is_kept {
            true => crate::common::child(started).unwrap(),
            false => started,
        }
    }

    /// Kills the daemon's own process; its keeper starts another one, and the honest guests come back.
    pub(crate) fn restart(&self) {
        let former = self.pid();
        let pid = rustix::process::Pid::from_raw(i32::try_from(former).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        wait_for("another daemon", || {
            let started = crate::common::child(self.daemon.0.id())?;
            let serves = status(&self.place).status.success();
            (started != former && serves).then_some(())
        });
        wait_for("the honest guests to be back", || {
            let status = json(&self.place);
            let is_back = |guest: &Guest| pages_sharing(&status, guest.pid) == Some(PAGES as u64);
            self.pair.iter().all(is_back).then_some(())
        });
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// A guest of user `uid`; it connects when it offers.
    pub(crate) fn guest(&self, uid: u32) -> Guest {
        let guest = Command::new(self.file("guest"));
        Guest::from(&mut self.under_agent(guest, &self.place.socket(), uid))
    }

    /// `command` as user `uid`, under the agent, with the daemon at `socket`.
    pub(crate) fn under_agent(&self, mut command: Command, socket: &Path, uid: u32) -> Command {
        command.uid(uid).gid(uid).current_dir("/");
        command.env("LD_PRELOAD", self.file("libpageone_agent.so"));
        command.env("PAGEONE_SOCKET", socket);
        command.env_remove("PAGEONE_DOMAIN");
        command
    }

    /// An attack by [`ATTACKER`]; waits until it stands.
    pub(crate) fn attack(&self, verb: &str, args: &[&str]) -> Attacker {
        self.attack_through(&[], verb, args)
    }

    /// The same by another user.
    pub(crate) fn attack_as(&self, uid: u32, verb: &str, args: &[&str]) -> Attacker {
        self.start_attack(uid, &[], verb, args)
    }

    /// The same, started through another command.
    pub(crate) fn attack_through(&self, through: &[&str], verb: &str, args: &[&str]) -> Attacker {
        self.start_attack(ATTACKER, through, verb, args)
    }

    fn start_attack(&self, uid: u32, through: &[&str], verb: &str, args: &[&str]) -> Attacker {
        let hostile = self.file("hostile");
        let mut words = through.to_vec();
        words.push(hostile.to_str().unwrap());
        let uid = uid.to_string();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).args([&uid, verb]);
        command.arg(self.place.socket()).args(args).current_dir("/");
        let mut attacker = Attacker::start(&mut command);
        attacker.wait_for("ready");
        attacker
    }

    /// A folder in which every user may make files.
    pub(crate) fn public_folder(&self) -> PathBuf {
        let folder = self.file("public");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        folder
    }

    /// What `pageone WORDS` says to user `uid`.
    pub(crate) fn command(&self, uid: u32, words: &[&str]) -> std::process::Output {
        let mut command = Command::new(self.file("pageone"));
        command.uid(uid).gid(uid).current_dir("/");
        command
            .env("PAGEONE_SOCKET", "")
            .env_remove("PAGEONE_DOMAIN");
        let (verb, rest) = words.split_first().unwrap();
        command.arg(verb).arg("--socket").arg(self.place.socket());
        output(command.args(rest))
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn rounds(&self) -> u64 {
        count(&json(&self.place), "full_scans")
    }

    /// Waits for `rounds` more rounds.
    pub(crate) fn let_pass(&self, rounds: u64) {
        let end = self.rounds() + rounds;
        wait_for("some rounds", || (self.rounds() >= end).then_some(()));
    }

    /// Gives the honest guests new content, equal in both, and waits until all of it is merged.
    pub(crate) fn renew(&mut self) {
        self.seed += 1_000_000;
        for guest in &mut self.pair {
            match guest.memory {
                0 => guest.offer(PAGES, self.seed),
                _ => guest.renew(PAGES, self.seed),
            }
        }
        wait_for("the honest guests to be merged", || {
            let status = json(&self.place);
            let merged = |guest: &Guest| pages_sharing(&status, guest.pid) == Some(PAGES as u64);
            self.pair.iter().all(merged).then_some(())
        });
    }

    /// Two honest guests come, equal to each other; how long it takes until all of them is merged.
    pub(crate) fn joins_and_merges(&mut self) -> Duration {
        self.pair = (0..2).map(|_| self.guest(HONEST)).collect();
        let (took, ()) = time(|| self.renew());
        for guest in &mut self.pair {
            guest.run("check");
        }
        took
    }

    fn pace(&self) -> Pace {
        let stop = AtomicBool::new(false);
        let begin = self.rounds();
        std::thread::scope(|scope| {
            let yardstick = scope.spawn(|| rounds_of_a_yardstick(&stop));
            std::thread::sleep(WINDOW);
            stop.store(true, Ordering::Relaxed);
            Pace {
                rounds: self.rounds() - begin,
                yardstick: yardstick.join().unwrap(),
            }
        })
    }

    /// What a usual daemon does in a window is measured twice, and the better counts: its period bounds it.
    fn measure_ease(&self) -> Ease {
        static USUAL: OnceLock<u64> = OnceLock::new();
        let measure = || self.pace().rounds;
        Ease {
            rounds: match self.is_usual {
                true => *USUAL.get_or_init(|| measure().max(measure())),
                false => measure(),
            },
            footprint: Footprint::of(self.pid()),
        }
    }

    /// Asserts all that must hold, while the attack that `begin` starts is on, and after it.
    pub(crate) fn withstands(mut self, begin: impl Fn(&Self) -> Attacker) {
        let ease = self.measure_ease();
        let attacker = begin(&self);
        self.is_at_ease(&ease, &attacker);
        drop(attacker);
        self.recovers(&ease);
        let _again = begin(&self);
        self.ends_in_time();
    }

    /// Asserts what must hold while an attack is on.
    fn is_at_ease(&mut self, ease: &Ease, attacker: &Attacker) {
        self.answers_in_time();
        self.serves_in_time();
        self.keeps_pace(ease);
        self.renew();
        for guest in &mut self.pair {
            guest.run("check");
        }
        self.is_bounded(ease);
        self.gives_nothing_away(attacker);
        self.unmerges_in_time();
    }

    /// Asserts what must hold while nothing yields a CPU to this daemon: that is all but merging.
    pub(crate) fn withstands_busy_cpus(mut self, _attacker: Attacker) {
        self.answers_in_time();
        self.serves_in_time();
        self.unmerges_in_time();
        self.ends_in_time();
    }

    fn is_bounded(&self, ease: &Ease) {
        let now = Footprint::of(self.pid());
        assert!(now.is_bounded(&ease.footprint), "{now:?} from {ease:?}");
    }

    /// Rounds come at least half as often as before, or as those of the yardstick, which the attackers keep from CPUs as much.
    fn keeps_pace(&self, ease: &Ease) {
        let is_half = |pace: &Pace| pace.rounds * 2 >= ease.rounds.min(pace.yardstick);
        let kept = once_in(WINDOWS, || self.pace(), is_half);
        kept.unwrap_or_else(|seen| panic!("{seen:?} in {WINDOW:?}, {} before", ease.rounds));
    }

    /// Asserts that the kernel works long for the daemon's closers only: no thread waits for these. What the workers take is the
    /// look at descriptors of a guest whose agent keeps locked files open: the kernel walks the locks there, too, once.
    pub(crate) fn closers_alone_take_long(&self) {
        self.takes_little(3);
    }

    /// Asserts that the kernel works for the daemon's threads, without its closers, less than one part in so many of the time.
    pub(crate) fn takes_little(&self, part: u32) {
        let so_far = || system_time_beside(self.pid(), "closer");
        // A part of it is judged, so a busy machine needs no longer one.
        let window = Duration::from_secs(3);
        let in_a_window = || {
            let before = so_far();
            std::thread::sleep(window);
            so_far().saturating_sub(before)
        };
        let little = once_in(TRIES, in_a_window, |took| *took < window / part);
        little.unwrap_or_else(|seen| {
            panic!("{seen:?} in {window:?}, less than one part in {part} is to be")
        });
    }

    fn answers_in_time(&self) {
        in_time("a status", || {
            let (took, answer) = time(|| status(&self.place));
            assert!(answer.status.success(), "{}", text(&answer.stderr));
            took
        });
    }

    /// A user who may not see others' guests has his own status within a second, and is never refused.
    pub(crate) fn answers_a_user_in_time(&self) {
        self.answers_in_time_to(LATE);
    }

    /// The same of user `uid`.
    pub(crate) fn answers_in_time_to(&self, uid: u32) {
        in_time("a user's own status", || {
            let (took, answer) = time(|| self.command(uid, &["status"]));
            assert!(answer.status.success(), "{}", text(&answer.stderr));
            took
        });
    }

    /// Waits until so many guests of user `uid` are served.
    pub(crate) fn serves(&self, number: usize, uid: u32) {
        wait_for("that many guests", || {
            let status = json(&self.place);
            let guests = status["guests"].as_array().unwrap();
            let his = guests.iter().filter(|guest| guest["uid"] == uid);
            (his.count() == number).then_some(())
        });
    }

    /// A guest that comes now is served within a second of its hello.
    pub(crate) fn serves_in_time(&self) {
        let mut fresh = self.ready_to_join();
        in_time("a join", || {
            let mut guest = std::mem::replace(&mut fresh, self.ready_to_join());
            let (took, ()) = time(|| {
                guest.run("advise 0 64 12");
                wait_for("a join", || (guest.run("served") == "1").then_some(()));
            });
            took
        });
    }

    /// A guest that has filled its memory and offers none of it yet.
    fn ready_to_join(&self) -> Guest {
        let mut guest = self.guest(LATE);
        guest.map(64);
        guest.run("fill 0 64 5");
        guest
    }

    /// `set run=2` answers within a second, and the honest guests share nothing then.
    fn unmerges_in_time(&mut self) {
        let socket = self.place.socket();
        let turn = |knob: &str| {
            let done = output(pageone().arg("set").arg("--socket").arg(&socket).arg(knob));
            let why = text(&done.stderr);
            // Which it says of the attackers.
            let late = why.contains("not answer in time");
            assert!(done.status.success() || late, "{knob}: {why}");
        };
        in_time("set run=2", || time(|| turn("run=2")).0);
        let status = json(&self.place);
        for guest in &self.pair {
            assert_eq!(pages_sharing(&status, guest.pid), Some(0), "{status}");
        }
        turn("run=1");
    }

    /// No store of the attacker's has a byte of the honest guests, no store at all one of the secret.
    pub(crate) fn gives_nothing_away(&self, attacker: &Attacker) {
        self.keeps_the_secret();
        let mut foreign = HashSet::new();
        for guest in &self.pair {
            foreign.extend(stores::offered(guest, PAGES));
        }
        for store in attacker.stores() {
            let pages = stores::pages(&store);
            let leaked = pages
                .iter()
                .filter(|page| foreign.contains(*page) || stores::tells(page, &self.secret));
            assert_eq!(leaked.count(), 0, "foreign pages in {}", store.display());
        }
    }

    /// No store holds anything of the secret.
    pub(crate) fn keeps_the_secret(&self) {
        for store in held(self.pid(), "store") {
            let pages = stores::pages(&store);
            let leaked = pages
                .iter()
                .filter(|page| stores::tells(page, &self.secret));
            let leaked = leaked.count();
            assert_eq!(leaked, 0, "pages of the secret in {}", store.display());
        }
    }

    /// The daemon is what it was before the attack.
    fn recovers(&self, ease: &Ease) {
        let mut last = Footprint::of(self.pid());
        let end = Instant::now() + Duration::from_secs(20);
        while !last.is_back(&ease.footprint) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
            last = Footprint::of(self.pid());
        }
        assert!(last.is_back(&ease.footprint), "{last:?} from {ease:?}");
    }

    /// A daemon that starts beside this one, in the same folder, serves within some seconds.
    pub(crate) fn has_room_for_another(&self) {
        let socket = self.file("another.sock");
        let mut command = pageone();
        command
            .args(["daemon", "--no-keep"])
            .arg("--socket")
            .arg(&socket);
        let _another = Running::start(command.stderr(std::process::Stdio::null()));
        let end = Instant::now() + 5 * a_second();
        let serves = || {
            let asked = output(pageone().args(["status", "--socket"]).arg(&socket));
            asked.status.success()
        };
        while !serves() {
            assert!(Instant::now() < end, "the other daemon does not start");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// SIGTERM ends the daemon within its time, and it has not said a word of a panic.
    fn ends_in_time(mut self) {
        self.pair.clear();
        let pid = match self.is_kept {
            true => self.daemon.0.id(),
            false => self.pid(),
        };
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let (took, code) = time(|| self.daemon.end());
        assert_eq!(code, 0, "{}", self.log());
        assert!(took <= a_second(), "the daemon took {took:?} to end");
        assert!(!self.log().contains("panicked"), "{}", self.log());
    }
}

fn read_log(daemon: &mut Running) -> Arc<Mutex<String>> {
    let log = Arc::new(Mutex::new(String::new()));
    let all = Arc::clone(&log);
    let lines = std::io::BufReader::new(daemon.0.stderr.take().unwrap());
    std::thread::spawn(move || {
        for line in lines.split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            all.lock().unwrap().push_str(&(line + "\n"));
        }
    });
    log
}

/// Pages of a guest that share; `None` when the daemon does not serve it.
fn pages_sharing(status: &Value, pid: u32) -> Option<u64> {
    let guests = status["guests"].as_array().unwrap();
    let guest = guests.iter().find(|guest| guest["pid"] == pid)?;
    Some(count(guest, "pages_sharing"))
}

/// Asserts that `what`, which says how long it took, takes a second at most, in one of some tries.
fn in_time(name: &str, what: impl FnMut() -> Duration) {
    let most = a_second();
    let done = once_in(TRIES, what, |took| *took <= most);
    done.unwrap_or_else(|took| panic!("{name} took {took:?}, and is to take {most:?}"));
}
