//! The memory manager's state and decisions: the NUMA nodes that a container's memory comes from.
//!
//! A group of nodes that one container has memory of is a group for all: a node gives memory alone, or together with the
//! same nodes, never both.

use super::hint::{Hint, ProviderHints};
use super::mask::NumaMask;
use super::memory_file::{Assignments, Checkpoint, MemoryFileError};
use crate::pod::model::{self, ContainerKind, PodContainer, PodId, QosClass};
use crate::quantity;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The name of the state file, in the kubelet's root.
pub(crate) const FILE: &str = "memory_manager_state";
const MEMORY: &str = "memory";

/// The memory manager policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryPolicy {
    #[default]
    None,
    /// Containers of Guaranteed pods have their memory from as few NUMA nodes as possible.
    Static,
}

impl MemoryPolicy {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Static => "Static",
        }
    }
}

/// Memory of one NUMA node that no container gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaReservation {
    pub numa_node: u32,
    /// `memory` and `hugepages-<size>`, in bytes.
    pub limits: BTreeMap<String, i64>,
}

/// The memory of one NUMA node, by kind, in bytes.
pub(crate) type NodeMemory = BTreeMap<u32, BTreeMap<String, u64>>;

/// Reads the memory of the NUMA nodes below `/sys/devices/system`. A machine without them has one node, with `total` bytes.
pub(crate) fn read_nodes(system: &Path, total: i64) -> NodeMemory {
    let mut nodes = NodeMemory::new();
    let online = std::fs::read_to_string(system.join("node/online")).unwrap_or_default();
    let online: super::cpuset::CpuSet = online.parse().unwrap_or_default();
    for node in online.iter() {
        let directory = system.join(format!("node/node{node}"));
        let text = std::fs::read_to_string(directory.join("meminfo")).unwrap_or_default();
        let kilobytes = text.lines().find_map(|line| {
            let (_, rest) = line.split_once("MemTotal:")?;
            rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        });
        let Some(kilobytes) = kilobytes else { continue };
        let mut kinds = BTreeMap::from([(MEMORY.to_owned(), kilobytes.saturating_mul(1024))]);
        for (size, bytes) in crate::node::hugepages(&directory.join("hugepages")) {
            kinds.insert(format!("hugepages-{size}"), u64::try_from(bytes).unwrap_or(0));
        }
        nodes.insert(node, kinds);
    }
    if nodes.is_empty() {
        nodes.insert(0, BTreeMap::from([(MEMORY.to_owned(), u64::try_from(total).unwrap_or(0))]));
    }
    nodes
}

/// Memory of one kind of one node, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MemoryTable {
    pub total: u64,
    pub system_reserved: u64,
    pub allocatable: u64,
    pub reserved: u64,
    pub free: u64,
}

/// One NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NumaState {
    pub number_of_assignments: i64,
    pub memory_map: BTreeMap<String, MemoryTable>,
    /// The node, and those that it gives memory together with.
    pub cells: Vec<u32>,
}

/// Memory of one kind that a container has from these nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Block {
    pub numa_affinity: Vec<u32>,
    #[serde(rename = "type")]
    pub kind: String,
    pub size: u64,
}

impl Block {
    fn mask(&self) -> NumaMask {
        NumaMask::of(self.numa_affinity.iter().copied())
    }
}

/// A container gets no memory. The texts are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error(
        "[memorymanager] failed to get the default NUMA affinity, no NUMA nodes with enough memory is available"
    )]
    NoNodes,
    #[error("[memorymanager] failed to find the default preferred hint")]
    NotPreferred,
    #[error("[memorymanager] failed to find NUMA nodes to extend the current topology hint")]
    NotExtended,
    #[error("[memorymanager] failed to find the extended preferred hint")]
    ExtendedNotPreferred,
    #[error("[memorymanager] preferred hint violates NUMA node allocation")]
    Violation,
}

/// The memory manager cannot start.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryStartError {
    #[error("[memorymanager] you should specify the system reserved memory")]
    NothingReserved,
    #[error(
        "the reserved memory configuration references a NUMA node {0} that does not exist on this machine"
    )]
    NoNode(u32),
    #[error("NUMA node {node} has less {kind} than is reserved")]
    TooMuch { node: u32, kind: String },
    #[error(
        "the total amount {reserved} of type {kind:?} is not equal to the value {expected} determined by Node Allocatable feature"
    )]
    Total { kind: String, reserved: i64, expected: i64 },
    #[error(transparent)]
    File(#[from] MemoryFileError),
    #[error(
        "[memorymanager] configured policy {configured:?} differs from state checkpoint policy {found:?}"
    )]
    Policy { configured: &'static str, found: String },
    #[error("[memorymanager] machine state can not be empty when it has memory assignments")]
    Empty,
    #[error(
        "[memorymanager] (pod: {pod}, container: {container}) the memory assignment uses the NUMA that does not exist"
    )]
    UnknownNode { pod: String, container: String },
    #[error(
        "[memorymanager] (pod: {pod}, container: {container}) the memory assignment uses memory resource that does not exist"
    )]
    UnknownKind { pod: String, container: String },
    #[error("[memorymanager] the expected machine state is different from the real one")]
    Different,
}

/// The requests of a container or a pod, by kind of memory.
pub(crate) type MemoryRequest = BTreeMap<String, u64>;

#[derive(Debug, Clone)]
pub(crate) struct MemoryState {
    policy: MemoryPolicy,
    nodes: BTreeMap<u32, NumaState>,
    assigned: Assignments,
    /// Memory of init containers that have ended by then, of the pod that is admitted.
    reusable: BTreeMap<(NumaMask, String), u64>,
    reusable_of: String,
}

impl MemoryState {
    /// The state at the kubelet's start. `reserved` is the node's reservation of memory as a whole, which the
    /// reservations of nodes must add up to.
    pub(crate) fn start(
        policy: MemoryPolicy,
        machine: &NodeMemory,
        reservations: &[NumaReservation],
        reserved: i64,
        file: Option<&[u8]>,
    ) -> Result<Self, MemoryStartError> {
        let mut state = Self {
            policy,
            nodes: BTreeMap::new(),
            assigned: Assignments::new(),
            reusable: BTreeMap::new(),
            reusable_of: String::new(),
        };
        let fresh = match policy {
            MemoryPolicy::None => BTreeMap::new(),
            MemoryPolicy::Static => {
                check_reservations(machine, reservations, reserved)?;
                fresh_nodes(machine, reservations)?
            }
        };
        let Some(bytes) = file else {
            state.nodes = fresh;
            return Ok(state);
        };
        let found = Checkpoint::read(bytes)?;
        if found.policy_name != policy.name() {
            let found = found.policy_name;
            return Err(MemoryStartError::Policy { configured: policy.name(), found });
        }
        let (nodes, assigned) = (found.machine(), found.entries);
        if policy == MemoryPolicy::None {
            return Ok(state);
        }
        if nodes.is_empty() {
            if !assigned.is_empty() {
                return Err(MemoryStartError::Empty);
            }
            state.nodes = fresh;
            return Ok(state);
        }
        let expected = expected_nodes(fresh, &assigned)?;
        if !same_nodes(&nodes, &expected) {
            return Err(MemoryStartError::Different);
        }
        (state.nodes, state.assigned) = (nodes, assigned);
        Ok(state)
    }

    pub(crate) fn file(&self) -> Vec<u8> {
        Checkpoint::new(self.policy.name(), &self.nodes, &self.assigned).write()
    }

    pub(crate) fn is_static(&self) -> bool {
        self.policy == MemoryPolicy::Static
    }

    pub(crate) fn pods(&self) -> Vec<String> {
        self.assigned.keys().cloned().collect()
    }

    pub(crate) fn blocks(&self, pod: &str, container: &str) -> Option<&[Block]> {
        self.assigned.get(pod)?.get(container).map(Vec::as_slice)
    }

    /// The nodes of a container's memory; empty if they do not matter.
    pub(crate) fn nodes_of(&self, pod: &str, container: &str) -> BTreeSet<u32> {
        let blocks = self.blocks(pod, container).unwrap_or_default();
        blocks.iter().flat_map(|block| block.numa_affinity.iter().copied()).collect()
    }

    /// Memory of each node that containers may have.
    pub(crate) fn allocatable(&self) -> Vec<Block> {
        let mut all = Vec::new();
        for (node, state) in &self.nodes {
            let some = state.memory_map.iter().filter(|(_, table)| table.allocatable > 0);
            all.extend(some.map(|(kind, table)| Block {
                numa_affinity: vec![*node],
                kind: kind.clone(),
                size: table.allocatable,
            }));
        }
        all
    }

    /// The memory that a container has from nodes of its own. As v1.36 has it by default: none in a pod with resources of
    /// its own.
    pub(crate) fn wanted(&self, pod: &Pod, container: &PodContainer) -> MemoryRequest {
        let has_own = self.is_static()
            && model::spec(pod).resources.is_none()
            && container.kind != ContainerKind::Ephemeral
            && model::qos_class(pod) == QosClass::Guaranteed;
        if !has_own {
            return MemoryRequest::new();
        }
        let resources = container.spec.resources.as_ref();
        let mut request = MemoryRequest::new();
        let lists = [resources.and_then(|r| r.limits.as_ref()), resources.and_then(|r| r.requests.as_ref())];
        for (kind, amount) in lists.into_iter().flatten().flatten() {
            if kind == MEMORY || kind.starts_with("hugepages-") {
                let bytes = quantity::value(amount).and_then(|bytes| u64::try_from(bytes).ok());
                request.insert(kind.clone(), bytes.unwrap_or(0));
            }
        }
        request
    }

    /// The memory that the containers of a pod need at one time.
    pub(crate) fn wanted_by_pod(&self, pod: &Pod, containers: &[PodContainer]) -> MemoryRequest {
        let (mut init, mut sidecars, mut regular) =
            (MemoryRequest::new(), MemoryRequest::new(), MemoryRequest::new());
        let of = |request: &MemoryRequest, kind: &str| request.get(kind).copied().unwrap_or(0);
        for container in containers {
            for (kind, size) in self.wanted(pod, container) {
                match container.kind {
                    ContainerKind::Init if container.is_sidecar() => {
                        *sidecars.entry(kind).or_default() += size;
                    }
                    ContainerKind::Init => {
                        let most = of(&init, &kind).max(of(&sidecars, &kind).saturating_add(size));
                        init.insert(kind, most);
                    }
                    ContainerKind::Regular => *regular.entry(kind).or_default() += size,
                    ContainerKind::Ephemeral => {}
                }
            }
        }
        let at_once = |(kind, size): (&String, &u64)| {
            let long = size.saturating_add(of(&sidecars, kind));
            (kind.clone(), long.max(of(&init, kind)))
        };
        regular.iter().map(at_once).collect()
    }

    /// Begins the admission of a pod: nothing of another one is used again.
    pub(crate) fn begin(&mut self, pod: &Pod) {
        let uid = PodId::of(pod).uid;
        if self.reusable_of != uid {
            self.reusable.clear();
            self.reusable_of = uid;
        }
    }

    /// The hints of a container.
    pub(crate) fn hints(&self, pod: &Pod, container: &PodContainer) -> ProviderHints {
        let request = self.wanted(pod, container);
        if request.is_empty() {
            return ProviderHints::new();
        }
        match self.blocks(&PodId::of(pod).uid, container.name()) {
            Some(blocks) => known_hints(blocks, &request),
            None => self.calculate(&request),
        }
    }

    /// The hints of a pod as a whole.
    pub(crate) fn pod_hints(&self, pod: &Pod, containers: &[PodContainer]) -> ProviderHints {
        let request = self.wanted_by_pod(pod, containers);
        if request.is_empty() {
            return ProviderHints::new();
        }
        let uid = PodId::of(pod).uid;
        match containers.iter().find_map(|container| self.blocks(&uid, container.name())) {
            Some(blocks) => known_hints(blocks, &request),
            None => self.calculate(&request),
        }
    }

    fn sum(&self, mask: NumaMask, kind: &str, of: impl Fn(&MemoryTable) -> u64) -> u64 {
        let tables = mask.nodes().filter_map(|node| self.nodes.get(&node)?.memory_map.get(kind));
        tables.map(of).fold(0, u64::saturating_add)
    }

    /// True if these nodes may give memory together: those that do so already do it as this group.
    fn is_group(&self, mask: NumaMask) -> bool {
        let members: Vec<u32> = mask.nodes().collect();
        match members.as_slice() {
            [one] => self.nodes.get(one).is_some_and(|state| state.cells.len() <= 1),
            several => several.iter().filter_map(|node| self.nodes.get(node)).all(|state| {
                state.number_of_assignments == 0
                    || (state.cells.len() > 1 && NumaMask::of(state.cells.iter().copied()) == mask)
            }),
        }
    }

    /// Every group of nodes that has the memory, as a hint for each kind. None at all: no kind is named, as upstream.
    fn calculate(&self, request: &MemoryRequest) -> ProviderHints {
        let all: BTreeSet<u32> = self.nodes.keys().copied().collect();
        let (mut fewest, mut masks) = (all.len(), Vec::new());
        for mask in NumaMask::combinations(&all) {
            let could = request.iter().all(|(kind, size)| self.sum(mask, kind, |t| t.allocatable) >= *size);
            if !could {
                continue;
            }
            fewest = fewest.min(mask.count());
            let has = |(kind, size): (&String, &u64)| {
                let again = self.reusable.get(&(mask, kind.clone())).copied().unwrap_or(0);
                self.sum(mask, kind, |table| table.free).saturating_add(again) >= *size
            };
            if self.is_group(mask) && request.iter().all(has) {
                masks.push(mask);
            }
        }
        if masks.is_empty() {
            return ProviderHints::new();
        }
        let hint = |mask: &NumaMask| Hint { affinity: Some(*mask), preferred: mask.count() == fewest };
        let hints: Vec<Hint> = masks.iter().map(hint).collect();
        request.keys().map(|kind| (kind.clone(), Some(hints.clone()))).collect()
    }

    /// The best of the groups that pass the test.
    fn best(&self, request: &MemoryRequest, test: impl Fn(NumaMask) -> bool) -> Option<(NumaMask, bool)> {
        let hints = self.calculate(request);
        // The hints of all kinds are the same; upstream reads those of plain memory.
        let hints = hints.get(MEMORY).cloned().flatten().unwrap_or_default();
        let mut best: Option<(NumaMask, bool)> = None;
        for hint in hints {
            let Some(mask) = hint.affinity.filter(|mask| test(*mask)) else { continue };
            let is_better = best.is_none_or(|(known, preferred)| match (hint.preferred, preferred) {
                (true, false) => true,
                (false, true) => false,
                _ => mask.is_narrower_than(known),
            });
            if is_better {
                best = Some((mask, hint.preferred));
            }
        }
        best
    }

    /// Gives a container its memory, from the nodes of the hint if they have it.
    pub(crate) fn allocate(
        &mut self,
        pod: &Pod,
        container: &PodContainer,
        hint: Hint,
    ) -> Result<(), MemoryError> {
        let request = self.wanted(pod, container);
        if request.is_empty() {
            return Ok(());
        }
        let uid = PodId::of(pod).uid;
        if let Some(blocks) = self.blocks(&uid, container.name()).map(<[Block]>::to_vec) {
            self.update_reusable(container, &blocks);
            return Ok(());
        }
        let (mut mask, mut preferred) = match hint.affinity {
            Some(mask) => (mask, hint.preferred),
            None => {
                let (mask, preferred) = self.best(&request, |_| true).ok_or(MemoryError::NoNodes)?;
                if hint.preferred && !preferred {
                    return Err(MemoryError::NotPreferred);
                }
                (mask, preferred)
            }
        };
        // The merge of hints may have left fewer nodes than the memory needs.
        if !request.iter().all(|(kind, size)| self.sum(mask, kind, |table| table.free) >= *size) {
            let extended =
                self.best(&request, |wider| mask.and(wider) == mask).ok_or(MemoryError::NotExtended)?;
            if preferred && !extended.1 {
                return Err(MemoryError::ExtendedNotPreferred);
            }
            (mask, preferred) = extended;
        }
        let _ = preferred;
        if mask.count() > 1 && !self.is_group(mask) {
            return Err(MemoryError::Violation);
        }
        let mut blocks = Vec::new();
        for (kind, size) in &request {
            let again = self.reusable.get(&(mask, kind.clone())).copied().unwrap_or(0);
            assign(&mut self.nodes, mask, kind, size.saturating_sub(again));
            blocks.push(Block { numa_affinity: mask.nodes().collect(), kind: kind.clone(), size: *size });
        }
        self.update_reusable(container, &blocks);
        self.shrink_init_containers(pod, container, &blocks);
        self.assigned.entry(uid).or_default().insert(container.name().to_owned(), blocks);
        Ok(())
    }

    fn update_reusable(&mut self, container: &PodContainer, blocks: &[Block]) {
        let ends = container.kind == ContainerKind::Init && !container.is_sidecar();
        for block in blocks {
            let again = self.reusable.entry((block.mask(), block.kind.clone())).or_default();
            *again = if ends { (*again).max(block.size) } else { again.saturating_sub(block.size) };
        }
    }

    /// Memory that was an init container's counts once: as that of the container that has it now.
    fn shrink_init_containers(&mut self, pod: &Pod, container: &PodContainer, blocks: &[Block]) {
        let uid = PodId::of(pod).uid;
        let all = model::containers(pod);
        let earlier = all
            .iter()
            .take_while(|c| c.name() != container.name())
            .filter(|c| c.kind == ContainerKind::Init && !c.is_sidecar());
        let earlier: Vec<String> = earlier.map(|c| c.name().to_owned()).collect();
        let Some(containers) = self.assigned.get_mut(&uid) else { return };
        for block in blocks {
            let mut left = block.size;
            for name in &earlier {
                for old in containers.get_mut(name).into_iter().flatten() {
                    if old.kind == block.kind && old.mask() == block.mask() {
                        let taken = old.size.min(left);
                        old.size -= taken;
                        left -= taken;
                    }
                }
            }
        }
    }

    /// The pod has ended. Returns true if it had memory of nodes.
    pub(crate) fn release(&mut self, pod: &str) -> bool {
        let Some(containers) = self.assigned.remove(pod) else { return false };
        for block in containers.into_values().flatten() {
            let mut left = block.size;
            for node in &block.numa_affinity {
                let Some(state) = self.nodes.get_mut(node) else { continue };
                state.number_of_assignments -= 1;
                if state.number_of_assignments <= 0 {
                    state.cells = vec![*node];
                }
                let Some(table) = state.memory_map.get_mut(&block.kind) else { continue };
                let freed = table.reserved.min(left);
                table.reserved -= freed;
                table.free += freed;
                left -= freed;
            }
        }
        if self.reusable_of == pod {
            self.reusable.clear();
        }
        true
    }

    /// Pods other than these do not exist any longer.
    pub(crate) fn retain(&mut self, live: &BTreeSet<String>) -> bool {
        let gone: Vec<String> = self.assigned.keys().filter(|pod| !live.contains(*pod)).cloned().collect();
        for pod in &gone {
            self.release(pod);
        }
        !gone.is_empty()
    }
}

/// A container that has its memory gets it again; an empty answer: it asks for another amount now.
fn known_hints(blocks: &[Block], request: &MemoryRequest) -> ProviderHints {
    let same = blocks.len() == request.len()
        && blocks.iter().all(|block| request.get(&block.kind) == Some(&block.size));
    if !same {
        return ProviderHints::new();
    }
    let hint = |block: &Block| vec![Hint { affinity: Some(block.mask()), preferred: true }];
    blocks.iter().map(|block| (block.kind.clone(), Some(hint(block)))).collect()
}

/// Takes memory of these nodes, the first ones first.
fn assign(nodes: &mut BTreeMap<u32, NumaState>, mask: NumaMask, kind: &str, size: u64) {
    let cells: Vec<u32> = mask.nodes().collect();
    let mut left = size;
    for node in &cells {
        let Some(state) = nodes.get_mut(node) else { continue };
        state.number_of_assignments += 1;
        state.cells = cells.clone();
        let Some(table) = state.memory_map.get_mut(kind) else { continue };
        let taken = table.free.min(left);
        table.free -= taken;
        table.reserved += taken;
        left -= taken;
    }
}

/// The reservations of all nodes are the reservation of the node as a whole.
fn check_reservations(
    machine: &NodeMemory,
    reservations: &[NumaReservation],
    expected: i64,
) -> Result<(), MemoryStartError> {
    let mut sums: BTreeMap<&str, i64> = BTreeMap::from([(MEMORY, 0)]);
    for reservation in reservations {
        if !machine.contains_key(&reservation.numa_node) {
            return Err(MemoryStartError::NoNode(reservation.numa_node));
        }
        for (kind, amount) in &reservation.limits {
            let sum = sums.entry(kind).or_default();
            *sum = sum.saturating_add(*amount);
        }
    }
    for (kind, reserved) in sums {
        // Nothing but plain memory can be reserved for the node as a whole.
        let expected = if kind == MEMORY { expected } else { 0 };
        if reserved != expected {
            return Err(MemoryStartError::Total { kind: kind.to_owned(), reserved, expected });
        }
        if kind == MEMORY && reserved == 0 {
            return Err(MemoryStartError::NothingReserved);
        }
    }
    Ok(())
}

/// Nodes that nobody has memory of.
fn fresh_nodes(
    machine: &NodeMemory,
    reservations: &[NumaReservation],
) -> Result<BTreeMap<u32, NumaState>, MemoryStartError> {
    let mut nodes = BTreeMap::new();
    for (node, kinds) in machine {
        let pages = kinds.iter().filter(|(kind, _)| *kind != MEMORY).map(|(_, size)| size).sum::<u64>();
        let mut memory_map = BTreeMap::new();
        for (kind, total) in kinds {
            let reserved = reservations.iter().filter(|r| r.numa_node == *node);
            let reserved: i64 = reserved.filter_map(|r| r.limits.get(kind)).sum();
            let system_reserved = u64::try_from(reserved).unwrap_or(0);
            let taken = if kind == MEMORY { system_reserved.saturating_add(pages) } else { system_reserved };
            let allocatable = total
                .checked_sub(taken)
                .ok_or_else(|| MemoryStartError::TooMuch { node: *node, kind: kind.clone() })?;
            let table =
                MemoryTable { total: *total, system_reserved, allocatable, reserved: 0, free: allocatable };
            memory_map.insert(kind.clone(), table);
        }
        nodes.insert(*node, NumaState { number_of_assignments: 0, memory_map, cells: vec![*node] });
    }
    Ok(nodes)
}

/// Nodes with the memory that containers have.
fn expected_nodes(
    mut nodes: BTreeMap<u32, NumaState>,
    assigned: &Assignments,
) -> Result<BTreeMap<u32, NumaState>, MemoryStartError> {
    for (pod, containers) in assigned {
        for (container, blocks) in containers {
            for block in blocks {
                let names = || (pod.clone(), container.clone());
                for node in &block.numa_affinity {
                    let (pod, container) = names();
                    let Some(state) = nodes.get(node) else {
                        return Err(MemoryStartError::UnknownNode { pod, container });
                    };
                    if !state.memory_map.contains_key(&block.kind) {
                        return Err(MemoryStartError::UnknownKind { pod, container });
                    }
                }
                assign(&mut nodes, block.mask(), &block.kind, block.size);
            }
        }
    }
    Ok(nodes)
}

/// As upstream compares: which node of a group gave how much depends on the order of allocations.
fn same_nodes(found: &BTreeMap<u32, NumaState>, expected: &BTreeMap<u32, NumaState>) -> bool {
    let in_group = |nodes: &BTreeMap<u32, NumaState>, cells: &[u32], kind: &str| {
        let tables = cells.iter().filter_map(|node| nodes.get(node)?.memory_map.get(kind));
        tables.fold((0u64, 0u64), |(free, reserved), table| {
            (free.saturating_add(table.free), reserved.saturating_add(table.reserved))
        })
    };
    found.len() == expected.len()
        && found.iter().all(|(node, state)| {
            let Some(other) = expected.get(node) else { return false };
            let cells = |state: &NumaState| NumaMask::of(state.cells.iter().copied());
            state.number_of_assignments == other.number_of_assignments
                && cells(state) == cells(other)
                && state.memory_map.len() == other.memory_map.len()
                && state.memory_map.iter().all(|(kind, table)| {
                    let Some(known) = other.memory_map.get(kind) else { return false };
                    (table.total, table.system_reserved, table.allocatable)
                        == (known.total, known.system_reserved, known.allocatable)
                        && in_group(found, &state.cells, kind) == in_group(expected, &state.cells, kind)
                })
        })
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
