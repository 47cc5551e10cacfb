//! Admission of a new pod: the node takes or refuses it, and ends others for a critical one.

use super::admission::{self, Admission, NodeState, Offer};
use super::ending::Ordered;
use super::model;
use super::preemption::Resident;
use super::status::Verdict;
use super::worker::Worker;
use crate::shutdown;
use ferrite_client::EventType;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::borrow::Cow;

const PREEMPTED: &str = "Preempted in order to admit critical pod";

impl Worker {
    /// Decides whether the pod may run here. False while pods that make room for it are still ending.
    pub(super) async fn admit(&mut self, pod: &Pod) -> bool {
        let admitted = self.decide_admission(pod);
        if !admitted || self.verdict.is_some() {
            return admitted;
        }
        // A pod that is gone from the API may have devices and processors until its containers have ended.
        let context = self.context.clone();
        let others_leave = context.resources.pods().iter().any(|uid| context.workers.is_gone(uid));
        let Err(e) = context.resources.allocate(pod).await else { return true };
        if e.is_shortage() && others_leave {
            // The resources that it got so far are free until it tries again.
            context.resources.release(&self.id.uid).await;
            return false;
        }
        let (reason, message) = e.refusal();
        self.reject(pod, reason, &message);
        true
    }

    /// As upstream: the event has the bare message.
    fn reject(&mut self, pod: &Pod, reason: &str, message: &str) {
        self.context.event(pod, EventType::Warning, reason, message);
        let message = format!("Pod was rejected: {message}");
        self.verdict = Some(Verdict { reason: reason.into(), message, disruption: None, grace: None });
    }

    fn decide_admission(&mut self, pod: &Pod) -> bool {
        let context = self.context.clone();
        if *context.shutting_down.borrow() {
            self.reject(pod, shutdown::REFUSED_REASON, shutdown::REFUSED_MESSAGE);
            return true;
        }
        let (offer, node_state) = self.offer();
        // Pods that came earlier and still run; creation time decides the order, then the name.
        let order = |p: &Pod| (p.metadata.creation_timestamp.clone().map(|t| t.0), p.metadata.name.clone());
        let here = |p: &Pod| {
            p.metadata.uid != pod.metadata.uid
                && !model::is_finished(p)
                // The API learns later that such a pod has ended, or cannot be asked.
                && !context.workers.has_released(&model::PodId::of(p).uid)
                && (order(p) < order(pod) || p.status.as_ref().is_some_and(|s| s.start_time.is_some()))
        };
        let (local, remote) = (context.pods.local().list(), context.pods.remote());
        let allocated: Vec<(Cow<'_, Pod>, bool)> = (local.iter().map(|p| (p, true)))
            .chain(remote.iter().map(|p| (p, false)))
            .filter(|(p, _)| here(p))
            .map(|(pod, local)| (context.resizes.allocated(pod), local))
            .collect();
        let residents: Vec<Resident<'_>> =
            allocated.iter().map(|(pod, local)| Resident { pod, local: *local }).collect();
        let resident = Resident { pod, local: self.local };
        if let Err(verdict) = admission::check_pressure(&resident, &context.pressures.borrow()) {
            self.reject(pod, &verdict.reason, &verdict.message);
            return true;
        }
        match admission::admit(&resident, &residents, &offer, &node_state) {
            Admission::Admitted => true,
            Admission::Refused(verdict) => {
                self.reject(pod, &verdict.reason, &verdict.message);
                true
            }
            Admission::After(victims) => {
                for victim in victims {
                    let verdict = Verdict {
                        reason: "Preempting".into(),
                        message: PREEMPTED.into(),
                        disruption: Some(
                            "Pod was preempted by Kubelet to accommodate a critical pod.".into(),
                        ),
                        grace: None,
                    };
                    let uid = victim.metadata.uid.as_deref().unwrap_or_default();
                    if context.workers.end(uid, verdict) == Ordered::First {
                        tracing::info!(pod = %self.id, victim = %model::PodId::of(victim), "ending a pod for a critical one");
                        context.event(victim, EventType::Warning, "Preempting", PREEMPTED);
                    }
                }
                false
            }
        }
    }

    /// The node's resources and abilities.
    pub(super) fn offer(&self) -> (Offer, NodeState) {
        let context = &self.context;
        let offer = Offer {
            cpu_milli: context.limits.cpu_milli,
            memory: context.limits.memory,
            ephemeral_storage: context.limits.ephemeral_storage,
            max_pods: context.max_pods,
        };
        let node = context.node.list();
        let node = node.first();
        let mut allocatable = node.and_then(|n| n.status.as_ref()?.allocatable.clone()).unwrap_or_default();
        // The device manager knows before the API does.
        for (name, amount) in context.devices.allocatable_for(&self.id.uid) {
            allocatable.insert(name, Quantity(amount.to_string()));
        }
        let features = context.readiness.borrow().features.clone();
        let taints = node.and_then(|n| n.spec.as_ref()?.taints.clone());
        let node_state = NodeState {
            name: context.node_name.clone(),
            taints: taints.unwrap_or_default(),
            labels: node
                .map_or(context.own_labels.clone(), |n| n.metadata.labels.clone().unwrap_or_default()),
            allocatable,
            abilities: context.abilities.clone(),
            supplemental_groups_policy: features.supplemental_groups_policy,
        };
        (offer, node_state)
    }
}
