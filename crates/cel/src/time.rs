//! Times and durations, read and written as Go does.

use std::cmp::Ordering;
use std::fmt;

use jiff::civil;
use jiff::tz::TimeZone;

use crate::error::{EvalError, err};

const NANOS: i64 = 1_000_000_000;
/// 0001-01-01T00:00:00Z.
const MIN_SECONDS: i64 = -62_135_596_800;
/// 9999-12-31T23:59:59Z.
const MAX_SECONDS: i64 = 253_402_300_799;

/// A moment between the years 1 and 9999, with the offset from UTC that it was written with.
#[derive(Debug, Clone, Copy)]
pub struct Timestamp {
    seconds: i64,
    nanos: i32,
    /// Seconds east of UTC. It is no part of the moment, but of its text.
    offset: i32,
}

/// A span of time in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Duration {
    pub nanos: i64,
}

impl PartialEq for Timestamp {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Timestamp {}

impl PartialOrd for Timestamp {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timestamp {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.seconds, self.nanos).cmp(&(other.seconds, other.nanos))
    }
}

/// The parts of a date and time of day in some zone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Civil {
    pub year: i64,
    pub month: i64,
    pub day: i64,
    pub hour: i64,
    pub minute: i64,
    pub second: i64,
    pub nanos: i64,
    /// Sunday is 0.
    pub weekday: i64,
    /// The first of January is 1.
    pub day_of_year: i64,
}

const OVERFLOW: EvalError = EvalError::text("timestamp overflow");

impl Timestamp {
    /// A moment in seconds since 1970, if it is in range.
    pub fn from_unix(seconds: i64, nanos: i32) -> Option<Self> {
        let total = i128::from(seconds) * i128::from(NANOS) + i128::from(nanos);
        let seconds = i64::try_from(total.div_euclid(NANOS.into())).ok()?;
        let nanos = total.rem_euclid(NANOS.into()) as i32;
        (MIN_SECONDS..=MAX_SECONDS).contains(&seconds).then_some(Self { seconds, nanos, offset: 0 })
    }

    pub fn unix_seconds(&self) -> i64 {
        self.seconds
    }

    pub fn subsecond_nanos(&self) -> i32 {
        self.nanos
    }

    pub(crate) fn plus(&self, duration: Duration) -> Result<Self, EvalError> {
        let nanos = i128::from(self.nanos) + i128::from(duration.nanos);
        let seconds = i128::from(self.seconds) + nanos.div_euclid(NANOS.into());
        let seconds = i64::try_from(seconds).map_err(|_| OVERFLOW)?;
        if !(MIN_SECONDS..=MAX_SECONDS).contains(&seconds) {
            return Err(OVERFLOW);
        }
        Ok(Self { seconds, nanos: nanos.rem_euclid(NANOS.into()) as i32, offset: self.offset })
    }

    pub(crate) fn minus(&self, other: &Self) -> Result<Duration, EvalError> {
        let seconds = i128::from(self.seconds) - i128::from(other.seconds);
        let nanos = seconds * i128::from(NANOS) + i128::from(self.nanos - other.nanos);
        i64::try_from(nanos).map(|nanos| Duration { nanos }).map_err(|_| EvalError::text("integer overflow"))
    }

    fn civil_at(&self, offset: i64) -> Civil {
        let local = self.seconds + offset;
        let days = local.div_euclid(86_400);
        let second = local.rem_euclid(86_400);
        let (year, month, day) = civil_from_days(days);
        Civil {
            year,
            month,
            day,
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
            nanos: self.nanos.into(),
            weekday: (days + 4).rem_euclid(7),
            day_of_year: days - days_from_civil(year, 1, 1) + 1,
        }
    }

    pub(crate) fn utc(&self) -> Civil {
        self.civil_at(0)
    }

    /// The parts in the zone that `zone` names: a name of the time zone database, or hours and minutes.
    pub(crate) fn in_zone(&self, zone: &str) -> Result<Civil, EvalError> {
        if let Some((hours, minutes)) = zone.split_once(':') {
            let number = |text: &str| {
                text.parse::<i32>().map_err(|_| err!("strconv.Atoi: parsing {text:?}: invalid syntax"))
            };
            let (hours, minutes) = (i64::from(number(hours)?), i64::from(number(minutes)?));
            let minutes = if zone.starts_with('-') { hours * 60 - minutes } else { hours * 60 + minutes };
            return Ok(self.civil_at(minutes.clamp(-100_000, 100_000) * 60));
        }
        if zone.is_empty() || zone == "UTC" {
            return Ok(self.utc());
        }
        let unknown = || err!("unknown time zone {zone}");
        let found = TimeZone::get(zone).map_err(|_| unknown())?;
        let moment = jiff::Timestamp::new(self.seconds, self.nanos).map_err(|_| unknown())?;
        Ok(self.civil_at(found.to_offset(moment).seconds().into()))
    }
}

/// The date of a count of days since 1970-01-01.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let shifted = (month + 9) % 12;
    let day_of_year = (153 * shifted + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

impl fmt::Display for Timestamp {
    /// As RFC 3339 says, with as many digits of the second as are needed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.civil_at(self.offset.into());
        write!(
            f,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}",
            at.year, at.month, at.day, at.hour, at.minute, at.second
        )?;
        if self.nanos != 0 {
            write!(f, ".{}", format!("{:09}", self.nanos).trim_end_matches('0'))?;
        }
        match self.offset {
            0 => f.write_str("Z"),
            offset => {
                let sign = if offset < 0 { '-' } else { '+' };
                write!(f, "{sign}{:02}:{:02}", offset.abs() / 3600, offset.abs() / 60 % 60)
            }
        }
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = (self.nanos / NANOS) as f64 + (self.nanos % NANOS) as f64 / 1e9;
        write!(f, "{seconds}s")
    }
}

/// `2006-01-02T15:04:05` with a fraction and a zone; the zone may be absent if `zone_optional`.
fn parse_time(text: &str, zone_optional: bool) -> Option<Timestamp> {
    let bytes = text.as_bytes();
    let number = |from: usize, to: usize| -> Option<i64> {
        let digits = text.get(from..to)?;
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let punctuation = [(4, b'-'), (7, b'-'), (10, b'T'), (13, b':'), (16, b':')];
    if punctuation.iter().any(|(at, c)| bytes.get(*at) != Some(c)) {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    civil::Date::new(year as i16, month as i8, day as i8).ok()?;
    if hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let mut at = 19;
    let mut nanos = 0;
    if matches!(bytes.get(at), Some(b'.' | b',')) {
        let end = at + 1 + bytes[at + 1..].iter().take_while(|b| b.is_ascii_digit()).count();
        let digits = &text[at + 1..end];
        if digits.is_empty() {
            return None;
        }
        nanos = format!("{:0<9.9}", digits).parse().ok()?;
        at = end;
    }
    let offset = match &text[at..] {
        "" if zone_optional => 0,
        "Z" => 0,
        zone => {
            let zone_bytes = zone.as_bytes();
            let sign = match zone_bytes.first()? {
                b'+' => 1,
                b'-' => -1,
                _ => return None,
            };
            if zone.len() != 6 || zone_bytes[3] != b':' {
                return None;
            }
            let (hours, minutes) = (number(at + 1, at + 3)?, number(at + 4, at + 6)?);
            if hours > 24 || minutes > 59 {
                return None;
            }
            sign * (hours * 3600 + minutes * 60)
        }
    };
    let seconds = days_from_civil(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second - offset;
    Some(Timestamp { seconds, nanos, offset: offset as i32 })
}

/// A time as `timestamp()` reads it. `Err` if it is a time, but out of range.
pub(crate) fn parse_timestamp(text: &str) -> Option<Result<Timestamp, EvalError>> {
    let time = parse_time(text, false)?;
    let in_range = (MIN_SECONDS..=MAX_SECONDS).contains(&time.seconds);
    Some(if in_range { Ok(time) } else { Err(OVERFLOW) })
}

/// A string of format `date-time`, which need not name a zone.
pub(crate) fn parse_openapi_time(text: &str) -> Option<Timestamp> {
    parse_time(text, true)
}

/// A string of format `date`.
pub(crate) fn parse_date(text: &str) -> Option<Timestamp> {
    parse_time(&format!("{text}T00:00:00Z"), false)
}

/// Units as Go's durations have them.
const UNITS: &[(&str, i64)] = &[
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", 1_000_000),
    ("s", NANOS),
    ("m", 60 * NANOS),
    ("h", 3600 * NANOS),
];

/// A duration as Go writes it: `1h15m30.918s`.
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let (mut rest, negative) = match text.as_bytes().first()? {
        b'-' => (&text[1..], true),
        b'+' => (&text[1..], false),
        _ => (text, false),
    };
    if rest == "0" {
        return Some(Duration { nanos: 0 });
    }
    if rest.is_empty() {
        return None;
    }
    // As Go: the magnitude is a u64, so that the smallest duration can be read.
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let whole_len = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (whole, after) = rest.split_at(whole_len);
        let mut value: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
        let (fraction, after) = match after.strip_prefix('.') {
            Some(after) => after.split_at(after.bytes().take_while(u8::is_ascii_digit).count()),
            None => ("", after),
        };
        if whole.is_empty() && fraction.is_empty() {
            return None;
        }
        let unit_len = after.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_len);
        let unit = UNITS.iter().find(|(name, _)| *name == unit)?.1;
        value = value.checked_mul(unit as u64).filter(|value| *value <= 1 << 63)?;
        if !fraction.is_empty() {
            let digits: f64 = fraction.get(..fraction.len().min(18))?.parse().ok()?;
            let scale = 10f64.powi(fraction.len().min(18) as i32);
            value += (digits * (unit as f64 / scale)) as u64;
        }
        total = total.checked_add(value).filter(|total| *total <= 1 << 63)?;
        rest = after;
    }
    let nanos = if negative { (total as i128).checked_neg()? } else { i128::from(total) };
    i64::try_from(nanos).ok().map(|nanos| Duration { nanos })
}

/// Units of durations of format `duration`; the last variant stands for every word that it begins.
const LONG_UNITS: &[(&[&str], i64)] = &[
    (&["ns", "nano"], 1),
    (&["us", "\u{b5}s", "micro"], 1_000),
    (&["ms", "milli"], 1_000_000),
    (&["s", "sec"], NANOS),
    (&["m", "min"], 60 * NANOS),
    (&["h", "hr", "hour"], 3600 * NANOS),
    (&["d", "day"], 24 * 3600 * NANOS),
    (&["w", "wk", "week"], 7 * 24 * 3600 * NANOS),
];

/// A string of format `duration`: as Go writes them, or words such as `3 days`.
pub(crate) fn parse_openapi_duration(text: &str) -> Option<Duration> {
    if let Some(duration) = parse_duration(text) {
        return Some(duration);
    }
    let mut total: Option<i64> = None;
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        rest = &rest[start..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let factor: i64 = rest[..digits].parse().ok()?;
        rest = rest[digits..].trim_start();
        let len = rest.find(|c: char| !c.is_ascii_alphabetic() && c != '\u{b5}').unwrap_or(rest.len());
        let unit = rest[..len].to_lowercase();
        rest = &rest[len..];
        for (variants, nanos) in LONG_UNITS {
            let prefix = variants.last().is_some_and(|last| unit.starts_with(last));
            if !unit.is_empty() && (prefix || variants.contains(&unit.as_str())) {
                total = Some(total.unwrap_or(0).wrapping_add(factor.wrapping_mul(*nanos)));
                break;
            }
        }
    }
    total.map(|nanos| Duration { nanos })
}
