//! What may change in a pod once it exists.

use crate::field::FieldErrors;
use serde_json::Value;

pub fn validate_update(new: &Value, _old: &Value) -> FieldErrors {
    super::spec::validate_pod(new)
}

pub fn validate_status_update(_new: &Value, _old: &Value) -> FieldErrors {
    Vec::new()
}
