//! The `pageone` command: see the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    pageone::main()
}
