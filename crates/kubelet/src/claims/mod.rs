//! Dynamic resources: drivers prepare the devices of a pod's claims before the pod starts, and undo it when the pod is
//! gone.
//!
//! `state.rs` (pure) knows who uses which claim, `checkpoint.rs` is the file that survives a restart, `registration.rs`
//! takes drivers and removes the ResourceSlices of drivers that are gone. This module holds the state and calls the
//! drivers, without a lock held: a driver that hangs holds up only pods that use its devices.

mod checkpoint;
mod health;
mod registration;
mod state;
#[cfg(test)]
mod tests;

pub(crate) use registration::DraPlugins;

use crate::pod::model::{self, PodContainer, PodId};
use crate::state_file;
use ferrite_client::resource_claims::{
    self, Named, allocation, extended_claim, is_owned_by, is_reserved_for, results,
};
use ferrite_client::{Api, Scope, message_of};
use ferrite_devices::dra::Claim;
use ferrite_devices::podresources::{CdiDevice, ClaimResource, DynamicResource};
use ferrite_devices::{CallError, DraPlugin};
use health::HealthCache;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Client;
use state::{ClaimKey, ClaimState, Device, OldClaim};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Claims could not be prepared, or their preparation not undone. The messages are upstream's.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error("pod \"{0}\": ResourceClaim not created yet")]
    NotCreated(PodId),
    #[error("pod \"{0}\", spec.resourceClaim {1:?}: none of the supported fields are set")]
    Unsupported(PodId, String),
    #[error("fetch ResourceClaim {name}: {problem}")]
    Fetch { name: String, problem: String },
    #[error("ResourceClaim {claim} was not created for Pod {pod} (Pod is not owner)")]
    NotOwned { claim: String, pod: PodId },
    #[error("pod {pod} ({pod_uid}) is not allowed to use ResourceClaim {claim} ({claim_uid})")]
    NotReserved { pod: String, pod_uid: String, claim: String, claim_uid: String },
    #[error("ResourceClaim {0}: not allocated")]
    NotAllocated(String),
    #[error("DRA driver {0} is not registered")]
    NoDriver(String),
    #[error(transparent)]
    OldClaim(#[from] OldClaim),
    #[error("{call}: {source}")]
    Call { call: &'static str, source: CallError },
    #[error("{call} returned result for unknown claim UID {uid}")]
    UnknownClaim { call: &'static str, uid: String },
    #[error("{call} failed for ResourceClaim {claim}: {problem}")]
    Driver { call: &'static str, claim: String, problem: String },
    #[error("{call} skipped {count} ResourceClaims")]
    Skipped { call: &'static str, count: usize },
    #[error("checkpoint ResourceClaim state: {0}")]
    Checkpoint(io::Error),
    #[error("unable to get information for ResourceClaim {0}")]
    Unknown(String),
}

/// A driver's longest message that is shown.
const MESSAGE: usize = 1024;
const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";

#[derive(Default)]
struct Inner {
    state: ClaimState,
    /// Registered instances of each driver; the last one is called.
    drivers: BTreeMap<String, Vec<DraPlugin>>,
    health: HealthCache,
    /// UIDs of pods that wait for a driver.
    waiting: BTreeMap<String, BTreeSet<String>>,
}

struct Shared {
    path: PathBuf,
    client: Client,
    node_name: String,
    inner: Mutex<Inner>,
    /// One writer of the checkpoint at a time, so that the newest state is the last one written.
    saving: tokio::sync::Mutex<()>,
    scope: Scope,
    /// Wakes the worker of a pod.
    wake: Box<dyn Fn(&str) + Send + Sync>,
}

/// The manager of claims. Clones share it.
#[derive(Clone)]
pub(crate) struct Claims(Arc<Shared>);

/// A claim that a pod is about to use.
struct Wanted {
    key: ClaimKey,
    uid: String,
    drivers: BTreeSet<String>,
}

fn shortened(text: &str) -> String {
    text.chars().take(MESSAGE).collect()
}

impl Claims {
    /// Reads the checkpoint in `dir`. `wake` is called with the UID of a pod whose driver has come.
    pub(crate) fn open(
        dir: &Path,
        client: Client,
        node_name: &str,
        wake: impl Fn(&str) + Send + Sync + 'static,
        scope: &Scope,
    ) -> io::Result<Self> {
        let path = dir.join(checkpoint::FILE);
        let found = state_file::read(&path)?;
        let state = found.map(|bytes| checkpoint::read(&bytes)).transpose().unwrap_or_else(|error| {
            tracing::error!(path = %path.display(), %error, "could not read the checkpoint of claims; starting without it");
            None
        });
        let inner = Inner { state: state.unwrap_or_default(), ..Inner::default() };
        Ok(Self(Arc::new(Shared {
            path,
            client,
            node_name: node_name.to_owned(),
            inner: Mutex::new(inner),
            saving: tokio::sync::Mutex::default(),
            scope: scope.clone(),
            wake: Box::new(wake),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn save(&self) -> Result<(), ClaimError> {
        let _last = self.0.saving.lock().await;
        let bytes = checkpoint::write(&self.lock().state);
        let bytes = bytes.map_err(|e| ClaimError::Checkpoint(io::Error::other(e)))?;
        let path = self.0.path.clone();
        let written = tokio::task::spawn_blocking(move || state_file::write(&path, &bytes)).await;
        written.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(ClaimError::Checkpoint)
    }

    fn driver(&self, name: &str) -> Option<DraPlugin> {
        self.lock().drivers.get(name).and_then(|instances| instances.last()).cloned()
    }

    /// Has the drivers prepare the devices of all claims of the pod. Claims that are prepared are left alone.
    pub(crate) async fn prepare(&self, pod: &Pod) -> Result<(), ClaimError> {
        let mut names = Vec::new();
        for entry in resource_claims::entries(pod) {
            match Named::of(pod, entry) {
                Named::Given(name) => names.push((name, false)),
                Named::Generated(name) => names.push((name, true)),
                Named::NotNeeded => {}
                Named::NotCreated => return Err(ClaimError::NotCreated(PodId::of(pod))),
                Named::Unsupported => {
                    return Err(ClaimError::Unsupported(PodId::of(pod), entry.name.clone()));
                }
            }
        }
        names.extend(extended_claim(pod).map(|name| (name, false)));
        if names.is_empty() {
            return Ok(());
        }
        let id = PodId::of(pod);
        // As upstream: nothing is noted before all claims and drivers are there. A pod that fails can be removed then.
        let mut wanted = Vec::new();
        for (name, must_own) in names {
            wanted.push(self.check(pod, name, must_own).await?);
        }
        for driver in wanted.iter().flat_map(|claim| &claim.drivers) {
            let mut inner = self.lock();
            if !inner.drivers.contains_key(driver) {
                inner.waiting.entry(driver.clone()).or_default().insert(id.uid.clone());
                return Err(ClaimError::NoDriver(driver.clone()));
            }
        }
        let mut batches: BTreeMap<String, Vec<(ClaimKey, Claim)>> = BTreeMap::new();
        {
            let mut inner = self.lock();
            for claim in &wanted {
                if inner.state.add(&claim.key, &claim.uid, &claim.drivers, &id.uid)? {
                    for driver in &claim.drivers {
                        let message = message_of_claim(&claim.key, &claim.uid);
                        batches.entry(driver.clone()).or_default().push((claim.key.clone(), message));
                    }
                }
            }
        }
        // If the kubelet ends before the answer, it knows what to undo.
        self.save().await?;
        for (name, claims) in &batches {
            let Some(driver) = self.driver(name) else { return Err(ClaimError::NoDriver(name.clone())) };
            let messages = claims.iter().map(|(_, message)| message.clone()).collect();
            let answers = driver.prepare(messages).await;
            let mut answers = answers.map_err(|source| ClaimError::Call { call: PREPARE, source })?;
            check_answers(PREPARE, claims, answers.iter().map(|(uid, answer)| (uid, answer.error.as_str())))?;
            let mut inner = self.lock();
            for (key, message) in claims {
                let devices = answers.remove(&message.uid).map(|answer| answer.devices).unwrap_or_default();
                let devices = devices.into_iter().map(|device| Device {
                    pool: device.pool_name,
                    device: device.device_name,
                    share_id: device.share_id,
                    requests: device.request_names,
                    cdi_devices: device.cdi_device_ids,
                });
                inner.state.set_devices(key, name, devices.collect());
            }
        }
        {
            let mut inner = self.lock();
            wanted.iter().for_each(|claim| inner.state.set_prepared(&claim.key));
        }
        if batches.is_empty() { Ok(()) } else { self.save().await }
    }

    /// The claim as the API has it, if the pod may use it.
    async fn check(&self, pod: &Pod, name: &str, must_own: bool) -> Result<Wanted, ClaimError> {
        let id = PodId::of(pod);
        let api = Api::<ResourceClaim>::namespaced(self.0.client.clone(), &id.namespace);
        let claim = api
            .get(name)
            .await
            .map_err(|error| ClaimError::Fetch { name: name.to_owned(), problem: message_of(&error) })?;
        if must_own && !is_owned_by(&claim, &id.uid) {
            return Err(ClaimError::NotOwned { claim: format!("{}/{name}", id.namespace), pod: id });
        }
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        if !is_reserved_for(&claim, pod) {
            return Err(ClaimError::NotReserved {
                pod: id.name,
                pod_uid: id.uid,
                claim: name.to_owned(),
                claim_uid: uid,
            });
        }
        let Some(devices) = allocation(&claim) else { return Err(ClaimError::NotAllocated(name.to_owned())) };
        let drivers = results(devices).iter().map(|result| result.driver.clone()).collect();
        Ok(Wanted { key: (id.namespace, name.to_owned()), uid, drivers })
    }

    /// The claims that a container uses, with the requests; an empty request is all of them.
    fn used<'a>(&self, pod: &'a Pod, container: &'a PodContainer) -> BTreeMap<&'a str, Vec<&'a str>> {
        let mut used: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let claims = container.spec.resources.as_ref().and_then(|resources| resources.claims.as_ref());
        for claim in claims.into_iter().flatten() {
            let entry = resource_claims::entries(pod).iter().find(|entry| entry.name == claim.name);
            if let Some(name) = entry.and_then(|entry| Named::of(pod, entry).name()) {
                used.entry(name).or_default().push(claim.request.as_deref().unwrap_or_default());
            }
        }
        let extended = pod.status.as_ref().and_then(|status| status.extended_resource_claim_status.as_ref());
        if let Some(status) = extended {
            for mapping in status.request_mappings.iter().filter(|m| m.container_name == container.name()) {
                used.entry(&status.resource_claim_name).or_default().push(&mapping.request_name);
            }
        }
        used
    }

    /// CDI names of the devices of a container.
    pub(crate) fn cdi_devices(&self, pod: &Pod, container: &PodContainer) -> Result<Vec<String>, ClaimError> {
        let used = self.used(pod, container);
        if used.is_empty() {
            return Ok(Vec::new());
        }
        let namespace = PodId::of(pod).namespace;
        let inner = self.lock();
        let mut names = Vec::new();
        for (claim, requests) in used {
            let found = inner.state.cdi_devices(&(namespace.clone(), claim.to_owned()), &requests);
            names.extend(found.ok_or_else(|| ClaimError::Unknown(claim.to_owned()))?);
        }
        Ok(names)
    }

    /// The devices of a container, as the pod resources API shows them.
    pub(crate) fn dynamic_resources(&self, pod: &Pod, container: &PodContainer) -> Vec<DynamicResource> {
        let namespace = PodId::of(pod).namespace;
        let used = self.used(pod, container);
        let inner = self.lock();
        let resource = |claim: &str| {
            let info = inner.state.0.get(&(namespace.clone(), claim.to_owned()))?;
            let devices =
                info.drivers.iter().flat_map(|(driver, list)| list.iter().map(move |d| (driver, d)));
            let claim_resources = devices.map(|(driver, device)| ClaimResource {
                cdi_devices: device.cdi_devices.iter().map(|name| CdiDevice { name: name.clone() }).collect(),
                driver_name: driver.clone(),
                pool_name: device.pool.clone(),
                device_name: device.device.clone(),
                share_id: device.share_id.clone(),
            });
            Some(DynamicResource {
                claim_name: claim.to_owned(),
                claim_namespace: namespace.clone(),
                claim_resources: claim_resources.collect(),
            })
        };
        used.into_keys().filter_map(resource).collect()
    }

    /// The pod has ended: drivers undo the preparation of claims that no other pod of the node uses.
    pub(crate) async fn unprepare(&self, pod: &str) -> Result<(), ClaimError> {
        let mut batches: BTreeMap<String, Vec<(ClaimKey, Claim)>> = BTreeMap::new();
        for (key, uid, drivers) in self.lock().state.only_of(pod) {
            for driver in drivers {
                let message = message_of_claim(&key, &uid);
                batches.entry(driver).or_default().push((key.clone(), message));
            }
        }
        for (name, claims) in batches {
            let Some(driver) = self.driver(&name) else {
                self.lock().waiting.entry(name.clone()).or_default().insert(pod.to_owned());
                return Err(ClaimError::NoDriver(name));
            };
            let messages = claims.iter().map(|(_, message)| message.clone()).collect();
            let answers = driver.unprepare(messages).await;
            let answers = answers.map_err(|source| ClaimError::Call { call: UNPREPARE, source })?;
            check_answers(
                UNPREPARE,
                &claims,
                answers.iter().map(|(uid, answer)| (uid, answer.error.as_str())),
            )?;
        }
        let changed = {
            let mut inner = self.lock();
            inner.waiting.retain(|_, pods| {
                pods.remove(pod);
                !pods.is_empty()
            });
            inner.state.release(pod)
        };
        if changed { self.save().await } else { Ok(()) }
    }

    /// Undoes what was prepared for pods that do not exist any longer.
    pub(crate) fn retain(&self, live: &BTreeSet<String>) {
        for pod in self.lock().state.pods().into_iter().filter(|pod| !live.contains(pod)) {
            let claims = self.clone();
            self.0.scope.spawn(async move {
                let mut backoff = registration::backoff();
                while let Err(error) = claims.unprepare(&pod).await {
                    tracing::warn!(pod, %error, "could not unprepare the claims of a pod that is gone; will try again");
                    tokio::time::sleep(backoff.next_delay()).await;
                }
            });
        }
    }
}

fn message_of_claim(key: &ClaimKey, uid: &str) -> Claim {
    Claim { namespace: key.0.clone(), uid: uid.to_owned(), name: key.1.clone() }
}

/// Fails unless there is one answer for each claim, without an error.
fn check_answers<'a>(
    call: &'static str,
    claims: &[(ClaimKey, Claim)],
    answers: impl Iterator<Item = (&'a String, &'a str)>,
) -> Result<(), ClaimError> {
    let mut count = 0;
    for (uid, problem) in answers {
        let Some((key, _)) = claims.iter().find(|(_, claim)| claim.uid == *uid) else {
            return Err(ClaimError::UnknownClaim { call, uid: shortened(uid) });
        };
        if !problem.is_empty() {
            return Err(ClaimError::Driver { call, claim: key.1.clone(), problem: shortened(problem) });
        }
        count += 1;
    }
    match claims.len() - count {
        0 => Ok(()),
        count => Err(ClaimError::Skipped { call, count }),
    }
}

/// True if the pod uses claims.
pub(crate) fn has_claims(pod: &Pod) -> bool {
    model::spec(pod).resource_claims.as_ref().is_some_and(|claims| !claims.is_empty())
        || extended_claim(pod).is_some()
}
