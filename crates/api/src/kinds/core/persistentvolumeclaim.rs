//! PersistentVolumeClaims.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    default_field, default_text, ensure_object, keep, list, map, object, present, remove, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, complaints, immutable, named_if_set};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown, wide};
use crate::kinds::common::volume_source::{access_modes_cell, validate_access_modes, validate_volume_mode};
use crate::kinds::core::pod::defaults::default_resource_list;
use crate::kinds::core::pod::resources::{amounts, is_native};
use crate::meta_validation::{dns1123_subdomain, qualified_name};
use crate::quantity::Quantity;
use crate::resource::{Column, MetadataUse, Strategy};
use crate::selector::validate_label_selector;
use ferrite_json::{Value, json};
use jiff::Timestamp;

const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";

pub(in crate::kinds) struct PersistentVolumeClaims;

impl Strategy for PersistentVolumeClaims {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        default_claim_spec(ensure_object(object, "spec"));
        let status = ensure_object(object, "status");
        default_text(status, "phase", "Pending");
        for key in ["capacity", "allocatedResources"] {
            if let Some(amounts) = status.get_mut(key) {
                default_resource_list(amounts);
            }
        }
    }

    fn prepare_create(&self, object: &mut Value) {
        object["status"] = json!({"phase": "Pending"});
        let spec = ensure_object(object, "spec");
        drop_foreign_source(spec);
        drop_unknown_source(spec);
        copy_data_source(spec);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
        let spec = ensure_object(new, "spec");
        if !present(&old["spec"], "dataSourceRef") {
            drop_foreign_source(spec);
        }
        if !["dataSource", "dataSourceRef"].iter().any(|key| present(&old["spec"], key)) {
            drop_unknown_source(spec);
        }
        copy_data_source(spec);
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        validate_claim_spec(&object["spec"], &Path::new("spec"))
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        errors.extend(validate_change(new, old));
        errors.extend(immutable(
            &new["spec"]["volumeMode"],
            &old["spec"]["volumeMode"],
            &Path::new("volumeMode"),
        ));
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let path = Path::new("status");
        let mut errors = Vec::new();
        if list(&new["spec"], "accessModes").is_empty() {
            errors.push(FieldError::required(&Path::new("Spec").child("accessModes"), ""));
        }
        errors.extend(negative_amounts(&new["status"], "capacity", &path));
        for (name, state) in map(&new["status"], "allocatedResourceStatuses").into_iter().flatten() {
            const STATES: &[&str] = &[
                "ControllerResizeInProgress",
                "ControllerResizeInfeasible",
                "NodeResizeInProgress",
                "NodeResizeInfeasible",
                "NodeResizePending",
            ];
            let path = path.child("allocatedResourceStatuses");
            errors.extend(resource_key(name, &path));
            if !state.as_str().is_some_and(|state| STATES.contains(&state)) {
                let mut states = STATES.to_vec();
                states.sort_unstable();
                errors.push(FieldError::not_supported(&path, name.as_str(), &states));
            }
        }
        let allocated = path.child("allocatedResources");
        for (name, _) in amounts(&new["status"], "allocatedResources") {
            errors.extend(resource_key(&name, &allocated));
        }
        errors.extend(negative_amounts(&new["status"], "allocatedResources", &path));
        errors
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        let mut warnings = Vec::new();
        if map(&object["metadata"], "annotations").is_some_and(|a| a.contains_key(CLASS_ANNOTATION)) {
            warnings.push(format!(
                "metadata.annotations[{CLASS_ANNOTATION}]: deprecated since v1.8; use \"storageClassName\" attribute instead"
            ));
        }
        warnings.extend(claim_spec_warnings(&object["spec"], &Path::new("spec")));
        warnings
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Status"),
                shown("Volume"),
                shown("Capacity"),
                shown("Access Modes"),
                shown("StorageClass"),
                shown("VolumeAttributesClass"),
                shown("Age"),
                wide("VolumeMode"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let phase = if crate::meta::is_deleting(object) { "Terminating" } else { text(status, "phase") };
        // A claim's capacity is known once it is bound.
        let (mut capacity, mut modes) = (Value::from(""), String::new());
        if !text(spec, "volumeName").is_empty() {
            capacity = cell::text_or(&status["capacity"], "storage", "0");
            modes = access_modes_cell(list(status, "accessModes"));
        }
        let class = match object["metadata"]["annotations"][CLASS_ANNOTATION].as_str() {
            Some(class) => class,
            None => text(spec, "storageClassName"),
        };
        vec![
            cell::name(object),
            phase.into(),
            text(spec, "volumeName").into(),
            capacity,
            modes.into(),
            class.into(),
            cell::text_or(spec, "volumeAttributesClassName", "<unset>"),
            cell::age(object, now),
            cell::text_or(spec, "volumeMode", "<unset>"),
        ]
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

/// Defaults of a claim's specification, also in templates of claims.
pub(in crate::kinds) fn default_claim_spec(spec: &mut Value) {
    default_field(spec, "volumeMode", "Filesystem");
    for kind in ["limits", "requests"] {
        if let Some(amounts) = ensure_object(spec, "resources").get_mut(kind) {
            default_resource_list(amounts);
        }
    }
}

/// The older field knows two kinds of sources; others are ignored, as they always were. A client that sets the newer
/// field, too, is told of them.
fn drop_unknown_source(spec: &mut Value) {
    if present(spec, "dataSourceRef") {
        return;
    }
    let known = object(spec, "dataSource").is_none_or(|source| {
        matches!(
            (text(source, "apiGroup"), text(source, "kind")),
            ("", "PersistentVolumeClaim") | ("snapshot.storage.k8s.io", "VolumeSnapshot")
        )
    });
    if !known {
        remove(spec, "dataSource");
    }
}

/// The older and the newer field for where the content comes from say the same.
fn copy_data_source(spec: &mut Value) {
    let (source, reference) = (object(spec, "dataSource").cloned(), object(spec, "dataSourceRef").cloned());
    match (source, reference) {
        (Some(source), None) => spec["dataSourceRef"] = source,
        (None, Some(mut reference)) if text(&reference, "namespace").is_empty() => {
            remove(&mut reference, "namespace");
            spec["dataSource"] = reference;
        }
        _ => {}
    }
}

/// Claims in other namespaces are a feature that is off: a source there is as if it had not been said.
fn drop_foreign_source(spec: &mut Value) {
    if !text(&spec["dataSourceRef"], "namespace").is_empty() {
        remove(spec, "dataSourceRef");
    }
}

/// The resource names of a claim: of native names only `storage`.
fn resource_key(name: &str, path: &Path) -> FieldErrors {
    let mut errors = complaints(path, name, qualified_name(name));
    if errors.is_empty() && is_native(name) && name != "storage" {
        errors.push(FieldError::not_supported(path, name, &["storage"]));
    }
    errors
}

fn negative_amounts(status: &Value, key: &str, path: &Path) -> FieldErrors {
    let path = path.child(key);
    let known = |name: &str| key == "capacity" || resource_key(name, &path).is_empty();
    amounts(status, key)
        .into_iter()
        .filter(|(name, amount)| amount.is_negative() && known(name))
        .map(|(name, amount)| {
            FieldError::invalid(&path.key(&name), amount.value(), "must be a valid resource quantity")
        })
        .collect()
}

/// Bytes are not divided.
pub(in crate::kinds) fn claim_spec_warnings(spec: &Value, path: &Path) -> Vec<String> {
    ["requests", "limits"]
        .into_iter()
        .filter_map(|kind| {
            let amount = *amounts(&spec["resources"], kind).get("storage")?;
            let place = path.child("resources").child(kind).key("storage");
            (!amount.is_integer()).then(|| {
                format!("{place}: fractional byte value \"{amount}\" is invalid, must be an integer")
            })
        })
        .collect()
}

/// Validates a claim's specification, also in templates of claims.
pub(in crate::kinds) fn validate_claim_spec(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if list(spec, "accessModes").is_empty() {
        errors.push(FieldError::required(&path.child("accessModes"), "at least 1 access mode is required"));
    }
    if present(spec, "selector") {
        errors.extend(validate_label_selector(&spec["selector"], &path.child("selector")));
    }
    errors.extend(validate_access_modes(spec, path));
    let storage = path.child("resources").key("storage");
    match amounts(&spec["resources"], "requests").get("storage") {
        None => errors.push(FieldError::required(&storage, "")),
        Some(amount) if amount.is_negative() || amount.is_zero() => {
            errors.push(FieldError::invalid(&storage, amount.to_string(), "must be greater than zero"));
        }
        Some(_) => {}
    }
    errors.extend(named_if_set(spec, "storageClassName", path, dns1123_subdomain));
    errors.extend(validate_volume_mode(spec, path));
    errors.extend(validate_data_sources(spec, path));
    errors.extend(named_if_set(spec, "volumeAttributesClassName", path, dns1123_subdomain));
    errors
}

fn validate_data_sources(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (source, reference) = (object(spec, "dataSource"), object(spec, "dataSourceRef"));
    for (key, found) in [("dataSource", source), ("dataSourceRef", reference)] {
        let (Some(found), path) = (found, path.child(key)) else { continue };
        for part in ["name", "kind"] {
            if text(found, part).is_empty() {
                errors.push(FieldError::required(&path.child(part), ""));
            }
        }
        let (group, kind) = (text(found, "apiGroup"), text(found, "kind"));
        if group.is_empty() && kind != "PersistentVolumeClaim" {
            errors.push(FieldError::invalid(
                &path,
                kind,
                "must be 'PersistentVolumeClaim' when referencing the default apiGroup",
            ));
        }
        if !group.is_empty() {
            errors.extend(complaints(&path.child("apiGroup"), group, dns1123_subdomain(group)));
        }
    }
    // As upstream: the value that is shown is a path, of which nothing can be shown.
    match (source, reference) {
        (Some(_), Some(reference)) if !text(reference, "namespace").is_empty() => {
            errors.push(FieldError::invalid(
                path,
                json!({}),
                "may not be specified when dataSourceRef.namespace is specified",
            ));
        }
        (Some(source), Some(reference)) => {
            // As upstream: an empty group is not the same as none.
            let group = |from: &Value| from["apiGroup"].as_str().map(str::to_owned);
            let same = group(source) == group(reference)
                && ["kind", "name"].iter().all(|k| text(source, k) == text(reference, k));
            if !same {
                errors.push(FieldError::invalid(path, json!({}), "must match dataSourceRef"));
            }
        }
        _ => {}
    }
    errors
}

fn requested(spec: &Value) -> Quantity {
    amounts(&spec["resources"], "requests").get("storage").copied().unwrap_or_else(nothing)
}

fn nothing() -> Quantity {
    Quantity::from_value(0, crate::quantity::Format::DecimalSi)
}

/// A claim keeps its requests: only a bound one may ask for more, or for another class of attributes.
fn validate_change(new: &Value, old: &Value) -> FieldErrors {
    let mut errors = Vec::new();
    let (mut is, mut was) = (new["spec"].clone(), old["spec"].clone());
    if text(&was, "volumeName").is_empty() {
        keep(&mut was, &is, "volumeName");
    }
    // A claim without a class may be given the default one, once.
    let annotated =
        |claim: &Value| claim["metadata"]["annotations"][CLASS_ANNOTATION].as_str().map(str::to_owned);
    let unclassed = !present(&was, "storageClassName") && present(&is, "storageClassName");
    let (class, class_before) = (annotated(new), annotated(old));
    let named = text(&is, "storageClassName").to_owned();
    let upgrades = unclassed
        && class_before.as_ref() == Some(&named)
        && class.as_ref().is_none_or(|class| *class == named);
    if unclassed && class_before.as_ref().is_none_or(|class| *class == named) {
        remove(&mut is, "storageClassName");
    }
    if !upgrades && class.clone().unwrap_or_default() != class_before.unwrap_or_default() {
        errors.push(FieldError::invalid(
            &Path::new("metadata").child("annotations").child(CLASS_ANNOTATION),
            class.unwrap_or_default(),
            IMMUTABLE,
        ));
    }
    let bound = text(&new["status"], "phase") == "Bound";
    if bound {
        if let Some(size) = was.pointer("/resources/requests/storage").cloned() {
            ensure_object(ensure_object(&mut is, "resources"), "requests")["storage"] = size;
        }
        keep(&mut is, &was, "volumeAttributesClassName");
    }
    if go::claim_spec(&is) != go::claim_spec(&was) {
        let diff = go::diff(&go::claim_spec(&was), &go::claim_spec(&is));
        errors.push(FieldError::forbidden(
            &Path::new("spec"),
            format!(
                "spec is immutable after creation except resources.requests and volumeAttributesClassName for \
                 bound claims\n{diff}"
            ),
        ));
    }
    let (size, before) = (requested(&new["spec"]), requested(&old["spec"]));
    let has = amounts(&old["status"], "capacity").get("storage").copied().unwrap_or_else(nothing);
    if size < before && size <= has {
        errors.push(FieldError::forbidden(
            &Path::new("spec").child("resources").child("requests").child("storage"),
            "field can not be less than status.capacity",
        ));
    }
    let class = |claim: &Value| claim["spec"]["volumeAttributesClassName"].as_str().map(str::to_owned);
    if class(new) != class(old) && present(&old["status"], "currentVolumeAttributesClassName") {
        let path = Path::new("spec").child("volumeAttributesClassName");
        let to = match class(new).as_deref() {
            None => Some("nil"),
            Some("") => Some("empty string"),
            Some(_) => None,
        };
        errors.extend(to.map(|to| {
            FieldError::forbidden(
                &path,
                format!(
                    "update to {to} is forbidden when status.currentVolumeAttributesClassName is not nil"
                ),
            )
        }));
    }
    errors
}
