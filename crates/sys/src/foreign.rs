//! Text that a stranger chose, on its way to a log or a terminal.
//!
//! A process names itself, its cgroup, its files and the domain it asks for. A line feed in such a name would
//! begin a line of the attacker's own, an escape sequence would command the reader's terminal, and characters
//! that turn the direction of writing would show a line in another order than it has. So whatever formats such a name wraps it
//! in [`Foreign`]. The tempting alternative, to refuse such names, is no way: the kernel has accepted them.

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

/// Whether a character does something to the text around it instead of being seen.
///
/// These are the control characters, those that end a line or a paragraph, those that turn the direction
/// of writing, and those without a width (Unicode 16, categories Cc, Zl, Zp and Cf where they are not part of a script).
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
        assert_eq!(format!("{:<4}|", Foreign("ab")), "ab  |");
        assert_eq!(format!("{:<4}|", Foreign("\n")), "\\n  |");
    }
}
