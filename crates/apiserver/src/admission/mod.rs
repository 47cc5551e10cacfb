//! Admission: the last gate before the store. Plugins may change an object, then all may refuse it.
//!
//! One module per plugin, one row each in [`PLUGINS`], in upstream's order. Plugins never wait.
//!
//! Webhooks and policies may wait, and are stages ([`stage`]): they run after the plugins of their phase. The whole order
//! is upstream's: plugins that change, `MutatingAdmissionPolicy`, `MutatingAdmissionWebhook`, plugins that refuse,
//! `ValidatingAdmissionPolicy`, `ValidatingAdmissionWebhook`, and charges of quotas last.
//!
//! To add a stage: one module with a type that implements [`MutatingStage`] or [`ValidatingStage`], and one row in
//! [`stage::MUTATING`] or [`stage::VALIDATING`]. [`matching`] decides which requests a configuration selects, and
//! [`configured::Configured`] keeps the compiled forms of stored configurations.

mod always_pull_images;
mod anti_affinity;
mod attributes;
mod authorizer;
mod certificates;
mod chain;
mod claim_resize;
mod config;
pub(crate) mod configured;
mod default_class;
mod default_tolerations;
mod deny_external_ips;
mod event_rate_limit;
pub(crate) mod expressions;
mod extended_toleration;
mod image_policy;
mod limit_ranger;
pub(crate) mod matching;
mod namespace_exists;
mod namespace_lifecycle;
mod node_declared_features;
mod node_restriction;
mod owner_references;
mod pod_node_selector;
mod pod_resize;
mod pod_security;
mod pod_topology;
mod policy;
mod priority;
pub(crate) mod reinvocation;
mod resource_quota;
mod runtime_class;
mod service_account;
pub(crate) mod stage;
mod storage_in_use;
mod taint_nodes;
mod times;
mod toleration_restriction;
mod webhook;

pub(crate) use attributes::{Attributes, Operation};
pub(crate) use chain::Chain;
pub use config::{ConfigError, Configurations, read as read_admission_config};
pub(crate) use image_policy::open as open_image_policy;
pub(crate) use reinvocation::Reinvocation;
pub(crate) use stage::Parts;
pub(crate) use webhook::WebhookMetrics;

use crate::registry::View;
use crate::review_webhook::WebhookSenders;
use ferrite_api::Status;
use ferrite_json::Value;
use ferrite_store::{Compare, Op, Txn};
use std::sync::Arc;

/// Writes that must happen together with the one that is admitted, or not at all.
#[derive(Debug, Default)]
pub(crate) struct Charges {
    pub compares: Vec<Compare>,
    pub ops: Vec<Op>,
}

impl Charges {
    pub fn is_empty(&self) -> bool {
        self.compares.is_empty() && self.ops.is_empty()
    }

    /// Adds the writes to a transaction.
    pub fn onto(self, mut txn: Txn) -> Txn {
        txn.compares.extend(self.compares);
        txn.ops.extend(self.ops);
        txn
    }
}

/// A plugin. Reads go to the state the server sees now.
pub(crate) trait Plugin: Send + Sync {
    fn name(&self) -> &'static str;

    /// False where the plugin never does anything, when it changes objects or when it refuses them (`validating`). As
    /// upstream: there it is not timed.
    fn handles(&self, _validating: bool, _operation: Operation) -> bool {
        true
    }

    fn mutate(&self, _view: &View, _attributes: &Attributes<'_>, _object: &mut Value) -> Result<(), Status> {
        Ok(())
    }

    /// `object` is none for a delete.
    fn validate(
        &self,
        _view: &View,
        _attributes: &Attributes<'_>,
        _object: Option<&Value>,
    ) -> Result<(), Status> {
        Ok(())
    }

    /// The quota charges of a write that every plugin has admitted.
    fn charge(&self, _view: &View, _attributes: &Attributes<'_>, _object: &Value) -> Result<Charges, Status> {
        Ok(Charges::default())
    }
}

/// Makes a plugin of its configuration, if there is one, or returns the error.
type Make = fn(Option<&Value>) -> Result<Box<dyn Plugin>, String>;

/// The origin of a plugin.
enum Made {
    Ready(&'static dyn Plugin),
    /// From its configuration, under its name.
    From(&'static str, Make),
}

/// A plugin, and true if it is on by default.
struct Row {
    made: Made,
    default: bool,
}

impl Row {
    fn name(&self) -> &'static str {
        match self.made {
            Made::Ready(plugin) => plugin.name(),
            Made::From(name, _) => name,
        }
    }

    fn link(&self, configurations: &Configurations) -> Result<Link, String> {
        match self.made {
            Made::Ready(plugin) => Ok(Link::Ready(plugin)),
            Made::From(name, make) => make(configurations.get(name))
                .map(Link::Made)
                .map_err(|why| format!("admission plugin {name} cannot be turned on: {why}")),
        }
    }
}

const fn on(plugin: &'static dyn Plugin) -> Row {
    Row { made: Made::Ready(plugin), default: true }
}

const fn off(plugin: &'static dyn Plugin) -> Row {
    Row { made: Made::Ready(plugin), default: false }
}

const fn made(name: &'static str, default: bool, make: Make) -> Row {
    Row { made: Made::From(name, make), default }
}

const PLUGINS: &[Row] = &[
    off(&namespace_exists::NamespaceAutoProvision),
    on(&namespace_lifecycle::NamespaceLifecycle),
    off(&namespace_exists::NamespaceExists),
    off(&anti_affinity::LimitPodHardAntiAffinityTopology),
    on(&limit_ranger::LimitRanger),
    on(&service_account::ServiceAccount),
    off(&node_restriction::NodeRestriction),
    on(&taint_nodes::TaintNodesByCondition),
    off(&always_pull_images::AlwaysPullImages),
    made(pod_security::NAME, true, pod_security::make),
    made(pod_node_selector::NAME, false, pod_node_selector::make),
    on(&priority::Priority),
    made(default_tolerations::NAME, true, default_tolerations::make),
    made(toleration_restriction::NAME, false, toleration_restriction::make),
    made(event_rate_limit::NAME, false, event_rate_limit::make),
    off(&extended_toleration::ExtendedResourceToleration),
    on(&default_class::DefaultStorageClass),
    on(&storage_in_use::StorageObjectInUseProtection),
    off(&owner_references::OwnerReferencesPermissionEnforcement),
    on(&claim_resize::PersistentVolumeClaimResize),
    on(&runtime_class::RuntimeClass),
    on(&certificates::CERTIFICATE_APPROVAL),
    on(&certificates::CERTIFICATE_SIGNING),
    on(&certificates::CLUSTER_TRUST_BUNDLE_ATTEST),
    on(&certificates::CertificateSubjectRestriction),
    on(&default_class::DefaultIngressClass),
    off(&deny_external_ips::DenyServiceExternalIPs),
    on(&pod_topology::PodTopologyLabels),
    on(&node_declared_features::NodeDeclaredFeatureValidator),
    on(&pod_resize::PodResizeValidator),
    made(resource_quota::NAME, true, resource_quota::make),
];

/// Plugins turned on beside, or off of, those that upstream turns on, and how they are configured.
#[derive(Debug, Clone, Default)]
pub struct AdmissionPlugins {
    pub enable: Vec<String>,
    pub disable: Vec<String>,
    pub configurations: Configurations,
    /// If it is given, these are on and no others.
    pub only: Option<Vec<String>>,
    /// Connects the plugin ImagePolicyWebhook to its webhook.
    pub webhook_senders: Option<Arc<dyn WebhookSenders>>,
}

impl AdmissionPlugins {
    /// Returns true if a plugin works that is on by default or not.
    fn turns_on(&self, name: &str, default: bool) -> bool {
        let named = |list: &[String]| list.iter().any(|listed| listed == name);
        match &self.only {
            Some(only) => named(only),
            None => named(&self.enable) || (default && !named(&self.disable)),
        }
    }
}

/// A plugin at work.
enum Link {
    Ready(&'static dyn Plugin),
    Made(Box<dyn Plugin>),
}

impl std::ops::Deref for Link {
    type Target = dyn Plugin;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Ready(plugin) => *plugin,
            Self::Made(plugin) => &**plugin,
        }
    }
}
