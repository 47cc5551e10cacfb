//! Durations in Go's notation: `1h30m`, `15s`, `100ms`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// A duration as flags and configuration files have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoDuration(pub Duration);

/// A text that is no duration that is positive or zero.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a duration like 1h30m, 15s or 100ms")]
pub struct ParseDurationError {
    text: String,
}

/// Units by the number of nanoseconds, the longest name first where one is the beginning of another.
const UNITS: &[(&str, u64)] = &[
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

impl FromStr for GoDuration {
    type Err = ParseDurationError;

    fn from_str(text: &str) -> Result<Self, ParseDurationError> {
        parse(text).map(Self).ok_or_else(|| ParseDurationError { text: text.chars().take(64).collect() })
    }
}

fn parse(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(end);
        let (name, unit) =
            UNITS.iter().filter(|(name, _)| tail.starts_with(name)).max_by_key(|(name, _)| name.len())?;
        total = total.checked_add(scaled(number, *unit)?)?;
        rest = &tail[name.len()..];
    }
    // Go's durations are signed 64-bit numbers of nanoseconds.
    (!text.is_empty() && i64::try_from(total).is_ok()).then(|| Duration::from_nanos(total))
}

/// A decimal number times a unit, in whole nanoseconds.
fn scaled(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut value = whole.checked_mul(unit)?;
    let mut place = unit;
    for digit in fraction.bytes() {
        place /= 10;
        value = value.checked_add(u64::from(digit - b'0') * place)?;
    }
    Some(value)
}

impl fmt::Display for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanoseconds = self.0.as_nanos();
        let (hours, minutes) = (nanoseconds / 3_600_000_000_000, nanoseconds / 60_000_000_000 % 60);
        let seconds = (nanoseconds % 60_000_000_000) as f64 / 1e9;
        match (hours, minutes) {
            (0, 0) if nanoseconds == 0 => f.write_str("0s"),
            (0, 0) if seconds < 1e-6 => write!(f, "{nanoseconds}ns"),
            (0, 0) if seconds < 1e-3 => write!(f, "{}µs", seconds * 1e6),
            (0, 0) if seconds < 1.0 => write!(f, "{}ms", seconds * 1e3),
            (0, 0) => write!(f, "{seconds}s"),
            (0, _) => write!(f, "{minutes}m{seconds}s"),
            _ => write!(f, "{hours}h{minutes}m{seconds}s"),
        }
    }
}

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_printed_as_go_does() {
        for (text, nanoseconds, printed) in [
            ("0", 0, "0s"),
            ("15s", 15_000_000_000, "15s"),
            ("1.5s", 1_500_000_000, "1.5s"),
            (".5s", 500_000_000, "500ms"),
            ("100ms", 100_000_000, "100ms"),
            ("1h30m", 5_400_000_000_000, "1h30m0s"),
            ("+2m", 120_000_000_000, "2m0s"),
            ("7ns", 7, "7ns"),
            ("3us", 3000, "3µs"),
        ] {
            let read: GoDuration = text.parse().unwrap();
            assert_eq!(read.0, Duration::from_nanos(nanoseconds), "{text}");
            assert_eq!(read.to_string(), printed);
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for text in ["", "15", "s", "1.2.3s", "-1s", "1x", "1 s", "99999999999h", "1e3s", "."] {
            assert!(text.parse::<GoDuration>().is_err(), "{text}");
        }
    }
}
