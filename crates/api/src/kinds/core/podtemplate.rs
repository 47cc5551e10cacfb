//! PodTemplates.

use crate::field::{FieldErrors, Path};
use crate::kinds::common::access::map;
use crate::kinds::common::cell;
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::common::workload;
use crate::resource::{Column, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct PodTemplates;

impl Strategy for PodTemplates {
    fn pod_spec(&self) -> Option<&'static str> {
        Some("/template/spec")
    }

    fn default(&self, object: &mut Value) {
        workload::default_template(object);
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        workload::validate_pod_template(&object["template"], &Path::new("template"))
    }

    fn warnings(&self, object: &Value) -> Vec<String> {
        workload::template_warnings(&object["template"], "template")
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["template"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Containers"), shown("Images"), shown("Pod Labels")] }
    }

    fn cells(&self, object: &Value, _now: Timestamp) -> Vec<Value> {
        let template = &object["template"];
        let [names, images] = cell::containers(template);
        vec![cell::name(object), names, images, cell::labels(map(&template["metadata"], "labels"))]
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}
