//! The part of a pod's worker that resizes: allocates, applies and reports.

use super::admission;
use super::decide;
use super::model::{self, ContainerKind, PodContainer};
use super::pod_level;
use super::resize::{self, Progress};
use super::runtime_pod::{Instance, RuntimePod};
use super::worker::{SyncError, Worker};
use crate::clock;
use crate::container::resources::{PodResources, container_resources};
use ferrite_client::EventType;
use ferrite_cri::v1::{ContainerStatsRequest, UpdateContainerResourcesRequest};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod};
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

/// Until a resize that the runtime refused is tried again.
const AFTER_FAILED_RESIZE: Duration = Duration::from_secs(3);
/// Until a resize that found no room is tried again, even if no pod ended.
const AFTER_DEFERRED_RESIZE: Duration = Duration::from_secs(180);

/// Why a running container does not get other resources.
#[derive(Debug, thiserror::Error)]
enum ResizeError {
    #[error("{0}")]
    Runtime(#[from] ferrite_cri::Error),
    #[error(
        "cannot decrease memory limits: attempting to set container {name:?} memory limit ({limit}) below current usage ({usage})"
    )]
    InUse { name: String, limit: u64, usage: u64 },
    #[error("pod cgroup: {0}")]
    Cgroup(std::io::Error),
    #[error(
        "cannot decrease memory limits: attempting to set pod memory limit ({limit}) below current usage ({usage})"
    )]
    PodInUse { limit: u64, usage: u64 },
}

impl Worker {
    /// After a restart of the kubelet, the resources that the pod's cgroup has: a resize may have been on its way.
    pub(super) fn recall_cgroup(&mut self, pod: &Pod, runtime: &RuntimePod) {
        if self.cgroup_of.is_none() && !runtime.sandboxes.is_empty() {
            let goal = self.cgroup_goal(&self.allocation.of(pod, runtime));
            let present = self.context.cgroups.present(model::qos_class(pod), &self.id.uid, &goal);
            self.cgroup_of = present.map(|present| pod_level::recalled(present, pod));
        }
    }

    /// Allocates a resize if the node has room for it. Returns the pod as it is allocated.
    pub(super) async fn allocate(
        &mut self,
        pod: &Arc<Pod>,
        runtime: &RuntimePod,
    ) -> Result<Arc<Pod>, SyncError> {
        let context = self.context.clone();
        let allocated = match self.allocation.of(pod, runtime) {
            Cow::Borrowed(_) => pod.clone(),
            Cow::Owned(allocated) => Arc::new(allocated),
        };
        if !resize::is_pending(pod, &allocated) {
            context.resizes.remove(&self.id.uid);
            self.resize.deferred = None;
            self.resize.infeasible = None;
            let has_other = self.cgroup_of.is_some_and(|has| has != self.cgroup_goal(&allocated));
            self.resize.is_applying |= has_other || resize::containers_change(&allocated, runtime);
            return Ok(allocated);
        }
        if let Some(why) = self.infeasible(pod, &allocated) {
            context.resizes.remove(&self.id.uid);
            if self.resize.infeasible.as_deref() != Some(&why) {
                let text = resize::summary("Pod resize Infeasible", pod, Some(&why));
                context.event(pod, EventType::Warning, "ResizeInfeasible", text);
            }
            self.resize.infeasible = Some(why);
            return Ok(allocated);
        }
        let turn = context.resizes.turn();
        let (offer, node) = self.offer();
        let (local, remote) = (context.pods.local().list(), context.pods.remote());
        let residents: Vec<_> = (local.iter().chain(&remote))
            .filter(|p| {
                let is_admitted = p.status.as_ref().is_some_and(|s| s.start_time.is_some());
                !model::is_finished(p) && is_admitted
            })
            .map(|p| context.resizes.allocated(p))
            .collect();
        let admits = |pod: &Pod| {
            let others = residents.iter().map(|p| &**p).filter(|p| p.metadata.uid != pod.metadata.uid);
            admission::admit_resources(pod, &others.collect::<Vec<&Pod>>(), &offer, &node)
        };
        let now = context.clock.now();
        context.resizes.add(&self.id.uid, pod, &allocated, now);
        let refusal = admits(pod).err().map(|verdict| verdict.message);
        let first = match refusal {
            None => context.resizes.before(&self.id.uid, now, |other| admits(other).is_ok()),
            Some(_) => None,
        };
        if let Some(first) = &first {
            context.workers.wake(first);
        }
        let waits = first.map(|_| "Another pod's resize comes first".to_owned());
        if let Some(message) = refusal.or(waits) {
            if self.resize.deferred.as_ref() != Some(&message) {
                let text = resize::summary("Pod resize Deferred", pod, Some(&message));
                context.event(pod, EventType::Warning, "ResizeDeferred", text);
            }
            self.resize.deferred = Some(message);
            return Ok(allocated);
        }
        // Noted before others look: the file and the API have it later.
        let noted = context.resizes.allocate(&self.id.uid, Some(pod.clone()));
        drop(turn);
        let mut allocation = self.allocation.clone();
        allocation.accept(pod);
        let dir = context.volumes.pod_dir(&self.id.uid);
        if let Err(error) = allocation.save(&dir).await {
            context.resizes.allocate(&self.id.uid, noted);
            return Err(SyncError::Allocation(error));
        }
        self.allocation = allocation;
        self.resize = Progress { is_applying: true, ..Progress::default() };
        context.resizes.remove(&self.id.uid);
        // Those after it may have their turn, or the room that it no longer asks for.
        context.retry_resizes();
        context.event(
            pod,
            EventType::Normal,
            "ResizeStarted",
            resize::summary("Pod resize started", pod, None),
        );
        Ok(pod.clone())
    }

    /// The reason why the node will never do this resize, by upstream's rules.
    fn infeasible(&self, pod: &Pod, allocated: &Pod) -> Option<String> {
        let context = &self.context;
        if model::qos_class(pod) == model::QosClass::Guaranteed {
            let managers = [
                ("cpu", "CPU Manager policy \"static\"", context.resources.is_static()),
                ("memory", "Memory Manager policy \"Static\"", context.resources.has_static_memory()),
            ];
            let manager = managers
                .into_iter()
                .find(|(name, _, manages)| *manages && resize::requests_differ(pod, allocated, name));
            if let Some((_, manager, _)) = manager {
                return Some(format!("Resize is infeasible for Guaranteed Pods alongside {manager}"));
            }
        }
        let swap = context.rules.swap;
        let has_swap =
            |pod: &Pod, container: &Container| swap.is_some_and(|swap| swap.of(pod, container) > 0);
        resize::changes_swap_in_place(pod, allocated, has_swap)
            .then(|| "In-place resize of containers with swap is not supported.".to_owned())
    }

    /// Gives running containers their allocated resources, as far as that works.
    pub(super) async fn apply_resizes(
        &mut self,
        pod: &Arc<Pod>,
        runtime: &RuntimePod,
        containers: &[PodContainer],
        resizes: &[decide::Resize],
    ) -> Result<(), SyncError> {
        let mut changes: Vec<(&PodContainer, &Instance)> = resizes
            .iter()
            .filter_map(|resize| {
                let container = containers.iter().find(|c| c.name() == resize.name)?;
                Some((container, runtime.instances.iter().find(|i| i.id == resize.id)?))
            })
            .collect();
        // As upstream: what gives memory back comes before what takes some.
        changes.sort_by_key(|(c, instance)| resize::smaller_memory_limit(pod, &c.spec, instance).is_none());
        for (container, instance) in changes {
            if let Err(error) = self.apply_resize(pod, container, instance).await {
                self.resize_failed(pod, &error);
                return Ok(());
            }
            let resources = container.spec.resources.clone().unwrap_or_default();
            self.allocation.applied(&instance.id, resources, pod, runtime);
            let dir = self.context.volumes.pod_dir(&self.id.uid);
            self.allocation.save(&dir).await.map_err(SyncError::Allocation)?;
        }
        if !resizes.is_empty() {
            self.resize.error = None;
        }
        Ok(())
    }

    /// The resize stays in progress; it is tried again.
    fn resize_failed(&mut self, pod: &Pod, error: &ResizeError) {
        let message = error.to_string();
        if self.resize.error.as_ref() != Some(&message) {
            let text = resize::summary("Pod resize error", pod, Some(&message));
            self.context.event(pod, EventType::Warning, "ResizeError", text);
        }
        self.resize.error = Some(message);
    }

    async fn apply_resize(
        &self,
        pod: &Pod,
        container: &PodContainer,
        instance: &Instance,
    ) -> Result<(), ResizeError> {
        let runtime = &self.context.runtime;
        if let Some(limit) = resize::smaller_memory_limit(pod, &container.spec, instance) {
            let request = ContainerStatsRequest { container_id: instance.id.clone() };
            let stats = runtime.container_stats(request).await?.stats;
            let usage = stats.and_then(|stats| stats.memory?.usage_bytes).map_or(0, |usage| usage.value);
            let limit = u64::try_from(limit).unwrap_or(0);
            if usage >= limit {
                return Err(ResizeError::InUse { name: instance.name.clone(), limit, usage });
            }
        }
        let linux = container_resources(pod, &container.spec, &self.context.rules);
        let request = UpdateContainerResourcesRequest {
            container_id: instance.id.clone(),
            linux: Some(linux),
            ..UpdateContainerResourcesRequest::default()
        };
        runtime.update_container_resources(request).await?;
        Ok(())
    }

    /// A resize is over when every container runs with its allocated resources. Then the pod's own limits
    /// follow.
    pub(super) async fn end_resize(&mut self, pod: &Arc<Pod>, runtime: &RuntimePod) -> Result<(), SyncError> {
        if !self.resize.is_applying || resize::containers_change(pod, runtime) {
            return Ok(());
        }
        // One that is on its way to run gets its resources then.
        let waits = |c: &PodContainer| {
            let latest = runtime.latest(c.name());
            !latest.is_some_and(Instance::is_running) && decide::still_to_run(pod, c, latest)
        };
        if model::containers(pod).iter().any(|c| c.kind == ContainerKind::Regular && waits(c)) {
            return Ok(());
        }
        let goal = self.cgroup_goal(pod);
        if let Err(error) = self.check_memory(pod, &goal) {
            self.resize_failed(pod, &error);
            return Ok(());
        }
        match self.write_cgroup(pod, runtime, goal).await {
            Ok(()) => {}
            Err(SyncError::Cgroup(error)) => {
                self.resize_failed(pod, &ResizeError::Cgroup(error));
                return Ok(());
            }
            Err(SyncError::Runtime(error)) => {
                self.resize_failed(pod, &ResizeError::Runtime(error));
                return Ok(());
            }
            Err(other) => return Err(other),
        }
        self.resize.is_applying = false;
        self.resize.error = None;
        let text = resize::summary("Pod resize completed", pod, None);
        self.context.event(pod, EventType::Normal, "ResizeCompleted", text);
        Ok(())
    }

    /// A limit below the memory in use would end processes of the pod.
    fn check_memory(&self, pod: &Pod, goal: &PodResources) -> Result<(), ResizeError> {
        let Some(limit) = self.cgroup_of.and_then(|has| pod_level::smaller_memory_limit(&has, goal)) else {
            return Ok(());
        };
        let usage = self.context.cgroups.memory_usage(model::qos_class(pod), &self.id.uid).unwrap_or(0);
        let limit = u64::try_from(limit).unwrap_or(0);
        if usage >= limit { Err(ResizeError::PodInUse { limit, usage }) } else { Ok(()) }
    }

    /// When a resize that could not go on is tried again.
    pub(super) fn resize_again_at(&self) -> Option<Timestamp> {
        let deferred = self.resize.deferred.as_ref().map(|_| AFTER_DEFERRED_RESIZE);
        let failed = self.resize.error.as_ref().map(|_| AFTER_FAILED_RESIZE);
        let wait = deferred.into_iter().chain(failed).min()?;
        Some(clock::add(self.context.clock.now(), wait))
    }
}
