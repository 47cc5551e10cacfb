//! The controllers of kube-controller-manager.
//!
//! One module per controller, one row per controller in [`CONTROLLERS`]. A controller is a set of pure functions
//! that decide, and a thin part that reads from shared informers, writes through the API and is woken by a queue.

mod autoscaling;
mod bootstrap_tokens;
mod certificates;
mod cluster_roles;
mod context;
mod cronjob;
mod daemon;
mod deployment;
mod devices;
mod discovery;
mod disruption;
mod endpoints;
mod error;
mod evict;
mod gc;
mod hash;
mod history;
mod intstr;
mod job;
mod kinds;
mod legacy_tokens;
mod namespace;
mod node_ipam;
mod node_ttl;
mod nodes;
mod pod_control;
mod pod_owners;
mod pods;
mod queues;
mod replicas;
mod resource_quota;
mod root_ca;
mod running;
mod selection;
mod selinux_warning;
mod service_account;
mod service_account_token;
pub mod service_lb;
mod service_ranges;
mod stateful;
mod status;
mod storage_migration;
mod storage_protection;
mod ttl_after_finished;
mod volume;

pub use autoscaling::AutoscalingConfig;
pub use certificates::{NodeCertificates, Signers};
pub use context::{Clients, Config, Context, Identity};
pub use error::SyncError;
pub use node_ipam::{NodeCidrs, NodeCidrsError};
pub use nodes::EvictionRates;
pub use selection::{FOR_JOINING, OF_THE_SERVER, ON_REQUEST, selects_any, start_all, unknown};
pub use volume::local_path;

/// A controller: its upstream name and how to start it. Starting spawns tasks into the context's scope and returns.
#[derive(Debug, Clone, Copy)]
pub struct ControllerEntry {
    pub name: &'static str,
    /// The user that it acts as.
    pub identity: Identity,
    pub start: fn(&Context),
}

const MANAGER: Identity = Identity::Manager;
const SERVER: Identity = Identity::Server;

const fn account(name: &'static str) -> Identity {
    Identity::ServiceAccount(name)
}

/// Every controller there is.
pub const CONTROLLERS: &[ControllerEntry] = &[
    ControllerEntry {
        name: "deployment-controller",
        identity: account("deployment-controller"),
        start: deployment::start,
    },
    ControllerEntry {
        name: "replicaset-controller",
        identity: account("replicaset-controller"),
        start: replicas::start_replica_sets,
    },
    ControllerEntry {
        name: "replicationcontroller-controller",
        identity: account("replication-controller"),
        start: replicas::start_replication_controllers,
    },
    ControllerEntry { name: "job-controller", identity: account("job-controller"), start: job::start },
    ControllerEntry {
        name: "cronjob-controller",
        identity: account("cronjob-controller"),
        start: cronjob::start,
    },
    ControllerEntry {
        name: "ttl-after-finished-controller",
        identity: account("ttl-after-finished-controller"),
        start: ttl_after_finished::start,
    },
    ControllerEntry {
        name: "daemonset-controller",
        identity: account("daemon-set-controller"),
        start: daemon::start,
    },
    ControllerEntry {
        name: "statefulset-controller",
        identity: account("statefulset-controller"),
        start: stateful::start,
    },
    ControllerEntry {
        name: "horizontal-pod-autoscaler-controller",
        identity: account("horizontal-pod-autoscaler"),
        start: autoscaling::start,
    },
    ControllerEntry {
        name: "endpoints-controller",
        identity: account("endpoint-controller"),
        start: endpoints::start_endpoints,
    },
    ControllerEntry {
        name: "endpointslice-controller",
        identity: account("endpointslice-controller"),
        start: endpoints::start_slices,
    },
    ControllerEntry {
        name: "endpointslice-mirroring-controller",
        identity: account("endpointslicemirroring-controller"),
        start: endpoints::start_mirroring,
    },
    ControllerEntry {
        name: "namespace-controller",
        identity: account("namespace-controller"),
        start: namespace::start,
    },
    ControllerEntry {
        name: "serviceaccount-controller",
        identity: account("service-account-controller"),
        start: service_account::start,
    },
    ControllerEntry {
        name: "serviceaccount-token-controller",
        identity: MANAGER,
        start: service_account_token::start,
    },
    ControllerEntry {
        name: "certificatesigningrequest-approving-controller",
        identity: account("certificate-controller"),
        start: certificates::start_approving,
    },
    ControllerEntry {
        name: "node-certificate-approving-controller",
        identity: SERVER,
        start: certificates::start_approving_nodes,
    },
    ControllerEntry {
        name: "certificatesigningrequest-signing-controller",
        identity: account("certificate-controller"),
        start: certificates::start_signing,
    },
    ControllerEntry {
        name: "certificatesigningrequest-cleaner-controller",
        identity: account("certificate-controller"),
        start: certificates::start_cleaning,
    },
    ControllerEntry {
        name: "bootstrap-signer-controller",
        identity: account("bootstrap-signer"),
        start: bootstrap_tokens::start_signing,
    },
    ControllerEntry {
        name: "token-cleaner-controller",
        identity: account("token-cleaner"),
        start: bootstrap_tokens::start_cleaning,
    },
    ControllerEntry {
        name: "legacy-serviceaccount-token-cleaner-controller",
        identity: account("legacy-service-account-token-cleaner"),
        start: legacy_tokens::start,
    },
    ControllerEntry {
        name: "podcertificaterequest-cleaner-controller",
        identity: account("podcertificaterequestcleaner"),
        start: certificates::start_cleaning_pod_requests,
    },
    ControllerEntry {
        name: "kube-apiserver-serving-clustertrustbundle-publisher-controller",
        identity: account("kube-apiserver-serving-clustertrustbundle-publisher"),
        start: certificates::start_publishing,
    },
    ControllerEntry {
        name: "root-ca-certificate-publisher-controller",
        identity: account("root-ca-cert-publisher"),
        start: root_ca::start,
    },
    ControllerEntry {
        name: "clusterrole-aggregation-controller",
        identity: account("clusterrole-aggregation-controller"),
        start: cluster_roles::start,
    },
    ControllerEntry {
        name: "resourcequota-controller",
        identity: account("resourcequota-controller"),
        start: resource_quota::start,
    },
    ControllerEntry {
        name: "disruption-controller",
        identity: account("disruption-controller"),
        start: disruption::start,
    },
    ControllerEntry {
        name: "persistentvolume-binder-controller",
        identity: account("persistent-volume-binder"),
        start: volume::binder::start,
    },
    ControllerEntry {
        name: "persistentvolume-attach-detach-controller",
        identity: account("attachdetach-controller"),
        start: volume::attach_detach::start,
    },
    ControllerEntry {
        name: "persistentvolume-expander-controller",
        identity: account("expand-controller"),
        start: volume::expander::start,
    },
    ControllerEntry {
        name: "ephemeral-volume-controller",
        identity: account("ephemeral-volume-controller"),
        start: volume::ephemeral::start,
    },
    ControllerEntry {
        name: "resourceclaim-controller",
        identity: account("resource-claim-controller"),
        start: devices::claims::start,
    },
    ControllerEntry {
        name: "device-taint-eviction-controller",
        identity: account("device-taint-eviction-controller"),
        start: devices::taints::start,
    },
    ControllerEntry {
        name: "persistentvolumeclaim-protection-controller",
        identity: account("pvc-protection-controller"),
        start: storage_protection::start_claims,
    },
    ControllerEntry {
        name: "persistentvolume-protection-controller",
        identity: account("pv-protection-controller"),
        start: storage_protection::start_volumes,
    },
    ControllerEntry {
        name: "volumeattributesclass-protection-controller",
        identity: account("volumeattributesclass-protection-controller"),
        start: storage_protection::start_classes,
    },
    ControllerEntry {
        name: "selinux-warning-controller",
        identity: account("selinux-warning-controller"),
        start: selinux_warning::start,
    },
    ControllerEntry {
        name: "service-cidr-controller",
        identity: account("service-cidrs-controller"),
        start: service_ranges::start,
    },
    ControllerEntry {
        name: "node-ipam-controller",
        identity: account("node-controller"),
        start: node_ipam::start,
    },
    ControllerEntry { name: "ttl-controller", identity: account("ttl-controller"), start: node_ttl::start },
    ControllerEntry {
        name: "garbage-collector-controller",
        identity: account("generic-garbage-collector"),
        start: gc::start,
    },
    ControllerEntry {
        name: "node-lifecycle-controller",
        identity: account("node-controller"),
        start: nodes::start_lifecycle,
    },
    ControllerEntry {
        name: "taint-eviction-controller",
        identity: account("node-controller"),
        start: nodes::start_taint_eviction,
    },
    ControllerEntry {
        name: "pod-garbage-collector-controller",
        identity: account("pod-garbage-collector"),
        start: nodes::start_pod_gc,
    },
    ControllerEntry {
        name: "validatingadmissionpolicy-status-controller",
        identity: account("validatingadmissionpolicy-status-controller"),
        start: status::policies::start,
    },
    ControllerEntry {
        name: "priority-and-fairness-config-consumer",
        identity: SERVER,
        start: status::flow_schemas::start,
    },
    ControllerEntry {
        name: "storage-version-migrator-controller",
        identity: account("storage-version-migrator-controller"),
        start: storage_migration::start,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = CONTROLLERS.iter().map(|entry| entry.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CONTROLLERS.len());
    }
}
