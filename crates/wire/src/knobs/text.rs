//! The values of knobs, from text and as text.

use serde::de::{DeserializeOwned, IntoDeserializer, value};

use super::{RunMode, no_mode};

pub(super) fn mode(text: &str) -> Result<RunMode, String> {
    let number: u8 = text.parse().map_err(|_| no_mode(text))?;
    RunMode::try_from(number)
}

pub(super) fn word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let word = IntoDeserializer::<value::Error>::into_deserializer(text);
    // The library names the words that it takes: "unknown variant `x`, expected one of …".
    T::deserialize(word).map_err(|error| {
        let error = error.to_string();
        match error.rsplit_once(", expected ") {
            Some((_, words)) => format!("`{text}` is not possible; it takes {words}"),
            None => error,
        }
    })
}

/// KSM writes 0 and 1.
pub(super) fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "true" | "on" => Ok(true),
        "0" | "false" | "off" => Ok(false),
        _ => Err(format!(
            "`{text}` is neither true nor false, on nor off, 1 nor 0"
        )),
    }
}

pub(super) fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("`{text}` is no number that it takes"))
}

pub(super) fn time_ms(text: &str) -> Result<u64, String> {
    let time = humantime::parse_duration(text)
        .map_err(|_| format!("`{text}` is no time; write it like 20s or 500ms"))?;
    match time.as_millis() {
        0 if !time.is_zero() => Err(format!("`{text}` is less than 1ms")),
        ms => Ok(u64::try_from(ms).unwrap_or(u64::MAX)),
    }
}

/// Percent of one core; 0 for none.
pub(super) fn percent(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('%').unwrap_or(text);
    match (text, number.parse()) {
        ("none" | "0", _) => Ok(0),
        (_, Ok(percent @ 1..)) => Ok(percent),
        _ => Err(format!(
            "`{text}` is no limit: write percent of a core, like 25, or none"
        )),
    }
}

/// MiB; 0 for none.
pub(super) fn size_mib(text: &str) -> Result<u64, String> {
    let bad = || format!("`{text}` is no limit: write MiB, like 4096, or 16G, 25% or none");
    let number = |digits: &str| digits.parse::<u64>().ok().filter(|&number| number > 0);
    if let "none" | "0" = text {
        return Ok(0);
    }
    if let Some(percent) = text.strip_suffix('%') {
        let percent = number(percent)
            .filter(|&percent| percent <= 100)
            .ok_or_else(bad)?;
        let memory = sys::meminfo::total_mib().map_err(|error| error.to_string())?;
        return Ok((memory * percent / 100).max(1));
    }
    if let Some(mib) = number(text) {
        return Ok(mib);
    }
    match crate::size::bytes_of(text).ok_or_else(bad)? >> 20 {
        0 => Err(format!(
            "`{text}`: a limit of less than 1 MiB is not possible"
        )),
        mib => Ok(mib),
    }
}

/// What its `Display` writes.
pub(super) fn bare(value: &impl ToString) -> String {
    value.to_string()
}

/// Its name, as [`word`] reads it.
pub(super) fn word_text(value: &impl serde::Serialize) -> String {
    let word = serde_json::to_value(value).ok();
    word.and_then(|word| word.as_str().map(str::to_owned))
        .unwrap_or_default()
}

pub(super) fn on_text(on: &bool) -> String {
    if *on { "on" } else { "off" }.to_owned()
}

pub(super) fn time_text(ms: &u64) -> String {
    humantime::format_duration(std::time::Duration::from_millis(*ms)).to_string()
}

/// A limit, 0 for none.
pub(super) fn limit_text(limit: &u32) -> String {
    match limit {
        0 => "none".to_owned(),
        limit => limit.to_string(),
    }
}

pub(super) fn mib_text(mib: &u64) -> String {
    match mib {
        0 => "none".to_owned(),
        &mib => crate::size::text_of_mib(mib),
    }
}
