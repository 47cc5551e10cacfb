//! Connects queue, cache and cycle to the API.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_client::{
    Api, Change, EventRecorder, EventType, Events, Informer, Informers, ObjectKey, Scope, is_conflict,
    is_not_found, message_of,
};
use ferrite_json::json;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Binding, Node, ObjectReference, Pod, PodCondition, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Client;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::{Selector, SelectorExt};
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};

use crate::cache::Cache;
use crate::cycle::{self, Placement, Search};
use crate::framework::{ClusterEvent, Framework, Permission, Profile, UnknownPluginError};
use crate::queue::{Popped, Queue};
use crate::snapshot::{PodInfo, Shapes, Snapshot};

/// Bindings under way at once; the cycle waits when there are more.
const BINDINGS: usize = 64;
const BIND_TIMEOUT: Duration = Duration::from_secs(30);

/// What the scheduler is given.
#[derive(Clone)]
pub struct SchedulerContext {
    pub client: Client,
    pub informers: Informers,
    pub events: Events,
    pub scope: Scope,
    pub profiles: Vec<Profile>,
}

impl std::fmt::Debug for SchedulerContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SchedulerContext").field("profiles", &self.profiles).finish_non_exhaustive()
    }
}

struct Scheduler {
    client: Client,
    frameworks: HashMap<String, (Framework, EventRecorder)>,
    cache: Mutex<Cache>,
    shapes: Mutex<Shapes>,
    queue: Mutex<Queue>,
    wake: Notify,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    services: Informer<Service>,
    replica_sets: Informer<ReplicaSet>,
    bindings: Arc<Semaphore>,
    scope: Scope,
}

/// Starts scheduling; the tasks belong to the context's scope. Fails if a profile names an unknown plugin.
pub fn start(context: &SchedulerContext) -> Result<(), UnknownPluginError> {
    let mut frameworks = HashMap::new();
    for profile in &context.profiles {
        let recorder = context.events.recorder(profile.scheduler_name.clone(), None);
        frameworks.insert(profile.scheduler_name.clone(), (Framework::new(profile)?, recorder));
    }
    let scheduler = Arc::new(Scheduler {
        client: context.client.clone(),
        frameworks,
        cache: Mutex::default(),
        shapes: Mutex::default(),
        queue: Mutex::default(),
        wake: Notify::new(),
        pods: context.informers.get(),
        nodes: context.informers.get(),
        services: context.informers.get(),
        replica_sets: context.informers.get(),
        bindings: Arc::new(Semaphore::new(BINDINGS)),
        scope: context.scope.clone(),
    });
    context.scope.spawn(async move {
        let watching = scheduler.clone();
        scheduler.nodes.subscribe(move |change| watching.node_changed(change));
        let watching = scheduler.clone();
        scheduler.pods.subscribe(move |change| watching.pod_changed(change));
        scheduler.nodes.synced().await;
        scheduler.pods.synced().await;
        scheduler.services.synced().await;
        scheduler.replica_sets.synced().await;
        scheduler.run().await;
    });
    Ok(())
}

fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|name| !name.is_empty())
}

fn is_finished(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

impl Scheduler {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn framework_of(&self, pod: &PodInfo) -> Option<&(Framework, EventRecorder)> {
        self.frameworks.get(pod.scheduler_name())
    }

    fn hint(&self, pod: &PodInfo, rejected_by: &[&'static str], event: &ClusterEvent) -> bool {
        self.framework_of(pod).is_some_and(|(framework, _)| framework.may_help(pod, rejected_by, event))
    }

    fn happened(&self, event: ClusterEvent) {
        let hint = |pod: &PodInfo, by: &[&'static str], event: &ClusterEvent| self.hint(pod, by, event);
        self.queue().on_event(event, Instant::now(), &hint);
        self.wake.notify_one();
    }

    fn node_changed(&self, change: &Change<Node>) {
        match change {
            Change::Added(node) => {
                self.cache().set_node(node.clone());
                self.happened(ClusterEvent::NodeAdded(node.clone()));
            }
            Change::Updated { old, new } => {
                self.cache().set_node(new.clone());
                // Heartbeats change nothing that scheduling looks at.
                let allocatable =
                    |node: &Node| node.status.as_ref().and_then(|status| status.allocatable.clone());
                if old.metadata.labels != new.metadata.labels
                    || old.spec != new.spec
                    || allocatable(old) != allocatable(new)
                {
                    self.happened(ClusterEvent::NodeUpdated { old: old.get().clone(), new: new.clone() });
                }
            }
            Change::Deleted(node) => {
                self.cache().remove_node(node.metadata.name.as_deref().unwrap_or_default());
            }
        }
    }

    fn pod_changed(&self, change: &Change<Pod>) {
        let object = change.object();
        let pod = Arc::new(self.shapes.lock().unwrap_or_else(PoisonError::into_inner).pod(object));
        let gone = matches!(change, Change::Deleted(_)) || is_finished(object);
        match node_name(object) {
            _ if gone => {
                self.queue().remove(&pod.key);
                let counted = self.cache().is_placed(&pod.key);
                self.cache().remove_pod(&pod.key);
                if counted {
                    self.happened(ClusterEvent::AssignedPodDeleted(pod));
                }
            }
            Some(node) => {
                self.queue().remove(&pod.key);
                let is_new = {
                    let mut cache = self.cache();
                    let is_new = cache.confirmed_labels(&pod.key) != Some(pod.labels());
                    cache.set_pod(pod.clone(), node);
                    is_new
                };
                if is_new {
                    self.happened(ClusterEvent::AssignedPodAdded(pod));
                }
            }
            None if pod.is_terminating() => self.queue().remove(&pod.key),
            None if self.framework_of(&pod).is_some() => {
                // A pod assumed on a node is with the binding, not with the queue.
                self.queue().set(pod, Instant::now());
                self.wake.notify_one();
            }
            None => {}
        }
    }

    async fn run(self: Arc<Self>) {
        let mut snapshot = Snapshot::default();
        let mut search = Search::default();
        loop {
            let popped = self.next().await;
            let Ok(permit) = self.bindings.clone().acquire_owned().await else { return };
            self.cache().update(&mut snapshot);
            let siblings = self.siblings_of(&popped.pod);
            let pod = PodInfo::clone(&popped.pod).with_siblings(siblings);
            let Some((framework, _)) = self.framework_of(&pod) else {
                self.queue().done(&pod.key);
                continue;
            };
            let result = cycle::schedule(framework, &snapshot, &pod, &mut search, |candidates| {
                rand::random_range(0..candidates.max(1))
            });
            let popped = Popped { pod: Arc::new(pod), ..popped };
            match result {
                Ok(placement) => {
                    debug!(pod = %popped.pod.key, node = placement.node, evaluated = placement.evaluated,
                           feasible = placement.feasible, "found a node");
                    // Counted at once, so that the next cycle sees it; the API is told meanwhile.
                    self.cache().assume(popped.pod.clone(), &placement.node);
                    let scheduler = self.clone();
                    self.scope.spawn(async move {
                        scheduler.bind(popped, placement).await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    let message = error.to_string();
                    let pod = popped.pod.clone();
                    self.give_back(popped, error.rejected_by);
                    let scheduler = self.clone();
                    self.scope.spawn(async move {
                        scheduler.report(&pod, "Unschedulable", &message).await;
                        drop(permit);
                    });
                }
            }
        }
    }

    async fn next(&self) -> Popped {
        loop {
            let woken = self.wake.notified();
            let due = {
                let mut queue = self.queue();
                if let Some(popped) = queue.pop(Instant::now()) {
                    return popped;
                }
                queue.next_due()
            };
            match due {
                None => woken.await,
                Some(at) => {
                    tokio::select! {
                        () = woken => {}
                        () = sleep_until(at) => {}
                    }
                }
            }
        }
    }

    fn give_back(&self, popped: Popped, rejected_by: Vec<&'static str>) {
        let hint = |pod: &PodInfo, by: &[&'static str], event: &ClusterEvent| self.hint(pod, by, event);
        self.queue().give_back(popped, rejected_by, Instant::now(), &hint);
        self.wake.notify_one();
    }

    /// Selects the pods of the Services and of the ReplicaSet the pod belongs to.
    fn siblings_of(&self, pod: &PodInfo) -> Option<Selector> {
        let labels = pod.labels();
        let namespace = pod.key.namespace.as_str();
        let mut all: Option<Selector> = None;
        for service in self.services.list_in(namespace) {
            let selector = service.spec.as_ref().and_then(|spec| spec.selector.clone()).unwrap_or_default();
            let selector: Selector = selector.into_iter().collect();
            if !selector.selects_all() && selector.matches(labels) {
                all.get_or_insert_default().extend(selector);
            }
        }
        if let Some((kind, name)) = pod.controller.as_deref()
            && kind == "ReplicaSet"
            && let Some(set) = self.replica_sets.get(&ObjectKey::new(namespace, name.clone()))
            && let Some(selector) =
                set.spec.as_ref().and_then(|spec| Selector::try_from(spec.selector.clone()).ok())
        {
            all.get_or_insert_default().extend(selector);
        }
        all
    }

    async fn bind(&self, popped: Popped, mut placement: Placement) {
        let pod = popped.pod.clone();
        let node = placement.node.clone();
        match self.try_bind(&pod, &mut placement).await {
            Ok(()) => {
                self.queue().done(&pod.key);
                if let Some((_, recorder)) = self.framework_of(&pod) {
                    let message = format!("Successfully assigned {} to {node}", pod.key);
                    recorder.event(&pod.reference(), EventType::Normal, "Scheduled", message);
                }
            }
            Err(problem) => {
                warn!(pod = %pod.key, node, problem, "cannot bind");
                if let Some((framework, _)) = self.framework_of(&pod) {
                    for plugin in framework.plugins.iter().rev().filter_map(|(plugin, _)| plugin.reserve()) {
                        plugin.unreserve(&mut placement.state, &pod, &node);
                    }
                }
                self.cache().forget(&pod.key);
                // What was kept free for it is free again.
                self.happened(ClusterEvent::AssignedPodDeleted(pod.clone()));
                self.give_back(popped, Vec::new());
                self.report(&pod, "SchedulerError", &problem).await;
            }
        }
    }

    async fn try_bind(&self, pod: &PodInfo, placement: &mut Placement) -> Result<(), String> {
        let node = placement.node.clone();
        let Some((framework, _)) = self.framework_of(pod) else { return Ok(()) };
        for plugin in framework.plugins.iter().filter_map(|(plugin, _)| plugin.reserve()) {
            plugin.reserve(&mut placement.state, pod, &node)?;
        }
        for plugin in framework.plugins.iter().filter_map(|(plugin, _)| plugin.permit()) {
            match plugin.permit(&mut placement.state, pod, &node) {
                Permission::Approved => {}
                Permission::Denied(reason) => return Err(format!("Binding rejected: {reason}")),
                Permission::Wait(limit) => {
                    return Err(format!("Binding rejected: not approved within {} s", limit.as_secs()));
                }
            }
        }
        for plugin in framework.plugins.iter().filter_map(|(plugin, _)| plugin.pre_bind()) {
            plugin.pre_bind(pod, &node).await?;
        }
        for plugin in framework.plugins.iter().filter_map(|(plugin, _)| plugin.bind()) {
            if let Some(result) = plugin.bind(pod, &node).await {
                return result;
            }
        }
        self.post_binding(pod, &node).await
    }

    async fn post_binding(&self, pod: &PodInfo, node: &str) -> Result<(), String> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        let binding = Binding {
            metadata: ObjectMeta {
                name: Some(pod.key.name.to_string()),
                namespace: Some(pod.key.namespace.to_string()),
                uid: pod.uid.as_ref().map(ToString::to_string),
                ..ObjectMeta::default()
            },
            target: ObjectReference {
                kind: Some("Node".to_owned()),
                name: Some(node.to_owned()),
                ..ObjectReference::default()
            },
        };
        let params = PostParams::default();
        let call = api.create_subresource("binding", &pod.key.name, &params, &binding);
        match timeout(BIND_TIMEOUT, call).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(format!("binding rejected: {}", message_of(&error))),
            Err(_) => Err("binding rejected: the API server did not answer in time".to_owned()),
        }
    }

    /// Tells people, and the pod's condition, why it has no node yet.
    async fn report(&self, pod: &PodInfo, reason: &str, message: &str) {
        if let Some((_, recorder)) = self.framework_of(pod) {
            recorder.event(&pod.reference(), EventType::Warning, "FailedScheduling", message);
        }
        let current = self.pods.get(&pod.key);
        let Some(current) = current.filter(|current| current.metadata.uid.as_deref() == pod.uid.as_deref())
        else {
            return;
        };
        let conditions = current.status.as_ref().and_then(|status| status.conditions.as_ref());
        let known = conditions.into_iter().flatten().find(|condition| condition.type_ == "PodScheduled");
        if known.is_some_and(|known| {
            known.status == "False"
                && known.reason.as_deref() == Some(reason)
                && known.message.as_deref() == Some(message)
        }) {
            return;
        }
        let since =
            known.filter(|known| known.status == "False").and_then(|k| k.last_transition_time.clone());
        let condition = PodCondition {
            type_: "PodScheduled".to_owned(),
            status: "False".to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_transition_time: since.or_else(|| Some(Time(jiff::Timestamp::now()))),
            observed_generation: current.metadata.generation,
            ..PodCondition::default()
        };
        let patch = json!({"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}});
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        if let Err(error) =
            api.patch_status(&pod.key.name, &PatchParams::default(), &Patch::Strategic(patch)).await
            && !is_not_found(&error)
            && !is_conflict(&error)
        {
            warn!(pod = %pod.key, error = message_of(&error), "cannot write why the pod has no node");
        }
    }
}
