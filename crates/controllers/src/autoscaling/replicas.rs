//! The number of replicas that the figures of one metric call for. Everything here is arithmetic on values.
//!
//! Figures and targets are in thousandths. They come from servers that anybody may have written: sums do not overflow,
//! and a quotient that is out of range becomes the nearest number in range.

use std::collections::BTreeMap;

use super::pods::{PodGroups, PodMetric, PodMetrics};

/// The reason why figures lead to no number, in upstream's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum CalculationError {
    #[error("no pods returned by selector while calculating replica count")]
    NoPods,
    #[error("did not receive metrics for targeted pods (pods might be unready)")]
    NoMetrics,
    #[error("no metrics returned matched known pods")]
    NoMatch,
    #[error("missing request for {resource} in container {container} of Pod {pod}")]
    MissingRequest { resource: String, container: String, pod: String },
    #[error("missing pod-level request for {resource} in Pod {pod}")]
    MissingPodRequest { resource: String, pod: String },
    #[error("container {container} not found in Pod {pod}")]
    NoContainer { container: String, pod: String },
    #[error("unable to calculate ready pods: {0}")]
    ReadyPods(#[source] Box<CalculationError>),
}

/// Allowed deviation of usage from its target before scaling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tolerances {
    pub(super) down: f64,
    pub(super) up: f64,
}

impl Tolerances {
    fn include(self, ratio: f64) -> bool {
        (1.0 - self.down) <= ratio && ratio <= (1.0 + self.up)
    }
}

/// A number of replicas and the usage it follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Calculated {
    pub(super) replicas: i32,
    /// The average of the pods, or the whole value where the target is one.
    pub(super) usage: i64,
    /// In percent of the requests, where the target is such a percentage.
    pub(super) utilization: Option<i32>,
}

/// Casts of floats saturate, and no number becomes zero.
#[expect(clippy::cast_possible_truncation, reason = "the cast saturates")]
fn ceil(number: f64) -> i32 {
    number.ceil() as i32
}

#[expect(clippy::cast_precision_loss, reason = "as upstream: ratios are floating-point numbers")]
fn float(number: i64) -> f64 {
    number as f64
}

#[expect(clippy::cast_precision_loss, reason = "no cluster has 2^52 pods")]
fn count(number: usize) -> f64 {
    number as f64
}

fn clamped<T: TryFrom<i128>>(number: i128, least: T, most: T) -> T {
    T::try_from(number).unwrap_or(if number < 0 { least } else { most })
}

/// The ratio of usage to a target percentage of the requests, the percentage, and the average usage.
fn utilization_ratio(
    metrics: &PodMetrics,
    requests: &BTreeMap<String, i64>,
    target: i32,
) -> Result<(f64, i32, i64), CalculationError> {
    let known = metrics.iter().filter_map(|(pod, metric)| Some((metric.value, *requests.get(pod)?)));
    let (mut used, mut requested, mut entries) = (0i128, 0i128, 0i128);
    for (value, request) in known {
        used += i128::from(value);
        requested += i128::from(request);
        entries += 1;
    }
    if requested == 0 {
        return Err(CalculationError::NoMatch);
    }
    let percentage = clamped(used * 100 / requested, i32::MIN, i32::MAX);
    let average = clamped(used / entries, i64::MIN, i64::MAX);
    Ok((f64::from(percentage) / f64::from(target), percentage, average))
}

/// The ratio of the average to a target value, and the average.
fn usage_ratio(metrics: &PodMetrics, target: i64) -> (f64, i64) {
    let sum: i128 = metrics.values().map(|metric| i128::from(metric.value)).sum();
    let entries = i128::try_from(metrics.len()).unwrap_or(1).max(1);
    let average = clamped(sum / entries, i64::MIN, i64::MAX);
    (float(average) / float(target), average)
}

/// The figures of one metric of the pods of a target.
#[derive(Debug)]
pub(super) struct PodFigures {
    pub(super) current: i32,
    pub(super) tolerances: Tolerances,
    pub(super) groups: PodGroups,
    metrics: PodMetrics,
}

impl PodFigures {
    /// Leaves only the figures that count.
    pub(super) fn new(
        current: i32,
        tolerances: Tolerances,
        groups: PodGroups,
        mut metrics: PodMetrics,
    ) -> Result<Self, CalculationError> {
        metrics.retain(|pod, _| !groups.ignored.contains(pod) && !groups.unready.contains(pod));
        if metrics.is_empty() {
            return Err(CalculationError::NoMetrics);
        }
        Ok(Self { current, tolerances, groups, metrics })
    }

    /// For a target in percent of the requests.
    pub(super) fn utilization(
        self,
        requests: &BTreeMap<String, i64>,
        target: i32,
    ) -> Result<Calculated, CalculationError> {
        let (ratio, percentage, usage) = utilization_ratio(&self.metrics, requests, target)?;
        // As upstream: on the way down, a pod without a figure uses its whole request, or the target if that is more.
        let fallback = |pod: &str| {
            let request = i128::from(requests.get(pod).copied().unwrap_or(0));
            clamped(request * i128::from(target.max(100)) / 100, i64::MIN, i64::MAX)
        };
        let again = |metrics: &PodMetrics| Ok(utilization_ratio(metrics, requests, target)?.0);
        let replicas = self.replicas(ratio, fallback, again)?;
        Ok(Calculated { replicas, usage, utilization: Some(percentage) })
    }

    /// For a target that is an average value.
    pub(super) fn average(self, target: i64) -> Result<Calculated, CalculationError> {
        let (ratio, usage) = usage_ratio(&self.metrics, target);
        let again = |metrics: &PodMetrics| Ok(usage_ratio(metrics, target).0);
        // As upstream: on the way down, a pod without a figure uses exactly the target.
        let replicas = self.replicas(ratio, |_| target, again)?;
        Ok(Calculated { replicas, usage, utilization: None })
    }

    /// Missing figures are replaced by those that dampen the change; a change that this turns around does not happen.
    fn replicas(
        mut self,
        ratio: f64,
        fallback: impl Fn(&str) -> i64,
        again: impl Fn(&PodMetrics) -> Result<f64, CalculationError>,
    ) -> Result<i32, CalculationError> {
        let with_unready = !self.groups.unready.is_empty() && ratio > 1.0;
        if !with_unready && self.groups.missing.is_empty() {
            return Ok(match self.tolerances.include(ratio) {
                true => self.current,
                false => ceil(ratio * count(self.groups.ready)),
            });
        }
        let assumed = |value: i64| PodMetric {
            timestamp: jiff::Timestamp::UNIX_EPOCH,
            window: std::time::Duration::ZERO,
            value,
        };
        for pod in &self.groups.missing {
            let value = match () {
                () if ratio < 1.0 => fallback(pod),
                () if ratio > 1.0 => 0,
                () => continue,
            };
            self.metrics.insert(pod.clone(), assumed(value));
        }
        if with_unready {
            for pod in &self.groups.unready {
                self.metrics.insert(pod.clone(), assumed(0));
            }
        }
        let new = again(&self.metrics)?;
        let turned = (ratio < 1.0 && new > 1.0) || (ratio > 1.0 && new < 1.0);
        if self.tolerances.include(new) || turned {
            return Ok(self.current);
        }
        let replicas = ceil(new * count(self.metrics.len()));
        let against = (new < 1.0 && replicas > self.current) || (new > 1.0 && replicas < self.current);
        Ok(if against { self.current } else { replicas })
    }
}

/// For a whole value of an object or of an external metric: ready pods in proportion. `ready` is asked for only where
/// it counts.
pub(super) fn value(
    current: i32,
    tolerances: Tolerances,
    usage: i64,
    target: i64,
    ready: impl FnOnce() -> Result<usize, CalculationError>,
) -> Result<Calculated, CalculationError> {
    let ratio = float(usage) / float(target);
    let replicas = match current {
        0 => ceil(ratio),
        _ if tolerances.include(ratio) => current,
        _ => ceil(ratio * count(ready().map_err(|error| CalculationError::ReadyPods(Box::new(error)))?)),
    };
    Ok(Calculated { replicas, usage, utilization: None })
}

/// For a value that is to be shared by the replicas: `replicas` is the number that the target reports.
pub(super) fn average_value(replicas: i32, tolerances: Tolerances, usage: i64, target: i64) -> Calculated {
    let (usage_now, target) = (float(usage), float(target));
    let wanted = match tolerances.include(usage_now / (target * f64::from(replicas))) {
        true => replicas,
        false => ceil(usage_now / target),
    };
    let average = match (usage, replicas) {
        // Too much to be divided, as upstream; and nobody to share with.
        (i64::MAX, _) | (_, 0) => usage,
        _ => {
            let (usage, replicas) = (i128::from(usage), i128::from(replicas));
            clamped(
                usage.div_euclid(replicas) + i128::from(usage.rem_euclid(replicas) != 0),
                i64::MIN,
                i64::MAX,
            )
        }
    };
    Calculated { replicas: wanted, usage: average, utilization: None }
}

/// The sum of the values of an external metric.
pub(super) fn sum(values: &[i64]) -> i64 {
    clamped(values.iter().map(|value| i128::from(*value)).sum(), i64::MIN, i64::MAX)
}
