//! The parts of `metadata` that the server owns.

use crate::options::Warnings;
use ferrite_api::field::{FieldError, Problem};
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use jiff::Timestamp;
use rand::RngExt;
use std::collections::BTreeSet;

/// Upstream's alphabet for generated names: no vowels and no look-alikes, so no words come about.
const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
const SUFFIX: usize = 5;
/// A generated name never exceeds the length of a DNS label.
const MAX_BASE: usize = 63 - SUFFIX;

/// A time as the API writes it.
/// A time as Leases have it.
pub(crate) fn micro_time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

pub(crate) fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

pub(crate) fn generate_name(base: &str) -> String {
    let mut name: String = base.chars().take(MAX_BASE).collect();
    let mut random = rand::rng();
    name.extend((0..SUFFIX).map(|_| char::from(ALPHABET[random.random_range(0..ALPHABET.len())])));
    name
}

/// Sets the identity of a new object and drops fields that only the server may set.
pub(crate) fn stamp_new(resource: &Resource, object: &mut Value, namespace: &str, now: Timestamp) {
    let strategy = &resource.strategy;
    let counts = strategy.has_generation();
    let generated = counts && strategy.starts_generation();
    let metadata = meta::metadata_mut(object);
    for key in ["resourceVersion", "selfLink", "deletionTimestamp", "deletionGracePeriodSeconds"] {
        metadata.remove(key);
    }
    // As upstream: kinds without a generation of their own keep the client's value.
    if counts {
        metadata.remove("generation");
    }
    metadata.insert("uid", crate::ids::random().to_string().into());
    metadata.insert("creationTimestamp", time(now).into());
    if resource.is_namespaced() {
        metadata.insert("namespace", namespace.into());
    }
    if generated {
        metadata.insert("generation", 1.into());
    }
}

/// Behind `.metadata.ownerReferences contains duplicate entries` in a warning about an object as the client
/// sent it.
pub(crate) const OWNERS_GIVEN: &str = "";
/// The same about an object after admission.
pub(crate) const OWNERS_ADMITTED: &str = " after mutating admission happens";

/// Keeps one reference to each owner and warns of the others.
pub(crate) fn merge_owners(object: &mut Value, warnings: &Warnings, when: &str) {
    let metadata = meta::metadata_mut(object);
    let Some(owners) = metadata.get_mut("ownerReferences").and_then(Value::as_array_mut) else { return };
    let mut seen = BTreeSet::new();
    let mut again = Vec::new();
    owners.retain(|owner| {
        let uid = owner.get("uid").and_then(Value::as_str).unwrap_or_default().to_owned();
        let first = seen.insert(uid.clone());
        if !first {
            again.push(uid);
        }
        first
    });
    if !again.is_empty() {
        warnings.add(format!(
            ".metadata.ownerReferences contains duplicate entries{when}; API server dedups owner references in \
             1.20+, and may reject such requests as early as 1.24; please fix your requests; duplicate UID(s) \
             observed: {}",
            again.join(", ")
        ));
    }
}

/// An object that is sent to a name has that name.
pub(crate) fn check_name(object: &Value, wanted: &str) -> Result<(), Status> {
    let why = match meta::name(object) {
        "" => format!(
            "the name of the object ({wanted} based on URL) was undeterminable: name must be provided"
        ),
        name if name != wanted => {
            format!("the name of the object ({name}) does not match the name on the URL ({wanted})")
        }
        _ => return Ok(()),
    };
    Err(Status::bad_request(why))
}

/// The refusal of an object. As upstream: it names the group of the kind that is stored.
pub(crate) fn invalid(resource: &Resource, name: &str, errors: &[FieldError]) -> Status {
    let stored = resource.storage_gvk();
    if resource.custom.is_none() {
        return Status::invalid(&stored.group, &resource.kind, name, errors);
    }
    // As upstream: an object of a custom kind has the kind that it names.
    let said = |key: &str| {
        let error = errors.iter().find(|error| error.path.as_str() == key)?;
        if let Problem::Invalid(Value::String(text)) = &error.problem { Some(text.as_str()) } else { None }
    };
    let kind = said("kind").unwrap_or(&resource.kind);
    let group = said("apiVersion").map(|version| version.split_once('/').map_or("", |(group, _)| group));
    Status::invalid(group.unwrap_or(&stored.group), kind, name, errors)
}

/// Copies the fields that an update may never change from the stored object.
pub(crate) fn keep_identity(new: &mut Value, old: &Value) {
    // A UID that differs stays, to be refused: it is immutable.
    if meta::uid(new).is_empty() {
        meta::set_str(new, "uid", meta::uid(old));
    }
    let before = old.get("metadata").and_then(Value::as_object);
    let metadata = meta::metadata_mut(new);
    for key in [
        "creationTimestamp",
        "namespace",
        "selfLink",
        "resourceVersion",
        "generation",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    ] {
        let kept = before.and_then(|before| before.get(key));
        let given = metadata.get(key);
        // The usual case: the client has sent what it has read.
        if given == kept {
            continue;
        }
        // Another grace period stays, to be refused.
        if key == "deletionGracePeriodSeconds" && given.is_some_and(Value::is_number) {
            continue;
        }
        match kept {
            Some(value) => metadata.insert(key, value.clone()),
            // Only a delete begins a deletion. A client that sets the field gets an error: it is immutable.
            None if key.starts_with("deletion") => continue,
            None => metadata.remove(key),
        };
    }
}

/// Bumps the generation when a field that counts has changed.
pub(crate) fn bump_generation(resource: &Resource, new: &mut Value, old: &Value) {
    if resource.strategy.generation_changes(new, old) {
        increment_generation(new);
    }
}

pub(crate) fn increment_generation(object: &mut Value) {
    let generation = object.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or(0);
    meta::metadata_mut(object).insert("generation", (generation + 1).into());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_named_once() {
        let mut object = ferrite_json::json!({"metadata": {"ownerReferences": [
            {"uid": "a", "name": "x"}, {"uid": "b"}, {"uid": "a", "name": "y"}]}});
        let warnings = Warnings::default();
        merge_owners(&mut object, &warnings, OWNERS_GIVEN);
        let kept = ferrite_json::json!([{"uid": "a", "name": "x"}, {"uid": "b"}]);
        assert_eq!(object["metadata"]["ownerReferences"], kept);
        assert!(warnings.take()[0].ends_with("duplicate UID(s) observed: a"));
        merge_owners(&mut object, &warnings, OWNERS_GIVEN);
        assert!(warnings.take().is_empty());
    }

    #[test]
    fn generated_names_are_short_enough_and_differ() {
        let long = "x".repeat(200);
        let name = generate_name(&long);
        assert_eq!(name.len(), 63);
        assert_ne!(generate_name("web-"), generate_name("web-"));
        assert!(generate_name("web-")[4..].bytes().all(|b| ALPHABET.contains(&b)));
    }
}
