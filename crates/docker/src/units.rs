//! Sizes and times as docker's users read and write them.

use jiff::Timestamp;

/// `64m`, `1.5g`, `100`: bytes, counted in 1024s.
pub fn parse_bytes(text: &str) -> Result<i64, String> {
    let fail = || format!("invalid size: '{text}'");
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(lower.len());
    let (number, unit) = lower.split_at(digits);
    let number: f64 = number.parse().map_err(|_| fail())?;
    let factor: f64 = match unit.trim().trim_end_matches("ib").trim_end_matches('b') {
        "" => 1.0,
        "k" => 1024.0,
        "m" => 1_048_576.0,
        "g" => 1_073_741_824.0,
        "t" => 1_099_511_627_776.0,
        _ => return Err(fail()),
    };
    let bytes = number * factor;
    if bytes.is_finite() && bytes < i64::MAX as f64 { Ok(bytes as i64) } else { Err(fail()) }
}

fn scaled(value: f64, base: f64, units: &[&str], digits: usize) -> String {
    let (mut value, mut unit) = (value, 0);
    while value >= base && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    // As many significant digits as asked for, without trailing zeroes.
    let whole = if value < 1.0 { 1 } else { value.log10().floor() as usize + 1 };
    let mut text = format!("{value:.*}", digits.saturating_sub(whole));
    if text.contains('.') {
        text.truncate(text.trim_end_matches('0').trim_end_matches('.').len());
    }
    text + units[unit]
}

/// `1.24MB`, in 1000s, as image sizes are shown.
pub fn human_size(bytes: u64) -> String {
    scaled(bytes as f64, 1000.0, &["B", "kB", "MB", "GB", "TB", "PB"], 3)
}

/// `1.24MiB`, in 1024s, as memory is shown.
pub fn binary_size(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 4)
}

/// `5 seconds`, `About an hour`, `3 weeks`.
pub fn human_duration(seconds: i64) -> String {
    let (minutes, hours) = (seconds / 60, (seconds + 1800) / 3600);
    match seconds {
        ..1 => "Less than a second".into(),
        1 => "1 second".into(),
        2..60 => format!("{seconds} seconds"),
        _ if minutes == 1 => "About a minute".into(),
        _ if minutes < 60 => format!("{minutes} minutes"),
        _ if hours == 1 => "About an hour".into(),
        _ if hours < 48 => format!("{hours} hours"),
        _ if hours < 24 * 7 * 2 => format!("{} days", hours / 24),
        _ if hours < 24 * 30 * 2 => format!("{} weeks", hours / 24 / 7),
        _ if hours < 24 * 365 * 2 => format!("{} months", hours / 24 / 30),
        _ => format!("{} years", hours / 24 / 365),
    }
}

/// Nanoseconds since 1970.
pub fn now() -> i64 {
    i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// `2026-01-02T03:04:05.000000006Z`; the zero time docker uses for "never".
pub fn rfc3339(nanoseconds: i64) -> String {
    if nanoseconds == 0 {
        return "0001-01-01T00:00:00Z".into();
    }
    Timestamp::from_nanosecond(nanoseconds.into()).map(|time| format!("{time:.9}")).unwrap_or_default()
}

/// `2026-01-02 03:04:05 +0000 UTC`
pub fn created_at(nanoseconds: i64) -> String {
    Timestamp::from_nanosecond(nanoseconds.into())
        .map(|time| time.strftime("%Y-%m-%d %H:%M:%S +0000 UTC").to_string())
        .unwrap_or_default()
}

/// A moment: seconds since 1970 (with fraction), RFC 3339, or an age like `10m`.
pub fn parse_moment(text: &str, now: i64) -> Result<i64, String> {
    let fail = || format!("failed to parse value as time or duration: {text:?}");
    if let Ok(seconds) = text.parse::<f64>() {
        return Ok((seconds * 1e9) as i64);
    }
    if let Ok(time) = text.parse::<Timestamp>() {
        return i64::try_from(time.as_nanosecond()).map_err(|_| fail());
    }
    parse_duration(text).map(|age| now - age).ok_or_else(fail)
}

/// Nanoseconds of `1h30m`, `1.5s`, `100ms`.
fn parse_duration(text: &str) -> Option<i64> {
    let mut rest = text;
    let mut total = 0f64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !(c.is_ascii_digit() || c == '.')).filter(|at| *at > 0)?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let factor = match &rest[..unit] {
            "ns" => 1.0,
            "us" | "µs" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            "m" => 60e9,
            "h" => 3600e9,
            _ => return None,
        };
        total += number * factor;
        rest = &rest[unit..];
    }
    (!text.is_empty() && total < i64::MAX as f64).then_some(total as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, want) in [
            ("100", Some(100)),
            ("64m", Some(64 << 20)),
            ("64MB", Some(64 << 20)),
            ("1.5g", Some(3 << 29)),
            ("1KiB", Some(1024)),
            ("x", None),
            ("1q", None),
            ("", None),
        ] {
            assert_eq!(parse_bytes(text).ok(), want, "{text}");
        }
        for (bytes, want) in [(0, "0B"), (999, "999B"), (1_240_000, "1.24MB"), (133_000_000, "133MB")] {
            assert_eq!(human_size(bytes), want);
        }
        assert_eq!(binary_size(64 << 20), "64MiB");
        assert_eq!(binary_size(1536), "1.5KiB");
    }

    #[test]
    fn times() {
        for (seconds, want) in [
            (0, "Less than a second"),
            (1, "1 second"),
            (59, "59 seconds"),
            (60, "About a minute"),
            (150, "2 minutes"),
            (3600, "About an hour"),
            (7200, "2 hours"),
            (3 * 86_400, "3 days"),
            (21 * 86_400, "3 weeks"),
            (100 * 86_400, "3 months"),
            (800 * 86_400, "2 years"),
        ] {
            assert_eq!(human_duration(seconds), want);
        }
        let now = 10_000_000_000_000;
        assert_eq!(parse_moment("5", now), Ok(5_000_000_000));
        assert_eq!(parse_moment("1m30s", now), Ok(now - 90_000_000_000));
        assert_eq!(parse_moment("1970-01-01T00:00:01Z", now), Ok(1_000_000_000));
        assert!(parse_moment("soon", now).is_err());
        assert_eq!(rfc3339(0), "0001-01-01T00:00:00Z");
        assert_eq!(rfc3339(1_500_000_000), "1970-01-01T00:00:01.500000000Z");
    }
}
