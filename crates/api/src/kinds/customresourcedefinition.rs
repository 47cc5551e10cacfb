//! CustomResourceDefinitions as objects. What their schemas may say is checked where schemas are compiled.

use super::access::{
    default_field, default_text, ensure_object, flag, keep, list, list_mut, object, object_mut, present,
    strings, text,
};
use super::admission::client_config::{
    default_service_port, validate_client_config, validate_review_versions,
};
use super::cell::has_condition;
use super::check::immutable;
use crate::field::{FieldError, FieldErrors, Path};
use crate::meta_validation::{dns1035_label, dns1123_subdomain};
use crate::resource::Strategy;
use ferrite_json::{Value, json};
use std::collections::HashSet;

pub(super) struct CustomResourceDefinitions;

impl Strategy for CustomResourceDefinitions {
    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        let names = ensure_object(spec, "names");
        let kind = text(names, "kind").to_owned();
        if !kind.is_empty() {
            default_text(names, "singular", &kind.to_lowercase());
            default_text(names, "listKind", &format!("{kind}List"));
        }
        let conversion = ensure_object(spec, "conversion");
        default_text(conversion, "strategy", "None");
        if let Some(config) = object_mut(conversion, "webhook").and_then(|w| object_mut(w, "clientConfig")) {
            default_service_port(config);
        }
        for version in list_mut(spec, "versions") {
            for column in list_mut(version, "additionalPrinterColumns") {
                default_field(column, "type", "");
            }
        }
        let stored = storage_versions(object);
        let status = ensure_object(object, "status");
        if list(status, "storedVersions").is_empty() && !stored.is_empty() {
            status["storedVersions"] = stored.into();
        }
    }

    fn prepare_create(&self, object: &mut Value) {
        let stored = storage_versions(object);
        object["status"] = if stored.is_empty() { json!({}) } else { json!({"storedVersions": stored}) };
    }

    /// A version that becomes the one that is stored joins those that have been.
    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        let mut stored: Vec<String> =
            strings(&new["status"], "storedVersions").into_iter().map(str::to_owned).collect();
        for version in storage_versions(new) {
            if !stored.contains(&version) {
                stored.push(version);
            }
        }
        if !stored.is_empty() {
            ensure_object(new, "status")["storedVersions"] = stored.into();
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = validate_object_name(object);
        errors.extend(validate_spec(&object["spec"], &Path::new("spec")));
        errors.extend(validate_stored_versions(object));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("spec");
        let (is, was) = (&new["spec"], &old["spec"]);
        let mut errors = validate_spec(is, &path);
        errors.extend(immutable(&is["group"], &was["group"], &path.child("group")));
        errors.extend(immutable(
            &is["names"]["plural"],
            &was["names"]["plural"],
            &path.child("names").child("plural"),
        ));
        // Until the resource is served nothing depends on these.
        if has_condition(&old["status"], "Established") {
            errors.extend(immutable(&is["scope"], &was["scope"], &path.child("scope")));
            errors.extend(immutable(
                &is["names"]["kind"],
                &was["names"]["kind"],
                &path.child("names").child("kind"),
            ));
        }
        errors.extend(validate_stored_versions(new));
        errors
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let path = Path::new("status").child("acceptedNames");
        validate_given_names(&new["status"]["acceptedNames"], &path)
    }

    /// The definition stays until its instances are gone, which the finalizer stands for.
    fn begin_deletion(&self, object: &mut Value, now: &str) -> bool {
        let metadata = crate::meta::metadata_mut(object);
        metadata.insert("deletionTimestamp", now.into());
        let finalizers = metadata.entry("finalizers").or_insert_with(|| json!([]));
        if let Some(list) = finalizers.as_array_mut()
            && !list.iter().any(|f| f == CLEANUP)
        {
            list.push(CLEANUP.into());
        }
        let terminating = json!({
            "type": "Terminating",
            "status": "True",
            "lastTransitionTime": now,
            "reason": "InstanceDeletionPending",
            "message": "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
        });
        let status = ensure_object(object, "status");
        match status["conditions"].as_array_mut() {
            Some(conditions) => {
                conditions.retain(|c| text(c, "type") != "Terminating");
                conditions.push(terminating);
            }
            None => status["conditions"] = json!([terminating]),
        }
        true
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

/// Held until every instance of a definition that is going away is gone.
const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";

fn storage_versions(definition: &Value) -> Vec<String> {
    list(&definition["spec"], "versions")
        .iter()
        .filter(|v| flag(v, "storage"))
        .map(|v| text(v, "name").to_owned())
        .collect()
}

fn validate_object_name(definition: &Value) -> FieldErrors {
    let spec = &definition["spec"];
    let wanted = format!("{}.{}", text(&spec["names"], "plural"), text(spec, "group"));
    let mut errors = Vec::new();
    for key in ["generateName", "name"] {
        let name = crate::meta::str(definition, key);
        if !name.is_empty() && name != wanted {
            errors.push(FieldError::invalid(
                &Path::new("metadata").child(key),
                name,
                "must be spec.names.plural+\".\"+spec.group",
            ));
        }
    }
    errors
}

fn validate_stored_versions(definition: &Value) -> FieldErrors {
    let path = Path::new("status").child("storedVersions");
    let stored = strings(&definition["status"], "storedVersions");
    if stored.is_empty() {
        return vec![FieldError::invalid(&path, Value::Null, "must have at least one stored version")];
    }
    let versions = list(&definition["spec"], "versions");
    let mut errors = Vec::new();
    let mut seen = HashSet::new();
    for (index, version) in stored.into_iter().enumerate() {
        let path = path.index(index);
        if !seen.insert(version) {
            errors.push(FieldError::invalid(&path, version, "must have no duplicates"));
        }
        if !versions.iter().any(|v| text(v, "name") == version) {
            errors.push(FieldError::invalid(
                &path,
                version,
                format!("missing from spec.versions; {version} was previously a storage version, and must remain in spec.versions until a storage migration ensures no data remains persisted in {version} and removes {version} from status.storedVersions"),
            ));
        }
    }
    errors
}

fn validate_spec(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let group = text(spec, "group");
    if group.is_empty() {
        errors.push(FieldError::required(&path.child("group"), ""));
    } else {
        let problems = dns1123_subdomain(group);
        if !problems.is_empty() {
            errors.push(FieldError::invalid(&path.child("group"), group, problems.join(",")));
        } else if !group.contains('.') {
            errors.push(FieldError::invalid(
                &path.child("group"),
                group,
                "should be a domain with at least one dot",
            ));
        }
    }
    match text(spec, "scope") {
        "" => errors.push(FieldError::required(&path.child("scope"), "")),
        "Cluster" | "Namespaced" => {}
        other => {
            errors.push(FieldError::not_supported(&path.child("scope"), other, &["Cluster", "Namespaced"]));
        }
    }
    if flag(spec, "preserveUnknownFields") {
        errors.push(FieldError::invalid(
            &path.child("preserveUnknownFields"),
            true,
            "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema instead",
        ));
    }
    errors.extend(validate_versions(list(spec, "versions"), &path.child("versions")));
    errors.extend(validate_names(&spec["names"], &path.child("names")));
    errors.extend(validate_conversion(&spec["conversion"], &path.child("conversion")));
    errors
}

fn validate_versions(versions: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    let mut unique = true;
    for (index, version) in versions.iter().enumerate() {
        let path = path.index(index);
        let name = text(version, "name");
        unique &= names.insert(name);
        let problems = dns1035_label(name);
        if !problems.is_empty() {
            errors.push(FieldError::invalid(&path.child("name"), name, problems.join(",")));
        }
        if !present(&version["schema"], "openAPIV3Schema") {
            errors.push(FieldError::required(
                &path.child("schema").child("openAPIV3Schema"),
                "schemas are required",
            ));
        }
        errors.extend(validate_columns(
            list(version, "additionalPrinterColumns"),
            &path.child("additionalPrinterColumns"),
        ));
    }
    let shown = || if versions.is_empty() { Value::Null } else { versions.to_vec().into() };
    if !unique {
        errors.push(FieldError::invalid(path, shown(), "must contain unique version names"));
    }
    if versions.iter().filter(|v| flag(v, "storage")).count() != 1 {
        errors.push(FieldError::invalid(
            path,
            shown(),
            "must have exactly one version marked as storage version",
        ));
    }
    errors
}

fn validate_columns(columns: &[Value], path: &Path) -> FieldErrors {
    const TYPES: &[&str] = &["boolean", "date", "integer", "number", "string"];
    const FORMATS: &[&str] = &["byte", "date", "date-time", "double", "float", "int32", "int64", "password"];
    let mut errors = Vec::new();
    for (index, column) in columns.iter().enumerate() {
        let path = path.index(index);
        if text(column, "name").is_empty() {
            errors.push(FieldError::required(&path.child("name"), ""));
        }
        match text(column, "type") {
            "" => errors.push(FieldError::required(
                &path.child("type"),
                format!("must be one of {}", TYPES.join(",")),
            )),
            kind if !TYPES.contains(&kind) => errors.push(FieldError::invalid(
                &path.child("type"),
                kind,
                format!("must be one of {}", TYPES.join(",")),
            )),
            _ => {}
        }
        let format = text(column, "format");
        if !format.is_empty() && !FORMATS.contains(&format) {
            errors.push(FieldError::invalid(
                &path.child("format"),
                format,
                format!("must be one of {}", FORMATS.join(",")),
            ));
        }
        if text(column, "jsonPath").is_empty() {
            errors.push(FieldError::required(&path.child("jsonPath"), ""));
        }
    }
    errors
}

fn validate_names(names: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["plural", "singular", "kind", "listKind"] {
        if text(names, key).is_empty() {
            errors.push(FieldError::required(&path.child(key), ""));
        }
    }
    errors.extend(validate_given_names(names, path));
    errors
}

/// Checks the names that are given.
fn validate_given_names(names: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mixed = "may have mixed case, but should otherwise match: ";
    for (key, introduction) in [("plural", ""), ("singular", ""), ("kind", mixed), ("listKind", mixed)] {
        let name = text(names, key);
        if name.is_empty() {
            continue;
        }
        let checked = if introduction.is_empty() { name.to_owned() } else { name.to_lowercase() };
        let problems = dns1035_label(&checked);
        if !problems.is_empty() {
            errors.push(FieldError::invalid(
                &path.child(key),
                name,
                introduction.to_owned() + &problems.join(","),
            ));
        }
    }
    for key in ["shortNames", "categories"] {
        for (index, name) in strings(names, key).into_iter().enumerate() {
            let problems = dns1035_label(name);
            if !problems.is_empty() {
                errors.push(FieldError::invalid(&path.child(key).index(index), name, problems.join(",")));
            }
        }
    }
    let (kind, list_kind) = (text(names, "kind"), text(names, "listKind"));
    if !kind.is_empty() && kind == list_kind {
        errors.push(FieldError::invalid(
            &path.child("listKind"),
            list_kind,
            "kind and listKind may not be the same",
        ));
    }
    errors
}

fn validate_conversion(conversion: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    match text(conversion, "strategy") {
        "None" => {
            if present(conversion, "webhook") {
                errors.push(FieldError::forbidden(
                    &path.child("webhook"),
                    "should not be set when strategy is not set to Webhook",
                ));
            }
        }
        "Webhook" => match object(&conversion["webhook"], "clientConfig") {
            None => errors.push(FieldError::required(
                &path.child("webhookClientConfig"),
                "required when strategy is set to Webhook",
            )),
            Some(config) => {
                errors.extend(validate_client_config(config, &path.child("webhookClientConfig")));
                errors.extend(validate_review_versions(
                    &strings(&conversion["webhook"], "conversionReviewVersions"),
                    &path.child("conversionReviewVersions"),
                ));
            }
        },
        "" => errors.push(FieldError::required(&path.child("strategy"), "")),
        other => {
            errors.push(FieldError::not_supported(&path.child("strategy"), other, &["None", "Webhook"]));
        }
    }
    errors
}
