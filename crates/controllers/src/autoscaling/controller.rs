//! Looks at each HorizontalPodAutoscaler once in every sync period and scales its target.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_api::quantity::Quantity as Amount;
use ferrite_api::selector::LabelSelector;
use ferrite_client::{Api, Change, EventRecorder, EventType, Informer, ObjectKey, WorkQueue, message_of};
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::{
    HPAScalingRules, HorizontalPodAutoscaler, HorizontalPodAutoscalerBehavior, HorizontalPodAutoscalerStatus,
    MetricStatus,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::PostParams;
use tokio::time::Instant;

use super::AutoscalingConfig;
use super::conditions::{self, ABLE_TO_SCALE, SCALED_TO_ZERO, SCALING_ACTIVE, SCALING_LIMITED};
use super::limits::{Behavior, Bounds, History};
use super::measures::{self, Action, Fault};
use super::metrics::MetricsClient;
use super::pods::Readiness;
use super::proposal::{Failure, Proposal, Target, selected};
use super::replicas::Tolerances;
use super::scale::{Scale, ScaleError};
use crate::kinds::Discovery;
use crate::{Context, pods};

const NAME: &str = "horizontal-pod-autoscaler-controller";
/// The name that upstream's events carry.
const COMPONENT: &str = "horizontal-pod-autoscaler";

/// The controller's state for one autoscaler.
#[derive(Debug)]
struct Known {
    history: History,
    /// Selects nothing until the target's scale is known.
    selector: LabelSelector,
}

struct Autoscalers {
    client: Client,
    autoscalers: Informer<HorizontalPodAutoscaler>,
    pods: Informer<Pod>,
    recorder: EventRecorder,
    discovery: Discovery,
    metrics: MetricsClient,
    config: AutoscalingConfig,
    started: Instant,
    known: Mutex<HashMap<ObjectKey, Known>>,
}

pub(crate) fn start(context: &Context) {
    let config = context.config.autoscaling;
    let controller = Arc::new(Autoscalers {
        client: context.client.clone(),
        autoscalers: context.informers.get(),
        pods: context.informers.get(),
        recorder: context.events.recorder(COMPONENT, None),
        discovery: Discovery::new(context.client.clone(), config.sync_period),
        metrics: MetricsClient::new(context.client.clone()),
        config,
        started: Instant::now(),
        known: Mutex::default(),
    });
    controller.pods.add_index(pods::BY_LABEL, pods::label_index);
    let woken = controller.clone();
    let kit = context.declared(NAME, config.workers.max(1), ferrite_client::RateLimits::default());
    kit.watches(&controller.autoscalers, move |change, queue| woken.changed(change, queue))
        .reads(&controller.pods)
        .run_with(controller.clone(), |controller, key| async move {
            Ok::<_, NoError>(controller.sync(&key).await)
        });
}

/// A sync never fails: it reports problems in conditions and events, and runs again in any case.
#[derive(Debug, thiserror::Error)]
enum NoError {}

/// The result of syncing an autoscaler: the status to write.
struct Outcome {
    status: HorizontalPodAutoscalerStatus,
    /// Told in the log; users see it in events.
    problem: Option<String>,
    fault: Fault,
    /// The target was scaled in this direction.
    action: Action,
    /// The number of replicas that was decided on, if one was.
    desired: Option<i32>,
}

impl Outcome {
    fn failed(status: HorizontalPodAutoscalerStatus, problem: String) -> Self {
        Self { status, problem: Some(problem), fault: Fault::Internal, action: Action::None, desired: None }
    }
}

impl Autoscalers {
    /// As upstream: every sync is one sync period after its trigger, and several triggers are one.
    fn changed(&self, change: &Change<HorizontalPodAutoscaler>, queue: &WorkQueue<ObjectKey>) {
        let key = ObjectKey::of(&**change.object());
        if matches!(change, Change::Deleted(_)) {
            // Its selector must not make others ambiguous, and its history is not that of one made later.
            if self.known().remove(&key).is_some() {
                measures::deleted(&key);
            }
            return;
        }
        let unknown = || Known { history: History::default(), selector: LabelSelector::nothing() };
        self.known().entry(key.clone()).or_insert_with(|| {
            measures::added();
            unknown()
        });
        queue.add_after(key, self.config.sync_period);
    }

    fn known(&self) -> MutexGuard<'_, HashMap<ObjectKey, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` with the history of an autoscaler, if it is still there.
    fn with_history<T>(&self, key: &ObjectKey, f: impl FnOnce(&mut History, Duration) -> T) -> T {
        let now = self.started.elapsed();
        match self.known().get_mut(key) {
            Some(known) => f(&mut known.history, now),
            None => f(&mut History::default(), now),
        }
    }

    fn warn(&self, autoscaler: &HorizontalPodAutoscaler, reason: &str, message: impl Into<String>) {
        self.recorder.event_for(autoscaler, EventType::Warning, reason, message);
    }

    async fn sync(&self, key: &ObjectKey) -> Option<Duration> {
        let autoscaler = self.autoscalers.get(key)?;
        let before = autoscaler.status.clone().unwrap_or_default();
        let began = Instant::now();
        let outcome = self.look(key, &autoscaler, before.clone()).await;
        let mut fault = outcome.fault;
        if let Some(problem) = outcome.problem {
            tracing::warn!(autoscaler = %key, problem, "cannot scale as wanted");
        }
        if let Some(desired) = outcome.desired {
            measures::desires(key, desired);
        }
        if outcome.status != before {
            let mut new = (*autoscaler).clone();
            new.status = Some(outcome.status);
            let api: Api<HorizontalPodAutoscaler> = Api::namespaced(self.client.clone(), &key.namespace);
            if let Err(error) = api.replace_status(&key.name, &PostParams::default(), &new).await {
                let message = message_of(&error);
                tracing::warn!(autoscaler = %key, error = message, "cannot write the status");
                self.warn(&autoscaler, "FailedUpdateStatus", message);
                fault = Fault::Internal;
            }
        }
        measures::looked(outcome.action, fault, began.elapsed());
        Some(self.config.sync_period)
    }

    /// One look: reads the scale and the metrics, decides, scales.
    async fn look(
        &self,
        key: &ObjectKey,
        autoscaler: &HorizontalPodAutoscaler,
        mut status: HorizontalPodAutoscalerStatus,
    ) -> Outcome {
        let spec = &autoscaler.spec;
        let target = &spec.scale_target_ref;
        let reference = format!("{}/{}/{}", target.kind, key.namespace, target.name);
        let mut told = status.conditions.take().unwrap_or_default();
        let now = Timestamp::now();
        let scale = match Scale::get(&self.client, &self.discovery, &key.namespace, target).await {
            Ok(scale) => scale,
            Err(error) => {
                let fault = match error {
                    ScaleError::ApiVersion(_) => Fault::Spec,
                    _ => Fault::Internal,
                };
                let error = error.to_string();
                self.warn(autoscaler, "FailedGetScale", error.clone());
                let message =
                    format!("the HPA controller was unable to get the target's current scale: {error}");
                conditions::set(&mut told, ABLE_TO_SCALE, false, ("FailedGetScale", &message), now);
                status.conditions = Some(told);
                let problem = format!("failed to query scale subresource for {reference}: {error}");
                return Outcome { fault, ..Outcome::failed(status, problem) };
            }
        };
        let got = ("SucceededGetScale", "the HPA controller was able to get the target's current scale");
        conditions::set(&mut told, ABLE_TO_SCALE, true, got, now);
        let current = scale.spec_replicas;
        self.with_history(key, |history, now| history.begin(current, now));
        let behavior = spec.behavior.as_ref();
        let behavior = behavior.map(|b| Behavior::of(b, self.config.downscale_stabilization));
        let bounds = Bounds { min: spec.min_replicas.unwrap_or(1), max: spec.max_replicas, current };

        let (mut desired, mut reason, mut problem) = (current, String::new(), None);
        let mut statuses: Vec<MetricStatus> = Vec::new();
        if current == 0 {
            let disabled =
                ("ScalingDisabled", "scaling is disabled since the replica count of the target is zero");
            conditions::set(&mut told, SCALING_ACTIVE, false, disabled, now);
            conditions::remove(&mut told, SCALED_TO_ZERO);
        } else if current > bounds.max {
            "Current number of replicas above Spec.MaxReplicas".clone_into(&mut reason);
            desired = bounds.max;
        } else if current < bounds.min {
            "Current number of replicas below Spec.MinReplicas".clone_into(&mut reason);
            desired = bounds.min;
        } else {
            let found = self.recommend(key, autoscaler, &scale).await;
            statuses = found.statuses;
            match found.result {
                Err(failed) => {
                    let why = (failed.reason, failed.message.as_str());
                    conditions::set(&mut told, SCALING_ACTIVE, false, why, now);
                    self.warn(autoscaler, "FailedComputeMetricsReplicas", failed.error.clone());
                    let problem = format!(
                        "failed to compute desired number of replicas based on listed metrics for {reference}: {}",
                        failed.error
                    );
                    let status = renewed(status, told, current, None, statuses);
                    return Outcome::failed(status, problem);
                }
                Ok(recommended) => {
                    let message = format!(
                        "the HPA was able to successfully calculate a replica count from {}",
                        recommended.metric
                    );
                    conditions::set(&mut told, SCALING_ACTIVE, true, ("ValidMetricFound", &message), now);
                    problem = recommended.problem;
                    let wanted = recommended.replicas.max(0);
                    if wanted > current {
                        reason = format!("{} above target", recommended.metric);
                    } else if wanted < current {
                        "All metrics below target".clone_into(&mut reason);
                    }
                    let normalized = self.with_history(key, |history, now| match &behavior {
                        None => history.normalize(bounds, wanted, self.config.downscale_stabilization, now),
                        Some(behavior) => history.normalize_with(behavior, bounds, wanted, now),
                    });
                    conditions::set(&mut told, ABLE_TO_SCALE, true, normalized.able, now);
                    conditions::set(&mut told, SCALING_LIMITED, normalized.limited, normalized.limit, now);
                    desired = normalized.replicas;
                }
            }
        }
        if desired == current {
            let status = renewed(status, told, current, Some(current), statuses);
            let fault = if problem.is_some() { Fault::Internal } else { Fault::None };
            return Outcome { status, problem, fault, action: Action::None, desired: Some(current) };
        }
        if let Err(error) = scale.set(&self.client, desired).await {
            let error = error.to_string();
            let message = format!("New size: {desired}; reason: {reason}; error: {error}");
            self.warn(autoscaler, "FailedRescale", message);
            let message = format!("the HPA controller was unable to update the target scale: {error}");
            conditions::set(&mut told, ABLE_TO_SCALE, false, ("FailedUpdateScale", &message), now);
            let status = renewed(status, told, current, None, statuses);
            return Outcome::failed(status, format!("failed to rescale {reference}: {error}"));
        }
        let message = format!("the HPA controller was able to update the target scale to {desired}");
        conditions::set(&mut told, ABLE_TO_SCALE, true, ("SucceededRescale", &message), now);
        conditions::remove(&mut told, SCALED_TO_ZERO);
        let message = format!("New size: {desired}; reason: {reason}");
        self.recorder.event_for(autoscaler, EventType::Normal, "SuccessfulRescale", message);
        self.with_history(key, |history, now| history.scaled(behavior.as_ref(), current, desired, now));
        tracing::info!(autoscaler = %key, current, desired, reason, "rescaled");
        let mut status = renewed(status, told, current, Some(desired), statuses);
        status.last_scale_time = Some(Time(Timestamp::from_second(now.as_second()).unwrap_or(now)));
        let fault = if problem.is_some() { Fault::Internal } else { Fault::None };
        Outcome { status, problem, fault, action: Action::between(current, desired), desired: Some(desired) }
    }

    /// Asks every metric and takes the highest number.
    async fn recommend(
        &self,
        key: &ObjectKey,
        autoscaler: &HorizontalPodAutoscaler,
        scale: &Scale,
    ) -> Recommended {
        let specs = autoscaler.spec.metrics.as_deref().unwrap_or_default();
        let (selector, pods) = match self.check_selector(key, scale) {
            Ok(selected) => selected,
            Err(invalid) => {
                self.warn(autoscaler, invalid.event, invalid.error.clone());
                let failed =
                    Failed { reason: invalid.reason, message: invalid.message, error: invalid.error };
                return Recommended { statuses: Vec::new(), result: Err(failed) };
            }
        };
        let kinds = self.discovery.kinds().await.unwrap_or_default();
        let target = Target {
            metrics: &self.metrics,
            kinds: &kinds,
            pods: &pods,
            namespace: &key.namespace,
            selector: &selector,
            spec_replicas: scale.spec_replicas,
            status_replicas: scale.status_replicas,
            tolerances: tolerances(self.config.tolerance, autoscaler.spec.behavior.as_ref()),
            readiness: Readiness {
                cpu_initialization_period: self.config.cpu_initialization_period,
                initial_readiness_delay: self.config.initial_readiness_delay,
            },
            now: Timestamp::now(),
        };
        let mut outcomes = Vec::with_capacity(specs.len());
        for spec in specs {
            let began = Instant::now();
            let outcome = target.propose(spec).await;
            let (action, fault) = match &outcome {
                Ok(proposal) => (Action::between(scale.spec_replicas, proposal.replicas), Fault::None),
                Err(failure) if failure.reason == "InvalidMetricSourceType" => (Action::None, Fault::Spec),
                Err(_) => (Action::None, Fault::Internal),
            };
            measures::computed(action, fault, &spec.type_, began.elapsed());
            if let Err(failure) = &outcome {
                self.warn(autoscaler, failure.reason, failure.error.to_string());
            }
            outcomes.push(outcome);
        }
        combine(outcomes, scale.spec_replicas)
    }

    /// The selector of a target and its pods, which no other autoscaler may have, too.
    fn check_selector(
        &self,
        key: &ObjectKey,
        scale: &Scale,
    ) -> Result<(LabelSelector, Vec<Arc<Pod>>), InvalidSelector> {
        let text = &scale.selector;
        if text.is_empty() {
            return Err(InvalidSelector {
                event: "SelectorRequired",
                reason: "InvalidSelector",
                error: "selector is required".to_owned(),
                message: "the HPA target's scale is missing a selector".to_owned(),
            });
        }
        let selector = LabelSelector::parse(text).map_err(|error| {
            let error =
                format!("couldn't convert selector into a corresponding internal selector object: {error}");
            InvalidSelector {
                event: "InvalidSelector",
                reason: "InvalidSelector",
                message: error.clone(),
                error,
            }
        })?;
        let pods = selected(&self.pods, &key.namespace, &selector);
        let mut known = self.known();
        if let Some(own) = known.get_mut(key) {
            own.selector = selector.clone();
        }
        let mut selecting: Vec<&ObjectKey> = known
            .iter()
            .filter(|(other, _)| other.namespace == key.namespace)
            .filter(|(_, other)| !other.selector.selects_nothing())
            .filter(|(_, other)| {
                let none = std::collections::BTreeMap::new();
                pods.iter().any(|pod| other.selector.matches(pod.metadata.labels.as_ref().unwrap_or(&none)))
            })
            .map(|(other, _)| other)
            .collect();
        if selecting.len() > 1 {
            selecting.sort();
            let names: Vec<String> =
                selecting.iter().map(|key| format!("{{{} {}}}", key.name, key.namespace)).collect();
            let error =
                format!("pods by selector {text} are controlled by multiple HPAs: [{}]", names.join(" "));
            return Err(InvalidSelector {
                event: "AmbiguousSelector",
                reason: "AmbiguousSelector",
                message: error.clone(),
                error,
            });
        }
        drop(known);
        Ok((selector, pods))
    }
}

/// A selector that nothing can be scaled by.
struct InvalidSelector {
    /// Reason of the event.
    event: &'static str,
    /// Reason of the condition.
    reason: &'static str,
    error: String,
    /// Message of the condition.
    message: String,
}

/// The outcome of all metrics together.
#[derive(Debug)]
pub(super) struct Recommended {
    pub(super) statuses: Vec<MetricStatus>,
    pub(super) result: Result<Recommendation, Failed>,
}

#[derive(Debug)]
pub(super) struct Recommendation {
    pub(super) replicas: i32,
    /// The metric that called for it.
    pub(super) metric: String,
    /// Set if other metrics failed.
    pub(super) problem: Option<String>,
}

/// No number can be recommended.
#[derive(Debug)]
pub(super) struct Failed {
    /// Of the condition ScalingActive.
    pub(super) reason: &'static str,
    pub(super) message: String,
    pub(super) error: String,
}

/// Takes the highest number that a metric calls for. As upstream: nothing is scaled down while a metric fails, since it
/// might have called for more.
pub(super) fn combine(outcomes: Vec<Result<Proposal, Failure>>, current: i32) -> Recommended {
    let total = outcomes.len();
    let mut statuses = Vec::with_capacity(total);
    let mut best: Option<(i32, String)> = None;
    let mut failures = Vec::new();
    for outcome in outcomes {
        match outcome {
            Ok(proposal) => {
                statuses.push(proposal.status);
                // As upstream: a later metric replaces one that calls for none.
                if best.as_ref().is_none_or(|(most, _)| *most == 0 || proposal.replicas > *most) {
                    best = Some((proposal.replicas, proposal.metric));
                }
            }
            Err(failure) => {
                statuses.push(MetricStatus::default());
                failures.push(failure);
            }
        }
    }
    let error = failures.first().map(|first| {
        let (invalid, first) = (failures.len(), first.in_context());
        format!("invalid metrics ({invalid} invalid out of {total}), first error is: {first}")
    });
    let result = match (best, failures.first(), error) {
        (Some((replicas, metric)), None, problem) => Ok(Recommendation { replicas, metric, problem }),
        (Some((replicas, metric)), Some(_), problem) if replicas >= current => {
            Ok(Recommendation { replicas, metric, problem })
        }
        (_, Some(first), error) => Err(Failed {
            reason: first.reason,
            message: format!("the HPA was unable to compute the replica count: {}", first.error),
            error: error.unwrap_or_default(),
        }),
        // The API server gives every autoscaler a metric.
        (None, None, _) => Err(Failed {
            reason: "InvalidMetricSourceType",
            message: "the HPA was unable to compute the replica count: no metric is specified".to_owned(),
            error: "no metric is specified".to_owned(),
        }),
    };
    Recommended { statuses, result }
}

/// The tolerance of each direction: that of the autoscaler, or else the controller's.
pub(super) fn tolerances(default: f64, behavior: Option<&HorizontalPodAutoscalerBehavior>) -> Tolerances {
    let own = |rules: Option<&HPAScalingRules>| {
        let tolerance = Amount::parse(&rules?.tolerance.as_ref()?.0).ok()?;
        #[expect(clippy::cast_precision_loss, reason = "tolerances are small")]
        Some(tolerance.milli_value() as f64 / 1000.0)
    };
    Tolerances {
        down: own(behavior.and_then(|b| b.scale_down.as_ref())).unwrap_or(default),
        up: own(behavior.and_then(|b| b.scale_up.as_ref())).unwrap_or(default),
    }
}

/// The status with its conditions and numbers brought up to date. Without `desired`, that number stays.
fn renewed(
    status: HorizontalPodAutoscalerStatus,
    conditions: Vec<k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscalerCondition>,
    current: i32,
    desired: Option<i32>,
    metrics: Vec<MetricStatus>,
) -> HorizontalPodAutoscalerStatus {
    HorizontalPodAutoscalerStatus {
        conditions: Some(conditions),
        current_metrics: (!metrics.is_empty()).then_some(metrics),
        // As the API: zero is not written.
        current_replicas: (current != 0).then_some(current),
        desired_replicas: desired.unwrap_or(status.desired_replicas),
        last_scale_time: status.last_scale_time,
        observed_generation: None,
    }
}
