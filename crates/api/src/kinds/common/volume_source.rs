//! The sources of volumes: the common part of pods' volumes and PersistentVolumes.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, default_text, int, list, map, object, present, text};
use crate::kinds::common::check::{complaints, named_if_set, one_of, one_of_if_set};
use crate::meta_validation::{dns1123_label, dns1123_subdomain};
use crate::quantity::canonicalise;
use ferrite_json::Value;

/// The most characters a CSI driver's name may have.
const DRIVER_MAX: usize = 63;

/// Defaults of a source that pods and PersistentVolumes know.
pub fn default_source(kind: &str, source: &mut Value) {
    match kind {
        "hostPath" => default_field(source, "type", ""),
        "emptyDir" => {
            if let Some(limit) = source.get_mut("sizeLimit") {
                canonicalise(limit);
            }
        }
        "iscsi" => default_text(source, "iscsiInterface", "default"),
        "rbd" => {
            default_text(source, "pool", "rbd");
            default_text(source, "user", "admin");
            default_text(source, "keyring", "/etc/ceph/keyring");
        }
        "azureDisk" => {
            default_field(source, "cachingMode", "ReadWrite");
            default_field(source, "kind", "Shared");
            default_field(source, "fsType", "ext4");
            default_field(source, "readOnly", false);
        }
        "scaleIO" => {
            default_text(source, "storageMode", "ThinProvisioned");
            default_text(source, "fsType", "xfs");
        }
        _ => {}
    }
}

/// Validates one source. Those only pods have are the pods' own affair.
pub fn validate_source(kind: &str, source: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let required = |keys: &[&str]| -> FieldErrors {
        keys.iter()
            .filter(|key| text(source, key).is_empty())
            .map(|key| FieldError::required(&path.child(key), ""))
            .collect()
    };
    match kind {
        "hostPath" => {
            let place = text(source, "path");
            if place.is_empty() {
                return required(&["path"]);
            }
            errors.extend(no_steps_back(place, &path.child("path")));
            errors.extend(one_of_if_set(
                source,
                "type",
                path,
                &[
                    "",
                    "BlockDevice",
                    "CharDevice",
                    "Directory",
                    "DirectoryOrCreate",
                    "File",
                    "FileOrCreate",
                    "Socket",
                ],
            ));
        }
        "local" => match text(source, "path") {
            "" => errors.extend(required(&["path"])),
            place => errors.extend(no_steps_back(place, &path.child("path"))),
        },
        "nfs" => {
            errors.extend(required(&["server", "path"]));
            let place = text(source, "path");
            if !place.starts_with('/') {
                errors.push(FieldError::invalid(&path.child("path"), place, "must be an absolute path"));
            }
        }
        "gcePersistentDisk" => {
            errors.extend(required(&["pdName"]));
            errors.extend(partition(source, path));
        }
        "awsElasticBlockStore" => {
            errors.extend(required(&["volumeID"]));
            errors.extend(partition(source, path));
        }
        "glusterfs" => errors.extend(required(&["endpoints", "path"])),
        "flocker" => {
            let (name, uuid) = (text(source, "datasetName"), text(source, "datasetUUID"));
            if name.is_empty() && uuid.is_empty() {
                errors.push(FieldError::required(path, "one of datasetName and datasetUUID is required"));
            }
            if !name.is_empty() && !uuid.is_empty() {
                errors.push(FieldError::invalid(
                    path,
                    "resource",
                    "datasetName and datasetUUID can not be specified simultaneously",
                ));
            }
            if name.contains('/') {
                errors.push(FieldError::invalid(&path.child("datasetName"), name, "must not contain '/'"));
            }
        }
        "rbd" => {
            if list(source, "monitors").is_empty() {
                errors.push(FieldError::required(&path.child("monitors"), ""));
            }
            errors.extend(required(&["image"]));
        }
        "cephfs" if list(source, "monitors").is_empty() => {
            errors.push(FieldError::required(&path.child("monitors"), ""));
        }
        "cinder" => {
            errors.extend(required(&["volumeID"]));
            errors.extend(secret_name(source, "secretRef", path));
        }
        "quobyte" => {
            errors.extend(validate_quobyte(source, path));
            errors.extend(required(&["volume"]));
        }
        "vsphereVolume" => errors.extend(required(&["volumePath"])),
        "photonPersistentDisk" => errors.extend(required(&["pdID"])),
        "portworxVolume" => errors.extend(required(&["volumeID"])),
        "flexVolume" => {
            errors.extend(required(&["driver"]));
            for key in map(source, "options").into_iter().flat_map(|o| o.keys()) {
                let owner = format!(".{}", key.split('/').next().unwrap_or_default().to_lowercase());
                let owner = if key.contains('/') { owner } else { format!(".{}", key.to_lowercase()) };
                if owner.ends_with(".kubernetes.io") || owner.ends_with(".k8s.io") {
                    errors.push(FieldError::invalid(
                        &path.child("options").key(key),
                        key.as_str(),
                        "kubernetes.io and k8s.io namespaces are reserved",
                    ));
                }
            }
        }
        "azureFile" => {
            errors.extend(required(&["secretName", "shareName"]));
        }
        "azureDisk" => errors.extend(validate_azure_disk(source, path)),
        "scaleIO" => {
            errors.extend(required(&["gateway", "system", "volumeName"]));
        }
        "storageos" => {
            errors.extend(required(&["volumeName"]));
            for key in ["volumeName", "volumeNamespace"] {
                errors.extend(named_if_set(source, key, path, dns1123_label));
            }
            errors.extend(secret_name(source, "secretRef", path));
        }
        "fc" => errors.extend(validate_fibre_channel(source, path)),
        "csi" => {
            errors.extend(validate_driver_name(text(source, "driver"), &path.child("driver")));
            errors.extend(secret_name(source, "nodePublishSecretRef", path));
            // As upstream: a bad name is reported at the source.
            if let Some(secret) = object(source, "nodePublishSecretRef") {
                errors.extend(named_if_set(secret, "name", path, dns1123_subdomain));
            }
        }
        _ => {}
    }
    errors
}

/// The name of a CSI driver, wherever it is given.
pub fn validate_driver_name(name: &str, path: &Path) -> FieldErrors {
    if name.is_empty() {
        return vec![FieldError::required(path, "")];
    }
    let mut errors = Vec::new();
    if name.len() > DRIVER_MAX {
        errors.push(FieldError::too_long(path, DRIVER_MAX));
    }
    errors.extend(complaints(path, name, dns1123_subdomain(&name.to_lowercase())));
    errors
}

/// A path does not lead out of where it starts.
pub fn no_steps_back(value: &str, path: &Path) -> Option<FieldError> {
    value
        .split('/')
        .any(|part| part == "..")
        .then(|| FieldError::invalid(path, value, "must not contain '..'"))
}

/// A secret that is referred to has a name.
fn secret_name(source: &Value, key: &str, path: &Path) -> Option<FieldError> {
    object(source, key)
        .filter(|secret| text(secret, "name").is_empty())
        .map(|_| FieldError::required(&path.child(key).child("name"), ""))
}

fn validate_quobyte(source: &Value, path: &Path) -> FieldErrors {
    const PAIRS: &str = "must be a host:port pair or multiple pairs separated by commas";
    let registry = text(source, "registry");
    if registry.is_empty() {
        return vec![FieldError::required(&path.child("registry"), PAIRS)];
    }
    if text(source, "tenant").len() >= 65 {
        return vec![FieldError::required(
            &path.child("tenant"),
            "must be a UUID and may not exceed a length of 64 characters",
        )];
    }
    registry
        .split(',')
        .filter(|pair| {
            pair.rsplit_once(':').is_none_or(|(host, _)| host.contains(':') && !host.ends_with(']'))
        })
        .map(|_| FieldError::invalid(&path.child("registry"), registry, PAIRS))
        .collect()
}

fn partition(source: &Value, path: &Path) -> Option<FieldError> {
    let number = int(source, "partition");
    (!(0..=255).contains(&number)).then(|| {
        FieldError::invalid(&path.child("partition"), number, "must be between 1 and 255, inclusive")
    })
}

fn validate_azure_disk(source: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let uri = text(source, "diskURI");
    for key in ["diskName", "diskURI"] {
        if text(source, key).is_empty() {
            errors.push(FieldError::required(&path.child(key), ""));
        }
    }
    errors.extend(one_of_if_set(source, "cachingMode", path, &["None", "ReadOnly", "ReadWrite"]));
    errors.extend(one_of_if_set(source, "kind", path, &["Dedicated", "Managed", "Shared"]));
    let managed = text(source, "kind") == "Managed";
    if managed && !uri.starts_with("/subscriptions/") {
        errors.push(FieldError::not_supported(
            &path.child("diskURI"),
            uri,
            &["/subscriptions/{sub-id}/resourcegroups/{group-name}/providers/microsoft.compute/disks/{disk-id}"],
        ));
    }
    if !managed && present(source, "kind") && !uri.starts_with("https://") {
        errors.push(FieldError::not_supported(
            &path.child("diskURI"),
            uri,
            &["https://{account-name}.blob.core.windows.net/{container-name}/{disk-name}.vhd"],
        ));
    }
    errors
}

fn validate_fibre_channel(source: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let (names, wwids) = (list(source, "targetWWNs"), list(source, "wwids"));
    if names.is_empty() && wwids.is_empty() {
        errors.push(FieldError::required(
            &path.child("targetWWNs"),
            "must specify either targetWWNs or wwids, but not both",
        ));
    }
    if !names.is_empty() && !wwids.is_empty() {
        errors.push(FieldError::invalid(
            &path.child("targetWWNs"),
            names.to_vec(),
            "targetWWNs and wwids can not be specified simultaneously",
        ));
    }
    if !names.is_empty() {
        match source["lun"].as_i64() {
            None => errors
                .push(FieldError::required(&path.child("lun"), "lun is required if targetWWNs is specified")),
            Some(lun) if !(0..=255).contains(&lun) => {
                errors.push(FieldError::invalid(
                    &path.child("lun"),
                    lun,
                    "must be between 0 and 255, inclusive",
                ));
            }
            _ => {}
        }
    }
    errors
}

/// The longest name made of a volume's and its portal's.
pub const ISCSI_NAME_MAX: usize = 64;
pub const PORTAL_TOO_LONG: &str = "Total length of <volume name>:<iscsi.targetPortal> must be under 64 characters \
    if iscsi.initiatorName is specified.";

/// The error in the name of a target or initiator; `kinds` is the error for a name of neither kind.
fn iscsi_name_problem(name: &str, kinds: &'static str) -> Option<&'static str> {
    // Any one character stands behind the prefix: so it does upstream, where a point was meant.
    let of_digits = |prefix: &str, digits: usize| {
        let mut rest = name.strip_prefix(prefix).unwrap_or_default().chars();
        rest.next().is_some_and(|c| c != '\n')
            && rest.clone().count() == digits
            && rest.all(|c| c.is_ascii_alphanumeric())
    };
    let sound = if name.starts_with("iqn") {
        name.match_indices("iqn.").any(|(at, _)| is_qualified(&name[at + "iqn.".len()..]))
    } else if name.starts_with("eui") {
        of_digits("eui", 16)
    } else if name.starts_with("naa") {
        of_digits("naa", 32)
    } else {
        return Some(kinds);
    };
    (!sound).then_some("must be valid format")
}

/// `2024-01.com.example:storage`: the date of the domain's registration, the domain, and its owner's name
/// for the target.
fn is_qualified(name: &str) -> bool {
    let bytes = name.as_bytes();
    let is_date = bytes.len() > 8
        && bytes[..8].iter().enumerate().all(|(index, byte)| match index {
            4 => *byte == b'-',
            7 => *byte == b'.',
            _ => byte.is_ascii_digit(),
        });
    let Some((domain, own)) = is_date.then(|| name[8..].split_once(':')).flatten() else { return false };
    !domain.is_empty()
        && domain.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.'))
        && !own.is_empty()
        && !own.contains([',', ';', '*', '&', '$', '|', ' ', '\t', '\n', '\r', '\x0c'])
}

/// A target of a pod's volume, or of the PersistentVolume whose name is given.
pub fn validate_iscsi(source: &Value, volume: Option<&str>, path: &Path) -> FieldErrors {
    let kinds = match volume {
        Some(_) => "must be valid format",
        None => "must be valid format starting with iqn, eui, or naa",
    };
    let mut errors = Vec::new();
    let portal = text(source, "targetPortal");
    if portal.is_empty() {
        errors.push(FieldError::required(&path.child("targetPortal"), ""));
    }
    if volume.is_some_and(|v| present(source, "initiatorName") && v.len() + 1 + portal.len() > ISCSI_NAME_MAX)
    {
        errors.push(FieldError::invalid(&path.child("targetportal"), portal, PORTAL_TOO_LONG));
    }
    match text(source, "iqn") {
        "" => errors.push(FieldError::required(&path.child("iqn"), "")),
        name => errors.extend(
            iscsi_name_problem(name, kinds).map(|p| FieldError::invalid(&path.child("iqn"), name, p)),
        ),
    }
    let lun = int(source, "lun");
    if !(0..=255).contains(&lun) {
        errors.push(FieldError::invalid(&path.child("lun"), lun, "must be between 0 and 255, inclusive"));
    }
    let chap = ["chapAuthDiscovery", "chapAuthSession"].iter().any(|key| source[*key] == true);
    if chap && !source["secretRef"].is_object() {
        errors.push(FieldError::required(&path.child("secretRef"), ""));
    }
    errors.extend(volume.and_then(|_| secret_name(source, "secretRef", path)));
    if let Some(initiator) = source["initiatorName"].as_str() {
        errors.extend(
            iscsi_name_problem(initiator, kinds)
                .map(|p| FieldError::invalid(&path.child("initiatorname"), initiator, p)),
        );
    }
    errors
}

/// Ways to mount a volume, sorted.
pub const ACCESS_MODES: &[&str] = &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];

/// The access modes of PersistentVolumes and claims.
pub fn validate_access_modes(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let path = path.child("accessModes");
    let modes = list(spec, "accessModes");
    for mode in modes.iter().filter_map(Value::as_str) {
        if !ACCESS_MODES.contains(&mode) {
            errors.push(FieldError::not_supported(&path, mode, ACCESS_MODES));
        }
    }
    let alone = |mode: &Value| mode == "ReadWriteOncePod";
    let other = |mode: &Value| !alone(mode) && mode.as_str().is_some_and(|m| ACCESS_MODES.contains(&m));
    if modes.iter().any(alone) && modes.iter().any(other) {
        errors.push(FieldError::forbidden(&path, "may not use ReadWriteOncePod with other access modes"));
    }
    errors
}

pub fn validate_volume_mode(spec: &Value, path: &Path) -> Option<FieldError> {
    present(spec, "volumeMode").then(|| one_of(spec, "volumeMode", path, &["Block", "Filesystem"])).flatten()
}

/// `RWO,ROX`, in the order upstream prints them.
pub fn access_modes_cell(modes: &[Value]) -> String {
    [
        ("ReadWriteOnce", "RWO"),
        ("ReadOnlyMany", "ROX"),
        ("ReadWriteMany", "RWX"),
        ("ReadWriteOncePod", "RWOP"),
    ]
    .iter()
    .filter(|(mode, _)| modes.iter().any(|m| m == mode))
    .map(|(_, short)| *short)
    .collect::<Vec<_>>()
    .join(",")
}
