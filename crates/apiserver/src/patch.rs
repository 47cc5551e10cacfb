//! Patch: JSON, merge, strategic merge and apply.

pub(crate) mod render;

use crate::call::Call;
use crate::encode;
use crate::http::Response;
use crate::managed::Conversions;
use crate::options::{FieldValidation, WriteOptions};
use crate::registry::stored::Written;
use crate::registry::{Update, beside_spec};
use ::http::header;
use bytes::Bytes;
use ferrite_api::codec::{self, DecodeError, Decoded, yaml};
use ferrite_api::field::{FieldError, Path};
use ferrite_api::resource::Resource;
use ferrite_api::schema::TypeRef;
use ferrite_api::{Gvk, Status, meta, patch};
use ferrite_json::{Map, Value, json};
use std::sync::{Mutex, PoisonError};

/// The kind of patch, from the content type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Json,
    Merge,
    Strategic,
    Apply,
}

fn unsupported() -> Status {
    Status::new(415, "UnsupportedMediaType", "415: Unsupported Media Type").with_empty_details()
}

fn patch_status(error: patch::PatchError) -> Status {
    match error.code() {
        400 => Status::bad_request(error.to_string()),
        413 => Status::new(413, "RequestEntityTooLarge", error.to_string()),
        422 => Status::new(422, "Invalid", error.to_string()).with_empty_details(),
        code => Status::new(code, "", error.to_string()),
    }
}

/// The refusal of an object of a custom kind that a patch has made.
fn refuse_custom(patched: &Value, why: String) -> Status {
    let error = FieldError::invalid(&Path::new("patch"), patched.to_string(), why);
    Status::invalid("", "", "", &[error])
}

/// A version or a kind that is no text: upstream reads both before the object.
fn type_meta_problem(patched: &Value) -> Option<String> {
    ["apiVersion", "kind"].into_iter().find_map(|key| {
        let value = patched.get(key).filter(|value| !value.is_null() && !value.is_string())?;
        Some(format!(
            "couldn't get version/kind; json parse error: json: cannot unmarshal {} into Go struct field .{key} of type string",
            patch::json_name(value)
        ))
    })
}

fn is_unversioned(object: &Value) -> bool {
    object.get("apiVersion").and_then(Value::as_str).unwrap_or_default().is_empty()
}

/// Refuses a patch of a kind that its target does not take.
pub(crate) fn check_kind(resource: &Resource, content_type: &str) -> Result<(), Status> {
    let kind = Kind::of(content_type);
    if resource.custom.is_none() {
        return kind.map(drop);
    }
    match kind {
        Ok(Kind::Json | Kind::Merge | Kind::Apply) => Ok(()),
        _ => Err(Status::new(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
        )),
    }
}

pub(crate) fn is_apply(content_type: &str) -> bool {
    Kind::of(content_type).is_ok_and(|kind| kind == Kind::Apply)
}

/// Returns true if the body is a kind of patch: others find no route.
pub(crate) fn is_patch(headers: &::http::HeaderMap) -> bool {
    let given = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    Kind::of(given).is_ok()
}

impl Kind {
    pub fn of(content_type: &str) -> Result<Self, Status> {
        Ok(match content_type.split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => Self::Json,
            "application/merge-patch+json" => Self::Merge,
            "application/strategic-merge-patch+json" => Self::Strategic,
            "application/apply-patch+yaml" => Self::Apply,
            _ => return Err(unsupported()),
        })
    }

    /// Applies a patch that is not an apply to `target`.
    pub fn apply_to(self, type_: TypeRef, target: &mut Value, document: &Value) -> Result<(), Status> {
        match self {
            Self::Strategic => patch::strategic_merge(type_, target, document).map_err(patch_status),
            other => other.merge_into(target, document),
        }
    }

    /// Patches `old` and brings the result under its type again. Returns it with the findings of strict
    /// validation.
    pub fn patched(
        self,
        type_: TypeRef,
        gvk: &Gvk,
        old: &Value,
        document: &Value,
    ) -> Result<Decoded, Status> {
        let mut patched = old.clone();
        self.apply_to(type_, &mut patched, document)?;
        let refused = |why: String| self.refused(type_, &patched, document, why);
        // A strategic patch is merged into an object that already has its type, whatever the patch calls it.
        if self != Self::Strategic
            && let Some(why) = type_meta_problem(&patched)
        {
            return Err(refused(why));
        }
        if self != Self::Strategic
            && let Some(why) = crate::call::kind_problem(&patched, gvk)
        {
            return Err(refused(why));
        }
        if self != Self::Strategic && is_unversioned(&patched) {
            // As upstream: an object without a version is read as one of the internal version, which has none of the
            // fields.
            let fields = patched.as_object().into_iter().flat_map(Map::keys);
            let fields = fields.filter(|name| !matches!(name.as_str(), "apiVersion" | "kind"));
            let strict = fields.map(|name| format!("unknown field {name:?}")).collect();
            return Ok(Decoded { value: json!({}), strict });
        }
        let conformed = beside_spec(&mut patched, old, |patched| {
            let strict = codec::json::conform_in_place(type_, patched)?;
            ferrite_api::codec::normalise_as_sent(type_, patched);
            Ok::<_, DecodeError>(strict)
        });
        let strict = match conformed {
            Ok(strict) => strict,
            Err(error) => {
                let why = if self == Self::Strategic { error.unstructured() } else { error.to_string() };
                return Err(self.refused(type_, &patched, document, why));
            }
        };
        patched["kind"] = gvk.kind.clone().into();
        patched["apiVersion"] = gvk.api_version().into();
        Ok(Decoded { value: patched, strict })
    }

    /// As [`Kind::patched`], for an object of a custom kind.
    fn patched_custom(self, resource: &Resource, old: &Value, document: &Value) -> Result<Decoded, Status> {
        let mut patched = old.clone();
        self.merge_into(&mut patched, document)?;
        if !patched.is_object() {
            let why = format!(
                "json: cannot unmarshal {} into Go value of type map[string]interface {{}}",
                patch::json_name(&patched)
            );
            return Err(refuse_custom(&patched, why));
        }
        if patched.get("kind").and_then(Value::as_str).unwrap_or_default().is_empty() {
            let why = format!("Object 'Kind' is missing in '{patched}'");
            return Err(refuse_custom(&patched, why));
        }
        resource.conform(patched.clone()).map_err(|e| refuse_custom(&patched, e.to_string()))
    }

    /// Applies a patch that needs no type.
    fn merge_into(self, target: &mut Value, document: &Value) -> Result<(), Status> {
        match self {
            Self::Json => patch::json_patch(target, document).map_err(patch_status),
            Self::Merge => {
                patch::merge_patch(target, document);
                Ok(())
            }
            Self::Strategic | Self::Apply => Err(unsupported()),
        }
    }

    /// The error for an invalid result of a patch of `old`.
    pub fn refuse_patched(self, type_: TypeRef, old: &Value, document: &Value, why: String) -> Status {
        let mut patched = old.clone();
        match self.apply_to(type_, &mut patched, document) {
            Ok(()) => self.refused(type_, &patched, document, why),
            Err(status) => status,
        }
    }

    /// Upstream quotes the value that it could not decode: the patched object, or a strategic patch itself.
    fn refused(self, type_: TypeRef, patched: &Value, document: &Value, why: String) -> Status {
        let quoted = match self {
            Self::Strategic => patch::go_format(document),
            Self::Merge => render::object(type_, patched, document, &render::Moved::new()),
            _ => {
                let moved = render::moved(type_, document);
                render::object(type_, patched, &render::touched(document), &moved)
            }
        };
        let error = FieldError::invalid(&Path::new("patch"), quoted, why);
        Status::invalid("", "", "", &[error])
    }
}

pub(crate) async fn handle(call: &mut Call, subresource: Option<&str>) -> Result<Response, Status> {
    let kind = Kind::of(call.header(header::CONTENT_TYPE))?;
    let options = call.write_options()?;
    let body = call.read_body().await?;
    call.audit_patch(&body);
    let (code, result) = match kind {
        Kind::Apply => apply(call, &body, subresource, &options).await?,
        kind => (200, plain(call, kind, &body, subresource, &options).await?),
    };
    encode::written(code, &call.resource, &result, call.representation, call.include_object()?)
}

async fn plain(
    call: &mut Call,
    kind: Kind,
    body: &Bytes,
    subresource: Option<&str>,
    options: &WriteOptions,
) -> Result<Written, Status> {
    let type_ = match call.resource.custom {
        Some(_) => None,
        None => Some(call.schema()?),
    };
    // A missing object is reported before the patch is parsed.
    let document = parse(kind, body, options.field_validation);
    let found = Mutex::new(Vec::new());
    let gvk = call.resource.gvk();
    let strict = options.field_validation == FieldValidation::Strict;
    let change = |old: &Value| {
        let Decoded { value: document, strict: complaints } = document.as_ref().map_err(Status::clone)?;
        let mut decoded = match type_ {
            Some(type_) => kind.patched(type_, &gvk, old, document)?,
            None => kind.patched_custom(&call.resource, old, document)?,
        };
        if kind == Kind::Json && type_.is_some() {
            decoded.strict.splice(0..0, repeated_keys(document, complaints, &decoded.value));
        }
        decoded.strict.splice(0..0, complaints.iter().cloned());
        if strict && let Some(why) = decoded.strict_error() {
            return Err(match type_ {
                Some(type_) => kind.refuse_patched(type_, old, document, why),
                None => {
                    let mut patched = old.clone();
                    kind.merge_into(&mut patched, document)?;
                    refuse_custom(&patched, why)
                }
            });
        }
        *found.lock().unwrap_or_else(PoisonError::into_inner) =
            decoded.warnings().map(str::to_owned).collect();
        Ok(decoded.value)
    };
    let result = call
        .server
        .registry
        .update(&Update {
            write: call.write(options),
            name: call.name(),
            subresource,
            change: &change,
            replaces: false,
            applied: None,
        })
        .await;
    // A client learns of unknown fields even when the object is refused for another reason.
    if options.field_validation == FieldValidation::Warn {
        call.warnings.extend(found.into_inner().unwrap_or_else(PoisonError::into_inner));
    }
    result
}

const NO_MERGE_PATCH: &str = "Invalid JSON Patch";

/// The patch itself as a value, with the findings of strict validation in it.
///
/// As upstream: unless the validation is `Ignore`, the server first checks that the document is valid for
/// its kind of patch, and names the one of its own types that it could not fill.
pub(crate) fn parse(kind: Kind, body: &Bytes, validation: FieldValidation) -> Result<Decoded, Status> {
    let looks = validation != FieldValidation::Ignore;
    let refuse = |why: String| match kind {
        Kind::Json | Kind::Merge if looks => Status::bad_request(format!("error decoding patch: {why}")),
        Kind::Merge => Status::bad_request(NO_MERGE_PATCH),
        _ => Status::bad_request(why),
    };
    let mut document = codec::json::decode_any(body).map_err(|e| refuse(e.to_string()))?;
    let wanted = match (kind, &document.value) {
        (Kind::Merge, Value::Null) => return Err(Status::bad_request(NO_MERGE_PATCH)),
        // Nothing at all changes nothing.
        (Kind::Json, Value::Null) => {
            document.value = json!([]);
            return Ok(document);
        }
        (_, Value::Null) => {
            document.value = json!({});
            return Ok(document);
        }
        (Kind::Json, Value::Array(operations)) => {
            if looks {
                check_operations(operations, &mut document.strict).map_err(refuse)?;
            }
            return Ok(document);
        }
        (Kind::Json, _) if looks => "[]handlers.jsonPatchOp",
        (Kind::Json, _) => "jsonpatch.Patch",
        (_, Value::Object(_)) => return Ok(document),
        // The array becomes the patched object, and is refused as one.
        (Kind::Merge, Value::Array(_)) if !looks => return Ok(document),
        _ => "map[string]interface {}",
    };
    Err(refuse(format!(
        "json: cannot unmarshal {} into Go value of type {wanted}",
        patch::json_name(&document.value)
    )))
}

/// Members of an operation of a JSON patch; all but the value are text.
const OPERATION: [&str; 4] = ["op", "path", "from", "value"];

/// Checks that the operations fit upstream's type for them, and collects its complaints about unknown
/// members.
fn check_operations(operations: &[Value], strict: &mut Vec<String>) -> Result<(), String> {
    let mut unknown = Vec::new();
    for (index, operation) in operations.iter().enumerate() {
        let found = match operation {
            Value::Null => continue,
            Value::Object(members) => {
                for (name, value) in members {
                    match OPERATION.iter().position(|known| *known == name.as_str()) {
                        None => unknown.push(format!("unknown field \"[{index}].{name}\"")),
                        Some(3) => {}
                        Some(_) if value.is_string() || value.is_null() => {}
                        Some(_) => {
                            return Err(format!(
                                "json: cannot unmarshal {} into Go struct field jsonPatchOp.{name} of type string",
                                patch::json_name(value)
                            ));
                        }
                    }
                }
                continue;
            }
            other => patch::json_name(other),
        };
        return Err(format!("json: cannot unmarshal {found} into Go value of type handlers.jsonPatchOp"));
    }
    strict.append(&mut unknown);
    for complaint in strict {
        *complaint = format!("json patch {complaint}");
    }
    Ok(())
}

/// Upstream's complaints about the patched object where an operation puts a value into it whose keys repeat. It keeps
/// the value as text, and finds the repeated keys twice.
fn repeated_keys(document: &Value, complaints: &[String], patched: &Value) -> Vec<String> {
    let operations = document.as_array().map(Vec::as_slice).unwrap_or_default();
    let repeated = complaints.iter().filter_map(|complaint| {
        let place = complaint.strip_prefix("json patch duplicate field \"[")?.strip_suffix('"')?;
        let (index, below) = place.split_once("].value.")?;
        let operation = operations.get(index.parse::<usize>().ok()?)?;
        let is = |name: &str| operation.get(name).and_then(Value::as_str).unwrap_or_default();
        if !matches!(is("op"), "add" | "replace") {
            return None;
        }
        // A value under a field that the kind does not have is not read.
        let into = patched.pointer(is("path"))?;
        into.get(below.split(['.', '[']).next()?)?;
        let mut at = String::new();
        for token in is("path").split('/').skip(1) {
            let token = token.replace("~1", "/").replace("~0", "~");
            match token.parse::<usize>() {
                Ok(index) => at.push_str(&format!("[{index}]")),
                Err(_) if at.is_empty() => at.push_str(&token),
                Err(_) => at.push_str(&format!(".{token}")),
            }
        }
        let dot = if at.is_empty() { "" } else { "." };
        Some(format!("duplicate field \"{at}{dot}{below}\""))
    });
    repeated.collect()
}

/// An applied configuration may leave out where it belongs, but not name another place.
fn check_place(call: &Call, applied: &Value) -> Result<(), Status> {
    crate::registry::metadata::check_name(applied, call.name())?;
    let namespace = meta::namespace(applied);
    if call.resource.is_namespaced() && !namespace.is_empty() && namespace != call.namespace() {
        return Err(Status::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    Ok(())
}

/// Checks that an applied configuration names its kind.
fn check_applied(document: &Value, expected: &Gvk) -> Result<(), Status> {
    let found = match document {
        Value::Object(map) => {
            let text = |key: &str| map.get(key).and_then(Value::as_str).unwrap_or_default();
            let (group, version) = text("apiVersion").split_once('/').unwrap_or(("", text("apiVersion")));
            if (group, version, text("kind")) != (&*expected.group, &*expected.version, &*expected.kind) {
                let why = format!("invalid object type: {group}/{version}, Kind={}", text("kind"));
                return Err(Status::bad_request(why));
            }
            return Ok(());
        }
        Value::Null => return Err(Status::bad_request("invalid object type: /, Kind=")),
        other => patch::json_name(other),
    };
    Err(Status::bad_request(format!(
        "error decoding YAML: error unmarshaling JSON: while decoding JSON: json: cannot unmarshal {found} into Go value of type map[string]interface {{}}"
    )))
}

/// As [`check_applied`], for a body that has not been read.
pub(crate) fn check_applied_body(body: &Bytes, expected: &Gvk) -> Result<(), Status> {
    let unreadable = |e| Status::bad_request(format!("error decoding YAML: {e}"));
    let document = yaml::read(body).map_err(unreadable)?;
    check_applied(&codec::json::decode_any(document.json().as_bytes()).map_err(unreadable)?.value, expected)
}

/// Server-side apply: creates the object or merges the configuration into it.
async fn apply(
    call: &mut Call,
    body: &Bytes,
    subresource: Option<&str>,
    options: &WriteOptions,
) -> Result<(u16, Written), Status> {
    let gvk = call.resource.gvk();
    let unreadable = |e| Status::bad_request(format!("error decoding YAML: {e}"));
    let document = yaml::read(body).map_err(unreadable)?;
    // The document itself is applied: a null owns its field, and an absent struct is not an empty one.
    let mut applied = codec::json::decode_any(document.json().as_bytes()).map_err(unreadable)?.value;
    check_applied(&applied, &gvk)?;
    let name = call.name().to_owned();
    let named = !meta::name(&applied).is_empty();
    if !named {
        meta::set_str(&mut applied, "name", &name);
    }
    if applied.pointer("/metadata/managedFields").is_some_and(|fields| !fields.is_null()) {
        return Err(Status::bad_request("metadata.managedFields must be nil"));
    }
    // As upstream: a mismatch with the schema is refused before the check for unknown fields.
    crate::managed::check(&call.resource, &applied)?;
    crate::managed::check_values(&call.resource, &applied)?;
    let decoded = match call.resource.custom {
        None => crate::call::decode_yaml(&document, body, &gvk)?,
        Some(_) => {
            let read = yaml::decode_any(body).map_err(unreadable)?;
            crate::call::conform_custom(body, &call.resource, read)?
        }
    };
    if options.field_validation == FieldValidation::Strict
        && let Some(why) = decoded.strict.iter().find(|why| why.starts_with("yaml: "))
    {
        return Err(Status::bad_request(format!(
            "error strict decoding YAML: error converting YAML to JSON: {why}"
        )));
    }
    call.take_strict(&gvk.kind, decoded, options.field_validation)?;
    check_place(call, &applied)?;
    let registry = &call.server.registry;
    let conversions = Conversions::new(&call.resource);
    let change = |old: &Value| {
        crate::managed::apply(&call.resource, Some(old), &applied, options, subresource, &conversions)
    };
    let update = Update {
        write: call.write(options),
        name: &name,
        subresource,
        change: &change,
        replaces: false,
        applied: Some(&conversions),
    };
    match registry.update(&update).await {
        Err(status) if status.code == 404 && subresource.is_none() => {
            call.authorize_create().await?;
            // The document of a new object must contain its name, and no UID of an earlier object.
            if !named {
                crate::registry::metadata::check_name(&Value::Null, &name)?;
            }
            let uid = meta::uid(&applied);
            if !uid.is_empty() {
                let why = format!(
                    "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                );
                return Err(Status::conflict(&call.resource.group, &call.resource.plural, &name, &why));
            }
            let new = crate::managed::apply(&call.resource, None, &applied, options, None, &conversions)?;
            crate::verbs::provide_namespace(call, options).await?;
            registry.create_applied(&call.write(options), new).await.map(|created| (201, created))
        }
        other => other.map(|result| (200, result)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_or_a_kind_that_is_no_text_is_refused_before_the_object() {
        for (patched, expected) in [
            (json!({"apiVersion": "v1", "kind": "ConfigMap"}), None),
            (json!({"apiVersion": null, "kind": "ConfigMap"}), None),
            (
                json!({"apiVersion": [], "kind": 1}),
                Some("array into Go struct field .apiVersion of type string"),
            ),
            (
                json!({"apiVersion": "v1", "kind": {}}),
                Some("object into Go struct field .kind of type string"),
            ),
        ] {
            let found = type_meta_problem(&patched);
            match expected {
                None => assert_eq!(found, None, "{patched}"),
                Some(end) => assert!(found.is_some_and(|found| found.ends_with(end)), "{patched}"),
            }
        }
    }

    #[test]
    fn keys_that_repeat_in_a_value_repeat_in_the_object() {
        let body = Bytes::from_static(
            br#"[{"op": "add", "path": "/metadata/labels", "value": {"a": "b", "a": "c"}},
                {"op": "add", "path": "/spec/nope", "value": {"z": 1, "z": 2}},
                {"op": "test", "path": "/metadata/labels", "value": {"a": "b", "a": "c"}}]"#,
        );
        let document = parse(Kind::Json, &body, FieldValidation::Warn).expect("a patch");
        assert_eq!(document.strict.len(), 3, "{:?}", document.strict);
        let patched = json!({"metadata": {"labels": {"a": "c"}}, "spec": {}});
        let repeated = repeated_keys(&document.value, &document.strict, &patched);
        assert_eq!(repeated, ["duplicate field \"metadata.labels.a\""]);
    }
}
