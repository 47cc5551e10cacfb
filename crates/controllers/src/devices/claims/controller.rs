//! The part of the resourceclaim controller that acts.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_client::{
    Api, Change, Controller, EventRecorder, EventType, Informer, ObjectKey, RateLimits, WorkQueue,
    is_not_found,
};
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference, ResourceClaimTemplate};
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};

use super::decide::{
    FINALIZER, Need, claim_for, is_done, is_left_behind, is_made_for, is_valid, need, release,
};
use super::measures;
use crate::Context;
use crate::error::{During, SyncError};
use crate::pods::{is_terminating, node_name};
use ferrite_client::resource_claims::{
    Named, PODS_BY_CLAIM, claim_index, claim_names, consumers, entries, extended_claim, is_allocated,
    is_for_pod, is_pod, is_reserved_for,
};

const NAME: &str = "resourceclaim-controller";
/// The source of events, as upstream's.
const SOURCE: &str = "resource_claim";
/// Owns the entries of `status.resourceClaimStatuses`.
const MANAGER: &str = "ResourceClaimController";

/// Index of pods by the templates that they name, as `namespace/name`.
const PODS_BY_TEMPLATE: &str = "resource claim template";
/// Index of claims by the UID of the pod that they were made for.
const BY_OWNER: &str = "pod that it was made for";

/// A pod whose claims may be missing, or a claim whose pods may be gone.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Task {
    Pod(ObjectKey),
    Claim(ObjectKey),
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pod(key) => write!(f, "pod:{key}"),
            Self::Claim(key) => write!(f, "claim:{key}"),
        }
    }
}

/// An entry of a pod: the pod's UID and the entry's name.
type EntryKey = (String, String);

struct Claims {
    client: Client,
    pods: Informer<Pod>,
    claims: Informer<ResourceClaim>,
    templates: Informer<ResourceClaimTemplate>,
    /// Names of claims that were made and that the watch has not shown yet, so that a second attempt for the same entry
    /// finds them. An entry goes when the watch shows its claim, or with the pod.
    made: Mutex<HashMap<EntryKey, String>>,
    recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(Claims {
        client: context.client.clone(),
        pods: context.informers.get(),
        claims: context.informers.get(),
        templates: context.informers.get(),
        made: Mutex::default(),
        recorder: context.events.recorder(SOURCE, None),
    });
    controller.pods.add_index(PODS_BY_CLAIM, claim_index);
    controller.pods.add_index(PODS_BY_TEMPLATE, template_index);
    controller.claims.add_index(BY_OWNER, owner_index);
    controller.claims.subscribe(measures::observe);
    let (of_pods, of_claims, of_templates) = (controller.clone(), controller.clone(), controller.clone());
    let kit: Controller<Task> = context.declared(NAME, context.workers(NAME), RateLimits::default());
    kit.watches(&controller.pods, move |change, queue| of_pods.pod_changed(change, queue))
        .watches(&controller.claims, move |change, queue| of_claims.claim_changed(change, queue))
        .watches(&controller.templates, move |change, queue| {
            if !matches!(change, Change::Deleted(_)) {
                let key = ObjectKey::of(&**change.object()).to_string();
                for pod in of_templates.pods.by_index(PODS_BY_TEMPLATE, &key) {
                    wake(&pod, false, queue);
                }
            }
        })
        .run_with(controller.clone(), |controller, task| async move {
            match task {
                Task::Pod(key) => controller.sync_pod(&key).await,
                Task::Claim(key) => controller.sync_claim(&key).await,
            }
            .map(|()| None::<Duration>)
        });
}

fn template_index(pod: &Pod) -> Vec<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let templates = entries(pod).iter().filter_map(|entry| entry.resource_claim_template_name.as_ref());
    let mut keys: Vec<String> = templates.map(|name| format!("{namespace}/{name}")).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

fn owner_index(claim: &ResourceClaim) -> Vec<String> {
    let owner = ferrite_client::controller_of(&claim.metadata);
    let pod = owner.filter(|owner| owner.api_version == "v1" && owner.kind == "Pod");
    pod.map(|owner| owner.uid.clone()).into_iter().collect()
}

/// Puts the pod into the queue, or the claims that it holds for nothing.
fn wake(pod: &Pod, deleted: bool, queue: &WorkQueue<Task>) {
    let extended = extended_claim(pod);
    if entries(pod).is_empty() && extended.is_none() {
        return;
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    if deleted || is_done(pod) {
        for name in claim_names(pod).chain(extended) {
            queue.add(Task::Claim(ObjectKey::new(namespace, name)));
        }
    }
    if !deleted && !is_terminating(pod) {
        queue.add(Task::Pod(ObjectKey::of(pod)));
    }
}

/// The parts of a pod that this controller acts on.
fn relevant(pod: &Pod) -> (Option<&str>, bool, Vec<Named<'_>>, Option<&str>) {
    let named = entries(pod).iter().map(|entry| Named::of(pod, entry)).collect();
    (node_name(pod), is_done(pod), named, extended_claim(pod))
}

fn other(message: String) -> SyncError {
    SyncError::Other(message)
}

impl Claims {
    fn made(&self) -> MutexGuard<'_, HashMap<EntryKey, String>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pod_changed(&self, change: &Change<Pod>, queue: &WorkQueue<Task>) {
        match change {
            Change::Added(pod) => wake(pod, false, queue),
            Change::Updated { old, new } => {
                if !entries(new).is_empty() || extended_claim(new).is_some() {
                    let changed = relevant(old) != relevant(new);
                    if changed {
                        wake(new, false, queue);
                    }
                }
            }
            Change::Deleted(pod) => {
                if !entries(pod).is_empty() {
                    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
                    self.made().retain(|(owner, _), _| owner != uid);
                }
                wake(pod, true, queue);
            }
        }
    }

    fn claim_changed(&self, change: &Change<ResourceClaim>, queue: &WorkQueue<Task>) {
        let claim = change.object();
        let key = ObjectKey::of(&**claim);
        let entry = claim.metadata.annotations.as_ref().and_then(|all| all.get(super::decide::POD_CLAIM));
        if let (Some(owner), Some(entry)) = (owner_index(claim).pop(), entry) {
            self.made().remove(&(owner, entry.clone()));
        }
        for pod in self.pods.by_index(PODS_BY_CLAIM, &key.to_string()) {
            wake(&pod, false, queue);
        }
        if !matches!(change, Change::Deleted(_)) {
            queue.add(Task::Claim(key));
        }
    }

    async fn sync_pod(&self, key: &ObjectKey) -> Result<(), SyncError> {
        let Some(pod) = self.pods.get(key).filter(|pod| !is_terminating(pod)) else { return Ok(()) };
        let mut found: Vec<(&str, String)> = Vec::new();
        let mut changed = false;
        for entry in entries(&pod) {
            match self.ensure(&pod, entry).await {
                Ok(Some(name)) => {
                    let known = Named::of(&pod, entry);
                    changed |= known.name() != Some(&name);
                    if !matches!(known, Named::Given(_)) {
                        found.push((&entry.name, name));
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    let message = format!("PodResourceClaim {}: {error}", entry.name);
                    self.recorder.event_for(
                        &*pod,
                        EventType::Warning,
                        "FailedResourceClaimCreation",
                        message.clone(),
                    );
                    return Err(other(format!("pod {key}, {message}")));
                }
            }
        }
        if changed {
            self.record(&pod, key, &found).await?;
        }
        if node_name(&pod).is_none() {
            // The scheduler reserves the claims of a pod that it places.
            return Ok(());
        }
        for entry in entries(&pod) {
            let named = Named::of(&pod, entry);
            let made =
                found.iter().find(|(entry_name, _)| *entry_name == entry.name).map(|(_, name)| name.as_str());
            let Some(name) = made.or(named.name()) else { continue };
            let Some(claim) = self.claims.get(&ObjectKey::new(&*key.namespace, name)) else { return Ok(()) };
            if !matches!(named, Named::Given(_)) && !is_for_pod(&claim, &pod) {
                return Err(other(format!(
                    "ResourceClaim {}/{name} was not created for Pod {key} (Pod is not owner)",
                    key.namespace
                )));
            }
            if is_allocated(&claim) && !is_reserved_for(&claim, &pod) {
                self.reserve(&claim, &pod).await?;
            }
        }
        Ok(())
    }

    /// The name of the claim behind an entry, made if it has to be. Nothing if the entry needs none, or if its claim is
    /// somebody else's to make.
    async fn ensure(&self, pod: &Pod, entry: &PodResourceClaim) -> Result<Option<String>, SyncError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let name = Named::of(pod, entry).name();
        let claim = name.and_then(|name| self.claims.get(&ObjectKey::new(namespace, name)));
        let template = match need(pod, entry, claim.as_deref()) {
            Need::Nothing => return Ok(name.map(str::to_owned)),
            Need::Claim { template } => template,
            Need::Unsupported => {
                let name = pod.metadata.name.as_deref().unwrap_or_default();
                return Err(other(format!(
                    "checking for claim before creating it: pod \"{namespace}/{name}\", spec.resourceClaim {:?}: none of the supported fields are set",
                    entry.name
                )));
            }
        };
        if let Some(name) = self.find_made(pod, entry, namespace).await? {
            return Ok(Some(name));
        }
        let Some(template) = self.templates.get(&ObjectKey::new(namespace, template)) else {
            return Err(other(format!(
                "resource claim template {template:?}: resourceclaimtemplate.resource.k8s.io {template:?} not found"
            )));
        };
        let claim = claim_for(pod, entry, &template);
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        let created = api.create(&PostParams::default(), &claim).await;
        measures::count_creation(&claim, created.is_ok());
        let created = created.during(|| "create ResourceClaim".to_owned())?;
        let name = created.metadata.name.unwrap_or_default();
        let owner = pod.metadata.uid.clone().unwrap_or_default();
        // Under the lock: the watch either has shown the claim, or removes the entry when it does.
        let mut made = self.made();
        if self.claims.get(&ObjectKey::new(namespace, &*name)).is_none() {
            made.insert((owner, entry.name.clone()), name.clone());
        }
        Ok(Some(name))
    }

    /// The claim that an earlier attempt made for this entry.
    async fn find_made(
        &self,
        pod: &Pod,
        entry: &PodResourceClaim,
        namespace: &str,
    ) -> Result<Option<String>, SyncError> {
        let owner = pod.metadata.uid.as_deref().unwrap_or_default();
        let known = self.claims.by_index(BY_OWNER, owner);
        if let Some(claim) = known.iter().find(|claim| is_made_for(claim, pod, entry)) {
            return Ok(claim.metadata.name.clone());
        }
        let key = (owner.to_owned(), entry.name.clone());
        let Some(name) = self.made().get(&key).cloned() else { return Ok(None) };
        // It may have been deleted before the watch showed it.
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        if api.get_opt(&name).await.during(|| format!("read claim {namespace}/{name}"))?.is_some() {
            return Ok(Some(name));
        }
        self.made().remove(&key);
        Ok(None)
    }

    /// Writes the names of generated claims into the pod's status: all of them, because an entry that this manager owns
    /// and does not name again is removed.
    async fn record(&self, pod: &Pod, key: &ObjectKey, found: &[(&str, String)]) -> Result<(), SyncError> {
        let statuses: Vec<Value> =
            found.iter().map(|(entry, claim)| json!({"name": entry, "resourceClaimName": claim})).collect();
        let patch = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": pod.metadata.uid},
            "status": {"resourceClaimStatuses": statuses}});
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        match api.patch_status(&key.name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(patch)).await {
            Err(error) if is_not_found(&error) => Ok(()),
            result => result.map(drop).during(|| format!("update pod {key} ResourceClaimStatuses")),
        }
    }

    async fn reserve(&self, claim: &ResourceClaim, pod: &Pod) -> Result<(), SyncError> {
        let key = ObjectKey::of(claim);
        let mut claim = claim.clone();
        claim.status.get_or_insert_default().reserved_for.get_or_insert_default().push(
            ResourceClaimConsumerReference {
                api_group: None,
                resource: "pods".into(),
                name: pod.metadata.name.clone().unwrap_or_default(),
                uid: pod.metadata.uid.clone().unwrap_or_default(),
            },
        );
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        let written = api.replace_status(&key.name, &PostParams::default(), &claim).await;
        written.map(drop).during(|| format!("reserve claim {key}"))
    }

    async fn sync_claim(&self, key: &ObjectKey) -> Result<(), SyncError> {
        let Some(claim) = self.claims.get(key) else { return Ok(()) };
        let mut remaining = Vec::new();
        for consumer in consumers(&claim) {
            if self.holds(consumer, key).await? {
                remaining.push(consumer.clone());
            }
        }
        let unused = remaining.is_empty();
        let plan = release(&claim, remaining);
        let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &key.namespace);
        // The writes name the version that was read: they fail if anything changed in the meantime.
        let mut current = (*claim).clone();
        if let Some(status) = plan.status {
            current.status = Some(status);
            current = api
                .replace_status(&key.name, &PostParams::default(), &current)
                .await
                .during(|| format!("release claim {key}"))?;
        }
        if plan.finalizer
            && let Some(finalizers) = current.metadata.finalizers.as_mut()
        {
            finalizers.retain(|finalizer| finalizer != FINALIZER);
            match api.replace(&key.name, &PostParams::default(), &current).await {
                Ok(_) => {}
                Err(error) if is_not_found(&error) => return Ok(()),
                Err(error) => {
                    return Err(error).during(|| format!("remove the finalizer of claim {key}"));
                }
            }
        }
        let find = |name: &str| self.pods.get(&ObjectKey::new(&*key.namespace, name));
        if unused && is_left_behind(&claim, find) {
            let same = Preconditions { uid: claim.metadata.uid.clone(), resource_version: None };
            return match api.delete(&key.name, &DeleteParams::default().preconditions(same)).await {
                Err(error) if is_not_found(&error) => Ok(()),
                result => result.during(|| format!("delete unused generated claim {key}")),
            };
        }
        Ok(())
    }

    /// True if the reservation holds. A pod that is not known may be so new that the watch has not shown it: only the
    /// server says for sure that there is none.
    async fn holds(
        &self,
        consumer: &ResourceClaimConsumerReference,
        claim: &ObjectKey,
    ) -> Result<bool, SyncError> {
        if !is_pod(consumer) {
            return Ok(true);
        }
        let key = ObjectKey::new(&*claim.namespace, &*consumer.name);
        if let Some(pod) = self.pods.get(&key) {
            return Ok(is_valid(consumer, Some(&pod)));
        }
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let pod = api.get_opt(&key.name).await.during(|| format!("read pod {key}"))?;
        Ok(is_valid(consumer, pod.as_ref()))
    }
}
