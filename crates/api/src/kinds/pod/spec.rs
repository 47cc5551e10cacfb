//! Validation of a pod's specification.

use crate::field::{FieldErrors, Path};
use serde_json::Value;

/// Validates a pod that is to be created.
pub fn validate_pod(_pod: &Value) -> FieldErrors {
    Vec::new()
}

/// Validates a `PodSpec` wherever it occurs.
pub fn validate_spec(_spec: &Value, _path: &Path) -> FieldErrors {
    Vec::new()
}

/// Warnings about a valid specification.
pub fn warnings(_spec: &Value, _path: &Path) -> Vec<String> {
    Vec::new()
}
