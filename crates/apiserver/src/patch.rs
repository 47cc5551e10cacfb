//! Patch: JSON, merge, strategic merge and apply.

use crate::call::Call;
use crate::encode;
use crate::http::Answer;
use crate::negotiate::Format;
use crate::options::{FieldValidation, WriteOptions};
use crate::registry::Update;
use ::http::header;
use bytes::Bytes;
use ferrite_api::codec::{Decoded, json};
use ferrite_api::schema::TypeRef;
use ferrite_api::{Status, meta, patch};
use serde_json::Value;
use std::sync::Mutex;

/// What the content type says the body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Json,
    Merge,
    Strategic,
    Apply,
}

const ACCEPTED: &str = "application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json, application/apply-patch+yaml";

impl Kind {
    pub fn of(content_type: &str) -> Result<Self, Status> {
        Ok(match content_type.split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => Self::Json,
            "application/merge-patch+json" => Self::Merge,
            "application/strategic-merge-patch+json" => Self::Strategic,
            "application/apply-patch+yaml" => Self::Apply,
            _ => return Err(Status::unsupported_media_type(ACCEPTED)),
        })
    }

    /// Applies a patch that is not an apply to `target`.
    pub fn apply_to(self, type_: TypeRef, target: &mut Value, document: &Value) -> Result<(), Status> {
        let result = match self {
            Self::Json => patch::json_patch(target, document),
            Self::Merge => {
                patch::merge_patch(target, document);
                Ok(())
            }
            Self::Strategic => patch::strategic_merge(type_, target, document),
            Self::Apply => return Err(Status::unsupported_media_type(ACCEPTED)),
        };
        result.map_err(|e| match e.code() {
            422 => Status::new(422, "Invalid", e.to_string()),
            _ => Status::bad_request(e.to_string()),
        })
    }
}

pub(crate) async fn handle(call: &mut Call, subresource: Option<&str>) -> Result<Answer, Status> {
    let kind = Kind::of(call.header(header::CONTENT_TYPE))?;
    let options = call.write_options()?;
    if kind == Kind::Apply && call.query.get("fieldManager").unwrap_or_default().is_empty() {
        return Err(Status::invalid(
            "meta.k8s.io",
            "PatchOptions",
            "",
            &[ferrite_api::field::FieldError::required(
                &ferrite_api::field::Path::new("fieldManager"),
                "is required for apply patch",
            )],
        ));
    }
    let body = call.read_body().await?;
    let (code, result) = match kind {
        Kind::Apply => apply(call, &body, subresource, &options).await?,
        kind => (200, plain(call, kind, &body, subresource, &options).await?),
    };
    call.warnings.extend(call.resource.strategy.warnings(&result));
    encode::object(code, &call.resource, &result, call.representation, call.include_object()?)
}

async fn plain(
    call: &mut Call,
    kind: Kind,
    body: &Bytes,
    subresource: Option<&str>,
    options: &WriteOptions,
) -> Result<Value, Status> {
    let type_ = call.schema()?;
    let document = parse(body)?;
    let found = Mutex::new(Vec::new());
    let gvk = call.resource.gvk();
    let change = |old: &Value| {
        let mut patched = old.clone();
        kind.apply_to(type_, &mut patched, &document)?;
        let decoded = json::conform(type_, &patched).map_err(|e| {
            Status::bad_request(format!(
                "{} in version {:?} cannot be handled as a {}: {e}",
                gvk.kind, gvk.version, gvk.kind
            ))
        })?;
        let Decoded { mut value, strict } = decoded;
        ferrite_api::codec::normalise(type_, &mut value);
        *found.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = strict;
        value["kind"] = gvk.kind.clone().into();
        value["apiVersion"] = gvk.api_version().into();
        Ok(value)
    };
    let result = call
        .server
        .registry
        .update(&Update {
            write: call.write(options),
            name: call.name(),
            subresource,
            change: &change,
            applied: false,
        })
        .await?;
    let strict = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if options.field_validation == FieldValidation::Warn {
        call.warnings.extend(strict);
    }
    Ok(result)
}

/// The patch itself as a value.
pub(crate) fn parse(body: &Bytes) -> Result<Value, Status> {
    json::decode_any(body).map(|d| d.value).map_err(|e| Status::bad_request(e.to_string()))
}

/// Server-side apply: creates the object or merges the configuration into it.
async fn apply(
    call: &mut Call,
    body: &Bytes,
    subresource: Option<&str>,
    options: &WriteOptions,
) -> Result<(u16, Value), Status> {
    let gvk = call.resource.gvk();
    let decoded = crate::call::decode(Format::Yaml, body, &gvk)?;
    let mut applied = call.take_strict(&gvk.kind, decoded, options.field_validation)?;
    let name = call.name().to_owned();
    if meta::name(&applied).is_empty() {
        meta::set_str(&mut applied, "name", &name);
    }
    if applied.pointer("/metadata/managedFields").and_then(Value::as_array).is_some_and(|m| !m.is_empty()) {
        return Err(Status::bad_request("metadata.managedFields must be nil"));
    }
    let registry = &call.server.registry;
    let change =
        |old: &Value| crate::managed::apply(&call.resource, Some(old), &applied, options, subresource);
    let update =
        Update { write: call.write(options), name: &name, subresource, change: &change, applied: true };
    match registry.update(&update).await {
        Err(status) if status.code == 404 && subresource.is_none() => {
            let new = crate::managed::apply(&call.resource, None, &applied, options, None)?;
            registry.create_applied(&call.write(options), new).await.map(|created| (201, created))
        }
        other => other.map(|result| (200, result)),
    }
}
