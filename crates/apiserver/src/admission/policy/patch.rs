//! Patches that mutations make.

use super::compiled::PatchType;
use crate::admission::Attributes;
use ferrite_api::codec::{self, Decoded, normalise};
use ferrite_api::resource::Resource;
use ferrite_api::schema::TypeRef;
use ferrite_api::{Gvk, Status, managed_fields, patch, schema};
use ferrite_cel::{Map as CelMap, Value as Cel};
use ferrite_json::{Value, json};
use std::sync::Arc;

/// Why a mutation cannot be done.
#[derive(Debug)]
pub(super) enum PatchFailure {
    /// The policy's failure policy decides.
    Error(String),
    /// The request fails, whatever the policy says.
    Status(Status),
}

/// The patch of a mutation, from the value of its expression.
pub(super) fn of_value(patch: PatchType, value: &Cel<'_>) -> Result<Value, String> {
    match patch {
        PatchType::ApplyConfiguration => match value {
            Cel::Object(object) => {
                check_names(value, &object.type_name)?;
                value.to_json().map_err(|error| error.to_string())
            }
            other => Err(format!(
                "unsupported return type from ApplyConfiguration expression: {}",
                other.type_of().declared()
            )),
        },
        PatchType::JsonPatch => {
            let Cel::List(list) = value else {
                return Err("type mismatch: JSONPatchType.expression should evaluate to array".to_owned());
            };
            list.iter().map(|item| operation(&item)).collect::<Result<Vec<_>, _>>().map(Value::Array)
        }
    }
}

/// An operation of a JSON patch from a `JSONPatch{...}`.
fn operation(item: &Cel<'_>) -> Result<Value, String> {
    let Cel::Object(object) = item else {
        return Err(
            "type mismatch: JSONPatchType.expression should evaluate to array of JSONPatch".to_owned()
        );
    };
    let text = |field: &str| object.get(field).and_then(Cel::as_str).unwrap_or_default();
    let mut operation = json!({"op": text("op"), "path": text("path")});
    if !text("from").is_empty() {
        operation["from"] = text("from").into();
    }
    if let Some(value) = object.get("value") {
        if let Cel::Object(object) = value {
            check_names(value, &object.type_name)?;
        }
        operation["value"] = value.to_json().map_err(|error| {
            format!("JSONPath valueExpression evaluated to a type that could not marshal to JSON: {error}")
        })?;
    }
    Ok(operation)
}

/// As upstream: an object within a field must be of the type that the path of fields names.
fn check_names(value: &Cel<'_>, root: &str) -> Result<(), String> {
    let mut wrong = Vec::new();
    find_wrong_names(value, root, &mut wrong);
    if wrong.is_empty() { Ok(()) } else { Err(format!("type mismatch: {}", wrong.join("\n"))) }
}

fn find_wrong_names(value: &Cel<'_>, expected: &str, wrong: &mut Vec<String>) {
    match value {
        Cel::Object(object) => {
            let found: &Arc<str> = &object.type_name;
            if **found != *expected {
                wrong.push(format!(
                    "unexpected type name {found:?}, expected {expected:?}, which matches field name path from root Object type"
                ));
            }
            for (name, value) in &object.fields {
                find_wrong_names(value, &format!("{expected}.{name}"), wrong);
            }
        }
        Cel::List(list) => list.iter().for_each(|item| find_wrong_names(&item, expected, wrong)),
        // A value from JSON has no named object types.
        Cel::Map(CelMap::Json { .. }) => {}
        Cel::Map(map) => map.entries().iter().for_each(|(_, value)| find_wrong_names(value, expected, wrong)),
        _ => {}
    }
}

/// The object that a patch makes of another.
pub(super) fn apply(
    kind: PatchType,
    attributes: &Attributes<'_>,
    matched: &Resource,
    object: &Value,
    mut patch: Value,
) -> Result<Value, PatchFailure> {
    let own = attributes.kind();
    let is_resource = own == attributes.resource.gvk();
    let (gvk, type_) = match is_resource {
        true => (matched.gvk(), matched.schema),
        false => (own.clone(), schema::of(&own)),
    };
    let custom = matched.custom.as_ref().filter(|_| is_resource).map(|custom| &custom.version().schema);
    if type_.is_none() && custom.is_none() {
        return Err(PatchFailure::Status(Status::unavailable(format!(
            "Resource kind {}/{}, Kind={} not found. There can be a delay between when CustomResourceDefinitions are created and when they are available.",
            gvk.group, gvk.version, gvk.kind
        ))));
    }
    let mut patched = match kind {
        PatchType::ApplyConfiguration => {
            for key in ["apiVersion", "kind"] {
                if let Some(value) = object.get(key) {
                    patch[key] = value.clone();
                }
            }
            let merged = managed_fields::merge(type_, custom, object, &patch)
                .map_err(|error| PatchFailure::Error(format!("error applying patch: {error}")))?;
            let conformed = conform(matched, type_, merged).map_err(|error| {
                PatchFailure::Error(format!(
                    "error applying patch: failed to convert typed object to object: {error}"
                ))
            })?;
            conformed.value
        }
        PatchType::JsonPatch => {
            let mut patched = object.clone();
            match patch::json_patch_explained(&mut patched, &patch) {
                // As upstream: a test that fails leaves the object as it is.
                Ok(false) => return Ok(object.clone()),
                Ok(true) => {}
                Err(error) => return Err(PatchFailure::Error(format!("JSON Patch: {error}"))),
            }
            let internal = |why: String| PatchFailure::Status(Status::internal(why));
            let conformed = conform(matched, type_, patched).map_err(|error| internal(error.to_string()))?;
            // Unknown fields of custom kinds are pruned, not refused.
            if let Some(why) = conformed.strict_error().filter(|_| type_.is_some()) {
                return Err(internal(why));
            }
            conformed.value
        }
    };
    named(&mut patched, &gvk);
    if is_resource {
        matched.strategy.default(&mut patched);
    }
    Ok(patched)
}

fn named(object: &mut Value, gvk: &Gvk) {
    object["kind"] = gvk.kind.as_str().into();
    object["apiVersion"] = gvk.api_version().into();
}

/// Brings an object under its type again.
fn conform(
    resource: &Resource,
    type_: Option<TypeRef>,
    object: Value,
) -> Result<Decoded, codec::DecodeError> {
    match type_ {
        Some(type_) => {
            let mut decoded = codec::json::conform(type_, &object)?;
            normalise(type_, &mut decoded.value);
            Ok(decoded)
        }
        None => resource.conform(object),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_cel::{Activation, Environment, Limits};

    #[test]
    fn values_become_patches_if_their_types_have_the_right_names() {
        let environment = Environment::kubernetes(36).with_mutations().with_mixed_literals();
        let rows = [
            (
                PatchType::ApplyConfiguration,
                "Object{spec: Object.spec{replicas: 3, containers: [Object.spec.containers{name: 'a'}]}}",
                Ok(json!({"spec": {"replicas": 3, "containers": [{"name": "a"}]}})),
            ),
            (
                PatchType::ApplyConfiguration,
                "Object{spec: Object.wrong{}}",
                Err(
                    "type mismatch: unexpected type name \"Object.wrong\", expected \"Object.spec\", which matches field name path from root Object type",
                ),
            ),
            (
                PatchType::JsonPatch,
                "[JSONPatch{op: 'add', path: '/spec', value: Object.spec{a: 1}}, JSONPatch{op: 'move', from: '/a', path: '/b'}]",
                Ok(
                    json!([{"op": "add", "path": "/spec", "value": {"a": 1}}, {"op": "move", "path": "/b", "from": "/a"}]),
                ),
            ),
            (
                PatchType::JsonPatch,
                "[JSONPatch{op: 'add', path: '/spec', value: Object.spec{a: Object.b{}}}]",
                Err(
                    "type mismatch: unexpected type name \"Object.b\", expected \"Object.spec.a\", which matches field name path from root Object type",
                ),
            ),
        ];
        for (kind, expression, expected) in rows {
            let program = environment.compile(expression).expect(expression);
            let value = program.evaluate(&Activation::new(), Limits::default()).result.expect(expression);
            assert_eq!(of_value(kind, &value), expected.map_err(str::to_owned), "{expression}");
        }
    }
}
