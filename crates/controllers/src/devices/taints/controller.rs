//! The part of the device-taint-eviction controller that acts.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_client::{Api, Change, EventRecorder, EventType, Informer, ObjectKey, WorkQueue};
use ferrite_component::metrics::{Counter, Histogram, registry};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Client;

use super::decide::{evicting, eviction, results};
use crate::Context;
use crate::error::{During, SyncError};
use crate::evict::{self, Disruption};
use crate::pods::{is_terminating, node_name};
use ferrite_client::resource_claims::{
    Named, PODS_BY_CLAIM, claim_index, consumers, entries, is_for_pod, is_pod, is_reserved_for,
};

const NAME: &str = "device-taint-eviction-controller";
const DISRUPTION: Disruption = Disruption {
    reason: "DeletionByDeviceTaintManager",
    message: "Device Taint manager: deleting due to NoExecute taint",
};
const REASON: &str = "DeviceTaintManagerEviction";

/// Index of slices and of claims by `driver/pool`.
const BY_POOL: &str = "pool";

static DELETIONS: LazyLock<Arc<Counter>> = LazyLock::new(|| {
    registry()
        .counter(
            "device_taint_eviction_controller_pod_deletions_total",
            "Number of pods that this controller deleted since its start.",
            &[],
        )
        .with(&[])
});

static LATENCY: LazyLock<Arc<Histogram>> = LazyLock::new(|| {
    registry()
        .histogram(
            "device_taint_eviction_controller_pod_deletion_duration_seconds",
            "Time between the end of a pod's toleration and its deletion.",
            &[],
            &[0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 120.0, 180.0, 240.0],
        )
        .with(&[])
});

struct Evictor {
    client: Client,
    pods: Informer<Pod>,
    claims: Informer<ResourceClaim>,
    slices: Informer<ResourceSlice>,
    /// The UIDs of pods that wait for the end of a toleration, by key.
    waiting: Mutex<HashMap<ObjectKey, Option<String>>>,
    recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(Evictor {
        client: context.client.clone(),
        pods: context.informers.get(),
        claims: context.informers.get(),
        slices: context.informers.get(),
        waiting: Mutex::default(),
        recorder: context.events.recorder(NAME, None),
    });
    controller.pods.add_index(PODS_BY_CLAIM, claim_index);
    controller.claims.add_index(BY_POOL, claim_pools);
    controller.slices.add_index(BY_POOL, |slice| vec![pool_of(slice)]);
    let claims = controller.claims.clone();
    context
        .controller(NAME)
        .watches(&controller.pods, |change, queue| {
            let pod = change.object();
            let changed = match change {
                Change::Updated { old, new } => node_name(old) != node_name(new) || names(old) != names(new),
                Change::Added(_) | Change::Deleted(_) => true,
            };
            if changed && !entries(pod).is_empty() {
                queue.add(ObjectKey::of(&**pod));
            }
        })
        .watches(&controller.claims, |change, queue| {
            if let Change::Updated { old, .. } = change {
                wake_users(old, queue);
            }
            wake_users(change.object(), queue);
        })
        .watches(&controller.slices, move |change, queue| {
            let changed = match change {
                Change::Updated { old, new } => {
                    old.spec.pool.generation != new.spec.pool.generation || evicting(old) != evicting(new)
                }
                Change::Added(_) | Change::Deleted(_) => true,
            };
            if changed {
                for claim in claims.by_index(BY_POOL, &pool_of(change.object())) {
                    wake_users(&claim, queue);
                }
            }
        })
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
}

fn pool_of(slice: &ResourceSlice) -> String {
    format!("{}/{}", slice.spec.driver, slice.spec.pool.name)
}

fn claim_pools(claim: &ResourceClaim) -> Vec<String> {
    let mut pools: Vec<String> =
        results(claim).map(|result| format!("{}/{}", result.driver, result.pool)).collect();
    pools.sort_unstable();
    pools.dedup();
    pools
}

fn names(pod: &Pod) -> Vec<Named<'_>> {
    entries(pod).iter().map(|entry| Named::of(pod, entry)).collect()
}

fn wake_users(claim: &ResourceClaim, queue: &WorkQueue<ObjectKey>) {
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    for consumer in consumers(claim).iter().filter(|consumer| is_pod(consumer)) {
        queue.add(ObjectKey::new(namespace, &*consumer.name));
    }
}

impl Evictor {
    fn waiting(&self) -> MutexGuard<'_, HashMap<ObjectKey, Option<String>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(pod) = self.pods.get(&key).filter(|pod| !is_terminating(pod)) else {
            self.waiting().remove(&key);
            return Ok(None);
        };
        let Some(when) = self.eviction_of(&pod) else {
            let waited = self.waiting().remove(&key);
            if waited.is_some_and(|uid| uid == pod.metadata.uid) {
                self.recorder.event_for(&*pod, EventType::Normal, REASON, "Cancelling deletion");
            }
            return Ok(None);
        };
        let left = when.duration_since(Timestamp::now());
        if left.is_positive() {
            self.waiting().insert(key, pod.metadata.uid.clone());
            return Ok(Some(left.unsigned_abs()));
        }
        self.evict(&key, &pod).await?;
        LATENCY.observe(left.unsigned_abs());
        self.waiting().remove(&key);
        Ok(None)
    }

    /// The time at which the pod is evicted; none if it may stay.
    fn eviction_of(&self, pod: &Pod) -> Option<Timestamp> {
        node_name(pod)?;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let claims = names(pod).into_iter().filter_map(|named| {
            let claim = self.claims.get(&ObjectKey::new(namespace, named.name()?))?;
            let is_its_own = matches!(named, Named::Given(_)) || is_for_pod(&claim, pod);
            (is_its_own && is_reserved_for(&claim, pod)).then_some(claim)
        });
        claims.filter_map(|claim| eviction(&claim, |driver, pool| self.pool(driver, pool))).min()
    }

    fn pool(&self, driver: &str, pool: &str) -> Vec<Arc<ResourceSlice>> {
        self.slices.by_index(BY_POOL, &format!("{driver}/{pool}"))
    }

    async fn evict(&self, key: &ObjectKey, pod: &Pod) -> Result<(), SyncError> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let current = api.get_opt(&key.name).await.during(|| format!("read pod {key}"))?;
        let gone =
            |pod: &Pod, current: &Pod| current.metadata.uid != pod.metadata.uid || is_terminating(current);
        if current.is_none_or(|current| gone(pod, &current)) {
            return Ok(());
        }
        self.recorder.event_for(pod, EventType::Normal, REASON, "Marking for deletion");
        if evict::mark_and_delete(&api, key, pod, &DISRUPTION).await? {
            DELETIONS.increment();
        }
        Ok(())
    }
}
