//! The running guard: informers in front, a table of each family behind.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use ferrite_client::{Api, Informer, Informers, ListSelector, ObjectKey, Scope};
use ferrite_network::{NetworkError, PodGuard, PodRef};
use ferrite_nft::{Change, Cidr, IpFamily, KernelError, Monitor, OwnGenerations, Table, Transaction};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::engine::Engine;
use crate::layout::PolicySet;
use crate::model::{Name, PodFacts, Policy};

/// A pod of a file on the node has another uid than its object.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Longest wait of a new pod for all policies to be known.
const SYNC_PATIENCE: Duration = Duration::from_secs(60);
/// Longest wait of a new pod for its own object. A pod without labels would escape the policies that select it, so after
/// this time it is refused and tried again.
const POD_PATIENCE: Duration = Duration::from_secs(5);
/// A table that somebody else keeps changing is not made again more often than this.
const HEAL_PERIOD: Duration = Duration::from_secs(1);
const PURPOSE: &str = "network policies";
/// Pods that come and go at the same time; more wait.
const REQUESTS: usize = 64;

/// Settings of the policy controller.
#[derive(Debug, Clone)]
pub struct PolicyConfig {
    /// The name of the nftables tables.
    pub table: String,
    /// The families that pods have addresses of; each has a table.
    pub families: Vec<IpFamily>,
    /// Addresses of this node's pods, and the node's name. A pod that has either is judged here.
    pub pods: Vec<Cidr>,
    pub node: Option<String>,
    /// The network namespace of the node; that of the calling thread when absent.
    pub netns: Option<PathBuf>,
}

/// Why the guard could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Where policies, pods and namespaces are read from.
#[derive(Clone)]
pub struct Sources {
    pods: Informer<Pod>,
    namespaces: Informer<Namespace>,
    policies: Informer<NetworkPolicy>,
}

impl Sources {
    /// Lists and watches with a client, and keeps no more than is needed.
    pub fn start(client: &kube::Client, scope: &Scope) -> Self {
        let all = ListSelector::everything;
        Self {
            pods: Informer::start_slim(Api::all(client.clone()), all(), scope, slim_pod),
            namespaces: Informer::start_slim(Api::all(client.clone()), all(), scope, slim_namespace),
            policies: Informer::start(Api::all(client.clone()), all(), scope),
        }
    }

    /// Shares the copies that other parts of the process have.
    pub fn shared(informers: &Informers) -> Self {
        Self { pods: informers.get(), namespaces: informers.get(), policies: informers.get() }
    }

    async fn synced(&self) {
        self.namespaces.synced().await;
        self.pods.synced().await;
        self.policies.synced().await;
    }
}

fn slim_pod(pod: &mut Pod) {
    pod.metadata.managed_fields = None;
    pod.metadata.owner_references = None;
    if let Some(annotations) = &mut pod.metadata.annotations {
        annotations.retain(|key, _| key == MIRROR);
    }
    if let Some(spec) = &mut pod.spec {
        let containers = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
        for container in containers {
            *container = k8s_openapi::api::core::v1::Container {
                ports: container.ports.take(),
                restart_policy: container.restart_policy.take(),
                ..Default::default()
            };
        }
        spec.volumes = None;
        spec.tolerations = None;
        spec.affinity = None;
    }
    if let Some(status) = &mut pod.status {
        *status = k8s_openapi::api::core::v1::PodStatus {
            phase: status.phase.take(),
            pod_ips: status.pod_ips.take(),
            ..Default::default()
        };
    }
}

fn slim_namespace(namespace: &mut Namespace) {
    namespace.metadata.managed_fields = None;
    namespace.metadata.annotations = None;
    namespace.spec = None;
    namespace.status = None;
}

/// The changes since the last transaction.
#[derive(Default)]
struct Pending {
    pods: BTreeSet<ObjectKey>,
    namespaces: BTreeSet<ObjectKey>,
    policies: BTreeSet<ObjectKey>,
    /// Somebody else changed the table, or may have.
    rebuild: bool,
}

#[derive(Default)]
struct Shared {
    pending: Mutex<Pending>,
    wake: Notify,
    /// Told of every change of a pod.
    pods: Notify,
}

impl Shared {
    fn note(&self, note: impl FnOnce(&mut Pending)) {
        note(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_one();
    }

    fn take(&self) -> Pending {
        std::mem::take(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

enum Request {
    Cover { sandbox: String, pod: Name, addresses: Vec<IpAddr>, done: oneshot::Sender<Result<(), String>> },
    Uncover { sandbox: String, done: oneshot::Sender<()> },
}

/// Filters the packets of this node's pods by NetworkPolicies.
///
/// Its tasks belong to the scope it was started with. The rules stay when they end, so that policies hold while the
/// process restarts.
pub struct PolicyGuard {
    requests: mpsc::Sender<Request>,
    ready: watch::Receiver<bool>,
    pods: Informer<Pod>,
    shared: Arc<Shared>,
}

impl PolicyGuard {
    pub fn start(
        config: PolicyConfig,
        sources: Sources,
        scope: &Scope,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<Self>, PolicyError>> + Send + '_>> {
        Box::pin(Self::start_parts(config, sources, scope))
    }

    async fn start_parts(
        config: PolicyConfig,
        sources: Sources,
        scope: &Scope,
    ) -> Result<Arc<Self>, PolicyError> {
        let own = OwnGenerations::default();
        let netns = config.netns.as_deref();
        let monitor = Monitor::open(&config.table, netns, own.clone())?;
        let open = |family: &IpFamily| -> Result<FamilyTable, KernelError> {
            let table = Table::open(*family, &config.table, netns, own.clone())?.for_purpose(PURPOSE);
            let engine = Engine::new(*family, config.pods.clone()).of_node(config.node.clone());
            Ok(FamilyTable { engine, table: Some(table) })
        };
        let tables = config.families.iter().map(open).collect::<Result<_, _>>()?;
        let shared = Arc::new(Shared::default());
        subscribe(&sources, &shared);
        let (requests, received) = mpsc::channel(REQUESTS);
        let (done, ready) = watch::channel(false);
        let guard =
            Arc::new(Self { requests, ready, pods: sources.pods.clone(), shared: Arc::clone(&shared) });
        let worker = Worker {
            tables,
            must_rebuild: true,
            sources,
            shared: Arc::clone(&shared),
            sandboxes: HashMap::new(),
        };
        scope.spawn(watch_table(monitor, shared));
        scope.spawn(worker.run(received, done));
        Ok(guard)
    }

    /// Waits until the kernel has all policies that existed at the start.
    pub async fn synced(&self) -> bool {
        self.ready.clone().wait_for(|ready| *ready).await.is_ok()
    }

    /// Waits until the object of a pod is known, for a while. Returns false if it is not.
    async fn know(&self, pod: &PodRef) -> bool {
        let key = ObjectKey::new(pod.namespace.clone(), pod.name.clone());
        let known = || {
            self.pods.get(&key).is_some_and(|object| {
                let annotations = object.metadata.annotations.as_ref();
                object.metadata.uid.as_deref() == Some(&pod.uid)
                    || annotations.is_some_and(|all| all.contains_key(MIRROR))
            })
        };
        let wait = async {
            loop {
                let changed = self.shared.pods.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if known() {
                    return;
                }
                changed.await;
            }
        };
        tokio::time::timeout(POD_PATIENCE, wait).await.is_ok()
    }
}

#[async_trait]
impl PodGuard for PolicyGuard {
    async fn cover(&self, sandbox: &str, pod: &PodRef, addresses: &[IpAddr]) -> Result<(), NetworkError> {
        let name = Name::new(pod.namespace.clone(), pod.name.clone());
        let fail = |what: &str| NetworkError::Guard { pod: name.to_string(), what: what.to_owned() };
        match tokio::time::timeout(SYNC_PATIENCE, self.synced()).await {
            Ok(true) => {}
            Ok(false) => return Err(fail("the node is being shut down")),
            Err(_) => return Err(fail("the policies of the cluster are not known yet")),
        }
        may_start(pod, self.know(pod).await).map_err(fail)?;
        let (done, answer) = oneshot::channel();
        let (sandbox, addresses) = (sandbox.to_owned(), addresses.to_vec());
        let request = Request::Cover { sandbox, pod: name.clone(), addresses, done };
        self.requests.send(request).await.map_err(|_| fail("the node is being shut down"))?;
        match answer.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(what)) => Err(fail(&what)),
            Err(_) => Err(fail("the node is being shut down")),
        }
    }

    async fn uncover(&self, sandbox: &str) {
        let (done, answer) = oneshot::channel();
        let request = Request::Uncover { sandbox: sandbox.to_owned(), done };
        if self.requests.send(request).await.is_ok() {
            let _ = answer.await;
        }
    }
}

/// A static pod may start before its mirror exists: the API server that would tell its labels may be such a pod.
fn may_start(pod: &PodRef, is_known: bool) -> Result<(), &'static str> {
    match is_known || pod.is_static {
        true => Ok(()),
        false => Err("the labels of the pod are not known yet"),
    }
}

fn subscribe(sources: &Sources, shared: &Arc<Shared>) {
    let note = Arc::clone(shared);
    sources.pods.subscribe(move |change| {
        let key = ObjectKey::of(change.object().as_ref());
        note.note(|pending| {
            pending.pods.insert(key);
        });
        note.pods.notify_waiters();
    });
    let note = Arc::clone(shared);
    sources.namespaces.subscribe(move |change| {
        let key = ObjectKey::of(change.object().as_ref());
        note.note(|pending| {
            pending.namespaces.insert(key);
        });
    });
    let note = Arc::clone(shared);
    sources.policies.subscribe(move |change| {
        let key = ObjectKey::of(change.object().as_ref());
        note.note(|pending| {
            pending.policies.insert(key);
        });
    });
}

async fn watch_table(mut monitor: Monitor, shared: Arc<Shared>) {
    loop {
        if monitor.changed().await == Change::Foreign {
            tracing::warn!("somebody else changed the nftables table of network policies; making it again");
        }
        shared.note(|pending| pending.rebuild = true);
        tokio::time::sleep(HEAL_PERIOD).await;
    }
}

/// The rules of one family.
struct FamilyTable {
    engine: Engine,
    /// Away while a thread works on it.
    table: Option<Table>,
}

/// The task that keeps the tables.
struct Worker {
    tables: Vec<FamilyTable>,
    must_rebuild: bool,
    sources: Sources,
    shared: Arc<Shared>,
    /// Sandboxes with links.
    sandboxes: HashMap<String, Name>,
}

impl Worker {
    async fn run(mut self, mut requests: mpsc::Receiver<Request>, ready: watch::Sender<bool>) {
        // A table without the policies that are not known yet would allow too much; until then the old one stays.
        self.sources.synced().await;
        self.shared.note(|_| {});
        loop {
            tokio::select! {
                () = self.shared.wake.notified() => {
                    self.learn();
                    match self.commit().await {
                        Ok(()) => drop(ready.send_if_modified(|ready| !std::mem::replace(ready, true))),
                        Err(what) => {
                            tracing::error!(what, "network policies are not up to date in the kernel; trying again");
                            tokio::time::sleep(HEAL_PERIOD).await;
                            self.shared.wake.notify_one();
                        }
                    }
                }
                request = requests.recv() => match request {
                    Some(request) => self.serve(request).await,
                    None => return,
                },
            }
        }
    }

    async fn serve(&mut self, request: Request) {
        self.learn();
        match request {
            Request::Cover { sandbox, pod, addresses, done } => {
                let key = ObjectKey::new(pod.namespace.clone(), pod.name.clone());
                let facts = self.sources.pods.get(&key).map(|object| PodFacts::of(&object));
                for engine in self.engines() {
                    engine.set_pod(&pod, facts.clone());
                    engine.set_attached(&pod, &addresses);
                }
                self.sandboxes.insert(sandbox, pod);
                // A caller that is gone has no pod to start.
                let _ = done.send(self.commit().await);
            }
            Request::Uncover { sandbox, done } => {
                if let Some(pod) = self.sandboxes.remove(&sandbox)
                    && !self.sandboxes.values().any(|other| *other == pod)
                {
                    self.engines().for_each(|engine| engine.set_attached(&pod, &[]));
                }
                if let Err(what) = self.commit().await {
                    tracing::warn!(what, "rules of a pod that is gone may still be there");
                }
                let _ = done.send(());
            }
        }
    }

    fn engines(&mut self) -> impl Iterator<Item = &mut Engine> {
        self.tables.iter_mut().map(|table| &mut table.engine)
    }

    /// Takes what the informers have heard.
    fn learn(&mut self) {
        let pending = self.shared.take();
        self.must_rebuild |= pending.rebuild;
        for key in pending.namespaces {
            let labels = self.sources.namespaces.get(&key);
            let labels = labels.map(|namespace| namespace.metadata.labels.clone().unwrap_or_default());
            self.engines().for_each(|engine| engine.set_namespace(&key.name, labels.clone()));
        }
        for key in pending.pods {
            let facts = self.sources.pods.get(&key).map(|pod| PodFacts::of(&pod));
            let name = Name::new(key.namespace.as_str(), key.name.as_str());
            self.engines().for_each(|engine| engine.set_pod(&name, facts.clone()));
        }
        for key in pending.policies {
            let policy = self.sources.policies.get(&key).map(|policy| Policy::of(&policy));
            let name = Name::new(key.namespace.as_str(), key.name.as_str());
            self.engines().for_each(|engine| engine.set_policy(&name, policy.clone()));
        }
    }

    /// Brings the kernel's tables in line.
    async fn commit(&mut self) -> Result<(), String> {
        let rebuild = std::mem::replace(&mut self.must_rebuild, true);
        for table in &mut self.tables {
            table.commit(rebuild).await?;
        }
        self.must_rebuild = false;
        Ok(())
    }
}

impl FamilyTable {
    /// A change that the kernel refuses means that somebody else changed the table: it is then made again as a whole.
    async fn commit(&mut self, rebuild: bool) -> Result<(), String> {
        if !rebuild {
            let transaction = self.engine.take_changes();
            let retired = self.engine.take_retired();
            if transaction.is_empty() && retired.is_empty() {
                return Ok(());
            }
            match self.apply(transaction, retired).await {
                Ok(false) => return Ok(()),
                Ok(true) => {}
                Err(what) => tracing::warn!(what, "the table is not as expected; making it again"),
            }
        }
        let transaction = self.engine.rebuild();
        self.apply(transaction, Vec::new()).await.map(drop)
    }

    /// Returns true if somebody else may have changed the table unnoticed.
    async fn apply(
        &mut self,
        transaction: Transaction<PolicySet>,
        retired: Vec<String>,
    ) -> Result<bool, String> {
        let Some(mut table) = self.table.take() else { return Err("the table is lost".into()) };
        let work = move || {
            let result = apply(&mut table, &transaction, &retired);
            (table, result)
        };
        // Only a panic loses the table.
        let (table, result) = tokio::task::spawn_blocking(work).await.map_err(|error| error.to_string())?;
        self.table = Some(table);
        result.map_err(|error| with_cause(&error))
    }
}

fn apply(
    table: &mut Table,
    transaction: &Transaction<PolicySet>,
    retired: &[String],
) -> Result<bool, KernelError> {
    if !transaction.is_empty() {
        table.apply(transaction)?;
    }
    if !retired.is_empty()
        && let Err(error) = table.delete_chains(retired)
    {
        // Nothing calls them; the next table is made without them.
        tracing::debug!(%error, "chains are still referred to");
    }
    Ok(table.take_missed())
}

fn with_cause(error: &KernelError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_static_pods_start_before_their_labels_are_known() {
        for (is_static, is_known, starts) in
            [(false, false, false), (false, true, true), (true, false, true), (true, true, true)]
        {
            let pod = PodRef { is_static, ..PodRef::default() };
            assert_eq!(may_start(&pod, is_known).is_ok(), starts, "{is_static} {is_known}");
        }
    }
}
