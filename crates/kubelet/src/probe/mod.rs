//! Probes: results, thresholds, the checks themselves, and one timer per probe of a running container.

mod check;
mod counts;
mod grpc;
mod http;
mod machine;
mod redirect;
mod worker;

pub(crate) use check::{Checker, Target};
pub(crate) use counts::ProbeCounts;
pub(crate) use http::{HttpError, HttpRequest, authority, get as http_get};
pub(crate) use machine::Outcome;
pub(crate) use worker::{ProbeContext, ProbeSet};

use crate::pod::PodContainer;
use crate::pod::runtime_pod::RuntimePod;
use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, Probe};
use std::collections::HashMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum ProbeKind {
    Startup,
    Readiness,
    Liveness,
}

impl ProbeKind {
    pub(crate) const ALL: [ProbeKind; 3] = [ProbeKind::Startup, ProbeKind::Readiness, ProbeKind::Liveness];

    /// As events spell it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ProbeKind::Startup => "Startup",
            ProbeKind::Readiness => "Readiness",
            ProbeKind::Liveness => "Liveness",
        }
    }

    pub(crate) fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            ProbeKind::Startup => container.startup_probe.as_ref(),
            ProbeKind::Readiness => container.readiness_probe.as_ref(),
            ProbeKind::Liveness => container.liveness_probe.as_ref(),
        }
    }
}

/// The results of a pod's probes, by container instance. A new instance starts with none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ProbeResults {
    results: HashMap<(String, ProbeKind), bool>,
}

impl ProbeResults {
    /// Notes a verdict. Returns true if it changed anything.
    pub(crate) fn set(&mut self, container_id: &str, kind: ProbeKind, success: bool) -> bool {
        self.results.insert((container_id.to_string(), kind), success) != Some(success)
    }

    pub(crate) fn get(&self, container_id: &str, kind: ProbeKind) -> Option<bool> {
        self.results.get(&(container_id.to_string(), kind)).copied()
    }

    /// Takes over what the status of the pod says about its running containers, so that a restart of the kubelet changes
    /// nothing until the probes have run again.
    fn recall(&mut self, pod: &Pod, containers: &[PodContainer], runtime: &RuntimePod) {
        let status = pod.status.as_ref();
        let known: Vec<&ContainerStatus> = status
            .into_iter()
            .flat_map(|s| [&s.container_statuses, &s.init_container_statuses])
            .flatten()
            .flatten()
            .collect();
        for container in containers {
            let Some(instance) = runtime.latest(container.name()).filter(|i| i.is_running()) else {
                continue;
            };
            let is_about = |status: &&&ContainerStatus| {
                let id = status.container_id.as_deref().and_then(|id| id.split_once("://"));
                status.name == container.name() && id.is_some_and(|(_, id)| id == instance.id)
            };
            let Some(status) = known.iter().find(is_about) else { continue };
            for (kind, holds) in
                [(ProbeKind::Startup, status.started == Some(true)), (ProbeKind::Readiness, status.ready)]
            {
                if holds && kind.of(&container.spec).is_some() && self.get(&instance.id, kind).is_none() {
                    self.set(&instance.id, kind, true);
                }
            }
        }
    }

    pub(crate) fn retain(&mut self, alive: impl Fn(&str) -> bool) {
        self.results.retain(|(id, _), _| alive(id));
    }

    /// Started: running, and past its startup probe when it has one.
    pub(crate) fn started(&self, container: &Container, container_id: &str) -> bool {
        container.startup_probe.is_none() || self.get(container_id, ProbeKind::Startup) == Some(true)
    }

    /// Ready: started, and its readiness probe, when it has one, has succeeded.
    pub(crate) fn ready(&self, container: &Container, container_id: &str) -> bool {
        self.started(container, container_id)
            && (container.readiness_probe.is_none()
                || self.get(container_id, ProbeKind::Readiness) == Some(true))
    }

    pub(crate) fn startup_failed(&self, container_id: &str) -> bool {
        self.get(container_id, ProbeKind::Startup) == Some(false)
    }

    pub(crate) fn liveness_failed(&self, container_id: &str) -> bool {
        self.get(container_id, ProbeKind::Liveness) == Some(false)
    }

    #[cfg(test)]
    pub(crate) fn fail_liveness(&mut self, container_id: &str) {
        self.set(container_id, ProbeKind::Liveness, false);
    }
}
