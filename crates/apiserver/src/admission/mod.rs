//! Admission: the last gate before the store. Plugins may change an object, then all may refuse it.
//!
//! One module per plugin, one row each in [`PLUGINS`], in upstream's order.

mod certificate_subject;
mod default_tolerations;
mod namespace_lifecycle;
mod priority;
mod service_account;
mod storage_in_use;
mod taint_nodes;

use crate::auth::User;
use crate::registry::View;
use ferrite_api::Status;
use ferrite_api::resource::Resource;
use serde_json::Value;

/// What is about to happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Create,
    Update,
    Delete,
}

/// What a plugin is told about a request.
pub(crate) struct Attributes<'a> {
    pub operation: Operation,
    pub resource: &'a Resource,
    pub subresource: Option<&'a str>,
    pub namespace: &'a str,
    pub name: &'a str,
    pub user: &'a User,
}

impl Attributes<'_> {
    /// Whether this creates or updates an object of a core resource, not one of its subresources.
    fn writes(&self, plural: &str) -> bool {
        self.operation != Operation::Delete
            && self.subresource.is_none()
            && self.resource.group.is_empty()
            && self.resource.plural == plural
    }

    /// Whether this creates an object of a core resource, not one of its subresources.
    fn creates(&self, plural: &str) -> bool {
        self.creates_in("", plural)
    }

    fn creates_in(&self, group: &str, plural: &str) -> bool {
        self.operation == Operation::Create
            && self.subresource.is_none()
            && self.resource.group == group
            && self.resource.plural == plural
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
}

pub(crate) const PLUGINS: &[&dyn Plugin] = &[
    &namespace_lifecycle::NamespaceLifecycle,
    &taint_nodes::TaintNodesByCondition,
    &service_account::ServiceAccount,
    &default_tolerations::DefaultTolerationSeconds,
    &priority::Priority,
    &certificate_subject::CertificateSubject,
    &storage_in_use::StorageObjectInUseProtection,
];

pub(crate) fn mutate(view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
    PLUGINS.iter().try_for_each(|plugin| {
        let _span =
            tracing::debug_span!("admission", plugin = plugin.name(), user = attributes.user.name).entered();
        plugin.mutate(view, attributes, object)
    })
}

pub(crate) fn validate(
    view: &View,
    attributes: &Attributes<'_>,
    object: Option<&Value>,
) -> Result<(), Status> {
    PLUGINS.iter().try_for_each(|plugin| plugin.validate(view, attributes, object))
}
