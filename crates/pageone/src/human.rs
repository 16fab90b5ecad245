//! Figures for a person, and figures from one.

use std::time::Duration;

use wire::{Pace, Thp};

/// Bytes with a unit, three digits or so: `1.25 GiB`.
#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
pub(crate) fn bytes(bytes: i64) -> String {
    let size = bytes.unsigned_abs() as f64;
    let sign = if bytes < 0 { "-" } else { "" };
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut value = size;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{sign}{value:.digits$} {}", units[unit])
}

/// Unsigned bytes with a unit.
pub(crate) fn size(bytes_: u64) -> String {
    bytes(i64::try_from(bytes_).unwrap_or(i64::MAX))
}

/// A merge period: `20s`, `500ms`, `2min`.
///
/// # Errors
/// No time, or one outside 10 ms to a day.
pub(crate) fn period(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text)
        .map_err(|error| format!("`{text}` is no time ({error}); write it like 20s or 500ms"))?;
    let (least, most) = (Duration::from_millis(10), Duration::from_secs(86_400));
    match (least..=most).contains(&time) {
        true => Ok(time),
        false => Err(format!("`{text}` is outside 10ms to 1day")),
    }
}

/// How many pages may share a copy.
///
/// # Errors
/// No number from 2 to 1000000.
pub(crate) fn sharing(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(pages @ 2..=1_000_000) => Ok(pages),
        _ => Err(format!("`{text}` is not a number of pages, 2 to 1000000")),
    }
}

/// A number of worker threads.
///
/// # Errors
/// No number from 1 to 1024.
pub(crate) fn threads(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(threads @ 1..=1024) => Ok(threads),
        _ => Err(format!("`{text}` is not a number of threads, 1 to 1024")),
    }
}

/// A limit of CPU time: percent of one core, or `none`.
///
/// # Errors
/// Neither; the engine knows how many CPUs there are, and so the most that makes sense.
pub(crate) fn cpu_limit(text: &str) -> Result<u32, String> {
    let number = text.strip_suffix('%').unwrap_or(text);
    match (text, number.parse()) {
        ("none", _) => Ok(0),
        (_, Ok(percent @ 1..)) => Ok(percent),
        _ => Err(format!(
            "`{text}` is no limit: write percent of a core, like 25, or none"
        )),
    }
}

/// A limit of the stores' size, in MiB, 0 for none: a number of MiB, `16GiB`, `25%` of the memory, or
/// `none`.
///
/// # Errors
/// None of these.
pub(crate) fn store_limit(text: &str) -> Result<u64, String> {
    let bad = || format!("`{text}` is no limit: write MiB, like 4096, or 16GiB, 25% or none");
    let number = |digits: &str| digits.parse::<u64>().ok().filter(|&number| number > 0);
    if text == "none" {
        return Ok(0);
    }
    if let Some(percent) = text.strip_suffix('%') {
        let percent = number(percent)
            .filter(|&percent| percent <= 100)
            .ok_or_else(bad)?;
        let memory = sys::meminfo::MemInfo::read().map_err(|error| error.to_string())?;
        return Ok(((memory.total / 100 * percent) >> 20).max(1));
    }
    let (digits, unit) = match text.strip_suffix("GiB") {
        Some(digits) => (digits, 1 << 10),
        None => (text.strip_suffix("MiB").unwrap_or(text), 1),
    };
    number(digits)
        .and_then(|mib| mib.checked_mul(unit))
        .ok_or_else(bad)
}

/// What is done with huge pages: keep, split or auto.
///
/// # Errors
/// Another word.
pub(crate) fn thp(text: &str) -> Result<Thp, String> {
    match text {
        "keep" => Ok(Thp::Keep),
        "split" => Ok(Thp::Split),
        "auto" => Ok(Thp::Auto),
        _ => Err(format!("`{text}` is none of keep, split, auto")),
    }
}

/// How the period is chosen: `fixed` or `auto`.
///
/// # Errors
/// Neither.
pub(crate) fn pace(text: &str) -> Result<Pace, String> {
    match text {
        "fixed" => Ok(Pace::Fixed),
        "auto" => Ok(Pace::Auto),
        _ => Err(format!("`{text}` is neither fixed nor auto")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_units() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(4096), "4.0 KiB");
        assert_eq!(bytes(-(1 << 20)), "-1.0 MiB");
        assert_eq!(bytes(700 << 20), "700 MiB");
        assert_eq!(bytes(i64::MIN), "-8388608 TiB");
        assert_eq!(size(u64::MAX), "8388608 TiB");
    }

    #[test]
    fn periods_and_threads_have_bounds() {
        assert_eq!(period("20s"), Ok(Duration::from_secs(20)));
        assert_eq!(period("1s 500ms"), Ok(Duration::from_millis(1500)));
        for bad in ["", "20", "0s", "1ms", "2days", "soon"] {
            let error = period(bad).unwrap_err();
            assert!(error.contains(bad), "{error}");
        }
        assert_eq!((cpu_limit("25"), cpu_limit("150%")), (Ok(25), Ok(150)));
        assert_eq!(cpu_limit("none"), Ok(0));
        for bad in ["0", "-1", "", "%", "some", "5000000000"] {
            assert!(cpu_limit(bad).is_err(), "{bad}");
        }
        assert_eq!(
            (pace("auto"), pace("fixed")),
            (Ok(Pace::Auto), Ok(Pace::Fixed))
        );
        assert!(pace("fast").is_err());
        assert_eq!(threads("12"), Ok(12));
        for bad in ["0", "-1", "1025", "x", "70000"] {
            assert!(threads(bad).is_err(), "{bad}");
        }
    }
}
