//! The CPU manager's state and decisions: which processors are exclusive, and which all others share.

use super::assign::{self, AssignError, Spread};
use super::cpuset::{CpuSet, CpuSetError};
use super::hint::{Hint, Hints};
use super::machine::CpuTopology;
use super::mask::NumaMask;
use crate::pod::model::{self, ContainerKind, PodContainer, PodId, QosClass};
use crate::quantity;
use crate::state_file::{self, go_map};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The name of the state file, in the kubelet's root.
pub(crate) const FILE: &str = "cpu_manager_state";

/// The static policy's options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    pub full_pcpus_only: bool,
    pub distribute_cpus_across_numa: bool,
    pub align_by_socket: bool,
    pub distribute_cpus_across_cores: bool,
    pub strict_cpu_reservation: bool,
    pub prefer_align_cpus_by_uncorecache: bool,
}

/// The CPU manager policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpuPolicy {
    #[default]
    None,
    Static(CpuOptions),
}

/// Which gate an option of the static policy needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Maturity {
    Stable,
    Beta,
    Alpha,
}

type Pick = fn(&mut CpuOptions) -> &mut bool;

/// The options of the static policy, by name.
const OPTIONS: &[(&str, Maturity, Pick)] = &[
    ("full-pcpus-only", Maturity::Stable, |o| &mut o.full_pcpus_only),
    ("distribute-cpus-across-numa", Maturity::Beta, |o| &mut o.distribute_cpus_across_numa),
    ("align-by-socket", Maturity::Alpha, |o| &mut o.align_by_socket),
    ("distribute-cpus-across-cores", Maturity::Alpha, |o| &mut o.distribute_cpus_across_cores),
    ("strict-cpu-reservation", Maturity::Stable, |o| &mut o.strict_cpu_reservation),
    ("prefer-align-cpus-by-uncorecache", Maturity::Stable, |o| &mut o.prefer_align_cpus_by_uncorecache),
];

/// Options that cannot be used. The texts are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CpuOptionError {
    #[error("unknown CPU Manager Policy option: {0:?}")]
    Unknown(String),
    #[error("CPU Manager Policy Alpha-level Options not enabled, but option {0:?} provided")]
    Alpha(String),
    #[error("CPU Manager Policy Beta-level Options not enabled, but option {0:?} provided")]
    Beta(String),
    #[error("bad value for option {name:?}: {value:?} is neither true nor false")]
    Value { name: String, value: String },
    #[error("static policy options {0} and {1} can not be used at the same time")]
    Together(&'static str, &'static str),
}

impl CpuOptions {
    /// Reads options by name; `alpha` and `beta` are the gates of options that are not stable.
    pub fn parse<'a>(
        options: impl IntoIterator<Item = (&'a str, &'a str)>,
        alpha: bool,
        beta: bool,
    ) -> Result<Self, CpuOptionError> {
        let mut read = Self::default();
        for (name, value) in options {
            let known = OPTIONS.iter().find(|(known, _, _)| *known == name);
            let Some((_, maturity, pick)) = known else { return Err(CpuOptionError::Unknown(name.into())) };
            match maturity {
                Maturity::Alpha if !alpha => return Err(CpuOptionError::Alpha(name.into())),
                Maturity::Beta if !beta => return Err(CpuOptionError::Beta(name.into())),
                _ => {}
            }
            // As Go reads a boolean.
            *pick(&mut read) = match value {
                "1" | "t" | "T" | "true" | "TRUE" | "True" => true,
                "0" | "f" | "F" | "false" | "FALSE" | "False" => false,
                _ => return Err(CpuOptionError::Value { name: name.into(), value: value.into() }),
            };
        }
        let (cores, numa) = ("distribute-cpus-across-cores", "distribute-cpus-across-numa");
        let uncore = "prefer-align-cpus-by-uncorecache";
        for (first, second, both) in [
            ("full-pcpus-only", cores, read.full_pcpus_only && read.distribute_cpus_across_cores),
            (numa, cores, read.distribute_cpus_across_numa && read.distribute_cpus_across_cores),
            (uncore, cores, read.prefer_align_cpus_by_uncorecache && read.distribute_cpus_across_cores),
            (uncore, numa, read.prefer_align_cpus_by_uncorecache && read.distribute_cpus_across_numa),
        ] {
            if both {
                return Err(CpuOptionError::Together(first, second));
            }
        }
        Ok(read)
    }
}

impl CpuPolicy {
    /// The options that are on.
    pub(crate) fn options(self) -> BTreeMap<&'static str, &'static str> {
        let CpuPolicy::Static(mut options) = self else { return BTreeMap::new() };
        OPTIONS
            .iter()
            .filter(|(_, _, pick)| *pick(&mut options))
            .map(|(name, _, _)| (*name, "true"))
            .collect()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            CpuPolicy::None => "none",
            CpuPolicy::Static(_) => "static",
        }
    }
}

/// Why there are no exclusive processors. The texts are upstream's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CpuError {
    #[error(transparent)]
    Assign(#[from] AssignError),
    #[error("SMT Alignment Error: requested {requested} cpus not multiple cpus per core = {per_core}")]
    NotWhole { requested: usize, per_core: usize },
    #[error(
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {available}, requested CPUs = {requested}, CPUs per core = {per_core}"
    )]
    NoCores { requested: usize, available: usize, per_core: usize },
}

impl CpuError {
    /// The reason of a pod that is refused for it.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            CpuError::Assign(_) => "UnexpectedAdmissionError",
            CpuError::NotWhole { .. } | CpuError::NoCores { .. } => "SMTAlignmentError",
        }
    }
}

/// Why the CPU manager cannot start.
#[derive(Debug, thiserror::Error)]
pub enum CpuStartError {
    #[error("the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero")]
    NothingReserved,
    #[error("unable to reserve the required amount of CPUs (size of {reserved} did not equal {count})")]
    Reserved { reserved: String, count: usize },
    #[error("the state file is no JSON of a CPU manager: {0}")]
    Form(String),
    #[error("the state file is corrupted: its checksum is wrong")]
    Checksum,
    #[error("configured policy {configured:?} differs from state checkpoint policy {found:?}")]
    Policy { configured: &'static str, found: String },
    #[error(transparent)]
    Set(#[from] CpuSetError),
    #[error("{0}")]
    Invalid(String),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Checkpoint {
    policy_name: String,
    default_cpu_set: String,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, BTreeMap<String, String>>,
    checksum: u64,
}

impl Checkpoint {
    fn sum(&self) -> u64 {
        let pods = self.entries.iter().map(|(pod, containers)| (pod, go_map(containers.clone())));
        state_file::checksum(&format!(
            "(*state.CPUManagerCheckpoint){{PolicyName:(string){} DefaultCPUSet:(string){} \
             Entries:(map[string]map[string]string){} Checksum:(checksum.Checksum)0}}",
            self.policy_name,
            self.default_cpu_set,
            go_map(pods)
        ))
    }
}

/// By UID of the pod and name of the container.
type Assignments = BTreeMap<String, BTreeMap<String, CpuSet>>;

#[derive(Debug, Clone)]
pub(crate) struct CpuState {
    policy: CpuPolicy,
    topology: CpuTopology,
    /// For the system; shared, unless they are strictly reserved.
    reserved: CpuSet,
    /// All threads of the reserved cores.
    reserved_cores: CpuSet,
    shared: CpuSet,
    assigned: Assignments,
}

impl CpuState {
    /// The state at the kubelet's start. `reserved` names processors, or `reserved_milli` says how many.
    pub(crate) fn start(
        policy: CpuPolicy,
        topology: CpuTopology,
        reserved: &CpuSet,
        reserved_milli: i64,
        file: Option<&[u8]>,
    ) -> Result<Self, CpuStartError> {
        let empty = CpuSet::default();
        let mut state = Self {
            policy,
            topology,
            reserved: empty.clone(),
            reserved_cores: empty.clone(),
            shared: empty,
            assigned: Assignments::new(),
        };
        if let CpuPolicy::Static(options) = policy {
            state.reserve(reserved, reserved_milli, options)?;
        }
        if let Some(bytes) = file {
            state.restore(bytes)?;
        }
        if let CpuPolicy::Static(options) = policy {
            state.check(options)?;
        }
        Ok(state)
    }

    fn reserve(&mut self, named: &CpuSet, milli: i64, options: CpuOptions) -> Result<(), CpuStartError> {
        let count = usize::try_from(milli).unwrap_or(0).div_ceil(1000);
        if count == 0 {
            return Err(CpuStartError::NothingReserved);
        }
        let all = self.topology.all();
        let reserved = match named.is_empty() {
            true => self.take(&all, count, options).unwrap_or_default(),
            false => named.intersection(&all),
        };
        if reserved.len() != count {
            return Err(CpuStartError::Reserved { reserved: reserved.to_string(), count });
        }
        let cores: BTreeSet<u32> =
            reserved.iter().filter_map(|id| Some(self.topology.cpus.get(&id)?.core)).collect();
        self.reserved_cores = self.topology.select(|_, cpu| cores.contains(&cpu.core));
        self.reserved = reserved;
        Ok(())
    }

    fn restore(&mut self, bytes: &[u8]) -> Result<(), CpuStartError> {
        let found: Checkpoint =
            ferrite_json::from_slice(bytes).map_err(|e| CpuStartError::Form(e.to_string()))?;
        // As upstream: files of old kubelets have no checksum.
        if found.checksum != 0 && found.checksum != found.sum() {
            return Err(CpuStartError::Checksum);
        }
        if found.policy_name != self.policy.name() {
            return Err(CpuStartError::Policy { configured: self.policy.name(), found: found.policy_name });
        }
        self.shared = found.default_cpu_set.parse()?;
        for (pod, containers) in found.entries {
            let parsed: Result<BTreeMap<String, CpuSet>, CpuSetError> =
                containers.into_iter().map(|(name, cpus)| Ok((name, cpus.parse()?))).collect();
            self.assigned.insert(pod, parsed?);
        }
        Ok(())
    }

    /// The file must speak of this machine and of these reservations.
    fn check(&mut self, options: CpuOptions) -> Result<(), CpuStartError> {
        let invalid = |problem: String| Err(CpuStartError::Invalid(problem));
        let mut all = self.topology.all();
        if options.strict_cpu_reservation {
            all = all.difference(&self.reserved);
        }
        if self.shared.is_empty() {
            if !self.assigned.is_empty() {
                return invalid("default cpuset cannot be empty".into());
            }
            self.shared = all;
            return Ok(());
        }
        let (reserved, shared) = (&self.reserved, &self.shared);
        let common = reserved.intersection(shared);
        if options.strict_cpu_reservation && !common.is_empty() {
            return invalid(format!(
                "some of strictly reserved cpus: \"{common}\" are present in defaultCpuSet: \"{shared}\""
            ));
        }
        if !options.strict_cpu_reservation && common != *reserved {
            return invalid(format!(
                "not all reserved cpus: \"{reserved}\" are present in defaultCpuSet: \"{shared}\""
            ));
        }
        let mut known = shared.clone();
        for (pod, containers) in &self.assigned {
            for (container, cpus) in containers {
                if !shared.intersection(cpus).is_empty() {
                    return invalid(format!(
                        "pod: {pod}, container: {container} cpuset: \"{cpus}\" overlaps with default cpuset \"{shared}\""
                    ));
                }
                known = known.union(cpus);
            }
        }
        match known == all {
            true => Ok(()),
            false => invalid(format!(
                "current set of available CPUs \"{all}\" doesn't match with CPUs in state \"{known}\""
            )),
        }
    }

    pub(crate) fn file(&self) -> Vec<u8> {
        let entries = |containers: &BTreeMap<String, CpuSet>| {
            containers.iter().map(|(name, cpus)| (name.clone(), cpus.to_string())).collect()
        };
        let mut checkpoint = Checkpoint {
            policy_name: self.policy.name().into(),
            default_cpu_set: self.shared.to_string(),
            entries: self.assigned.iter().map(|(pod, all)| (pod.clone(), entries(all))).collect(),
            checksum: 0,
        };
        checkpoint.checksum = checkpoint.sum();
        ferrite_json::to_vec(&checkpoint).unwrap_or_default()
    }

    pub(crate) fn is_static(&self) -> bool {
        self.policy != CpuPolicy::None
    }

    pub(crate) fn topology(&self) -> &CpuTopology {
        &self.topology
    }

    /// The processors that pods may have for themselves.
    pub(crate) fn allocatable(&self) -> CpuSet {
        self.topology.all().difference(&self.reserved)
    }

    pub(crate) fn exclusive(&self, pod: &str, container: &str) -> Option<&CpuSet> {
        self.assigned.get(pod)?.get(container)
    }

    /// UIDs of pods that have processors of their own.
    pub(crate) fn pods(&self) -> Vec<String> {
        self.assigned.keys().cloned().collect()
    }

    pub(crate) fn has_exclusive(&self, pod: &str) -> bool {
        self.assigned.contains_key(pod)
    }

    /// The processors that a container runs on; none if it runs on all.
    pub(crate) fn of(&self, pod: &str, container: &str) -> Option<&CpuSet> {
        let cpus = self.exclusive(pod, container).unwrap_or(&self.shared);
        (self.is_static() && !cpus.is_empty()).then_some(cpus)
    }

    /// Number of processors that a container gets for itself.
    pub(crate) fn wanted(&self, pod: &Pod, container: &PodContainer) -> usize {
        let of_pod = model::spec(pod).resources.is_some();
        if !self.is_static()
            || of_pod
            || container.kind == ContainerKind::Ephemeral
            || model::qos_class(pod) != QosClass::Guaranteed
        {
            return 0;
        }
        let resources = container.spec.resources.as_ref();
        let amount = |list: Option<&BTreeMap<_, _>>| quantity::milli_of(list, "cpu");
        let milli = resources
            .and_then(|r| amount(r.requests.as_ref()).or_else(|| amount(r.limits.as_ref())))
            .unwrap_or(0);
        if milli % 1000 == 0 { usize::try_from(milli / 1000).unwrap_or(0) } else { 0 }
    }

    fn take(&self, from: &CpuSet, count: usize, options: CpuOptions) -> Result<CpuSet, AssignError> {
        let group = if options.full_pcpus_only { self.topology.cpus_per_core() } else { 1 };
        let spread = Spread {
            across_numa: options.distribute_cpus_across_numa,
            across_cores: options.distribute_cpus_across_cores,
            uncore: options.prefer_align_cpus_by_uncorecache,
            group,
        };
        assign::take(&self.topology, from, count, spread)
    }

    /// Gives a container processors of its own, near to `affinity`. `reusable` are those of init containers that have
    /// ended by then.
    pub(crate) fn allocate(
        &mut self,
        pod: &Pod,
        container: &PodContainer,
        affinity: Option<NumaMask>,
        reusable: &CpuSet,
    ) -> Result<(), CpuError> {
        let CpuPolicy::Static(options) = self.policy else { return Ok(()) };
        let count = self.wanted(pod, container);
        if count == 0 {
            return Ok(());
        }
        if options.full_pcpus_only {
            let per_core = self.topology.cpus_per_core();
            if !count.is_multiple_of(per_core) {
                return Err(CpuError::NotWhole { requested: count, per_core });
            }
            let available = self.shared.difference(&self.reserved_cores).len();
            if count > available && self.exclusive(&PodId::of(pod).uid, container.name()).is_none() {
                return Err(CpuError::NoCores { requested: count, available, per_core });
            }
        }
        let uid = PodId::of(pod).uid;
        if self.exclusive(&uid, container.name()).is_some() {
            return Ok(());
        }
        let free = self.shared.difference(&self.reserved).union(reusable);
        let mut taken = CpuSet::default();
        if let Some(affinity) = affinity {
            let near = match options.align_by_socket {
                true => {
                    let sockets = self.topology.sockets_in(affinity);
                    self.topology.select(|_, cpu| sockets.contains(&cpu.socket))
                }
                false => self.topology.in_mask(affinity),
            };
            let near = free.intersection(&near);
            taken = self.take(&near, count.min(near.len()), options)?;
        }
        let rest = self.take(&free.difference(&taken), count - taken.len(), options)?;
        let taken = taken.union(&rest);
        self.shared = self.shared.difference(&taken);
        self.assigned.entry(uid).or_default().insert(container.name().to_owned(), taken);
        Ok(())
    }

    /// The pod has ended. Returns true if it had processors of its own.
    pub(crate) fn release(&mut self, pod: &str) -> bool {
        let Some(containers) = self.assigned.remove(pod) else { return false };
        for cpus in containers.values() {
            self.shared = self.shared.union(cpus);
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

    /// The nodes from which a container, or a whole pod, could have `count` processors.
    pub(crate) fn hints(&self, count: usize, has: Option<&CpuSet>, reusable: &CpuSet) -> Hints {
        let CpuPolicy::Static(options) = self.policy else { return None };
        if count == 0 {
            return None;
        }
        match has {
            Some(has) if has.len() != count => Some(Vec::new()),
            Some(has) => Some(self.hints_among(has, &CpuSet::default(), count, options)),
            None => {
                let free = self.shared.difference(&self.reserved);
                Some(self.hints_among(&free, reusable, count, options))
            }
        }
    }

    fn hints_among(&self, free: &CpuSet, reusable: &CpuSet, count: usize, options: CpuOptions) -> Vec<Hint> {
        let nodes = self.topology.numa_nodes();
        let (mut fewest, mut masks) = (nodes.len(), Vec::new());
        for mask in NumaMask::combinations(&nodes) {
            let members = self.topology.in_mask(mask);
            if members.len() >= count {
                fewest = fewest.min(mask.count());
            }
            let matching = free.union(reusable).intersection(&members).len();
            if reusable.is_subset(&members) && matching >= count {
                masks.push(mask);
            }
        }
        let sockets = self.topology.sockets().len().max(1);
        let per_socket = nodes.len() / sockets;
        let aligned = |mask: NumaMask| {
            options.align_by_socket
                && per_socket > 0
                && self.topology.sockets_in(mask).len() == fewest.div_ceil(per_socket)
        };
        let hint = |mask: NumaMask| Hint {
            affinity: Some(mask),
            preferred: mask.count() == fewest || aligned(mask),
        };
        masks.into_iter().map(hint).collect()
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
