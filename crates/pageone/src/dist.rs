//! `pageone dist FOLDER`: the files of a package that come from the tables of flags and of knobs.
//!
//! ```text
//! FOLDER/man/man1/pageone*.1                      a page a verb
//! FOLDER/bash-completion/completions/pageone      and so for zsh and fish, each where its shell looks
//! FOLDER/pageone.toml                             all keys, as comments, with their defaults
//! ```
//!
//! Help, manual pages and completions are made from the same table, so none of them is ever behind.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::{Shell, generate_to};
use wire::KNOBS;

/// Where each shell looks, below a prefix's `share`.
const SHELLS: [(Shell, &str, &str, &str); 3] = [
    (
        Shell::Bash,
        "bash-completion/completions",
        "pageone.bash",
        "pageone",
    ),
    (Shell::Zsh, "zsh/site-functions", "_pageone", "_pageone"),
    (
        Shell::Fish,
        "fish/vendor_completions.d",
        "pageone.fish",
        "pageone.fish",
    ),
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to
    folder: PathBuf,
}

/// Writes all files for `command`.
pub(crate) fn main(args: &Args, mut command: Command) -> Result<()> {
    let mut write = || -> Result<()> {
        let pages = args.folder.join("man/man1");
        fs::create_dir_all(&pages)?;
        manual(&pages, command.clone())?;
        for (shell, place, made, name) in SHELLS {
            let place = args.folder.join(place);
            fs::create_dir_all(&place)?;
            generate_to(shell, &mut command, "pageone", &place)?;
            fs::rename(place.join(made), place.join(name))?;
            complete_more(shell, &place.join(name))?;
        }
        Ok(fs::write(
            args.folder.join("pageone.toml"),
            configuration(),
        )?)
    };
    write().with_context(|| format!("cannot write to {}", args.folder.display()))
}

/// In bash: no blank behind `KEY=`, and sockets alone behind `--socket`.
const IN_BASH: &str = r#"
_pageone_sockets() {
    local path
    compgen -W "/run/pageone.sock ${XDG_RUNTIME_DIR:+$XDG_RUNTIME_DIR/pageone.sock}" -- "$1"
    compgen -f -- "$1" | while read -r path; do
        [[ ! -S $path ]] || printf '%s\n' "$path"
    done
    compgen -d -S / -- "$1"
}
_pageone_more() {
    if [[ $3 == --socket ]]; then
        mapfile -t COMPREPLY < <(_pageone_sockets "$2" | sort -u)
    else
        _pageone "$@"
    fi
    [[ ${#COMPREPLY[@]} != 1 || ${COMPREPLY[0]} != *[=/] ]] || compopt -o nospace 2>/dev/null
    return 0
}
complete -F _pageone_more -o bashdefault -o default pageone
"#;

/// In fish: sockets and folders alone behind `--socket`. The word may have the flag in it, as `--socket=/run`.
const IN_FISH: &str = r#"
function __pageone_sockets
    set -l word (commandline -ct | string replace -r '^--socket=' '' | string replace -r '^~/' $HOME/)
    echo /run/pageone.sock
    test -n "$XDG_RUNTIME_DIR"; and echo $XDG_RUNTIME_DIR/pageone.sock
    for path in $word*
        test -S $path; and echo $path
        test -d $path; and echo $path/
    end
end
complete -c pageone -l socket -x -a '(__pageone_sockets)'
"#;
/// What the library has there: any file.
const FILES_IN_FISH: &str = " -r -F";

/// Adds to a script what the library does not make.
fn complete_more(shell: Shell, file: &Path) -> Result<()> {
    let mut script = fs::read_to_string(file)?;
    match shell {
        Shell::Bash => script.push_str(IN_BASH),
        // Of a folder's files sockets alone: `=` is what zsh marks them with.
        Shell::Zsh => script = script.replace(":SOCKET:_files", ":SOCKET:_files -g \"*(=)\""),
        Shell::Fish => {
            // Other rules for the flag would add all files.
            let is_of_socket =
                |line: &&str| line.contains(" -l socket ") && line.ends_with(FILES_IN_FISH);
            let lines = script.lines().map(|line| match is_of_socket(&line) {
                true => format!("{}\n", line.trim_end_matches(FILES_IN_FISH)),
                false => format!("{line}\n"),
            });
            script = lines.collect();
            script.push_str(IN_FISH);
            for knob in KNOBS {
                let (key, form) = (knob.key, knob.form);
                let line = "complete -c pageone -n \"__fish_pageone_using_subcommand set\" -f -a";
                let _ = writeln!(script, "{line} '{key}=' -d '{form}'");
            }
        }
        _ => {}
    }
    Ok(fs::write(file, script)?)
}

/// A page for each verb that the help shows.
fn manual(folder: &Path, command: Command) -> Result<()> {
    clap_mangen::generate_to(without_help(command), folder)?;
    let first = folder.join("pageone.1");
    let page = fs::read_to_string(&first)? + BESIDES;
    Ok(fs::write(first, page)?)
}

/// What the first page says of all verbs, besides their flags.
const BESIDES: &str = r"
.SH ENVIRONMENT
.TP
PAGEONE_SOCKET
The daemon's socket, for verbs that ask a daemon
.TP
PAGEONE_DOMAIN
The name for which a guest asks, as by \-\-domain
.TP
PAGEONE_AGENT
The agent's library
.TP
PAGEONE_LOG
What the daemon logs: a level, like warn, or a level of a part, like engine=debug
.SH FILES
.TP
/run/pageone.sock
The socket of root's daemon
.TP
/etc/pageone/pageone.toml
The daemon's configuration
.TP
/etc/pageone/policy.toml
The policy: who shares with whom, who sees all guests, who turns knobs
.TP
/usr/share/doc/pageone
The quick start, the manual by verb (cli.md), and operation
.SH EXIT STATUS
0 done, 1 failed, 2 wrong usage. The codes of run are those of env(1). Those of doctor: 1 less is merged than could be, 2 all memory is kept from being merged.
.SH EXAMPLES
.nf
pageone analyze \-\-all
sudo pageone attach \-\-any 1234
pageone status
.fi
";

/// The verb `help` would have a page for each other verb once more.
fn without_help(command: Command) -> Command {
    let command = command.disable_help_subcommand(true);
    command.mut_subcommands(without_help)
}

/// The example of a configuration: it says nothing but the defaults.
fn configuration() -> String {
    let mut text = String::from(
        "# PageONE's configuration: see `man pageone-daemon`. `pageone config check` finds mistakes.\n\
         # Keys stand here with their defaults. A flag of the daemon wins over this file.\n\n\
         # Where to listen.\n#socket = \"/run/pageone.sock\"\n\n\
         # Who may be a guest, in which domain, and who may see and control.\n\
         #policy = \"/etc/pageone/policy.toml\"\n\n\
         # What to log: error, warn, info, debug, or by part, like \"info,engine=debug\".\n#log = \"info\"\n",
    );
    for knob in KNOBS {
        let (about, key) = (knob.about.trim(), knob.key);
        // A default in words is the machine's: a value that any machine takes stands for it.
        let value = match knob.default.contains(' ') {
            true => format!("{key} = \"1\"    # without this line: {}", knob.default),
            false => format!("{key} = {:?}", knob.default),
        };
        let _ = write!(text, "\n# {about}: {}\n#{value}\n", knob.form);
    }
    text.push_str(
        "\n# CPUs and memory of a NUMA node for the daemon itself: a number, or \"auto\".\n# node = \"auto\"\n\n\
         # Pretended nodes, to try things out: cut the memory into so many.\n# numa = \"fake=4\"\n\n\
         # What one process and one user may take: operations.md has all keys.\n# [limits]\n# guests_per_user = 1024\n\n\
         # Running processes that become guests: by command, executable, user, uid, group, gid, cgroup, unit.\n\
         # [[attach]]\n# unit = \"worker@*.service\"\n# any = true              # all memory, not only what they offer\n\
         # any_huge = false        # with any: also what is to be of huge pages\n# domain = \"workers\"\n# mount = false           # containers get the socket\n\
         # need = \"4G\"             # planned for by `run --node auto`\n# after = \"10s\"\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::config::Config;

    /// The words that bash offers in place of the last of these.
    fn offered(script: &Path, words: &[&str]) -> Vec<String> {
        let ask = r#"
            source "$1"; shift
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
            _pageone_more pageone "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
            printf '%s\n' "${COMPREPLY[@]}""#;
        let mut bash = std::process::Command::new("bash");
        bash.args(["--norc", "-c", ask, "bash"]).arg(script);
        let said = bash.args(words).output().unwrap();
        assert!(said.stderr.is_empty(), "{said:?}");
        let said = String::from_utf8(said.stdout).unwrap();
        said.lines().map(str::to_owned).collect()
    }

    /// The words that fish offers for the last one of a line; none where there is no fish.
    fn offered_by_fish(script: &Path, line: &str) -> Option<Vec<String>> {
        let mut fish = std::process::Command::new("fish");
        fish.args(["--no-config", "-c", "source $argv[1]; complete -C $argv[2]"]);
        let Ok(said) = fish.arg(script).arg(line).output() else {
            eprintln!("skipped: there is no fish");
            return None;
        };
        assert!(said.status.success(), "{said:?}");
        let said = String::from_utf8(said.stdout).unwrap();
        // A description may follow each.
        let words = said.lines().map(|line| line.split('\t').next().unwrap());
        Some(words.map(str::to_owned).collect())
    }

    #[test]
    fn completions_offer_knobs_and_sockets() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("made");
        let args = Args { folder };
        main(&args, <crate::Cli as clap::CommandFactory>::command()).unwrap();
        let made = |name: &str| args.folder.join(name);
        let bash = made("bash-completion/completions/pageone");
        let keys = offered(&bash, &["pageone", "set", ""]);
        for knob in KNOBS {
            assert!(keys.contains(&format!("{}=", knob.key)), "{keys:?}");
        }
        let one = offered(&bash, &["pageone", "set", "merge_p"]);
        assert_eq!(one, ["merge_period="]);
        let [socket, file] = ["one.sock", "one.text"].map(|name| place.path().join(name));
        let _listens = sys::socket::listen(&socket).unwrap();
        fs::write(file, "").unwrap();
        let begin = place.path().join("one");
        let sockets = offered(
            &bash,
            &["pageone", "status", "--socket", begin.to_str().unwrap()],
        );
        assert_eq!(sockets, [socket.to_str().unwrap()]);
        let usual = offered(&bash, &["pageone", "top", "--socket", "/run/pageone.s"]);
        assert!(usual.contains(&"/run/pageone.sock".to_owned()), "{usual:?}");
        let read = |name: &str| fs::read_to_string(made(name)).unwrap();
        let page = read("man/man1/pageone.1");
        assert!(page.contains("/etc/pageone/policy.toml"), "{page}");
        assert!(!read("man/man1/pageone-run.1").contains(".SH FILES"));
        let fish = read("fish/vendor_completions.d/pageone.fish");
        for line in fish.lines().filter(|line| line.contains("-l socket")) {
            assert!(!line.ends_with("-F"), "it offers all files: {line}");
        }
        let script = made("fish/vendor_completions.d/pageone.fish");
        for flag in ["--socket ", "--socket="] {
            let line = format!("pageone status {flag}{}", begin.display());
            let Some(words) = offered_by_fish(&script, &line) else {
                break;
            };
            let has = |path: &str| words.iter().any(|word| word.ends_with(path));
            assert!(has(socket.to_str().unwrap()), "{flag}: {words:?}");
            assert!(!has("one.text"), "{flag}: {words:?}");
        }
        let zsh = read("zsh/site-functions/_pageone");
        assert!(fish.contains("-a 'merge_period='"), "{fish}");
        assert!(zsh.contains("merge_period= "), "{zsh}");
        assert!(zsh.contains(r#":SOCKET:_files -g "*(=)"'"#), "{zsh}");
    }

    #[test]
    fn the_example_says_the_defaults_and_is_a_configuration() {
        let example = configuration();
        assert_eq!(Config::parse(&example).unwrap(), Config::default());
        let key = |line: &&str| line.starts_with('#') && !line.starts_with("# ");
        let keys = example.lines().filter(key).map(|line| &line[1..]);
        let said: Vec<_> = keys.collect();
        assert!(Config::parse(&said.join("\n")).is_ok(), "{example}");
        let is_default = |line: &&str| !line.contains("# without this line");
        let said: Vec<_> = said.into_iter().filter(is_default).collect();
        let config = Config::parse(&said.join("\n")).unwrap();
        assert_eq!(config.knobs, Config::default().knobs);
        assert_eq!(config.socket, Some("/run/pageone.sock".into()));
        assert!(said.len() >= KNOBS.len(), "{example}");
        let sections = example.lines().filter_map(|line| line.strip_prefix("# "));
        let toml = |line: &&str| line.contains(" = ") || line.starts_with('[');
        let sections: Vec<_> = sections.filter(toml).collect();
        assert!(Config::parse(&sections.join("\n")).is_ok(), "{sections:?}");
    }
}
