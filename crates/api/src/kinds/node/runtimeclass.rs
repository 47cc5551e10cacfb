//! RuntimeClasses.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, map, object, object_mut, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, complaints, repeated};
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::core::pod::defaults::default_resource_list;
use crate::kinds::core::pod::resources::validate_resources;
use crate::kinds::core::pod::{old_label, validate_tolerations};
use crate::meta_validation::{dns1123_label, validate_labels};
use crate::resource::{Column, MetadataUse, Strategy};
use ferrite_json::{Value, json};
use jiff::Timestamp;
use std::collections::HashSet;

pub(in crate::kinds) struct RuntimeClasses;

impl Strategy for RuntimeClasses {
    fn warnings(&self, object: &Value) -> Vec<String> {
        let keys = map(&object["scheduling"], "nodeSelector").into_iter().flat_map(ferrite_json::Map::keys);
        keys.filter_map(|key| Some(format!("scheduling.nodeSelector: {}", old_label(key)?))).collect()
    }

    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn knows_finalizers(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        if let Some(fixed) = object_mut(object, "overhead").and_then(|o| o.get_mut("podFixed")) {
            default_resource_list(fixed);
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let handler = text(object, "handler");
        let mut errors = match handler {
            "" => vec![FieldError::required(&Path::new("handler"), "")],
            _ => complaints(&Path::new("handler"), handler, dns1123_label(handler)),
        };
        if let Some(overhead) = self::object(object, "overhead") {
            // As upstream: the pod's fixed share is checked as if it were limits.
            let limits = json!({"limits": overhead["podFixed"]});
            errors.extend(validate_resources(&limits, &HashSet::new(), &Path::new("overhead")));
        }
        if let Some(scheduling) = self::object(object, "scheduling") {
            errors.extend(validate_scheduling(scheduling, &Path::new("scheduling")));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        if text(new, "handler") != text(old, "handler") {
            errors.push(FieldError::invalid(&Path::new("handler"), text(new, "handler"), IMMUTABLE));
        }
        errors
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Handler"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![cell::name(object), text(object, "handler").into(), cell::age(object, now)]
    }

    fn create_on_update(&self) -> bool {
        true
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

fn validate_scheduling(scheduling: &Value, path: &Path) -> FieldErrors {
    let mut errors = validate_labels(&scheduling["nodeSelector"], &path.child("nodeSelector"));
    let (tolerations, path) = (list(scheduling, "tolerations"), path.child("tolerations"));
    errors.extend(validate_tolerations(tolerations, &path));
    let again = repeated(tolerations.iter().map(Value::to_string));
    for (index, toleration) in tolerations.iter().enumerate() {
        if again[index] {
            errors.push(
                FieldError::duplicate(&path.index(index), toleration.clone())
                    .rendered_as(go::compact("Toleration", toleration)),
            );
        }
    }
    errors
}
