//! The things that a pod must have before its containers: a cgroup, volumes, devices of drivers.

use super::model;
use super::resize;
use super::runtime_pod::RuntimePod;
use super::worker::{Desired, SyncError, Worker};
use crate::clock;
use ferrite_client::EventType;
use ferrite_component::steps::Timer;
use k8s_openapi::api::core::v1::Pod;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Until volumes that could not be brought up to date are tried again.
const AFTER_FAILED_REFRESH: Duration = Duration::from_secs(30);

impl Worker {
    /// Makes the pod's cgroup, or brings its limits up to date when the pod's changed.
    pub(super) async fn ensure_cgroup(&mut self, pod: &Pod, runtime: &RuntimePod) -> Result<(), SyncError> {
        let mut total = resize::widest(pod, runtime);
        if self.context.resources.has_exclusive(&self.id.uid) {
            // As upstream: a quota would slow down containers that have processors of their own.
            total.cpu_limit = None;
        }
        if self.cgroup_of == Some(total) {
            return Ok(());
        }
        let made = self.context.cgroups.ensure(model::qos_class(pod), &self.id.uid, &total).await;
        made.map_err(|e| {
            let message = format!("unable to ensure pod container exists: {e}");
            self.context.event(pod, EventType::Warning, "FailedCreatePodContainer", message);
            SyncError::Cgroup(e)
        })?;
        self.cgroup_of = Some(total);
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
        let (stop, mut ending, timer) = (CancellationToken::new(), self.desired.clone(), Timer::start());
        let done = {
            let set_up = self.context.volumes.set_up(pod, now, self.volumes.as_ref(), &stop);
            tokio::pin!(set_up);
            tokio::select! {
                done = &mut set_up => done,
                () = async { drop(ending.wait_for(Desired::must_end).await) } => {
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
        let mut ending = self.desired.clone();
        let prepared = tokio::select! {
            prepared = self.context.claims.prepare(pod) => prepared,
            _ = ending.wait_for(Desired::must_end) => return Err(SyncError::Interrupted),
        };
        prepared.map_err(|error| {
            let error = SyncError::Prepare(error);
            let message = format!("Failed to prepare dynamic resources: {error}");
            self.context.event(pod, EventType::Warning, "FailedPrepareDynamicResources", message);
            error
        })
    }
}
