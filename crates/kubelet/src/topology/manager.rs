//! Gives pods the resources that the node keeps account of one by one: processors of their own, and devices.

use super::cpu::{self, CpuError, CpuPolicy, CpuStartError, CpuState};
use super::cpuset::{CpuSet, CpuSetError};
use super::device_hints;
use super::hint::{self, Hint, NumaInfo, ProviderHints, TopologyPolicy, TopologyScope};
use super::machine::CpuTopology;
use super::memory::{
    self, Block as MemoryBlock, MemoryError, MemoryPolicy, MemoryStartError, MemoryState, NodeMemory,
    NumaReservation,
};
use crate::devices::{AllocateError, Devices, Reusable};
use crate::pod::labels;
use crate::pod::model::{self, ContainerKind, PodContainer, PodId};
use crate::state_file;
use ferrite_cri::RuntimeService;
use ferrite_cri::v1::{
    ContainerFilter, ContainerState, ContainerStateValue, LinuxContainerResources, ListContainersRequest,
    UpdateContainerResourcesRequest,
};
use k8s_openapi::api::core::v1::Pod;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// The administrator's settings of the resource managers.
#[derive(Debug, Clone)]
pub struct ResourceSettings {
    pub cpu_policy: CpuPolicy,
    /// Processors for the system, such as `0-1`; without a name some are chosen.
    pub reserved_cpus: String,
    /// Interval between checks that each container runs on its processors.
    pub cpu_reconcile_period: Duration,
    pub topology_policy: TopologyPolicy,
    pub topology_scope: TopologyScope,
    pub prefer_closest_numa: bool,
    /// A machine with more NUMA nodes has no topology policy.
    pub most_numa_nodes: usize,
    pub memory_policy: MemoryPolicy,
    /// Memory of NUMA nodes that no container gets.
    pub reserved_memory: Vec<NumaReservation>,
}

impl Default for ResourceSettings {
    fn default() -> Self {
        Self {
            cpu_policy: CpuPolicy::None,
            reserved_cpus: String::new(),
            cpu_reconcile_period: Duration::from_secs(10),
            topology_policy: TopologyPolicy::None,
            topology_scope: TopologyScope::Container,
            prefer_closest_numa: false,
            most_numa_nodes: 8,
            memory_policy: MemoryPolicy::None,
            reserved_memory: Vec::new(),
        }
    }
}

impl ResourceSettings {
    /// The options of the topology manager as its configuration has them.
    pub(crate) fn topology_options(&self) -> BTreeMap<&'static str, String> {
        let mut options = BTreeMap::new();
        if self.prefer_closest_numa {
            options.insert("prefer-closest-numa-nodes", "true".to_owned());
        }
        if self.most_numa_nodes != Self::default().most_numa_nodes {
            options.insert("max-allowable-numa-nodes", self.most_numa_nodes.to_string());
        }
        options
    }
}

/// Why the managers of resources cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ResourceStartError {
    #[error(
        "could not restore state from checkpoint, please drain this node and delete the CPU manager checkpoint file {path:?} before restarting Kubelet"
    )]
    Cpu { path: PathBuf, source: CpuStartError },
    #[error(
        "could not restore state from checkpoint, please drain this node and delete the memory manager checkpoint file {path:?} before restarting Kubelet"
    )]
    Memory { path: PathBuf, source: MemoryStartError },
    #[error("the file {path:?}")]
    File { path: PathBuf, source: io::Error },
    #[error("reserved processors")]
    Reserved(#[source] CpuSetError),
    #[error("unsupported on machines with more than {most} NUMA Nodes: this one has {count}")]
    NumaNodes { most: usize, count: usize },
    #[error("the option align-by-socket does not go with the topology policy single-numa-node")]
    AlignBySocket,
    #[error(
        "align-by-socket is not compatible with hardware where number of sockets are more than number of NUMA"
    )]
    Sockets,
}

/// Why a pod does not get its resources.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResourceError {
    #[error("Resources cannot be allocated with Topology locality")]
    Topology,
    #[error(transparent)]
    Cpu(#[from] CpuError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Devices(#[from] AllocateError),
    #[error("could not write the state of a resource manager: {0}")]
    File(io::Error),
}

impl ResourceError {
    /// The reason and the message of a pod that is refused, as upstream.
    pub(crate) fn refusal(&self) -> (&'static str, String) {
        let unexpected =
            || ("UnexpectedAdmissionError", format!("Allocate failed due to {self}, which is unexpected"));
        match self {
            ResourceError::Topology => ("TopologyAffinityError", self.to_string()),
            ResourceError::Cpu(e) if e.reason() != "UnexpectedAdmissionError" => (e.reason(), e.to_string()),
            _ => unexpected(),
        }
    }

    /// The node has enough, and others have it.
    pub(crate) fn is_shortage(&self) -> bool {
        match self {
            ResourceError::Devices(e) => e.is_shortage(),
            ResourceError::Cpu(_) | ResourceError::Memory(_) | ResourceError::Topology => true,
            ResourceError::File(_) => false,
        }
    }
}

/// The machine's memory, and the parts of the machine that pods cannot have.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeReserve {
    pub cpu_milli: i64,
    /// With the threshold below which pods are evicted.
    pub memory_reserved: i64,
    /// By NUMA node.
    pub memory: NodeMemory,
}

/// Processors for a container that is to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContainerCpus {
    /// As the kernel writes them.
    pub set: String,
    /// Nobody else's: there is no quota then.
    pub exclusive: bool,
    /// The NUMA nodes of its memory, as the kernel writes them; empty: all.
    pub mems: String,
}

pub(crate) struct ResourceManager {
    settings: ResourceSettings,
    devices: Devices,
    cpu: Mutex<CpuState>,
    memory: Mutex<MemoryState>,
    path: PathBuf,
    memory_path: PathBuf,
    /// One writer of the files at a time, so that the newest state is the last one written.
    saving: tokio::sync::Mutex<()>,
    /// Where nodes are chosen for several resources at once, pods are admitted one after the other.
    alone: tokio::sync::Mutex<()>,
    /// The processors that containers share have changed, or a container has started.
    changed: Notify,
}

impl ResourceManager {
    /// Reads the state file in the kubelet's root and writes it anew.
    pub(crate) fn start(
        settings: ResourceSettings,
        topology: CpuTopology,
        nodes: &NodeReserve,
        root: &Path,
        devices: Devices,
    ) -> Result<Self, ResourceStartError> {
        let count = topology.numa_nodes().len().max(nodes.memory.len());
        let limited =
            settings.topology_policy != TopologyPolicy::None || settings.memory_policy != MemoryPolicy::None;
        if limited && count > settings.most_numa_nodes {
            return Err(ResourceStartError::NumaNodes { most: settings.most_numa_nodes, count });
        }
        if let CpuPolicy::Static(options) = settings.cpu_policy
            && options.align_by_socket
        {
            if settings.topology_policy == TopologyPolicy::SingleNumaNode {
                return Err(ResourceStartError::AlignBySocket);
            }
            if topology.sockets().len() > count {
                return Err(ResourceStartError::Sockets);
            }
        }
        let reserved: CpuSet = settings.reserved_cpus.parse().map_err(ResourceStartError::Reserved)?;
        let path = root.join(cpu::FILE);
        let file = |source| ResourceStartError::File { path: path.clone(), source };
        let found = state_file::read(&path).map_err(file)?;
        let state =
            CpuState::start(settings.cpu_policy, topology, &reserved, nodes.cpu_milli, found.as_deref());
        let state = state.map_err(|source| ResourceStartError::Cpu { path: path.clone(), source })?;
        state_file::write(&path, &state.file()).map_err(file)?;
        let memory_path = root.join(memory::FILE);
        let file = |source| ResourceStartError::File { path: memory_path.clone(), source };
        let found = state_file::read(&memory_path).map_err(file)?;
        let memory = MemoryState::start(
            settings.memory_policy,
            &nodes.memory,
            &settings.reserved_memory,
            nodes.memory_reserved,
            found.as_deref(),
        );
        let memory =
            memory.map_err(|source| ResourceStartError::Memory { path: memory_path.clone(), source })?;
        state_file::write(&memory_path, &memory.file()).map_err(file)?;
        Ok(Self {
            settings,
            devices,
            cpu: Mutex::new(state),
            memory: Mutex::new(memory),
            path,
            memory_path,
            saving: tokio::sync::Mutex::default(),
            alone: tokio::sync::Mutex::default(),
            changed: Notify::new(),
        })
    }

    fn cpu(&self) -> MutexGuard<'_, CpuState> {
        self.cpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self) -> MutexGuard<'_, MemoryState> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives every container of the pod its devices, processors and memory.
    pub(crate) async fn allocate(&self, pod: &Pod) -> Result<(), ResourceError> {
        let chooses = self.settings.topology_policy != TopologyPolicy::None;
        let in_turn = chooses || self.memory().is_static();
        let _alone = match in_turn {
            true => Some(self.alone.lock().await),
            false => None,
        };
        self.memory().begin(pod);
        let uid = PodId::of(pod).uid;
        let (mut cpus, mut reusable) = (CpuSet::default(), Reusable::new());
        let of_pod = match self.settings.topology_scope {
            TopologyScope::Pod if chooses => Some(self.choose(&self.pod_hints(pod))?),
            _ => None,
        };
        let (mut changed, had_memory) = (false, self.memory().pods().contains(&uid));
        for container in model::containers(pod).iter().filter(|c| c.kind != ContainerKind::Ephemeral) {
            let hint = match of_pod {
                Some(hint) => hint,
                None if chooses => self.choose(&self.hints(pod, container, &cpus, &reusable))?,
                None => Hint { affinity: None, preferred: false },
            };
            self.memory().allocate(pod, container, hint)?;
            let near = hint.affinity.map(|mask| mask.nodes().map(i64::from).collect::<BTreeSet<i64>>());
            self.devices.allocate_container(pod, container, near.as_ref(), &mut reusable).await?;
            let mut state = self.cpu();
            state.allocate(pod, container, hint.affinity, &cpus)?;
            let Some(own) = state.exclusive(&uid, container.name()) else { continue };
            changed = true;
            cpus = match container.kind == ContainerKind::Init && !container.is_sidecar() {
                true => cpus.union(own),
                false => cpus.difference(own),
            };
        }
        self.devices.save_allocations().await?;
        if !had_memory && self.memory().pods().contains(&uid) {
            self.save_memory().await.map_err(ResourceError::File)?;
        }
        if changed {
            self.save().await.map_err(ResourceError::File)?;
            self.changed.notify_one();
        }
        Ok(())
    }

    fn choose(&self, providers: &[ProviderHints]) -> Result<Hint, ResourceError> {
        let state = self.cpu();
        let numa = NumaInfo { topology: state.topology(), prefer_closest: self.settings.prefer_closest_numa };
        match hint::merge(self.settings.topology_policy, &numa, providers) {
            (hint, true) => Ok(hint),
            (_, false) => Err(ResourceError::Topology),
        }
    }

    fn hints(
        &self,
        pod: &Pod,
        container: &PodContainer,
        cpus: &CpuSet,
        reusable: &Reusable,
    ) -> Vec<ProviderHints> {
        let uid = PodId::of(pod).uid;
        let views = self.devices.views(pod, std::slice::from_ref(container), reusable);
        let state = self.cpu();
        let nodes = state.topology().numa_nodes();
        let devices = views.iter().map(|(name, view)| (name.clone(), device_hints::hints(view, &nodes)));
        let count = state.wanted(pod, container);
        let cpu = state.hints(count, state.exclusive(&uid, container.name()), cpus);
        let memory = self.memory().hints(pod, container);
        vec![devices.collect(), ProviderHints::from([("cpu".to_owned(), cpu)]), memory]
    }

    /// The hints of a pod as a whole.
    fn pod_hints(&self, pod: &Pod) -> Vec<ProviderHints> {
        let uid = PodId::of(pod).uid;
        let all = model::containers(pod);
        let containers: Vec<PodContainer> =
            all.into_iter().filter(|c| c.kind != ContainerKind::Ephemeral).collect();
        let views = self.devices.views(pod, &containers, &Reusable::new());
        let state = self.cpu();
        let nodes = state.topology().numa_nodes();
        let devices = views.iter().map(|(name, view)| (name.clone(), device_hints::hints(view, &nodes)));
        let count = at_once(&containers, |container| state.wanted(pod, container));
        let mut has = CpuSet::default();
        for container in &containers {
            if let Some(own) = state.exclusive(&uid, container.name()) {
                has = has.union(own);
            }
        }
        let cpu = match has.len() == count && count > 0 {
            true => state.hints(count, Some(&has), &CpuSet::default()),
            false => state.hints(count, None, &has),
        };
        let memory = self.memory().pod_hints(pod, &containers);
        vec![devices.collect(), ProviderHints::from([("cpu".to_owned(), cpu)]), memory]
    }

    /// UIDs of pods that have something of their own.
    pub(crate) fn pods(&self) -> BTreeSet<String> {
        let mut pods: BTreeSet<String> = self.devices.pods().into_iter().collect();
        pods.extend(self.cpu().pods());
        pods.extend(self.memory().pods());
        pods
    }

    /// The processors and the NUMA nodes for a container that is to start.
    pub(crate) fn cpus(&self, pod: &str, container: &str) -> Option<ContainerCpus> {
        let mems: CpuSet = self.memory().nodes_of(pod, container).into_iter().collect();
        let state = self.cpu();
        let set = state.of(pod, container).map(ToString::to_string).unwrap_or_default();
        let exclusive = state.exclusive(pod, container).is_some();
        (!set.is_empty() || !mems.is_empty()).then(|| ContainerCpus {
            set,
            exclusive,
            mems: mems.to_string(),
        })
    }

    /// The memory of a container that comes from certain NUMA nodes.
    pub(crate) fn memory_blocks(&self, pod: &str, container: &str) -> Vec<MemoryBlock> {
        self.memory().blocks(pod, container).map(<[MemoryBlock]>::to_vec).unwrap_or_default()
    }

    /// Memory of each NUMA node that containers may have.
    pub(crate) fn allocatable_memory(&self) -> Vec<MemoryBlock> {
        self.memory().allocatable()
    }

    /// True if memory is given from certain NUMA nodes: its amount cannot change then.
    pub(crate) fn has_static_memory(&self) -> bool {
        self.memory().is_static()
    }

    /// The processors that are a container's own, and those that could be.
    pub(crate) fn exclusive(&self, pod: &str, container: &str) -> Vec<i64> {
        self.cpu().exclusive(pod, container).into_iter().flat_map(CpuSet::iter).map(i64::from).collect()
    }

    pub(crate) fn allocatable_cpus(&self) -> Vec<i64> {
        let state = self.cpu();
        match state.is_static() {
            true => state.allocatable().iter().map(i64::from).collect(),
            false => Vec::new(),
        }
    }

    /// A pod with processors of its own has no quota.
    pub(crate) fn has_exclusive(&self, pod: &str) -> bool {
        self.cpu().has_exclusive(pod)
    }

    /// True if processors are given to containers one by one: their number cannot change then.
    pub(crate) fn is_static(&self) -> bool {
        self.cpu().is_static()
    }

    /// A container has started: its shared processors may have changed meanwhile.
    pub(crate) fn started(&self) {
        if self.is_static() {
            self.changed.notify_one();
        }
    }

    /// The pod has ended.
    pub(crate) async fn release(&self, pod: &str) {
        self.devices.release(pod).await;
        let (released, freed) = (self.cpu().release(pod), self.memory().release(pod));
        self.after_release(released, freed).await;
    }

    /// Frees the resources of pods that do not exist any longer.
    pub(crate) async fn retain(&self, live: &BTreeSet<String>) {
        self.devices.retain(live).await;
        let (released, freed) = (self.cpu().retain(live), self.memory().retain(live));
        self.after_release(released, freed).await;
    }

    async fn after_release(&self, released: bool, freed: bool) {
        if freed && let Err(error) = self.save_memory().await {
            tracing::warn!(%error, "could not write the memory manager's state; the next change tries again");
        }
        if !released {
            return;
        }
        if let Err(error) = self.save().await {
            tracing::warn!(%error, "could not write the CPU manager's state; the next change tries again");
        }
        self.changed.notify_one();
    }

    async fn save(&self) -> io::Result<()> {
        let _last = self.saving.lock().await;
        let (path, bytes) = (self.path.clone(), self.cpu().file());
        let written = tokio::task::spawn_blocking(move || state_file::write(&path, &bytes)).await;
        written.unwrap_or_else(|e| Err(io::Error::other(e)))
    }

    async fn save_memory(&self) -> io::Result<()> {
        let _last = self.saving.lock().await;
        let (path, bytes) = (self.memory_path.clone(), self.memory().file());
        let written = tokio::task::spawn_blocking(move || state_file::write(&path, &bytes)).await;
        written.unwrap_or_else(|e| Err(io::Error::other(e)))
    }

    /// Keeps running containers on the processors that are theirs, until the scope ends.
    pub(crate) async fn follow(self: Arc<Self>, runtime: Arc<dyn RuntimeService>) {
        if !self.is_static() {
            return;
        }
        let mut applied: BTreeMap<String, String> = BTreeMap::new();
        loop {
            if let Err(error) = self.reconcile(&*runtime, &mut applied).await {
                tracing::warn!(%error, "could not keep containers on their processors; will try again");
            }
            tokio::select! {
                () = self.changed.notified() => {}
                () = tokio::time::sleep(self.settings.cpu_reconcile_period) => {}
            }
        }
    }

    async fn reconcile(
        &self,
        runtime: &dyn RuntimeService,
        applied: &mut BTreeMap<String, String>,
    ) -> ferrite_cri::Result<()> {
        let state = ContainerStateValue { state: ContainerState::ContainerRunning.into() };
        let filter = ContainerFilter { state: Some(state), ..ContainerFilter::default() };
        let request = ListContainersRequest { filter: Some(filter) };
        let running = runtime.list_containers(request).await?.containers;
        applied.retain(|id, _| running.iter().any(|container| container.id == *id));
        let mut failed = None;
        for container in running {
            let text = |key: &str| container.labels.get(key).map(String::as_str).unwrap_or_default();
            let Some(cpus) = self.cpus(text(labels::POD_UID), text(labels::CONTAINER_NAME)) else { continue };
            if cpus.set.is_empty() || applied.get(&container.id) == Some(&cpus.set) {
                continue;
            }
            let linux = LinuxContainerResources { cpuset_cpus: cpus.set.clone(), ..Default::default() };
            let request = UpdateContainerResourcesRequest {
                container_id: container.id.clone(),
                linux: Some(linux),
                ..Default::default()
            };
            match runtime.update_container_resources(request).await {
                Ok(_) => drop(applied.insert(container.id, cpus.set)),
                Err(e) => failed = Some(e),
            }
        }
        failed.map_or(Ok(()), Err)
    }
}

/// The need of containers at one time: those that run beside one another, or the most that an init
/// container needs.
pub(crate) fn at_once(containers: &[PodContainer], need: impl Fn(&PodContainer) -> usize) -> usize {
    let (mut sidecars, mut init, mut regular) = (0, 0, 0);
    for container in containers {
        match container.kind {
            ContainerKind::Init if container.is_sidecar() => sidecars += need(container),
            ContainerKind::Init => init = init.max(sidecars + need(container)),
            ContainerKind::Regular => regular += need(container),
            ContainerKind::Ephemeral => {}
        }
    }
    init.max(sidecars + regular)
}

#[cfg(test)]
mod tests;
