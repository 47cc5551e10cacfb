//! Stopping containers: hook, signal, grace, and the events around them.

use super::context::Context;
use super::labels;
use super::model::{self, ContainerKind, PodContainer};
use super::runtime_pod::{Instance, RuntimePod};
use ferrite_client::EventType;
use ferrite_cri::v1::{StopContainerRequest, StopPodSandboxRequest};
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use std::time::Duration;

/// However long its hook took, a container gets this much time between the signals.
const MIN_GRACE: Duration = Duration::from_secs(2);

/// Tells if preStop hooks are run. They run once: stopping again in a hurry goes straight to the signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hooks {
    Run,
    Skip,
}

/// A container to stop.
pub(super) struct Victim<'a> {
    /// Nothing when nobody knows the spec any more; the container then carries its hook.
    pub container: Option<&'a PodContainer>,
    pub instance: &'a Instance,
    /// The message of the event; by default that the container is stopped.
    pub message: Option<String>,
    pub grace: Duration,
    pub pod_ip: &'a str,
    pub hooks: Hooks,
}

impl Context {
    /// Stops one container. Its preStop hook counts against the grace period.
    pub(super) async fn kill_container(&self, pod: &Pod, victim: Victim<'_>) -> ferrite_cri::Result<()> {
        let Victim { container, instance, message, grace, pod_ip, hooks } = victim;
        let about = model::reference(pod, container.map(PodContainer::field_path));
        let message = message.unwrap_or_else(|| format!("Stopping container {}", instance.name));
        self.recorder.event(&about, EventType::Normal, "Killing", message);
        let from_spec = container.and_then(|c| c.spec.lifecycle.as_ref()).and_then(|l| l.pre_stop.clone());
        let hook = match container {
            Some(_) => from_spec,
            None => labels::pre_stop_hook(&instance.annotations),
        };
        let started = tokio::time::Instant::now();
        if let Some(hook) = hook.filter(|_| grace > Duration::ZERO && hooks == Hooks::Run) {
            let target = crate::probe::Target {
                container_id: instance.id.clone(),
                pod_ip: pod_ip.to_string(),
                container: container.map(|c| c.spec.clone()).unwrap_or_default(),
            };
            let run = crate::hooks::run(&*self.runtime, &hook, &target);
            let failure = match tokio::time::timeout(grace, run).await {
                Ok(Ok(())) => None,
                Ok(Err(e)) => Some(e.to_string()),
                Err(_) => Some("PreStopHook did not complete in the grace period".to_string()),
            };
            if let Some(failure) = failure {
                let message = format!("PreStopHook failed: {failure}");
                self.recorder.event(&about, EventType::Warning, "FailedPreStopHook", message);
            }
        }
        let left = grace.saturating_sub(started.elapsed());
        let left = if grace.is_zero() { left } else { left.max(MIN_GRACE.min(grace)) };
        let request = StopContainerRequest {
            container_id: instance.id.clone(),
            timeout: i64::try_from(left.as_secs_f64().ceil() as u64).unwrap_or(i64::MAX),
        };
        match self.runtime.stop_container(request).await {
            Err(e) if !e.is_not_found() => {
                let message = format!("error killing pod: {e}");
                self.event(pod, EventType::Warning, "FailedKillPod", message);
                Err(e)
            }
            _ => Ok(()),
        }
    }

    /// Stops every container, sidecars after the others and in reverse order, then every sandbox.
    pub(super) async fn kill_pod(
        &self,
        pod: &Pod,
        runtime: &RuntimePod,
        grace: Duration,
        hooks: Hooks,
    ) -> ferrite_cri::Result<()> {
        let containers = model::containers(pod);
        let spec_of = |name: &str| containers.iter().find(|c| c.name() == name);
        let pod_ip = runtime.sandboxes.first().and_then(|s| s.ips.first()).cloned().unwrap_or_default();
        let kill = async |instance: &Instance, grace: Duration| {
            let container = spec_of(&instance.name);
            let victim = Victim { container, instance, message: None, grace, pod_ip: &pod_ip, hooks };
            self.kill_container(pod, victim).await
        };
        let is_sidecar = |i: &Instance| spec_of(&i.name).is_some_and(PodContainer::is_sidecar);
        let started = tokio::time::Instant::now();
        let alive = || {
            runtime
                .instances
                .iter()
                .filter(|i| i.is_running() || i.state == super::runtime_pod::RunState::Unknown)
        };
        let first = alive().filter(|i| !is_sidecar(i)).map(|i| kill(i, grace));
        for result in join_all(first).await {
            result?;
        }
        let position =
            |name: &str| containers.iter().position(|c| c.kind == ContainerKind::Init && c.name() == name);
        let mut sidecars: Vec<&Instance> = alive().filter(|i| is_sidecar(i)).collect();
        sidecars.sort_by_key(|i| std::cmp::Reverse(position(&i.name)));
        for sidecar in sidecars {
            let left = grace.saturating_sub(started.elapsed());
            kill(sidecar, left).await?;
        }
        for sandbox in &runtime.sandboxes {
            let request = StopPodSandboxRequest { pod_sandbox_id: sandbox.id.clone() };
            match self.runtime.stop_pod_sandbox(request).await {
                Err(e) if !e.is_not_found() => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Time between the signals to a pod's containers.
pub(crate) fn grace_of(pod: &Pod) -> Duration {
    let seconds =
        pod.metadata.deletion_grace_period_seconds.unwrap_or_else(|| labels::termination_grace(pod));
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}
