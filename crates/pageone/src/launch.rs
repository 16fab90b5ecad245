//! How a process becomes a guest: the agent in `LD_PRELOAD`, and where it finds its engine.

use std::env::VarError;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sys::foreign::Foreign;
use wire::Name;

/// How long a process has to have lived before all its memory is offered.
pub(crate) const ANY_AFTER: Duration = Duration::from_secs(2);

/// What a guest's environment tells its agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch<'a> {
    /// The agent's library, absolute.
    pub(crate) agent: &'a Path,
    /// The engine's socket.
    pub(crate) socket: &'a Path,
    /// The domain to ask for.
    pub(crate) domain: Option<&'a str>,
    /// Whether the kernel's KSM is told as well.
    pub(crate) also_ksm: bool,
    /// Whether all memory is offered.
    pub(crate) any: Option<Any>,
}

/// How all memory is offered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Any {
    /// So long a process has to have lived.
    pub(crate) after: Duration,
    /// Whether memory is offered with it that was advised to be of huge pages.
    pub(crate) huge: bool,
}

impl<'a> Launch<'a> {
    /// For a guest in its user's domain that offers its memory itself, to PageONE alone.
    pub(crate) fn new(agent: &'a Path, socket: &'a Path) -> Self {
        Self {
            agent,
            socket,
            domain: None,
            also_ksm: false,
            any: None,
        }
    }

    /// Puts it into the environment of `command`.
    pub(crate) fn equip(self, command: &mut Command) {
        let others = std::env::var_os("LD_PRELOAD");
        command.env("LD_PRELOAD", preload(others, self.agent));
        command.env(
            "ASAN_OPTIONS",
            let_sanitizers_be(std::env::var_os("ASAN_OPTIONS")),
        );
        let socket = std::path::absolute(self.socket);
        command.env("PAGEONE_SOCKET", socket.as_deref().unwrap_or(self.socket));
        match self.domain {
            Some(domain) => command.env("PAGEONE_DOMAIN", domain),
            None => command.env_remove("PAGEONE_DOMAIN"),
        };
        match self.also_ksm {
            true => command.env("PAGEONE_ALSO_KSM", "1"),
            false => command.env_remove("PAGEONE_ALSO_KSM"),
        };
        match self.any {
            Some(any) => command.env("PAGEONE_ANY", any.after.as_millis().to_string()),
            None => command.env_remove("PAGEONE_ANY"),
        };
        match self.any.is_some_and(|any| any.huge) {
            true => command.env("PAGEONE_ANY_HUGE", "1"),
            false => command.env_remove("PAGEONE_ANY_HUGE"),
        };
    }
}

/// The libraries to preload: the agent is the last. Its hooks enter the kernel themselves, so a function of the same name in
/// another library has to come before.
fn preload(others: Option<OsString>, agent: &Path) -> OsString {
    let mut all = others.unwrap_or_default();
    if !all.is_empty() {
        all.push(":");
    }
    all.push(agent);
    all
}

/// AddressSanitizer's options, for programs that the command starts: its shared runtime ends a program that another library is loaded
/// before. Such programs run unmerged: the agent does not begin where it finds LeakSanitizer, which that runtime has in it.
fn let_sanitizers_be(options: Option<OsString>) -> OsString {
    const OPTION: &str = "verify_asan_link_order";
    let mut all = options.unwrap_or_default();
    if all.to_string_lossy().contains(OPTION) {
        return all;
    }
    if !all.is_empty() {
        all.push(":");
    }
    all.push(OPTION);
    all.push("=0");
    all
}

/// Checks the name of a domain, before an agent would quietly drop it.
///
/// # Errors
/// It is empty, too long, or has control characters.
pub(crate) fn check_domain(domain: &str) -> Result<()> {
    if domain.is_empty() || Name::new(domain).is_none() {
        bail!(
            "`{}` is no domain: 1 to {} bytes, no control characters",
            Foreign(domain),
            Name::MAX
        );
    }
    Ok(())
}

/// The name of a domain that a person wrote.
///
/// # Errors
/// As [`check_domain`], in words.
pub(crate) fn domain_of(text: &str) -> Result<String, String> {
    let checked = check_domain(text);
    checked.map_or_else(|error| Err(error.to_string()), |()| Ok(text.to_owned()))
}

/// The domain that guests of a command ask for.
pub(crate) struct WantedDomain {
    pub(crate) name: String,
    /// What said so.
    pub(crate) by: &'static str,
}

impl WantedDomain {
    /// What the flag says, else the environment, as agents without `run` have it.
    pub(crate) fn of(flag: Option<&str>) -> Result<Option<Self>> {
        const VARIABLE: &str = "PAGEONE_DOMAIN";
        let of_environment = || match std::env::var(VARIABLE) {
            Ok(name) if name.is_empty() => Ok(None),
            Ok(name) => Ok(Some((name, VARIABLE))),
            Err(VarError::NotPresent) => Ok(None),
            Err(VarError::NotUnicode(_)) => bail!("{VARIABLE} is no domain: it is not UTF-8"),
        };
        let asked = match flag {
            Some(name) => Some((name.to_owned(), "--domain")),
            None => of_environment()?,
        };
        let Some((name, by)) = asked else {
            return Ok(None);
        };
        check_domain(&name).context(by)?;
        Ok(Some(Self { name, by }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn an_empty_name_is_no_domain() {
        assert!(check_domain("").is_err() && check_domain("blue").is_ok());
    }

    #[test]
    fn the_environment_says_it_all() {
        let launch = Launch {
            agent: Path::new("/lib/agent.so"),
            socket: Path::new("/run/x.sock"),
            domain: Some("blue"),
            also_ksm: false,
            any: Some(Any {
                after: Duration::from_secs(2),
                huge: false,
            }),
        };
        let mut command = Command::new("true");
        launch.equip(&mut command);
        let set: HashMap<_, _> = command.get_envs().collect();
        let value = |name: &str| set[std::ffi::OsStr::new(name)].and_then(|v| v.to_str());
        assert!(value("LD_PRELOAD").unwrap().ends_with("/lib/agent.so"));
        assert_eq!(
            preload(Some("/a.so".into()), launch.agent),
            "/a.so:/lib/agent.so"
        );
        assert_eq!(preload(Some("".into()), launch.agent), "/lib/agent.so");
        assert_eq!(value("ASAN_OPTIONS"), Some("verify_asan_link_order=0"));
        assert_eq!(
            let_sanitizers_be(Some("a=1".into())),
            "a=1:verify_asan_link_order=0"
        );
        let own = || Some(OsString::from("verify_asan_link_order=1"));
        assert_eq!(let_sanitizers_be(own()), "verify_asan_link_order=1");
        assert_eq!(value("PAGEONE_SOCKET"), Some("/run/x.sock"));
        assert_eq!(value("PAGEONE_DOMAIN"), Some("blue"));
        assert_eq!(value("PAGEONE_ALSO_KSM"), None);
        assert_eq!(value("PAGEONE_ANY"), Some("2000"));
        assert_eq!(value("PAGEONE_ANY_HUGE"), None);
    }

    #[test]
    fn domains_are_bounded() {
        assert!(check_domain("blue").is_ok());
        assert!(check_domain(&"x".repeat(64)).is_err());
        let told = check_domain("a\nb").unwrap_err().to_string();
        assert!(!told.contains('\n'), "{told}");
    }
}
