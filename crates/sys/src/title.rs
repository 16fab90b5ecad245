//! Names by which people know a process: of a virtual machine, of a container, of a unit.
//!
//! The names are the process's own word, or that of the process that started it: for people to read, never to decide by.
//!
//! Source: qemu(1) (`-name`), systemd.unit(5) (escapes), `systemd-machined`.

use std::io::Read;

use crate::foreign::ForeignName;

/// Characters of a name that are kept. libvirt's are shorter; a program may claim one of a megabyte, and each view would show it.
const MOST_CHARACTERS: usize = 64;

/// The name of the virtual machine that process `pid` says it is, by QEMU's `-name`.
///
/// **This may block for as long as that process likes**: the kernel reads the command line from its memory, which may lie
/// under a userfaultfd. So it is for a thread that no other thread waits for.
#[must_use]
pub fn of_machine(pid: u32) -> Option<ForeignName> {
    let line = command_line(pid).ok()?;
    machine_in(&line).map(ForeignName::from)
}

/// The words with which process `pid` was started, or that it has put there: each ends with a zero byte, and there are 2 MiB at most.
///
/// **This may block**, as [`of_machine`].
///
/// # Errors
/// It is gone.
pub fn command_line(pid: u32) -> std::io::Result<Vec<u8>> {
    const MOST: u64 = 2 << 20;
    let mut line = Vec::new();
    let file = crate::text::open(format!("/proc/{pid}/cmdline"))?;
    file.take(MOST).read_to_end(&mut line)?;
    Ok(line)
}

fn machine_in(line: &[u8]) -> Option<String> {
    let mut words = line.split(|&byte| byte == 0);
    words.find(|word| matches!(*word, b"-name" | b"--name"))?;
    let value = String::from_utf8_lossy(words.next()?);
    // A comma in a value is written twice.
    let value = value.replace(",,", "\u{0}");
    let mut parts = value.split(',');
    let named = parts.clone().find_map(|part| part.strip_prefix("guest="));
    let first = parts.next().filter(|part| !part.contains('='));
    let name = named.or(first)?.chars().take(MOST_CHARACTERS);
    let name = name.collect::<String>().replace('\u{0}', ",");
    (!name.is_empty()).then_some(name)
}

/// The machine, container or unit whose cgroup process `pid` is in. Never blocks.
#[must_use]
pub fn of_cgroup(pid: u32) -> Option<ForeignName> {
    let text = crate::text::read(format!("/proc/{pid}/cgroup")).ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    path.rsplit('/').find_map(part_name).map(ForeignName::from)
}

/// The name in one part of a cgroup's path.
fn part_name(part: &str) -> Option<String> {
    let part = part.trim_end_matches(" (deleted)");
    if let Some(scope) = part.strip_suffix(".scope") {
        if let Some(machine) = scope.strip_prefix("machine-") {
            return Some(without_number(&unescaped(machine)));
        }
        let (engine, id) = scope.rsplit_once('-')?;
        return container(engine, id);
    }
    if let Some(container) = part.strip_prefix("lxc.payload.") {
        return Some(container.to_owned());
    }
    match part.strip_suffix(".service") {
        Some(unit) if !unit.starts_with("user@") => Some(unescaped(unit) + ".service"),
        Some(_) => None,
        None => container("container", part),
    }
}

/// A container by its number, of which people know the first twelve digits.
fn container(engine: &str, id: &str) -> Option<String> {
    let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_id.then(|| format!("{engine} {}", id.get(..12).unwrap_or(id)))
}

/// libvirt puts its driver and a running number before a machine's name: `qemu-3-web`.
fn without_number(machine: &str) -> String {
    let mut parts = machine.splitn(3, '-');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(_), Some(number), Some(name)) if number.parse::<u32>().is_ok() => name.to_owned(),
        _ => machine.to_owned(),
    }
}

/// A unit's name as it was before systemd escaped it: `\x2d` is a `-`.
fn unescaped(name: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), name.as_bytes());
    while let Some((&first, others)) = rest.split_first() {
        let code = rest.strip_prefix(b"\\x").and_then(|code| code.get(..2));
        let code = code.and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = rest.get(4..).unwrap_or_default();
            }
            None => {
                bytes.push(first);
                rest = others;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_its_name_in_the_command_line() {
        let name = |words: &[&str]| machine_in(words.join("\0").as_bytes());
        let line = [
            "qemu",
            "-m",
            "1G",
            "-name",
            "guest=web,,1,debug-threads=on",
            "-smp",
            "2",
        ];
        assert_eq!(name(&line).as_deref(), Some("web,1"));
        assert_eq!(name(&["qemu", "-name", "db"]).as_deref(), Some("db"));
        assert_eq!(
            name(&["qemu", "-name", "db,process=x"]).as_deref(),
            Some("db")
        );
        assert_eq!(name(&["qemu", "-name", "debug-threads=on"]), None);
        let long = "x".repeat(1 << 20);
        let cut = name(&["qemu", "-name", &long]).map(|name| name.len());
        assert_eq!(cut, Some(MOST_CHARACTERS));
        for none in [&["qemu"][..], &["qemu", "-name"], &["qemu", "-name", ""]] {
            assert_eq!(name(none), None);
        }
        assert_eq!(of_machine(std::process::id()), None);
    }

    #[test]
    fn machines_containers_and_units_are_told_by_their_cgroups() {
        let id = "0123456789ab".to_owned() + &"c".repeat(52);
        for (part, name) in [
            ("machine-qemu\\x2d3\\x2dweb\\x2d1.scope", Some("web-1")),
            ("machine-fedora.scope", Some("fedora")),
            (&format!("docker-{id}.scope"), Some("docker 0123456789ab")),
            (
                &format!("cri-containerd-{id}.scope"),
                Some("cri-containerd 0123456789ab"),
            ),
            (&id, Some("container 0123456789ab")),
            ("lxc.payload.db", Some("db")),
            ("redis@a\\x2db.service", Some("redis@a-b.service")),
            ("user@1000.service", None),
            ("session-2.scope", None),
            ("init.scope", None),
            ("machine.slice", None),
            ("", None),
        ] {
            assert_eq!(part_name(part).as_deref(), name, "{part}");
        }
        assert_eq!(unescaped("a\\x2d\\xzz\\x2"), "a-\\xzz\\x2");
    }
}
