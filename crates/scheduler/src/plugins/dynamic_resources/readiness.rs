//! Binding conditions: devices that must be made ready before the pod may be bound.

use ferrite_client::resource_claims::{allocation, results};
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use std::time::Duration;

/// The state of a claim's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Readiness {
    /// No device has a condition that is not met.
    Ready,
    Pending,
    /// The driver says that a device will not become ready.
    Failed(String),
}

fn status_of<'a>(
    claim: &'a ResourceClaim,
    result: &DeviceRequestAllocationResult,
) -> Option<&'a AllocatedDeviceStatus> {
    let devices = claim.status.as_ref()?.devices.as_ref()?;
    devices.iter().find(|status| {
        status.device == result.device && status.driver == result.driver && status.pool == result.pool
    })
}

fn condition<'a>(status: &'a AllocatedDeviceStatus, name: &str) -> Option<&'a Condition> {
    let found = status.conditions.iter().flatten().find(|condition| condition.type_ == name);
    found.filter(|condition| condition.status == "True")
}

fn with_conditions(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let devices = allocation(claim).map(results).unwrap_or_default().iter();
    devices.filter(|result| result.binding_conditions.as_ref().is_some_and(|names| !names.is_empty()))
}

pub(super) fn has_conditions(claim: &ResourceClaim) -> bool {
    with_conditions(claim).next().is_some()
}

/// The state of the claim's devices; one that is not allocated is pending.
pub(super) fn readiness(claim: &ResourceClaim) -> Readiness {
    if allocation(claim).is_none() {
        return Readiness::Pending;
    }
    for result in with_conditions(claim) {
        let Some(status) = status_of(claim, result) else { return Readiness::Pending };
        let failures = result.binding_failure_conditions.iter().flatten();
        if let Some(failed) = failures.filter_map(|name| condition(status, name)).next() {
            return Readiness::Failed(format!(
                "device binding failed: claim={}, reason={}, message={:?}",
                claim.metadata.name.as_deref().unwrap_or_default(),
                failed.reason,
                failed.message
            ));
        }
        let mut wanted = result.binding_conditions.iter().flatten();
        if wanted.any(|name| condition(status, name).is_none()) {
            return Readiness::Pending;
        }
    }
    Readiness::Ready
}

/// True if the devices had their time to become ready.
pub(super) fn is_timed_out(claim: &ResourceClaim, limit: Duration, now: Timestamp) -> bool {
    let since = allocation(claim).and_then(|allocation| allocation.allocation_timestamp.as_ref());
    has_conditions(claim)
        && since.is_some_and(|since| now.duration_since(since.0).unsigned_abs() > limit && now > since.0)
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn claim(conditions: Value) -> ResourceClaim {
        ferrite_json::from_value(json!({
            "metadata": {"name": "c", "namespace": "ns"},
            "spec": {},
            "status": {
                "allocation": {"allocationTimestamp": "2026-01-01T00:00:00Z", "devices": {"results": [
                    {"request": "r", "driver": "d", "pool": "p", "device": "plain"},
                    {"request": "r", "driver": "d", "pool": "p", "device": "fabric",
                     "bindingConditions": ["Attached"], "bindingFailureConditions": ["Broken"]},
                ]}},
                "devices": conditions,
            },
        }))
        .unwrap()
    }

    #[test]
    fn devices_become_ready_or_fail() {
        let device = |conditions: &[(&str, &str)]| {
            let conditions: Vec<_> = conditions
                .iter()
                .map(|(name, status)| {
                    json!({"type": name, "status": status, "reason": "R", "message": "m",
                           "lastTransitionTime": "2026-01-01T00:00:00Z"})
                })
                .collect();
            json!([{"driver": "d", "pool": "p", "device": "fabric", "conditions": conditions}])
        };
        let failed = "device binding failed: claim=c, reason=R, message=\"m\"".to_owned();
        let rows = [
            (json!(null), Readiness::Pending),
            (device(&[]), Readiness::Pending),
            (device(&[("Attached", "False")]), Readiness::Pending),
            (device(&[("Attached", "True")]), Readiness::Ready),
            (device(&[("Attached", "True"), ("Broken", "False")]), Readiness::Ready),
            (device(&[("Attached", "True"), ("Broken", "True")]), Readiness::Failed(failed)),
        ];
        for (conditions, expected) in rows {
            assert_eq!(readiness(&claim(conditions.clone())), expected, "{conditions}");
        }
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let limit = Duration::from_secs(60);
        assert!(!is_timed_out(&claim(json!(null)), limit, at("2026-01-01T00:01:00Z")));
        assert!(is_timed_out(&claim(json!(null)), limit, at("2026-01-01T00:01:01Z")));
        assert!(!is_timed_out(&claim(json!(null)), limit, at("2025-01-01T00:01:01Z")));
    }
}
