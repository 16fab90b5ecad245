//! The programs of these tests, compiled once: the attackers, and the setuid program with its secret.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::support;

/// Compiles `sources` of `tests/hostile/` into one program.
fn compile(program: &Path, sources: &[PathBuf], defines: &[String]) {
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-g", "-Wall", "-Wextra", "-pthread", "-o"]);
    cc.arg(program).args(defines).args(sources).arg("-ldl");
    assert!(cc.status().expect("a C compiler is installed").success());
}

fn sources(wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let folder = fs::read_dir(support::root().join("tests/hostile")).unwrap();
    let paths = folder.map(|entry| entry.unwrap().path());
    let is_wanted = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.ends_with(".c") && wanted(name)
    };
    paths.filter(is_wanted).collect()
}

/// Programs with a `main` of their own, each one file.
const ALONE: [&str; 3] = ["setuid.c", "dropper.c", "fixed.c"];

fn built(name: &str) -> PathBuf {
    let own = format!("{name}-{}", std::process::id());
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(own)
}

/// The attackers, who speak this version of the protocol.
pub(crate) fn attackers() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let program = built("hostile");
        let version = format!("-DPROTOCOL={}", wire::VERSION);
        let files = sources(|name| !ALONE.contains(&name));
        compile(&program, &files, &[version]);
        program
    })
}

/// The program that gives its rights up.
pub(crate) fn dropper() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let program = built("dropper");
        compile(&program, &sources(|name| name == "dropper.c"), &[]);
        program
    })
}

/// Puts a setuid-root program into `folder` that has code at a known place. Gives it, and the folder that this code would make.
pub(crate) fn install_fixed(folder: &Path) -> (PathBuf, PathBuf) {
    let (program, reached) = (folder.join("fixed"), folder.join("reached"));
    let define = format!("-DREACHED=\"{}\"", reached.display());
    let place = ["-no-pie", "-Wl,--section-start=.fixed=0x10000000"].map(str::to_owned);
    let flags: Vec<_> = place.into_iter().chain([define]).collect();
    compile(&program, &sources(|name| name == "fixed.c"), &flags);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    (program, reached)
}

/// Puts the setuid-root program into `folder`, and beside it the file with its secret, which is root's alone.
pub(crate) fn install_setuid(folder: &Path) -> Vec<u8> {
    let mut secret = [0; 64];
    let random = fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    let text = format!("only root may read this: {}", random.trim());
    secret[..text.len()].copy_from_slice(text.as_bytes());
    let file = folder.join("secret");
    fs::write(&file, secret).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let program = folder.join("setuid");
    let define = format!("-DSECRET_FILE=\"{}\"", file.display());
    compile(&program, &sources(|name| name == "setuid.c"), &[define]);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    secret.to_vec()
}
