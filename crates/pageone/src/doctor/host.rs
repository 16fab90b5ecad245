//! The machine: its kernel, and the rights of this user.

use engine::{EngineError, Facilities};
use rustix::io::Errno;

use super::check::Check;
use crate::paths;

/// The kernel that has all that is needed.
const KERNEL: (u32, u32) = (6, 8);
/// The kernel's own default; guests are measured to do with it.
const MAPPINGS: u64 = 65_530;

const LATER_KERNEL: &str = "boot Linux 6.8 or newer";

/// All of them; `served` by root's daemon this user needs few rights.
pub(super) fn checks(served: bool) -> Vec<Check> {
    let root = rustix::process::geteuid().is_root();
    let Facilities {
        page_map,
        reading,
        userfaultfd,
        lifelines,
    } = Facilities::tried();
    vec![
        kernel(&sys::host::kernel_release()),
        facility(
            "page-map",
            page_map,
            "many pages are asked at once what was written",
            LATER_KERNEL,
        ),
        facility(
            "reading",
            reading,
            "memory of guests can be read",
            LATER_KERNEL,
        ),
        match userfaultfd {
            Ok(right) => right_to_hold(right, served),
            Err(error) => failed("userfaultfd", &error, LATER_KERNEL),
        },
        facility(
            "leases",
            lifelines,
            "the kernel tells when no process maps a page",
            "sudo sysctl fs.leases-enable=1",
        ),
        ptrace(
            sys::host::sysctl("kernel.yama.ptrace_scope"),
            root || served,
        ),
        code_writes(sys::mapping::try_to_force()),
        mappings(sys::host::sysctl("vm.max_map_count")),
        agent(
            paths::agent().map_err(|error| format!("{error:#}")),
            std::env::var_os("PAGEONE_AGENT").is_some(),
        ),
    ]
}

fn kernel(release: &str) -> Check {
    match sys::host::version_of(release) {
        Some(version) if version >= KERNEL => Check::ok("kernel", format!("Linux {release}")),
        Some(_) => Check::fail(
            "kernel",
            format!("Linux {release}"),
            "pages can be taken from a running program and put back since Linux 6.8",
        )
        .fix(LATER_KERNEL),
        None => Check::warn(
            "kernel",
            format!("its release is not understood: `{release}`"),
            "Linux 6.8 or newer is needed",
        )
        .fix("mount -t proc proc /proc"),
    }
}

fn facility(check: &'static str, tried: Result<(), EngineError>, well: &str, fix: &str) -> Check {
    match tried {
        Ok(()) => Check::ok(check, well),
        Err(error) => failed(check, &error, fix),
    }
}

/// A facility that is missing, or could not be tried: for want of something that the kernel's answer tells.
fn failed(check: &'static str, error: &EngineError, fix: &str) -> Check {
    let source = match error {
        EngineError::Untried { source, .. } => Errno::from_io_error(source),
        _ => None,
    };
    let fix = match source {
        Some(Errno::MFILE) => "ulimit -n 65536",
        Some(Errno::NFILE) => "sudo sysctl fs.file-max=1048576",
        Some(Errno::PERM | Errno::ACCESS) if rustix::process::geteuid().is_root() => {
            "grep Seccomp: /proc/self/status  # 2: a filter of the container or the unit; allow the call there"
        }
        Some(Errno::PERM | Errno::ACCESS) => "sudo pageone doctor",
        Some(_) if paths::has_unit() => "free -m; systemctl show -p MemoryMax --value pageone",
        Some(_) => "free -m",
        None => fix,
    };
    let why = "no engine starts here without it";
    Check::fail(check, error.to_string(), why).fix(fix)
}

fn right_to_hold(right: bool, served: bool) -> Check {
    match (right, served) {
        (true, _) => Check::ok("userfaultfd", "pages can be held and moved"),
        (false, true) => Check::ok("userfaultfd", "root's daemon lends its right to its guests"),
        (false, false) => Check::fail(
            "userfaultfd",
            "this user has no right to it",
            "no page can be merged without it: programs run, and nothing is saved",
        )
        .fix(format!(
            "{}  # or: sudo sysctl vm.unprivileged_userfaultfd=1",
            paths::daemon_of_root()
        )),
    }
}

/// By Yama's scope: who may read the memory of others. Agents allow their own engine to, which scope 1 heeds.
fn ptrace(scope: Option<u64>, is_roots: bool) -> Check {
    let why = "the engine reads the memory of its guests";
    match scope {
        Some(3) => Check::fail(
            "ptrace",
            "kernel.yama.ptrace_scope is 3: no process may read another's memory",
            why,
        )
        .fix("sudo grep -r ptrace_scope /etc/sysctl.d  # remove it there, and restart the machine"),
        Some(2) if !is_roots => Check::fail(
            "ptrace",
            "kernel.yama.ptrace_scope is 2: only root may read others' memory",
            why,
        )
        .fix(format!(
            "sudo sysctl kernel.yama.ptrace_scope=1  # or: {}",
            paths::daemon_of_root()
        )),
        Some(scope) => Check::ok("ptrace", format!("kernel.yama.ptrace_scope is {scope}")),
        None => Check::ok("ptrace", "memory of the same user may be read"),
    }
}

/// Hooks stand in libc's code, which is read-only: the agent writes them by /proc/self/mem, `attach` by /proc/PID/mem.
fn code_writes(tried: Result<(), Errno>) -> Check {
    let why = "libc's own calls have no hooks then, and with `never` no process can be attached";
    let warn = |what: String| Check::warn("code-writes", what, why);
    match tried {
        Ok(()) => Check::ok("code-writes", "hooks can be put into libc's code"),
        Err(Errno::IO) => warn(
            "the kernel refuses writes to code by /proc/PID/mem: proc_mem.force_override is never or ptrace"
                .to_owned(),
        )
        .fix("grep -o 'proc_mem[^ ]*' /proc/cmdline  # boot with proc_mem.force_override=always"),
        Err(error) => warn(format!("writes to code cannot be tried: {error}"))
            .fix("mount -t proc proc /proc"),
    }
}

fn mappings(most: Option<u64>) -> Check {
    let why = "merged pages between others take mappings; at the limit the rest is left alone";
    let fix = "sudo sysctl vm.max_map_count=1048576";
    match most {
        Some(most) if most >= MAPPINGS => {
            Check::ok("mappings", format!("vm.max_map_count is {most}"))
        }
        Some(most) => Check::warn("mappings", format!("vm.max_map_count is {most}"), why).fix(fix),
        None => Check::warn("mappings", "vm.max_map_count cannot be read", why)
            .fix("mount -t proc proc /proc"),
    }
}

/// `is_named`: it was looked for at `PAGEONE_AGENT` alone.
fn agent(found: Result<std::path::PathBuf, String>, is_named: bool) -> Check {
    let fix = match is_named {
        true => "unset PAGEONE_AGENT  # it is looked for beside the command then",
        false => {
            "make build && sudo make install  # from PageONE's source; or install the package `pageone` again"
        }
    };
    match found {
        Ok(path) => Check::ok("agent", path.display().to_string()),
        Err(error) => {
            Check::fail("agent", error, "programs become guests by this library").fix(fix)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::Level;
    use super::*;

    #[test]
    fn kernels_and_limits_are_judged() {
        let levels = |checks: &[Check]| checks.iter().map(|check| check.level).collect::<Vec<_>>();
        let kernels = ["6.18.5", "6.8.0-31-generic", "6.7.9", "5.15.0", "what"].map(kernel);
        use Level::{Fail, Ok, Warn};
        assert_eq!(levels(&kernels), [Ok, Ok, Fail, Fail, Warn]);
        let scopes = [None, Some(1), Some(2), Some(3)];
        assert_eq!(
            levels(&scopes.map(|scope| ptrace(scope, false))),
            [Ok, Ok, Fail, Fail]
        );
        assert_eq!(
            levels(&scopes.map(|scope| ptrace(scope, true))),
            [Ok, Ok, Ok, Fail]
        );
        assert_eq!(
            levels(&[Some(65_530), Some(65_529), None].map(mappings)),
            [Ok, Warn, Warn]
        );
        let writes = [Result::Ok(()), Err(Errno::IO), Err(Errno::NOENT)].map(code_writes);
        assert_eq!(levels(&writes), [Ok, Warn, Warn]);
        let told = &writes[1];
        let fix = told.fix.as_deref();
        assert!(told.what.contains("proc_mem.force_override") && fix.is_some());
        let rights = [(true, false), (false, true), (false, false)];
        assert_eq!(
            levels(&rights.map(|(right, served)| right_to_hold(right, served))),
            [Ok, Ok, Fail]
        );
    }

    #[test]
    fn what_fails_has_a_command_that_mends_it() {
        let untried = |errno: Errno| EngineError::Untried {
            what: "a lease",
            remedy: "do something",
            source: errno.into(),
        };
        let forbidden = match rustix::process::geteuid().is_root() {
            true => "Seccomp",
            false => "sudo",
        };
        for (errno, fix) in [
            (Errno::MFILE, "ulimit"),
            (Errno::NFILE, "file-max"),
            (Errno::PERM, forbidden),
        ] {
            let check = failed("leases", &untried(errno), "other");
            assert!(check.fix.unwrap().contains(fix), "{errno}");
        }
        let missing = EngineError::Missing {
            what: "a lease",
            needs: "something",
            source: std::io::ErrorKind::Unsupported.into(),
        };
        assert_eq!(
            failed("leases", &missing, "other").fix.as_deref(),
            Some("other")
        );
    }
}
