//! A pod as the workers see it: its identity and its containers, whatever list of the spec they come from.

use k8s_openapi::api::core::v1::{Container, ObjectReference, Pod, PodSpec};
use std::fmt;

/// Which pod, for good: a pod of the same name created later has another UID.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PodId {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl PodId {
    pub(crate) fn of(pod: &Pod) -> Self {
        Self {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
        }
    }

    /// The directory of the pod's logs beneath the log root.
    pub(crate) fn log_directory(&self) -> String {
        format!("{}_{}_{}", self.namespace, self.name, self.uid)
    }
}

/// As upstream's messages name a pod: `name_namespace(uid)`.
impl fmt::Display for PodId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}({})", self.name, self.namespace, self.uid)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ContainerKind {
    Init,
    Regular,
    Ephemeral,
}

/// One container of a pod's spec. An ephemeral container is shown in the shape of an ordinary one.
#[derive(Debug, Clone)]
pub(crate) struct PodContainer {
    pub kind: ContainerKind,
    pub spec: Container,
    /// The container whose process namespace an ephemeral container joins.
    pub target: Option<String>,
}

impl PodContainer {
    pub(crate) fn name(&self) -> &str {
        &self.spec.name
    }

    /// An init container that keeps running beside the pod's containers (a sidecar).
    pub(crate) fn is_sidecar(&self) -> bool {
        self.kind == ContainerKind::Init && self.spec.restart_policy.as_deref() == Some("Always")
    }

    /// The field path events about this container carry.
    pub(crate) fn field_path(&self) -> String {
        let list = match self.kind {
            ContainerKind::Init => "initContainers",
            ContainerKind::Regular => "containers",
            ContainerKind::Ephemeral => "ephemeralContainers",
        };
        format!("spec.{list}{{{}}}", self.spec.name)
    }
}

/// All containers of a pod: init, regular, then ephemeral ones, each in the order of the spec.
pub(crate) fn containers(pod: &Pod) -> Vec<PodContainer> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let plain = |kind, c: &Container| PodContainer { kind, spec: c.clone(), target: None };
    let mut all: Vec<PodContainer> =
        spec.init_containers.iter().flatten().map(|c| plain(ContainerKind::Init, c)).collect();
    all.extend(spec.containers.iter().map(|c| plain(ContainerKind::Regular, c)));
    all.extend(spec.ephemeral_containers.iter().flatten().map(|e| PodContainer {
        kind: ContainerKind::Ephemeral,
        target: e.target_container_name.clone().filter(|t| !t.is_empty()),
        spec: Container {
            args: e.args.clone(),
            command: e.command.clone(),
            env: e.env.clone(),
            env_from: e.env_from.clone(),
            image: e.image.clone(),
            image_pull_policy: e.image_pull_policy.clone(),
            name: e.name.clone(),
            security_context: e.security_context.clone(),
            stdin: e.stdin,
            stdin_once: e.stdin_once,
            termination_message_path: e.termination_message_path.clone(),
            termination_message_policy: e.termination_message_policy.clone(),
            tty: e.tty,
            volume_devices: e.volume_devices.clone(),
            volume_mounts: e.volume_mounts.clone(),
            working_dir: e.working_dir.clone(),
            ..Container::default()
        },
    }));
    all
}

pub(crate) fn spec(pod: &Pod) -> &PodSpec {
    static EMPTY: std::sync::LazyLock<PodSpec> = std::sync::LazyLock::new(PodSpec::default);
    pod.spec.as_ref().unwrap_or(&EMPTY)
}

pub(crate) fn is_host_network(pod: &Pod) -> bool {
    spec(pod).host_network.unwrap_or(false)
}

/// Returns true if the pod has a user namespace of its own.
pub(crate) fn has_own_users(pod: &Pod) -> bool {
    spec(pod).host_users == Some(false)
}

pub(crate) fn is_deleting(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

pub(crate) fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or("Pending")
}

/// Succeeded and Failed are final: such a pod never runs again.
pub(crate) fn is_finished(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RestartPolicy {
    Always,
    OnFailure,
    Never,
}

impl RestartPolicy {
    pub(crate) fn parse(text: Option<&str>) -> Self {
        match text {
            Some("OnFailure") => RestartPolicy::OnFailure,
            Some("Never") => RestartPolicy::Never,
            _ => RestartPolicy::Always,
        }
    }

    pub(crate) fn of(pod: &Pod) -> Self {
        Self::parse(spec(pod).restart_policy.as_deref())
    }
}

/// The action of the first restart rule of a container that is about this exit code.
pub(crate) fn matching_rule(container: &PodContainer, exit_code: i32) -> Option<&str> {
    container.spec.restart_policy_rules.iter().flatten().find_map(|rule| {
        let codes = rule.exit_codes.as_ref()?;
        let listed = codes.values.iter().flatten().any(|v| *v == exit_code);
        (listed == (codes.operator == "In")).then_some(rule.action.as_str())
    })
}

/// Returns true if a container that ended with `exit_code` runs again: its own rules come first, then its
/// own policy, then the pod's.
pub(crate) fn restarts_after(pod: &Pod, container: &PodContainer, exit_code: i32) -> bool {
    if container.kind == ContainerKind::Ephemeral {
        return false;
    }
    if matching_rule(container, exit_code).is_some() {
        return true;
    }
    let policy = match container.spec.restart_policy.as_deref() {
        Some(own) => RestartPolicy::parse(Some(own)),
        // A plain init container of an Always pod is retried when it fails, not when it succeeds.
        None if container.kind == ContainerKind::Init && RestartPolicy::of(pod) == RestartPolicy::Always => {
            RestartPolicy::OnFailure
        }
        None => RestartPolicy::of(pod),
    };
    match policy {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => exit_code != 0,
        RestartPolicy::Never => false,
    }
}

/// The reference events about the pod, or about one of its containers, carry.
pub(crate) fn reference(pod: &Pod, field_path: Option<String>) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
        resource_version: pod.metadata.resource_version.clone(),
        field_path,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QosClass {
    Guaranteed,
    Burstable,
    BestEffort,
}

impl QosClass {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            QosClass::Guaranteed => "Guaranteed",
            QosClass::Burstable => "Burstable",
            QosClass::BestEffort => "BestEffort",
        }
    }
}

/// Guaranteed when every container limits CPU and memory and asks for as much; BestEffort when none asks
/// for or limits any; Burstable otherwise. The server's word wins when the pod carries it.
pub(crate) fn qos_class(pod: &Pod) -> QosClass {
    match pod.status.as_ref().and_then(|s| s.qos_class.as_deref()) {
        Some("Guaranteed") => return QosClass::Guaranteed,
        Some("Burstable") => return QosClass::Burstable,
        Some("BestEffort") => return QosClass::BestEffort,
        _ => {}
    }
    let (mut any, mut guaranteed) = (false, true);
    // Resources of the pod as a whole count instead of its containers'.
    let whole = spec(pod).resources.clone().filter(|r| {
        [&r.requests, &r.limits].into_iter().any(|list| list.as_ref().is_some_and(|list| !list.is_empty()))
    });
    let all = match whole {
        Some(whole) => vec![Some(whole)],
        None => {
            let all = containers(pod).into_iter().filter(|c| c.kind != ContainerKind::Ephemeral);
            all.map(|c| c.spec.resources).collect()
        }
    };
    for resources in &all {
        let resources = resources.as_ref();
        for name in ["cpu", "memory"] {
            let limit =
                crate::quantity::milli_of(resources.and_then(|r| r.limits.as_ref()), name).unwrap_or(0);
            let request =
                crate::quantity::milli_of(resources.and_then(|r| r.requests.as_ref()), name).unwrap_or(limit);
            any |= limit > 0 || request > 0;
            guaranteed &= limit > 0 && request == limit;
        }
    }
    match (any, guaranteed) {
        (false, _) => QosClass::BestEffort,
        (true, true) => QosClass::Guaranteed,
        (true, false) => QosClass::Burstable,
    }
}
