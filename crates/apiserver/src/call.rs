//! One request for a resource, on its way through the verbs.

use crate::audit::Record;
use crate::auth::{self, Action, User};
use crate::encode::IncludeObject;
use crate::flowcontrol::Seat;
use crate::http::{self, Body};
use crate::negotiate::{self, Format, Representation};
use crate::options::{FieldValidation, Query, Warnings, WriteOptions};
use crate::registry::Write;
use crate::registry::metadata::check_name;
use crate::request::{Target, Verb};
use crate::server::ApiServer;
use crate::traffic::Account;
use ::http::{HeaderValue, header, request::Parts};
use bytes::Bytes;
use ferrite_api::codec::{DecodeError, Decoded, json, protobuf, yaml};
use ferrite_api::resource::Resource;
use ferrite_api::schema::{self, TypeRef};
use ferrite_api::{Gvk, Status, meta};
use ferrite_json::Value;
use futures_util::FutureExt;
use std::sync::{Arc, Mutex, PoisonError};

/// Upstream's limit for bodies of writes.
pub(crate) const BODY_LIMIT: usize = 3 << 20;

/// The task of a request that waits for its body, without the head.
const TASK: usize = 4 << 10;

/// Memory of a request that waits for its body.
fn head_size(parts: &Parts) -> usize {
    let headers = parts.headers.iter().map(|(name, value)| name.as_str().len() + value.len());
    TASK + parts.uri.path().len() + parts.uri.query().map_or(0, str::len) + headers.sum::<usize>()
}

pub(crate) struct Call {
    pub server: Arc<ApiServer>,
    pub user: Arc<User>,
    pub resource: Arc<Resource>,
    pub target: Target,
    pub verb: Verb,
    pub query: Query,
    pub parts: Parts,
    /// Behind a lock only because a body is not `Sync` and calls are shared across awaits.
    pub body: Mutex<Option<Body>>,
    pub representation: Representation,
    /// When the request has to be done; streams go on.
    pub deadline: tokio::time::Instant,
    /// Given up while the body is on the way.
    pub seat: Option<Arc<Seat>>,
    pub warnings: Vec<String>,
    /// Warnings from admission; the response lists them after the other warnings.
    pub admission: Warnings,
}

impl Call {
    pub fn header(&self, name: header::HeaderName) -> &str {
        self.parts.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default()
    }

    /// The audit of the request, if it is audited.
    pub fn audit(&self) -> Option<&Arc<Record>> {
        self.parts.extensions.get()
    }

    pub fn name(&self) -> &str {
        self.target.name.as_deref().unwrap_or_default()
    }

    pub fn namespace(&self) -> &str {
        self.target.namespace.as_deref().unwrap_or_default()
    }

    pub fn include_object(&self) -> Result<IncludeObject, Status> {
        // Only tables have objects to include.
        match self.representation.shape {
            negotiate::Shape::Table { .. } => {
                IncludeObject::parse(self.query.get("includeObject").unwrap_or_default())
            }
            _ => IncludeObject::parse(""),
        }
    }

    pub fn write_options(&self) -> Result<WriteOptions, Status> {
        let kind = match self.verb {
            Verb::Patch => "PatchOptions",
            Verb::Update => "UpdateOptions",
            _ => "CreateOptions",
        };
        let applies = self.verb == Verb::Patch && crate::patch::is_apply(self.header(header::CONTENT_TYPE));
        let agent = self.parts.headers.get(header::USER_AGENT).map(|v| String::from_utf8_lossy(v.as_bytes()));
        let options = WriteOptions::parse(&self.query, &agent.unwrap_or_default(), kind, applies)?;
        Ok(WriteOptions { warnings: self.admission.clone(), ..options })
    }

    pub fn write<'a>(&'a self, options: &'a WriteOptions) -> Write<'a> {
        let copied = crate::encode::copies_written(&self.resource, self.representation);
        Write {
            resource: &self.resource,
            namespace: self.namespace(),
            requested: self.name(),
            user: &self.user,
            options,
            copied,
        }
    }

    /// Refuses to create by an update or an apply if the user may not create.
    pub async fn authorize_create(&self) -> Result<(), Status> {
        let registry = &self.server.registry;
        let action = Action::on(&self.target, "create");
        auth::authorize(&registry.rbac, &registry.view(), &self.user, &action).await
    }

    pub fn schema(&self) -> Result<TypeRef, Status> {
        match self.resource.schema {
            Some(type_) => Ok(type_),
            None => type_of(&self.resource.gvk()),
        }
    }

    pub async fn read_body(&mut self) -> Result<Bytes, Status> {
        let body = self.body.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        match body {
            Some(body) => {
                let too_many = || Status::too_many_requests("Too many requests, please try again later.");
                let account = self.parts.extensions.get::<Account>();
                let mut held = match account.map(|account| account.take(head_size(&self.parts))) {
                    Some(None) => return Err(too_many()),
                    held => held.flatten(),
                };
                let may_take = |bytes| held.as_mut().is_none_or(|held| held.grow(bytes));
                let mut reading = std::pin::pin!(http::read(body, BODY_LIMIT, may_take));
                // The usual case: the body is here already.
                if let Some(bytes) = (&mut reading).now_or_never() {
                    return bytes;
                }
                // Others are served while this client takes its time.
                let waiting = self.server.in_flight.wait_for_body(self.verb);
                if let Some(seat) = &self.seat {
                    seat.step_aside();
                }
                let bytes = reading.await?;
                let seated = match &self.seat {
                    Some(seat) => seat.step_in(self.server.config.serving.request_timeout / 4).await,
                    None => true,
                };
                match seated && waiting.is_none_or(|waiting| waiting.may_continue(self.user.is_master())) {
                    true => Ok(bytes),
                    false => Err(too_many()),
                }
            }
            None => Ok(Bytes::new()),
        }
    }

    /// Reads the body as an object of this resource's kind.
    pub async fn read_object(&mut self, validation: FieldValidation) -> Result<Value, Status> {
        let expected = self.resource.gvk();
        if self.resource.custom.is_none() {
            let object = self.read_as(&expected, validation).await?;
            let given = Given(expected);
            return match self.resource.strategy.conversion_problem(&object) {
                Some(why) => Err(given.refuse(&given.0, &why)),
                None => Ok(object),
            };
        }
        let bytes = self.read_body().await?;
        let format = negotiate::content_type(self.header(header::CONTENT_TYPE))?;
        let decoded = decode_custom(format, &bytes, &self.resource)?;
        let object = self.take_strict(&expected.kind, decoded, validation)?;
        self.audit_object(&object);
        Ok(object)
    }

    pub fn audit_patch(&self, patch: &[u8]) {
        if let Some(record) = self.audit() {
            record.request_patch(patch);
        }
    }

    fn audit_object(&self, object: &Value) {
        if let Some(record) = self.audit() {
            let is_own = object["kind"] == *self.resource.kind;
            let strategy = is_own.then_some(&self.resource.strategy);
            record.request_object(object, |object| {
                if let Some(strategy) = strategy {
                    strategy.default(object);
                }
            });
        }
    }

    /// Reads the body as an object of the given kind: missing kind and version are taken as meant.
    pub async fn read_as(&mut self, expected: &Gvk, validation: FieldValidation) -> Result<Value, Status> {
        let bytes = self.read_body().await?;
        let format = negotiate::content_type(self.header(header::CONTENT_TYPE))?;
        let decoded = decode(format, &bytes, expected)?;
        let object = self.take_strict(&expected.kind, decoded, validation)?;
        self.audit_object(&object);
        Ok(object)
    }

    /// A whole object that replaces another says where it belongs, and it is the place that the path names.
    pub fn check_place(&self, object: &Value) -> Result<(), Status> {
        self.check_namespace(object)?;
        check_name(object, self.name())
    }

    /// A body may leave its namespace out, but must not name another one than the path does.
    pub fn check_namespace(&self, object: &Value) -> Result<(), Status> {
        let namespace = meta::namespace(object);
        if self.resource.is_namespaced() && !namespace.is_empty() && namespace != self.namespace() {
            return Err(Status::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        Ok(())
    }

    /// Applies field validation to a decoder's findings.
    pub fn take_strict(
        &mut self,
        kind: &str,
        decoded: Decoded,
        validation: FieldValidation,
    ) -> Result<Value, Status> {
        match validation {
            FieldValidation::Ignore => {}
            FieldValidation::Warn => self.warnings.extend(decoded.warnings().map(str::to_owned)),
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

/// Decodes a body and checks that it is of the expected kind. Missing kind and version are taken as meant.
pub(crate) fn decode(format: Format, bytes: &[u8], expected: &Gvk) -> Result<Decoded, Status> {
    let type_ = type_of(expected)?;
    let (given, decoded) = match format {
        Format::Protobuf => {
            if bytes.is_empty() {
                return Err(unrecognised(bytes, expected, &"empty data"));
            }
            let envelope = protobuf::open(bytes).map_err(|e| unrecognised(bytes, expected, &e))?;
            let given = Given::new(&envelope.api_version, &envelope.kind, expected);
            given.check(expected)?;
            let value =
                protobuf::decode_message(type_, envelope.raw).map_err(|e| given.refuse(expected, &e))?;
            (given, Decoded { value, strict: Vec::new() })
        }
        Format::Json => given_and_decoded(bytes, bytes, expected, json::decode(type_, bytes))?,
        Format::Yaml => {
            let document = yaml::read(bytes).map_err(|e| no_yaml(bytes, expected, &e))?;
            given_and_decoded(bytes, document.json().as_bytes(), expected, document.decode(type_))?
        }
    };
    finish(type_, expected, given, decoded)
}

/// As [`decode`], for an object of a custom kind. Validation checks its kind.
pub(crate) fn decode_custom(format: Format, bytes: &[u8], resource: &Resource) -> Result<Decoded, Status> {
    let expected = resource.gvk();
    match format {
        Format::Json => {
            json::type_meta(bytes).map_err(|e| unreadable(bytes, &expected, &e))?;
            let decoded = json::decode_any(bytes).map_err(|e| unreadable(bytes, &expected, &e))?;
            conform_custom(bytes, resource, decoded)
        }
        Format::Yaml => {
            let decoded = yaml::decode_any(bytes).map_err(|e| no_yaml(bytes, &expected, &e))?;
            conform_custom(bytes, resource, decoded)
        }
        Format::Protobuf => Err(Status::new(
            415,
            "UnsupportedMediaType",
            "the body of the request was in an unknown format - accepted media types include: application/json, application/yaml",
        )),
    }
}

/// Brings an object that a client has sent under the schema of a custom kind.
pub(crate) fn conform_custom(bytes: &[u8], resource: &Resource, decoded: Decoded) -> Result<Decoded, Status> {
    let expected = resource.gvk();
    let Decoded { value, strict: mut complaints } = decoded;
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default();
    if text("kind").is_empty() {
        let body = String::from_utf8_lossy(bytes);
        return Err(unrecognised(bytes, &expected, &format!("Object 'Kind' is missing in '{body}'")));
    }
    let given = Given::new(text("apiVersion"), text("kind"), &expected);
    if text("apiVersion") != expected.api_version() {
        return Err(Status::bad_request(format!(
            "the API version in the data ({}) does not match the expected API version ({})",
            text("apiVersion"),
            expected.api_version()
        )));
    }
    let conformed = resource.conform(value).map_err(|e| given.refuse(&expected, &e))?;
    complaints.extend(conformed.strict);
    Ok(Decoded { value: conformed.value, strict: complaints })
}

/// Decodes options, whose kind has been checked. Errors do not name the options.
pub(crate) fn decode_options(format: Format, bytes: &[u8], gvk: &Gvk) -> Result<Decoded, Status> {
    let type_ = type_of(gvk)?;
    let refuse = |e: DecodeError| Status::bad_request(e.to_string());
    Ok(match format {
        Format::Protobuf => {
            let envelope = protobuf::open(bytes).map_err(refuse)?;
            let value = protobuf::decode_message(type_, envelope.raw).map_err(refuse)?;
            Decoded { value, strict: Vec::new() }
        }
        Format::Json => json::decode(type_, bytes).map_err(refuse)?,
        Format::Yaml => yaml::read(bytes).and_then(|document| document.decode(type_)).map_err(refuse)?,
    })
}

/// As [`decode`], for YAML that has been read already.
pub(crate) fn decode_yaml(
    document: &yaml::Document,
    bytes: &[u8],
    expected: &Gvk,
) -> Result<Decoded, Status> {
    let type_ = type_of(expected)?;
    let (given, decoded) =
        given_and_decoded(bytes, document.json().as_bytes(), expected, document.decode(type_))?;
    finish(type_, expected, given, decoded)
}

/// The checked kind that a body names, and the decoded body. `text` is the body as JSON.
fn given_and_decoded(
    bytes: &[u8],
    text: &[u8],
    expected: &Gvk,
    decoded: Result<Decoded, DecodeError>,
) -> Result<(Given, Decoded), Status> {
    // A wrong kind is reported before other errors, so a body that cannot be decoded is read again for its
    // kind.
    let said = decoded.as_ref().ok().and_then(|decoded| {
        let text = |key: &str| decoded.value.get(key).and_then(Value::as_str);
        Some(Given::new(text("apiVersion")?, text("kind")?, expected))
    });
    if let Some(given) = said.as_ref().filter(|given| given.0.version.contains('/')) {
        let why = DecodeError::Text(format!("unexpected GroupVersion string: {}", given.api_version()));
        return Err(unrecognised(bytes, expected, &why));
    }
    let given = match said {
        Some(given) => given,
        None => {
            let (api_version, kind) = json::type_meta(text).map_err(|e| unreadable(bytes, expected, &e))?;
            Given::new(&api_version, &kind, expected)
        }
    };
    given.check(expected)?;
    let decoded = decoded.map_err(|e| given.refuse(expected, &e))?;
    Ok((given, decoded))
}

fn finish(type_: TypeRef, expected: &Gvk, given: Given, mut decoded: Decoded) -> Result<Decoded, Status> {
    if given.api_version() != expected.api_version() && !given.is_as_good_as(expected) {
        return Err(Status::bad_request(format!(
            "the API version in the data ({}) does not match the expected API version ({})",
            given.api_version(),
            expected.api_version()
        )));
    }
    ferrite_api::codec::normalise_as_sent(type_, &mut decoded.value);
    decoded.value["kind"] = expected.kind.clone().into();
    decoded.value["apiVersion"] = expected.api_version().into();
    Ok(decoded)
}

/// The kind that the body names, completed by the expected one.
struct Given(Gvk);

impl Given {
    fn new(api_version: &str, kind: &str, expected: &Gvk) -> Self {
        let kind = if kind.is_empty() { &expected.kind } else { kind };
        let gvk = if api_version.is_empty() {
            Gvk::new(&*expected.group, &*expected.version, kind)
        } else {
            let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
            Gvk::new(group, version, kind)
        };
        Self(gvk)
    }

    fn api_version(&self) -> String {
        self.0.api_version()
    }

    fn refuse(&self, expected: &Gvk, why: &dyn std::fmt::Display) -> Status {
        Status::bad_request(format!(
            "{} in version {:?} cannot be handled as a {}: {why}",
            self.0.kind, self.0.version, expected.kind
        ))
    }

    /// As upstream: evictions are taken in an older version too, which says the same.
    fn is_as_good_as(&self, expected: &Gvk) -> bool {
        expected.kind == "Eviction" && (&*self.0.group, &*self.0.version) == ("policy", "v1beta1")
    }

    /// Checks that the server knows the kind and can convert it to the expected one.
    fn check(&self, expected: &Gvk) -> Result<(), Status> {
        self.problem(expected).map_or(Ok(()), |why| Err(self.refuse(expected, &why)))
    }

    fn problem(&self, expected: &Gvk) -> Option<String> {
        let Gvk { group, version, kind } = &self.0;
        let known = self.0 == *expected || schema::of(&self.0).is_some() || was_served(group, version, kind);
        if !known {
            return Some(format!(
                "no kind {} is registered for version {:?} in scheme {:?}",
                go_quote(kind),
                self.api_version(),
                scheme(&expected.group),
            ));
        }
        (*kind != expected.kind).then(|| {
            format!(
                "converting ({version}.{kind}) to ({}.{}): unknown conversion",
                internal_package(&expected.group),
                expected.kind
            )
        })
    }
}

/// As [`Given::problem`], for an object that a patch has made.
pub(crate) fn kind_problem(value: &Value, expected: &Gvk) -> Option<String> {
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default();
    let given = Given::new(text("apiVersion"), text("kind"), expected);
    given.problem(expected)
}

/// Go prints bytes that are no text as `\xff`; the decoder has turned them into the replacement character.
fn go_quote(text: &str) -> String {
    format!("{text:?}").replace('\u{fffd}', "\\xff")
}

/// The Go package of a group's internal types.
pub(crate) fn internal_package(group: &str) -> &str {
    match group {
        "" | "events.k8s.io" => "core",
        group => group.split('.').next().unwrap_or(group),
    }
}

/// Versions that are no longer served but that the server can still read, as upstream's.
const RETIRED: &[(&str, &str, &[&str])] = &[
    ("apps", "v1beta1", &["ControllerRevision", "Deployment", "Scale", "StatefulSet"]),
    (
        "apps",
        "v1beta2",
        &["ControllerRevision", "DaemonSet", "Deployment", "ReplicaSet", "Scale", "StatefulSet"],
    ),
    ("batch", "v1beta1", &["CronJob"]),
    (
        "extensions",
        "v1beta1",
        &["DaemonSet", "Deployment", "Ingress", "NetworkPolicy", "ReplicaSet", "Scale"],
    ),
    ("networking.k8s.io", "v1beta1", &["IPAddress", "Ingress", "IngressClass", "ServiceCIDR"]),
    ("policy", "v1beta1", &["Eviction", "PodDisruptionBudget"]),
    ("rbac.authorization.k8s.io", "v1beta1", RBAC),
    ("rbac.authorization.k8s.io", "v1alpha1", RBAC),
    (
        "storage.k8s.io",
        "v1beta1",
        &[
            "CSIDriver",
            "CSINode",
            "CSIStorageCapacity",
            "StorageClass",
            "VolumeAttachment",
            "VolumeAttributesClass",
        ],
    ),
];
const RBAC: &[&str] = &["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"];

fn was_served(group: &str, version: &str, kind: &str) -> bool {
    RETIRED.iter().any(|(g, v, kinds)| *g == group && *v == version && kinds.contains(&kind))
}

/// The error for a body without a recognisable kind. Upstream quotes its beginning.
fn unrecognised(bytes: &[u8], expected: &Gvk, why: &dyn std::fmt::Display) -> Status {
    const QUOTED: usize = 30;
    let cut = &bytes[..bytes.len().min(QUOTED)];
    let beginning = match bytes.first() {
        None => "<empty>".into(),
        Some(b'{') => String::from_utf8_lossy(cut).into_owned(),
        Some(_) => cut.iter().map(|b| format!("{b:02x}")).collect(),
    };
    let more = if bytes.len() > QUOTED { " ..." } else { "" };
    Status::bad_request(format!(
        "the object provided is unrecognized (must be of type {}): {why} ({beginning}{more})",
        expected.kind
    ))
}

/// The body is no YAML, or no object.
fn no_yaml(bytes: &[u8], expected: &Gvk, why: &DecodeError) -> Status {
    match why {
        DecodeError::Yaml(why) => unrecognised(bytes, expected, &format!("yaml: {why}")),
        DecodeError::NoJson(why) => unrecognised(bytes, expected, why),
        other => unreadable(bytes, expected, other),
    }
}

/// The body is no JSON, or no object.
fn unreadable(bytes: &[u8], expected: &Gvk, why: &dyn std::fmt::Display) -> Status {
    unrecognised(bytes, expected, &format!("couldn't get version/kind; json parse error: {why}"))
}

/// Upstream is several servers in one, and each names the place where its kinds are known.
fn scheme(group: &str) -> &'static str {
    match group {
        "apiextensions.k8s.io" => "pkg/apiserver/apiserver.go:55",
        "apiregistration.k8s.io" => "pkg/apiserver/scheme/scheme.go:28",
        _ => "pkg/api/legacyscheme/scheme.go:30",
    }
}
