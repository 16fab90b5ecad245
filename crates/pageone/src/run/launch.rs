//! How a process becomes a guest: the agent in `LD_PRELOAD`, and where it finds its engine.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use wire::Name;

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

impl Launch<'_> {
    /// Puts it into the environment of `command`.
    pub(crate) fn equip(self, command: &mut Command) {
        let mut preload = OsString::from(self.agent);
        if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            preload.push(":");
            preload.push(others);
        }
        command.env("LD_PRELOAD", preload);
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

/// Checks the name of a domain, before an agent would quietly drop it.
///
/// # Errors
/// It is empty, too long, or has control characters.
pub(crate) fn check_domain(domain: &str) -> Result<()> {
    if domain.is_empty() || Name::new(domain).is_none() {
        bail!(
            "`{domain}` is no domain: 1 to {} bytes, no control characters",
            Name::MAX
        );
    }
    Ok(())
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
        assert!(value("LD_PRELOAD").unwrap().starts_with("/lib/agent.so"));
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
        assert!(check_domain("a\nb").is_err());
    }
}
