//! `pageone run -- CMD`: runs a command as a guest of the daemon, or of an engine of its own.

mod own;
mod parent;
mod tally;

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use engine::EngineError;
use numa::placement::NodeRequest;
use rustix::io::Errno;
use sys::foreign::Foreign;
use sys::inherited::Inherited;
use sys::ksm::Ksm;
use wire::{KnobValues, Reply, Request};

use own::Own;
use parent::{Event, Parent};

use crate::daemon::OVERFLOW;
use crate::knobs::KnobFlags;
use crate::launch::{ANY_AFTER, Any, Launch, WantedDomain};
use crate::output::say;
use crate::program::Obstacle;
use crate::{client, human, node, paths, program};

/// The exit code for a failure of `run` itself, as env(1) and its kin have it.
pub(crate) const OWN_FAILURE: u8 = 125;
/// The longest wait for the daemon's word on the domain.
const PATIENCE: Duration = Duration::from_secs(10);
/// An engine whose stores may have no more bytes is of no use.
const LEAST_STORE: u64 = 16 << 20;
/// What becomes of a command for which there is no engine.
const UNMERGED: &str = "the command runs, but its memory is not merged";

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long, help = format!("{}; without a daemon there, this command runs its own engine", paths::SERVED))]
    socket: Option<PathBuf>,
    /// Share pages only with guests of this name: of the same user, or as the policy says [default: $PAGEONE_DOMAIN]
    #[arg(long)]
    domain: Option<String>,
    /// Tell the kernel's KSM of the memory as well
    #[arg(long)]
    also_ksm: bool,
    /// Offer all memory of the command and its children, as they are
    #[arg(long)]
    any: bool,
    /// With --any, or where the policy says so: offer memory only of processes that have run this long [default: 2s]
    #[arg(long, value_name = "TIME", value_parser = human::period)]
    any_after: Option<Duration>,
    /// With --any, or where the policy says so: also memory that was advised to be of huge pages
    #[arg(long)]
    any_huge: bool,
    /// The engine that merges
    #[arg(long, value_enum, default_value_t = Backend::Pageone)]
    backend: Backend,
    /// CPUs and memory of this NUMA node, or of the one that fits best by free memory and distance
    #[arg(long, value_name = "N|auto")]
    node: Option<NodeRequest>,
    /// With --node: how much memory the command will take [default: what -m of QEMU says, or the limit of the cgroup]
    #[arg(long, value_name = "SIZE", value_parser = human::size_of, requires = "node")]
    need: Option<u64>,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
    #[command(flatten)]
    knobs: KnobFlags,
}

/// The engine that merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    /// PageONE's engine
    Pageone,
    /// The kernel's KSM, which is told to take all memory of the command; nothing else of PageONE is at work
    Ksm,
    /// PageONE's engine; KSM where the command cannot load the agent, is not setuid, and no domain is asked for
    Auto,
}

impl Args {
    /// How all memory is offered.
    fn all(&self) -> Any {
        Any {
            after: self.any_after.unwrap_or(ANY_AFTER),
            huge: self.any_huge,
        }
    }

    /// Refuses flags that say how all memory is offered, where it is not.
    fn check_any(&self, is_any: bool) -> Result<()> {
        let flag = match (self.any_after, self.any_huge) {
            (Some(_), _) => "--any-after",
            (None, true) => "--any-huge",
            (None, false) => return Ok(()),
        };
        match is_any {
            true => Ok(()),
            false => bail!("{flag} takes --any, or a policy that offers all memory"),
        }
    }
}

pub(crate) fn main(args: &Args) -> ExitCode {
    match start(args) {
        Ok(code) => code,
        Err(error) => {
            say(&format!("pageone: {error:#}"));
            ExitCode::from(OWN_FAILURE)
        }
    }
}

fn start(args: &Args) -> Result<ExitCode> {
    let name = args.command.first().context("no command")?;
    let file = match program::find(name, std::env::var_os("PATH").as_deref()) {
        Ok(file) => file,
        Err(error) => {
            say(&format!("pageone: {error}"));
            return Ok(ExitCode::from(error.exit_code()));
        }
    };
    let domain = WantedDomain::of(args.domain.as_deref())?;
    let given = Inherited::take().context("cannot read the signal mask")?;
    let command = command_of(args, &given);
    if args.backend == Backend::Ksm {
        return by_ksm(args, domain.as_ref(), command);
    }
    let obstacle = program::obstacle(&file);
    if let Some(obstacle) = &obstacle {
        if is_left_to_ksm(args, domain.as_ref(), &file, obstacle)? {
            return become_ksms(args, command);
        }
        if obstacle.is_fatal() {
            return place_and_become(args, command);
        }
    }
    let agent = paths::agent()?;
    let socket = paths::served(args.socket.as_deref());
    let launch = Launch {
        agent: &agent,
        socket: socket.as_deref().unwrap_or(&agent),
        domain: domain.as_ref().map(|asked| asked.name.as_str()),
        also_ksm: args.also_ksm,
        any: args.any.then_some(args.all()),
    };
    let absence = match &socket {
        Ok(path) => match sys::socket::connect(path) {
            Ok(connection) => {
                warn_of_stranger(path, &connection);
                return become_guest(args, path, launch, command);
            }
            Err(error) => format!("{:#}", client::absent(path, error)),
        },
        Err(error) => error.to_string(),
    };
    args.check_any(args.any)?;
    if let Some(vain) = why_in_vain(args, &given, obstacle.as_ref())? {
        say(&format!("pageone: {absence}; {vain}"));
        return become_unmerged(args, command);
    }
    say(&format!(
        "pageone: {absence}; this command has an engine of its own until it ends"
    ));
    embed(args, &given, launch, command)
}

/// The command. It is given what this process was.
fn command_of(args: &Args, given: &Inherited) -> Command {
    let mut words = args.command.iter();
    let mut command = Command::new(words.next().map_or(OsStr::new(""), |name| name));
    given.hand_on(command.args(words));
    command
}

/// Says that a command cannot load the agent. True where KSM has all its memory instead, as `auto` wants it.
fn is_left_to_ksm(
    args: &Args,
    domain: Option<&WantedDomain>,
    file: &Path,
    obstacle: &Obstacle,
) -> Result<bool> {
    let because = match args.backend {
        Backend::Auto => {
            ksm_refuses(args, domain, obstacle)?.map(|why| format!(", nor by KSM: {why}"))
        }
        _ => Some(String::new()),
    };
    let file = file.display();
    match &because {
        Some(because) => say(&format!(
            "pageone: {file} {obstacle}: it runs, but its memory is not merged{because}"
        )),
        None => {
            say(&format!(
                "pageone: {file} {obstacle}: it is left to KSM, which shares among the programs of all users"
            ));
            warn_of_knobs(&args.knobs, "KSM has knobs of its own (`pageone ksm tune`)");
        }
    }
    Ok(because.is_none())
}

/// Becomes the command, a guest of the daemon at a socket.
///
/// # Errors
/// It may not be one in its domain, or cannot be executed.
fn become_guest(
    args: &Args,
    socket: &Path,
    launch: Launch<'_>,
    mut command: Command,
) -> Result<ExitCode> {
    let ruled = ask_for_domain(socket, launch.domain)?;
    let any = launch.any.or(ruled.then_some(args.all()));
    args.check_any(any.is_some())?;
    Launch { any, ..launch }.equip(&mut command);
    place(args)?;
    let at = socket.display();
    warn_of_knobs(
        &args.knobs,
        &format!("the daemon at {at} serves, and `pageone set` turns its knobs"),
    );
    Err(failed_exec(&mut command))
}

/// Why an engine of the command's own would be of no use, if so. `auto` goes by the command, though a static program may start others that
/// load the agent. The linker drops LD_PRELOAD of setuid ones.
fn why_in_vain(
    args: &Args,
    given: &Inherited,
    obstacle: Option<&Obstacle>,
) -> Result<Option<String>> {
    let is_auto = args.backend == Backend::Auto;
    if obstacle.is_some_and(|obstacle| is_auto || *obstacle == Obstacle::Secure) {
        let why = "no engine is started for it, and programs that it starts are not merged either";
        return Ok(Some(why.to_owned()));
    }
    if let Some(why) = too_little(given) {
        return Ok(Some(why));
    }
    let why = |why| format!("an engine of this command's own could merge nothing: {why}");
    Ok(no_right()?.map(why))
}

/// The limit of this process that leaves an engine too little, if there is one.
fn too_little(given: &Inherited) -> Option<String> {
    let largest = given
        .largest_file()
        .filter(|&largest| largest < LEAST_STORE)?;
    Some(format!(
        "its files may have {} at most (ulimit -f), and an engine has merged pages in a file: {UNMERGED}",
        human::size(largest)
    ))
}

/// Becomes the command, all of whose memory is KSM's to merge, and that of its children.
fn by_ksm(args: &Args, domain: Option<&WantedDomain>, command: Command) -> Result<ExitCode> {
    if let Some(WantedDomain { by, .. }) = domain {
        bail!("KSM knows no domains: leave {by} out");
    }
    if args.any || args.also_ksm {
        bail!("KSM takes all memory: leave --any and --also-ksm out");
    }
    args.check_any(args.any)?;
    if let Some(flag) = args.knobs.first() {
        bail!("--{flag} turns PageONE's engine, not KSM: leave it out, or see `pageone ksm tune`");
    }
    offer_to_ksm()?;
    become_ksms(args, command)
}

/// Has KSM take all memory of this process, and so of a command that cannot load the agent; or gives the reason why not. KSM shares
/// among all users, and a setuid program is another user's.
fn ksm_refuses(
    args: &Args,
    domain: Option<&WantedDomain>,
    obstacle: &Obstacle,
) -> Result<Option<String>> {
    let refuses = match domain {
        Some(WantedDomain { name, by }) => format!(
            "{by} asks for the domain `{}`, and KSM knows none",
            Foreign(name)
        ),
        None if *obstacle == Obstacle::Secure => "it shares among all users".to_owned(),
        None if !has_domain_of_user(args)? => {
            "the daemon's policy does not give it its user's domain, and KSM knows none".to_owned()
        }
        None => match offer_to_ksm() {
            Ok(()) => return Ok(None),
            Err(error) => format!("{error:#}"),
        },
    };
    Ok(Some(refuses))
}

/// Whether the command would share with all programs of its user, as far as a daemon says. KSM heeds no policy, so a narrower domain, or
/// none, is no case for it.
fn has_domain_of_user(args: &Args) -> Result<bool> {
    let socket = paths::served(args.socket.as_deref());
    let Some(socket) = socket
        .ok()
        .filter(|path| sys::socket::connect(path).is_ok())
    else {
        return Ok(true);
    };
    let reply = client::ask(&socket, &Request::Domain(String::new()), PATIENCE)?;
    Ok(match reply {
        Reply::Domain(domain) | Reply::DomainOfAny(domain) => domain.starts_with("uid:"),
        _ => false,
    })
}

/// Tells KSM to take all memory of this process, and of the command that it becomes.
fn offer_to_ksm() -> Result<()> {
    sys::residence::offer_memory_to_ksm().context(
        "the kernel does not let its KSM have all memory of this process: \
         it takes Linux 6.4 and CONFIG_KSM",
    )
}

/// Becomes the command, after [`offer_to_ksm`].
fn become_ksms(args: &Args, command: Command) -> Result<ExitCode> {
    if !Ksm::default().runs() {
        say("pageone: KSM does not run: write 1 to /sys/kernel/mm/ksm/run");
    }
    place_and_become(args, command)
}

/// Knobs are those of an engine of `run`'s own.
fn warn_of_knobs(knobs: &KnobFlags, why: &str) {
    if let Some(flag) = knobs.first() {
        say(&format!("pageone: --{flag} turns nothing: {why}"));
    }
}

/// An agent serves root's daemon or its own user's, and says nothing of others.
fn warn_of_stranger(path: &Path, connection: &impl AsFd) {
    let own = rustix::process::geteuid().as_raw();
    let peer = sys::socket::peer(connection).map_or(OVERFLOW, |peer| peer.uid);
    if peer != 0 && (peer != own || own == OVERFLOW) {
        say(&format!(
            "pageone: the daemon at {} is of user {peer}, whom agents of user {own} do not trust: the \
             command runs, but its memory is not merged",
            path.display()
        ));
    }
}

/// Asks the daemon whether the command will be a guest in the domain it asks for: the command will
/// be this process. Without a name a refusal only means that nothing is merged, and silence that it is merged later: the agent connects
/// again by itself. Tells whether the policy has all its memory offered.
fn ask_for_domain(socket: &Path, name: Option<&str>) -> Result<bool> {
    let request = Request::Domain(name.unwrap_or_default().to_owned());
    let reply = match client::ask(socket, &request, PATIENCE) {
        Err(error) if name.is_none() => {
            say(&format!(
                "pageone: {error:#}: the command runs, and what it offers is merged as soon as a daemon serves there"
            ));
            return Ok(false);
        }
        reply => reply?,
    };
    match (reply, name) {
        (Reply::Refused(why), Some(name)) => {
            let file = crate::policy::file_of(&why);
            bail!("the domain `{}` is refused: {why}{file}", Foreign(name))
        }
        (Reply::Refused(why), None) => {
            let file = crate::policy::file_of(&why);
            say(&format!(
                "pageone: {why}: it runs, but its memory is not merged{file}"
            ));
            Ok(false)
        }
        (Reply::DomainOfAny(_), _) => Ok(true),
        _ => Ok(false),
    }
}

/// Puts this thread, and what it starts, on the CPUs and the memory of the node asked for. Gives the socket beside which that is noted.
fn place(args: &Args) -> Result<Option<PathBuf>> {
    let Some(request) = args.node else {
        return Ok(None);
    };
    let need = args.need.unwrap_or_else(|| node::need(&args.command));
    // A user without a place for a socket has none for notes.
    let socket = paths::socket(args.socket.as_deref()).ok();
    node::place(request, need, socket.as_deref())?;
    Ok(socket)
}

/// Becomes the command, at the node asked for.
fn place_and_become(args: &Args, mut command: Command) -> Result<ExitCode> {
    place(args)?;
    Err(failed_exec(&mut command))
}

/// Becomes the command; returns only if that fails.
fn failed_exec(command: &mut Command) -> anyhow::Error {
    let error = command.exec();
    anyhow::Error::new(error).context(cannot_run(command))
}

fn cannot_run(command: &Command) -> String {
    format!("cannot run {}", command.get_program().display())
}

/// Becomes the command, for which there is no engine.
fn become_unmerged(args: &Args, command: Command) -> Result<ExitCode> {
    warn_of_knobs(&args.knobs, "no engine is started");
    place_and_become(args, command)
}

/// Why no engine of this user's could merge anything.
///
/// # Errors
/// The kernel is too old.
fn no_right() -> Result<Option<String>> {
    if rustix::process::geteuid().as_raw() == OVERFLOW {
        return Ok(Some(format!("no agent trusts one of user {OVERFLOW}")));
    }
    let facilities = engine::Facilities::tried();
    let why = |error| format!("{:#}", anyhow::Error::new(error));
    if let Err(error) = facilities.reading {
        return Ok(Some(why(error)));
    }
    Ok(match facilities.userfaultfd {
        Ok(true) => facilities.page_map.err().map(why),
        Ok(false) => Some(format!(
            "this user has no right to userfaultfd, so {UNMERGED}: \
             have root start a daemon (`{}`), or set vm.unprivileged_userfaultfd to 1",
            paths::daemon_of_root()
        )),
        Err(error @ EngineError::Missing { .. }) => {
            return Err(error).context("cannot start the engine");
        }
        Err(error) => Some(why(error)),
    })
}

/// Runs the command with an engine of its own; without one, where it cannot start.
fn embed(
    args: &Args,
    given: &Inherited,
    launch: Launch<'_>,
    mut command: Command,
) -> Result<ExitCode> {
    let begin = || -> Result<(Parent, Own)> {
        let knobs = args.knobs.over(KnobValues::default());
        Ok((Parent::new()?, Own::start(knobs, args.any)?))
    };
    let (parent, own) = match begin() {
        Ok(begun) => begun,
        Err(error) => {
            say(&format!("pageone: {error:#}: {UNMERGED}"));
            return become_unmerged(args, command);
        }
    };
    let socket = own.socket();
    Launch { socket, ..launch }.equip(&mut command);
    // The engine runs already: only this process and its children are placed.
    let noted = place(args)?;
    let child = match command.spawn() {
        Err(error) if is_shortage(&error) => {
            own.stop();
            drop(parent);
            say(&format!(
                "pageone: cannot start a process: {error}: {UNMERGED}"
            ));
            return Err(failed_exec(&mut command_of(args, given)));
        }
        child => child.with_context(|| cannot_run(&command))?,
    };
    if let Some(socket) = noted
        && let Err(error) = node::hand_over(&socket, child.id())
    {
        say(&format!("pageone: {error:#}"));
    }
    Ok(parent::pass_on(accompany(parent, own, child.id())?))
}

/// Waits for the command's end, whatever becomes of its engine.
fn accompany(mut parent: Parent, mut own: Own, child: u32) -> Result<ExitStatus> {
    loop {
        match parent.wait(child, &own)? {
            Event::Ended(status) => {
                own.stop();
                return Ok(status);
            }
            Event::Alone => own.note_loss(),
        }
    }
}

/// Whether there is no room for one process more, whichever it is.
fn is_shortage(error: &std::io::Error) -> bool {
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::AGAIN, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|error| shortages.contains(&error))
}
