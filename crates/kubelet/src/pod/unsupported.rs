//! Pods that wait for features that this node does not have. As upstream such a pod is not failed: it stays
//! Pending, and events say why.

use super::model;
use k8s_openapi::api::core::v1::{Pod, Volume};

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Unsupported {
    #[error("MountVolume.SetUp failed for volume {volume:?} : {what}")]
    Volume { volume: String, what: &'static str },
}

impl Unsupported {
    /// The reason of the event, as upstream's.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Unsupported::Volume { .. } => "FailedMount",
        }
    }
}

/// Finds a part of the pod that nobody will ever serve. Volumes of an unknown kind are refused where they
/// are set up.
pub(crate) fn find(pod: &Pod) -> Option<Unsupported> {
    let spec = model::spec(pod);
    spec.volumes.iter().flatten().find_map(|volume| {
        let what = part_of(volume)?;
        Some(Unsupported::Volume { volume: volume.name.clone(), what })
    })
}

/// The unsupported part of a volume of a known kind.
fn part_of(volume: &Volume) -> Option<&'static str> {
    let sources = volume.projected.as_ref().and_then(|p| p.sources.as_ref());
    sources.into_iter().flatten().find_map(|source| {
        if source.cluster_trust_bundle.is_some() {
            Some("ClusterTrustBundle projection is not supported")
        } else if source.pod_certificate.is_some() {
            Some("PodCertificate projection is not supported")
        } else {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    #[test]
    fn what_pods_wait_for() {
        let volume = |source: Value| {
            let mut volume = source;
            volume["name"] = json!("v");
            json!({"containers": [], "volumes": [volume]})
        };
        let projected = |source: Value| volume(json!({"projected": {"sources": [source]}}));
        for (spec, expected) in [
            (json!({"containers": []}), None),
            (volume(json!({"emptyDir": {}})), None),
            (volume(json!({"emptyDir": {"medium": "Memory"}})), None),
            (volume(json!({"emptyDir": {"medium": "HugePages-2Mi"}})), None),
            (projected(json!({"configMap": {"name": "c"}})), None),
            (
                projected(json!({"clusterTrustBundle": {"path": "p"}})),
                Some(("FailedMount", "ClusterTrustBundle projection")),
            ),
            (
                projected(json!({"podCertificate": {"signerName": "s", "keyType": "ED25519"}})),
                Some(("FailedMount", "PodCertificate projection")),
            ),
        ] {
            let pod: Pod = ferrite_json::from_value(json!({"metadata": {}, "spec": spec.clone()})).unwrap();
            let got = find(&pod);
            assert_eq!(got.is_some(), expected.is_some(), "{spec}");
            if let (Some(got), Some((reason, part))) = (got, expected) {
                assert_eq!(got.reason(), reason, "{spec}");
                assert!(got.to_string().contains(part), "{got}");
            }
        }
    }
}
