//! Durations in Go's notation (`12h`, `1h30m`, `1.5s`), as configuration files and plugins write them.

use std::time::Duration;

const UNITS: &[(&str, f64)] = &[
    ("ns", 1.0),
    ("us", 1e3),
    ("µs", 1e3),
    ("μs", 1e3),
    ("ms", 1e6),
    ("s", 1e9),
    ("m", 60e9),
    ("h", 3600e9),
];

/// Nanoseconds; `None` when the text is no duration.
pub(crate) fn parse(text: &str) -> Option<i64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Some(0);
    }
    if rest.is_empty() {
        return None;
    }
    let mut total = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number = &rest[..digits];
        if number.bytes().all(|b| b == b'.') {
            return None;
        }
        let number: f64 = number.parse().ok()?;
        rest = &rest[digits..];
        let unit = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let (_, nanos) = UNITS.iter().find(|(name, _)| *name == &rest[..unit])?;
        total += number * nanos;
        rest = &rest[unit..];
    }
    // As Go: a number that does not fit is no duration.
    (total < i64::MAX as f64).then_some((sign * total) as i64)
}

pub(crate) fn not_negative(nanos: i64) -> Duration {
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations() {
        for (text, nanos) in [
            ("0", Some(0)),
            ("0s", Some(0)),
            ("12h", Some(43_200_000_000_000)),
            ("1h30m", Some(5_400_000_000_000)),
            ("1.5s", Some(1_500_000_000)),
            (".5s", Some(500_000_000)),
            ("-1m", Some(-60_000_000_000)),
            ("10ms1us", Some(10_001_000)),
            ("", None),
            ("-", None),
            ("10", None),
            ("s", None),
            (".s", None),
            ("1d", None),
            ("1h 2m", None),
            ("99999999999h", None),
        ] {
            assert_eq!(parse(text), nanos, "{text}");
        }
    }
}
