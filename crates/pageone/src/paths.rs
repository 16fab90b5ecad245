//! Where things are: the daemon's socket, the agent's library; and by which command a daemon is started there.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sys::elf::{Kind, number};

/// The file name of the agent's library.
pub(crate) const AGENT: &str = "libpageone_agent.so";

/// The socket of root's daemon.
const OF_ROOT: &str = "/run/pageone.sock";

/// What the help of verbs says of [`served`].
pub(crate) const SERVED: &str = "The daemon's socket [default: $PAGEONE_SOCKET, else that of this user's daemon, else of root's]";

/// Where a daemon is asked: at the socket asked for, else at that of `PAGEONE_SOCKET`, by which guests find theirs. Without
/// either it is the user's own if there is one, else root's, which serves all users.
///
/// # Errors
/// As [`socket`].
pub(crate) fn served(asked: Option<&Path>) -> Result<PathBuf> {
    served_by(asked, env::var_os("PAGEONE_SOCKET"))
}

fn served_by(asked: Option<&Path>, named: Option<OsString>) -> Result<PathBuf> {
    let named = named.filter(|path| !path.is_empty()).map(PathBuf::from);
    let asked = asked.or(named.as_deref());
    let own = socket(asked);
    let has_own = own.as_ref().is_ok_and(|own| own.exists());
    match asked {
        None if !has_own && Path::new(OF_ROOT).exists() => Ok(PathBuf::from(OF_ROOT)),
        None if own.is_err() => bail!(
            "no daemon at {OF_ROOT}: start one with `{}`, or name another socket with --socket \
             (this user has none of his own: XDG_RUNTIME_DIR is not set)",
            daemon_of_root()
        ),
        _ => own,
    }
}

/// Where a daemon listens: at the socket asked for, else at root's or the user's own.
///
/// # Errors
/// A user without `XDG_RUNTIME_DIR` has no default.
pub(crate) fn socket(asked: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = asked {
        return Ok(path.to_owned());
    }
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from(OF_ROOT));
    }
    let folder = env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let folder = folder.context("XDG_RUNTIME_DIR is not set: name a socket with --socket")?;
    Ok(PathBuf::from(folder).join("pageone.sock"))
}

/// What a daemon is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Serve, from now on.
    Start,
    /// End, and begin anew.
    Restart,
    /// Read its policy again.
    Reload,
}

/// Where systemd looks for units.
const UNITS: [&str; 5] = [
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
];

/// Whether systemd runs here, and has the unit of root's daemon.
pub(crate) fn has_unit() -> bool {
    has_unit_below(Path::new("/"))
}

fn has_unit_below(root: &Path) -> bool {
    let has = |folder: &str| root.join(folder).join("pageone.service").exists();
    root.join("run/systemd/system").is_dir() && UNITS.into_iter().any(has)
}

/// The command by which the daemon at a socket does so; `pid` is the process that serves there, if one does.
pub(crate) fn order(order: Order, at: &Path, pid: Option<u32>) -> String {
    // Who has no daemon of his own is served by root's.
    let is_usual = || order == Order::Start && socket(None).is_ok_and(|usual| usual == at);
    match at == Path::new(OF_ROOT) || is_usual() {
        true => to_roots(order, pid, has_unit(), sudo()),
        false => by_hand(
            order,
            pid,
            if pid.is_some_and(is_others) {
                "sudo "
            } else {
                ""
            },
            format!("pageone daemon --socket {}", quoted(at)),
        ),
    }
}

/// Whether this user may send a process no signal.
fn is_others(pid: u32) -> bool {
    let own = rustix::process::geteuid();
    let user = sys::credentials::Credentials::of(pid, pid).map(|ids| ids.effective_user());
    !own.is_root() && user.map_or(true, |user| user != own.as_raw())
}

/// By what a command becomes root's. Root needs nothing, and a container often has no sudo.
fn sudo() -> &'static str {
    match rustix::process::geteuid().is_root() {
        true => "",
        false => "sudo ",
    }
}

fn to_roots(order: Order, pid: Option<u32>, has_unit: bool, sudo: &str) -> String {
    let word = match order {
        _ if !has_unit => return by_hand(order, pid, sudo, format!("{sudo}pageone daemon")),
        Order::Start => "enable --now",
        Order::Restart => "restart",
        Order::Reload => "reload",
    };
    format!("{sudo}systemctl {word} pageone")
}

fn by_hand(order: Order, pid: Option<u32>, sudo: &str, start: String) -> String {
    match (order, pid) {
        (Order::Restart, Some(pid)) => {
            format!("{sudo}kill {pid}  # its keeper starts it again; without one: {start}")
        }
        (Order::Reload, Some(pid)) => format!("{sudo}kill -HUP {pid}"),
        _ => start,
    }
}

/// The command that starts a daemon at a socket.
pub(crate) fn daemon_at(at: &Path) -> String {
    order(Order::Start, at, None)
}

/// The command that starts root's daemon.
pub(crate) fn daemon_of_root() -> String {
    daemon_at(Path::new(OF_ROOT))
}

/// A path as a shell takes it.
pub(crate) fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "/._-+@%:,".contains(char);
    match path.chars().all(is_plain) {
        true => path,
        false => format!("'{}'", path.replace('\'', r"'\''")),
    }
}

/// The agent's library, as an absolute path.
///
/// # Errors
/// It is in none of the places; the message names them.
pub(crate) fn agent() -> Result<PathBuf> {
    if let Some(path) = env::var_os("PAGEONE_AGENT") {
        let path = PathBuf::from(path);
        if !path.is_file() {
            bail!("PAGEONE_AGENT names {}, which is no file", path.display());
        }
        if !is_library(&path) {
            bail!(
                "PAGEONE_AGENT names {}, which is no shared library for this processor",
                path.display()
            );
        }
        return preloadable(path);
    }
    let exe = env::current_exe().context("cannot find out where this program is")?;
    let places = agent_places(exe.parent().unwrap_or(Path::new("/")));
    let Some(found) = places.iter().find(|place| place.is_file()) else {
        let places: Vec<_> = places.iter().map(|p| p.display().to_string()).collect();
        bail!(
            "the agent's library is in none of these places: {}. Build it with `cargo build \
             --workspace`, or name it in PAGEONE_AGENT",
            places.join(", ")
        );
    };
    preloadable(found.clone())
}

/// Whether the dynamic linker could load the file: it would leave out any other with a word on standard error, and the command would run
/// unmerged.
fn is_library(path: &Path) -> bool {
    const SHARED: u64 = 3;
    let Ok(file) = File::open(path) else {
        return false;
    };
    let read = |at, to: &mut [u8]| file.read_exact_at(to, at).is_ok();
    let mut header = [0; 18];
    read(0, &mut header)
        && matches!(Kind::of(read), Kind::Own(_))
        && number(&header, 16, 2) == Some(SHARED)
}

fn agent_places(folder: &Path) -> [PathBuf; 4] {
    [
        folder.join(AGENT),
        folder.join("deps").join(AGENT),
        folder.join("../lib/pageone").join(AGENT),
        Path::new("/usr/lib/pageone").join(AGENT),
    ]
}

/// The dynamic linker splits `LD_PRELOAD` at spaces and colons, and has no way to quote them.
fn preloadable(path: PathBuf) -> Result<PathBuf> {
    let path = path
        .canonicalize()
        .with_context(|| format!("cannot resolve {}", path.display()))?;
    match path.to_str() {
        Some(text) if !text.contains([' ', ':', '\t', '\n']) => Ok(path),
        _ => bail!(
            "{} cannot be preloaded: its path has a space or a colon in it",
            path.display()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_asked_socket_is_taken_as_it_is() {
        let asked = Path::new("/somewhere/x.sock");
        assert_eq!(socket(Some(asked)).unwrap(), asked);
        let named = || Some(OsString::from("/named.sock"));
        assert_eq!(served_by(Some(asked), named()).unwrap(), asked);
        assert_eq!(served_by(None, named()).unwrap(), Path::new("/named.sock"));
        let empty = served_by(None, Some(OsString::new())).ok();
        assert_eq!(empty, served_by(None, None).ok());
    }

    #[test]
    fn systemd_is_named_where_it_runs_and_has_the_unit() {
        let root = tempfile::tempdir().unwrap();
        let has = || has_unit_below(root.path());
        let make = |path: &str| std::fs::create_dir_all(root.path().join(path)).unwrap();
        make("usr/lib/systemd/system");
        let unit = root.path().join("usr/lib/systemd/system/pageone.service");
        std::fs::write(&unit, "").unwrap();
        assert!(!has(), "systemd does not run");
        make("run/systemd/system");
        assert!(has());
        std::fs::remove_file(&unit).unwrap();
        assert!(!has(), "there is no unit");
    }

    #[test]
    fn a_daemon_is_told_by_its_unit_or_by_hand() {
        let orders = [Order::Start, Order::Restart, Order::Reload];
        let by_unit = orders.map(|order| to_roots(order, Some(7), true, "sudo "));
        assert_eq!(
            by_unit,
            [
                "sudo systemctl enable --now pageone",
                "sudo systemctl restart pageone",
                "sudo systemctl reload pageone"
            ]
        );
        let by_hand = orders.map(|order| to_roots(order, Some(7), false, "sudo "));
        assert_eq!(by_hand[0], "sudo pageone daemon");
        assert!(by_hand[1].starts_with("sudo kill 7  # "), "{by_hand:?}");
        assert_eq!(by_hand[2], "sudo kill -HUP 7");
        let start = |sudo| to_roots(Order::Restart, None, false, sudo);
        assert_eq!(start("sudo "), "sudo pageone daemon");
        assert_eq!(start(""), "pageone daemon");
        let of_root = [true, false].map(|unit| to_roots(Order::Reload, Some(7), unit, ""));
        assert_eq!(of_root, ["systemctl reload pageone", "kill -HUP 7"]);
        let is_root = rustix::process::geteuid().is_root();
        assert_eq!(daemon_of_root().starts_with("sudo "), !is_root);
        let at = Path::new("/a b/s.sock");
        assert_eq!(daemon_at(at), "pageone daemon --socket '/a b/s.sock'");
        let own = std::process::id();
        assert_eq!(
            order(Order::Reload, at, Some(own)),
            format!("kill -HUP {own}")
        );
    }

    #[test]
    fn paths_the_linker_would_split_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let bad = folder.path().join("a b.so");
        std::fs::write(&bad, "").unwrap();
        assert!(preloadable(bad).is_err());
        let good = folder.path().join("a.so");
        std::fs::write(&good, "").unwrap();
        assert!(preloadable(good).unwrap().is_absolute());
    }
}
