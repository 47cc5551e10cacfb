//! Keeps the Node object true: registers it, reports changes at once and everything now and then.

use super::events::{self, NodeEvent};
use super::features::RuntimeFeatures;
use super::machine::Machine;
use super::status::{self, Observed};
use crate::clock::Clock;
use crate::config::Config;
use crate::devices::{Devices, is_extended_resource};
use crate::eviction::{Pressure, Pressures};
use crate::pod::writer_difference;
use crate::volumes::local_path;
use ferrite_client::{
    Api, Backoff, Change, EventRecorder, EventType, Informer, Scope, is_already_exists, is_conflict,
    is_not_found, message_of,
};
use ferrite_cri::v1::{ListImagesRequest, StatusRequest, VersionRequest};
use ferrite_cri::{ImageService, RuntimeService};
use ferrite_json::json;
use k8s_openapi::api::core::v1::{Node, NodeSpec, NodeStatus, ObjectReference, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{Patch, PatchParams, PostParams};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// Interval between status checks of a runtime that is not ready: CRI has no event for that.
const UNREADY_CHECK: Duration = Duration::from_millis(200);

/// Tells a cloud provider which addresses an administrator chose.
const PROVIDED_NODE_IP: &str = "alpha.kubernetes.io/provided-node-ip";

/// Tells if pods can run here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Readiness {
    /// Why pods with their own network cannot start.
    pub network_problem: Option<String>,
    /// Why nothing can.
    pub runtime_problem: Option<String>,
    /// The machine shuts down.
    pub shutting_down: bool,
    /// The features that the runtime reported when it last answered.
    pub features: RuntimeFeatures,
}

impl Readiness {
    fn problem(&self) -> Option<String> {
        let shutdown = self.shutting_down.then_some("node is shutting down");
        let all: Vec<&str> = [&self.runtime_problem, &self.network_problem]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .chain(shutdown)
            .collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

/// The object that events about the node refer to. As upstream, the name stands for the UID, so that events
/// outlive the object.
pub(crate) fn reference(name: &str) -> ObjectReference {
    ObjectReference {
        kind: Some("Node".into()),
        uid: Some(name.to_string()),
        name: Some(name.to_string()),
        ..ObjectReference::default()
    }
}

/// Labels that the node is registered with.
pub(crate) fn labels(config: &Config, machine: &Machine) -> BTreeMap<String, String> {
    let mut labels = config.node_labels.clone();
    labels.insert("kubernetes.io/hostname".into(), config.node_name.clone());
    labels.insert("kubernetes.io/arch".into(), machine.architecture.into());
    labels.insert("kubernetes.io/os".into(), "linux".into());
    labels
}

pub(crate) struct NodeManager {
    pub config: Arc<Config>,
    pub machine: Machine,
    pub port: u16,
    pub client: Client,
    pub runtime: Arc<dyn RuntimeService>,
    pub images: Arc<dyn ImageService>,
    pub recorder: EventRecorder,
    pub clock: Clock,
    pub readiness: watch::Sender<Readiness>,
    pub pressures: watch::Receiver<Pressures>,
    pub shutting_down: watch::Receiver<bool>,
    /// Asks for a report: an image came or went, pressure changed.
    pub refresh: Arc<Notify>,
    pub devices: Devices,
}

impl NodeManager {
    /// Registers the node and keeps reporting until the scope ends.
    pub(crate) async fn start(self, informer: &Informer<Node>, scope: &Scope) {
        self.recorder.event(
            &reference(&self.config.node_name),
            EventType::Normal,
            "Starting",
            "Starting kubelet.".to_string(),
        );
        self.register().await;
        let changed = self.refresh.clone();
        informer.subscribe(move |change: &Change<Node>| {
            // Gone: register again. Changed by others: restore our own fields.
            if !matches!(change, Change::Added(_)) {
                changed.notify_one();
            }
        });
        scope.spawn(super::lease::run(
            self.client.clone(),
            self.config.node_name.clone(),
            self.config.node_lease_duration,
            self.clock,
        ));
        let informer = informer.clone();
        scope.spawn(self.report(informer));
    }

    fn tell(&self, events: impl IntoIterator<Item = NodeEvent>) {
        let about = reference(&self.config.node_name);
        for (kind, reason, message) in events {
            self.recorder.event(&about, kind, reason, message);
        }
    }

    fn labels(&self) -> BTreeMap<String, String> {
        labels(&self.config, &self.machine)
    }

    /// Without an API server: only whether the runtime is ready matters.
    pub(crate) async fn watch_runtime(self) {
        loop {
            let ready = self.readiness.borrow().problem().is_none();
            let period = self.config.node_status_update_frequency;
            tokio::time::sleep(if ready { period } else { UNREADY_CHECK }).await;
            self.look().await;
        }
    }

    fn annotations(&self) -> BTreeMap<String, String> {
        let managed = "volumes.kubernetes.io/controller-managed-attach-detach";
        let local = local_path::published(self.config.local_volumes.as_deref());
        let provided = self.config.cloud_provider.as_ref().map(|p| &p.provided).filter(|ips| !ips.is_empty());
        let provided = provided.map(|ips| {
            let ips: Vec<String> = ips.iter().map(ToString::to_string).collect();
            (PROVIDED_NODE_IP.to_owned(), ips.join(","))
        });
        std::iter::once((managed.to_owned(), "true".to_owned())).chain(local).chain(provided).collect()
    }

    fn spec(&self) -> NodeSpec {
        // Until the cloud provider has been there, no pod is scheduled.
        let uninitialized = Taint {
            key: "node.cloudprovider.kubernetes.io/uninitialized".into(),
            value: Some("true".into()),
            effect: "NoSchedule".into(),
            time_added: None,
        };
        let uninitialized = self.config.cloud_provider.as_ref().map(|_| uninitialized);
        let taints: Vec<Taint> =
            self.config.register_with_taints.iter().cloned().chain(uninitialized).collect();
        let provider = &self.config.provider_id;
        NodeSpec {
            taints: (!taints.is_empty()).then_some(taints),
            provider_id: (!provider.is_empty()).then(|| provider.clone()),
            ..NodeSpec::default()
        }
    }

    async fn register(&self) {
        if !self.config.register_node {
            return;
        }
        let nodes = Api::<Node>::all(self.client.clone());
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(7), 0.1);
        loop {
            let observed = self.observe().await;
            let status = self.status(&observed, &NodeStatus::default());
            let node = Node {
                metadata: ObjectMeta {
                    name: Some(self.config.node_name.clone()),
                    labels: Some(self.labels()),
                    annotations: Some(self.annotations()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.spec()),
                status: Some(status),
            };
            let made = nodes.create(&PostParams::default(), &node).await;
            if let (Ok(_), Some(status)) = (&made, &node.status) {
                self.tell(events::of_status(&self.config.node_name, &NodeStatus::default(), status));
            }
            let result = match made {
                Err(e) if is_already_exists(&e) => {
                    let patch =
                        json!({"metadata": {"labels": self.labels(), "annotations": self.annotations()}});
                    let name = &self.config.node_name;
                    let patched = nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
                    match patched {
                        Ok(known) => self.reset_extended(&nodes, &known).await,
                        Err(e) => Err(e),
                    }
                }
                other => other.map(drop),
            };
            match result {
                Ok(()) => return,
                Err(e) => {
                    tracing::warn!(error = %message_of(&e), "could not register the node; will try again");
                    tokio::time::sleep(backoff.next_delay()).await;
                }
            }
        }
    }

    /// As upstream: a node without a checkpoint was made anew, and has no devices until plugins say so.
    async fn reset_extended(&self, nodes: &Api<Node>, known: &Node) -> kube::Result<()> {
        let capacity = known.status.as_ref().and_then(|s| s.capacity.clone()).unwrap_or_default();
        let gone: BTreeMap<String, &str> =
            capacity.into_keys().filter(|name| is_extended_resource(name)).map(|name| (name, "0")).collect();
        if gone.is_empty() || !self.devices.take_new() {
            return Ok(());
        }
        let patch = json!({"status": {"capacity": &gone, "allocatable": &gone}});
        let name = &self.config.node_name;
        nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
    }

    async fn report(self, informer: Informer<Node>) {
        informer.synced().await;
        let key = ferrite_client::ObjectKey::cluster(&self.config.node_name);
        let mut due = tokio::time::Instant::now();
        let (mut was_ready, mut was_unschedulable) = (None, false);
        let mut asked = true;
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10), 0.2);
        loop {
            let before = self.readiness.borrow().clone();
            self.look().await;
            let ready = self.readiness.borrow().problem().is_none();
            let changed = *self.readiness.borrow() != before || was_ready != Some(ready);
            let now = tokio::time::Instant::now();
            let mut written = true;
            if asked || changed || now >= due {
                match informer.get(&key) {
                    None if !self.config.register_node => {
                        due = now + self.config.node_status_update_frequency
                    }
                    None => self.register().await,
                    Some(node) => {
                        let unschedulable = node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false);
                        let name = &self.config.node_name;
                        self.tell(events::of_scheduling(name, was_unschedulable, unschedulable));
                        was_unschedulable = unschedulable;
                        let force = now >= due;
                        written = self.write(&node, force).await;
                        if written && force {
                            due = now + self.config.node_status_report_frequency;
                        }
                    }
                }
            }
            if was_ready != Some(ready) {
                let reason = if ready { "NodeReady" } else { "NodeNotReady" };
                self.tell([events::status_is_now(&self.config.node_name, reason)]);
                was_ready = Some(ready);
            }
            if !written {
                // The server does not answer: the report is sent when it does.
                tokio::time::sleep(backoff.next_delay()).await;
                asked = true;
                continue;
            }
            backoff.reset();
            let period = self.config.node_status_update_frequency;
            let pause = if ready { period.min(due.saturating_duration_since(now)) } else { UNREADY_CHECK };
            asked = tokio::select! {
                () = tokio::time::sleep(pause) => false,
                () = self.refresh.notified() => true,
            };
        }
    }

    fn status(&self, observed: &Observed, before: &NodeStatus) -> NodeStatus {
        status::node_status(&self.config, &self.machine, observed, before, self.port, self.clock.now())
    }

    /// Writes the differences. Returns true if the server has them now.
    async fn write(&self, node: &Node, force: bool) -> bool {
        let nodes = Api::<Node>::all(self.client.clone());
        let observed = self.observe().await;
        let mut node = node.clone();
        for _ in 0..5 {
            let before = node.status.clone().unwrap_or_default();
            let after = self.status(&observed, &before);
            if !force && status::same_but_heartbeat(&before, &after) {
                return true;
            }
            let value = |s: &NodeStatus| ferrite_json::to_value(s).unwrap_or_default();
            let Some(difference) = writer_difference(&value(&before), &value(&after)) else { return true };
            let patch = json!({"metadata": {"resourceVersion": node.metadata.resource_version}, "status": difference});
            let name = &self.config.node_name;
            match nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Ok(_) => {
                    self.tell(events::of_status(name, &before, &after));
                    return true;
                }
                Err(e) if is_conflict(&e) => match nodes.get(name).await {
                    Ok(fresh) => node = fresh,
                    Err(_) => return false,
                },
                Err(e) if is_not_found(&e) => return false,
                Err(e) => {
                    tracing::warn!(error = %message_of(&e), "could not report the node's status");
                    return false;
                }
            }
        }
        false
    }

    /// Asks the runtime whether it and its network are ready.
    pub(crate) async fn look(&self) {
        let features = self.readiness.borrow().features.clone();
        let shutting_down = *self.shutting_down.borrow();
        let mut readiness = Readiness { features, shutting_down, ..Readiness::default() };
        match self.runtime.status(StatusRequest { verbose: false }).await {
            Ok(answer) => {
                readiness.features = RuntimeFeatures::from_cri(&answer);
                let conditions = answer.status.map(|s| s.conditions).unwrap_or_default();
                let problem = |type_: &str, what: &str| {
                    let condition = conditions.iter().find(|c| c.r#type == type_);
                    match condition {
                        Some(c) if c.status => None,
                        Some(c) => Some(format!(
                            "{what} not ready: {type_}=false reason:{} message:{}",
                            c.reason, c.message
                        )),
                        None => Some(format!("{what} not ready: {type_} is not reported")),
                    }
                };
                readiness.runtime_problem = problem("RuntimeReady", "container runtime");
                readiness.network_problem = problem("NetworkReady", "container runtime network");
            }
            Err(e) => readiness.runtime_problem = Some(format!("container runtime is down: {e}")),
        }
        self.readiness.send_if_modified(|current| {
            let changed = *current != readiness;
            *current = readiness;
            changed
        });
    }

    async fn observe(&self) -> Observed {
        let version = self.runtime.version(VersionRequest::default()).await;
        let runtime_version =
            version.map(|v| format!("{}://{}", v.runtime_name, v.runtime_version)).unwrap_or_default();
        let images = self.images.list_images(ListImagesRequest { filter: None }).await;
        let images = images.map(|answer| answer.images).unwrap_or_default();
        let pressures = self.pressures.borrow().clone();
        Observed {
            memory_pressure: pressures.contains(&Pressure::Memory),
            disk_pressure: pressures.contains(&Pressure::Disk),
            pid_pressure: pressures.contains(&Pressure::Pid),
            problem: self.readiness.borrow().problem(),
            features: self.readiness.borrow().features.clone(),
            devices: self.devices.capacity(),
            runtime_version,
            images: images
                .into_iter()
                .map(|i| {
                    let names = i.repo_digests.into_iter().chain(i.repo_tags).collect();
                    (names, i64::try_from(i.size).unwrap_or(i64::MAX))
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_ready_unless_something_is_wrong() {
        let text = |text: &str| Some(text.to_owned());
        for (runtime, network, shutting_down, expected) in [
            (None, None, false, None),
            (text("a"), None, false, text("a")),
            (text("a"), text("b"), true, text("a, b, node is shutting down")),
            (None, None, true, text("node is shutting down")),
        ] {
            let readiness = Readiness {
                runtime_problem: runtime,
                network_problem: network,
                shutting_down,
                ..Readiness::default()
            };
            assert_eq!(readiness.problem(), expected);
        }
    }
}
