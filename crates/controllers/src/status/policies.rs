//! Which generation of a ValidatingAdmissionPolicy has been looked at.

use std::sync::Arc;

use ferrite_client::{Api, Informer, is_not_found};
use ferrite_json::json;
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use kube::Client;
use kube::api::{Patch, PatchParams};

use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "validatingadmissionpolicy-status-controller";
const MANAGER: &str = "validatingadmissionpolicy-status";

pub(crate) fn start(context: &Context) {
    let policies: Informer<ValidatingAdmissionPolicy> = context.informers.get();
    let client = context.client.clone();
    super::run(context.controller(NAME).reconciles(&policies), policies, move |policy| {
        let observed = decide(&policy);
        write(client.clone(), policy, observed)
    });
}

/// The generation to report, if it is not reported yet.
fn decide(policy: &ValidatingAdmissionPolicy) -> Option<i64> {
    let reported = policy.status.as_ref().and_then(|status| status.observed_generation);
    policy.metadata.generation.filter(|generation| reported != Some(*generation))
}

async fn write(
    client: Client,
    policy: Arc<ValidatingAdmissionPolicy>,
    observed: Option<i64>,
) -> Result<(), SyncError> {
    let (Some(observed), Some(name)) = (observed, &policy.metadata.name) else { return Ok(()) };
    let patch = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "status": {"observedGeneration": observed, "typeChecking": {}},
    });
    let api: Api<ValidatingAdmissionPolicy> = Api::all(client);
    match api.patch_status(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(patch)).await {
        Err(error) if is_not_found(&error) => Ok(()),
        other => other.map(drop).during(|| format!("write the status of ValidatingAdmissionPolicy {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_generation_is_reported_once() {
        let policy = |generation: i64, observed: Option<i64>| -> ValidatingAdmissionPolicy {
            ferrite_json::from_value(json!({"metadata": {"generation": generation},
                "status": {"observedGeneration": observed}}))
            .expect("a policy")
        };
        assert_eq!(decide(&policy(1, None)), Some(1));
        assert_eq!(decide(&policy(1, Some(1))), None);
        assert_eq!(decide(&policy(2, Some(1))), Some(2));
    }
}
