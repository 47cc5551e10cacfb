//! Chooses nodes by where a pod's volumes are or can be made, and binds the volumes before the pod.

mod matching;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_api::field::FieldError;
use ferrite_client::{Api, ObjectKey, message_of};
use ferrite_json::{Value, json};
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSIDriver, CSINode, CSIStorageCapacity, StorageClass};
use kube::Client;
use kube::api::{Patch, PatchParams};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::timeout;

use super::volumes::{
    annotation, check_owner, claim_class, claim_key, concerns_claim_of, is_bound, is_reachable, not_found,
    volume_class, volume_name,
};
use crate::framework::{
    Action, ClusterEvent, CycleState, Filter, Handle, Made, Plugin, PluginArgs, PluginError, PreBind,
    PreFilter, PreFiltered, Reason, Rejection, Reserve, Store,
};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

const NAME: &str = "VolumeBinding";
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
/// The provisioner of classes whose volumes are made by hand.
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Args {
    bind_timeout_seconds: i64,
    shape: Option<Value>,
}

impl Default for Args {
    fn default() -> Self {
        Self { bind_timeout_seconds: 600, shape: None }
    }
}

/// A choice that the API does not show yet.
#[derive(Debug, Default)]
struct Assumed {
    /// Volumes by name, with the version they were seen at and the claim they are kept for.
    volumes: HashMap<String, (Option<String>, ObjectKey)>,
    /// Claims, with the version they were seen at and the node they are to be provisioned for.
    claims: HashMap<ObjectKey, (Option<String>, String)>,
}

struct VolumeBinding {
    client: Option<Client>,
    bind_timeout: Duration,
    claims: Store<PersistentVolumeClaim>,
    volumes: Store<PersistentVolume>,
    classes: Store<StorageClass>,
    drivers: Store<CSIDriver>,
    nodes: Store<Node>,
    capacities: Store<CSIStorageCapacity>,
    assumed: Mutex<Assumed>,
    /// Counts changes of claims and volumes, to wake callers that wait for a binding.
    changes: watch::Sender<u64>,
}

pub(super) fn new(args: &PluginArgs, handle: &Handle) -> Made {
    let args = args.decode_valid(|args: &Args, path| {
        let mut errors = Vec::new();
        if args.bind_timeout_seconds < 0 {
            let problem = "invalid BindTimeoutSeconds, should not be a negative value";
            errors.push(FieldError::invalid(
                &path.child("bindTimeoutSeconds"),
                args.bind_timeout_seconds,
                problem,
            ));
        }
        if let Some(shape) = &args.shape {
            let problem =
                "unexpected field `shape`, remove it or turn on the feature gate StorageCapacityScoring";
            errors.push(FieldError::invalid(&path.child("shape"), shape.clone(), problem));
        }
        errors
    })?;
    let plugin = VolumeBinding {
        client: handle.client().cloned(),
        bind_timeout: Duration::from_secs(u64::try_from(args.bind_timeout_seconds).unwrap_or(0)),
        claims: handle.store(),
        volumes: handle.store(),
        classes: handle.store(),
        drivers: handle.store(),
        nodes: handle.lister(),
        capacities: handle.store(),
        assumed: Mutex::default(),
        changes: watch::Sender::new(0),
    };
    let wake = |changes: watch::Sender<u64>| move || changes.send_modify(|count| *count += 1);
    plugin.claims.on_change(wake(plugin.changes.clone()));
    plugin.volumes.on_change(wake(plugin.changes.clone()));
    // Limits of drivers on nodes come with CSINodes: their events must reach the hint.
    let _: Store<CSINode> = handle.store();
    Ok(Arc::new(plugin))
}

/// A pod's claims.
#[derive(Debug, Default)]
struct Claims {
    bound: Vec<Arc<PersistentVolumeClaim>>,
    /// Those that wait for a node, smallest first.
    delayed: Vec<Arc<PersistentVolumeClaim>>,
    /// Volumes of the delayed claims' classes.
    volumes: Vec<Arc<PersistentVolume>>,
}

/// The volumes to bind and to provision for a pod's claims on one node.
#[derive(Debug, Clone, Default)]
struct Choice {
    bindings: Vec<(Arc<PersistentVolume>, Arc<PersistentVolumeClaim>)>,
    provisions: Vec<Arc<PersistentVolumeClaim>>,
}

/// The pod's claims, and the choice for each node that fits.
#[derive(Clone)]
struct PodClaims {
    claims: Arc<Claims>,
    choices: Arc<Mutex<HashMap<String, Choice>>>,
}

impl PodClaims {
    fn choice(&self, node: &str) -> Option<Choice> {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner).get(node).cloned()
    }
}

/// A volume could not be bound.
#[derive(Debug, thiserror::Error)]
enum BindingError {
    #[error("there is no client")]
    NoClient,
    /// The API server's answer names the object.
    #[error("{0}")]
    Write(String),
    #[error("binding volumes: ClaimRef got reset for pv {0:?}")]
    ReferenceReset(String),
    #[error("binding volumes: pv {volume:?} node affinity doesn't match node {node:?}")]
    Unreachable { volume: String, node: String },
    #[error("binding volumes: provisioning failed for PVC {0:?}")]
    ProvisioningFailed(String),
    #[error("binding volumes: failed to check binding: PVC {0:?} does not exist any more")]
    ClaimGone(String),
    #[error("binding volumes: context deadline exceeded")]
    TimedOut,
}

fn name_of(name: &Option<String>) -> String {
    name.clone().unwrap_or_default()
}

impl VolumeBinding {
    fn assumed(&self) -> MutexGuard<'_, Assumed> {
        self.assumed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The claim that the volume is kept for although the API does not say so yet. A newer version of the volume has the
    /// last word.
    fn kept_for(&self, volume: &PersistentVolume) -> Option<ObjectKey> {
        let assumed = self.assumed();
        let (version, claim) = assumed.volumes.get(volume.metadata.name.as_deref()?)?;
        (*version == volume.metadata.resource_version).then(|| claim.clone())
    }

    /// The node that the claim is to be provisioned for.
    fn selected_node(&self, claim: &PersistentVolumeClaim) -> Option<String> {
        let assumed = self.assumed();
        if let Some((version, node)) = assumed.claims.get(&ObjectKey::of(claim))
            && *version == claim.metadata.resource_version
        {
            return Some(node.clone());
        }
        annotation(&claim.metadata.annotations, SELECTED_NODE).map(str::to_owned)
    }

    /// True if the claim's class waits for the first pod.
    fn is_delayed(&self, claim: &PersistentVolumeClaim) -> Result<bool, Rejection> {
        let name = claim_class(claim);
        let Some(class) = self.classes.get(&ObjectKey::cluster(name)) else { return Ok(false) };
        match class.volume_binding_mode.as_deref() {
            Some(mode) => Ok(mode == "WaitForFirstConsumer"),
            None => {
                let problem = format!("VolumeBindingMode not set for StorageClass {name:?}");
                Err(PluginError::new("PreFilter", NAME, problem).into())
            }
        }
    }

    fn claims_of(&self, pod: &PodInfo) -> Result<Option<Claims>, Rejection> {
        let mut claims = Claims::default();
        let mut has_some = false;
        let mut has_unbound = false;
        for (name, is_own) in pod.claim_names() {
            has_some = true;
            let claim = self.claims.get(&claim_key(pod, &name)).ok_or_else(|| {
                if is_own {
                    let problem =
                        "waiting for ephemeral volume controller to create the persistentvolumeclaim";
                    Rejection::unresolvable(format!("{problem} {name:?}"))
                } else {
                    not_found("persistentvolumeclaim", &name)
                }
            })?;
            let phase = claim.status.as_ref().and_then(|status| status.phase.as_deref());
            if phase == Some("Lost") {
                return Err(Rejection::unresolvable(format!(
                    "persistentvolumeclaim {name:?} bound to non-existent persistentvolume {:?}",
                    volume_name(&claim)
                )));
            }
            if claim.metadata.deletion_timestamp.is_some() {
                let problem = format!("persistentvolumeclaim {name:?} is being deleted");
                return Err(Rejection::unresolvable(problem));
            }
            if is_own {
                check_owner(pod, &claim).map_err(Rejection::unresolvable)?;
            }
            if is_bound(&claim) {
                claims.bound.push(claim);
            } else if volume_name(&claim).is_empty() && self.is_delayed(&claim)? {
                claims.delayed.push(claim);
            } else {
                has_unbound = true;
            }
        }
        if has_unbound {
            return Err(Rejection::unresolvable("pod has unbound immediate PersistentVolumeClaims"));
        }
        if !claims.delayed.is_empty() {
            claims.delayed.sort_by_key(|claim| matching::requested(claim));
            let of_class = |volume: &Arc<PersistentVolume>| {
                claims.delayed.iter().any(|claim| claim_class(claim) == volume_class(volume))
            };
            claims.volumes = self.volumes.list().into_iter().filter(of_class).collect();
            // A volume that is kept for another claim is taken.
            claims.volumes.retain(|volume| {
                self.kept_for(volume)
                    .is_none_or(|kept| claims.delayed.iter().any(|claim| ObjectKey::of(&**claim) == kept))
            });
        }
        Ok(has_some.then_some(claims))
    }

    /// The choice for the node, or every reason against it.
    fn choose(&self, claims: &Claims, node: &Node) -> Result<Choice, Vec<Reason>> {
        let mut reasons: Vec<Reason> = Vec::new();
        let mut choice = Choice::default();
        let mut is_missing = false;
        let mut is_unreachable = false;
        for claim in &claims.bound {
            match self.volumes.get(&ObjectKey::cluster(volume_name(claim))) {
                None => is_missing = true,
                Some(volume) => is_unreachable |= !is_reachable(&volume, node),
            }
        }
        if is_unreachable && !is_missing {
            reasons.push("node(s) didn't match PersistentVolume's node affinity".into());
        }
        match self.choose_delayed(claims, node, &mut choice) {
            Ok(()) => {}
            Err(reason) => reasons.push(reason.into()),
        }
        if is_missing {
            reasons.push("node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)".into());
        }
        if reasons.is_empty() { Ok(choice) } else { Err(reasons) }
    }

    fn choose_delayed(&self, claims: &Claims, node: &Node, choice: &mut Choice) -> Result<(), &'static str> {
        const CONFLICT: &str = "node(s) didn't find available persistent volumes to bind";
        let node_name = node.metadata.name.as_deref().unwrap_or_default();
        let mut to_provision = Vec::new();
        for claim in &claims.delayed {
            match self.selected_node(claim) {
                Some(selected) if selected != node_name => return Err(CONFLICT),
                Some(_) => to_provision.push(claim),
                None => {
                    let taken: Vec<&str> = choice
                        .bindings
                        .iter()
                        .filter_map(|(volume, _)| volume.metadata.name.as_deref())
                        .collect();
                    match matching::find(claim, &claims.volumes, node, &taken).cloned() {
                        Some(volume) => choice.bindings.push((volume, claim.clone())),
                        None => to_provision.push(claim),
                    }
                }
            }
        }
        for claim in to_provision {
            let name = claim_class(claim);
            let class = self.classes.get(&ObjectKey::cluster(name)).ok_or(CONFLICT)?;
            if matches!(class.provisioner.as_str(), "" | NO_PROVISIONER) || !matching::allows(&class, node) {
                return Err(CONFLICT);
            }
            let driver = self.drivers.get(&ObjectKey::cluster(class.provisioner.as_str()));
            let reports = driver.is_some_and(|driver| driver.spec.storage_capacity == Some(true));
            let size = matching::requested(claim);
            if reports && !matching::has_room(&self.capacities.list(), name, &size, node) {
                return Err("node(s) did not have enough free storage");
            }
            choice.provisions.push(claim.clone());
        }
        Ok(())
    }

    fn forget(&self, choice: &Choice) {
        let mut assumed = self.assumed();
        for (volume, _) in &choice.bindings {
            assumed.volumes.remove(volume.metadata.name.as_deref().unwrap_or_default());
        }
        for claim in &choice.provisions {
            assumed.claims.remove(&ObjectKey::of(&**claim));
        }
    }

    /// Writes the choice, and waits until the volumes are bound.
    async fn bind(&self, choice: &Choice, node: &str) -> Result<(), BindingError> {
        let client = self.client.clone().ok_or(BindingError::NoClient)?;
        let mut changes = self.changes.subscribe();
        for (volume, claim) in &choice.bindings {
            self.bind_volume(&client, volume, claim).await?;
        }
        for claim in &choice.provisions {
            self.select_node(&client, claim, node).await?;
        }
        let bound = async {
            loop {
                changes.mark_unchanged();
                if self.are_bound(choice, node)? {
                    return Ok(());
                }
                if changes.changed().await.is_err() {
                    return Err(BindingError::TimedOut);
                }
            }
        };
        timeout(self.bind_timeout, bound).await.unwrap_or(Err(BindingError::TimedOut))
    }

    async fn bind_volume(
        &self,
        client: &Client,
        volume: &PersistentVolume,
        claim: &PersistentVolumeClaim,
    ) -> Result<(), BindingError> {
        let mut patch = json!({
            // Somebody else may have taken it since.
            "metadata": {"resourceVersion": volume.metadata.resource_version},
            "spec": {"claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "namespace": claim.metadata.namespace, "name": claim.metadata.name, "uid": claim.metadata.uid,
                "resourceVersion": claim.metadata.resource_version}},
        });
        if !matching::refers_to(volume, claim) {
            patch["metadata"]["annotations"] = json!({(BOUND_BY_CONTROLLER): "yes"});
        }
        let name = name_of(&volume.metadata.name);
        let api: Api<PersistentVolume> = Api::all(client.clone());
        let result = api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
        result.map(drop).map_err(|error| BindingError::Write(message_of(&error)))
    }

    async fn select_node(
        &self,
        client: &Client,
        claim: &PersistentVolumeClaim,
        node: &str,
    ) -> Result<(), BindingError> {
        let patch = json!({"metadata": {"resourceVersion": claim.metadata.resource_version,
            "annotations": {(SELECTED_NODE): node}}});
        let name = name_of(&claim.metadata.name);
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), namespace);
        let result = api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
        result.map(drop).map_err(|error| BindingError::Write(message_of(&error)))
    }

    /// The newest state of a claim that is being bound.
    fn present(&self, claim: &PersistentVolumeClaim) -> Result<Arc<PersistentVolumeClaim>, BindingError> {
        let current = self.claims.get(&ObjectKey::of(claim));
        let current = current.filter(|current| current.metadata.uid == claim.metadata.uid);
        current.ok_or_else(|| BindingError::ClaimGone(name_of(&claim.metadata.name)))
    }

    fn are_bound(&self, choice: &Choice, node: &str) -> Result<bool, BindingError> {
        let object = self.nodes.get(&ObjectKey::cluster(node));
        let reaches = |volume: &PersistentVolume| {
            if object.as_ref().is_none_or(|object| is_reachable(volume, object)) {
                return Ok(());
            }
            Err(BindingError::Unreachable { volume: name_of(&volume.metadata.name), node: node.to_owned() })
        };
        for (volume, claim) in &choice.bindings {
            let name = volume.metadata.name.as_deref().unwrap_or_default();
            let current = self.volumes.get(&ObjectKey::cluster(name));
            let Some(current) =
                current.filter(|c| c.metadata.resource_version != volume.metadata.resource_version)
            else {
                return Ok(false);
            };
            reaches(&current)?;
            if !matching::refers_to(&current, claim) {
                return Err(BindingError::ReferenceReset(name.to_owned()));
            }
            let claim = self.present(claim)?;
            if !is_bound(&claim) {
                return Ok(false);
            }
        }
        for claim in &choice.provisions {
            let current = self.present(claim)?;
            if current.metadata.resource_version == claim.metadata.resource_version {
                return Ok(false);
            }
            // The provisioner takes the annotation away to have another node chosen.
            if annotation(&current.metadata.annotations, SELECTED_NODE) != Some(node) {
                return Err(BindingError::ProvisioningFailed(name_of(&claim.metadata.name)));
            }
            if let Some(volume) = self.volumes.get(&ObjectKey::cluster(volume_name(&current))) {
                reaches(&volume)?;
            }
            if !is_bound(&current) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Plugin for VolumeBinding {
    fn name(&self) -> &'static str {
        NAME
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        let changed = match event {
            ClusterEvent::NodeAdded(_) | ClusterEvent::PodUpdated => return true,
            ClusterEvent::NodeUpdated { old, new } => return old.metadata.labels != new.metadata.labels,
            ClusterEvent::Object(changed) if changed.action != Action::Deleted => changed,
            _ => return false,
        };
        if let Some(new) = changed.object::<StorageClass>() {
            let old = changed.old::<StorageClass>();
            return old.is_none_or(|old| old.allowed_topologies != new.allowed_topologies);
        }
        if let Some(new) = changed.object::<CSIStorageCapacity>() {
            let old = changed.old::<CSIStorageCapacity>().map(matching::volume_limit);
            return old.is_none_or(|old| matching::volume_limit(new) > old);
        }
        if let Some(new) = changed.object::<CSIDriver>() {
            let reports = |driver: &CSIDriver| driver.spec.storage_capacity == Some(true);
            return changed.old::<CSIDriver>().is_some_and(|old| reports(old) && !reports(new));
        }
        if changed.object::<CSINode>().is_some() {
            return changed.action == Action::Added;
        }
        changed.object::<PersistentVolume>().is_some() || concerns_claim_of(pod, event).unwrap_or(false)
    }

    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        Some(self)
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }

    fn reserve(&self) -> Option<&dyn Reserve> {
        Some(self)
    }

    fn pre_bind(&self) -> Option<&dyn PreBind> {
        Some(self)
    }
}

/// The choice for the node that the pod goes to.
#[derive(Clone)]
struct Chosen(Arc<Choice>);

impl PreFilter for VolumeBinding {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _snapshot: &Snapshot,
    ) -> Result<PreFiltered, Rejection> {
        let Some(claims) = self.claims_of(pod)? else { return Ok(PreFiltered::Skip) };
        state.put(PodClaims { claims: Arc::new(claims), choices: Arc::default() });
        Ok(PreFiltered::Needed)
    }
}

impl Filter for VolumeBinding {
    fn filter(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(claims) = state.get::<PodClaims>() else { return Ok(()) };
        let choice =
            self.choose(&claims.claims, &node.node).map_err(Rejection::UnschedulableAndUnresolvable)?;
        if !choice.bindings.is_empty() || !choice.provisions.is_empty() {
            let mut choices = claims.choices.lock().unwrap_or_else(PoisonError::into_inner);
            choices.insert(node.name().to_owned(), choice);
        }
        Ok(())
    }
}

impl Reserve for VolumeBinding {
    fn reserve(&self, state: &mut CycleState, _pod: &PodInfo, node: &str) -> Result<(), Rejection> {
        let Some(choice) = state.get::<PodClaims>().and_then(|claims| claims.choice(node)) else {
            return Ok(());
        };
        {
            let mut assumed = self.assumed();
            for (volume, claim) in &choice.bindings {
                let version = volume.metadata.resource_version.clone();
                assumed.volumes.insert(name_of(&volume.metadata.name), (version, ObjectKey::of(&**claim)));
            }
            for claim in &choice.provisions {
                let version = claim.metadata.resource_version.clone();
                assumed.claims.insert(ObjectKey::of(&**claim), (version, node.to_owned()));
            }
        }
        state.put(Chosen(Arc::new(choice)));
        Ok(())
    }

    fn unreserve(&self, state: &mut CycleState, _pod: &PodInfo, _node: &str) {
        if let Some(Chosen(choice)) = state.get::<Chosen>() {
            self.forget(choice);
        }
    }
}

impl PreBind for VolumeBinding {
    fn is_needed(&self, state: &CycleState, _pod: &PodInfo, _node: &str) -> bool {
        state.get::<Chosen>().is_some()
    }

    fn pre_bind<'a>(
        &'a self,
        state: &'a CycleState,
        _pod: &'a PodInfo,
        node: &'a str,
    ) -> BoxFuture<'a, Result<(), Rejection>> {
        Box::pin(async move {
            let Some(Chosen(choice)) = state.get::<Chosen>() else { return Ok(()) };
            let result = self.bind(choice, node).await;
            if result.is_ok() {
                // The API shows it now.
                self.forget(choice);
            }
            result.map_err(|error| PluginError::new("PreBind", NAME, error).into())
        })
    }
}

#[cfg(test)]
mod tests;
