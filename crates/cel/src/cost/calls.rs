//! The rules for the costs of calls, and for the sizes of their results.

use super::estimate::{Argument, CallEstimate, Estimator, ONE, extended, only};
use super::{REGEX_FACTOR, Range, STRING_FACTOR, scale};
use crate::ast::{ExprKind, Literal};
use crate::types::Type;

impl<'e> Estimator<'e> {
    /// Rules of cel-go's extensions for lists and sets.
    pub(super) fn extension(
        &self,
        overload: &str,
        target: Option<&Argument<'e>>,
        args: &[Argument<'e>],
    ) -> Option<CallEstimate> {
        let list = |factor: f64, size: Range| {
            Some(CallEstimate { cost: size.scaled(factor).plus(Range::fixed(11)), result: Some(size) })
        };
        let literal = |argument: &Argument<'_>, default: u64| match argument.expr.kind {
            ExprKind::Literal(Literal::Int(value)) => value.max(0) as u64,
            _ => default,
        };
        let sort = |elements: &Argument<'e>, of: &str| {
            let size = self.size_of(elements);
            list(if matches!(of, "string" | "bytes") { 2.1 } else { 2.0 }, size.times(size))
        };
        match (overload, target, args) {
            ("list_slice", Some(target), [start, end]) => {
                let most = self.size_of(target).max;
                list(1.0, Range::fixed(literal(end, most).wrapping_sub(literal(start, 0))))
            }
            ("lists_range", None, [end]) => list(1.0, Range::fixed(literal(end, u64::MAX))),
            ("list_reverse", Some(target), []) => list(1.0, self.size_of(target)),
            ("list_flatten" | "list_flatten_int", Some(target), args) => {
                let depth = args.first().map_or(1, |depth| literal(depth, u64::MAX));
                list(depth as f64, self.size_of(target))
            }
            ("list_distinct", Some(target), []) => {
                let size = self.size_of(target);
                list(2.0, size.times(size))
            }
            (
                "list_sets_contains_list" | "list_sets_intersects_list" | "list_sets_equivalent_list",
                _,
                [a, b],
            ) => {
                let factor = if overload == "list_sets_equivalent_list" { 2.0 } else { 1.0 };
                only(self.size_of(a).times(self.size_of(b)).scaled(factor).plus(ONE))
            }
            (overload, Some(_), [keys]) if overload.ends_with("_sortByAssociatedKeys") => {
                sort(keys, overload.trim_start_matches("list_").trim_end_matches("_sortByAssociatedKeys"))
            }
            (overload, Some(target), []) if overload.ends_with("_sort") => {
                sort(target, overload.trim_start_matches("list_").trim_end_matches("_sort"))
            }
            _ => None,
        }
    }

    /// Rules of Kubernetes' libraries.
    pub(super) fn kubernetes(
        &self,
        function: &str,
        overload: &str,
        target: Option<&Argument<'e>>,
        args: &[Argument<'e>],
    ) -> Option<CallEstimate> {
        let string_of = |argument: &Argument<'e>| self.size_of(argument).scaled(STRING_FACTOR);
        match (function, target, args) {
            ("check", ..) => only(Range::fixed(350_000)),
            (
                "serviceAccount"
                | "path"
                | "group"
                | "resource"
                | "subresource"
                | "namespace"
                | "name"
                | "allowed"
                | "reason"
                | "error"
                | "errored"
                | "masked"
                | "prefixLength"
                | "family"
                | "isUnspecified"
                | "isLoopback"
                | "isLinkLocalMulticast"
                | "isLinkLocalUnicast"
                | "isGlobalUnicast"
                | "format.named"
                | "sign"
                | "asInteger"
                | "isInteger"
                | "asApproximateFloat"
                | "isGreaterThan"
                | "isLessThan"
                | "compareTo"
                | "add"
                | "sub"
                | "major"
                | "minor"
                | "patch"
                | "getScheme"
                | "getHostname"
                | "getHost"
                | "getPort"
                | "getEscapedPath"
                | "getQuery",
                ..,
            ) => only(ONE),
            ("fieldSelector" | "labelSelector", _, [selector]) => {
                let length = self.size_of(selector);
                only(
                    Range::fixed(10).plus(length.scaled(STRING_FACTOR)).plus(length.scaled(0.5).scaled(50.0)),
                )
            }
            ("isSorted" | "sum" | "max" | "min" | "indexOf" | "lastIndexOf", Some(target), _) => {
                let size = self.size_of(target);
                only(match element(&target.of) {
                    Some(of @ (Type::String | Type::Bytes)) => {
                        size.times(ONE.plus(self.element_size(target, of).scaled(STRING_FACTOR)))
                    }
                    Some(_) => size,
                    None => size.scaled(STRING_FACTOR),
                })
            }
            ("url" | "jsonpatch.escapeKey", _, [text]) => {
                Some(CallEstimate { cost: string_of(text), result: Some(self.size_of(text)) })
            }
            ("lowerAscii" | "upperAscii" | "substring" | "trim", Some(target), _) => {
                Some(CallEstimate { cost: string_of(target), result: Some(self.size_of(target)) })
            }
            ("replace", Some(target), [from, to, ..]) => {
                let size = self.size_of(target);
                let result = replaced(size, self.size_of(from), self.size_of(to));
                Some(CallEstimate { cost: size.scaled(2.0 * STRING_FACTOR), result: Some(result) })
            }
            ("split", Some(target), args) => {
                let size = self.size_of(target);
                let max = match args.get(1).map(|limit| &limit.expr.kind) {
                    Some(ExprKind::Literal(Literal::Int(limit))) => *limit as u64,
                    _ => size.max,
                };
                let result = Some(Range { min: 0, max });
                Some(CallEstimate { cost: size.scaled(2.0 * STRING_FACTOR), result })
            }
            ("join", Some(target), args) => {
                let count = self.size_of(target);
                let mut size = element(&target.of)
                    .map_or(Range::default(), |of| count.times(self.element_size(target, of)));
                if let Some(separator) = args.first() {
                    let gaps = Range { min: count.min.saturating_sub(1), max: count.max.saturating_sub(1) };
                    size = size.plus(self.size_of(separator).times(gaps));
                }
                Some(CallEstimate { cost: size.scaled(STRING_FACTOR), result: Some(size) })
            }
            ("find" | "findAll", Some(target), [pattern, ..]) => {
                let size = self.size_of(target);
                let text = size.plus(ONE).scaled(STRING_FACTOR);
                let cost = text.times(self.size_of(pattern).scaled(REGEX_FACTOR));
                Some(CallEstimate { cost, result: Some(Range { min: 0, max: size.max }) })
            }
            ("ip", ..) if overload == "cidr_ip" => only(ONE),
            (
                "cidr" | "isIP" | "isCIDR" | "ip" | "quantity" | "isQuantity" | "semver" | "isSemver",
                _,
                [text, ..],
            ) => only(string_of(text)),
            ("ip.isCanonical", _, [text]) => only(self.size_of(text).scaled(2.0 * STRING_FACTOR)),
            ("containsIP" | "containsCIDR", _, [other, ..]) => {
                let size = Range { min: 4, max: 16 };
                let mut cost = size.plus(size).scaled(STRING_FACTOR);
                if function == "containsCIDR" {
                    cost = cost.plus(size.scaled(STRING_FACTOR)).plus(ONE);
                }
                let with_string = overload.ends_with("_string");
                only(if with_string { cost.plus(string_of(other)) } else { cost })
            }
            ("validate", _, [text, ..]) => only(string_of(text).scaled(128.0 * REGEX_FACTOR)),
            ("_==_", _, [left, right]) if left.of == right.of => self.equal(left, right),
            _ => None,
        }
    }

    /// Equality of two values of one of Kubernetes' types.
    fn equal(&self, left: &Argument<'e>, right: &Argument<'e>) -> Option<CallEstimate> {
        match &left.of {
            Type::Opaque(name, _) if matches!(&**name, "net.IP" | "net.CIDR") => only(ONE),
            Type::Struct(name) => match &**name {
                "kubernetes.Quantity" | "kubernetes.Semver" => only(ONE),
                name if name.starts_with("kubernetes.authorization.") => only(ONE),
                "kubernetes.NamedFormat" => only(Range { min: 1, max: 64 }.scaled(STRING_FACTOR)),
                "kubernetes.URL" => {
                    let max = right.size.map_or(1, |size| size.max);
                    only(Range { min: 1, max }.scaled(STRING_FACTOR))
                }
                _ => None,
            },
            _ => None,
        }
    }

    fn element_size(&self, list: &Argument<'_>, of: &Type) -> Range {
        let path = if list.path.is_empty() { [].into() } else { extended(&list.path, "@items") };
        self.sizes.size(&path, of).unwrap_or(Range::UNKNOWN)
    }
}

/// The first parameter of a list, map or optional type.
fn element(of: &Type) -> Option<&Type> {
    match of {
        Type::List(element) => Some(element),
        Type::Map(of) => Some(&of.0),
        Type::Opaque(_, params) => params.first(),
        _ => None,
    }
}

/// The size of a string after replacements.
fn replaced(size: Range, from: Range, to: Range) -> Range {
    let (mut count, mut kept) = (Range::default(), Range::default());
    if from.min == 0 {
        count.max = size.max.saturating_add(1);
        kept.max = size.max;
    } else if to.max <= from.min {
        kept.max = size.max;
    } else {
        count.max = (size.max as f64 / from.min as f64).ceil() as u64;
    }
    if from.max == 0 {
        count.min = size.min.saturating_add(1);
        kept.min = size.min;
    } else if from.max <= to.min {
        kept.min = size.min;
    } else {
        count.min = (size.min as f64 / from.max as f64).ceil() as u64;
    }
    count.times(to).plus(kept)
}

/// Rules of the standard library.
pub(super) fn standard(
    overload: &str,
    target: Option<&Argument<'_>>,
    args: &[Argument<'_>],
) -> Option<CallEstimate> {
    let size = |argument: &Argument<'_>| argument.size.unwrap_or(Range::UNKNOWN);
    let strings = |range: Range| range.scaled(STRING_FACTOR);
    match (overload, target, args) {
        ("string_format", Some(target), _) => only(strings(size(target))),
        ("string_to_bytes", _, [text]) => {
            let size = size(text);
            let result = Range { min: size.min, max: size.max.wrapping_mul(4) };
            Some(CallEstimate { cost: strings(size), result: Some(result) })
        }
        ("bytes_to_string", _, [bytes]) => {
            let size = size(bytes);
            Some(CallEstimate {
                cost: strings(size),
                result: Some(Range { min: size.min / 4, max: size.max }),
            })
        }
        ("strings_quote", _, [text]) => {
            let size = size(text);
            let result =
                Range { min: size.min.wrapping_add(2), max: size.max.wrapping_mul(2).wrapping_add(2) };
            Some(CallEstimate { cost: strings(size), result: Some(result) })
        }
        ("starts_with_string" | "ends_with_string", _, [text]) => only(strings(size(text))),
        ("in_list", _, [_, list]) => only(size(list).scaled(1.0)),
        ("matches_string", Some(target), [pattern]) => {
            only(strings(size(target).plus(ONE)).times(size(pattern).scaled(REGEX_FACTOR)))
        }
        ("contains_string", Some(target), [part]) => only(strings(size(target)).times(strings(size(part)))),
        ("add_list", _, [left, right]) => {
            Some(CallEstimate { cost: ONE, result: Some(size(left).plus(size(right))) })
        }
        ("add_string" | "add_bytes", _, [left, right]) => {
            let sum = size(left).plus(size(right));
            Some(CallEstimate { cost: strings(sum), result: Some(sum) })
        }
        (
            "less_string"
            | "greater_string"
            | "less_equals_string"
            | "greater_equals_string"
            | "less_bytes"
            | "greater_bytes"
            | "less_equals_bytes"
            | "greater_equals_bytes"
            | "equals"
            | "not_equals",
            _,
            [left, right],
        ) => {
            let max = size(left).max.min(size(right).max);
            only(Range { min: scale(max.min(1), STRING_FACTOR), max: scale(max, STRING_FACTOR) })
        }
        _ => None,
    }
}
