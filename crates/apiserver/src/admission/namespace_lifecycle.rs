//! Nothing is created in a namespace that does not exist or is going away; system namespaces stay.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::{Status, meta};
use ferrite_json::{Value, json};

pub(super) struct NamespaceLifecycle;

/// Namespaces the cluster cannot do without.
const IMMORTAL: [&str; 3] = ["default", "kube-system", "kube-public"];

impl Plugin for NamespaceLifecycle {
    fn name(&self) -> &'static str {
        "NamespaceLifecycle"
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, _object: &mut Value) -> Result<(), Status> {
        if attributes.operation != Operation::Create || !attributes.resource.is_namespaced() {
            return Ok(());
        }
        let Some(namespace) = view.get("", "namespaces", "", attributes.namespace) else {
            return Err(Status::not_found("", "namespaces", attributes.namespace));
        };
        if !meta::is_deleting(&namespace) {
            return Ok(());
        }
        let mut refused = Status::forbidden(
            &attributes.resource.group,
            &attributes.resource.plural,
            attributes.name,
            &format!(
                "unable to create new content in namespace {} because it is being terminated",
                attributes.namespace
            ),
        );
        if let Some(details) = &mut refused.details {
            details.insert(
                "causes",
                json!([{
                    "reason": "NamespaceTerminating",
                    "message": format!("namespace {} is being terminated", attributes.namespace),
                    "field": "metadata.namespace",
                }]),
            );
        }
        Err(refused)
    }

    fn validate(
        &self,
        _view: &View,
        attributes: &Attributes<'_>,
        _object: Option<&Value>,
    ) -> Result<(), Status> {
        let refused = attributes.operation == Operation::Delete
            && attributes.resource.group.is_empty()
            && attributes.resource.plural == "namespaces"
            && IMMORTAL.contains(&attributes.name);
        if refused {
            return Err(Status::forbidden(
                "",
                "namespaces",
                attributes.name,
                "this namespace may not be deleted",
            ));
        }
        Ok(())
    }
}
