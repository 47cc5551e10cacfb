//! The source of a node's former dynamic configuration. Nothing uses it any more, but it is still
//! validated.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{object, text};
use crate::kinds::common::check::named;
use crate::kinds::common::go;
use crate::meta_validation::{config_map_key, dns1123_label, dns1123_subdomain};
use ferrite_json::Value;

pub(super) fn validate(node: &Value) -> FieldErrors {
    let mut errors = Vec::new();
    if let Some(source) = object(&node["spec"], "configSource") {
        errors.extend(validate_source(source, false, &Path::new("spec").child("configSource")));
    }
    let (status, path) = (&node["status"]["config"], Path::new("status").child("config"));
    for key in ["assigned", "active", "lastKnownGood"] {
        if let Some(source) = object(status, key) {
            errors.extend(validate_source(source, true, &path.child(key)));
        }
    }
    errors
}

fn validate_source(source: &Value, reported: bool, path: &Path) -> FieldErrors {
    match object(source, "configMap") {
        Some(reference) => validate_reference(reference, reported, &path.child("configMap")),
        None => vec![
            FieldError::invalid(path, source.clone(), "exactly one reference subfield must be non-nil")
                .rendered_as(go::compact("NodeConfigSource", source)),
        ],
    }
}

/// A ConfigMap is requested by its name, and reported with its identity.
fn validate_reference(reference: &Value, reported: bool, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["uid", "resourceVersion"] {
        match (reported, text(reference, key).is_empty()) {
            (true, true) => errors.push(FieldError::required(&path.child(key), "")),
            (false, false) => {
                errors.push(FieldError::forbidden(&path.child(key), format!("{key} must not be set in spec")))
            }
            _ => {}
        }
    }
    errors.extend(named(reference, "namespace", path, dns1123_label));
    errors.extend(named(reference, "name", path, dns1123_subdomain));
    errors.extend(named(reference, "kubeletConfigKey", path, config_map_key));
    errors
}
