//! `serviceaccounts/token`: tokens, and whose they are.

use crate::admission::{Attributes, Operation};
use crate::auth::{User, token};
use crate::call::Call;
use crate::encode;
use crate::http::Answer;
use crate::options::WriteOptions;
use crate::registry::metadata;
use crate::server::ApiServer;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::{Gvk, Status, meta};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

const MIN_SECONDS: i64 = 600;
const DEFAULT_SECONDS: i64 = 3600;

pub(super) async fn handle(call: &mut Call) -> Result<Answer, Status> {
    let options = call.write_options()?;
    let gvk = Gvk::new("authentication.k8s.io", "v1", "TokenRequest");
    let mut request = call.read_as(&gvk, options.field_validation).await?;
    let account = call.server.registry.read(&call.resource, call.namespace(), call.name())?;
    let Some(signer) = &call.server.tokens else {
        return Err(Status::unavailable("this server has no key to sign tokens with"));
    };
    let given = meta::name(&request);
    if !given.is_empty() && given != call.name() {
        let error = FieldError::invalid(
            &Path::new("metadata").child("name"),
            given,
            "must match the service account name if specified",
        );
        return Err(Status::invalid(&gvk.group, &gvk.kind, call.name(), &[error]));
    }
    let given = meta::namespace(&request);
    if !given.is_empty() && given != call.namespace() {
        let error = FieldError::invalid(
            &Path::new("metadata").child("namespace"),
            given,
            "must match the service account namespace if specified",
        );
        return Err(Status::invalid(&gvk.group, &gvk.kind, call.name(), &[error]));
    }
    let now = Timestamp::now();
    let spec = &mut request["spec"];
    let seconds = spec["expirationSeconds"].as_i64().unwrap_or(DEFAULT_SECONDS);
    spec["expirationSeconds"] = seconds.into();
    check_seconds(seconds)?;
    crate::managed::on_body(&gvk, &mut request, &options, "token", now);
    admit(call, &options, &request)?;
    let spec = &mut request["spec"];
    if spec["audiences"].as_array().is_none_or(Vec::is_empty) {
        spec["audiences"] = json!([signer.issuer]);
    }
    let bound = bound_object(call, &request["spec"]["boundObjectRef"])?;
    let mut claims = json!({
        "aud": request["spec"]["audiences"],
        "exp": now.as_second() + seconds,
        "iat": now.as_second(),
        "iss": signer.issuer,
        "jti": uuid::Uuid::new_v4().to_string(),
        "kubernetes.io": {
            "namespace": call.namespace(),
            "serviceaccount": {"name": call.name(), "uid": meta::uid(&account)},
        },
        "nbf": now.as_second(),
        "sub": format!("system:serviceaccount:{}:{}", call.namespace(), call.name()),
    });
    if let Some((key, name, uid)) = bound {
        claims["kubernetes.io"][key] = json!({"name": name, "uid": uid});
    }
    let signed = signer.sign(&claims).ok_or_else(|| Status::internal("a token could not be signed"))?;
    let expires = now.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(now);
    request["status"] = json!({"token": signed, "expirationTimestamp": metadata::time(expires)});
    let metadata = meta::metadata_mut(&mut request);
    metadata.insert("uid".into(), uuid::Uuid::new_v4().to_string().into());
    metadata.insert("name".into(), call.name().into());
    metadata.insert("namespace".into(), call.namespace().into());
    metadata.insert("creationTimestamp".into(), metadata::time(now).into());
    encode::value(201, &request, call.representation)
}

fn admit(call: &Call, options: &WriteOptions, request: &Value) -> Result<(), Status> {
    let registry = &call.server.registry;
    let attributes = Attributes {
        operation: Operation::Create,
        resource: &call.resource,
        subresource: Some("token"),
        namespace: call.namespace(),
        name: call.name(),
        user: &call.user,
        old: None,
        options,
        rbac: &registry.rbac,
    };
    registry.admission.validate(&registry.view(), &attributes, Some(request)).map(drop)
}

fn check_seconds(seconds: i64) -> Result<(), Status> {
    let path = Path::new("spec").child("expirationSeconds");
    let why = if seconds < MIN_SECONDS {
        "may not specify a duration less than 10 minutes"
    } else if seconds > 1 << 32 {
        "may not specify a duration larger than 2^32 seconds"
    } else {
        return Ok(());
    };
    let error = FieldError::invalid(&path, seconds, why);
    Err(Status::invalid("authentication.k8s.io", "TokenRequest", "", &[error]))
}

/// The object whose end is the token's end: claim, name and UID.
fn bound_object(call: &Call, reference: &Value) -> Result<Option<(&'static str, String, String)>, Status> {
    let text = |key: &str| reference[key].as_str().unwrap_or_default();
    if reference.is_null() {
        return Ok(None);
    }
    let (claim, plural, namespace) = match (text("apiVersion"), text("kind")) {
        ("v1" | "", "Pod") => ("pod", "pods", call.namespace()),
        ("v1" | "", "Secret") => ("secret", "secrets", call.namespace()),
        ("v1" | "", "Node") => ("node", "nodes", ""),
        (version, kind) => {
            return Err(Status::bad_request(format!(
                "cannot bind token to object of type {}, Kind={kind}",
                if version.contains('/') { version.to_owned() } else { format!("/{version}") }
            )));
        }
    };
    let object = call.server.registry.view().get("", plural, namespace, text("name"));
    let object = object.ok_or_else(|| Status::not_found("", plural, text("name")))?;
    let uid = meta::uid(&object);
    if !text("uid").is_empty() && text("uid") != uid {
        let why = format!(
            "the UID in the bound object reference ({}) does not match the UID in record. The object might have been deleted and then recreated",
            text("uid")
        );
        return Err(Status::conflict("", text("kind"), text("name"), &why));
    }
    Ok(Some((claim, text("name").to_owned(), uid.to_owned())))
}

/// Whose a token is, and for which of `wanted` it is meant. None when it is nobody's any more.
pub(crate) fn user_of<'a>(
    server: &ApiServer,
    text: &str,
    wanted: &[&'a str],
) -> Option<(User, Vec<&'a str>)> {
    let claims = server.tokens.as_ref()?.verify(text, Timestamp::now().as_second())?;
    let audiences = token::audiences(&claims, wanted);
    if audiences.is_empty() {
        return None;
    }
    let about = &claims["kubernetes.io"];
    let namespace = about["namespace"].as_str()?;
    let view = server.registry.view();
    let alive = |plural: &str, namespace: &str, reference: &Value| {
        let object = view.get("", plural, namespace, reference["name"].as_str().unwrap_or_default());
        object.is_some_and(|o| meta::uid(&o) == reference["uid"].as_str().unwrap_or_default())
    };
    let account = &about["serviceaccount"];
    if !alive("serviceaccounts", namespace, account) {
        return None;
    }
    for (claim, plural, namespace) in
        [("pod", "pods", namespace), ("secret", "secrets", namespace), ("node", "nodes", "")]
    {
        if about[claim].is_object() && !alive(plural, namespace, &about[claim]) {
            return None;
        }
    }
    let user = User::service_account(namespace, account["name"].as_str()?, account["uid"].as_str()?);
    let mut user = user.with_credential(format!("JTI={}", claims["jti"].as_str().unwrap_or_default()));
    for (claim, key) in [("pod", "pod"), ("node", "node")] {
        for field in ["name", "uid"] {
            if let Some(value) = about[claim][field].as_str() {
                let key = format!("authentication.kubernetes.io/{key}-{field}");
                user.extra.insert(key, vec![value.to_owned()]);
            }
        }
    }
    Some((user, audiences))
}
