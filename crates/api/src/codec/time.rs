//! Times as Go parses them, with Go's complaints.

use super::DecodeError;
use jiff::Timestamp;
use jiff::civil::{Date, DateTime};
use jiff::tz::Offset;

const SECONDS: &str = "2006-01-02T15:04:05Z07:00";
const MICROS: &str = "2006-01-02T15:04:05.000000Z07:00";
const FRACTION: &str = ".000000";

/// Any RFC 3339 time.
pub(super) fn parse_time(text: &str) -> Result<Timestamp, DecodeError> {
    parse(text, false)
}

/// Tells in Go's words why a text is no RFC 3339 time.
pub fn check_time(text: &str) -> Result<(), DecodeError> {
    parse_time(text).map(|_| ())
}

/// An RFC 3339 time with exactly six digits behind the point, as upstream insists.
pub(super) fn parse_micro_time(text: &str) -> Result<Timestamp, DecodeError> {
    parse(text, true)
}

fn parse(text: &str, micros: bool) -> Result<Timestamp, DecodeError> {
    Reader { text, rest: text }.read(micros).map_err(|problem| {
        let layout = if micros { MICROS } else { SECONDS };
        DecodeError::Text(match problem {
            Problem::Element { rest, element } => {
                format!("parsing time {text:?} as {layout:?}: cannot parse {rest:?} as {element:?}")
            }
            Problem::Range(what) => format!("parsing time {text:?}: {what} out of range"),
            Problem::Extra(rest) => format!("parsing time {text:?}: extra text: {rest:?}"),
        })
    })
}

enum Problem<'a> {
    Element { rest: &'a str, element: &'static str },
    Range(&'static str),
    Extra(&'a str),
}

struct Reader<'a> {
    text: &'a str,
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn read(mut self, micros: bool) -> Result<Timestamp, Problem<'a>> {
        let year = self.number("2006", 4, 0..=9999, "year")?;
        self.literal("-")?;
        let month = self.number("01", 2, 1..=12, "month")?;
        self.literal("-")?;
        let day = self.number("02", 2, 0..=99, "day")?;
        self.literal("T")?;
        let hour = match self.rest.as_bytes() {
            // Go takes an hour of one digit, for want of a layout without the zero.
            [first, second, ..] if first.is_ascii_digit() && !second.is_ascii_digit() => {
                self.number("15", 1, 0..=23, "hour")?
            }
            _ => self.number("15", 2, 0..=23, "hour")?,
        };
        self.literal(":")?;
        let minute = self.number("04", 2, 0..=59, "minute")?;
        self.literal(":")?;
        let second = self.number("05", 2, 0..=59, "second")?;
        let nanos = if micros { self.micros()? } else { self.fraction() };
        let offset = self.zone()?;
        if !self.rest.is_empty() {
            return Err(Problem::Extra(self.rest));
        }
        // Each part is within the bounds checked above, so the conversions keep it.
        let small = |number: i32| i8::try_from(number).unwrap_or_default();
        let date = Date::new(i16::try_from(year).unwrap_or_default(), small(month), small(day))
            .map_err(|_| Problem::Range("day"))?;
        let civil: DateTime = date.at(small(hour), small(minute), small(second), nanos);
        offset.to_timestamp(civil).map_err(|_| Problem::Element { rest: self.text, element: "2006" })
    }

    fn number(
        &mut self,
        element: &'static str,
        digits: usize,
        range: std::ops::RangeInclusive<i32>,
        what: &'static str,
    ) -> Result<i32, Problem<'a>> {
        let bad = Problem::Element { rest: self.rest, element };
        let number = match self.rest.get(..digits) {
            Some(text) if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().ok(),
            _ => None,
        };
        let Some(number) = number else { return Err(bad) };
        if !range.contains(&number) {
            return Err(Problem::Range(what));
        }
        self.rest = &self.rest[digits..];
        Ok(number)
    }

    fn literal(&mut self, literal: &'static str) -> Result<(), Problem<'a>> {
        match self.rest.strip_prefix(literal) {
            Some(rest) => self.rest = rest,
            None => return Err(Problem::Element { rest: self.rest, element: literal }),
        }
        Ok(())
    }

    /// Whatever fraction there is; digits beyond nanoseconds do not count.
    fn fraction(&mut self) -> i32 {
        let Some(digits) = self.rest.strip_prefix(['.', ',']) else { return 0 };
        let length = digits.bytes().take_while(u8::is_ascii_digit).count();
        if length == 0 {
            return 0;
        }
        self.rest = &digits[length..];
        format!("{:0<9.9}", &digits[..length]).parse().unwrap_or(0)
    }

    fn micros(&mut self) -> Result<i32, Problem<'a>> {
        let bad = Problem::Element { rest: self.rest, element: FRACTION };
        let digits = self.rest.strip_prefix(['.', ',']).and_then(|rest| rest.get(..6));
        let micros = digits.filter(|d| d.bytes().all(|b| b.is_ascii_digit())).and_then(|d| d.parse().ok());
        let Some(micros): Option<i32> = micros else { return Err(bad) };
        self.rest = &self.rest[7..];
        Ok(micros * 1000)
    }

    fn zone(&mut self) -> Result<Offset, Problem<'a>> {
        const ELEMENT: &str = "Z07:00";
        if let Some(rest) = self.rest.strip_prefix('Z') {
            self.rest = rest;
            return Ok(Offset::UTC);
        }
        let bad = || Problem::Element { rest: self.rest, element: ELEMENT };
        let zone = self.rest.get(..6).ok_or_else(bad)?;
        let sign = match zone.as_bytes()[0] {
            b'+' => 1,
            b'-' => -1,
            _ => return Err(bad()),
        };
        let number = |text: Option<&str>| {
            text.filter(|t| t.bytes().all(|b| b.is_ascii_digit())).and_then(|t| t.parse::<i32>().ok())
        };
        let (hours, minutes) = (number(zone.get(1..3)), number(zone.get(4..6)));
        let (Some(hours), Some(minutes), Some(":")) = (hours, minutes, zone.get(3..4)) else {
            return Err(bad());
        };
        if hours > 24 {
            return Err(Problem::Range("time zone offset hour"));
        }
        if minutes > 60 {
            return Err(Problem::Range("time zone offset minute"));
        }
        self.rest = &self.rest[6..];
        Offset::from_seconds(sign * (hours * 3600 + minutes * 60))
            .map_err(|_| Problem::Range("time zone offset hour"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_taken_as_go_takes_them() {
        for (text, seconds) in [
            ("1970-01-01T00:00:01Z", 1),
            ("1970-01-01T01:00:00+01:00", 0),
            ("1970-01-01T00:00:00.999Z", 0),
            ("1970-01-01T0:00:00Z", 0),
        ] {
            let at = parse_time(text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(at.as_second(), seconds, "{text}");
        }
        let micro = parse_micro_time("1970-01-01T00:00:00.000007Z").expect("six digits");
        assert_eq!(micro.as_microsecond(), 7);
    }

    #[test]
    fn complaints_are_gos() {
        for (text, micros, why) in [
            ("", false, r#"parsing time "" as "2006-01-02T15:04:05Z07:00": cannot parse "" as "2006""#),
            ("x", false, r#"parsing time "x" as "2006-01-02T15:04:05Z07:00": cannot parse "x" as "2006""#),
            (
                "2020-01-01",
                false,
                r#"parsing time "2020-01-01" as "2006-01-02T15:04:05Z07:00": cannot parse "" as "T""#,
            ),
            ("2020-13-01T00:00:00Z", false, r#"parsing time "2020-13-01T00:00:00Z": month out of range"#),
            ("2020-02-30T00:00:00Z", false, r#"parsing time "2020-02-30T00:00:00Z": day out of range"#),
            ("2020-01-01T00:00:00Zé", false, r#"parsing time "2020-01-01T00:00:00Zé": extra text: "é""#),
            (
                "2020-01-01T00:00:00.5Z",
                true,
                r#"parsing time "2020-01-01T00:00:00.5Z" as "2006-01-02T15:04:05.000000Z07:00": cannot parse ".5Z" as ".000000""#,
            ),
            (
                "2020-01-01T00:00:00é000000",
                false,
                "parsing time \"2020-01-01T00:00:00é000000\" as \"2006-01-02T15:04:05Z07:00\": cannot parse \"é000000\" as \"Z07:00\"",
            ),
        ] {
            assert_eq!(parse(text, micros).expect_err(text).to_string(), why);
        }
    }
}
