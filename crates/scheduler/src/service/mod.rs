//! Connects queue, cache and cycle to the API.

mod aside;
mod binding;
mod departures;
mod policy;
mod pre_binds;
mod preempt;
mod report;
mod turns;
mod watch;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_client::{Events, Informer, Informers, ObjectKey, Scope, SeriesRecorder};
use ferrite_component::steps::Timer;
use k8s_openapi::api::apps::v1::{ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::{Node, Pod, ReplicationController, Service};
use kube::Client;
use kube::core::Selector;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

use crate::cache::Cache;
use crate::configuration::Configuration;
use crate::cycle::{self, FitError, Placement, ScheduleError, Search};
use crate::extender::{Extender, ExtenderError};
use crate::framework::{
    ClusterEvent, Framework, FrameworkError, Handle, Nomination, PluginError, Registry, Rejection, Store,
};
use crate::measures;
use crate::queue::{Popped, Queue};
use crate::siblings::{Owner, siblings};
use crate::snapshot::{PodInfo, Shapes, Snapshot};
use aside::{Aside, SEARCHES};
use departures::Departures;
use policy::Policy;
use pre_binds::PreBinds;
use turns::Turns;

/// Writes of results under way at once; the cycle waits when there are more. A pod that waits for something else, such as
/// the provisioner of its volume, is not counted.
const BINDINGS: usize = 64;

/// Reasons of the PodScheduled condition.
const UNSCHEDULABLE: &str = "Unschedulable";
const SCHEDULER_ERROR: &str = "SchedulerError";

/// Everything that the scheduler is started with.
#[derive(Clone)]
pub struct SchedulerContext {
    pub client: Client,
    pub informers: Informers,
    pub events: Events,
    pub scope: Scope,
    pub configuration: Configuration,
    /// The plugins that profiles can name.
    pub registry: Registry,
    /// Web services that take part, made by [`connect`] from the configuration.
    pub extenders: Vec<Extender>,
}

/// Fails if a profile of the configuration cannot be made.
pub fn check(configuration: &Configuration, registry: &Registry) -> Result<(), FrameworkError> {
    let handle = Handle::default();
    configuration.profiles.iter().try_for_each(|profile| Framework::new(profile, registry, &handle).map(drop))
}

/// Prepares the extenders of a configuration.
pub async fn connect(
    configuration: &Configuration,
    informers: &Informers,
) -> Result<Vec<Extender>, ExtenderError> {
    let mut extenders = Vec::new();
    for settings in &configuration.extenders {
        extenders.push(Extender::new(settings, Store::Informer(informers.get())).await?);
    }
    Ok(extenders)
}

impl std::fmt::Debug for SchedulerContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SchedulerContext").field("configuration", &self.configuration).finish_non_exhaustive()
    }
}

/// The state that one cycle hands to the next. Its lock is held from the snapshot of a cycle until the pod counts on its
/// node: two cycles never give the same room away.
#[derive(Debug, Default)]
struct Order {
    snapshot: Snapshot,
    search: Search,
}

/// A framework and the recorder that signs with its name.
type Profiles = HashMap<String, (Framework, SeriesRecorder)>;

struct Scheduler {
    client: Client,
    profiles: Arc<Profiles>,
    handle: Handle,
    cache: Mutex<Cache>,
    order: tokio::sync::Mutex<Order>,
    /// Pods whose search runs beside the order of cycles, or waits to.
    aside: Mutex<Aside>,
    wake_aside: Notify,
    shapes: Mutex<Shapes>,
    queue: Mutex<Queue>,
    wake: Notify,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    services: Informer<Service>,
    replica_sets: Informer<ReplicaSet>,
    stateful_sets: Informer<StatefulSet>,
    replication_controllers: Informer<ReplicationController>,
    bindings: Arc<Semaphore>,
    pre_binds: PreBinds,
    extenders: Vec<Extender>,
    /// Victims that preemptors wait for.
    departures: Departures,
    /// The order of writes to a pod's status, and of its binding after them.
    turns: Turns,
    scope: Scope,
}

/// Starts scheduling; the tasks belong to the context's scope. Fails if a profile cannot be made.
pub fn start(context: &SchedulerContext) -> Result<(), FrameworkError> {
    let handle = Handle::new(context.client.clone(), context.informers.clone())
        .with_scope(context.scope.clone())
        .with_events(context.events.clone());
    let mut profiles = Profiles::new();
    for profile in &context.configuration.profiles {
        let recorder = context.events.series_recorder(&profile.scheduler_name);
        let framework = Framework::new(profile, &context.registry, &handle)?;
        profiles.insert(profile.scheduler_name.clone(), (framework, recorder));
    }
    let profiles = Arc::new(profiles);
    let policy = Policy { profiles: profiles.clone() };
    let scheduler = Arc::new(Scheduler {
        client: context.client.clone(),
        profiles,
        handle,
        cache: Mutex::default(),
        order: tokio::sync::Mutex::new(Order {
            search: Search {
                percentage: context.configuration.percentage_of_nodes_to_score,
                ..Search::default()
            },
            ..Order::default()
        }),
        aside: Mutex::default(),
        wake_aside: Notify::new(),
        shapes: Mutex::default(),
        queue: Mutex::new(
            Queue::new(Box::new(policy), context.configuration.backoff)
                .with_longest_wait(context.configuration.longest_wait),
        ),
        wake: Notify::new(),
        pods: context.informers.get(),
        nodes: context.informers.get(),
        services: context.informers.get(),
        replica_sets: context.informers.get(),
        stateful_sets: context.informers.get(),
        replication_controllers: context.informers.get(),
        bindings: Arc::new(Semaphore::new(BINDINGS)),
        pre_binds: PreBinds::default(),
        extenders: context.extenders.clone(),
        departures: Departures::default(),
        turns: Turns::default(),
        scope: context.scope.clone(),
    });
    context.scope.spawn(async move {
        scheduler.watch();
        scheduler.nodes.synced().await;
        scheduler.pods.synced().await;
        scheduler.services.synced().await;
        scheduler.replica_sets.synced().await;
        scheduler.stateful_sets.synced().await;
        scheduler.replication_controllers.synced().await;
        scheduler.handle.synced().await;
        scheduler.run().await;
    });
    Ok(())
}

/// The pod's way ended without a binding.
#[derive(Debug)]
enum Failure {
    /// Plugins rejected it; events that they care about may help.
    Rejected(Box<FitError>),
    /// Something failed; it is tried again after its back-off.
    Error(String),
}

impl Failure {
    /// A plugin rejected the pod on the one node that was chosen for it.
    fn rejected(plugin: &'static str, rejection: Rejection) -> Self {
        if let Rejection::Error(error) = rejection {
            return error.into();
        }
        Self::Rejected(Box::new(FitError {
            nodes: 1,
            reasons: rejection.reasons().iter().map(|reason| (reason.clone(), 1)).collect(),
            rejected_by: vec![plugin],
            nomination: Nomination::Clear,
            ..FitError::default()
        }))
    }
}

impl From<PluginError> for Failure {
    fn from(error: PluginError) -> Self {
        Self::Error(error.to_string())
    }
}

/// Records the search for a node in the life of the pod.
fn record_cycle(timer: Timer, popped: &Popped, result: &Result<Placement, ScheduleError>) {
    let uid = popped.pod.uid.as_deref().unwrap_or_default();
    let waited = popped.since.elapsed().saturating_sub(timer.elapsed()).as_micros();
    match result {
        Ok(Placement { node, evaluated, feasible, .. }) => timer.end(
            "scheduler",
            "schedule",
            uid,
            format_args!("{node}, one of {feasible} that fit of {evaluated} tried, {waited} µs in the queue"),
        ),
        Err(ScheduleError::Unschedulable(error)) => {
            timer.end("scheduler", "schedule", uid, format_args!("{error}"));
        }
        Err(ScheduleError::Plugin(error)) => timer.end("scheduler", "schedule", uid, format_args!("{error}")),
    }
}

impl Scheduler {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the pod was deleted, or got a node, since it was taken from the queue.
    fn is_gone(&self, key: &ObjectKey) -> bool {
        self.queue().is_gone(key)
    }

    /// Nothing more is to be done for the pod.
    fn done(&self, key: &ObjectKey) {
        if self.queue().done(key, Instant::now()) {
            self.wake.notify_one();
        }
    }

    fn profile_of(&self, pod: &PodInfo) -> Option<&(Framework, SeriesRecorder)> {
        self.profiles.get(pod.scheduler_name())
    }

    fn happened(&self, event: ClusterEvent) {
        self.queue().on_event(event, Instant::now());
        self.wake.notify_one();
    }

    async fn run(self: Arc<Self>) {
        for _ in 0..SEARCHES {
            self.scope.spawn(self.clone().search_aside());
        }
        loop {
            let popped = self.next().await;
            if self.is_costly(&popped.pod) {
                self.set_aside(popped);
                continue;
            }
            let Ok(permit) = self.bindings.clone().acquire_owned().await else { return };
            let mut order = self.order.lock().await;
            let Order { snapshot, search } = &mut *order;
            // An update seen during the binding put it back into the queue, or it was deleted while others had their turn.
            if self.is_gone(&popped.pod.key) || self.cache().is_placed(&popped.pod.key) {
                self.done(&popped.pod.key);
                continue;
            }
            self.cache().update(snapshot);
            let timer = Timer::start();
            let siblings = self.siblings_of(&popped.pod);
            let pod = PodInfo::clone(&popped.pod).with_siblings(siblings);
            let Some((framework, _)) = self.profile_of(&pod) else {
                self.done(&pod.key);
                continue;
            };
            let pick = |candidates: usize| rand::random_range(0..candidates.max(1));
            let result = cycle::schedule(framework, snapshot, &self.extenders, &pod, search, pick).await;
            let popped = Popped { pod: Arc::new(pod), ..popped };
            record_cycle(timer, &popped, &result);
            match result {
                Ok(placement) => self.place(popped, placement, permit),
                Err(ScheduleError::Unschedulable(error)) => {
                    self.fail(popped, Failure::Rejected(error), permit);
                }
                Err(ScheduleError::Plugin(error)) => self.fail(popped, error.into(), permit),
            }
        }
    }

    /// Reserves the pod's resources on its node, and binds it in the background.
    fn place(self: &Arc<Self>, popped: Popped, mut placement: Placement, permit: OwnedSemaphorePermit) {
        debug!(pod = %popped.pod.key, node = placement.node, evaluated = placement.evaluated,
               feasible = placement.feasible, "found a node");
        if self.is_gone(&popped.pod.key) {
            return self.done(&popped.pod.key);
        }
        // Counted at once, so that the next cycle sees it; the API is written to meanwhile.
        self.cache().assume(popped.pod.clone(), &placement.node);
        if let Err(failure) = self.reserve(&popped.pod, &mut placement) {
            self.take_back(&popped.pod, &mut placement);
            return self.fail(popped, failure, permit);
        }
        let scheduler = self.clone();
        self.scope.spawn(async move {
            scheduler.bind(popped, placement, permit).await;
        });
    }

    /// Gives the pod back to the queue, and writes why in the background.
    fn fail(self: &Arc<Self>, popped: Popped, failure: Failure, permit: OwnedSemaphorePermit) {
        let pod = popped.pod.clone();
        let result = if matches!(failure, Failure::Rejected(_)) { "unschedulable" } else { "error" };
        measures::attempt(result, pod.scheduler_name(), popped.started);
        let (message, reason, error) = match failure {
            Failure::Rejected(error) => (error.to_string(), UNSCHEDULABLE, *error),
            Failure::Error(message) => {
                warn!(pod = %pod.key, message, "cannot schedule");
                let error = FitError { nomination: Nomination::Clear, ..FitError::default() };
                (message, SCHEDULER_ERROR, error)
            }
        };
        if self.is_gone(&pod.key) {
            return self.done(&pod.key);
        }
        match &error.nomination {
            Nomination::Keep => {}
            Nomination::Clear => {
                self.cache().remove_nomination(&pod.key);
            }
            Nomination::Node(node) => self.cache().nominate(pod.clone(), node),
        }
        // Before the pod can be taken from the queue again.
        let mut turn = self.turns.take(&pod.key);
        let victims: Vec<_> =
            error.victims.pods.into_iter().filter(|victim| !victim.is_terminating()).collect();
        if !self.return_to_queue(popped, error.rejected_by, !victims.is_empty() || error.remedy.is_some()) {
            return;
        }
        if !victims.is_empty() {
            measures::victims(victims.len());
        }
        let scheduler = self.clone();
        self.scope.spawn(async move {
            let report = async {
                turn.come().await;
                scheduler.report(&pod, reason, &message, &error.nomination).await;
                drop(turn);
            };
            let remedy = async {
                let Some(remedy) = &error.remedy else { return };
                let result = remedy.apply().await;
                if let Err(error) = &result {
                    warn!(pod = %pod.key, %error, "cannot help a pod that fits nowhere");
                }
                // A change that helps was remembered while the pod was held.
                scheduler.queue().release(&pod.key, result.is_err(), Instant::now());
                scheduler.wake.notify_one();
            };
            match &error.nomination {
                Nomination::Node(node) if !victims.is_empty() => {
                    tokio::join!(report, remedy, scheduler.preempt(&pod, node, &victims));
                }
                _ => {
                    tokio::join!(report, remedy);
                }
            }
            drop(permit);
        });
    }

    /// Gives the pod back to the queue. False if it is gone: then nobody removes pods for it, and no room is kept.
    fn return_to_queue(&self, popped: Popped, rejected_by: Vec<&'static str>, is_held: bool) -> bool {
        let key = popped.pod.key.clone();
        let is_gone = {
            let mut queue = self.queue();
            let is_gone = queue.is_gone(&key);
            if is_held && !is_gone {
                queue.hold(key.clone());
            }
            queue.give_back(popped, rejected_by, Instant::now());
            is_gone
        };
        if is_gone {
            // Its deletion was seen before it was nominated.
            self.cache().remove_nomination(&key);
        }
        self.wake.notify_one();
        !is_gone
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

    /// Selects the pods of the Services and of the owner that the pod belongs to.
    fn siblings_of(&self, pod: &PodInfo) -> Option<Selector> {
        let namespace = pod.key.namespace.as_str();
        let services = self.services.list_in(namespace);
        let owner_of = |wanted: &str| {
            let (kind, name) = pod.controller.as_deref()?;
            (kind == wanted).then(|| ObjectKey::new(namespace, name.clone()))
        };
        let replica_set = owner_of("ReplicaSet").and_then(|key| self.replica_sets.get(&key));
        let stateful_set = owner_of("StatefulSet").and_then(|key| self.stateful_sets.get(&key));
        let controller =
            owner_of("ReplicationController").and_then(|key| self.replication_controllers.get(&key));
        let owner = Owner {
            replica_set: replica_set.as_deref(),
            stateful_set: stateful_set.as_deref(),
            replication_controller: controller.as_deref(),
        };
        siblings(pod.labels(), services.iter().map(|service| &**service), owner)
    }
}
