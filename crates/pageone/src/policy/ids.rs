//! Sets of user or group ids, as a policy lists them: `1000`, `"2000-2999"`, or a list of such.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// The greatest id; the one above it is "none" to the kernel.
const MAX: u32 = u32::MAX - 1;

/// A set of ids: ranges in ascending order, with a gap between any two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ids(Vec<RangeInclusive<u32>>);

impl Ids {
    /// The set of all ids in `ranges`.
    ///
    /// # Errors
    /// There are none, or two of them share an id: what the second adds is then a mistake.
    pub(super) fn new(mut ranges: Vec<RangeInclusive<u32>>) -> Result<Self, String> {
        ranges.sort_unstable_by_key(|range| *range.start());
        let mut joined: Vec<RangeInclusive<u32>> = Vec::new();
        for range in ranges {
            match joined.last_mut() {
                Some(last) if last.end() >= range.start() => {
                    return Err(format!("{} is listed twice", range.start()));
                }
                Some(last) if last.end() + 1 == *range.start() => {
                    *last = *last.start()..=*range.end();
                }
                _ => joined.push(range),
            }
        }
        match joined.is_empty() {
            true => Err("the list is empty: it fits no process".to_owned()),
            false => Ok(Self(joined)),
        }
    }

    /// Whether `id` is in the set.
    pub(crate) fn contains(&self, id: u32) -> bool {
        self.0.iter().any(|range| range.contains(&id))
    }

    /// Whether all of `other` is in the set.
    pub(super) fn covers(&self, other: &Self) -> bool {
        other.0.iter().all(|theirs| {
            let holds = |ours: &RangeInclusive<u32>| {
                ours.start() <= theirs.start() && theirs.end() <= ours.end()
            };
            self.0.iter().any(holds)
        })
    }
}

/// One entry of a list.
struct Entry(RangeInclusive<u32>);

fn number<E: Error>(value: i64) -> Result<u32, E> {
    let id = u32::try_from(value).ok().filter(|id| *id <= MAX);
    id.ok_or_else(|| E::custom(format!("{value} is no id: 0 to {MAX}")))
}

fn range<E: Error>(text: &str) -> Result<RangeInclusive<u32>, E> {
    let bad = || {
        E::custom(format!(
            "`{text}` is no range of ids: write it like 1000-1999"
        ))
    };
    let (first, last) = text.split_once('-').ok_or_else(bad)?;
    let part = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse::<i64>().ok()).flatten()
    };
    let (first, last) = part(first.trim()).zip(part(last.trim())).ok_or_else(bad)?;
    let (first, last) = (number(first)?, number(last)?);
    match first <= last {
        true => Ok(first..=last),
        false => Err(E::custom(format!(
            "`{text}` is empty: {first} is above {last}"
        ))),
    }
}

/// An id, or a range of them.
impl FromStr for Ids {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = |error: serde::de::value::Error| error.to_string();
        let one = text
            .trim()
            .parse()
            .ok()
            .map(number::<serde::de::value::Error>);
        let range = match one {
            Some(id) => id.map(|id| id..=id),
            None if text.contains('-') => range(text),
            None => {
                return Err(format!(
                    "`{text}` is no id: write a number, or a range like 1000-1999"
                ));
            }
        };
        Self::new(vec![range.map_err(error)?])
    }
}

const EXPECTED: &str = "an id, a range like \"1000-1999\", or a list of them";

struct EntryVisitor;

impl Visitor<'_> for EntryVisitor {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an id, or a range like \"1000-1999\"")
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Entry, E> {
        number(value).map(|id| Entry(id..=id))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Entry, E> {
        range(text).map(Entry)
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(EntryVisitor)
    }
}

struct IdsVisitor;

impl<'de> Visitor<'de> for IdsVisitor {
    type Value = Ids;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Ids, E> {
        let Entry(range) = EntryVisitor.visit_i64(value)?;
        Ids::new(vec![range]).map_err(E::custom)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Ids, E> {
        Ids::new(vec![range(text)?]).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Ids, A::Error> {
        let mut ranges = Vec::new();
        while let Some(Entry(range)) = list.next_element()? {
            ranges.push(range);
        }
        Ids::new(ranges).map_err(A::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Ids {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(IdsVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Deserialize)]
    struct Line {
        uid: Ids,
    }

    fn parse(value: &str) -> Result<Ids, String> {
        let line: Result<Line, _> = toml::from_str(&format!("uid = {value}"));
        line.map(|line| line.uid).map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_ranges_and_lists_are_read() {
        assert_eq!(parse("7"), Ok(Ids(vec![7..=7])));
        assert_eq!(parse("'7 - 9'"), Ok(Ids(vec![7..=9])));
        assert_eq!(parse("[20, '7-9', 10]"), Ok(Ids(vec![7..=10, 20..=20])));
        assert_eq!(parse("'0-4294967294'"), Ok(Ids(vec![0..=MAX])));
    }

    #[test]
    fn what_is_no_set_is_named() {
        for (value, said) in [
            ("[]", "empty"),
            ("-1", "-1"),
            ("4294967295", "no id"),
            ("'9-7'", "9 is above 7"),
            ("'7'", "no range"),
            ("'a-b'", "no range"),
            ("'+1-2'", "no range"),
            ("'1-99999999999999999999'", "no range"),
            ("[1, '0-3']", "1 is listed twice"),
            ("true", "an id"),
            ("1.5", "an id"),
        ] {
            let error = parse(value).unwrap_err();
            assert!(error.contains(said), "{value}: {error}");
        }
    }

    fn small() -> impl Strategy<Value = Vec<RangeInclusive<u32>>> {
        proptest::collection::vec((0_u32..12, 0_u32..4).prop_map(|(a, n)| a..=a + n), 1..4)
    }

    proptest! {
        #[test]
        fn sets_are_what_their_ranges_say(one in small(), two in small()) {
            let has = |ranges: &[RangeInclusive<u32>], id| ranges.iter().any(|r| r.contains(&id));
            if let (Ok(a), Ok(b)) = (Ids::new(one.clone()), Ids::new(two.clone())) {
                for id in 0..20 {
                    prop_assert_eq!(a.contains(id), has(&one, id));
                }
                let covered = (0..20).all(|id| !has(&two, id) || has(&one, id));
                prop_assert_eq!(a.covers(&b), covered);
            }
        }
    }
}
