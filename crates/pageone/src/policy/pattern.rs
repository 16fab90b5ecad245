//! Patterns for paths of cgroups: `*` and `?` inside a name, `**` for any number of names.
//!
//! A matcher of our own, because a guest may choose its cgroup's name (a delegated subtree). This one
//! takes at most the product of the lengths, where common ones take a time that grows with a power
//! of the name's length. Both levels, names in a path and characters in a name, are the same
//! algorithm: on a mismatch the last star takes one item more, and no earlier star needs a second try.

use serde::{Deserialize, Deserializer, de::Error as _};

/// A pattern; equal when their texts are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pattern(Vec<Name>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    /// `**`: any number of names, also none.
    Any,
    /// Characters, with `*` and `?`.
    Like(Vec<char>),
}

impl Pattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let bad = |why: &str| Err(format!("the pattern `{text}` {why}"));
        let Some(path) = text.strip_prefix('/') else {
            return bad("does not begin with `/`, as paths of cgroups do");
        };
        if text.contains(['[', ']', '{', '}']) || text.chars().any(char::is_control) {
            return bad("has a character that means nothing here: only `*`, `?` and `**` do");
        }
        let names: Vec<&str> = match path {
            "" => vec![],
            path => path.split('/').collect(),
        };
        if names.iter().any(|name| ["", ".", ".."].contains(name)) {
            return bad("has an empty name, `.` or `..` in it");
        }
        if names
            .iter()
            .any(|name| *name != "**" && name.contains("**"))
        {
            return bad("has `**` inside a name: it stands for whole names only");
        }
        let name = |name: &&str| match *name {
            "**" => Name::Any,
            name => Name::Like(name.chars().collect()),
        };
        Ok(Self(names.iter().map(name).collect()))
    }

    /// Whether `path` (absolute, as the kernel writes it) fits.
    pub(crate) fn matches(&self, path: &str) -> bool {
        let Some(path) = path.strip_prefix('/') else {
            return false;
        };
        let names = path.split('/').filter(|name| !name.is_empty());
        let names: Vec<Vec<char>> = names.map(|name| name.chars().collect()).collect();
        let fits = |pattern: &Name, name: &Vec<char>| match pattern {
            Name::Any => false,
            Name::Like(pattern) => {
                let fits = |p: &char, c: &char| *p == '?' || p == c;
                wild(pattern, name, |p| *p == '*', fits)
            }
        };
        wild(&self.0, &names, |name| *name == Name::Any, fits)
    }

    /// Whether all paths that fit `other` surely fit this one; may miss some such pairs.
    pub(super) fn covers(&self, other: &Self) -> bool {
        self == other || self.0 == [Name::Any]
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        Self::parse(&text).map_err(D::Error::custom)
    }
}

/// Whether `text` is made of `pattern`'s items, where a star stands for any number of items.
fn wild<P, T>(
    pattern: &[P],
    text: &[T],
    is_star: impl Fn(&P) -> bool,
    fits: impl Fn(&P, &T) -> bool,
) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on when the rest does not fit: after the last star, one item further.
    let mut again: Option<(usize, usize)> = None;
    while let Some(item) = text.get(t) {
        match pattern.get(p) {
            Some(star) if is_star(star) => {
                again = Some((p + 1, t));
                p += 1;
            }
            Some(one) if fits(one, item) => (p, t) = (p + 1, t + 1),
            _ => match &mut again {
                None => return false,
                Some((after, from)) => {
                    *from += 1;
                    (p, t) = (*after, *from);
                }
            },
        }
    }
    pattern.iter().skip(p).all(is_star)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matches(pattern: &str, path: &str) -> bool {
        Pattern::parse(pattern).unwrap().matches(path)
    }

    #[test]
    fn stars_stay_inside_a_name_and_double_stars_do_not() {
        for (pattern, path, expected) in [
            ("/", "/", true),
            ("/", "/a", false),
            ("/*", "/", false),
            ("/machine.slice/*.scope", "/machine.slice/vm-1.scope", true),
            ("/machine.slice/*.scope", "/machine.slice/.scope", true),
            ("/machine.slice/*.scope", "/machine.slice/x/vm.scope", false),
            (
                "/machine.slice/*.scope",
                "/machine.slice/vm.scope/libvirt",
                false,
            ),
            (
                "/machine.slice/*.scope/**",
                "/machine.slice/vm.scope/libvirt/a",
                true,
            ),
            ("/machine.slice/*.scope/**", "/machine.slice/vm.scope", true),
            ("/**/vm?", "/vm1", true),
            ("/**/vm?", "/a/b/vm1", true),
            ("/**/vm?", "/a/b/vm12", false),
            ("/a/**/b/**/c", "/a/b/x/b/y/c", true),
            ("/a/**/b/**/c", "/a/x/c", false),
            ("/**", "/", true),
            ("/a", "a", false),
            (
                "/machine-qemu\\x2d1.scope",
                "/machine-qemu\\x2d1.scope",
                true,
            ),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn bad_patterns_are_named() {
        for pattern in [
            "", "a", "/a//b", "/a/", "/../x", "/a**", "/[ab]", "/a\nb", "/{a,b}",
        ] {
            let error = Pattern::parse(pattern).unwrap_err();
            assert!(error.contains(&format!("`{pattern}`")), "{error}");
        }
    }

    #[test]
    fn a_hostile_name_takes_no_time() {
        let pattern = format!("/{}b/**/x", "*a".repeat(40));
        let path = format!("/{}/{}", "a".repeat(255), "a/".repeat(1900));
        assert!(!matches(&pattern, &path));
    }

    /// The definition, without a thought of time.
    fn plain(pattern: &[char], text: &[char]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some(('*', rest)) => (0..=text.len()).any(|at| plain(rest, &text[at..])),
            Some((one, rest)) => text
                .split_first()
                .is_some_and(|(c, after)| (*one == '?' || one == c) && plain(rest, after)),
        }
    }

    proptest! {
        #[test]
        fn a_name_matches_as_the_definition_says(
            pattern in "[ab?*]{0,6}".prop_filter("single stars", |p| !p.contains("**") && !p.is_empty()),
            text in "[ab]{1,8}",
        ) {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            let expected = plain(&chars(&pattern), &chars(&text));
            prop_assert_eq!(matches(&format!("/{pattern}"), &format!("/{text}")), expected);
        }
    }
}
