//! Figures for a person, and figures from one.

use std::time::Duration;

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

/// A time: `20s`, `500ms`, `2min`.
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
    fn times_have_bounds() {
        assert_eq!(period("20s"), Ok(Duration::from_secs(20)));
        assert_eq!(period("1s 500ms"), Ok(Duration::from_millis(1500)));
        for bad in ["", "20", "0s", "1ms", "2days", "soon"] {
            let error = period(bad).unwrap_err();
            assert!(error.contains(bad), "{error}");
        }
    }
}
