//! DeviceClasses.

use super::claim::{validate_config, validate_selectors};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, list};
use crate::kinds::common::cell;
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::core::pod::resources::is_extended_resource;
use crate::meta_validation::long_name;
use crate::resource::{Column, MetadataUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct DeviceClasses;

impl Strategy for DeviceClasses {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = validate_selectors(list(spec, "selectors"), &path.child("selectors"));
        for (index, config) in list(spec, "config").iter().enumerate() {
            errors.extend(validate_config(config, &path.child("config").index(index)));
        }
        if let Some(name) = spec["extendedResourceName"].as_str()
            && !is_extended_resource(name)
        {
            errors.push(FieldError::invalid(
                &path.child("extendedResourceName"),
                name,
                "must be a valid extended resource name",
            ));
        }
        errors
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        long_name(name)
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![cell::name(object), cell::age(object, now)]
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}
