//! Names of processes: what people know them by.
//!
//! The daemon does not look for them: a name is of no use to it, and to ask for a command line may block for as long as its
//! process likes ([`sys::title`]). So the command asks, in threads that it does not wait for long. A process is asked once, and
//! has its name as soon as the answer is there, be it at a later look.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sys::foreign::ForeignName;
use sys::title;

/// The longest wait for all names together.
const PATIENCE: Duration = Duration::from_millis(200);
/// Command lines that are asked for at a time.
const MOST: usize = 64;

/// A process: its number, and when it began, which tells it from others of its number.
type Process = (u32, u64);

static NAMES: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);

/// The names of processes, each given by its number and the name of its command; none for one that has no other name.
pub(crate) fn of(asked: &[(u32, &ForeignName)]) -> Vec<Option<ForeignName>> {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let process = |&(pid, _): &(u32, _)| Some((pid, sys::usage::began(pid).ok()?));
    let processes: Vec<Option<Process>> = asked.iter().map(process).collect();
    names.forget_all_but(&processes.iter().copied().flatten().collect());
    // Other programs than QEMU do not name their machine.
    let is_qemu = |command: &ForeignName| {
        let begins = |name: &&str| command.raw().starts_with(name);
        ["qemu", "kvm"].iter().any(begins)
    };
    let machines = asked.iter().zip(&processes);
    let machines =
        machines.filter_map(|((_, command), process)| process.filter(|_| is_qemu(command)));
    names.ask_all(machines.collect(), PATIENCE, title::of_machine);
    let named = processes.into_iter();
    named.map(|process| names.of(process?)).collect()
}

/// What is known of processes, and what they were asked and have not answered.
struct Names {
    /// The names of machines; none for a process that says none.
    known: BTreeMap<Process, Option<ForeignName>>,
    /// A thread each waits for these.
    asked: BTreeSet<Process>,
    to: Sender<(Process, Option<ForeignName>)>,
    from: Receiver<(Process, Option<ForeignName>)>,
}

impl Default for Names {
    fn default() -> Self {
        let (to, from) = channel();
        Self {
            known: BTreeMap::new(),
            asked: BTreeSet::new(),
            to,
            from,
        }
    }
}

impl Names {
    /// What was asked stays asked: its thread is there until it has an answer.
    fn forget_all_but(&mut self, processes: &BTreeSet<Process>) {
        self.known.retain(|process, _| processes.contains(process));
    }

    /// Asks those machines that were not asked before, some at a time, and waits so long for answers.
    fn ask_all<F>(&mut self, mut machines: Vec<Process>, patience: Duration, title: F)
    where
        F: Fn(u32) -> Option<ForeignName> + Clone + Send + 'static,
    {
        while let Ok((process, name)) = self.from.try_recv() {
            self.learn(process, name);
        }
        machines.retain(|one| !self.known.contains_key(one) && !self.asked.contains(one));
        let deadline = Instant::now() + patience;
        // Those that do not answer take no place from others at the next look.
        let mut open = BTreeSet::new();
        loop {
            while open.len() < MOST
                && let Some(process) = machines.pop()
            {
                if self.ask(process, title.clone()) {
                    open.insert(process);
                }
            }
            if open.is_empty() {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((process, name)) = self.from.recv_timeout(left) else {
                return;
            };
            open.remove(&process);
            self.learn(process, name);
        }
    }

    fn learn(&mut self, process: Process, name: Option<ForeignName>) {
        self.asked.remove(&process);
        self.known.insert(process, name);
    }

    /// Starts a thread that asks for the name of a machine.
    fn ask<F>(&mut self, process: Process, title: F) -> bool
    where
        F: FnOnce(u32) -> Option<ForeignName> + Send + 'static,
    {
        let to = self.to.clone();
        let asks = move || drop(to.send((process, title(process.0))));
        let thread = thread::Builder::new().name("name".to_owned());
        let starts = thread.spawn(asks).is_ok();
        if starts {
            self.asked.insert(process);
        }
        starts
    }

    /// The machine's own name, else that of its cgroup.
    fn of(&self, process: Process) -> Option<ForeignName> {
        let machine = self.known.get(&process).cloned().flatten();
        machine.or_else(|| title::of_cgroup(process.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_machine_is_named_by_its_command_line() {
        let mut machine = Command::new("sh")
            .args(["-c", "read x", "sh", "-name", "guest=web,debug-threads=on"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = machine.id();
        let name = |command: &str| {
            // So that it is asked anew.
            of(&[]);
            of(&[(pid, &command.into())]).pop().flatten()
        };
        // The command line is the shell's a moment after it has begun.
        let web = Some(ForeignName::from("web"));
        let is_web = || name("qemu-system-x86") == web;
        let named = (0..500).any(|_| {
            is_web() || {
                thread::sleep(Duration::from_millis(10));
                false
            }
        });
        assert!(named, "{:?}", name("qemu-system-x86"));
        machine.kill().unwrap();
        machine.wait().unwrap();
        assert_eq!(name("qemu"), None);
    }

    /// Numbers that no process has.
    fn crowd(count: usize) -> Vec<Process> {
        (1..)
            .map(|number| (u32::MAX - number, 0))
            .take(count)
            .collect()
    }

    #[test]
    fn more_machines_than_are_asked_at_a_time_have_names() {
        let all = crowd(3 * MOST);
        let mut names = Names::default();
        let number = |pid: u32| Some(ForeignName::from(pid.to_string()));
        names.ask_all(all.clone(), Duration::from_secs(60), number);
        for process in all {
            assert_eq!(names.of(process), number(process.0));
        }
        assert!(names.asked.is_empty());
    }

    #[test]
    fn an_answer_that_is_late_counts_at_the_next_look() {
        let (late, other) = ((u32::MAX, 0), (u32::MAX - 1, 0));
        let (release, wait) = channel::<()>();
        let wait = std::sync::Arc::new(Mutex::new(wait));
        let mut names = Names::default();
        let short = Duration::from_millis(1);
        let slow = move |_| {
            let _ = wait.lock().unwrap().recv();
            Some("late".into())
        };
        names.ask_all(vec![late], short, slow);
        assert_eq!(names.of(late), None);
        // It is not asked again, and others are.
        let quick = |pid| (pid != u32::MAX).then(|| "other".into());
        names.ask_all(vec![late, other], Duration::from_secs(60), quick);
        assert_eq!(names.of(late), None);
        assert_eq!(names.of(other), Some("other".into()));
        release.send(()).unwrap();
        for _ in 0..1000 {
            names.ask_all(vec![late], short, |_| None);
            if names.of(late).is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(names.of(late), Some("late".into()));
    }
}
