//! Refuses writes into a namespace that does not exist, or makes the namespace first.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use ferrite_json::Value;

pub(super) struct NamespaceExists;

impl Plugin for NamespaceExists {
    fn name(&self) -> &'static str {
        "NamespaceExists"
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        _object: Option<&Value>,
    ) -> Result<(), Status> {
        let namespace = attributes.namespace;
        if attributes.resource.is_namespaced() && view.get("", "namespaces", "", namespace).is_none() {
            return Err(Status::not_found("", "namespaces", namespace));
        }
        Ok(())
    }
}

/// Has no code of its own: its work is done before a create begins, because a plugin only decides.
pub(super) struct NamespaceAutoProvision;

impl NamespaceAutoProvision {
    pub const NAME: &'static str = "NamespaceAutoProvision";
}

impl Plugin for NamespaceAutoProvision {
    fn name(&self) -> &'static str {
        Self::NAME
    }
}
