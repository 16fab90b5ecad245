//! Why an agent leaves, in words.

use std::io::Error;

use rustix::io::Errno;

/// What agents give for memory that was moved: the program watches it, or it has no page there.
const WATCHED: i32 = Errno::DEADLK.raw_os_error();
const NO_PAGE: i32 = Errno::FAULT.raw_os_error();

/// What an agent's step and number mean.
pub(crate) fn words(step: u8, number: u16) -> String {
    let code = i32::from(number);
    let error = Error::from_raw_os_error(code);
    match step {
        wire::STEP_USERFAULTFD => format!(
            "userfaultfd is refused to it: {error} (remedy: a daemon of root's, or vm.unprivileged_userfaultfd=1)"
        ),
        wire::STEP_MEMORY if [WATCHED, NO_PAGE].contains(&code) => format!(
            "merged memory that it moved past libc cannot be its own there: {error} (a userfaultfd of its own watches it, a guard \
             lies on it, or it was made larger)"
        ),
        wire::STEP_MEMORY => format!(
            "memory or its own /proc is refused to it: {error} (a program that changed its user hides from /proc \
             until prctl(PR_SET_DUMPABLE, 1))"
        ),
        wire::STEP_RIGHTS => "the program changes its rights, and a new agent comes".to_owned(),
        wire::STEP_FILTER if number == 0 => {
            "a seccomp filter that the agent could not read; nothing of the program is merged"
                .to_owned()
        }
        wire::STEP_FILTER => {
            format!(
                "a seccomp filter refuses system call {number}; nothing of the program is merged"
            )
        }
        wire::STEP_ELSEWHERE => {
            "the program goes to another root directory or namespace; a new agent comes if it \
             finds /proc, this socket and a user that it may trust there; its memory is private until then"
                .to_owned()
        }
        wire::STEP_NARROW => format!(
            "its thread cannot be given a seccomp filter of its own: {error} (remedy: a kernel with CONFIG_SECCOMP_FILTER)"
        ),
        wire::STEP_EXECUTABLE => {
            "the program makes all that it reads executable (READ_IMPLIES_EXEC); nothing of it is merged"
                .to_owned()
        }
        wire::STEP_DETACHED => "pageone detach has taken it out of the process".to_owned(),
        wire::STEP_THREADS => "the program's threads have different rights".to_owned(),
        _ => format!("the agent failed at step {step}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{NO_PAGE, words};

    #[test]
    fn a_reason_names_the_call_or_the_error() {
        assert!(words(wire::STEP_FILTER, 25).contains("system call 25"));
        assert!(words(wire::STEP_USERFAULTFD, 1).contains("Operation not permitted"));
        assert!(words(99, 12).contains("step 99"));
        assert!(words(wire::STEP_MEMORY, 12).contains("PR_SET_DUMPABLE"));
        let no_page = u16::try_from(NO_PAGE).expect("a small number");
        assert!(words(wire::STEP_MEMORY, no_page).contains("guard"));
    }
}
