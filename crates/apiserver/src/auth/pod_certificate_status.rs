//! The status of a PodCertificateRequest is its certificate. The right to write statuses is not the right to sign for a
//! signer.

use super::{Action, Grant, Rbac, decide};
use crate::registry::View;
use ferrite_api::field::{FieldError, Path};

const GROUP: &str = "certificates.k8s.io";
const PLURAL: &str = "podcertificaterequests";

/// Refuses a change of a request's status by a user who may not sign for its signer.
pub(crate) fn check(rbac: &Rbac, view: &View, grant: &Grant<'_>) -> Option<FieldError> {
    if grant.resource.group != GROUP || grant.resource.plural != PLURAL {
        return None;
    }
    let old = grant.old?;
    if old.get("status") == grant.new.get("status") {
        return None;
    }
    let signer = old["spec"]["signerName"].as_str().unwrap_or_default();
    let domain = signer.split_once('/').map_or(signer, |(domain, _)| domain);
    let may = [signer.to_owned(), format!("{domain}/*")].into_iter().any(|name| {
        let action = Action {
            verb: "sign".into(),
            group: GROUP.into(),
            version: "*".into(),
            resource: "signers".into(),
            name,
            ..Action::default()
        };
        decide(rbac, view, grant.user, &action).allowed
    });
    let path = Path::new("spec").child("signerName");
    (!may).then(|| {
        let why = format!("User {:?} is not permitted to \"sign\" for signer {signer:?}", grant.user.name);
        FieldError::forbidden(&path, why)
    })
}
