//! Which processes are meant: conditions on a process, on the command line (`--match`) and in the configuration
//! (`[[attach]]`).
//!
//! ```text
//!   command=redis-server,uid=1000-1999        all conditions must hold
//!   --match A --match B                       one of them is enough
//! ```
//!
//! A selector says which processes are meant, and nothing of trust: a program chooses its own name. The domain of a guest comes
//! from its user and cgroup, by the policy.

use std::fs;
use std::io::{self, ErrorKind};
use std::str::FromStr;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _};
use sys::credentials::Credentials;
use sys::subject::Subject;

use crate::policy::{Ids, Names, Pattern, Whose, numbers as ids};

/// Bytes of a command's name (`TASK_COMM_LEN` less one).
const MOST_OF_COMMAND: usize = 15;

const ALL_KEYS: [&str; 8] = [
    "command",
    "executable",
    "user",
    "uid",
    "group",
    "gid",
    "cgroup",
    "unit",
];
/// The keys, for messages.
const KEYS: &str = "command, executable, user, uid, group, gid, cgroup and unit";

/// One or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "a text, or a list of texts")]
enum Texts {
    One(String),
    Many(Vec<String>),
}

/// Conditions as they are written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    command: Option<Texts>,
    executable: Option<Texts>,
    user: Option<Names>,
    uid: Option<Ids>,
    group: Option<Names>,
    gid: Option<Ids>,
    cgroup: Option<Texts>,
    unit: Option<Texts>,
}

/// Conditions that are read one by one, as a file has them.
#[derive(Default)]
pub(crate) struct Conditions(toml::Table);

impl Conditions {
    /// Reads the value of a key; `others` are keys that may stand beside those of conditions.
    pub(crate) fn at<'a>(&'a mut self, key: &'a str, others: &'static str) -> Condition<'a> {
        let to = &mut self.0;
        Condition { key, others, to }
    }

    /// What they mean together.
    ///
    /// # Errors
    /// They mean no process, or exclude each other.
    pub(crate) fn selector(self) -> Result<Selector, String> {
        read_table(self.0)
    }
}

/// Reads the value of a key.
pub(crate) struct Condition<'a> {
    key: &'a str,
    others: &'static str,
    to: &'a mut toml::Table,
}

impl<'de> DeserializeSeed<'de> for Condition<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        let Self { key, others, to } = self;
        if !ALL_KEYS.contains(&key) {
            let of_file = crate::knobs::above_tables(key);
            let why =
                format!("there is no key `{key}`{of_file}: the keys are {KEYS}, and {others}");
            return Err(D::Error::custom(why));
        }
        let value = toml::Value::deserialize(from)?;
        // Alone first: what is wrong with it stands in its line.
        let alone = toml::Table::from_iter([(key.to_owned(), value.clone())]);
        read_table(alone).map_err(D::Error::custom)?;
        to.insert(key.to_owned(), value);
        Ok(())
    }
}

fn read_table(table: toml::Table) -> Result<Selector, String> {
    table
        .try_into()
        .map_err(|error: toml::de::Error| error.message().to_owned())
}

/// Conditions on a process. All that are given must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Words")]
pub(crate) struct Selector {
    command: Option<Vec<Pattern>>,
    executable: Option<Vec<Pattern>>,
    uid: Option<Ids>,
    gid: Option<Ids>,
    cgroup: Option<Vec<Pattern>>,
    unit: Option<Vec<Pattern>>,
}

impl Selector {
    /// Whether the process is meant. One that is gone is not.
    pub(crate) fn fits(&self, pid: u32) -> bool {
        let name = || format!("/{}", sys::process::comm(pid).raw());
        self.users_fit(pid)
            && one_fits(self.command.as_ref(), || Some(name()))
            && one_fits(self.executable.as_ref(), || executable(pid))
            && self.groups_fit(pid)
    }

    fn users_fit(&self, pid: u32) -> bool {
        if self.uid.is_none() && self.gid.is_none() {
            return true;
        }
        let fit = |ids: &Option<Ids>, id: u32| ids.as_ref().is_none_or(|ids| ids.contains(id));
        Credentials::of(pid, pid).is_ok_and(|its| {
            fit(&self.uid, its.effective_user()) && fit(&self.gid, its.effective_group())
        })
    }

    fn groups_fit(&self, pid: u32) -> bool {
        if self.cgroup.is_none() && self.unit.is_none() {
            return true;
        }
        sys::process::cgroup_path(pid).is_ok_and(|path| {
            let mut names = path.split('/').filter(|name| !name.is_empty());
            let in_unit = |name: &str| one_fits(self.unit.as_ref(), || Some(format!("/{name}")));
            one_fits(self.cgroup.as_ref(), || Some(path.clone()))
                // A slice holds the units below it.
                && (self.unit.is_none() || names.any(in_unit))
        })
    }
}

/// Why conditions on cgroups fit no process on this machine, if any are given and it is so.
pub(crate) fn blind<'a>(mut selectors: impl Iterator<Item = &'a Selector>) -> Option<io::Error> {
    let asked = selectors.any(|its| its.cgroup.is_some() || its.unit.is_some());
    let own = asked.then(|| sys::process::cgroup_path(std::process::id()));
    own?.err()
}

/// Whether one of the patterns fits a path, or there are none to fit.
fn one_fits(patterns: Option<&Vec<Pattern>>, path: impl FnOnce() -> Option<String>) -> bool {
    patterns.is_none_or(|patterns| {
        let path = path();
        path.is_some_and(|path| patterns.iter().any(|pattern| pattern.matches(&path)))
    })
}

/// The file that a process executes, also one that was replaced meanwhile; none for a thread of the kernel.
fn executable(pid: u32) -> Option<String> {
    let path = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    let path = path.to_str()?;
    Some(path.strip_suffix(" (deleted)").unwrap_or(path).to_owned())
}

/// The processes that one of the selectors means, in ascending order, without this one, the threads of the kernel, and those whose
/// program this user may not see.
///
/// # Errors
/// /proc cannot be read.
pub(crate) fn find(selectors: &[Selector]) -> Result<Vec<u32>> {
    let meant = |pid: u32| selectors.iter().any(|selector| selector.fits(pid));
    let others = numbers()?.filter(|&pid| pid != std::process::id() && is_program(pid));
    let mut found: Vec<_> = others.filter(|&pid| meant(pid)).collect();
    found.sort_unstable();
    Ok(found)
}

/// The numbers of all processes, of the kernel's threads too.
///
/// # Errors
/// /proc cannot be read.
pub(crate) fn numbers() -> Result<impl Iterator<Item = u32>> {
    let entries = fs::read_dir("/proc").context("cannot list processes")?;
    // A process that ends meanwhile is none of ours.
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter_map(|name| name.parse().ok()))
}

/// What is said of a thread of the kernel's.
pub(crate) const OF_KERNEL: &str = "is a kernel thread, which has no memory of its own";

/// Refuses a number that a person gave and that is no process with memory.
///
/// # Errors
/// The reason.
pub(crate) fn check(pid: u32) -> Result<()> {
    let subject = match Subject::of(pid) {
        Ok(subject) => subject,
        Err(error) if error.kind() == ErrorKind::NotFound => bail!("there is no process {pid}"),
        Err(error) => bail!("process {pid} cannot be looked at: {error}"),
    };
    let comm = sys::process::comm(pid);
    if subject.is_kernels {
        bail!("process {pid} ({comm}) {OF_KERNEL}");
    }
    if subject.has_ended {
        bail!("process {pid} ({comm}) has ended, and has no memory any more");
    }
    Ok(())
}

/// Whether a process executes a file, as the kernel's threads do not, and this user may know which.
pub(crate) fn is_program(pid: u32) -> bool {
    executable(pid).is_some()
}

impl TryFrom<Words> for Selector {
    type Error = String;

    fn try_from(words: Words) -> Result<Self, String> {
        let selector = Self {
            command: read(words.command, "command", command)?,
            executable: read(words.executable, "executable", Pattern::parse)?,
            uid: ids(Whose::User, words.uid, words.user)?,
            gid: ids(Whose::Group, words.gid, words.group)?,
            cgroup: read(words.cgroup, "cgroup", Pattern::parse)?,
            unit: read(words.unit, "unit", unit)?,
        };
        match selector == Self::default() {
            true => Err(format!("it means no process: give one or more of {KEYS}")),
            false => Ok(selector),
        }
    }
}

/// The patterns of a condition.
fn read(
    texts: Option<Texts>,
    key: &str,
    parse: impl Fn(&str) -> Result<Pattern, String>,
) -> Result<Option<Vec<Pattern>>, String> {
    let texts = match texts {
        None => return Ok(None),
        Some(Texts::One(text)) => vec![text],
        Some(Texts::Many(texts)) => texts,
    };
    let patterns: Vec<_> = texts
        .iter()
        .map(|text| parse(text))
        .collect::<Result<_, _>>()?;
    match patterns.is_empty() {
        true => Err(format!("`{key}` is empty: it fits no process")),
        false => Ok(Some(patterns)),
    }
}

/// A pattern for the name of a command.
fn command(text: &str) -> Result<Pattern, String> {
    match text.len() > MOST_OF_COMMAND && !text.contains('*') {
        true => Err(format!(
            "`{text}` fits no command: the kernel keeps {MOST_OF_COMMAND} bytes of its name; write a part of it and `*`, or \
             name the `executable`"
        )),
        false => name(text),
    }
}

/// A pattern for the name of a systemd unit, which says of which kind it is.
fn unit(text: &str) -> Result<Pattern, String> {
    match text.contains(['.', '*', '?']) {
        true => name(text),
        false => Err(format!(
            "`{text}` fits no unit: the name has its kind, as in `{text}.service` or `{text}.slice`"
        )),
    }
}

/// A pattern for a single name.
fn name(text: &str) -> Result<Pattern, String> {
    match text.is_empty() || text.contains('/') || text.contains("**") {
        true => Err(format!(
            "`{text}` is no pattern for a name: it has no `/` and no `**`"
        )),
        false => Pattern::parse(&format!("/{text}")).map_err(|_| {
            format!(
                "the pattern `{text}` has a character that means nothing here: only `*` and `?` do"
            )
        }),
    }
}

/// `KEY=VALUE`, or several with commas between them.
impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = Words::default();
        for condition in text.split(',') {
            let pair = condition
                .split_once('=')
                .filter(|(_, value)| !value.is_empty());
            let (key, value) = pair.ok_or_else(|| {
                format!("`{condition}` is no condition: write KEY=VALUE, with the keys {KEYS}")
            })?;
            let twice = match key.trim() {
                "command" => words
                    .command
                    .replace(Texts::One(value.to_owned()))
                    .is_some(),
                "executable" => words
                    .executable
                    .replace(Texts::One(value.to_owned()))
                    .is_some(),
                "cgroup" => words.cgroup.replace(Texts::One(value.to_owned())).is_some(),
                "unit" => words.unit.replace(Texts::One(value.to_owned())).is_some(),
                "user" => words.user.replace(Names::One(value.to_owned())).is_some(),
                "group" => words.group.replace(Names::One(value.to_owned())).is_some(),
                "uid" => words.uid.replace(value.parse()?).is_some(),
                "gid" => words.gid.replace(value.parse()?).is_some(),
                key => return Err(format!("there is no key `{key}`: the keys are {KEYS}")),
            };
            if twice {
                return Err(format!(
                    "`{key}` is there twice: give --match again for another rule"
                ));
            }
        }
        words.try_into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Selector, String> {
        text.parse()
    }

    #[test]
    fn all_conditions_must_hold() {
        let pid = std::process::id();
        let comm = sys::process::comm(pid);
        let exe = executable(pid).unwrap();
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        let all = format!("command={}", comm.raw());
        let all = format!(
            "{all},executable={exe},uid={},gid={}",
            uid.as_raw(),
            gid.as_raw()
        );
        assert!(parse(&all).unwrap().fits(pid), "{all}");
        let user = nix::unistd::User::from_uid(nix::unistd::geteuid());
        if let Some(user) = user.unwrap() {
            let named = format!("user={}", user.name);
            assert!(parse(&named).unwrap().fits(pid), "{named}");
        }
        for other in [
            "command=x*y",
            "executable=/x/*",
            "uid=4294967294",
            "gid=4294967294",
            "cgroup=/x/y",
            "unit=x.service",
        ] {
            assert!(!parse(other).unwrap().fits(pid), "{other}");
            let key = other.split_once('=').unwrap().0;
            if !all.contains(key) {
                let both = format!("{all},{other}");
                assert!(!parse(&both).unwrap().fits(pid), "{both}");
            }
        }
        if let Ok(group) = sys::process::cgroup(pid) {
            assert!(parse("cgroup=/**").unwrap().fits(pid));
            let mut names = group.path.raw().rsplit('/');
            if let Some(unit) = names.find(|name| name.contains('.')) {
                assert!(parse(&format!("unit={unit}")).unwrap().fits(pid), "{unit}");
            }
        }
    }

    #[test]
    fn processes_are_found_without_this_one_and_the_kernels_threads() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let all = parse("uid=0-4294967294").unwrap();
        let found = find(&[parse("uid=4294967294").unwrap(), all]).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.contains(&child.id()));
        assert!(!found.contains(&std::process::id()));
        assert!(!found.contains(&2), "kthreadd has no executable");
    }

    #[test]
    fn mistakes_are_named() {
        for (text, said) in [
            ("", "is no condition"),
            ("redis", "`redis` is no condition"),
            ("command=", "is no condition"),
            ("name=x", "there is no key `name`"),
            ("command=a/b", "`a/b` is no pattern for a name"),
            ("command=[a]", "`[a]` has a character"),
            ("unit=**", "`**` is no pattern"),
            ("unit=redis", "`redis.service`"),
            ("cgroup=x", "does not begin with `/`"),
            ("executable=redis", "does not begin with `/`"),
            ("uid=root", "no id"),
            ("user=no-such-user", "no user `no-such-user`"),
            ("group=no-such-group", "no group `no-such-group`"),
            ("user=root,uid=0", "both `user` and `uid`"),
            ("uid=9-7", "9 is above 7"),
            ("command=a,command=b", "there twice"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
