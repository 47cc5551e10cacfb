//! `ferrite explain-schedule`: why a pod goes where it goes, or why it waits.

use crate::apiserver::BoxError;
use crate::kube_scheduler::CONFIGURATION;
use ferrite_client::{Api, ObjectKey};
use ferrite_component::read_config;
use ferrite_scheduler::cache::Cache;
use ferrite_scheduler::configuration::v1::KubeSchedulerConfiguration;
use ferrite_scheduler::explain::explain;
use ferrite_scheduler::extender::Extender;
use ferrite_scheduler::framework::Handle;
use ferrite_scheduler::siblings::{Owner, siblings};
use ferrite_scheduler::snapshot::{PodInfo, Snapshot};
use ferrite_scheduler::{Configuration, Framework, Profile, Registry};
use k8s_openapi::api::apps::v1::{ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{
    Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, ReplicationController, Service,
};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass, VolumeAttachment};
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// A manifest is a few lines: more is not read.
const LONGEST_MANIFEST: u64 = 1 << 20;

/// Flags of explain-schedule.
#[derive(Debug, clap::Args)]
pub struct ExplainSchedule {
    /// The pod, as `pod/NAME` or `NAME`. A pod that has its node already is explained as if it had none.
    #[arg(value_name = "POD", required_unless_present = "filename")]
    pod: Option<String>,
    /// A file with a pod that need not exist.
    #[arg(short = 'f', long, value_name = "FILE", conflicts_with = "pod")]
    filename: Option<PathBuf>,
    /// Namespace of the pod.
    #[arg(short = 'n', long, default_value = "default", value_name = "NAMESPACE")]
    namespace: String,
    /// Configuration file of the scheduler that the pod asks for: a KubeSchedulerConfiguration. Without it the profile is the
    /// default one, which the scheduler of `ferrite up` and `ferrite server` has.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Kubeconfig file; the usual one without it.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
enum ExplainError {
    #[error("there is no pod {0}")]
    NoPod(ObjectKey),
    #[error("the configuration has no profile {wanted:?}; it has {}", .known.join(", "))]
    NoProfile { wanted: String, known: Vec<String> },
    #[error("{} is larger than a pod can be", .0.display())]
    TooLarge(PathBuf),
    #[error("{} is no pod: {problem}", .path.display())]
    NoManifest { path: PathBuf, problem: String },
}

fn read_manifest(path: &Path) -> Result<Pod, BoxError> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(LONGEST_MANIFEST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > LONGEST_MANIFEST {
        return Err(ExplainError::TooLarge(path.to_owned()).into());
    }
    let invalid = |problem: String| ExplainError::NoManifest { path: path.to_owned(), problem };
    let value: ferrite_json::Value =
        serde_saphyr::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    if value["kind"].as_str() != Some("Pod") {
        return Err(invalid("its kind is not Pod".to_owned()).into());
    }
    Ok(ferrite_json::from_value(value).map_err(|error| invalid(error.to_string()))?)
}

fn is_finished(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// The nodes with the pods on them, and the nominated pods; `without` is left out.
fn snapshot(nodes: Vec<Node>, pods: &[Pod], without: &ObjectKey) -> Snapshot {
    let mut cache = Cache::new();
    nodes.into_iter().for_each(|node| cache.set_node(Arc::new(node)));
    for pod in pods.iter().filter(|pod| !is_finished(pod) && ObjectKey::of(*pod) != *without) {
        let info = Arc::new(PodInfo::new(pod));
        let named = |name: &&str| !name.is_empty();
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).filter(named);
        let nomination = pod.status.as_ref().and_then(|status| status.nominated_node_name.as_deref());
        match (node, nomination.filter(named)) {
            (Some(node), _) => cache.set_pod(info, node),
            (None, Some(node)) => cache.nominate(info, node),
            (None, None) => {}
        }
    }
    let mut snapshot = Snapshot::default();
    cache.update(&mut snapshot);
    snapshot
}

/// The profile of the configuration that the pod's scheduler has, and a remark for people if nobody knows that profile.
fn profile_of<'c>(
    configuration: &'c Configuration,
    is_given: bool,
    pod: &PodInfo,
) -> Result<(&'c Profile, Option<String>), ExplainError> {
    let wanted = pod.scheduler_name();
    let profiles = &configuration.profiles;
    if let Some(found) = profiles.iter().find(|profile| profile.scheduler_name == wanted) {
        return Ok((found, None));
    }
    match profiles.first() {
        Some(default) if !is_given => {
            let remark = format!(
                "The configuration of the scheduler {wanted:?} is not known: this is how the default profile decides. \
                 --config names its file."
            );
            Ok((default, Some(remark)))
        }
        _ => {
            let known = profiles.iter().map(|profile| profile.scheduler_name.clone()).collect();
            Err(ExplainError::NoProfile { wanted: wanted.to_owned(), known })
        }
    }
}

/// A client with the credentials of a kubeconfig, or of the usual one.
pub async fn client_of(kubeconfig: Option<&Path>) -> Result<kube::Client, BoxError> {
    let config = match kubeconfig {
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path)?;
            kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
        None => kube::Config::infer().await?,
    };
    Ok(kube::Client::try_from(config)?)
}

impl ExplainSchedule {
    pub async fn run(self) -> Result<ExitCode, BoxError> {
        let client = client_of(self.kubeconfig.as_deref()).await?;
        let everything = ListParams::default();
        macro_rules! all {
            ($kind:ty) => {
                Api::<$kind>::all(client.clone()).list(&everything).await?.items
            };
        }
        let configuration = match &self.config {
            Some(path) => read_config::<KubeSchedulerConfiguration>(path, CONFIGURATION)?.resolve()?,
            None => Configuration::default(),
        };
        let mut pods = all!(Pod);
        let mut pod = match (&self.filename, &self.pod) {
            (Some(path), _) => {
                let mut pod = read_manifest(path)?;
                pod.metadata.namespace.get_or_insert_with(|| self.namespace.clone());
                pod
            }
            (None, name) => {
                let name = name.as_deref().unwrap_or_default();
                let name = name.strip_prefix("pod/").or_else(|| name.strip_prefix("pods/")).unwrap_or(name);
                let key = ObjectKey::new(self.namespace.as_str(), name);
                let found = pods.iter().find(|pod| ObjectKey::of(*pod) == key).cloned();
                found.ok_or(ExplainError::NoPod(key))?
            }
        };
        if let Some(spec) = &mut pod.spec {
            spec.node_name = None;
        }
        let key = ObjectKey::of(&pod);
        pods.retain(|other| ObjectKey::of(other) != key);
        pods.push(pod.clone());
        let nodes = all!(Node);
        let snapshot = snapshot(nodes.clone(), &pods, &key);
        let handle = Handle::default()
            .with_objects(pods)
            .with_objects(nodes)
            .with_objects(all!(Namespace))
            .with_objects(all!(ResourceClaim))
            .with_objects(all!(ResourceSlice))
            .with_objects(all!(DeviceClass))
            .with_objects(all!(PersistentVolumeClaim))
            .with_objects(all!(PersistentVolume))
            .with_objects(all!(StorageClass))
            .with_objects(all!(CSINode))
            .with_objects(all!(CSIDriver))
            .with_objects(all!(CSIStorageCapacity))
            .with_objects(all!(VolumeAttachment))
            .with_objects(all!(PodDisruptionBudget));
        let pod = PodInfo::new(&pod);
        let (profile, remark) = profile_of(&configuration, self.config.is_some(), &pod)?;
        let framework = Framework::new(profile, &Registry::default(), &handle)?;
        let mut extenders = Vec::new();
        for settings in &configuration.extenders {
            extenders.push(Extender::new(settings, handle.lister()).await?);
        }
        let siblings = {
            let (services, replica_sets, stateful_sets) =
                (all!(Service), all!(ReplicaSet), all!(StatefulSet));
            let controllers = all!(ReplicationController);
            let key_of = |kind: &str| {
                let (owner, name) = pod.controller.as_deref()?;
                (owner == kind).then(|| ObjectKey::new(pod.key.namespace.clone(), name.clone()))
            };
            let replica_set = key_of("ReplicaSet");
            let stateful_set = key_of("StatefulSet");
            let controller = key_of("ReplicationController");
            let owner = Owner {
                replica_set: replica_sets.iter().find(|set| Some(ObjectKey::of(*set)) == replica_set),
                stateful_set: stateful_sets.iter().find(|set| Some(ObjectKey::of(*set)) == stateful_set),
                replication_controller: controllers
                    .iter()
                    .find(|one| Some(ObjectKey::of(*one)) == controller),
            };
            let namespace = Some(pod.key.namespace.as_str());
            let here = services.iter().filter(|service| service.metadata.namespace.as_deref() == namespace);
            siblings(pod.labels(), here, owner)
        };
        let pod = pod.with_siblings(siblings);
        if let Some(remark) = remark {
            println!("{remark}\n");
        }
        print!("{}", explain(&framework, &snapshot, &extenders, &pod).await);
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_is_the_one_that_the_pod_asks_for() {
        let pod = |scheduler: &str| {
            let mut pod = Pod::default();
            pod.spec.get_or_insert_default().scheduler_name = Some(scheduler.to_owned());
            PodInfo::new(&pod)
        };
        let mut configuration = Configuration::default();
        configuration.profiles.push(Profile { scheduler_name: "second".to_owned(), ..Profile::default() });
        let name = |configuration: &Configuration, is_given: bool, scheduler: &str| {
            let (profile, remark) = profile_of(configuration, is_given, &pod(scheduler)).ok()?;
            Some((profile.scheduler_name.clone(), remark.is_some()))
        };
        let found = |name: &str, has_remark: bool| Some((name.to_owned(), has_remark));
        assert_eq!(name(&configuration, true, "second"), found("second", false));
        assert_eq!(name(&configuration, true, "third"), None);
        let default = Configuration::default();
        assert_eq!(name(&default, false, "default-scheduler"), found("default-scheduler", false));
        assert_eq!(name(&default, false, "third"), found("default-scheduler", true));
    }
}
