//! Notices nodes that stop reporting, by a timer per node that every heartbeat puts off.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_client::{
    Api, Change, EventRecorder, EventType, Informer, ListSelector, ObjectKey, WorkQueue, is_conflict,
    is_not_found,
};
use ferrite_json::json;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use kube::Client;
use kube::api::{Patch, PatchParams, PostParams};
use tokio::time::Instant;

use super::conditions::{READY, Readiness, condition, readiness, silenced};
use super::taints;
use super::zones::{self, Zone};
use crate::error::{During, SyncError};
use crate::pods::{self, BY_NODE, is_ready};
use crate::{Config, Context};

const NAME: &str = "node-lifecycle-controller";
const LEASES: &str = "kube-node-lease";

/// The last signs of life of a node, by this process's clock: clocks of nodes are not trusted.
struct Signs {
    heartbeat: Option<Time>,
    renewed: Option<MicroTime>,
    seen: Instant,
}

struct Monitor {
    client: Client,
    nodes: Informer<Node>,
    pods: Informer<Pod>,
    queue: Arc<WorkQueue<ObjectKey>>,
    signs: Mutex<HashMap<String, Signs>>,
    /// When the next eviction in a zone may begin.
    next_eviction: Mutex<HashMap<String, Instant>>,
    recorder: EventRecorder,
    config: Arc<Config>,
}

pub(crate) fn start(context: &Context) {
    let kit = context.controller(NAME);
    let monitor = Arc::new(Monitor {
        client: context.client.clone(),
        nodes: context.informers.get(),
        pods: context.informers.get(),
        queue: kit.queue().clone(),
        signs: Mutex::default(),
        next_eviction: Mutex::default(),
        recorder: context.events.recorder("node-controller", None),
        config: context.config.clone(),
    });
    monitor.pods.add_index(BY_NODE, pods::node_index);
    let leases: Api<Lease> = Api::namespaced(context.reader.clone(), LEASES);
    let leases = Informer::start(leases, ListSelector::everything(), &context.scope);
    let (by_lease, by_node) = (monitor.clone(), monitor.clone());
    kit.watches(&leases, move |change, _| by_lease.lease_changed(change))
        .watches(&monitor.nodes, move |change, _| by_node.node_changed(change))
        .reads(&monitor.pods)
        .run_with(monitor.clone(), |monitor, key| async move { monitor.sync(key).await });
}

fn zone_of(node: &Node) -> String {
    let label = |key: &str| {
        node.metadata.labels.as_ref().and_then(|labels| labels.get(key)).cloned().unwrap_or_default()
    };
    format!("{}/{}", label("topology.kubernetes.io/region"), label("topology.kubernetes.io/zone"))
}

impl Monitor {
    fn signs(&self) -> MutexGuard<'_, HashMap<String, Signs>> {
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lease_changed(&self, change: &Change<Lease>) {
        if let Change::Deleted(_) = change {
            return;
        }
        let lease = change.object();
        let renewed = lease.spec.as_ref().and_then(|spec| spec.renew_time.clone());
        let mut signs = self.signs();
        let known = signs.entry(lease.metadata.name.clone().unwrap_or_default()).or_insert_with(Signs::now);
        if known.renewed != renewed {
            known.renewed = renewed;
            known.seen = Instant::now();
        }
    }

    fn node_changed(&self, change: &Change<Node>) {
        let node = change.object();
        let key = ObjectKey::of(&**node);
        if let Change::Deleted(_) = change {
            self.signs().remove(key.name.as_str());
            return;
        }
        let heartbeat = condition(node, READY).and_then(|ready| ready.last_heartbeat_time.clone());
        {
            let mut signs = self.signs();
            let known = signs.entry(key.name.to_string()).or_insert_with(Signs::now);
            // The controller's own write about a silent node is no heartbeat.
            if readiness(node) != Readiness::Unknown && known.heartbeat != heartbeat {
                known.heartbeat = heartbeat;
                known.seen = Instant::now();
            }
        }
        if let Change::Updated { old, new } = change
            && readiness(old) != readiness(new)
        {
            // The allowed rate of evictions depends on it.
            for other in self.nodes.list() {
                if taints::wants_eviction(&other) {
                    self.queue.add(ObjectKey::of(&*other));
                }
            }
        }
        self.queue.add(key);
    }

    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(node) = self.nodes.get(&key) else { return Ok(None) };
        let grace = match readiness(&node) {
            Readiness::Absent => self.config.node_startup_grace,
            _ => self.config.node_monitor_grace,
        };
        let silent_for = self.signs().entry(key.name.to_string()).or_insert_with(Signs::now).seen.elapsed();
        if silent_for >= grace
            && let Some(silent) = silenced(&node, Timestamp::now())
        {
            let api: Api<Node> = Api::all(self.client.clone());
            return match api.replace_status(&key.name, &PostParams::default(), &silent).await {
                Ok(written) => {
                    let message = format!("Node {} status is now: NodeNotReady", key.name);
                    self.recorder.event_for(&written, EventType::Normal, "NodeNotReady", message);
                    // The change comes back through the watch, and taints follow then.
                    Ok(None)
                }
                Err(error) if is_not_found(&error) => Ok(None),
                Err(error) => Err(error).during(|| format!("update status of node {}", key.name)),
            };
        }
        let wait = self.taint(&key, &node).await?;
        if matches!(readiness(&node), Readiness::False | Readiness::Unknown) {
            self.mark_pods_not_ready(&key.name).await?;
        }
        let next = grace.saturating_sub(silent_for).max(Duration::from_millis(100));
        let until_silent = (silent_for < grace).then_some(next);
        Ok([wait, until_silent].into_iter().flatten().min())
    }

    /// Brings the taints in line; how long until an eviction that had to be put off may begin.
    async fn taint(&self, key: &ObjectKey, node: &Node) -> Result<Option<Duration>, SyncError> {
        let leave = if taints::wants_eviction(node) { self.may_evict(node) } else { Ok(()) };
        if let Some(desired) = taints::desired(node, leave.is_ok(), Timestamp::now()) {
            let patch = json!({"metadata": {"resourceVersion": node.metadata.resource_version},
                               "spec": {"taints": desired}});
            let api: Api<Node> = Api::all(self.client.clone());
            match api.patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Ok(_) => {}
                Err(error) if is_not_found(&error) => return Ok(None),
                Err(error) => return Err(error).during(|| format!("taint node {}", key.name)),
            }
        }
        Ok(leave.err().flatten())
    }

    /// Leave to evict one more node of its zone now, or after how long to ask again, if at all.
    fn may_evict(&self, node: &Node) -> Result<(), Option<Duration>> {
        let mut all: BTreeMap<String, Zone> = BTreeMap::new();
        for other in self.nodes.list() {
            let zone = all.entry(zone_of(&other)).or_default();
            match readiness(&other) {
                Readiness::True => zone.ready += 1,
                _ => zone.lost += 1,
            }
        }
        let zone = zone_of(node);
        let rate = zones::rate(&all, &zone, self.config.evictions);
        if rate <= 0.0 {
            return Err(None);
        }
        let now = Instant::now();
        let mut next = self.next_eviction.lock().unwrap_or_else(PoisonError::into_inner);
        let at = next.entry(zone).or_insert(now);
        if *at > now {
            return Err(Some(*at - now));
        }
        *at = now + Duration::from_secs_f64(1.0 / rate);
        Ok(())
    }

    /// Takes pods of a node that does not answer out of Services at once.
    async fn mark_pods_not_ready(&self, node: &str) -> Result<(), SyncError> {
        for pod in self.pods.by_index(BY_NODE, node).into_iter().filter(|pod| is_ready(pod)) {
            let key = ObjectKey::of(&*pod);
            let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
            let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [{
                "type": "Ready", "status": "False", "lastTransitionTime": Time(Timestamp::now())}]}});
            match api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await {
                Ok(_) => {
                    self.recorder.event_for(&*pod, EventType::Warning, "NodeNotReady", "Node is not ready")
                }
                Err(error) if is_not_found(&error) || is_conflict(&error) => {}
                Err(error) => return Err(error).during(|| format!("mark pod {key} not ready")),
            }
        }
        Ok(())
    }
}

impl Signs {
    fn now() -> Self {
        Self { heartbeat: None, renewed: None, seen: Instant::now() }
    }
}
