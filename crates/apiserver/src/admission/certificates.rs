//! Certificate signing requests: their requesters, and the users who may decide about them.

use super::{Attributes, Operation, Plugin};
use crate::auth::Action;
use crate::registry::View;
use base64::Engine;
use ferrite_api::{Status, meta};
use ferrite_json::{Value, json};

const GROUP: &str = "certificates.k8s.io";
const REQUESTS: &str = "certificatesigningrequests";
const CLIENT_SIGNER: &str = "kubernetes.io/kube-apiserver-client";
const MASTERS: &str = "system:masters";

/// Writes the requester into a request, whatever the client wrote. No plugin, because nobody may turn it
/// off.
pub(super) fn stamp_requester(attributes: &Attributes<'_>, object: &mut Value) {
    if !attributes.creates_in(GROUP, REQUESTS) {
        return;
    }
    let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return };
    let user = attributes.user;
    for key in ["username", "uid", "groups", "extra"] {
        spec.remove(key);
    }
    spec.insert("username", user.name.clone().into());
    if !user.uid.is_empty() {
        spec.insert("uid", user.uid.clone().into());
    }
    spec.insert("groups", user.groups.clone().into());
    if !user.extra.is_empty() {
        spec.insert("extra", json!(user.extra));
    }
}

fn signer(object: &Value) -> &str {
    object["spec"]["signerName"].as_str().unwrap_or_default()
}

/// Returns true if the user has a right over a signer, by its name or by its domain.
fn may(view: &View, attributes: &Attributes<'_>, verb: &str, signer: &str) -> bool {
    let domain = signer.split_once('/').map_or(signer, |(domain, _)| domain);
    [signer.to_owned(), format!("{domain}/*")].into_iter().any(|name| {
        let action = Action {
            verb: verb.into(),
            group: GROUP.into(),
            version: "*".into(),
            resource: "signers".into(),
            name,
            ..Action::default()
        };
        attributes.may(view, &action)
    })
}

/// A write that needs a right over the signer it is about.
pub(super) struct OverSigner {
    name: &'static str,
    verb: &'static str,
    /// The wanted action, for a refusal.
    wanted: &'static str,
    /// The signer, if the write is one of those.
    signer: for<'a> fn(&Attributes<'a>, &'a Value) -> Option<&'a str>,
}

/// Approving and denying needs the right over the signer that would sign.
pub(super) static CERTIFICATE_APPROVAL: OverSigner = OverSigner {
    name: "CertificateApproval",
    verb: "approve",
    wanted: "approve requests with",
    signer: |attributes, object| {
        let decides = attributes.is_sub(GROUP, REQUESTS, Some("approval"));
        decides.then(|| signer(attributes.old.unwrap_or(object)))
    },
};

/// So does writing a certificate, or that there will be none.
pub(super) static CERTIFICATE_SIGNING: OverSigner = OverSigner {
    name: "CertificateSigning",
    verb: "sign",
    wanted: "sign requests with",
    signer: |attributes, new| {
        let old = attributes.old.filter(|_| attributes.is_sub(GROUP, REQUESTS, Some("status")))?;
        let same = |key: &str| new["status"].get(key) == old["status"].get(key);
        (!same("certificate") || !same("conditions")).then(|| signer(old))
    },
};

/// Only users with a right over a signer write its trust bundles.
pub(super) static CLUSTER_TRUST_BUNDLE_ATTEST: OverSigner = OverSigner {
    name: "ClusterTrustBundleAttest",
    verb: "attest",
    wanted: "attest for",
    signer: |attributes, object| {
        let of_a_signer = attributes.is(GROUP, "clustertrustbundles") && !signer(object).is_empty();
        // The garbage collector and storage migration change no bundle, and need no right over its signer.
        let is_kept = || attributes.old.is_some_and(|old| changes_only_ownership(object, old));
        (of_a_signer && !is_kept()).then(|| signer(object))
    },
};

/// True if a write changes owners, finalizers and field managers at most.
fn changes_only_ownership(new: &Value, old: &Value) -> bool {
    let strip = |object: &Value| {
        let mut object = object.clone();
        let metadata = meta::metadata_mut(&mut object);
        for key in ["ownerReferences", "finalizers", "selfLink", "managedFields"] {
            metadata.remove(key);
        }
        object
    };
    strip(new) == strip(old)
}

impl Plugin for OverSigner {
    fn name(&self) -> &'static str {
        self.name
    }

    fn handles(&self, validating: bool, operation: Operation) -> bool {
        validating && matches!(operation, Operation::Create | Operation::Update)
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(signer) = object.and_then(|object| (self.signer)(attributes, object)) else { return Ok(()) };
        if may(view, attributes, self.verb, signer) {
            return Ok(());
        }
        Err(attributes.forbid(format!("user not permitted to {} signerName {signer:?}", self.wanted)))
    }
}

/// Nobody gets a certificate that makes them everybody's master.
pub(super) struct CertificateSubjectRestriction;

impl Plugin for CertificateSubjectRestriction {
    fn name(&self) -> &'static str {
        "CertificateSubjectRestriction"
    }

    fn handles(&self, validating: bool, operation: Operation) -> bool {
        validating && operation == Operation::Create
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
    ferrite_pki::Request::parse(&pem).map(|request| request.organizations)
}
