//! IngressClasses.

use super::domain_prefixed_path;
use super::ingress::validate_reference;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, ensure_object, object, object_mut, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, immutable};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::dns1123_label;
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::NONE;
use ferrite_json::Value;
use jiff::Timestamp;

const CONTROLLER_MAX: usize = 250;

pub(in crate::kinds) struct IngressClasses;

impl Strategy for IngressClasses {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        if let Some(parameters) = object_mut(ensure_object(object, "spec"), "parameters") {
            default_field(parameters, "scope", "Cluster");
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let controller = text(spec, "controller");
        let mut errors = Vec::new();
        if controller.len() > CONTROLLER_MAX {
            errors.push(FieldError::too_long(&path.child("controller"), CONTROLLER_MAX));
        }
        errors.extend(domain_prefixed_path(controller, &path.child("controller")));
        if let Some(parameters) = self::object(spec, "parameters") {
            errors.extend(validate_parameters(parameters, &path.child("parameters")));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("spec").child("controller");
        let mut errors: FieldErrors =
            immutable(&text(&new["spec"], "controller").into(), &old["spec"]["controller"], &path)
                .into_iter()
                .collect();
        errors.extend(self.validate(new));
        errors
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Controller"), shown("Parameters"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        let parameters = self::object(spec, "parameters").map_or_else(
            || NONE.to_owned(),
            |p| match p["apiGroup"].as_str() {
                Some(group) => format!("{}.{group}/{}", text(p, "kind"), text(p, "name")),
                None => format!("{}/{}", text(p, "kind"), text(p, "name")),
            },
        );
        vec![cell::name(object), text(spec, "controller").into(), parameters.into(), cell::age(object, now)]
    }
}

fn validate_parameters(parameters: &Value, path: &Path) -> FieldErrors {
    let mut errors = validate_reference(parameters, path);
    let namespace = parameters["namespace"].as_str();
    let at = path.child("namespace");
    match (text(parameters, "scope"), namespace) {
        ("Namespace", None) => {
            errors.push(FieldError::required(&at, "`parameters.scope` is set to 'Namespace'"));
        }
        ("Namespace", Some(namespace)) => errors.extend(complaints(&at, namespace, dns1123_label(namespace))),
        ("Cluster", Some(_)) => {
            errors.push(FieldError::forbidden(&at, "`parameters.scope` is set to 'Cluster'"));
        }
        ("Cluster", None) => {}
        (other, _) => {
            errors.push(FieldError::not_supported(&path.child("scope"), other, &["Cluster", "Namespace"]));
        }
    }
    errors
}
