//! Evaluations of pods, and requests that are exempt from them.

use super::policy::{Level, Rule};
use crate::admission::{Attributes, Operation};
use ferrite_component::metrics::{Counter, Family, registry};
use std::sync::{Arc, LazyLock};

static EVALUATIONS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let labels = &[
        "decision",
        "mode",
        "policy_level",
        "policy_version",
        "request_operation",
        "resource",
        "subresource",
    ];
    registry().counter(
        "pod_security_evaluations_total",
        "Evaluations of pods and of their templates.",
        labels,
    )
});

static EXEMPTIONS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    let labels = &["request_operation", "resource", "subresource"];
    registry().counter("pod_security_exemptions_total", "Requests that are exempt from evaluation.", labels)
});

/// Operation, resource and subresource as upstream's labels have them: whatever holds a template is a controller.
fn request<'a>(attributes: &Attributes<'a>) -> [&'a str; 3] {
    let operation = match attributes.operation {
        Operation::Create => "create",
        _ => "update",
    };
    let resource = if attributes.resource.plural == "pods" { "pod" } else { "controller" };
    [operation, resource, attributes.subresource.unwrap_or_default()]
}

pub(super) fn evaluated(attributes: &Attributes<'_>, mode: &str, rule: Rule, allowed: bool) {
    let [operation, resource, subresource] = request(attributes);
    let decision = if allowed { "allow" } else { "deny" };
    let level = match rule.level {
        Level::Privileged => "privileged",
        Level::Baseline => "baseline",
        Level::Restricted => "restricted",
    };
    // As upstream: a version of the future cannot make new series.
    let version = match rule.version {
        None => "latest".to_owned(),
        Some(minor) => format!("v1.{minor}"),
    };
    EVALUATIONS.with(&[decision, mode, level, &version, operation, resource, subresource]).increment();
}

pub(super) fn exempted(attributes: &Attributes<'_>) {
    EXEMPTIONS.with(&request(attributes)).increment();
}
