//! The call of one webhook.

use super::compiled::{SideEffects, Webhook};
use super::review::{self, AnswerError, Verdict};
use crate::admission::{Attributes, expressions};
use crate::outbound::{Call, Outbound, until};
use crate::registry::View;
use ferrite_api::patch::json_patch;
use ferrite_api::resource::Resource;
use ferrite_api::{Status, schema};
use ferrite_json::Value;
use std::borrow::Cow;

/// The largest answer: a patch of a whole object, which is base64 of JSON.
const LIMIT: usize = 8 << 20;

/// The decision of a webhook that admits a request.
pub(super) struct Outcome {
    /// The object as it is now, if it was changed.
    pub object: Option<Value>,
    /// The patch that was applied, if the audit of the request records it.
    pub patch: Option<Value>,
}

/// Why a webhook does not admit a request.
pub(super) enum Failure {
    /// It could not be asked, or gave no answer that can be used. The failure policy decides.
    Calling { why: String, code: u16 },
    /// It refused.
    Refused(Status),
    /// Its answer cannot be followed, whatever the failure policy says.
    Internal(Status),
}

fn calling(why: impl std::fmt::Display, code: u16) -> Failure {
    Failure::Calling { why: why.to_string(), code }
}

type Version<'a> = Option<Cow<'a, Value>>;

/// The objects in the version that a webhook wants.
pub(super) async fn versions<'a>(
    view: &View,
    attributes: &Attributes<'_>,
    matched: &Resource,
    object: Option<&'a Value>,
    old: Option<&'a Value>,
) -> Result<(Version<'a>, Version<'a>), Status> {
    let own = attributes.resource;
    // The body of a subresource is the same in all versions.
    if std::ptr::eq(own, matched) || attributes.kind() != own.gvk() {
        return Ok((object.map(Cow::Borrowed), old.map(Cow::Borrowed)));
    }
    let mut converted = [None, None];
    for (place, value) in converted.iter_mut().zip([object, old]) {
        if let Some(value) = value {
            *place = Some(Cow::Owned(view.convert(own, matched, value).await?));
        }
    }
    let [object, old] = converted;
    Ok((object, old))
}

/// Asks a webhook about a request.
pub(super) async fn invoke(
    outbound: &Outbound,
    webhook: &Webhook,
    view: &View,
    attributes: &Attributes<'_>,
    matched: &Resource,
    object: Option<&Value>,
    mutating: bool,
) -> Result<Outcome, Failure> {
    if attributes.options.dry_run {
        match webhook.side_effects {
            SideEffects::None => {}
            SideEffects::Unsaid => return Err(calling("Webhook SideEffects is nil", 400)),
            SideEffects::Some => {
                let why = format!("admission webhook {:?} does not support dry run", webhook.name);
                return Err(Failure::Internal(Status::bad_request(why)));
            }
        }
    }
    let Some(version) = webhook.version else {
        let why = "could not create admission objects: webhook does not accept known AdmissionReview versions (v1, v1beta1)";
        return Err(calling(why, 400));
    };
    let destination = match &webhook.destination {
        Ok(destination) => destination,
        Err(error) => return Err(calling(format_args!("could not get REST client: {error}"), 500)),
    };
    let (shown, old) =
        versions(view, attributes, matched, object, attributes.old).await.map_err(Failure::Internal)?;
    let uid = uuid::Uuid::new_v4().to_string();
    let question = review::question(
        version,
        &uid,
        expressions::request(attributes, matched),
        shown.as_deref().cloned(),
        old.map(Cow::into_owned),
    );
    let query = format!("timeout={}s", webhook.timeout.as_secs());
    let call = Call {
        destination,
        body: question.to_string().into(),
        query: &query,
        deadline: until(webhook.timeout),
        limit: LIMIT,
    };
    drop(question);
    let answered = outbound.call(view, call).await.map_err(|error| {
        let url = destination.url(&query);
        calling(format_args!("failed to call webhook: Post {url:?}: {error}"), 503)
    })?;
    if !(200..=206).contains(&answered.code) {
        let why = unexpected(answered.code, &answered.body);
        return Err(calling(format_args!("failed to call webhook: {why}"), answered.code));
    }
    let verdict = review::verdict(version, &uid, mutating, &answered.body)
        .map_err(|error: AnswerError| calling(error, 503))?;
    for (key, value) in &verdict.annotations {
        attributes.options.warnings.annotate(format!("{}/{key}", webhook.name), value.clone());
    }
    verdict.warnings.iter().for_each(|warning| attributes.options.warnings.add(warning.as_str()));
    if !verdict.allowed {
        return Err(Failure::Refused(review::refusal(&webhook.name, &verdict.status)));
    }
    if verdict.patch.is_empty() {
        return Ok(Outcome { object: None, patch: None });
    }
    let Some(shown) = shown else {
        let why = format!(
            "admission webhook {:?} attempted to modify the object, which is not supported for this operation",
            webhook.name
        );
        return match is_empty_patch(&verdict) {
            true => Ok(Outcome { object: None, patch: None }),
            false => Err(Failure::Internal(Status::internal(why))),
        };
    };
    patched(view, attributes, matched, &verdict, shown.into_owned()).await
}

fn is_empty_patch(verdict: &Verdict) -> bool {
    ferrite_json::from_slice::<Value>(&verdict.patch)
        .is_ok_and(|patch| patch.as_array().is_some_and(Vec::is_empty))
}

/// Applies a webhook's patch to the object that it was shown.
async fn patched(
    view: &View,
    attributes: &Attributes<'_>,
    matched: &Resource,
    verdict: &Verdict,
    shown: Value,
) -> Result<Outcome, Failure> {
    let undecodable =
        |why: String| calling(format_args!("received undecodable patch in webhook response: {why}"), 503);
    let patch =
        ferrite_api::codec::json::decode_any(&verdict.patch).map_err(|e| undecodable(e.to_string()))?.value;
    match patch.as_array() {
        None => return Err(undecodable("it is no list".to_owned())),
        Some(operations) if operations.is_empty() => return Ok(Outcome { object: None, patch: None }),
        Some(_) => {}
    }
    if verdict.patch_type != "JSONPatch" {
        return Err(calling(format_args!("unsupported patch type {:?}", verdict.patch_type), 400));
    }
    let internal = |why: &dyn std::fmt::Display| Failure::Internal(Status::internal(why));
    let own = attributes.resource;
    let kind = expressions::matched_kind(attributes, matched);
    let mut object = shown;
    json_patch(&mut object, &patch).map_err(|error| internal(&error))?;
    if !object.is_object() {
        return Err(internal(&"the patch leaves no object"));
    }
    object["kind"] = kind.kind.clone().into();
    object["apiVersion"] = kind.api_version().into();
    let is_body = attributes.kind() != own.gvk();
    object = match is_body {
        false => matched.conform(object).map_err(|error| internal(&error))?.value,
        true => match schema::of(&kind) {
            None => object,
            Some(type_) => {
                ferrite_api::codec::json::conform(type_, &object).map_err(|error| internal(&error))?.value
            }
        },
    };
    if !is_body {
        // As upstream: fields that a webhook adds get defaults like those that a client sends.
        matched.strategy.default(&mut object);
        if !std::ptr::eq(own, matched) {
            object = view.convert(matched, own, &object).await.map_err(Failure::Internal)?;
        }
    }
    let patch = attributes.options.warnings.audits_objects().then_some(patch);
    Ok(Outcome { object: Some(object), patch })
}

/// An answer that is no AdmissionReview, in the words of upstream's client.
fn unexpected(code: u16, body: &[u8]) -> String {
    /// As much of the answer as is repeated.
    const SHOWN: usize = 2048;
    let text = String::from_utf8_lossy(body.get(..SHOWN.min(body.len())).unwrap_or_default());
    let text = text.trim();
    match code {
        400 => "the server rejected our request for an unknown reason".into(),
        401 => "the server has asked for the client to provide credentials".into(),
        403 | 415 => text.to_owned(),
        404 => "the server could not find the requested resource".into(),
        405 => "the server does not allow this method on the requested resource".into(),
        409 => "the server reported a conflict".into(),
        422 => "the server rejected our request due to an error in our request".into(),
        429 => "the server has received too many requests and has asked us to try again later".into(),
        503 => "the server is currently unable to handle the request".into(),
        504 => "the server was unable to return a response in the time allotted, but may still be processing the request".into(),
        500.. => format!("an error on the server ({text:?}) has prevented the request from succeeding"),
        _ => format!("the server responded with the status code {code} but did not return more information"),
    }
}
