//! Scalars with a text form of their own: quantities, times, base64.

use super::DecodeError;
use crate::quantity::{Quantity, is_plainly_canonical};
use base64::Engine as _;
use base64::alphabet;
use base64::engine::{GeneralPurpose, GeneralPurposeConfig};
use ferrite_json::Text;
use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Standard base64, padding required, as Go's `StdEncoding`.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);

/// A quantity in its canonical form, the form that upstream keeps: `1000m` becomes `1`.
pub(super) fn canonical_quantity(text: &str) -> Result<Text, DecodeError> {
    if is_plainly_canonical(text) {
        return Ok(text.into());
    }
    let quantity = Quantity::parse(text).map_err(|error| DecodeError::Text(error.to_string()))?;
    Ok(quantity.to_string().into())
}

/// `2026-01-02T03:04:05Z`.
pub(super) fn format_time(time: Timestamp) -> String {
    time.to_zoned(TimeZone::UTC).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Returns true if a readable time is written as [`format_time`] writes it: nothing else is as long and
/// ends so.
pub(super) fn is_canonical_time(text: &str) -> bool {
    text.len() == "2026-01-02T03:04:05Z".len() && text.ends_with('Z')
}

/// `2026-01-02T03:04:05.000006Z`.
pub(super) fn format_micro_time(time: Timestamp) -> String {
    let zoned = time.to_zoned(TimeZone::UTC);
    let micros = zoned.subsec_nanosecond() / 1000;
    format!("{}.{micros:06}Z", zoned.strftime("%Y-%m-%dT%H:%M:%S"))
}

pub(super) fn decode_base64(text: &str) -> Result<Vec<u8>, DecodeError> {
    let engine = |text: &str| BASE64.decode(text);
    // Go skips line breaks in the input.
    let decoded =
        if text.contains(['\r', '\n']) { engine(&text.replace(['\r', '\n'], "")) } else { engine(text) };
    decoded.map_err(|error| {
        let at = match error {
            base64::DecodeError::InvalidByte(at, _) | base64::DecodeError::InvalidLastSymbol(at, _) => at,
            base64::DecodeError::InvalidLength(_) | base64::DecodeError::InvalidPadding => text.len() / 4 * 4,
        };
        DecodeError::Text(format!("illegal base64 data at input byte {at}"))
    })
}

pub(super) fn encode_base64(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}

/// Nanoseconds as Go prints a duration: `1h2m3.5s`, `150ms`, `0s`.
pub(super) fn format_duration(nanos: i64) -> String {
    let sign = if nanos < 0 { "-" } else { "" };
    let total = nanos.unsigned_abs();
    let fraction = |value: u64, unit: u64| {
        let (whole, part) = (value / unit, value % unit);
        let width = unit.ilog10() as usize;
        let digits = format!("{part:0width$}");
        let digits = digits.trim_end_matches('0');
        if digits.is_empty() { whole.to_string() } else { format!("{whole}.{digits}") }
    };
    match total {
        0 => return "0s".into(),
        1..1_000 => return format!("{sign}{total}ns"),
        1_000..1_000_000 => return format!("{sign}{}µs", fraction(total, 1_000)),
        1_000_000..1_000_000_000 => return format!("{sign}{}ms", fraction(total, 1_000_000)),
        _ => {}
    }
    let seconds = total / 1_000_000_000;
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let rest = fraction(total % 60_000_000_000, 1_000_000_000);
    match (hours, minutes) {
        (0, 0) => format!("{sign}{rest}s"),
        (0, _) => format!("{sign}{minutes}m{rest}s"),
        _ => format!("{sign}{hours}h{minutes}m{rest}s"),
    }
}

/// The inverse of [`format_duration`] for anything Go's `ParseDuration` takes.
pub(super) fn parse_duration(text: &str) -> Option<i64> {
    let (negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Some(0);
    }
    let mut total = 0f64;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(end);
        let unit_end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        let scale = match unit {
            "ns" => 1.0,
            "us" | "µs" | "μs" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            "m" => 60e9,
            "h" => 3600e9,
            _ => return None,
        };
        total += number.parse::<f64>().ok()? * scale;
        rest = tail;
    }
    let total = if negative { -total } else { total };
    (total.abs() < 9.2e18).then_some(total as i64)
}

/// Whole seconds since the epoch, rounded down, and the nanoseconds above them, as Go splits a time.
pub(super) fn floor_seconds(time: Timestamp) -> (i64, i32) {
    let (seconds, nanos) = (time.as_second(), time.subsec_nanosecond());
    if nanos < 0 { (seconds - 1, nanos + 1_000_000_000) } else { (seconds, nanos) }
}
