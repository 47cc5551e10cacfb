//! The ranges that addresses are given out from.

use super::super::View;
use super::families::{Family, listed};
use ferrite_api::{Cidr, address_number, meta};
use ferrite_json::Value;
use rand::RngExt;
use std::net::IpAddr;
use std::sync::Arc;

/// As upstream: the shortest prefix of an IPv6 range.
const WIDEST_V6: u8 = 64;

/// Returns true if addresses are allocated from a ServiceCIDR. One without a condition counts as ready: its
/// controller may not run.
fn is_ready(range: &Value) -> bool {
    let conditions = range.pointer("/status/conditions").and_then(Value::as_array);
    let ready = conditions.into_iter().flatten().find(|c| c["type"] == "Ready");
    !meta::is_deleting(range) && ready.is_none_or(|c| c["status"] == "True")
}

/// The ranges of a family that addresses are given out from, each once, in any order.
pub(super) fn usable(view: &View, configured: &[Cidr], family: Family) -> Vec<Cidr> {
    let objects: Vec<Arc<Value>> = view.few("networking.k8s.io", "servicecidrs", "").collect();
    // The server's own range may not have been written yet.
    let mut ranges: Vec<Cidr> = match objects.is_empty() {
        true => configured.to_vec(),
        false => objects
            .iter()
            .filter(|object| is_ready(object))
            .flat_map(|object| listed(&object["spec"], "cidrs"))
            .filter_map(|text| Cidr::parse(&text))
            .collect(),
    };
    ranges.retain(|range| match range.address {
        IpAddr::V4(_) => family == Family::V4,
        IpAddr::V6(_) => family == Family::V6 && range.bits >= WIDEST_V6,
    });
    ranges.sort_unstable();
    ranges.dedup();
    if !ranges.is_empty() {
        let first = rand::rng().random_range(0..ranges.len());
        ranges.rotate_left(first);
    }
    ranges
}

/// The addresses of a range in the order of allocation: anywhere in the upper part first, then anywhere in
/// the lower part, which is left for static allocation.
pub(super) fn candidates(range: Cidr) -> impl Iterator<Item = IpAddr> {
    let (first, last) = range.ends();
    let (first, last) = (address_number(first).0, address_number(last).0);
    let size = last - first;
    let last = if range.address.is_ipv4() { last.saturating_sub(1) } else { last };
    let upper = first.saturating_add(1).saturating_add(by_name(size.saturating_add(1), 16, 256));
    let lower = from_somewhere(first.saturating_add(1), upper - 1);
    from_somewhere(upper, last).chain(lower).map(move |number| range.address_of(number))
}

/// Number of the `size` addresses that are left for static allocation: a part of them, within upstream's
/// bounds.
pub(super) fn by_name(size: u128, part: u128, most: u128) -> u128 {
    const LEAST: u128 = 16;
    if size <= LEAST { 0 } else { (size / part).clamp(LEAST, most) }
}

/// Every number from `first` to `last`, beginning anywhere: a number that was just returned is not
/// allocated again at once, while others may still use it for its former owner.
pub(super) fn from_somewhere(first: u128, last: u128) -> impl Iterator<Item = u128> {
    let start = if first < last { rand::rng().random_range(first..=last) } else { first };
    (start..=last).chain(first..start.min(last.saturating_add(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;
    use std::collections::BTreeSet;

    #[test]
    fn every_number_comes_once() {
        for (first, last, count) in [(1, 10, 10), (5, 5, 1), (6, 5, 0)] {
            let mut numbers: Vec<u128> = from_somewhere(first, last).collect();
            assert_eq!(numbers.len(), count);
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), count);
        }
    }

    #[test]
    fn the_lower_part_is_given_out_last() {
        for (range, total, upper, lowest_of_upper) in [
            ("10.0.0.0/24", 254, 238, "10.0.0.17"),
            ("10.0.0.0/28", 14, 14, "10.0.0.1"),
            ("10.0.0.0/20", 4094, 3838, "10.0.1.1"),
            ("10.0.0.0/30", 2, 2, "10.0.0.1"),
            ("10.0.0.0/32", 0, 0, "10.0.0.0"),
            ("fd00::/120", 255, 239, "fd00::11"),
        ] {
            let all: Vec<IpAddr> = candidates(Cidr::parse(range).expect(range)).collect();
            assert_eq!(all.len(), total, "{range}");
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), total, "{range}");
            let lowest = all[..upper].iter().min().map(IpAddr::to_string);
            assert!(total == 0 || lowest.as_deref() == Some(lowest_of_upper), "{range}: {lowest:?}");
        }
        let wide = Cidr::parse("fd00::/64").expect("a range");
        assert!(candidates(wide).take(100).all(|a| wide.contains_host(a)));
    }

    #[test]
    fn a_range_is_ready_until_somebody_says_otherwise() {
        for (range, ready) in [
            (json!({}), true),
            (json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}), true),
            (json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}), false),
            (json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), false),
        ] {
            assert_eq!(is_ready(&range), ready, "{range}");
        }
    }
}
