//! Quantities: amounts of resources such as `100m` and `1.5Gi`.
//!
//! Upstream rounds every amount that it reads up to a whole number of nano units and caps it at 2^63-1, so that an
//! `i128` of nanos holds each exactly.

use std::any::Any;
use std::cmp::Ordering;
use std::fmt;

use super::{Entry, NO_MATCH};
use crate::error::EvalError;
use crate::value::{Opaque, Value};

const NANOS: i128 = 1_000_000_000;
/// The largest amount: 2^63-1 units.
const MAX: i128 = (i64::MAX as i128) * NANOS;

/// The notation of an amount, which decides how it is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    DecimalSi,
    BinarySi,
    DecimalExponent,
}

/// An amount of something. Equality and order are by amount, whatever the format.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    nanos: i128,
    format: Format,
    /// The power of ten that upstream's small form counts in; `None` where it uses its form for any size.
    scale: Option<i32>,
}

pub(super) const TABLE: &[Entry] = &[
    ("quantity", |_, args| match args {
        [Value::String(text)] => Quantity::parse(text).map(Value::opaque),
        _ => Err(NO_MATCH),
    }),
    ("isQuantity", |_, args| match args {
        [Value::String(text)] => Ok(Value::Bool(Quantity::parse(text).is_ok())),
        _ => Err(NO_MATCH),
    }),
    ("sign", |_, args| with(args, |quantity| Ok(Value::Int(quantity.nanos.signum() as i64)))),
    ("isInteger", |_, args| with(args, |quantity| Ok(Value::Bool(quantity.integer().is_some())))),
    ("asInteger", |_, args| {
        let error = EvalError::text("cannot convert value to integer");
        with(args, |quantity| quantity.integer().map(Value::Int).ok_or(error))
    }),
    ("asApproximateFloat", |_, args| with(args, |quantity| Ok(Value::Double(quantity.nanos as f64 / 1e9)))),
    ("add", |_, args| combine(args, |a, b| a + b)),
    ("sub", |_, args| combine(args, |a, b| a - b)),
];

fn with<'a>(
    args: &[Value<'a>],
    by: impl FnOnce(&Quantity) -> Result<Value<'a>, EvalError>,
) -> Result<Value<'a>, EvalError> {
    let [value] = args else { return Err(NO_MATCH) };
    by(value.downcast::<Quantity>().ok_or(NO_MATCH)?)
}

/// Adds or subtracts a quantity or a whole number. The sum has the format of the first, or of the other if the first is zero.
fn combine<'a>(args: &[Value<'a>], by: fn(i128, i128) -> i128) -> Result<Value<'a>, EvalError> {
    let [first, second] = args else { return Err(NO_MATCH) };
    let first = first.downcast::<Quantity>().ok_or(NO_MATCH)?;
    let second = match second {
        Value::Int(units) => {
            Quantity { nanos: i128::from(*units) * NANOS, format: Format::DecimalSi, scale: Some(0) }
        }
        other => *other.downcast::<Quantity>().ok_or(NO_MATCH)?,
    };
    let format = if first.nanos == 0 { second.format } else { first.format };
    let nanos = by(first.nanos, second.nanos);
    let scale = match (first.nanos, second.nanos) {
        (_, 0) => first.scale,
        (0, _) => second.scale,
        _ => first.scale.zip(second.scale).map(|(first, second)| first.min(second)),
    };
    Ok(Value::opaque(Quantity { nanos, format, scale }))
}

impl Quantity {
    /// Reads a quantity. Fractions below a nano round away from zero; amounts beyond 2^63-1 are capped.
    pub fn parse(text: &str) -> Result<Self, EvalError> {
        const FORMAT: EvalError = EvalError::text(
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
        );
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            Some(_) => (false, text),
            None => return Err(FORMAT),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (whole, below) = rest.split_at(end);
        let (fraction, suffix) = match below.strip_prefix('.') {
            None => (None, below),
            Some(below) => {
                let end = below.find(|c: char| !c.is_ascii_digit()).unwrap_or(below.len());
                (Some(&below[..end]), &below[end..])
            }
        };
        if !suffix_is_plausible(suffix) {
            return Err(FORMAT);
        }
        let (scale, format) =
            Scale::parse(suffix).ok_or(EvalError::text("unable to parse quantity's suffix"))?;
        // A number without digits is zero, as it is upstream.
        let fraction = fraction.unwrap_or_default();
        let magnitude = match scale {
            Scale::Ten(exponent) => decimal_nanos(whole, fraction, exponent),
            Scale::Two(shift) => binary_nanos(whole, fraction, shift),
        };
        let digits = whole.trim_start_matches('0').len().max(1);
        let scale = match scale {
            Scale::Ten(exponent) => {
                let scale = i64::from(exponent) - fraction.len() as i64;
                (digits + fraction.len() <= 18 && scale >= -9).then_some(scale as i32)
            }
            Scale::Two(shift) => (fraction.is_empty() && digits as u32 + shift * 3 / 10 < 15).then_some(0),
        };
        Ok(Self { nanos: if negative { -magnitude } else { magnitude }, format, scale })
    }

    /// The amount in whole units. As upstream: only of one that was written without a fraction, and small.
    fn integer(&self) -> Option<i64> {
        self.scale.filter(|scale| *scale >= 0)?;
        i64::try_from(self.nanos / NANOS).ok()
    }

    fn is_integer(&self) -> bool {
        self.nanos % NANOS == 0
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl Opaque for Quantity {
    fn type_name(&self) -> &'static str {
        "kubernetes.Quantity"
    }

    fn equals(&self, other: &dyn Opaque) -> bool {
        other.as_any().downcast_ref::<Self>() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// The canonical form: no fraction, the largest suffix that needs none.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        // Small or fractional binary amounts would lose precision; upstream prints them as decimals.
        let binary = self.format == Format::BinarySi
            && self.is_integer()
            && self.nanos.unsigned_abs() >= 1024 * NANOS.unsigned_abs();
        if binary {
            let mut units = self.nanos / NANOS;
            let mut power = 0;
            while units % 1024 == 0 && power < BINARY.len() {
                units /= 1024;
                power += 1;
            }
            let suffix = if power == 0 { "" } else { BINARY[power - 1] };
            return write!(f, "{units}{suffix}");
        }
        let mut mantissa = self.nanos;
        let mut exponent = -9;
        while mantissa % 1000 == 0 && exponent < 18 {
            mantissa /= 1000;
            exponent += 3;
        }
        if self.format == Format::DecimalExponent {
            return if exponent == 0 { write!(f, "{mantissa}") } else { write!(f, "{mantissa}e{exponent}") };
        }
        let suffix = DECIMAL.iter().find(|(_, e)| *e == exponent).map_or("", |(s, _)| s);
        write!(f, "{mantissa}{suffix}")
    }
}

const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];

enum Scale {
    Ten(i32),
    Two(u32),
}

impl Scale {
    fn parse(suffix: &str) -> Option<(Self, Format)> {
        if let Some((_, exponent)) = DECIMAL.iter().find(|(s, _)| *s == suffix) {
            return Some((Self::Ten(*exponent), Format::DecimalSi));
        }
        if let Some(power) = BINARY.iter().position(|s| *s == suffix) {
            return Some((Self::Two(10 * (power as u32 + 1)), Format::BinarySi));
        }
        let exponent = suffix.strip_prefix(['e', 'E'])?;
        // Exponents beyond these give zero-or-one-nano and the cap respectively, whatever the digits.
        exponent.parse::<i64>().ok().map(|e| {
            let bounded = e.clamp(-1_000_000, 1_000_000) as i32;
            (Self::Ten(bounded), Format::DecimalExponent)
        })
    }
}

/// `[eEinumkKMGTP]*[-+]?[0-9]*`
fn suffix_is_plausible(suffix: &str) -> bool {
    let rest = suffix.trim_start_matches(|c: char| "eEinumkKMGTP".contains(c));
    let rest = rest.strip_prefix(['+', '-']).unwrap_or(rest);
    rest.bytes().all(|b| b.is_ascii_digit())
}

/// The digits of `whole.fraction` × 10^`exponent`, in nanos, rounded up and capped.
fn decimal_nanos(whole: &str, fraction: &str, exponent: i32) -> i128 {
    let digits = || whole.bytes().chain(fraction.bytes());
    // The place of a digit: the power of ten it counts, in nanos.
    let first_place = whole.len() as i64 - 1 + i64::from(exponent) + 9;
    let mut nanos: i128 = 0;
    let mut place = first_place;
    let mut inexact = false;
    for digit in digits() {
        let digit = i128::from(digit - b'0');
        if digit != 0 {
            if place < 0 {
                inexact = true;
            } else if place > 27 {
                return MAX;
            } else {
                nanos += digit * 10_i128.pow(place as u32);
            }
        }
        place -= 1;
    }
    (nanos + i128::from(inexact)).min(MAX)
}

/// `whole.fraction` × 2^`shift`, in nanos, rounded up and capped.
fn binary_nanos(whole: &str, fraction: &str, shift: u32) -> i128 {
    let whole = whole.trim_start_matches('0');
    if whole.len() > 19 {
        return MAX;
    }
    let units = whole.bytes().fold(0_i128, |n, d| n * 10 + i128::from(d - b'0'));
    if units << shift > MAX / NANOS {
        return MAX;
    }
    let fraction = fraction.trim_end_matches('0');
    let (kept, rest) = fraction.split_at(fraction.len().min(18));
    let denominator = 10_i128.pow(kept.len() as u32);
    let numerator = kept.bytes().fold(0_i128, |n, d| n * 10 + i128::from(d - b'0')) << shift;
    let (quotient, remainder) = (numerator / denominator, numerator % denominator);
    let below = remainder * NANOS;
    let inexact = below % denominator != 0 || !rest.is_empty();
    let nanos = (units << shift) * NANOS + quotient * NANOS + below / denominator;
    (nanos + i128::from(inexact)).min(MAX)
}
