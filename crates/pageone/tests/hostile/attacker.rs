//! A running attack: its processes, their output, and their end.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::common::{PATIENCE, wait_for};

/// An attacker and its process group, ended on drop.
pub(crate) struct Attacker {
    process: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    /// What it has said so far.
    pub(crate) said: Vec<String>,
    /// Others that attack with it, and end after it.
    pub(crate) others: Vec<Self>,
}

impl Attacker {
    pub(crate) fn start(command: &mut Command) -> Self {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut process = command.process_group(0).spawn().unwrap();
        let stdin = process.stdin.take();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            process,
            stdin,
            lines,
            said: Vec::new(),
            others: Vec::new(),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Waits for a line that begins so.
    pub(crate) fn wait_for(&mut self, begin: &str) -> String {
        loop {
            let line = match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => panic!("no {begin:?}, but {:?}", self.said),
                Err(_) => panic!("the attacker ended before {begin:?}: {:?}", self.said),
            };
            assert!(!line.starts_with("failed"), "{line}");
            self.said.push(line.clone());
            if line.starts_with(begin) {
                return line;
            }
        }
    }

    /// Waits for a line that begins so, or for the end; gives all lines.
    pub(crate) fn wait_for_or_end(&mut self, begin: &str) -> &[String] {
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.said.push(line);
            if self.said.last().is_some_and(|line| line.starts_with(begin)) {
                break;
            }
        }
        &self.said
    }

    /// The lines said meanwhile.
    pub(crate) fn listen(&mut self) -> &[String] {
        self.said.extend(self.lines.try_iter());
        &self.said
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// All processes of the group.
    pub(crate) fn pids(&self) -> BTreeSet<u32> {
        let group = self.pid().to_string();
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let in_group = |pid: &u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let after_name = stat.rsplit(") ").next().unwrap_or_default();
            let mut fields = after_name.split(' ');
            fields.next().is_some_and(|state| state != "Z") && fields.nth(1) == Some(&group)
        };
        pids.filter(in_group).collect()
    }

    /// The stores that its processes have descriptors of.
    pub(crate) fn stores(&self) -> Vec<PathBuf> {
        let held = |pid: u32| {
            let folder = std::fs::read_dir(format!("/proc/{pid}/fd"));
            let links = folder.into_iter().flatten().flatten();
            links.map(|entry| entry.path())
        };
        let is_store = |link: &PathBuf| {
            let target = std::fs::read_link(link).unwrap_or_default();
            target.to_string_lossy().starts_with("/memfd:pageone-store")
        };
        self.pids()
            .into_iter()
            .flat_map(held)
            .filter(is_store)
            .collect()
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        self.stdin = None;
        let group = Pid::from_child(&self.process);
        let end = || {
            let _ = kill_process_group(group, Signal::KILL);
            let _ = self.process.try_wait();
            self.pids().is_empty().then_some(())
        };
        let mut end = end;
        match std::thread::panicking() {
            true => drop(end()),
            false => wait_for("the attackers' end", end),
        }
        let _ = self.process.wait();
    }
}
