//! Names of things.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The kernel's number of a node. Numbers may have gaps.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for NodeId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}

/// Writes numbers as the kernel does: `0-3,8`.
pub fn format_list(numbers: &[u32]) -> String {
    let mut text = String::new();
    let mut rest = numbers;
    while let Some((&first, _)) = rest.split_first() {
        let run = rest
            .iter()
            .zip(first..)
            .take_while(|&(&number, expected)| number == expected)
            .count();
        if !text.is_empty() {
            text.push(',');
        }
        text += &first.to_string();
        if run > 1 {
            text += &format!("-{}", rest[run - 1]);
        }
        rest = &rest[run..];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_written_as_they_are_read() {
        for text in ["", "0", "0-3", "0-3,8", "1,3,5-6"] {
            assert_eq!(format_list(&sys::node::parse_list(text).unwrap()), text);
        }
    }
}
