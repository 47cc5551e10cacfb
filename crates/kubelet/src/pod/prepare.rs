//! The things that a pod must have before its containers: a cgroup, volumes, devices of drivers.

use super::model;
use super::pod_level;
use super::runtime_pod::RuntimePod;
use super::worker::{SyncError, Worker};
use crate::clock;
use crate::container::huge_pages;
use crate::container::resources::{self, PodResources, pod_resources};
use ferrite_client::EventType;
use ferrite_component::steps::Timer;
use ferrite_cri::v1::UpdatePodSandboxResourcesRequest;
use k8s_openapi::api::core::v1::Pod;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Until volumes that could not be brought up to date are tried again.
const AFTER_FAILED_REFRESH: Duration = Duration::from_secs(30);

impl Worker {
    /// The resources that the pod's cgroup is to have, for a pod as it is allocated.
    pub(super) fn cgroup_goal(&self, pod: &Pod) -> PodResources {
        let mut goal = pod_resources(pod);
        if self.context.resources.has_exclusive(&self.id.uid) {
            // As upstream: a quota would slow down containers that have processors of their own.
            goal.cpu_limit = None;
        }
        goal
    }

    /// Makes the pod's cgroup, or makes it wide enough for its allocated resources. It becomes narrower when the
    /// containers have theirs: see [`Worker::end_resize`].
    pub(super) async fn ensure_cgroup(&mut self, pod: &Pod, runtime: &RuntimePod) -> Result<(), SyncError> {
        let goal = self.cgroup_goal(pod);
        let goal = self.cgroup_of.map_or(goal, |has| pod_level::wider(&has, &goal));
        self.write_cgroup(pod, runtime, goal).await.map_err(|e| {
            let message = format!("unable to ensure pod container exists: {e}");
            self.context.event(pod, EventType::Warning, "FailedCreatePodContainer", message);
            e
        })
    }

    /// Writes these resources to the pod's cgroup, unless it has them.
    pub(super) async fn write_cgroup(
        &mut self,
        pod: &Pod,
        runtime: &RuntimePod,
        goal: PodResources,
    ) -> Result<(), SyncError> {
        if self.cgroup_of == Some(goal) {
            return Ok(());
        }
        let context = self.context.clone();
        // As upstream: the runtime hears of other resources first, and may refuse them.
        if let Some(sandbox) = runtime.sandbox().filter(|_| self.cgroup_of.is_some()) {
            let request = UpdatePodSandboxResourcesRequest {
                pod_sandbox_id: sandbox.id.clone(),
                overhead: resources::overhead(pod, context.rules.quota),
                resources: Some(resources::of_sandbox(pod, &goal, context.rules.quota)),
            };
            match context.runtime.update_pod_sandbox_resources(request).await {
                Err(error) if !error.is_unimplemented() => return Err(error.into()),
                _ => {}
            }
        }
        let pages = huge_pages::of_pod(pod, context.rules.huge_pages);
        let written = context.cgroups.ensure(model::qos_class(pod), &self.id.uid, &goal, pages).await;
        written.map_err(SyncError::Cgroup)?;
        self.cgroup_of = Some(goal);
        self.weigh_burstable().await;
        Ok(())
    }

    /// The class of Burstable pods has the share that its pods ask for. Without it they have the kernel's default.
    pub(super) async fn weigh_burstable(&self) {
        let pods = self.context.pods.list();
        if let Err(error) = self.context.cgroups.weigh_burstable(&pods).await {
            tracing::warn!(%error, "cannot set the CPU share of Burstable pods");
        }
    }

    /// Sets the volumes up, and writes their files again when something that they show has changed.
    pub(super) async fn ensure_volumes(&mut self, pod: &Pod) -> Result<(), SyncError> {
        let changed = self.objects_changed.swap(false, std::sync::atomic::Ordering::AcqRel);
        let now = self.context.clock.now();
        let due = self.volumes.as_ref().is_none_or(|v| v.refresh_at.is_some_and(|at| at <= now));
        let shown = (pod.metadata.labels.clone(), pod.metadata.annotations.clone());
        let same =
            self.volumes_of.as_ref().is_some_and(|m| (m.labels.clone(), m.annotations.clone()) == shown);
        if !changed && !due && same {
            return Ok(());
        }
        // Waiting (for a driver, for an attachment) stops when the pod must end; work on files is
        // completed.
        let (stop, mut ending, timer) = (CancellationToken::new(), self.end_signal(), Timer::start());
        let done = {
            let set_up = self.context.volumes.set_up(pod, now, self.volumes.as_ref(), &stop);
            tokio::pin!(set_up);
            tokio::select! {
                done = &mut set_up => done,
                () = ending.begun() => {
                    stop.cancel();
                    let _ = set_up.await;
                    return Err(SyncError::Interrupted);
                }
            }
        };
        match done {
            Ok(volumes) => {
                timer.end("kubelet", "volumes", &self.id.uid, format_args!("set up"));
                self.volumes = Some(volumes);
                self.volumes_of = Some(pod.metadata.clone());
                Ok(())
            }
            Err(e) => {
                self.context.event(pod, EventType::Warning, "FailedMount", e.to_string());
                // A running pod keeps its files until newer ones are available.
                match &mut self.volumes {
                    Some(volumes) => {
                        volumes.refresh_at = Some(clock::add(now, AFTER_FAILED_REFRESH));
                        Ok(())
                    }
                    None => Err(e.into()),
                }
            }
        }
    }

    /// Has drivers prepare the pod's devices. As upstream, only for a pod without a sandbox: one that runs has them.
    pub(super) async fn ensure_claims(&self, pod: &Pod, runtime: &RuntimePod) -> Result<(), SyncError> {
        if runtime.sandbox().is_some() || !crate::claims::has_claims(pod) {
            return Ok(());
        }
        let mut ending = self.end_signal();
        let prepared = tokio::select! {
            prepared = self.context.claims.prepare(pod) => prepared,
            () = ending.begun() => return Err(SyncError::Interrupted),
        };
        prepared.map_err(|error| {
            let error = SyncError::Prepare(error);
            let message = format!("Failed to prepare dynamic resources: {error}");
            self.context.event(pod, EventType::Warning, "FailedPrepareDynamicResources", message);
            error
        })
    }
}
