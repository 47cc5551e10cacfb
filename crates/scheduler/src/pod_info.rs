//! Pods as the scheduling cycle sees them.

use std::borrow::Cow;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;

use ferrite_client::resource_claims::{self, Named};
use ferrite_client::{ObjectKey, controller_of};
use ferrite_json::Text;
use k8s_openapi::api::core::v1::{
    NodeAffinity, ObjectReference, Pod, PodSpec, PodStatus, Toleration, TopologySpreadConstraint, Volume,
};
use kube::core::Selector;

use crate::affinity_terms::AffinityTerms;
use crate::resources::{Resources, non_zero_requests, pod_requests};
use crate::snapshot::PREEMPTION_BY_SCHEDULER;

/// A host port a pod wants for itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort {
    pub ip: String,
    pub protocol: String,
    pub port: i32,
}

impl HostPort {
    /// The same port and protocol, on one address or on all.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        self.port == other.port
            && self.protocol == other.protocol
            && (self.ip == other.ip || self.ip == "0.0.0.0" || other.ip == "0.0.0.0")
    }
}

/// The scheduler of pods that name none.
pub const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// The members of a pod's spec that decide where it may run, as they stand in the object.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Placement {
    pub scheduler_name: Option<String>,
    pub node_selector: Option<BTreeMap<String, String>>,
    pub node_affinity: Option<Box<NodeAffinity>>,
    pub tolerations: Vec<Toleration>,
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    pub preemption_policy: Option<String>,
    pub is_gated: bool,
    /// Features that the kubelet must have declared.
    pub node_features: Vec<&'static str>,
}

/// The features of the kubelet that the pod needs.
fn node_features(spec: &PodSpec) -> Vec<&'static str> {
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let mut rules = containers.flat_map(|container| container.restart_policy_rules.iter().flatten());
    let mut features = Vec::new();
    if rules.any(|rule| rule.action == "RestartAllContainers") {
        features.push("RestartAllContainersOnContainerExits");
    }
    if spec.host_network == Some(true) && spec.host_users == Some(false) {
        features.push("UserNamespacesHostNetworkSupport");
    }
    features
}

impl Placement {
    fn new(spec: &PodSpec) -> Self {
        let node_affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.clone());
        Self {
            scheduler_name: spec.scheduler_name.clone().filter(|name| name != DEFAULT_SCHEDULER),
            node_selector: spec.node_selector.clone(),
            node_affinity: node_affinity.map(Box::new),
            tolerations: spec.tolerations.clone().unwrap_or_default(),
            topology_spread_constraints: spec.topology_spread_constraints.clone().unwrap_or_default(),
            preemption_policy: spec.preemption_policy.clone(),
            is_gated: spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty()),
            node_features: node_features(spec),
        }
    }
}

/// A disk that pods on one node cannot share, unless all of them only read it.
#[derive(Debug, Clone, PartialEq)]
pub enum Disk {
    GcePersistentDisk {
        name: String,
        read_only: bool,
    },
    /// Not even readers share it.
    AwsElasticBlockStore {
        volume: String,
    },
    Iscsi {
        iqn: String,
        read_only: bool,
    },
    Rbd {
        monitors: Vec<String>,
        pool: String,
        image: String,
        read_only: bool,
    },
}

impl Disk {
    fn of(volume: &Volume) -> Option<Self> {
        if let Some(disk) = &volume.gce_persistent_disk {
            let read_only = disk.read_only.unwrap_or(false);
            return Some(Self::GcePersistentDisk { name: disk.pd_name.clone(), read_only });
        }
        if let Some(disk) = &volume.aws_elastic_block_store {
            return Some(Self::AwsElasticBlockStore { volume: disk.volume_id.clone() });
        }
        if let Some(disk) = &volume.iscsi {
            return Some(Self::Iscsi { iqn: disk.iqn.clone(), read_only: disk.read_only.unwrap_or(false) });
        }
        let disk = volume.rbd.as_ref()?;
        Some(Self::Rbd {
            monitors: disk.monitors.clone(),
            pool: disk.pool.clone().unwrap_or_else(|| "rbd".to_owned()),
            image: disk.image.clone(),
            read_only: disk.read_only.unwrap_or(false),
        })
    }

    /// The same disk, and not both only read it.
    pub fn conflicts_with(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::GcePersistentDisk { name, read_only },
                Self::GcePersistentDisk { name: other, read_only: other_reads },
            ) => name == other && !(*read_only && *other_reads),
            (Self::AwsElasticBlockStore { volume }, Self::AwsElasticBlockStore { volume: other }) => {
                volume == other
            }
            (Self::Iscsi { iqn, read_only }, Self::Iscsi { iqn: other, read_only: other_reads }) => {
                iqn == other && !(*read_only && *other_reads)
            }
            (
                Self::Rbd { monitors, pool, image, read_only },
                Self::Rbd { monitors: others, pool: other_pool, image: other_image, read_only: other_reads },
            ) => {
                monitors.iter().any(|monitor| others.contains(monitor))
                    && pool == other_pool
                    && image == other_image
                    && !(*read_only && *other_reads)
            }
            _ => false,
        }
    }
}

/// The volumes of a pod that matter to scheduling.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodVolumes {
    claims: Vec<String>,
    /// Volumes whose claim is made for the pod and named after both.
    ephemeral: Vec<String>,
    disks: Vec<Disk>,
}

impl PodVolumes {
    /// None for the many pods that have no such volumes.
    fn new(spec: &PodSpec) -> Option<Box<Self>> {
        let mut volumes = Self::default();
        for volume in spec.volumes.iter().flatten() {
            if let Some(claim) = &volume.persistent_volume_claim {
                volumes.claims.push(claim.claim_name.clone());
            } else if volume.ephemeral.is_some() {
                volumes.ephemeral.push(volume.name.clone());
            } else {
                volumes.disks.extend(Disk::of(volume));
            }
        }
        (volumes != Self::default()).then(|| Box::new(volumes))
    }
}

/// The image's name with its tag; `latest` if it has none.
fn normalized_image(name: &str) -> String {
    if name.rfind(':') <= name.rfind('/') { format!("{name}:latest") } else { name.to_owned() }
}

fn images(spec: &PodSpec) -> Vec<String> {
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let images = containers.filter_map(|container| container.image.as_deref());
    let volumes =
        spec.volumes.iter().flatten().filter_map(|volume| volume.image.as_ref()?.reference.as_deref());
    images.chain(volumes).filter(|image| !image.is_empty()).map(normalized_image).collect()
}

/// The part of a pod that all pods of one template have in common.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodShape {
    pub placement: Placement,
    pub requests: Resources,
    /// CPU (thousandths) and memory, with a modest amount for each container that asks for none.
    pub non_zero_requests: (i64, i64),
    pub host_ports: Vec<HostPort>,
    pub priority: i32,
    pub affinity: AffinityTerms,
    pub anti_affinity: AffinityTerms,
    /// Names of the images of all containers and volumes, with tags.
    pub images: Vec<String>,
    /// The number of containers, init containers included.
    pub containers: usize,
    volumes: Option<Box<PodVolumes>>,
    labels: BTreeMap<String, String>,
}

impl PodShape {
    fn new(pod: &Pod) -> Self {
        let spec = pod.spec.as_ref();
        let containers = spec.into_iter().flat_map(|spec| {
            let sidecars = spec.init_containers.iter().flatten();
            spec.containers.iter().chain(sidecars.filter(|c| c.restart_policy.as_deref() == Some("Always")))
        });
        let host_ports = containers
            .flat_map(|container| container.ports.iter().flatten())
            .filter_map(|port| {
                Some(HostPort {
                    ip: port.host_ip.clone().filter(|ip| !ip.is_empty()).unwrap_or_else(|| "0.0.0.0".into()),
                    protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
                    port: port.host_port.filter(|port| *port > 0)?,
                })
            })
            .collect();
        let affinity = spec.and_then(|spec| spec.affinity.as_ref());
        let pod_affinity = affinity.and_then(|affinity| affinity.pod_affinity.as_ref());
        let requests = spec.map(|spec| pod_requests(spec, pod.status.as_ref())).unwrap_or_default();
        let pod_anti_affinity = affinity.and_then(|affinity| affinity.pod_anti_affinity.as_ref());
        Self {
            placement: spec.map(Placement::new).unwrap_or_default(),
            non_zero_requests: spec
                .map_or((0, 0), |spec| non_zero_requests(spec, pod.status.as_ref(), &requests)),
            requests,
            host_ports,
            priority: spec.and_then(|spec| spec.priority).unwrap_or(0),
            affinity: AffinityTerms::new(
                pod_affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref()),
                pod_affinity.and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref()),
                pod,
            ),
            anti_affinity: AffinityTerms::new(
                pod_anti_affinity
                    .and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref()),
                pod_anti_affinity
                    .and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref()),
                pod,
            ),
            images: spec.map(images).unwrap_or_default(),
            containers: spec
                .map_or(0, |spec| spec.containers.len() + spec.init_containers.as_ref().map_or(0, Vec::len)),
            volumes: spec.and_then(PodVolumes::new),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
        }
    }
}

/// The shapes seen last, to be shared by the pods that have them. Pods of one template arrive together.
#[derive(Debug, Default)]
pub struct Shapes(VecDeque<Arc<PodShape>>);

/// Distinct shapes that are compared before a new one is kept.
const RECENT_SHAPES: usize = 16;

impl Shapes {
    /// The pod, with a shape that it shares with others like it.
    pub fn pod(&mut self, pod: &Pod) -> PodInfo {
        let shape = PodShape::new(pod);
        let known = self.0.iter().find(|known| ***known == shape).cloned();
        let shape = known.unwrap_or_else(|| {
            let shape = Arc::new(shape);
            self.0.truncate(RECENT_SHAPES - 1);
            self.0.push_front(shape.clone());
            shape
        });
        PodInfo::with_shape(pod, shape)
    }
}

/// The ResourceClaim behind an entry of `spec.resourceClaims`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodClaim {
    Given(Text),
    /// The claim was made for this pod, which must own it.
    Generated(Text),
    /// The claim has yet to be made.
    NotCreated,
    /// The entry uses a field that is newer than this program.
    Unsupported(Text),
}

impl PodClaim {
    fn all(pod: &Pod) -> Option<Box<[Self]>> {
        let entries = resource_claims::entries(pod).iter();
        let claims: Box<[Self]> = entries
            .filter_map(|entry| match Named::of(pod, entry) {
                Named::Given(name) => Some(Self::Given(name.into())),
                Named::Generated(name) => Some(Self::Generated(name.into())),
                Named::NotNeeded => None,
                Named::NotCreated => Some(Self::NotCreated),
                Named::Unsupported => Some(Self::Unsupported(entry.name.as_str().into())),
            })
            .collect();
        (!claims.is_empty()).then_some(claims)
    }
}

/// A pod as scheduling sees it. The object itself is not kept: there may be a hundred thousand.
#[derive(Debug, Clone)]
pub struct PodInfo {
    pub key: ObjectKey,
    pub uid: Option<Text>,
    /// The node that it names. Not a part of the shape, or each pod would have its own as soon as it is bound.
    pub node_name: Option<Text>,
    /// Kind and name of the owner that controls it.
    pub controller: Option<Box<(Text, Text)>>,
    /// Selects the pods of the same Service or owner; default spreading counts them.
    pub siblings: Option<Selector>,
    /// When its node started it, in seconds; the end of time for a pod that has not started.
    started: i64,
    /// Zero if it has none.
    generation: i64,
    terminating: bool,
    /// The scheduler deletes it to make room.
    preempted: bool,
    /// None for the many pods without claims on devices.
    resource_claims: Option<Box<[PodClaim]>>,
    shape: Arc<PodShape>,
}

impl Deref for PodInfo {
    type Target = PodShape;

    fn deref(&self) -> &PodShape {
        &self.shape
    }
}

impl PodInfo {
    pub fn new(pod: &Pod) -> Self {
        Self::with_shape(pod, Arc::new(PodShape::new(pod)))
    }

    fn with_shape(pod: &Pod, shape: Arc<PodShape>) -> Self {
        let controller = controller_of(&pod.metadata);
        let status = pod.status.as_ref();
        let terminating = pod.metadata.deletion_timestamp.is_some();
        Self {
            key: ObjectKey::of(pod),
            uid: pod.metadata.uid.as_deref().map(Text::from),
            node_name: pod
                .spec
                .as_ref()
                .and_then(|spec| spec.node_name.as_deref())
                .filter(|name| !name.is_empty())
                .map(Text::from),
            controller: controller
                .map(|owner| Box::new((owner.kind.as_str().into(), owner.name.as_str().into()))),
            siblings: None,
            started: status
                .and_then(|status| status.start_time.as_ref())
                .map_or(i64::MAX, |time| time.0.as_second()),
            generation: pod.metadata.generation.unwrap_or(0),
            terminating,
            preempted: terminating && status.is_some_and(is_preempted),
            resource_claims: PodClaim::all(pod),
            shape,
        }
    }

    /// The part that it has in common with the pods of its template.
    pub fn shape(&self) -> &Arc<PodShape> {
        &self.shape
    }

    /// The same for pods that share a shape, for as long as both live.
    pub fn shape_number(&self) -> usize {
        Arc::as_ptr(&self.shape).addr()
    }

    /// The name of the scheduler that the pod asks for.
    pub fn scheduler_name(&self) -> &str {
        self.placement.scheduler_name.as_deref().unwrap_or(DEFAULT_SCHEDULER)
    }

    /// True if a change from `old` may matter to its scheduling.
    pub fn differs_from(&self, old: &Self) -> bool {
        self.resource_claims != old.resource_claims
            || !Arc::ptr_eq(&self.shape, &old.shape) && self.shape != old.shape
    }

    /// True if both are one pod, and the same in all that scheduling looks at.
    pub fn is_same(&self, other: &Self) -> bool {
        self.key == other.key
            && self.uid == other.uid
            && self.node_name == other.node_name
            && self.controller == other.controller
            && self.started == other.started
            && self.generation == other.generation
            && self.terminating == other.terminating
            && self.preempted == other.preempted
            && self.resource_claims == other.resource_claims
            && (Arc::ptr_eq(&self.shape, &other.shape) || self.shape == other.shape)
    }

    /// Its claims on devices.
    pub fn resource_claims(&self) -> &[PodClaim] {
        self.resource_claims.as_deref().unwrap_or_default()
    }

    /// A reference to the pod, as events have it.
    pub fn reference(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(self.key.namespace.to_string()),
            name: Some(self.key.name.to_string()),
            uid: self.uid.as_ref().map(ToString::to_string),
            ..ObjectReference::default()
        }
    }

    #[must_use]
    pub fn with_siblings(mut self, siblings: Option<Selector>) -> Self {
        self.siblings = siblings;
        self
    }

    pub fn labels(&self) -> &BTreeMap<String, String> {
        &self.labels
    }

    pub fn tolerations(&self) -> &[Toleration] {
        &self.placement.tolerations
    }

    /// True if it has pod affinity or anti-affinity of any kind.
    pub fn has_affinity(&self) -> bool {
        [&self.affinity, &self.anti_affinity]
            .iter()
            .any(|terms| !terms.required.is_empty() || !terms.preferred.is_empty())
    }

    /// Names of its claims, and whether each was made for this pod.
    pub fn claim_names(&self) -> impl Iterator<Item = (Cow<'_, str>, bool)> {
        let volumes = self.volumes.as_deref();
        let claims = volumes.into_iter().flat_map(|volumes| &volumes.claims);
        let ephemeral = volumes.into_iter().flat_map(|volumes| &volumes.ephemeral);
        claims
            .map(|name| (Cow::Borrowed(name.as_str()), false))
            .chain(ephemeral.map(|volume| (Cow::Owned(format!("{}-{volume}", self.key.name)), true)))
    }

    /// Disks that it does not share with every other pod.
    pub fn disks(&self) -> &[Disk] {
        self.volumes.as_deref().map(|volumes| volumes.disks.as_slice()).unwrap_or_default()
    }

    /// Its `metadata.generation`.
    pub fn generation(&self) -> Option<i64> {
        Some(self.generation).filter(|generation| *generation != 0)
    }

    pub fn is_terminating(&self) -> bool {
        self.terminating
    }

    /// True if it is being deleted because the scheduler needs its room.
    pub fn is_preempted(&self) -> bool {
        self.preempted
    }

    /// When its node started it, in seconds; the end of time for a pod that has not started.
    pub fn started(&self) -> i64 {
        self.started
    }
}

/// True if the status says that the scheduler preempts the pod.
fn is_preempted(status: &PodStatus) -> bool {
    let target = status.conditions.iter().flatten().find(|condition| condition.type_ == "DisruptionTarget");
    target.is_some_and(|target| {
        target.status == "True" && target.reason.as_deref() == Some(PREEMPTION_BY_SCHEDULER)
    })
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    #[test]
    fn a_pod_is_the_same_unless_something_changed_that_scheduling_looks_at() {
        let pod = |change: fn(&mut Value)| {
            let mut pod = json!({"metadata": {"name": "a", "namespace": "ns", "uid": "u", "generation": 1,
                    "labels": {"a": "b"}},
                "spec": {"nodeName": "n", "containers": [{"name": "c"}]}, "status": {"phase": "Running"}});
            change(&mut pod);
            PodInfo::new(&ferrite_json::from_value(pod).unwrap())
        };
        let before = pod(|_| {});
        assert!(before.is_same(&pod(|pod| pod["status"]["phase"] = json!("Pending"))));
        assert!(before.is_same(&pod(|pod| {
            pod["status"]["conditions"] = json!([{"type": "DisruptionTarget", "status": "True",
                "reason": "PreemptionByScheduler", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        })));
        let changes: [fn(&mut Value); 7] = [
            |pod| pod["metadata"]["uid"] = json!("v"),
            |pod| pod["metadata"]["generation"] = json!(2),
            |pod| pod["metadata"]["labels"]["a"] = json!("c"),
            |pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"),
            |pod| pod["spec"]["nodeName"] = json!("m"),
            |pod| pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "1"}}),
            |pod| pod["status"]["startTime"] = json!("2026-01-01T00:00:00Z"),
        ];
        for change in changes {
            assert!(!before.is_same(&pod(change)));
        }
    }
}
