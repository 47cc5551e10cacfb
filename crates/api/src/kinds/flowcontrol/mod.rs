//! `flowcontrol.apiserver.k8s.io`.

pub(super) mod flowschema;
pub(super) mod prioritylevel;

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{keep_metadata, list, text};
use crate::resource::keep_all_but_status;
use ferrite_json::Value;
use std::collections::HashSet;

/// As upstream: a status brings no metadata at all, not even those that others refuse.
fn prepare_status(new: &mut Value, old: &Value) {
    keep_all_but_status(new, old);
    for key in ["uid", "deletionGracePeriodSeconds"] {
        keep_metadata(new, old, key);
    }
}

/// Conditions have a type, and each type occurs once.
fn validate_conditions(status: &Value) -> FieldErrors {
    let mut errors = Vec::new();
    let mut types = HashSet::new();
    for (index, condition) in list(status, "conditions").iter().enumerate() {
        let path = Path::new("status").child("conditions").index(index).child("type");
        let kind = text(condition, "type");
        if !types.insert(kind) {
            errors.push(FieldError::duplicate(&path, kind));
        }
        if kind.is_empty() {
            errors.push(FieldError::required(&path, ""));
        }
    }
    errors
}
