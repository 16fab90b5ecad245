//! A process: whether it is a guest, and the memory of it that cannot be merged.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sys::credentials::{self, Credentials};
use sys::foreign::{Foreign, ForeignName};
use sys::ksm::{Ksm, Member};
use sys::subject::{self, LeftAlone, Makeup, Subject};
use wire::{GuestStatus, PAGE_BYTES, Reply, Status};

use super::check::Check;
use super::command::{remedy, unloadable};
use super::reasons;
use super::service::Service;
use crate::program::{self, Obstacle};
use crate::within::{LISTING, within};
use crate::{client, human, names, paths};

/// Descriptors and threads that are looked at for pins.
const MOST_DESCRIPTORS: u32 = 4096;
/// Why some kinds of what was offered are not merged.
const LEFT_ALONE: &str = "PageONE leaves this alone: a mapping of a store cannot be so";
/// A kind of memory is told of from this part of all on, in percent, and from so many bytes on.
const PART: u64 = 5;
const LEAST: u64 = 1 << 20;

/// All checks of process `pid`, unless looking at it takes too long: it may lock its memory for as long as it likes.
pub(super) fn checks_in_time(pid: u32, service: &Arc<Service>) -> Vec<Check> {
    let service = Arc::clone(service);
    within(LISTING, move || checks(pid, &service)).unwrap_or_else(|error| {
        let what = format!("cannot look at {pid}: {error}");
        if error.kind() != ErrorKind::TimedOut {
            return vec![Check::fail("process", what, "nothing is known of it")];
        }
        let why =
            "its memory is locked, or one of its files lies on a file system that does not answer";
        let fix = format!("sudo cat /proc/{pid}/stack  # shows the call that it waits in");
        vec![Check::fail("process", what, why).fix(fix)]
    })
}

/// All checks of process `pid`.
fn checks(pid: u32, service: &Service) -> Vec<Check> {
    let comm = sys::process::comm(pid);
    let subject = match subject(pid, &comm) {
        Ok(subject) => subject,
        Err(absent) => return vec![absent],
    };
    let size = human::size(subject.anonymous_bytes);
    let is_it = |guest: &&GuestStatus| guest.pid == pid;
    let guests = service.status.iter().flat_map(|status| &status.guests);
    let guest = guests.clone().find(is_it);
    let name = names::of(&[(pid, names::user(pid), &comm)]).pop().flatten();
    let known = name.map_or(String::new(), |name| format!(", `{name}`"));
    let mut all = vec![Check::ok(
        "process",
        format!("{pid} (`{comm}`{known}) has {size} of private anonymous memory"),
    )];
    let is_ksms = Member::of(pid).is_ok_and(|member| member.all);
    let (programs, obstacle) = program(pid, is_ksms);
    all.extend(programs);
    all.extend(identity(pid));
    all.push(sandbox(&subject, guest.is_some()));
    all.push(tracer(&subject));
    all.extend(offers_at_start(pid));
    let makeup = subject::makeup(pid);
    match &makeup {
        Ok(makeup) => {
            all.extend(kinds(makeup, guest));
            all.extend(makeup.has_sanitizer.then(sanitizer));
        }
        Err(error) => all.push(unseen("memory", pid, "its memory", error)),
    }
    all.push(pins(pid, guest));
    let makeup = makeup.ok();
    all.extend(match guest {
        Some(guest) => of_a_guest(guest, makeup, service),
        None => of_no_guest(pid, makeup, service, obstacle.as_ref(), is_ksms),
    });
    all
}

/// # Errors
/// The check that says why there is nothing to look at.
fn subject(pid: u32, comm: &ForeignName) -> Result<Subject, Check> {
    let absent = |what: String| {
        Check::fail("process", what, "there is no memory to merge").fix("pgrep -l NAME")
    };
    match Subject::of(pid) {
        Ok(subject) if subject.is_kernels => {
            let is = crate::selector::OF_KERNEL;
            Err(absent(format!("{pid} (`{comm}`) {is}")))
        }
        Ok(subject) if subject.has_ended => Err(absent(format!("{pid} (`{comm}`) has ended"))),
        Ok(subject) => Ok(subject),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(absent(format!("there is no process {pid}")))
        }
        Err(error) => Err(absent(format!(
            "process {pid} cannot be looked at: {error}"
        ))),
    }
}

fn of_a_guest(guest: &GuestStatus, makeup: Option<Makeup>, service: &Service) -> Vec<Check> {
    let saved = human::size(guest.saved_bytes);
    let what = format!("a guest in the domain `{}`, {saved} saved", guest.domain);
    let mut all = vec![Check::ok("session", what)];
    if let Some(makeup) = makeup.filter(|_| !reasons::is_unseen(guest)) {
        let huge = huge_advised(guest, &makeup);
        let offered = offered(guest, &makeup);
        all.push(match &huge {
            // Its remedy offers the rest as well.
            Some(_) => Check::ok(offered.check, offered.what),
            None => offered,
        });
        all.extend(huge);
    }
    let knobs = service.status.as_ref().map(|status| status.knobs);
    let makeup = makeup.unwrap_or_default();
    all.extend(reasons::checks(guest, &makeup, &knobs.unwrap_or_default()));
    all
}

fn of_no_guest(
    pid: u32,
    makeup: Option<Makeup>,
    service: &Service,
    obstacle: Option<&Obstacle>,
    is_ksms: bool,
) -> Vec<Check> {
    if !tells_of(pid, service) {
        return vec![of_another(pid, service)];
    }
    let preloaded = makeup.is_some_and(|makeup| makeup.has_agent);
    let tried = (!preloaded).then(|| try_out(pid, service)).flatten();
    match tried {
        Some(Err(error)) if has_agent(&error) => vec![offers_nothing(pid)],
        _ if obstacle.is_some() && is_ksms => vec![of_ksm()],
        tried => {
            let mut all = vec![no_session(pid, makeup.as_ref(), service, obstacle)];
            all.extend(tried.map(|tried| attachable(tried, obstacle)));
            if obstacle.is_none() && is_refused(pid, service) {
                let wrong = all.iter_mut().filter(|check| check.fix.is_some());
                wrong.for_each(|check| check.fix = Some(service.change_policy.clone()));
            }
            all
        }
    }
}

/// Whether the policy of the daemon has no domain for it.
fn is_refused(pid: u32, service: &Service) -> bool {
    let asks = || {
        let socket = service
            .socket
            .as_ref()
            .filter(|_| service.status.is_some())?;
        let began = sys::usage::began(pid).ok()?;
        client::domain_of(socket, pid, began, "").ok()
    };
    matches!(asks(), Some(Reply::Refused(_)))
}

/// Whether this user would be told of it, were it a guest.
fn tells_of(pid: u32, service: &Service) -> bool {
    let own = rustix::process::geteuid();
    let sees_all = |status: &Status| status.only_user.is_none();
    let sees_all = service.status.as_ref().is_some_and(sees_all);
    own.is_root() || names::user(pid) == own.as_raw() || sees_all
}

/// A process of another user, which may be a guest or none.
fn of_another(pid: u32, service: &Service) -> Check {
    let what = match service.status {
        Some(_) => "this daemon tells this user only of his own guests",
        None => "whether it has the agent, its user and root alone may see",
    };
    let why = "it may be a guest, and it may be none";
    Check::warn("session", what, why).fix(format!("sudo pageone doctor {pid}"))
}

/// What this user cannot see may be well or not.
fn unseen(check: &'static str, pid: u32, what: &str, error: &io::Error) -> Check {
    let is_root = rustix::process::geteuid().is_root();
    let fix = match (error.kind(), is_root) {
        (ErrorKind::PermissionDenied, false) => format!("sudo pageone doctor {pid}"),
        (ErrorKind::PermissionDenied, true) => {
            format!("pageone doctor {pid}  # outside the container, with CAP_SYS_PTRACE")
        }
        _ => format!("pageone doctor {pid}  # once more: it may have just ended"),
    };
    let what = format!("{what} cannot be looked at: {error}");
    let why = "what cannot be looked at may keep its memory from being merged";
    Check::warn(check, what, why).fix(fix)
}

/// The program, as it was linked and as it was started; and what keeps the agent out of it.
fn program(pid: u32, is_ksms: bool) -> (Vec<Check>, Option<Obstacle>) {
    let exe = format!("/proc/{pid}/exe");
    let name = std::fs::read_link(&exe).map_or(exe.clone(), |path| path.display().to_string());
    let built = program::built(Path::new(&exe));
    let linked = match &built {
        Ok(Some(obstacle)) if is_ksms => Check::ok("program", format!("{name} {obstacle}")),
        Ok(Some(Obstacle::OtherLibc(linker))) => {
            let what = format!("{name} is linked for musl ({linker}): its agent is attached");
            Check::ok("program", what)
        }
        Ok(Some(obstacle)) => unloadable("program", &name, obstacle),
        Ok(None) => Check::ok("program", format!("{name} is linked dynamically")),
        Err(error) => unseen("program", pid, "its program", error),
    };
    let secure = match subject::is_secure(pid) {
        Ok(true) => Some(unloadable("setuid", &name, &Obstacle::Secure)),
        Ok(false) => None,
        Err(error) => Some(unseen("setuid", pid, "how it was started", &error)),
    };
    let checks = [Some(linked), secure].into_iter().flatten();
    // What keeps an agent from being loaded does not keep it from being attached there.
    let obstacle = built.ok().flatten();
    (checks.collect(), obstacle.filter(Obstacle::bars_attaching))
}

/// Whose process it is. A guest has one user, whose secrets its memory does not hold.
fn identity(pid: u32) -> Vec<Check> {
    let ids = match Credentials::of(pid, pid) {
        Ok(ids) => ids,
        Err(error) => return vec![unseen("identity", pid, "its user", &error)],
    };
    let [_, user, ..] = ids.users;
    let [_, group, ..] = ids.groups;
    if ids != Credentials::plain(user, group) {
        let why = "a process that changes its user could see pages of both users' domains";
        let check = Check::fail("identity", format!("it runs as {ids}"), why);
        return vec![
            check.fix("setpriv --reuid=UID --regid=GID --clear-groups pageone run -- CMD"),
        ];
    }
    match credentials::is_secret(pid, user) {
        Ok(true) => {
            let why = "memory that its own user may not read is not shared with that user's other processes";
            let check = Check::fail("identity", "its memory is a secret (PR_SET_DUMPABLE)", why);
            vec![check.fix("start it as its user, and let that user read its program: chmod u+r")]
        }
        Ok(false) => vec![Check::ok("identity", format!("it runs as {ids}"))],
        Err(error) => vec![unseen("identity", pid, "its memory's owner", &error)],
    }
}

fn sandbox(subject: &Subject, is_guest: bool) -> Check {
    let filters = subject.filters;
    match subject.seccomp {
        0 => Check::ok("sandbox", "no seccomp filter"),
        1 => Check::fail(
            "sandbox",
            "it is in seccomp's strict mode",
            "the agent may do nothing there",
        )
        .fix("start it without SECCOMP_MODE_STRICT"),
        _ if is_guest => Check::ok("sandbox", format!("the agent lives with its {filters} seccomp filters")),
        _ => Check::warn(
            "sandbox",
            format!("{filters} seccomp filters look at its calls"),
            "a filter that refuses what the agent needs keeps it out; the daemon's log names the call",
        )
        .fix("journalctl -u pageone | grep seccomp"),
    }
}

fn tracer(subject: &Subject) -> Check {
    match subject.tracer {
        0 => Check::ok("tracer", "no process traces it"),
        tracer => Check::warn(
            "tracer",
            format!("process {tracer} (`{}`) traces it", sys::process::comm(tracer)),
            "no other may put the agent into it meanwhile, and while it is stopped it answers nothing",
        )
        .fix(format!("ps -fp {tracer}  # have it detach, or let the process go on; else: kill {tracer}")),
    }
}

/// A wish to offer all memory that the agent does not understand: it offers nothing then, and says nothing.
#[cfg(target_arch = "x86_64")]
fn offers_at_start(pid: u32) -> Option<Check> {
    let said = crate::attach::variable(pid, b"PAGEONE_ANY=").ok()??;
    let said = String::from_utf8_lossy(&said);
    if said.parse::<u64>().is_ok() {
        return None;
    }
    let what = format!("PAGEONE_ANY=`{said}` is no number of milliseconds");
    let why = "with it the agent offers nothing for the program";
    let ms = humantime::parse_duration(&said).map_or(2000, |time| time.as_millis());
    Some(Check::warn("any", what, why).fix(format!("start it with PAGEONE_ANY={ms}")))
}

#[cfg(not(target_arch = "x86_64"))]
fn offers_at_start(_: u32) -> Option<Check> {
    None
}

fn sanitizer() -> Check {
    let why = "it discards memory past libc, so nothing is offered for the program";
    Check::warn("sanitizer", "AddressSanitizer is in it", why)
        .fix("build it without -fsanitize=address")
}

/// Memory that cannot be merged, a check a kind.
fn kinds(makeup: &Makeup, guest: Option<&GuestStatus>) -> Vec<Check> {
    let Makeup {
        anonymous,
        shared,
        files,
        huge_tlb,
        stored,
        left_alone: left,
        ..
    } = *makeup;
    // Else another program tracks writes, and offers nothing.
    let offers = guest.is_some() || makeup.has_agent || makeup.mergeable > 0;
    let left = if offers { left } else { LeftAlone::default() };
    // What is merged and was not read since is in no page table: the daemon knows of it.
    let merged = guest.map_or(0, |guest| {
        guest.pages_stored.saturating_mul(PAGE_BYTES as u64)
    });
    let all = (anonymous + shared + files + huge_tlb).saturating_add(stored.max(merged));
    // Of a guest's memory it is the engine that tracks and holds: this daemon, another, or one of `pageone run`.
    let (foreign, locked) = match guest.is_some() || makeup.has_agent {
        true => (0, makeup.locked_apart),
        false => (makeup.held.max(makeup.tracked), makeup.locked),
    };
    let told = |bytes: u64, is| {
        let much = bytes >= LEAST && bytes.saturating_mul(100) >= all.saturating_mul(PART);
        much.then(|| format!("{} of {} {is}", human::size(bytes), human::size(all)))
    };
    let tell = |(check, bytes, is, why, fix): Kind| {
        Some(Check::warn(check, told(bytes, is)?, why).fix(fix))
    };
    let kinds = unmerged(makeup, foreign, locked).into_iter();
    let kinds = kinds.chain(offered_in_vain(&left));
    let mut checks: Vec<_> = kinds.filter_map(tell).collect();
    if checks.is_empty() {
        checks.push(Check::ok("memory", "it is of kinds that can be merged"));
    }
    let offered = told(makeup.locked - locked, "is locked (mlock), and offered");
    checks.extend(offered.map(|what| Check::ok("locked", what)));
    checks
}

/// A check, how many bytes are so, how they are, why these are not merged, and the remedy.
type Kind = (&'static str, u64, &'static str, &'static str, &'static str);

/// Memory that cannot be offered, or is not by `--any`.
fn unmerged(makeup: &Makeup, foreign: u64, locked: u64) -> [Kind; 5] {
    [
        (
            "shared-memory",
            makeup.shared,
            "is shared memory or a memory file",
            "only private anonymous memory is merged",
            "qemu-system-x86_64 -object memory-backend-ram,share=off,…",
        ),
        (
            "huge-pages",
            makeup.huge_tlb,
            "is of huge pages that were set aside (hugetlb)",
            "the kernel cannot split them",
            "start it without hugetlb; transparent huge pages are merged",
        ),
        (
            "locked",
            locked,
            "is locked (mlock)",
            "`--any` leaves locked memory out",
            "start it without mlock, or have it offer its memory itself",
        ),
        (
            "written-files",
            makeup.written,
            "is what it wrote to private mappings of files",
            "the kernel moves pages of anonymous memory only, so this cannot be offered",
            "have it read the file into memory instead; QEMU: -object memory-backend-ram,share=off,…",
        ),
        (
            "other-uffd",
            foreign,
            "is in use by another userfaultfd",
            "a mapping has one userfaultfd only",
            "wait until it ends: a migration or a snapshot of QEMU, say",
        ),
    ]
}

/// Memory that is offered, and left alone.
fn offered_in_vain(left: &LeftAlone) -> [Kind; 5] {
    [
        (
            "executable",
            left.executable,
            "is offered, and executable",
            LEFT_ALONE,
            "have it offer memory that is not executable",
        ),
        (
            "wiped-on-fork",
            left.wiped,
            "is offered, and wiped on fork (MADV_WIPEONFORK)",
            LEFT_ALONE,
            "have it offer memory that a child gets as it is",
        ),
        (
            "sealed",
            left.sealed,
            "is offered, and sealed (mseal)",
            LEFT_ALONE,
            "have it offer memory that is not sealed",
        ),
        (
            "read-only",
            left.read_only,
            "is offered, and read-only",
            "PageONE leaves it alone: the kernel moves no read-only page",
            "have it take the right to write only when the memory is merged",
        ),
        (
            "no-access",
            left.no_access,
            "is offered, and closed to all (PROT_NONE)",
            "PageONE leaves it alone: it merges nothing that may not be read",
            "have it close the memory only when that is merged",
        ),
    ]
}

fn pins(pid: u32, guest: Option<&GuestStatus>) -> Check {
    let found = match guest {
        Some(guest) => Ok(guest.pins.clone()),
        None => {
            sys::pins::find(pid, MOST_DESCRIPTORS).map(|found| found.map(|pin| pin.to_string()))
        }
    };
    match found {
        Err(error) => unseen("pins", pid, "its descriptors", &error),
        Ok(None) => Check::ok("pins", "nothing of it can pin memory for long"),
        Ok(Some(pin)) => Check::warn(
            "pins",
            pin,
            "a device may write pinned memory unseen: once written, its pages are not merged again",
        )
        .fix(format!("ls -l /proc/{pid}/fd")),
    }
}

/// What a guest offers of what it has.
fn offered(guest: &GuestStatus, makeup: &Makeup) -> Check {
    let counted = guest.pages.saturating_mul(PAGE_BYTES as u64);
    // The daemon does not count the other kinds.
    let left = makeup.left_alone;
    let offered = counted.saturating_add(left.sum() - left.unwritable());
    let present = (makeup.anonymous + makeup.stored).max(offered);
    let what = format!(
        "it offers {} of {}",
        human::size(offered),
        human::size(present)
    );
    // What QEMU offers is the memory of its machine; the rest is its own.
    let is_machine = offered > 0 && names::is_qemu(&guest.comm);
    match offered < present / 2 && !is_machine {
        false => Check::ok("offered", what),
        true => Check::warn("offered", what, "memory is merged only where it is offered")
            .fix(reasons::offers_all(guest)),
    }
}

/// Whether `--any` leaves out so much that it is worth a word.
fn is_much_huge(makeup: &Makeup) -> bool {
    let bytes = makeup.huge_advised;
    bytes >= LEAST && bytes >= (makeup.anonymous + makeup.stored) / 8
}

/// Memory that a guest does not offer since it is advised to be of huge pages, where that is an eighth of all or more.
fn huge_advised(guest: &GuestStatus, makeup: &Makeup) -> Option<Check> {
    if !is_much_huge(makeup) {
        return None;
    }
    let all = makeup.anonymous + makeup.stored;
    let [bytes, all] = [makeup.huge_advised, all].map(human::size);
    let what = format!("{bytes} of {all} is advised to be of huge pages, and is not offered");
    let why = "`--any` leaves that out, as numpy's arrays are: to be merged huge pages are split";
    let check = Check::warn("huge-advised", what, why);
    Some(check.fix(reasons::offers_huge(guest)))
}

/// Whether `pageone attach` would make it a guest: that alone decides, and is asked.
#[cfg(target_arch = "x86_64")]
fn try_out(pid: u32, service: &Service) -> Option<Result<String, String>> {
    let told = crate::attach::try_out(service.socket.as_ref()?, pid);
    Some(told.map_err(|error| format!("{error:#}")))
}

/// Whether attaching refuses a process for the agent that it has. Another process has tried, so its words are all there is. Only how they
/// begin counts: further on may be a name that the process chose.
#[cfg(target_arch = "x86_64")]
fn has_agent(error: &str) -> bool {
    error.starts_with(crate::attach::HAS_AGENT)
}

#[cfg(not(target_arch = "x86_64"))]
fn has_agent(_: &str) -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn try_out(_: u32, _: &Service) -> Option<Result<String, String>> {
    None
}

/// A process all of whose memory was given to KSM.
fn of_ksm() -> Check {
    if Ksm::default().runs() {
        return Check::ok("session", "KSM has all its memory");
    }
    let what = "KSM has all its memory, and does not run";
    let fix = "echo 1 | sudo tee /sys/kernel/mm/ksm/run";
    Check::fail("session", what, "nothing of it is merged").fix(fix)
}

fn attachable(tried: Result<String, String>, obstacle: Option<&Obstacle>) -> Check {
    match tried {
        Ok(would) => Check::ok("attachable", would),
        Err(error) => {
            let what = format!("it cannot be attached: {}", Foreign(&error));
            let why = "without that it becomes a guest only when it is started anew";
            let anew = || "pageone run --any -- CMD".to_owned();
            Check::warn("attachable", what, why).fix(obstacle.map_or_else(anew, remedy))
        }
    }
}

/// A command that shows which socket a process was told. What else stands there may be a stranger's: nothing of it acts on the terminal.
fn shows_socket(pid: u32) -> String {
    format!("tr '\\0' '\\n' </proc/{pid}/environ | grep -a PAGEONE_ | cat -v")
}

/// The socket that a process was told at its start, unless its name would act on the terminal.
#[cfg(target_arch = "x86_64")]
fn told_socket(pid: u32) -> Option<PathBuf> {
    let said = crate::attach::variable(pid, b"PAGEONE_SOCKET=").ok()??;
    let said = String::from_utf8(said).ok()?;
    let is_plain = said.starts_with('/') && !said.chars().any(sys::foreign::acts);
    is_plain.then(|| PathBuf::from(said))
}

#[cfg(not(target_arch = "x86_64"))]
fn told_socket(_: u32) -> Option<PathBuf> {
    None
}

/// An agent was attached, and the process has offered nothing since, or not to this daemon.
fn offers_nothing(pid: u32) -> Check {
    let what = "an agent was attached to it, and it is no guest of this daemon: it has offered no memory, or it has another socket";
    let again = format!("pageone detach {pid} && pageone attach --any {pid}");
    Check::fail("session", what, "nothing of it is merged").fix(again)
}

/// The command that mends why a process is not served: by the reason itself, else by the log of a daemon that is a unit.
fn remedy_of(reason: &str, is_unit: bool) -> Option<String> {
    let knob = "vm.unprivileged_userfaultfd=1";
    match reason.contains(knob) {
        true => Some(format!(
            "sudo sysctl {knob}  # or: {}",
            paths::daemon_of_root()
        )),
        false => is_unit.then(|| "journalctl -u pageone".to_owned()),
    }
}

/// Why a process is no guest of this daemon's.
fn no_session(
    pid: u32,
    makeup: Option<&Makeup>,
    service: &Service,
    obstacle: Option<&Obstacle>,
) -> Check {
    let status = service.status.as_ref();
    let why = "nothing of it is merged";
    let mut unserved = status.iter().flat_map(|status| &status.unserved);
    if let Some(refused) = unserved.find(|one| one.pid == pid) {
        let reason = human::without_process(pid, &refused.why);
        let what = format!("it is not served: {}", Foreign(&reason));
        let fix = remedy_of(&reason, service.is_roots && paths::has_unit());
        return Check {
            fix,
            ..Check::fail("session", what, why)
        };
    }
    let told = told_socket(pid);
    let own = service.socket.as_ref();
    let own = own.and_then(|socket| std::path::absolute(socket).ok());
    let is_here = told.is_some() && told == own;
    let its_socket = match told {
        Some(other) if !is_here && other.exists() => {
            format!("pageone doctor --socket {} {pid}", paths::quoted(&other))
        }
        _ => shows_socket(pid),
    };
    let Some(makeup) = makeup else {
        let what =
            "this daemon does not serve it, and whether it has the agent cannot be looked at";
        return Check::warn("session", what, "another engine may serve it").fix(its_socket);
    };
    if makeup.has_agent && makeup.held + makeup.tracked + makeup.stored > 0 {
        let what = "the agent is loaded, and has met an engine of its own (`pageone run`) or another daemon";
        let why = "what is merged of it, only that engine tells";
        return Check::warn("session", what, why).fix(its_socket);
    }
    if makeup.has_agent && is_here && status.is_some() {
        let what = "the agent is loaded, and has offered this daemon no memory yet";
        return Check::fail("session", what, why).fix("pageone run --any -- CMD");
    }
    if makeup.has_agent {
        let what = match status {
            Some(_) => {
                "the agent is loaded, and has not come to this daemon: nothing was offered yet, or it has another socket"
            }
            None => {
                "the agent is loaded, and no engine holds memory of it: nothing was offered yet, or its engine is gone"
            }
        };
        return Check::fail("session", what, why).fix(its_socket);
    }
    if service.refuses {
        let what = "whether it is a guest, the daemon tells others only";
        return Check::warn("session", what, why).fix(format!("sudo pageone doctor {pid}"));
    }
    if let Some(obstacle) = obstacle {
        let what = "it cannot load the agent";
        return Check::fail("session", what, why).fix(remedy(obstacle));
    }
    if status.is_none() {
        return Check::fail("session", "no daemon tells of it", why).fix(paths::daemon_of_root());
    }
    Check::fail("session", "the agent is not loaded", why).fix(not_loaded(pid, makeup))
}

/// The command that makes a process a guest, for what it has.
fn not_loaded(pid: u32, makeup: &Makeup) -> String {
    let any = match makeup.mergeable {
        0 if is_much_huge(makeup) => " --any --any-huge",
        0 => " --any",
        _ => "",
    };
    format!("pageone attach{any} {pid}  # or start it by: pageone run{any} -- CMD")
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::super::check::Level;
    use super::*;

    #[test]
    fn merged_memory_that_nobody_reads_is_part_of_all() {
        let makeup = Makeup {
            files: 16 << 20,
            written: 2 << 20,
            has_agent: true,
            ..Makeup::default()
        };
        let merged = |mib: u64| GuestStatus {
            pages_stored: mib << 8,
            ..GuestStatus::default()
        };
        let told = |guest: Option<&GuestStatus>| kinds(&makeup, guest)[0].check;
        assert_eq!(told(None), "written-files");
        assert_eq!(told(Some(&merged(1))), "written-files");
        assert_eq!(told(Some(&merged(64))), "memory");
    }

    #[test]
    fn little_that_is_offered_is_told_of_but_for_machines() {
        let makeup = Makeup {
            anonymous: 64 << 20,
            ..Makeup::default()
        };
        let level = |comm: &str, pages| {
            let guest = GuestStatus {
                comm: comm.into(),
                pages,
                ..GuestStatus::default()
            };
            offered(&guest, &makeup).level
        };
        assert_eq!(level("qemu-system-x86", 1), Level::Ok);
        assert_eq!(level("qemu-system-x86", 0), Level::Warn);
        assert_eq!(level("redis", 1), Level::Warn);
        assert_eq!(level("redis", 8192), Level::Ok);
    }

    #[test]
    fn memory_under_advice_for_huge_pages_is_told_with_its_remedy() {
        let told = |huge_mib: u64, attached| {
            let makeup = Makeup {
                anonymous: 188 << 20,
                huge_advised: huge_mib << 20,
                ..Makeup::default()
            };
            let guest = GuestStatus {
                pid: 7,
                comm: "python3".into(),
                pages: (188 - huge_mib) << 8,
                regions: 1,
                attached,
                ..GuestStatus::default()
            };
            let checks = of_a_guest(&guest, Some(makeup), &Service::default()).into_iter();
            let bad = checks.filter(|check| check.level != Level::Ok);
            bad.map(|check| (check.check, check.fix.unwrap()))
                .collect::<Vec<_>>()
        };
        let attach = "pageone detach 7 && pageone attach --any --any-huge 7  # in a rule of [[attach]]: any = true, any_huge = true";
        for much in [56, 150] {
            assert_eq!(told(much, true), [("huge-advised", attach.to_owned())]);
        }
        let run = "pageone run --any --any-huge -- CMD".to_owned();
        assert_eq!(told(56, false), [("huge-advised", run)]);
        assert_eq!(told(20, true), []);
    }

    #[test]
    fn a_process_is_attached_for_what_it_has() {
        let fix = |mergeable, huge_advised| {
            let makeup = Makeup {
                anonymous: 16 << 20,
                mergeable,
                huge_advised,
                ..Makeup::default()
            };
            not_loaded(7, &makeup)
        };
        let [plain, any, huge] = ["", " --any", " --any --any-huge"]
            .map(|any| format!("pageone attach{any} 7  # or start it by: pageone run{any} -- CMD"));
        assert_eq!(
            [fix(1, 0), fix(0, 1 << 20), fix(0, 2 << 20)],
            [plain, any, huge]
        );
    }

    #[test]
    fn a_reason_with_a_remedy_needs_no_log() {
        let reason =
            "it is dropped: (remedy: a daemon of root's, or vm.unprivileged_userfaultfd=1)";
        for is_unit in [false, true] {
            let fix = remedy_of(reason, is_unit).unwrap();
            assert!(fix.starts_with("sudo sysctl vm."), "{fix}");
        }
        let log = remedy_of("it is odd", true);
        assert_eq!(log.as_deref(), Some("journalctl -u pageone"));
        assert_eq!(remedy_of("it is odd", false), None);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_socket_is_that_of_the_environment_unless_it_acts() {
        let told = |socket: &str| {
            let mut sleep = Command::new("sleep");
            let mut sleep = sleep
                .arg("60")
                .env("PAGEONE_SOCKET", socket)
                .spawn()
                .unwrap();
            // Its environment is there a moment after it is executed.
            let has_it = || crate::attach::variable(sleep.id(), b"PAGEONE_SOCKET=");
            let begun = std::time::Instant::now();
            while !has_it().is_ok_and(|said| said.is_some()) {
                assert!(begun.elapsed().as_secs() < 60, "{:?}", has_it());
                std::thread::yield_now();
            }
            let told = told_socket(sleep.id());
            sleep.kill().unwrap();
            sleep.wait().unwrap();
            told
        };
        assert_eq!(told("/run/a b.sock"), Some("/run/a b.sock".into()));
        assert_eq!(told("/run/\x1b[2J"), None);
        assert_eq!(told(""), None);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_name_that_a_process_chose_is_no_word_on_its_agent() {
        let name = crate::attach::HAS_AGENT;
        assert!(has_agent(&format!(
            "{name}, or another tool has been there"
        )));
        let refused = format!("no rule of the policy gives the domain `{name}` to user 7");
        assert!(!has_agent(&refused));
    }

    #[test]
    fn the_command_that_shows_the_socket_lets_no_name_act() {
        let mut sleep = Command::new("sleep");
        sleep.arg("60").env("PAGEONE_SOCKET", "/\x1b[2J\r\u{9b}1m");
        let mut sleep = sleep.spawn().unwrap();
        let mut show = Command::new("sh");
        show.args(["-c", &shows_socket(sleep.id())]);
        let shown = show.stderr(Stdio::inherit()).output().unwrap();
        sleep.kill().unwrap();
        sleep.wait().unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.contains("PAGEONE_SOCKET=/^["), "{shown:?}");
        let acts = |c: char| c != '\n' && sys::foreign::acts(c);
        assert!(!shown.chars().any(acts), "{shown:?}");
    }
}
