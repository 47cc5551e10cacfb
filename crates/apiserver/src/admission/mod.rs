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
mod authorizer;
mod certificates;
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

pub use config::{ConfigError, Configurations, read as read_admission_config};
pub(crate) use image_policy::open as open_image_policy;
pub(crate) use reinvocation::Reinvocation;
pub(crate) use stage::{MutatingStage, Parts, ValidatingStage};
pub(crate) use webhook::WebhookMetrics;

use crate::auth::{Action, Rbac, User, decide, settled};
use crate::metrics::AdmissionTimes;
use crate::options::WriteOptions;
use crate::outbound::Outbound;
use crate::registry::View;
use crate::review_webhook::{WebhookSender, WebhookSenders};
use crate::subresource::scale;

use ferrite_api::resource::Resource;
use ferrite_api::{Gvk, Status};
use ferrite_json::Value;
use ferrite_store::{Compare, Op, Txn};
use std::sync::Arc;
use std::time::Instant;

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Create,
    Update,
    Delete,
    /// A request that becomes a stream: exec, attach, port-forward and proxy.
    Connect,
}

impl Operation {
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
            Self::Connect => "CONNECT",
        }
    }
}

/// The facts about a request that a plugin gets.
#[derive(Clone, Copy)]
pub(crate) struct Attributes<'a> {
    pub operation: Operation,
    pub resource: &'a Resource,
    pub subresource: Option<&'a str>,
    pub namespace: &'a str,
    pub name: &'a str,
    /// The request does not name the object: it has no name yet and `name` is the prefix that it will be drawn from, or it
    /// is deleted with its collection.
    pub unnamed: bool,
    pub user: &'a User,
    /// The stored object; none for a create.
    pub old: Option<&'a Value>,
    pub options: &'a WriteOptions,
    pub rbac: &'a Arc<Rbac>,
}

impl<'a> Attributes<'a> {
    /// The name as webhooks and policies see it: none while it is not drawn.
    pub fn given_name(&self) -> &'a str {
        if self.unnamed { "" } else { self.name }
    }
    /// The namespace as webhooks and policies see it. As upstream: a Namespace is in itself.
    pub fn given_namespace(&self) -> &'a str {
        match self.resource.group.is_empty() && self.resource.plural == "namespaces" {
            true => self.given_name(),
            false => self.namespace,
        }
    }
    /// Group, version and kind of the object: that of the body where a subresource has one of its own.
    pub fn kind(&self) -> Gvk {
        let body = self.subresource.and_then(|name| self.resource.subresource(name)).and_then(|sub| sub.body);
        match body {
            Some((group, version, kind)) => Gvk::new(group, version, kind),
            None => self.resource.gvk(),
        }
    }

    /// Returns true if the request is about the resource itself, not one of its subresources.
    fn is(&self, group: &str, plural: &str) -> bool {
        self.is_sub(group, plural, None)
    }

    fn is_sub(&self, group: &str, plural: &str, subresource: Option<&str>) -> bool {
        self.subresource == subresource && self.resource.group == group && self.resource.plural == plural
    }

    /// Returns true if the request creates or updates an object of a core resource, not one of its
    /// subresources.
    fn writes(&self, plural: &str) -> bool {
        matches!(self.operation, Operation::Create | Operation::Update) && self.is("", plural)
    }

    /// Returns true if the request creates an object of a core resource, not one of its subresources.
    fn creates(&self, plural: &str) -> bool {
        self.creates_in("", plural)
    }

    fn creates_in(&self, group: &str, plural: &str) -> bool {
        self.operation == Operation::Create && self.is(group, plural)
    }

    /// A refusal of this request.
    fn forbid(&self, why: impl AsRef<str>) -> Status {
        // As upstream: deletes of a collection do not name their objects.
        let unnamed = self.unnamed && self.operation == Operation::Delete;
        let name = if unnamed { "Unknown" } else { self.name };
        Status::forbidden(&self.resource.group, &self.resource.plural, name, why.as_ref())
    }

    /// Tells the client something that does not stop the request.
    fn warn(&self, text: impl Into<String>) {
        self.options.warnings.add(text);
    }

    /// Annotates the audit of the request.
    fn annotate(&self, key: impl AsRef<str>, value: impl Into<String>) {
        self.options.warnings.annotate(key, value);
    }

    /// Returns true if the user may also do another action.
    fn may(&self, view: &View, action: &Action) -> bool {
        decide(self.rbac, view, self.user, action).allowed
    }
}

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

/// Returns true if a request writes the scale of an object.
fn is_scale(attributes: &Attributes<'_>) -> bool {
    attributes.subresource == Some("scale") && attributes.operation == Operation::Update
}

/// The plugins that work, in order.
pub(crate) struct Chain {
    links: Vec<Link>,
    mutating: Vec<Box<dyn MutatingStage>>,
    validating: Vec<Box<dyn ValidatingStage>>,
    /// True if a create in a missing namespace makes that namespace.
    pub provisions_namespaces: bool,
    pub times: AdmissionTimes,
    /// Of each of the links, in their order.
    plugin_times: Vec<times::PluginTimes>,
    pub webhook_metrics: Arc<WebhookMetrics>,
}

impl Chain {
    /// Fails with the first name that is no plugin's, or the first configuration that a plugin does not take.
    pub fn new(
        wanted: &AdmissionPlugins,
        outbound: &Arc<Outbound>,
        image_policy: Option<&Arc<dyn WebhookSender>>,
    ) -> Result<Self, String> {
        let webhook_metrics = Arc::default();
        let known: Vec<&str> = PLUGINS.iter().map(Row::name).chain(stage::names()).collect();
        let only = wanted.only.iter().flatten();
        let mut names =
            wanted.enable.iter().chain(&wanted.disable).chain(only).chain(wanted.configurations.keys());
        if let Some(name) = names.find(|name| !known.contains(&name.as_str())) {
            return Err(format!("no admission plugin is called {name:?}: there are {}", known.join(", ")));
        }
        let works = |name: &str, default: bool| wanted.turns_on(name, default);
        let rows: Vec<&Row> = PLUGINS.iter().filter(|row| works(row.name(), row.default)).collect();
        let parts = |name: &str| Parts {
            configuration: wanted.configurations.get(name),
            outbound,
            webhook_metrics: &webhook_metrics,
            image_policy,
        };
        Ok(Self {
            times: AdmissionTimes::default(),
            plugin_times: rows.iter().map(|_| times::PluginTimes::default()).collect(),
            links: rows.iter().map(|row| row.link(&wanted.configurations)).collect::<Result<_, _>>()?,
            mutating: stage::make(stage::MUTATING, &works, &parts)?,
            validating: stage::make(stage::VALIDATING, &works, &parts)?,
            webhook_metrics: Arc::clone(&webhook_metrics),
            provisions_namespaces: rows
                .iter()
                .any(|row| row.name() == namespace_exists::NamespaceAutoProvision::NAME),
        })
    }

    /// Lets all change the object. Returns true if a webhook or a policy did: the caller prepares it anew.
    pub async fn mutate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<bool, Status> {
        let started = Instant::now();
        let mut admitted = self.mutate_at_once(view, attributes, object).map(|()| false);
        if admitted.is_ok() && self.may_mutate(view, attributes) {
            // Boxed, so that writes that nobody is asked about stay small.
            admitted = Box::pin(self.mutate_waiting(view, attributes, object)).await;
        }
        self.times.observe(false, attributes.operation.name(), admitted.is_err(), started.elapsed());
        admitted
    }

    fn may_mutate(&self, view: &View, attributes: &Attributes<'_>) -> bool {
        !attributes.options.within && self.mutating.iter().any(|stage| stage.concerns(view, attributes))
    }

    fn may_validate(&self, view: &View, attributes: &Attributes<'_>) -> bool {
        !attributes.options.within && self.validating.iter().any(|stage| stage.concerns(view, attributes))
    }

    fn mutate_at_once(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<(), Status> {
        certificates::stamp_requester(attributes, object);
        let mut watch = times::Stopwatch::start();
        self.links.iter().zip(&self.plugin_times).try_for_each(|(plugin, times)| {
            let _span =
                tracing::debug_span!("admission", plugin = plugin.name(), user = attributes.user.name)
                    .entered();
            let operation = attributes.operation.name();
            times.measure(&mut watch, plugin.name(), false, operation, || {
                plugin.mutate(view, attributes, object)
            })
        })
    }

    /// Runs the stages, and where one of them asks for it, all plugins and stages once more.
    async fn mutate_waiting(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<bool, Status> {
        if is_scale(attributes) {
            return self.mutate_scale(view, attributes, object).await;
        }
        let unstamped = reinvocation::Unstamped::take(attributes, object);
        let before = object.clone();
        let mut reinvocation = Reinvocation::default();
        let mut ran = self.run_mutating(view, attributes, Some(object), &mut reinvocation).await;
        if ran.is_ok() && reinvocation.begin_again() {
            // Plugins have no say in requests that become streams.
            let plugins = match attributes.operation {
                Operation::Connect => Ok(()),
                _ => self.mutate_at_once(view, attributes, object),
            };
            ran = match plugins {
                Ok(()) => self.run_mutating(view, attributes, Some(object), &mut reinvocation).await,
                refused => refused,
            };
        }
        let changed = *object != before;
        unstamped.put_back(object, before);
        ran.map(|()| changed)
    }

    /// Stages see the scale of an object, not the object.
    async fn mutate_scale(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<bool, Status> {
        let resource = attributes.resource;
        let old = attributes.old.map(|old| scale::scale_of(resource, old));
        let shown = Attributes { old: old.as_ref(), ..*attributes };
        let before = scale::scale_of(resource, object);
        let mut after = before.clone();
        let mut reinvocation = Reinvocation::default();
        self.run_mutating(view, &shown, Some(&mut after), &mut reinvocation).await?;
        if reinvocation.begin_again() {
            self.run_mutating(view, &shown, Some(&mut after), &mut reinvocation).await?;
        }
        let changed = before["spec"] != after["spec"];
        if changed {
            scale::set_replicas(resource, object, &after);
        }
        Ok(changed)
    }

    async fn run_mutating(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        mut object: Option<&mut Value>,
        reinvocation: &mut Reinvocation,
    ) -> Result<(), Status> {
        for stage in &self.mutating {
            if stage.concerns(view, attributes) {
                stage.mutate(view, attributes, object.as_deref_mut(), reinvocation).await?;
            }
        }
        Ok(())
    }

    /// Asks all plugins and stages. Quotas are charged afterwards, by [`Chain::charge`].
    ///
    /// `object` is none for a delete.
    pub async fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let started = Instant::now();
        let mut validated = match attributes.rbac.asks_webhooks() {
            false => self.validate_at_once(view, attributes, object),
            true => Box::pin(self.validate_asking(view, attributes, object)).await,
        };
        if validated.is_ok() && self.may_validate(view, attributes) {
            validated = Box::pin(self.run_validating(view, attributes, object)).await;
        }
        self.times.observe(true, attributes.operation.name(), validated.is_err(), started.elapsed());
        validated
    }

    fn validate_at_once(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let operation = attributes.operation.name();
        let mut watch = times::Stopwatch::start();
        self.links.iter().zip(&self.plugin_times).try_for_each(|(plugin, times)| {
            times.measure(&mut watch, plugin.name(), true, operation, || {
                plugin.validate(view, attributes, object)
            })
        })
    }

    /// As [`Chain::validate_at_once`], where a plugin may have to wait for the webhook of an authorizer.
    async fn validate_asking(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let operation = attributes.operation.name();
        for (plugin, times) in self.links.iter().zip(&self.plugin_times) {
            let validate = || {
                let mut watch = times::Stopwatch::start();
                times.measure(&mut watch, plugin.name(), true, operation, || {
                    plugin.validate(view, attributes, object)
                })
            };
            settled(attributes.rbac, validate).await?;
        }
        Ok(())
    }

    async fn run_validating(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let resource = attributes.resource;
        let of = |object: &Value| scale::scale_of(resource, object);
        let (scale, old_scale) = match is_scale(attributes) {
            true => (object.map(of), attributes.old.map(of)),
            false => (None, None),
        };
        let object = scale.as_ref().or(object);
        let shown = Attributes { old: old_scale.as_ref().or(attributes.old), ..*attributes };
        let attributes = &shown;
        for stage in &self.validating {
            if stage.concerns(view, attributes) {
                stage.validate(view, attributes, object).await?;
            }
        }
        Ok(())
    }

    /// Asks about a delete. Nothing can be changed, but stages that change objects may refuse it.
    pub async fn admit_delete(&self, view: &View, attributes: &Attributes<'_>) -> Result<(), Status> {
        if self.may_mutate(view, attributes) {
            let started = Instant::now();
            let admitted =
                Box::pin(self.run_mutating(view, attributes, None, &mut Reinvocation::default())).await;
            self.times.observe(false, attributes.operation.name(), admitted.is_err(), started.elapsed());
            admitted?;
        }
        self.validate(view, attributes, None).await
    }
    /// Asks about a request that becomes a stream; `options` are its own. Only stages run. Returns true if
    /// the options were changed.
    pub async fn connect(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        options: &mut Value,
    ) -> Result<bool, Status> {
        let mutates = self.may_mutate(view, attributes);
        let changed =
            if mutates { Box::pin(self.mutate_waiting(view, attributes, options)).await? } else { false };
        if self.may_validate(view, attributes) {
            Box::pin(self.run_validating(view, attributes, Some(options))).await?;
        }
        Ok(changed)
    }

    /// The quota charges of a write that every plugin has admitted. They must be stored in the same
    /// transaction.
    pub fn charge(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<Charges, Status> {
        let mut charges = Charges::default();
        for plugin in &self.links {
            let charged = plugin.charge(view, attributes, object)?;
            charges.compares.extend(charged.compares);
            charges.ops.extend(charged.ops);
        }
        Ok(charges)
    }
}
