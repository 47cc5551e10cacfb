//! Validation of volumes.

use super::containers::local_path;
use super::defaults::VOLUME_SOURCES;
use super::env::validate_downward_items;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::access::{int, list, object, present, text};
use crate::kinds::check::{complaints, one_of_if_set};
use crate::kinds::core::persistentvolumeclaim::validate_claim_spec;
use crate::meta_validation::{dns1123_label, dns1123_subdomain, validate_annotations, validate_labels};
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// A pod's volumes by name.
pub(super) type Volumes<'a> = HashMap<&'a str, &'a Value>;

const MODE_RANGE: &str = "must be a number between 0 and 0777 (octal), both inclusive";

/// Also answers the volumes that can be mounted, by name: as upstream, one with a fault is as good as none.
pub(super) fn validate_volumes<'a>(volumes: &'a [Value], path: &Path) -> (Volumes<'a>, FieldErrors) {
    let mut errors = Vec::new();
    let mut sound = Volumes::new();
    for (index, volume) in volumes.iter().enumerate() {
        let path = path.index(index);
        let name = text(volume, "name");
        let mut own = validate_source(volume, &path);
        if name.is_empty() {
            own.push(FieldError::required(&path.child("name"), ""));
        } else {
            own.extend(complaints(&path.child("name"), name, dns1123_label(name)));
        }
        if sound.contains_key(name) {
            own.push(FieldError::duplicate(&path.child("name"), name));
        }
        if own.is_empty() {
            sound.insert(name, volume);
        }
        errors.append(&mut own);
    }
    (sound, errors)
}

fn validate_source(volume: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut given = 0;
    for kind in VOLUME_SOURCES.iter().filter(|kind| present(volume, kind)) {
        let (source, path) = (&volume[*kind], path.child(kind));
        if given > 0 {
            errors.push(FieldError::forbidden(&path, "may not specify more than 1 volume type"));
            continue;
        }
        given += 1;
        let mut required = |keys: &[&str]| {
            for key in keys {
                if text(source, key).is_empty() {
                    errors.push(FieldError::required(&path.child(key), ""));
                }
            }
        };
        match *kind {
            "secret" => {
                required(&["secretName"]);
                errors.extend(validate_items(source, &path));
            }
            "configMap" => {
                required(&["name"]);
                errors.extend(validate_items(source, &path));
            }
            "downwardAPI" => {
                errors.extend(validate_mode(source, "defaultMode", &path));
                errors.extend(validate_downward_items(source, &path));
            }
            "projected" => errors.extend(validate_projected(source, &path)),
            "persistentVolumeClaim" => required(&["claimName"]),
            "image" => {
                errors.extend(one_of_if_set(
                    source,
                    "pullPolicy",
                    &path,
                    &["Always", "IfNotPresent", "Never"],
                ));
            }
            "emptyDir" => {
                let limit = source.get("sizeLimit").and_then(Value::as_str);
                if limit
                    .and_then(|l| crate::quantity::Quantity::parse(l).ok())
                    .is_some_and(|q| q.is_negative())
                {
                    errors.push(FieldError::forbidden(
                        &path.child("sizeLimit"),
                        "SizeLimit field must be a valid resource quantity",
                    ));
                }
            }
            "ephemeral" => errors.extend(validate_ephemeral(source, &path.child("volumeClaimTemplate"))),
            kind => errors.extend(super::super::volume_source::validate_source(kind, source, &path)),
        }
    }
    if given == 0 {
        errors.push(FieldError::required(path, "must specify a volume type"));
    }
    errors
}

/// A claim that is made with the pod: its metadata is labels and annotations, nothing that would identify it.
fn validate_ephemeral(source: &Value, path: &Path) -> FieldErrors {
    let Some(template) = object(source, "volumeClaimTemplate") else {
        return vec![FieldError::required(path, "")];
    };
    let metadata = &template["metadata"];
    let mut errors = validate_annotations(&metadata["annotations"], &path.child("annotations"));
    errors.extend(validate_labels(&metadata["labels"], &path.child("labels")));
    for key in ["name", "generateName", "namespace", "uid", "resourceVersion"] {
        if !text(metadata, key).is_empty() {
            errors.push(FieldError::forbidden(
                &path.child("metadata").child(key),
                "cannot be set for an ephemeral volume",
            ));
        }
    }
    errors.extend(validate_claim_spec(&template["spec"], &path.child("spec")));
    errors
}

pub(super) fn validate_mode(source: &Value, key: &str, path: &Path) -> Option<FieldError> {
    let mode = source.get(key)?.as_i64()?;
    (!(0..=0o777).contains(&mode)).then(|| FieldError::invalid(&path.child(key), mode, MODE_RANGE))
}

fn validate_items(source: &Value, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors = validate_mode(source, "defaultMode", path).into_iter().collect();
    for (index, item) in list(source, "items").iter().enumerate() {
        let path = path.child("items").index(index);
        if text(item, "key").is_empty() {
            errors.push(FieldError::required(&path.child("key"), ""));
        }
        let place = text(item, "path");
        if place.is_empty() {
            errors.push(FieldError::required(&path.child("path"), ""));
        }
        errors.extend(local_path_of_key(place, &path.child("path")));
        errors.extend(validate_mode(item, "mode", &path));
    }
    errors
}

/// Where a key is shown. Names beginning with `..` are the volume's own.
pub(super) fn local_path_of_key(value: &str, path: &Path) -> FieldErrors {
    let mut errors = local_path(value, path);
    if value.starts_with("..") && !value.starts_with("../") && value != ".." {
        errors.push(FieldError::invalid(path, value, "must not start with '..'"));
    }
    errors
}

/// Several sources in one volume. As upstream, paths that collide are named at the volume.
fn validate_projected(source: &Value, volume: &Path) -> FieldErrors {
    const KINDS: &[&str] = &[
        "secret",
        "configMap",
        "downwardAPI",
        "serviceAccountToken",
        "clusterTrustBundle",
        "podCertificate",
    ];
    let mut errors: FieldErrors = validate_mode(source, "defaultMode", volume).into_iter().collect();
    let mut places: HashSet<&str> = HashSet::new();
    for (index, part) in list(source, "sources").iter().enumerate() {
        let part_path = volume.child("sources").index(index);
        let given: Vec<&str> = KINDS.iter().copied().filter(|kind| object(part, kind).is_some()).collect();
        for kind in &given {
            let (source, path) = (&part[*kind], part_path.child(kind));
            let name = text(source, "name");
            let collide = |place: &str, shown: &str| {
                (!place.is_empty()).then(|| FieldError::invalid(volume, shown, "conflicting duplicate paths"))
            };
            match *kind {
                "secret" | "configMap" => {
                    if name.is_empty() {
                        errors.push(FieldError::required(&path.child("name"), ""));
                    }
                    errors.extend(validate_items(source, &path));
                    for place in list(source, "items").iter().map(|i| text(i, "path")) {
                        if !places.insert(place) {
                            errors.extend(collide(place, name));
                        }
                    }
                }
                "downwardAPI" => {
                    errors.extend(validate_downward_items(source, &path));
                    for place in list(source, "items").iter().map(|i| text(i, "path")) {
                        if !places.insert(place) {
                            errors.extend(collide(place, place));
                        }
                    }
                }
                "serviceAccountToken" => errors.extend(validate_token(source, &path, volume)),
                "clusterTrustBundle" => {
                    errors.extend(validate_trust_bundle(source, &path));
                    let place = text(source, "path");
                    if !places.insert(place) {
                        errors.extend(collide(place, place));
                    }
                }
                _ => {
                    for key in ["credentialBundlePath", "keyPath", "certificateChainPath"] {
                        let place = text(source, key);
                        errors.extend(local_path_of_key(place, &path.child(key)));
                        if !place.is_empty() && !places.insert(place) {
                            errors.extend(collide(place, place));
                        }
                    }
                }
            }
        }
        if given.len() > 1 {
            errors.push(FieldError::forbidden(
                &part_path,
                "may not specify more than 1 volume type per source",
            ));
        }
    }
    errors
}

fn validate_token(source: &Value, path: &Path, volume: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (seconds, path) = (int(source, "expirationSeconds"), path.child("expirationSeconds"));
    if seconds < 600 {
        errors.push(FieldError::invalid(&path, seconds, "may not specify a duration less than 10 minutes"));
    }
    if seconds > 1 << 32 {
        errors.push(FieldError::invalid(
            &path,
            seconds,
            "may not specify a duration larger than 2^32 seconds",
        ));
    }
    match text(source, "path") {
        "" => errors.push(FieldError::required(&volume.child("path"), "")),
        place => errors.extend(local_path_of_key(place, &volume.child("path"))),
    }
    errors
}

fn validate_trust_bundle(source: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    match (source["name"].as_str(), source["signerName"].as_str()) {
        (Some(name), None) => {
            if name.is_empty() {
                errors.push(FieldError::required(&path.child("name"), "must be a valid object name"));
            }
            let own = name.rsplit(':').next().unwrap_or_default();
            errors.extend(dns1123_subdomain(own).into_iter().map(|why| {
                FieldError::invalid(
                    &path.child("name"),
                    name,
                    format!("not a valid clustertrustbundlename: {why}"),
                )
            }));
        }
        (None, None) => {
            errors.push(FieldError::required(path, "either name or signerName must be specified"));
        }
        (Some(_), Some(_)) => errors.push(FieldError::invalid(
            path,
            source.clone(),
            "only one of name and signerName may be used",
        )),
        (None, Some(_)) => {}
    }
    if text(source, "path").is_empty() {
        errors.push(FieldError::required(&path.child("path"), ""));
    }
    errors.extend(local_path_of_key(text(source, "path"), &path.child("path")));
    errors
}
