//! Who may connect, in which trust domain its pages are shared, who may see all guests, and who may turn knobs.
//!
//! The domain comes from what the kernel says of the peer (user, group, cgroup), never from the
//! peer's word. Without a policy file, and for those whom its default gives a domain, each user is one; a name that
//! a guest asks for only splits the domain of its own user. A file has rules, and the first that *fits* decides:
//!
//! ```text
//!  peer (uid, gid, cgroup) + name asked for ──▶ rule 1 ─ no ─▶ rule 2 ─ no ─▶ … ─▶ default
//!                                                 │ fits: all its conditions hold, and it says
//!                                                 ▼ something for that name (or for no name)
//!                                               a domain, or a refusal
//! ```
//!
//! A domain by cgroup is one user's, unless the rule says whose it is: in a container root and a service without rights are neighbours.
//!
//! No two grants make the same text for different domains. `uid:7`, `uid:7/NAME`, `gid:7`, `gid:7/NAME`,
//! `cgroup:NUMBER/PATH`, `cgroup:NUMBER:7/PATH` and `name:NAME` differ in the part before the first colon. Only numbers stand
//! before a slash, one or two of them. Only `name:` is shared by several rules, on purpose.

mod file;
mod ids;
mod names;
mod pattern;

use std::fmt;
use std::path::Path;

pub use file::PolicyError;
pub(crate) use ids::Ids;
pub(crate) use names::{Names, Whose, numbers};
pub(crate) use pattern::Pattern;
use sys::credentials::Credentials;
use sys::foreign::Foreign;
pub use sys::process::Cgroup;

/// What the kernel says of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// Effective user id when it connected.
    pub uid: u32,
    /// Effective group id when it connected.
    pub gid: u32,
    /// Its cgroup; `None` when it was not looked up, or cannot be known.
    pub cgroup: Option<Cgroup>,
    /// It has its user's number, and not his rights: see [`sys::confined`].
    pub confined: bool,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "user {} (group {}", self.uid, self.gid)?;
        match &self.cgroup {
            Some(cgroup) => write!(f, ", cgroup `{}`)", cgroup.path),
            None => write!(f, ")"),
        }
    }
}

/// What the kernel says of a process, as it would of a peer.
///
/// # Errors
/// The process is gone.
pub(crate) fn who(pid: u32) -> anyhow::Result<Who> {
    Ok(Who::with(pid, &Credentials::of(pid, pid)?))
}

impl Who {
    /// The process that has these credentials.
    pub(crate) fn with(pid: u32, its: &Credentials) -> Self {
        Self {
            uid: its.effective_user(),
            gid: its.effective_group(),
            cgroup: sys::process::cgroup(pid).ok(),
            confined: false,
        }
    }
}

/// Why a peer may not be a guest, or not in the domain it asks for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A user's daemon has no right to the memory of others.
    #[error("this daemon serves user {own} only, not {who}")]
    OtherUser {
        /// The daemon's user.
        own: u32,
        /// The peer.
        who: Who,
    },
    /// A rule says so.
    #[error("rule {rule} of the policy refuses {who}")]
    Rule {
        /// The rule's number, from 1.
        rule: usize,
        /// The peer.
        who: Who,
    },
    /// A name that no rule gives to this peer.
    #[error("no rule of the policy gives the domain `{}` to {who}", Foreign(name))]
    Name {
        /// The name.
        name: String,
        /// The peer.
        who: Who,
    },
    /// No rule fits, and the default is to refuse.
    #[error("no rule of the policy is for {who}")]
    Nobody {
        /// The peer.
        who: Who,
    },
    /// Its rules give only names, and it asks for none.
    #[error(
        "the policy's rules for {who} give only names: ask for one by `--domain` (or PAGEONE_DOMAIN)"
    )]
    OnlyNames {
        /// The peer.
        who: Who,
    },
    /// The policy asks for cgroups, and this one cannot be known.
    #[error("the policy asks for cgroups, and that of {who} cannot be known")]
    NoCgroup {
        /// The peer.
        who: Who,
    },
}

/// What a command adds to the reason why a process is refused: the way to the policy, where that refuses it.
pub(crate) fn file_of(why: &str) -> &'static str {
    match why.contains("the policy") {
        true => " (`pageone doctor` names the file)",
        false => "",
    }
}

/// Who is meant: all conditions that are given hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Peers {
    uid: Option<Ids>,
    gid: Option<Ids>,
    cgroup: Option<Vec<Pattern>>,
}

impl Peers {
    fn fit(&self, who: &Who) -> bool {
        let in_cgroup = |patterns: &Vec<Pattern>| {
            let cgroup = who.cgroup.as_ref();
            cgroup.is_some_and(|cgroup| patterns.iter().any(|p| p.matches(cgroup.path.raw())))
        };
        self.uid.as_ref().is_none_or(|ids| ids.contains(who.uid))
            && self.gid.as_ref().is_none_or(|ids| ids.contains(who.gid))
            && self.cgroup.as_ref().is_none_or(in_cgroup)
    }

    /// Whether they are given a right. A confined one has a number that anyone in its container may take: a control group has to fit, too.
    fn have(&self, who: &Who) -> bool {
        self.fit(who) && (!who.confined || self.cgroup.is_some())
    }

    /// Whether every process that `other` means is surely meant by `self`.
    fn cover(&self, other: &Self) -> bool {
        let ids = |ours: &Option<Ids>, theirs: &Option<Ids>| match (ours, theirs) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(ours), Some(theirs)) => ours.covers(theirs),
        };
        let cgroups = match (&self.cgroup, &other.cgroup) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(ours), Some(theirs)) => theirs
                .iter()
                .all(|theirs| ours.iter().any(|ours| ours.covers(theirs))),
        };
        ids(&self.uid, &other.uid) && ids(&self.gid, &other.gid) && cgroups
    }
}

/// The domain of a guest that asks for no name.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Grant {
    /// One a user.
    User,
    /// One a group.
    Group,
    /// One a user and cgroup.
    Cgroup,
    /// One a cgroup, for all users of the rule.
    WholeCgroup,
    /// This one for all.
    Named(String),
}

impl Grant {
    fn domain(&self, who: &Who) -> Option<String> {
        match self {
            Self::User => Some(format!("uid:{}", who.uid)),
            Self::Group => Some(format!("gid:{}", who.gid)),
            // The number too: a cgroup that is made again at this path is another.
            Self::Cgroup => {
                let cgroup = who.cgroup.as_ref()?;
                let (id, uid, path) = (cgroup.id, who.uid, cgroup.path.raw());
                Some(format!("cgroup:{id}:{uid}{path}"))
            }
            Self::WholeCgroup => {
                let cgroup = who.cgroup.as_ref()?;
                Some(format!("cgroup:{}{}", cgroup.id, cgroup.path.raw()))
            }
            Self::Named(name) => Some(format!("name:{name}")),
        }
    }
}

/// The part of a domain that a name splits off; all of it without a name.
fn split_by(domain: String, name: &str) -> String {
    match name {
        "" => domain,
        name => format!("{domain}/{name}"),
    }
}

/// What a rule says to those it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Says {
    Refuse,
    Give {
        /// Without a name asked for.
        grant: Option<Grant>,
        /// Names that may be claimed: each is one domain for all who claim it.
        names: Vec<String>,
        /// Whether any other name splits the grant.
        split: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    peers: Peers,
    says: Says,
    /// Whether all memory of programs under `pageone run` is offered.
    any: bool,
}

impl Rule {
    /// Whether it gives a domain of this name to those it is for.
    fn gives(&self, name: &str) -> bool {
        match &self.says {
            Says::Refuse => false,
            Says::Give { grant, names, .. } => {
                *grant == Some(Grant::Named(name.to_owned())) || names.iter().any(|n| n == name)
            }
        }
    }

    /// What the rule says to `who` asking for `name`: nothing, a refusal, or a domain.
    fn decide(&self, who: &Who, name: &str) -> Option<Result<String, ()>> {
        if !self.peers.fit(who) {
            return None;
        }
        let Says::Give {
            grant,
            names,
            split,
        } = &self.says
        else {
            return Some(Err(()));
        };
        let own = || grant.as_ref().and_then(|grant| grant.domain(who));
        match name {
            "" => own().map(Ok),
            name if names.iter().any(|given| given == name) => Some(Ok(format!("name:{name}"))),
            name if *split => own().map(|domain| Ok(split_by(domain, name))),
            _ => None,
        }
    }
}

/// Which process gets which domain, which may see all users' guests, and which may turn knobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The daemon's own user id.
    own: u32,
    rules: Vec<Rule>,
    /// Whether a peer that no rule fits has its user's domain.
    default_uid: bool,
    /// Who may see what all guests have, besides root and the daemon's user.
    monitor: Option<Peers>,
    /// Who may turn knobs, besides these.
    control: Option<Peers>,
}

impl Policy {
    /// The policy without a file, of a daemon that runs as this process does: one domain a user.
    #[must_use]
    pub fn here() -> Self {
        Self::without_file(rustix::process::geteuid().as_raw())
    }

    fn without_file(own: u32) -> Self {
        let says = Says::Give {
            grant: Some(Grant::User),
            names: vec![],
            split: true,
        };
        let peers = Peers::default();
        Self {
            own,
            rules: vec![Rule {
                peers,
                says,
                any: false,
            }],
            default_uid: false,
            monitor: None,
            control: None,
        }
    }

    /// Reads a policy file for a daemon that runs as this process does.
    ///
    /// # Errors
    /// The file cannot be read, or says something that is not understood: which rule and line.
    pub fn read(path: &Path) -> Result<Self, PolicyError> {
        let named = |what: String| PolicyError::new(format!("the policy {}", path.display()), what);
        let text = std::fs::read_to_string(path)
            .map_err(|error| named(format!("it cannot be read: {error}")))?;
        let own = rustix::process::geteuid().as_raw();
        Self::parse(&text, own).map_err(|error| named(error.to_string()))
    }

    /// Reads the text of a policy file, for a daemon of user `own`.
    ///
    /// # Errors
    /// It says something that is not understood: which rule and line.
    pub fn parse(text: &str, own: u32) -> Result<Self, PolicyError> {
        file::parse(text, own)
    }

    /// Permissions of the socket: root serves all users, others only themselves (they have no
    /// right to other users' memory anyway).
    #[must_use]
    pub fn socket_mode(&self) -> u32 {
        if self.own == 0 { 0o666 } else { 0o600 }
    }

    /// Whether the peer's cgroup counts, so that it must be looked up.
    #[must_use]
    pub fn asks_for_cgroups(&self) -> bool {
        self.rules.iter().any(|rule| {
            let by_cgroup =
                |grant: &Option<Grant>| matches!(grant, Some(Grant::Cgroup | Grant::WholeCgroup));
            let gives = matches!(&rule.says, Says::Give { grant, .. } if by_cgroup(grant));
            rule.peers.cgroup.is_some() || gives
        })
    }

    /// Whether a peer's cgroup is to be looked at: by rules, or for its rights.
    #[must_use]
    pub fn looks_at_cgroups(&self) -> bool {
        let has_some = |peers: &Peers| peers.cgroup.is_some();
        self.asks_for_cgroups() || self.rights().any(has_some)
    }

    /// Whether a right is for such a peer, unless it is confined.
    #[must_use]
    pub fn names(&self, who: &Who) -> bool {
        self.rights().any(|peers| peers.fit(who))
    }

    fn rights(&self) -> impl Iterator<Item = &Peers> {
        [&self.monitor, &self.control].into_iter().flatten()
    }

    /// The domain of a guest that asks for `name` (empty: for none).
    ///
    /// # Errors
    /// It may not be a guest here, or not in that domain: why.
    pub fn domain(&self, who: &Who, name: &str) -> Result<String, Refusal> {
        let who = who.clone();
        if self.own != 0 && who.uid != self.own {
            let own = self.own;
            return Err(Refusal::OtherUser { own, who });
        }
        // Without the cgroup, a rule that refuses it would be passed over.
        if self.asks_for_cgroups() && who.cgroup.is_none() {
            return Err(Refusal::NoCgroup { who });
        }
        let rules = self.rules.iter().zip(1..);
        let mut said = rules.filter_map(|(rule, n)| Some((rule.decide(&who, name)?, n)));
        match said.next() {
            Some((Ok(domain), _)) => Ok(domain),
            Some((Err(()), rule)) => Err(Refusal::Rule { rule, who }),
            // A name splits what its user has by default, as without a file; not a name that rules give, nor for those who have a rule.
            None if self.default_uid && (name.is_empty() || self.leaves(&who, name)) => {
                Ok(split_by(format!("uid:{}", who.uid), name))
            }
            None if !name.is_empty() => {
                let name = name.to_owned();
                Err(Refusal::Name { name, who })
            }
            None if self.rules.iter().any(|rule| rule.peers.fit(&who)) => {
                Err(Refusal::OnlyNames { who })
            }
            None => Err(Refusal::Nobody { who }),
        }
    }

    /// Whether no rule is for `who`, and none gives the name.
    fn leaves(&self, who: &Who, name: &str) -> bool {
        let concerns = |rule: &Rule| rule.peers.fit(who) || rule.gives(name);
        !self.rules.iter().any(concerns)
    }

    /// Whether the rule that gives `who` its domain has all memory offered of the programs that `pageone run` starts.
    #[must_use]
    pub fn offers_any(&self, who: &Who, name: &str) -> bool {
        let mut rules = self.rules.iter();
        let deciding = rules.find(|rule| rule.decide(who, name).is_some());
        deciding.is_some_and(|rule| rule.any) && self.domain(who, name).is_ok()
    }

    /// Whether a user is root, or the one that the daemon runs as: these could do to the daemon whatever they like.
    #[must_use]
    pub fn is_master(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own
    }

    /// Whether a peer is a master, and no container's root, who has a master's number alone.
    #[must_use]
    pub fn is_free_master(&self, who: &Who) -> bool {
        self.is_master(who.uid) && !who.confined
    }

    /// Whether a peer may see the counters of all users' guests. Others see those of their own.
    #[must_use]
    pub fn may_monitor(&self, who: &Who) -> bool {
        let named = self.monitor.as_ref().is_some_and(|peers| peers.have(who));
        self.is_free_master(who) || named
    }

    /// Whether a peer may turn the knobs. That is no right to see anything.
    #[must_use]
    pub fn may_control(&self, who: &Who) -> bool {
        let named = self.control.as_ref().is_some_and(|peers| peers.have(who));
        self.is_free_master(who) || named
    }
}

#[cfg(test)]
mod tests;
