//! Events of `events.k8s.io`: the stored fields of the core group's under newer names, and stricter rules.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, ensure_object, present, remove, text};
use crate::kinds::common::check::IMMUTABLE;
use crate::kinds::common::go;
use crate::kinds::core::event::{self, Events};
use crate::meta_validation::{
    dns1123_subdomain, unknown_finalizers, validate_metadata, validate_metadata_update,
};
use crate::resource::{Column, MetadataUse, Storage, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

/// Newer and older names of the same fields.
const NAMES: [(&str, &str); 7] = [
    ("reportingController", "reportingComponent"),
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("deprecatedSource", "source"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
];

pub(in crate::kinds) const STORAGE: Storage = Storage {
    group: "",
    version: "v1",
    kind: "Event",
    plural: "events",
    to_storage: to_core,
    from_storage: from_core,
};

fn to_core(object: &mut Value) {
    rename(object, "v1", |(newer, older)| (newer, older));
}

fn from_core(object: &mut Value) {
    rename(object, "events.k8s.io/v1", |(newer, older)| (older, newer));
}

fn rename(
    object: &mut Value,
    version: &str,
    names: impl Fn((&'static str, &'static str)) -> (&'static str, &'static str),
) {
    if !object.is_object() {
        return;
    }
    object["apiVersion"] = version.into();
    for pair in NAMES {
        let (from, to) = names(pair);
        if let Some(value) = remove(object, from) {
            object[to] = value;
        }
    }
}

fn stored(object: &Value) -> Value {
    let mut stored = object.clone();
    to_core(&mut stored);
    stored
}

pub(in crate::kinds) struct EventsV1;

impl Strategy for EventsV1 {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Nothing
    }

    fn has_dependents(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        for key in ["regarding", "deprecatedSource"] {
            ensure_object(object, key);
        }
        for time in ["deprecatedFirstTimestamp", "deprecatedLastTimestamp", "eventTime"] {
            default_field(object, time, Value::Null);
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let event = stored(object);
        let mut errors = event::validate_legacy(&event, "reportingController");
        errors.extend(validate_metadata(object, true, dns1123_subdomain));
        errors.extend(unknown_finalizers(object));
        errors.extend(event::validate_series(&event));
        if !present(&event, "eventTime") {
            errors.push(FieldError::required(&Path::new("eventTime"), ""));
        }
        let kind = text(&event, "type");
        if !matches!(kind, "Normal" | "Warning") {
            errors.push(FieldError::invalid(&Path::new("type"), "", format!("has invalid value: {kind}")));
        }
        for key in ["firstTimestamp", "lastTimestamp"] {
            if present(&event, key) {
                errors.push(FieldError::invalid(&Path::new(key), "", "needs to be unset"));
            }
        }
        if event["count"].as_i64().unwrap_or(0) != 0 {
            errors.push(FieldError::invalid(&Path::new("count"), "", "needs to be unset"));
        }
        let source = &event["source"];
        if !text(source, "component").is_empty() || !text(source, "host").is_empty() {
            errors.push(FieldError::invalid(&Path::new("source"), "", "needs to be unset"));
        }
        errors
    }

    /// An event is a statement: only how often and when it was last seen changes.
    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        /// In upstream's order, which names the reason twice. Structures print as their layouts say.
        const STATED: [(&str, &str); 14] = [
            ("involvedObject", "ObjectReference"),
            ("reason", ""),
            ("message", ""),
            ("source", "EventSource"),
            ("firstTimestamp", ""),
            ("lastTimestamp", ""),
            ("count", ""),
            ("reason", ""),
            ("type", ""),
            ("eventTime", ""),
            ("action", ""),
            ("related", "ObjectReference"),
            ("reportingComponent", ""),
            ("reportingInstance", ""),
        ];
        let (new, old) = (stored(new), stored(old));
        let mut errors = event::validate_legacy(&new, "reportingController");
        errors.extend(validate_metadata_update(&new, &old));
        errors.extend(unknown_finalizers(&new));
        if new["series"] != old["series"] {
            errors.extend(event::validate_series(&new));
        }
        for (key, layout) in STATED {
            let (is, was) = (&new[key], &old[key]);
            if is == was || (key != "related" && empty(is) && empty(was)) {
                continue;
            }
            let path = Path::new(if key == "reportingComponent" { "reportingController" } else { key });
            // Of values, not pointers: an unset field is the zero of its type.
            let shown = match key {
                "related" if is.is_null() => is.clone(),
                "count" => is.as_i64().unwrap_or(0).into(),
                _ if is.is_null()
                    && layout.is_empty()
                    && !key.ends_with("Time")
                    && !key.ends_with("stamp") =>
                {
                    "".into()
                }
                _ => is.clone(),
            };
            let error = FieldError::invalid(&path, shown, IMMUTABLE);
            errors.push(match layout {
                "" => error,
                "ObjectReference" if key == "related" && is.is_null() => error,
                layout => error.rendered_as(go::compact(layout, is)),
            });
        }
        errors
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        Events.validate_name(name)
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &[
            "reason",
            "regarding.apiVersion",
            "regarding.fieldPath",
            "regarding.kind",
            "regarding.name",
            "regarding.namespace",
            "regarding.resourceVersion",
            "regarding.uid",
            "reportingController",
            "type",
        ]
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        match field.split_once('.') {
            Some((parent, key)) => text(&object[parent], key),
            None => text(object, field),
        }
        .to_owned()
    }

    fn columns(&self) -> &[Column] {
        Events.columns()
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        Events.cells(&stored(object), now)
    }

    fn create_on_update(&self) -> bool {
        Events.create_on_update()
    }
}

fn empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Number(number) => number.as_i64() == Some(0),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn names_of_fields_change_with_the_version() {
        let newer = json!({"apiVersion": "events.k8s.io/v1", "note": "n", "regarding": {"name": "p"},
            "deprecatedCount": 2, "reportingController": "c", "reason": "R"});
        let older = json!({"apiVersion": "v1", "message": "n", "involvedObject": {"name": "p"}, "count": 2,
            "reportingComponent": "c", "reason": "R"});
        let mut object = newer.clone();
        to_core(&mut object);
        assert_eq!(object, older);
        from_core(&mut object);
        assert_eq!(object, newer);
    }
}
