//! Schedules of CronJobs, in the dialect of `robfig/cron` as upstream parses it.
//!
//! That is five fields (`*` and `?`, names, ranges, steps, `N/step` from N to the end), the descriptors `@hourly` and
//! the like, `@every <duration>`, and a leading `TZ=` or `CRON_TZ=`. A day must match both day fields if one of them is
//! a star, else either. No crate has these rules and these error messages, which users know from upstream.

use jiff::civil::{Date, DateTime};
use jiff::tz::{Offset, TimeZone};
use jiff::{SignedDuration, Timestamp, ToSpan};

/// A text that is not a schedule, in upstream's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    #[error("empty spec string")]
    Empty,
    #[error("provided bad location {0}: unknown time zone {0}")]
    UnknownZone(String),
    /// Upstream's parser panics on a zone without a schedule, and reports the panic.
    #[error("invalid schedule format: runtime error: slice bounds out of range [:-1]")]
    ZoneAlone,
    #[error("unrecognized descriptor: {0}")]
    UnknownDescriptor(String),
    #[error("failed to parse duration {descriptor}: time: {problem}")]
    Duration { descriptor: String, problem: String },
    #[error("expected exactly 5 fields, found {}: [{}]", .0.len(), .0.join(" "))]
    FieldCount(Vec<String>),
    #[error("failed to parse int from {0}: strconv.Atoi: parsing {0:?}: {1}")]
    Number(String, &'static str),
    #[error("negative number ({0}) not allowed: {1}")]
    Negative(i64, String),
    #[error("too many hyphens: {0}")]
    Hyphens(String),
    #[error("too many slashes: {0}")]
    Slashes(String),
    #[error("step of range should be a positive number: {0}")]
    ZeroStep(String),
    #[error("beginning of range ({0}) below minimum ({1}): {2}")]
    BelowMinimum(u64, u32, String),
    #[error("end of range ({0}) above maximum ({1}): {2}")]
    AboveMaximum(u64, u32, String),
    #[error("beginning of range ({0}) beyond end of range ({1}): {2}")]
    Reversed(u64, u64, String),
}

struct Bounds {
    min: u32,
    max: u32,
    names: &'static [&'static str],
}

const MONTHS: &[&str] = &["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const DAYS: &[&str] = &["sun", "mon", "tue", "wed", "thu", "fri", "sat"];
const FIELDS: [Bounds; 5] = [
    Bounds { min: 0, max: 59, names: &[] },
    Bounds { min: 0, max: 23, names: &[] },
    Bounds { min: 1, max: 31, names: &[] },
    Bounds { min: 1, max: 12, names: MONTHS },
    Bounds { min: 0, max: 6, names: DAYS },
];

/// The descriptors that stand for five fields.
const DESCRIPTORS: &[(&str, &str)] = &[
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

/// Years after which a search for the next time gives up, as for February 31.
const YEARS: i16 = 5;

/// The values that a field allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Field {
    bits: u64,
    /// True if a star (or `?`) without a step is among the ranges.
    star: bool,
}

impl Field {
    fn has(self, value: impl TryInto<u32>) -> bool {
        value.try_into().is_ok_and(|value: u32| value < 64 && self.bits & (1 << value) != 0)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Rule {
    Fields { minute: Field, hour: Field, day: Field, month: Field, weekday: Field },
    Every(SignedDuration),
}

/// The times at which a CronJob runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    rule: Rule,
    /// None is the zone of the process that runs the jobs.
    zone: Option<TimeZone>,
}

impl Schedule {
    pub fn parse(text: &str) -> Result<Self, ScheduleError> {
        if text.is_empty() {
            return Err(ScheduleError::Empty);
        }
        let (zone, text) = match text.strip_prefix("TZ=").or_else(|| text.strip_prefix("CRON_TZ=")) {
            Some(rest) => {
                let (name, rest) = rest.split_once(' ').ok_or(ScheduleError::ZoneAlone)?;
                let zone = zone(name).ok_or_else(|| ScheduleError::UnknownZone(name.to_owned()))?;
                (zone, rest.trim())
            }
            None => (None, text),
        };
        Ok(Self { rule: parse_rule(text)?, zone })
    }

    /// The same schedule in another zone.
    #[must_use]
    pub fn in_zone(self, zone: TimeZone) -> Self {
        Self { zone: Some(zone), ..self }
    }

    /// The first time after `after`; none if there is none within five years. Schedules that name no zone mean `local`.
    pub fn next(&self, after: Timestamp, local: &TimeZone) -> Option<Timestamp> {
        let second = i64::try_from(after.as_nanosecond().div_euclid(1_000_000_000)).ok()?;
        match &self.rule {
            Rule::Every(delay) => Timestamp::from_second(second.checked_add(delay.as_secs())?).ok(),
            Rule::Fields { minute, hour, day, month, weekday } => {
                if [minute, hour, month].iter().any(|field| field.bits == 0) {
                    return None;
                }
                let day_matches = |date: Date| {
                    let in_month = day.has(date.day());
                    let in_week = weekday.has(date.weekday().to_sunday_zero_offset());
                    if day.star || weekday.star { in_month && in_week } else { in_month || in_week }
                };
                let clock = Clock(self.zone.as_ref().unwrap_or(local));
                clock.search(second, *minute, *hour, *month, day_matches)
            }
        }
    }
}

/// The zone that Go loads under a name; `Some(None)` is the local one, and `None` no zone at all.
fn zone(name: &str) -> Option<Option<TimeZone>> {
    match name {
        "" | "UTC" => Some(Some(TimeZone::UTC)),
        "Local" => Some(None),
        name => TimeZone::get(name).ok().map(Some),
    }
}

fn parse_rule(text: &str) -> Result<Rule, ScheduleError> {
    let text = match DESCRIPTORS.iter().find(|(name, _)| *name == text) {
        Some((_, fields)) => fields,
        None => text,
    };
    if let Some(duration) = text.strip_prefix("@every ") {
        let delay = parse_duration(duration)
            .map_err(|problem| ScheduleError::Duration { descriptor: text.to_owned(), problem })?;
        // Whole seconds, and at least one.
        return Ok(Rule::Every(SignedDuration::from_secs((delay / NANOS).max(1))));
    }
    if text.starts_with('@') {
        return Err(ScheduleError::UnknownDescriptor(text.to_owned()));
    }
    let fields: Vec<&str> = text.split_whitespace().collect();
    let [minute, hour, day, month, weekday] = fields[..] else {
        return Err(ScheduleError::FieldCount(fields.into_iter().map(str::to_owned).collect()));
    };
    let [minutes, hours, days, months, weekdays] = &FIELDS;
    Ok(Rule::Fields {
        minute: parse_field(minute, minutes)?,
        hour: parse_field(hour, hours)?,
        day: parse_field(day, days)?,
        month: parse_field(month, months)?,
        weekday: parse_field(weekday, weekdays)?,
    })
}

const NANOS: i64 = 1_000_000_000;
const UNITS: &[(&str, i64)] = &[
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", NANOS),
    ("m", 60 * NANOS),
    ("h", 3600 * NANOS),
];

/// One of Go's durations (numbers with units, `1h30m`) in nanoseconds; the error is Go's.
fn parse_duration(text: &str) -> Result<i64, String> {
    let invalid = || format!("invalid duration {text:?}");
    let (negative, unsigned) = match text.strip_prefix(['-', '+']) {
        Some(rest) => (text.starts_with('-'), rest),
        None => (false, text),
    };
    if unsigned == "0" {
        return Ok(0);
    }
    let mut rest = unsigned;
    let mut total: i64 = 0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.len() + fraction.len() == 0 || fraction.contains('.') {
            return Err(invalid());
        }
        let end = tail.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        if unit.is_empty() {
            return Err(format!("missing unit in duration {text:?}"));
        }
        let Some((_, scale)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(format!("unknown unit {unit:?} in duration {text:?}"));
        };
        let whole: i64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| invalid())? };
        // More digits than nanoseconds have say nothing more.
        let digits = &fraction[..fraction.len().min(18)];
        let part: i64 = if digits.is_empty() { 0 } else { digits.parse().map_err(|_| invalid())? };
        let part =
            i128::from(part) * i128::from(*scale) / 10_i128.pow(u32::try_from(digits.len()).unwrap_or(0));
        total = whole
            .checked_mul(*scale)
            .and_then(|whole| whole.checked_add(i64::try_from(part).ok()?))
            .and_then(|amount| total.checked_add(amount))
            .ok_or_else(invalid)?;
        rest = tail;
    }
    if unsigned.is_empty() {
        return Err(invalid());
    }
    Ok(if negative { -total } else { total })
}

fn parse_field(text: &str, bounds: &Bounds) -> Result<Field, ScheduleError> {
    let mut field = Field::default();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let found = parse_range(range, bounds)?;
        field.bits |= found.bits;
        field.star |= found.star;
    }
    Ok(field)
}

fn parse_range(text: &str, bounds: &Bounds) -> Result<Field, ScheduleError> {
    let with_step: Vec<&str> = text.split('/').collect();
    let ends: Vec<&str> = with_step[0].split('-').collect();
    let mut star = matches!(ends[0], "*" | "?");
    let (start, mut end) = if star {
        (u64::from(bounds.min), u64::from(bounds.max))
    } else {
        let start = number(ends[0], bounds)?;
        match ends.len() {
            1 => (start, start),
            2 => (start, number(ends[1], bounds)?),
            _ => return Err(ScheduleError::Hyphens(text.to_owned())),
        }
    };
    let step = match with_step.len() {
        1 => 1,
        2 => {
            let step = plain_number(with_step[1])?;
            // `N/step` means from N to the end.
            if ends.len() == 1 {
                end = u64::from(bounds.max);
            }
            star &= step <= 1;
            step
        }
        _ => return Err(ScheduleError::Slashes(text.to_owned())),
    };
    if start < u64::from(bounds.min) {
        return Err(ScheduleError::BelowMinimum(start, bounds.min, text.to_owned()));
    }
    if end > u64::from(bounds.max) {
        return Err(ScheduleError::AboveMaximum(end, bounds.max, text.to_owned()));
    }
    if start > end {
        return Err(ScheduleError::Reversed(start, end, text.to_owned()));
    }
    let step = usize::try_from(step).unwrap_or(usize::MAX);
    if step == 0 {
        return Err(ScheduleError::ZeroStep(text.to_owned()));
    }
    let bits = (start..=end).step_by(step).fold(0, |bits, value| bits | 1 << value);
    Ok(Field { bits, star })
}

fn number(text: &str, bounds: &Bounds) -> Result<u64, ScheduleError> {
    let lower = text.to_lowercase();
    let named = bounds.names.iter().zip(u64::from(bounds.min)..).find(|(name, _)| **name == lower);
    named.map_or_else(|| plain_number(text), |(_, value)| Ok(value))
}

fn plain_number(text: &str) -> Result<u64, ScheduleError> {
    match text.parse::<i64>() {
        Ok(number) => u64::try_from(number).map_err(|_| ScheduleError::Negative(number, text.to_owned())),
        Err(error) => {
            use std::num::IntErrorKind::{NegOverflow, PosOverflow};
            let problem = match error.kind() {
                PosOverflow | NegOverflow => "value out of range",
                _ => "invalid syntax",
            };
            Err(ScheduleError::Number(text.to_owned(), problem))
        }
    }
}

/// Converts between seconds since 1970 and the clock on the wall, with Go's choice where the wall clock jumps.
struct Clock<'a>(&'a TimeZone);

impl Clock<'_> {
    fn wall(&self, second: i64) -> Option<DateTime> {
        Some(self.0.to_datetime(Timestamp::from_second(second).ok()?))
    }

    fn offset(&self, second: i64) -> Option<i64> {
        Some(i64::from(self.0.to_offset(Timestamp::from_second(second).ok()?).seconds()))
    }

    /// As Go's `time.Date`: the offset is that of the zone just before or after, also for a time that the clock skips.
    fn second(&self, wall: DateTime) -> Option<i64> {
        let as_utc = Offset::UTC.to_timestamp(wall).ok()?.as_second();
        match self.offset(as_utc)? {
            0 => Some(as_utc),
            guess => Some(as_utc - self.offset(as_utc - guess)?),
        }
    }

    /// Finds the month, then the day, the hour and the minute. A field that wraps around starts again with the month.
    /// The steps are upstream's, so that clocks that jump give the same times.
    fn search(
        &self,
        after: i64,
        minute: Field,
        hour: Field,
        month: Field,
        day_matches: impl Fn(Date) -> bool,
    ) -> Option<Timestamp> {
        const MINUTE: i64 = 60;
        const HOUR: i64 = 3600;
        let mut at = after.checked_add(1)?;
        let last_year = self.wall(at)?.year().checked_add(YEARS)?;
        // True once a field was incremented: then all smaller ones are at their minimum.
        let mut added = false;
        'wrap: loop {
            if self.wall(at)?.year() > last_year {
                return None;
            }
            while !month.has(self.wall(at)?.month()) {
                if !std::mem::replace(&mut added, true) {
                    at = self.second(self.wall(at)?.date().first_of_month().to_datetime(midnight()))?;
                }
                at = self.second(self.wall(at)?.checked_add(1.month()).ok()?)?;
                if self.wall(at)?.month() == 1 {
                    continue 'wrap;
                }
            }
            while !day_matches(self.wall(at)?.date()) {
                if !std::mem::replace(&mut added, true) {
                    at = self.second(self.wall(at)?.date().to_datetime(midnight()))?;
                }
                at = self.second(self.wall(at)?.checked_add(1.day()).ok()?)?;
                // Midnight may not exist.
                match i64::from(self.wall(at)?.hour()) {
                    0 => {}
                    hour if hour > 12 => at += (24 - hour) * HOUR,
                    hour => at -= hour * HOUR,
                }
                if self.wall(at)?.day() == 1 {
                    continue 'wrap;
                }
            }
            while !hour.has(self.wall(at)?.hour()) {
                if !std::mem::replace(&mut added, true) {
                    let wall = self.wall(at)?;
                    at = self.second(wall.date().at(wall.hour(), 0, 0, 0))?;
                }
                at += HOUR;
                if self.wall(at)?.hour() == 0 {
                    continue 'wrap;
                }
            }
            while !minute.has(self.wall(at)?.minute()) {
                if !std::mem::replace(&mut added, true) {
                    at -= at.rem_euclid(MINUTE);
                }
                at += MINUTE;
                if self.wall(at)?.minute() == 0 {
                    continue 'wrap;
                }
            }
            // The second is always zero.
            if self.wall(at)?.second() != 0 {
                added = true;
                at += MINUTE - i64::from(self.wall(at)?.second());
                if self.wall(at)?.second() == 0 {
                    continue 'wrap;
                }
            }
            return Timestamp::from_second(at).ok();
        }
    }
}

fn midnight() -> jiff::civil::Time {
    jiff::civil::Time::midnight()
}

#[cfg(test)]
mod tests;
