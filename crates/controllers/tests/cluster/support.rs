//! A cluster without containers.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use ferrite_apiserver::{ApiServer, Config as ServerConfig, MountedGroup, User};
use ferrite_client::{Api, Informer, Object, Scope};
use ferrite_controllers::{Clients, Config, Context, Identity, start_all};
use ferrite_json::{Value, json};
use ferrite_scheduler::{Configuration, Registry, SchedulerContext};
use k8s_openapi::api::core::v1::{Namespace, Node, ServiceAccount};
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::NamespaceResourceScope;
use kube::{Client, Resource};

use crate::{kubelet, storage};

pub struct Cluster {
    pub client: Client,
    pub context: Context,
    pub store: Arc<ferrite_store::Store>,
    pub server: Arc<ApiServer>,
    scope: Scope,
}

/// The user that a controller is in a real cluster, with its rights there.
pub fn user_of(identity: Identity) -> User {
    match identity {
        Identity::Manager => User::new("system:kube-controller-manager", ["system:authenticated"]),
        Identity::ServiceAccount(name) => User::new(
            format!("system:serviceaccount:kube-system:{name}"),
            ["system:serviceaccounts", "system:serviceaccounts:kube-system"],
        ),
        Identity::Server => User::new("system:apiserver", ["system:masters"]),
    }
}

fn clients(server: &Arc<ApiServer>) -> Clients {
    let server = Arc::clone(server);
    Arc::new(move |identity| Client::new(server.in_process_client(user_of(identity)), "default"))
}

/// Starts every controller that there is.
pub fn start_controllers(context: &Context) {
    let names: Vec<&str> =
        std::iter::once("*").chain(ferrite_controllers::ON_REQUEST.iter().copied()).collect();
    assert!(start_all(context, &names).is_empty());
}

impl Cluster {
    /// A server, all controllers, the scheduler, and nodes of four CPUs each.
    pub async fn start(nodes: &[&str]) -> Self {
        Self::start_with(nodes, Config::default()).await
    }

    pub async fn start_with(nodes: &[&str], config: Config) -> Self {
        Self::start_mounted(nodes, config, Vec::new()).await
    }

    /// The same, with groups that the server serves without storage.
    pub async fn start_mounted(nodes: &[&str], config: Config, mounted: Vec<Arc<dyn MountedGroup>>) -> Self {
        let cluster = Self::without_controllers(nodes, config, mounted).await;
        start_controllers(&cluster.context);
        cluster.has_default_account().await;
        cluster
    }

    /// A server, the scheduler and nodes.
    pub async fn without_controllers(
        nodes: &[&str],
        config: Config,
        mounted: Vec<Arc<dyn MountedGroup>>,
    ) -> Self {
        let _ = tracing_subscriber::fmt().with_test_writer().with_max_level(tracing::Level::INFO).try_init();
        let server_config = ServerConfig {
            service_ranges: vec![ferrite_api::Cidr::parse("10.96.0.0/16").unwrap()],
            mounted,
            feature_gates: config.feature_gates.clone(),
            // Kinds that are off by default take effect with their gates.
            runtime_config: [("storagemigration.k8s.io/v1beta1".to_owned(), true)].into(),
            ..ServerConfig::new("192.0.2.1:6443".parse().unwrap())
        };
        let store = Arc::new(ferrite_store::Store::memory());
        let server = ApiServer::start(Arc::clone(&store), server_config).await.unwrap();
        let client =
            Client::new(server.in_process_client(User::new("system:admin", ["system:masters"])), "default");
        let scope = Scope::new();
        let config = Config { root_ca: Some("PEM".into()), ..config };
        let context = Context::new(clients(&server), scope.clone(), config);
        ferrite_scheduler::start(&SchedulerContext {
            client: client.clone(),
            informers: context.informers.clone(),
            events: context.events.clone(),
            scope: scope.clone(),
            configuration: Configuration::default(),
            registry: Registry::default(),
            extenders: Vec::new(),
        })
        .unwrap();
        let cluster = Self { client, context, store, server, scope };
        for node in nodes {
            cluster.add_node(node).await;
        }
        kubelet::start(&cluster.client, &cluster.context.informers, &cluster.scope);
        cluster
    }

    /// Waits for the account without which the server refuses pods of the namespace `default`.
    pub async fn has_default_account(&self) {
        self.eventually("the default account", |accounts: &[Arc<ServiceAccount>]| {
            accounts
                .iter()
                .find(|account| account.metadata.namespace.as_deref() == Some("default"))
                .map(|_| ())
        })
        .await;
    }

    /// Gives every claim a volume of its own at once, as a provisioner does.
    pub fn provision(&self) {
        storage::start(&self.client, &self.context.informers, &self.scope);
    }

    pub async fn add_node(&self, name: &str) {
        let node = json!({"apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}});
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes.create(&PostParams::default(), &ferrite_json::from_value(node).unwrap()).await.unwrap();
        let resources = json!({"cpu": "4", "memory": "8Gi", "pods": "110"});
        // A patch names no version: controllers have seen the node by now and may have changed it.
        let status = json!({"status": {"allocatable": resources, "capacity": resources,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}});
        nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    pub fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub async fn create<K>(&self, namespace: &str, object: Value) -> K
    where
        K: Object + Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        let object = K::decode(&ferrite_json::to_vec(&object).unwrap()).unwrap();
        self.api::<K>(namespace).create(&PostParams::default(), &object).await.unwrap()
    }

    pub async fn create_namespace(&self, name: &str) {
        let namespace = ferrite_json::from_value(json!({"metadata": {"name": name}})).unwrap();
        Api::<Namespace>::all(self.client.clone()).create(&PostParams::default(), &namespace).await.unwrap();
    }

    /// Waits until the known objects of `K` satisfy `check`, woken by each change.
    pub async fn eventually<K, T>(&self, what: &str, check: impl Fn(&[Arc<K>]) -> Option<T>) -> T
    where
        K: Object + Resource<DynamicType = ()>,
    {
        let informer: Informer<K> = self.context.informers.get();
        let (sender, mut receiver) = tokio::sync::watch::channel(());
        informer.subscribe(move |_| {
            sender.send_replace(());
        });
        let wait = async {
            loop {
                receiver.mark_unchanged();
                if let Some(found) = check(&informer.list()) {
                    return found;
                }
                receiver.changed().await.unwrap();
            }
        };
        match tokio::time::timeout(Duration::from_secs(120), wait).await {
            Ok(found) => found,
            Err(_) => panic!("never came: {what}; there is {:#?}", Brief(&informer.list())),
        }
    }

    pub async fn stop(self) {
        self.scope.shutdown().await;
        self.server.shutdown().await;
    }
}

struct Brief<'a, K>(&'a [Arc<K>]);

impl<K: Resource + Debug> Debug for Brief<'_, K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.0.iter().map(|object| {
            let meta = object.meta();
            (meta.name.clone(), meta.owner_references.as_ref().map(Vec::len), format!("{object:?}").len())
        });
        f.debug_list().entries(names).finish()
    }
}
