//! ClusterTrustBundles.

use std::collections::BTreeMap;

use super::certificatesigningrequest::validate_signer_name;
use super::pem;
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::text;
use crate::kinds::common::cell;
use crate::kinds::common::check::immutable;
use crate::kinds::common::row::{NAME, shown};
use crate::meta;
use crate::meta_validation::dns1123_subdomain;
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

/// Complaints about the name of a bundle. The name of a signer's bundle begins with the signer's, so that whoever may
/// create bundles of one signer cannot take the name of another's.
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
