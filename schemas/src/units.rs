//! Byte counts and times as people read them, for the texts of errors. The exact numbers stand in an error's details.

/// `90.9 MB`: decimal units, as storage is sold, with one decimal.
#[must_use]
pub fn human_bytes(count: u64) -> String {
    for (unit, name) in [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")] {
        if count >= unit {
            let tenths = (u128::from(count) * 10 + u128::from(unit) / 2) / u128::from(unit);
            return format!("{}.{} {name}", tenths / 10, tenths % 10);
        }
    }
    format!("{count} B")
}

/// `12.4 s`, `3 min 5 s` or `250 ms`.
#[must_use]
pub fn human_ms(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..60_000 => format!("{}.{} s", ms / 1_000, ms % 1_000 / 100),
        60_000..3_600_000 => format!("{} min {} s", ms / 60_000, ms % 60_000 / 1_000),
        _ => format!("{} h {} min", ms / 3_600_000, ms % 3_600_000 / 60_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!(human_bytes(999), "999 B");
        assert_eq!(human_bytes(90_868_376), "90.9 MB");
        assert_eq!(human_bytes(u64::MAX), "18446744.1 TB");
        assert_eq!((human_ms(250), human_ms(12_449)), ("250 ms".to_owned(), "12.4 s".to_owned()));
        assert_eq!((human_ms(185_000), human_ms(7_380_000)), ("3 min 5 s".to_owned(), "2 h 3 min".to_owned()));
    }
}
