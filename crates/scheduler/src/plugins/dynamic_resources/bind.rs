//! From a node to a pod that can be bound: devices are kept for the pod, written to its claims, and waited for.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrite_client::resource_claims::{allocation, consumers, is_allocated};
use ferrite_client::{Api, ObjectKey, is_conflict, is_not_found, message_of};
use ferrite_json::json;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerExtendedResourceRequest, Pod};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimConsumerReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::warn;

use super::filter::{ExtendedAllocation, PodClaims};
use super::readiness::{Readiness, has_conditions, is_timed_out, readiness};
use super::{DynamicResources, NAME};
use crate::devices::Devices;
use crate::framework::{CycleState, PluginError, PreBind, Rejection, Reserve};
use crate::snapshot::PodInfo;

/// Keeps a claim with devices from being removed.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Attempts to write a claim that others write, too, and the pause between two.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(10);

/// A claim could not be written.
#[derive(Debug, thiserror::Error)]
pub(super) enum BindError {
    #[error("claim allocation not found for node")]
    NotFound,
    #[error("claim {0} got deleted in the meantime")]
    Deleted(ObjectKey),
    #[error("claim {0} got allocated elsewhere in the meantime")]
    AllocatedElsewhere(ObjectKey),
    #[error("claim {0} got deallocated elsewhere in the meantime")]
    Deallocated(ObjectKey),
    #[error("{doing} claim {claim}: {problem}")]
    Write { doing: &'static str, claim: ObjectKey, problem: String },
    #[error("update pod {pod} ExtendedResourceClaimStatus: {problem}")]
    PodStatus { pod: ObjectKey, problem: String },
    #[error("device binding timeout: claim={0}")]
    NotReady(String),
    #[error("{0}")]
    Failed(String),
    #[error("the scheduler ends")]
    Ended,
}

/// The devices that were chosen, between Reserve and the binding.
#[derive(Clone)]
struct Chosen(Arc<Reserved>);

struct Reserved {
    /// For each claim of the spec: the devices that it gets, if it had none.
    devices: Vec<Option<Arc<AllocationResult>>>,
    extended: Option<ExtendedAllocation>,
    /// The claims as they were written last.
    written: Mutex<Written>,
}

#[derive(Default)]
struct Written {
    claims: Vec<Arc<ResourceClaim>>,
    /// The claim of extended resources, once it exists.
    extended: Option<Arc<ResourceClaim>>,
}

fn uid_of(claim: &ResourceClaim) -> &str {
    claim.metadata.uid.as_deref().unwrap_or_default()
}

fn name_of(claim: &ResourceClaim) -> &str {
    claim.metadata.name.as_deref().unwrap_or_default()
}

fn is_reserved_for(claim: &ResourceClaim, uid: &str) -> bool {
    consumers(claim).iter().any(|consumer| consumer.uid == uid)
}

fn api_of(client: &Client, claim: &ResourceClaim) -> Api<ResourceClaim> {
    Api::namespaced(client.clone(), claim.metadata.namespace.as_deref().unwrap_or_default())
}

fn write_error(doing: &'static str, claim: &ResourceClaim) -> impl FnOnce(kube::Error) -> BindError {
    let claim = ObjectKey::of(claim);
    move |error| BindError::Write { doing, claim, problem: message_of(&error) }
}

/// Takes the devices from a claim.
pub(super) async fn deallocate(client: &Client, claim: &ResourceClaim) -> Result<(), BindError> {
    let claim = ResourceClaim { status: None, ..claim.clone() };
    let result = api_of(client, &claim).replace_status(name_of(&claim), &PostParams::default(), &claim).await;
    result.map(drop).map_err(write_error("deallocate", &claim))
}

/// Deletes a claim that the scheduler made, with the finalizer that the scheduler set.
pub(super) async fn delete(client: &Client, claim: &ResourceClaim) -> Result<(), BindError> {
    let api = api_of(client, claim);
    let mut current = claim.clone();
    for attempt in 1.. {
        current.metadata.finalizers.get_or_insert_default().retain(|name| name != FINALIZER);
        match api.replace(name_of(claim), &PostParams::default(), &current).await {
            Ok(_) => break,
            Err(error) if is_not_found(&error) => return Ok(()),
            Err(error) if is_conflict(&error) && attempt < ATTEMPTS => {
                sleep(PAUSE).await;
                match api.get_opt(name_of(claim)).await.map_err(write_error("get", claim))? {
                    Some(latest) if uid_of(&latest) == uid_of(claim) => current = latest,
                    _ => return Ok(()),
                }
            }
            Err(error) => return Err(write_error("update", claim)(error)),
        }
    }
    let preconditions = Preconditions { uid: claim.metadata.uid.clone(), ..Preconditions::default() };
    let params = DeleteParams::default().preconditions(preconditions);
    match api.delete(name_of(claim), &params).await {
        Err(error) if !is_not_found(&error) => Err(write_error("delete", claim)(error)),
        _ => Ok(()),
    }
}

/// Everything that is needed to write one claim, in a task that nothing interrupts.
struct Binding {
    client: Client,
    devices: Arc<Devices>,
    claim: Arc<ResourceClaim>,
    /// The devices to write; none if the claim has some already.
    allocation: Option<Arc<AllocationResult>>,
    pod: ResourceClaimConsumerReference,
}

impl Binding {
    /// Writes devices and reservation. The devices stay taken until the outcome is known.
    async fn run(self) -> Result<Arc<ResourceClaim>, BindError> {
        let uid = uid_of(&self.claim).to_owned();
        if self.allocation.is_some() {
            self.devices.begin_write(&uid);
        }
        let result = self.write().await.map(Arc::new);
        match &result {
            Ok(claim) => self.devices.written(claim.clone()),
            Err(_) => self.devices.end_write(&uid),
        }
        result
    }

    async fn write(&self) -> Result<ResourceClaim, BindError> {
        let api = api_of(&self.client, &self.claim);
        let key = ObjectKey::of(&*self.claim);
        let mut claim = ResourceClaim::clone(&self.claim);
        let mut attempt = 1;
        loop {
            match self.try_write(&api, &key, claim).await? {
                Ok(written) => return Ok(written),
                Err(error) if attempt == ATTEMPTS => return Err(error),
                Err(_) => {}
            }
            attempt += 1;
            sleep(PAUSE).await;
            claim = api.get(&key.name).await.map_err(write_error("get updated", &self.claim))?;
            if uid_of(&claim) != uid_of(&self.claim) {
                return Err(BindError::Deleted(key));
            }
        }
    }

    /// The inner error is a conflict.
    async fn try_write(
        &self,
        api: &Api<ResourceClaim>,
        key: &ObjectKey,
        mut claim: ResourceClaim,
    ) -> Result<Result<ResourceClaim, BindError>, BindError> {
        let outcome = |result: Result<ResourceClaim, kube::Error>, doing| match result {
            Ok(claim) => Ok(Ok(claim)),
            Err(error) if is_conflict(&error) => Ok(Err(write_error(doing, &self.claim)(error))),
            Err(error) => Err(write_error(doing, &self.claim)(error)),
        };
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(BindError::Deleted(key.clone()));
        }
        if let Some(devices) = &self.allocation {
            if is_allocated(&claim) {
                return Err(BindError::AllocatedElsewhere(key.clone()));
            }
            if !claim.metadata.finalizers.iter().flatten().any(|name| name == FINALIZER) {
                claim.metadata.finalizers.get_or_insert_default().push(FINALIZER.to_owned());
                let result = api.replace(&key.name, &PostParams::default(), &claim).await;
                match outcome(result, "add finalizer to")? {
                    Ok(updated) => claim = updated,
                    Err(conflict) => return Ok(Err(conflict)),
                }
            }
            claim.status.get_or_insert_default().allocation = Some(AllocationResult::clone(devices));
        }
        let status = claim.status.get_or_insert_default();
        let Some(allocation) = &mut status.allocation else {
            return Err(BindError::Deallocated(key.clone()));
        };
        if allocation.allocation_timestamp.is_none() {
            allocation.allocation_timestamp = Some(Time(Timestamp::now()));
        }
        status.reserved_for.get_or_insert_default().push(self.pod.clone());
        let result = api.replace_status(&key.name, &PostParams::default(), &claim).await;
        let doing = if self.allocation.is_some() {
            "add allocation and reservation to"
        } else {
            "add reservation to"
        };
        outcome(result, doing)
    }
}

/// Makes the claim of a pod's extended resources.
async fn create(client: &Client, base: &ResourceClaim) -> Result<ResourceClaim, BindError> {
    let mut claim = ResourceClaim { status: None, ..base.clone() };
    claim.metadata.name = None;
    claim.metadata.uid = None;
    let created = api_of(client, base).create(&PostParams::default(), &claim).await;
    created.map_err(write_error("create", base))
}

impl DynamicResources {
    /// Runs `work` to its end, also if the pod is preempted meanwhile: nobody else knows what it has written.
    async fn uninterrupted<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, BindError>> + Send + 'static,
    ) -> Result<T, BindError> {
        let (sender, receiver) = oneshot::channel();
        self.handle.spawn(async move {
            let _ = sender.send(work.await);
        });
        receiver.await.unwrap_or(Err(BindError::Ended))
    }

    async fn bind(&self, pod: &PodInfo, node: &str, reserved: &Arc<Reserved>) -> Result<(), BindError> {
        let client = self.handle.client().cloned().ok_or(BindError::Ended)?;
        let uid = pod.uid.as_deref().unwrap_or_default();
        let consumer = ResourceClaimConsumerReference {
            api_group: None,
            resource: "pods".to_owned(),
            name: pod.key.name.to_string(),
            uid: uid.to_owned(),
        };
        for (position, devices) in reserved.devices.iter().enumerate() {
            let claim = reserved.claim(position);
            if is_reserved_for(&claim, uid) {
                continue;
            }
            let binding = Binding {
                client: client.clone(),
                devices: self.devices.clone(),
                claim,
                allocation: devices.clone(),
                pod: consumer.clone(),
            };
            let into = reserved.clone();
            self.uninterrupted(async move {
                let written = binding.run().await?;
                into.written().claims[position] = written;
                Ok(())
            })
            .await?;
        }
        if let Some(extended) = &reserved.extended {
            self.bind_extended(pod, &client, consumer, extended, reserved).await?;
        }
        self.wait_until_ready(pod, node, reserved).await
    }

    async fn bind_extended(
        &self,
        pod: &PodInfo,
        client: &Client,
        consumer: ResourceClaimConsumerReference,
        extended: &ExtendedAllocation,
        reserved: &Arc<Reserved>,
    ) -> Result<(), BindError> {
        let (into, devices, client) = (reserved.clone(), self.devices.clone(), client.clone());
        let (base, allocation) = (extended.claim.clone(), extended.devices.clone());
        let key = pod.key.clone();
        let (pod_uid, mappings) = (pod.uid.as_ref().map(ToString::to_string), extended.mappings.clone());
        self.uninterrupted(async move {
            let created = Arc::new(create(&client, &base).await?);
            into.written().extended = Some(created.clone());
            // The devices go over to the claim that exists now.
            devices.set_pending(uid_of(&created), allocation.clone());
            devices.remove_pending(uid_of(&base));
            let binding = Binding {
                client: client.clone(),
                devices: devices.clone(),
                claim: created,
                allocation: Some(allocation),
                pod: consumer,
            };
            let written = binding.run().await?;
            let name = name_of(&written).to_owned();
            into.written().extended = Some(written);
            show_in_status(&client, &key, pod_uid, &name, &mappings).await
        })
        .await
    }

    /// Waits until the drivers have made all devices ready.
    async fn wait_until_ready(
        &self,
        pod: &PodInfo,
        node: &str,
        reserved: &Reserved,
    ) -> Result<(), BindError> {
        let claims: Vec<Arc<ResourceClaim>> = {
            let written = reserved.written();
            written
                .claims
                .iter()
                .chain(&written.extended)
                .filter(|claim| has_conditions(claim))
                .cloned()
                .collect()
        };
        if claims.is_empty() {
            return Ok(());
        }
        let message = format!("waiting for binding conditions for device on node {node}");
        self.handle.record(pod, "BindingConditionsPending", message);
        let limit = self.args.binding_timeout.0;
        let mut changes = self.devices.changes();
        let end = Instant::now() + limit;
        loop {
            changes.mark_unchanged();
            let now = Timestamp::now();
            let mut pending = None;
            let mut next = end;
            for claim in &claims {
                let current =
                    self.devices.claim(&ObjectKey::of(&**claim)).filter(|c| uid_of(c) == uid_of(claim));
                let Some(current) = current else { return Err(BindError::Deleted(ObjectKey::of(&**claim))) };
                match readiness(&current) {
                    Readiness::Ready => {}
                    Readiness::Failed(problem) => return Err(BindError::Failed(problem)),
                    Readiness::Pending if is_timed_out(&current, limit, now) => {
                        return Err(BindError::NotReady(name_of(&current).to_owned()));
                    }
                    Readiness::Pending => {
                        pending.get_or_insert_with(|| name_of(&current).to_owned());
                        next = next.min(Instant::now() + time_left(&current, limit, now));
                    }
                }
            }
            let Some(name) = pending else { return Ok(()) };
            if Instant::now() >= end {
                return Err(BindError::NotReady(name));
            }
            if let Ok(Err(_)) = timeout_at(next, changes.changed()).await {
                return Err(BindError::Ended);
            }
        }
    }
}

/// The time until the claim's devices are late.
fn time_left(claim: &ResourceClaim, limit: Duration, now: Timestamp) -> Duration {
    let since = allocation(claim).and_then(|allocation| allocation.allocation_timestamp.as_ref());
    let passed = since.map_or(Duration::ZERO, |since| {
        Duration::try_from(now.duration_since(since.0)).unwrap_or(Duration::ZERO)
    });
    limit.saturating_sub(passed) + Duration::from_millis(1)
}

/// Tells the pod's kubelet which claim its extended resources come from.
async fn show_in_status(
    client: &Client,
    pod: &ObjectKey,
    uid: Option<String>,
    claim: &str,
    mappings: &[ContainerExtendedResourceRequest],
) -> Result<(), BindError> {
    let status = json!({"resourceClaimName": claim, "requestMappings": mappings});
    let patch = json!({"metadata": {"uid": uid}, "status": {"extendedResourceClaimStatus": status}});
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    let result = api.patch_status(&pod.name, &PatchParams::default(), &Patch::Strategic(patch)).await;
    result.map(drop).map_err(|error| BindError::PodStatus { pod: pod.clone(), problem: message_of(&error) })
}

impl Reserved {
    fn written(&self) -> std::sync::MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claim(&self, position: usize) -> Arc<ResourceClaim> {
        self.written().claims[position].clone()
    }
}

impl Reserve for DynamicResources {
    fn reserve(&self, state: &mut CycleState, _pod: &PodInfo, node: &str) -> Result<(), Rejection> {
        let Some(PodClaims(cycle)) = state.get::<PodClaims>() else { return Ok(()) };
        let cycle = cycle.clone();
        let found = cycle.on_node(node);
        let mut devices: Vec<Option<Arc<AllocationResult>>> = vec![None; cycle.claims.len()];
        for (position, allocation) in found.iter().flat_map(|found| &found.claims) {
            devices[*position] = Some(allocation.clone());
        }
        let is_missing =
            |(claim, devices): (&Arc<ResourceClaim>, &Option<_>)| !is_allocated(claim) && devices.is_none();
        if cycle.claims.iter().zip(&devices).any(is_missing) {
            return Err(PluginError::new("Reserve", NAME, BindError::NotFound).into());
        }
        let extended = found.as_ref().and_then(|found| found.extended.clone());
        let of_extended = extended.iter().map(|extended| (uid_of(&extended.claim), &extended.devices));
        let of_claims = cycle.claims.iter().zip(&devices);
        let of_claims = of_claims.filter_map(|(claim, devices)| Some((uid_of(claim), devices.as_ref()?)));
        for (uid, devices) in of_claims.chain(of_extended) {
            self.devices.set_pending(uid, devices.clone());
        }
        let written = Mutex::new(Written { claims: cycle.claims.clone(), extended: None });
        state.put(Chosen(Arc::new(Reserved { devices, extended, written })));
        Ok(())
    }

    fn unreserve(&self, state: &mut CycleState, pod: &PodInfo, _node: &str) {
        let Some(Chosen(reserved)) = state.get::<Chosen>() else { return };
        let uid = pod.uid.as_deref().unwrap_or_default();
        let Written { claims, extended } = &*reserved.written();
        if let Some(base) = &reserved.extended {
            self.devices.remove_pending(uid_of(&base.claim));
        }
        for (claim, devices) in claims.iter().zip(&reserved.devices) {
            if devices.is_some() {
                self.devices.remove_pending(uid_of(claim));
            }
        }
        let Some(client) = self.handle.client() else { return };
        for claim in claims.iter().filter(|claim| is_allocated(claim) && is_reserved_for(claim, uid)) {
            let (client, claim, uid) = (client.clone(), claim.clone(), uid.to_owned());
            self.handle.spawn(async move {
                let patch = json!({"metadata": {"uid": claim.metadata.uid},
                    "status": {"reservedFor": [{"$patch": "delete", "uid": uid}]}});
                let api = api_of(&client, &claim);
                let result = api
                    .patch_status(name_of(&claim), &PatchParams::default(), &Patch::Strategic(patch))
                    .await;
                if let Err(error) = result
                    && !is_not_found(&error)
                {
                    warn!(claim = name_of(&claim), error = message_of(&error), "cannot unreserve a claim");
                }
            });
        }
        if let Some(claim) = extended.clone() {
            let client = client.clone();
            self.handle.spawn(async move {
                if let Err(error) = delete(&client, &claim).await {
                    warn!(claim = name_of(&claim), %error, "cannot delete the claim of extended resources");
                }
            });
        }
    }
}

impl PreBind for DynamicResources {
    fn is_needed(&self, state: &CycleState, _pod: &PodInfo, _node: &str) -> bool {
        state
            .get::<Chosen>()
            .is_some_and(|Chosen(reserved)| !reserved.devices.is_empty() || reserved.extended.is_some())
    }

    fn pre_bind<'a>(
        &'a self,
        state: &'a CycleState,
        pod: &'a PodInfo,
        node: &'a str,
    ) -> BoxFuture<'a, Result<(), Rejection>> {
        Box::pin(async move {
            let Some(Chosen(reserved)) = state.get::<Chosen>() else { return Ok(()) };
            let result = self.bind(pod, node, reserved).await;
            result.map_err(|error| PluginError::new("PreBind", NAME, error).into())
        })
    }
}
