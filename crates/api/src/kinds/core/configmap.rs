//! ConfigMaps.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{flag, map};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::config_map_key;
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::age;
use ferrite_json::Value;
use jiff::Timestamp;

/// The most bytes of data in a ConfigMap or Secret.
pub(in crate::kinds) const DATA_MAX: usize = 1024 * 1024;

pub(in crate::kinds) struct ConfigMaps;

impl Strategy for ConfigMaps {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = Vec::new();
        let binary = map(object, "binaryData");
        let mut total = 0;
        for (key, value) in map(object, "data").into_iter().flatten() {
            let path = Path::new("data").key(key);
            errors
                .extend(config_map_key(key).into_iter().map(|p| FieldError::invalid(&path, key.as_str(), p)));
            if binary.is_some_and(|b| b.contains_key(key)) {
                errors.push(FieldError::invalid(
                    &path,
                    key.as_str(),
                    "duplicate of key present in binaryData",
                ));
            }
            total += value.as_str().map_or(0, str::len);
        }
        for (key, value) in binary.into_iter().flatten() {
            let path = Path::new("binaryData").key(key);
            errors
                .extend(config_map_key(key).into_iter().map(|p| FieldError::invalid(&path, key.as_str(), p)));
            total += decoded_len(value);
        }
        if total > DATA_MAX {
            errors.push(FieldError::too_long(&Path::new("[]"), DATA_MAX));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = immutable_errors(new, old, &["data", "binaryData"]);
        errors.extend(self.validate(new));
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Data"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let count = |key: &str| map(object, key).map_or(0, ferrite_json::Map::len);
        vec![
            crate::meta::name(object).into(),
            (count("data") + count("binaryData")).into(),
            age(object, now).into(),
        ]
    }
}

/// The bytes a base64 text stands for, without decoding it.
pub(in crate::kinds) fn decoded_len(value: &Value) -> usize {
    let text = value.as_str().unwrap_or_default();
    let padding = text.bytes().rev().take_while(|b| *b == b'=').count();
    (text.len() / 4 * 3).saturating_sub(padding)
}

/// Errors about changes of an object that says of itself that it does not change.
pub(in crate::kinds) fn immutable_errors(new: &Value, old: &Value, fields: &[&str]) -> FieldErrors {
    const WHY: &str = "field is immutable when `immutable` is set";
    let mut errors = Vec::new();
    if !flag(old, "immutable") {
        return errors;
    }
    if !flag(new, "immutable") {
        errors.push(FieldError::forbidden(&Path::new("immutable"), WHY));
    }
    for field in fields {
        let entries = |object| map(object, field).filter(|m| !m.is_empty());
        if entries(new) != entries(old) {
            errors.push(FieldError::forbidden(&Path::new(field), WHY));
        }
    }
    errors
}
