//! Watches every resource, and acts on the graph and on [`super::decide`].

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use ferrite_client::{
    Api, Backoff, Change, EventRecorder, EventType, Informer, ListSelector, Object, ObjectKey, RateLimits,
    Scope, WorkQueue, is_conflict, is_not_found, run_workers,
};
use ferrite_json::{Value, json};
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::Client;
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, PropagationPolicy,
};
use kube::core::{DynamicResourceScope, ObjectMeta, PartialObjectMeta};
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::decide::{self, Owner, Step};
use super::dump::{Snapshot, uids};
use super::graph::{Graph, Identity, Node, Observation, Uid, Work};
use super::{FOREGROUND, ORPHAN};
use crate::Context;
use crate::discovery::{self, Discovered, Served};
use crate::error::{During, SyncError};

const NAME: &str = "garbage-collector-controller";
/// The paths of the graph: the controller's name, and the name that it had before v1.28.
const PAGES: [&str; 2] =
    ["/debug/controllers/garbage-collector-controller/graph", "/debug/controllers/garbagecollector/graph"];
/// Resources that are never collected: events go by their age.
const IGNORED: &[(&str, &str)] = &[("", "events"), ("events.k8s.io", "events")];

/// Delay before a failed discovery is repeated.
const REDISCOVER: Duration = Duration::from_secs(5);
/// As upstream: the time between discoveries, here only while a group is stale.
const STALE: Duration = Duration::from_secs(30);
/// As upstream: collection starts after this time even if some resource could not be listed.
const INITIAL_SYNC: Duration = Duration::from_secs(30);

type Metadata = PartialObjectMeta<DynamicObject>;

/// An object as the server has it.
enum Live {
    Found(Box<ObjectMeta>),
    /// There is none, or another one has its name.
    Absent,
    /// Objects of its kind have a namespace, and this one would have none.
    Unreachable,
}

struct Collector {
    client: Client,
    recorder: EventRecorder,
    graph: Mutex<Graph>,
    /// The resources that there are now.
    resources: RwLock<Resources>,
    /// Informers by (apiVersion, plural), each with the scope that ends it.
    monitors: Mutex<HashMap<(String, String), Monitor>>,
    deletions: Arc<WorkQueue<Uid>>,
    orphanings: Arc<WorkQueue<Uid>>,
}

/// Resources by (apiVersion, kind), and whether they are namespaced.
type Resources = HashMap<(String, String), (ApiResource, bool)>;

struct Monitor {
    /// Held for as long as the resource is there.
    _informer: Informer<Metadata>,
    scope: Scope,
}

pub(crate) fn start(context: &Context) {
    // Kinds come and go with definitions and with the servers of other groups: each change of one triggers a discovery.
    let changed = Arc::new(Notify::new());
    let definitions: Informer<CustomResourceDefinition> = context.informers.get();
    let services: Informer<APIService> = context.informers.get();
    let notify = Arc::clone(&changed);
    definitions.subscribe(move |_| notify.notify_one());
    let notify = Arc::clone(&changed);
    services.subscribe(move |_| notify.notify_one());
    let recorder = context.events.recorder(NAME, None);
    let collector = Arc::new(Collector::new(context.client.clone(), recorder));
    for path in PAGES {
        let shown = collector.clone();
        context.config.pages.add(path, "text/vnd.graphviz", move |query| {
            let snapshot = Snapshot::of(&shown.graph(), &uids(query));
            snapshot.to_dot()
        });
    }
    let (scope, workers) = (context.scope.clone(), context.workers(NAME));
    context.scope.spawn(collector.run(scope, workers, changed));
}

impl Collector {
    fn new(client: Client, recorder: EventRecorder) -> Self {
        let queue = |name| Arc::new(WorkQueue::named(name, RateLimits::default()));
        Self {
            client,
            recorder,
            graph: Mutex::default(),
            resources: RwLock::default(),
            monitors: Mutex::default(),
            deletions: queue("garbage_collector_attempt_to_delete"),
            orphanings: queue("garbage_collector_attempt_to_orphan"),
        }
    }

    async fn run(self: Arc<Self>, scope: Scope, workers: usize, changed: Arc<Notify>) {
        let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30), 0.5);
        let found = loop {
            match discovery::discover(&self.client).await {
                Ok(found) => break found,
                Err(error) => {
                    warn!(%error, "cannot discover what to collect");
                    tokio::time::sleep(backoff.next_delay()).await;
                }
            }
        };
        let monitors = self.follow(&found, &scope);
        scope.spawn(self.clone().keep_following(found, scope.clone(), changed));
        let complete = join_all(monitors.iter().map(Informer::synced));
        // The owners that no watch shows are read from the server, so a graph with gaps does no harm.
        match tokio::time::timeout(INITIAL_SYNC, complete).await {
            Ok(_) => debug!(resources = monitors.len(), "graph is complete"),
            Err(_) => warn!("some resources cannot be listed; collecting without them"),
        }
        let (deleting, orphaning) = (self.clone(), self.clone());
        let delete = run_workers(NAME, self.deletions.clone(), workers, scope.clone(), move |uid| {
            let collector = deleting.clone();
            async move { collector.attempt_to_delete(uid).await }
        });
        let orphan = run_workers(NAME, self.orphanings.clone(), workers, scope.clone(), move |uid| {
            let collector = orphaning.clone();
            async move { collector.attempt_to_orphan(uid).await }
        });
        futures_util::future::join(delete, orphan).await;
    }

    /// Discovers again after each change, and from time to time while a group is stale: nothing reports that its
    /// resources are known again.
    async fn keep_following(self: Arc<Self>, mut found: Discovered, scope: Scope, changed: Arc<Notify>) {
        let mut has_failed = false;
        loop {
            let again = async {
                match (has_failed, found.stale.is_empty()) {
                    (true, _) => tokio::time::sleep(REDISCOVER).await,
                    (false, false) => tokio::time::sleep(STALE).await,
                    (false, true) => std::future::pending().await,
                }
            };
            tokio::select! {
                () = changed.notified() => {}
                () = again => {}
            }
            match discovery::discover(&self.client).await {
                Ok(new) => {
                    found = new;
                    has_failed = false;
                    self.follow(&found, &scope);
                }
                Err(error) => {
                    warn!(%error, "cannot discover what to collect");
                    has_failed = true;
                }
            }
        }
    }

    /// Watches served resources and ends the watches of others. Returns the new informers. Resources of a version that
    /// is stale are watched if they were before: they may still be served.
    fn follow(self: &Arc<Self>, found: &Discovered, scope: &Scope) -> Vec<Informer<Metadata>> {
        if found.served.is_empty() {
            return Vec::new();
        }
        {
            let mut resources = self.resources.write().unwrap_or_else(PoisonError::into_inner);
            resources.retain(|(api_version, _), _| found.stale.contains(api_version));
            resources.extend(found.served.iter().map(|served| {
                let resource = &served.resource;
                let key = (resource.api_version.clone(), resource.kind.clone());
                (key, (resource.clone(), served.is_namespaced()))
            }));
        }
        let collected = |served: &&Served| {
            let resource = &served.resource;
            served.can(&["delete", "list", "watch"])
                && !IGNORED.contains(&(resource.group.as_str(), resource.plural.as_str()))
        };
        let key = |resource: &ApiResource| (resource.api_version.clone(), resource.plural.clone());
        let wanted: HashSet<(String, String)> =
            found.served.iter().filter(collected).map(|served| key(&served.resource)).collect();
        let mut monitors = self.monitors.lock().unwrap_or_else(PoisonError::into_inner);
        monitors.retain(|key, monitor| {
            let stays = wanted.contains(key) || found.stale.contains(&key.0);
            if !stays {
                monitor.scope.cancel();
            }
            stays
        });
        let mut new = Vec::new();
        for served in found.served.iter().filter(collected) {
            let resource = &served.resource;
            if monitors.contains_key(&key(resource)) {
                continue;
            }
            let api: Api<Metadata> = Api::all_with(self.client.clone(), resource);
            let scope = scope.child();
            // Every object of the cluster passes here. The graph keeps the data that it needs; the informer
            // keeps the names.
            let informer =
                Informer::start_slim(api, ListSelector::everything(), &scope, |object: &mut Metadata| {
                    let whole = std::mem::take(&mut object.metadata);
                    object.types = None;
                    object.metadata = ObjectMeta {
                        name: whole.name,
                        namespace: whole.namespace,
                        uid: whole.uid,
                        resource_version: whole.resource_version,
                        ..ObjectMeta::default()
                    };
                });
            let (watching, of) = (Arc::clone(self), resource.clone());
            informer.subscribe(move |change| watching.changed(&of, change));
            new.push(informer.clone());
            monitors.insert(key(resource), Monitor { _informer: informer, scope });
        }
        debug!(resources = monitors.len(), new = new.len(), "resources are followed");
        new
    }

    fn graph(&self) -> MutexGuard<'_, Graph> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self, resource: &ApiResource, change: &Change<Metadata>) {
        let meta = &change.object().metadata;
        let work = match change {
            Change::Deleted(_) => self.graph().gone(meta.uid.as_deref().unwrap_or_default()),
            Change::Added(_) | Change::Updated { .. } => {
                let has = |name: &str| meta.finalizers.iter().flatten().any(|finalizer| finalizer == name);
                self.graph().present(Observation {
                    identity: Identity {
                        api_version: resource.api_version.as_str().into(),
                        kind: resource.kind.as_str().into(),
                        namespace: meta.namespace.as_deref().unwrap_or_default().into(),
                        name: meta.name.as_deref().unwrap_or_default().into(),
                        uid: meta.uid.clone().unwrap_or_default(),
                    },
                    owners: meta.owner_references.clone().unwrap_or_default(),
                    deleting: meta.deletion_timestamp.is_some(),
                    foreground: has(FOREGROUND),
                    orphan: has(ORPHAN),
                })
            }
        };
        self.take_on(work);
    }

    fn take_on(&self, work: Work) {
        for (dependent, reference) in work.invalid {
            let (regarding, message) = invalid_namespace(&dependent, &reference);
            self.recorder.event(&regarding, EventType::Warning, "OwnerRefInvalidNamespace", message);
        }
        work.delete.into_iter().for_each(|uid| self.deletions.add(uid));
        work.orphan.into_iter().for_each(|uid| self.orphanings.add(uid));
    }

    /// The resource of a kind, and whether it is namespaced.
    fn resource(&self, api_version: &str, kind: &str) -> Result<(ApiResource, bool), SyncError> {
        let key = (api_version.to_owned(), kind.to_owned());
        let resources = self.resources.read().unwrap_or_else(PoisonError::into_inner);
        let found = resources.get(&key).or_else(|| {
            // The same kind in another version: the server prefers one and serves the object in it.
            let group = api_version.split_once('/').map_or("", |(group, _)| group);
            resources.values().find(|(resource, _)| resource.group == group && resource.kind == kind)
        });
        found.cloned().ok_or_else(|| SyncError::Other(format!("no resource for {kind} in {api_version}")))
    }

    /// The API that an object is reached through. `None` if it has no namespace, but objects of its kind have one: a
    /// cluster-scoped dependent names it.
    fn api<K>(&self, identity: &Identity) -> Result<Option<Api<K>>, SyncError>
    where
        K: Object + kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>,
    {
        let (resource, is_namespaced) = self.resource(&identity.api_version, &identity.kind)?;
        let client = self.client.clone();
        Ok(match (is_namespaced, identity.namespace.as_str()) {
            (true, "") => None,
            (true, namespace) => Some(Api::namespaced_with(client, namespace, &resource)),
            (false, _) => Some(Api::all_with(client, &resource)),
        })
    }

    /// Reads the metadata of an object.
    async fn live(&self, identity: &Identity) -> Result<Live, SyncError> {
        let Some(api) = self.api::<Metadata>(identity)? else { return Ok(Live::Unreachable) };
        match api.get(&identity.name).await {
            Ok(object) if object.metadata.uid.as_deref() == Some(&identity.uid) => {
                Ok(Live::Found(Box::new(object.metadata)))
            }
            Ok(_) => Ok(Live::Absent),
            Err(error) if is_not_found(&error) => Ok(Live::Absent),
            Err(error) => Err(error).during(|| format!("read {} {}", identity.kind, key_of(identity))),
        }
    }

    /// The server does not have the object.
    fn not_found(&self, identity: &Identity) -> Result<(), SyncError> {
        let absence = self.graph().not_found(identity);
        self.take_on(absence.work);
        if absence.has_alternative {
            // The next attempt looks at the other place.
            return Err(SyncError::Other(format!("dependents disagree about {}", key_of(identity))));
        }
        Ok(())
    }

    async fn attempt_to_delete(&self, uid: Uid) -> Result<Option<Duration>, SyncError> {
        let Some(node) = self.graph().get(&uid).cloned() else { return Ok(None) };
        if node.deleting && !node.deleting_dependents {
            return Ok(None);
        }
        let live = match self.live(&node.identity).await? {
            Live::Found(live) => live,
            Live::Absent => return self.not_found(&node.identity).map(|()| None),
            Live::Unreachable => return Ok(None),
        };
        if node.deleting_dependents {
            return self.wait_for_dependents(&node, &live).await.map(|()| None);
        }
        let references = live.owner_references.clone().unwrap_or_default();
        let mut owners = Vec::with_capacity(references.len());
        for reference in &references {
            match self.state_of(reference, &node.identity).await? {
                Some(state) => owners.push(state),
                // Its state cannot be known, so the object stays.
                None => return Ok(None),
            }
        }
        let waiting: Vec<bool> = {
            let graph = self.graph();
            let dependents = node.dependents.iter().filter_map(|uid| graph.get(uid));
            dependents.map(|dependent| dependent.deleting_dependents).collect()
        };
        let finalizers = live.finalizers.clone().unwrap_or_default();
        match decide::decide(&owners, &waiting, &finalizers) {
            Step::Keep => {}
            Step::DropReferences(positions) => {
                let kept = (0..references.len()).filter(|index| !positions.contains(index));
                let kept: Vec<_> = kept.map(|index| references[index].clone()).collect();
                self.set_owners(&node.identity, &live, kept).await?;
            }
            Step::Delete { policy, unblock: false } => self.delete(&node.identity, &live, policy).await?,
            Step::Delete { policy, unblock: true } => {
                let mut loose = references;
                loose.iter_mut().for_each(|reference| reference.block_owner_deletion = Some(false));
                if let Some(patched) = self.set_owners(&node.identity, &live, loose).await? {
                    self.delete(&node.identity, &patched, policy).await?;
                }
            }
        }
        if self.graph().get(&uid).is_some_and(|node| !node.observed) {
            // As upstream: an object that came and went while its watch was broken would stay in the graph.
            return Err(SyncError::Other(format!("no watch shows {} yet", key_of(&node.identity))));
        }
        Ok(None)
    }

    /// Deletes an object with the owners that were read: one that has been adopted since then stays.
    async fn delete(
        &self,
        identity: &Identity,
        live: &ObjectMeta,
        policy: PropagationPolicy,
    ) -> Result<(), SyncError> {
        let Some(api) = self.api::<DynamicObject>(identity)? else { return Ok(()) };
        let mut version = live.resource_version.clone();
        loop {
            let preconditions = Preconditions { uid: live.uid.clone(), resource_version: version.clone() };
            let params = DeleteParams {
                propagation_policy: Some(policy.clone()),
                preconditions: Some(preconditions),
                ..DeleteParams::default()
            };
            match api.delete(&identity.name, &params).await {
                Ok(_) => {
                    debug!(kind = %identity.kind, object = %key_of(identity), "collected");
                    return Ok(());
                }
                Err(error) if is_not_found(&error) => return self.not_found(identity),
                Err(error) if is_conflict(&error) && version.is_some() => match self.live(identity).await? {
                    // Changes that have nothing to do with the owners must not hold back the deletion.
                    Live::Found(now) if now.owner_references == live.owner_references => version = None,
                    Live::Found(_) => {
                        let changed = format!("the owners of {} have changed", key_of(identity));
                        return Err(SyncError::Other(changed));
                    }
                    Live::Absent | Live::Unreachable => return self.not_found(identity),
                },
                Err(error) => return Err(error).during(|| format!("delete {}", key_of(identity))),
            }
        }
    }

    /// The state of an owner. `None` if it is unknowable: a cluster-scoped object cannot have an owner in a
    /// namespace.
    async fn state_of(
        &self,
        reference: &OwnerReference,
        dependent: &Identity,
    ) -> Result<Option<Owner>, SyncError> {
        {
            let graph = self.graph();
            if graph.is_absent(reference, &dependent.namespace) {
                return Ok(Some(Owner::Dangling));
            }
            let known = graph.get(&reference.uid).filter(|owner| owner.observed);
            if let Some(owner) = known.filter(|owner| owner.identity.matches(reference, &dependent.namespace))
            {
                return Ok(Some(if owner.deleting_dependents { Owner::Waiting } else { Owner::Solid }));
            }
        }
        let (_, is_namespaced) = self.resource(&reference.api_version, &reference.kind)?;
        let namespace = if is_namespaced { dependent.namespace.as_str() } else { "" };
        let identity = Identity::of_owner(reference, namespace);
        match self.live(&identity).await? {
            Live::Unreachable => {
                warn!(object = %key_of(dependent), owner = reference.name, "a cluster-scoped object names an owner in a namespace");
                Ok(None)
            }
            Live::Absent => {
                self.graph().note_absent(&identity);
                Ok(Some(Owner::Dangling))
            }
            Live::Found(live) => {
                let waits = live.deletion_timestamp.is_some()
                    && live.finalizers.iter().flatten().any(|finalizer| finalizer == FOREGROUND);
                Ok(Some(if waits { Owner::Waiting } else { Owner::Solid }))
            }
        }
    }

    async fn wait_for_dependents(&self, node: &Node, live: &ObjectMeta) -> Result<(), SyncError> {
        let blocking: Vec<(Uid, bool)> = {
            let graph = self.graph();
            let Some(node) = graph.get(&node.identity.uid) else { return Ok(()) };
            let blocking = graph.blocking(node).into_iter();
            blocking
                .map(|dependent| (dependent.identity.uid.clone(), dependent.deleting_dependents))
                .collect()
        };
        if blocking.is_empty() {
            return self.remove_finalizer(&node.identity, live, FOREGROUND).await;
        }
        for (uid, deleting_dependents) in blocking {
            if !deleting_dependents {
                self.deletions.add(uid);
            }
        }
        Ok(())
    }

    async fn attempt_to_orphan(&self, uid: Uid) -> Result<Option<Duration>, SyncError> {
        let dependents: Vec<Identity> = {
            let graph = self.graph();
            let Some(node) = graph.get(&uid) else { return Ok(None) };
            let dependents = node.dependents.iter().filter_map(|dependent| graph.get(dependent));
            dependents.map(|dependent| dependent.identity.clone()).collect()
        };
        for dependent in dependents {
            if let Live::Found(live) = self.live(&dependent).await? {
                let mut owners = live.owner_references.clone().unwrap_or_default();
                owners.retain(|owner| owner.uid != uid);
                self.set_owners(&dependent, &live, owners).await?;
            }
        }
        let Some(node) = self.graph().get(&uid).cloned() else { return Ok(None) };
        if let Live::Found(live) = self.live(&node.identity).await? {
            self.remove_finalizer(&node.identity, &live, ORPHAN).await?;
        }
        Ok(None)
    }

    async fn set_owners(
        &self,
        identity: &Identity,
        live: &ObjectMeta,
        owners: Vec<OwnerReference>,
    ) -> Result<Option<ObjectMeta>, SyncError> {
        self.patch(identity, live, json!({"ownerReferences": owners})).await
    }

    async fn remove_finalizer(
        &self,
        identity: &Identity,
        live: &ObjectMeta,
        name: &str,
    ) -> Result<(), SyncError> {
        let mut finalizers = live.finalizers.clone().unwrap_or_default();
        finalizers.retain(|finalizer| finalizer != name);
        self.patch(identity, live, json!({"finalizers": finalizers})).await.map(|_| ())
    }

    /// Changes metadata of exactly the version that was read and returns the new one, if there is still such an object. A
    /// conflict is tried again from a fresh read.
    async fn patch(
        &self,
        identity: &Identity,
        live: &ObjectMeta,
        mut metadata: Value,
    ) -> Result<Option<ObjectMeta>, SyncError> {
        metadata["uid"] = json!(live.uid);
        metadata["resourceVersion"] = json!(live.resource_version);
        let Some(api) = self.api::<DynamicObject>(identity)? else { return Ok(None) };
        let patch = Patch::Merge(json!({"metadata": metadata}));
        match api.patch(&identity.name, &PatchParams::default(), &patch).await {
            Ok(object) => Ok(Some(object.metadata)),
            Err(error) if is_not_found(&error) => Ok(None),
            Err(error) => Err(error).during(|| format!("change metadata of {}", key_of(identity))),
        }
    }
}

/// Upstream's event about an object that names an owner of another namespace.
fn invalid_namespace(dependent: &Identity, reference: &OwnerReference) -> (ObjectReference, String) {
    let Identity { api_version, kind, namespace, name, uid } = dependent;
    let regarding = ObjectReference {
        api_version: Some(api_version.to_string()),
        kind: Some(kind.to_string()),
        namespace: Some(namespace.to_string()),
        name: Some(name.to_string()),
        uid: Some(uid.clone()),
        ..ObjectReference::default()
    };
    let OwnerReference { api_version, kind, name, uid, .. } = reference;
    let message = format!(
        "ownerRef [{api_version}/{kind}, namespace: {namespace}, name: {name}, uid: {uid}] does not exist in namespace {:?}",
        namespace.as_str()
    );
    (regarding, message)
}

fn key_of(identity: &Identity) -> ObjectKey {
    ObjectKey::new(identity.namespace.clone(), identity.name.clone())
}

#[cfg(test)]
#[path = "collector_tests.rs"]
mod tests;
