//! Watches every resource, and acts on the graph and on [`super::decide`].

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use ferrite_client::{
    Api, Backoff, Change, Informer, ListSelector, Object, ObjectKey, Scope, WorkQueue, is_conflict,
    is_not_found, run_workers,
};
use ferrite_component::Pages;
use ferrite_json::{Value, json};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Client;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::core::{DynamicResourceScope, ObjectMeta, PartialObjectMeta};
use tokio::sync::Notify;
use tracing::{debug, warn};

use super::decide::{self, Owner, Step};
use super::dump::{Snapshot, uids};
use super::graph::{Graph, Identity, Node, Observation, Uid, Work};
use super::{FOREGROUND, ORPHAN};
use crate::Context;
use crate::discovery::{self, Served};
use crate::error::{During, SyncError};

const NAME: &str = "garbage-collector-controller";
/// The paths of the graph: the controller's name, and the name that it had before v1.28.
const PAGES: [&str; 2] =
    ["/debug/controllers/garbage-collector-controller/graph", "/debug/controllers/garbagecollector/graph"];
/// Resources that are never collected: events go by their age.
const IGNORED: &[(&str, &str)] = &[("", "events"), ("events.k8s.io", "events")];

/// Delay before a failed discovery is repeated.
const REDISCOVER: Duration = Duration::from_secs(5);

type Metadata = PartialObjectMeta<DynamicObject>;

struct Collector {
    client: Client,
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
    let (client, scope, workers) = (context.client.clone(), context.scope.clone(), context.workers(NAME));
    let pages = context.config.pages.clone();
    // Kinds come and go with definitions: each change of one triggers a discovery.
    let changed = Arc::new(Notify::new());
    let definitions: Informer<CustomResourceDefinition> = context.informers.get();
    let notify = Arc::clone(&changed);
    definitions.subscribe(move |_| notify.notify_one());
    context.scope.spawn(async move {
        let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30), 0.5);
        let served = loop {
            match discovery::discover(&client).await {
                Ok(found) => break found.served,
                Err(error) => {
                    warn!(%error, "cannot discover what to collect");
                    tokio::time::sleep(backoff.next_delay()).await;
                }
            }
        };
        run(client, scope, workers, served, changed, &pages).await;
    });
}

async fn run(
    client: Client,
    scope: Scope,
    workers: usize,
    served: Vec<Served>,
    changed: Arc<Notify>,
    pages: &Pages,
) {
    let collector = Arc::new(Collector {
        client,
        graph: Mutex::default(),
        resources: RwLock::default(),
        monitors: Mutex::default(),
        deletions: Arc::new(WorkQueue::new()),
        orphanings: Arc::new(WorkQueue::new()),
    });
    for path in PAGES {
        let shown = collector.clone();
        pages.add(path, "text/vnd.graphviz", move |query| {
            let snapshot = Snapshot::of(&shown.graph(), &uids(query));
            snapshot.to_dot()
        });
    }
    let monitors = collector.follow(&served, &scope);
    for monitor in &monitors {
        monitor.synced().await;
    }
    debug!(resources = monitors.len(), "graph is complete");
    let following = collector.clone();
    let inner = scope.clone();
    scope.spawn(async move {
        loop {
            changed.notified().await;
            match discovery::discover(&following.client).await {
                Ok(found) => {
                    following.follow(&found.served, &inner);
                }
                Err(error) => {
                    warn!(%error, "cannot discover what to collect");
                    tokio::time::sleep(REDISCOVER).await;
                    changed.notify_one();
                }
            }
        }
    });
    let (deleting, orphaning) = (collector.clone(), collector.clone());
    let delete = run_workers(NAME, collector.deletions.clone(), workers, scope.clone(), move |uid| {
        let collector = deleting.clone();
        async move { collector.attempt_to_delete(uid).await }
    });
    let orphan = run_workers(NAME, collector.orphanings.clone(), workers, scope.clone(), move |uid| {
        let collector = orphaning.clone();
        async move { collector.attempt_to_orphan(uid).await }
    });
    futures_util::future::join(delete, orphan).await;
}

impl Collector {
    /// Watches served resources and ends the watches of others. Returns the new informers.
    fn follow(self: &Arc<Self>, served: &[Served], scope: &Scope) -> Vec<Informer<Metadata>> {
        let resources = served
            .iter()
            .map(|served| {
                let resource = &served.resource;
                let key = (resource.api_version.clone(), resource.kind.clone());
                (key, (resource.clone(), served.is_namespaced()))
            })
            .collect();
        *self.resources.write().unwrap_or_else(PoisonError::into_inner) = resources;
        let collected = |served: &&Served| {
            let resource = &served.resource;
            served.can(&["delete", "list", "watch"])
                && !IGNORED.contains(&(resource.group.as_str(), resource.plural.as_str()))
        };
        let key = |resource: &ApiResource| (resource.api_version.clone(), resource.plural.clone());
        let wanted: HashSet<(String, String)> =
            served.iter().filter(collected).map(|served| key(&served.resource)).collect();
        let mut monitors = self.monitors.lock().unwrap_or_else(PoisonError::into_inner);
        monitors.retain(|key, monitor| {
            let stays = wanted.contains(key);
            if !stays {
                monitor.scope.cancel();
            }
            stays
        });
        let mut new = Vec::new();
        for served in served.iter().filter(collected) {
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
        work.delete.into_iter().for_each(|uid| self.deletions.add(uid));
        work.orphan.into_iter().for_each(|uid| self.orphanings.add(uid));
    }

    /// The API an object is reached through. A namespaced kind is looked for in `namespace`.
    fn api<K>(&self, api_version: &str, kind: &str, namespace: &str) -> Result<Api<K>, SyncError>
    where
        K: Object + kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>,
    {
        let key = (api_version.to_owned(), kind.to_owned());
        let resources = self.resources.read().unwrap_or_else(PoisonError::into_inner);
        let (resource, namespaced) = resources
            .get(&key)
            .or_else(|| {
                // The same kind in another version: the server prefers one and serves the object in it.
                let group = api_version.split_once('/').map_or("", |(group, _)| group);
                resources.values().find(|(resource, _)| resource.group == group && resource.kind == kind)
            })
            .ok_or_else(|| SyncError::Other(format!("no resource for {kind} in {api_version}")))?;
        Ok(if *namespaced && !namespace.is_empty() {
            Api::namespaced_with(self.client.clone(), namespace, resource)
        } else {
            Api::all_with(self.client.clone(), resource)
        })
    }

    fn is_namespaced(&self, api_version: &str, kind: &str) -> bool {
        let resources = self.resources.read().unwrap_or_else(PoisonError::into_inner);
        resources.get(&(api_version.to_owned(), kind.to_owned())).is_some_and(|(_, namespaced)| *namespaced)
    }

    /// The metadata of the object as it is now, if it is still the same object.
    async fn live(&self, identity: &Identity) -> Result<Option<ObjectMeta>, SyncError> {
        let namespace = if self.is_namespaced(&identity.api_version, &identity.kind) {
            identity.namespace.as_str()
        } else {
            ""
        };
        let api: Api<Metadata> = self.api(&identity.api_version, &identity.kind, namespace)?;
        match api.get(&identity.name).await {
            Ok(object) => Ok(Some(object.metadata).filter(|meta| meta.uid.as_deref() == Some(&identity.uid))),
            Err(error) if is_not_found(&error) => Ok(None),
            Err(error) => Err(error).during(|| format!("read {} {}", identity.kind, key_of(identity))),
        }
    }

    async fn attempt_to_delete(&self, uid: Uid) -> Result<Option<Duration>, SyncError> {
        let Some(node) = self.graph().get(&uid).cloned() else { return Ok(None) };
        if node.deleting && !node.deleting_dependents {
            return Ok(None);
        }
        let Some(live) = self.live(&node.identity).await? else {
            let work = self.graph().gone(&uid);
            self.take_on(work);
            return Ok(None);
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
            Step::Delete { policy, unblock } => {
                if unblock {
                    let mut loose = references;
                    loose.iter_mut().for_each(|reference| reference.block_owner_deletion = Some(false));
                    self.set_owners(&node.identity, &live, loose).await?;
                }
                let params = DeleteParams {
                    propagation_policy: Some(policy),
                    preconditions: Some(Preconditions { uid: live.uid.clone(), resource_version: None }),
                    ..DeleteParams::default()
                };
                let api: Api<DynamicObject> =
                    self.api(&node.identity.api_version, &node.identity.kind, &node.identity.namespace)?;
                match api.delete(&node.identity.name, &params).await {
                    Ok(_) => {
                        debug!(kind = %node.identity.kind, object = %key_of(&node.identity), "collected")
                    }
                    Err(error) if is_not_found(&error) || is_conflict(&error) => {}
                    Err(error) => return Err(error).during(|| format!("delete {}", key_of(&node.identity))),
                }
            }
        }
        Ok(None)
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
            if graph.is_absent(&reference.uid) {
                return Ok(Some(Owner::Dangling));
            }
            if let Some(owner) = graph.get(&reference.uid).filter(|owner| owner.observed) {
                return Ok(Some(if owner.deleting_dependents { Owner::Waiting } else { Owner::Solid }));
            }
        }
        if dependent.namespace.is_empty() && self.is_namespaced(&reference.api_version, &reference.kind) {
            warn!(object = %key_of(dependent), owner = reference.name, "a cluster-scoped object names an owner in a namespace");
            return Ok(None);
        }
        let identity = Identity {
            api_version: reference.api_version.as_str().into(),
            kind: reference.kind.as_str().into(),
            namespace: dependent.namespace.clone(),
            name: reference.name.as_str().into(),
            uid: reference.uid.clone(),
        };
        match self.live(&identity).await? {
            None => {
                self.graph().note_absent(&reference.uid);
                Ok(Some(Owner::Dangling))
            }
            Some(live) => {
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
            if let Some(live) = self.live(&dependent).await? {
                let mut owners = live.owner_references.clone().unwrap_or_default();
                owners.retain(|owner| owner.uid != uid);
                self.set_owners(&dependent, &live, owners).await?;
            }
        }
        let Some(node) = self.graph().get(&uid).cloned() else { return Ok(None) };
        if let Some(live) = self.live(&node.identity).await? {
            self.remove_finalizer(&node.identity, &live, ORPHAN).await?;
        }
        Ok(None)
    }

    async fn set_owners(
        &self,
        identity: &Identity,
        live: &ObjectMeta,
        owners: Vec<OwnerReference>,
    ) -> Result<(), SyncError> {
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
        self.patch(identity, live, json!({"finalizers": finalizers})).await
    }

    /// Changes metadata of exactly the version that was read; a conflict is tried again from a fresh read.
    async fn patch(
        &self,
        identity: &Identity,
        live: &ObjectMeta,
        mut metadata: Value,
    ) -> Result<(), SyncError> {
        metadata["uid"] = json!(live.uid);
        metadata["resourceVersion"] = json!(live.resource_version);
        let api: Api<DynamicObject> = self.api(&identity.api_version, &identity.kind, &identity.namespace)?;
        let patch = Patch::Merge(json!({"metadata": metadata}));
        match api.patch(&identity.name, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            Err(error) if is_not_found(&error) => Ok(()),
            Err(error) => Err(error).during(|| format!("change metadata of {}", key_of(identity))),
        }
    }
}

fn key_of(identity: &Identity) -> ObjectKey {
    ObjectKey::new(identity.namespace.clone(), identity.name.clone())
}
