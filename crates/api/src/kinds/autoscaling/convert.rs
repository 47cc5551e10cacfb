//! Conversion between the versions of the autoscaler. The older version keeps fields that it lacks in
//! annotations.

use crate::kinds::common::access::{default_field, ensure_object, object, present, remove, text};
use crate::kinds::common::go;
use ferrite_json::{Map, Value, json};

const METRICS: &str = "autoscaling.alpha.kubernetes.io/metrics";
const CURRENT_METRICS: &str = "autoscaling.alpha.kubernetes.io/current-metrics";
const CONDITIONS: &str = "autoscaling.alpha.kubernetes.io/conditions";
const BEHAVIOUR: &str = "autoscaling.alpha.kubernetes.io/behavior";
/// The annotations in which the older version has fields of the newer one.
pub(super) const ANNOTATIONS: [&str; 4] = [METRICS, CURRENT_METRICS, CONDITIONS, BEHAVIOUR];

/// From the older version to the newer.
pub(super) fn to_v2(object: &mut Value) {
    if !object.is_object() {
        return;
    }
    object["apiVersion"] = "autoscaling/v2".into();
    let [metrics, current, conditions, behaviour] =
        [METRICS, CURRENT_METRICS, CONDITIONS, BEHAVIOUR].map(|key| take_annotation(object, key));

    let spec = ensure_object(object, "spec");
    let mut all = Vec::new();
    if let Some(share) = remove(spec, "targetCPUUtilizationPercentage").filter(|s| !s.is_null()) {
        all.push(json!({"type": "Resource", "resource": {"name": "cpu",
            "target": {"type": "Utilization", "averageUtilization": share}}}));
    }
    if let Some(Value::Array(metrics)) = metrics {
        all.extend(metrics.iter().map(|m| metric_to_v2(m, "target")));
    }
    if !all.is_empty() {
        spec["metrics"] = all.into();
    }
    if let Some(behaviour) = behaviour.filter(Value::is_object) {
        spec["behavior"] = lower_keys(&behaviour);
    }

    let status = ensure_object(object, "status");
    if let Some(share) = remove(status, "currentCPUUtilizationPercentage").filter(|s| !s.is_null()) {
        status["currentMetrics"] = json!([{"type": "Resource", "resource": {"name": "cpu",
            "current": {"averageUtilization": share}}}]);
    }
    if let Some(Value::Array(current)) = current {
        status["currentMetrics"] = current.iter().map(|m| metric_to_v2(m, "current")).collect();
    }
    if let Some(conditions) = conditions.filter(Value::is_array) {
        status["conditions"] = conditions;
    }
}

/// From the newer version to the older.
pub(super) fn from_v2(object: &mut Value) {
    if !object.is_object() {
        return;
    }
    object["apiVersion"] = "autoscaling/v1".into();
    let spec = ensure_object(object, "spec");
    let metrics = remove(spec, "metrics").unwrap_or_default();
    let behaviour = remove(spec, "behavior").filter(Value::is_object);
    let of_cpu = |m: &Value| text(m, "type") == "Resource" && text(&m["resource"], "name") == "cpu";
    let share = |m: &&Value| present(&m["resource"]["target"], "averageUtilization");
    let metrics = metrics.as_array().map(Vec::as_slice).unwrap_or_default();
    if let Some(cpu) = metrics.iter().find(|m| of_cpu(m)).filter(share) {
        spec["targetCPUUtilizationPercentage"] = cpu["resource"]["target"]["averageUtilization"].clone();
    }
    let others: Vec<Value> =
        metrics.iter().filter(|m| !(of_cpu(m) && share(m))).map(|m| metric_to_v1(m, "target")).collect();

    let status = ensure_object(object, "status");
    let current = remove(status, "currentMetrics").unwrap_or_default();
    let conditions = remove(status, "conditions").unwrap_or_default();
    let current = current.as_array().map(Vec::as_slice).unwrap_or_default();
    if let Some(cpu) = current.iter().find(|m| of_cpu(m))
        && present(&cpu["resource"]["current"], "averageUtilization")
    {
        status["currentCPUUtilizationPercentage"] = cpu["resource"]["current"]["averageUtilization"].clone();
    }
    // The older version always has the number of replicas.
    default_field(status, "currentReplicas", 0);
    let current: Vec<Value> = current.iter().map(|m| metric_to_v1(m, "current")).collect();
    let conditions = conditions.as_array().cloned().unwrap_or_default();

    for (key, text) in [
        (METRICS, (!others.is_empty()).then(|| go::compact_list("V1MetricSpec", &others))),
        (CURRENT_METRICS, (!current.is_empty()).then(|| go::compact_list("V1MetricSpec", &current))),
        (CONDITIONS, (!conditions.is_empty()).then(|| go::compact_list("V1Condition", &conditions))),
        (BEHAVIOUR, behaviour.map(|b| go::compact("HorizontalPodAutoscalerBehavior", &b))),
    ] {
        if let Some(text) = text {
            ensure_object(ensure_object(object, "metadata"), "annotations")[key] = text.into();
        }
    }
}

/// Removes an annotation and returns its content. An unreadable one counts as absent.
fn take_annotation(object: &mut Value, key: &str) -> Option<Value> {
    let metadata = object.get_mut("metadata")?;
    let annotations = metadata.get_mut("annotations")?;
    let text = remove(annotations, key)?;
    if annotations.as_object().is_some_and(Map::is_empty) {
        remove(metadata, "annotations");
    }
    ferrite_json::from_str(text.as_str()?).ok()
}

/// Objects written by Go without names for their fields: they begin with capitals.
fn lower_keys(value: &Value) -> Value {
    match value {
        Value::Object(map) => map
            .iter()
            .filter(|(_, v)| !v.is_null())
            .map(|(key, v)| {
                let mut chars = key.chars();
                let key = chars.next().map_or(String::new(), |c| c.to_lowercase().chain(chars).collect());
                (key, lower_keys(v))
            })
            .collect::<Map>()
            .into(),
        Value::Array(items) => items.iter().map(lower_keys).collect(),
        other => other.clone(),
    }
}

/// The names of amounts in the older form begin with `target` or `current`.
fn metric_to_v2(metric: &Value, part: &str) -> Value {
    let mut converted = json!({"type": metric["type"]});
    let name = |key: &str| format!("{part}{key}");
    for (kind, source) in metric.as_object().into_iter().flatten().filter(|(_, s)| s.is_object()) {
        let mut amounts = Map::new();
        for (old, new) in [
            (name("Value"), "value"),
            ("averageValue".to_owned(), "averageValue"),
            (name("AverageValue"), "averageValue"),
            (name("AverageUtilization"), "averageUtilization"),
        ] {
            if let Some(amount) = source.get(&old).filter(|a| !a.is_null()) {
                amounts.insert(new.to_owned(), amount.clone());
            }
        }
        if part == "target" {
            let of = match () {
                () if amounts.contains_key("averageUtilization") => "Utilization",
                () if amounts.contains_key("averageValue") => "AverageValue",
                () => "Value",
            };
            // An average stands in place of the value, which the older form cannot leave out.
            if of == "AverageValue" {
                amounts.remove("value");
            }
            amounts.insert("type".to_owned(), of.into());
        }
        let mut new = json!({ part: amounts });
        for key in ["name", "container"] {
            if present(source, key) {
                new[key] = source[key].clone();
            }
        }
        if present(source, "metricName") {
            new["metric"] = json!({"name": source["metricName"]});
            for key in ["selector", "metricSelector"] {
                if present(source, key) {
                    new["metric"]["selector"] = source[key].clone();
                }
            }
        }
        if kind == "object" && present(source, "target") {
            new["describedObject"] = source["target"].clone();
        }
        converted[kind] = new;
    }
    converted
}

fn metric_to_v1(metric: &Value, part: &str) -> Value {
    let mut converted = json!({"type": metric["type"]});
    for (kind, source) in metric.as_object().into_iter().flatten().filter(|(_, s)| s.is_object()) {
        let amounts = &source[part];
        let mut old = json!({});
        for key in ["name", "container"] {
            if present(source, key) {
                old[key] = source[key].clone();
            }
        }
        if let Some(metric) = object(source, "metric") {
            old["metricName"] = metric["name"].clone();
            if present(metric, "selector") {
                let key = if kind == "external" { "metricSelector" } else { "selector" };
                old[key] = metric["selector"].clone();
            }
        }
        if kind == "object" {
            old["target"] = source["describedObject"].clone();
        }
        for (new, name) in [
            ("value", "Value"),
            ("averageValue", "AverageValue"),
            ("averageUtilization", "AverageUtilization"),
        ] {
            if !present(amounts, new) {
                continue;
            }
            let key = if kind == "object" && new == "averageValue" {
                "averageValue".to_owned()
            } else {
                format!("{part}{name}")
            };
            old[key] = amounts[new].clone();
        }
        // These amounts are not optional in the older form.
        let needed = match (kind.as_str(), part) {
            ("resource" | "containerResource", "current") => Some("currentAverageValue"),
            ("pods", "current") => Some("currentAverageValue"),
            ("pods", "target") => Some("targetAverageValue"),
            ("object", "current") => Some("currentValue"),
            ("object", "target") => Some("targetValue"),
            ("external", "current") => Some("currentValue"),
            _ => None,
        };
        if let Some(key) = needed.filter(|key| !present(&old, key)) {
            old[key] = "0".into();
        }
        converted[kind] = old;
    }
    converted
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::common::access::{list, map};

    fn v2(spec: Value, status: Value) -> Value {
        json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "x"},
            "spec": spec, "status": status})
    }

    #[test]
    fn cpu_is_a_field_and_the_rest_goes_to_annotations() {
        let cpu = json!({"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}});
        let pods = json!({"type": "Pods", "pods": {"metric": {"name": "m"}, "target": {"type": "AverageValue", "averageValue": "1k"}}});
        let behaviour = json!({"scaleUp": {"selectPolicy": "Max", "policies": [{"type": "Pods", "value": 4, "periodSeconds": 15}]}});
        let current = json!([{"type": "Resource", "resource": {"name": "cpu", "current": {"averageUtilization": 20, "averageValue": "0"}}}]);
        let newer = v2(
            json!({"maxReplicas": 3, "metrics": [cpu, pods], "behavior": behaviour}),
            json!({"currentMetrics": current}),
        );
        let mut older = newer.clone();
        from_v2(&mut older);
        assert_eq!(older["spec"], json!({"maxReplicas": 3, "targetCPUUtilizationPercentage": 70}));
        assert_eq!(older["status"], json!({"currentCPUUtilizationPercentage": 20, "currentReplicas": 0}));
        let annotations = map(&older["metadata"], "annotations").unwrap();
        assert_eq!(
            annotations[CURRENT_METRICS],
            r#"[{"type":"Resource","resource":{"name":"cpu","currentAverageUtilization":20,"currentAverageValue":"0"}}]"#
        );
        assert_eq!(
            annotations[METRICS],
            r#"[{"type":"Pods","pods":{"metricName":"m","targetAverageValue":"1k"}}]"#
        );
        let mut back = older;
        to_v2(&mut back);
        back["status"].as_object_mut().map(|status| status.remove("currentReplicas"));
        assert_eq!(back, newer);
        assert!(list(&back["status"], "conditions").is_empty());
    }
}
