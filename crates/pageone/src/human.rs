//! Figures for a person, and figures from one.

use std::fmt::Display;
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
    // 99.95 and more would round to four digits.
    let digits = if unit == 0 || value >= 99.95 { 0 } else { 1 };
    format!("{sign}{value:.digits$} {}", units[unit])
}

/// Unsigned bytes with a unit.
pub(crate) fn size(bytes_: u64) -> String {
    bytes(i64::try_from(bytes_).unwrap_or(i64::MAX))
}

/// Seconds with a unit: `2.5 min`.
pub(crate) fn time(seconds: f64) -> String {
    let units = [(86_400.0, "days"), (3600.0, "h"), (60.0, "min")];
    match units.into_iter().find(|(unit, _)| seconds >= 2.0 * unit) {
        Some((unit, name)) => format!("{:.1} {name}", seconds / unit),
        None => format!("{seconds:.1} s"),
    }
}

/// So many of a thing: `1 thread`, `2 threads`, `3 processes`.
pub(crate) fn count<N: Display + PartialEq + From<u8>>(number: N, thing: &str) -> String {
    let plural = match thing.ends_with('s') {
        _ if number == N::from(1) => "",
        true => "es",
        false => "s",
    };
    format!("{number} {thing}{plural}")
}

/// The number of a process, from a person.
///
/// # Errors
/// Another word: a name, most likely.
pub(crate) fn process(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|&number| number > 0);
    number
        .ok_or_else(|| "this is not a process number (PID); `pgrep -x NAME` prints them".to_owned())
}

/// A size from a person: `512M`, `4GiB`, `1.5T`.
///
/// # Errors
/// No size, none at all, or one beyond 64 bits.
pub(crate) fn size_of(text: &str) -> Result<u64, String> {
    let bytes = wire::size::bytes_of(text);
    bytes
        .ok_or_else(|| format!("`{text}` is no size, or beyond 16 EiB; write it like 512M or 4GiB"))
}

/// As a flag takes it that reads [`size_of`]: in KiB, rounded up, for there are no sizes without a unit.
pub(crate) fn as_flag(bytes: u64) -> String {
    format!("{}k", bytes.div_ceil(1024))
}

/// Whole MiB from a person, one to `MOST`: `512`, or with a unit, `2G`.
///
/// # Errors
/// No size, or one out of these bounds.
pub(crate) fn mib<const MOST: u64>(text: &str) -> Result<u64, String> {
    let mib = match text.parse() {
        Ok(mib) => mib,
        Err(_) => size_of(text)? >> 20,
    };
    let most = wire::size::text_of_mib(MOST);
    match (1..=MOST).contains(&mib) {
        true => Ok(mib),
        false => Err(format!("`{text}` is outside 1MiB to {most}")),
    }
}

/// A text in lines of at most `width` characters, as far as its words allow.
pub(crate) fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// `text` in `width` characters, cut where it is longer.
pub(crate) fn cut(text: &str, width: usize) -> String {
    match text.chars().count() <= width {
        true => text.to_owned(),
        false => text.chars().take(width - 1).chain(['…']).collect(),
    }
}

/// A time before now: `1h`, `30days`.
///
/// # Errors
/// No time, or less than a second.
pub(crate) fn span(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).ok();
    let time = time.filter(|&time| time >= Duration::from_secs(1));
    time.ok_or_else(|| {
        format!("`{text}` is no time of a second or more; write it like 1h or 7days")
    })
}

/// A time: `20s`, `500ms`, `2min`.
///
/// # Errors
/// No time, or one outside 10 ms to a day.
pub(crate) fn period(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text)
        .map_err(|_| format!("`{text}` is no time; write it like 20s or 500ms"))?;
    let (least, most) = (Duration::from_millis(10), Duration::from_secs(86_400));
    match (least..=most).contains(&time) {
        true => Ok(time),
        false => Err(format!("`{text}` is outside 10ms to 1day")),
    }
}

/// A message in one line, for a log: of one that shows a piece of a file, where that is, and what is wrong with it.
pub(crate) fn in_a_line(message: &str) -> String {
    let mut lines = message
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    match lines.next_back() {
        Some(last) => format!("{first}: {last}"),
        None => first.to_owned(),
    }
}

/// A reason that stands beside the number of its process, which it need not name again.
pub(crate) fn without_process(pid: u32, why: &str) -> String {
    let rest = why.strip_prefix(&format!("process {pid} "));
    rest.map_or_else(|| why.to_owned(), |rest| format!("it {rest}"))
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
        assert_eq!(bytes((100 << 20) - 1), "100 MiB");
        assert_eq!(bytes(i64::MIN), "-8388608 TiB");
        assert_eq!(size(u64::MAX), "8388608 TiB");
    }

    #[test]
    fn mib_are_a_number_or_a_size() {
        for (text, expected) in [("512", 512), ("1g", 1024), ("1.5MiB", 1), ("1024", 1024)] {
            assert_eq!(mib::<1024>(text), Ok(expected), "{text}");
        }
        for bad in ["0", "512k", "1025", "2g", "-1", "x", ""] {
            let error = mib::<1024>(bad).unwrap_err();
            assert!(error.contains(&format!("`{bad}` is ")), "{error}");
        }
        assert!(mib::<1024>("2g").unwrap_err().ends_with("1MiB to 1GiB"));
    }

    #[test]
    fn one_thing_is_no_plural() {
        let counts = [(1_u32, "process"), (2, "process"), (0, "page"), (1, "page")];
        let said = counts.map(|(number, thing)| count(number, thing));
        assert_eq!(said, ["1 process", "2 processes", "0 pages", "1 page"]);
    }

    #[test]
    fn seconds_have_units() {
        let times = [0.04, 119.9, 120.0, 7200.0, 400_000.0].map(time);
        assert_eq!(times, ["0.0 s", "119.9 s", "2.0 min", "2.0 h", "4.6 days"]);
    }

    #[test]
    fn lines_break_between_words() {
        assert_eq!(
            wrapped("a bc  def g", 4),
            ["a bc", "def", "g"].map(str::to_owned)
        );
        assert_eq!(wrapped("abcdef g", 4), ["abcdef", "g"].map(str::to_owned));
        assert!(wrapped(" ", 4).is_empty());
    }

    #[test]
    fn a_text_that_is_too_long_is_cut() {
        assert_eq!(
            [5, 4, 1].map(|width| cut("Grüße", width)),
            ["Grüße", "Grü…", "…"]
        );
    }

    #[test]
    fn times_before_now_are_a_second_or_more() {
        assert_eq!(span("1h"), Ok(Duration::from_secs(3600)));
        for bad in ["", "0s", "5", "soon", "99999999999999999999h"] {
            let error = span(bad).unwrap_err();
            assert!(error.contains(bad) && error.contains("7days"), "{error}");
        }
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

    #[test]
    fn a_process_is_named_once() {
        let said = |why| without_process(7, why);
        assert_eq!(said("process 7 is dropped: x"), "it is dropped: x");
        for other in ["process 77 is dropped", "thread 8 of process 7 x"] {
            assert_eq!(said(other), other);
        }
    }

    #[test]
    fn a_mistake_of_a_file_takes_one_line_of_a_log() {
        let error = "in the file /x: TOML parse error at line 2, column 1\n  |\n2 | thread = 2\n  | ^^^^^^\nthere is no key `thread`\n";
        let line = in_a_line(error);
        let expected =
            "in the file /x: TOML parse error at line 2, column 1: there is no key `thread`";
        assert_eq!(line, expected);
        assert_eq!(in_a_line("it is gone"), "it is gone");
    }
}
