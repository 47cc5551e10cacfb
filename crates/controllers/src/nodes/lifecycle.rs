//! Notices nodes that stop reporting, by a timer per node that every heartbeat puts off.

use std::collections::{BTreeMap, HashMap, HashSet};
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
use super::taints::{self, Eviction};
use super::zones::{self, Zone};
use super::{labels, measures};
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
    /// Pods to mark as not ready, by their node: those of a node that fell silent, and those that came to a node that is
    /// not ready. Others may be ready on such a node: its kubelet says so.
    unmarked: Mutex<HashMap<String, HashSet<ObjectKey>>>,
    /// When the next eviction in a zone may begin.
    next_eviction: Mutex<HashMap<String, Instant>>,
    recorder: EventRecorder,
    config: Arc<Config>,
}

pub(crate) fn start(context: &Context) {
    let kit = context.controller(NAME);
    let monitor = Arc::new(Monitor::new(context, kit.queue().clone()));
    monitor.pods.add_index(BY_NODE, pods::node_index);
    let leases: Api<Lease> = Api::namespaced(context.reader.clone(), LEASES);
    let leases = Informer::start(leases, ListSelector::everything(), &context.scope);
    let (by_lease, by_node, by_pod) = (monitor.clone(), monitor.clone(), monitor.clone());
    kit.watches(&leases, move |change, _| by_lease.lease_changed(change))
        .watches(&monitor.nodes, move |change, _| by_node.node_changed(change))
        .watches(&monitor.pods, move |change, _| by_pod.pod_changed(change))
        .run_with(monitor.clone(), |monitor, key| async move { monitor.sync(key).await });
}

/// Upstream's key of the node's zone.
fn zone_of(node: &Node) -> String {
    let label = |key: &str| {
        node.metadata.labels.as_ref().and_then(|labels| labels.get(key)).map_or("", String::as_str)
    };
    match (label("topology.kubernetes.io/region"), label("topology.kubernetes.io/zone")) {
        ("", "") => String::new(),
        (region, zone) => format!("{region}:\0:{zone}"),
    }
}

fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

impl Monitor {
    fn new(context: &Context, queue: Arc<WorkQueue<ObjectKey>>) -> Self {
        Self {
            client: context.client.clone(),
            nodes: context.informers.get(),
            pods: context.informers.get(),
            queue,
            signs: Mutex::default(),
            unmarked: Mutex::default(),
            next_eviction: Mutex::default(),
            recorder: context.events.recorder("node-controller", None),
            config: context.config.clone(),
        }
    }

    fn signs(&self) -> MutexGuard<'_, HashMap<String, Signs>> {
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unmarked(&self) -> MutexGuard<'_, HashMap<String, HashSet<ObjectKey>>> {
        self.unmarked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notices pods that come to a node that is not ready.
    fn pod_changed(&self, change: &Change<Pod>) {
        let pod = change.object();
        let node = node_of(pod);
        let has_come = match change {
            Change::Added(_) => true,
            Change::Updated { old, .. } => node_of(old) != node,
            Change::Deleted(_) => false,
        };
        if !has_come || node.is_empty() || !is_ready(pod) {
            return;
        }
        let key = ObjectKey::cluster(node);
        if self.nodes.get(&key).is_none_or(|node| readiness(&node) != Readiness::True) {
            self.unmarked().entry(node.to_owned()).or_default().insert(ObjectKey::of(&**pod));
            self.queue.add(key);
        }
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
        match change {
            Change::Deleted(_) => {
                self.signs().remove(key.name.as_str());
                self.unmarked().remove(key.name.as_str());
                let what = format!("Removing Node {} from Controller", key.name);
                self.tell(node, "RemovingNode", &what);
                return;
            }
            Change::Added(_) => {
                measures::EVICTIONS.with(&[&zone_of(node)]);
                let what = format!("Registered Node {} in Controller", key.name);
                self.tell(node, "RegisteredNode", &what);
            }
            Change::Updated { .. } => {}
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
            // The allowed rate of evictions depends on it, and evictions end when the last node is lost.
            let all = self.nodes.list();
            let is_any_ready = all.iter().any(|other| readiness(other) == Readiness::True);
            for other in all {
                if taints::wants_eviction(&other) || (!is_any_ready && taints::is_lost(&other)) {
                    self.queue.add(ObjectKey::of(&*other));
                }
            }
        }
        self.queue.add(key);
    }

    fn tell(&self, node: &Node, reason: &str, what: &str) {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        self.recorder.event_for(node, EventType::Normal, reason, format!("Node {name} event: {what}"));
    }

    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(node) = self.nodes.get(&key) else {
            self.unmarked().remove(key.name.as_str());
            return Ok(None);
        };
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
                    if readiness(&node) == Readiness::True {
                        let message = format!("Node {} status is now: NodeNotReady", key.name);
                        self.recorder.event_for(&written, EventType::Normal, "NodeNotReady", message);
                        let pods = self.pods.by_index(BY_NODE, &key.name);
                        let pods = pods.iter().filter(|pod| is_ready(pod)).map(|pod| ObjectKey::of(&**pod));
                        self.unmarked().entry(key.name.to_string()).or_default().extend(pods);
                        self.mark_pods_not_ready(&key.name).await?;
                    }
                    // The change comes back through the watch, and taints follow then.
                    Ok(None)
                }
                Err(error) if is_not_found(&error) => Ok(None),
                Err(error) => Err(error).during(|| format!("update status of node {}", key.name)),
            };
        }
        let wait = self.taint(&key, &node).await?;
        self.reconcile_labels(&key, &node).await?;
        match readiness(&node) {
            Readiness::False | Readiness::Unknown => self.mark_pods_not_ready(&key.name).await?,
            Readiness::True | Readiness::Absent => {
                self.unmarked().remove(key.name.as_str());
            }
        }
        let next = grace.saturating_sub(silent_for).max(Duration::from_millis(100));
        let until_silent = (silent_for < grace).then_some(next);
        Ok([wait, until_silent].into_iter().flatten().min())
    }

    /// Brings the older labels in line with those that replaced them.
    async fn reconcile_labels(&self, key: &ObjectKey, node: &Node) -> Result<(), SyncError> {
        let labels = labels::to_reconcile(node);
        if labels.is_empty() {
            return Ok(());
        }
        let api: Api<Node> = Api::all(self.client.clone());
        let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
        match api.patch(&key.name, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            Err(error) if is_not_found(&error) => Ok(()),
            Err(error) => Err(error).during(|| format!("label node {}", key.name)),
        }
    }

    /// Brings the taints in line; how long until an eviction that had to be put off may begin.
    async fn taint(&self, key: &ObjectKey, node: &Node) -> Result<Option<Duration>, SyncError> {
        let (eviction, wait) = self.eviction(node);
        if let Some(desired) = taints::desired(node, eviction, Timestamp::now()) {
            let patch = json!({"metadata": {"resourceVersion": node.metadata.resource_version},
                               "spec": {"taints": desired}});
            let api: Api<Node> = Api::all(self.client.clone());
            match api.patch(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Ok(_) => {}
                Err(error) if is_not_found(&error) => return Ok(None),
                Err(error) => return Err(error).during(|| format!("taint node {}", key.name)),
            }
            if taints::wants_eviction(node) && eviction == Eviction::May {
                measures::EVICTIONS.with(&[&zone_of(node)]).increment();
            }
        }
        Ok(wait)
    }

    /// Decides about evictions from the node, and after how long to ask again, if at all.
    fn eviction(&self, node: &Node) -> (Eviction, Option<Duration>) {
        if !taints::is_lost(node) {
            return (Eviction::Waits, None);
        }
        let mut all: BTreeMap<String, Zone> = BTreeMap::new();
        for other in self.nodes.list().iter().filter(|node| !labels::is_excluded(node)) {
            let zone = all.entry(zone_of(other)).or_default();
            match readiness(other) {
                Readiness::True => zone.ready += 1,
                _ => zone.lost += 1,
            }
        }
        if zones::are_all_lost(&all) {
            return (Eviction::Ends, None);
        }
        if !taints::wants_eviction(node) {
            return (Eviction::Waits, None);
        }
        let zone = zone_of(node);
        let rate = zones::rate(&all, &zone, self.config.evictions);
        if rate <= 0.0 {
            return (Eviction::Waits, None);
        }
        let now = Instant::now();
        let mut next = self.next_eviction.lock().unwrap_or_else(PoisonError::into_inner);
        let at = next.entry(zone).or_insert(now);
        if *at > now {
            return (Eviction::Waits, Some(*at - now));
        }
        *at = now + Duration::from_secs_f64(1.0 / rate);
        (Eviction::May, None)
    }

    /// Takes the noted pods of a node that does not answer out of Services at once.
    async fn mark_pods_not_ready(&self, node: &str) -> Result<(), SyncError> {
        let noted: Vec<ObjectKey> = self.unmarked().get(node).into_iter().flatten().cloned().collect();
        for key in noted {
            if let Some(pod) = self.pods.get(&key).filter(|pod| node_of(pod) == node && is_ready(pod)) {
                self.mark_not_ready(&key, &pod).await?;
            }
            if let Some(left) = self.unmarked().get_mut(node) {
                left.remove(&key);
            }
        }
        self.unmarked().retain(|_, left| !left.is_empty());
        Ok(())
    }

    async fn mark_not_ready(&self, key: &ObjectKey, pod: &Pod) -> Result<(), SyncError> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
        let patch = json!({"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": [{
            "type": "Ready", "status": "False", "lastTransitionTime": Time(Timestamp::now())}]}});
        match api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(patch)).await {
            Ok(_) => {
                self.recorder.event_for(pod, EventType::Warning, "NodeNotReady", "Node is not ready");
                Ok(())
            }
            Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(()),
            Err(error) => Err(error).during(|| format!("mark pod {key} not ready")),
        }
    }
}

impl Signs {
    fn now() -> Self {
        Self { heartbeat: None, renewed: None, seen: Instant::now() }
    }
}

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
