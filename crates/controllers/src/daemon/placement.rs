//! Which nodes a DaemonSet runs on, and the pod that runs on one of them.

use std::borrow::Cow;

use ferrite_client::{matches_node, tolerates};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec, Taint, Toleration,
};

use super::{GENERATION_LABEL, template_generation};
use crate::history::HASH;
use crate::pod_control::pod_from_template;
use crate::pods::node_name;

const NO_SCHEDULE: &str = "NoSchedule";
const NO_EXECUTE: &str = "NoExecute";

/// The taints that every daemon pod tolerates: daemons run on nodes with problems, and are not evicted from them.
const TOLERATED: &[(&str, &str)] = &[
    ("node.kubernetes.io/not-ready", NO_EXECUTE),
    ("node.kubernetes.io/unreachable", NO_EXECUTE),
    ("node.kubernetes.io/disk-pressure", NO_SCHEDULE),
    ("node.kubernetes.io/memory-pressure", NO_SCHEDULE),
    ("node.kubernetes.io/pid-pressure", NO_SCHEDULE),
    ("node.kubernetes.io/unschedulable", NO_SCHEDULE),
];
/// The taint that daemon pods of the node's network tolerate too: such a pod may set up the network.
const TOLERATED_ON_HOST_NETWORK: (&str, &str) = ("node.kubernetes.io/network-unavailable", NO_SCHEDULE);

/// The decision about a DaemonSet's pod on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// A pod should run there.
    Run,
    /// No new pod goes there, but one that runs may stay.
    Stay,
    /// No pod should be there.
    Leave,
}

/// The conditions that a DaemonSet places on nodes.
pub(super) struct Eligibility<'a> {
    spec: Option<&'a PodSpec>,
    tolerations: Vec<Cow<'a, Toleration>>,
}

impl<'a> Eligibility<'a> {
    pub(super) fn new(set: &'a DaemonSet) -> Self {
        let spec = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let own = spec.and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default();
        let host_network = spec.and_then(|spec| spec.host_network).unwrap_or(false);
        let added = daemon_tolerations(host_network).map(Cow::Owned);
        Self { spec, tolerations: own.iter().map(Cow::Borrowed).chain(added).collect() }
    }

    /// The verdict for `node`.
    pub(super) fn of(&self, node: &Node) -> Placement {
        let Some(spec) = self.spec else { return Placement::Leave };
        let wanted = spec.node_name.as_deref().filter(|name| !name.is_empty());
        if wanted.is_some_and(|name| node.metadata.name.as_deref() != Some(name)) {
            return Placement::Leave;
        }
        let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
        if !matches_node(spec.node_selector.as_ref(), required, node) {
            return Placement::Leave;
        }
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
        let keeps_off =
            |effect: &str| taints.iter().any(|taint| taint.effect == effect && !self.tolerates(taint));
        if keeps_off(NO_EXECUTE) {
            Placement::Leave
        } else if keeps_off(NO_SCHEDULE) {
            Placement::Stay
        } else {
            Placement::Run
        }
    }

    fn tolerates(&self, taint: &Taint) -> bool {
        self.tolerations.iter().any(|toleration| tolerates(toleration, taint))
    }
}

fn daemon_tolerations(host_network: bool) -> impl Iterator<Item = Toleration> {
    let network = host_network.then_some(&TOLERATED_ON_HOST_NETWORK);
    TOLERATED.iter().chain(network).map(|(key, effect)| Toleration {
        key: Some((*key).to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some((*effect).to_owned()),
        ..Toleration::default()
    })
}

/// The pods of one revision of a DaemonSet, which differ only in their node.
pub(super) struct PodMaker {
    pod: Pod,
}

impl PodMaker {
    pub(super) fn new(set: &DaemonSet, hash: &str) -> Self {
        let mut template = set.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
        let labels = template.metadata.get_or_insert_default().labels.get_or_insert_default();
        if let Some(generation) = template_generation(set) {
            labels.insert(GENERATION_LABEL.to_owned(), generation);
        }
        labels.insert(HASH.to_owned(), hash.to_owned());
        let spec = template.spec.get_or_insert_default();
        let host_network = spec.host_network.unwrap_or(false);
        let tolerations = spec.tolerations.get_or_insert_default();
        for added in daemon_tolerations(host_network) {
            let same = |held: &Toleration| {
                held.key == added.key
                    && held.operator == added.operator
                    && held.effect == added.effect
                    && held.value.as_deref().unwrap_or_default().is_empty()
            };
            // The daemon's toleration has no time limit; it takes the place of one that may have.
            match tolerations.iter_mut().find(|held| same(held)) {
                Some(held) => *held = added,
                None => tolerations.push(added),
            }
        }
        Self { pod: pod_from_template(set, template) }
    }

    /// The pod for `node`. Affinity pins it there and the scheduler binds it: so it waits for resources and obeys
    /// priorities as any pod does.
    pub(super) fn pod_for(&self, node: &str) -> Pod {
        let mut pod = self.pod.clone();
        let affinity = pod.spec.get_or_insert_default().affinity.get_or_insert_default();
        let affinity = affinity.node_affinity.get_or_insert_default();
        affinity.required_during_scheduling_ignored_during_execution = Some(NodeSelector {
            node_selector_terms: vec![NodeSelectorTerm {
                match_fields: Some(vec![NodeSelectorRequirement {
                    key: "metadata.name".to_owned(),
                    operator: "In".to_owned(),
                    values: Some(vec![node.to_owned()]),
                }]),
                match_expressions: None,
            }],
        });
        pod
    }
}

/// The node that the pod is on, or that it is pinned to.
pub(super) fn target_node(pod: &Pod) -> Option<&str> {
    if let Some(name) = node_name(pod) {
        return Some(name);
    }
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()?;
    let terms = &affinity.required_during_scheduling_ignored_during_execution.as_ref()?.node_selector_terms;
    let mut fields = terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    let field = fields.find(|field| field.key == "metadata.name" && field.operator == "In")?;
    match field.values.as_deref()? {
        [only] => Some(only),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn set(spec: Value) -> DaemonSet {
        ferrite_json::from_value(json!({
            "metadata": {"name": "d", "namespace": "ns", "uid": "u",
                         "annotations": {"deprecated.daemonset.template.generation": "3"}},
            "spec": {"selector": {}, "template": {"metadata": {"labels": {"app": "d"}}, "spec": spec}},
        }))
        .unwrap()
    }

    fn node(labels: Value, taints: Value) -> Node {
        ferrite_json::from_value(
            json!({"metadata": {"name": "n1", "labels": labels}, "spec": {"taints": taints}}),
        )
        .unwrap()
    }

    #[test]
    fn eligibility() {
        use Placement::{Leave, Run, Stay};
        let taint = |key: &str, effect: &str| json!([{"key": key, "effect": effect, "value": "v"}]);
        let name_affinity = |name: &str| {
            json!({"containers": [], "affinity": {"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}]}}}})
        };
        let plain = || json!({"containers": []});
        for (what, spec, labels, taints, expected) in [
            ("plain", plain(), json!({}), json!([]), Run),
            ("named node", json!({"containers": [], "nodeName": "n1"}), json!({}), json!([]), Run),
            ("other node named", json!({"containers": [], "nodeName": "n2"}), json!({}), json!([]), Leave),
            (
                "selector",
                json!({"containers": [], "nodeSelector": {"a": "b"}}),
                json!({"a": "b"}),
                json!([]),
                Run,
            ),
            (
                "no such label",
                json!({"containers": [], "nodeSelector": {"a": "b"}}),
                json!({}),
                json!([]),
                Leave,
            ),
            ("affinity", name_affinity("n1"), json!({}), json!([]), Run),
            ("affinity to another", name_affinity("n2"), json!({}), json!([]), Leave),
            (
                "unschedulable",
                plain(),
                json!({}),
                taint("node.kubernetes.io/unschedulable", "NoSchedule"),
                Run,
            ),
            ("not ready", plain(), json!({}), taint("node.kubernetes.io/not-ready", "NoExecute"), Run),
            ("disk full", plain(), json!({}), taint("node.kubernetes.io/disk-pressure", "NoSchedule"), Run),
            (
                "no network",
                plain(),
                json!({}),
                taint("node.kubernetes.io/network-unavailable", "NoSchedule"),
                Stay,
            ),
            (
                "no network, and needs none",
                json!({"containers": [], "hostNetwork": true}),
                json!({}),
                taint("node.kubernetes.io/network-unavailable", "NoSchedule"),
                Run,
            ),
            ("own taint", plain(), json!({}), taint("k", "NoSchedule"), Stay),
            ("own taint that evicts", plain(), json!({}), taint("k", "NoExecute"), Leave),
            ("soft taint", plain(), json!({}), taint("k", "PreferNoSchedule"), Run),
            (
                "tolerated taint",
                json!({"containers": [], "tolerations": [{"key": "k", "operator": "Exists"}]}),
                json!({}),
                taint("k", "NoExecute"),
                Run,
            ),
        ] {
            assert_eq!(Eligibility::new(&set(spec)).of(&node(labels, taints)), expected, "{what}");
        }
    }

    #[test]
    fn a_pod_is_pinned_labelled_and_tolerant() {
        let set = set(json!({
            "containers": [],
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists",
                             "effect": "NoExecute", "tolerationSeconds": 30}],
            "affinity": {"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "a", "operator": "Exists"}]}]},
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "preference": {"matchExpressions": [{"key": "b", "operator": "Exists"}]}}]}},
        }));
        let pod = PodMaker::new(&set, "abc").pod_for("n1");
        let labels = pod.metadata.labels.as_ref().unwrap();
        assert_eq!(
            ferrite_json::to_value(labels).unwrap(),
            json!({"app": "d", "controller-revision-hash": "abc", "pod-template-generation": "3"})
        );
        assert_eq!(pod.metadata.generate_name.as_deref(), Some("d-"));
        assert_eq!(pod.metadata.owner_references.as_ref().unwrap()[0].uid, "u");
        let spec = ferrite_json::to_value(pod.spec.as_ref().unwrap()).unwrap();
        let affinity = &spec["affinity"]["nodeAffinity"];
        assert_eq!(
            affinity["requiredDuringSchedulingIgnoredDuringExecution"],
            json!({"nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]}),
            "the node was found eligible already"
        );
        assert!(affinity["preferredDuringSchedulingIgnoredDuringExecution"].is_array(), "preferences stay");
        let tolerations: Vec<_> = spec["tolerations"].as_array().unwrap().iter().collect();
        assert_eq!(tolerations.len(), TOLERATED.len());
        for ((key, effect), toleration) in TOLERATED.iter().zip(tolerations) {
            assert_eq!(
                *toleration,
                json!({"key": key, "operator": "Exists", "effect": effect}),
                "no time limit"
            );
        }
        assert_eq!(target_node(&pod), Some("n1"));
    }

    #[test]
    fn the_target_is_the_node_or_else_the_one_that_affinity_names() {
        let affinity = |values: Value| {
            json!({"spec": {"containers": [], "affinity": {"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": values}]}]}}}}})
        };
        for (pod, expected) in [
            (json!({"spec": {"containers": [], "nodeName": "n1"}}), Some("n1")),
            (affinity(json!(["n2"])), Some("n2")),
            (affinity(json!(["n2", "n3"])), None),
            (json!({"spec": {"containers": []}}), None),
        ] {
            let pod: Pod = ferrite_json::from_value(pod).unwrap();
            assert_eq!(target_node(&pod), expected);
        }
    }
}
