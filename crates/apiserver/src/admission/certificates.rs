//! Certificate signing requests: who made them, and who may decide about them.

use super::{Attributes, Operation, Plugin};
use crate::auth::Action;
use crate::registry::View;
use base64::Engine;
use ferrite_api::Status;
use serde_json::{Value, json};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;

const GROUP: &str = "certificates.k8s.io";
const REQUESTS: &str = "certificatesigningrequests";
const CLIENT_SIGNER: &str = "kubernetes.io/kube-apiserver-client";
const MASTERS: &str = "system:masters";

/// A request says who made it; the server writes that, whatever the client wrote. No plugin, for nobody may
/// turn it off.
pub(super) fn stamp_requester(attributes: &Attributes<'_>, object: &mut Value) {
    if !attributes.creates_in(GROUP, REQUESTS) {
        return;
    }
    let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return };
    let user = attributes.user;
    for key in ["username", "uid", "groups", "extra"] {
        spec.remove(key);
    }
    spec.insert("username".into(), user.name.clone().into());
    if !user.uid.is_empty() {
        spec.insert("uid".into(), user.uid.clone().into());
    }
    spec.insert("groups".into(), user.groups.clone().into());
    if !user.extra.is_empty() {
        spec.insert("extra".into(), json!(user.extra));
    }
}

fn signer(object: &Value) -> &str {
    object["spec"]["signerName"].as_str().unwrap_or_default()
}

/// Whether the user has a right over a signer, by its name or by its domain.
fn may(view: &View, attributes: &Attributes<'_>, verb: &str, signer: &str) -> bool {
    let domain = signer.split_once('/').map_or(signer, |(domain, _)| domain);
    [signer.to_owned(), format!("{domain}/*")].into_iter().any(|name| {
        let action = Action {
            verb: verb.into(),
            group: GROUP.into(),
            resource: "signers".into(),
            name,
            ..Action::default()
        };
        attributes.may(view, &action)
    })
}

/// Approving and denying needs the right over the signer that would sign.
pub(super) struct CertificateApproval;

impl Plugin for CertificateApproval {
    fn name(&self) -> &'static str {
        "CertificateApproval"
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(object) = object.filter(|_| attributes.is_sub(GROUP, REQUESTS, Some("approval"))) else {
            return Ok(());
        };
        let signer = signer(attributes.old.unwrap_or(object));
        match may(view, attributes, "approve", signer) {
            true => Ok(()),
            false => Err(attributes
                .forbid(format!("user not permitted to approve requests with signerName {signer:?}"))),
        }
    }
}

/// So does writing a certificate, or that there will be none.
pub(super) struct CertificateSigning;

impl Plugin for CertificateSigning {
    fn name(&self) -> &'static str {
        "CertificateSigning"
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let (Some(new), Some(old), true) =
            (object, attributes.old, attributes.is_sub(GROUP, REQUESTS, Some("status")))
        else {
            return Ok(());
        };
        let same = |key: &str| new["status"].get(key) == old["status"].get(key);
        let signer = signer(old);
        if (same("certificate") && same("conditions")) || may(view, attributes, "sign", signer) {
            return Ok(());
        }
        Err(attributes.forbid(format!("user not permitted to sign requests with signerName {signer:?}")))
    }
}

/// Trust bundles of a signer are written by those who may speak for it.
pub(super) struct ClusterTrustBundleAttest;

impl Plugin for ClusterTrustBundleAttest {
    fn name(&self) -> &'static str {
        "ClusterTrustBundleAttest"
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(object) = object.filter(|_| attributes.is(GROUP, "clustertrustbundles")) else {
            return Ok(());
        };
        let signer = signer(object);
        if signer.is_empty() || may(view, attributes, "attest", signer) {
            return Ok(());
        }
        Err(attributes.forbid(format!("user not permitted to attest for signerName {signer:?}")))
    }
}

/// Nobody gets a certificate that makes them everybody's master.
pub(super) struct CertificateSubjectRestriction;

impl Plugin for CertificateSubjectRestriction {
    fn name(&self) -> &'static str {
        "CertificateSubjectRestriction"
    }

    fn validate(
        &self,
        _view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let relevant = attributes.operation == Operation::Create && attributes.is(GROUP, REQUESTS);
        let Some(object) = object.filter(|o| relevant && signer(o) == CLIENT_SIGNER) else { return Ok(()) };
        let organizations = organizations(object["spec"]["request"].as_str().unwrap_or_default())
            .ok_or_else(|| attributes.forbid("failed to parse CSR: it is not a certificate request"))?;
        if organizations.iter().any(|o| o == MASTERS) {
            return Err(attributes
                .forbid(format!("use of {CLIENT_SIGNER} signer with {MASTERS} group is not allowed")));
        }
        Ok(())
    }
}

/// The organisations a request wants to be certified for. `encoded` is a PEM in base64.
fn organizations(encoded: &str) -> Option<Vec<String>> {
    let pem = base64::engine::general_purpose::STANDARD.decode(encoded).ok()?;
    let (_, pem) = x509_parser::pem::parse_x509_pem(&pem).ok()?;
    let (_, request) = X509CertificationRequest::from_der(&pem.contents).ok()?;
    let subject = &request.certification_request_info.subject;
    Some(subject.iter_organization().filter_map(|o| o.as_str().ok()).map(str::to_owned).collect())
}
