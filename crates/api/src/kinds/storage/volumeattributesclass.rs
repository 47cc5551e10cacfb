//! VolumeAttributesClasses.

use super::{class_name, validate_parameters, validate_provisioner};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::text;
use crate::kinds::common::cell;
use crate::kinds::common::row::{NAME, shown};
use crate::resource::{Column, MetadataUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct VolumeAttributesClasses;

impl Strategy for VolumeAttributesClasses {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = validate_provisioner(object, "driverName");
        errors.extend(validate_parameters(object, true));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        ["driverName", "parameters"]
            .iter()
            .filter(|key| new[**key] != old[**key])
            .map(|key| FieldError::forbidden(&Path::new(key), format!("updates to {key} are forbidden.")))
            .chain(self.validate(new))
            .collect()
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("DriverName"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![class_name(object), text(object, "driverName").into(), cell::age(object, now)]
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}
