//! CustomResourceDefinitions as objects. Their schemas are checked where schemas are compiled.

use super::authorities::validate_authorities;
use crate::custom::{Approval, annotation};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::admissionregistration::client_config::{
    default_service_port, validate_client_config, validate_review_versions,
};
use crate::kinds::common::access::{
    default_field, default_text, ensure_object, flag, keep, list, list_mut, object, object_mut, present,
    strings, text,
};
use crate::kinds::common::cell::has_condition;
use crate::kinds::common::check::immutable;
use crate::meta_validation::{dns1035_label, dns1123_subdomain};
use crate::resource::Strategy;
use ferrite_json::{Value, json};
use std::collections::{BTreeSet, HashSet};

pub(in crate::kinds) struct CustomResourceDefinitions;

impl Strategy for CustomResourceDefinitions {
    fn knows_finalizers(&self) -> bool {
        false
    }

    fn status_has_table(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        let names = ensure_object(spec, "names");
        let kind = text(names, "kind").to_owned();
        if !kind.is_empty() {
            default_text(names, "singular", &kind.to_lowercase());
            default_text(names, "listKind", &format!("{kind}List"));
        }
        if !present(spec, "conversion") {
            spec["conversion"] = json!({"strategy": "None"});
        }
        let conversion = ensure_object(spec, "conversion");
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
        errors.extend(validate_spec(&object["spec"], None, &Path::new("spec")));
        errors.extend(validate_status(object));
        errors.extend(validate_stored_versions(object));
        errors.extend(validate_approval(object, None));
        errors.extend(validate_preserve(object, None));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let path = Path::new("spec");
        let (is, was) = (&new["spec"], &old["spec"]);
        let mut errors = validate_spec(is, Some(was), &path);
        let established = has_condition(&old["status"], "Established");
        errors.extend(validate_authorities(is, was, established, &path));
        // Until the resource is served nothing depends on these.
        if established {
            errors.extend(immutable(&is["scope"], &was["scope"], &path.child("scope")));
            errors.extend(immutable(
                &is["names"]["kind"],
                &was["names"]["kind"],
                &path.child("names").child("kind"),
            ));
        }
        errors.extend(immutable(&is["group"], &was["group"], &path.child("group")));
        errors.extend(immutable(
            &is["names"]["plural"],
            &was["names"]["plural"],
            &path.child("names").child("plural"),
        ));
        errors.extend(validate_status(new));
        errors.extend(validate_stored_versions(new));
        errors.extend(validate_approval(new, Some(old)));
        errors.extend(validate_preserve(new, Some(old)));
        errors
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        validate_status(new)
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        unknown_formats(object).iter().map(|format| format!("unrecognized format {format:?}")).collect()
    }

    fn warnings_on_update(&self, new: &Value, old: &Value) -> Vec<String> {
        let had = unknown_formats(old);
        let new = unknown_formats(new).into_iter().filter(|format| !had.contains(format));
        new.map(|format| format!("unrecognized format {format:?}")).collect()
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

/// The version that is stored, as a list: none, or the first that says so.
fn storage_versions(definition: &Value) -> Vec<String> {
    let versions = list(&definition["spec"], "versions").iter();
    versions.filter(|v| flag(v, "storage")).take(1).map(|v| text(v, "name").to_owned()).collect()
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

/// Formats that no version of upstream knows, and that are ignored.
fn unknown_formats(definition: &Value) -> BTreeSet<String> {
    let schemas = list(&definition["spec"], "versions").iter().map(|v| &v["schema"]["openAPIV3Schema"]);
    schemas.flat_map(crate::custom::spec::unknown_formats).collect()
}

fn validate_status(definition: &Value) -> FieldErrors {
    validate_names(&definition["status"]["acceptedNames"], &Path::new("status").child("acceptedNames"))
}

fn validate_stored_versions(definition: &Value) -> FieldErrors {
    let path = Path::new("status").child("storedVersions");
    let stored = strings(&definition["status"], "storedVersions");
    if stored.is_empty() {
        return vec![FieldError::invalid(&path, Value::Null, "must have at least one stored version")];
    }
    let mut errors = Vec::new();
    // As upstream: a version is struck from the list when it is met, and the second of the same name misses it.
    let mut left: Vec<&str> = stored.clone();
    for version in list(&definition["spec"], "versions") {
        let name = text(version, "name");
        let known = left.contains(&name);
        if flag(version, "storage") && !known {
            let why = format!("must have the storage version {name}");
            errors.push(FieldError::invalid(&path, stored.clone(), why));
        }
        left.retain(|version| *version != name);
    }
    for (index, version) in stored.iter().enumerate().filter(|(_, version)| left.contains(version)) {
        errors.push(FieldError::invalid(
            &path.index(index),
            *version,
            format!("missing from spec.versions; {version} was previously a storage version, and must remain in spec.versions until a storage migration ensures no data remains persisted in {version} and removes {version} from status.storedVersions"),
        ));
    }
    errors
}

/// The API approval of a definition in a community group: missing, bad, or good.
fn approval(definition: &Value) -> Option<Result<(), FieldError>> {
    let approval = Approval::of(definition)?;
    let path = Path::new("metadata").child("annotations").key(Approval::annotation());
    Some(match approval {
        Approval::Missing => Err(FieldError::required(&path, approval.message(definition))),
        Approval::Invalid => {
            Err(FieldError::invalid(&path, annotation(definition), approval.message(definition)))
        }
        Approval::Bypassed | Approval::Approved => Ok(()),
    })
}

fn validate_approval(new: &Value, old: Option<&Value>) -> Option<FieldError> {
    let kind = |approval: &Option<Result<(), FieldError>>| {
        approval.as_ref().map(|a| a.as_ref().err().map(FieldError::cause_reason))
    };
    let is = approval(new);
    if old.is_some_and(|old| kind(&approval(old)) == kind(&is)) {
        return None;
    }
    is?.err()
}

fn validate_preserve(new: &Value, old: Option<&Value>) -> Option<FieldError> {
    let set = |definition: &Value| flag(&definition["spec"], "preserveUnknownFields");
    if !set(new) || old.is_some_and(set) {
        return None;
    }
    Some(FieldError::invalid(
        &Path::new("spec").child("preserveUnknownFields"),
        true,
        "cannot set to true, set x-kubernetes-preserve-unknown-fields to true in spec.versions[*].schema instead",
    ))
}

/// Parts of versions that upstream's server moves to the top when all versions have the same.
struct Hoisted {
    schema: bool,
    subresources: bool,
    columns: bool,
    selectable: bool,
}

impl Hoisted {
    fn of(versions: &[Value]) -> Self {
        let same = |key: &str| {
            let first = versions.first().map(|version| &version[key]);
            versions.iter().all(|version| Some(&version[key]) == first)
        };
        Self {
            schema: same("schema"),
            subresources: same("subresources"),
            columns: same("additionalPrinterColumns"),
            selectable: same("selectableFields"),
        }
    }

    /// A version as Go prints it.
    fn shown(&self, version: &Value) -> String {
        let part = |hoisted: bool, key: &str| match version.get(key) {
            Some(value) if !hoisted => value.to_string(),
            _ => "null".to_owned(),
        };
        format!(
            r#"{{"Name":{},"Served":{},"Storage":{},"Deprecated":{},"DeprecationWarning":{},"Schema":{},"Subresources":{},"AdditionalPrinterColumns":{},"SelectableFields":{}}}"#,
            Value::from(text(version, "name")),
            flag(version, "served"),
            flag(version, "storage"),
            flag(version, "deprecated"),
            part(false, "deprecationWarning"),
            part(self.schema, "schema"),
            part(self.subresources, "subresources"),
            part(self.columns, "additionalPrinterColumns"),
            part(self.selectable, "selectableFields"),
        )
    }
}

fn validate_spec(spec: &Value, old: Option<&Value>, path: &Path) -> FieldErrors {
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
    let versions = list(spec, "versions");
    let hoisted = Hoisted::of(versions);
    let at = path.child("versions");
    for (index, version) in versions.iter().enumerate() {
        if !present(&version["schema"], "openAPIV3Schema") {
            let path = at.index(index).child("schema").child("openAPIV3Schema");
            errors.push(FieldError::required(&path, ""));
        }
    }
    for (index, version) in versions.iter().enumerate() {
        errors.extend(validate_version(version, old, &hoisted, &at.index(index)));
    }
    errors.extend(validate_version_list(spec, &hoisted, path));
    let names_path = path.child("names");
    for key in ["plural", "singular", "kind", "listKind"] {
        if text(&spec["names"], key).is_empty() {
            errors.push(FieldError::required(&names_path.child(key), ""));
        }
    }
    errors.extend(validate_names(&spec["names"], &names_path));
    if let Some(first) = versions.first() {
        errors.extend(validate_hoisted(first, versions, old, &hoisted, path));
    }
    errors.extend(validate_conversion(&spec["conversion"], &path.child("conversion")));
    errors
}

fn has_status(version: &Value) -> bool {
    version["subresources"].get("status").is_some_and(Value::is_object)
}

fn is_unchanged(version: &Value, old: Option<&Value>) -> bool {
    old.is_some_and(|old| {
        let before = list(old, "versions").iter().find(|v| text(v, "name") == text(version, "name"));
        before.is_some_and(|before| before["schema"] == version["schema"])
    })
}

fn validate_version(version: &Value, old: Option<&Value>, hoisted: &Hoisted, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let name = text(version, "name");
    let problems = dns1035_label(name);
    if !problems.is_empty() {
        errors.push(FieldError::invalid(&path.child("name"), name, problems.join(",")));
    }
    if let Some(warning) = version.get("deprecationWarning").and_then(Value::as_str) {
        for why in deprecation_problems(flag(version, "deprecated"), warning) {
            errors.push(FieldError::invalid(&path.child("deprecationWarning"), warning, why));
        }
    }
    let schema = &version["schema"]["openAPIV3Schema"];
    if !hoisted.schema && schema.is_object() {
        let path = path.child("schema").child("openAPIV3Schema");
        let unchanged = is_unchanged(version, old);
        errors.extend(crate::custom::spec::validate_schema(schema, &path, has_status(version), unchanged));
    }
    if !hoisted.subresources {
        errors.extend(validate_subresources(&version["subresources"], &path.child("subresources")));
    }
    if !hoisted.columns {
        let path = path.child("additionalPrinterColumns");
        errors.extend(validate_columns(list(version, "additionalPrinterColumns"), &path));
    }
    if !hoisted.selectable {
        let path = path.child("selectableFields");
        let fields = list(version, "selectableFields");
        errors.extend(crate::custom::spec::validate_selectable(fields, schema, &path));
    }
    errors
}

/// Settings that all versions share are reported for the definition as a whole.
fn validate_hoisted(
    first: &Value,
    versions: &[Value],
    old: Option<&Value>,
    hoisted: &Hoisted,
    path: &Path,
) -> FieldErrors {
    let mut errors = Vec::new();
    let schema = &first["schema"]["openAPIV3Schema"];
    if hoisted.schema && schema.is_object() {
        let path = path.child("validation").child("openAPIV3Schema");
        let unchanged = is_unchanged(first, old);
        let any_status = versions.iter().any(has_status);
        errors.extend(crate::custom::spec::validate_schema(schema, &path, any_status, unchanged));
    }
    if hoisted.subresources {
        errors.extend(validate_subresources(&first["subresources"], &path.child("subresources")));
    }
    if hoisted.columns {
        let columns = list(first, "additionalPrinterColumns");
        errors.extend(validate_columns(columns, &path.child("additionalPrinterColumns")));
    }
    if hoisted.selectable {
        let path = path.child("selectableFields");
        let fields = list(first, "selectableFields");
        errors.extend(crate::custom::spec::validate_selectable(fields, schema, &path));
    }
    errors
}

fn deprecation_problems(deprecated: bool, warning: &str) -> Vec<String> {
    if !deprecated {
        return vec!["can only be set for deprecated versions".to_owned()];
    }
    let mut problems = Vec::new();
    if warning.len() > 256 {
        problems.push("must be <= 256 characters long".to_owned());
    }
    if warning.is_empty() {
        problems.push("must not be an empty string".to_owned());
    }
    if let Some((at, _)) = warning.char_indices().find(|(_, c)| c.is_control()) {
        problems.push(format!(
            "must only contain printable UTF-8 characters; non-printable character found at index {at}"
        ));
    }
    problems
}

fn validate_version_list(spec: &Value, hoisted: &Hoisted, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let versions = list(spec, "versions");
    let at = path.child("versions");
    let shown = versions.iter().map(|version| hoisted.shown(version)).collect::<Vec<_>>().join(",");
    let shown = if present(spec, "versions") { format!("[{shown}]") } else { "null".to_owned() };
    let mut complain = |why: &str| {
        errors.push(FieldError::invalid(&at, json!([]), why).rendered_as(&*shown));
    };
    let mut names = HashSet::new();
    if !versions.iter().all(|version| names.insert(text(version, "name"))) {
        complain("must contain unique version names");
    }
    if versions.iter().filter(|v| flag(v, "storage")).count() != 1 {
        complain("must have exactly one version marked as storage version");
    }
    if let Some(first) = versions.first() {
        let name = text(first, "name");
        let problems = dns1035_label(name);
        if !name.is_empty() && !problems.is_empty() {
            errors.push(FieldError::invalid(&path.child("version"), name, problems.join(",")));
        }
    }
    errors
}

fn validate_simple_path(given: &str, path: &Path) -> Option<FieldError> {
    (!given.starts_with('.'))
        .then(|| FieldError::invalid(path, given, "must be a simple json path starting with ."))
}

fn validate_subresources(subresources: &Value, path: &Path) -> FieldErrors {
    let Some(scale) = subresources.get("scale").filter(|scale| scale.is_object()) else { return Vec::new() };
    let mut errors = Vec::new();
    for (key, roots, why) in [
        ("specReplicasPath", &[".spec."][..], "should be a json path under .spec"),
        ("statusReplicasPath", &[".status."][..], "should be a json path under .status"),
        (
            "labelSelectorPath",
            &[".spec.", ".status."][..],
            "should be a json path under either .spec or .status",
        ),
    ] {
        let given = text(scale, key);
        let path = path.child(&format!("scale.{key}"));
        if given.is_empty() {
            if key != "labelSelectorPath" {
                errors.push(FieldError::required(&path, ""));
            }
        } else if let Some(error) = validate_simple_path(given, &path) {
            errors.push(error);
        } else if !roots.iter().any(|root| given.starts_with(root)) {
            errors.push(FieldError::invalid(&path, given, why));
        }
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
        let given = text(column, "jsonPath");
        let path = path.child("JSONPath");
        errors.extend(match given {
            "" => Some(FieldError::required(&path, "")),
            given => validate_simple_path(given, &path),
        });
    }
    errors
}

fn validate_names(names: &Value, path: &Path) -> FieldErrors {
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
    let labels = |key: &str| {
        strings(names, key)
            .into_iter()
            .enumerate()
            .filter_map(|(index, name)| {
                let problems = dns1035_label(name);
                let path = path.child(key).index(index);
                (!problems.is_empty()).then(|| FieldError::invalid(&path, name, problems.join(",")))
            })
            .collect::<Vec<_>>()
    };
    errors.extend(labels("shortNames"));
    let (kind, list_kind) = (text(names, "kind"), text(names, "listKind"));
    if !kind.is_empty() && kind == list_kind {
        errors.push(FieldError::invalid(
            &path.child("listKind"),
            list_kind,
            "kind and listKind may not be the same",
        ));
    }
    errors.extend(labels("categories"));
    errors
}

fn validate_conversion(conversion: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let strategy = text(conversion, "strategy");
    match strategy {
        "None" | "Webhook" => {}
        "" => errors.push(FieldError::required(&path.child("strategy"), "")),
        other => {
            errors.push(FieldError::not_supported(&path.child("strategy"), other, &["None", "Webhook"]));
        }
    }
    // As upstream: the fields are those of its internal form.
    let (config_path, versions_path) =
        (path.child("webhookClientConfig"), path.child("conversionReviewVersions"));
    let config = object(&conversion["webhook"], "clientConfig");
    let versions = strings(&conversion["webhook"], "conversionReviewVersions");
    if strategy != "Webhook" {
        let unwanted = [(config.is_some(), &config_path), (!versions.is_empty(), &versions_path)];
        let unwanted = unwanted.into_iter().filter(|(set, _)| *set);
        let why = "should not be set when strategy is not set to Webhook";
        errors.extend(unwanted.map(|(_, path)| FieldError::forbidden(path, why)));
        return errors;
    }
    match config {
        None => {
            errors.push(FieldError::required(&config_path, "required when strategy is set to Webhook"));
        }
        Some(config) => errors.extend(validate_client_config(config, &config_path)),
    }
    if versions.is_empty() {
        errors.push(FieldError::required(&versions_path, ""));
    } else {
        errors.extend(validate_review_versions(&versions, &versions_path));
    }
    errors
}
