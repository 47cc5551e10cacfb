//! Nobody makes an object go away, or stay, with another that they could not delete or hold themselves.

use super::{Attributes, Operation, Plugin};
use crate::auth::Action;
use crate::registry::View;
use ferrite_api::quota::amounts::list;
use ferrite_api::{Status, meta};
use ferrite_json::Value;

pub(super) struct OwnerReferencesPermissionEnforcement;

impl Plugin for OwnerReferencesPermissionEnforcement {
    fn name(&self) -> &'static str {
        "OwnerReferencesPermissionEnforcement"
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(object) = object.filter(|_| !attributes.is_sub("", "pods", Some("status"))) else {
            return Ok(());
        };
        let nothing = Value::Null;
        let old = attributes.old.map_or(&nothing, |old| &old["metadata"]);
        let (new_owners, old_owners) =
            (list(&object["metadata"], "ownerReferences"), list(old, "ownerReferences"));
        if new_owners == old_owners {
            return Ok(());
        }
        if attributes.operation == Operation::Update {
            let delete = Action {
                verb: "delete".into(),
                group: attributes.resource.group.to_string(),
                version: attributes.resource.version.to_string(),
                resource: attributes.resource.plural.to_string(),
                subresource: attributes.subresource.unwrap_or_default().into(),
                namespace: attributes.namespace.into(),
                name: meta::name(object).into(),
                ..Action::default()
            };
            if !attributes.may(view, &delete) {
                return Err(
                    attributes.forbid("cannot set an ownerRef on a resource you can't delete: , <nil>")
                );
            }
        }
        let blocks = |owner: &Value| owner["blockOwnerDeletion"] == true;
        let known = |owner: &&Value| old_owners.iter().any(|o| blocks(o) && o["uid"] == owner["uid"]);
        for owner in new_owners.iter().filter(|owner| blocks(owner) && !known(owner)) {
            let finalize = finalizers_of(view, attributes, owner).ok_or_else(|| {
                attributes.forbid(format!(
                    "cannot set blockOwnerDeletion in this case because cannot find RESTMapping for APIVersion {} Kind {}: no matches for kind {:?} in version {:?}",
                    owner["apiVersion"].as_str().unwrap_or_default(),
                    owner["kind"].as_str().unwrap_or_default(),
                    owner["kind"].as_str().unwrap_or_default(),
                    owner["apiVersion"].as_str().unwrap_or_default(),
                ))
            })?;
            if !attributes.may(view, &finalize) {
                return Err(attributes.forbid(
                    "cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on: , <nil>",
                ));
            }
        }
        Ok(())
    }
}

/// The right to hold an owner back.
fn finalizers_of(view: &View, attributes: &Attributes<'_>, owner: &Value) -> Option<Action> {
    let (group, version) = owner["apiVersion"].as_str().map(|v| v.split_once('/').unwrap_or(("", v)))?;
    let resource = view.of_kind(group, version, owner["kind"].as_str()?)?;
    Some(Action {
        verb: "update".into(),
        group: group.into(),
        version: version.into(),
        resource: resource.plural.to_string(),
        subresource: "finalizers".into(),
        namespace: if resource.is_namespaced() { attributes.namespace.into() } else { String::new() },
        name: owner["name"].as_str()?.into(),
        ..Action::default()
    })
}
