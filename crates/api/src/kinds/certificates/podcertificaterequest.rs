//! PodCertificateRequests.

mod status;

use super::certificatesigningrequest::validate_signer_name;
use super::key::{self, Key};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    clear_status, default_field, ensure_object, int, keep, map, present, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::{complaints, immutable};
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::{ANNOTATIONS_MAX, dns1123_subdomain, qualified_name};
use crate::resource::{Column, Strategy, keep_all_but_status};
use crate::table::NONE;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferrite_json::Value;
use jiff::Timestamp;

const DAY_SECONDS: i64 = 24 * 60 * 60;
pub(in crate::kinds) const SECONDS_MIN: i64 = 60 * 60;
const UID_MAX: usize = 128;
/// Limit of the public key, of the proof, and of the request.
const KEY_MAX: usize = 10 * 1024;

pub(in crate::kinds) struct PodCertificateRequests;

impl Strategy for PodCertificateRequests {
    fn reset_fields(&self, subresource: Option<&str>) -> Option<&'static [&'static str]> {
        (subresource == Some("status")).then_some(&["spec"])
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        default_field(ensure_object(object, "spec"), "maxExpirationSeconds", DAY_SECONDS);
    }

    fn prepare_create(&self, object: &mut Value) {
        clear_status(object);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "status");
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep_all_but_status(new, old);
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        validate_spec(&object["spec"], &Path::new("spec"))
    }

    /// A request never changes. As upstream, one that is stored is not validated again.
    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        immutable(&new["spec"], &old["spec"], &Path::new("spec")).into_iter().collect()
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        status::validate(new, old, Timestamp::now())
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["spec.nodeName", "spec.podName", "spec.signerName"]
    }

    fn selectable_value(&self, object: &Value, field: &str) -> String {
        text(&object["spec"], field.strip_prefix("spec.").unwrap_or_default()).to_owned()
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("PodName"),
                shown("ServiceAccountName"),
                shown("NodeName"),
                shown("SignerName"),
                shown("State"),
                shown("UnverifiedUserAnnotations"),
            ]
        }
    }

    fn cells(&self, object: &Value, _now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        let keys: Vec<&str> = map(spec, "unverifiedUserAnnotations")
            .into_iter()
            .flatten()
            .map(|(key, _)| key.as_str())
            .collect();
        vec![
            cell::name(object),
            text(spec, "podName").into(),
            text(spec, "serviceAccountName").into(),
            text(spec, "nodeName").into(),
            text(spec, "signerName").into(),
            status::state(object).unwrap_or("Pending").into(),
            if keys.is_empty() { NONE.into() } else { keys.join(",").into() },
        ]
    }
}

fn validate_spec(spec: &Value, path: &Path) -> FieldErrors {
    let signer = text(spec, "signerName");
    let mut errors = validate_signer_name(signer, &path.child("signerName"));
    errors.extend(validate_user_annotations(
        &spec["unverifiedUserAnnotations"],
        &path.child("unverifiedUserAnnotations"),
    ));
    for (name, uid) in
        [("podName", "podUID"), ("serviceAccountName", "serviceAccountUID"), ("nodeName", "nodeUID")]
    {
        let (value, id) = (text(spec, name), text(spec, uid));
        errors.extend(complaints(&path.child(name), value, dns1123_subdomain(value)));
        if id.is_empty() {
            errors.push(FieldError::invalid(&path.child(uid), id, "must not be empty"));
        }
        if id.len() > UID_MAX {
            errors.push(FieldError::too_long(&path.child(uid), UID_MAX));
        }
    }
    let seconds_path = path.child("maxExpirationSeconds");
    if !present(spec, "maxExpirationSeconds") {
        errors.push(FieldError::required(&seconds_path, "must be set"));
        return errors;
    }
    let (seconds, longest) = (int(spec, "maxExpirationSeconds"), longest(signer));
    if !(SECONDS_MIN..=longest).contains(&seconds) {
        let why = format!("must be in the range [{SECONDS_MIN}, {longest}]");
        errors.push(FieldError::invalid(&seconds_path, seconds, why));
    }
    errors.extend(validate_key(spec, path));
    errors
}

/// Limit of a certificate's life in seconds. As upstream, its own signers give a day, others three months.
pub(in crate::kinds) fn longest(signer: &str) -> i64 {
    let domain = signer.split('/').next().unwrap_or_default();
    let of_kubernetes = format!(".{domain}").ends_with(".kubernetes.io");
    if of_kubernetes { DAY_SECONDS } else { 91 * DAY_SECONDS }
}

/// Settings of a pod's author for the signer. Their keys have a domain.
pub(in crate::kinds) fn validate_user_annotations(annotations: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut total = 0;
    for (key, value) in annotations.as_object().into_iter().flatten() {
        total += key.len() + value.as_str().map_or(0, str::len);
        let key = key.to_lowercase();
        if key.is_empty() {
            errors.push(FieldError::required(path, ""));
            continue;
        }
        let problems = complaints(path, &key, qualified_name(&key));
        if problems.is_empty() && !key.contains('/') {
            let why = "must be a domain-prefixed key (such as \"acme.io/foo\")";
            errors.push(FieldError::invalid(path, key, why));
        }
        errors.extend(problems);
    }
    if total > ANNOTATIONS_MAX {
        errors.push(FieldError::too_long(path, ANNOTATIONS_MAX));
    }
    errors
}

fn bytes(spec: &Value, key: &str) -> Vec<u8> {
    STANDARD.decode(text(spec, key)).unwrap_or_default()
}

/// An error that does not print the value.
fn omitted(path: &Path, why: &str) -> FieldError {
    FieldError::invalid(path, Value::Null, why).rendered_as("")
}

/// The key comes in one of two forms, each with a proof that the requester has it.
fn validate_key(spec: &Value, path: &Path) -> Option<FieldError> {
    let (request, public, proof) =
        (bytes(spec, "stubPKCS10Request"), bytes(spec, "pkixPublicKey"), bytes(spec, "proofOfPossession"));
    match (request.is_empty(), public.is_empty(), proof.is_empty()) {
        (false, true, true) => validate_request(&request, &path.child("stubPKCS10Request")),
        (true, false, false) => validate_public_key(spec, &public, &proof, path),
        _ => Some(omitted(
            path,
            "exactly one of (stubPKCS10Request) or (pkixPublicKey, proofOfPossession) must be set",
        )),
    }
}

fn validate_request(der: &[u8], path: &Path) -> Option<FieldError> {
    if der.len() > KEY_MAX {
        return Some(FieldError::too_long(path, KEY_MAX));
    }
    let Some((key, is_signed)) = key::of_request(der) else {
        return Some(omitted(path, "must be a valid PKCS#10 CSR"));
    };
    if let Some(error) = validate_strength(&key, path, "P256, P384, or P521") {
        return Some(error);
    }
    (!is_signed).then(|| omitted(path, "invalid signature"))
}

fn validate_public_key(spec: &Value, der: &[u8], proof: &[u8], path: &Path) -> Option<FieldError> {
    let (key_path, proof_path) = (path.child("pkixPublicKey"), path.child("proofOfPossession"));
    for (bytes, path) in [(der, &key_path), (proof, &proof_path)] {
        if bytes.len() > KEY_MAX {
            return Some(FieldError::too_long(path, KEY_MAX));
        }
    }
    let Some(key) = Key::parse(der) else {
        let value = spec["pkixPublicKey"].clone();
        return Some(FieldError::invalid(&key_path, value, "must be a valid PKIX-serialized public key"));
    };
    if let Some(error) = validate_strength(&key, &key_path, "P256 or P384") {
        return Some(error);
    }
    let proved = key.verifies(der, text(spec, "podUID").as_bytes(), proof);
    (!proved).then(|| omitted(&proof_path, "could not verify proof-of-possession signature"))
}

fn validate_strength(key: &Key, path: &Path, curves: &str) -> Option<FieldError> {
    match key {
        Key::Ecdsa { curve: "P-256" | "P-384" | "P-521", .. } | Key::Ed25519(_) => None,
        Key::Ecdsa { curve, .. } => Some(FieldError::invalid(
            path,
            format!("curve {curve}"),
            format!("elliptic public keys must use curve {curves}"),
        )),
        Key::Rsa { .. } if matches!(key.modulus_bits(), 3072 | 4096) => None,
        Key::Rsa { .. } => Some(FieldError::invalid(
            path,
            format!("{}-bit modulus", key.modulus_bits()),
            "RSA keys must have modulus size 3072 or 4096",
        )),
        Key::Other => {
            Some(omitted(path, "unknown public key type; supported types are Ed25519, ECDSA, and RSA"))
        }
    }
}

#[cfg(test)]
mod tests;
