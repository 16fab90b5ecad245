//! Makes guests of running processes, by the rules of the configuration (`[[attach]]`).
//!
//! A thread looks at the machine's processes again and again. A process that fits a rule and has lived for the rule's time gets an
//! agent, by another process that runs `pageone attach` ([`Work`]):
//!
//! ```text
//!   /proc ─▶ seen before? ─▶ first rule that fits ─▶ old enough? ─▶ `pageone attach` ─▶ attached, or the reason in the log
//!              │ yes: nothing, until it is tried again, executes a program, or fitted no rule a minute ago or two
//! ```
//!
//! Another process, because it holds the threads of a stranger's process and reads his memory: whatever goes wrong there, the daemon
//! has no part in it. One process at a time is attached. Work that does not end in time is left behind ([`PATIENCE`]); until it has ended,
//! no other process of the same user is attached. A user whose process took long, or could not be attached, has to wait for four times
//! as long. Users take turns, a process each. So one user holds up no other for long, also if he has subordinate ids
//! ([`sys::principal`]). **The limit**: [`MOST_LATE`] users together do, for [`LONGEST`] each time.
//!
//! A process may take another name, and execute a program, as often as it likes. Each try is later than the one before, whatever its name and whatever came of
//! it; so an exec is followed, and a process that renames itself without end costs a try an hour.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use sys::foreign::Foreign;
use sys::usage::Program;

use crate::attach::asked::{NoAnswer, Wish, Work};
use crate::policy;
use crate::selector::{self, Conditions, Selector};

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
/// How often a program is tried that cannot be attached.
const TRIES: u32 = 4;
/// From a try at a process to the next, and the longest; four times as long each time.
const FIRST_RETRY: Duration = Duration::from_secs(15);
const LONGEST_RETRY: Duration = Duration::from_secs(60 * 60);
/// Lines in the log about processes of one user that are not attached, in so much time.
const MOST_LINES: u32 = 5;
const LINES_TIME: Duration = Duration::from_secs(10);
/// A process that fits no rule is looked at each time while it is so young, and then once in one minute or two: it may come to another user or cgroup.
const YOUNG: Duration = Duration::from_secs(60);

/// A rule of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AttachRule {
    selector: Selector,
    domain: Option<String>,
    any: bool,
    any_huge: bool,
    mount: bool,
    need: Option<u64>,
    after: Duration,
}

/// Reads the rules of the configuration. Errors arise where a value is read, so that they have its line.
pub(super) struct Rules;

impl<'de> DeserializeSeed<'de> for Rules {
    type Value = Vec<AttachRule>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Rules {
    type Value = Vec<AttachRule>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("rules, each below [[attach]]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut rules = Vec::new();
        while let Some(rule) = from.next_element_seed(Next(&rules))? {
            rules.push(rule);
        }
        Ok(rules)
    }
}

/// Reads the rule after these.
struct Next<'a>(&'a [AttachRule]);

impl<'de> DeserializeSeed<'de> for Next<'_> {
    type Value = AttachRule;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<AttachRule, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Next<'_> {
    type Value = AttachRule;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys and values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<AttachRule, A::Error> {
        /// Short-lived processes cost nothing.
        const AFTER: Duration = Duration::from_secs(10);
        let mut conditions = Conditions::default();
        let mut rule = AttachRule {
            selector: Selector::default(),
            domain: None,
            any: false,
            any_huge: false,
            mount: false,
            need: None,
            after: AFTER,
        };
        while let Some(key) = from.next_key::<String>()? {
            match key.as_str() {
                "domain" => {
                    rule.domain = Some(from.next_value_seed(Text(crate::launch::domain_of))?)
                }
                "any" => rule.any = from.next_value()?,
                "any_huge" => rule.any_huge = from.next_value()?,
                "mount" => rule.mount = from.next_value()?,
                "need" => rule.need = Some(from.next_value_seed(Text(need))?),
                "after" => rule.after = from.next_value_seed(Text(after))?,
                _ => from.next_value_seed(conditions.at(&key, OWN_KEYS))?,
            }
        }
        rule.selector = conditions.selector().map_err(A::Error::custom)?;
        if rule.any_huge && !rule.any {
            return Err(A::Error::custom("any_huge takes `any = true`"));
        }
        let same = self
            .0
            .iter()
            .position(|before| before.selector == rule.selector);
        match same {
            None => Ok(rule),
            Some(before) => Err(A::Error::custom(format!(
                "rule {} decides all that it would: it has the same conditions",
                before + 1
            ))),
        }
    }
}

/// The keys of a rule beside its conditions.
const OWN_KEYS: &str = "domain, any, any_huge, mount, need and after";

fn need(text: &str) -> Result<u64, String> {
    crate::human::size_of(text).map_err(|error| format!("`need = \"{text}\"`: {error}"))
}

fn after(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text);
    time.map_err(|_| format!("`after = \"{text}\"` is no time; write it like 20s or 500ms"))
}

/// A value that is read as a text, whichever of the file's kinds it has.
pub(super) struct Text<F>(pub(super) F);

impl<'de, T, E: std::fmt::Display, F: FnOnce(&str) -> Result<T, E>> DeserializeSeed<'de>
    for Text<F>
{
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<T, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "it takes a whole number, a text in quotes, true or false"
        )]
        enum Value {
            Switch(bool),
            Number(i64),
            Text(String),
        }
        let text = match Value::deserialize(from)? {
            Value::Switch(on) => on.to_string(),
            Value::Number(number) => number.to_string(),
            Value::Text(text) => text,
        };
        (self.0)(&text).map_err(D::Error::custom)
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
        warn_of_blind(&rules);
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
            lines: HashMap::new(),
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

/// Says that rules by cgroup fit no process here, if it is so.
fn warn_of_blind(rules: &[AttachRule]) {
    if let Some(error) = selector::blind(rules.iter().map(|rule| &rule.selector)) {
        tracing::warn!("no rule of [[attach]] with cgroup or unit fits a process: {error}");
    }
}

/// A process as it was when it was looked at.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    began: u64,
    /// Another program in it is looked at anew.
    program: Program,
    /// It has its agent, or cannot have one.
    done: bool,
    /// Until when it counts as one that fits no rule.
    unfit_until: Option<Instant>,
    /// Tries that failed since it executes this program.
    failed: u32,
    /// Tries at all its programs, and when the next may be.
    tried: u32,
    rests_until: Option<Instant>,
}

/// What came of a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Attached,
    Failed,
    /// That is not the process's doing.
    NoAnswer,
}

impl Seen {
    fn new(began: u64, program: Program) -> Self {
        Self {
            began,
            program,
            done: false,
            unfit_until: None,
            failed: 0,
            tried: 0,
            rests_until: None,
        }
    }

    /// The same process, which may execute another program now, or have another name.
    fn executes(mut self, program: Program) -> Self {
        if self.program != program {
            (self.program, self.done, self.failed) = (program, false, 0);
            self.unfit_until = None;
        }
        self
    }

    /// Whether it is not looked at now.
    fn rests(&self, now: Instant) -> bool {
        let until = [self.rests_until, self.unfit_until];
        self.done || until.into_iter().flatten().any(|until| until > now)
    }

    fn note(&mut self, outcome: Outcome, now: Instant) {
        match outcome {
            Outcome::NoAnswer => {
                self.rests_until = Some(now + FIRST_RETRY);
                return;
            }
            Outcome::Attached => (self.failed, self.done) = (0, true),
            Outcome::Failed => {
                self.failed += 1;
                self.done = self.failed >= TRIES;
            }
        }
        let rest = FIRST_RETRY.saturating_mul(4_u32.saturating_pow(self.tried));
        self.tried += 1;
        self.rests_until = Some(now + rest.min(LONGEST_RETRY));
    }
}

/// A process to attach.
struct Due {
    pid: u32,
    /// Who answers for it.
    user: u32,
    /// The place of its rule, from 0.
    rule: usize,
}

/// Puts the first of each user before the second of any.
fn in_turns(due: Vec<Due>) -> VecDeque<Due> {
    let mut counts = HashMap::<u32, usize>::new();
    let turn = |its: Due| {
        let count = counts.entry(its.user).or_default();
        *count += 1;
        (*count, its)
    };
    let mut turns: Vec<_> = due.into_iter().map(turn).collect();
    turns.sort_by_key(|&(turn, _)| turn);
    turns.into_iter().map(|(_, its)| its).collect()
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
    /// What the log has of processes of a user that are not attached, and since when.
    lines: HashMap<u32, (Instant, u32)>,
}

impl Look {
    fn take(&mut self, rules: Vec<AttachRule>) {
        if self.rules != rules {
            warn_of_blind(&rules);
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
        let pauses = &mut self.pauses;
        self.late.retain_mut(|late| {
            let goes_on = matches!(late.work.has_ended(), Ok(false));
            if !goes_on {
                // By all the time that it took, and not by that for which it was waited for.
                let until = late.since + late.since.elapsed() * (SHARE + 1);
                pauses.insert(late.user, until);
            }
            goes_on
        });
        let pids = match selector::numbers() {
            Ok(pids) => pids,
            Err(error) => return tracing::warn!("cannot look for processes to attach: {error:#}"),
        };
        let now = Instant::now();
        self.pauses.retain(|_, until| now < *until);
        self.lines.retain(|_, (since, _)| now - *since < LINES_TIME);
        let mut before = std::mem::take(&mut self.seen);
        let mut due = Vec::new();
        for pid in pids {
            if let Some(mut seen) = look(pid, before.remove(&pid)) {
                due.extend(self.due(pid, &mut seen, now));
                self.seen.insert(pid, seen);
            }
        }
        self.attach_all(in_turns(due));
    }

    /// What is to be attached of a process, if anything.
    fn due(&self, pid: u32, seen: &mut Seen, now: Instant) -> Option<Due> {
        if seen.rests(now) {
            return None;
        }
        if pid == std::process::id() || !selector::is_program(pid) {
            seen.done = true;
            return None;
        }
        let age = age(seen.began);
        let mut rules = self.rules.iter().enumerate();
        let Some((place, rule)) = rules.find(|(_, rule)| rule.selector.fits(pid)) else {
            // Not all at once, also where the daemon came when all were old.
            let rest = YOUNG + Duration::from_secs(u64::from(pid) % YOUNG.as_secs());
            seen.unfit_until = (age >= YOUNG).then(|| now + rest);
            return None;
        };
        if age < rule.after {
            return None;
        }
        let Ok(who) = policy::who(pid) else {
            seen.done = true;
            return None;
        };
        match sys::principal::of(pid, who.uid) {
            Ok(user) => Some(Due {
                pid,
                user,
                rule: place,
            }),
            Err(_) => {
                seen.note(Outcome::NoAnswer, now);
                None
            }
        }
    }

    /// Attaches what is due, as far as the time until the next look goes.
    fn attach_all(&mut self, mut due: VecDeque<Due>) {
        let begun = Instant::now();
        let mut in_vain = 0;
        while begun.elapsed() < PERIOD
            && let Some(next) = due.pop_front()
        {
            let now = Instant::now();
            let is_late = self.late.iter().any(|late| late.user == next.user);
            if is_late || self.late.len() >= MOST_LATE {
                continue;
            }
            let until = self.pauses.get(&next.user);
            if until.is_some_and(|&until| now < until) {
                due.push_back(next);
                in_vain += 1;
                // All that are left wait.
                if in_vain >= due.len() {
                    thread::sleep(Duration::from_millis(5));
                }
                continue;
            }
            in_vain = 0;
            self.attach(&next);
        }
    }

    fn attach(&mut self, due: &Due) {
        let begun = Instant::now();
        let (Some(seen), Some(rule)) = (self.seen.get(&due.pid), self.rules.get(due.rule)) else {
            return;
        };
        let name = seen.program.name.clone();
        let wish = Wish {
            pid: due.pid,
            began: seen.began,
            domain: rule.domain.clone(),
            any: rule.any,
            any_huge: rule.any_huge,
            mount: rule.mount,
            need: rule.need,
        };
        let done = self.by_another(&wish, due.user);
        let took = begun.elapsed();
        let outcome = match &done {
            Ok(_) => Outcome::Attached,
            Err(error) if error.is::<NoAnswer>() => Outcome::NoAnswer,
            Err(_) => Outcome::Failed,
        };
        if took > SHORT || outcome == Outcome::Failed {
            self.pauses.insert(due.user, begun + took * (SHARE + 1));
        }
        let Some(seen) = self.seen.get_mut(&due.pid) else {
            return;
        };
        seen.note(outcome, Instant::now());
        let (failed, is_last) = (seen.failed, seen.done);
        // As people count.
        let (pid, number) = (due.pid, due.rule + 1);
        match done {
            Ok(told) => {
                let told = Foreign(told.trim_end());
                tracing::info!("by rule {number} of [[attach]]: {told}");
            }
            Err(error) if outcome == Outcome::NoAnswer => {
                tracing::debug!("process {pid}: {error}");
            }
            Err(error) => {
                let why = format!("{error:#}");
                let why = Foreign(why.trim_end());
                let told = format_args!(
                    "process {pid} ({name}) fits rule {number} of [[attach]] and is not attached: {why}"
                );
                let worth = failed == 1 || is_last;
                match worth && self.may_say(due.user) {
                    true if is_last => tracing::warn!("{told}; it is not tried again"),
                    true => tracing::warn!("{told}; it is tried again {} times", TRIES - 1),
                    false => tracing::debug!("{told}"),
                }
            }
        }
    }

    /// Whether one more line about this user's processes may be written: what he does must not drown what is said of others.
    fn may_say(&mut self, user: u32) -> bool {
        let (_, lines) = self
            .lines
            .entry(user)
            .or_insert_with(|| (Instant::now(), 0));
        *lines += 1;
        if *lines == MOST_LINES + 1 {
            tracing::warn!(
                "more processes of user {user} are not attached: the reasons are at level debug"
            );
        }
        *lines <= MOST_LINES
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

/// A process as it is now, and what is known of it; none when it is gone.
fn look(pid: u32, before: Option<Seen>) -> Option<Seen> {
    let (began, program) = match sys::usage::began_as(pid) {
        // Its user does not let it be seen just now, and gets no new tries by that.
        Err(error) if error.kind() == ErrorKind::WouldBlock => return before,
        found => found.ok()?,
    };
    let same = before.filter(|seen| seen.began == began);
    Some(match same {
        Some(seen) => seen.executes(program),
        None => Seen::new(began, program),
    })
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

    fn name(text: &str) -> Program {
        let (name, stack) = (text.to_owned().into(), 1);
        Program { name, stack }
    }

    /// Seconds until it may be tried again.
    fn rest(seen: &Seen, now: Instant) -> u64 {
        (seen.rests_until.expect("a rest") - now).as_secs()
    }

    #[test]
    fn a_process_is_tried_less_and_less_and_then_no_more() {
        let now = Instant::now();
        let mut seen = Seen::new(7, name("web"));
        for expected in [15, 60, 240] {
            seen.note(Outcome::Failed, now);
            assert_eq!((rest(&seen, now), seen.done), (expected, false));
        }
        seen.note(Outcome::Failed, now);
        assert!(seen.done);
        seen.note(Outcome::NoAnswer, now);
        assert_eq!((rest(&seen, now), seen.tried), (15, 4), "not its doing");
    }

    #[test]
    fn another_name_brings_no_try_sooner() {
        let now = Instant::now();
        for outcome in [Outcome::Failed, Outcome::Attached] {
            let mut seen = Seen::new(7, name("web"));
            for (nth, expected) in [15, 60, 240, 960, 3600, 3600].into_iter().enumerate() {
                seen.note(outcome, now);
                assert_eq!(rest(&seen, now), expected);
                seen = seen.executes(name(&format!("web-{nth}")));
                assert!(!seen.done, "it may be another program");
                assert_eq!(rest(&seen, now), expected);
            }
        }
    }

    #[test]
    fn a_process_that_fits_no_rule_is_looked_at_again_and_at_once_when_it_executes_its_own_program()
    {
        let now = Instant::now();
        let unfit = || Seen {
            unfit_until: Some(now + YOUNG),
            ..Seen::new(7, name("web"))
        };
        assert!(unfit().rests(now) && !unfit().rests(now + YOUNG));
        assert!(unfit().executes(name("web")).rests(now));
        let again = Program {
            stack: 2,
            ..name("web")
        };
        assert!(!unfit().executes(again).rests(now));
    }

    #[test]
    fn an_exec_is_seen_that_changes_no_name() {
        let mut child = std::process::Command::new("sh");
        child.args(["-c", "echo; read line; exec sh -c 'echo; read line'"]);
        let piped = std::process::Stdio::piped;
        let mut child = child.stdin(piped()).stdout(piped()).spawn().unwrap();
        let mut said = [0];
        // It runs: its maker goes on a moment before an exec is done.
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        let before = look(child.id(), None).unwrap();
        let program = before.program.clone();
        assert_eq!(look(child.id(), Some(before)).unwrap().program, program);
        let mut input = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut input, b"\n").unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        let after = look(child.id(), None).unwrap().program;
        assert!(after.name == program.name && after != program, "{after:?}");
        drop(input);
        child.wait().unwrap();
    }

    #[test]
    fn users_take_turns() {
        let due = |(pid, user)| Due { pid, user, rule: 0 };
        let all = [(1, 7), (2, 7), (3, 7), (4, 8), (5, 8), (6, 9)].map(due);
        let turns: Vec<_> = in_turns(all.into())
            .into_iter()
            .map(|its| its.pid)
            .collect();
        assert_eq!(turns, [1, 4, 6, 2, 5, 3]);
    }

    #[test]
    fn this_process_is_not_older_than_the_machine_and_not_from_the_future() {
        let began = sys::usage::began(std::process::id()).unwrap();
        assert!(age(began) < Duration::from_secs(3600 * 24));
        assert_eq!(age(u64::MAX), Duration::ZERO);
    }
}
