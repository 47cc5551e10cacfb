//! Decides when a pod is evicted.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::resource::v1::{
    Device, DeviceRequestAllocationResult, DeviceTaint, DeviceToleration, ResourceClaim, ResourceSlice,
};

const NO_EXECUTE: &str = "NoExecute";

/// The devices that the claim was given.
pub(super) fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    allocation
        .and_then(|allocation| allocation.devices.as_ref())
        .and_then(|devices| devices.results.as_ref())
        .into_iter()
        .flatten()
}

/// The device of this name. Slices of an earlier generation of the pool are out of date.
fn device<'a>(pool: &'a [Arc<ResourceSlice>], name: &str) -> Option<&'a Device> {
    let generation = pool.iter().map(|slice| slice.spec.pool.generation).max()?;
    pool.iter()
        .filter(|slice| slice.spec.pool.generation == generation)
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .find(|device| device.name == name)
}

/// The taints of a slice that evict, with the names of their devices.
pub(super) fn evicting(slice: &ResourceSlice) -> Vec<(&str, &DeviceTaint)> {
    let devices = slice.spec.devices.iter().flatten();
    devices
        .flat_map(|device| device.taints.iter().flatten().map(|taint| (device.name.as_str(), taint)))
        .filter(|(_, taint)| taint.effect == NO_EXECUTE)
        .collect()
}

/// As upstream: only a toleration that names the effect tolerates it here; one for all effects does not.
fn tolerates(toleration: &DeviceToleration, taint: &DeviceTaint) -> bool {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let key = text(&toleration.key);
    text(&toleration.effect) == NO_EXECUTE
        && (key.is_empty() || key == taint.key)
        && match toleration.operator.as_deref().unwrap_or_default() {
            "" | "Equal" => text(&toleration.value) == text(&taint.value),
            "Exists" => true,
            _ => false,
        }
}

/// The time at which the taint ends the use of a device under these tolerations; none if one of them has no limit.
fn deadline(taint: &DeviceTaint, tolerations: &[DeviceToleration]) -> Option<Timestamp> {
    let mut shortest: Option<i64> = None;
    for toleration in tolerations.iter().filter(|toleration| tolerates(toleration, taint)) {
        let seconds = toleration.toleration_seconds?.max(0);
        shortest = Some(shortest.map_or(seconds, |known| known.min(seconds)));
    }
    let added = taint.time_added.as_ref()?.0;
    let tolerated = SignedDuration::from_secs(shortest.unwrap_or_default());
    Some(added.saturating_add(tolerated).unwrap_or(Timestamp::MAX))
}

/// The time at which the users of the claim are evicted; none if they may stay. `pool` finds the slices of a driver's pool.
pub(super) fn eviction(
    claim: &ResourceClaim,
    pool: impl Fn(&str, &str) -> Vec<Arc<ResourceSlice>>,
) -> Option<Timestamp> {
    let mut earliest: Option<Timestamp> = None;
    for result in results(claim) {
        let slices = pool(&result.driver, &result.pool);
        let Some(device) = device(&slices, &result.device) else { continue };
        let taints = device.taints.iter().flatten().filter(|taint| taint.effect == NO_EXECUTE);
        let tolerations = result.tolerations.as_deref().unwrap_or_default();
        earliest = taints.filter_map(|taint| deadline(taint, tolerations)).chain(earliest).min();
    }
    earliest
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    const ADDED: &str = "2026-01-01T00:00:00Z";

    fn slice(name: &str, generation: i64, devices: Value) -> Arc<ResourceSlice> {
        let slice = json!({"metadata": {"name": name}, "spec": {
            "driver": "d.example", "pool": {"name": "p", "generation": generation, "resourceSliceCount": 1},
            "devices": devices}});
        Arc::new(ferrite_json::from_value(slice).unwrap())
    }

    fn claim(tolerations: Value) -> ResourceClaim {
        let result = |device: &str| json!({"request": "r", "driver": "d.example", "pool": "p", "device": device, "tolerations": tolerations});
        ferrite_json::from_value(json!({"metadata": {"name": "c"}, "spec": {},
            "status": {"allocation": {"devices": {"results": [result("a"), result("b")]}}}}))
        .unwrap()
    }

    #[test]
    fn the_earliest_end_of_a_toleration_decides() {
        let taint = |key: &str, value: &str, effect: &str| json!({"key": key, "value": value, "effect": effect, "timeAdded": ADDED});
        let broken = || json!([taint("broken", "", "NoExecute")]);
        let exists = |seconds: Option<i64>| json!({"key": "broken", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds});
        let after =
            |seconds: i64| Some(ADDED.parse::<Timestamp>().unwrap() + SignedDuration::from_secs(seconds));
        for (what, taints, tolerations, expected) in [
            ("healthy", json!([]), json!([]), None),
            ("not tolerated", broken(), json!([]), after(0)),
            ("another effect", json!([taint("broken", "", "NoSchedule")]), json!([]), None),
            ("no effect", json!([taint("broken", "", "None")]), json!([]), None),
            ("tolerated for ever", broken(), json!([exists(None)]), None),
            ("tolerated for a time", broken(), json!([exists(Some(30))]), after(30)),
            ("the shortest time", broken(), json!([exists(Some(30)), exists(Some(10))]), after(10)),
            ("less than no time", broken(), json!([exists(Some(-5))]), after(0)),
            ("one without limit", broken(), json!([exists(Some(30)), exists(None)]), None),
            ("all effects", broken(), json!([{"key": "broken", "operator": "Exists"}]), after(0)),
            ("all keys", broken(), json!([{"operator": "Exists", "effect": "NoExecute"}]), None),
            (
                "another value",
                json!([taint("broken", "yes", "NoExecute")]),
                json!([{"key": "broken", "operator": "Equal", "value": "no", "effect": "NoExecute"}]),
                after(0),
            ),
            (
                "one of two",
                json!([taint("broken", "", "NoExecute"), taint("hot", "", "NoExecute")]),
                json!([exists(None)]),
                after(0),
            ),
        ] {
            let pool = vec![slice("s", 1, json!([{"name": "a"}, {"name": "b", "taints": taints}]))];
            assert_eq!(eviction(&claim(tolerations), |_, _| pool.clone()), expected, "{what}");
        }
    }

    #[test]
    fn only_the_newest_generation_of_a_pool_counts() {
        let tainted =
            json!([{"name": "a", "taints": [{"key": "k", "effect": "NoExecute", "timeAdded": ADDED}]}]);
        let healthy = json!([{"name": "a"}, {"name": "b"}]);
        for (what, pool, expected) in [
            ("out of date", vec![slice("x", 1, tainted.clone()), slice("y", 2, healthy.clone())], false),
            ("current", vec![slice("x", 2, tainted), slice("y", 1, healthy)], true),
            ("no slice", vec![], false),
        ] {
            assert_eq!(eviction(&claim(json!([])), |_, _| pool.clone()).is_some(), expected, "{what}");
        }
    }
}
