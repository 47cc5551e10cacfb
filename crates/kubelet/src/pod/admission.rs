//! Whether this node takes a pod at all.
//!
//! What the node cannot do is refused with upstream's reason. Nothing a pod asks for is dropped: `fields.rs` has a
//! verdict for every field.

use super::model;
use super::status::Verdict;
use crate::container::resources::{PodResources, pod_resources, requests};
use crate::container::sysctl::KernelVersion;
use crate::container::{apparmor, sysctl};
use crate::quantity;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// What the node offers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    pub cpu_milli: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
    pub max_pods: i64,
}

/// What the node's kernel can do for pods.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Abilities {
    pub apparmor: bool,
    pub kernel: KernelVersion,
}

/// The node as pods see it when they arrive.
#[derive(Debug, Clone)]
pub(crate) struct NodeState {
    pub labels: BTreeMap<String, String>,
    pub allocatable: BTreeMap<String, Quantity>,
    pub abilities: Abilities,
    /// Whether the runtime can leave the image's groups out.
    pub supplemental_groups_policy: bool,
}

/// Refuses a pod that does not fit beside `others`, the pods that run here already.
pub(crate) fn admit<'a>(
    pod: &Pod,
    others: impl Iterator<Item = &'a Pod>,
    offer: &Offer,
    node: &NodeState,
) -> Result<(), Verdict> {
    sysctl::check(pod, node.abilities.kernel).map_err(|e| refusal("SysctlForbidden", e.to_string()))?;
    admit_features(pod, node)?;
    let spec = model::spec(pod);
    let mismatch =
        spec.node_selector.iter().flatten().any(|(key, value)| node.labels.get(key) != Some(value));
    if mismatch {
        return Err(refusal(
            "NodeAffinity",
            "Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ));
    }
    let others: Vec<&Pod> = others.collect();
    admit_resources(pod, &others, offer, node)?;
    admit_ports(pod, &others)?;
    apparmor::check(pod, node.abilities.apparmor)
        .map_err(|e| refusal("AppArmor", format!("Cannot enforce AppArmor: {e}")))
}

fn admit_features(pod: &Pod, node: &NodeState) -> Result<(), Verdict> {
    const OS: &str = "kubernetes.io/os";
    let labels = pod.metadata.labels.as_ref();
    if labels.and_then(|l| l.get(OS)).is_some_and(|os| os != "linux") {
        return Err(refusal(
            "PodOSSelectorNodeLabelDoesNotMatch",
            "Failed to admit pod as the `kubernetes.io/os` label doesn't match node label",
        ));
    }
    let spec = model::spec(pod);
    if spec.os.as_ref().is_some_and(|os| os.name != "linux") {
        return Err(refusal(
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS",
        ));
    }
    let policy = spec.security_context.as_ref().and_then(|c| c.supplemental_groups_policy.as_deref());
    if policy == Some("Strict") && !node.supplemental_groups_policy {
        return Err(refusal(
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        ));
    }
    let containers = model::containers(pod);
    let mut rules = containers.iter().flat_map(|c| c.spec.restart_policy_rules.iter().flatten());
    if rules.any(|rule| rule.action == "RestartAllContainers") {
        return Err(refusal(
            "PodFeatureUnsupported",
            "Pod requires node features that are not available: RestartAllContainersOnContainerExits",
        ));
    }
    Ok(())
}

/// Refuses what does not fit beside `others`.
pub(crate) fn admit_resources(
    pod: &Pod,
    others: &[&Pod],
    offer: &Offer,
    node: &NodeState,
) -> Result<(), Verdict> {
    let mut used = Used::default();
    for other in others {
        used.add(&pod_resources(other));
    }
    let count = i64::try_from(others.len()).unwrap_or(i64::MAX);
    if count.saturating_add(1) > offer.max_pods {
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
    // Huge pages, and devices the Node counts. As upstream, an extended resource no Node counts is not this node's
    // matter: something in the cluster keeps account of it.
    let is_counted = |name: &str| !matches!(name, "cpu" | "memory" | "ephemeral-storage" | "pods");
    for (name, requested) in requests(pod).into_iter().filter(|(name, _)| is_counted(name)) {
        let capacity = match node.allocatable.get(&name) {
            Some(amount) => quantity::value(amount).unwrap_or(0),
            None if name.starts_with("hugepages-") => 0,
            None => continue,
        };
        let taken = |p: &&Pod| requests(p).get(&name).copied().unwrap_or(0);
        let used = others.iter().map(taken).fold(0i64, i64::saturating_add);
        if requested > 0 && requested > capacity.saturating_sub(used) {
            return Err(out_of(&name, requested, used, capacity));
        }
    }
    Ok(())
}

/// A port of the node that a pod wants: protocol, address (`None` is all of them), number.
type WantedPort = (String, Option<String>, i32);

fn host_ports(pod: &Pod) -> Vec<WantedPort> {
    let containers = model::containers(pod);
    let ports = containers.iter().flat_map(|container| container.spec.ports.iter().flatten());
    let wanted = ports.filter_map(|port| {
        let number = port.host_port.filter(|number| *number > 0)?;
        let every = |ip: &&String| ip.is_empty() || *ip == "0.0.0.0";
        let address = port.host_ip.as_ref().filter(|ip| !every(ip)).cloned();
        Some((port.protocol.clone().unwrap_or_else(|| "TCP".into()), address, number))
    });
    wanted.collect()
}

/// Two pods cannot have one port of the node, unless its address or protocol differs.
fn admit_ports(pod: &Pod, others: &[&Pod]) -> Result<(), Verdict> {
    let wanted = host_ports(pod);
    if wanted.is_empty() {
        return Ok(());
    }
    let meets = |(protocol, address, number): &WantedPort, taken: &WantedPort| {
        let same_address = address.is_none() || taken.1.is_none() || *address == taken.1;
        *protocol == taken.0 && *number == taken.2 && same_address
    };
    let mut taken = others.iter().flat_map(|other| host_ports(other));
    if taken.any(|taken| wanted.iter().any(|port| meets(port, &taken))) {
        return Err(refusal(
            "NodePorts",
            "Pod was rejected: Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports",
        ));
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

    fn node_with(allocatable: &[(&str, &str)], able: bool) -> NodeState {
        NodeState {
            labels: BTreeMap::from([("disk".to_string(), "ssd".to_string())]),
            allocatable: allocatable.iter().map(|(k, v)| (k.to_string(), Quantity(v.to_string()))).collect(),
            abilities: Abilities { apparmor: able, kernel: if able { (6, 1) } else { (4, 4) } },
            supplemental_groups_policy: able,
        }
    }

    /// One row for each verdict of `fields.rs` that refuses a pod as it arrives.
    #[test]
    fn what_the_node_cannot_do_is_refused() {
        let offer = Offer { cpu_milli: 1000, memory: 1 << 30, ephemeral_storage: 1 << 30, max_pods: 9 };
        let with_security =
            |context: Value| pod(json!({"containers": [{"name": "c"}], "securityContext": context}));
        let asking = |name: &str, amount: &str| {
            pod(
                json!({"containers": [{"name": "c", "resources": {"limits": {name: amount}, "requests": {name: amount}}}]}),
            )
        };
        let mut labelled = pod(json!({"containers": []}));
        labelled.metadata.labels = Some([("kubernetes.io/os".to_string(), "windows".to_string())].into());
        for (what, candidate, on_able, on_unable) in [
            (
                "os",
                pod(json!({"os": {"name": "windows"}, "containers": []})),
                Some("PodOSNotSupported"),
                Some("PodOSNotSupported"),
            ),
            (
                "os label",
                labelled,
                Some("PodOSSelectorNodeLabelDoesNotMatch"),
                Some("PodOSSelectorNodeLabelDoesNotMatch"),
            ),
            (
                "safe sysctl",
                with_security(json!({"sysctls": [{"name": "net.ipv4.tcp_rmem", "value": "1"}]})),
                None,
                Some("SysctlForbidden"),
            ),
            (
                "unsafe sysctl",
                with_security(json!({"sysctls": [{"name": "kernel.msgmax", "value": "1"}]})),
                Some("SysctlForbidden"),
                Some("SysctlForbidden"),
            ),
            (
                "AppArmor of the pod",
                with_security(json!({"appArmorProfile": {"type": "RuntimeDefault"}})),
                None,
                Some("AppArmor"),
            ),
            (
                "AppArmor of a container",
                pod(json!({"containers": [{"name": "c", "securityContext": {
                "appArmorProfile": {"type": "Localhost", "localhostProfile": "x"}}}]})),
                None,
                Some("AppArmor"),
            ),
            (
                "groups",
                with_security(json!({"supplementalGroupsPolicy": "Strict"})),
                None,
                Some("SupplementalGroupsPolicyNotSupported"),
            ),
            (
                "restart of all",
                pod(json!({"containers": [{"name": "c", "restartPolicyRules": [
                {"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [1]}}]}]})),
                Some("PodFeatureUnsupported"),
                Some("PodFeatureUnsupported"),
            ),
            ("merged groups", with_security(json!({"supplementalGroupsPolicy": "Merge"})), None, None),
            ("huge pages", asking("hugepages-2Mi", "4Mi"), None, Some("OutOfhugepages-2Mi")),
            ("devices the node has", asking("example.org/gpu", "2"), None, None),
            ("devices nobody has", asking("example.org/none", "2"), None, None),
            ("too many devices", asking("example.org/gpu", "5"), Some("OutOfexample.org/gpu"), None),
        ] {
            let able = node_with(&[("hugepages-2Mi", "4Mi"), ("example.org/gpu", "4")], true);
            for (node, expected) in [(able, on_able), (node_with(&[], false), on_unable)] {
                let got = admit(&candidate, std::iter::empty(), &offer, &node).err();
                assert_eq!(got.as_ref().map(|v| v.reason.as_str()), expected, "{what}");
            }
        }
        let message = admit(
            &with_security(json!({"appArmorProfile": {"type": "RuntimeDefault"}})),
            std::iter::empty(),
            &offer,
            &node_with(&[], false),
        );
        assert_eq!(
            message.unwrap_err().message,
            "Cannot enforce AppArmor: AppArmor is not enabled on the host"
        );
    }

    #[test]
    fn pods_that_do_not_fit_are_refused() {
        let offer = Offer { cpu_milli: 1000, memory: 1 << 30, ephemeral_storage: 1 << 30, max_pods: 2 };
        let labels = node_with(&[], true);
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

    #[test]
    fn pods_with_one_host_port_are_kept_apart() {
        let offer = Offer { cpu_milli: 1000, memory: 1 << 30, ephemeral_storage: 1 << 30, max_pods: 10 };
        let with = |port: Value| pod(json!({"containers": [{"name": "c", "ports": [port]}]}));
        let taken = with(json!({"containerPort": 80, "hostPort": 8080, "hostIP": "192.0.2.1"}));
        for (what, port, refused) in [
            ("the same", json!({"containerPort": 1, "hostPort": 8080, "hostIP": "192.0.2.1"}), true),
            ("all addresses", json!({"containerPort": 1, "hostPort": 8080}), true),
            (
                "all addresses, named",
                json!({"containerPort": 1, "hostPort": 8080, "hostIP": "0.0.0.0"}),
                true,
            ),
            ("another address", json!({"containerPort": 1, "hostPort": 8080, "hostIP": "127.0.0.1"}), false),
            ("another protocol", json!({"containerPort": 1, "hostPort": 8080, "protocol": "UDP"}), false),
            ("another port", json!({"containerPort": 80, "hostPort": 8081}), false),
            ("no host port", json!({"containerPort": 8080}), false),
        ] {
            let got = admit(&with(port), [taken.clone()].iter(), &offer, &node_with(&[], true)).err();
            assert_eq!(got.map(|v| v.reason), refused.then(|| "NodePorts".to_owned()), "{what}");
        }
    }
}
