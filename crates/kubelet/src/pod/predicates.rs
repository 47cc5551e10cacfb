//! Rules of the scheduler that a node checks again: the pod may not have been bound by the scheduler.

use super::model;
use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, Pod, Taint, Toleration};
use std::collections::{BTreeMap, BTreeSet};

/// Returns true if the pod's selector and required affinity accept the node.
pub(super) fn matches_node(pod: &Pod, name: &str, labels: &BTreeMap<String, String>) -> bool {
    let spec = model::spec(pod);
    if spec.node_selector.iter().flatten().any(|(key, value)| labels.get(key) != Some(value)) {
        return false;
    }
    let required = spec
        .affinity
        .as_ref()
        .and_then(|a| a.node_affinity.as_ref()?.required_during_scheduling_ignored_during_execution.as_ref());
    required.is_none_or(|selector| {
        selector.node_selector_terms.iter().any(|term| term_matches(term, name, labels))
    })
}

/// A term without any requirement matches nothing.
fn term_matches(term: &NodeSelectorTerm, name: &str, labels: &BTreeMap<String, String>) -> bool {
    let (expressions, fields) = (term.match_expressions.as_deref(), term.match_fields.as_deref());
    let (expressions, fields) = (expressions.unwrap_or_default(), fields.unwrap_or_default());
    let label = |key: &str| labels.get(key).map(String::as_str);
    let field = |key: &str| (key == "metadata.name").then_some(name);
    (!expressions.is_empty() || !fields.is_empty())
        && expressions.iter().all(|r| requirement_matches(r, label(&r.key)))
        && fields.iter().all(|r| requirement_matches(r, field(&r.key)))
}

fn requirement_matches(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|value| values.iter().any(|v| v == value));
    let compared = || -> Option<std::cmp::Ordering> {
        let [bound] = values else { return None };
        Some(value?.parse::<i64>().ok()?.cmp(&bound.parse::<i64>().ok()?))
    };
    match requirement.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared() == Some(std::cmp::Ordering::Greater),
        "Lt" => compared() == Some(std::cmp::Ordering::Less),
        _ => false,
    }
}

/// A port of the node: protocol, number, address (empty for all).
type HostPort = (String, i32, String);

fn host_ports(pod: &Pod) -> BTreeSet<HostPort> {
    let mut ports = BTreeSet::new();
    let containers = model::containers(pod);
    let holding = containers.iter().filter(|c| c.kind == model::ContainerKind::Regular || c.is_sidecar());
    for port in holding.flat_map(|c| c.spec.ports.iter().flatten()) {
        let Some(number) = port.host_port.filter(|number| *number > 0) else { continue };
        let address = port.host_ip.clone().filter(|ip| ip != "0.0.0.0" && ip != "::").unwrap_or_default();
        ports.insert((port.protocol.clone().unwrap_or_else(|| "TCP".into()), number, address));
    }
    ports
}

/// Returns true if a pod that is here has a port of the node that `pod` wants.
pub(super) fn ports_conflict(pod: &Pod, others: &[&Pod]) -> bool {
    let wanted = host_ports(pod);
    if wanted.is_empty() {
        return false;
    }
    let taken = others.iter().flat_map(|other| host_ports(other)).collect::<BTreeSet<_>>();
    wanted.iter().any(|(protocol, number, address)| {
        taken.iter().any(|(p, n, a)| {
            p == protocol && n == number && (a == address || a.is_empty() || address.is_empty())
        })
    })
}

/// Returns true if the node repels running pods in a way that the pod does not bear.
pub(super) fn is_repelled(pod: &Pod, taints: &[Taint]) -> bool {
    let tolerations = model::spec(pod).tolerations.as_deref().unwrap_or_default();
    let executing = taints.iter().filter(|taint| taint.effect == "NoExecute");
    executing.into_iter().any(|taint| !tolerations.iter().any(|t| tolerates(t, taint)))
}

/// Returns true if the pod bears this taint.
pub(super) fn tolerates_taint(pod: &Pod, key: &str, effect: &str) -> bool {
    let taint = Taint { key: key.into(), effect: effect.into(), ..Taint::default() };
    model::spec(pod).tolerations.iter().flatten().any(|toleration| tolerates(toleration, &taint))
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let (effect, key) = (text(&toleration.effect), text(&toleration.key));
    if (!effect.is_empty() && effect != taint.effect) || (!key.is_empty() && key != taint.key) {
        return false;
    }
    match text(&toleration.operator).as_str() {
        "Exists" => true,
        // An empty key stands for every key, and that with Exists only.
        "" | "Equal" => !key.is_empty() && text(&toleration.value) == text(&taint.value),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn pod(spec: Value) -> Pod {
        ferrite_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    fn with_affinity(terms: Value) -> Pod {
        pod(json!({"containers": [], "affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}}))
    }

    #[test]
    fn affinity() {
        let labels = BTreeMap::from([("disk".into(), "ssd".into()), ("cores".into(), "8".into())]);
        let expression = |key: &str, operator: &str, values: Value| json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]);
        for (what, terms, expected) in [
            ("in", expression("disk", "In", json!(["hdd", "ssd"])), true),
            ("not in the list", expression("disk", "In", json!(["hdd"])), false),
            ("not in", expression("disk", "NotIn", json!(["hdd"])), true),
            ("absent is not in", expression("zone", "NotIn", json!(["a"])), true),
            ("exists", expression("disk", "Exists", json!([])), true),
            ("does not exist", expression("disk", "DoesNotExist", json!([])), false),
            ("greater", expression("cores", "Gt", json!(["4"])), true),
            ("not less", expression("cores", "Lt", json!(["8"])), false),
            ("no number", expression("disk", "Gt", json!(["4"])), false),
            ("no terms", json!([]), false),
            ("an empty term", json!([{}]), false),
            (
                "one of two",
                json!([{"matchExpressions": [{"key": "x", "operator": "Exists"}]},
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}]),
                true,
            ),
            (
                "another name",
                json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}]),
                false,
            ),
        ] {
            assert_eq!(matches_node(&with_affinity(terms), "n", &labels), expected, "{what}");
        }
        assert!(!matches_node(
            &pod(json!({"containers": [], "nodeSelector": {"disk": "hdd"}})),
            "n",
            &labels
        ));
        assert!(matches_node(&pod(json!({"containers": []})), "n", &BTreeMap::new()));
    }

    #[test]
    fn ports() {
        let with = |port: Value| pod(json!({"containers": [{"name": "c", "ports": [port]}]}));
        let plain = |port: i32| with(json!({"containerPort": 1, "hostPort": port}));
        let at = |ip: &str| with(json!({"containerPort": 1, "hostPort": 80, "hostIP": ip}));
        for (what, wanted, other, expected) in [
            ("same", plain(80), plain(80), true),
            ("another", plain(80), plain(81), false),
            ("none", with(json!({"containerPort": 80})), plain(80), false),
            (
                "another protocol",
                plain(80),
                with(json!({"containerPort": 1, "hostPort": 80, "protocol": "UDP"})),
                false,
            ),
            ("another address", at("192.0.2.1"), at("192.0.2.2"), false),
            ("same address", at("192.0.2.1"), at("192.0.2.1"), true),
            ("all addresses", at("192.0.2.1"), plain(80), true),
            ("all, written out", at("0.0.0.0"), at("192.0.2.1"), true),
        ] {
            assert_eq!(ports_conflict(&wanted, &[&other]), expected, "{what}");
        }
    }

    #[test]
    fn taints() {
        let taint = |effect: &str| Taint {
            key: "k".into(),
            value: Some("v".into()),
            effect: effect.into(),
            ..Taint::default()
        };
        let tolerating = |toleration: Value| pod(json!({"containers": [], "tolerations": [toleration]}));
        for (what, pod, effect, expected) in [
            ("not tolerated", pod(json!({"containers": []})), "NoExecute", true),
            ("only for the scheduler", pod(json!({"containers": []})), "NoSchedule", false),
            (
                "equal",
                tolerating(json!({"key": "k", "value": "v", "effect": "NoExecute"})),
                "NoExecute",
                false,
            ),
            ("another value", tolerating(json!({"key": "k", "value": "w"})), "NoExecute", true),
            ("exists", tolerating(json!({"key": "k", "operator": "Exists"})), "NoExecute", false),
            ("everything", tolerating(json!({"operator": "Exists"})), "NoExecute", false),
            (
                "another effect",
                tolerating(json!({"operator": "Exists", "effect": "NoSchedule"})),
                "NoExecute",
                true,
            ),
            ("no key", tolerating(json!({"value": "v"})), "NoExecute", true),
        ] {
            assert_eq!(is_repelled(&pod, &[taint(effect)]), expected, "{what}");
        }
    }
}
