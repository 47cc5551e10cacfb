//! PersistentVolumes.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    default_field, default_text, ensure_object, keep, list, map, object, object_mut, present, remove, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, immutable, named, named_if_set, one_of_if_set};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown, wide};
use crate::kinds::common::volume_source::{
    access_modes_cell, default_source, validate_access_modes, validate_iscsi, validate_source,
    validate_volume_mode,
};
use crate::kinds::core::pod::defaults::default_resource_list;
use crate::kinds::core::pod::resources::amounts;
use crate::kinds::core::pod::validate_node_selector;
use crate::meta_validation::{dns1123_label, dns1123_subdomain};
use crate::resource::{Column, MetadataUse, Strategy};
use ferrite_json::{Value, json};
use jiff::Timestamp;

/// The keys of a specification that say where the volume is.
const SOURCES: &[&str] = &[
    "hostPath",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "glusterfs",
    "flocker",
    "nfs",
    "rbd",
    "quobyte",
    "cephfs",
    "iscsi",
    "cinder",
    "fc",
    "flexVolume",
    "azureFile",
    "vsphereVolume",
    "photonPersistentDisk",
    "portworxVolume",
    "azureDisk",
    "scaleIO",
    "local",
    "storageos",
    "csi",
];

const EXPAND_SECRET: &str = "controllerExpandSecretRef";

pub(in crate::kinds) struct PersistentVolumes;

impl Strategy for PersistentVolumes {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::ContentTwice
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_text(spec, "persistentVolumeReclaimPolicy", "Retain");
        default_field(spec, "volumeMode", "Filesystem");
        if let Some(capacity) = spec.get_mut("capacity") {
            default_resource_list(capacity);
        }
        for kind in SOURCES {
            if let Some(source) = object_mut(spec, kind) {
                default_source(kind, source);
            }
        }
        default_text(ensure_object(object, "status"), "phase", "Pending");
    }

    fn prepare_create(&self, object: &mut Value) {
        object["status"] = json!({
            "phase": "Pending",
            "lastPhaseTransitionTime": object["metadata"]["creationTimestamp"],
        });
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        const CHANGED: &str = "lastPhaseTransitionTime";
        let (is, was) = (&new["status"], &old["status"]);
        let moved = text(is, "phase") != text(was, "phase");
        if moved && (is[CHANGED].is_null() || is[CHANGED] == was[CHANGED]) {
            let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
            ensure_object(new, "status")[CHANGED] = now.to_string().into();
        } else if is[CHANGED].is_null() && !was[CHANGED].is_null() {
            let since = was[CHANGED].clone();
            ensure_object(new, "status")[CHANGED] = since;
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = validate_volume(object);
        errors.extend(validate_mount_options(object));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        // As upstream: the volume is validated as a new one, and again as a change.
        let mut errors = self.validate(new);
        errors.extend(validate_volume(new));
        let (is, was) = (&new["spec"], &old["spec"]);
        let sources = |spec: &Value| -> Value {
            SOURCES.iter().filter_map(|kind| Some((*kind, object(spec, kind)?.clone()))).collect()
        };
        let (mut after, before) = (sources(is), sources(was));
        // The secret for growing a volume may be set later.
        if present(&after, "csi") && present(&before, "csi") && !present(&before["csi"], EXPAND_SECRET) {
            remove(&mut after["csi"], EXPAND_SECRET);
        }
        if after != before {
            let difference = go::diff(&go::volume_source(&before), &go::volume_source(&after));
            errors.push(FieldError::forbidden(
                &Path::new("spec").child("persistentvolumesource"),
                format!("spec.persistentvolumesource is immutable after creation\n{difference}"),
            ));
        }
        errors.extend(immutable(&is["volumeMode"], &was["volumeMode"], &Path::new("volumeMode")));
        if was["nodeAffinity"].is_object() && is["nodeAffinity"] != was["nodeAffinity"] {
            errors.push(FieldError::invalid(
                &Path::new("nodeAffinity"),
                is["nodeAffinity"].clone(),
                "field is immutable, except for updating from beta label to GA",
            ));
        }
        if present(was, "volumeAttributesClassName") && !present(is, "volumeAttributesClassName") {
            errors.push(FieldError::forbidden(
                &Path::new("spec").child("volumeAttributesClassName"),
                "update from non-nil value to nil is forbidden",
            ));
        }
        errors
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        let mut warnings = Vec::new();
        let annotations = map(&object["metadata"], "annotations");
        for (key, since, instead) in [
            ("volume.beta.kubernetes.io/storage-class", "v1.8", "storageClassName"),
            (MOUNT_OPTIONS, "v1.31", "mountOptions"),
        ] {
            if annotations.is_some_and(|a| a.contains_key(key)) {
                warnings.push(format!(
                    "metadata.annotations[{key}]: deprecated since {since}; use {instead:?} attribute instead"
                ));
            }
        }
        if text(&object["spec"], "persistentVolumeReclaimPolicy") == "Recycle" {
            warnings.push(
                "spec.persistentVolumeReclaimPolicy: The Recycle reclaim policy is deprecated. Instead, the \
                 recommended approach is to use dynamic provisioning."
                    .to_owned(),
            );
        }
        for (key, when) in [
            ("cephfs", "deprecated in v1.28, non-functional in v1.31+"),
            ("photonPersistentDisk", "deprecated in v1.11, non-functional in v1.16+"),
            ("scaleIO", "deprecated in v1.16, non-functional in v1.22+"),
            ("storageos", "deprecated in v1.22, non-functional in v1.25+"),
            ("glusterfs", "deprecated in v1.25, non-functional in v1.26+"),
            ("rbd", "deprecated in v1.28, non-functional in v1.31+"),
        ] {
            if present(&object["spec"], key) {
                let shown = match key {
                    "cephfs" => "cephFS",
                    "storageos" => "storageOS",
                    other => other,
                };
                warnings.push(format!("spec.{shown}: {when}"));
            }
        }
        warnings
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Capacity"),
                shown("Access Modes"),
                shown("Reclaim Policy"),
                shown("Status"),
                shown("Claim"),
                shown("StorageClass"),
                shown("VolumeAttributesClass"),
                shown("Reason"),
                shown("Age"),
                wide("VolumeMode"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let claim = match &spec["claimRef"] {
            Value::Object(_) => {
                format!("{}/{}", text(&spec["claimRef"], "namespace"), text(&spec["claimRef"], "name"))
            }
            _ => String::new(),
        };
        let phase = if crate::meta::is_deleting(object) { "Terminating" } else { text(status, "phase") };
        let class =
            match object["metadata"]["annotations"]["volume.beta.kubernetes.io/storage-class"].as_str() {
                Some(class) => class,
                None => text(spec, "storageClassName"),
            };
        vec![
            cell::name(object),
            cell::text_or(&spec["capacity"], "storage", "0"),
            access_modes_cell(list(spec, "accessModes")).into(),
            text(spec, "persistentVolumeReclaimPolicy").into(),
            phase.into(),
            claim.into(),
            class.into(),
            cell::text_or(spec, "volumeAttributesClassName", "<unset>"),
            text(status, "reason").into(),
            cell::age(object, now),
            cell::text_or(spec, "volumeMode", "<unset>"),
        ]
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

/// Validates the specification of a volume a VolumeAttachment carries itself: a CSI source and little else.
pub(in crate::kinds) fn validate_inline(spec: &Value, path: &Path) -> FieldErrors {
    const NOT_INLINE: &str = "may not be specified in the context of inline volumes";
    let mut errors = Vec::new();
    let forbid = |key: &str, why: &str| FieldError::forbidden(&path.child(key), why);
    if present(spec, "claimRef") {
        errors.push(forbid("claimRef", NOT_INLINE));
    }
    if map(spec, "capacity").is_some_and(|c| !c.is_empty()) {
        errors.push(forbid("capacity", NOT_INLINE));
    }
    if !spec["csi"].is_object() {
        errors.push(FieldError::required(
            &path.child("csi"),
            "has to be specified in the context of inline volumes",
        ));
    }
    if list(spec, "accessModes").is_empty() {
        errors.push(FieldError::required(&path.child("accessModes"), ""));
    }
    errors.extend(validate_access_modes(spec, path));
    if !matches!(text(spec, "persistentVolumeReclaimPolicy"), "" | "Retain") {
        let why = "may only be Retain in the context of inline volumes";
        errors.push(forbid("persistentVolumeReclaimPolicy", why));
    }
    if present(spec, "nodeAffinity") {
        errors.push(forbid("nodeAffinity", NOT_INLINE));
    }
    errors.extend(validate_one_source(spec, "", false, path));
    if !text(spec, "storageClassName").is_empty() {
        errors.push(forbid("storageClassName", NOT_INLINE));
    }
    if spec["volumeMode"].as_str().is_some_and(|mode| mode != "Filesystem") {
        let why = "may not specify volumeMode other than Filesystem in the context of inline volumes";
        errors.push(forbid("volumeMode", why));
    }
    errors
}

fn validate_volume(volume: &Value) -> FieldErrors {
    validate_spec(&volume["spec"], crate::meta::name(volume), &Path::new("spec"))
}

const MOUNT_OPTIONS: &str = "volume.beta.kubernetes.io/mount-options";

/// Sources of volumes that are mounted with the options of an annotation.
const MOUNTED_WITH_OPTIONS: [&str; 13] = [
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "glusterfs",
    "nfs",
    "rbd",
    "quobyte",
    "iscsi",
    "cinder",
    "cephfs",
    "azureFile",
    "vsphereVolume",
    "azureDisk",
    "photonPersistentDisk",
];

fn validate_mount_options(volume: &Value) -> Option<FieldError> {
    let annotated = map(&volume["metadata"], "annotations").is_some_and(|a| a.contains_key(MOUNT_OPTIONS));
    let mounted = MOUNTED_WITH_OPTIONS.iter().any(|kind| object(&volume["spec"], kind).is_some());
    (annotated && !mounted).then(|| {
        let path = Path::new("metadata").child("annotations").child(MOUNT_OPTIONS);
        FieldError::forbidden(&path, "may not specify mount options for this volume type")
    })
}

fn validate_spec(spec: &Value, name: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if list(spec, "accessModes").is_empty() {
        errors.push(FieldError::required(&path.child("accessModes"), ""));
    }
    errors.extend(validate_access_modes(spec, path));
    errors.extend(validate_capacity(spec, &path.child("capacity")));
    let policy = text(spec, "persistentVolumeReclaimPolicy");
    if !policy.is_empty() {
        errors.extend(one_of_if_set(
            spec,
            "persistentVolumeReclaimPolicy",
            path,
            &["Delete", "Recycle", "Retain"],
        ));
    }
    let affinity = object(spec, "nodeAffinity");
    if let Some(affinity) = affinity {
        let path = path.child("nodeAffinity").child("required");
        match object(affinity, "required") {
            Some(required) => errors.extend(validate_node_selector(required, &path)),
            None => errors.push(FieldError::required(&path, "must specify required node constraints")),
        }
    }
    errors.extend(validate_one_source(spec, name, affinity.is_some(), path));
    let is_root = |path: &str| path.starts_with('/') && path.split('/').all(|p| matches!(p, "" | "." | ".."));
    let root = object(spec, "hostPath").is_some_and(|h| is_root(text(h, "path")));
    if root && policy == "Recycle" {
        errors.push(FieldError::forbidden(
            &path.child("persistentVolumeReclaimPolicy"),
            "may not be 'recycle' for a hostPath mount of '/'",
        ));
    }
    errors.extend(named_if_set(spec, "storageClassName", path, dns1123_subdomain));
    errors.extend(validate_volume_mode(spec, path));
    if let Some(class) = spec["volumeAttributesClassName"].as_str() {
        let csi = path.child("csi");
        let path = path.child("volumeAttributesClassName");
        if class.is_empty() {
            errors.push(FieldError::required(&path, "an empty string is disallowed"));
        } else {
            errors.extend(complaints(&path, class, dns1123_subdomain(class)));
        }
        if !spec["csi"].is_object() {
            errors
                .push(FieldError::required(&csi, "has to be specified when using volumeAttributesClassName"));
        }
    }
    errors
}

fn validate_capacity(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let capacity = map(spec, "capacity").filter(|c| !c.is_empty());
    if capacity.is_none() {
        errors.push(FieldError::required(path, ""));
    }
    if capacity.is_none_or(|c| c.len() > 1 || !c.contains_key("storage")) {
        let given = spec["capacity"].clone();
        errors.push(FieldError::not_supported(path, given, &["storage"]));
    }
    for (name, amount) in amounts(spec, "capacity") {
        let path = path.key(&name);
        if amount.is_negative() {
            errors.push(FieldError::invalid(&path, amount.value(), "must be a valid resource quantity"));
        }
        if amount.is_negative() || amount.is_zero() {
            errors.push(FieldError::invalid(&path, amount.to_string(), "must be greater than zero"));
        }
    }
    errors
}

fn validate_one_source(spec: &Value, name: &str, has_affinity: bool, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut given = 0;
    for kind in SOURCES.iter().filter(|kind| present(spec, kind)) {
        let source = &spec[*kind];
        given += 1;
        // As upstream: some have one name here and another there.
        if given > 1 && *kind != "flexVolume" {
            let shown = if *kind == "cephfs" { "cephFS" } else { kind };
            errors.push(FieldError::forbidden(&path.child(shown), "may not specify more than 1 volume type"));
            continue;
        }
        let path_of = path.child(if *kind == "gcePersistentDisk" { "persistentDisk" } else { kind });
        match *kind {
            "csi" => errors.extend(validate_csi(source, &path_of)),
            "iscsi" => errors.extend(validate_iscsi(source, Some(name), &path_of)),
            "azureFile" => {
                errors.extend(validate_source(kind, source, &path_of));
                if source["secretNamespace"].as_str() == Some("") {
                    errors.push(FieldError::required(&path_of.child("secretNamespace"), ""));
                }
            }
            "glusterfs" => {
                errors.extend(validate_source(kind, source, &path_of));
                let namespace_path = path_of.child("endpointsNamespace");
                match source["endpointsNamespace"].as_str() {
                    Some("") => errors.push(FieldError::invalid(
                        &namespace_path,
                        "",
                        "if the endpointnamespace is set, it must be a valid namespace name",
                    )),
                    Some(name) => errors.extend(complaints(&namespace_path, name, dns1123_label(name))),
                    None => {}
                }
            }
            "cinder" | "storageos" => {
                errors.extend(validate_source(kind, source, &path_of));
                if object(source, "secretRef").is_some_and(|s| text(s, "namespace").is_empty()) {
                    let path = path_of.child("secretRef").child("namespace");
                    errors.push(FieldError::required(&path, ""));
                }
            }
            _ => errors.extend(validate_source(kind, source, &path_of)),
        }
        if *kind == "local" && !has_affinity {
            errors.push(FieldError::required(
                &path.child("nodeAffinity"),
                "Local volume requires node affinity",
            ));
        }
    }
    if given == 0 {
        errors.push(FieldError::required(path, "must specify a volume type"));
    }
    errors
}

fn validate_csi(source: &Value, path: &Path) -> FieldErrors {
    let mut errors = crate::kinds::common::volume_source::validate_driver_name(
        text(source, "driver"),
        &path.child("driver"),
    );
    if text(source, "volumeHandle").is_empty() {
        errors.push(FieldError::required(&path.child("volumeHandle"), ""));
    }
    for key in [
        "controllerPublishSecretRef",
        "controllerExpandSecretRef",
        "nodePublishSecretRef",
        "nodeExpandSecretRef",
    ] {
        let Some(reference) = object(source, key) else { continue };
        let path = path.child(key);
        errors.extend(named(reference, "name", &path, dns1123_subdomain));
        errors.extend(named(reference, "namespace", &path, dns1123_label));
    }
    errors
}
