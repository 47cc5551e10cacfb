//! Pods and nodes as the scheduling cycle sees them: everything it needs is computed once, when they change.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_client::ObjectKey;
use ferrite_json::Text;
use k8s_openapi::api::core::v1::Node;

pub use crate::affinity_terms::{AffinityTerm, AffinityTerms, Namespaces};
use crate::columns::{Column, Columns};
pub use crate::pod_info::{
    DEFAULT_SCHEDULER, Disk, HostPort, Placement, PodClaim, PodInfo, PodShape, PodVolumes, Shapes,
};
use crate::resources::Resources;

pub const ZONE: &str = "topology.kubernetes.io/zone";
pub const REGION: &str = "topology.kubernetes.io/region";
/// Reason of the DisruptionTarget condition of a pod that the scheduler deletes to make room.
pub const PREEMPTION_BY_SCHEDULER: &str = "PreemptionByScheduler";
pub const HOSTNAME: &str = "kubernetes.io/hostname";

/// A node, the pods on it, and their sums.
#[derive(Debug, Clone)]
pub struct NodeInfo {
    pub node: Arc<Node>,
    pub pods: Vec<Arc<PodInfo>>,
    pub allocatable: Resources,
    pub requested: Resources,
    /// CPU (thousandths) and memory, with a modest amount for each container that asks for none.
    pub non_zero_requested: (i64, i64),
    /// Pods that are to run here as soon as there is room: other pods are being deleted for them.
    nominated: Vec<Arc<PodInfo>>,
    generation: u64,
}

/// A number that no node has had yet.
fn next_generation() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed)
}

impl NodeInfo {
    pub fn new(node: Arc<Node>) -> Self {
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        Self {
            allocatable: Resources::from_list(allocatable),
            pods: Vec::new(),
            requested: Resources::default(),
            non_zero_requested: (0, 0),
            nominated: Vec::new(),
            generation: next_generation(),
            node,
        }
    }

    pub fn set_node(&mut self, node: Arc<Node>) {
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        self.allocatable = Resources::from_list(allocatable);
        self.node = node;
        self.generation = next_generation();
    }

    /// Two nodes with the same generation are the same in all respects. Every change brings a new one.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Pods that are to run here as soon as there is room.
    pub fn nominated(&self) -> &[Arc<PodInfo>] {
        &self.nominated
    }

    /// The pods among them whose room `pod` may not take: those of equal or higher priority, but for itself.
    pub fn nominated_before<'a>(&'a self, pod: &'a PodInfo) -> impl Iterator<Item = &'a Arc<PodInfo>> {
        self.nominated.iter().filter(|other| other.key != pod.key && other.priority >= pod.priority)
    }

    /// True if there are such pods.
    pub fn keeps_room_from(&self, pod: &PodInfo) -> bool {
        self.nominated_before(pod).next().is_some()
    }

    pub fn nominate(&mut self, pod: Arc<PodInfo>) {
        self.nominated.push(pod);
        self.generation = next_generation();
    }

    pub fn remove_nominated(&mut self, key: &ObjectKey) {
        self.nominated.retain(|pod| pod.key != *key);
        self.generation = next_generation();
    }

    pub fn name(&self) -> &str {
        self.node.metadata.name.as_deref().unwrap_or_default()
    }

    pub fn labels(&self) -> &BTreeMap<String, String> {
        static EMPTY: BTreeMap<String, String> = BTreeMap::new();
        self.node.metadata.labels.as_ref().unwrap_or(&EMPTY)
    }

    pub fn add_pod(&mut self, pod: Arc<PodInfo>) {
        self.requested.add(&pod.requests);
        let (cpu, memory) = pod.non_zero_requests;
        self.non_zero_requested.0 = self.non_zero_requested.0.saturating_add(cpu);
        self.non_zero_requested.1 = self.non_zero_requested.1.saturating_add(memory);
        self.pods.push(pod);
        self.generation = next_generation();
    }

    pub fn remove_pod(&mut self, key: &ObjectKey) -> Option<Arc<PodInfo>> {
        let index = self.pods.iter().position(|pod| pod.key == *key)?;
        let pod = self.pods.swap_remove(index);
        self.requested.subtract(&pod.requests);
        let (cpu, memory) = pod.non_zero_requests;
        self.non_zero_requested.0 = self.non_zero_requested.0.saturating_sub(cpu);
        self.non_zero_requested.1 = self.non_zero_requested.1.saturating_sub(memory);
        self.generation = next_generation();
        Some(pod)
    }

    fn zone(&self) -> (String, String) {
        let label = |key: &str| self.labels().get(key).cloned().unwrap_or_default();
        (label(REGION), label(ZONE))
    }
}

/// All nodes at one moment. Nodes of different zones take turns in the order, so that a search that stops early has
/// still looked everywhere.
#[derive(Debug, Default, Clone)]
pub struct Snapshot {
    nodes: Vec<Arc<NodeInfo>>,
    /// The generations of the nodes, side by side: a search that remembers its results reads them and no node.
    generations: Vec<u64>,
    positions: HashMap<String, usize>,
    /// Some pod on some node has pod affinity or anti-affinity of any kind.
    pub has_affinity: bool,
    /// The nodes that pods are nominated to.
    pub nominated: HashMap<ObjectKey, Text>,
    /// The number of nodes that have each image, by every name of it.
    pub images: Arc<HashMap<String, usize>>,
    columns: Columns,
}

impl Snapshot {
    pub fn new(nodes: impl IntoIterator<Item = Arc<NodeInfo>>) -> Self {
        let mut snapshot = Self::default();
        snapshot.rebuild(nodes);
        snapshot
    }

    pub fn nodes(&self) -> &[Arc<NodeInfo>] {
        &self.nodes
    }

    pub fn get(&self, name: &str) -> Option<&Arc<NodeInfo>> {
        self.positions.get(name).map(|position| &self.nodes[*position])
    }

    /// The [generation](NodeInfo::generation) of the node at a position.
    pub fn generation(&self, position: usize) -> u64 {
        self.generations[position]
    }

    /// The position of the node that the pod is nominated to.
    pub fn nominated_position(&self, pod: &PodInfo) -> Option<usize> {
        self.position(self.nominated.get(&pod.key)?)
    }

    /// The values of a label on all nodes, by their position among [`nodes`](Snapshot::nodes).
    pub fn column(&self, label: &str) -> Arc<Column> {
        self.columns.get(&self.nodes, label)
    }

    /// Where the node stands among [`nodes`](Snapshot::nodes).
    pub fn position(&self, name: &str) -> Option<usize> {
        self.positions.get(name).copied()
    }

    pub(crate) fn rebuild(&mut self, nodes: impl IntoIterator<Item = Arc<NodeInfo>>) {
        self.columns.forget();
        let mut zones: BTreeMap<(String, String), Vec<Arc<NodeInfo>>> = BTreeMap::new();
        for node in nodes {
            zones.entry(node.zone()).or_default().push(node);
        }
        let longest = zones.values().map(Vec::len).max().unwrap_or(0);
        for nodes in zones.values_mut() {
            nodes.sort_by(|a, b| a.name().cmp(b.name()));
        }
        self.nodes = (0..longest)
            .flat_map(|turn| zones.values().filter_map(move |nodes| nodes.get(turn).cloned()))
            .collect();
        self.generations = self.nodes.iter().map(|node| node.generation()).collect();
        self.positions = self
            .nodes
            .iter()
            .enumerate()
            .map(|(position, node)| (node.name().to_owned(), position))
            .collect();
    }

    pub(crate) fn replace(&mut self, node: Arc<NodeInfo>) {
        if let Some(position) = self.positions.get(node.name()) {
            let before = &self.nodes[*position];
            if !Arc::ptr_eq(&before.node, &node.node) && before.labels() != node.labels() {
                self.columns.forget();
            }
            self.generations[*position] = node.generation();
            self.nodes[*position] = node;
        }
    }
}
