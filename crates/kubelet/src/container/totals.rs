//! The amounts that a whole pod asks for, of every resource.

use crate::pod::model;
use ferrite_api::quantity::Quantity as Parsed;
use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// Requests or limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Requests,
    Limits,
}

impl Side {
    fn of(self, resources: Option<&ResourceRequirements>) -> Option<&BTreeMap<String, Quantity>> {
        match self {
            Self::Requests => resources?.requests.as_ref(),
            Self::Limits => resources?.limits.as_ref(),
        }
    }
}

type Amounts = BTreeMap<String, Parsed>;

/// The containers together, or an init container at its turn beside the sidecars before it if that is more. Resources of the
/// pod as a whole replace the sums; the sandbox's overhead is added.
pub(crate) fn total(pod: &Pod, side: Side) -> BTreeMap<String, Quantity> {
    let spec = model::spec(pod);
    let own = |container: &Container| parse(side.of(container.resources.as_ref()));
    let mut total = Amounts::new();
    spec.containers.iter().for_each(|container| add(&mut total, &own(container)));
    let (mut sidecars, mut initial) = (Amounts::new(), Amounts::new());
    for container in spec.init_containers.iter().flatten() {
        let mut moment = sidecars.clone();
        add(&mut moment, &own(container));
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars.clone_from(&moment);
        }
        raise(&mut initial, &moment);
    }
    add(&mut total, &sidecars);
    raise(&mut total, &initial);
    let of_pod = parse(side.of(spec.resources.as_ref())).into_iter();
    total.extend(of_pod.filter(|(name, _)| is_pod_level(name)));
    for (name, amount) in parse(spec.overhead.as_ref()) {
        // As upstream: overhead widens a limit and makes none.
        match total.get_mut(&name) {
            Some(sum) if side == Side::Requests || !sum.is_zero() => *sum = *sum + amount,
            None if side == Side::Requests => {
                total.insert(name, amount);
            }
            _ => {}
        }
    }
    total.into_iter().map(|(name, amount)| (name, Quantity(amount.to_string()))).collect()
}

/// Resources that a pod may have as a whole.
fn is_pod_level(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || name.starts_with("hugepages-")
}

fn parse(list: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    let all = list.into_iter().flatten();
    all.filter_map(|(name, amount)| Some((name.clone(), Parsed::parse(&amount.0).ok()?))).collect()
}

fn add(sums: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        let sum = sums.get(name).map_or(*amount, |sum| *sum + *amount);
        sums.insert(name.clone(), sum);
    }
}

fn raise(sums: &mut Amounts, others: &Amounts) {
    for (name, amount) in others {
        if sums.get(name).is_none_or(|sum| sum < amount) {
            sums.insert(name.clone(), *amount);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    #[test]
    fn a_pod_asks_for_the_sum_or_for_its_own_amounts() {
        let container =
            |cpu: &str| json!({"name": "c", "resources": {"requests": {"cpu": cpu}, "limits": {"cpu": cpu}}});
        let sidecar = |cpu: &str| {
            let mut container = container(cpu);
            container["restartPolicy"] = json!("Always");
            container
        };
        let rows: [(&str, Value, Value, Value); 6] = [
            (
                "containers run side by side",
                json!({"containers": [container("1"), container("500m")]}),
                json!({"cpu": "1500m"}),
                json!({"cpu": "1500m"}),
            ),
            (
                "an init container needs its share beside earlier sidecars",
                json!({"initContainers": [sidecar("1"), container("2")], "containers": [container("1")]}),
                json!({"cpu": "3"}),
                json!({"cpu": "3"}),
            ),
            (
                "the pod's own amounts replace sums",
                json!({"resources": {"requests": {"cpu": "2", "memory": "1Gi"}}, "containers": [container("1")]}),
                json!({"cpu": "2", "memory": "1Gi"}),
                json!({"cpu": "1"}),
            ),
            (
                "only resources that a pod may have",
                json!({"resources": {"requests": {"example.com/x": "2", "hugepages-2Mi": "4Mi"}}, "containers": []}),
                json!({"hugepages-2Mi": "4Mi"}),
                json!({}),
            ),
            (
                "overhead is asked for, and widens limits",
                json!({"overhead": {"cpu": "250m", "memory": "1Mi"}, "containers": [container("1")]}),
                json!({"cpu": "1250m", "memory": "1Mi"}),
                json!({"cpu": "1250m"}),
            ),
            ("nothing", json!({"containers": [{"name": "c"}]}), json!({}), json!({})),
        ];
        for (what, spec, requests, limits) in rows {
            let pod: Pod = ferrite_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
            let shown = |side| ferrite_json::to_value(total(&pod, side)).unwrap();
            assert_eq!((shown(Side::Requests), shown(Side::Limits)), (requests, limits), "{what}");
        }
    }
}
