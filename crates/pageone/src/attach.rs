//! `pageone attach PID…`: an agent for a process that runs already.
//!
//! ```text
//!   one thread held ─▶ places for the image and the board; both are made ready here
//!                        │
//!                        ▼
//!   all threads held ─▶ what their filters allow ─▶ memory for both, written ─▶ jumps over libc's entries ─▶ the agent begins
//!                        │
//!                        ▼
//!   all but one go on
//!                        │
//!                        ▼
//!   what the program had offered to the kernel is offered to the agent ─▶ the last one goes on
//! ```
//!
//! **What must hold**: no thread ever runs bytes that are half written, or a hook that has not all it needs. None makes a call that a
//! hook should have seen, or that a seccomp filter refuses. So all is done while all threads stand still, at a [`moment`] at which
//! none is on its way to such a call. Each jump stands over one instruction ([`site`]), and the agent has begun before a thread goes on.
//! Memory is offered after that: what the program unmaps from then on is seen. Whichever step fails, those before it are undone, in
//! reverse, before a thread goes on.
//!
//! The loader is not asked. A thread may hold its lock, or malloc's, at the moment at which it is stopped.
//!
//! Each line uses only those below it:
//!
//! | file | for |
//! |---|---|
//! | [`asked`] | a process that does it for the daemon |
//! | [`work`] | the steps, and how each is undone |
//! | [`mod@detach`] | the same, back again |
//! | [`patience`] | the commands wait for no process that lies |
//! | [`mount`] | the daemon's socket in a container |
//! | [`target`] | the process, and the reasons against it |
//! | [`owner`] | how its agent knows its server |
//! | [`image`] | the agent's library, relocated |
//! | [`filters`] | whether its seccomp filters allow all that is to be done |
//! | [`moment`] | no thread stands behind a jump and before its call |
//! | [`record`] | the changes, noted in the process |
//! | [`board`], [`site`] | where jumps stand, and the code between them and the hooks |
//! | [`elf`] | images |

pub(crate) mod asked;
mod board;
mod detach;
mod elf;
mod filters;
mod gates;
mod image;
mod moment;
mod mount;
mod owner;
mod patience;
mod record;
mod site;
mod target;
mod work;

use std::cell::Cell;
use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sys::foreign::Foreign;
use sys::seize::SeizeError;
use wire::{GuestStatus, Reply, Request, Status, Unserved};

use crate::launch;
use crate::policy::{self, Policy};
use crate::selector::{self, Selector};
use crate::{client, human, node, paths};
use image::Image;
pub(crate) use target::{HAS_AGENT, variable};
use target::{HasAgent, NotAttached, Target};

#[derive(clap::Args)]
#[command(override_usage = "pageone attach [OPTIONS] <PID|--match <KEY=VALUE,...>>...")]
pub(crate) struct Args {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// Share pages only with guests of this name: of the same user, or as the policy says [default: $PAGEONE_DOMAIN, else that of each process]
    #[arg(long, value_parser = launch::domain_of)]
    domain: Option<String>,
    /// Offer all memory of the processes, not only what they offer themselves
    #[arg(long)]
    any: bool,
    /// With --any: also memory that was advised to be of huge pages
    #[arg(long, requires = "any")]
    any_huge: bool,
    /// Memory that each process will take in all; later `run --node auto` plans with the part not yet touched [default: QEMU's -m, or the
    /// cgroup's limit, of one that began within 5 minutes]
    #[arg(long, value_name = "SIZE", value_parser = human::size_of)]
    need: Option<u64>,
    /// Mount the daemon's socket, read-only, for processes in whose mounts it is not (containers)
    #[arg(long)]
    mount: bool,
    /// Say what would be attached, and why not, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// All processes for which these conditions hold, as command=redis-server,user=alice; the keys are command, executable, user, uid, group, gid, cgroup, unit
    #[arg(long = "match", value_name = "KEY=VALUE,...")]
    selectors: Vec<Selector>,
    /// With --dry-run: the policy by which the domains are shown; without it the daemon is asked
    #[arg(long, value_name = "FILE", requires = "dry_run")]
    policy: Option<PathBuf>,
    /// Only if the process began then, in ticks since boot: for the daemon, whose choice another process may have outlived
    #[arg(long, hide = true, conflicts_with = "selectors")]
    began: Option<u64>,
    /// In this process, whatever time it takes: for the command itself, whose child does so
    #[arg(long, hide = true, conflicts_with_all = ["selectors", "asked"])]
    alone: bool,
    /// Take from standard input, a connection, what the daemon wants to have attached: for the service that systemd starts
    #[arg(long, hide = true, conflicts_with_all = ["selectors", "pids", "began", "domain", "any", "dry_run"])]
    asked: bool,
    /// The processes
    #[arg(required_unless_present_any = ["selectors", "asked"], value_name = "PID", value_parser = human::process)]
    pids: Vec<u32>,
}

#[derive(clap::Args)]
#[command(override_usage = "pageone detach [OPTIONS] <PID|--match <KEY=VALUE,...>>...")]
pub(crate) struct Detach {
    /// Say what would be detached, and why not, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// All processes that were attached and for which these conditions hold, as command=redis-server,user=alice; the keys are those of attach
    #[arg(long = "match", value_name = "KEY=VALUE,...")]
    selectors: Vec<Selector>,
    /// Only if the process began then, in ticks since boot: for the command itself, whose choice another process may have outlived
    #[arg(long, hide = true, conflicts_with = "selectors")]
    began: Option<u64>,
    /// In this process, whatever time it takes: for the command itself, whose child does so
    #[arg(long, hide = true)]
    alone: bool,
    /// The processes
    #[arg(required_unless_present = "selectors", value_name = "PID", value_parser = human::process)]
    pids: Vec<u32>,
}

/// `pageone detach`.
pub(crate) fn detach(args: &Detach) -> Result<()> {
    let fitting = find(&args.selectors, &args.pids)?;
    let named = args.pids.iter().map(|&pid| (pid, args.began));
    let (mut failed, mut none) = (false, true);
    for (pid, began) in named.chain(fitting) {
        // A look at it, too, may take as long as the process likes.
        let detached = match args.alone {
            true => detach_here(pid, began, args.dry_run),
            false => patience::detach(pid, began, args.dry_run),
        };
        match detached {
            // One that fits: the command hears nothing of it.
            Err(error) if args.alone && began.is_some() && error.is::<NotAttached>() => {}
            Ok(told) if told.is_empty() => {}
            Ok(told) => {
                none = false;
                tell(&told);
            }
            Err(error) => {
                (failed, none) = (true, false);
                warn(&format!("{pid} is not detached: {}", told(&error)));
            }
        }
    }
    if none && !args.alone {
        bail!("none of the processes that fit was attached");
    }
    end(failed)
}

/// The processes that fit one of the conditions and are not named, by when they began.
///
/// # Errors
/// None fits, and none is named.
fn find(selectors: &[Selector], named: &[u32]) -> Result<Vec<(u32, Option<u64>)>> {
    let fitting = selector::find(selectors)?;
    if fitting.is_empty() && named.is_empty() {
        if let Some(error) = selector::blind(selectors.iter()) {
            bail!("no process fits: the conditions name a cgroup or a unit, and {error}");
        }
        bail!("no process fits: `ps -eo pid,comm,uid,cgroup` shows what they are");
    }
    // Asked anew behind that: one that is gone has left its number to any other.
    let fits = |pid: u32| selectors.iter().any(|selector| selector.fits(pid));
    let began = |pid: u32| {
        let began = sys::usage::began(pid).ok()?;
        fits(pid).then_some((pid, Some(began)))
    };
    let others = fitting.into_iter().filter(|pid| !named.contains(pid));
    Ok(others.filter_map(began).collect())
}

fn detach_here(pid: u32, began: Option<u64>, dry_run: bool) -> Result<String> {
    arm_faults();
    in_time(pid, || {
        let (target, record) = Target::look_for_agent(pid, began)?;
        let name = target.name.to_string();
        if dry_run {
            return Ok(format!("{pid} ({name}): would be detached"));
        }
        let done = detach::detach(target, &record)?;
        Ok(format!("{pid} ({name}): {done}"))
    })
}

/// The end of a command that has said of each process what became of it.
fn end(failed: bool) -> Result<()> {
    match failed {
        true => std::process::exit(1),
        false => Ok(()),
    }
}

/// Says what was done. The caller may have gone: then no process reads it.
fn tell(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// The same of what was not.
fn warn(text: &str) {
    let _ = writeln!(std::io::stderr(), "pageone: {text}");
}

/// An error, parts of which the process may have chosen.
fn told(error: &anyhow::Error) -> String {
    Foreign(&format!("{error:#}")).to_string()
}

fn arm_faults() {
    #[cfg(debug_assertions)]
    if let Some(text) = std::env::var_os("PAGEONE_FAULT") {
        sys::fault::arm(text.to_str().unwrap_or_default());
    }
}

pub(crate) fn main(args: &Args) -> Result<()> {
    arm_faults();
    let to = To::of(args)?;
    if args.asked {
        return asked::serve(|wish| to.grant(wish));
    }
    let domain = launch::WantedDomain::of(args.domain.as_deref())?.map(|asked| asked.name);
    let policy = args.policy.as_deref().map(Policy::read).transpose()?;
    let attach = |pid: u32, began: Option<u64>| match args.alone {
        true => to.attach(pid, began, args.mount, |target, image, server| {
            args.attach_one(
                &to,
                domain.as_deref(),
                policy.as_ref(),
                target,
                (image, server),
            )
        }),
        false => patience::attach(pid, args.again(&to.socket, pid, began)),
    };
    // Of those that are named an agent is asked for. Of those that fit, which are known by when they began, some may have theirs.
    let fitting = find(&args.selectors, &args.pids)?;
    let named = args.pids.iter().map(|&pid| (pid, args.began));
    let mut failed = false;
    for (pid, began) in named.chain(fitting) {
        match attach(pid, began) {
            Ok(told) => tell(&told),
            Err(error) if began.is_none() && error.is::<HasAgent>() => {
                failed = true;
                let error = to.guest(pid).map_or(error, |guest| {
                    anyhow!("{HAS_AGENT}: it is a guest in the domain {}", guest.domain)
                });
                warn(&format!("{pid} is not attached: {}", told(&error)));
            }
            Err(error) if began.is_some() && error.is::<HasAgent>() => {
                tell(&format!("{pid} ({}): {error}", sys::process::comm(pid)));
            }
            Err(error) => {
                failed = true;
                let why = told(&error);
                // Once: not by the child that does the work, whose words these are.
                let file = if args.alone {
                    ""
                } else {
                    policy::file_of(&why)
                };
                warn(&format!("{pid} is not attached: {why}{file}"));
            }
        }
    }
    end(failed)
}

impl Args {
    /// Puts an agent into a process, or says what would be done.
    fn attach_one(
        &self,
        to: &To,
        domain: Option<&str>,
        policy: Option<&Policy>,
        target: Target,
        (image, server): (Image, owner::Server),
    ) -> Result<String> {
        let name = target.domain(domain)?;
        let asked = name.as_deref().unwrap_or_default();
        let words = words(&to.socket, name.as_deref(), self.any, self.any_huge)?;
        let domain = match policy {
            Some(policy) => of_policy(policy, target.pid, asked)?,
            None => to.domain(target.pid, asked, self.dry_run)?,
        };
        if self.dry_run {
            return would(&target, image, self, &domain);
        }
        let pid = target.pid;
        let was_guest = to.guest(pid).is_some();
        let done = to.put(target, image, server, &words, self.need)?;
        // A daemon of another number space knows it by another number.
        let late = match done.offers() && domain != UNTOLD {
            true => to.wait_for(pid, was_guest).unwrap_or_default(),
            false => String::new(),
        };
        Ok(format!("{done}; in the domain {domain}{late}"))
    }

    /// The words by which a child does the same to one process.
    fn again(&self, socket: &Path, pid: u32, began: Option<u64>) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["--socket".into(), socket.into()];
        let mut add = |flag: &str, value: Option<OsString>| {
            let value = value.into_iter();
            words.extend(value.flat_map(|value| [flag.into(), value]));
        };
        let number = |number: u64| number.to_string().into();
        add("--domain", self.domain.clone().map(OsString::from));
        add("--need", self.need.map(|need| human::as_flag(need).into()));
        add("--policy", self.policy.clone().map(OsString::from));
        add("--began", began.map(number));
        let flags = [
            ("--any", self.any),
            ("--any-huge", self.any_huge),
            ("--mount", self.mount),
            ("--dry-run", self.dry_run),
        ];
        words.extend(flags.iter().filter(|flag| flag.1).map(|flag| flag.0.into()));
        words.push(pid.to_string().into());
        words
    }
}

/// Where processes are attached to, and with what.
struct To {
    socket: PathBuf,
    /// The user of the daemon; none where nothing is to be done.
    server: Option<u32>,
    file: PathBuf,
    library: Vec<u8>,
}

impl To {
    fn of(args: &Args) -> Result<Self> {
        let socket = paths::served(args.socket.as_deref())?;
        let socket = std::path::absolute(&socket).context("cannot find the daemon's socket")?;
        let server = match args.dry_run {
            true => None,
            false => Some(server(&socket)?),
        };
        let file = paths::agent()?;
        let library = std::fs::read(&file);
        let library = library.with_context(|| format!("cannot read {}", file.display()))?;
        Ok(Self {
            socket,
            server,
            file,
            library,
        })
    }

    /// Has `how` attach a process, if that began then.
    fn attach(
        &self,
        pid: u32,
        began: Option<u64>,
        mount: bool,
        how: impl FnOnce(Target, Image, owner::Server) -> Result<String>,
    ) -> Result<String> {
        let mounted = Cell::new(false);
        let done = in_time(pid, || {
            self.attach_to(pid, began, mount.then_some(&mounted), how)
        });
        // Behind all that is asked of the error.
        done.map_err(|error| match mounted.get() {
            true => error.context("not attached, though the daemon's socket is mounted there now"),
            false => error,
        })
    }

    /// `mounted` says whether the socket may be mounted, and gets to know whether it is.
    fn attach_to(
        &self,
        pid: u32,
        began: Option<u64>,
        mounted: Option<&Cell<bool>>,
        how: impl FnOnce(Target, Image, owner::Server) -> Result<String>,
    ) -> Result<String> {
        let target = Target::look(pid, began)?;
        let missing = match target.sees(&self.socket) {
            Err(_) if mounted.is_some() => Some(self.missing(&target)?),
            seen => seen.map(|()| None)?,
        };
        target.sees_itself()?;
        let image = Image::of(&self.library);
        let image = image.with_context(|| format!("cannot use {}", self.file.display()))?;
        // Behind what can be checked without it: a mount stays.
        let is_done = self.server.is_some();
        if let Some(missing) = missing.as_ref().filter(|_| is_done) {
            missing.mount()?;
            mounted.inspect(|mounted| mounted.set(true));
            target.sees(&self.socket)?;
        }
        let name = target.name.to_string();
        // Without a daemon it would be of the one who asks.
        let server = self.server;
        let server = server.unwrap_or_else(|| rustix::process::geteuid().as_raw());
        let server = owner::Server::of(&target, server, &self.socket)?;
        let told = how(target, image, server)?;
        let missing = missing.map(|missing| missing.told(is_done));
        Ok(format!(
            "{pid} ({name}): {told}{}",
            missing.unwrap_or_default()
        ))
    }

    /// What is to be mounted for a process that does not have the socket.
    fn missing(&self, target: &Target) -> Result<mount::Missing<'_>> {
        let own = rustix::process::geteuid().as_raw();
        if self.server.is_some_and(|server| server != own) {
            bail!("the daemon is another user's, who could have any folder mounted there");
        }
        mount::Missing::of(target, &self.socket)
    }

    /// Puts an agent into a process.
    fn put(
        &self,
        target: Target,
        image: Image,
        server: owner::Server,
        words: &[u8],
        need: Option<u64>,
    ) -> Result<work::Done> {
        let (pid, environment) = (target.pid, words.to_vec());
        let words = work::Words {
            environment,
            server,
        };
        let done = work::attach(target, image, &words)?;
        // Beside the socket of another user's daemon that user may choose what the file is.
        let own = self.server == Some(rustix::process::geteuid().as_raw());
        if own && let Err(error) = node::note_attached(&self.socket, pid, need) {
            warn(&format!(
                "starts after this one may share its node: {error:#}"
            ));
        }
        Ok(done)
    }

    /// The daemon's status, as far as it tells.
    fn status(&self) -> Option<Box<Status>> {
        match client::ask_quietly(&self.socket, &Request::Status, JOINING) {
            Ok(Reply::Status(status)) => Some(status),
            _ => None,
        }
    }

    /// The process as the daemon's guest.
    fn guest(&self, pid: u32) -> Option<GuestStatus> {
        if !client::shares_numbers(&self.socket) {
            return None;
        }
        let guests = self.status()?.guests;
        guests.into_iter().find(|guest| guest.pid == pid)
    }

    /// Waits until the daemon knows the process, so that the next command meets a guest. Gives what is to be said if it does not; nothing
    /// where the daemon tells nothing, or the process has ended. One that was a guest before may be told as that one for a moment.
    fn wait_for(&self, pid: u32, mut was_guest: bool) -> Option<String> {
        let begun = Instant::now();
        while begun.elapsed() < JOINING {
            let status = self.status()?;
            let has_ended = sys::usage::began(pid).is_err();
            let is_guest = status.guests.iter().any(|guest| guest.pid == pid);
            was_guest &= is_guest && begun.elapsed() < RETIRING;
            if has_ended || is_guest && !was_guest {
                return None;
            }
            let is_new =
                |one: &&Unserved| one.pid == pid && one.seconds <= begun.elapsed().as_secs();
            if let Some(one) = status.unserved.iter().find(is_new) {
                return Some(format!("; not served: {}", Foreign(&one.why)));
            }
            std::thread::sleep(AGAIN);
        }
        Some("; its agent has not come to the daemon yet".to_owned())
    }

    /// The domain that the daemon gives a process that asks for `name`, for people. Where none serves, and it is only a trial, it is that
    /// of the policy that root's would have.
    ///
    /// # Errors
    /// It may be no guest there.
    fn domain(&self, pid: u32, name: &str, trial: bool) -> Result<String> {
        const OF_ROOT: &str = "/etc/pageone/policy.toml";
        let began = sys::usage::began(pid)?;
        if !trial || sys::socket::connect(&self.socket).is_ok() {
            return match client::domain_of(&self.socket, pid, began, name) {
                Ok(Reply::Domain(domain) | Reply::DomainOfAny(domain)) => {
                    Ok(Foreign(&domain).to_string())
                }
                Ok(Reply::Refused(why)) => Err(anyhow!(why)),
                // The daemon of another number space, or one that hangs: it will decide.
                Ok(_) | Err(_) => Ok(UNTOLD.to_owned()),
            };
        }
        let file = Path::new(OF_ROOT);
        let (policy, by) = match file.exists() {
            true => (Policy::read(file)?, OF_ROOT),
            false => (Policy::here(), "a policy without rules"),
        };
        let domain = of_policy(&policy, pid, name)?;
        let socket = self.socket.display();
        Ok(format!(
            "{domain} (by {by}: at {socket} no daemon could be asked)"
        ))
    }

    /// What the daemon wants.
    fn grant(&self, wish: &asked::Wish) -> Result<String> {
        let domain = wish.domain.as_deref();
        domain.map_or(Ok(()), launch::check_domain)?;
        let how = |target: Target, image, server| {
            let name = target.domain(domain)?;
            let words = words(&self.socket, name.as_deref(), wish.any, wish.any_huge)?;
            let asked = name.as_deref().unwrap_or_default();
            let given = self.domain(target.pid, asked, false)?;
            let done = self.put(target, image, server, &words, wish.need)?;
            Ok(format!("{done}; in the domain {given}"))
        };
        match self.attach(wish.pid, Some(wish.began), wish.mount, how) {
            // It got an agent from elsewhere meanwhile.
            Err(error) if error.is::<HasAgent>() => Ok(format!(
                "{} ({}): {error}",
                wish.pid,
                sys::process::comm(wish.pid)
            )),
            done => done,
        }
    }
}

/// The domain that a policy gives a process, for people.
fn of_policy(policy: &Policy, pid: u32, name: &str) -> Result<String> {
    let domain = policy.domain(&policy::who(pid)?, name)?;
    Ok(Foreign(&domain).to_string())
}

/// A domain that the daemon did not tell.
const UNTOLD: &str = "that its daemon's policy gives, and which it did not tell";

/// The longest wait until the daemon knows a process that was attached, and between two questions.
const JOINING: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_millis(20);
/// In so much time the daemon notices that a guest has left, if it is not in a round.
const RETIRING: Duration = Duration::from_millis(1200);

/// Does something to a process. If that ends meanwhile, or executes another program, this is the error: what else was found is not
/// true of it.
fn in_time(pid: u32, act: impl FnOnce() -> Result<String>) -> Result<String> {
    let was_there = sys::usage::began(pid).is_ok();
    let is_late = |error: &_| ends_a_read(error) || was_there && has_ended(pid);
    act().map_err(|error| match is_late(&error) {
        true => SeizeError::Gone.into(),
        false => error,
    })
}

/// An error of a process that has executed another program meanwhile: its old memory ends in the middle of a read.
fn ends_a_read(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    let is_end = io.is_some_and(|io| io.kind() == ErrorKind::UnexpectedEof);
    // What else is said of it counts more.
    is_end && error.chain().count() == 1
}

/// The longest wait for the end of a process whose first thread has no memory any more: its others may go on.
const ENDING: Duration = Duration::from_secs(1);

/// Whether a process has ended, though its parent may not have asked what became of it.
fn has_ended(pid: u32) -> bool {
    // The memory goes first. Where it is secret, it is there.
    let program = std::fs::read_link(format!("/proc/{pid}/exe"));
    let is_gone = |error| {
        matches!(
            Errno::from_io_error(&error),
            Some(Errno::NOENT | Errno::SRCH)
        )
    };
    if !program.is_err_and(is_gone) {
        return false;
    }
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let process = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    match process {
        Some(Ok(process)) => asked::is_readable(&process, ENDING).unwrap_or(false),
        Some(Err(error)) => error == Errno::SRCH,
        None => true,
    }
}

/// The user of the daemon at the socket.
fn server(socket: &Path) -> Result<u32> {
    let connection = sys::socket::connect(socket);
    let connection = connection.map_err(|error| client::absent(socket, error))?;
    Ok(sys::socket::peer(&connection)
        .context("the daemon is gone")?
        .uid)
}

/// What the environment of a command would tell its agent.
fn words(socket: &Path, domain: Option<&str>, any: bool, any_huge: bool) -> Result<Vec<u8>> {
    let mut words = Vec::new();
    let mut add = |name: &str, value: &[u8]| {
        words.extend_from_slice(name.as_bytes());
        words.push(b'=');
        words.extend_from_slice(value);
        words.push(0);
    };
    add("PAGEONE_SOCKET", socket.as_os_str().as_bytes());
    if let Some(domain) = domain {
        add("PAGEONE_DOMAIN", domain.as_bytes());
    }
    if any {
        // Of its fork children; the process itself has lived.
        add(
            "PAGEONE_ANY",
            launch::ANY_AFTER.as_millis().to_string().as_bytes(),
        );
    }
    if any_huge {
        add("PAGEONE_ANY_HUGE", b"1");
    }
    words.push(0);
    if words.len() > wire::attach::WORDS_BYTES {
        bail!("the socket's path and the domain are too long");
    }
    Ok(words)
}

/// What `pageone attach --dry-run` says of a process, for a daemon at this socket.
///
/// # Errors
/// Why it would not be attached.
pub(crate) fn try_out(socket: &Path, pid: u32) -> Result<String> {
    let words = ["--dry-run".into(), "--socket".into(), socket.into()];
    let words: [OsString; 3] = words;
    patience::attach(pid, words.into_iter().chain([pid.to_string().into()]))
}

/// What would be done.
fn would(target: &Target, mut image: Image, args: &Args, domain: &str) -> Result<String> {
    let (libc, base) = target.libc()?;
    image.relocate(base, base)?;
    moment::Bodies::of(&libc, base, &image)?;
    work::plan(target, &mut image, base, (&libc, base))?;
    target.entry()?;
    work::place_of_image(target, &image)?;
    let offered: u64 = target
        .offered()?
        .iter()
        .map(|range| range.end - range.start)
        .sum();
    let any = work::Any {
        huge: args.any_huge,
    };
    let offers = match (args.any, offered) {
        (true, _) => format!("it would offer {any}"),
        (false, 0) => "it offers no memory yet: see --any".to_owned(),
        (false, offered) => format!("it offers {}", human::size(offered)),
    };
    // To read them its threads have to be held, which is more than to do nothing.
    let filters = match target.has_filters() {
        true => "; if its seccomp filters allow all of the agent's calls, which is looked at then",
        false => "",
    };
    Ok(format!(
        "would be attached, in the domain {domain}; {offers}{filters}"
    ))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn a_process_that_executes_another_program_is_told_as_such() {
        let end = || std::io::Error::from(ErrorKind::UnexpectedEof);
        let told = |pid, error| in_time(pid, || Err(error)).unwrap_err().to_string();
        let own = std::process::id();
        let said = told(own, end().into());
        assert!(said.contains("runs another program now"), "{said}");
        let other = anyhow::Error::new(end()).context("it is not undone");
        assert_eq!(told(own, other), "it is not undone");
    }

    #[test]
    fn a_process_that_ends_meanwhile_is_told_as_such() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = child.id();
        let lives = in_time(pid, || bail!("its memory is a secret"));
        assert_eq!(lives.unwrap_err().to_string(), "its memory is a secret");
        let ends = in_time(pid, || {
            child.kill().unwrap();
            // Its parent, this process, takes no notice.
            while !sys::task::is_gone(pid) {
                std::thread::sleep(AGAIN);
            }
            bail!("it has no libc")
        });
        let said = ends.unwrap_err().to_string();
        assert!(said.contains("is gone"), "{said}");
        child.wait().unwrap();
        let was_never_there = in_time(pid, || bail!("there is no such process"));
        let said = was_never_there.unwrap_err().to_string();
        assert_eq!(said, "there is no such process");
    }

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_child_is_told_all_that_the_command_was() {
        let parse = |words: &[OsString]| {
            let words = [&["pageone attach".into()], words].concat();
            Alone::try_parse_from(words).unwrap().args
        };
        let words = "--domain d --any --any-huge --mount --need 1.5M --dry-run --policy p 7 8";
        let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
        let again = parse(&words).again(Path::new("/s"), 8, Some(99));
        let args = parse(&[vec!["--alone".into()], again].concat());
        assert_eq!((&args.pids[..], args.began), (&[8][..], Some(99)));
        assert_eq!(args.socket.as_deref(), Some(Path::new("/s")));
        assert_eq!(args.domain.as_deref(), Some("d"));
        assert_eq!(args.need, Some(3 << 19));
        assert_eq!(args.policy.as_deref(), Some(Path::new("p")));
        assert!(args.alone && args.any && args.any_huge && args.mount && args.dry_run);
        let few = parse(&["7".into()]).again(Path::new("/s"), 7, None);
        let args = parse(&few);
        assert!(args.began.is_none() && args.need.is_none() && !args.any && !args.dry_run);
    }
}
