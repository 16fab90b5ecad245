//! The `pageone` command: see the library.
#![forbid(unsafe_code)]

sys::note_inherited!();

fn main() -> std::process::ExitCode {
    sys::mark::keep();
    pageone::main()
}
