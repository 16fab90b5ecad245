//! Plain tables: columns as wide as their cells, numbers to the right.

/// Renders rows under a head. Every column but those in `left` is aligned to the right.
pub(super) fn render(head: &[&str], rows: &[Vec<String>], left: &[usize]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells
            .map(String::len)
            .chain([head[column].len()])
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: Vec<&str>| {
        let cells = cells
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, &width))| {
                if left.contains(&column) {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                }
            });
        format!(" {}", cells.collect::<Vec<_>>().join("  "))
            .trim_end()
            .to_owned()
            + "\n"
    };
    let mut text = line(head.to_vec());
    for row in rows {
        text += &line(row.iter().map(String::as_str).collect());
    }
    text
}

/// A number of bytes with a binary unit, to at most one decimal.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    while unit + 1 < UNITS.len() && bytes >> (10 * (unit + 1)) > 0 {
        unit += 1;
    }
    let tenths = (u128::from(bytes) * 10) >> (10 * unit);
    if tenths % 10 == 0 || unit == 0 {
        format!("{} {}", tenths / 10, UNITS[unit])
    } else {
        format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_and_bytes() {
        let rows = [
            vec!["1".into(), "a".into()],
            vec!["200".into(), "bb".into()],
        ];
        assert_eq!(
            render(&["N", "Name"], &rows, &[1]),
            "   N  Name\n   1  a\n 200  bb\n"
        );
        assert_eq!(
            [0, 1023, 1024, 1536, 5 << 30].map(bytes),
            ["0 B", "1023 B", "1 KiB", "1.5 KiB", "5 GiB"]
        );
        assert_eq!(bytes(u64::MAX), "16383.9 PiB");
    }
}
