//! The authorities of conversion webhooks.

use crate::field::{FieldError, Path};
use crate::kinds::common::access::text;
use crate::pem;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ferrite_json::Value;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

/// The authorities of a conversion webhook. As upstream: before the resource is served, and as long as they were not
/// readable before, they need not be readable.
pub(super) fn validate_authorities(
    spec: &Value,
    old: &Value,
    established: bool,
    path: &Path,
) -> Option<FieldError> {
    let bundle = |spec: &Value| spec["conversion"]["webhook"]["clientConfig"]["caBundle"].clone();
    let problem = |bundle: &Value| bundle_problem(bundle.as_str()?);
    let (given, before) = (bundle(spec), bundle(old));
    if !established || text(&spec["conversion"], "strategy") != "Webhook" || problem(&before).is_some() {
        return None;
    }
    let path = path.child("conversion").child("webhookClientConfig").child("caBundle");
    problem(&given).map(|why| FieldError::invalid(&path, given.clone(), why))
}

/// Why no authority can be read from a bundle; none of one that is empty or has at least one.
fn bundle_problem(bundle: &str) -> Option<String> {
    if bundle.is_empty() {
        return None;
    }
    let bytes = STANDARD.decode(bundle).unwrap_or_default();
    let blocks = pem::blocks(&bytes);
    let is_certificate = |block: &&pem::Block| block.kind == "CERTIFICATE" && !block.has_headers;
    let reads = |block: &pem::Block| X509Certificate::from_der(&block.content).is_ok();
    if blocks.iter().filter(is_certificate).any(reads) {
        return None;
    }
    let why = match blocks.iter().any(|block| is_certificate(&block)) {
        true => "failed to parse certificate: x509: malformed certificate",
        false if blocks.is_empty() => "unable to parse bytes as PEM block",
        false => "no valid certificate authority data seen",
    };
    Some(format!("unable to load root certificates: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn authorities_are_read_once_the_kind_is_served() {
        let spec = |bundle: &[u8]| json!({"conversion": {"strategy": "Webhook", "webhook": {"clientConfig": {"caBundle": STANDARD.encode(bundle)}}}});
        let authority = crate::kinds::tests::authority();
        let broken = pem::encode("CERTIFICATE", b"der");
        let key = pem::encode("PRIVATE KEY", b"secret");
        let none = json!({"conversion": {"strategy": "None"}});
        for (new, old, established, told) in [
            (spec(authority.as_bytes()), none.clone(), true, ""),
            (spec(b""), none.clone(), true, ""),
            (spec(b"a"), none.clone(), false, ""),
            (spec(b"a"), spec(b"b"), true, ""),
            (spec(b"a"), none.clone(), true, "unable to parse bytes as PEM block"),
            (spec(broken.as_bytes()), spec(authority.as_bytes()), true, "failed to parse certificate"),
            (spec(key.as_bytes()), none.clone(), true, "no valid certificate authority data seen"),
        ] {
            let error = validate_authorities(&new, &old, established, &Path::new("spec"));
            let text = error.map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(text.is_empty(), told.is_empty(), "{text}");
            assert!(text.contains(told), "{text}");
            assert!(
                text.is_empty() || text.starts_with("spec.conversion.webhookClientConfig.caBundle"),
                "{text}"
            );
        }
    }
}
