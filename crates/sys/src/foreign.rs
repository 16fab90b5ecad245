//! Text that a stranger chose, on its way to a log or a terminal.
//!
//! A process names itself, its cgroup, its files and the domain it asks for. A line feed in such a name would
//! begin a line of the attacker's own. An escape sequence would command the reader's terminal. Characters
//! that turn the direction of writing would show a line in another order than it has. So such a name is a [`ForeignName`] from where
//! it is read: it has no way to be shown but escaped. A text that is borrowed for a moment is wrapped in [`Foreign`].
//! The tempting alternative, to refuse such names, is no way: the kernel has accepted them.
//!
//! As a value it goes on as it is, for programs: in JSON, and as a key. Whatever prints JSON for people to see escapes it with
//! [`plain_json`].

use std::fmt::{self, Write};

/// A text of which each character is shown as itself only if it can do nothing but be seen.
#[derive(Clone, Copy, Debug)]
pub struct Foreign<'a>(pub &'a str);

impl fmt::Display for Foreign<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.chars().any(acts) {
            return f.pad(self.0);
        }
        let mut shown = String::new();
        for c in self.0.chars() {
            match acts(c) {
                true => write!(shown, "{}", c.escape_default())?,
                false => shown.push(c),
            }
        }
        f.pad(&shown)
    }
}

/// A name that a stranger chose.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct ForeignName(String);

impl ForeignName {
    /// The name as it is: to compare it, or as a key. Not to show it.
    #[must_use]
    pub fn raw(&self) -> &str {
        &self.0
    }
}

impl From<String> for ForeignName {
    fn from(name: String) -> Self {
        Self(name)
    }
}

impl From<&str> for ForeignName {
    fn from(name: &str) -> Self {
        Self(name.to_owned())
    }
}

impl fmt::Display for ForeignName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Foreign(&self.0).fmt(f)
    }
}

impl fmt::Debug for ForeignName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", Foreign(&self.0))
    }
}

/// JSON in which nothing acts: such characters can stand in its strings only, where JSON has escapes of its own.
#[must_use]
pub fn plain_json(json: &str) -> String {
    let mut plain = String::with_capacity(json.len());
    for c in json.chars() {
        match acts(c) && c != '\n' {
            true => c.encode_utf16(&mut [0; 2]).iter().for_each(|half| {
                let _ = write!(plain, "\\u{half:04x}");
            }),
            false => plain.push(c),
        }
    }
    plain
}

/// Whether a character does something to the text around it instead of being seen.
///
/// These are the control characters, those that end a line or a paragraph, those that turn the direction
/// of writing, and those without a width. In Unicode 16 these are the categories Cc, Zl and Zp, and Cf where it is not part
/// of a script.
#[must_use]
pub fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_is_escaped_and_the_rest_is_as_it_was() {
        for (text, shown) in [
            ("qemu-system-x86", "qemu-system-x86"),
            ("Grüße, 世界", "Grüße, 世界"),
            ("a\nERROR b", r"a\nERROR b"),
            ("a\rb\tc", r"a\rb\tc"),
            ("\x1b[2J\x07\x7f\u{9b}", r"\u{1b}[2J\u{7}\u{7f}\u{9b}"),
            ("a\u{2028}b\u{85}c", r"a\u{2028}b\u{85}c"),
            ("\u{202e}txt.exe\u{2066}", r"\u{202e}txt.exe\u{2066}"),
            ("a\u{200b}\u{feff}\u{e0041}", r"a\u{200b}\u{feff}\u{e0041}"),
        ] {
            assert_eq!(Foreign(text).to_string(), shown);
        }
        let name = ForeignName::from("a\n\u{202e}");
        assert_eq!(
            (name.raw(), name.to_string()),
            ("a\n\u{202e}", r"a\n\u{202e}".to_owned())
        );
        assert_eq!(
            format!("{name:?} {name:<4}"),
            r#""a\n\u{202e}" a\n\u{202e}"#
        );
        assert_eq!(
            plain_json("{\"a\":\"\u{9b}ä\u{e0041}\"}\n"),
            "{\"a\":\"\\u009bä\\udb40\\udc41\"}\n"
        );
        assert_eq!(format!("{:<4}|", Foreign("ab")), "ab  |");
        assert_eq!(format!("{:<4}|", Foreign("\n")), "\\n  |");
    }
}
