//! ResourceClaims and ResourceClaimTemplates.

use super::admin;
use super::allocation::{drop_deallocated, validate_allocation, validate_devices};
use super::claim::{default_claim, validate_claim};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, list, present, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::IMMUTABLE;
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::core::pod::volumes::validate_template_metadata;
use crate::resource::{Column, MetadataUse, StatusUse, Strategy, keep_all_but_status};
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::HashSet;

const CONSUMERS_MAX: usize = 256;

pub(in crate::kinds) struct ResourceClaims;

impl Strategy for ResourceClaims {
    fn status_has_table(&self) -> bool {
        false
    }

    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        default_claim(ensure_object(object, "spec"));
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep_all_but_status(new, old);
        if new["status"].is_object() {
            drop_deallocated(&mut new["status"], &old["status"]);
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        validate_claim(&object["spec"], &Path::new("spec"))
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = Vec::new();
        if new["spec"] != old["spec"] {
            errors.push(
                FieldError::invalid(&Path::new("spec"), new["spec"].clone(), IMMUTABLE)
                    .rendered_as(go::compact("ResourceClaimSpec", &new["spec"])),
            );
        }
        errors
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        validate_status(new, &old["status"])
    }

    fn needed_namespace_label(
        &self,
        new: &Value,
        old: Option<&Value>,
        subresource: Option<&str>,
    ) -> Option<(&'static str, FieldError)> {
        match (old, subresource) {
            (None, None) => admin::requested(&new["spec"]),
            (Some(old), Some("status")) => admin::granted(&new["status"], &old["status"]),
            _ => None,
        }
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("State"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let status = &object["status"];
        let mut states = Vec::new();
        let deleting = crate::meta::is_deleting(object);
        if deleting {
            states.push("deleted");
        }
        if present(status, "allocation") {
            states.push("allocated");
            if !list(status, "reservedFor").is_empty() {
                states.push("reserved");
            }
        } else if !deleting {
            states.push("pending");
        }
        vec![cell::name(object), states.join(",").into(), cell::age(object, now)]
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

fn validate_status(claim: &Value, old: &Value) -> FieldErrors {
    let status = &claim["status"];
    let path = Path::new("status");
    let mut errors = Vec::new();
    let consumers = list(status, "reservedFor");
    let at = path.child("reservedFor");
    if consumers.len() > CONSUMERS_MAX {
        errors.push(FieldError::too_many(&at, consumers.len(), CONSUMERS_MAX));
    }
    let mut uids = HashSet::new();
    for (index, consumer) in consumers.iter().enumerate() {
        let path = at.index(index);
        for key in ["resource", "name", "uid"] {
            if text(consumer, key).is_empty() {
                errors.push(FieldError::required(&path.child(key), ""));
            }
        }
        let uid = text(consumer, "uid");
        if !uids.insert(uid) {
            errors.push(FieldError::duplicate(&path, uid));
        }
    }
    errors.extend(validate_devices(status, &path));
    let (allocation, before) = (present(status, "allocation"), present(old, "allocation"));
    if !consumers.is_empty() && !allocation {
        errors.push(FieldError::forbidden(&at, "may not be specified when `allocated` is not set"));
    } else if crate::meta::is_deleting(claim)
        && consumers.iter().any(|c| !list(old, "reservedFor").contains(c))
    {
        errors.push(FieldError::forbidden(
            &at,
            "new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set",
        ));
    }
    if allocation && before && status["allocation"] != old["allocation"] {
        errors.push(FieldError::invalid(&path.child("allocation"), status["allocation"].clone(), IMMUTABLE));
    } else if allocation && !before {
        errors.extend(validate_allocation(&claim["spec"], &status["allocation"], &path.child("allocation")));
    }
    errors
}

pub(in crate::kinds) struct ResourceClaimTemplates;

impl Strategy for ResourceClaimTemplates {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        default_claim(ensure_object(ensure_object(object, "spec"), "spec"));
    }

    fn needed_namespace_label(
        &self,
        new: &Value,
        old: Option<&Value>,
        _subresource: Option<&str>,
    ) -> Option<(&'static str, FieldError)> {
        old.is_none().then(|| admin::requested(&new["spec"]["spec"])).flatten()
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (template, path) = (&object["spec"], Path::new("spec"));
        let mut errors = validate_template_metadata(&template["metadata"], &path.child("metadata"));
        errors.extend(validate_claim(&template["spec"], &path.child("spec")));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        if new["spec"] != old["spec"] {
            errors.push(
                FieldError::invalid(&Path::new("spec"), new["spec"].clone(), IMMUTABLE)
                    .rendered_as(go::compact("ResourceClaimTemplateSpec", &new["spec"])),
            );
        }
        errors
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
