//! Formats of strings that schemas can demand.

use crate::meta_validation::{dns1123_label, dns1123_subdomain};
use base64::Engine;
use std::net::{IpAddr, Ipv4Addr};

type Check = fn(&str) -> bool;

/// Formats by their names without dashes; others are ignored, as upstream.
const FORMATS: &[(&str, Check)] = &[
    ("bsonobjectid", |text| text.len() == 24 && is_hex(text)),
    ("uri", is_uri),
    ("email", is_email),
    ("hostname", is_hostname),
    ("ipv4", |text| text.parse::<Ipv4Addr>().is_ok()),
    ("ipv6", |text| matches!(text.parse::<IpAddr>(), Ok(IpAddr::V6(_)))),
    ("cidr", |text| crate::Cidr::parse(text).is_some()),
    ("mac", is_mac),
    ("uuid", |text| is_uuid(text, None)),
    ("uuid3", |text| is_uuid(text, Some('3'))),
    ("uuid4", |text| is_uuid(text, Some('4'))),
    ("uuid5", |text| is_uuid(text, Some('5'))),
    ("isbn", |text| is_isbn10(text) || is_isbn13(text)),
    ("isbn10", is_isbn10),
    ("isbn13", is_isbn13),
    ("creditcard", is_credit_card),
    ("ssn", is_ssn),
    ("hexcolor", |text| {
        let digits = text.strip_prefix('#').unwrap_or(text);
        matches!(digits.len(), 3 | 6) && is_hex(digits)
    }),
    ("rgbcolor", is_rgb),
    ("byte", |text| base64::engine::general_purpose::STANDARD.decode(text).is_ok()),
    ("password", |_| true),
    ("date", |text| text.len() == 10 && text.parse::<jiff::civil::Date>().is_ok()),
    ("duration", is_duration),
    ("datetime", is_date_time),
    ("k8sshortname", |text| dns1123_label(text).is_empty()),
    ("k8slongname", |text| dns1123_subdomain(text).is_empty()),
];

/// Returns true if a text has a format; none for a format that upstream does not know.
pub(super) fn is_valid(format: &str, text: &str) -> Option<bool> {
    if format.is_empty() {
        return None;
    }
    let name = format.replace('-', "");
    FORMATS.iter().find(|(known, _)| *known == name).map(|(_, check)| check(text))
}

/// Is the format one that upstream knows for a type of this name?
pub(super) fn is_known(type_: &str, format: &str) -> bool {
    match type_ {
        "" | "string" => FORMATS.iter().any(|(known, _)| *known == format.replace('-', "")),
        "integer" => matches!(format, "int32" | "int64"),
        "number" => matches!(format, "float" | "double"),
        _ => false,
    }
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_hexdigit())
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// An absolute URI or an absolute path.
fn is_uri(text: &str) -> bool {
    let clean = !text.is_empty() && !text.bytes().any(|b| b <= b' ' || b == 0x7f);
    let scheme = text.split_once(':').is_some_and(|(scheme, rest)| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
            && !rest.is_empty()
    });
    clean && (text.starts_with('/') || scheme)
}

fn is_email(text: &str) -> bool {
    // A name may stand before the address, as in a header.
    let address = match text.rfind('<') {
        Some(at) => text[at + 1..].strip_suffix('>').unwrap_or_default(),
        None => text,
    };
    address.rsplit_once('@').is_some_and(|(local, domain)| {
        let part = |part: &str| {
            !part.is_empty() && !part.bytes().any(|b| b <= b' ' || b"<>()[],;:\\\"".contains(&b))
        };
        part(local)
            && part(domain)
            && !local.contains('@')
            && !local.starts_with('.')
            && !local.ends_with('.')
    })
}

/// As upstream: a name of one label may have a hyphen only behind its first character, and the last label of several has
/// two letters at least.
fn is_hostname(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || !c.is_ascii();
    let label = |label: &str| {
        label.chars().count() <= 63
            && label.starts_with(word)
            && label.ends_with(word)
            && label.chars().all(|c| word(c) || c == '-')
    };
    let sized = text.len() <= 255 && text.split('.').all(|label| label.len() <= 63);
    sized
        && match text.rsplit_once('.') {
            Some((labels, last)) => {
                labels.split('.').all(label)
                    && last.chars().count() >= 2
                    && last.chars().all(char::is_alphabetic)
            }
            None => {
                let mut chars = text.chars();
                let first = chars.next().is_some_and(word);
                let rest = chars.as_str();
                first && rest.strip_prefix('-').unwrap_or(rest).chars().all(word)
            }
        }
}

fn is_mac(text: &str) -> bool {
    let separated = |separator: char, width: usize, counts: &[usize]| {
        let parts: Vec<&str> = text.split(separator).collect();
        counts.contains(&parts.len()) && parts.iter().all(|p| p.len() == width && is_hex(p))
    };
    separated(':', 2, &[6, 8, 20]) || separated('-', 2, &[6, 8, 20]) || separated('.', 4, &[3, 4, 10])
}

fn is_uuid(text: &str, version: Option<char>) -> bool {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    // Dashes are optional, but stand only in their places.
    let places: Vec<usize> = text.match_indices('-').map(|(at, _)| at).collect();
    let mut expected = [8, 12, 16, 20].into_iter();
    let placed = places.iter().enumerate().all(|(number, at)| {
        let before = at - number;
        expected.any(|place| place == before)
    });
    let form = match version {
        None => true,
        Some(version) => {
            let variant = digits.chars().nth(16).is_some_and(|c| "89abAB".contains(c));
            digits.chars().nth(12) == Some(version) && (version == '3' || variant)
        }
    };
    digits.len() == 32 && is_hex(&digits) && placed && form
}

fn is_isbn10(text: &str) -> bool {
    let digits: Vec<char> = text.chars().filter(|c| !matches!(c, '-' | ' ')).collect();
    let value = |(at, c): (usize, &char)| match c {
        'X' if at == 9 => Some(10),
        c => c.to_digit(10),
    };
    let values: Option<Vec<u32>> = digits.iter().enumerate().map(value).collect();
    values.is_some_and(|values| {
        values.len() == 10
            && values.iter().zip(1..).map(|(value, weight)| value * weight).sum::<u32>() % 11 == 0
    })
}

fn is_isbn13(text: &str) -> bool {
    let digits: Option<Vec<u32>> =
        text.chars().filter(|c| !matches!(c, '-' | ' ')).map(|c| c.to_digit(10)).collect();
    digits.is_some_and(|digits| {
        digits.len() == 13
            && digits.iter().enumerate().map(|(at, d)| d * if at % 2 == 0 { 1 } else { 3 }).sum::<u32>() % 10
                == 0
    })
}

fn is_credit_card(text: &str) -> bool {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(10)).collect();
    let sum: u32 = digits
        .iter()
        .rev()
        .enumerate()
        .map(|(at, digit)| match (at % 2, digit * 2) {
            (0, _) => *digit,
            (_, double) if double > 9 => double - 9,
            (_, double) => double,
        })
        .sum();
    (13..=16).contains(&digits.len()) && sum.is_multiple_of(10)
}

fn is_ssn(text: &str) -> bool {
    let digits: String = text.chars().filter(|c| !matches!(c, '-' | ' ')).collect();
    let parts: Vec<&str> = text.split(['-', ' ']).collect();
    let shape = match parts.as_slice() {
        [all] => all.len() == 9,
        [a, b] => (a.len(), b.len()) == (3, 6) || (a.len(), b.len()) == (5, 4),
        [a, b, c] => (a.len(), b.len(), c.len()) == (3, 2, 4),
        _ => false,
    };
    shape && is_digits(&digits)
}

fn is_rgb(text: &str) -> bool {
    let inner = text.strip_prefix("rgb(").and_then(|rest| rest.strip_suffix(')'));
    inner.is_some_and(|inner| {
        let parts: Vec<&str> = inner.split(',').map(str::trim).collect();
        parts.len() == 3 && parts.iter().all(|part| is_digits(part) && part.parse::<u8>().is_ok())
    })
}

/// Go's duration (`1h2m`), or a number with a unit behind a space (`22 ns`).
fn is_duration(text: &str) -> bool {
    const UNITS: &[&str] = &[
        "ns",
        "nano",
        "nanos",
        "nanosecond",
        "nanoseconds",
        "us",
        "µs",
        "μs",
        "micro",
        "micros",
        "microsecond",
        "microseconds",
        "ms",
        "milli",
        "millis",
        "millisecond",
        "milliseconds",
        "s",
        "sec",
        "secs",
        "second",
        "seconds",
        "m",
        "min",
        "mins",
        "minute",
        "minutes",
        "h",
        "hr",
        "hrs",
        "hour",
        "hours",
        "d",
        "day",
        "days",
        "w",
        "wk",
        "wks",
        "week",
        "weeks",
    ];
    let mut rest = text.trim_start_matches(['+', '-']).trim();
    if rest == "0" {
        return true;
    }
    let mut parts = 0;
    while !rest.is_empty() {
        let number = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
        let (digits, after) = rest.split_at(number);
        let after = after.trim_start();
        let unit = after.len() - after.trim_start_matches(char::is_alphabetic).len();
        let (unit, after) = after.split_at(unit);
        if digits.parse::<f64>().is_err() || !UNITS.contains(&unit) {
            return false;
        }
        parts += 1;
        rest = after;
    }
    parts > 0
}

fn is_date_time(text: &str) -> bool {
    text.len() >= 20
        && matches!(text.as_bytes().get(10), Some(b'T' | b't'))
        && text.parse::<jiff::Timestamp>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats() {
        for (format, good, bad) in [
            ("date-time", "2014-12-15T19:30:20Z", "2014-12-15"),
            ("date", "2014-12-15", "2014-13-15"),
            ("ipv4", "10.0.0.1", "10.0.0.256"),
            ("ipv6", "::1", "10.0.0.1"),
            ("cidr", "10.0.0.0/8", "10.0.0.0"),
            ("uuid", "7a0c5a0e-1d6f-4d2b-9a52-8c4d9a8f2b10", "7a0c"),
            ("uuid4", "7a0c5a0e-1d6f-4d2b-9a52-8c4d9a8f2b10", "7a0c5a0e-1d6f-1d2b-9a52-8c4d9a8f2b10"),
            ("email", "a@b.example", "a"),
            ("uri", "https://a.example/b", "a b"),
            ("hostname", "a.example", "-a"),
            ("hostname", "a-b", "a-b-c"),
            ("hostname", "a-b-c.example", "a.e"),
            ("hostname", "1.example", "a.1x"),
            ("hostname", "a.b.example", "a..example"),
            ("hostname", "\u{fc}ber.example", "a.example."),
            ("byte", "YQ==", "?"),
            ("duration", "1h30m", "1x"),
            ("mac", "00:00:5e:00:53:01", "00:00"),
            ("isbn10", "0321751043", "0321751044"),
            ("isbn13", "978-0321751041", "978-0321751042"),
            ("hexcolor", "#FFFFFF", "#FF"),
            ("rgbcolor", "rgb(1,2,255)", "rgb(1,2,256)"),
            ("ssn", "111-22-3333", "11-22-3333"),
            ("k8s-short-name", "a-b", "A"),
        ] {
            assert_eq!(is_valid(format, good), Some(true), "{format} {good}");
            assert_eq!(is_valid(format, bad), Some(false), "{format} {bad}");
        }
        assert_eq!(is_valid("nothing-known", "x"), None);
        assert_eq!(is_valid("", "x"), None);
    }
}
