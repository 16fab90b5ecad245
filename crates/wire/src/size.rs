//! Sizes as people write them.

/// The bytes of a number with a unit: `512M`, `4GiB`, `1.5T`, `1kb`. A unit is a power of 1024 however it is spelled, as
/// QEMU and systemd have it. `None` for what is no size, for nothing at all, and beyond 64 bits.
#[must_use]
pub fn bytes_of(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(end);
    let unit = unit.trim_start().to_ascii_lowercase();
    let letter = unit.strip_suffix("ib").or_else(|| unit.strip_suffix('b'));
    let shift = match letter.unwrap_or(&unit) {
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        _ => return None,
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    // Three digits behind the point are more than any user needs, and exact.
    let thousandths = format!("{part:0<3}").get(..3)?.parse::<u128>().ok()?;
    let parts = whole.parse::<u64>().ok().map(u128::from)? * 1000 + thousandths;
    let bytes = (parts << shift) / 1000;
    u64::try_from(bytes).ok().filter(|&bytes| bytes > 0)
}

/// So many MiB, as [`bytes_of`] reads them again: in the largest unit in which three digits behind the point are exact.
#[must_use]
pub fn text_of_mib(mib: u64) -> String {
    let exact = |&(_, shift): &(&str, u32)| {
        mib >> shift > 0 && (u128::from(mib) * 1000).trailing_zeros() >= shift
    };
    let units = [("PiB", 30), ("TiB", 20), ("GiB", 10)];
    let (unit, shift) = units.into_iter().find(exact).unwrap_or(("MiB", 0));
    let thousandths = (u128::from(mib) * 1000) >> shift;
    let number = format!("{}.{:03}", thousandths / 1000, thousandths % 1000);
    format!(
        "{}{unit}",
        number.trim_end_matches('0').trim_end_matches('.')
    )
}

#[cfg(test)]
mod tests {
    use super::{bytes_of, text_of_mib};

    #[test]
    fn what_is_written_reads_the_same() {
        for (mib, text) in [
            (1, "1MiB"),
            (1023, "1023MiB"),
            (1024, "1GiB"),
            (1025, "1025MiB"),
            (1536, "1.5GiB"),
            (100 << 10, "100GiB"),
            (2 << 20, "2TiB"),
            (9 << 17, "1.125TiB"),
            (9 << 16, "576GiB"),
            (5 << 30, "5PiB"),
            (u64::MAX >> 20, "17592186044415MiB"),
        ] {
            assert_eq!(text_of_mib(mib), text);
            assert_eq!(bytes_of(text), Some(mib << 20), "{text}");
        }
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("512M", 512 << 20),
            ("4GiB", 4 << 30),
            ("4 GB", 4 << 30),
            ("1t", 1 << 40),
            ("1kb", 1 << 10),
            ("1.5G", 3 << 29),
            ("0.25m", 1 << 18),
        ] {
            assert_eq!(bytes_of(text), Some(bytes), "{text}");
        }
        for bad in [
            "",
            "4",
            "G",
            "0G",
            "-1G",
            "4X",
            "1.2.3G",
            ".G",
            "99999999999T",
            "1..G",
            "4Gx",
            "4GiBB",
        ] {
            assert_eq!(bytes_of(bad), None, "{bad}");
        }
    }
}
