//! Who says which trust domain a process would have.
//!
//! ```text
//! --policy FILE         that file
//! a daemon serves here  its word on each process
//! else                  the file that a daemon would read if it were started here
//! none                  a domain for each user
//! ```
//!
//! All domains of an answer are by one of these, and the answer says by which. So a daemon that fails in the middle counts as none.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;
use sys::foreign::ForeignName;
use wire::Reply;

use crate::policy::{self, Policy};
use crate::{client, daemon, paths};

/// Columns of an engine's name.
const WIDTH: usize = 40;

/// By what the domains are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "from", content = "path", rename_all = "snake_case")]
pub(crate) enum Origin {
    /// The policy of the daemon at this socket.
    Daemon(ForeignName),
    /// This file.
    File(ForeignName),
    /// No rules: each user is a domain.
    Users,
    /// Dumps: all are in one domain.
    Dumps,
}

impl Origin {
    /// PageONE with these domains, as an engine's name.
    pub(crate) fn engine(&self) -> String {
        match self {
            Self::Daemon(_) => "PageONE, the daemon's domains".to_owned(),
            Self::File(path) => by_file(path),
            Self::Users => "PageONE, a domain for each user".to_owned(),
            Self::Dumps => "PageONE, all dumps in one domain".to_owned(),
        }
    }
}

/// The end of a path tells more than its beginning.
fn by_file(path: &ForeignName) -> String {
    const HEAD: &str = "PageONE, by ";
    let path = path.to_string();
    let (room, len) = (WIDTH - HEAD.len(), path.chars().count());
    match len <= room {
        true => format!("{HEAD}{path}"),
        false => {
            let end = path.chars().skip(len + 1 - room);
            HEAD.chars().chain(['…']).chain(end).collect()
        }
    }
}

/// What the rules say of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ruling {
    /// It is gone, or this user is not told.
    #[default]
    Unknown,
    /// It may be no guest.
    Refused,
    Domain(ForeignName),
}

impl Ruling {
    pub(crate) fn domain(&self) -> Option<&ForeignName> {
        match self {
            Self::Domain(name) => Some(name),
            Self::Unknown | Self::Refused => None,
        }
    }
}

/// As JSON the name, or none.
impl Serialize for Ruling {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.domain().serialize(to)
    }
}

impl fmt::Display for Ruling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("-"),
            Self::Refused => f.write_str("refused"),
            Self::Domain(name) => name.fmt(f),
        }
    }
}

/// The domains of processes.
pub(crate) enum Rules {
    /// By the daemon at this socket. It does not tell this user of those that are not here.
    Told(PathBuf, BTreeMap<u32, Ruling>),
    /// By a policy, and its file if it has one.
    Read(Policy, Option<PathBuf>),
}

impl Rules {
    /// A file that was asked for.
    ///
    /// # Errors
    /// It cannot be read or understood.
    pub(crate) fn of_file(path: &Path) -> Result<Self> {
        Ok(Self::Read(Policy::read(path)?, Some(path.to_owned())))
    }

    /// Those in force here, for these processes.
    ///
    /// # Errors
    /// No daemon tells, and the file that it would read has a mistake.
    pub(crate) fn in_force(pids: &[u32]) -> Result<Self> {
        let socket = paths::served(None).ok();
        let told = socket.and_then(|socket| Some((told(&socket, pids)?, socket)));
        if let Some((domains, socket)) = told {
            return Ok(Self::Told(socket, domains));
        }
        match daemon::default_policy()? {
            Some(path) => Self::of_file(&path),
            None => Ok(Self::Read(Policy::here(), None)),
        }
    }

    /// The domain of a process that asks for no name.
    pub(crate) fn domain(&self, pid: u32) -> Ruling {
        match self {
            Self::Told(_, domains) => domains.get(&pid).cloned().unwrap_or_default(),
            Self::Read(policy, _) => match policy::who(pid) {
                Ok(who) => policy
                    .domain(&who, "")
                    .map_or(Ruling::Refused, |domain| Ruling::Domain(domain.into())),
                Err(_) => Ruling::Unknown,
            },
        }
    }

    /// By what these are.
    pub(crate) fn origin(&self) -> Origin {
        let name = |path: &Path| ForeignName::from(path.display().to_string());
        match self {
            Self::Told(socket, _) => Origin::Daemon(name(socket)),
            Self::Read(_, Some(file)) => Origin::File(name(file)),
            Self::Read(_, None) => Origin::Users,
        }
    }
}

/// The domains that the daemon gives these processes. None where none listens, it fails, or it knows none of them: it may count
/// processes by other numbers.
fn told(socket: &Path, pids: &[u32]) -> Option<BTreeMap<u32, Ruling>> {
    let mut domains = BTreeMap::new();
    for &pid in pids {
        // One that is gone has no domain.
        let Ok(began) = sys::usage::began(pid) else {
            continue;
        };
        match client::domain_of(socket, pid, began, "") {
            Ok(Reply::Domain(domain) | Reply::DomainOfAny(domain)) => {
                domains.insert(pid, Ruling::Domain(domain.into()));
            }
            Ok(Reply::Refused(_)) => {
                domains.insert(pid, Ruling::Refused);
            }
            Ok(Reply::Unseen) => {}
            Ok(_) | Err(_) => return None,
        }
    }
    (!domains.is_empty()).then_some(domains)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_named_by_what_its_domains_are_by() {
        let by = |path: &str| Origin::File(path.into()).engine();
        assert_eq!(
            by("/etc/pageone/policy.toml"),
            "PageONE, by /etc/pageone/policy.toml"
        );
        assert_eq!(by(&"x".repeat(28)).chars().count(), WIDTH);
        let long = by(&format!("/a\x1b/{}/policy.toml", "x".repeat(99)));
        assert_eq!(long.chars().count(), WIDTH);
        assert!(long.starts_with("PageONE, by …x"), "{long}");
        assert!(long.ends_with("x/policy.toml"), "{long}");
    }

    #[test]
    fn where_nobody_listens_nothing_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        assert_eq!(told(&socket, &[std::process::id()]), None);
    }
}
