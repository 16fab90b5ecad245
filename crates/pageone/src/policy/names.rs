//! Users and groups by name: `user = "alice"` beside `uid = 1000`. Names are looked up when the file or the flag is read, as
//! this machine knows them (nsswitch.conf), and stand for their numbers from there on.

use nix::unistd::{Group, User};
use serde::Deserialize;

use super::ids::Ids;

/// The user that the packages make, for `pageone-serve`.
const PACKAGES: &str = "pageone";

/// One name, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "a name, or a list of names")]
pub(crate) enum Names {
    One(String),
    Many(Vec<String>),
}

/// What has the names.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Whose {
    User,
    Group,
}

impl Whose {
    /// The key of names, and that of numbers.
    fn keys(self) -> (&'static str, &'static str) {
        match self {
            Self::User => ("user", "uid"),
            Self::Group => ("group", "gid"),
        }
    }

    fn number(self, name: &str) -> Result<u32, String> {
        let found = match self {
            Self::User => User::from_name(name).map(|user| user.map(|user| user.uid.as_raw())),
            Self::Group => {
                Group::from_name(name).map(|group| group.map(|group| group.gid.as_raw()))
            }
        };
        let (key, number) = self.keys();
        match found {
            Ok(Some(found)) => Ok(found),
            Ok(None) if name.starts_with(|first: char| first.is_ascii_digit()) => Err(format!(
                "there is no {key} `{name}`; a number is a `{number}`"
            )),
            Ok(None) if name == PACKAGES => Err(format!(
                "there is no {key} `{name}` on this machine: `sudo systemd-sysusers pageone.conf` makes it, as the packages do"
            )),
            Ok(None) => Err(format!("there is no {key} `{name}` on this machine")),
            Err(error) => Err(format!("the {key} `{name}` cannot be looked up: {error}")),
        }
    }
}

/// The numbers of a condition that is written by numbers or by names.
///
/// # Errors
/// It is written by both, or a name is not known.
pub(crate) fn numbers(
    whose: Whose,
    ids: Option<Ids>,
    names: Option<Names>,
) -> Result<Option<Ids>, String> {
    let (key, number) = whose.keys();
    let names = match (ids, names) {
        (ids, None) => return Ok(ids),
        (Some(_), Some(_)) => {
            return Err(format!(
                "it has both `{key}` and `{number}`: write one of them"
            ));
        }
        (None, Some(Names::One(name))) => vec![name],
        (None, Some(Names::Many(names))) => names,
    };
    let ranges = names
        .iter()
        .map(|name| whose.number(name).map(|id| id..=id));
    let ids = Ids::new(ranges.collect::<Result<_, _>>()?);
    ids.map(Some).map_err(|error| format!("`{key}`: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(whose: Whose, names: &[&str]) -> Result<Option<Ids>, String> {
        let names = names.iter().map(ToString::to_string).collect();
        numbers(whose, None, Some(Names::Many(names)))
    }

    #[test]
    fn names_stand_for_their_numbers() {
        let root = "0".parse().ok();
        let one = numbers(Whose::User, None, Some(Names::One("root".into())));
        assert_eq!(one, Ok(root.clone()));
        assert_eq!(read(Whose::Group, &["root"]), Ok(root.clone()));
        assert_eq!(numbers(Whose::User, root.clone(), None), Ok(root.clone()));
        assert_eq!(numbers(Whose::User, None, None), Ok(None));
        // In a container a user may have no name.
        if let Some(user) = User::from_uid(nix::unistd::geteuid()).unwrap() {
            let mine = user.uid.as_raw().to_string().parse().ok();
            assert_eq!(read(Whose::User, &[&user.name]), Ok(mine));
        }
    }

    #[test]
    fn mistakes_are_named() {
        let root = || "0".parse().ok();
        let both = numbers(Whose::Group, root(), Some(Names::One("root".into())));
        if matches!(User::from_name(PACKAGES), Ok(None)) {
            let error = read(Whose::User, &[PACKAGES]).unwrap_err();
            assert!(error.contains("systemd-sysusers pageone.conf"), "{error}");
        }
        for (found, said) in [
            (
                read(Whose::User, &["no-such-user"]),
                "no user `no-such-user`",
            ),
            (
                read(Whose::Group, &["root", "no-such"]),
                "no group `no-such`",
            ),
            (read(Whose::User, &["4294967294"]), "a number is a `uid`"),
            (read(Whose::User, &["a\0b"]), "no user"),
            (read(Whose::User, &[""]), "no user ``"),
            (read(Whose::User, &[]), "`user`: the list is empty"),
            (
                read(Whose::User, &["root", "root"]),
                "`user`: 0 is listed twice",
            ),
            (both, "both `group` and `gid`"),
        ] {
            let error = found.unwrap_err();
            assert!(error.contains(said), "{said}: {error}");
        }
    }
}
