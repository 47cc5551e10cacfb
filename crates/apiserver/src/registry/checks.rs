//! Validation of objects before they are written.

use super::View;
use ferrite_api::codec::{Step, empty_places, normalise};
use ferrite_api::field::{FieldError, FieldErrors};
use ferrite_api::meta_validation::{
    path_segment, unknown_finalizers, validate_metadata, validate_metadata_update,
};
use ferrite_api::resource::{MetadataUse, Resource};
use ferrite_json::{Map, Value};

/// Where a client has sent an empty list or map. Upstream's server has it in memory until the object is stored, and its
/// messages show it; all else takes it for none.
pub(super) struct Sent(Vec<(Vec<Step>, Value)>);

impl Sent {
    /// Removes empty values from an object.
    pub(super) fn take(resource: &Resource, object: &mut Value) -> Self {
        let Some(type_) = resource.schema else { return Self(Vec::new()) };
        resource.strategy.mark_sent_empty(object);
        let places = empty_places(type_, object);
        if !places.is_empty() {
            normalise(type_, object);
        }
        Self(places)
    }

    /// The errors of an object, reported for the object as it was sent. Validation uses the object to be
    /// stored.
    pub(super) fn errors(&self, object: &Value, validate: impl Fn(&Value) -> FieldErrors) -> FieldErrors {
        let errors = validate(object);
        if errors.is_empty() || self.0.is_empty() {
            return errors;
        }
        let mut sent = object.clone();
        for (place, empty) in &self.0 {
            restore(&mut sent, place, empty);
        }
        let told = validate(&sent);
        let same = told.len() == errors.len()
            && told
                .iter()
                .zip(&errors)
                .all(|(a, b)| a.path == b.path && a.cause_reason() == b.cause_reason());
        if same { told } else { errors }
    }
}

/// Puts something empty back, unless there is something by now, or its surroundings have gone.
fn restore(object: &mut Value, place: &[Step], empty: &Value) {
    let mut at = object;
    for step in place {
        // A structure that says nothing else is left out, too.
        if at.is_null() {
            *at = Value::Object(Map::new());
        }
        let below = match (step, at) {
            (Step::Index(index), Value::Array(list)) => list.get_mut(*index),
            (Step::Key(key), Value::Object(map)) => Some(map.entry(key.clone()).or_insert(Value::Null)),
            _ => None,
        };
        let Some(below) = below else { return };
        at = below;
    }
    if at.is_null() {
        *at = empty.clone();
    }
}

/// The errors of a new object. As upstream: the kind's validation comes first, then that of fields that all
/// kinds share.
pub(super) fn of_new(resource: &Resource, object: &Value) -> FieldErrors {
    let strategy = &resource.strategy;
    let namespaced = resource.is_namespaced();
    let mut errors = Vec::new();
    if strategy.metadata_use() != MetadataUse::Nothing {
        errors.extend(validate_metadata(object, namespaced, |name| strategy.validate_name(name)));
        errors.extend(own_finalizers(resource, object));
    }
    errors.extend(strategy.validate(object));
    // The names of most kinds are held to more than this.
    let unchecked = strategy.metadata_use() == MetadataUse::Nothing
        || !path_segment(ferrite_api::meta::name(object)).is_empty();
    if errors.is_empty() && unchecked {
        errors = validate_metadata(object, namespaced, path_segment);
    }
    errors
}

/// The error of a write that needs a label of its namespace, unless the namespace has it.
pub(super) fn of_namespace(
    view: &View,
    namespace: &str,
    needed: Option<(&'static str, FieldError)>,
) -> Option<FieldError> {
    let (label, error) = needed?;
    let found = view.get("", "namespaces", "", namespace);
    let labelled = found.is_some_and(|found| found["metadata"]["labels"][label] == "true");
    (!labelled).then_some(error)
}

/// The complaints of a kind's validation about finalizers. As upstream: some kinds, and custom objects, may have any. The
/// writer of a custom object is warned.
fn own_finalizers(resource: &Resource, object: &Value) -> FieldErrors {
    match resource.custom.is_none() && resource.strategy.knows_finalizers() {
        true => unknown_finalizers(object),
        false => Vec::new(),
    }
}

/// The errors of a change, and the warnings that its validation finds. As upstream: the server validates metadata and so does the kind, and both
/// report.
pub(super) fn of_change(
    resource: &Resource,
    subresource: Option<&str>,
    new: &Value,
    old: &Value,
    warnings: &mut Vec<String>,
) -> FieldErrors {
    let strategy = &resource.strategy;
    let metadata = || validate_metadata(new, resource.is_namespaced(), |name| strategy.validate_name(name));
    let mut errors = metadata();
    let changed = validate_metadata_update(new, old);
    errors.extend(changed.iter().cloned());
    let uses = match subresource {
        None => strategy.metadata_use(),
        Some("status" | "approval") => strategy.status_metadata_use(),
        Some(_) => MetadataUse::Change,
    };
    for _ in 0..uses.content() {
        errors.extend(metadata());
        errors.extend(own_finalizers(resource, new));
    }
    if uses.change() {
        errors.extend(changed);
        errors.extend(own_finalizers(resource, new));
    }
    errors.extend(match subresource {
        None => strategy.validate_change(new, old, warnings),
        Some("status") => strategy.validate_status_update(new, old),
        Some(subresource) => strategy.validate_subresource_update(subresource, new, old),
    });
    errors
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn what_was_sent_empty_is_told() {
        let kinds = ferrite_api::kinds::built_in();
        let resource = kinds.iter().find(|r| r.kind == "Pod" && r.version == "v1").unwrap();
        let mut pod = json!({"spec": {"hostAliases": [{"ip": "1.2.3.4", "hostnames": []}],
            "containers": [{"name": "c", "ports": []}], "nodeSelector": {}}});
        let sent = Sent::take(resource, &mut pod);
        assert_eq!(sent.0.len(), 3);
        assert!(pod["spec"]["nodeSelector"].is_null());
        let mut again = pod.clone();
        for (place, empty) in &sent.0 {
            restore(&mut again, place, empty);
        }
        assert_eq!(again["spec"]["containers"][0]["ports"], json!([]));
        assert_eq!(again["spec"]["nodeSelector"], json!({}));
    }
}
