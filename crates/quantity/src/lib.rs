//! Amounts of resources: `100m`, `1.5Gi`, `2e3`.
//!
//! Upstream keeps an arbitrary-precision decimal, but rounds every parsed amount up to a whole number of
//! nano units and caps it at 2^63-1, so an `i128` of nanos holds every amount exactly.
//!
//! The API and CEL expressions have the same quantities; this crate is below both.

use std::cmp::Ordering;
use std::fmt;
use std::ops::{Add, Mul, Sub};
use thiserror::Error;

const NANOS: i128 = 1_000_000_000;
/// The largest amount: 2^63-1 units.
const MAX: i128 = (i64::MAX as i128) * NANOS;

/// The notation of an amount, which decides how it is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `12M`, `100m`
    DecimalSi,
    /// `12Mi`
    BinarySi,
    /// `12e6`
    DecimalExponent,
}

/// Why a text is not a quantity. The messages are those clients see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum QuantityError {
    #[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
    Format,
    #[error("unable to parse quantity's suffix")]
    Suffix,
}

/// An amount of something. Equality and order are by amount, whatever the format.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    nanos: i128,
    format: Format,
}

impl Quantity {
    pub const ZERO: Self = Self { nanos: 0, format: Format::DecimalSi };

    /// Reads a quantity. Fractions below a nano round away from zero; amounts beyond 2^63-1 are capped.
    pub fn parse(text: &str) -> Result<Self, QuantityError> {
        Self::parse_scaled(text).map(|(quantity, _)| quantity)
    }

    /// As [`Quantity::parse`], with the power of ten in which upstream's small form counts the amount. `None` where
    /// upstream uses its form for any size.
    pub fn parse_scaled(text: &str) -> Result<(Self, Option<i32>), QuantityError> {
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            Some(_) => (false, text),
            None => return Err(QuantityError::Format),
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
            return Err(QuantityError::Format);
        }
        let (scale, format) = Scale::parse(suffix).ok_or(QuantityError::Suffix)?;
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
        Ok((Self { nanos: if negative { -magnitude } else { magnitude }, format }, scale))
    }

    pub fn from_value(units: i64, format: Format) -> Self {
        Self { nanos: i128::from(units) * NANOS, format }
    }

    pub fn from_milli(milli: i64, format: Format) -> Self {
        Self { nanos: i128::from(milli) * (NANOS / 1000), format }
    }

    pub fn format(&self) -> Format {
        self.format
    }

    pub fn is_zero(&self) -> bool {
        self.nanos == 0
    }

    pub fn is_negative(&self) -> bool {
        self.nanos < 0
    }

    /// Returns true if the amount is a whole number of units.
    pub fn is_integer(&self) -> bool {
        self.nanos % NANOS == 0
    }

    /// Whole units, rounded away from zero.
    pub fn value(&self) -> i64 {
        saturate(divide_away(self.nanos, NANOS))
    }

    /// Thousandths of a unit, rounded away from zero, at most the largest `i64`.
    pub fn milli_value(&self) -> i64 {
        saturate(divide_away(self.nanos, NANOS / 1000))
    }

    /// Units, as exactly as a floating-point number can be.
    pub fn approximate(&self) -> f64 {
        self.nanos as f64 / NANOS as f64
    }

    /// Whole units, without the fraction. `None` beyond the range.
    pub fn truncated(&self) -> Option<i64> {
        i64::try_from(self.nanos / NANOS).ok()
    }

    /// -1, 0 or 1.
    pub fn signum(&self) -> i64 {
        self.nanos.signum() as i64
    }

    /// The sum, which may be beyond the largest amount that can be read. It has the format of the addition.
    pub fn add_unbounded(self, other: Self) -> Self {
        let format = if self.is_zero() { other.format } else { self.format };
        Self { nanos: self.nanos + other.nanos, format }
    }

    /// The difference, as [`Quantity::add_unbounded`].
    pub fn sub_unbounded(self, other: Self) -> Self {
        self.add_unbounded(Self { nanos: -other.nanos, format: other.format })
    }

    /// Rounded up to a multiple of a thousandth, the precision in which resources are stored.
    pub fn rounded_to_milli(self) -> Self {
        let step = NANOS / 1000;
        Self { nanos: divide_away(self.nanos, step) * step, ..self }
    }
}

/// The sum, in the first quantity's format (or the other's, if the first is zero). Saturates.
impl Add for Quantity {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let sum = self.add_unbounded(other);
        Self { nanos: sum.nanos.clamp(-MAX, MAX), ..sum }
    }
}

/// The difference, in the first quantity's format (or the other's, if the first is zero). Saturates.
impl Sub for Quantity {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self + Self { nanos: -other.nanos, format: other.format }
    }
}

/// The amount taken a number of times. Saturates.
impl Mul<i64> for Quantity {
    type Output = Self;

    fn mul(self, factor: i64) -> Self {
        let nanos = self.nanos.saturating_mul(i128::from(factor)).clamp(-MAX, MAX);
        Self { nanos, ..self }
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

impl std::str::FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
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

fn divide_away(n: i128, by: i128) -> i128 {
    n / by + if n % by == 0 { 0 } else { n.signum() }
}

fn saturate(n: i128) -> i64 {
    n.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
}

/// Returns true if a text is plainly a canonical quantity of no less than a thousandth: whole, short, and
/// without a thousand that a larger suffix would stand for. Returns false where it would have to calculate.
pub fn is_plainly_canonical(text: &str) -> bool {
    let length = text.bytes().take_while(u8::is_ascii_digit).count();
    if length == 0 || length > 6 {
        return false;
    }
    let (digits, suffix) = text.split_at(length);
    let number = digits.bytes().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
    match suffix {
        _ if digits.starts_with('0') => text == "0",
        "" | "m" | "k" | "M" | "G" | "T" => number % 1000 != 0,
        "Ki" | "Mi" | "Gi" | "Ti" => number % 1024 != 0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_plainly_canonical_is() {
        let suffixes = ["", "n", "u", "m", "k", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti", "e3", ".5"];
        let numbers = [
            "", "0", "00", "1", "10", "64", "100", "999", "1000", "1024", "1500", "2048", "999999", "1234567",
        ];
        let mut plain = 0;
        for text in numbers.iter().flat_map(|n| suffixes.map(|s| format!("{n}{s}"))) {
            if is_plainly_canonical(&text) {
                plain += 1;
                let quantity = Quantity::parse(&text).unwrap();
                assert_eq!(quantity.to_string(), text);
                assert_eq!(quantity.rounded_to_milli().to_string(), text);
            }
        }
        assert!(plain > 60, "{plain}");
    }

    #[test]
    fn canonical_form() {
        for (input, output) in [
            ("0", "0"),
            ("0Mi", "0"),
            ("1", "1"),
            ("+1", "1"),
            ("-1", "-1"),
            ("0.5", "500m"),
            (".5", "500m"),
            ("1.", "1"),
            ("1000m", "1"),
            ("1500m", "1500m"),
            ("1.0001", "1000100u"),
            ("0.0000000001", "1n"),
            ("-0.0000000001", "-1n"),
            ("1024", "1024"),
            ("1000", "1k"),
            ("12000", "12k"),
            ("123000000", "123M"),
            ("1Ki", "1Ki"),
            ("1024Ki", "1Mi"),
            ("1536Mi", "1536Mi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Ki", "512"),
            ("1023.5Ki", "1048064"),
            ("0.1Ki", "102400m"),
            ("1e3", "1e3"),
            ("1E3", "1e3"),
            ("100e1", "1e3"),
            ("1e2", "100"),
            ("1e-3", "1e-3"),
            ("2E", "2E"),
            ("1n", "1n"),
            ("7u", "7u"),
            ("99999999999999999999", "9223372036854775807"),
            ("16Ei", "9223372036854775807"),
            ("1e1000000000", "9223372036854775807"),
            ("0.000000000000000000000000000001Ei", "1n"),
        ] {
            let text = Quantity::parse(input).unwrap().to_string();
            assert_eq!(text, output, "canonical form of {input}");
            assert_eq!(Quantity::parse(&text).unwrap(), Quantity::parse(input).unwrap(), "{input} again");
        }
    }

    #[test]
    fn a_number_without_digits_is_zero() {
        for input in ["-", "+", ".", "-.", "Mi", ".Mi", "e3"] {
            assert!(Quantity::parse(input).unwrap().is_zero(), "{input:?}");
        }
    }

    #[test]
    fn what_is_not_a_quantity() {
        for (input, error) in [
            ("", QuantityError::Format),
            ("x", QuantityError::Format),
            ("1 ", QuantityError::Format),
            ("1x", QuantityError::Format),
            ("1e3x", QuantityError::Format),
            ("1.2.3", QuantityError::Format),
            ("..", QuantityError::Format),
            ("i", QuantityError::Suffix),
            ("+-1", QuantityError::Suffix),
            ("1kk", QuantityError::Suffix),
            ("1K", QuantityError::Suffix),
            ("1mi", QuantityError::Suffix),
            ("1e", QuantityError::Suffix),
            ("1é", QuantityError::Format),
        ] {
            assert_eq!(Quantity::parse(input), Err(error), "{input:?}");
        }
    }

    #[test]
    fn whole_values_round_away_from_zero() {
        for (input, value, milli) in [
            ("1500m", 2, 1500),
            ("-1500m", -2, -1500),
            ("1n", 1, 1),
            ("1Gi", 1 << 30, (1 << 30) * 1000),
            ("9E", 9_000_000_000_000_000_000, i64::MAX),
        ] {
            let quantity = Quantity::parse(input).unwrap();
            assert_eq!((quantity.value(), quantity.milli_value()), (value, milli), "{input}");
        }
    }

    #[test]
    fn sums_keep_the_first_format_unless_it_is_zero() {
        let sum = |a: &str, b: &str| Quantity::parse(a).unwrap().add(Quantity::parse(b).unwrap()).to_string();
        assert_eq!(sum("1Gi", "1G"), "2073741824");
        assert_eq!(sum("0", "1Gi"), "1Gi");
        assert_eq!(sum("100m", "900m"), "1");
        assert_eq!(sum("9E", "9E"), "9223372036854775807");
        assert_eq!(Quantity::parse("1").unwrap().sub(Quantity::parse("1500m").unwrap()).to_string(), "-500m");
        assert_eq!(Quantity::parse("250m").unwrap().mul(4).to_string(), "1");
    }

    proptest! {
        #[test]
        fn printing_and_parsing_agree(nanos in -MAX..=MAX, format in 0..3) {
            let format = [Format::DecimalSi, Format::BinarySi, Format::DecimalExponent][format as usize];
            let quantity = Quantity { nanos, format };
            prop_assert_eq!(Quantity::parse(&quantity.to_string()).unwrap(), quantity);
        }

        #[test]
        fn arithmetic_is_that_of_integers(a in any::<i32>(), b in any::<i32>()) {
            let quantity = |n: i32| Quantity::parse(&format!("{n}m")).unwrap();
            let (x, y) = (i64::from(a), i64::from(b));
            prop_assert_eq!(quantity(a).add(quantity(b)).milli_value(), x + y);
            prop_assert_eq!(quantity(a).sub(quantity(b)).milli_value(), x - y);
            prop_assert_eq!(quantity(a).cmp(&quantity(b)), a.cmp(&b));
            prop_assert_eq!(quantity(a).mul(7).milli_value(), x * 7);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "\\PC*") {
            let _ = Quantity::parse(&text);
        }

        #[test]
        fn binary_fractions_match_wide_arithmetic(whole in 0u32..4096, digits in "[0-9]{0,9}", power in 0usize..4) {
            let shift = 10 * (power as u32 + 1);
            let text = format!("{whole}.{digits}{}", BINARY[power]);
            let denominator = 10_i128.pow(digits.len() as u32);
            let numerator = (i128::from(whole) * denominator + digits.parse::<i128>().unwrap_or(0)) << shift;
            let expected = divide_away(numerator * NANOS, denominator).min(MAX);
            prop_assert_eq!(Quantity::parse(&text).unwrap().nanos, expected);
        }
    }
}
