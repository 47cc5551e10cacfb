//! The names of the controllers' queues, as upstream's metrics `workqueue_*` have them.

/// Controllers and their queues.
const QUEUES: &[(&str, &str)] = &[
    ("bootstrap-signer-controller", "bootstrap_signer_queue"),
    ("certificatesigningrequest-approving-controller", "certificate"),
    ("certificatesigningrequest-signing-controller", "certificate"),
    ("clusterrole-aggregation-controller", "ClusterRoleAggregator"),
    ("cronjob-controller", "cronjob"),
    ("daemonset-controller", "daemonset"),
    ("deployment-controller", "deployment"),
    ("disruption-controller", "disruption"),
    ("disruption-controller-stale-conditions", "stale_pod_disruption"),
    ("endpoints-controller", "endpoint"),
    ("endpointslice-controller", "endpoint_slice"),
    ("endpointslice-mirroring-controller", "endpoint_slice_mirroring"),
    ("ephemeral-volume-controller", "ephemeral_volume"),
    ("horizontal-pod-autoscaler-controller", "horizontalpodautoscaler"),
    ("job-controller", "job"),
    ("job-controller-orphans", "job_orphan_pod"),
    (
        "kube-apiserver-serving-clustertrustbundle-publisher-controller",
        "ca_cert_publisher_cluster_trust_bundles",
    ),
    ("namespace-controller", "namespace"),
    ("node-lifecycle-controller", "node_lifecycle_controller"),
    ("persistentvolume-binder-controller", "claims"),
    ("persistentvolume-expander-controller", "volume_expand"),
    ("persistentvolume-protection-controller", "pvprotection"),
    ("persistentvolumeclaim-protection-controller", "pvcprotection"),
    ("pod-garbage-collector-controller", "orphaned_pods_nodes"),
    ("priority-and-fairness-config-consumer", "priority_and_fairness_config_queue"),
    ("replicaset-controller", "replicaset"),
    ("replicationcontroller-controller", "replicationmanager"),
    ("resourceclaim-controller", "resource_claim"),
    ("resourcequota-controller", "resourcequota_primary"),
    ("root-ca-certificate-publisher-controller", "root_ca_cert_publisher"),
    ("selinux-warning-controller", "selinux_warning"),
    ("service-cidr-controller", "ipaddresses"),
    ("serviceaccount-controller", "serviceaccount"),
    ("serviceaccount-token-controller", "serviceaccount_tokens_service"),
    ("statefulset-controller", "statefulset"),
    ("token-cleaner-controller", "token_cleaner"),
    ("ttl-after-finished-controller", "ttl_jobs_to_delete"),
    ("ttl-controller", "ttlcontroller"),
    ("validatingadmissionpolicy-status-controller", "validatingadmissionpolicy-status"),
    ("volumeattributesclass-protection-controller", "vacprotection"),
];

/// The queue of a controller; its own name where upstream has no such queue.
pub(crate) fn name_of(controller: &'static str) -> &'static str {
    QUEUES.iter().find(|(name, _)| *name == controller).map_or(controller, |(_, queue)| *queue)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CONTROLLERS;

    #[test]
    fn queues_belong_to_controllers() {
        for (name, _) in QUEUES {
            let of = name.strip_suffix("-orphans").or(name.strip_suffix("-stale-conditions")).unwrap_or(name);
            assert!(CONTROLLERS.iter().any(|entry| entry.name == of), "{name}");
        }
        assert_eq!(name_of("replicaset-controller"), "replicaset");
        assert_eq!(name_of("local-path-provisioner"), "local-path-provisioner");
    }
}
