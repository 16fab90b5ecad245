//! Makes guests of running processes, by the rules of the configuration (`[[attach]]`).
//!
//! A thread looks at the machine's processes again and again. A process that fits a rule and has lived for the rule's time gets an
//! agent, by another process that runs `pageone attach` ([`Work`]):
//!
//! ```text
//!   /proc ─▶ seen before? ─▶ first rule that fits ─▶ old enough? ─▶ `pageone attach` ─▶ attached, or the reason in the log
//!              │ yes: nothing, until it is tried again, or executes another program
//! ```
//!
//! Another process, because it holds the threads of a stranger's process and reads his memory: whatever goes wrong there, the daemon
//! has no part in it. One process at a time is attached. Work that does not end in time is left behind ([`PATIENCE`]); until it has ended,
//! no other process of the same user is attached. A user whose process took long has to wait for four times as long. So one
//! user holds up no other for long, also if he has subordinate ids ([`sys::principal`]). **The limit**: [`MOST_LATE`] users together do,
//! for [`LONGEST`] each time.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Deserialize;
use sys::foreign::{Foreign, ForeignName};

use super::policy;
use crate::attach::asked::{NoAnswer, Wish, Work};
use crate::selector::{self, Selector};

/// Between two looks.
const PERIOD: Duration = Duration::from_secs(2);
/// The longest wait for one to be attached, which takes milliseconds in most cases.
const PATIENCE: Duration = Duration::from_secs(20);
/// Work that is left behind is ended after this time: it waits for a file that never answers.
const LONGEST: Duration = Duration::from_secs(15 * 60);
/// A user's next process waits for so many times what the last one took, if that was longer than [`SHORT`].
const SHARE: u32 = 4;
const SHORT: Duration = Duration::from_millis(100);
/// Work that did not end in time, at most. With so many, no process is attached.
const MOST_LATE: usize = 32;
/// How often a process is tried, and after what time again; four times as long each time.
const TRIES: u32 = 4;
const FIRST_RETRY: Duration = Duration::from_secs(15);
/// A process that fits no rule is looked at again when it executes another program, and in any case while it is so young.
const YOUNG: Duration = Duration::from_secs(60);

/// A rule of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Words")]
pub(crate) struct AttachRule {
    selector: Selector,
    domain: Option<String>,
    any: bool,
    after: Duration,
}

/// A rule as it is written.
#[derive(Deserialize)]
struct Words {
    domain: Option<String>,
    any: Option<bool>,
    after: Option<String>,
    #[serde(flatten)]
    selector: toml::Table,
}

impl TryFrom<Words> for AttachRule {
    type Error = String;

    fn try_from(words: Words) -> Result<Self, String> {
        /// Short-lived processes cost nothing.
        const AFTER: Duration = Duration::from_secs(10);
        let after = words.after.as_deref().map(|text| {
            let time = humantime::parse_duration(text);
            time.map_err(|error| {
                format!("`after = \"{text}\"` is no time: {error}; write it like 10s")
            })
        });
        if let Some(name) = &words.domain {
            crate::run::launch::check_domain(name).map_err(|error| error.to_string())?;
        }
        // Its own messages name the keys of a rule, too.
        let selector = words.selector.try_into::<Selector>();
        Ok(Self {
            selector: selector.map_err(|error| {
                format!(
                    "{}; besides, a rule has domain, any and after",
                    error.message()
                )
            })?,
            domain: words.domain,
            any: words.any.unwrap_or(false),
            after: after.transpose()?.unwrap_or(AFTER),
        })
    }
}

/// The thread; it ends with this.
pub(super) struct Attacher(Sender<Vec<AttachRule>>);

impl Attacher {
    /// Begins to look, for a daemon at `socket`.
    ///
    /// # Errors
    /// There is no thread, or rules for a machine on which no process can be attached.
    pub(super) fn start(socket: &Path, rules: Vec<AttachRule>) -> Result<Self> {
        let socket = std::path::absolute(socket).context("cannot find the socket")?;
        anyhow::ensure!(
            rules.is_empty() || cfg!(target_arch = "x86_64"),
            "[[attach]] is for x86-64 alone"
        );
        // Now: the file of this program may be replaced. Without it the child says where it looked.
        let agent = crate::paths::agent().ok();
        let (tell, told) = mpsc::channel();
        let mut look = Look {
            socket,
            agent,
            rules,
            seen: HashMap::new(),
            late: Vec::new(),
            pauses: HashMap::new(),
        };
        let run = move || {
            loop {
                let wait = if look.rules.is_empty() {
                    told.recv().map_err(|_| RecvTimeoutError::Disconnected)
                } else {
                    look.all();
                    told.recv_timeout(PERIOD)
                };
                match wait {
                    Ok(rules) => look.take(rules),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        let thread = thread::Builder::new().name("attacher".to_owned());
        thread.spawn(run).context("cannot start a thread")?;
        Ok(Self(tell))
    }

    /// Goes on by other rules. Guests stay guests.
    pub(super) fn take(&self, rules: Vec<AttachRule>) {
        // The thread ends after this sender alone.
        let _ = self.0.send(rules);
    }
}

/// A process as it was when it was looked at: another program in it is looked at anew.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    began: u64,
    name: ForeignName,
    next: Next,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// It is young, or fitted no rule so far.
    Look,
    /// It fits no rule, or has its agent, or cannot have one.
    Nothing,
    /// It could not be attached so often.
    Try { failed: u32, at: Instant },
}

impl Next {
    /// Without a failure more.
    fn later(self, now: Instant) -> Self {
        let failed = match self {
            Self::Try { failed, .. } => failed,
            _ => 0,
        };
        let at = now + FIRST_RETRY;
        Self::Try { failed, at }
    }

    /// After one failure more.
    fn after(self, now: Instant) -> Self {
        let failed = match self {
            Self::Try { failed, .. } => failed + 1,
            _ => 1,
        };
        match failed < TRIES {
            true => Self::Try {
                failed,
                at: now + FIRST_RETRY * 4_u32.pow(failed - 1),
            },
            false => Self::Nothing,
        }
    }
}

/// Work that has not ended, and the user who answers for the process that it is done on.
struct Late {
    work: Work,
    since: Instant,
    user: u32,
}

struct Look {
    socket: PathBuf,
    agent: Option<PathBuf>,
    rules: Vec<AttachRule>,
    seen: HashMap<u32, Seen>,
    late: Vec<Late>,
    /// Until when no process of a user is attached.
    pauses: HashMap<u32, Instant>,
}

impl Look {
    fn take(&mut self, rules: Vec<AttachRule>) {
        if self.rules != rules {
            self.seen.clear();
            self.rules = rules;
        }
    }

    fn all(&mut self) {
        for late in &mut self.late {
            if late.since.elapsed() > LONGEST {
                late.work.end();
            }
        }
        self.late
            .retain_mut(|late| matches!(late.work.has_ended(), Ok(false)));
        let pids = match selector::numbers() {
            Ok(pids) => pids,
            Err(error) => return tracing::warn!("cannot look for processes to attach: {error:#}"),
        };
        let now = Instant::now();
        self.pauses.retain(|_, until| now < *until);
        let mut before = std::mem::take(&mut self.seen);
        for pid in pids {
            if let Some(seen) = self.one(pid, before.remove(&pid)) {
                self.seen.insert(pid, seen);
            }
        }
    }

    /// Looks at a process; none when it is gone.
    fn one(&mut self, pid: u32, before: Option<Seen>) -> Option<Seen> {
        let now = Instant::now();
        let (began, name) = sys::usage::began_as(pid).ok()?;
        let same = before.filter(|seen| (seen.began, &seen.name) == (began, &name));
        let mut seen = same.unwrap_or(Seen {
            began,
            name,
            next: Next::Look,
        });
        match seen.next {
            Next::Nothing => return Some(seen),
            Next::Try { at, .. } if at > now => return Some(seen),
            Next::Look | Next::Try { .. } => {}
        }
        if pid == std::process::id() || !selector::is_program(pid) {
            seen.next = Next::Nothing;
            return Some(seen);
        }
        let age = age(began);
        let fits = |rule: &AttachRule| rule.selector.fits(pid);
        let found = self.rules.iter().position(fits);
        let rule = found.and_then(|at| self.rules.get(at).map(|rule| (at + 1, rule.clone())));
        match rule {
            None if age >= YOUNG => seen.next = Next::Nothing,
            Some((number, rule)) if age >= rule.after => {
                seen.next = self.attach(pid, &seen, number, &rule);
            }
            _ => {}
        }
        Some(seen)
    }

    fn attach(&mut self, pid: u32, seen: &Seen, number: usize, rule: &AttachRule) -> Next {
        let begun = Instant::now();
        let Ok(who) = policy::who(pid) else {
            return Next::Nothing;
        };
        let Ok(user) = sys::principal::of(pid, who.uid) else {
            return seen.next.later(begun);
        };
        let pauses = self.pauses.get(&user).is_some_and(|&until| begun < until);
        let is_late = self.late.iter().any(|late| late.user == user);
        if pauses || is_late || self.late.len() >= MOST_LATE {
            return seen.next;
        }
        let name = &seen.name;
        let wish = Wish {
            pid,
            began: seen.began,
            domain: rule.domain.clone(),
            any: rule.any,
        };
        let done = self.by_another(&wish, user);
        let took = begun.elapsed();
        if took > SHORT {
            self.pauses.insert(user, begun + took * (SHARE + 1));
        }
        match done {
            Ok(told) => {
                tracing::info!(
                    "by rule {number} of [[attach]]: {}",
                    Foreign(told.trim_end())
                );
                Next::Nothing
            }
            // That is not the process's doing.
            Err(error) if error.is::<NoAnswer>() => {
                tracing::debug!("process {pid}: {error}");
                seen.next.later(Instant::now())
            }
            Err(error) => {
                let why = format!("{error:#}");
                let next = seen.next.after(Instant::now());
                let is_first = matches!(next, Next::Try { failed: 1, .. });
                let why = Foreign(why.trim_end());
                let told = format_args!(
                    "process {pid} ({name}) fits rule {number} of [[attach]] and is not attached: {why}"
                );
                match (is_first, next) {
                    (true, _) => tracing::warn!("{told}; it is tried again {} times", TRIES - 1),
                    (_, Next::Nothing) => tracing::warn!("{told}; it is not tried again"),
                    _ => tracing::debug!("{told}"),
                }
                next
            }
        }
    }

    /// What is said by the process that attaches it.
    fn by_another(&mut self, wish: &Wish, user: u32) -> Result<String> {
        let mut work = Work::begin(&self.socket, self.agent.as_deref(), wish)?;
        let begun = Instant::now();
        while !work.has_ended()? {
            if begun.elapsed() > PATIENCE {
                let since = begun;
                self.late.push(Late { work, user, since });
                anyhow::bail!("`pageone attach` has not ended after {PATIENCE:?}");
            }
            thread::sleep(Duration::from_millis(5));
        }
        work.outcome()
    }
}

/// How long ago a time of /proc/PID/stat was.
fn age(began: u64) -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let now = Duration::from_secs(now.tv_sec.unsigned_abs());
    now.saturating_sub(Duration::from_secs(sys::usage::seconds_since_boot(began)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_takes_as_many_as_are_left_behind_and_one_more() {
        let unit = include_str!("../../../../packaging/pageone-attach.socket");
        let most = unit
            .lines()
            .find_map(|line| line.strip_prefix("MaxConnections="));
        let most: usize = most.expect("a limit").parse().expect("a number");
        assert!(most > MOST_LATE);
    }

    #[test]
    fn a_process_is_tried_less_and_less_and_then_no_more() {
        let now = Instant::now();
        let mut next = Next::Look;
        let mut waits = Vec::new();
        for _ in 1..TRIES {
            next = next.after(now);
            match next {
                Next::Try { at, .. } => waits.push((at - now).as_secs()),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(waits, [15, 60, 240]);
        assert_eq!(next.after(now), Next::Nothing);
    }

    #[test]
    fn this_process_is_not_older_than_the_machine_and_not_from_the_future() {
        let began = sys::usage::began(std::process::id()).unwrap();
        assert!(age(began) < Duration::from_secs(3600 * 24));
        assert_eq!(age(u64::MAX), Duration::ZERO);
    }
}
