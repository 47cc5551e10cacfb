//! OOM scores: the kernel kills processes with high scores first.

use crate::container::resources::requests;
use crate::pod::model::{self, QosClass};
use crate::quantity;
use k8s_openapi::api::core::v1::{Container, Pod};

/// Of containers that go last.
const GUARANTEED: i64 = -997;

/// The adjustment of the score of this container's processes.
pub(super) fn adjustment(pod: &Pod, container: &Container, node_memory: i64) -> i64 {
    // Pods the node cannot do without, as upstream.
    if model::spec(pod).priority.is_some_and(|p| p >= 2_000_001_000) {
        return GUARANTEED;
    }
    match model::qos_class(pod) {
        QosClass::Guaranteed => GUARANTEED,
        QosClass::BestEffort => 1000,
        QosClass::Burstable if node_memory <= 0 => 999,
        QosClass::Burstable => {
            let share = share_of_rest(pod);
            let score = |request: i64| {
                1000i64.saturating_sub(request.saturating_add(share).saturating_mul(1000) / node_memory)
            };
            let own = score(request(container));
            let own = match least_served(pod, container) {
                // A sidecar goes no sooner than the containers that it serves.
                Some(least) => own.min(score(least)),
                None => own,
            };
            if own == 1000 { 999 } else { own.max(1000 + GUARANTEED) }
        }
    }
}

fn request(container: &Container) -> i64 {
    let requests = container.resources.as_ref().and_then(|r| r.requests.as_ref());
    quantity::value_of(requests, "memory").unwrap_or(0)
}

/// The least request of a regular container, if the container is a sidecar.
fn least_served(pod: &Pod, container: &Container) -> Option<i64> {
    let all = model::containers(pod);
    all.iter().find(|c| c.name() == container.name).filter(|c| c.is_sidecar())?;
    model::spec(pod).containers.iter().map(request).min()
}

/// A container's part of the memory that the pod asks for as a whole beyond its containers.
fn share_of_rest(pod: &Pod) -> i64 {
    let spec = model::spec(pod);
    let whole = spec.resources.as_ref().and_then(|r| r.requests.as_ref());
    let Some(whole) = quantity::value_of(whole, "memory").filter(|whole| *whole > 0) else { return 0 };
    let claimed = requests(pod).get("memory").copied().unwrap_or(0);
    let count = spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len);
    whole.saturating_sub(claimed) / i64::try_from(count).unwrap_or(i64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    #[test]
    fn scores_follow_the_quality_of_service() {
        let asks = |memory: &str| json!({"requests": {"memory": memory}});
        let of = |resources: Value| json!({"containers": [{"name": "c", "resources": resources}]});
        let beside = |sidecar: Value, container: Value| {
            json!({"initContainers": [{"name": "c", "restartPolicy": "Always", "resources": sidecar}],
                "containers": [{"name": "a", "resources": container}, {"name": "b", "resources": asks("500")}]})
        };
        let plain_init = json!({"initContainers": [{"name": "c", "resources": {}}],
            "containers": [{"name": "a", "resources": asks("200")}]});
        let whole = json!({"resources": asks("600"),
            "containers": [{"name": "c", "resources": asks("100")}, {"name": "b", "resources": asks("300")}]});
        let critical = json!({"priority": 2_000_001_000, "containers": [{"name": "c"}]});
        for (spec, expected) in [
            (of(json!({})), 1000),
            (of(json!({"limits": {"cpu": "1", "memory": "10"}})), -997),
            (of(asks("250")), 750),
            (of(asks("1000")), 3),
            (of(json!({"requests": {"cpu": "1"}})), 999),
            (critical, -997),
            (beside(json!({}), asks("200")), 800),
            (beside(asks("300"), asks("200")), 700),
            (plain_init, 999),
            (whole, 800),
        ] {
            let pod: Pod = ferrite_json::from_value(json!({"spec": spec})).unwrap();
            let containers = model::containers(&pod);
            let container = &containers.iter().find(|c| c.name() == "c").unwrap().spec;
            assert_eq!(adjustment(&pod, container, 1000), expected, "{spec}");
        }
    }
}
