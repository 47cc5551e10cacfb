//! ConfigMaps and Secrets that pods on this node refer to: each is watched while a pod uses it, and no other.

use ferrite_client::{Api, Change, Informer, ListSelector, Object, ObjectKey, Scope};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Client;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Time that a pod waits for the first response about an object before it tries again later.
const FIRST_ANSWER: Duration = Duration::from_secs(20);

/// Called with the UID of a pod when something it uses changed.
pub(crate) type Wake = Arc<dyn Fn(&str) + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ObjectError {
    #[error("failed to sync {kind} cache: timed out waiting for the condition")]
    NotSynced { kind: &'static str },
}

type Users = Arc<Mutex<BTreeSet<String>>>;

struct Entry<K> {
    informer: Informer<K>,
    scope: Scope,
    users: Users,
}

struct Watched<K> {
    kind: &'static str,
    entries: Mutex<HashMap<ObjectKey, Entry<K>>>,
}

impl<K> Watched<K>
where
    K: Object + kube::Resource<Scope = NamespaceResourceScope>,
    K::DynamicType: Default,
{
    fn new(kind: &'static str) -> Self {
        Self { kind, entries: Mutex::new(HashMap::new()) }
    }

    async fn get(
        &self,
        shared: &Objects,
        pod_uid: &str,
        key: &ObjectKey,
    ) -> Result<Option<Arc<K>>, ObjectError> {
        let informer = self.watch(shared, pod_uid, key);
        tokio::time::timeout(FIRST_ANSWER, informer.synced())
            .await
            .map_err(|_| ObjectError::NotSynced { kind: self.kind })?;
        Ok(informer.get(key))
    }

    fn watch(&self, shared: &Objects, pod_uid: &str, key: &ObjectKey) -> Informer<K> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.entry(key.clone()).or_insert_with(|| {
            let scope = shared.scope.child();
            let api = Api::<K>::namespaced(shared.client.clone(), &key.namespace);
            let selector = ListSelector::fields(format!("metadata.name={}", key.name));
            let informer = Informer::start(api, selector, &scope);
            let users: Users = Arc::default();
            let (told, wake) = (users.clone(), shared.wake.clone());
            informer.subscribe(move |_: &Change<K>| {
                let users = told.lock().unwrap_or_else(PoisonError::into_inner).clone();
                users.iter().for_each(|uid| wake(uid));
            });
            Entry { informer, scope, users }
        });
        entry.users.lock().unwrap_or_else(PoisonError::into_inner).insert(pod_uid.to_string());
        entry.informer.clone()
    }

    fn release(&self, pod_uid: &str) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|_, entry| {
            let mut users = entry.users.lock().unwrap_or_else(PoisonError::into_inner);
            users.remove(pod_uid);
            let used = !users.is_empty();
            if !used {
                entry.scope.cancel();
            }
            used
        });
    }
}

pub(crate) struct Objects {
    client: Client,
    scope: Scope,
    wake: Wake,
    config_maps: Watched<ConfigMap>,
    secrets: Watched<Secret>,
}

impl Objects {
    pub(crate) fn new(client: Client, scope: &Scope, wake: Wake) -> Self {
        Self {
            client,
            scope: scope.child(),
            wake,
            config_maps: Watched::new("configmap"),
            secrets: Watched::new("secret"),
        }
    }

    /// Wakes pods when something changes that they use.
    pub(crate) fn wake(&self) -> Wake {
        self.wake.clone()
    }

    /// The ConfigMap, or nothing when there is none. From now on the pod is woken when that changes.
    pub(crate) async fn config_map(
        &self,
        pod_uid: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<ConfigMap>>, ObjectError> {
        self.config_maps.get(self, pod_uid, &ObjectKey::new(namespace, name)).await
    }

    /// As [`Objects::config_map`].
    pub(crate) async fn secret(
        &self,
        pod_uid: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Option<Arc<Secret>>, ObjectError> {
        self.secrets.get(self, pod_uid, &ObjectKey::new(namespace, name)).await
    }

    /// The pod is gone: objects that only it used are watched no longer.
    pub(crate) fn release(&self, pod_uid: &str) {
        self.config_maps.release(pod_uid);
        self.secrets.release(pod_uid);
    }
}

/// All keys of a ConfigMap as bytes.
pub(crate) fn config_map_data(map: &ConfigMap) -> BTreeMap<String, Vec<u8>> {
    let text = map.data.iter().flatten().map(|(k, v)| (k.clone(), v.clone().into_bytes()));
    let binary = map.binary_data.iter().flatten().map(|(k, v)| (k.clone(), v.0.clone()));
    text.chain(binary).collect()
}

/// All keys of a Secret as bytes.
pub(crate) fn secret_data(secret: &Secret) -> BTreeMap<String, Vec<u8>> {
    secret.data.iter().flatten().map(|(k, v)| (k.clone(), v.0.clone())).collect()
}
