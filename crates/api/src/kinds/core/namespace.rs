//! Namespaces.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_text, ensure_object, keep, list, text};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::{dns1123_label, validate_finalizer_name};
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::age;
use ferrite_json::{Value, json};
use jiff::Timestamp;

/// Every namespace carries its own name as a label.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";
/// Holds a namespace until everything in it is gone.
const FINALIZER: &str = "kubernetes";

pub(in crate::kinds) struct Namespaces;

impl Strategy for Namespaces {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn has_spec_finalizers(&self) -> bool {
        true
    }

    fn begin_finalization(&self, object: &mut Value) {
        ensure_object(object, "status")["phase"] = "Terminating".into();
        crate::meta::metadata_mut(object).remove("deletionGracePeriodSeconds");
    }

    fn checks_preconditions_itself(&self) -> bool {
        true
    }

    fn default(&self, object: &mut Value) {
        let name = crate::meta::name(object).to_owned();
        if !name.is_empty() {
            let labels = ensure_object(ensure_object(object, "metadata"), "labels");
            labels[NAME_LABEL] = name.into();
        }
        ensure_object(object, "spec");
        default_text(ensure_object(object, "status"), "phase", "Active");
    }

    fn prepare_create(&self, object: &mut Value) {
        // A name that the server has drawn is there only now.
        let name = crate::meta::name(object).to_owned();
        ensure_object(ensure_object(object, "metadata"), "labels")[NAME_LABEL] = name.into();
        object["status"] = json!({"phase": "Active"});
        let spec = ensure_object(object, "spec");
        if !list(spec, "finalizers").iter().any(|f| f == FINALIZER) {
            match spec["finalizers"].as_array_mut() {
                Some(finalizers) => finalizers.push(FINALIZER.into()),
                None => spec["finalizers"] = json!([FINALIZER]),
            }
        }
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let path = Path::new("spec").child("finalizers");
        list(&object["spec"], "finalizers")
            .iter()
            .filter_map(Value::as_str)
            .flat_map(|name| validate_finalizer_name(name, &path))
            .collect()
    }

    fn validate_update(&self, _new: &Value, _old: &Value) -> FieldErrors {
        Vec::new()
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let phase = text(&new["status"], "phase");
        let deleting = crate::meta::is_deleting(new);
        let path = Path::new("status").child("Phase");
        if deleting && phase != "Terminating" {
            return vec![FieldError::invalid(
                &path,
                phase,
                "may only be 'Terminating' if `deletionTimestamp` is not empty",
            )];
        }
        if !deleting && phase != "Active" {
            return vec![FieldError::invalid(
                &path,
                phase,
                "may only be 'Active' if `deletionTimestamp` is empty",
            )];
        }
        Vec::new()
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        dns1123_label(name)
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["status.phase"]
    }

    fn text_fields(&self) -> &'static [&'static str] {
        &["status.phase"]
    }

    fn selectable_value(&self, object: &Value, _field: &str) -> String {
        text(&object["status"], "phase").to_owned()
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Status"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![
            crate::meta::name(object).into(),
            text(&object["status"], "phase").into(),
            age(object, now).into(),
        ]
    }
}
