//! Where things are: the daemon's socket, the agent's library.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sys::elf::{Kind, number};

/// The file name of the agent's library.
const AGENT: &str = "libpageone_agent.so";

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
            "no daemon at {OF_ROOT}: have root start `pageone daemon`, or name another socket with --socket \
             (this user has none of his own: XDG_RUNTIME_DIR is not set)"
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

/// The command that starts a daemon at a socket.
pub(crate) fn daemon_at(at: &Path) -> String {
    if socket(None).is_ok_and(|usual| usual == at) {
        return "pageone daemon".to_owned();
    }
    match at == Path::new(OF_ROOT) {
        true => "sudo pageone daemon".to_owned(),
        false => format!("pageone daemon --socket {}", quoted(at)),
    }
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
