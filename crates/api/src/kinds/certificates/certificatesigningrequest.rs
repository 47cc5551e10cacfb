//! CertificateSigningRequests.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    clear_status, ensure_object, keep, list, list_mut, present, strings, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::repeated;
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::{dns1123_label, dns1123_subdomain};
use crate::pem;
use crate::resource::{Column, MetadataUse, Strategy};
use crate::table::{NONE, duration};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferrite_json::Value;
use jiff::Timestamp;

const LEGACY_SIGNER: &str = "kubernetes.io/legacy-unknown";
const SECONDS_MIN: i64 = 600;
const DOMAIN_MAX: usize = 253;
const PATH_MAX: usize = 253 + 63 + 1;
/// Conditions that stay once they are there.
const LASTING: [&str; 3] = ["Approved", "Denied", "Failed"];
/// The usages that a request may ask for, sorted.
pub const USAGES: &[&str] = &[
    "any",
    "cert sign",
    "client auth",
    "code signing",
    "content commitment",
    "crl sign",
    "data encipherment",
    "decipher only",
    "digital signature",
    "email protection",
    "encipher only",
    "ipsec end system",
    "ipsec tunnel",
    "ipsec user",
    "key agreement",
    "key encipherment",
    "microsoft sgc",
    "netscape sgc",
    "ocsp signing",
    "s/mime",
    "server auth",
    "signing",
    "timestamping",
];

pub(in crate::kinds) struct CertificateSigningRequests;

impl Strategy for CertificateSigningRequests {
    fn status_metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn reset_fields(&self, subresource: Option<&str>) -> Option<&'static [&'static str]> {
        Some(match subresource {
            Some("status") => &["spec", "status.conditions"],
            Some("approval") => &["spec", "status.certificate"],
            None => &["spec", "status"],
            Some(_) => return None,
        })
    }

    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn default(&self, object: &mut Value) {
        ensure_object(object, "spec");
    }

    fn prepare_create(&self, object: &mut Value) {
        clear_status(object);
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        keep(new, old, "status");
    }

    /// The signer reports and the approver decides. Neither touches the other's conditions.
    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        keep(new, old, "spec");
        let status = ensure_object(new, "status");
        for decision in ["Approved", "Denied"] {
            let is_one = |c: &Value| text(c, "type") == decision;
            let was: Vec<&Value> = list(&old["status"], "conditions").iter().filter(|c| is_one(c)).collect();
            // To add or to remove one is refused by validation.
            if list(status, "conditions").iter().filter(|c| is_one(c)).count() == was.len() {
                let same = list_mut(status, "conditions").filter(|c| is_one(c)).zip(was);
                same.for_each(|(is, was)| *is = was.clone());
            }
        }
        stamp_conditions(status, &old["status"]);
    }

    fn prepare_subresource_update(&self, subresource: &str, new: &mut Value, old: &Value) {
        if subresource != "approval" {
            return;
        }
        keep(new, old, "spec");
        let status = ensure_object(new, "status");
        keep(status, &old["status"], "certificate");
        stamp_conditions(status, &old["status"]);
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = validate_spec(&object["spec"], &Path::new("spec"));
        errors.extend(validate_conditions(&object["status"]));
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        errors.extend(validate_lasting(new, old, false));
        errors
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        let (is, was) = (&new["status"]["certificate"], &old["status"]["certificate"]);
        if let Some(certificate) = is.as_str() {
            errors.extend(validate_certificate(certificate));
        }
        errors.extend(validate_lasting(new, old, false));
        if !was.is_null() && is != was {
            errors.push(FieldError::forbidden(
                &Path::new("status").child("certificate"),
                "updates may not modify existing certificate content",
            ));
        }
        errors
    }

    fn validate_subresource_update(&self, _subresource: &str, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        errors.extend(validate_lasting(new, old, true));
        errors
    }

    fn validate_name(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["spec.signerName"]
    }

    fn text_fields(&self) -> &'static [&'static str] {
        &["spec.signerName"]
    }

    fn selectable_value(&self, object: &Value, _field: &str) -> String {
        text(&object["spec"], "signerName").to_owned()
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Age"),
                shown("SignerName"),
                shown("Requestor"),
                shown("RequestedDuration"),
                shown("Condition"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let has = |kind: &str| list(status, "conditions").iter().any(|c| text(c, "type") == kind);
        let mut word = match (has("Denied"), has("Approved")) {
            (true, _) => "Denied".to_owned(),
            (false, true) => "Approved".to_owned(),
            (false, false) => "Pending".to_owned(),
        };
        if has("Failed") {
            word.push_str(",Failed");
        }
        if !text(status, "certificate").is_empty() {
            word.push_str(",Issued");
        }
        let asked = spec["expirationSeconds"].as_i64().map_or_else(|| NONE.to_owned(), duration);
        vec![
            cell::name(object),
            cell::age(object, now),
            cell::text_or(spec, "signerName", NONE),
            text(spec, "username").into(),
            asked.into(),
            word.into(),
        ]
    }
}

/// Conditions say when they were written, and since when they have been so.
fn stamp_conditions(status: &mut Value, old: &Value) {
    let now: Value =
        Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default().to_string().into();
    for condition in list_mut(status, "conditions").filter(|c| c.is_object()) {
        if !present(condition, "lastUpdateTime") {
            condition["lastUpdateTime"] = now.clone();
        }
        if present(condition, "lastTransitionTime") {
            continue;
        }
        let same = list(old, "conditions").iter().find(|c| {
            text(c, "type") == text(condition, "type") && text(c, "status") == text(condition, "status")
        });
        condition["lastTransitionTime"] = same
            .map(|c| c["lastTransitionTime"].clone())
            .filter(|t| !t.is_null())
            .unwrap_or_else(|| now.clone());
    }
}

fn validate_spec(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let request = STANDARD.decode(text(spec, "request")).unwrap_or_default();
    if pem::blocks(&request).first().is_none_or(|block| block.kind != "CERTIFICATE REQUEST") {
        errors.push(FieldError::invalid(
            &path.child("request"),
            spec["request"].clone(),
            "PEM block type must be CERTIFICATE REQUEST",
        ));
    }
    let usages = strings(spec, "usages");
    let usages_path = path.child("usages");
    if usages.is_empty() {
        errors.push(FieldError::required(&usages_path, ""));
    }
    for (index, usage) in usages.iter().enumerate() {
        if !USAGES.contains(usage) {
            errors.push(FieldError::not_supported(&usages_path.index(index), *usage, USAGES));
        }
    }
    let again = repeated(usages.iter());
    for (index, usage) in usages.iter().enumerate() {
        if again[index] {
            errors.push(FieldError::duplicate(&usages_path.index(index), *usage));
        }
    }
    let (signer, signer_path) = (text(spec, "signerName"), path.child("signerName"));
    if signer == LEGACY_SIGNER {
        errors.push(FieldError::invalid(
            &signer_path,
            signer,
            "the legacy signerName is not allowed via this API version",
        ));
    } else {
        errors.extend(validate_signer_name(signer, &signer_path));
    }
    if let Some(seconds) = spec["expirationSeconds"].as_i64().filter(|s| *s < SECONDS_MIN) {
        errors.push(FieldError::invalid(
            &path.child("expirationSeconds"),
            seconds,
            "may not specify a duration less than 600 seconds (10 minutes)",
        ));
    }
    errors
}

/// The name of a signer: a domain and a path.
pub(in crate::kinds) fn validate_signer_name(name: &str, path: &Path) -> FieldErrors {
    if name.is_empty() {
        return vec![FieldError::required(path, "")];
    }
    let Some((domain, rest)) = name.split_once('/').filter(|(_, rest)| !rest.contains('/')) else {
        return vec![FieldError::invalid(
            path,
            name,
            "must be a fully qualified domain and path of the form 'example.com/signer-name'",
        )];
    };
    let mut errors = Vec::new();
    if domain.len() > DOMAIN_MAX {
        errors.push(FieldError::too_long(path, DOMAIN_MAX));
    }
    let mut first_bad = |value: &str, check: fn(&str) -> Vec<String>| {
        let bad =
            value.split('.').map(|label| (label, check(label))).find(|(_, problems)| !problems.is_empty());
        if let Some((label, problems)) = bad {
            errors.extend(
                problems
                    .into_iter()
                    .map(|p| FieldError::invalid(path, value, format!("validating label {label:?}: {p}"))),
            );
        }
    };
    first_bad(domain, dns1123_label);
    first_bad(rest, dns1123_subdomain);
    if !domain.contains('.') {
        errors.push(FieldError::invalid(
            path,
            domain,
            "should be a domain with at least two segments separated by dots",
        ));
    }
    if rest.len() > PATH_MAX {
        errors.push(FieldError::too_long(path, PATH_MAX));
    }
    errors
}

fn validate_conditions(status: &Value) -> FieldErrors {
    let path = Path::new("status").child("conditions");
    let conditions = list(status, "conditions");
    let mut errors = Vec::new();
    let again = repeated(conditions.iter().map(|condition| text(condition, "type")));
    for (index, condition) in conditions.iter().enumerate() {
        let path = path.index(index);
        let (kind, holds) = (text(condition, "type"), text(condition, "status"));
        if kind.is_empty() {
            errors.push(FieldError::required(&path.child("type"), ""));
        }
        if again[index] {
            errors.push(FieldError::duplicate(&path.child("type"), kind));
        }
        match holds {
            "" => errors.push(FieldError::required(&path.child("status"), "")),
            "True" => {}
            "False" | "Unknown" => {
                if LASTING.contains(&kind) {
                    errors.push(FieldError::not_supported(&path.child("status"), holds, &["True"]));
                }
            }
            other => errors.push(FieldError::not_supported(
                &path.child("status"),
                other,
                &["False", "True", "Unknown"],
            )),
        }
    }
    // The later of the two is the one too many.
    let first = |kind: &str| conditions.iter().position(|c| text(c, "type") == kind);
    if let (Some(approved), Some(denied)) = (first("Approved"), first("Denied")) {
        let later = if approved > denied { "Approved" } else { "Denied" };
        errors.push(FieldError::invalid(
            &path,
            later,
            "Approved and Denied conditions are mutually exclusive",
        ));
    }
    errors
}

fn validate_lasting(new: &Value, old: &Value, may_decide: bool) -> FieldErrors {
    let path = Path::new("status").child("conditions");
    let of = |request: &Value, kind: &str| -> Vec<Value> {
        list(&request["status"], "conditions").iter().filter(|c| text(c, "type") == kind).cloned().collect()
    };
    let mut errors = Vec::new();
    for kind in LASTING {
        let (is, was) = (of(new, kind), of(old, kind));
        let change = if is.len() < was.len() {
            "remove"
        } else if may_decide || kind == "Failed" {
            continue;
        } else if is.len() > was.len() {
            "add"
        } else if is != was {
            "modify"
        } else {
            continue;
        };
        errors.push(FieldError::forbidden(
            &path,
            format!("updates may not {change} a condition of type {kind:?}"),
        ));
    }
    errors
}

fn validate_certificate(encoded: &str) -> Option<FieldError> {
    let bytes = STANDARD.decode(encoded).unwrap_or_default();
    let wrong = |why: String| {
        let path = Path::new("status").child("certificate");
        Some(FieldError::invalid(&path, "<certificate data>", why))
    };
    if bytes.is_empty() {
        return None;
    }
    let blocks = pem::blocks(&bytes);
    if blocks.is_empty() {
        return wrong("must contain at least one CERTIFICATE PEM block".to_owned());
    }
    for block in blocks {
        if block.kind != "CERTIFICATE" {
            return wrong(format!("only CERTIFICATE PEM blocks are allowed, found {:?}", block.kind));
        }
        if block.has_headers {
            return wrong("no PEM block headers are permitted".to_owned());
        }
        if block.content.is_empty() {
            return wrong("found CERTIFICATE PEM block containing 0 certificates".to_owned());
        }
        if !pem::is_sequences(&block.content) {
            return wrong("x509: malformed certificate".to_owned());
        }
    }
    None
}
