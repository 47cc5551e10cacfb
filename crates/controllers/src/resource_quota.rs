//! Keeps what quotas say is used true: admission counts what comes, this counts anew what has gone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrite_api::quota::amounts::{Amounts, amounts};
use ferrite_api::quota::{Evaluator, evaluator, recount};
use ferrite_client::{
    Api, Change, Informer, ListSelector, ObjectKey, Scope, WorkQueue, is_conflict, is_not_found,
};
use ferrite_json::{Map, Value};
use k8s_openapi::api::core::v1::ResourceQuota;
use kube::Client;
use kube::api::{DynamicObject, PostParams};

use crate::Context;
use crate::discovery::{self, Served};
use crate::error::{During, SyncError};

const NAME: &str = "resourcequota-controller";
/// A quota is counted anew this often even if nothing seems to have changed.
const RESYNC: Duration = Duration::from_secs(300);

type Queue = Arc<WorkQueue<ObjectKey>>;
type Objects = Informer<DynamicObject>;

/// The resources that some quota counts, each watched from when the first one does.
struct Monitors {
    client: Client,
    scope: Scope,
    queue: Queue,
    quotas: Informer<ResourceQuota>,
    started: Mutex<HashMap<(String, String), Objects>>,
}

pub(crate) fn start(context: &Context) {
    let kit = context.controller(NAME);
    let quotas: Informer<ResourceQuota> = context.informers.get();
    let client = context.client.clone();
    let monitors = Arc::new(Monitors {
        client: client.clone(),
        scope: context.scope.clone(),
        queue: kit.queue().clone(),
        quotas: quotas.clone(),
        started: Mutex::default(),
    });
    kit.watches(&quotas, |change, queue| {
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
                Some(quota) => sync(&client, &monitors, &quota).await,
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
) -> Result<Option<Duration>, SyncError> {
    let value = ferrite_json::to_value(quota).map_err(|e| SyncError::Other(e.to_string()))?;
    let hard = amounts(&value["spec"]["hard"]);
    let namespace = quota.metadata.namespace.as_deref().unwrap_or_default();
    let name = quota.metadata.name.as_deref().unwrap_or_default();
    let mut counted: Vec<(Evaluator, Vec<Value>)> = Vec::new();
    for (served, evaluator) in tracked(&discovery::served(client).await?, &hard) {
        let informer = monitors.of(served);
        informer.synced().await;
        let objects = informer.list_in(namespace);
        let values = objects.iter().filter_map(|object| ferrite_json::to_value(&**object).ok()).collect();
        counted.push((evaluator, values));
    }
    let pairs =
        counted.iter().flat_map(|(evaluator, list)| list.iter().map(move |object| (evaluator, object)));
    let used = recount(&value, &hard, pairs);
    if amounts(&value["status"]["hard"]) == hard && amounts(&value["status"]["used"]) == used {
        return Ok(Some(RESYNC));
    }
    let mut updated = value;
    updated["status"]["hard"] = printed(&hard);
    updated["status"]["used"] = printed(&used);
    let updated: ResourceQuota =
        ferrite_json::from_value(updated).map_err(|e| SyncError::Other(e.to_string()))?;
    let api: Api<ResourceQuota> = Api::namespaced(client.clone(), namespace);
    match api.replace_status(name, &PostParams::default(), &updated).await {
        Ok(_) => Ok(Some(RESYNC)),
        Err(error) if is_not_found(&error) => Ok(None),
        Err(error) if is_conflict(&error) => Ok(Some(Duration::from_millis(100))),
        Err(error) => Err(error).during(|| format!("write the status of quota {namespace}/{name}")),
    }
}

fn printed(list: &Amounts) -> Value {
    let map: Map = list.iter().map(|(name, amount)| (name.clone(), amount.to_string().into())).collect();
    map.into()
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

impl Monitors {
    fn of(self: &Arc<Self>, served: &Served) -> Objects {
        let key = (served.resource.group.clone(), served.resource.plural.clone());
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(informer) = started.get(&key) {
            return informer.clone();
        }
        let counts_content = evaluator(&key.0, &key.1)
            .is_some_and(|e| e.counts_updates(None) || e.counts_updates(Some("resize")));
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &served.resource);
        let slim = if counts_content { without_bookkeeping } else { only_name };
        let informer = Informer::start_slim(api, ListSelector::everything(), &self.scope, slim);
        let monitors = self.clone();
        informer.subscribe(move |change| monitors.changed(change));
        started.insert(key, informer.clone());
        informer
    }

    /// What has gone, or has ended, is free for others.
    fn changed(&self, change: &Change<DynamicObject>) {
        let frees = match change {
            Change::Added(_) => false,
            Change::Deleted(_) => true,
            Change::Updated { old, new } => {
                let phase = |object: &DynamicObject| object.data["status"]["phase"].clone();
                old.data["spec"] != new.data["spec"]
                    || phase(old) != phase(new)
                    || new.metadata.deletion_timestamp.is_some()
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

fn without_bookkeeping(object: &mut DynamicObject) {
    object.metadata.managed_fields = None;
}

fn only_name(object: &mut DynamicObject) {
    without_bookkeeping(object);
    object.metadata.annotations = None;
    object.metadata.labels = None;
    object.data = Default::default();
}
