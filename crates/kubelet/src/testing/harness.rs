//! A kubelet's pod side, put together for a test.

use super::fake_api::{FakeApi, Key};
use super::fake_runtime::FakeRuntime;
use crate::cgroup::Cgroups;
use crate::claims::Claims;
use crate::clock::Clock;
use crate::container::dns::ClusterDns;
use crate::container::env::ApiAddress;
use crate::container::fields::NodeLimits;
use crate::container::resources::{CpuQuota, NodeRules};
use crate::devices::Devices;
use crate::images::{Images, PullLimits, PulledImages, VerificationPolicy};
use crate::logs::LogLinks;
use crate::node::{Readiness, RuntimeFeatures};
use crate::objects::Objects;
use crate::pod::admission::Abilities;
use crate::pod::backoff::BackOff;
use crate::pod::context::Context;
use crate::pod::manager::{self, Workers};
use crate::pod::table::PodTable;
use crate::probe::{Checker, ProbeContext};
use crate::sources::{DirectorySource, LocalPods, Source};
use crate::topology::{NodeReserve, ResourceManager, ResourceSettings, test_machine};
use crate::userns::UserNamespaces;
use crate::volumes::{Volumes, VolumesConfig};
use ferrite_cgroup::Layout;
use ferrite_client::{Api, Events, Informer, ListSelector, Scope};
use ferrite_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

pub(crate) struct Harness {
    pub api: FakeApi,
    pub runtime: FakeRuntime,
    pub workers: Arc<Workers>,
    pub dir: Arc<tempfile::TempDir>,
    pub context: Arc<Context>,
    scope: Scope,
    clock: Clock,
    settings: ResourceSettings,
    limits: PullLimits,
    pub readiness: watch::Sender<Readiness>,
    pub shutting_down: watch::Sender<bool>,
}

impl Harness {
    pub(crate) async fn start() -> Self {
        Self::start_with(ResourceSettings::default()).await
    }

    /// On a machine of two sockets with two processors each, of which one is reserved.
    pub(crate) async fn start_with(settings: ResourceSettings) -> Self {
        let clock = Clock::paused();
        let api = FakeApi::new();
        api.put("nodes", json!({"metadata": {"name": "node", "uid": "n"}}));
        let runtime = FakeRuntime::new(clock);
        let dir = Arc::new(tempfile::tempdir().unwrap());
        Self::assemble(api, runtime, dir, clock, settings, PullLimits::default()).await
    }

    /// With limits of pulls.
    pub(crate) async fn start_pulling(limits: PullLimits) -> Self {
        let clock = Clock::paused();
        let api = FakeApi::new();
        api.put("nodes", json!({"metadata": {"name": "node", "uid": "n"}}));
        let dir = Arc::new(tempfile::tempdir().unwrap());
        Self::assemble(api, FakeRuntime::new(clock), dir, clock, ResourceSettings::default(), limits).await
    }

    /// The kubelet dies and starts anew; the API, the runtime and the disk stay as they are.
    pub(crate) async fn restart(self) -> Self {
        self.scope.shutdown().await;
        let settings = self.settings.clone();
        let (api, runtime, dir) = (self.api.clone(), self.runtime.clone(), self.dir.clone());
        Self::assemble(api, runtime, dir, self.clock, settings, self.limits).await
    }

    /// The kubelet dies; the test can change its files before it starts anew.
    pub(crate) async fn stop(&self) {
        self.scope.shutdown().await;
    }

    async fn assemble(
        api: FakeApi,
        runtime: FakeRuntime,
        dir: Arc<tempfile::TempDir>,
        clock: Clock,
        settings: ResourceSettings,
        pull_limits: PullLimits,
    ) -> Self {
        let scope = Scope::new();
        let client = api.client();
        let recorder = Events::start(client.clone(), &scope).recorder("kubelet", Some("node"));
        let workers: Arc<Workers> = Arc::default();
        let told = workers.clone();
        let objects =
            Arc::new(Objects::new(client.clone(), &scope, Arc::new(move |uid| told.objects_changed(uid))));
        let (readiness, seen) =
            watch::channel(Readiness { features: RuntimeFeatures::everything(), ..Readiness::default() });
        let (shutting_down, shutdown_seen) = watch::channel(false);
        let limits = NodeLimits { cpu_milli: 2000, memory: 1 << 30, ephemeral_storage: 1 << 30 };
        let shared: Arc<FakeRuntime> = Arc::new(runtime.clone());
        let resolv_conf = dir.path().join("resolv.conf");
        std::fs::write(&resolv_conf, "nameserver 192.0.2.53\n").unwrap();
        let node =
            Informer::start(Api::all(client.clone()), ListSelector::fields("metadata.name=node"), &scope);
        let manifests = dir.path().join("manifests");
        std::fs::create_dir_all(&manifests).unwrap();
        let local = Arc::new(LocalPods::new([Source::File]));
        let source = DirectorySource::new(manifests, "node", Duration::from_secs(20), clock);
        scope.spawn(source.run(local.clone()));
        let waking = workers.clone();
        let plugins = dir.path().join("kubelet/device-plugins");
        let devices =
            Devices::open(&plugins, clock, Arc::default(), move |uid| waking.wake(uid), &scope).unwrap();
        devices.serve().unwrap();
        let waking = workers.clone();
        let root = dir.path().join("kubelet");
        let claims =
            Claims::open(&root, client.clone(), "node", move |uid| waking.wake(uid), &scope).unwrap();
        let resources = ResourceManager::start(
            settings.clone(),
            test_machine(2, 1, 2, 1),
            &NodeReserve {
                cpu_milli: 1000,
                memory_reserved: 1 << 20,
                memory: (0..2).map(|node| (node, [("memory".to_owned(), 8 << 20)].into())).collect(),
            },
            &dir.path().join("kubelet"),
            devices.clone(),
        )
        .unwrap();
        let pulled =
            PulledImages::open(&dir.path().join("kubelet"), VerificationPolicy::default(), clock).unwrap();
        pulled.recover(&*shared).await;
        let context = Arc::new(Context {
            node_name: "node".into(),
            node_hostname: "node".into(),
            host_ips: vec!["192.0.2.1".into()],
            log_dir: dir.path().join("logs/pods"),
            log_links: LogLinks::beside(&dir.path().join("logs/pods")),
            seccomp_root: dir.path().join("kubelet/seccomp"),
            cluster_dns: ClusterDns { addresses: Vec::new(), domain: "cluster.local".into() },
            resolv_conf,
            api_address: Some(ApiAddress { host: "10.96.0.1".into(), port: 443 }),
            limits,
            max_pods: 3,
            rules: NodeRules {
                memory: limits.memory,
                quota: CpuQuota::default(),
                swap: None,
                huge_pages: &[],
            },
            sync_frequency: Duration::from_secs(60),
            oom_group: false,
            seccomp_default: false,
            restart_backoff: BackOff::default(),
            own_labels: Default::default(),
            runtime_name: "ferrite".into(),
            runtime: shared.clone(),
            images: Images::new(shared.clone(), recorder.clone(), clock, Arc::default(), pulled)
                .with_limits(pull_limits),
            resources: Arc::new(resources),
            devices: devices.clone(),
            claims,
            userns: UserNamespaces::open(dir.path().join("kubelet/pods"), 65_536).unwrap(),
            abilities: Abilities { apparmor: false, kernel: (6, 1), unsafe_sysctls: Default::default() },
            volumes: Volumes::new(
                VolumesConfig {
                    root: dir.path().join("kubelet"),
                    local_volumes: Some(dir.path().join("volumes")),
                    limits,
                    node_name: "node".into(),
                    recorder: recorder.clone(),
                    stats_period: Some(Duration::from_secs(60)),
                    feature_gates: Default::default(),
                },
                client.clone(),
                objects.clone(),
                node.clone(),
                &scope,
            ),
            objects,
            cgroups: Cgroups::new(Layout::v1(Vec::new()), "/test"),
            services: Informer::start(Api::all(client.clone()), ListSelector::everything(), &scope),
            workers: workers.clone(),
            resizes: Default::default(),
            pods: PodTable::new(
                Informer::start(Api::all(client.clone()), ListSelector::fields("spec.nodeName=node"), &scope),
                local,
            ),
            node,
            readiness: seen,
            shutting_down: shutdown_seen,
            pressures: watch::channel(Default::default()).1,
            client,
            recorder: recorder.clone(),
            probes: ProbeContext {
                checker: Checker::new(shared),
                recorder,
                clock,
                counts: Default::default(),
            },
            clock,
        });
        manager::start_local(&context, &workers, &scope);
        manager::start(context.clone(), workers.clone(), &scope).await.unwrap();
        scope.spawn(context.resources.clone().follow(context.runtime.clone()));
        Self {
            api,
            runtime,
            workers,
            dir,
            context,
            scope,
            clock,
            settings,
            limits: pull_limits,
            readiness,
            shutting_down,
        }
    }

    /// Creates a pod bound to this node.
    pub(crate) fn create(&self, name: &str, mut spec: Value) {
        spec["nodeName"] = json!("node");
        self.api.put(
            "pods",
            json!({"metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "generation": 1},
                   "spec": spec, "status": {"phase": "Pending"}}),
        );
    }

    pub(crate) fn key(name: &str) -> Key {
        Key { resource: "pods".into(), namespace: "default".into(), name: name.into() }
    }

    pub(crate) fn pod(&self, name: &str) -> Option<Value> {
        self.api.get(&Self::key(name))
    }

    /// Asks for deletion, as a user does.
    pub(crate) fn delete(&self, name: &str, grace: i64) {
        let mut pod = self.pod(name).unwrap();
        pod["metadata"]["deletionTimestamp"] = json!("2023-11-14T22:13:20Z");
        pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        self.api.put("pods", pod);
    }

    pub(crate) async fn until(&self, name: &str, what: &str, test: impl Fn(&Value) -> bool) -> Value {
        self.api.until(what, |api| api.get(&Self::key(name)).filter(|p| test(p))).await
    }

    pub(crate) async fn until_phase(&self, name: &str, phase: &str) -> Value {
        self.until(name, &format!("{name} is {phase}"), |p| p["status"]["phase"] == phase).await
    }

    pub(crate) async fn until_gone(&self, name: &str) {
        self.api
            .until(&format!("{name} is gone"), |api| api.get(&Self::key(name)).is_none().then_some(()))
            .await;
    }

    pub(crate) async fn until_workers(&self, count: usize) {
        let mut counted = self.workers.count();
        let wait = counted.wait_for(|n| *n == count);
        tokio::time::timeout(std::time::Duration::from_secs(3600), wait).await.unwrap().unwrap();
    }

    /// Waits for an event about a pod and answers its message.
    pub(crate) async fn until_event(&self, reason: &str, part: &str) -> String {
        self.api
            .until(&format!("event {reason} {part}"), |api| {
                api.list("events").iter().find_map(|e| {
                    let message = e["message"].as_str().unwrap_or_default();
                    (e["reason"] == reason && message.contains(part)).then(|| message.to_string())
                })
            })
            .await
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        self.scope.cancel();
        // A test that failed half-way may have left volumes mounted.
        if Arc::strong_count(&self.dir) == 1 {
            let _ = crate::volumes::remove_tree(self.dir.path());
        }
    }
}
