//! Keeps the usage of quotas correct: admission counts new objects, this controller recounts after
//! deletions.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_api::quota::amounts::{Amounts, amounts};
use ferrite_api::quota::{Evaluator, evaluator, recount};
use ferrite_client::{
    Api, Change, Informer, ListSelector, ObjectKey, Scope, WorkQueue, is_conflict, is_not_found,
};
use ferrite_json::{Map, Value};
use k8s_openapi::api::core::v1::ResourceQuota;
use k8s_openapi::serde_json;
use kube::Client;
use kube::api::{DynamicObject, ListParams, ObjectMeta, PostParams};

use crate::Context;
use crate::discovery::{self, Served};
use crate::error::{During, SyncError};

const NAME: &str = "resourcequota-controller";

type Queue = Arc<WorkQueue<ObjectKey>>;

/// A watched resource.
#[derive(Clone)]
struct Monitor {
    informer: Informer<DynamicObject>,
    /// Ends when no quota counts the resource any more.
    scope: Scope,
    /// The newest version that an event has brought.
    seen: Arc<AtomicU64>,
}

impl Monitor {
    /// Returns true if the monitor knows every write up to `version`. Events arrive in the order of writes.
    fn has_seen(&self, version: Option<u64>) -> bool {
        version.is_some_and(|version| self.seen.load(Ordering::Acquire) >= version)
    }
}

fn version(metadata: &ObjectMeta) -> Option<u64> {
    metadata.resource_version.as_deref()?.parse().ok()
}

/// Group and plural name.
type ResourceKey = (String, String);

/// A monitor and the quotas that need it.
struct Started {
    monitor: Monitor,
    users: HashSet<ObjectKey>,
}

/// The resources that some quota counts, each watched from when the first one does until the last one is gone.
struct Monitors {
    client: Client,
    scope: Scope,
    queue: Queue,
    quotas: Informer<ResourceQuota>,
    started: Mutex<HashMap<ResourceKey, Started>>,
}

pub(crate) fn start(context: &Context) {
    let kit = context.controller(NAME);
    let quotas: Informer<ResourceQuota> = context.informers.get();
    let client = context.client.clone();
    let resync = context.config.quota_resync;
    let monitors = Arc::new(Monitors {
        client: client.clone(),
        scope: context.scope.clone(),
        queue: kit.queue().clone(),
        quotas: quotas.clone(),
        started: Mutex::default(),
    });
    let releasing = Arc::clone(&monitors);
    kit.watches(&quotas, move |change, queue| {
        if let Change::Deleted(quota) = change {
            releasing.release(&ObjectKey::of(&**quota));
        }
        let is_same = matches!(change, Change::Updated { old, new } if old.spec == new.spec
            && hard_of(new.status.as_ref().and_then(|s| s.hard.as_ref())) == hard_of(new.spec.as_ref().and_then(|s| s.hard.as_ref())));
        if !is_same && !matches!(change, Change::Deleted(_)) {
            queue.add(ObjectKey::of(&**change.object()));
        }
    })
    .run(move |key| {
        let quota = quotas.get(&key);
        let (client, monitors) = (client.clone(), monitors.clone());
        async move {
            match quota {
                Some(quota) => {
                    let result = sync(&client, &monitors, &quota, resync).await;
                    // A quota that was deleted meanwhile needs no monitor.
                    if monitors.quotas.get(&key).is_none() {
                        monitors.release(&key);
                    }
                    result
                }
                None => Ok(None),
            }
        }
    });
}

fn hard_of<T: serde::Serialize>(list: Option<&T>) -> Amounts {
    amounts(&ferrite_json::to_value(list).unwrap_or_default())
}

async fn sync(
    client: &Client,
    monitors: &Arc<Monitors>,
    quota: &ResourceQuota,
    resync: Duration,
) -> Result<Option<Duration>, SyncError> {
    let value = ferrite_json::to_value(quota).map_err(|e| SyncError::Other(e.to_string()))?;
    let hard = amounts(&value["spec"]["hard"]);
    let namespace = quota.metadata.namespace.as_deref().unwrap_or_default();
    let name = quota.metadata.name.as_deref().unwrap_or_default();
    let found = discovery::discover(client).await?;
    if let Some(group) =
        hard.keys().filter_map(|name| counted_group(name)).find(|group| found.is_stale(group))
    {
        // Without its objects the usage would fall to zero.
        return Err(SyncError::Other(format!("the resources of {group} cannot be discovered at present")));
    }
    let mut counted: Vec<(Evaluator, Vec<Value>)> = Vec::new();
    let mut is_current = true;
    let tracked = tracked(&found.served, &hard);
    monitors.keep(&ObjectKey::of(quota), &tracked);
    for (served, evaluator) in &tracked {
        let monitor = monitors.of(served, ObjectKey::of(quota));
        tokio::select! {
            () = monitor.informer.synced() => {}
            // The quota is gone.
            () = monitor.scope.token().cancelled() => return Ok(None),
        }
        is_current &= monitor.has_seen(version(&quota.metadata));
        let objects = monitor.informer.list_in(namespace);
        counted.push((evaluator.clone(), values(objects.iter().map(|object| &**object))));
    }
    let mut used = total(&value, &hard, &counted);
    let is_recorded = |used: &Amounts| {
        amounts(&value["status"]["hard"]) == hard && amounts(&value["status"]["used"]) == *used
    };
    if is_recorded(&used) {
        return Ok(Some(resync));
    }
    if !is_current {
        // Admission charges a quota in the transaction that writes the object. The quota may have arrived here before
        // the object: to write the count of such a cache would take the object off the quota again.
        counted.clear();
        for (served, evaluator) in tracked {
            let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &served.resource);
            let list = api.list(&ListParams::default()).await.during(|| {
                format!("list {} of namespace {namespace} for quota {name}", served.resource.plural)
            })?;
            counted.push((evaluator, values(&list.items)));
        }
        used = total(&value, &hard, &counted);
        if is_recorded(&used) {
            return Ok(Some(resync));
        }
    }
    let mut updated = value;
    updated["status"]["hard"] = printed(&hard);
    updated["status"]["used"] = printed(&used);
    let updated: ResourceQuota =
        ferrite_json::from_value(updated).map_err(|e| SyncError::Other(e.to_string()))?;
    let api: Api<ResourceQuota> = Api::namespaced(client.clone(), namespace);
    match api.replace_status(name, &PostParams::default(), &updated).await {
        Ok(_) => Ok(Some(resync)),
        Err(error) if is_not_found(&error) => Ok(None),
        Err(error) if is_conflict(&error) => Ok(Some(Duration::from_millis(100))),
        Err(error) => Err(error).during(|| format!("write the status of quota {namespace}/{name}")),
    }
}

fn values<'a>(objects: impl IntoIterator<Item = &'a DynamicObject>) -> Vec<Value> {
    objects.into_iter().filter_map(|object| ferrite_json::to_value(object).ok()).collect()
}

fn total(quota: &Value, hard: &Amounts, counted: &[(Evaluator, Vec<Value>)]) -> Amounts {
    let pairs =
        counted.iter().flat_map(|(evaluator, list)| list.iter().map(move |object| (evaluator, object)));
    recount(quota, hard, pairs)
}

fn printed(list: &Amounts) -> Value {
    let map: Map = list.iter().map(|(name, amount)| (name.clone(), amount.to_string().into())).collect();
    map.into()
}

/// The group of a key that counts the objects of a resource, as `count/widgets.example.com`.
fn counted_group(name: &str) -> Option<&str> {
    Some(name.strip_prefix("count/")?.split_once('.')?.1)
}

/// The resources that a quota's keys are about.
fn tracked<'a>(served: &'a [Served], hard: &Amounts) -> Vec<(&'a Served, Evaluator)> {
    served
        .iter()
        .filter(|served| served.is_namespaced() && served.can(&["create", "list", "watch"]))
        .filter_map(|served| Some((served, evaluator(&served.resource.group, &served.resource.plural)?)))
        .filter(|(_, evaluator)| hard.keys().any(|name| evaluator.tracks(name)))
        .collect()
}

fn key_of(served: &Served) -> ResourceKey {
    (served.resource.group.clone(), served.resource.plural.clone())
}

impl Monitors {
    fn lock(&self) -> MutexGuard<'_, HashMap<ResourceKey, Started>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a quota needs no other monitors than these.
    fn keep(&self, quota: &ObjectKey, tracked: &[(&Served, Evaluator)]) {
        let needed: HashSet<ResourceKey> = tracked.iter().map(|(served, _)| key_of(served)).collect();
        self.lock().retain(|key, started| needed.contains(key) || started.is_needed_without(quota));
    }

    /// Notes that a quota needs no monitor any more.
    fn release(&self, quota: &ObjectKey) {
        self.lock().retain(|_, started| started.is_needed_without(quota));
    }

    /// The monitor of a resource that a quota counts.
    fn of(self: &Arc<Self>, served: &Served, quota: ObjectKey) -> Monitor {
        let key = key_of(served);
        let mut all = self.lock();
        if let Some(started) = all.get_mut(&key) {
            started.users.insert(quota);
            return started.monitor.clone();
        }
        let counts_content = evaluator(&key.0, &key.1)
            .is_some_and(|e| e.counts_updates(None) || e.counts_updates(Some("resize")));
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &served.resource);
        let slim = if counts_content { without_bookkeeping } else { only_name };
        let scope = self.scope.child();
        let informer = Informer::start_slim(api, ListSelector::everything(), &scope, slim);
        let monitor = Monitor { informer: informer.clone(), scope, seen: Arc::default() };
        let (monitors, seen) = (self.clone(), monitor.seen.clone());
        informer.subscribe(move |change| {
            if let Some(version) = version(&change.object().metadata) {
                seen.fetch_max(version, Ordering::AcqRel);
            }
            monitors.changed(change);
        });
        all.insert(key, Started { monitor: monitor.clone(), users: HashSet::from([quota]) });
        monitor
    }

    /// Triggers a sync when an object has gone or ended: its share of the quota is free for others.
    fn changed(&self, change: &Change<DynamicObject>) {
        let frees = match change {
            Change::Added(_) => false,
            Change::Deleted(_) => true,
            Change::Updated { old, new } => {
                let phase = |object: &DynamicObject| object.data["status"]["phase"].clone();
                old.data["spec"] != new.data["spec"]
                    || phase(old) != phase(new)
                    || new.metadata.deletion_timestamp.is_some()
                    || is_resized(&old.data["status"], &new.data["status"])
            }
        };
        if frees {
            let namespace = change.object().metadata.namespace.clone().unwrap_or_default();
            for quota in self.quotas.list_in(&namespace) {
                self.queue.add(ObjectKey::of(&*quota));
            }
        }
    }
}

impl Started {
    /// Takes a quota from the users. Without users the monitor ends.
    fn is_needed_without(&mut self, quota: &ObjectKey) -> bool {
        self.users.remove(quota);
        if self.users.is_empty() {
            self.monitor.scope.cancel();
        }
        !self.users.is_empty()
    }
}

/// Returns true if a container of a pod has other resources than before: the end of a resize may free a part of the quota.
fn is_resized(old: &serde_json::Value, new: &serde_json::Value) -> bool {
    ["containerStatuses", "initContainerStatuses"].into_iter().any(|key| {
        let (old, new) = (old[key].as_array(), new[key].as_array());
        old.into_iter().flatten().any(|old| {
            let same = new.into_iter().flatten().find(|new| new["name"] == old["name"]);
            old["resources"].is_object() && same.is_some_and(|new| new["resources"] != old["resources"])
        })
    })
}

fn without_bookkeeping(object: &mut DynamicObject) {
    object.metadata.managed_fields = None;
}

fn only_name(object: &mut DynamicObject) {
    without_bookkeeping(object);
    object.metadata.annotations = None;
    object.metadata.labels = None;
    object.data = Default::default();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discovery::tests::listed;
    use ferrite_json::json;
    use kube::client::Body;
    use std::convert::Infallible;

    #[test]
    fn the_end_of_a_resize_is_seen() {
        use serde_json::json;
        let status = |cpu: Option<&str>, ready: bool| {
            let resources = cpu.map(|cpu| json!({"requests": {"cpu": cpu}}));
            json!({"containerStatuses": [{"name": "c", "ready": ready, "resources": resources}]})
        };
        for (old, new, expected) in [
            (status(Some("1"), true), status(Some("2"), true), true),
            (status(Some("1"), true), status(Some("1"), false), false),
            (status(None, false), status(Some("1"), true), false),
            (json!({}), status(Some("1"), true), false),
        ] {
            assert_eq!(is_resized(&old, &new), expected, "{old} {new}");
        }
    }

    /// A server whose watches never say anything. Lists of all namespaces, which informers make, are empty; the list of
    /// namespace `q` has `current`. Bodies that are written arrive in the channel.
    fn server(current: Vec<Value>) -> (Client, tokio::sync::mpsc::UnboundedReceiver<Value>) {
        let (sender, written) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let list = |items: &[Value]| json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "5"}, "items": items});
            let watches = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let path = request.uri().path().to_owned();
            let answer = match path.as_str() {
                "/apis" => json!({"items": [{"metadata": {"name": "down.example"},
                    "versions": [{"version": "v1", "freshness": "Stale"}]}]}),
                "/api" => {
                    json!({"items": [{"metadata": {}, "versions": [{"version": "v1", "freshness": "Current",
                    "resources": [listed("pods", "Pod", "Namespaced", &["create", "list", "watch"])]}]}]})
                }
                "/api/v1/pods" => list(&[]),
                "/api/v1/namespaces/q/pods" => list(&current),
                other => json!({"kind": "Status", "status": "Failure", "message": other, "code": 404}),
            };
            let sender = sender.clone();
            async move {
                if watches {
                    return std::future::pending().await;
                }
                let bytes = match path.strip_suffix("/status") {
                    Some(_) => {
                        let bytes = request.into_body().collect_bytes().await.expect("a body");
                        let _ = sender.send(ferrite_json::from_slice(&bytes).expect("an object"));
                        bytes.to_vec()
                    }
                    None => ferrite_json::to_vec(&answer).expect("an answer"),
                };
                Ok::<_, Infallible>(http::Response::new(Body::from(bytes)))
            }
        });
        (Client::new(service, "default"), written)
    }

    fn monitors(client: &Client, scope: &Scope) -> Arc<Monitors> {
        Arc::new(Monitors {
            client: client.clone(),
            scope: scope.clone(),
            queue: Arc::new(WorkQueue::new()),
            quotas: Informer::start(Api::all(client.clone()), ListSelector::everything(), scope),
            started: Mutex::default(),
        })
    }

    #[tokio::test]
    async fn a_resource_is_watched_while_a_quota_counts_it() {
        let (client, _) = server(Vec::new());
        let scope = Scope::new();
        let monitors = monitors(&client, &scope);
        let found = discovery::discover(&client).await.expect("discovered");
        let hard = amounts(&json!({"pods": "5"}));
        let tracked = tracked(&found.served, &hard);
        let (first, second) = (ObjectKey::new("a", "q"), ObjectKey::new("b", "q"));
        let watch = |quota: &ObjectKey| {
            let (served, _) = tracked.first().expect("pods");
            monitors.of(served, quota.clone())
        };
        let monitor = watch(&first);
        watch(&second);
        monitors.release(&first);
        assert!(!monitor.scope.is_ended(), "the other quota counts pods");
        // The other quota counts nothing of it any more.
        monitors.keep(&second, &[]);
        assert!(monitor.scope.is_ended() && monitors.lock().is_empty());
        let again = watch(&first);
        monitors.keep(&first, &tracked);
        assert!(!again.scope.is_ended() && monitor.scope.is_ended());
        monitors.release(&first);
        assert!(again.scope.is_ended());
        scope.cancel();
    }

    /// A quota on one name that is used once.
    fn quota_on(name: &str) -> ResourceQuota {
        let (hard, used) = (json!({name: "5"}), json!({name: "1"}));
        let quota = json!({
            "metadata": {"name": "q", "namespace": "q", "resourceVersion": "9"},
            "spec": {"hard": hard},
            "status": {"hard": hard, "used": used},
        });
        ferrite_json::from_value(quota).expect("a quota")
    }

    #[tokio::test]
    async fn a_stale_group_fails_only_the_quotas_that_count_it() {
        let (client, mut written) = server(Vec::new());
        let scope = Scope::new();
        let monitors = monitors(&client, &scope);
        let counting = quota_on("count/widgets.down.example");
        let result = sync(&client, &monitors, &counting, Duration::from_secs(300)).await;
        assert!(result.is_err() && written.try_recv().is_err(), "{result:?}");
        let other = quota_on("pods");
        sync(&client, &monitors, &other, Duration::from_secs(300)).await.expect("synced");
        assert_eq!(written.try_recv().expect("written")["status"]["used"], json!({"pods": "0"}));
        scope.cancel();
    }

    async fn synced(current: Vec<Value>) -> Option<Value> {
        let (client, mut written) = server(current);
        let scope = Scope::new();
        let monitors = monitors(&client, &scope);
        let quota = quota_on("pods");
        sync(&client, &monitors, &quota, Duration::from_secs(300)).await.expect("synced");
        scope.cancel();
        written.try_recv().ok()
    }

    #[tokio::test]
    async fn a_pod_that_was_charged_and_not_yet_seen_stays_counted() {
        let pod = json!({"kind": "Pod", "apiVersion": "v1",
            "metadata": {"name": "p", "namespace": "q", "resourceVersion": "9"}, "spec": {"containers": []}});
        assert_eq!(synced(vec![pod]).await, None, "the quota is right as it is");
        let written = synced(Vec::new()).await.expect("the pod is gone");
        assert_eq!(written["status"]["used"], json!({"pods": "0"}));
    }

    #[tokio::test]
    async fn a_monitor_has_seen_what_came_before_its_last_event() {
        let scope = Scope::new();
        let (client, _) = server(Vec::new());
        let api: Api<DynamicObject> =
            Api::all_with(client, &kube::discovery::ApiResource::erase::<ResourceQuota>(&()));
        let informer = Informer::start(api, ListSelector::everything(), &scope);
        let monitor = Monitor { informer, scope: scope.clone(), seen: Arc::new(AtomicU64::new(7)) };
        for (version, expected) in [(Some(6), true), (Some(7), true), (Some(8), false), (None, false)] {
            assert_eq!(monitor.has_seen(version), expected, "{version:?}");
        }
        scope.cancel();
    }
}
