//! Names of processes, by which people know them.
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
/// Command lines that are asked for at a time, those included that have not answered at former looks. The unit of
/// `pageone serve` has room for as many threads.
const MOST: usize = 64;
/// The same of one user.
const MOST_OF_USER: usize = 16;

/// A process: its number, and when it began, which tells it from others of its number.
type Process = (u32, u64);

static NAMES: LazyLock<Mutex<Names>> = LazyLock::new(Mutex::default);

/// The names of processes, each given by its number, its user and the name of its command; none for one that has no other name.
pub(crate) fn of(asked: &[(u32, u32, &ForeignName)]) -> Vec<Option<ForeignName>> {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let process = |&(pid, ..): &(u32, u32, _)| Some((pid, sys::usage::began(pid).ok()?));
    let processes: Vec<Option<Process>> = asked.iter().map(process).collect();
    names.forget_all_but(&processes.iter().copied().flatten().collect());
    // Other programs than QEMU do not name their machine.
    let machines = asked.iter().zip(&processes);
    let machines = machines.filter(|((.., command), _)| is_qemu(command));
    let machines =
        machines.filter_map(|((_, user, _), process)| Some((process.as_ref().copied()?, *user)));
    names.ask_all(machines.collect(), PATIENCE, title::of_machine);
    let named = processes.into_iter();
    named.map(|process| names.of(process?)).collect()
}

/// Whether the name of its command is one of QEMU's.
pub(crate) fn is_qemu(command: &ForeignName) -> bool {
    let begins = |name: &&str| command.raw().starts_with(name);
    ["qemu", "kvm"].iter().any(begins)
}

/// The user of a process; of one that is gone, no user.
pub(crate) fn user(pid: u32) -> u32 {
    sys::credentials::Credentials::of(pid, pid).map_or(u32::MAX, |ids| ids.effective_user())
}

/// What is known of processes, and what they were asked and have not answered.
struct Names {
    /// The names of machines; none for a process that says none.
    known: BTreeMap<Process, Option<ForeignName>>,
    /// A thread each waits for these; with their users.
    asked: BTreeMap<Process, u32>,
    to: Sender<(Process, Option<ForeignName>)>,
    from: Receiver<(Process, Option<ForeignName>)>,
}

impl Default for Names {
    fn default() -> Self {
        let (to, from) = channel();
        Self {
            known: BTreeMap::new(),
            asked: BTreeMap::new(),
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

    /// Asks those machines that were not asked before, some at a time, and waits so long for answers. Machines come with their users.
    fn ask_all<F>(&mut self, mut machines: Vec<(Process, u32)>, patience: Duration, title: F)
    where
        F: Fn(u32) -> Option<ForeignName> + Clone + Send + 'static,
    {
        while let Ok((process, name)) = self.from.try_recv() {
            self.learn(process, name);
        }
        machines.retain(|(one, _)| !self.known.contains_key(one) && !self.asked.contains_key(one));
        let deadline = Instant::now() + patience;
        // Those of former looks are not waited for.
        let mut open = BTreeSet::new();
        loop {
            while let Some(at) = machines.iter().position(|&(_, user)| self.has_room(user)) {
                let (process, user) = machines.swap_remove(at);
                if self.ask(process, user, title.clone()) {
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

    /// Whether one more process of a user may be asked: those that never answer take no place from other users.
    fn has_room(&self, user: u32) -> bool {
        let his = self.asked.values().filter(|&&its| its == user).count();
        self.asked.len() < MOST && his < MOST_OF_USER
    }

    fn learn(&mut self, process: Process, name: Option<ForeignName>) {
        self.asked.remove(&process);
        self.known.insert(process, name);
    }

    /// Starts a thread that asks for the name of a machine.
    fn ask<F>(&mut self, process: Process, user: u32, title: F) -> bool
    where
        F: FnOnce(u32) -> Option<ForeignName> + Send + 'static,
    {
        let to = self.to.clone();
        let asks = move || drop(to.send((process, title(process.0))));
        let thread = thread::Builder::new().name("name".to_owned());
        let starts = thread.spawn(asks).is_ok();
        if starts {
            self.asked.insert(process, user);
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
            of(&[(pid, 0, &command.into())]).pop().flatten()
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

    /// Numbers that no process has, of a user's.
    fn crowd(user: u32, count: usize) -> Vec<(Process, u32)> {
        (1..)
            .map(|number| ((u32::MAX - number, user.into()), user))
            .take(count)
            .collect()
    }

    #[test]
    fn more_machines_than_are_asked_at_a_time_have_names() {
        let all = crowd(0, 3 * MOST);
        let mut names = Names::default();
        let number = |pid: u32| Some(ForeignName::from(pid.to_string()));
        names.ask_all(all.clone(), Duration::from_secs(60), number);
        for (process, _) in all {
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
        names.ask_all(vec![(late, 0)], short, slow);
        assert_eq!(names.of(late), None);
        // It is not asked again, and others are.
        let quick = |pid| (pid != u32::MAX).then(|| "other".into());
        names.ask_all(vec![(late, 0), (other, 0)], Duration::from_secs(60), quick);
        assert_eq!(names.of(late), None);
        assert_eq!(names.of(other), Some("other".into()));
        release.send(()).unwrap();
        for _ in 0..1000 {
            names.ask_all(vec![(late, 0)], short, |_| None);
            if names.of(late).is_some() {
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(names.of(late), Some("late".into()));
    }

    #[test]
    fn machines_that_never_answer_take_few_threads_and_no_place_of_others() {
        let (release, wait) = channel::<()>();
        let wait = std::sync::Arc::new(Mutex::new(wait));
        let mut names = Names::default();
        let short = Duration::from_millis(1);
        for _ in 0..3 {
            let wait = std::sync::Arc::clone(&wait);
            let slow = move |_| wait.lock().unwrap().recv().ok().and(None);
            names.ask_all(crowd(1, 200), short, slow);
            assert_eq!(names.asked.len(), MOST_OF_USER);
        }
        let quick = |pid: u32| Some(ForeignName::from(pid.to_string()));
        let others = crowd(2, 100);
        names.ask_all(others.clone(), Duration::from_secs(60), quick);
        assert!(
            others
                .iter()
                .all(|&(process, _)| names.of(process).is_some())
        );
        drop(release);
    }
}
