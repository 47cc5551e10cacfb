//! From a node that was found to a pod that is bound.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::EventType;
use ferrite_component::steps::Timer;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tracing::{debug, info};

use super::{Failure, Scheduler};
use crate::cycle::Placement;
use crate::framework::{ClusterEvent, Framework, Nomination, Permission, PermitOutcome};
use crate::measures;
use crate::profile::ExtensionPoint;
use crate::queue::Popped;
use crate::snapshot::PodInfo;

/// As upstream: no plugin delays a pod for longer.
const LONGEST_PERMIT_WAIT: Duration = Duration::from_secs(15 * 60);

impl Scheduler {
    /// Runs Reserve and Permit.
    pub(super) fn reserve(&self, pod: &Arc<PodInfo>, placement: &mut Placement) -> Result<(), Failure> {
        let Some((framework, _)) = self.profile_of(pod) else { return Ok(()) };
        let profile = pod.scheduler_name();
        let started = std::time::Instant::now();
        for plugin in framework.at(ExtensionPoint::Reserve) {
            let Some(point) = plugin.reserve() else { continue };
            point.reserve(&mut placement.state, pod, &placement.node).map_err(|rejection| {
                measures::point("Reserve", rejection.status(), profile, started);
                Failure::rejected(plugin.name(), rejection)
            })?;
        }
        measures::point("Reserve", "Success", profile, started);
        let started = std::time::Instant::now();
        let mut delays = Vec::new();
        for plugin in framework.at(ExtensionPoint::Permit) {
            let Some(point) = plugin.permit() else { continue };
            match point.permit(&mut placement.state, pod, &placement.node) {
                Permission::Approved => {}
                Permission::Rejected(rejection) => {
                    measures::point("Permit", rejection.status(), profile, started);
                    return Err(Failure::rejected(plugin.name(), rejection));
                }
                Permission::Wait(limit) => delays.push((plugin.name(), limit.min(LONGEST_PERMIT_WAIT))),
            }
        }
        let status = if delays.is_empty() { "Success" } else { "Wait" };
        measures::point("Permit", status, profile, started);
        if !delays.is_empty() {
            self.handle.waiting_pods.insert(pod.clone(), &placement.node, delays);
        }
        Ok(())
    }

    /// Undoes all that was done for the pod on its node.
    pub(super) fn take_back(&self, pod: &Arc<PodInfo>, placement: &mut Placement) {
        if let Some((framework, _)) = self.profile_of(pod) {
            for plugin in framework.at(ExtensionPoint::Reserve).iter().rev() {
                if let Some(point) = plugin.reserve() {
                    point.unreserve(&mut placement.state, pod, &placement.node);
                }
            }
        }
        self.cache().forget(&pod.key);
    }

    pub(super) async fn bind(
        self: &Arc<Self>,
        popped: Popped,
        mut placement: Placement,
        permit: OwnedSemaphorePermit,
    ) {
        let _counted = measures::binding();
        let pod = popped.pod.clone();
        let timer = Timer::start();
        let mut permit = Some(permit);
        let bound = self.try_bind(&pod, &placement, &mut permit).await;
        let Some(permit) = self.permit_again(permit).await else { return };
        match bound {
            Ok(()) => {
                let uid = pod.uid.as_deref().unwrap_or_default();
                timer.end("scheduler", "bind", uid, format_args!("to {}", placement.node));
                self.done(&pod.key);
                measures::attempt("scheduled", pod.scheduler_name(), popped.started);
                measures::scheduled(popped.attempts, popped.since);
                if let Some((framework, recorder)) = self.profile_of(&pod) {
                    let message = format!("Successfully assigned {} to {}", pod.key, placement.node);
                    let (about, kind) = (pod.reference(), EventType::Normal);
                    recorder.event(&about, None, kind, "Scheduled", "Binding", message);
                    for plugin in framework.at(ExtensionPoint::PostBind) {
                        if let Some(point) = plugin.post_bind() {
                            point.post_bind(&placement.state, &pod, &placement.node);
                        }
                    }
                }
            }
            Err(failure) => {
                debug!(pod = %pod.key, node = placement.node, ?failure, "not bound");
                self.take_back(&pod, &mut placement);
                // The room that was kept for it is free again. A pod that plugins rejected does not profit from its own
                // room, so it goes back after the event.
                let event = ClusterEvent::AssignedPodDeleted(pod.clone());
                if matches!(failure, Failure::Rejected(_)) {
                    self.fail(popped, failure, permit);
                    self.queue().on_event_except(event, &pod.key, Instant::now());
                    self.wake.notify_one();
                } else {
                    self.happened(event);
                    self.fail(popped, failure, permit);
                }
            }
        }
    }

    /// The permit, or another one if it was given up. `None` when the scheduler ends.
    async fn permit_again(&self, permit: Option<OwnedSemaphorePermit>) -> Option<OwnedSemaphorePermit> {
        match permit {
            Some(permit) => Some(permit),
            None => self.bindings.clone().acquire_owned().await.ok(),
        }
    }

    /// Gives the permit up while plugins wait: the authors of pods and claims decide for how long, and the cycles of all
    /// other pods need permits.
    async fn try_bind(
        &self,
        pod: &Arc<PodInfo>,
        placement: &Placement,
        permit: &mut Option<OwnedSemaphorePermit>,
    ) -> Result<(), Failure> {
        let Placement { node, state, .. } = placement;
        let Some((framework, _)) = self.profile_of(pod) else { return Ok(()) };
        // A report that it had no node may still be under way.
        self.turns.settled(&pod.key).await;
        let pre_binds = || framework.at(ExtensionPoint::PreBind).iter();
        let has_work = pre_binds()
            .any(|plugin| plugin.pre_bind().is_some_and(|point| point.is_needed(state, pod, node)));
        let pre_binding = has_work.then(|| self.pre_binds.begin(pod));
        let waits = self.handle.waiting_pods.get(&pod.key).is_some();
        if (has_work || waits) && self.is_gone(&pod.key) {
            // Its deletion was seen before there was something to stop.
            self.stop_binding(pod);
        } else if has_work || waits {
            // Others learn where the pod will be while its binding takes its time.
            self.write_nomination(pod, &Nomination::Node(node.clone())).await;
            *permit = None;
        }
        let started = Instant::now();
        let outcome = self.handle.waiting_pods.wait(&pod.key).await;
        if waits {
            let result = match &outcome {
                PermitOutcome::Allowed => "Success",
                PermitOutcome::Rejected { rejection, .. } => rejection.status(),
                PermitOutcome::Preempted(_) => "Error",
            };
            measures::permit_wait(result, started);
        }
        match outcome {
            PermitOutcome::Allowed => {}
            PermitOutcome::Rejected { plugin, rejection } => {
                return Err(Failure::rejected(plugin, rejection));
            }
            PermitOutcome::Preempted(reason) => {
                return Err(Failure::Error(format!("waiting on permit for pod: {reason}")));
            }
        }
        if let Some(pre_binding) = pre_binding {
            let started = std::time::Instant::now();
            let work = pre_bind(framework, pod, placement);
            let done = pre_binding.run(work, |cause| Failure::Error(cause.to_owned())).await;
            let status = if done.is_ok() { "Success" } else { "Error" };
            measures::point("PreBind", status, pod.scheduler_name(), started);
            done?;
        }
        *permit = self.permit_again(permit.take()).await;
        for extender in self.extenders.iter().filter(|e| e.is_binder() && e.is_interested(pod)) {
            match extender.bind(pod, node).await {
                Ok(()) => return Ok(()),
                Err(error) if extender.is_ignorable() => {
                    info!(extender = extender.name(), %error, "an extender that may be ignored did not bind");
                }
                Err(error) => return Err(Failure::Error(error.to_string())),
            }
        }
        for plugin in framework.at(ExtensionPoint::Bind) {
            let Some(point) = plugin.bind() else { continue };
            let started = std::time::Instant::now();
            if let Some(result) = point.bind(state, pod, node).await {
                let status = if result.is_ok() { "Success" } else { "Error" };
                measures::point("Bind", status, pod.scheduler_name(), started);
                return result.map_err(Failure::from);
            }
        }
        Err(Failure::Error("no plugin binds the pod".to_owned()))
    }
}

async fn pre_bind(framework: &Framework, pod: &PodInfo, placement: &Placement) -> Result<(), Failure> {
    let Placement { node, state, .. } = placement;
    for plugin in framework.at(ExtensionPoint::PreBind) {
        let Some(point) = plugin.pre_bind().filter(|point| point.is_needed(state, pod, node)) else {
            continue;
        };
        // As upstream: after Permit a pod counts as failed, not as unschedulable.
        point.pre_bind(state, pod, node).await.map_err(|rejection| Failure::Error(rejection.to_string()))?;
    }
    Ok(())
}
