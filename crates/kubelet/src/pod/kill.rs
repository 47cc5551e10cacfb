//! Stopping containers: hook, signal, grace, and the events around them.

use super::context::Context;
use super::labels;
use super::model::{self, ContainerKind, PodContainer, PodId};
use super::runtime_pod::{Instance, RunState, RuntimePod};
use crate::hooks::{HookError, Reached};
use ferrite_client::EventType;
use ferrite_cri::v1::{StopContainerRequest, StopPodSandboxRequest};
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::{LifecycleHandler, Pod};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::sync::watch;

/// As upstream: however little is left of its grace period, a container gets this much time between the signals.
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
        self.kill_in_turn(pod, victim, std::future::ready(())).await
    }

    /// Stops one container after its `turn`. Its preStop hook runs at once; hook and waiting count against the grace
    /// period.
    async fn kill_in_turn(
        &self,
        pod: &Pod,
        victim: Victim<'_>,
        turn: impl Future<Output = ()>,
    ) -> ferrite_cri::Result<()> {
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
            match tokio::time::timeout(grace, self.run_hook(pod, &hook, &target)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(pod = %PodId::of(pod), container = instance.name, %error, "PreStop hook failed");
                    // As upstream: the error may repeat what the hook sent or read.
                    let message = "PreStopHook failed".to_owned();
                    self.recorder.event(&about, EventType::Warning, "FailedPreStopHook", message);
                }
                Err(_) => {
                    tracing::info!(pod = %PodId::of(pod), container = instance.name, "PreStop hook not completed in grace period");
                }
            }
        }
        let left = || grace.saturating_sub(started.elapsed());
        let _ = tokio::time::timeout(left(), turn).await;
        let left = left().max(MIN_GRACE);
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

    /// Runs a hook to its end, and tells if it was reached in another way than the pod says.
    pub(super) async fn run_hook(
        &self,
        pod: &Pod,
        hook: &LifecycleHandler,
        target: &crate::probe::Target,
    ) -> Result<(), HookError> {
        let reached = crate::hooks::run(&*self.runtime, hook, target).await?;
        if let Reached::WithoutTls { authority } = reached {
            let message = format!(
                "request to HTTPS lifecycle hook {authority} got HTTP response, retry with HTTP succeeded"
            );
            self.event(pod, EventType::Warning, "LifecycleHTTPFallback", message);
        }
        Ok(())
    }

    /// Stops every container, sidecars after the containers that they serve, then every sandbox.
    pub(super) async fn kill_pod(
        &self,
        pod: &Pod,
        runtime: &RuntimePod,
        grace: Duration,
        hooks: Hooks,
    ) -> ferrite_cri::Result<()> {
        let containers = model::containers(pod);
        let pod_ip = runtime.sandboxes.first().and_then(|s| s.ips.first()).cloned().unwrap_or_default();
        let is_alive = |i: &&Instance| i.is_running() || i.state == RunState::Unknown;
        let alive: Vec<&Instance> = runtime.instances.iter().filter(is_alive).collect();
        let running: watch::Sender<BTreeSet<&str>> =
            watch::Sender::new(alive.iter().map(|instance| instance.id.as_str()).collect());
        let kills = alive.iter().map(|instance| {
            let before = served(&containers, &alive, instance);
            let mut seen = running.subscribe();
            let (running, pod_ip, containers) = (&running, pod_ip.as_str(), &containers);
            async move {
                let container = containers.iter().find(|c| c.name() == instance.name);
                let victim = Victim { container, instance, message: None, grace, pod_ip, hooks };
                let turn = async {
                    let _ = seen.wait_for(|running| before.iter().all(|id| !running.contains(id))).await;
                };
                self.kill_in_turn(pod, victim, turn).await?;
                running.send_modify(|running| running.retain(|id| *id != instance.id));
                Ok(())
            }
        });
        for result in join_all(kills).await {
            result?;
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

/// The instances that end before this one: a sidecar serves the regular containers and the sidecars after it.
fn served<'a>(containers: &[PodContainer], alive: &[&'a Instance], instance: &Instance) -> Vec<&'a str> {
    let position = |name: &str| containers.iter().position(|c| c.name() == name);
    let Some(own) = position(&instance.name).filter(|at| containers[*at].is_sidecar()) else {
        return Vec::new();
    };
    let is_served = |other: &&&Instance| {
        position(&other.name).is_some_and(|at| match containers[at].kind {
            ContainerKind::Regular => true,
            ContainerKind::Init => at > own && containers[at].is_sidecar(),
            ContainerKind::Ephemeral => false,
        })
    };
    alive.iter().filter(is_served).map(|other| other.id.as_str()).collect()
}

/// Time between the signals to a pod's containers.
pub(crate) fn grace_of(pod: &Pod) -> Duration {
    let seconds =
        pod.metadata.deletion_grace_period_seconds.unwrap_or_else(|| labels::termination_grace(pod));
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}
