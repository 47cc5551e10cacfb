//! Bindings: the scheduler's decision, written once and never stored.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, text};
use crate::resource::Strategy;
use ferrite_json::Value;

pub(in crate::kinds) struct Bindings;

impl Strategy for Bindings {
    fn default(&self, object: &mut Value) {
        ensure_object(object, "target");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("target");
        let target = &object["target"];
        let mut errors = Vec::new();
        let kind = text(target, "kind");
        if !kind.is_empty() && kind != "Node" {
            errors.push(FieldError::not_supported(&path.child("kind"), kind, &["Node", "<empty>"]));
        }
        if text(target, "name").is_empty() {
            errors.push(FieldError::required(&path.child("name"), ""));
        }
        errors
    }
}
