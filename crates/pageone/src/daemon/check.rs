//! Which files the daemon reads, and `pageone config check`, which reads them and does nothing else.
//!
//! Without a flag they are `pageone.toml` and `policy.toml` of a folder, as far as they exist. The folder is
//! `$CONFIGURATION_DIRECTORY`, which systemd sets, else `/etc/pageone` for root. A user's own daemon has none: the
//! machine's files are for the machine's daemon.

use std::env;
use std::io;
use std::path::PathBuf;

use anyhow::Result;

use super::config::Config;
use crate::output::print;
use crate::policy::Policy;

/// Where root's daemon looks.
const FOLDER: &str = "/etc/pageone";

/// The flags that name files.
#[derive(clap::Args)]
pub(crate) struct Files {
    /// A TOML file with all knobs, socket, policy, numa, node, log, [limits] and [[attach]]; a flag wins over it [default for root: /etc/pageone/pageone.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Who may be a guest, in which domain, and who may control [default for root: /etc/pageone/policy.toml, if it exists; without a file a domain for each user]
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
}

impl Files {
    /// The configuration, and the file that it is from.
    ///
    /// # Errors
    /// The file cannot be read or understood.
    pub(super) fn config(&self) -> Result<(Config, Option<PathBuf>)> {
        let file = self.config.clone().or_else(|| found("pageone.toml"));
        let config = file.as_deref().map(Config::read).transpose()?;
        Ok((config.unwrap_or_default(), file))
    }

    /// Reads all files; gives the configuration's and the policy's.
    ///
    /// # Errors
    /// There is a mistake in one.
    pub(super) fn check(&self) -> Result<(Option<PathBuf>, Option<PathBuf>)> {
        let (config, file) = self.config()?;
        let policy = self.policy(&config);
        if let Some(path) = &policy {
            Policy::read(path)?;
        }
        Ok((file, policy))
    }

    /// The file of the policy: a flag, else the configuration, else the default one.
    pub(super) fn policy(&self, config: &Config) -> Option<PathBuf> {
        let named = self.policy.clone().or_else(|| config.policy.clone());
        named.or_else(|| found("policy.toml"))
    }
}

/// The file of the policy that a daemon without flags would read here, if there is one.
///
/// # Errors
/// The configuration, which may name it, cannot be read or understood.
pub(crate) fn default_policy() -> Result<Option<PathBuf>> {
    let files = Files {
        config: None,
        policy: None,
    };
    let (config, _) = files.config()?;
    Ok(files.policy(&config))
}

/// The file of the policy of root's daemon with these flags, as far as its configuration can be read here.
pub(crate) fn policy_of(config: Option<PathBuf>, policy: Option<PathBuf>) -> PathBuf {
    let folder = PathBuf::from(FOLDER);
    let config = config.or_else(|| existing(folder.join("pageone.toml")));
    let named = || Config::read(&config?).ok()?.policy;
    policy
        .or_else(named)
        .unwrap_or_else(|| folder.join("policy.toml"))
}

/// A file of the folder, if there is one.
fn found(name: &str) -> Option<PathBuf> {
    let root = rustix::process::geteuid().is_root();
    existing(folder(env::var_os("CONFIGURATION_DIRECTORY"), root)?.join(name))
}

/// The path, unless it names nothing. A policy that cannot be reached is a mistake, and not the default policy.
fn existing(path: PathBuf) -> Option<PathBuf> {
    use io::ErrorKind::{NotADirectory, NotFound};
    let looked = path.symlink_metadata();
    let is_absent = looked.is_err_and(|error| matches!(error.kind(), NotFound | NotADirectory));
    (!is_absent).then_some(path)
}

/// The folder by what systemd says. It may say several, with colons between them: ours is the first.
fn folder(said: Option<std::ffi::OsString>, root: bool) -> Option<PathBuf> {
    let said = said.filter(|said| !said.is_empty());
    let said = said.as_ref().map(|said| {
        let text = said.to_string_lossy();
        PathBuf::from(text.split(':').next().unwrap_or_default())
    });
    said.or_else(|| root.then(|| PathBuf::from(FOLDER)))
}

/// `pageone config …`
#[derive(clap::Subcommand)]
pub(crate) enum ConfigCommand {
    /// Reads the configuration and the policy as the daemon would, and says what is wrong with them
    Check(Files),
}

impl ConfigCommand {
    pub(crate) fn run(self) -> Result<()> {
        let Self::Check(files) = self;
        let (config, policy) = files.check()?;
        let lines = [
            (config, "the configuration: the defaults"),
            (policy, "the policy: a domain for each user"),
        ];
        print(&lines.map(|(file, without)| line(file, without)).concat())
    }
}

fn line(file: Option<PathBuf>, without: &str) -> String {
    match file {
        Some(path) => format!("{}: no mistake\n", path.display()),
        None => format!("no file for {without}\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_leads_nowhere_is_a_file_that_cannot_be_read() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(existing(folder.path().join("absent")), None);
        assert_eq!(existing(PathBuf::from("/dev/null/policy.toml")), None);
        let link = folder.path().join("policy.toml");
        std::os::unix::fs::symlink("/nonexistent", &link).unwrap();
        assert_eq!(existing(link.clone()), Some(link));
    }

    #[test]
    fn systemds_folder_wins_and_only_root_has_a_default() {
        let said = |text: &str| Some(text.into());
        let is = |path: &str| Some(PathBuf::from(path));
        assert_eq!(folder(said("/a"), true), is("/a"));
        assert_eq!(folder(said("/a:/b"), false), is("/a"));
        assert_eq!(folder(said(""), true), is(FOLDER));
        assert_eq!(folder(None, true), is(FOLDER));
        assert_eq!(folder(None, false), None);
    }
}
