//! Records the managers of fields: managedFields on every write.

mod conversions;

pub(crate) use conversions::Conversions;

use crate::extensions::Converter;
use crate::options::WriteOptions;
use ferrite_api::codec::normalise;
use ferrite_api::managed_fields::{self, ApplyError, OtherVersions, Writer};
use ferrite_api::resource::Resource;
use ferrite_api::{Gvk, Status, meta, schema};
use ferrite_json::{Value, json as object};
use jiff::Timestamp;
use std::sync::Arc;

/// Fields that a write through this endpoint cannot set, and so never owns.
fn ignored(resource: &Resource, subresource: Option<&str>) -> &'static [&'static str] {
    if subresource == Some("status") && resource.custom.is_some() {
        return &["metadata", "spec"];
    }
    let usual = || plain(resource, subresource);
    resource.strategy.reset_fields(subresource).unwrap_or_else(usual)
}

/// The schema of a custom kind.
fn custom(resource: &Resource) -> Option<&ferrite_api::custom::Schema> {
    resource.custom.as_ref().map(|custom| &custom.version().schema)
}

fn plain(resource: &Resource, subresource: Option<&str>) -> &'static [&'static str] {
    match subresource {
        Some(_) => &[],
        None if resource.subresource("status").is_some() => &["status"],
        None => &[],
    }
}

/// A write that is not an apply: what managedFields are brought up to date for.
#[derive(Clone, Copy)]
pub(crate) struct Recorded<'a> {
    pub resource: &'a Resource,
    pub options: &'a WriteOptions,
    pub subresource: Option<&'a str>,
    pub now: Timestamp,
}

/// Brings managedFields of `new` up to date for a write that is not an apply.
pub(crate) fn on_write(
    resource: &Resource,
    old: Option<&Value>,
    new: &mut Value,
    options: &WriteOptions,
    subresource: Option<&str>,
    now: Timestamp,
) {
    Recorded { resource, options, subresource, now }.record(old, new, None);
}

impl Recorded<'_> {
    /// As [`on_write`] for an update, where a webhook may have to convert objects for managers of other versions.
    pub async fn on_update(self, converter: &Arc<Converter>, old: &Value, new: &mut Value) {
        let conversions = Conversions::new(self.resource);
        if !conversions.concern(old) && !conversions.concern(new) {
            return self.record(Some(old), new, None);
        }
        let given = new.clone();
        let recorded = conversions.settle(converter, || {
            let mut new = given.clone();
            self.record(Some(old), &mut new, Some(&conversions));
            new
        });
        match recorded.await {
            Ok(recorded) => *new = recorded,
            // As upstream: where objects cannot be compared, nobody's fields are remembered.
            Err(status) => {
                tracing::warn!(error = status.message, "cannot convert an object for its managers");
                meta::metadata_mut(new).remove("managedFields");
            }
        }
    }

    fn record(self, old: Option<&Value>, new: &mut Value, conversions: Option<&Conversions<'_>>) {
        let Self { resource, options, subresource, now } = self;
        if let Some(old) = old
            && !fits_all_managers(resource, old, new, conversions)
        {
            meta::metadata_mut(new).remove("managedFields");
            return;
        }
        let writer = Writer {
            type_: resource.schema,
            custom: custom(resource),
            api_version: &resource.api_version(),
            stored: resource.storage,
            others: conversions.map(|all| all as &dyn OtherVersions),
            manager: &options.field_manager,
            subresource: subresource.unwrap_or_default(),
            ignored: ignored(resource, subresource),
            now,
        };
        match (subresource, old) {
            (Some("scale"), Some(old)) if has_usual_replicas(resource) => {
                managed_fields::update_scale(&writer, old, new);
            }
            (Some("scale"), old) => {
                managed_fields::update(&writer, old, new);
                forget_time(new, "scale");
            }
            _ => managed_fields::update(&writer, old, new),
        }
    }
}

/// As upstream: managers of another version are compared in that version. Where its schema lacks a field of the object,
/// nobody's fields are remembered.
fn fits_all_managers(
    resource: &Resource,
    old: &Value,
    new: &Value,
    conversions: Option<&Conversions<'_>>,
) -> bool {
    let Some(custom) = &resource.custom else { return true };
    let own = resource.api_version();
    let entries = old.pointer("/metadata/managedFields").and_then(Value::as_array).into_iter().flatten();
    let mut others: Vec<&str> = entries.filter_map(|entry| entry["apiVersion"].as_str()).collect();
    others.retain(|version| *version != own && custom.schema_of(version).is_some());
    others.sort_unstable();
    others.dedup();
    let fits = |version: &str, object: &Value| match conversions {
        None => custom.fits(version, object),
        // An object that is not converted yet is asked for, and compared in the next round.
        Some(all) => all.convert(object, version).is_none_or(|object| custom.fits(version, &object)),
    };
    others
        .into_iter()
        .map(|version| (fits(version, old), fits(version, new)))
        .all(|fits| fits == (true, true))
}

/// Are the replicas of a kind at `spec.replicas`? A custom kind may have them elsewhere.
fn has_usual_replicas(resource: &Resource) -> bool {
    let scale = resource.custom.as_ref().and_then(|custom| custom.version().scale.as_ref());
    scale.is_none_or(|scale| scale.spec_replicas == ["spec", "replicas"])
}

/// As [`on_write`], for a body that is answered and not stored.
pub(crate) fn on_body(
    gvk: &Gvk,
    body: &mut Value,
    options: &WriteOptions,
    subresource: &str,
    now: Timestamp,
) {
    let writer = Writer {
        type_: schema::of(gvk),
        custom: None,
        api_version: &gvk.api_version(),
        stored: None,
        others: None,
        manager: &options.field_manager,
        subresource,
        ignored: &[],
        now,
    };
    managed_fields::update(&writer, None, body);
}

/// Takes the time from the entries of a subresource: upstream loses it where the body is another kind's.
pub(crate) fn forget_time(object: &mut Value, subresource: &str) {
    let entries = meta::metadata_mut(object).get_mut("managedFields").and_then(Value::as_array_mut);
    for entry in entries.into_iter().flatten().filter_map(Value::as_object_mut) {
        if entry.get("subresource").is_some_and(|s| s == subresource) {
            entry.remove("time");
        }
    }
}

/// Merges an applied configuration into the stored object, or makes the object when there is none. The result counts when
/// `conversions` lack nothing.
pub(crate) fn apply(
    resource: &Resource,
    old: Option<&Value>,
    applied: &Value,
    options: &WriteOptions,
    subresource: Option<&str>,
    conversions: &Conversions<'_>,
) -> Result<Value, Status> {
    let type_ = resource.schema;
    let others = old.filter(|old| conversions.concern(old)).map(|_| conversions as &dyn OtherVersions);
    let writer = Writer {
        type_,
        custom: custom(resource),
        api_version: &resource.api_version(),
        stored: resource.storage,
        others,
        manager: &options.field_manager,
        subresource: subresource.unwrap_or_default(),
        ignored: ignored(resource, subresource),
        now: Timestamp::now(),
    };
    let merged = managed_fields::apply(&writer, old, applied, options.force)
        .map_err(|e| refusal(&e, resource, meta::name(applied)))?;
    let mut value = merged.object;
    if let Some(type_) = type_ {
        value = resource.conform(value).map_err(|e| Status::bad_request(e.to_string()))?.value;
        normalise(type_, &mut value);
    }
    value["kind"] = (*resource.kind).into();
    value["apiVersion"] = resource.api_version().into();
    Ok(value)
}

/// Checks an applied configuration against the schema.
pub(crate) fn check(resource: &Resource, applied: &Value) -> Result<(), Status> {
    let version = resource.api_version();
    let checked = match (resource.schema, custom(resource)) {
        (Some(type_), _) => managed_fields::validate(type_, applied, &version),
        (None, Some(schema)) => managed_fields::validate_custom(schema, applied, &version),
        (None, None) => Ok(()),
    };
    checked.map_err(|e| refusal(&e, resource, meta::name(applied)))
}

/// Checks that the values of an applied configuration can be read: amounts, times, bytes. The schema does not know these.
pub(crate) fn check_values(resource: &Resource, applied: &Value) -> Result<(), Status> {
    let Some(type_) = resource.schema else { return Ok(()) };
    ferrite_api::codec::json::conform(type_, applied).map(|_| ()).map_err(|error| {
        let version = resource.api_version();
        let version = if version.contains('/') { version } else { format!("/{version}") };
        let (namespace, name) = (meta::str(applied, "namespace"), meta::name(applied));
        let kind = format!("{version}, Kind={}", resource.kind);
        let why = error.unstructured();
        Status::new(
            500,
            "",
            format!(
                "failed to convert new object ({namespace}/{name}; {kind}) to proper version: unable to convert \
                 unstructured object to {kind}: {why}"
            ),
        )
    })
}

fn refusal(error: &ApplyError, resource: &Resource, name: &str) -> Status {
    match error {
        ApplyError::Conflicts(conflicts) => {
            let mut status = Status::new(409, "Conflict", error.to_string());
            let causes: Vec<Value> = conflicts
                .iter()
                .map(|c| {
                    object!({
                        "reason": "FieldManagerConflict",
                        "message": format!("conflict with {}", c.manager),
                        "field": c.path.to_string(),
                    })
                })
                .collect();
            let mut details = ferrite_json::Map::new();
            details.insert("causes", causes.into());
            status.details = Some(Box::new(details));
            status
        }
        ApplyError::ManagedFieldsGiven => Status::bad_request(error.to_string()),
        other => {
            tracing::debug!(resource = %resource.plural, name, error = %other, "apply failed");
            Status::new(500, "", other.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn values_that_cannot_be_read_are_refused_in_upstreams_words() {
        let resources = ferrite_api::kinds::built_in();
        let secrets = resources.iter().find(|resource| resource.plural == "secrets").expect("known");
        let secret = |data: Value| json!({"metadata": {"name": "s"}, "data": data});
        assert!(check_values(secrets, &secret(json!({"a": "YQ=="}))).is_ok());
        let refused = check_values(secrets, &secret(json!({"a": "!!"}))).expect_err("no base64");
        assert_eq!(refused.code, 500);
        assert_eq!(
            refused.message,
            "failed to convert new object (/s; /v1, Kind=Secret) to proper version: unable to convert unstructured \
             object to /v1, Kind=Secret: error decoding from json: illegal base64 data at input byte 0"
        );
    }
}
