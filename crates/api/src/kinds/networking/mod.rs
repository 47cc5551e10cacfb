//! `networking.k8s.io`.

pub(super) mod ingress;
pub(super) mod ingressclass;
pub(super) mod ipaddress;
pub(super) mod networkpolicy;
pub(super) mod servicecidr;

use crate::field::{FieldError, FieldErrors, Path};
use crate::meta_validation::dns1123_subdomain;

/// A path that begins with a domain: `example.com/name`.
pub(super) fn domain_prefixed_path(value: &str, path: &Path) -> FieldErrors {
    if value.is_empty() {
        return vec![FieldError::required(path, "")];
    }
    let Some((host, rest)) =
        value.split_once('/').filter(|(host, rest)| !host.is_empty() && !rest.is_empty())
    else {
        return vec![FieldError::invalid(
            path,
            value,
            "must be a domain-prefixed path (such as \"acme.io/foo\")",
        )];
    };
    let mut errors: FieldErrors =
        dns1123_subdomain(host).into_iter().map(|p| FieldError::invalid(path, host, p)).collect();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/-._~%!$&'()*+,;=:".contains(c);
    if !rest.chars().all(plain) {
        errors.push(FieldError::invalid(
            path,
            rest,
            "Invalid path (e.g. '/path', regex used for validation is '[A-Za-z0-9/\\-._~%!$&'()*+,;=:]+')",
        ));
    }
    errors
}
