//! Numbers that may be given as a percentage.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// The number itself, or that percentage of `whole`. A text that is no percentage counts as zero: the server
/// validated the object.
pub(crate) fn scaled(value: &IntOrString, whole: i32, round_up: bool) -> i32 {
    match value {
        IntOrString::Int(number) => (*number).max(0),
        IntOrString::String(text) => {
            let percent: i64 = text.strip_suffix('%').and_then(|digits| digits.parse().ok()).unwrap_or(0);
            let product = percent.saturating_mul(i64::from(whole)).max(0);
            let scaled = if round_up { product.saturating_add(99) / 100 } else { product / 100 };
            i32::try_from(scaled).unwrap_or(i32::MAX)
        }
    }
}
