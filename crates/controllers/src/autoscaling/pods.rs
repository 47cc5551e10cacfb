//! The pods of a target: the groups of the arithmetic, and the resources that they request.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ferrite_api::quantity::Quantity as Amount;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::replicas::CalculationError;
use crate::pods;

/// The figure of one pod, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PodMetric {
    pub(super) timestamp: Timestamp,
    /// The time before `timestamp` that the figure is an average of.
    pub(super) window: Duration,
    pub(super) value: i64,
}

/// Figures by the names of pods.
pub(super) type PodMetrics = BTreeMap<String, PodMetric>;

/// Periods during which the CPU usage of a young pod does not count.
#[derive(Debug, Clone, Copy)]
pub(super) struct Readiness {
    pub(super) cpu_initialization_period: Duration,
    pub(super) initial_readiness_delay: Duration,
}

/// Pods by the way in which their figures count.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PodGroups {
    pub(super) ready: usize,
    /// Pending, or too young for a figure of their CPU usage.
    pub(super) unready: BTreeSet<String>,
    /// Without a figure.
    pub(super) missing: BTreeSet<String>,
    /// Failed, or being deleted.
    pub(super) ignored: BTreeSet<String>,
}

/// Tells the pods apart. `resource` is empty for metrics that are no resource's.
pub(super) fn group(
    all: &[Arc<Pod>],
    metrics: &PodMetrics,
    resource: &str,
    readiness: Readiness,
    now: Timestamp,
) -> PodGroups {
    let mut groups = PodGroups::default();
    for pod in all {
        let name = pod.metadata.name.clone().unwrap_or_default();
        let phase = pods::phase(pod);
        if pods::is_terminating(pod) || phase == "Failed" {
            groups.ignored.insert(name);
        } else if phase == "Pending" {
            groups.unready.insert(name);
        } else {
            match metrics.get(&name) {
                None => drop(groups.missing.insert(name)),
                Some(metric) if resource == "cpu" && !counts_for_cpu(pod, metric, readiness, now) => {
                    groups.unready.insert(name);
                }
                Some(_) => groups.ready += 1,
            }
        }
    }
    groups
}

/// Returns true if the pod is past its start, during which it may use more CPU than later.
fn counts_for_cpu(pod: &Pod, metric: &PodMetric, readiness: Readiness, now: Timestamp) -> bool {
    let started = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
    let (Some(ready), Some(started)) = (pods::condition(pod, "Ready"), started) else { return false };
    let changed = ready.last_transition_time.as_ref().map_or(Timestamp::MIN, |time| time.0);
    if later(started.0, readiness.cpu_initialization_period) > now {
        // As upstream: a whole window must lie after the last change of readiness.
        ready.status != "False" && metric.timestamp >= later(changed, metric.window)
    } else {
        // Not ready now, and its readiness has not changed since soon after its start: it was never ready.
        ready.status != "False" || later(started.0, readiness.initial_readiness_delay) <= changed
    }
}

fn later(time: Timestamp, by: Duration) -> Timestamp {
    let by = SignedDuration::try_from(by).unwrap_or(SignedDuration::MAX);
    time.checked_add(by).unwrap_or(Timestamp::MAX)
}

/// The request of each pod for a resource, in thousandths: of one container, or of the whole pod if `container` is
/// empty.
pub(super) fn requests(
    all: &[Arc<Pod>],
    container: &str,
    resource: &str,
) -> Result<BTreeMap<String, i64>, CalculationError> {
    all.iter()
        .map(|pod| {
            let name = pod.metadata.name.clone().unwrap_or_default();
            let request = match container.is_empty() && has_pod_level_requests(pod) {
                true => pod_level_request(pod, resource),
                false => request_of_containers(pod, container, resource),
            };
            Ok((name, request?))
        })
        .collect()
}

fn milli(quantity: &Quantity) -> i64 {
    Amount::parse(&quantity.0).map_or(0, |amount| amount.milli_value())
}

fn request<'a>(container: &'a Container, resource: &str) -> Option<&'a Quantity> {
    container.resources.as_ref()?.requests.as_ref()?.get(resource)
}

fn is_restartable(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

fn is_pod_level(resource: &str) -> bool {
    resource == "cpu" || resource == "memory" || resource.starts_with("hugepages-")
}

fn pod_requests(pod: &Pod) -> Option<&BTreeMap<String, Quantity>> {
    pod.spec.as_ref()?.resources.as_ref()?.requests.as_ref()
}

fn has_pod_level_requests(pod: &Pod) -> bool {
    pod_requests(pod).is_some_and(|requests| requests.keys().any(|name| is_pod_level(name)))
}

/// The pod's own request; for a resource that it does not name, the need of its containers. The overhead is added.
fn pod_level_request(pod: &Pod, resource: &str) -> Result<i64, CalculationError> {
    let missing = || CalculationError::MissingPodRequest {
        resource: resource.to_owned(),
        pod: pod.metadata.name.clone().unwrap_or_default(),
    };
    let spec = pod.spec.as_ref().ok_or_else(missing)?;
    let own = pod_requests(pod).and_then(|own| own.get(resource)).filter(|_| is_pod_level(resource));
    let request = match own {
        Some(own) => Some(milli(own)),
        None => need_of_containers(pod, resource),
    };
    let overhead = spec.overhead.as_ref().and_then(|overhead| overhead.get(resource)).map(milli);
    match (request, overhead) {
        (None, None) => Err(missing()),
        (request, overhead) => Ok(request.unwrap_or(0).saturating_add(overhead.unwrap_or(0))),
    }
}

/// The most that containers need at one time: those that run together, or one of the init containers before.
fn need_of_containers(pod: &Pod, resource: &str) -> Option<i64> {
    let spec = pod.spec.as_ref()?;
    let of = |container: &Container| request(container, resource).map(milli);
    let mut named = false;
    let mut amount = |container: &Container| {
        let found = of(container);
        named |= found.is_some();
        found.unwrap_or(0)
    };
    let mut running = spec.containers.iter().fold(0i64, |sum, c| sum.saturating_add(amount(c)));
    let (mut sidecars, mut starting) = (0i64, 0i64);
    for container in spec.init_containers.iter().flatten() {
        let need = amount(container);
        if is_restartable(container) {
            running = running.saturating_add(need);
            sidecars = sidecars.saturating_add(need);
            starting = starting.max(sidecars);
        } else {
            starting = starting.max(sidecars.saturating_add(need));
        }
    }
    named.then_some(running.max(starting))
}

/// The sum of the requests of all containers that run together, or the request of one.
fn request_of_containers(pod: &Pod, container: &str, resource: &str) -> Result<i64, CalculationError> {
    let name = || pod.metadata.name.clone().unwrap_or_default();
    let spec = pod.spec.as_ref();
    let running = spec.map(|spec| spec.containers.iter()).into_iter().flatten();
    let init = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
    let mut sum = 0i64;
    for candidate in running.chain(init.filter(|container| is_restartable(container))) {
        if !container.is_empty() && candidate.name != container {
            continue;
        }
        let found = request(candidate, resource).ok_or_else(|| CalculationError::MissingRequest {
            resource: resource.to_owned(),
            container: candidate.name.clone(),
            pod: name(),
        })?;
        sum = sum.saturating_add(milli(found));
        if !container.is_empty() {
            return Ok(sum);
        }
    }
    match container.is_empty() {
        true => Ok(sum),
        false => Err(CalculationError::NoContainer { container: container.to_owned(), pod: name() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn pod(value: Value) -> Arc<Pod> {
        Arc::new(ferrite_json::from_value(value).expect("a pod"))
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    #[test]
    fn pods_are_told_apart() {
        let started = at(1000).to_string();
        let running = |ready: &str, changed: i64| {
            json!({"phase": "Running", "startTime": started, "conditions": [
                {"type": "Ready", "status": ready, "lastTransitionTime": at(changed).to_string()}]})
        };
        let metric =
            |second: i64| PodMetric { timestamp: at(second), window: Duration::from_secs(30), value: 100 };
        let readiness = Readiness {
            cpu_initialization_period: Duration::from_secs(300),
            initial_readiness_delay: Duration::from_secs(30),
        };
        // Status; time of the figure; resource; now; group.
        type Row = (&'static str, Value, Option<i64>, &'static str, i64, &'static str);
        let rows: Vec<Row> = vec![
            ("pending", json!({"phase": "Pending"}), Some(1100), "cpu", 1100, "unready"),
            ("failed", json!({"phase": "Failed"}), Some(1100), "cpu", 1100, "ignored"),
            ("no figure", running("True", 1010), None, "cpu", 1100, "missing"),
            (
                "no condition",
                json!({"phase": "Running", "startTime": started}),
                Some(1100),
                "cpu",
                1100,
                "unready",
            ),
            ("no condition, memory", json!({"phase": "Running"}), Some(1100), "memory", 1100, "ready"),
            ("young, ready, old figure", running("True", 1010), Some(1039), "cpu", 1100, "unready"),
            ("young, ready, whole window", running("True", 1010), Some(1040), "cpu", 1100, "ready"),
            ("young, not ready", running("False", 1010), Some(1100), "cpu", 1100, "unready"),
            ("grown, never ready", running("False", 1010), Some(1400), "cpu", 1400, "unready"),
            ("grown, not ready any more", running("False", 1200), Some(1400), "cpu", 1400, "ready"),
            ("grown, ready", running("True", 1390), Some(1391), "cpu", 1400, "ready"),
        ];
        for (name, status, figure, resource, now, group_name) in rows {
            let all = [pod(json!({"metadata": {"name": "p"}, "status": status}))];
            let metrics: PodMetrics = figure.map(|at| ("p".to_owned(), metric(at))).into_iter().collect();
            let groups = group(&all, &metrics, resource, readiness, at(now));
            let found = match () {
                () if groups.ready == 1 => "ready",
                () if !groups.unready.is_empty() => "unready",
                () if !groups.missing.is_empty() => "missing",
                () => "ignored",
            };
            assert_eq!(found, group_name, "{name}");
        }
        let leaving = [pod(
            json!({"metadata": {"name": "p", "deletionTimestamp": started}, "status": running("True", 1010)}),
        )];
        assert_eq!(group(&leaving, &PodMetrics::new(), "cpu", readiness, at(1100)).ignored.len(), 1);
    }

    #[test]
    fn requests_are_summed_as_upstream_sums_them() {
        let container = |name: &str, cpu: Option<&str>| match cpu {
            Some(cpu) => json!({"name": name, "resources": {"requests": {"cpu": cpu}}}),
            None => json!({"name": name}),
        };
        let sidecar =
            json!({"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}});
        let init = json!({"name": "i", "resources": {"requests": {"cpu": "9"}}});
        let rows: Vec<(&str, Value, &str, Result<i64, &str>)> = vec![
            (
                "sum",
                json!({"containers": [container("a", Some("100m")), container("b", Some("2"))]}),
                "",
                Ok(2100),
            ),
            (
                "one",
                json!({"containers": [container("a", Some("100m")), container("b", None)]}),
                "a",
                Ok(100),
            ),
            (
                "sidecars count, init containers do not",
                json!({"containers": [container("a", Some("1"))], "initContainers": [sidecar, init]}),
                "",
                Ok(2000),
            ),
            (
                "one sidecar",
                json!({"containers": [container("a", None)], "initContainers": [sidecar]}),
                "s",
                Ok(1000),
            ),
            (
                "missing",
                json!({"containers": [container("a", Some("1")), container("b", None)]}),
                "",
                Err("missing request for cpu in container b of Pod p"),
            ),
            (
                "unknown",
                json!({"containers": [container("a", Some("1"))]}),
                "z",
                Err("container z not found in Pod p"),
            ),
            (
                "of the pod",
                json!({"resources": {"requests": {"cpu": "5"}}, "containers": [container("a", Some("1"))]}),
                "",
                Ok(5000),
            ),
            (
                "of the pod, overhead",
                json!({"overhead": {"cpu": "250m"}, "resources": {"requests": {"cpu": "5"}}, "containers": [container("a", None)]}),
                "",
                Ok(5250),
            ),
            (
                "one container of such a pod",
                json!({"resources": {"requests": {"cpu": "5"}}, "containers": [container("a", Some("1"))]}),
                "a",
                Ok(1000),
            ),
            (
                "of the pod, another resource",
                json!({"resources": {"requests": {"memory": "5"}}, "containers": [container("a", Some("1"))], "initContainers": [sidecar, init]}),
                "",
                Ok(10000),
            ),
            (
                "of the pod, nowhere",
                json!({"resources": {"requests": {"memory": "5"}}, "containers": [container("a", None)]}),
                "",
                Err("missing pod-level request for cpu in Pod p"),
            ),
        ];
        for (name, spec, container, expected) in rows {
            let all = [pod(json!({"metadata": {"name": "p"}, "spec": spec}))];
            let found =
                requests(&all, container, "cpu").map(|all| all["p"]).map_err(|error| error.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{name}");
        }
    }
}
