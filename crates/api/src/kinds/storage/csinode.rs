//! CSINodes: which drivers a node has.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, list, remove, strings, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, complaints, repeated};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, number, shown};
use crate::kinds::common::volume_source::validate_driver_name;
use crate::meta_validation::qualified_name;
use crate::resource::{Column, MetadataUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::HashSet;

const NODE_ID_MAX: usize = 256;

pub(in crate::kinds) struct CsiNodes;

impl Strategy for CsiNodes {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Content
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("spec").child("drivers");
        let mut errors = Vec::new();
        let mut names = HashSet::new();
        for (index, driver) in list(&object["spec"], "drivers").iter().enumerate() {
            let path = path.index(index);
            let name = text(driver, "name");
            errors.extend(validate_driver_name(name, &path.child("name")));
            errors.extend(validate_node_id(text(driver, "nodeID"), &path.child("nodeID")));
            if let Some(count) = driver["allocatable"]["count"].as_i64()
                && count < 0
            {
                errors.push(FieldError::invalid(
                    &path.child("allocatable").child("count"),
                    count,
                    "must be greater than or equal to 0",
                ));
            }
            if !names.insert(name) {
                errors.push(FieldError::duplicate(&path.child("name"), name));
            }
            let keys = strings(driver, "topologyKeys");
            let again = repeated(keys.iter());
            for (index, key) in keys.iter().enumerate() {
                if key.is_empty() {
                    errors.push(FieldError::required(&path, ""));
                }
                if again[index] {
                    errors.push(FieldError::duplicate(&path, *key));
                }
                errors.extend(complaints(&path, key, qualified_name(key)));
            }
        }
        errors
    }

    /// A driver that stays, stays as it is.
    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        let path = Path::new("spec").child("drivers");
        let without_limits = |driver: &Value| {
            let mut driver = driver.clone();
            remove(&mut driver, "allocatable");
            driver
        };
        for before in list(&old["spec"], "drivers") {
            let same = |d: &&Value| text(d, "name") == text(before, "name");
            let Some(driver) = list(&new["spec"], "drivers").iter().find(same).map(without_limits) else {
                continue;
            };
            if driver != without_limits(before) {
                let rendered = go::compact("CSINodeDriver", &driver);
                errors.push(FieldError::invalid(&path, driver, IMMUTABLE).rendered_as(rendered));
            }
        }
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, number("Drivers"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![cell::name(object), cell::count(&object["spec"], "drivers"), cell::age(object, now)]
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

fn validate_node_id(id: &str, path: &Path) -> Option<FieldError> {
    match id.len() {
        0 => Some(FieldError::required(path, "")),
        length if length > NODE_ID_MAX => {
            Some(FieldError::invalid(path, id, format!("must be {NODE_ID_MAX} characters or less")))
        }
        _ => None,
    }
}
