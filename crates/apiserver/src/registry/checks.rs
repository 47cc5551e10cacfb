//! Validation of what is about to be written.

use ferrite_api::codec::{has_empty, normalise_as_sent};
use ferrite_api::field::FieldErrors;
use ferrite_api::meta_validation::{path_segment, validate_metadata, validate_metadata_update};
use ferrite_api::resource::{MetadataUse, Resource};
use ferrite_json::Value;

/// An object as the client has sent it, where it differs from what will be stored in more than its spelling: messages
/// show lists and maps that are empty as they were sent.
pub(super) struct Sent(Option<Value>);

impl Sent {
    pub(super) fn of(resource: &Resource, object: &Value) -> Self {
        Self(resource.schema.filter(|type_| has_empty(type_, object)).map(|_| object.clone()))
    }

    /// The errors of an object, told of the object as it was sent. What is wrong is decided by what will be stored.
    pub(super) fn errors(
        self,
        resource: &Resource,
        object: &Value,
        validate: impl Fn(&Value) -> FieldErrors,
    ) -> FieldErrors {
        let errors = validate(object);
        let (Some(mut sent), Some(type_), false) = (self.0, resource.schema, errors.is_empty()) else {
            return errors;
        };
        normalise_as_sent(type_, &mut sent);
        let told = validate(&sent);
        let same = told.len() == errors.len()
            && told
                .iter()
                .zip(&errors)
                .all(|(a, b)| a.path == b.path && a.cause_reason() == b.cause_reason());
        if same { told } else { errors }
    }
}

/// What is wrong with a new object. As upstream: the kind looks first, then the server at what all kinds share.
pub(super) fn of_new(resource: &Resource, object: &Value) -> FieldErrors {
    let strategy = &resource.strategy;
    let namespaced = resource.is_namespaced();
    let mut errors = match strategy.metadata_use() {
        MetadataUse::Nothing => Vec::new(),
        MetadataUse::Change | MetadataUse::Everything => {
            validate_metadata(object, namespaced, |name| strategy.validate_name(name))
        }
    };
    errors.extend(strategy.validate(object));
    // The names of most kinds are held to more than this.
    let unchecked = strategy.metadata_use() == MetadataUse::Nothing
        || !path_segment(ferrite_api::meta::name(object)).is_empty();
    if errors.is_empty() && unchecked {
        errors = validate_metadata(object, namespaced, path_segment);
    }
    errors
}

/// What is wrong with a change. As upstream: the server looks at metadata and so does the kind, and both tell.
pub(super) fn of_change(
    resource: &Resource,
    subresource: Option<&str>,
    new: &Value,
    old: &Value,
) -> FieldErrors {
    let strategy = &resource.strategy;
    let metadata = || validate_metadata(new, resource.is_namespaced(), |name| strategy.validate_name(name));
    let mut errors = metadata();
    let changed = validate_metadata_update(new, old);
    errors.extend(changed.iter().cloned());
    let uses = strategy.metadata_use();
    if uses == MetadataUse::Everything && subresource.is_none() {
        errors.extend(metadata());
    }
    if uses != MetadataUse::Nothing {
        errors.extend(changed);
    }
    errors.extend(match subresource {
        None => strategy.validate_update(new, old),
        Some("status") => strategy.validate_status_update(new, old),
        Some(subresource) => strategy.validate_subresource_update(subresource, new, old),
    });
    errors
}
