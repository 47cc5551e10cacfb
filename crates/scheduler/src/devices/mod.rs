//! Dynamic resource allocation: the devices of the cluster, the claims that have them, and the choice of devices for
//! claims that have none.
//!
//! [`allocator`] is the pure choice. [`Devices`] is the state that all profiles share: devices that a pod of one profile
//! is about to get are taken for the pods of every other.

pub(crate) mod allocator;
mod classes;
mod manager;
mod selectors;

pub(crate) use classes::IMPLICIT_PREFIX;
pub(crate) use manager::Devices;

use k8s_openapi::api::resource::v1::{DeviceTaint, DeviceToleration};

/// True if the toleration is about the taint. An empty effect or key is about all.
pub(crate) fn tolerates(toleration: &DeviceToleration, taint: &DeviceTaint) -> bool {
    let is_or_empty =
        |own: &Option<String>, other: &str| own.as_deref().is_none_or(|own| own.is_empty() || own == other);
    is_or_empty(&toleration.effect, &taint.effect)
        && is_or_empty(&toleration.key, &taint.key)
        && match toleration.operator.as_deref().unwrap_or_default() {
            "" | "Equal" => {
                toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default()
            }
            "Exists" => true,
            _ => false,
        }
}
