//! The two kinds that own a number of equal pods.

use std::collections::BTreeMap;

use ferrite_client::Object;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{ReplicaSet, ReplicaSetCondition, ReplicaSetStatus};
use k8s_openapi::api::core::v1::{
    PodTemplateSpec, ReplicationController, ReplicationControllerCondition, ReplicationControllerStatus,
};
use kube::Resource;
use kube::core::Selector;

/// A kind whose pods [`super::manager`] keeps at a number. Status is spoken of as a ReplicaSet's.
pub(super) trait Replicated:
    Object + Resource<DynamicType = (), Scope = NamespaceResourceScope> + serde::Serialize
{
    const CONTROLLER: &'static str;
    /// The controller as a source of events.
    const COMPONENT: &'static str;

    fn replicas(&self) -> i32;
    fn min_ready_seconds(&self) -> i32;
    /// `None` if it cannot be understood.
    fn selector(&self) -> Option<Selector>;
    /// The labels that every pod the selector matches has.
    fn match_labels(&self) -> Option<&BTreeMap<String, String>>;
    fn template(&self) -> PodTemplateSpec;
    fn status(&self) -> ReplicaSetStatus;
    fn set_status(&mut self, status: ReplicaSetStatus);
}

impl Replicated for ReplicaSet {
    const CONTROLLER: &'static str = "replicaset-controller";
    const COMPONENT: &'static str = "replicaset-controller";

    fn replicas(&self) -> i32 {
        self.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
    }

    fn min_ready_seconds(&self) -> i32 {
        self.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0)
    }

    fn selector(&self) -> Option<Selector> {
        self.spec.as_ref()?.selector.clone().try_into().ok()
    }

    fn match_labels(&self) -> Option<&BTreeMap<String, String>> {
        self.spec.as_ref()?.selector.match_labels.as_ref()
    }

    fn template(&self) -> PodTemplateSpec {
        self.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default()
    }

    fn status(&self) -> ReplicaSetStatus {
        self.status.clone().unwrap_or_default()
    }

    fn set_status(&mut self, status: ReplicaSetStatus) {
        self.status = Some(status);
    }
}

impl Replicated for ReplicationController {
    const CONTROLLER: &'static str = "replicationcontroller-controller";
    const COMPONENT: &'static str = "replication-controller";

    fn replicas(&self) -> i32 {
        self.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
    }

    fn min_ready_seconds(&self) -> i32 {
        self.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0)
    }

    fn selector(&self) -> Option<Selector> {
        Some(self.spec.as_ref()?.selector.clone().unwrap_or_default().into_iter().collect())
    }

    fn match_labels(&self) -> Option<&BTreeMap<String, String>> {
        self.spec.as_ref()?.selector.as_ref()
    }

    fn template(&self) -> PodTemplateSpec {
        self.spec.as_ref().and_then(|spec| spec.template.clone()).unwrap_or_default()
    }

    fn status(&self) -> ReplicaSetStatus {
        let status = self.status.clone().unwrap_or_default();
        ReplicaSetStatus {
            available_replicas: status.available_replicas,
            fully_labeled_replicas: status.fully_labeled_replicas,
            observed_generation: status.observed_generation,
            ready_replicas: status.ready_replicas,
            replicas: status.replicas,
            terminating_replicas: None,
            conditions: status.conditions.map(|conditions| {
                conditions
                    .into_iter()
                    .map(|c| ReplicaSetCondition {
                        last_transition_time: c.last_transition_time,
                        message: c.message,
                        reason: c.reason,
                        status: c.status,
                        type_: c.type_,
                    })
                    .collect()
            }),
        }
    }

    fn set_status(&mut self, status: ReplicaSetStatus) {
        self.status = Some(ReplicationControllerStatus {
            available_replicas: status.available_replicas,
            fully_labeled_replicas: status.fully_labeled_replicas,
            observed_generation: status.observed_generation,
            ready_replicas: status.ready_replicas,
            replicas: status.replicas,
            conditions: status.conditions.map(|conditions| {
                conditions
                    .into_iter()
                    .map(|c| ReplicationControllerCondition {
                        last_transition_time: c.last_transition_time,
                        message: c.message,
                        reason: c.reason,
                        status: c.status,
                        type_: c.type_,
                    })
                    .collect()
            }),
        });
    }
}
