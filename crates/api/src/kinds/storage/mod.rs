//! `storage.k8s.io`.

pub(super) mod csidriver;
pub(super) mod csinode;
pub(super) mod csistoragecapacity;
pub(super) mod storageclass;
pub(super) mod volumeattachment;
pub(super) mod volumeattributesclass;

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{map, text};
use crate::kinds::common::check::complaints;
use crate::meta_validation::qualified_name;
use ferrite_json::Value;

/// The most bytes and the most entries of a driver's parameters.
const PARAMETERS_MAX: usize = 256 * 1024;
const PARAMETER_COUNT_MAX: usize = 512;

/// The name of a class, marked if an annotation makes it the default.
fn class_name(class: &Value) -> Value {
    let annotations = &class["metadata"]["annotations"];
    let default =
        ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"]
            .iter()
            .any(|key| annotations[*key] == "true");
    let name = crate::meta::name(class);
    if default { format!("{name} (default)").into() } else { name.into() }
}

/// The name of a provisioner: a qualified name. Upper case is accepted; errors show it in lower case.
fn validate_provisioner(class: &Value, key: &str) -> FieldErrors {
    let path = Path::new(key);
    match text(class, key).to_lowercase().as_str() {
        "" => vec![FieldError::required(&path, "")],
        name => complaints(&path, name, qualified_name(name)),
    }
}

/// The parameters for a driver.
fn validate_parameters(class: &Value, at_least_one: bool) -> FieldErrors {
    let path = Path::new("parameters");
    let mut errors = Vec::new();
    let parameters = map(class, "parameters").filter(|p| !p.is_empty());
    let Some(parameters) = parameters else {
        if at_least_one {
            errors.push(FieldError::required(&path, "must contain at least one key/value pair"));
        }
        return errors;
    };
    if parameters.len() > PARAMETER_COUNT_MAX {
        return vec![FieldError::too_long(&path, PARAMETER_COUNT_MAX)];
    }
    let mut total = 0;
    for (key, value) in parameters {
        if key.is_empty() {
            errors.push(FieldError::invalid(&path, "", "field can not be empty."));
        }
        total += key.len() + value.as_str().map_or(0, str::len);
    }
    if total > PARAMETERS_MAX {
        errors.push(FieldError::too_long(&path, PARAMETERS_MAX));
    }
    errors
}
