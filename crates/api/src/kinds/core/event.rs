//! Events of the core group. `events.k8s.io` names the same stored fields differently. The store has this
//! form, and everything here that reads an event goes through it.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, ensure_object, int, present, text};
use crate::kinds::common::row::{shown, wide};
use crate::meta_validation::qualified_name;
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::since;
use ferrite_json::Value;
use jiff::Timestamp;

const NAME_MAX: usize = 128;
const NOTE_MAX: usize = 1024;

pub(in crate::kinds) struct Events;

impl Strategy for Events {
    fn knows_finalizers(&self) -> bool {
        false
    }

    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Nothing
    }

    fn has_dependents(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "involvedObject");
        ensure_object(object, "source");
        for time in ["firstTimestamp", "lastTimestamp", "eventTime"] {
            default_field(object, time, Value::Null);
        }
        for name in ["reportingComponent", "reportingInstance"] {
            default_field(object, name, "");
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        validate_legacy(object, "reportingComponent")
    }

    fn validate_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        self.validate(new)
    }

    fn validate_name(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &[
            "involvedObject.apiVersion",
            "involvedObject.fieldPath",
            "involvedObject.kind",
            "involvedObject.name",
            "involvedObject.namespace",
            "involvedObject.resourceVersion",
            "involvedObject.uid",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ]
    }

    fn text_fields(&self) -> &'static [&'static str] {
        &[
            "involvedObject.kind",
            "involvedObject.name",
            "involvedObject.namespace",
            "involvedObject.uid",
            "reason",
            "type",
        ]
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        match field {
            "source" => first_set(text(&object["source"], "component"), text(object, "reportingComponent")),
            _ => match field.split_once('.') {
                Some((parent, key)) => text(&object[parent], key),
                None => text(object, field),
            },
        }
        .to_owned()
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                shown("Last Seen"),
                shown("Type"),
                shown("Reason"),
                shown("Object"),
                wide("Subobject"),
                wide("Source"),
                shown("Message"),
                wide("First Seen"),
                wide("Count"),
                Column::new("Name", "string", "name", 1),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let first = since(first_set(text(object, "firstTimestamp"), text(object, "eventTime")), now);
        let mut last = match text(object, "lastTimestamp") {
            "" => first.clone(),
            time => since(time, now),
        };
        // An event without a count happened once.
        let mut count = int(object, "count").max(1);
        if let Some(series) = object.get("series").filter(|s| s.is_object()) {
            last = since(text(series, "lastObservedTime"), now);
            count = int(series, "count");
        }
        let about = &object["involvedObject"];
        let kind = text(about, "kind").to_lowercase();
        let target = match text(about, "name") {
            "" => kind,
            name => format!("{kind}/{name}"),
        };
        let source = &object["source"];
        let component = first_set(text(source, "component"), text(object, "reportingComponent"));
        let instance = first_set(text(source, "host"), text(object, "reportingInstance"));
        let origin =
            if instance.is_empty() { component.to_owned() } else { format!("{component}, {instance}") };
        vec![
            last.into(),
            text(object, "type").into(),
            text(object, "reason").into(),
            target.into(),
            text(about, "fieldPath").into(),
            origin.into(),
            text(object, "message").trim().into(),
            first.into(),
            count.into(),
            crate::meta::name(object).into(),
        ]
    }

    fn create_on_update(&self) -> bool {
        true
    }
}

fn first_set<'a>(first: &'a str, second: &'a str) -> &'a str {
    if first.is_empty() { second } else { first }
}

/// An event lives in the namespace of the object that it is about; for an object without one, in `default`
/// (or, as the newer form allows, `kube-system`).
fn validate_namespace(event: &Value, new_style: bool) -> FieldErrors {
    let about = &event["involvedObject"];
    let about_namespace = text(about, "namespace");
    let namespace = crate::meta::namespace(event);
    let path = Path::new("involvedObject").child("namespace");
    let mismatch = || vec![FieldError::invalid(&path, about_namespace, "does not match event.namespace")];
    if about_namespace.is_empty() {
        let allowed = namespace == "default" || (new_style && namespace == "kube-system");
        return if allowed || namespace.is_empty() { Vec::new() } else { mismatch() };
    }
    // Events of the newer kind may be about another namespace.
    if about_namespace == namespace || new_style { Vec::new() } else { mismatch() }
}

/// The rules that hold for events of both groups. Those without eventTime come from old clients, which are held to less.
pub(in crate::kinds) fn validate_legacy(event: &Value, controller_field: &str) -> FieldErrors {
    let new_style = present(event, "eventTime");
    let mut errors = validate_namespace(event, new_style);
    if new_style {
        errors.extend(validate_new_style(event, controller_field));
    }
    errors
}

fn validate_new_style(event: &Value, controller_field: &str) -> FieldErrors {
    let mut errors = Vec::new();
    let controller = text(event, "reportingComponent");
    let path = Path::new(controller_field);
    if controller.is_empty() {
        errors.push(FieldError::required(&path, ""));
    }
    errors.extend(qualified_name(controller).into_iter().map(|p| FieldError::invalid(&path, controller, p)));
    let mut bounded = |key: &str, max: usize| {
        let path = Path::new(key);
        let value = text(event, key);
        if value.is_empty() {
            errors.push(FieldError::required(&path, ""));
        } else if value.len() > max {
            errors.push(FieldError::invalid(&path, "", format!("can have at most {max} characters")));
        }
    };
    bounded("reportingInstance", NAME_MAX);
    bounded("action", NAME_MAX);
    bounded("reason", NAME_MAX);
    if text(event, "message").len() > NOTE_MAX {
        errors.push(FieldError::invalid(
            &Path::new("message"),
            "",
            format!("can have at most {NOTE_MAX} characters"),
        ));
    }
    errors
}

/// A series is more than one event, and has been seen.
pub(in crate::kinds) fn validate_series(event: &Value) -> FieldErrors {
    let mut errors = Vec::new();
    let Some(series) = event.get("series").filter(|s| s.is_object()) else { return errors };
    let path = Path::new("series");
    if int(series, "count") < 2 {
        errors.push(FieldError::invalid(&path.child("count"), "", "should be at least 2"));
    }
    if !present(series, "lastObservedTime") {
        errors.push(FieldError::required(&path.child("lastObservedTime"), ""));
    }
    errors
}
