//! ClusterTrustBundles.

use std::collections::BTreeMap;

use super::certificatesigningrequest::validate_signer_name;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::text;
use crate::kinds::common::cell;
use crate::kinds::common::check::immutable;
use crate::kinds::common::row::{NAME, shown};
use crate::meta;
use crate::meta_validation::dns1123_subdomain;
use crate::pem;
use crate::resource::{Column, MetadataUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

const BUNDLE_MAX: usize = 1024 * 1024;

pub(in crate::kinds) struct ClusterTrustBundles;

impl Strategy for ClusterTrustBundles {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    /// The rules for a name depend on the signer: [`Strategy::validate`] has them.
    fn validate_name(&self, _name: &str) -> Vec<String> {
        Vec::new()
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = validate_all_but_bundle(object);
        errors.extend(validate_bundle(text(&object["spec"], "trustBundle")));
        errors
    }

    /// As upstream: a bundle that does not change is not parsed again.
    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let (is, was) = (&new["spec"], &old["spec"]);
        let mut errors = validate_all_but_bundle(new);
        if text(is, "trustBundle") != text(was, "trustBundle") {
            errors.extend(validate_bundle(text(is, "trustBundle")));
        }
        let signer = |spec: &Value| Value::from(text(spec, "signerName"));
        errors.extend(immutable(&signer(is), &signer(was), &Path::new("spec").child("signerName")));
        errors
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["spec.signerName"]
    }

    fn selectable_value(&self, object: &Value, _field: &str) -> String {
        text(&object["spec"], "signerName").to_owned()
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("SignerName")] }
    }

    fn cells(&self, object: &Value, _now: Timestamp) -> Vec<Value> {
        vec![cell::name(object), text(&object["spec"], "signerName").into()]
    }
}

fn validate_all_but_bundle(object: &Value) -> FieldErrors {
    let (name, signer) = (meta::name(object), text(&object["spec"], "signerName"));
    let path = Path::new("metadata").child("name");
    let mut errors: FieldErrors = name_problems(name, signer)
        .into_iter()
        .map(|problem| FieldError::invalid(&path, name, problem))
        .collect();
    if !signer.is_empty() {
        errors.extend(validate_signer_name(signer, &Path::new("spec").child("signerName")));
    }
    errors
}

/// Complaints about the name of a bundle. The name of a signer's bundle begins with the signer's, so that a
/// writer of one signer's bundles cannot take the name of another signer's bundle.
pub(in crate::kinds) fn name_problems(name: &str, signer: &str) -> Vec<String> {
    if signer.is_empty() {
        if name.contains(':') {
            return vec!["ClusterTrustBundle without signer name must not have \":\" in its name".to_owned()];
        }
        return dns1123_subdomain(name);
    }
    let prefix = format!("{}:", signer.replace('/', ":"));
    match name.strip_prefix(&prefix) {
        Some(own) => dns1123_subdomain(own),
        None => {
            vec![format!("ClusterTrustBundle for signerName {signer} must be named with prefix {prefix}")]
        }
    }
}

fn validate_bundle(bundle: &str) -> FieldErrors {
    let path = Path::new("spec").child("trustBundle");
    if bundle.len() > BUNDLE_MAX {
        return vec![FieldError::too_long(&path, BUNDLE_MAX)];
    }
    let invalid = |why: String| FieldError::invalid(&path, "<value omitted>", why);
    let blocks = pem::blocks(bundle.as_bytes());
    let mut errors = Vec::new();
    let mut places: BTreeMap<&[u8], Vec<usize>> = BTreeMap::new();
    for (index, block) in blocks.iter().enumerate() {
        match anchor_problem(block) {
            Some(why) => errors.push(invalid(format!("entry {index} {why}"))),
            None => places.entry(&block.content).or_default().push(index),
        }
    }
    if !errors.is_empty() {
        return errors;
    }
    if places.is_empty() {
        errors.push(invalid("at least one trust anchor must be provided".to_owned()));
    }
    for indices in places.values().filter(|indices| indices.len() > 1) {
        let indices: Vec<String> = indices.iter().map(ToString::to_string).collect();
        errors.push(invalid(format!("duplicate trust anchor (indices [{}])", indices.join(" "))));
    }
    errors
}

/// Reason why a block is no trust anchor.
fn anchor_problem(block: &pem::Block) -> Option<String> {
    if block.kind != "CERTIFICATE" {
        return Some(format!("has bad block type: {}", block.kind));
    }
    if block.has_headers {
        return Some("has PEM block headers".to_owned());
    }
    let Some((_, certificate)) =
        X509Certificate::from_der(&block.content).ok().filter(|(rest, _)| rest.is_empty())
    else {
        return Some("does not parse as X.509".to_owned());
    };
    match certificate.basic_constraints() {
        Ok(Some(constraints)) if constraints.value.ca => None,
        _ => Some("does not have the CA bit set".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_bundle_begins_with_its_signer() {
        for (name, signer, expected) in [
            ("a", "", None),
            ("example.com:s:a", "example.com/s", None),
            (
                "example.com:s:a",
                "",
                Some("ClusterTrustBundle without signer name must not have \":\" in its name"),
            ),
            (
                "example.com:t:a",
                "example.com/s",
                Some(
                    "ClusterTrustBundle for signerName example.com/s must be named with prefix example.com:s:",
                ),
            ),
            (
                "a",
                "example.com/s",
                Some(
                    "ClusterTrustBundle for signerName example.com/s must be named with prefix example.com:s:",
                ),
            ),
        ] {
            assert_eq!(name_problems(name, signer).first().map(String::as_str), expected, "{name} {signer}");
        }
        assert_eq!(name_problems("example.com:s:A", "example.com/s").len(), 1);
    }

    #[test]
    fn a_bundle_has_anchors_and_nothing_else() {
        let anchor = crate::kinds::tests::authority();
        let with_headers = anchor.replacen("-----\n", "-----\nKey: value\n\n", 1);
        let key = pem::encode("PRIVATE KEY", b"secret");
        let broken = pem::encode("CERTIFICATE", b"der");
        let omitted =
            |why: &str| vec![format!("spec.trustBundle: Invalid value: \"<value omitted>\": {why}")];
        for (bundle, expected) in [
            (anchor.clone(), vec![]),
            (format!("a note\n{anchor}"), vec![]),
            (String::new(), omitted("at least one trust anchor must be provided")),
            (format!("{anchor}{anchor}"), omitted("duplicate trust anchor (indices [0 1])")),
            (format!("{anchor}{key}"), omitted("entry 1 has bad block type: PRIVATE KEY")),
            (with_headers, omitted("entry 0 has PEM block headers")),
            (broken, omitted("entry 0 does not parse as X.509")),
            (
                "x".repeat(BUNDLE_MAX + 1),
                vec!["spec.trustBundle: Too long: may not be more than 1048576 bytes".to_owned()],
            ),
        ] {
            let errors: Vec<String> = validate_bundle(&bundle).iter().map(ToString::to_string).collect();
            assert_eq!(errors, expected);
        }
    }

    #[test]
    fn a_bundle_that_stays_is_not_parsed_again_and_keeps_its_signer() {
        let object = |signer: &str, bundle: &str| {
            let name = format!("{}:a", signer.replace('/', ":"));
            ferrite_json::json!({"metadata": {"name": name}, "spec": {"signerName": signer, "trustBundle": bundle}})
        };
        let strategy = ClusterTrustBundles;
        let old = object("example.com/s", "once valid");
        assert_eq!(strategy.validate_update(&old, &old), []);
        assert_eq!(strategy.validate_update(&object("example.com/s", "other"), &old).len(), 1);
        let errors = strategy.validate_update(&object("example.com/t", "once valid"), &old);
        assert_eq!(errors.len(), 1);
        assert!(errors[0].to_string().ends_with("field is immutable"), "{}", errors[0]);
    }
}
