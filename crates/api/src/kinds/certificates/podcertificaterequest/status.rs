//! The status of a PodCertificateRequest: it is written once, and is the answer to the request.

use super::{bytes, omitted};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::certificates::key::{self, Key};
use crate::kinds::common::access::{int, list, text};
use crate::kinds::common::check;
use crate::pem;
use ferrite_json::Value;
use jiff::{SignedDuration, Timestamp};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

const ISSUED: &str = "Issued";
const DENIED: &str = "Denied";
const FAILED: &str = "Failed";
/// In the order in which upstream prints them.
const OUTCOMES: [&str; 3] = [ISSUED, DENIED, FAILED];
const CHAIN_MAX: usize = 100 * 1024;
/// Difference between a certificate's beginning and the server's clock.
const SKEW: SignedDuration = SignedDuration::from_mins(5);
/// Time between the beginning or the end of a certificate and its renewal.
const MARGIN: SignedDuration = SignedDuration::from_mins(10);
const TIMES: [(&str, &str); 3] = [
    ("notBefore", "must be present and consistent with the issued certificate"),
    ("notAfter", "must be present and consistent with the issued certificate"),
    ("beginRefreshAt", "must be present and in the range [notbefore+10min, notafter-10min]"),
];

/// The outcome of a request; none while it is pending.
pub(super) fn state(request: &Value) -> Option<&'static str> {
    let conditions = list(&request["status"], "conditions");
    let holds =
        |kind: &str| conditions.iter().any(|c| text(c, "type") == kind && text(c, "status") == "True");
    OUTCOMES.into_iter().find(|kind| holds(kind))
}

/// Validates a write of the status.
pub(super) fn validate(new: &Value, old: &Value, now: Timestamp) -> FieldErrors {
    let path = Path::new("status");
    let (is, was) = (&new["status"], &old["status"]);
    let mut errors = validate_conditions(list(is, "conditions"), &path.child("conditions"));
    if !errors.is_empty() {
        return errors;
    }
    if state(old).is_some() {
        if !same(is, was) {
            let why = "immutable after PodCertificateRequest is issued, denied, or failed";
            errors.push(omitted(&path, why));
        }
        return errors;
    }
    match state(new) {
        Some(ISSUED) => errors.extend(validate_issued(new, old, now)),
        Some(_) if !is_only_conditions(is) => {
            let why =
                "non-condition status fields must be empty when denying or failing the PodCertificateRequest";
            errors.push(omitted(&path, why));
        }
        Some(_) => {}
        None if !same(is, was) => {
            let why = r#"status is immutable unless transitioning to "Issued", "Denied", or "Failed""#;
            errors.push(omitted(&path, why));
        }
        None => {}
    }
    errors
}

fn validate_conditions(conditions: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut outcomes = 0;
    for (index, condition) in conditions.iter().enumerate() {
        // As upstream, whose path of these errors has a dot before the index.
        let path = path.child(&format!("[{index}]"));
        let (kind, holds) = (text(condition, "type"), text(condition, "status"));
        if !OUTCOMES.contains(&kind) {
            errors.push(FieldError::not_supported(&path.child("type"), kind, &OUTCOMES));
            continue;
        }
        outcomes += 1;
        if outcomes > 1 {
            let why = r#"There may be at most one condition with type "Issued", "Denied", or "Failed""#;
            errors.push(FieldError::invalid(&path.child("type"), kind, why));
        }
        if holds != "True" {
            errors.push(FieldError::not_supported(&path.child("status"), holds, &["True"]));
        }
    }
    errors.extend(check::conditions(conditions, path));
    errors
}

fn is_only_conditions(status: &Value) -> bool {
    text(status, "certificateChain").is_empty() && TIMES.iter().all(|(key, _)| text(status, key).is_empty())
}

fn same(a: &Value, b: &Value) -> bool {
    list(a, "conditions") == list(b, "conditions")
        && ["certificateChain", "notBefore", "beginRefreshAt", "notAfter"]
            .iter()
            .all(|key| text(a, key) == text(b, key))
}

/// Validates the certificate that was issued for a request.
fn validate_issued(new: &Value, old: &Value, now: Timestamp) -> FieldErrors {
    let path = Path::new("status").child("certificateChain");
    let (spec, status) = (&old["spec"], &new["status"]);
    let chain = text(status, "certificateChain");
    if chain.len() > CHAIN_MAX {
        return vec![FieldError::too_long(&path, CHAIN_MAX)];
    }
    let invalid = |why: &str| vec![FieldError::invalid(&path, chain, why)];
    let blocks = pem::blocks(chain.as_bytes());
    let Some((leaf, others)) = blocks.split_first() else {
        return invalid("issued certificate chain must contain at least one certificate");
    };
    if leaf.kind != "CERTIFICATE" {
        return invalid("issued certificate chain must consist entirely of CERTIFICATE PEM blocks");
    }
    let Some(leaf) = certificate(&leaf.content) else {
        return invalid("leaf certificate does not parse as valid X.509");
    };
    let mut errors = validate_names(&leaf, &path);
    let Some(wanted) = requested_key(spec) else {
        errors.push(match text(spec, "stubPKCS10Request").is_empty() {
            false => omitted(&Path::new("spec").child("stubPKCS10Request"), "must be a valid PKCS#10 CSR"),
            true => omitted(
                &Path::new("spec").child("pkixPublicKey"),
                "must be a valid PKIX-serialized public key",
            ),
        });
        return errors;
    };
    if Key::of(leaf.public_key()).is_none_or(|key| key != wanted) {
        errors.extend(invalid("leaf certificate was not issued to the requested public key"));
        return errors;
    }
    let wrong_time = validate_times(spec, status, &leaf, now);
    if !errors.is_empty() || !wrong_time.is_empty() {
        errors.extend(wrong_time);
        return errors;
    }
    for block in others {
        if block.kind != "CERTIFICATE" {
            return invalid("issued certificate chain must consist entirely of CERTFICATE PEM blocks");
        }
        if certificate(&block.content).is_none() {
            return invalid("intermediate certificate does not parse as valid X.509");
        }
    }
    errors
}

fn certificate(der: &[u8]) -> Option<X509Certificate<'_>> {
    X509Certificate::from_der(der).ok().filter(|(rest, _)| rest.is_empty()).map(|(_, leaf)| leaf)
}

fn requested_key(spec: &Value) -> Option<Key> {
    let request = bytes(spec, "stubPKCS10Request");
    match request.is_empty() {
        false => key::of_request(&request).map(|(key, _)| key),
        true => Key::parse(&bytes(spec, "pkixPublicKey")),
    }
}

fn validate_names(leaf: &X509Certificate<'_>, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let names = leaf.subject_alternative_name().ok().flatten();
    for name in names.iter().flat_map(|names| &names.value.general_names) {
        match name {
            GeneralName::DNSName(name) => {
                errors.extend(dns_problems(name).into_iter().map(|why| FieldError::invalid(path, *name, why)))
            }
            GeneralName::RFC822Name(name) if !is_mail_address(name) => {
                let why = "leaf certificate should not contain invalid EmailAddress";
                errors.push(FieldError::invalid(path, *name, why));
            }
            _ => {}
        }
    }
    errors
}

fn dns_problems(name: &str) -> Vec<&'static str> {
    let mut problems = Vec::new();
    if name.is_empty() {
        problems.push("leaf certificate should not contain empty DNSName");
    }
    if name.contains("..") {
        problems.push("leaf certificate's DNSName should not contain '..'");
    }
    if name.starts_with('.') || name.ends_with('.') {
        problems.push("leaf certificate's DNSName should not start or end with '.'");
    }
    problems
}

/// True of `local@domain`, the form that a certificate may have.
fn is_mail_address(name: &str) -> bool {
    let odd = |c: char| c.is_whitespace() || c.is_control() || "<>(),;:\\\"[]".contains(c);
    name.split_once('@').is_some_and(|(local, domain)| {
        let dotted = |part: &str| part.split('.').all(|label| !label.is_empty());
        !domain.contains('@') && !name.contains(odd) && dotted(local) && dotted(domain)
    })
}

fn validate_times(spec: &Value, status: &Value, leaf: &X509Certificate<'_>, now: Timestamp) -> FieldErrors {
    let path = Path::new("status");
    let time = |key: &str| text(status, key).parse::<Timestamp>().ok();
    let (Some(begin), Some(end), Some(refresh)) =
        (time("notBefore"), time("notAfter"), time("beginRefreshAt"))
    else {
        let missing = TIMES.iter().filter(|(key, _)| time(key).is_none());
        return missing.map(|(key, why)| FieldError::required(&path.child(key), *why)).collect();
    };
    let wrong = |key: &str, time: Timestamp, why: &str| {
        vec![FieldError::invalid(&path.child(key), text(status, key), why).rendered_as(go_time(time))]
    };
    let validity = leaf.validity();
    if begin.as_second() != validity.not_before.timestamp() {
        let why = "must be set to the NotBefore time encoded in the leaf certificate";
        return wrong("notBefore", begin, why);
    }
    if now.duration_since(begin).abs() >= SKEW {
        let why = "must be set to within 5 minutes of kube-apiserver's current time";
        return wrong("notBefore", begin, why);
    }
    if end.as_second() != validity.not_after.timestamp() {
        let why = "must be set to the NotAfter time encoded in the leaf certificate";
        return wrong("notAfter", end, why);
    }
    let lifetime = end.duration_since(begin).as_secs();
    let life = |why: String| {
        let path = path.child("certificateChain");
        vec![FieldError::invalid(&path, lifetime, why).rendered_as(go_duration(lifetime))]
    };
    if lifetime < super::SECONDS_MIN {
        return life("leaf certificate lifetime must be >= 1 hour".to_owned());
    }
    let longest = int(spec, "maxExpirationSeconds");
    if lifetime > longest {
        return life(format!("leaf certificate lifetime must be <= spec.maxExpirationSeconds ({longest})"));
    }
    if refresh.duration_since(begin) < MARGIN {
        return wrong("beginRefreshAt", refresh, "must be at least 10 minutes after status.notBefore");
    }
    if end.duration_since(refresh) < MARGIN {
        return wrong("beginRefreshAt", refresh, "must be at least 10 minutes before status.notAfter");
    }
    Vec::new()
}

/// A time as Go prints it.
fn go_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%S +0000 UTC").to_string()
}

/// A duration of whole seconds as Go prints it.
fn go_duration(seconds: i64) -> String {
    let sign = if seconds < 0 { "-" } else { "" };
    let seconds = seconds.unsigned_abs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{sign}{rest}s"),
        (0, _) => format!("{sign}{minutes}m{rest}s"),
        _ => format!("{sign}{hours}h{minutes}m{rest}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use ferrite_json::json;
    use rcgen::{CertificateParams, DistinguishedName, KeyPair};
    use time::OffsetDateTime;

    const NOW: i64 = 1_800_000_000;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(NOW + seconds).unwrap()
    }

    /// A request for the key, which is pending.
    fn request(key: &KeyPair) -> Value {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let der = params.serialize_request(key).unwrap();
        json!({"spec": {"stubPKCS10Request": STANDARD.encode(der.der()), "maxExpirationSeconds": 7200}})
    }

    fn certificate_for(key: &KeyPair, from: i64, to: i64, name: Option<&str>) -> String {
        let mut params = CertificateParams::default();
        let time = |seconds: i64| OffsetDateTime::from_unix_timestamp(NOW + seconds).unwrap();
        (params.not_before, params.not_after) = (time(from), time(to));
        if let Some(name) = name {
            params.subject_alt_names = vec![rcgen::SanType::DnsName(name.try_into().unwrap())];
        }
        params.self_signed(key).unwrap().pem()
    }

    fn condition(kind: &str) -> Value {
        json!({"type": kind, "status": "True", "reason": "R", "message": "", "lastTransitionTime": at(0).to_string()})
    }

    fn issued(chain: &str, from: i64, refresh: i64, to: i64) -> Value {
        json!({"conditions": [condition(ISSUED)], "certificateChain": chain, "notBefore": at(from).to_string(),
            "beginRefreshAt": at(refresh).to_string(), "notAfter": at(to).to_string()})
    }

    fn errors(old: &Value, status: Value) -> Vec<String> {
        let mut new = old.clone();
        new["status"] = status;
        validate(&new, old, at(0)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_certificate_is_the_requested_keys_and_has_the_requested_life() {
        let (key, other) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let old = request(&key);
        let good = certificate_for(&key, 0, 3600, None);
        assert_eq!(errors(&old, issued(&good, 0, 1800, 3600)), [""; 0]);
        let chain = format!("{good}{}", certificate_for(&other, 0, 3600, None));
        assert_eq!(errors(&old, issued(&chain, 0, 1800, 3600)), [""; 0], "with an intermediate one");
        for (status, expected) in [
            (issued("", 0, 1800, 3600), "must contain at least one certificate"),
            (
                issued(&certificate_for(&other, 0, 3600, None), 0, 1800, 3600),
                "leaf certificate was not issued to the requested public key",
            ),
            (
                issued(&good, 1, 1800, 3600),
                "must be set to the NotBefore time encoded in the leaf certificate",
            ),
            (
                issued(&good, 0, 1800, 3601),
                "must be set to the NotAfter time encoded in the leaf certificate",
            ),
            (
                issued(&certificate_for(&key, -300, 3600, None), -300, 1800, 3600),
                "must be set to within 5 minutes of kube-apiserver's current time",
            ),
            (
                issued(&certificate_for(&key, 0, 3599, None), 0, 1800, 3599),
                "status.certificateChain: Invalid value: 59m59s: leaf certificate lifetime must be >= 1 hour",
            ),
            (
                issued(&certificate_for(&key, 0, 7201, None), 0, 1800, 7201),
                "Invalid value: 2h0m1s: leaf certificate lifetime must be <= spec.maxExpirationSeconds (7200)",
            ),
            (issued(&good, 0, 599, 3600), "must be at least 10 minutes after status.notBefore"),
            (issued(&good, 0, 3001, 3600), "must be at least 10 minutes before status.notAfter"),
            (
                issued(&certificate_for(&key, 0, 3600, Some("a..b")), 0, 1800, 3600),
                "leaf certificate's DNSName should not contain '..'",
            ),
            (
                issued(&format!("{good}{}", pem::encode("PRIVATE KEY", b"x")), 0, 1800, 3600),
                "must consist entirely of CERTFICATE PEM blocks",
            ),
            (
                issued(&format!("{good}{}", pem::encode("CERTIFICATE", b"x")), 0, 1800, 3600),
                "intermediate certificate does not parse as valid X.509",
            ),
        ] {
            let found = errors(&old, status);
            assert!(found.len() == 1 && found[0].contains(expected), "{expected}: {found:?}");
        }
    }

    #[test]
    fn a_status_is_written_once() {
        let key = KeyPair::generate().unwrap();
        let old = request(&key);
        let good = certificate_for(&key, 0, 3600, None);
        let denied = json!({"conditions": [condition(DENIED)]});
        assert_eq!(errors(&old, denied.clone()), [""; 0]);
        assert_eq!(errors(&old, json!({"conditions": [condition(FAILED)]})), [""; 0]);
        let mut with_certificate = issued(&good, 0, 1800, 3600);
        with_certificate["conditions"] = json!([condition(DENIED)]);
        assert_eq!(
            errors(&old, with_certificate),
            [
                "status: Invalid value: non-condition status fields must be empty when denying or failing the PodCertificateRequest"
            ]
        );
        assert_eq!(
            errors(&old, json!({"certificateChain": good})),
            [
                r#"status: Invalid value: status is immutable unless transitioning to "Issued", "Denied", or "Failed""#
            ]
        );
        let mut ended = old.clone();
        ended["status"] = denied.clone();
        assert_eq!(errors(&ended, denied), [""; 0]);
        assert_eq!(
            errors(&ended, issued(&good, 0, 1800, 3600)),
            ["status: Invalid value: immutable after PodCertificateRequest is issued, denied, or failed"]
        );
        let both = json!({"conditions": [condition(ISSUED), condition(DENIED)]});
        assert!(errors(&old, both)[0].contains("There may be at most one condition"));
        assert!(
            errors(&old, json!({"conditions": [condition("Approved")]}))[0]
                .contains("Unsupported value: \"Approved\"")
        );
    }
}
