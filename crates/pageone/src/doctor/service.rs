//! The daemon: whether one serves, which, and in which domain.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use wire::{Reply, Request, RunMode, Status};

use super::check::Check;
use crate::paths::Order;
use crate::view::status;
use crate::{client, paths};

/// The longest wait for a reply.
const PATIENCE: Duration = Duration::from_secs(10);

/// The daemon as this user meets it.
#[derive(Debug, Default)]
pub(super) struct Service {
    pub(super) checks: Vec<Check>,
    /// Its socket, if one is known.
    pub(super) socket: Option<PathBuf>,
    /// Whether root's daemon serves, which lends its rights.
    pub(super) is_roots: bool,
    /// Its counters, as far as this user sees them.
    pub(super) status: Option<Status>,
    /// Whether it refuses this user its counters.
    pub(super) refuses: bool,
    /// Whether it knows processes by other numbers.
    pub(super) has_other_numbers: bool,
    /// The command that changes its policy; empty without a daemon.
    pub(super) change_policy: String,
}

impl Service {
    /// The daemon at the socket asked for, or at the usual one.
    pub(super) fn at(asked: Option<&Path>) -> Self {
        let mut service = Self::default();
        match paths::served(asked) {
            Ok(socket) => {
                service.meet(&socket);
                service.socket = Some(socket);
            }
            Err(error) => service.checks.push(
                Check::warn("daemon", format!("{error:#}"), ALONE)
                    .fix("pageone doctor --socket /run/pageone.sock"),
            ),
        }
        service
    }

    fn meet(&mut self, socket: &Path) {
        let connection = match sys::socket::connect(socket) {
            Ok(connection) => connection,
            Err(errno) => return self.checks.push(absent(socket, errno)),
        };
        let own = rustix::process::geteuid().as_raw();
        let peer = sys::socket::peer(&connection).ok();
        let pid = peer.as_ref().map(|peer| peer.pid);
        let shares = pid.and_then(sys::process::shares_numbers);
        self.has_other_numbers = shares == Some(false);
        let pid = pid.filter(|&pid| pid > 0);
        let peer = peer.map_or(u32::MAX, |peer| peer.uid);
        self.is_roots = peer == 0;
        drop(connection);
        let restart = || paths::order(Order::Restart, socket, pid);
        if peer != 0 && peer != own {
            let what = format!("the daemon at {} is of user {peer}", socket.display());
            let why = "agents trust root's daemon, or their own user's";
            self.checks
                .push(Check::fail("daemon", what, why).fix(paths::daemon_of_root()));
            return;
        }
        // A daemon that hangs is asked once.
        let request = Request::Domain(String::new());
        let domain_of = match client::ask(socket, &request, PATIENCE) {
            Ok(reply) => reply,
            Err(error) => return self.checks.push(mute(&error).fix(restart())),
        };
        match status::ask(socket) {
            Ok(status) => {
                self.checks.push(version(socket, &status.version, restart));
                self.checks.push(mode(status.knobs.run));
                self.status = Some(status);
            }
            Err(error) => match error.downcast_ref() {
                Some(status::Refused(why)) => {
                    self.refuses = true;
                    self.checks.push(refused(why));
                }
                None => self.checks.push(mute(&error).fix(restart())),
            },
        }
        let reload = paths::order(Order::Reload, socket, pid);
        self.change_policy = format!("{} && {reload}", edit_policy(pid));
        let domain = domain(domain_of, restart, &self.change_policy);
        self.checks.push(domain);
    }
}

/// A daemon that serves, and tells this user nothing.
fn refused(why: &str) -> Check {
    let what = format!("it refuses its status: {why}");
    let matters = "its policy or its limits keep this user from seeing which guests there are";
    Check::warn("daemon", what, matters).fix("sudo pageone doctor")
}

/// A daemon that listens and does not answer, or not as it should.
fn mute(error: &anyhow::Error) -> Check {
    let why = match error.is::<client::Silent>() {
        true => "it hangs, is stopped or is very busy",
        false => "it breaks off, or speaks as this program does not: it is of another version",
    };
    Check::fail("daemon", format!("{error:#}"), why)
}

const ALONE: &str =
    "`pageone run` has an engine of its own then, and runs share nothing with each other";

fn absent(socket: &Path, errno: Errno) -> Check {
    let what = client::absent(socket, errno).to_string();
    let command = paths::daemon_at(socket);
    match errno {
        Errno::NOENT => Check::warn("daemon", what, ALONE).fix(command),
        Errno::CONNREFUSED if is_socket(socket) => Check::warn("daemon", what, ALONE).fix(command),
        Errno::ACCESS | Errno::PERM => {
            let why = "another user's daemon serves that user alone";
            Check::fail("daemon", what, why).fix("pageone doctor --socket /run/pageone.sock")
        }
        _ => Check::fail("daemon", what, "no daemon can be reached there")
            .fix(format!("ls -l {}", paths::quoted(socket))),
    }
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

fn version(socket: &Path, version: &str, restart: impl Fn() -> String) -> Check {
    let own = env!("CARGO_PKG_VERSION");
    match version == own {
        true => Check::ok(
            "daemon",
            format!("version {version} at {}", socket.display()),
        ),
        false => {
            let theirs = if version.is_empty() {
                "an older one"
            } else {
                version
            };
            let what = format!("it has version {theirs}, and this program {own}");
            let why = "one of them was upgraded without the other";
            Check::warn("daemon", what, why).fix(restart())
        }
    }
}

fn mode(run: RunMode) -> Check {
    let why = "the daemon was told so, and merges nothing new";
    match run {
        RunMode::Run => Check::ok("run", "it merges"),
        RunMode::Stop => {
            Check::warn("run", "merging is stopped (run=0)", why).fix("pageone set run=1")
        }
        RunMode::Unmerge => {
            Check::warn("run", "all is unmerged (run=2)", why).fix("pageone set run=1")
        }
    }
}

pub(super) const POLICY_SAYS: &str = "the policy of the daemon says so";

/// The command that opens the policy of the daemon `pid`, as its command line and its configuration name it.
fn edit_policy(pid: Option<u32>) -> String {
    let of = |name: &str| PathBuf::from(format!("/proc/{}/{name}", pid.unwrap_or(0)));
    let line = pid.and_then(|pid| sys::title::command_line(pid).ok());
    let line = line.unwrap_or_default();
    let words: Vec<_> = line.split(|&byte| byte == 0).collect();
    let folder = std::fs::read_link(of("cwd")).unwrap_or_default();
    let [config, policy] =
        ["--config", "--policy"].map(|name| Some(folder.join(flag(&words, name)?)));
    let file = crate::daemon::policy_of(config, policy);
    format!("sudoedit {}", paths::quoted(&file))
}

/// The file that a flag names on a command line.
fn flag(words: &[&[u8]], name: &str) -> Option<PathBuf> {
    let file = |word: &[u8]| PathBuf::from(OsStr::from_bytes(word));
    let given = |(at, word): (usize, &&[u8])| match word.strip_prefix(name.as_bytes())? {
        [] => words.get(at + 1).map(|next| file(next)),
        [b'=', rest @ ..] => Some(file(rest)),
        _ => None,
    };
    words.iter().enumerate().find_map(given)
}

/// The domain of this user, in this cgroup.
fn domain(reply: Reply, restart: impl Fn() -> String, change_policy: &str) -> Check {
    match reply {
        Reply::Domain(domain) => Check::ok(
            "domain",
            format!("what this user starts here is in `{domain}`"),
        ),
        Reply::DomainOfAny(domain) => Check::ok(
            "domain",
            format!("what this user starts here is in `{domain}`, with all its memory"),
        ),
        Reply::Refused(why) => Check::fail("domain", why, POLICY_SAYS).fix(change_policy),
        _ => Check::fail(
            "domain",
            client::UNEXPECTED,
            "what starts here may be no guest",
        )
        .fix(restart()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_names_its_file_in_both_ways() {
        let named = |line: &str| {
            flag(
                &line.split(' ').map(str::as_bytes).collect::<Vec<_>>(),
                "--policy",
            )
        };
        for line in ["daemon --policy /a --config /b", "daemon --policy=/a"] {
            assert_eq!(named(line), Some("/a".into()), "{line}");
        }
        for line in ["daemon", "daemon --policy-x /a", "daemon --policy"] {
            assert_eq!(named(line), None, "{line}");
        }
    }
}
