//! A Job's pod failure policy and success policy.

use k8s_openapi::api::batch::v1::{
    PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyOnPodConditionsPattern,
    SuccessPolicy,
};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};

use super::indexes::Indexes;

/// What a rule of the failure policy does about a failed pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FailureAction {
    /// The failure does not count.
    Ignore,
    Count,
    FailIndex,
    /// With the message of the condition.
    FailJob(String),
}

/// The action of the first rule that matches; none means that the failure counts.
pub(super) fn failure_action(policy: Option<&PodFailurePolicy>, pod: &Pod) -> Option<FailureAction> {
    let status = pod.status.as_ref()?;
    policy?.rules.iter().enumerate().find_map(|(at, rule)| {
        let place = || {
            let meta = &pod.metadata;
            (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
        };
        let message = if let Some(codes) = &rule.on_exit_codes {
            let (container, code) = matching_container(status, codes)?;
            let (namespace, name) = place();
            format!(
                "Container {container} for pod {namespace}/{name} failed with exit code {code} matching {} rule at index {at}",
                rule.action
            )
        } else {
            let condition = matching_condition(status, rule.on_pod_conditions.as_deref()?)?;
            let (namespace, name) = place();
            format!("Pod {namespace}/{name} has condition {condition} matching {} rule at index {at}", rule.action)
        };
        match rule.action.as_str() {
            "Ignore" => Some(FailureAction::Ignore),
            "Count" => Some(FailureAction::Count),
            "FailIndex" => Some(FailureAction::FailIndex),
            "FailJob" => Some(FailureAction::FailJob(message)),
            // An action of a later version: the rule does not exist for this one.
            _ => None,
        }
    })
}

/// Whether the failure of a pod counts against the limits.
pub(super) fn counts(policy: Option<&PodFailurePolicy>, pod: &Pod) -> bool {
    failure_action(policy, pod) != Some(FailureAction::Ignore)
}

fn matching_container<'a>(
    status: &'a PodStatus,
    codes: &PodFailurePolicyOnExitCodesRequirement,
) -> Option<(&'a str, i32)> {
    let containers = status.container_statuses.iter().flatten();
    let init_containers = status.init_container_statuses.iter().flatten();
    containers.chain(init_containers).find_map(|container: &ContainerStatus| {
        let code = container.state.as_ref()?.terminated.as_ref()?.exit_code;
        let named = codes.container_name.as_ref().is_none_or(|name| *name == container.name);
        let matches = match codes.operator.as_str() {
            "In" => codes.values.contains(&code),
            "NotIn" => !codes.values.contains(&code),
            _ => false,
        };
        (named && code != 0 && matches).then_some((container.name.as_str(), code))
    })
}

fn matching_condition<'a>(
    status: &'a PodStatus,
    patterns: &[PodFailurePolicyOnPodConditionsPattern],
) -> Option<&'a str> {
    let matches = |kind: &str, status: &str| {
        patterns
            .iter()
            .any(|pattern| pattern.type_ == kind && pattern.status.as_deref().unwrap_or("True") == status)
    };
    let conditions = status.conditions.iter().flatten();
    conditions
        .map(|condition| (condition.type_.as_str(), condition.status.as_str()))
        .find(|(kind, status)| matches(kind, status))
        .map(|(kind, _)| kind)
}

/// The message of the condition if the succeeded indexes satisfy a rule of the success policy.
pub(super) fn success(
    policy: Option<&SuccessPolicy>,
    completions: usize,
    succeeded: &Indexes,
) -> Option<String> {
    if succeeded.is_empty() {
        return None;
    }
    let enough = |wanted: Option<i32>, found: usize| {
        wanted.is_some_and(|wanted| found >= usize::try_from(wanted).unwrap_or(0))
    };
    let met = policy?.rules.iter().position(|rule| match &rule.succeeded_indexes {
        Some(text) => {
            let required = Indexes::parse(text, completions);
            let found = required.overlap(succeeded);
            !required.is_empty() && (found == required.total() || enough(rule.succeeded_count, found))
        }
        None => enough(rule.succeeded_count, succeeded.total()),
    });
    met.map(|at| format!("Matched rules at index {at}"))
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn pod(status: &Value) -> Pod {
        ferrite_json::from_value(json!({"metadata": {"namespace": "ns", "name": "p"}, "status": status}))
            .unwrap()
    }

    fn policy(rules: &Value) -> PodFailurePolicy {
        ferrite_json::from_value(json!({"rules": rules})).unwrap()
    }

    fn exited(containers: &[(&str, i32)]) -> Value {
        let statuses: Vec<Value> = containers
            .iter()
            .map(|(name, code)| {
                json!({"name": name, "ready": false, "restartCount": 0, "image": "", "imageID": "",
                       "state": {"terminated": {"exitCode": code}}})
            })
            .collect();
        json!(statuses)
    }

    #[test]
    fn rules_match_in_order() {
        let codes = |action: &str, operator: &str, values: &[i32], container: Option<&str>| json!({"action": action, "onExitCodes": {"operator": operator, "values": values, "containerName": container}});
        let condition = |action: &str, kind: &str, status: Option<&str>| json!({"action": action, "onPodConditions": [{"type": kind, "status": status}]});
        let failed = json!({"containerStatuses": exited(&[("side", 0), ("main", 42)])});
        let evicted = json!({"conditions": [{"type": "DisruptionTarget", "status": "True"}]});
        let message = |text: &str| Some(FailureAction::FailJob(text.to_owned()));
        for (what, rules, status, expected) in [
            ("no rule", json!([]), &failed, None),
            (
                "ignored code",
                json!([codes("Ignore", "In", &[1, 42], None)]),
                &failed,
                Some(FailureAction::Ignore),
            ),
            ("another code", json!([codes("Ignore", "In", &[1], None)]), &failed, None),
            ("success is no failure", json!([codes("Ignore", "NotIn", &[42], None)]), &failed, None),
            (
                "not in",
                json!([codes("FailIndex", "NotIn", &[1], None)]),
                &failed,
                Some(FailureAction::FailIndex),
            ),
            ("another container", json!([codes("Ignore", "In", &[42], Some("side"))]), &failed, None),
            (
                "this container",
                json!([codes("Count", "In", &[42], Some("main"))]),
                &failed,
                Some(FailureAction::Count),
            ),
            (
                "the first rule that matches",
                json!([
                    codes("Ignore", "In", &[1], None),
                    codes("FailJob", "In", &[42], None),
                    codes("Ignore", "In", &[42], None)
                ]),
                &failed,
                message(
                    "Container main for pod ns/p failed with exit code 42 matching FailJob rule at index 1",
                ),
            ),
            (
                "a condition",
                json!([condition("Ignore", "DisruptionTarget", None)]),
                &evicted,
                Some(FailureAction::Ignore),
            ),
            (
                "a condition that is not false",
                json!([condition("Ignore", "DisruptionTarget", Some("False"))]),
                &evicted,
                None,
            ),
            (
                "a condition that fails the job",
                json!([condition("FailJob", "DisruptionTarget", Some("True"))]),
                &evicted,
                message("Pod ns/p has condition DisruptionTarget matching FailJob rule at index 0"),
            ),
            (
                "an init container",
                json!([codes("Ignore", "In", &[3], Some("init"))]),
                &json!({"initContainerStatuses": exited(&[("init", 3)])}),
                Some(FailureAction::Ignore),
            ),
        ] {
            let policy = policy(&rules);
            assert_eq!(failure_action(Some(&policy), &pod(status)), expected, "{what}");
        }
        assert_eq!(failure_action(None, &pod(&failed)), None);
    }

    #[test]
    fn success_rules() {
        for (what, rules, succeeded, expected) in [
            ("nothing succeeded", json!([{"succeededCount": 0}]), "", None),
            ("a count", json!([{"succeededCount": 2}]), "0,3", Some(0)),
            ("too few", json!([{"succeededCount": 3}]), "0,3", None),
            ("all of the indexes", json!([{"succeededIndexes": "0,2-3"}]), "0-3", Some(0)),
            ("not all of them", json!([{"succeededIndexes": "0,2-3"}]), "0,3", None),
            ("enough of them", json!([{"succeededIndexes": "0,2-3", "succeededCount": 2}]), "0,3", Some(0)),
            ("others do not count", json!([{"succeededIndexes": "4", "succeededCount": 1}]), "0-3", None),
            ("the second rule", json!([{"succeededIndexes": "9"}, {"succeededIndexes": "0"}]), "0", Some(1)),
            ("indexes beyond the completions", json!([{"succeededIndexes": "20"}]), "0-9", None),
        ] {
            let policy: SuccessPolicy = ferrite_json::from_value(json!({"rules": rules})).unwrap();
            let got = success(Some(&policy), 10, &Indexes::parse(succeeded, 10));
            assert_eq!(got, expected.map(|at| format!("Matched rules at index {at}")), "{what}");
        }
        assert_eq!(success(None, 10, &Indexes::parse("0-9", 10)), None);
    }
}
