//! Carries out what was decided for a pod: stops, removes, resizes and starts its containers.

use super::decide::{Actions, KillCause, Start};
use super::kill::{Hooks, Victim, grace_of};
use super::model::{self, PodContainer};
use super::restart_all::Reset;
use super::runtime_pod::RuntimePod;
use super::start::{SandboxError, StartError, StartInputs};
use super::status::WaitingReason;
use super::worker::{Progress, SyncError, Worker};
use crate::clock;
use crate::probe::ProbeKind;
use ferrite_client::EventType;
use ferrite_cri::v1::RemoveContainerRequest;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use std::sync::Arc;
use std::time::Duration;

/// Delay until a failed pull is shown as back-off, and until a failed start is checked again.
const AFTER_FAILED_START: Duration = Duration::from_secs(1);

/// Time for the API to learn that all containers of a pod begin anew, before they are removed.
const BEFORE_RESET: Duration = Duration::from_secs(1);

impl Worker {
    /// Carries out the decisions. Returns the time at which a failed start may be tried again.
    pub(super) async fn apply(
        &mut self,
        pod: &Arc<Pod>,
        runtime: &RuntimePod,
        actions: &Actions,
        progress: Progress,
    ) -> Result<Option<Timestamp>, SyncError> {
        let context = self.context.clone();
        let containers = model::containers(pod);
        if actions.kill_pod {
            if actions.create_sandbox.is_some() {
                let message = "Pod sandbox changed, it will be killed and re-created.";
                context.event(pod, EventType::Normal, "SandboxChanged", message);
            }
            self.probes.stop();
            // An order to end the pod has a grace period of its own, which may be shorter.
            let mut ending = self.end_signal();
            tokio::select! {
                killed = context.kill_pod(pod, runtime, grace_of(pod), Hooks::Run) => killed?,
                () = ending.begun() => return Err(SyncError::Interrupted),
            }
        }
        self.reset(pod, runtime, &actions.reset).await?;
        for kill in &actions.kill {
            let Some(instance) = runtime.instances.iter().find(|i| i.id == kill.id) else { continue };
            let container = containers.iter().find(|c| c.name() == kill.name);
            let grace = kill_grace(pod, container, kill.cause);
            let ip = self.pod_ip(pod, runtime);
            let message = Some(kill.message.clone());
            let victim = Victim { container, instance, message, grace, pod_ip: &ip, hooks: Hooks::Run };
            let mut ending = self.end_signal();
            tokio::select! {
                killed = context.kill_container(pod, victim) => killed?,
                () = ending.begun() => return Err(SyncError::Interrupted),
            }
        }
        self.apply_resizes(pod, runtime, &containers, &actions.resize).await?;
        for wait in &actions.waiting {
            let reason = WaitingReason::crash_loop(wait.delay, &wait.name, &self.id);
            if self.waiting.get(&wait.name) != Some(&reason)
                && let Some(container) = containers.iter().find(|c| c.name() == wait.name)
            {
                let message =
                    format!("Back-off restarting failed container {} in pod {}", wait.name, self.id);
                let about = model::reference(pod, Some(container.field_path()));
                context.recorder.event(&about, EventType::Warning, "BackOff", message);
            }
            self.waiting.insert(wait.name.clone(), reason);
        }
        if actions.start.is_empty() {
            return Ok(None);
        }
        let (sandbox, attempt) = match (actions.create_sandbox, runtime.sandbox()) {
            (Some(attempt), _) => (context.create_sandbox(pod, attempt).await?, attempt),
            (None, Some(sandbox)) => (sandbox.clone(), sandbox.attempt),
            (None, None) => return Ok(None),
        };
        let users = context.users(pod).map_err(SandboxError::Users)?;
        let sandbox_config = context.sandbox_config(pod, attempt, &users)?;
        let keyring = context.keyring(pod).await?;
        let volumes = self.volumes.clone().unwrap_or_default();
        let mut retry: Option<Timestamp> = None;
        for start in &actions.start {
            let Some(container) = containers.iter().find(|c| c.name() == start.name) else { continue };
            if let Some(until) = self.refused_until.get(&start.name).filter(|at| **at > context.clock.now()) {
                retry = Some(retry.map_or(*until, |r: Timestamp| r.min(*until)));
                continue;
            }
            // The address is shown, and earlier containers are, while later images are pulled.
            let current = self.observe().await?;
            if progress == Progress::Shown {
                self.publish(pod, &current, false, false);
            }
            let inputs = StartInputs {
                pod,
                sandbox: &sandbox,
                sandbox_config: &sandbox_config,
                runtime: &current,
                volumes: &volumes,
                keyring: &keyring,
                users: &users,
            };
            let ending = self.end_signal();
            let started = context.start_container(&inputs, container, start, &mut self.pulls, ending);
            let started = Box::pin(started).await;
            let now = context.clock.now();
            match started {
                Ok(()) => {
                    self.waiting.remove(&start.name);
                    self.refused_until.remove(&start.name);
                    self.count_restart(start, runtime, now);
                }
                Err(StartError::Interrupted) => return Err(SyncError::Interrupted),
                Err(StartError::Waiting(reason)) => {
                    if reason.reason == "PostStartHookError" {
                        // The container ran.
                        self.count_restart(start, runtime, now);
                    }
                    let at = self.retry_at(container, &reason, now);
                    retry = Some(retry.map_or(at, |r| r.min(at)));
                    self.waiting.insert(start.name.clone(), reason);
                }
            }
        }
        Ok(retry)
    }

    /// Notes a restart for the back-off of the next one.
    fn count_restart(&mut self, start: &Start, runtime: &RuntimePod, now: Timestamp) {
        if start.attempt > 0 {
            let ended = runtime.latest(&start.name).and_then(|i| i.finished_at).unwrap_or(now);
            self.backoff.next(&start.name, ended, now);
        }
    }

    /// Removes containers. Their logs stay.
    async fn reset(&mut self, pod: &Pod, runtime: &RuntimePod, resets: &[Reset]) -> Result<(), SyncError> {
        let context = self.context.clone();
        let ip = self.pod_ip(pod, runtime);
        if !resets.is_empty() {
            // Others are to see the condition AllContainersRestarting, which a newer status takes back.
            let _ = tokio::time::timeout(BEFORE_RESET, self.until_gone_or(self.writer.flushed())).await;
        }
        for reset in resets {
            let Some(instance) = runtime.instances.iter().find(|i| i.id == reset.id) else { continue };
            if reset.kill {
                let victim = Victim {
                    container: None,
                    instance,
                    message: Some("killing".to_owned()),
                    grace: Duration::ZERO,
                    pod_ip: &ip,
                    hooks: Hooks::Skip,
                };
                context.kill_container(pod, victim).await?;
            }
            let request = RemoveContainerRequest { container_id: reset.id.clone() };
            match context.runtime.remove_container(request).await {
                Err(error) if !error.is_not_found() => return Err(error.into()),
                _ => {}
            }
            context.log_links.remove(&self.id, &reset.name, &reset.id).await;
            let attempt = self.attempts.entry(reset.name.clone()).or_default();
            *attempt = (*attempt).max(instance.attempt + 1);
            self.removed.insert(reset.name.clone(), instance.clone());
            self.waiting.remove(&reset.name);
        }
        Ok(())
    }

    fn retry_at(&mut self, container: &PodContainer, reason: &WaitingReason, now: Timestamp) -> Timestamp {
        match reason.reason.as_str() {
            "ImagePullBackOff" => {
                let at = self.pulls.retry_at(container.name(), now);
                at.unwrap_or_else(|| clock::add(now, AFTER_FAILED_START))
            }
            "ErrImagePull" => clock::add(now, AFTER_FAILED_START),
            "CreateContainerError" | "RunContainerError" => {
                let delay = match self.backoff.blocked(container.name(), now, now) {
                    Some((delay, _)) => delay,
                    None => Duration::from_secs(10),
                };
                self.backoff.next(container.name(), now, now);
                let at = clock::add(now, delay);
                self.refused_until.insert(container.name().to_string(), at);
                at
            }
            "PostStartHookError" => clock::add(now, AFTER_FAILED_START),
            _ => clock::add(now, self.context.sync_frequency),
        }
    }
}

fn kill_grace(pod: &Pod, container: Option<&PodContainer>, cause: KillCause) -> Duration {
    let kind = match cause {
        KillCause::Liveness => Some(ProbeKind::Liveness),
        KillCause::Startup => Some(ProbeKind::Startup),
        KillCause::SpecChanged | KillCause::Resize | KillCause::Unknown => None,
    };
    let own = kind
        .and_then(|k| k.of(&container?.spec))
        .and_then(|p| p.termination_grace_period_seconds)
        .and_then(|s| u64::try_from(s).ok());
    own.map_or_else(|| grace_of(pod), Duration::from_secs)
}
