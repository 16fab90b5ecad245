//! A command: whether it would become a guest.

use std::ffi::OsStr;

use super::check::Check;
use crate::program::{self, Obstacle};

/// What `run` would find of it.
pub(super) fn check(name: &OsStr) -> Check {
    let file = match program::find(name, std::env::var_os("PATH").as_deref()) {
        Ok(file) => file,
        Err(error) => {
            let fix = format!("command -v {}", name.display());
            return Check::fail("program", error.to_string(), "there is nothing to run").fix(fix);
        }
    };
    match program::obstacle(&file) {
        None => Check::ok("program", format!("{} loads the agent", file.display())),
        Some(obstacle) => unloadable("program", &file.display().to_string(), &obstacle),
    }
}

/// A program that does not load the agent.
pub(super) fn unloadable(check: &'static str, program: &str, obstacle: &Obstacle) -> Check {
    let why = match obstacle {
        Obstacle::Valgrind => "without the agent nothing of it is merged",
        _ => "the dynamic linker loads the agent, and only then memory is merged",
    };
    Check::fail(check, format!("{program} {obstacle}"), why).fix(remedy(obstacle))
}

/// What merges its memory all the same, and what would let the agent in.
pub(super) fn remedy(obstacle: &Obstacle) -> String {
    let build = match obstacle {
        Obstacle::Secure => return "run it as the user whose rights it takes".to_owned(),
        Obstacle::Go => return "pageone run --backend auto -- CMD  # KSM merges it".to_owned(),
        Obstacle::Static => "link it dynamically, or link libpageone_agent.a into it",
        Obstacle::OtherLibc(_) => {
            return "pageone attach --any PID  # when it runs; or use its build for glibc"
                .to_owned();
        }
        Obstacle::OtherMachine => "use its build for this processor",
        Obstacle::Sanitizer(_) => "use its build without the sanitizer",
        Obstacle::Valgrind => return "start it without valgrind".to_owned(),
    };
    format!("pageone run --backend auto -- CMD  # KSM merges it; or {build}")
}
