//! Has volumes of CSI drivers attached to the nodes whose pods want them, and detached when nobody wants them any more.
//!
//! One key is one node. An attachment is an object (VolumeAttachment) that the driver's own controller acts on; a node's
//! `volumesAttached` lists the volumes that its kubelet may mount, and `volumesInUse` lists those that it
//! has.

mod decide;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use decide::{Action, Attachment, Decision, NodeState, WantedVolume, decide};
use ferrite_client::csi::{
    attach_required, attachment_name, is_attachment_name, parse_unique_name, unique_name,
};
use ferrite_client::{
    Api, EventRecorder, EventType, Informer, ObjectKey, WorkQueue, is_already_exists, is_conflict,
    is_not_found,
};
use ferrite_json::json;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{
    CSIDriver, VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};

use super::objects::{
    PODS_BY_CLAIM, claim_index, claim_key, claim_keys, claim_phase, claim_ref, is_bound_to, is_terminated,
    name, volume_name,
};
use crate::Context;
use crate::error::{During, SyncError};
use crate::pods::{BY_NODE, node_index};

const NAME: &str = "persistentvolume-attach-detach-controller";
/// The source of events, as upstream's.
const SOURCE: &str = "attachdetach-controller";
const ATTACHMENTS_BY_NODE: &str = "attach-node";
const ATTACHMENTS_BY_VOLUME: &str = "attach-volume";
const VOLUMES_BY_DRIVER: &str = "csi-driver";
/// Kubelets that leave attaching to the controller say so.
const MANAGED: &str = "volumes.kubernetes.io/controller-managed-attach-detach";
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

struct AttachDetach {
    client: Client,
    pods: Informer<Pod>,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    nodes: Informer<Node>,
    attachments: Informer<VolumeAttachment>,
    drivers: Informer<CSIDriver>,
    recorder: EventRecorder,
    /// Time alone forces no volume off a node.
    patient: bool,
    /// Since when volumes of each node are wanted by nobody.
    unwanted: Mutex<BTreeMap<String, BTreeMap<String, Timestamp>>>,
    /// The last message about a volume of a node, so that it is not repeated.
    said: Mutex<BTreeMap<(String, String), String>>,
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(AttachDetach {
        patient: !context.config.force_detach,
        client: context.client.clone(),
        pods: context.informers.get(),
        claims: context.informers.get(),
        volumes: context.informers.get(),
        nodes: context.informers.get(),
        attachments: context.informers.get(),
        drivers: context.informers.get(),
        recorder: context.events.recorder(SOURCE, None),
        unwanted: Mutex::default(),
        said: Mutex::default(),
    });
    controller.pods.add_index(PODS_BY_CLAIM, claim_index);
    controller.pods.add_index(BY_NODE, node_index);
    controller.attachments.add_index(ATTACHMENTS_BY_NODE, |one| vec![one.spec.node_name.clone()]);
    controller.attachments.add_index(ATTACHMENTS_BY_VOLUME, |one| {
        one.spec.source.persistent_volume_name.iter().cloned().collect()
    });
    controller.volumes.add_index(VOLUMES_BY_DRIVER, |volume| csi_driver(volume).into_iter().collect());
    let (by_claim, by_volume, by_driver) = (controller.clone(), controller.clone(), controller.clone());
    let (by_attachment, by_pod) = (controller.clone(), controller.clone());
    context
        .controller(NAME)
        .watches(&controller.pods, move |change, queue| {
            // Most pods have no claim: they wake nobody.
            let pod = change.object();
            if !claim_keys(pod).is_empty() || by_pod.has_attachments(pod) {
                add_node(node_of(pod), queue);
            }
        })
        .watches(&controller.claims, move |change, queue| {
            by_claim.wake_pods_of(&ObjectKey::of(&**change.object()), queue);
        })
        .watches(&controller.volumes, move |change, queue| {
            by_volume.wake_users_of(change.object(), queue);
        })
        .watches(&controller.drivers, move |change, queue| {
            for volume in by_driver.volumes.by_index(VOLUMES_BY_DRIVER, name(&change.object().metadata)) {
                by_driver.wake_users_of(&volume, queue);
            }
        })
        .watches(&controller.attachments, move |change, queue| {
            let attachment = change.object();
            if let ferrite_client::Change::Updated { old, new } = change
                && was_attached(old, new)
            {
                by_attachment.report_attached(new);
            }
            add_node(Some(attachment.spec.node_name.clone()), queue);
            // Another node may wait for the volume.
            if let Some(volume) = &attachment.spec.source.persistent_volume_name
                && let Some(volume) = by_attachment.volumes.get(&ObjectKey::cluster(volume))
            {
                by_attachment.wake_users_of(&volume, queue);
            }
        })
        .watches(&controller.nodes, |change, queue| {
            // A heartbeat is no reason to look.
            let changed = match change {
                ferrite_client::Change::Updated { old, new } => facts(old) != facts(new),
                _ => true,
            };
            if changed {
                queue.add(ObjectKey::of(&**change.object()));
            }
        })
        .run_with(controller.clone(), |controller, key| async move { controller.sync(&key.name).await });
}

/// The facts of a node that matter here.
#[derive(Debug, Default, PartialEq, Eq)]
struct Facts {
    /// Its kubelet leaves attaching to this controller.
    managed: bool,
    ready: bool,
    out_of_service: bool,
    in_use: BTreeSet<String>,
    reported: BTreeSet<String>,
}

fn facts(node: &Node) -> Facts {
    let status = node.status.as_ref();
    let in_use = status.and_then(|status| status.volumes_in_use.clone()).unwrap_or_default();
    let attached = status.and_then(|status| status.volumes_attached.as_deref()).unwrap_or_default();
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let ready = conditions.iter().any(|one| one.type_ == "Ready" && one.status == "True");
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default();
    let out_of_service = taints.iter().any(|taint| taint.key == OUT_OF_SERVICE);
    let annotations = node.metadata.annotations.as_ref();
    let managed = annotations.is_some_and(|all| all.get(MANAGED).is_some_and(|value| value == "true"));
    Facts {
        managed,
        ready,
        out_of_service,
        in_use: in_use.into_iter().collect(),
        reported: attached.iter().map(|one| one.name.clone()).collect(),
    }
}

/// Returns true if the attachment `object` is of the volume that the node calls `unique`.
fn is_of(object: &str, unique: &str, node: &str) -> bool {
    parse_unique_name(unique).is_some_and(|(driver, handle)| attachment_name(handle, driver, node) == object)
}

fn node_of(pod: &Pod) -> Option<String> {
    pod.spec.as_ref()?.node_name.clone().filter(|node| !node.is_empty())
}

fn csi_driver(volume: &PersistentVolume) -> Option<String> {
    Some(volume.spec.as_ref()?.csi.as_ref()?.driver.clone())
}

fn add_node(node: Option<String>, queue: &WorkQueue<ObjectKey>) {
    if let Some(node) = node {
        queue.add(ObjectKey::cluster(&node));
    }
}

/// Returns true if several nodes may have the volume, as upstream: a volume without access modes may be
/// anywhere.
fn is_shared(volume: &PersistentVolume) -> bool {
    let modes = volume.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
    modes.is_empty() || modes.iter().any(|mode| matches!(mode.as_str(), "ReadWriteMany" | "ReadOnlyMany"))
}

/// Returns true if a volume of this controller has just been attached.
fn was_attached(old: &VolumeAttachment, new: &VolumeAttachment) -> bool {
    let attached = |one: &VolumeAttachment| one.status.as_ref().is_some_and(|status| status.attached);
    is_attachment_name(name(&new.metadata)) && attached(new) && !attached(old)
}

/// Upstream's message, with the space that it ends with.
fn attached_message(volume: &str) -> String {
    format!("AttachVolume.Attach succeeded for volume {volume:?} ")
}

impl AttachDetach {
    /// Records for the pods that wait for a volume that they have it.
    fn report_attached(&self, attachment: &VolumeAttachment) {
        let node = &attachment.spec.node_name;
        let Some(volume) = attachment.spec.source.persistent_volume_name.as_deref() else { return };
        for pod in self.pods.by_index(BY_NODE, node).iter().filter(|pod| !is_terminated(pod)) {
            if self.volumes_of(pod, node).iter().any(|(_, wanted)| wanted.volume == volume) {
                let message = attached_message(volume);
                self.recorder.event_for(&**pod, EventType::Normal, "SuccessfulAttachVolume", message);
            }
        }
    }

    fn has_attachments(&self, pod: &Pod) -> bool {
        node_of(pod).is_some_and(|node| self.attachments.count_by_index(ATTACHMENTS_BY_NODE, &node) > 0)
    }

    fn wake_pods_of(&self, claim: &ObjectKey, queue: &WorkQueue<ObjectKey>) {
        for pod in self.pods.by_index(PODS_BY_CLAIM, &claim.to_string()) {
            add_node(node_of(&pod), queue);
        }
    }

    fn wake_users_of(&self, volume: &PersistentVolume, queue: &WorkQueue<ObjectKey>) {
        if csi_driver(volume).is_some()
            && let Some(reference) = claim_ref(volume)
        {
            self.wake_pods_of(&claim_key(reference), queue);
        }
    }

    async fn sync(&self, node: &str) -> Result<Option<Duration>, SyncError> {
        let (state, users) = self.look(node);
        let Some(state) = state else { return Ok(None) };
        let decision = decide(&state);
        {
            let mut unwanted = self.unwanted.lock().unwrap_or_else(PoisonError::into_inner);
            match decision.unwanted_since.is_empty() {
                true => unwanted.remove(node),
                false => unwanted.insert(node.to_owned(), decision.unwanted_since.clone()),
            };
            let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
            said.retain(|(of, volume), _| of != node || state.wanted.contains_key(volume));
        }
        // A kubelet must not mount a volume that is about to be detached: the status is first.
        self.report(node, &decision).await?;
        for action in &decision.actions {
            self.act(node, &state, action, &users).await?;
        }
        Ok(decision.wake)
    }

    /// The state of the node, and the pods that want each volume. `None` for a node that this controller
    /// does not manage.
    fn look(&self, node: &str) -> (Option<NodeState>, BTreeMap<String, Vec<Arc<Pod>>>) {
        let object = self.nodes.get(&ObjectKey::cluster(node));
        let facts = object.as_deref().map(facts).unwrap_or_default();
        let mut attachments = BTreeMap::new();
        // Only its own attachments: others detach theirs.
        let attached = self.attachments.by_index(ATTACHMENTS_BY_NODE, node);
        for one in attached.iter().filter(|one| is_attachment_name(name(&one.metadata))) {
            let volume = one.spec.source.persistent_volume_name.as_deref().unwrap_or_default();
            let there = self.volumes.get(&ObjectKey::cluster(volume));
            let unique = match there.as_deref().and_then(csi_names) {
                Some((driver, handle)) if driver == one.spec.attacher => unique_name(&driver, &handle),
                // The volume is gone. The node may still have it, under a name of which the object's is made.
                _ => {
                    let mut known = facts.in_use.union(&facts.reported);
                    let same = |unique: &&String| is_of(name(&one.metadata), unique, node);
                    known.find(same).cloned().unwrap_or_else(|| unique_name(&one.spec.attacher, volume))
                }
            };
            let status = one.status.as_ref();
            let error = status.and_then(|status| status.attach_error.as_ref());
            let entry = Attachment {
                object: name(&one.metadata).to_owned(),
                attached: status.is_some_and(|status| status.attached),
                deleting: one.metadata.deletion_timestamp.is_some(),
                problem: error.and_then(|error| error.message.clone()),
            };
            attachments.insert(unique, entry);
        }
        if object.is_some() && !facts.managed {
            return (None, BTreeMap::new());
        }
        let (mut wanted, mut users) = (BTreeMap::new(), BTreeMap::<String, Vec<Arc<Pod>>>::new());
        for pod in self.pods.by_index(BY_NODE, node) {
            if is_terminated(&pod) {
                continue;
            }
            for (unique, volume) in self.volumes_of(&pod, node) {
                users.entry(unique.clone()).or_default().push(pod.clone());
                wanted.insert(unique, volume);
            }
        }
        let unwanted = self.unwanted.lock().unwrap_or_else(PoisonError::into_inner);
        let state = NodeState {
            patient: self.patient,
            gone: object.is_none(),
            ready: facts.ready,
            out_of_service: facts.out_of_service,
            in_use: facts.in_use,
            reported: facts.reported,
            wanted,
            attachments,
            unwanted_since: unwanted.get(node).cloned().unwrap_or_default(),
            now: Timestamp::now(),
        };
        (Some(state), users)
    }

    /// The pod's volumes that must be attached.
    fn volumes_of(&self, pod: &Pod, node: &str) -> Vec<(String, WantedVolume)> {
        let mut found = Vec::new();
        for key in claim_keys(pod) {
            let Some(claim) = self.claims.get(&key).filter(|claim| claim_phase(claim) == "Bound") else {
                continue;
            };
            let Some(volume) = self.volumes.get(&ObjectKey::cluster(volume_name(&claim))) else { continue };
            let Some((driver, handle)) = csi_names(&volume) else { continue };
            let object = self.drivers.get(&ObjectKey::cluster(&driver));
            if !is_bound_to(&volume, &claim) || !attach_required(object.as_deref()) {
                continue;
            }
            let others = self.attachments.by_index(ATTACHMENTS_BY_VOLUME, name(&volume.metadata));
            let elsewhere =
                others.iter().map(|one| one.spec.node_name.clone()).filter(|other| other != node).collect();
            let wanted = WantedVolume {
                volume: name(&volume.metadata).to_owned(),
                shared: is_shared(&volume),
                elsewhere,
                driver: driver.clone(),
                handle: handle.clone(),
            };
            found.push((unique_name(&driver, &handle), wanted));
        }
        found
    }

    async fn report(&self, node: &str, decision: &Decision) -> Result<(), SyncError> {
        let Some(report) = &decision.report else { return Ok(()) };
        let nodes: Api<Node> = Api::all(self.client.clone());
        let object = self.nodes.get(&ObjectKey::cluster(node));
        let version = object.and_then(|object| object.metadata.resource_version.clone());
        let attached: Vec<_> = report.iter().map(|name| json!({"name": name, "devicePath": ""})).collect();
        let patch = json!({
            "metadata": {"resourceVersion": version},
            "status": {"volumesAttached": attached},
        });
        match nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(error) if is_not_found(&error) => Ok(()),
            Err(error) if is_conflict(&error) => {
                Err(SyncError::Other(format!("the status of node {node} changed meanwhile")))
            }
            written => written.map(drop).during(|| format!("report the volumes attached to node {node}")),
        }
    }

    async fn act(
        &self,
        node: &str,
        state: &NodeState,
        action: &Action,
        users: &BTreeMap<String, Vec<Arc<Pod>>>,
    ) -> Result<(), SyncError> {
        match action {
            Action::Attach { name } => match state.wanted.get(name) {
                Some(volume) => self.attach(node, volume).await,
                None => Ok(()),
            },
            Action::Detach { name, object, forced } => {
                if *forced {
                    tracing::warn!(node, volume = %name, "detaching a volume that the node has not let go");
                }
                self.detach(object).await
            }
            Action::MultiAttach { name, nodes } => {
                self.multi_attach(node, name, state, nodes, users);
                Ok(())
            }
            Action::Failed { name, problem } => {
                let volume = state.wanted.get(name).map_or(name.as_str(), |wanted| &wanted.volume);
                let message = format!("AttachVolume.Attach failed for volume {volume:?} : {problem}");
                self.say(node, name, users, message);
                Ok(())
            }
        }
    }

    async fn attach(&self, node: &str, volume: &WantedVolume) -> Result<(), SyncError> {
        let object = VolumeAttachment {
            metadata: ObjectMeta {
                name: Some(attachment_name(&volume.handle, &volume.driver, node)),
                ..ObjectMeta::default()
            },
            spec: VolumeAttachmentSpec {
                attacher: volume.driver.clone(),
                node_name: node.to_owned(),
                source: VolumeAttachmentSource {
                    persistent_volume_name: Some(volume.volume.clone()),
                    ..VolumeAttachmentSource::default()
                },
            },
            status: None,
        };
        let attachments: Api<VolumeAttachment> = Api::all(self.client.clone());
        match attachments.create(&PostParams::default(), &object).await {
            Err(error) if is_already_exists(&error) => Ok(()),
            made => made.map(drop).during(|| format!("attach volume {} to node {node}", volume.volume)),
        }
    }

    async fn detach(&self, object: &str) -> Result<(), SyncError> {
        let attachments: Api<VolumeAttachment> = Api::all(self.client.clone());
        let seen = self.attachments.get(&ObjectKey::cluster(object));
        let uid = seen.and_then(|seen| seen.metadata.uid.clone());
        let params = DeleteParams::default().preconditions(Preconditions { uid, resource_version: None });
        match attachments.delete(object, &params).await {
            Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(()),
            deleted => deleted.during(|| format!("delete volume attachment {object}")),
        }
    }

    /// Records events for waiting pods that name the user of their volume, in upstream's words.
    fn multi_attach(
        &self,
        node: &str,
        name_of: &str,
        state: &NodeState,
        nodes: &[String],
        users: &BTreeMap<String, Vec<Arc<Pod>>>,
    ) {
        let Some(wanted) = state.wanted.get(name_of) else { return };
        let holders: Vec<Arc<Pod>> = nodes
            .iter()
            .flat_map(|other| self.pods.by_index(BY_NODE, other))
            .filter(|pod| !is_terminated(pod))
            .filter(|pod| {
                node_of(pod).is_some_and(|at| self.volumes_of(pod, &at).iter().any(|v| v.0 == name_of))
            })
            .collect();
        // All of them use the volume through the same claim, and are of its namespace.
        if let Some(waiting) = users.get(name_of).and_then(|waiting| waiting.first()) {
            let message = multi_attach_message(&wanted.volume, waiting, &holders);
            self.say(node, name_of, users, message);
        }
    }

    fn say(&self, node: &str, volume: &str, users: &BTreeMap<String, Vec<Arc<Pod>>>, message: String) {
        {
            let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
            let key = (node.to_owned(), volume.to_owned());
            if said.get(&key) == Some(&message) {
                return;
            }
            said.insert(key, message.clone());
        }
        for pod in users.get(volume).into_iter().flatten() {
            self.recorder.event_for(&**pod, EventType::Warning, "FailedAttachVolume", message.clone());
        }
    }
}

fn csi_names(volume: &PersistentVolume) -> Option<(String, String)> {
    let source = volume.spec.as_ref()?.csi.as_ref()?;
    Some((source.driver.clone(), source.volume_handle.clone()))
}

/// As upstream: pods of the same namespace are named, others are counted.
fn multi_attach_message(volume: &str, waiting: &Pod, holders: &[Arc<Pod>]) -> String {
    let start = format!("Multi-Attach error for volume {volume:?} ");
    if holders.is_empty() {
        return start + "Volume is already exclusively attached to one node and can't be attached to another";
    }
    let namespace = waiting.metadata.namespace.as_deref();
    let (near, far): (Vec<_>, Vec<_>) =
        holders.iter().partition(|pod| pod.metadata.namespace.as_deref() == namespace);
    let near: Vec<&str> = near.iter().map(|pod| name(&pod.metadata)).collect();
    match (near.is_empty(), far.len()) {
        (true, count) => format!("{start}Volume is already used by {count} pod(s) in different namespaces"),
        (false, 0) => format!("{start}Volume is already used by pod(s) {}", near.join(", ")),
        (false, count) => {
            let near = near.join(", ");
            format!(
                "{start}Volume is already used by pod(s) {near} and {count} pod(s) in different namespaces"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_of_others_are_not_named() {
        let pod = |namespace: &str, name: &str| -> Arc<Pod> {
            let metadata = json!({"name": name, "namespace": namespace});
            Arc::new(ferrite_json::from_value(json!({"metadata": metadata})).unwrap())
        };
        let waiting = pod("a", "w");
        for (holders, expected) in [
            (vec![], "Volume is already exclusively attached to one node and can't be attached to another"),
            (vec![pod("a", "x"), pod("a", "y")], "Volume is already used by pod(s) x, y"),
            (vec![pod("b", "x")], "Volume is already used by 1 pod(s) in different namespaces"),
            (
                vec![pod("a", "x"), pod("b", "y")],
                "Volume is already used by pod(s) x and 1 pod(s) in different namespaces",
            ),
        ] {
            let said = multi_attach_message("pv", &waiting, &holders);
            assert_eq!(said, format!("Multi-Attach error for volume \"pv\" {expected}"));
        }
    }

    #[test]
    fn an_attached_volume_is_reported_once() {
        let attachment = |name: &str, attached: Option<bool>| -> VolumeAttachment {
            let status = attached.map(|attached| json!({"attached": attached}));
            let spec = json!({"attacher": "d", "nodeName": "n", "source": {"persistentVolumeName": "pv"}});
            ferrite_json::from_value(json!({"metadata": {"name": name}, "spec": spec, "status": status}))
                .unwrap()
        };
        let own = attachment_name("handle", "driver", "n");
        for (name, old, new, expected) in [
            (own.as_str(), None, Some(true), true),
            (&own, Some(false), Some(true), true),
            (&own, Some(true), Some(true), false),
            (&own, Some(true), Some(false), false),
            ("of-somebody-else", None, Some(true), false),
        ] {
            assert_eq!(
                was_attached(&attachment(name, old), &attachment(name, new)),
                expected,
                "{old:?} {new:?}"
            );
        }
        assert_eq!(attached_message("pv"), "AttachVolume.Attach succeeded for volume \"pv\" ");
    }

    #[test]
    fn access_modes_say_who_may_share() {
        for (modes, expected) in [
            (json!(["ReadWriteOnce"]), false),
            (json!(["ReadWriteOncePod"]), false),
            (json!(["ReadWriteOnce", "ReadOnlyMany"]), true),
            (json!(["ReadWriteMany"]), true),
            (json!([]), true),
        ] {
            let volume: PersistentVolume =
                ferrite_json::from_value(json!({"metadata": {}, "spec": {"accessModes": modes.clone()}}))
                    .unwrap();
            assert_eq!(is_shared(&volume), expected, "{modes}");
        }
    }
}
