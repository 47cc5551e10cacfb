//! LimitRanges: defaults for containers without amounts, and bounds for the others.

use super::{Attributes, Operation, Plugin};
use crate::registry::View;
use ferrite_api::quantity::Quantity;
use ferrite_api::quota::amounts::{Amounts, Side, amounts, list, pod_total};
use ferrite_api::{Status, meta};
use ferrite_json::{Value, json};

pub(super) struct LimitRanger;

const ANNOTATION: &str = "kubernetes.io/limit-ranger";

impl Plugin for LimitRanger {
    fn name(&self) -> &'static str {
        "LimitRanger"
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if applies(attributes, object) && attributes.resource.plural == "pods" {
            for range in view.few("", "limitranges", attributes.namespace) {
                set_defaults(object, &range);
            }
        }
        Ok(())
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let Some(object) = object.filter(|o| applies(attributes, o)) else { return Ok(()) };
        let is_pod = attributes.resource.plural == "pods";
        for range in view.few("", "limitranges", attributes.namespace) {
            let problems = if is_pod { pod_problems(object, &range) } else { claim_problems(object, &range) };
            match problems.as_slice() {
                [] => {}
                [only] => return Err(attributes.forbid(only)),
                several => return Err(attributes.forbid(format!("[{}]", several.join(", ")))),
            }
        }
        Ok(())
    }
}

/// Pods when they are made or resized, claims always.
fn applies(attributes: &Attributes<'_>, object: &Value) -> bool {
    match attributes.operation {
        Operation::Create => attributes.is("", "pods") || attributes.is("", "persistentvolumeclaims"),
        Operation::Update => {
            !meta::is_deleting(object)
                && (attributes.is_sub("", "pods", Some("resize"))
                    || attributes.is("", "persistentvolumeclaims"))
        }
        Operation::Delete | Operation::Connect => false,
    }
}

fn limits_of<'a>(range: &'a Value, kind: &'a str) -> impl Iterator<Item = &'a Value> {
    list(&range["spec"], "limits").iter().filter(move |limit| limit["type"] == kind)
}

/// Writes the range's defaults into containers, and says so in an annotation.
fn set_defaults(pod: &mut Value, range: &Value) {
    let mut defaults: [Amounts; 2] = Default::default();
    for limit in limits_of(range, "Container") {
        defaults[0].extend(amounts(&limit["defaultRequest"]));
        defaults[1].extend(amounts(&limit["default"]));
    }
    let mut told = Vec::new();
    for (key, what) in [("containers", "container"), ("initContainers", "init container")] {
        for container in pod["spec"].get_mut(key).and_then(Value::as_array_mut).into_iter().flatten() {
            let name = container["name"].as_str().unwrap_or_default().to_owned();
            for (side, defaults) in [(Side::Requests, &defaults[0]), (Side::Limits, &defaults[1])] {
                let set = set_missing(container, side, defaults);
                if !set.is_empty() {
                    let side = if side == Side::Requests { "request" } else { "limit" };
                    told.push(format!("{} {side} for {what} {name}", set.join(", ")));
                }
            }
        }
    }
    if !told.is_empty() {
        let annotations = meta::metadata_mut(pod).entry("annotations").or_insert_with(|| json!({}));
        if let Some(annotations) = annotations.as_object_mut() {
            annotations.insert(ANNOTATION, format!("LimitRanger plugin set: {}", told.join("; ")).into());
        }
    }
}

/// The names that were missing.
fn set_missing(container: &mut Value, side: Side, defaults: &Amounts) -> Vec<String> {
    if defaults.is_empty() {
        return Vec::new();
    }
    let Some(container) = container.as_object_mut() else { return Vec::new() };
    let resources = container.entry("resources").or_insert_with(|| json!({}));
    let Some(resources) = resources.as_object_mut() else { return Vec::new() };
    let Some(given) = resources.entry(side.key()).or_insert_with(|| json!({})).as_object_mut() else {
        return Vec::new();
    };
    let missing: Vec<_> = defaults.iter().filter(|(name, _)| !given.contains_key(*name)).collect();
    for (name, amount) in &missing {
        given.insert((*name).clone(), amount.to_string().into());
    }
    missing.into_iter().map(|(name, _)| name.to_string()).collect()
}

fn pod_problems(pod: &Value, range: &Value) -> Vec<String> {
    let spec = &pod["spec"];
    let mut problems = Vec::new();
    for limit in list(&range["spec"], "limits") {
        match limit["type"].as_str().unwrap_or_default() {
            "Container" => {
                for container in list(spec, "containers").iter().chain(list(spec, "initContainers")) {
                    let side = |side: Side| amounts(&container["resources"][side.key()]);
                    bounds(limit, "Container", &side(Side::Requests), &side(Side::Limits), &mut problems);
                }
            }
            "Pod" => {
                let total = |side| pod_total(spec, side);
                bounds(limit, "Pod", &total(Side::Requests), &total(Side::Limits), &mut problems);
            }
            _ => {}
        }
    }
    problems.dedup();
    problems
}

fn claim_problems(claim: &Value, range: &Value) -> Vec<String> {
    let requests = amounts(&claim["spec"]["resources"]["requests"]);
    let mut problems = Vec::new();
    let kind = "PersistentVolumeClaim";
    for limit in limits_of(range, kind) {
        for (name, bound) in amounts(&limit["min"]) {
            problems.extend(too_little(kind, &name, bound, &requests, &Amounts::new()));
        }
        for (name, bound) in amounts(&limit["max"]) {
            let said = format!("maximum {name} usage per {kind} is {bound}");
            match requests.get(&name) {
                None => problems.push(format!("{said}.  No request is specified")),
                Some(amount) if *amount > bound => {
                    problems.push(format!("{said}, but request is {amount}"));
                }
                Some(_) => {}
            }
        }
    }
    problems
}

fn bounds(limit: &Value, kind: &str, requests: &Amounts, limits: &Amounts, problems: &mut Vec<String>) {
    for (name, bound) in amounts(&limit["min"]) {
        problems.extend(too_little(kind, &name, bound, requests, limits));
    }
    for (name, bound) in amounts(&limit["max"]) {
        problems.extend(too_much(kind, &name, bound, requests, limits));
    }
    for (name, bound) in amounts(&limit["maxLimitRequestRatio"]) {
        problems.extend(too_far_apart(kind, &name, bound, requests, limits));
    }
}

fn too_little(
    kind: &str,
    name: &str,
    bound: Quantity,
    requests: &Amounts,
    limits: &Amounts,
) -> Option<String> {
    let said = format!("minimum {name} usage per {kind} is {bound}");
    match (requests.get(name), limits.get(name)) {
        (None, _) => Some(format!("{said}.  No request is specified")),
        (Some(request), _) if *request < bound => Some(format!("{said}, but request is {request}")),
        (_, Some(limit)) if *limit < bound => Some(format!("{said}, but limit is {limit}")),
        _ => None,
    }
}

fn too_much(kind: &str, name: &str, bound: Quantity, requests: &Amounts, limits: &Amounts) -> Option<String> {
    let said = format!("maximum {name} usage per {kind} is {bound}");
    match (requests.get(name), limits.get(name)) {
        (_, None) => Some(format!("{said}.  No limit is specified")),
        (_, Some(limit)) if *limit > bound => Some(format!("{said}, but limit is {limit}")),
        (Some(request), _) if *request > bound => Some(format!("{said}, but request is {request}")),
        _ => None,
    }
}

fn too_far_apart(
    kind: &str,
    name: &str,
    bound: Quantity,
    requests: &Amounts,
    limits: &Amounts,
) -> Option<String> {
    let said = format!("{name} max limit to request ratio per {kind} is {bound}");
    let Some(request) = requests.get(name).filter(|r| !r.is_zero()) else {
        return Some(format!("{said}, but no request is specified or request is 0"));
    };
    let Some(limit) = limits.get(name).filter(|l| !l.is_zero()) else {
        return Some(format!("{said}, but no limit is specified or limit is 0"));
    };
    #[expect(clippy::cast_precision_loss, reason = "upstream compares and prints a float")]
    let ratio = limit.milli_value() as f64 / request.milli_value() as f64;
    #[expect(clippy::cast_precision_loss, reason = "upstream compares and prints a float")]
    let most = bound.milli_value() as f64;
    (ratio * 1000.0 > most).then(|| format!("{said}, but provided ratio is {ratio:.6}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(resources: Value) -> Value {
        json!({"metadata": {}, "spec": {"containers": [{"name": "c", "resources": resources}]}})
    }

    fn range(limit: Value) -> Value {
        json!({"spec": {"limits": [limit]}})
    }

    #[test]
    fn what_is_missing_is_set_and_told() {
        let range = range(json!({
            "type": "Container", "default": {"cpu": "1", "memory": "1Gi"}, "defaultRequest": {"cpu": "500m"},
        }));
        let mut pod = pod(json!({"limits": {"memory": "2Gi"}}));
        set_defaults(&mut pod, &range);
        assert_eq!(
            pod["spec"]["containers"][0]["resources"],
            json!({"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "2Gi"}})
        );
        assert_eq!(
            pod["metadata"]["annotations"][ANNOTATION],
            "LimitRanger plugin set: cpu request for container c; cpu limit for container c"
        );
    }

    #[test]
    fn bounds_hold_for_requests_and_limits() {
        let rows: &[(Value, Value, &[&str])] = &[
            (
                json!({"type": "Container", "min": {"cpu": "50m"}}),
                json!({"requests": {"cpu": "10m"}}),
                &["minimum cpu usage per Container is 50m, but request is 10m"],
            ),
            (
                json!({"type": "Container", "min": {"cpu": "50m"}}),
                json!({}),
                &["minimum cpu usage per Container is 50m.  No request is specified"],
            ),
            (
                json!({"type": "Pod", "max": {"cpu": "1"}}),
                json!({"limits": {"cpu": "2"}}),
                &["maximum cpu usage per Pod is 1, but limit is 2"],
            ),
            (
                json!({"type": "Container", "max": {"cpu": "1"}}),
                json!({"requests": {"cpu": "1"}, "limits": {"cpu": "1"}}),
                &[],
            ),
            (
                json!({"type": "Container", "maxLimitRequestRatio": {"memory": "2"}}),
                json!({"requests": {"memory": "1Mi"}, "limits": {"memory": "9Mi"}}),
                &["memory max limit to request ratio per Container is 2, but provided ratio is 9.000000"],
            ),
        ];
        for (limit, resources, expected) in rows {
            assert_eq!(pod_problems(&pod(resources.clone()), &range(limit.clone())), *expected, "{limit}");
        }
    }

    #[test]
    fn claims_are_bounded_by_what_they_request() {
        let claim = json!({"spec": {"resources": {"requests": {"storage": "9Gi"}}}});
        let limit =
            json!({"type": "PersistentVolumeClaim", "min": {"storage": "1Gi"}, "max": {"storage": "5Gi"}});
        assert_eq!(
            claim_problems(&claim, &range(limit)),
            ["maximum storage usage per PersistentVolumeClaim is 5Gi, but request is 9Gi"]
        );
    }
}
