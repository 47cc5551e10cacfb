//! Every pod runs as a service account that exists.

use super::{Attributes, Plugin};
use crate::registry::View;
use ferrite_api::Status;
use serde_json::Value;

pub(super) struct ServiceAccount;

impl Plugin for ServiceAccount {
    fn name(&self) -> &'static str {
        "ServiceAccount"
    }

    fn mutate(&self, _view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.creates("pods") {
            return Ok(());
        }
        let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return Ok(()) };
        let given = ["serviceAccountName", "serviceAccount"]
            .into_iter()
            .find_map(|k| spec.get(k).and_then(Value::as_str).filter(|s| !s.is_empty()));
        let name = given.unwrap_or("default").to_owned();
        spec.insert("serviceAccount".into(), name.clone().into());
        spec.insert("serviceAccountName".into(), name.into());
        Ok(())
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(object) = object.filter(|_| attributes.creates("pods")) else { return Ok(()) };
        let name = object.pointer("/spec/serviceAccountName").and_then(Value::as_str).unwrap_or_default();
        if view.get("", "serviceaccounts", attributes.namespace, name).is_some() {
            return Ok(());
        }
        Err(Status::forbidden(
            "",
            "pods",
            attributes.name,
            &format!(
                "error looking up service account {}/{name}: serviceaccount {name:?} not found",
                attributes.namespace
            ),
        ))
    }
}
