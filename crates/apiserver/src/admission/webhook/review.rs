//! AdmissionReview: the question to a webhook, and the checks on its answer. Pure.

use base64::Engine;
use ferrite_api::Status;
use ferrite_json::{Map, Value, json};

/// Versions of AdmissionReview.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V1,
    V1Beta1,
}

impl Version {
    /// The first that the webhook takes and this server knows.
    pub fn of(accepted: &Value) -> Option<Self> {
        accepted.as_array()?.iter().find_map(|version| match version.as_str() {
            Some("v1") => Some(Self::V1),
            Some("v1beta1") => Some(Self::V1Beta1),
            _ => None,
        })
    }

    fn api_version(self) -> &'static str {
        match self {
            Self::V1 => "admission.k8s.io/v1",
            Self::V1Beta1 => "admission.k8s.io/v1beta1",
        }
    }
}

/// The question. `request` has all fields but the UID and the objects.
pub(super) fn question(
    version: Version,
    uid: &str,
    mut request: Map,
    object: Option<Value>,
    old: Option<Value>,
) -> Value {
    request.insert("uid", uid.into());
    request.insert("object", object.unwrap_or_default());
    request.insert("oldObject", old.unwrap_or_default());
    json!({"kind": "AdmissionReview", "apiVersion": version.api_version(), "request": Value::Object(request)})
}

/// A webhook's answer, checked.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Verdict {
    pub allowed: bool,
    /// JSON of a patch; empty for none.
    pub patch: Vec<u8>,
    pub patch_type: String,
    pub status: Value,
    pub warnings: Vec<String>,
    pub annotations: Vec<(String, String)>,
}

/// Why an answer cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum AnswerError {
    /// It is no AdmissionReview at all.
    #[error("failed to call webhook: {0}")]
    Undecodable(String),
    #[error("received invalid webhook response: {0}")]
    Invalid(String),
}

/// Texts and annotations that one answer may carry. More is no answer but an attack.
const MAX_WARNINGS: usize = 256;
const MAX_ANNOTATIONS: usize = 256;

/// Checks an answer to the question with `uid`.
pub(super) fn verdict(
    version: Version,
    uid: &str,
    mutating: bool,
    body: &[u8],
) -> Result<Verdict, AnswerError> {
    let undecodable = |why: String| AnswerError::Undecodable(why);
    let invalid = |why: String| Err(AnswerError::Invalid(why));
    let review = ferrite_api::codec::json::decode_any(body)
        .map_err(|e| undecodable(format!("couldn't get version/kind; json parse error: {e}")))?
        .value;
    if !review.is_object() {
        let why = "json: cannot unmarshal into Go value of type struct";
        return Err(undecodable(format!("couldn't get version/kind; json parse error: {why}")));
    }
    let response = match &review["response"] {
        Value::Null => return invalid("webhook response was absent".into()),
        response @ Value::Object(_) => response,
        _ => return Err(wrong("response", "object")),
    };
    let text = |key: &'static str| match &response[key] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.as_str())),
        _ => Err(wrong(key, "string")),
    };
    let answered = text("uid")?.unwrap_or_default();
    let patch = match text("patch")? {
        None => Vec::new(),
        Some(encoded) => base64::engine::general_purpose::STANDARD
            .decode(encoded)
            .map_err(|e| undecodable(format!("response.patch is not base64: {e}")))?,
    };
    let patch_type = text("patchType")?;
    if version == Version::V1 {
        if answered != uid {
            return invalid(format!("expected response.uid={uid:?}, got {answered:?}"));
        }
        let (api_version, kind) =
            (review["apiVersion"].as_str().unwrap_or_default(), review["kind"].as_str().unwrap_or_default());
        if (api_version, kind) != (version.api_version(), "AdmissionReview") {
            let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
            return invalid(format!(
                "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got {group}/{version}, Kind={kind}"
            ));
        }
        match (mutating, patch.is_empty(), patch_type) {
            (true, false, None) => {
                return invalid("webhook returned response.patch but not response.patchType".into());
            }
            (true, true, Some(_)) => {
                return invalid("webhook returned response.patchType but not response.patch".into());
            }
            (true, _, Some("")) => {
                return invalid("webhook returned invalid response.patchType of \"\"".into());
            }
            (false, false, _) => return invalid("validating webhook may not return response.patch".into()),
            (false, _, Some(_)) => {
                return invalid("validating webhook may not return response.patchType".into());
            }
            _ => {}
        }
    }
    let patch = if mutating { patch } else { Vec::new() };
    let patch_type = match version {
        Version::V1 => patch_type.unwrap_or_default().to_owned(),
        // As upstream: the older version knows no other.
        Version::V1Beta1 => "JSONPatch".to_owned(),
    };
    let allowed = match &response["allowed"] {
        Value::Null => false,
        Value::Bool(allowed) => *allowed,
        _ => return Err(wrong("allowed", "bool")),
    };
    let status = match &response["status"] {
        status @ (Value::Null | Value::Object(_)) => status.clone(),
        _ => return Err(wrong("status", "object")),
    };
    let warnings = response["warnings"].as_array().into_iter().flatten().take(MAX_WARNINGS);
    let annotations = response["auditAnnotations"].as_object();
    let annotations = annotations.into_iter().flat_map(|map| map.iter()).take(MAX_ANNOTATIONS);
    Ok(Verdict {
        allowed,
        patch,
        patch_type,
        status,
        warnings: warnings.filter_map(|text| text.as_str().map(str::to_owned)).collect(),
        annotations: annotations
            .filter_map(|(key, value)| Some((key.to_string(), value.as_str()?.to_owned())))
            .collect(),
    })
}

fn wrong(field: &str, expected: &str) -> AnswerError {
    AnswerError::Undecodable(format!("json: response.{field} of the AdmissionReview is no {expected}"))
}

/// The refusal that a webhook's answer is, as upstream completes it.
pub(super) fn refusal(webhook: &str, result: &Value) -> Status {
    let text = |key: &str| result[key].as_str().unwrap_or_default();
    let code = result["code"].as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(0);
    let code = if (400..1000).contains(&code) { code } else { 400 };
    let denied = format!("admission webhook {webhook:?} denied the request");
    let message = match (text("message"), text("reason")) {
        ("", "") => format!("{denied} without explanation"),
        ("", reason) => format!("{denied}: {reason}"),
        (message, _) => format!("{denied}: {message}"),
    };
    let mut status = Status::new(code, text("reason").to_owned(), message);
    status.details = result["details"].as_object().map(|details| Box::new(details.clone()));
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(response: Value) -> Value {
        json!({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "response": response})
    }

    #[test]
    fn answers_that_break_the_rules_are_refused() {
        let patch = base64::engine::general_purpose::STANDARD.encode("[]");
        let rows: [(Value, bool, &str); 17] = [
            (answer(json!({"uid": "u", "allowed": true})), true, ""),
            (
                answer(json!({"uid": "u", "allowed": true, "patch": patch, "patchType": "JSONPatch"})),
                true,
                "",
            ),
            (answer(json!({"uid": "u"})), false, ""),
            (json!({}), true, "received invalid webhook response: webhook response was absent"),
            (json!([]), true, "failed to call webhook: couldn't get version/kind"),
            (json!("x"), true, "failed to call webhook: couldn't get version/kind"),
            (answer(json!({"uid": "v"})), true, "expected response.uid=\"u\", got \"v\""),
            (answer(json!({})), true, "expected response.uid=\"u\", got \"\""),
            (
                json!({"response": {"uid": "u"}}),
                true,
                "expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview, got /, Kind=",
            ),
            (
                answer(json!({"uid": "u", "patch": patch})),
                true,
                "webhook returned response.patch but not response.patchType",
            ),
            (
                answer(json!({"uid": "u", "patchType": "JSONPatch"})),
                true,
                "webhook returned response.patchType but not response.patch",
            ),
            (
                answer(json!({"uid": "u", "patch": patch, "patchType": ""})),
                true,
                "invalid response.patchType",
            ),
            (
                answer(json!({"uid": "u", "patch": patch})),
                false,
                "validating webhook may not return response.patch",
            ),
            (
                answer(json!({"uid": "u", "patchType": "JSONPatch"})),
                false,
                "validating webhook may not return response.patchType",
            ),
            (
                answer(json!({"uid": "u", "allowed": "yes"})),
                true,
                "response.allowed of the AdmissionReview is no bool",
            ),
            (answer(json!({"uid": "u", "patch": "!"})), true, "response.patch is not base64"),
            (
                answer(json!({"uid": "u", "status": 1})),
                true,
                "response.status of the AdmissionReview is no object",
            ),
        ];
        for (body, mutating, expected) in rows {
            let got = verdict(Version::V1, "u", mutating, body.to_string().as_bytes());
            let got = got.map_or_else(|error| error.to_string(), |_| String::new());
            assert!(got.contains(expected) && expected.is_empty() == got.is_empty(), "{body}: {got}");
        }
        for garbage in [&b""[..], b"\xff\xfe", b"{", b"<html>"] {
            assert!(verdict(Version::V1, "u", true, garbage).is_err());
        }
        // The older version is believed without a UID.
        let old = json!({"response": {"allowed": true, "patch": patch}});
        let verdict = verdict(Version::V1Beta1, "u", true, old.to_string().as_bytes()).expect("a verdict");
        assert_eq!((verdict.allowed, verdict.patch_type.as_str()), (true, "JSONPatch"));
    }

    #[test]
    fn refusals_are_in_upstreams_words() {
        let rows = [
            (Value::Null, 400, "admission webhook \"w\" denied the request without explanation"),
            (json!({"message": "no"}), 400, "admission webhook \"w\" denied the request: no"),
            (json!({"reason": "Bad", "code": 200}), 400, "admission webhook \"w\" denied the request: Bad"),
            (json!({"message": "no", "code": 403}), 403, "admission webhook \"w\" denied the request: no"),
        ];
        for (result, code, message) in rows {
            let status = refusal("w", &result);
            assert_eq!((status.code, status.message.as_str()), (code, message), "{result}");
        }
    }
}
