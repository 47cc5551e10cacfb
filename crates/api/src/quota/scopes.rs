//! Scopes: quotas that are only about some of the objects.

use super::amounts::list;
use crate::kinds::core::pod::resources::qos_class;
use ferrite_json::Value;
use std::fmt;

/// One condition of a quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Scope {
    name: String,
    operator: String,
    values: Vec<String>,
}

/// The conditions of a quota. All have to hold.
pub(super) fn of(quota: &Value) -> Vec<Scope> {
    let plain = list(&quota["spec"], "scopes").iter().map(|name| Scope {
        name: text(name),
        operator: "Exists".into(),
        values: Vec::new(),
    });
    let selected = list(&quota["spec"]["scopeSelector"], "matchExpressions").iter().map(Scope::of_term);
    plain.chain(selected).collect()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// As Go prints a requirement: clients see it in refusals.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{} {} [{}]}}", self.name, self.operator, self.values.join(" "))
    }
}

impl Scope {
    /// A requirement on one scope, as selectors have it.
    pub fn of_term(term: &Value) -> Self {
        Self {
            name: text(&term["scopeName"]),
            operator: text(&term["operator"]),
            values: list(term, "values").iter().map(text).collect(),
        }
    }

    pub fn is_like(&self, other: &Self) -> bool {
        self.name == other.name
    }

    fn selects(&self, value: &str) -> bool {
        let listed = self.values.iter().any(|v| v == value);
        match self.operator.as_str() {
            "In" => !value.is_empty() && listed,
            "NotIn" => !listed,
            "DoesNotExist" => value.is_empty(),
            _ => !value.is_empty(),
        }
    }
}

/// Returns true if a pod ends by itself, as quotas see it.
pub(super) fn is_terminating(pod: &Value) -> bool {
    pod["spec"]["activeDeadlineSeconds"].as_i64().is_some_and(|seconds| seconds >= 0)
}

pub(super) fn pod_in_scope(scope: &Scope, pod: &Value) -> bool {
    let spec = &pod["spec"];
    let best_effort = || qos_class(spec) == "BestEffort";
    match scope.name.as_str() {
        "Terminating" => is_terminating(pod),
        "NotTerminating" => !is_terminating(pod),
        "BestEffort" => best_effort(),
        "NotBestEffort" => !best_effort(),
        "PriorityClass" => scope.selects(spec["priorityClassName"].as_str().unwrap_or_default()),
        "CrossNamespacePodAffinity" => crosses_namespaces(spec),
        _ => false,
    }
}

/// Claims know the class of their attributes: the one they want, or one that is being given.
pub(super) fn claim_in_scope(scope: &Scope, claim: &Value) -> bool {
    let classes = [
        claim.pointer("/spec/volumeAttributesClassName"),
        claim.pointer("/status/currentVolumeAttributesClassName"),
        claim.pointer("/status/modifyVolumeStatus/targetVolumeAttributesClassName"),
    ];
    let mut named =
        classes.into_iter().flatten().filter_map(Value::as_str).filter(|c| !c.is_empty()).peekable();
    if scope.name != "VolumeAttributesClass" {
        return false;
    }
    match named.peek() {
        None => scope.selects(""),
        Some(_) => named.any(|class| scope.selects(class)),
    }
}

/// Returns true if affinity of the pod refers to pods of other namespaces.
fn crosses_namespaces(spec: &Value) -> bool {
    let crosses =
        |term: &Value| !list(term, "namespaces").is_empty() || term["namespaceSelector"].is_object();
    ["podAffinity", "podAntiAffinity"].iter().any(|kind| {
        let affinity = &spec["affinity"][*kind];
        list(affinity, "requiredDuringSchedulingIgnoredDuringExecution").iter().any(crosses)
            || list(affinity, "preferredDuringSchedulingIgnoredDuringExecution")
                .iter()
                .any(|weighted| crosses(&weighted["podAffinityTerm"]))
    })
}
