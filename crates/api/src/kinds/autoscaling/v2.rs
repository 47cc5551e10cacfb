//! HorizontalPodAutoscalers.

use super::rules::validate_spec;
use crate::field::{FieldErrors, Path};
use crate::kinds::common::access::{
    default_field, ensure_object, int, list, list_mut, object_mut, present, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::not_negative;
use crate::kinds::common::row::{NAME, shown};
use crate::quantity::canonicalise;
use crate::resource::{Column, StatusUse, Strategy};
use crate::table::{NONE, UNKNOWN};
use ferrite_json::{Value, json};
use jiff::Timestamp;

/// Default target of cpu use for autoscalers without metrics, in per cent of the request.
const CPU_TARGET: i64 = 80;
/// Number of metrics that a cell shows.
const METRICS_SHOWN: usize = 2;

pub(in crate::kinds) struct HorizontalPodAutoscalers;

impl Strategy for HorizontalPodAutoscalers {
    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_field(spec, "minReplicas", 1);
        if list(spec, "metrics").is_empty() {
            spec["metrics"] = json!([{"type": "Resource", "resource": {
                "name": "cpu", "target": {"type": "Utilization", "averageUtilization": CPU_TARGET}}}]);
        }
        for metric in list_mut(spec, "metrics") {
            canonicalise_metric(metric, "target");
        }
        if let Some(behaviour) = object_mut(spec, "behavior") {
            default_behaviour(behaviour);
        }
        for metric in list_mut(ensure_object(object, "status"), "currentMetrics") {
            canonicalise_metric(metric, "current");
        }
    }

    /// A direction without policies gets the default ones, and one with none is refused: an object is no list of policies.
    fn mark_sent_empty(&self, object: &mut Value) {
        for direction in ["scaleUp", "scaleDown"] {
            let policies = object.pointer_mut(&format!("/spec/behavior/{direction}/policies"));
            if let Some(policies) = policies.filter(|policies| policies.as_array().is_some_and(Vec::is_empty))
            {
                *policies = json!({});
            }
        }
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::WithMetadata
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        validate_spec(&object["spec"], None, &Path::new("spec"))
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        validate_spec(&new["spec"], Some(&old["spec"]), &Path::new("spec"))
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let path = Path::new("status");
        ["currentReplicas", "desiredReplicas"]
            .iter()
            .filter_map(|key| not_negative(&new["status"], key, &path))
            .collect()
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("Reference"),
                shown("Targets"),
                shown("MinPods"),
                shown("MaxPods"),
                shown("Replicas"),
                shown("Age"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let (spec, status) = (&object["spec"], &object["status"]);
        let target = &spec["scaleTargetRef"];
        vec![
            cell::name(object),
            format!("{}/{}", text(target, "kind"), text(target, "name")).into(),
            metrics_cell(list(spec, "metrics"), list(status, "currentMetrics")).into(),
            cell::int_or_string(&spec["minReplicas"], "<unset>"),
            int(spec, "maxReplicas").into(),
            int(status, "currentReplicas").into(),
            cell::age(object, now),
        ]
    }
}

fn canonicalise_metric(metric: &mut Value, part: &str) {
    for source in metric.as_object_mut().into_iter().flatten().map(|(_, source)| source) {
        let Some(amounts) = object_mut(source, part) else { continue };
        for key in ["value", "averageValue"] {
            if let Some(amount) = amounts.get_mut(key) {
                canonicalise(amount);
            }
        }
    }
}

/// Rules for one direction are completed; a direction without any gets all of them.
fn default_behaviour(behaviour: &mut Value) {
    let up = ensure_object(behaviour, "scaleUp");
    default_field(up, "stabilizationWindowSeconds", 0);
    default_rules(
        up,
        json!([{"type": "Pods", "value": 4, "periodSeconds": 15}, {"type": "Percent", "value": 100, "periodSeconds": 15}]),
    );
    default_rules(
        ensure_object(behaviour, "scaleDown"),
        json!([{"type": "Percent", "value": 100, "periodSeconds": 15}]),
    );
}

fn default_rules(rules: &mut Value, policies: Value) {
    default_field(rules, "selectPolicy", "Max");
    if !present(rules, "policies") {
        rules["policies"] = policies;
    }
    if let Some(tolerance) = rules.get_mut("tolerance") {
        canonicalise(tolerance);
    }
}

fn metrics_cell(specs: &[Value], statuses: &[Value]) -> String {
    if specs.is_empty() {
        return NONE.to_owned();
    }
    let cells: Vec<String> =
        specs.iter().enumerate().map(|(index, spec)| metric_cell(spec, statuses.get(index))).collect();
    match cells.len().saturating_sub(METRICS_SHOWN) {
        0 => cells.join(", "),
        more => format!("{} + {more} more...", cells[..METRICS_SHOWN].join(", ")),
    }
}

fn metric_cell(spec: &Value, status: Option<&Value>) -> String {
    let kind = match text(spec, "type") {
        "External" => "external",
        "Pods" => "pods",
        "Object" => "object",
        "Resource" => "resource",
        "ContainerResource" => "containerResource",
        _ => return "<unknown type>".to_owned(),
    };
    let target = &spec[kind]["target"];
    let current = status.map_or(&Value::Null, |s| &s[kind]["current"]);
    let amount = |from: &'_ Value, key: &str| -> Option<String> { from[key].as_str().map(str::to_owned) };
    let pair = |key: &str| {
        let now = amount(current, key).unwrap_or_else(|| UNKNOWN.to_owned());
        format!("{now}/{}", amount(target, key).unwrap_or_default())
    };
    let per_pod = present(target, "averageValue");
    match kind {
        "pods" => pair("averageValue"),
        "external" | "object" if per_pod => format!("{} (avg)", pair("averageValue")),
        "external" | "object" => pair("value"),
        _ if per_pod => format!("{}: {}", text(&spec[kind], "name"), pair("averageValue")),
        _ => {
            let share = |from: &Value, absent: &str| {
                from["averageUtilization"].as_i64().map_or_else(|| absent.to_owned(), |p| format!("{p}%"))
            };
            format!("{}: {}/{}", text(&spec[kind], "name"), share(current, UNKNOWN), share(target, "<auto>"))
        }
    }
}
