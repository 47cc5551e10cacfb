//! A scheduler with a plugin of its own: `TestPlugin` holds back pods that have the annotation `test-plugin`.
//!
//! Run it against the cluster of the current kubeconfig: `cargo run -p ferrite-scheduler --example test_plugin`. It serves
//! the pods whose `schedulerName` is `test-scheduler`.

use std::sync::Arc;

use ferrite_client::{Events, Informers, Scope};
use ferrite_scheduler::framework::{CycleState, Filter, Handle, Made, Plugin, PluginArgs, Rejection, Store};
use ferrite_scheduler::profile::PluginSets;
use ferrite_scheduler::snapshot::{NodeInfo, PodInfo};
use ferrite_scheduler::{Configuration, Profile, Registry, SchedulerContext};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;

pub const NAME: &str = "TestPlugin";
const ANNOTATION: &str = "test-plugin";

/// Arguments come from `pluginConfig` of the configuration. Unknown ones are refused.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct NoArgs {}

/// A `PodInfo` has the fields that most plugins need. A plugin that needs more reads the object from a
/// store of the handle.
struct TestPlugin {
    pods: Store<Pod>,
}

/// The factory: arguments and a handle in, a plugin out.
pub fn new(args: &PluginArgs, handle: &Handle) -> Made {
    let NoArgs {} = args.decode()?;
    Ok(Arc::new(TestPlugin { pods: handle.lister() }))
}

impl Plugin for TestPlugin {
    fn name(&self) -> &'static str {
        NAME
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }
}

impl Filter for TestPlugin {
    fn filter(&self, _state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        tracing::info!(pod = %pod.key, node = node.name(), "TestPlugin filters");
        let object = self.pods.get(&pod.key);
        let annotations = object.as_ref().and_then(|pod| pod.metadata.annotations.as_ref());
        if annotations.is_some_and(|annotations| annotations.contains_key(ANNOTATION)) {
            return Err(Rejection::unschedulable("testPlugin"));
        }
        Ok(())
    }
}

/// The default profile with the plugin enabled at every extension point it has.
pub fn profile() -> Profile {
    let mut plugins = PluginSets::defaults();
    plugins.multi_point.enabled.push((NAME.to_owned(), 0));
    Profile { scheduler_name: "test-scheduler".to_owned(), plugins, ..Profile::default() }
}

#[tokio::main]
pub async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let client = Client::try_default().await?;
    let scope = Scope::new();
    let mut registry = Registry::default();
    registry.register(NAME, new)?;
    ferrite_scheduler::start(&SchedulerContext {
        client: client.clone(),
        informers: Informers::new(client.clone(), scope.clone()),
        events: Events::start(client, &scope),
        scope: scope.clone(),
        configuration: Configuration { profiles: vec![profile()], ..Configuration::default() },
        registry,
        extenders: Vec::new(),
    })?;
    tokio::signal::ctrl_c().await?;
    scope.shutdown().await;
    Ok(())
}
