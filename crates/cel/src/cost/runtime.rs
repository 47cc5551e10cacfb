//! The cost of calls that were made.

use super::{REGEX_FACTOR, STRING_FACTOR, scale};
use crate::functions::{NamedFormat, traversal};
use crate::value::Value;

/// The rule for the cost of a call.
#[derive(Clone, Copy)]
pub(crate) enum CallCost {
    One,
    Fixed(u64),
    /// From the arguments: it can be charged before the call.
    Args(fn(&[Value<'_>]) -> u64),
    /// From the result.
    Result(fn(u64) -> u64),
}

impl CallCost {
    /// The cost, if it is known before the call.
    pub fn of_args(self, args: &[Value<'_>]) -> Option<u64> {
        match self {
            Self::One => Some(1),
            Self::Fixed(cost) => Some(cost),
            Self::Args(cost) => Some(cost(args)),
            Self::Result(_) => None,
        }
    }

    /// The cost after the call; a result that is an error has size 1.
    pub fn of_result(self, args: &[Value<'_>], result: Option<&Value<'_>>) -> u64 {
        match self {
            Self::Result(cost) => cost(result.map_or(1, Value::cost_size)),
            other => other.of_args(args).unwrap_or(1),
        }
    }
}

fn size(args: &[Value<'_>], at: usize) -> u64 {
    args.get(at).map_or(1, Value::cost_size)
}

fn string_size(args: &[Value<'_>]) -> u64 {
    scale(size(args, 0), STRING_FACTOR)
}

fn twice_string_size(args: &[Value<'_>]) -> u64 {
    scale(size(args, 0), 2.0 * STRING_FACTOR)
}

fn regex(args: &[Value<'_>]) -> u64 {
    scale(size(args, 0).saturating_add(1), STRING_FACTOR) * scale(size(args, 1), REGEX_FACTOR)
}

fn smaller(args: &[Value<'_>]) -> u64 {
    scale(size(args, 0).min(size(args, 1)), STRING_FACTOR)
}

fn selector(args: &[Value<'_>]) -> u64 {
    let length = size(args, 1);
    10 + scale(length, STRING_FACTOR) + scale(scale(length, 0.5), 50.0)
}

/// Comparing each item with each other.
fn self_compare(list: Option<&Value<'_>>) -> u64 {
    let Some(Value::List(list)) = list else { return 11 };
    let factor = match list.get(0) {
        Some(Value::String(_) | Value::Bytes(_)) => 2.1,
        _ => 2.0,
    };
    let count = list.len() as u64;
    (count.saturating_mul(count) as f64 * factor) as u64 + 11
}

fn contains_ip(args: &[Value<'_>], with_string: bool) -> u64 {
    let own = scale(2 * size(args, 0), STRING_FACTOR);
    own + if with_string { scale(size(args, 1), STRING_FACTOR) } else { 0 }
}

fn contains_cidr(args: &[Value<'_>], with_string: bool) -> u64 {
    contains_ip(args, with_string) + scale(size(args, 0), STRING_FACTOR) + 1
}

fn validate(args: &[Value<'_>]) -> u64 {
    let Some(format) = args.first().and_then(|format| format.downcast::<NamedFormat>()) else { return 1 };
    scale(size(args, 1) + 1, STRING_FACTOR) * scale(format.regex_size, REGEX_FACTOR)
}

/// The rule for a call of `function`; `overload` is empty if several fit.
pub(crate) fn rule(function: &str, overload: &str) -> CallCost {
    use CallCost::{Args, Fixed, One, Result};
    // Extensions have rules for their overloads.
    match overload {
        "list_slice" | "lists_range" | "list_reverse" => return Result(|size| size + 11),
        "list_flatten" | "list_flatten_int" => {
            return Args(|args| {
                let depth = args.get(1).and_then(Value::as_int).map_or(1.0, |depth| depth as f64);
                (size(args, 0) as f64 * depth) as u64 + 11
            });
        }
        "list_distinct" => return Args(|args| self_compare(args.first())),
        "list_sets_contains_list" | "list_sets_intersects_list" => {
            return Args(|args| size(args, 0).saturating_mul(size(args, 1)).saturating_add(1));
        }
        "list_sets_equivalent_list" => {
            return Args(|args| {
                size(args, 0).saturating_mul(size(args, 1)).saturating_mul(2).saturating_add(1)
            });
        }
        overload if overload.ends_with("_sortByAssociatedKeys") => {
            return Args(|args| self_compare(args.get(1)));
        }
        overload if overload.ends_with("_sort") => return Args(|args| self_compare(args.first())),
        _ => {}
    }
    match function {
        "check" => Fixed(350_000),
        "fieldSelector" | "labelSelector" => Args(selector),
        "isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf" => {
            Args(|args| args.first().map_or(0, traversal))
        }
        "url"
        | "lowerAscii"
        | "upperAscii"
        | "substring"
        | "trim"
        | "jsonpatch.escapeKey"
        | "cidr"
        | "isIP"
        | "isCIDR"
        | "quantity"
        | "isQuantity"
        | "semver"
        | "isSemver" => Args(string_size),
        "ip" if overload == "cidr_ip" => One,
        "ip" => Args(string_size),
        "replace" | "split" | "ip.isCanonical" => Args(twice_string_size),
        "join" => Result(|size| scale(size, 2.0 * STRING_FACTOR)),
        "find" | "findAll" => Args(regex),
        "containsIP" if overload == "cidr_contains_ip_string" => Args(|args| contains_ip(args, true)),
        "containsIP" => Args(|args| contains_ip(args, false)),
        "containsCIDR" if overload == "cidr_contains_cidr_string" => Args(|args| contains_cidr(args, true)),
        "containsCIDR" => Args(|args| contains_cidr(args, false)),
        "validate" => Args(validate),
        _ => standard(overload),
    }
}

fn standard(overload: &str) -> CallCost {
    use CallCost::{Args, One};
    match overload {
        "starts_with_string" | "ends_with_string" | "string_to_bytes" | "bytes_to_string"
        | "strings_quote" | "string_format" => Args(string_size),
        "in_list" => Args(|args| size(args, 1)),
        "less_string"
        | "greater_string"
        | "less_equals_string"
        | "greater_equals_string"
        | "less_bytes"
        | "greater_bytes"
        | "less_equals_bytes"
        | "greater_equals_bytes" => Args(smaller),
        "add_string" | "add_bytes" => Args(|args| scale(size(args, 0) + size(args, 1), STRING_FACTOR)),
        "matches_string" => Args(regex),
        "contains_string" => {
            Args(|args| scale(size(args, 0), STRING_FACTOR) * scale(size(args, 1), STRING_FACTOR))
        }
        _ => One,
    }
}
