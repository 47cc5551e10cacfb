//! Cells of server-side tables: ages and the like, as upstream prints them.

use ferrite_json::Value;
use jiff::Timestamp;

/// The text of an empty cell.
pub const NONE: &str = "<none>";
/// The text of a cell whose time or fact is unknown.
pub const UNKNOWN: &str = "<unknown>";

/// Time since the object was created, in upstream's short form (`5s`, `3m20s`, `2d4h`).
pub fn age(object: &Value, now: Timestamp) -> String {
    since(crate::meta::str(object, "creationTimestamp"), now)
}

/// Time since an RFC 3339 time; `<unknown>` when it is empty or unreadable.
pub fn since(time: &str, now: Timestamp) -> String {
    match time.parse::<Timestamp>() {
        Ok(then) => duration(now.as_second().saturating_sub(then.as_second())),
        Err(_) => UNKNOWN.to_owned(),
    }
}

/// A number of seconds for humans: precise while it is short, coarse when it is long.
///
/// A clock that is a second or less behind gives `0s`; further behind gives `<invalid>`.
pub fn duration(seconds: i64) -> String {
    const HOUR: i64 = 3600;
    const DAY: i64 = 24 * HOUR;
    const YEAR: i64 = 365 * DAY;

    /// `<big><unit>`, followed by the smaller unit unless it is zero.
    fn pair(big: i64, big_unit: char, small: i64, small_unit: char) -> String {
        if small == 0 { format!("{big}{big_unit}") } else { format!("{big}{big_unit}{small}{small_unit}") }
    }

    match seconds {
        i64::MIN..=-2 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        0..=119 => format!("{seconds}s"),
        120..=599 => pair(seconds / 60, 'm', seconds % 60, 's'),
        600..=10_799 => format!("{}m", seconds / 60),
        10_800..=28_799 => pair(seconds / HOUR, 'h', seconds / 60 % 60, 'm'),
        28_800..=172_799 => format!("{}h", seconds / HOUR),
        172_800..=691_199 => pair(seconds / DAY, 'd', seconds / HOUR % 24, 'h'),
        691_200..63_072_000 => format!("{}d", seconds / DAY),
        63_072_000..252_288_000 => pair(seconds / YEAR, 'y', seconds / DAY % 365, 'd'),
        _ => format!("{}y", seconds / YEAR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_lose_precision_as_they_grow() {
        for (seconds, text) in [
            (-2, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (1, "1s"),
            (70, "70s"),
            (119, "119s"),
            (120, "2m"),
            (190, "3m10s"),
            (600, "10m"),
            (1000, "16m"),
            (7200, "120m"),
            (10_799, "179m"),
            (10_800, "3h"),
            (10_860, "3h1m"),
            (28_799, "7h59m"),
            (28_800, "8h"),
            (86_400, "24h"),
            (172_799, "47h"),
            (172_800, "2d"),
            (172_800 + 3600, "2d1h"),
            (691_199, "7d23h"),
            (691_200, "8d"),
            (63_071_999, "729d"),
            (63_072_000, "2y"),
            (63_072_000 + 86_400, "2y1d"),
            (252_287_999, "7y364d"),
            (252_288_000, "8y"),
            (400_000_000, "12y"),
        ] {
            assert_eq!(duration(seconds), text, "{seconds} seconds");
        }
    }

    #[test]
    fn times_that_cannot_be_read_are_unknown() {
        let now: Timestamp = "2026-01-02T00:00:00Z".parse().unwrap();
        assert_eq!(since("2026-01-01T23:59:30Z", now), "30s");
        assert_eq!(since("", now), UNKNOWN);
        assert_eq!(since("yesterday", now), UNKNOWN);
        assert_eq!(age(&ferrite_json::json!({}), now), UNKNOWN);
    }
}
