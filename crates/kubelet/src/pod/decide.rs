//! Decides the next actions for a pod that should run: a pure function of the pod, of the runtime's state,
//! of probe results and of back-off.

use super::backoff::BackOff;
use super::labels;
use super::model::{self, ContainerKind, PodContainer, RestartPolicy};
use super::resize;
use super::restart_all::{self, Reset};
use super::runtime_pod::{Instance, RunState, RuntimePod};
use crate::probe::ProbeResults;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;
use std::time::Duration;

/// Everything a decision depends on.
pub(crate) struct Inputs<'a> {
    pub pod: &'a Pod,
    pub runtime: &'a RuntimePod,
    pub probes: &'a ProbeResults,
    pub backoff: &'a BackOff,
    pub now: Timestamp,
    /// The restart counts of containers whose earlier instances were removed.
    pub attempts: &'a BTreeMap<String, u32>,
}

/// Start a container; `attempt` becomes its restart count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Start {
    pub name: String,
    pub attempt: u32,
    /// An instance that was made and never ran: it gives way to the new one.
    pub replaces: Option<String>,
}

/// Stop a running container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kill {
    pub id: String,
    pub name: String,
    pub message: String,
    pub cause: KillCause,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KillCause {
    SpecChanged,
    Liveness,
    Startup,
    /// Its policy wants a restart for the resources that change.
    Resize,
    /// The runtime lost sight of it: it must be gone before another takes its place.
    Unknown,
}

/// Give a running container its allocated resources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resize {
    pub id: String,
    pub name: String,
}

/// A container that waits for its back-off to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub name: String,
    pub delay: Duration,
    pub until: Timestamp,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Actions {
    /// Stop every container and sandbox before anything else.
    pub kill_pod: bool,
    /// Remove every container; the pod begins anew in its sandbox.
    pub reset: Vec<Reset>,
    /// Make a sandbox; the number is its attempt.
    pub create_sandbox: Option<u32>,
    pub kill: Vec<Kill>,
    pub resize: Vec<Resize>,
    pub start: Vec<Start>,
    pub waiting: Vec<Waiting>,
    /// Nothing of this pod will ever run again.
    pub finished: bool,
}

impl Actions {
    fn finish() -> Self {
        Actions { kill_pod: true, finished: true, ..Actions::default() }
    }

    /// When a waiting container may start.
    pub(crate) fn wake_at(&self) -> Option<Timestamp> {
        self.waiting.iter().map(|w| w.until).min()
    }
}

/// The next actions. Applied, they change the runtime's state; the runtime's event triggers the next sync.
pub(crate) fn decide(inputs: &Inputs<'_>) -> Actions {
    let containers = model::containers(inputs.pod);
    if restart_all::is_due(&containers, inputs.runtime) {
        return Actions { reset: restart_all::resets(&containers, inputs.runtime), ..Actions::default() };
    }
    match sandbox_verdict(inputs.pod, inputs.runtime) {
        SandboxVerdict::Keep(id) => in_sandbox(inputs, &containers, &id),
        SandboxVerdict::Create { attempt } => with_new_sandbox(inputs, &containers, attempt),
    }
}

enum SandboxVerdict {
    Keep(String),
    Create { attempt: u32 },
}

fn sandbox_verdict(pod: &Pod, runtime: &RuntimePod) -> SandboxVerdict {
    let Some(newest) = runtime.sandboxes.first() else { return SandboxVerdict::Create { attempt: 0 } };
    let ready = runtime.sandboxes.iter().filter(|s| s.ready).count();
    let lost_network = !model::is_host_network(pod) && newest.ips.is_empty();
    if ready > 1 || !newest.ready || lost_network {
        return SandboxVerdict::Create { attempt: newest.attempt + 1 };
    }
    SandboxVerdict::Keep(newest.id.clone())
}

fn with_new_sandbox(inputs: &Inputs<'_>, containers: &[PodContainer], attempt: u32) -> Actions {
    let runtime = inputs.runtime;
    let ran_before = attempt != 0 && !runtime.instances.is_empty();
    if ran_before && RestartPolicy::of(inputs.pod) == RestartPolicy::Never {
        return Actions::finish();
    }
    let regular: Vec<&PodContainer> = containers
        .iter()
        .filter(|c| c.kind == ContainerKind::Regular && still_to_run(inputs.pod, c, runtime.latest(c.name())))
        .collect();
    if regular.is_empty() && !runtime.instances.is_empty() {
        return Actions::finish();
    }
    let mut actions =
        Actions { kill_pod: !runtime.is_empty(), create_sandbox: Some(attempt), ..Actions::default() };
    match containers.iter().find(|c| c.kind == ContainerKind::Init) {
        // Init containers run again from the first: their results may be gone with the sandbox.
        Some(first) => actions.start_or_wait(inputs, first, runtime.latest(first.name())),
        None => {
            for c in regular {
                actions.start_or_wait(inputs, c, runtime.latest(c.name()));
            }
        }
    }
    // A sandbox nobody may use yet would only hold resources: wait without one.
    if actions.start.is_empty() {
        actions.create_sandbox = None;
        actions.kill_pod = runtime.sandboxes.iter().any(|s| s.ready) || runtime.running().next().is_some();
    }
    actions
}

fn in_sandbox(inputs: &Inputs<'_>, containers: &[PodContainer], sandbox: &str) -> Actions {
    let runtime = inputs.runtime;
    let mut actions = Actions::default();
    for c in containers.iter().filter(|c| c.kind == ContainerKind::Ephemeral) {
        match runtime.latest(c.name()) {
            None => actions.start_or_wait(inputs, c, None),
            Some(i) if i.state == RunState::Created => actions.start_or_wait(inputs, c, Some(i)),
            Some(_) => {}
        }
    }
    match init_progress(inputs, containers, sandbox, &mut actions) {
        InitProgress::Running => return actions,
        InitProgress::Failed => return Actions::finish(),
        InitProgress::Done => {}
    }
    let mut alive = 0;
    for c in containers.iter().filter(|c| c.kind == ContainerKind::Regular) {
        let latest = runtime.latest(c.name());
        match latest {
            Some(i) if i.is_running() => {
                alive += 1;
                actions.keep_or_kill(inputs, c, i);
            }
            Some(i) if i.state == RunState::Unknown => {
                alive += 1;
                actions.kill.push(Kill {
                    id: i.id.clone(),
                    name: i.name.clone(),
                    message: format!("Container is in {:?} state, try killing it before restart", "unknown"),
                    cause: KillCause::Unknown,
                });
            }
            _ if still_to_run(inputs.pod, c, latest) => {
                alive += 1;
                actions.start_or_wait(inputs, c, latest);
            }
            _ => {}
        }
    }
    if alive == 0 { Actions::finish() } else { actions }
}

enum InitProgress {
    Running,
    Done,
    Failed,
}

fn init_progress(
    inputs: &Inputs<'_>,
    containers: &[PodContainer],
    sandbox: &str,
    actions: &mut Actions,
) -> InitProgress {
    let runtime = inputs.runtime;
    // Once a regular container was made in this sandbox, init containers are over; only sidecars are kept up.
    let initialized = containers
        .iter()
        .any(|c| c.kind == ContainerKind::Regular && runtime.latest_in(sandbox, c.name()).is_some());
    let all: Vec<&PodContainer> = containers.iter().filter(|c| c.kind == ContainerKind::Init).collect();
    // As upstream: the last one that was made says how far the pod is. Earlier ones have had their turn.
    let reached = match initialized {
        true => all.len(),
        false => all.iter().rposition(|c| runtime.latest_in(sandbox, c.name()).is_some()).unwrap_or(0),
    };
    for (position, c) in all.into_iter().enumerate() {
        let has_passed = position < reached;
        if has_passed && !c.is_sidecar() {
            continue;
        }
        let current = runtime.latest_in(sandbox, c.name());
        match current {
            Some(i) if i.is_running() => {
                if !c.is_sidecar() && resize::change(inputs.pod, &c.spec, i) == resize::Change::InPlace {
                    actions.resize.push(Resize { id: i.id.clone(), name: i.name.clone() });
                }
                let unwell = c.is_sidecar() && actions.keep_or_kill(inputs, c, i);
                if has_passed || (c.is_sidecar() && !unwell && inputs.probes.started(&c.spec, &i.id)) {
                    continue;
                }
                return InitProgress::Running;
            }
            Some(i) if i.state == RunState::Exited && !c.is_sidecar() && i.exit_code == 0 => continue,
            Some(i) if i.state == RunState::Exited && !model::restarts_after(inputs.pod, c, i.exit_code) => {
                return InitProgress::Failed;
            }
            _ => {
                // Back-off counts failures across sandboxes, so use the newest instance of any.
                actions.start_or_wait(inputs, c, runtime.latest(c.name()));
                if !has_passed {
                    return InitProgress::Running;
                }
            }
        }
    }
    InitProgress::Done
}

pub(super) fn still_to_run(pod: &Pod, container: &PodContainer, latest: Option<&Instance>) -> bool {
    match latest {
        Some(i) if i.state == RunState::Exited => model::restarts_after(pod, container, i.exit_code),
        _ => true,
    }
}

fn kill_verdict(inputs: &Inputs<'_>, container: &PodContainer, instance: &Instance) -> Option<Kill> {
    let kill = |cause, what: String| {
        Some(Kill { id: instance.id.clone(), name: instance.name.clone(), message: what, cause })
    };
    let subject = match container.kind {
        ContainerKind::Init => format!("Init container {}", container.name()),
        _ => format!("Container {}", container.name()),
    };
    let suffix = if model::restarts_after(inputs.pod, container, 137) { ", will be restarted" } else { "" };
    if instance.hash.as_deref().is_some_and(|h| h != labels::container_hash(container)) {
        return kill(KillCause::SpecChanged, format!("{subject} definition changed, will be restarted"));
    }
    if inputs.probes.startup_failed(&instance.id) {
        return kill(KillCause::Startup, format!("{subject} failed startup probe{suffix}"));
    }
    if inputs.probes.liveness_failed(&instance.id) {
        return kill(KillCause::Liveness, format!("{subject} failed liveness probe{suffix}"));
    }
    if resize::change(inputs.pod, &container.spec, instance) == resize::Change::Restart {
        return kill(KillCause::Resize, format!("{subject} resize requires restart"));
    }
    None
}

impl Actions {
    /// A running container is stopped, resized or left alone. True if it is stopped.
    fn keep_or_kill(&mut self, inputs: &Inputs<'_>, container: &PodContainer, instance: &Instance) -> bool {
        if let Some(kill) = kill_verdict(inputs, container, instance) {
            self.kill.push(kill);
            return true;
        }
        if resize::change(inputs.pod, &container.spec, instance) == resize::Change::InPlace {
            self.resize.push(Resize { id: instance.id.clone(), name: instance.name.clone() });
        }
        false
    }

    fn start_or_wait(&mut self, inputs: &Inputs<'_>, container: &PodContainer, latest: Option<&Instance>) {
        let name = container.name().to_string();
        let Some(latest) = latest else {
            let attempt = inputs.attempts.get(&name).copied().unwrap_or(0);
            self.start.push(Start { name, attempt, replaces: None });
            return;
        };
        if latest.state == RunState::Created {
            self.start.push(Start { name, attempt: latest.attempt, replaces: Some(latest.id.clone()) });
            return;
        }
        let failed_at = latest.finished_at.unwrap_or(inputs.now);
        match inputs.backoff.blocked(&name, failed_at, inputs.now) {
            Some((delay, until)) => self.waiting.push(Waiting { name, delay, until }),
            None => self.start.push(Start { name, attempt: latest.attempt + 1, replaces: None }),
        }
    }
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
