//! Resource quantities as numbers.

use ferrite_api::quantity::Quantity as Parsed;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// A quantity in thousandths (the unit of CPU requests), rounded up. Nothing when it is not a quantity.
pub(crate) fn milli(q: &Quantity) -> Option<i64> {
    Parsed::parse(&q.0).ok().map(|q| q.milli_value())
}

/// A quantity in whole units, rounded up. Nothing when it is not a quantity.
pub(crate) fn value(q: &Quantity) -> Option<i64> {
    Parsed::parse(&q.0).ok().map(|q| q.value())
}

/// The amount of `resource` in a resource list, in thousandths.
pub(crate) fn milli_of(list: Option<&BTreeMap<String, Quantity>>, resource: &str) -> Option<i64> {
    list?.get(resource).and_then(milli)
}

/// The amount of `resource` in a resource list, in whole units.
pub(crate) fn value_of(list: Option<&BTreeMap<String, Quantity>>, resource: &str) -> Option<i64> {
    list?.get(resource).and_then(value)
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
