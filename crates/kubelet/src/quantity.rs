//! Resource quantities as numbers.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// A quantity in thousandths (the unit of CPU requests), rounded up. Nothing when it is not a quantity.
pub(crate) fn milli(q: &Quantity) -> Option<i64> {
    scaled(&q.0, 1000)
}

/// A quantity in whole units, rounded up. Nothing when it is not a quantity.
pub(crate) fn value(q: &Quantity) -> Option<i64> {
    scaled(&q.0, 1)
}

/// The amount of `resource` in a resource list, in thousandths.
pub(crate) fn milli_of(list: Option<&BTreeMap<String, Quantity>>, resource: &str) -> Option<i64> {
    list?.get(resource).and_then(milli)
}

/// The amount of `resource` in a resource list, in whole units.
pub(crate) fn value_of(list: Option<&BTreeMap<String, Quantity>>, resource: &str) -> Option<i64> {
    list?.get(resource).and_then(value)
}

fn scaled(text: &str, scale: i128) -> Option<i64> {
    let text = text.trim();
    let end = text
        .char_indices()
        .find(|(i, c)| !(c.is_ascii_digit() || *c == '.' || (*i == 0 && matches!(c, '+' | '-'))))
        .map_or(text.len(), |(i, _)| i);
    let (number, suffix) = text.split_at(end);
    let (negative, number) = match number.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, number.strip_prefix('+').unwrap_or(number)),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || fraction.len() > 18 {
        return None;
    }
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let (numerator, denominator) = suffix_factor(suffix)?;
    let numerator = digits.checked_mul(numerator)?.checked_mul(scale)?;
    let denominator = denominator.checked_mul(10i128.checked_pow(u32::try_from(fraction.len()).ok()?)?)?;
    let rounded = numerator.checked_add(denominator - 1)? / denominator;
    i64::try_from(if negative { -rounded } else { rounded }).ok()
}

fn suffix_factor(suffix: &str) -> Option<(i128, i128)> {
    let binary = |n: u32| Some((1i128 << (10 * n), 1));
    let decimal = |n: u32| Some((10i128.pow(3 * n), 1));
    match suffix {
        "" => Some((1, 1)),
        "n" => Some((1, 1_000_000_000)),
        "u" => Some((1, 1_000_000)),
        "m" => Some((1, 1000)),
        "k" => decimal(1),
        "M" => decimal(2),
        "G" => decimal(3),
        "T" => decimal(4),
        "P" => decimal(5),
        "E" => decimal(6),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        other => {
            let exponent: i32 = other.strip_prefix(['e', 'E'])?.parse().ok()?;
            let power = 10i128.checked_pow(exponent.unsigned_abs().min(30))?;
            Some(if exponent < 0 { (1, power) } else { (power, 1) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_become_numbers() {
        for (text, milli_value, whole) in [
            ("1", Some(1000), Some(1)),
            ("100m", Some(100), Some(1)),
            ("1.5", Some(1500), Some(2)),
            ("64Mi", Some(67_108_864_000), Some(67_108_864)),
            ("1e3", Some(1_000_000), Some(1000)),
            ("2k", Some(2_000_000), Some(2000)),
            ("-1", Some(-1000), Some(-1)),
            ("1Xi", None, None),
            ("", None, None),
            ("1.2.3", None, None),
        ] {
            let q = Quantity(text.to_string());
            assert_eq!((milli(&q), value(&q)), (milli_value, whole), "{text}");
        }
    }
}
