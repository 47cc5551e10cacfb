//! The plugins and stages that work, and the order in which a request meets them.

use super::reinvocation::{self, Reinvocation};
use super::stage::{self, MutatingStage, Parts, ValidatingStage};
use super::webhook::WebhookMetrics;
use super::{
    AdmissionPlugins, Attributes, Charges, Link, Operation, PLUGINS, Plugin, Row, certificates,
    namespace_exists, times,
};
use crate::auth::settled;
use crate::metrics::AdmissionTimes;
use crate::outbound::Outbound;
use crate::registry::View;
use crate::review_webhook::WebhookSender;
use crate::subresource::scale;
use ferrite_api::Status;
use ferrite_json::Value;
use std::sync::Arc;
use std::time::Instant;

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
        self.each_plugin(false, attributes, |plugin| {
            let _span =
                tracing::debug_span!("admission", plugin = plugin.name(), user = attributes.user.name)
                    .entered();
            plugin.mutate(view, attributes, object)
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
        self.each_plugin(true, attributes, |plugin| plugin.validate(view, attributes, object))
    }

    /// Does the work of each plugin in order until one refuses, and records how long each took.
    fn each_plugin(
        &self,
        validating: bool,
        attributes: &Attributes<'_>,
        mut work: impl FnMut(&dyn Plugin) -> Result<(), Status>,
    ) -> Result<(), Status> {
        let operation = attributes.operation.name();
        let mut watch = times::Stopwatch::start();
        let links = self.links.iter().zip(&self.plugin_times);
        let mut links = links.filter(|(plugin, _)| plugin.handles(validating, attributes.operation));
        links.try_for_each(|(plugin, times)| {
            times.measure(&mut watch, plugin.name(), validating, operation, || work(&**plugin))
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
            if !plugin.handles(true, attributes.operation) {
                continue;
            }
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
