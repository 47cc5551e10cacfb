//! ValidatingAdmissionPolicyBindings and MutatingAdmissionPolicyBindings.

use super::matching::{default_matching, validate_match_resources, validate_mutable};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, list, map, object, object_mut, present, strings, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, named, repeated};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::{dns1123_subdomain, path_segment};
use crate::resource::{Column, MetadataUse, Strategy};
use crate::selector::validate_label_selector;
use ferrite_json::Value;
use jiff::Timestamp;

const ACTIONS: &[&str] = &["Audit", "Deny", "Warn"];
const EXCLUSIVE: &str = "name and selector are mutually exclusive";

pub(in crate::kinds) struct PolicyBindings {
    pub mutating: bool,
}

impl Strategy for PolicyBindings {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Content
    }

    fn knows_finalizers(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        if let Some(matching) = object_mut(ensure_object(object, "spec"), "matchResources") {
            default_matching(matching, &["resourceRules", "excludeResourceRules"]);
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = named(spec, "policyName", &path, dns1123_subdomain);
        if let Some(reference) = self::object(spec, "paramRef") {
            errors.extend(validate_param_ref(reference, &path.child("paramRef")));
        }
        if let Some(matching) = self::object(spec, "matchResources") {
            let path = path.child("matchResources");
            errors.extend(validate_match_resources(matching, &path));
            if self.mutating {
                errors.extend(validate_mutable(matching, &path));
            }
        }
        if !self.mutating {
            errors.extend(validate_actions(
                &strings(spec, "validationActions"),
                &path.child("validationActions"),
            ));
        }
        errors
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("PolicyName"), shown("ParamRef"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        vec![
            cell::name(object),
            text(spec, "policyName").into(),
            param_cell(self::object(spec, "paramRef")).into(),
            cell::age(object, now),
        ]
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

fn param_cell(reference: Option<&Value>) -> String {
    let Some(reference) = reference else { return "<unset>".to_owned() };
    match (text(reference, "namespace"), text(reference, "name")) {
        (_, "") => object(reference, "selector").map_or_else(|| "<unset>".to_owned(), go_selector),
        ("", name) => format!("*/{name}"),
        (namespace, name) => format!("{namespace}/{name}"),
    }
}

/// A selector as Go's generated `String` writes it.
fn go_selector(selector: &Value) -> String {
    let labels: String = map(selector, "matchLabels")
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}: {},", value.as_str().unwrap_or_default()))
        .collect();
    let expressions: String = list(selector, "matchExpressions")
        .iter()
        .map(|e| {
            format!(
                "LabelSelectorRequirement{{Key:{},Operator:{},Values:[{}],}},",
                text(e, "key"),
                text(e, "operator"),
                strings(e, "values").join(" ")
            )
        })
        .collect();
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )
}

fn validate_param_ref(reference: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (name, selector) = (text(reference, "name"), present(reference, "selector"));
    if !name.is_empty() {
        errors.extend(complaints(&path.child("name"), name, path_segment(name)));
        if selector {
            errors.push(FieldError::forbidden(&path.child("name"), EXCLUSIVE));
        }
    }
    if selector {
        errors.extend(validate_label_selector(&reference["selector"], &path.child("selector")));
        if !name.is_empty() {
            errors.push(FieldError::forbidden(&path.child("selector"), EXCLUSIVE));
        }
    }
    if name.is_empty() && !selector {
        errors.push(FieldError::required(path, "one of name or selector must be specified"));
    }
    let at = path.child("parameterNotFoundAction");
    match text(reference, "parameterNotFoundAction") {
        "Allow" | "Deny" => {}
        "" => errors.push(FieldError::required(&at, "")),
        other => errors.push(FieldError::not_supported(&at, other, &["Deny", "Allow"])),
    }
    errors
}

fn validate_actions(actions: &[&str], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let again = repeated(actions.iter());
    for (index, action) in actions.iter().enumerate() {
        if !ACTIONS.contains(action) {
            errors.push(FieldError::not_supported(&path.index(index), *action, ACTIONS));
        }
        if again[index] {
            errors.push(FieldError::duplicate(&path.index(index), *action));
        }
    }
    if actions.contains(&"Deny") && actions.contains(&"Warn") {
        errors.push(FieldError::invalid(
            path,
            actions.to_vec(),
            "must not contain both Deny and Warn (repeating the same validation failure information in the API \
             response and headers serves no purpose)",
        ));
    }
    if actions.is_empty() {
        errors.push(FieldError::required(path, "at least one validation action is required"));
    }
    errors
}
