//! One request for a resource, on its way through the verbs.

use crate::auth::User;
use crate::encode::IncludeObject;
use crate::http::{self, Body};
use crate::negotiate::{self, Format, Representation};
use crate::options::{FieldValidation, Query, WriteOptions};
use crate::registry::Write;
use crate::request::{Target, Verb};
use crate::server::ApiServer;
use ::http::{HeaderValue, header, request::Parts};
use bytes::Bytes;
use ferrite_api::codec::{Decoded, json, protobuf, yaml};
use ferrite_api::resource::Resource;
use ferrite_api::schema::{self, TypeRef};
use ferrite_api::{Gvk, Status};
use serde_json::Value;
use std::sync::{Arc, Mutex, PoisonError};

/// Upstream's limit for bodies of writes.
pub(crate) const BODY_LIMIT: usize = 3 << 20;

pub(crate) struct Call {
    pub server: Arc<ApiServer>,
    pub user: User,
    pub resource: Arc<Resource>,
    pub target: Target,
    pub verb: Verb,
    pub query: Query,
    pub parts: Parts,
    /// Behind a lock only because a body is not `Sync` and calls are shared across awaits.
    pub body: Mutex<Option<Body>>,
    pub representation: Representation,
    pub warnings: Vec<String>,
}

impl Call {
    pub fn header(&self, name: header::HeaderName) -> &str {
        self.parts.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default()
    }

    pub fn name(&self) -> &str {
        self.target.name.as_deref().unwrap_or_default()
    }

    pub fn namespace(&self) -> &str {
        self.target.namespace.as_deref().unwrap_or_default()
    }

    pub fn include_object(&self) -> Result<IncludeObject, Status> {
        IncludeObject::parse(self.query.get("includeObject").unwrap_or_default())
    }

    pub fn write_options(&self) -> Result<WriteOptions, Status> {
        WriteOptions::parse(&self.query, self.header(header::USER_AGENT))
    }

    pub fn write<'a>(&'a self, options: &'a WriteOptions) -> Write<'a> {
        Write { resource: &self.resource, namespace: self.namespace(), user: &self.user, options }
    }

    pub fn schema(&self) -> Result<TypeRef, Status> {
        type_of(&self.resource.gvk())
    }

    pub async fn read_body(&mut self) -> Result<Bytes, Status> {
        let body = self.body.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        match body {
            Some(body) => http::read(body, BODY_LIMIT).await,
            None => Ok(Bytes::new()),
        }
    }

    /// Reads the body as an object of this resource's kind.
    pub async fn read_object(&mut self, validation: FieldValidation) -> Result<Value, Status> {
        let expected = self.resource.gvk();
        self.read_as(&expected, validation).await
    }

    /// Reads the body as an object of the given kind: missing kind and version are taken as meant.
    pub async fn read_as(&mut self, expected: &Gvk, validation: FieldValidation) -> Result<Value, Status> {
        let bytes = self.read_body().await?;
        let format = negotiate::content_type(self.header(header::CONTENT_TYPE))?;
        let decoded = decode(format, &bytes, expected)?;
        self.take_strict(&expected.kind, decoded, validation)
    }

    /// Applies field validation to what a decoder found.
    pub fn take_strict(
        &mut self,
        kind: &str,
        decoded: Decoded,
        validation: FieldValidation,
    ) -> Result<Value, Status> {
        match validation {
            FieldValidation::Ignore => {}
            FieldValidation::Warn => self.warnings.extend(decoded.strict.iter().cloned()),
            FieldValidation::Strict => {
                if let Some(error) = decoded.strict_error() {
                    return Err(Status::bad_request(format!(
                        "{kind} in version {:?} cannot be handled as a {kind}: {error}",
                        self.target.version
                    )));
                }
            }
        }
        Ok(decoded.value)
    }

    /// Warnings as headers, in upstream's form.
    pub fn warning_headers(warnings: &[String]) -> impl Iterator<Item = HeaderValue> {
        warnings.iter().filter_map(|w| HeaderValue::from_str(&format!("299 - {w:?}")).ok())
    }
}

pub(crate) fn type_of(gvk: &Gvk) -> Result<TypeRef, Status> {
    schema::of(gvk).ok_or_else(|| Status::internal(format!("no schema for {gvk}")))
}

/// Decodes a body and checks that it is of the expected kind.
pub(crate) fn decode(format: Format, bytes: &[u8], expected: &Gvk) -> Result<Decoded, Status> {
    let type_ = type_of(expected)?;
    let unrecognized = |error: String| {
        Status::bad_request(format!(
            "{} in version {:?} cannot be handled as a {}: {error}",
            expected.kind, expected.version, expected.kind
        ))
    };
    let mut decoded = match format {
        Format::Json => json::decode(type_, bytes).map_err(|e| unrecognized(e.to_string()))?,
        Format::Yaml => yaml::decode(type_, bytes).map_err(|e| unrecognized(e.to_string()))?,
        Format::Protobuf => {
            let envelope = protobuf::open(bytes).map_err(|e| {
                Status::bad_request(format!(
                    "the object provided is unrecognized (must be of type {}): {e}",
                    expected.kind
                ))
            })?;
            let given = (envelope.api_version.to_string(), envelope.kind.to_string());
            check_kind(&given.0, &given.1, expected)?;
            let value =
                protobuf::decode_message(type_, envelope.raw).map_err(|e| unrecognized(e.to_string()))?;
            Decoded { value, strict: Vec::new() }
        }
    };
    if !decoded.value.is_object() {
        return Err(unrecognized("the body is not an object".into()));
    }
    let text = |key: &str| decoded.value.get(key).and_then(Value::as_str).unwrap_or_default();
    check_kind(text("apiVersion"), text("kind"), expected)?;
    ferrite_api::codec::normalise(type_, &mut decoded.value);
    decoded.value["kind"] = expected.kind.clone().into();
    decoded.value["apiVersion"] = expected.api_version().into();
    Ok(decoded)
}

fn check_kind(api_version: &str, kind: &str, expected: &Gvk) -> Result<(), Status> {
    if !kind.is_empty() && kind != expected.kind {
        return Err(Status::bad_request(format!(
            "{kind} in version {:?} cannot be handled as a {}: converting ({kind}) to ({}): unknown conversion",
            api_version.rsplit('/').next().unwrap_or_default(),
            expected.kind,
            expected.kind
        )));
    }
    if !api_version.is_empty() && api_version != expected.api_version() {
        return Err(Status::bad_request(format!(
            "the API version in the data ({api_version}) does not match the expected API version ({})",
            expected.api_version()
        )));
    }
    Ok(())
}
