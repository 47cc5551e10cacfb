//! From one metric of an autoscaler's specification to a proposal: its figures are fetched, then calculated with.

use std::sync::Arc;

use ferrite_api::quantity::{Format, Quantity as Amount};
use ferrite_api::selector::{LabelSelector, SelectorError};
use ferrite_client::Informer;
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::{
    ContainerResourceMetricStatus, ExternalMetricSource, ExternalMetricStatus, MetricSpec, MetricStatus,
    MetricTarget, MetricValueStatus, ObjectMetricSource, ObjectMetricStatus, PodsMetricSource,
    PodsMetricStatus, ResourceMetricStatus,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;

use super::metrics::{MetricsClient, MetricsError};
use super::pods::{self as groups, PodMetrics, Readiness};
use super::replicas::{self, Calculated, CalculationError, PodFigures, Tolerances};
use crate::kinds::Kinds;
use crate::pods;

/// The number of replicas that one metric calls for.
#[derive(Debug)]
pub(super) struct Proposal {
    pub(super) replicas: i32,
    /// The metric as conditions and events name it.
    pub(super) metric: String,
    pub(super) status: MetricStatus,
}

/// The reason why a metric calls for no number.
#[derive(Debug)]
pub(super) struct Failure {
    /// Of the event and of the condition ScalingActive.
    pub(super) reason: &'static str,
    /// The message of the event; the condition's message contains it.
    pub(super) error: ProposalError,
    /// Says which metric it is about.
    prefix: String,
}

impl Failure {
    pub(super) fn new(reason: &'static str, error: ProposalError, prefix: impl Into<String>) -> Self {
        Self { reason, error, prefix: prefix.into() }
    }

    /// The failure among those of all metrics.
    pub(super) fn in_context(&self) -> String {
        format!("{}{}", self.prefix, self.error)
    }
}

/// In upstream's words.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProposalError {
    #[error("unable to get metrics for resource {resource}: {source}")]
    Resource { resource: String, source: MetricsError },
    #[error("unable to get metric {metric}: {source}")]
    Pods { metric: String, source: MetricsError },
    // Upstream puts the parts into this odd order.
    #[error("unable to get metric {metric}: {kind} on {namespace} {name}/{source}")]
    Object { metric: String, kind: String, namespace: String, name: String, source: MetricsError },
    #[error("unable to get external metric {namespace}/{metric}/{selector}: {source}")]
    External { namespace: String, metric: String, selector: String, source: MetricsError },
    #[error(transparent)]
    Calculation(#[from] CalculationError),
    #[error(transparent)]
    Selector(#[from] SelectorError),
    #[error("failed to get {what}: {source}")]
    During { what: String, source: Box<ProposalError> },
    #[error("invalid {0} metric source: neither {1} was set")]
    NoTarget(&'static str, &'static str),
    #[error("unknown metric source type {0:?}")]
    UnknownType(String),
}

impl ProposalError {
    /// Returns true if fetching the metric failed, false if the specification is invalid.
    fn is_of_metric(&self) -> bool {
        !matches!(self, Self::NoTarget(..) | Self::UnknownType(_))
    }
}

fn during(what: String) -> impl FnOnce(ProposalError) -> ProposalError {
    move |source| ProposalError::During { what, source: Box::new(source) }
}

/// Everything that a proposal follows from besides its metric.
pub(super) struct Target<'a> {
    pub(super) metrics: &'a MetricsClient,
    pub(super) kinds: &'a Kinds,
    pub(super) pods: &'a [Arc<Pod>],
    pub(super) namespace: &'a str,
    pub(super) selector: &'a LabelSelector,
    /// Of the target's specification and of its status.
    pub(super) spec_replicas: i32,
    pub(super) status_replicas: i32,
    pub(super) tolerances: Tolerances,
    pub(super) readiness: Readiness,
    pub(super) now: Timestamp,
}

/// The pods of a namespace that a selector selects, found by an index of labels.
pub(super) fn selected(pods: &Informer<Pod>, namespace: &str, selector: &LabelSelector) -> Vec<Arc<Pod>> {
    use ferrite_api::selector::Operator;
    let equal = selector.requirements().iter().filter_map(|requirement| {
        let is_equal =
            matches!(requirement.operator, Operator::Equals | Operator::DoubleEquals | Operator::In);
        match requirement.values.as_slice() {
            [value] if is_equal => Some((&requirement.key, value)),
            _ => None,
        }
    });
    let mut found = pods::candidates(pods, namespace, equal);
    found.retain(|pod| selector.matches(&pod.metadata.labels.clone().unwrap_or_default()));
    found
}

fn milli(quantity: &Quantity) -> i64 {
    Amount::parse(&quantity.0).map_or(0, |amount| amount.milli_value())
}

fn quantity(milli: i64) -> Quantity {
    Quantity(Amount::from_milli(milli, Format::DecimalSi).to_string())
}

/// As upstream: memory is reported in powers of two.
fn resource_quantity(resource: &str, milli: i64) -> Quantity {
    let format = if resource == "memory" { Format::BinarySi } else { Format::DecimalSi };
    Quantity(Amount::from_milli(milli, format).to_string())
}

/// A selector as Go prints the typed form, which is part of the names of metrics.
fn printed(selector: Option<&meta::LabelSelector>) -> String {
    let Some(selector) = selector else { return "nil".to_owned() };
    let labels = selector.match_labels.iter().flatten();
    let labels: String = labels.map(|(key, value)| format!("{key}: {value},")).collect();
    let expressions = selector.match_expressions.iter().flatten();
    let expressions: String = expressions
        .map(|expression| {
            let values = expression.values.clone().unwrap_or_default().join(" ");
            let (key, operator) = (&expression.key, &expression.operator);
            format!("LabelSelectorRequirement{{Key:{key},Operator:{operator},Values:[{values}],}},")
        })
        .collect();
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )
}

impl Target<'_> {
    /// Computes the replica count that a metric calls for.
    pub(super) async fn propose(&self, spec: &MetricSpec) -> Result<Proposal, Failure> {
        let unknown =
            || Failure::new("InvalidMetricSourceType", ProposalError::UnknownType(spec.type_.clone()), "");
        match (spec.type_.as_str(), spec) {
            ("Resource", MetricSpec { resource: Some(source), .. }) => {
                let name = &source.name;
                let proposal = self.resource(name, "", &source.target).await.map_err(|error| {
                    Failure::new(
                        "FailedGetResourceMetric",
                        error,
                        format!("failed to get {name} resource metric value: "),
                    )
                })?;
                let metric = match proposal.0.utilization {
                    Some(_) => format!("{name} resource utilization (percentage of request)"),
                    None => format!("{name} resource"),
                };
                let status = ResourceMetricStatus { name: name.clone(), current: proposal.1 };
                let status = MetricStatus { resource: Some(status), ..typed(spec) };
                Ok(Proposal { replicas: proposal.0.replicas, metric, status })
            }
            ("ContainerResource", MetricSpec { container_resource: Some(source), .. }) => {
                let (name, container) = (&source.name, &source.container);
                let found = self.resource(name, container, &source.target).await;
                let proposal = found.map_err(|error| {
                    Failure::new(
                        "FailedGetContainerResourceMetric",
                        error,
                        format!("failed to get {container} container metric value: "),
                    )
                })?;
                let metric = match proposal.0.utilization {
                    Some(_) => format!("{name} container resource utilization (percentage of request)"),
                    None => format!("{name} resource"),
                };
                let status = ContainerResourceMetricStatus {
                    name: name.clone(),
                    container: container.clone(),
                    current: proposal.1,
                };
                let status = MetricStatus { container_resource: Some(status), ..typed(spec) };
                Ok(Proposal { replicas: proposal.0.replicas, metric, status })
            }
            ("Pods", MetricSpec { pods: Some(source), .. }) => {
                let found = self.pods_metric(source).await;
                let (calculated, current) = found.map_err(|error| {
                    Failure::new("FailedGetPodsMetric", error, "failed to get pods metric value: ")
                })?;
                let status = PodsMetricStatus { metric: source.metric.clone(), current };
                let status = MetricStatus { pods: Some(status), ..typed(spec) };
                let metric = format!("pods metric {}", source.metric.name);
                Ok(Proposal { replicas: calculated.replicas, metric, status })
            }
            ("Object", MetricSpec { object: Some(source), .. }) => {
                let found = self.object_metric(source).await;
                let (calculated, current, metric) = found.map_err(|error| {
                    let part = match &source.target.type_ {
                        kind if kind == "AverageValue" && error.is_of_metric() => {
                            format!("failed to get {} object metric: ", source.metric.name)
                        }
                        _ => String::new(),
                    };
                    let prefix = format!("failed to get object metric value: {part}");
                    Failure::new("FailedGetObjectMetric", error, prefix)
                })?;
                let status = ObjectMetricStatus {
                    described_object: source.described_object.clone(),
                    metric: source.metric.clone(),
                    current,
                };
                let status = MetricStatus { object: Some(status), ..typed(spec) };
                Ok(Proposal { replicas: calculated.replicas, metric, status })
            }
            ("External", MetricSpec { external: Some(source), .. }) => {
                let name = &source.metric.name;
                let found = self.external_metric(source).await;
                let (calculated, current) = found.map_err(|error| {
                    let part = match source.target.average_value {
                        _ if !error.is_of_metric() => String::new(),
                        Some(_) => format!("failed to get {name} external metric: "),
                        None => format!("failed to get external metric {name}: "),
                    };
                    let prefix = format!("failed to get {name} external metric value: {part}");
                    Failure::new("FailedGetExternalMetric", error, prefix)
                })?;
                let status = ExternalMetricStatus { metric: source.metric.clone(), current };
                let status = MetricStatus { external: Some(status), ..typed(spec) };
                let metric = format!("external metric {name}({})", printed(source.metric.selector.as_ref()));
                Ok(Proposal { replicas: calculated.replicas, metric, status })
            }
            _ => Err(unknown()),
        }
    }

    fn figures(&self, metrics: PodMetrics, resource: &str) -> Result<PodFigures, CalculationError> {
        if self.pods.is_empty() {
            return Err(CalculationError::NoPods);
        }
        let found = groups::group(self.pods, &metrics, resource, self.readiness, self.now);
        PodFigures::new(self.spec_replicas, self.tolerances, found, metrics)
    }

    fn ready_pods(&self) -> Result<usize, CalculationError> {
        if self.pods.is_empty() {
            return Err(CalculationError::NoPods);
        }
        let ready = |pod: &&Arc<Pod>| pods::phase(pod) == "Running" && pods::is_ready(pod);
        Ok(self.pods.iter().filter(ready).count())
    }

    async fn resource(
        &self,
        resource: &str,
        container: &str,
        target: &MetricTarget,
    ) -> Result<(Calculated, MetricValueStatus), ProposalError> {
        let fetch = async {
            let found = self.metrics.resource(resource, self.namespace, self.selector, container).await;
            found.map_err(|source| ProposalError::Resource { resource: resource.to_owned(), source })
        };
        let status = |calculated: &Calculated| MetricValueStatus {
            average_utilization: calculated.utilization,
            average_value: Some(resource_quantity(resource, calculated.usage)),
            value: None,
        };
        if let Some(average) = &target.average_value {
            let usage = async {
                let figures = self.figures(fetch.await?, resource)?;
                Ok(figures.average(milli(average))?)
            };
            let calculated = usage.await.map_err(during(format!("{resource} usage")))?;
            return Ok((calculated, status(&calculated)));
        }
        let Some(utilization) = target.average_utilization else {
            let missing = "an average utilization target nor an average value (usage) target";
            return Err(ProposalError::NoTarget("resource", missing));
        };
        let used = async {
            let figures = self.figures(fetch.await?, resource)?;
            let requests = groups::requests(self.pods, container, resource)?;
            Ok(figures.utilization(&requests, utilization)?)
        };
        let calculated = used.await.map_err(during(format!("{resource} utilization")))?;
        Ok((calculated, status(&calculated)))
    }

    async fn pods_metric(
        &self,
        source: &PodsMetricSource,
    ) -> Result<(Calculated, MetricValueStatus), ProposalError> {
        let selector = LabelSelector::from_typed(source.metric.selector.as_ref())?;
        let name = &source.metric.name;
        let found = self.metrics.pods(self.kinds, name, self.namespace, self.selector, &selector).await;
        let metrics = found.map_err(|source| ProposalError::Pods { metric: name.clone(), source })?;
        let target = source.target.average_value.as_ref();
        let target = target.ok_or(ProposalError::NoTarget("pods", "a value nor an average value target"))?;
        let calculated = self.figures(metrics, "")?.average(milli(target))?;
        let current = MetricValueStatus {
            average_value: Some(quantity(calculated.usage)),
            ..MetricValueStatus::default()
        };
        Ok((calculated, current))
    }

    async fn object_metric(
        &self,
        source: &ObjectMetricSource,
    ) -> Result<(Calculated, MetricValueStatus, String), ProposalError> {
        let selector = LabelSelector::from_typed(source.metric.selector.as_ref())?;
        let (name, object) = (&source.metric.name, &source.described_object);
        let fetch = async {
            let found = self.metrics.object(self.kinds, name, self.namespace, object, &selector).await;
            found.map_err(|source| ProposalError::Object {
                metric: name.clone(),
                kind: object.kind.clone(),
                namespace: self.namespace.to_owned(),
                name: object.name.clone(),
                source,
            })
        };
        match (source.target.type_.as_str(), &source.target.value, &source.target.average_value) {
            ("Value", Some(target), _) => {
                let usage = fetch.await?;
                let ready = || self.ready_pods();
                let calculated =
                    replicas::value(self.spec_replicas, self.tolerances, usage, milli(target), ready)?;
                let current = MetricValueStatus {
                    value: Some(quantity(calculated.usage)),
                    ..MetricValueStatus::default()
                };
                Ok((calculated, current, format!("{} metric {name}", object.kind)))
            }
            ("AverageValue", _, Some(target)) => {
                let usage = fetch.await?;
                let calculated =
                    replicas::average_value(self.status_replicas, self.tolerances, usage, milli(target));
                let current = MetricValueStatus {
                    average_value: Some(quantity(calculated.usage)),
                    ..MetricValueStatus::default()
                };
                let metric = format!("external metric {name}({})", printed(source.metric.selector.as_ref()));
                Ok((calculated, current, metric))
            }
            _ => Err(ProposalError::NoTarget("object", "a value target nor an average value target")),
        }
    }

    async fn external_metric(
        &self,
        source: &ExternalMetricSource,
    ) -> Result<(Calculated, MetricValueStatus), ProposalError> {
        let name = &source.metric.name;
        let fetch = async {
            let selector = LabelSelector::from_typed(source.metric.selector.as_ref())?;
            let found = self.metrics.external(name, self.namespace, &selector).await;
            found.map(|values| replicas::sum(&values)).map_err(|error| ProposalError::External {
                namespace: self.namespace.to_owned(),
                metric: name.clone(),
                selector: printed(source.metric.selector.as_ref()),
                source: error,
            })
        };
        if let Some(target) = &source.target.average_value {
            let usage = fetch.await?;
            let calculated =
                replicas::average_value(self.status_replicas, self.tolerances, usage, milli(target));
            let average_value = Some(quantity(calculated.usage));
            return Ok((calculated, MetricValueStatus { average_value, ..MetricValueStatus::default() }));
        }
        let Some(target) = &source.target.value else {
            return Err(ProposalError::NoTarget("external", "a value target nor an average value target"));
        };
        let usage = fetch.await?;
        let ready = || self.ready_pods();
        let calculated = replicas::value(self.spec_replicas, self.tolerances, usage, milli(target), ready)?;
        let value = Some(quantity(calculated.usage));
        Ok((calculated, MetricValueStatus { value, ..MetricValueStatus::default() }))
    }
}

fn typed(spec: &MetricSpec) -> MetricStatus {
    MetricStatus { type_: spec.type_.clone(), ..MetricStatus::default() }
}
