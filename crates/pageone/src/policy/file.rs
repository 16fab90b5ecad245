//! The policy's file, TOML: its keys, and the mistakes that it may have.
//!
//! A mistake must not become a domain that is wider than its writer meant. So whatever cannot have an
//! effect is an error: keys that are not known, conditions that fit no process, names listed twice, and
//! rules behind one that decides all they would.

use serde::Deserialize;
use toml::Spanned;

use super::ids::Ids;
use super::names::{Names, Whose, numbers};
use super::pattern::Pattern;
use super::{Grant, Peers, Policy, Rule, Says};

/// Why a policy cannot be used: where, and what.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("in {place}: {what}")]
pub struct PolicyError {
    place: String,
    what: String,
}

impl PolicyError {
    pub(super) fn new(place: String, what: String) -> Self {
        Self { place, what }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    default: Otherwise,
    monitor: Option<Spanned<Right>>,
    control: Option<Spanned<Right>>,
    #[serde(default)]
    rule: Vec<Spanned<Words>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Otherwise {
    #[default]
    Uid,
    Refuse,
}

/// Who has a right.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Right {
    uid: Option<Ids>,
    user: Option<Names>,
    gid: Option<Ids>,
    group: Option<Names>,
    cgroup: Option<Patterns>,
}

/// One rule as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    uid: Option<Ids>,
    user: Option<Names>,
    gid: Option<Ids>,
    group: Option<Names>,
    cgroup: Option<Patterns>,
    per: Option<Per>,
    domain: Option<String>,
    names: Option<Vec<String>>,
    split: Option<bool>,
    refuse: Option<bool>,
    any: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a pattern, or a list of patterns")]
enum Patterns {
    One(String),
    Many(Vec<String>),
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Per {
    Uid,
    Gid,
    Cgroup,
}

pub(super) fn parse(text: &str, own: u32) -> Result<Policy, PolicyError> {
    let file: File = toml::from_str(text).map_err(|error| unreadable(text, &error))?;
    let right =
        |right: Option<_>, name| right.map(|right| read_right(text, name, right)).transpose();
    let (monitor, control) = (
        right(file.monitor, "monitor")?,
        right(file.control, "control")?,
    );
    let mut rules: Vec<Rule> = Vec::new();
    for (words, number) in file.rule.into_iter().zip(1..) {
        let line = line(text, words.span().start);
        let mistake = |what| PolicyError::new(format!("rule {number} (line {line})"), what);
        let rule = read(words.into_inner()).map_err(mistake)?;
        if let Some(before) = rules.iter().position(|before| before.hides(&rule)) {
            let what = format!("rule {} decides all that it would", before + 1);
            return Err(mistake(what));
        }
        rules.push(rule);
    }
    Ok(Policy {
        own,
        rules,
        default_uid: matches!(file.default, Otherwise::Uid),
        monitor,
        control,
    })
}

/// The line of the byte at `at`, from 1.
fn line(text: &str, at: usize) -> usize {
    let before = text.as_bytes().get(..at).unwrap_or_default();
    before.iter().filter(|&&b| b == b'\n').count() + 1
}

/// What TOML or a value has against it; its own message has the line, but not the rule.
fn unreadable(text: &str, error: &toml::de::Error) -> PolicyError {
    let at = error.span().map_or(0, |span| span.start);
    let before = text.get(..at).unwrap_or_default().lines();
    let rules = before.filter(|line| line.trim_start().starts_with("[[rule]]"));
    let place = match rules.count() {
        0 => format!("line {}", line(text, at)),
        rule => format!("rule {rule} (line {})", line(text, at)),
    };
    PolicyError::new(place, error.to_string().trim_end().to_owned())
}

fn read_right(text: &str, name: &str, right: Spanned<Right>) -> Result<Peers, PolicyError> {
    let line = line(text, right.span().start);
    let mistake = |what| PolicyError::new(format!("{name} (line {line})"), what);
    let Right {
        uid,
        user,
        gid,
        group,
        cgroup,
    } = right.into_inner();
    let uid = numbers(Whose::User, uid, user).map_err(mistake)?;
    let gid = numbers(Whose::Group, gid, group).map_err(mistake)?;
    if uid.is_none() && gid.is_none() {
        let what = "it names no user: give `user`, `uid`, `group` or `gid`, or leave it out";
        return Err(mistake(what.to_owned()));
    }
    let cgroup = cgroup.map(read_patterns).transpose().map_err(mistake)?;
    Ok(Peers { uid, gid, cgroup })
}

fn read(words: Words) -> Result<Rule, String> {
    let says = read_says(&words)?;
    let cgroup = words.cgroup.map(read_patterns).transpose()?;
    let uid = numbers(Whose::User, words.uid, words.user)?;
    let gid = numbers(Whose::Group, words.gid, words.group)?;
    if uid.is_none() && gid.is_none() && cgroup.is_none() {
        return Err(
            "it is for no process: give `user`, `uid`, `group`, `gid` or `cgroup`; for all users write \
                    uid = \"0-4294967294\""
                .to_owned(),
        );
    }
    let peers = Peers { uid, gid, cgroup };
    let any = match (words.any, &says) {
        (Some(false), _) => return Err("`any = false` says nothing: leave it out".to_owned()),
        (Some(true), Says::Refuse) => {
            return Err("it refuses, so no memory is offered: leave `any` out".to_owned());
        }
        (any, _) => any.is_some(),
    };
    Ok(Rule { peers, says, any })
}

fn read_patterns(patterns: Patterns) -> Result<Vec<Pattern>, String> {
    let texts = match patterns {
        Patterns::One(text) => vec![text],
        Patterns::Many(texts) => texts,
    };
    let mut read: Vec<Pattern> = Vec::new();
    for text in &texts {
        let pattern = Pattern::parse(text)?;
        if read.iter().any(|before| before.covers(&pattern)) {
            return Err(format!(
                "the pattern `{text}` adds nothing to those before it"
            ));
        }
        read.push(pattern);
    }
    match read.is_empty() {
        true => Err("`cgroup` is empty: it fits no process".to_owned()),
        false => Ok(read),
    }
}

/// What a rule gives: exactly one of `refuse`, `domain`, `per` and (alone or besides these two) `names`.
fn read_says(words: &Words) -> Result<Says, String> {
    let mistake = |what: &str| Err(what.to_owned());
    if words.refuse == Some(false) {
        return mistake("`refuse = false` says nothing: leave it out");
    }
    let names = read_names(words.names.as_deref())?;
    let grant = match (words.per, &words.domain) {
        (Some(_), Some(_)) => {
            return mistake("it has both `domain` and `per`: one rule, one domain");
        }
        (Some(Per::Uid), None) => Some(Grant::User),
        (Some(Per::Gid), None) => Some(Grant::Group),
        // Users are strangers unless the rule names them together.
        (Some(Per::Cgroup), None) if words.uid.is_none() && words.user.is_none() => {
            Some(Grant::Cgroup)
        }
        (Some(Per::Cgroup), None) => Some(Grant::WholeCgroup),
        (None, Some(name)) => Some(Grant::Named(read_name(name)?)),
        (None, None) => None,
    };
    let split = words.split.unwrap_or(false);
    let splits = matches!(grant, Some(Grant::User | Grant::Group));
    match (words.refuse.is_some(), grant.is_some() || !names.is_empty()) {
        (true, true) => mistake("it refuses, so it cannot give `domain`, `per` or `names`"),
        (true, false) if split => mistake("it refuses, so there is nothing to split"),
        (true, false) => Ok(Says::Refuse),
        (false, false) => mistake("it gives nothing: write `domain`, `per`, `names` or `refuse`"),
        (false, true) if split && !splits => {
            mistake("only a domain of `per = \"uid\"` or `per = \"gid\"` can be split")
        }
        (false, true) => Ok(Says::Give {
            grant,
            names,
            split,
        }),
    }
}

fn read_names(names: Option<&[String]>) -> Result<Vec<String>, String> {
    let mut read = Vec::new();
    for name in names.unwrap_or_default() {
        if read.contains(name) {
            return Err(format!("the name `{name}` is listed twice"));
        }
        read.push(read_name(name)?);
    }
    match names {
        Some([]) => Err("`names` is empty: it gives nothing".to_owned()),
        _ => Ok(read),
    }
}

fn read_name(name: &str) -> Result<String, String> {
    match wire::Name::new(name).filter(|_| !name.is_empty()) {
        Some(_) => Ok(name.to_owned()),
        None => Err(format!(
            "`{name}` is no name of a domain: 1 to {} bytes, no control characters",
            wire::Name::MAX
        )),
    }
}

impl Rule {
    /// Whether this rule decides all that the later `other` would.
    fn hides(&self, other: &Self) -> bool {
        if !self.peers.cover(&other.peers) {
            return false;
        }
        match (&self.says, &other.says) {
            (Says::Refuse, _) => true,
            (Says::Give { .. }, Says::Refuse) => false,
            (
                Says::Give {
                    grant,
                    names,
                    split,
                },
                Says::Give {
                    grant: their_grant,
                    names: their_names,
                    split: their_split,
                },
            ) => {
                (grant.is_some() || their_grant.is_none())
                    && (*split || !their_split)
                    && (*split || their_names.iter().all(|name| names.contains(name)))
            }
        }
    }
}
