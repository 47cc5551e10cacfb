//! `serviceaccounts/token`: tokens, and whose they are.

use crate::admission::{Attributes, Operation};
use crate::auth::{User, token};
use crate::call::Call;
use crate::encode;
use crate::http::Response;
use crate::options::WriteOptions;
use crate::registry::metadata;
use crate::server::ApiServer;
use base64::Engine;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::{Gvk, Status, meta};
use ferrite_json::{Value, json};
use jiff::{SignedDuration, Timestamp};

const MIN_SECONDS: i64 = 600;
const DEFAULT_SECONDS: i64 = 3600;
/// The lifetime that pods ask for, as admission mounts tokens.
const POD_SECONDS: i64 = 3607;
const EXTENDED_SECONDS: i64 = 365 * 24 * 3600;

/// Returns true if a token lives longer than asked for. As upstream: only one that admission has mounted
/// into a pod, for this server and nobody else.
fn is_extended(seconds: i64, bound: &[(&str, String, String)], audiences: &Value, issuer: &str) -> bool {
    let for_us = audiences.as_array().is_some_and(|list| list.iter().all(|audience| audience == issuer));
    seconds == POD_SECONDS && for_us && bound.iter().any(|(claim, ..)| *claim == "pod")
}

pub(super) async fn handle(call: &mut Call) -> Result<Response, Status> {
    let options = call.write_options()?;
    let gvk = Gvk::new("authentication.k8s.io", "v1", "TokenRequest");
    let mut request = call.read_as(&gvk, options.field_validation).await?;
    if let Some(record) = call.audit() {
        record.request_object(&request, |request| {
            let seconds = request["spec"]["expirationSeconds"].as_i64().unwrap_or(DEFAULT_SECONDS);
            request["spec"]["expirationSeconds"] = seconds.into();
        });
    }
    call.check_namespace(&request)?;
    let now = Timestamp::now();
    let spec = &mut request["spec"];
    let seconds = spec["expirationSeconds"].as_i64().unwrap_or(DEFAULT_SECONDS);
    spec["expirationSeconds"] = seconds.into();
    crate::managed::on_body(&gvk, &mut request, &options, "token", now);
    // As upstream: admission comes before the name is checked and the account is looked up.
    admit(call, &options, &mut request).await?;
    let given = meta::name(&request);
    if !given.is_empty() && given != call.name() {
        let error = FieldError::invalid(
            &Path::new("metadata").child("name"),
            given,
            "must match the service account name if specified",
        );
        return Err(Status::invalid(&gvk.group, &gvk.kind, call.name(), &[error]));
    }
    let account = call.server.registry.read(&call.resource, call.namespace(), call.name())?;
    let (given, uid) = (meta::uid(&request), meta::uid(&account));
    if !given.is_empty() && given != uid {
        let why = format!(
            "the UID in the token request ({given}) does not match the UID of the service account ({uid})"
        );
        return Err(Status::conflict(&gvk.group, &gvk.kind, call.name(), &why));
    }
    let Some(signer) = &call.server.tokens else {
        return Err(Status::unavailable("this server has no key to sign tokens with"));
    };
    let mut seconds = request["spec"]["expirationSeconds"].as_i64().unwrap_or(seconds);
    check_seconds(seconds)?;
    let spec = &mut request["spec"];
    if let Some(longest) = call.server.config.max_token_seconds.filter(|longest| seconds > *longest) {
        call.warnings
            .push(format!("requested expiration of {seconds} seconds shortened to {longest} seconds"));
        seconds = longest;
        spec["expirationSeconds"] = seconds.into();
    }
    if spec["audiences"].as_array().is_none_or(Vec::is_empty) {
        spec["audiences"] = json!(call.server.config.audiences());
    }
    let bound = bound_object(call, &request["spec"]["boundObjectRef"])?;
    let id = uuid::Uuid::new_v4().to_string();
    if let Some(record) = call.audit() {
        record.annotate("authentication.kubernetes.io/issued-credential-id", format!("JTI={id}"));
    }
    let mut claims = json!({
        "aud": request["spec"]["audiences"],
        "exp": now.as_second() + seconds,
        "iat": now.as_second(),
        "iss": signer.issuer,
        "jti": id,
        "kubernetes.io": {
            "namespace": call.namespace(),
            "serviceaccount": {"name": call.name(), "uid": meta::uid(&account)},
        },
        "nbf": now.as_second(),
        "sub": format!("system:serviceaccount:{}:{}", call.namespace(), call.name()),
    });
    let extended = call.server.config.extend_token_expiration
        && is_extended(seconds, &bound, &request["spec"]["audiences"], &signer.issuer);
    for (key, name, uid) in bound {
        claims["kubernetes.io"][key] = json!({"name": name});
        if !uid.is_empty() {
            claims["kubernetes.io"][key]["uid"] = uid.into();
        }
    }
    if extended {
        // As upstream: clients that never read their token again go on working, and are found by this claim.
        claims["kubernetes.io"]["warnafter"] = (now.as_second() + seconds).into();
        claims["exp"] = (now.as_second() + EXTENDED_SECONDS).into();
    }
    let signed = signer.sign(&claims).ok_or_else(|| Status::internal("a token could not be signed"))?;
    let expires = now.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(now);
    request["status"] = json!({"token": signed, "expirationTimestamp": metadata::time(expires)});
    let metadata = meta::metadata_mut(&mut request);
    metadata.insert("uid", uuid::Uuid::new_v4().to_string().into());
    metadata.insert("name", call.name().into());
    metadata.insert("namespace", call.namespace().into());
    metadata.insert("creationTimestamp", metadata::time(now).into());
    encode::object(201, &call.resource, &request, call.representation, call.include_object()?)
}

async fn admit(call: &Call, options: &WriteOptions, request: &mut Value) -> Result<(), Status> {
    let registry = &call.server.registry;
    let attributes = Attributes {
        operation: Operation::Create,
        resource: &call.resource,
        subresource: Some("token"),
        namespace: call.namespace(),
        name: call.name(),
        unnamed: false,
        user: &call.user,
        old: None,
        options,
        rbac: &registry.rbac,
    };
    let view = registry.view();
    registry.admission.mutate(&view, &attributes, request).await?;
    registry.admission.validate(&view, &attributes, Some(request)).await
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

/// The objects that the token is bound to: claim, name and UID. The token ends with the first.
fn bound_object(call: &Call, reference: &Value) -> Result<Vec<(&'static str, String, String)>, Status> {
    let text = |key: &str| reference[key].as_str().unwrap_or_default();
    if reference.is_null() {
        return Ok(Vec::new());
    }
    // As upstream: any version of the core group is taken.
    let (claim, plural, namespace) = match (text("apiVersion"), text("kind")) {
        (version, "Pod") if !version.contains('/') => ("pod", "pods", call.namespace()),
        (version, "Secret") if !version.contains('/') => ("secret", "secrets", call.namespace()),
        (version, "Node") if !version.contains('/') => ("node", "nodes", ""),
        (version, kind) => {
            let version = if version.contains('/') { version.to_owned() } else { format!("/{version}") };
            return Err(Status::bad_request(format!(
                "cannot bind token to object of type {version}, Kind={kind}"
            )));
        }
    };
    if text("name").is_empty() {
        return Err(Status::bad_request("Name parameter required."));
    }
    let view = call.server.registry.view();
    let object = view.get("", plural, namespace, text("name"));
    let object = object.ok_or_else(|| Status::not_found("", plural, text("name")))?;
    if claim == "pod" && object["spec"]["serviceAccountName"] != call.name() {
        return Err(Status::bad_request(format!(
            "cannot bind token for serviceaccount {:?} to pod running with different serviceaccount name.",
            call.name()
        )));
    }
    let uid = meta::uid(&object);
    if !text("uid").is_empty() && text("uid") != uid {
        let why = format!(
            "the UID in the bound object reference ({}) does not match the UID in record. The object might have been deleted and then recreated",
            text("uid")
        );
        return Err(Status::conflict("", text("kind"), text("name"), &why));
    }
    let mut bound = vec![(claim, text("name").to_owned(), uid.to_owned())];
    if let Some(node) = object["spec"]["nodeName"].as_str().filter(|_| claim == "pod") {
        let uid = view.get("", "nodes", "", node).map(|node| meta::uid(&node).to_owned());
        bound.push(("node", node.to_owned(), uid.unwrap_or_default()));
    }
    Ok(bound)
}

/// Why a token makes nobody known.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Rejected {
    /// It is no token of ours.
    Unknown,
    /// It was one.
    Because(String),
}

/// A list of texts as Go's `%q` shows it.
fn quoted<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let texts: Vec<String> = texts.into_iter().map(|text| format!("{text:?}")).collect();
    format!("[{}]", texts.join(" "))
}

/// An object that is being deleted keeps its tokens for so long beyond its end.
const LEEWAY: SignedDuration = SignedDuration::from_secs(60);

/// Whose a token is, and for which of `wanted` it is meant.
pub(crate) fn user_of<'a>(
    server: &ApiServer,
    text: &str,
    wanted: &[&'a str],
) -> Result<(User, Vec<&'a str>), Rejected> {
    let signer = server.tokens.as_ref().ok_or(Rejected::Unknown)?;
    let claims = signer.verify(text).ok_or_else(|| match signer.claims_issuer(text) {
        true => Rejected::Because("go-jose/go-jose: error in cryptographic primitive".to_owned()),
        false => Rejected::Unknown,
    })?;
    if claims["iss"] == ferrite_pki::LEGACY_ISSUER {
        let audiences = server.own_audiences(wanted);
        if audiences.is_empty() {
            return Err(Rejected::Because(format!(
                "token audiences {} is invalid for the target audiences {}",
                quoted(server.config().audiences()),
                quoted(wanted.iter().copied())
            )));
        }
        return legacy_user(server, text, &claims).map(|user| (user, audiences));
    }
    let because = |why: &str| Rejected::Because(why.to_owned());
    let audiences = token::audiences(&claims, wanted);
    if audiences.is_empty() {
        return Err(Rejected::Because(format!(
            "token audiences {} is invalid for the target audiences {}",
            quoted(claims["aud"].as_array().into_iter().flatten().filter_map(Value::as_str)),
            quoted(wanted.iter().copied())
        )));
    }
    let now = Timestamp::now();
    token::in_time(&claims, now.as_second()).map_err(because)?;
    let about = &claims["kubernetes.io"];
    let namespace = about["namespace"].as_str().ok_or(Rejected::Unknown)?;
    let view = server.registry.view();
    let account = &about["serviceaccount"];
    for (claim, plural, namespace) in [
        ("serviceaccount", "serviceaccounts", namespace),
        ("pod", "pods", namespace),
        ("secret", "secrets", namespace),
        ("node", "nodes", ""),
    ] {
        // A pod's token names its node, but ends with the pod.
        if !about[claim].is_object() || (claim == "node" && about["pod"].is_object()) {
            continue;
        }
        let text = |key: &str| about[claim][key].as_str().unwrap_or_default();
        let object = view.get("", plural, namespace, text("name"));
        is_alive(object.as_deref(), claim, text("uid"), now).map_err(Rejected::Because)?;
    }
    let text = |key: &str| account[key].as_str().unwrap_or_default();
    let user = User::service_account(namespace, text("name"), text("uid"));
    let mut user = user.with_credential(format!("JTI={}", claims["jti"].as_str().unwrap_or_default()));
    for claim in ["pod", "node"] {
        for field in ["name", "uid"] {
            if let Some(value) = about[claim][field].as_str() {
                let key = format!("authentication.kubernetes.io/{claim}-{field}");
                user.extra.insert(key, vec![value.to_owned()]);
            }
        }
    }
    server.metrics.access.token_used();
    Ok((user, audiences))
}

/// Whose a token in a secret is: it lasts for as long as the secret holds it.
fn legacy_user(server: &ApiServer, token: &str, claims: &Value) -> Result<User, Rejected> {
    let text = |key: &str| {
        claims.get(format!("kubernetes.io/serviceaccount/{key}")).and_then(Value::as_str).unwrap_or_default()
    };
    let invalidated = || Rejected::Because("service account token has been invalidated".into());
    let view = server.registry.view();
    let now = Timestamp::now();
    let secret = view.get("", "secrets", text("namespace"), text("secret.name")).ok_or_else(invalidated)?;
    let held = secret["data"]["token"].as_str().unwrap_or_default();
    if meta::is_deleting(&secret) || base64::engine::general_purpose::STANDARD.encode(token) != held {
        return Err(invalidated());
    }
    let account = view.get("", "serviceaccounts", text("namespace"), text("service-account.name"));
    is_alive(account.as_deref(), "serviceaccount", text("service-account.uid"), now)
        .map_err(Rejected::Because)?;
    server.legacy_tokens.presented(&secret, text("service-account.name"), now).map_err(Rejected::Because)?;
    Ok(User::service_account(text("namespace"), text("service-account.name"), text("service-account.uid")))
}

/// Checks that the object that a token is bound to still exists.
fn is_alive(object: Option<&Value>, claim: &str, uid: &str, now: Timestamp) -> Result<(), String> {
    let invalidated = || "service account token has been invalidated".to_owned();
    let object = object.ok_or_else(invalidated)?;
    let ends: Option<Timestamp> = meta::str(object, "deletionTimestamp").parse().ok();
    if ends.is_some_and(|ends| ends.checked_add(LEEWAY).is_ok_and(|last| last < now)) {
        return Err(invalidated());
    }
    match meta::uid(object) {
        stored if stored == uid => Ok(()),
        stored if claim == "serviceaccount" => {
            Err(format!("service account UID ({stored}) does not match claim ({uid})"))
        }
        stored => {
            Err(format!("{claim} UID ({stored}) does not match service account {claim} ref claim ({uid})"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audiences_are_shown_as_go_shows_them() {
        assert_eq!(quoted(["a", "https://b"]), r#"["a" "https://b"]"#);
        assert_eq!(quoted([]), "[]");
    }

    #[test]
    fn only_tokens_mounted_into_pods_live_longer_than_asked_for() {
        let bound = |claims: &[&'static str]| -> Vec<(&'static str, String, String)> {
            claims.iter().map(|claim| (*claim, "name".to_owned(), "uid".to_owned())).collect()
        };
        for (seconds, claims, audiences, extended) in [
            (3607, vec!["pod", "node"], json!(["us"]), true),
            (3607, vec!["pod"], json!(["us"]), true),
            (3607, vec![], json!(["us"]), false),
            (3607, vec!["secret"], json!(["us"]), false),
            (3607, vec!["node"], json!(["us"]), false),
            (3607, vec!["pod"], json!(["us", "others"]), false),
            (3607, vec!["pod"], json!(["others"]), false),
            (3600, vec!["pod"], json!(["us"]), false),
        ] {
            let is = is_extended(seconds, &bound(&claims), &audiences, "us");
            assert_eq!(is, extended, "{seconds} {claims:?} {audiences}");
        }
    }
}
