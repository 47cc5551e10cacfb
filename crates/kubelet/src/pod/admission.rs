//! Whether this node takes a pod at all.

use super::model;
use super::status::Verdict;
use crate::container::resources::{PodResources, pod_resources};
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;

/// What the node offers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    pub cpu_milli: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
    pub max_pods: i64,
}

/// Refuses a pod that does not fit beside `others`, the pods that run here already.
pub(crate) fn admit<'a>(
    pod: &Pod,
    others: impl Iterator<Item = &'a Pod>,
    offer: &Offer,
    node_labels: &BTreeMap<String, String>,
) -> Result<(), Verdict> {
    let spec = model::spec(pod);
    let mismatch =
        spec.node_selector.iter().flatten().any(|(key, value)| node_labels.get(key) != Some(value));
    if mismatch {
        return Err(refusal(
            "NodeAffinity",
            "Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ));
    }
    if let Some(os) = spec.os.as_ref().filter(|os| os.name != "linux") {
        return Err(refusal(
            "PodOSNotSupported",
            format!("Failed to admit pod as the OS field doesn't match node OS: {}", os.name),
        ));
    }
    let (mut count, mut used) = (0i64, Used::default());
    for other in others {
        count += 1;
        used.add(&pod_resources(other));
    }
    if count + 1 > offer.max_pods {
        return Err(out_of("pods", 1, count, offer.max_pods));
    }
    let wanted = pod_resources(pod);
    let checks = [
        ("cpu", wanted.cpu_request, used.cpu, offer.cpu_milli),
        ("memory", wanted.memory_request, used.memory, offer.memory),
        ("ephemeral-storage", wanted.ephemeral_request, used.ephemeral, offer.ephemeral_storage),
    ];
    for (name, requested, used, capacity) in checks {
        if requested > 0 && requested > capacity.saturating_sub(used) {
            return Err(out_of(name, requested, used, capacity));
        }
    }
    Ok(())
}

#[derive(Default)]
struct Used {
    cpu: i64,
    memory: i64,
    ephemeral: i64,
}

impl Used {
    fn add(&mut self, r: &PodResources) {
        self.cpu = self.cpu.saturating_add(r.cpu_request);
        self.memory = self.memory.saturating_add(r.memory_request);
        self.ephemeral = self.ephemeral.saturating_add(r.ephemeral_request);
    }
}

fn refusal(reason: &str, message: impl Into<String>) -> Verdict {
    Verdict { reason: reason.into(), message: message.into() }
}

fn out_of(resource: &str, requested: i64, used: i64, capacity: i64) -> Verdict {
    refusal(
        &format!("OutOf{resource}"),
        format!(
            "Pod was rejected: Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        ferrite_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    #[test]
    fn pods_that_do_not_fit_are_refused() {
        let offer = Offer { cpu_milli: 1000, memory: 1 << 30, ephemeral_storage: 1 << 30, max_pods: 2 };
        let labels = BTreeMap::from([("disk".to_string(), "ssd".to_string())]);
        let cpu = |amount: &str| {
            pod(json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": amount}}}]}))
        };
        let plain = pod(json!({"containers": [{"name": "c"}]}));
        for (what, candidate, others, expected) in [
            ("fits", cpu("500m"), vec![cpu("500m")], None),
            ("no cpu left", cpu("600m"), vec![cpu("500m")], Some("OutOfcpu")),
            ("asks for nothing", plain.clone(), vec![cpu("1")], None),
            ("too many", plain.clone(), vec![plain.clone(), plain.clone()], Some("OutOfpods")),
            (
                "selector",
                pod(json!({"nodeSelector": {"disk": "hdd"}, "containers": []})),
                vec![],
                Some("NodeAffinity"),
            ),
            (
                "selector matches",
                pod(json!({"nodeSelector": {"disk": "ssd"}, "containers": []})),
                vec![],
                None,
            ),
            (
                "os",
                pod(json!({"os": {"name": "windows"}, "containers": []})),
                vec![],
                Some("PodOSNotSupported"),
            ),
        ] {
            let got = admit(&candidate, others.iter(), &offer, &labels).err();
            assert_eq!(got.as_ref().map(|v| v.reason.as_str()), expected, "{what}");
        }
        let message = admit(&cpu("600m"), [cpu("500m")].iter(), &offer, &labels).unwrap_err().message;
        assert_eq!(
            message,
            "Pod was rejected: Node didn't have enough resource: cpu, requested: 600, used: 500, capacity: 1000"
        );
    }
}
