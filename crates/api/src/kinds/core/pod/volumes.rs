//! Validation of volumes.

use super::containers::local_path;
use super::defaults::VOLUME_SOURCES;
use super::env::{validate_downward_item, validate_downward_items};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::certificates::certificatesigningrequest::validate_signer_name;
use crate::kinds::certificates::clustertrustbundle::name_problems;
use crate::kinds::certificates::podcertificaterequest::{SECONDS_MIN, longest, validate_user_annotations};
use crate::kinds::common::access::{int, list, object, present, text};
use crate::kinds::common::check::{complaints, one_of_if_set};
use crate::kinds::common::volume_source::{ISCSI_NAME_MAX, PORTAL_TOO_LONG, validate_iscsi};
use crate::kinds::common::workload::render_selector;
use crate::kinds::core::persistentvolumeclaim::validate_claim_spec;
use crate::meta_validation::{dns1123_label, dns1123_subdomain, validate_annotations, validate_labels};
use crate::selector::validate_label_selector;
use ferrite_json::Value;
use std::collections::{HashMap, HashSet};

/// A pod's volumes by name.
pub(super) type Volumes<'a> = HashMap<&'a str, &'a Value>;

const MODE_RANGE: &str = "must be a number between 0 and 0777 (octal), both inclusive";

/// Also answers the volumes that can be mounted, by name: as upstream, one with a fault is as good as none.
/// The name of the pod, where it is known, tells the names of the claims that are made with it.
pub(super) fn validate_volumes<'a>(
    volumes: &'a [Value],
    pod: Option<&str>,
    path: &Path,
) -> (Volumes<'a>, FieldErrors) {
    let mut errors = Vec::new();
    let mut sound = Volumes::new();
    let made: HashSet<String> = volumes
        .iter()
        .filter(|volume| present(volume, "ephemeral"))
        .filter_map(|volume| Some(format!("{}-{}", pod?, text(volume, "name"))))
        .collect();
    for (index, volume) in volumes.iter().enumerate() {
        let path = path.index(index);
        let name = text(volume, "name");
        let mut own = validate_source(volume, pod, &path);
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
        let claim = text(&volume["persistentVolumeClaim"], "claimName");
        if made.contains(claim) {
            errors.push(FieldError::invalid(
                &path.child("persistentVolumeClaim").child("claimName"),
                claim,
                "must not reference a PVC that gets created for an ephemeral volume",
            ));
        }
    }
    (sound, errors)
}

fn validate_source(volume: &Value, pod: Option<&str>, volume_path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut given = 0;
    for kind in VOLUME_SOURCES.iter().filter(|kind| present(volume, kind)) {
        let source = &volume[*kind];
        if given > 0 {
            // As upstream: some have one name here and another there.
            let shown = match *kind {
                "cephfs" => "cephFS",
                "downwardAPI" => "downwarAPI",
                kind => kind,
            };
            errors.push(FieldError::forbidden(
                &volume_path.child(shown),
                "may not specify more than 1 volume type",
            ));
            errors.extend((*kind == "iscsi").then(|| long_portal(volume, volume_path)).flatten());
            continue;
        }
        given += 1;
        let path = volume_path.child(if *kind == "gcePersistentDisk" { "persistentDisk" } else { kind });
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
                required(&["reference"]);
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
            "ephemeral" => {
                errors.extend(validate_ephemeral(source, &path.child("volumeClaimTemplate")));
                errors.extend(validate_claim_name(text(volume, "name"), pod, volume_path));
            }
            "gitRepo" => {
                required(&["repository"]);
                errors.extend(local_path(text(source, "directory"), &path.child("directory")));
            }
            "iscsi" => {
                errors.extend(validate_iscsi(source, None, &path));
                errors.extend(long_portal(volume, volume_path));
            }
            kind => errors.extend(crate::kinds::common::volume_source::validate_source(kind, source, &path)),
        }
    }
    if given == 0 {
        errors.push(FieldError::required(volume_path, "must specify a volume type"));
    }
    errors
}

/// With its own initiator a volume's name becomes part of a name that is limited.
fn long_portal(volume: &Value, path: &Path) -> Option<FieldError> {
    let (name, source) = (text(volume, "name"), &volume["iscsi"]);
    let too_long = present(source, "initiatorName")
        && name.len() + 1 + text(source, "targetPortal").len() > ISCSI_NAME_MAX;
    too_long.then(|| FieldError::invalid(&path.child("name"), name, PORTAL_TOO_LONG))
}

/// The claim that is made with a pod is called after both.
fn validate_claim_name(name: &str, pod: Option<&str>, path: &Path) -> FieldErrors {
    let Some(pod) = pod.filter(|_| !name.is_empty()) else { return Vec::new() };
    let claim = format!("{pod}-{name}");
    dns1123_subdomain(&claim)
        .into_iter()
        .map(|why| FieldError::invalid(&path.child("name"), name, format!("PVC name {claim:?}: {why}")))
        .collect()
}

/// The fields of metadata beside labels and annotations, in upstream's order and under upstream's names.
const IDENTIFYING: &[(&str, &str)] = &[
    ("name", "name"),
    ("generateName", "generateName"),
    ("namespace", "namespace"),
    ("selfLink", "selfLink"),
    ("uid", "uID"),
    ("resourceVersion", "resourceVersion"),
    ("generation", "generation"),
    ("creationTimestamp", "creationTimestamp"),
    ("deletionTimestamp", "deletionTimestamp"),
    ("deletionGracePeriodSeconds", "deletionGracePeriodSeconds"),
    ("ownerReferences", "ownerReferences"),
    ("finalizers", "finalizers"),
    ("managedFields", "managedFields"),
];

/// A claim that is made with the pod: its metadata is labels and annotations, nothing that would identify it.
fn validate_ephemeral(source: &Value, path: &Path) -> FieldErrors {
    let Some(template) = object(source, "volumeClaimTemplate") else {
        return vec![FieldError::required(path, "")];
    };
    let mut errors = validate_template_metadata(&template["metadata"], &path.child("metadata"));
    errors.extend(validate_claim_spec(&template["spec"], &path.child("spec")));
    errors
}

/// Metadata of a claim that somebody makes from a template: labels and annotations alone.
pub(in crate::kinds) fn validate_template_metadata(metadata: &Value, path: &Path) -> FieldErrors {
    let mut errors = validate_annotations(&metadata["annotations"], &path.child("annotations"));
    errors.extend(validate_labels(&metadata["labels"], &path.child("labels")));
    for (key, shown) in IDENTIFYING {
        let is_set = match &metadata[*key] {
            Value::Null | Value::Bool(false) => false,
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Number(number) => number.as_i64() != Some(0),
            _ => true,
        };
        if is_set {
            errors.push(FieldError::forbidden(&path.child(shown), "cannot be set"));
        }
    }
    errors
}

pub(super) fn validate_mode(source: &Value, key: &str, path: &Path) -> Option<FieldError> {
    let mode = source.get(key)?.as_i64()?;
    (!(0..=0o777).contains(&mode)).then(|| FieldError::invalid(&path.child(key), mode, MODE_RANGE))
}

fn validate_items(source: &Value, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors = validate_mode(source, "defaultMode", path).into_iter().collect();
    for (index, item) in list(source, "items").iter().enumerate() {
        errors.extend(validate_item(item, &path.child("items").index(index)));
    }
    errors
}

/// One key, and the place where it is shown.
fn validate_item(item: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if text(item, "key").is_empty() {
        errors.push(FieldError::required(&path.child("key"), ""));
    }
    let place = text(item, "path");
    if place.is_empty() {
        errors.push(FieldError::required(&path.child("path"), ""));
    }
    errors.extend(local_path_of_key(place, &path.child("path")));
    errors.extend(validate_mode(item, "mode", path));
    errors
}

/// Where a key is shown. Names beginning with `..` are the volume's own.
pub(super) fn local_path_of_key(value: &str, path: &Path) -> FieldErrors {
    let mut errors = local_path(value, path);
    if value.starts_with("..") && !value.starts_with("../") {
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
                    for (index, item) in list(source, "items").iter().enumerate() {
                        errors.extend(validate_item(item, &path.child("items").index(index)));
                        let place = text(item, "path");
                        if !places.insert(place) {
                            errors.extend(collide(place, name));
                        }
                    }
                }
                "downwardAPI" => {
                    for item in list(source, "items") {
                        errors.extend(validate_downward_item(item, &path));
                        let place = text(item, "path");
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
                    errors.extend(validate_pod_certificate(source, &path));
                    let keys = ["credentialBundlePath", "keyPath", "certificateChainPath"];
                    for key in keys {
                        let place = text(source, key);
                        errors.extend(local_path_of_key(place, &path.child(key)));
                        if !place.is_empty() && !places.insert(place) {
                            errors.extend(collide(place, place));
                        }
                    }
                    if keys.iter().all(|key| text(source, key).is_empty()) {
                        errors.push(FieldError::required(
                            &path,
                            "specify at least one of credentialBundlePath, keyPath, and certificateChainPath",
                        ));
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

/// A certificate that is asked for in the pod's name.
fn validate_pod_certificate(source: &Value, path: &Path) -> FieldErrors {
    const KEYS: &[&str] = &["RSA3072", "RSA4096", "ECDSAP256", "ECDSAP384", "ECDSAP521", "ED25519"];
    let signer = text(source, "signerName");
    let mut errors = validate_signer_name(signer, &path.child("signerName"));
    errors.extend(validate_user_annotations(&source["userAnnotations"], &path.child("userAnnotations")));
    let key = text(source, "keyType");
    if !KEYS.contains(&key) {
        errors.push(FieldError::not_supported(&path.child("keyType"), key, KEYS));
    }
    if let Some(seconds) = source["maxExpirationSeconds"].as_i64() {
        let path = path.child("maxExpirationSeconds");
        let longest = longest(signer);
        if seconds < SECONDS_MIN {
            errors.push(FieldError::invalid(
                &path,
                seconds,
                "if provided, maxExpirationSeconds must be >= 3600",
            ));
        }
        if seconds > longest {
            errors.push(FieldError::invalid(
                &path,
                seconds,
                format!("if provided, maxExpirationSeconds must be <= {longest}"),
            ));
        }
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
            let signer =
                name.rsplit_once(':').map(|(signer, _)| signer.replace(':', "/")).unwrap_or_default();
            errors.extend(name_problems(name, &signer).into_iter().map(|why| {
                FieldError::invalid(
                    &path.child("name"),
                    name,
                    format!("not a valid clustertrustbundlename: {why}"),
                )
            }));
            if present(source, "labelSelector") {
                let selector = &source["labelSelector"];
                errors.push(
                    FieldError::invalid(
                        &path.child("labelSelector"),
                        selector.clone(),
                        "labelSelector must be unset if name is specified",
                    )
                    .rendered_as(render_selector(selector)),
                );
            }
        }
        (None, None) => {
            errors.push(FieldError::required(path, "either name or signerName must be specified"));
        }
        (Some(_), Some(_)) => errors.push(FieldError::invalid(
            path,
            source.clone(),
            "only one of name and signerName may be used",
        )),
        (None, Some(signer)) => {
            let signer_path = path.child("signerName");
            if signer.is_empty() {
                errors.push(FieldError::required(&signer_path, "must be a valid signer name"));
            }
            errors.extend(validate_signer_name(signer, &signer_path));
            errors.extend(validate_label_selector(&source["labelSelector"], &path.child("labelSelector")));
        }
    }
    if text(source, "path").is_empty() {
        errors.push(FieldError::required(&path.child("path"), ""));
    }
    errors.extend(local_path_of_key(text(source, "path"), &path.child("path")));
    errors
}
