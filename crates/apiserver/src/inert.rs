//! Kinds that are stored although nothing acts on them yet. Whoever writes one is warned, where the server runs as part
//! of a cluster that is meant to be whole (`ferrite up`, `ferrite server`).
//!
//! A bare `ferrite kube-apiserver` warns of none: upstream's controllers and nodes may complete it, and its answers are
//! compared with upstream's, in which no write of these kinds carries a warning (also those on which the API server itself
//! should act: webhooks, policies, flow control and remote API services).
//!
//! To make a kind work is to remove its row here, and its name from README.md and docs/differences.md.

use ferrite_api::resource::Resource;
use ferrite_json::Value;

/// A kind on which nothing acts.
struct Inert {
    group: &'static str,
    plural: &'static str,
    kind: &'static str,
    /// What does not happen.
    missing: &'static str,
    /// Whether nothing acts on this object; none means on no object of the kind.
    only: Option<fn(&Value) -> bool>,
}

const fn row(group: &'static str, plural: &'static str, kind: &'static str, missing: &'static str) -> Inert {
    Inert { group, plural, kind, missing, only: None }
}

/// Whether objects are converted by a webhook, which nobody calls.
fn converts(definition: &Value) -> bool {
    definition.pointer("/spec/conversion/strategy").is_some_and(|strategy| strategy == "Webhook")
}

const ADMISSION: &str = "admissionregistration.k8s.io";
const CLAIMS: &str = "resource.k8s.io";
const NETWORKING: &str = "networking.k8s.io";
const STORAGE: &str = "storage.k8s.io";
const NO_CALL: &str = "requests are not sent to it";
const NO_CEL: &str = "its expressions are not evaluated";
const NO_FLOW: &str = "requests are not queued or limited by it";
const NO_VOLUME: &str = "nodes call no CSI driver";
const NO_DEVICE: &str = "no device is allocated";

#[rustfmt::skip]
const INERT: &[Inert] = &[
    row(ADMISSION, "mutatingadmissionpolicies", "MutatingAdmissionPolicy", NO_CEL),
    row(ADMISSION, "mutatingadmissionpolicybindings", "MutatingAdmissionPolicyBinding", NO_CEL),
    row(ADMISSION, "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", NO_CALL),
    row(ADMISSION, "validatingadmissionpolicies", "ValidatingAdmissionPolicy", NO_CEL),
    row(ADMISSION, "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", NO_CEL),
    row(ADMISSION, "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", NO_CALL),
    Inert {
        only: Some(converts),
        ..row("apiextensions.k8s.io", "customresourcedefinitions", "CustomResourceDefinition", "its resources are not served")
    },
    row("autoscaling", "horizontalpodautoscalers", "HorizontalPodAutoscaler", "nothing is scaled"),
    row("flowcontrol.apiserver.k8s.io", "flowschemas", "FlowSchema", NO_FLOW),
    row("flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations", "PriorityLevelConfiguration", NO_FLOW),
    row(NETWORKING, "ingressclasses", "IngressClass", "no traffic is routed"),
    row(NETWORKING, "ingresses", "Ingress", "no traffic is routed"),
    row(NETWORKING, "networkpolicies", "NetworkPolicy", "no traffic is filtered"),
    row(CLAIMS, "deviceclasses", "DeviceClass", NO_DEVICE),
    row(CLAIMS, "resourceclaims", "ResourceClaim", NO_DEVICE),
    row(CLAIMS, "resourceclaimtemplates", "ResourceClaimTemplate", NO_DEVICE),
    row(CLAIMS, "resourceslices", "ResourceSlice", NO_DEVICE),
    row(STORAGE, "csidrivers", "CSIDriver", NO_VOLUME),
    row(STORAGE, "csistoragecapacities", "CSIStorageCapacity", NO_VOLUME),
    row(STORAGE, "volumeattachments", "VolumeAttachment", NO_VOLUME),
    row(STORAGE, "volumeattributesclasses", "VolumeAttributesClass", NO_VOLUME),
    row("storagemigration.k8s.io", "storageversionmigrations", "StorageVersionMigration", "nothing is migrated"),
];

/// The warning for whoever writes an object on which nothing acts.
pub(crate) fn warning(resource: &Resource, object: &Value) -> Option<String> {
    let row = INERT.iter().find(|row| row.group == resource.group && row.plural == resource.plural)?;
    let inert = row.only.is_none_or(|only| only(object));
    inert.then(|| format!("{} is stored, but nothing acts on it yet: {}", row.kind, row.missing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn rows_are_of_resources_that_exist() {
        let served = ferrite_api::kinds::built_in();
        for row in INERT {
            let found = served.iter().find(|r| r.group == row.group && r.plural == row.plural);
            assert_eq!(found.map(|r| r.kind.as_ref()), Some(row.kind), "{}", row.plural);
        }
    }

    #[test]
    fn the_documents_name_the_same_kinds() {
        for (name, text) in [
            ("README.md", include_str!("../../../README.md")),
            ("docs/differences.md", include_str!("../../../docs/differences.md")),
        ] {
            for row in INERT {
                assert!(text.contains(&format!("`{}`", row.kind)), "{name} does not name {}", row.kind);
            }
        }
    }

    #[test]
    fn only_a_definition_that_converts_is_not_served() {
        let served = ferrite_api::kinds::built_in();
        let definitions = served.iter().find(|r| r.plural == "customresourcedefinitions").unwrap();
        assert_eq!(warning(definitions, &json!({"spec": {"conversion": {"strategy": "None"}}})), None);
        assert!(warning(definitions, &json!({"spec": {"conversion": {"strategy": "Webhook"}}})).is_some());
        let pods = served.iter().find(|r| r.plural == "pods" && r.group.is_empty()).unwrap();
        assert_eq!(warning(pods, &json!({})), None);
    }
}
