//! Decides if this node takes a pod.
//!
//! The node refuses a pod that it cannot support, with upstream's reason. No setting of a pod is dropped:
//! `fields.rs` has a verdict for every field.

use super::model;
use super::predicates;
use super::preemption::{Resident, victims};
use super::status::Verdict;
use crate::container::resources::{PodResources, pod_resources, requests};
use crate::container::sysctl::{KernelVersion, UnsafeSysctls};
use crate::container::{apparmor, sysctl};
use crate::eviction::{Pressure, Pressures};
use crate::quantity;
use k8s_openapi::api::core::v1::{Pod, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// The node's resources for pods.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    pub cpu_milli: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
    pub max_pods: i64,
}

/// The features of the node's kernel for pods.
#[derive(Debug, Clone)]
pub(crate) struct Abilities {
    pub apparmor: bool,
    pub kernel: KernelVersion,
    /// Settings of the kernel that an administrator lets pods have.
    pub unsafe_sysctls: UnsafeSysctls,
}

/// The node as pods see it when they arrive.
#[derive(Debug, Clone)]
pub(crate) struct NodeState {
    pub name: String,
    pub taints: Vec<Taint>,
    pub labels: BTreeMap<String, String>,
    pub allocatable: BTreeMap<String, Quantity>,
    pub abilities: Abilities,
    /// True if the runtime supports leaving out the image's groups.
    pub supplemental_groups_policy: bool,
}

/// A resource of which the node has too little left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Insufficient {
    pub resource: String,
    pub requested: i64,
    pub used: i64,
    pub capacity: i64,
}

impl Insufficient {
    /// The amount that would have to be freed.
    pub(crate) fn missing(&self) -> i64 {
        self.requested.saturating_sub(self.capacity.saturating_sub(self.used))
    }

    fn verdict(&self) -> Verdict {
        let Self { resource, requested, used, capacity } = self;
        refusal(
            &format!("OutOf{resource}"),
            format!(
                "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
            ),
        )
    }
}

/// The decision about a new pod.
#[derive(Debug, PartialEq)]
pub(crate) enum Admission<'a> {
    Admitted,
    Refused(Verdict),
    /// It is critical, and these pods must end first.
    After(Vec<&'a Pod>),
}

/// Decides about a pod beside `others`, the pods that run here already.
pub(crate) fn admit<'a>(
    pod: &Resident<'_>,
    others: &[Resident<'a>],
    offer: &Offer,
    node: &NodeState,
) -> Admission<'a> {
    match check(pod, others, offer, node) {
        Err(verdict) => Admission::Refused(verdict),
        Ok(insufficient) if insufficient.is_empty() => {
            match apparmor::check(pod.pod, node.abilities.apparmor) {
                Ok(()) => Admission::Admitted,
                Err(e) => Admission::Refused(refusal("AppArmor", format!("Cannot enforce AppArmor: {e}"))),
            }
        }
        // As upstream: a critical pod is never refused for want of resources that others could give up.
        Ok(insufficient) if pod.is_critical() => match victims(pod, others, &insufficient) {
            Ok(victims) => Admission::After(victims),
            Err(e) => Admission::Refused(refusal(
                "UnexpectedAdmissionError",
                format!("Unexpected error while attempting to recover from admission failure: {e}"),
            )),
        },
        Ok(insufficient) => Admission::Refused(insufficient[0].verdict()),
    }
}

/// While the node is short of something it takes no pod that would make that worse, as upstream.
pub(crate) fn check_pressure(pod: &Resident<'_>, pressures: &Pressures) -> Result<(), Verdict> {
    if pressures.is_empty() || pod.is_critical() {
        return Ok(());
    }
    if pressures.iter().eq([&Pressure::Memory]) {
        let bears = predicates::tolerates_taint(pod.pod, "node.kubernetes.io/memory-pressure", "NoSchedule");
        if model::qos_class(pod.pod) != model::QosClass::BestEffort || bears {
            return Ok(());
        }
    }
    let names: Vec<&str> = pressures.iter().map(|pressure| pressure.name()).collect();
    Err(refusal("Evicted", format!("The node had condition: [{}]. ", names.join(" "))))
}

/// Returns the resources of which the node has too little; other reasons are final.
fn check(
    pod: &Resident<'_>,
    others: &[Resident<'_>],
    offer: &Offer,
    node: &NodeState,
) -> Result<Vec<Insufficient>, Verdict> {
    let local = pod.local;
    let (pod, critical) = (pod.pod, pod.is_critical());
    sysctl::check(pod, node.abilities.kernel, &node.abilities.unsafe_sysctls)
        .map_err(|e| refusal("SysctlForbidden", e.to_string()))?;
    admit_features(pod, node)?;
    let others: Vec<&Pod> = others.iter().map(|other| other.pod).collect();
    let insufficient = missing_resources(pod, &others, offer, node);
    // As upstream, the first reason is reported, and resources come first unless room can be made.
    if let Some(first) = insufficient.first().filter(|_| !critical) {
        return Err(first.verdict());
    }
    let failed = |name: &str, why: &str| Err(refusal(name, format!("Predicate {name} failed: {why}")));
    if !predicates::matches_node(pod, &node.name, &node.labels) {
        return failed("NodeAffinity", "node(s) didn't match Pod's node affinity/selector");
    }
    if predicates::ports_conflict(pod, &others) {
        return failed("NodePorts", "node(s) didn't have free ports for the requested pod ports");
    }
    if !local && predicates::is_repelled(pod, &node.taints) {
        return failed("TaintToleration", "node(s) had taints that the pod didn't tolerate");
    }
    Ok(insufficient)
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
    Ok(())
}

/// Refuses resources that do not fit beside `others`.
pub(crate) fn admit_resources(
    pod: &Pod,
    others: &[&Pod],
    offer: &Offer,
    node: &NodeState,
) -> Result<(), Verdict> {
    missing_resources(pod, others, offer, node).first().map_or(Ok(()), |missing| Err(missing.verdict()))
}

fn missing_resources(pod: &Pod, others: &[&Pod], offer: &Offer, node: &NodeState) -> Vec<Insufficient> {
    let mut used = Used::default();
    for other in others {
        used.add(&pod_resources(other));
    }
    let mut missing = Vec::new();
    let mut compare = |resource: &str, requested: i64, used: i64, capacity: i64| {
        if requested > 0 && requested > capacity.saturating_sub(used) {
            missing.push(Insufficient { resource: resource.to_owned(), requested, used, capacity });
        }
    };
    compare("pods", 1, i64::try_from(others.len()).unwrap_or(i64::MAX), offer.max_pods);
    let wanted = pod_resources(pod);
    compare("cpu", wanted.cpu_request, used.cpu, offer.cpu_milli);
    compare("memory", wanted.memory_request, used.memory, offer.memory);
    compare("ephemeral-storage", wanted.ephemeral_request, used.ephemeral, offer.ephemeral_storage);
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
        compare(&name, requested, others.iter().map(taken).fold(0i64, i64::saturating_add), capacity);
    }
    missing
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
    Verdict { reason: reason.into(), message: message.into(), disruption: None, grace: None }
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
            name: "node".into(),
            taints: Vec::new(),
            labels: BTreeMap::from([("disk".to_string(), "ssd".to_string())]),
            allocatable: allocatable.iter().map(|(k, v)| (k.to_string(), Quantity(v.to_string()))).collect(),
            abilities: Abilities {
                apparmor: able,
                kernel: if able { (6, 1) } else { (4, 4) },
                unsafe_sysctls: UnsafeSysctls::default(),
            },
            supplemental_groups_policy: able,
        }
    }

    /// The verdict about a pod of the API beside others.
    fn admit(candidate: &Pod, others: &[Pod], offer: &Offer, node: &NodeState) -> Option<Verdict> {
        let resident = |pod| Resident { pod, local: false };
        let others: Vec<Resident<'_>> = others.iter().map(resident).collect();
        match super::admit(&resident(candidate), &others, offer, node) {
            Admission::Admitted => None,
            Admission::Refused(verdict) => Some(verdict),
            Admission::After(victims) => {
                let names: Vec<_> = victims.iter().filter_map(|p| p.metadata.name.clone()).collect();
                Some(refusal("after", names.join(" ")))
            }
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
                None,
                None,
            ),
            ("merged groups", with_security(json!({"supplementalGroupsPolicy": "Merge"})), None, None),
            ("huge pages", asking("hugepages-2Mi", "4Mi"), None, Some("OutOfhugepages-2Mi")),
            ("devices the node has", asking("example.org/gpu", "2"), None, None),
            ("devices nobody has", asking("example.org/none", "2"), None, None),
            ("too many devices", asking("example.org/gpu", "5"), Some("OutOfexample.org/gpu"), None),
        ] {
            let able = node_with(&[("hugepages-2Mi", "4Mi"), ("example.org/gpu", "4")], true);
            for (node, expected) in [(able, on_able), (node_with(&[], false), on_unable)] {
                let got = admit(&candidate, &[], &offer, &node);
                assert_eq!(got.as_ref().map(|v| v.reason.as_str()), expected, "{what}");
            }
        }
        let message = admit(
            &with_security(json!({"appArmorProfile": {"type": "RuntimeDefault"}})),
            &[],
            &offer,
            &node_with(&[], false),
        );
        assert_eq!(message.unwrap().message, "Cannot enforce AppArmor: AppArmor is not enabled on the host");
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
            let got = admit(&candidate, &others, &offer, &labels);
            assert_eq!(got.as_ref().map(|v| v.reason.as_str()), expected, "{what}");
        }
        let message = admit(&cpu("600m"), &[cpu("500m")], &offer, &labels).unwrap().message;
        assert_eq!(
            message,
            "Node didn't have enough resource: cpu, requested: 600, used: 500, capacity: 1000"
        );
    }

    #[test]
    fn reasons_are_upstreams_and_critical_pods_get_room() {
        let offer = Offer { cpu_milli: 1000, memory: 1 << 30, ephemeral_storage: 1 << 30, max_pods: 9 };
        let mut tainted = node_with(&[], true);
        tainted.taints = vec![Taint { key: "k".into(), effect: "NoExecute".into(), ..Taint::default() }];
        let plain = node_with(&[], true);
        let cpu = |amount: &str, priority: i32| {
            pod(
                json!({"priority": priority, "containers": [{"name": "c", "resources": {"requests": {"cpu": amount}}}]}),
            )
        };
        let port =
            pod(json!({"containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 80}]}]}));
        let critical = 2_000_000_000;
        let picky = |priority: i32| {
            let mut pod = cpu("1", priority);
            pod.spec.as_mut().unwrap().node_selector = Some([("disk".to_owned(), "hdd".to_owned())].into());
            pod
        };
        for (what, candidate, others, node, expected) in [
            ("port taken", port.clone(), vec![port.clone()], &plain, Some("NodePorts")),
            ("taint", cpu("1", 0), vec![], &tainted, Some("TaintToleration")),
            ("resources are told first", picky(0), vec![cpu("500m", 0)], &plain, Some("OutOfcpu")),
            ("room does not help", picky(critical), vec![cpu("500m", 0)], &plain, Some("NodeAffinity")),
            ("room is made", cpu("600m", critical), vec![cpu("500m", 0)], &plain, Some("after")),
            (
                "no room can be made",
                cpu("600m", critical),
                vec![cpu("500m", critical)],
                &plain,
                Some("UnexpectedAdmissionError"),
            ),
            ("high, not critical", cpu("600m", critical - 1), vec![cpu("500m", 0)], &plain, Some("OutOfcpu")),
        ] {
            let got = admit(&candidate, &others, &offer, node);
            assert_eq!(got.as_ref().map(|v| v.reason.as_str()), expected, "{what}");
        }
        let (local, victim) = (cpu("600m", 0), cpu("500m", 0));
        let others = [Resident { pod: &victim, local: false }];
        let got = super::admit(&Resident { pod: &local, local: true }, &others, &offer, &tainted);
        assert_eq!(got, Admission::After(vec![&victim]), "static pods are critical and bear every taint");
    }

    #[test]
    fn a_node_under_pressure_takes_fewer_pods() {
        let best = pod(json!({"containers": [{"name": "c"}]}));
        let burstable = pod(json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]}));
        let bearing = pod(json!({"containers": [{"name": "c"}], "tolerations": [
            {"key": "node.kubernetes.io/memory-pressure", "operator": "Exists", "effect": "NoSchedule"}]}));
        let critical = pod(json!({"priority": 2_000_000_000, "containers": [{"name": "c"}]}));
        use Pressure::{Disk, Memory, Pid};
        for (what, candidate, pressures, expected) in [
            ("none", &best, vec![], true),
            ("memory, asks for nothing", &best, vec![Memory], false),
            ("memory, asks for something", &burstable, vec![Memory], true),
            ("memory, bears it", &bearing, vec![Memory], true),
            ("disk", &burstable, vec![Disk], false),
            ("memory and disk", &burstable, vec![Memory, Disk], false),
            ("processes", &bearing, vec![Pid], false),
            ("critical", &critical, vec![Memory, Disk, Pid], true),
        ] {
            let resident = Resident { pod: candidate, local: false };
            let got = check_pressure(&resident, &pressures.into_iter().collect());
            assert_eq!(got.is_ok(), expected, "{what}");
        }
        let refused = check_pressure(&Resident { pod: &best, local: false }, &[Memory].into());
        let message = "The node had condition: [MemoryPressure]. ";
        assert_eq!(refused.unwrap_err().message, message);
    }
}
