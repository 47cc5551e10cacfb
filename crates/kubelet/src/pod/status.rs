//! A pod's status, computed from its spec and from the runtime's state.

use super::model::{self, ContainerKind, PodContainer, RestartPolicy};
use super::pod_level;
use super::resize;
use super::restart_all;
use super::runtime_pod::{Instance, RunState, RuntimePod};
use crate::clock;
use crate::container::resources::PodResources;
use crate::probe::ProbeResults;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting, ContainerStatus,
    HostIP, Pod, PodCondition, PodIP, PodStatus, ResourceStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// Why a container does not run: the waiting state's reason and message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WaitingReason {
    pub reason: String,
    pub message: String,
}

impl WaitingReason {
    pub(crate) fn new(reason: &str, message: impl Into<String>) -> Self {
        Self { reason: reason.into(), message: message.into() }
    }

    pub(crate) fn crash_loop(delay: Duration, container: &str, pod: &model::PodId) -> Self {
        let delay = clock::go_duration(delay);
        Self::new(
            "CrashLoopBackOff",
            format!("back-off {delay} restarting failed container={container} pod={pod}"),
        )
    }
}

/// Why the kubelet ended a pod by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub reason: String,
    pub message: String,
    /// The message of the condition DisruptionTarget, when the pod ends for the sake of others.
    pub disruption: Option<String>,
    /// Grace period of its containers, if not the pod's own.
    pub grace: Option<Duration>,
}

pub(crate) struct StatusInputs<'a> {
    /// The pod with the resources that are allocated to it.
    pub pod: &'a Pod,
    pub resize: &'a resize::Progress,
    /// The resources that the pod's control group has, once it was made.
    pub group: Option<PodResources>,
    /// The health of a container's devices.
    pub devices: &'a dyn Fn(&str) -> Vec<ResourceStatus>,
    pub runtime: &'a RuntimePod,
    /// Instances that were removed so that the pod begins anew, by container.
    pub removed: &'a BTreeMap<String, Instance>,
    pub probes: &'a ProbeResults,
    pub waiting: &'a HashMap<String, WaitingReason>,
    /// Set when the kubelet refused or ended the pod: the phase is Failed whatever its containers did.
    pub verdict: Option<&'a Verdict>,
    /// The pod is being stopped for good: ended containers are not started again.
    pub terminating: bool,
    /// Everything of the pod has stopped for good.
    pub terminated: bool,
    pub host_ips: &'a [String],
    /// The runtime's name, before `://` in container identifiers.
    pub runtime_name: &'a str,
    pub now: Timestamp,
}

/// The status to publish. Conditions owned by others, and times of conditions that did not change, are
/// taken over from the pod's present status.
pub(crate) fn pod_status(inputs: &StatusInputs<'_>) -> PodStatus {
    let pod = inputs.pod;
    let old = pod.status.clone().unwrap_or_default();
    let containers = model::containers(pod);
    let of_kind = |kind| containers.iter().filter(move |c| c.kind == kind);
    let initialized = is_initialized(inputs, &containers);
    // A pod that was refused has containers in name only; shown as waiting they would hide the reason.
    let refused = inputs.verdict.is_some() && inputs.runtime.instances.is_empty();
    let statuses = |kind| -> Vec<ContainerStatus> {
        if refused {
            return Vec::new();
        }
        of_kind(kind).map(|c| container_status(inputs, &old, c, initialized)).collect()
    };
    let init = statuses(ContainerKind::Init);
    let mut regular = statuses(ContainerKind::Regular);
    // As upstream: of regular containers only.
    for status in &mut regular {
        status.allocated_resources_status = some((inputs.devices)(&status.name));
    }
    let ephemeral = statuses(ContainerKind::Ephemeral);

    let computed = phase(inputs, &containers, &init, &regular);
    let has_running = || inputs.runtime.instances.iter().any(|instance| instance.is_running());
    let is_ending = !inputs.terminated && (inputs.terminating || has_running());
    let phase = match model::phase(pod) {
        // Final phases stay; a verdict of the kubelet is final too.
        done @ ("Failed" | "Succeeded") => done.to_string(),
        // As upstream: a pod is not over while its containers may still run.
        now if is_ending && (inputs.verdict.is_some() || matches!(computed, "Failed" | "Succeeded")) => {
            now.into()
        }
        _ if inputs.verdict.is_some() => "Failed".into(),
        // As upstream: a pod that begins anew does not wait to begin.
        "Running" if computed == "Pending" && restart_all::is_possible(pod) => "Running".into(),
        _ => computed.to_string(),
    };
    let is_running = phase == "Running";
    let (reason, message) = match inputs.verdict.filter(|_| !is_ending) {
        Some(v) => (Some(v.reason.clone()), Some(v.message.clone())),
        None if matches!(phase.as_str(), "Failed" | "Succeeded") => (old.reason.clone(), old.message.clone()),
        None => (None, None),
    };

    let mut ips: Vec<String> = if model::is_host_network(pod) {
        if inputs.runtime.sandboxes.is_empty() { Vec::new() } else { inputs.host_ips.to_vec() }
    } else {
        inputs.runtime.sandboxes.iter().find(|s| s.ready).map(|s| s.ips.clone()).unwrap_or_default()
    };
    if ips.is_empty() {
        // The address stays readable while the pod ends.
        ips = old.pod_ips.iter().flatten().map(|p| p.ip.clone()).collect();
    }
    let conditions = conditions(inputs, &old, &phase, &containers, &init, &regular);
    PodStatus {
        conditions: Some(conditions),
        container_statuses: some(regular),
        init_container_statuses: some(init),
        ephemeral_container_statuses: some(ephemeral),
        host_ip: inputs.host_ips.first().cloned(),
        host_ips: some(inputs.host_ips.iter().map(|ip| HostIP { ip: ip.clone() }).collect()),
        pod_ip: ips.first().cloned(),
        pod_ips: some(ips.into_iter().map(|ip| PodIP { ip }).collect()),
        phase: Some(phase),
        reason,
        message,
        qos_class: Some(model::qos_class(pod).as_str().to_string()),
        resources: Some(pod_level::status(pod, inputs.group.as_ref().filter(|_| is_running))),
        allocated_resources: pod_level::allocated(pod),
        start_time: old.start_time.clone().or(Some(Time(inputs.now))),
        observed_generation: pod.metadata.generation,
        ..old
    }
}

fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

fn is_initialized(inputs: &StatusInputs<'_>, containers: &[PodContainer]) -> bool {
    let runtime = inputs.runtime;
    let started = |c: &PodContainer| runtime.latest(c.name()).is_some();
    if containers.iter().filter(|c| c.kind == ContainerKind::Regular).any(started) {
        return true;
    }
    containers.iter().filter(|c| c.kind == ContainerKind::Init).all(|c| match runtime.latest(c.name()) {
        Some(i) if c.is_sidecar() => i.is_running() && inputs.probes.started(&c.spec, &i.id),
        Some(i) => i.state == RunState::Exited && i.exit_code == 0,
        None => false,
    })
}

fn container_status(
    inputs: &StatusInputs<'_>,
    old: &PodStatus,
    container: &PodContainer,
    initialized: bool,
) -> ContainerStatus {
    let spec = &container.spec;
    let known = [&old.container_statuses, &old.init_container_statuses, &old.ephemeral_container_statuses]
        .into_iter()
        .flatten()
        .flatten()
        .find(|s| s.name == spec.name);
    let Some(latest) = inputs.runtime.latest(&spec.name) else {
        // Its records are gone, but the earlier status was true.
        if let Some(known) =
            known.filter(|k| k.container_id.is_some() && (inputs.terminating || inputs.terminated))
        {
            return ended(known.clone());
        }
        let removed = known.filter(|_| restart_all::is_possible(inputs.pod));
        return match removed.and_then(|known| begins_anew(inputs, known)) {
            Some(status) => status,
            None => unstarted(inputs, container, initialized),
        };
    };
    let id = |i: &Instance| format!("{}://{}", inputs.runtime_name, i.id);
    let running = latest.is_running();
    let mut state = match latest.state {
        RunState::Running => ContainerState {
            running: Some(ContainerStateRunning { started_at: latest.started_at.map(Time) }),
            ..ContainerState::default()
        },
        RunState::Exited => terminated(inputs, known, latest),
        RunState::Created => waiting(WaitingReason::new("ContainerCreating", "")),
        RunState::Unknown => ContainerState {
            terminated: Some(ContainerStateTerminated {
                exit_code: 137,
                reason: Some("ContainerStatusUnknown".into()),
                message: Some("The container could not be located when the pod was terminated".into()),
                container_id: Some(id(latest)),
                ..ContainerStateTerminated::default()
            }),
            ..ContainerState::default()
        },
    };
    let mut last_state = inputs.runtime.previous(&spec.name, latest).map(|i| terminated(inputs, known, i));
    // The runtime has nothing of an instance that was removed.
    if last_state.is_none() && restart_all::is_possible(inputs.pod) {
        let removed = inputs.removed.get(&spec.name).filter(|i| i.state == RunState::Exited);
        last_state = removed
            .map(|removed| terminated(inputs, known, removed))
            .or_else(|| known.and_then(|known| last_end(known, &id(latest))));
    }
    // While a container waits to run again, its end moves to lastState and the reason of the wait is shown.
    if !running
        && !inputs.terminated
        && let Some(reason) = inputs.waiting.get(&spec.name)
    {
        if latest.state == RunState::Exited {
            last_state = Some(state);
        }
        state = waiting(reason.clone());
    }
    let started = running && inputs.probes.started(spec, &latest.id);
    let ready = match container.kind {
        ContainerKind::Init if !container.is_sidecar() => {
            latest.state == RunState::Exited && latest.exit_code == 0
        }
        ContainerKind::Ephemeral => false,
        _ => running && !inputs.terminated && inputs.probes.ready(spec, &latest.id),
    };
    ContainerStatus {
        container_id: Some(id(latest)),
        image: if latest.image.is_empty() {
            spec.image.clone().unwrap_or_default()
        } else {
            latest.image.clone()
        },
        image_id: if latest.image_ref.is_empty() {
            latest.image_id.clone()
        } else {
            latest.image_ref.clone()
        },
        last_state: Some(last_state.unwrap_or_default()),
        name: spec.name.clone(),
        ready,
        restart_count: i32::try_from(latest.attempt).unwrap_or(i32::MAX),
        started: Some(started),
        state: Some(state),
        allocated_resources: spec.resources.as_ref().and_then(|r| r.requests.clone()),
        resources: resize::shown(inputs.pod, spec, latest),
        user: latest.user.as_ref().map(|u| k8s_openapi::api::core::v1::ContainerUser {
            linux: Some(k8s_openapi::api::core::v1::LinuxContainerUser {
                uid: u.uid,
                gid: u.gid,
                supplemental_groups: some(u.supplemental_groups.clone()),
            }),
        }),
        ..ContainerStatus::default()
    }
}

/// The status of a container that was removed, because all containers of the pod begin anew.
fn begins_anew(inputs: &StatusInputs<'_>, known: &ContainerStatus) -> Option<ContainerStatus> {
    let mut status =
        ContainerStatus { ready: false, started: Some(false), container_id: None, ..known.clone() };
    if restart_all::is_removed(known) {
        return Some(status);
    }
    known.container_id.as_ref()?;
    let ended = inputs.removed.get(&known.name).filter(|instance| instance.state == RunState::Exited);
    let ended = ended.and_then(|instance| terminated(inputs, Some(known), instance).terminated);
    let removed = ContainerStateTerminated {
        reason: Some(restart_all::REASON.into()),
        message: Some(restart_all::MESSAGE.into()),
        exit_code: 137,
        ..ContainerStateTerminated::default()
    };
    let told = || known.state.as_ref().and_then(|state| state.terminated.clone());
    let ended = ended.or_else(told).unwrap_or(removed);
    status.last_state = Some(ContainerState { terminated: Some(ended), ..ContainerState::default() });
    status.state = Some(waiting(WaitingReason::new(restart_all::REASON, restart_all::MESSAGE)));
    status.restart_count = known.restart_count.saturating_add(1);
    Some(status)
}

/// The end of the instance before this one, as an earlier status told it.
fn last_end(known: &ContainerStatus, id: &str) -> Option<ContainerState> {
    let end = |state: &Option<ContainerState>| state.as_ref().and_then(|state| state.terminated.clone());
    let other = known.container_id.as_deref() != Some(id);
    let ended = end(&known.state).filter(|_| other).or_else(|| end(&known.last_state))?;
    Some(ContainerState { terminated: Some(ended), ..ContainerState::default() })
}

/// A container nobody has started.
fn unstarted(inputs: &StatusInputs<'_>, container: &PodContainer, initialized: bool) -> ContainerStatus {
    let spec = &container.spec;
    let state = if let Some(reason) = inputs.waiting.get(&spec.name) {
        waiting(reason.clone())
    } else if !initialized {
        waiting(WaitingReason::new("PodInitializing", ""))
    } else {
        waiting(WaitingReason::new("ContainerCreating", ""))
    };
    ContainerStatus {
        image: spec.image.clone().unwrap_or_default(),
        image_id: String::new(),
        last_state: Some(ContainerState::default()),
        name: spec.name.clone(),
        started: Some(false),
        state: Some(state),
        ..ContainerStatus::default()
    }
}

/// A status known from before, of a container that is gone from the runtime: if it still says running, the
/// truth is lost.
fn ended(mut status: ContainerStatus) -> ContainerStatus {
    status.ready = false;
    status.started = Some(false);
    if status.state.as_ref().is_none_or(|s| s.terminated.is_none()) {
        status.state = Some(ContainerState {
            terminated: Some(ContainerStateTerminated {
                exit_code: 137,
                reason: Some("ContainerStatusUnknown".into()),
                message: Some("The container could not be located when the pod was terminated".into()),
                ..ContainerStateTerminated::default()
            }),
            ..ContainerState::default()
        });
    }
    status
}

fn waiting(reason: WaitingReason) -> ContainerState {
    ContainerState {
        waiting: Some(ContainerStateWaiting {
            reason: Some(reason.reason),
            message: (!reason.message.is_empty()).then_some(reason.message),
        }),
        ..ContainerState::default()
    }
}

/// As upstream: the termination messages of all containers of a pod together stay below this.
const MAX_MESSAGES: usize = 12 * 1024;

/// Cuts a termination message to its share of the limit for a pod with this number of containers.
fn share(mut message: String, containers: usize) -> String {
    message.truncate(message.floor_char_boundary(MAX_MESSAGES / containers.max(1)));
    message
}

/// The final state of an instance. A message that was reported before stays: its file may be gone.
fn terminated(
    inputs: &StatusInputs<'_>,
    known: Option<&ContainerStatus>,
    instance: &Instance,
) -> ContainerState {
    let id = format!("{}://{}", inputs.runtime_name, instance.id);
    let told = known
        .into_iter()
        .flat_map(|known| [&known.state, &known.last_state])
        .filter_map(|state| state.as_ref()?.terminated.as_ref())
        .find(|ended| ended.container_id.as_ref() == Some(&id))
        .and_then(|ended| ended.message.clone());
    let reason = match (instance.reason.as_str(), instance.exit_code) {
        ("", 0) => "Completed",
        ("", _) => "Error",
        (given, _) => given,
    };
    ContainerState {
        terminated: Some(ContainerStateTerminated {
            exit_code: instance.exit_code,
            reason: Some(reason.to_string()),
            message: Some(instance.message.clone())
                .filter(|message| !message.is_empty())
                .or(told)
                .map(|message| share(message, model::containers(inputs.pod).len())),
            started_at: instance.started_at.map(Time),
            finished_at: instance.finished_at.map(Time),
            container_id: Some(id),
            ..ContainerStateTerminated::default()
        }),
        ..ContainerState::default()
    }
}

fn has_terminated(state: &Option<ContainerState>) -> Option<i32> {
    state.as_ref()?.terminated.as_ref().map(|t| t.exit_code)
}

fn is_running(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|s| s.running.is_some())
}

fn phase(
    inputs: &StatusInputs<'_>,
    containers: &[PodContainer],
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
) -> &'static str {
    let policy = RestartPolicy::of(inputs.pod);
    let any_regular = regular.iter().any(|s| s.container_id.is_some());
    let (mut init_pending, mut init_failed) = (0, 0);
    for (c, s) in containers.iter().filter(|c| c.kind == ContainerKind::Init).zip(init) {
        if c.is_sidecar() {
            init_pending += u32::from(!any_regular && s.started != Some(true));
            continue;
        }
        match (has_terminated(&s.state), has_terminated(&s.last_state)) {
            (Some(0), _) => {}
            (Some(_), _) => init_failed += 1,
            (None, Some(code)) if code != 0 && !is_running(s) => init_failed += 1,
            _ => init_pending += 1,
        }
    }
    if init_failed > 0 && (policy == RestartPolicy::Never || inputs.terminated) {
        return "Failed";
    }
    if init_pending + init_failed > 0 && !any_regular {
        return if inputs.terminated { "Failed" } else { "Pending" };
    }
    let (mut waiting, mut running, mut stopped, mut succeeded, mut restarting) = (0, 0, 0, 0, 0);
    let specs = containers.iter().filter(|c| c.kind == ContainerKind::Regular);
    for (c, s) in specs.zip(regular) {
        let ended = has_terminated(&s.state).or_else(|| has_terminated(&s.last_state));
        match ended {
            _ if is_running(s) => running += 1,
            _ if s.container_id.is_none() => waiting += 1,
            Some(code) => {
                stopped += 1;
                succeeded += u32::from(code == 0);
                restarting += u32::from(model::restarts_after(inputs.pod, c, code));
            }
            None => waiting += 1,
        }
    }
    if inputs.terminated {
        return if waiting == 0 && running == 0 && stopped == succeeded { "Succeeded" } else { "Failed" };
    }
    match (waiting, running, stopped) {
        (1.., _, _) => "Pending",
        (_, 1.., _) => "Running",
        (_, _, 1..) if restarting > 0 => "Running",
        (_, _, n) if n > 0 && n == succeeded => "Succeeded",
        (_, _, 1..) => "Failed",
        _ => "Pending",
    }
}

fn conditions(
    inputs: &StatusInputs<'_>,
    old: &PodStatus,
    phase: &str,
    containers: &[PodContainer],
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
) -> Vec<PodCondition> {
    let may_begin_anew = restart_all::is_possible(inputs.pod);
    let mut initialized = initialized_condition(phase, containers, init, regular);
    let holds = |type_: &str| old.conditions.iter().flatten().any(|c| c.type_ == type_ && c.status == "True");
    if may_begin_anew && initialized.status == "False" && holds("Initialized") {
        // As upstream: a pod is initialized once.
        initialized = simple("Initialized", true);
    }
    let mut wanted = vec![
        simple("PodReadyToStartContainers", inputs.runtime.sandboxes.iter().any(|s| s.ready)),
        initialized,
    ];
    let containers_ready = containers_ready_condition("ContainersReady", phase, containers, init, regular);
    wanted.push(ready_condition(inputs.pod, old, phase, &containers_ready));
    wanted.push(containers_ready);
    let kept = old.conditions.clone().unwrap_or_default();
    let mut scheduled = simple("PodScheduled", true);
    if let Some(given) = kept.iter().find(|c| c.type_ == "PodScheduled") {
        scheduled = given.clone();
    }
    wanted.push(scheduled);
    let resizing = !matches!(phase, "Failed" | "Succeeded");
    if resizing {
        wanted.extend(resize::conditions(inputs.resize));
    }
    if may_begin_anew {
        wanted.push(match phase {
            "Failed" => explained(restart_all::CONDITION, "PodFailed", ""),
            _ if restart_all::is_due(containers, inputs.runtime) => PodCondition {
                reason: Some("RestartAllContainersStarted".into()),
                message: Some("container exited with restart policy rule".into()),
                ..simple(restart_all::CONDITION, true)
            },
            _ => simple(restart_all::CONDITION, false),
        });
    }
    if let Some(message) = inputs.verdict.and_then(|verdict| verdict.disruption.clone()) {
        wanted.push(PodCondition {
            reason: Some("TerminationByKubelet".into()),
            message: Some(message),
            ..simple("DisruptionTarget", true)
        });
    }
    for condition in &mut wanted {
        condition.observed_generation = inputs.pod.metadata.generation;
        let before = kept.iter().find(|c| c.type_ == condition.type_);
        condition.last_transition_time = match before {
            Some(b) if b.status == condition.status => b.last_transition_time.clone(),
            _ => Some(Time(inputs.now)),
        };
    }
    let owned: Vec<String> = wanted.iter().map(|c| c.type_.clone()).collect();
    // A resize that has come to its end has no condition.
    let is_of_resize = |type_: &str| matches!(type_, resize::PENDING | resize::IN_PROGRESS);
    wanted.extend(kept.into_iter().filter(|c| !owned.contains(&c.type_) && !is_of_resize(&c.type_)));
    wanted
}

fn simple(type_: &str, status: bool) -> PodCondition {
    PodCondition {
        type_: type_.into(),
        status: if status { "True" } else { "False" }.into(),
        ..PodCondition::default()
    }
}

fn explained(type_: &str, reason: &str, message: impl Into<String>) -> PodCondition {
    let message = message.into();
    PodCondition {
        reason: Some(reason.into()),
        message: (!message.is_empty()).then_some(message),
        ..simple(type_, false)
    }
}

fn initialized_condition(
    phase: &str,
    containers: &[PodContainer],
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
) -> PodCondition {
    let incomplete: Vec<&str> = containers
        .iter()
        .filter(|c| c.kind == ContainerKind::Init)
        .zip(init)
        .filter(|(c, s)| if c.is_sidecar() { s.started != Some(true) } else { !s.ready })
        .map(|(c, _)| c.name())
        .collect();
    if phase == "Succeeded" {
        return PodCondition { reason: Some("PodCompleted".into()), ..simple("Initialized", true) };
    }
    if incomplete.is_empty() || regular.iter().any(|s| s.container_id.is_some()) {
        return simple("Initialized", true);
    }
    explained(
        "Initialized",
        "ContainersNotInitialized",
        format!("containers with incomplete status: [{}]", incomplete.join(" ")),
    )
}

fn containers_ready_condition(
    type_: &str,
    phase: &str,
    containers: &[PodContainer],
    init: &[ContainerStatus],
    regular: &[ContainerStatus],
) -> PodCondition {
    match phase {
        "Succeeded" => return explained(type_, "PodCompleted", ""),
        "Failed" => return explained(type_, "PodFailed", ""),
        _ => {}
    }
    let sidecars =
        containers.iter().filter(|c| c.kind == ContainerKind::Init).zip(init).filter(|(c, _)| c.is_sidecar());
    let unready: Vec<&str> =
        sidecars.map(|(_, s)| s).chain(regular).filter(|s| !s.ready).map(|s| s.name.as_str()).collect();
    if unready.is_empty() {
        return simple(type_, true);
    }
    explained(type_, "ContainersNotReady", format!("containers with unready status: [{}]", unready.join(" ")))
}

fn ready_condition(pod: &Pod, old: &PodStatus, phase: &str, containers_ready: &PodCondition) -> PodCondition {
    if containers_ready.status != "True" || matches!(phase, "Failed" | "Succeeded") {
        return PodCondition { type_: "Ready".into(), ..containers_ready.clone() };
    }
    let mut messages = Vec::new();
    for gate in model::spec(pod).readiness_gates.iter().flatten() {
        let name = &gate.condition_type;
        match old.conditions.iter().flatten().find(|c| c.type_ == *name) {
            None => messages
                .push(format!("corresponding condition of pod readiness gate {name:?} does not exist.")),
            Some(c) if c.status != "True" => messages
                .push(format!("the status of pod readiness gate {name:?} is not \"True\", but {}", c.status)),
            Some(_) => {}
        }
    }
    if messages.is_empty() {
        return simple("Ready", true);
    }
    explained("Ready", "ReadinessGatesNotReady", messages.join(", "))
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
