//! Fills cluster roles that are made of others: those that their labels select.

use std::sync::Arc;
use std::time::Duration;

use ferrite_api::selector::LabelSelector;
use ferrite_client::{Api, Informer, ObjectKey, is_not_found};
use ferrite_json::json;
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use kube::Client;
use kube::api::{Patch, PatchParams};

use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "clusterrole-aggregation-controller";
/// Index of the roles that are made of others.
const AGGREGATING: &str = "aggregating";
/// Roles often come in groups: one look after the last of them is enough.
const SETTLE: Duration = Duration::from_millis(100);

pub(crate) fn start(context: &Context) {
    let roles: Informer<ClusterRole> = context.informers.get();
    roles.add_index(AGGREGATING, |role| match role.aggregation_rule {
        Some(_) => vec![AGGREGATING.to_owned()],
        None => Vec::new(),
    });
    let (client, known) = (context.client.clone(), roles.clone());
    context
        .controller(NAME)
        // Any role may be part of any other, before the change or after.
        .watches(&roles, move |change, queue| {
            if change.object().aggregation_rule.is_some() {
                queue.add_after(ObjectKey::of(&**change.object()), SETTLE);
            }
            for role in known.by_index(AGGREGATING, AGGREGATING) {
                queue.add_after(ObjectKey::of(&*role), SETTLE);
            }
        })
        .run(move |key: ObjectKey| {
            let wanted = roles.get(&key).and_then(|role| decide(&role, &roles.list()));
            let client = client.clone();
            async move {
                match wanted {
                    Some(rules) => apply(&client, &key.name, rules).await,
                    None => Ok(None),
                }
            }
        });
}

/// The rules a role should have. None when it has them, or has them of its own.
fn decide(role: &ClusterRole, all: &[Arc<ClusterRole>]) -> Option<Vec<PolicyRule>> {
    let selectors = role.aggregation_rule.as_ref()?.cluster_role_selectors.as_deref().unwrap_or_default();
    let mut sorted: Vec<&Arc<ClusterRole>> = all.iter().collect();
    sorted.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let mut rules: Vec<PolicyRule> = Vec::new();
    for selector in selectors {
        let Ok(selector) = LabelSelector::from_typed(Some(selector)) else { continue };
        for part in &sorted {
            let labels = part.metadata.labels.clone().unwrap_or_default();
            if part.metadata.name == role.metadata.name || !selector.matches(&labels) {
                continue;
            }
            for rule in part.rules.iter().flatten() {
                if !rules.contains(rule) {
                    rules.push(rule.clone());
                }
            }
        }
    }
    (role.rules.as_deref().unwrap_or_default() != rules).then_some(rules)
}

async fn apply(client: &Client, name: &str, rules: Vec<PolicyRule>) -> Result<Option<Duration>, SyncError> {
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": name}, "rules": rules,
    });
    let api: Api<ClusterRole> = Api::all(client.clone());
    match api.patch(name, &PatchParams::apply(NAME).force(), &Patch::Apply(role)).await {
        Ok(_) => Ok(None),
        Err(error) if is_not_found(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("write the rules of cluster role {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::Value;

    fn role(value: Value) -> Arc<ClusterRole> {
        Arc::new(ferrite_json::from_value(value).unwrap())
    }

    #[test]
    fn a_role_has_the_rules_of_those_it_selects() {
        let rule = |resource: &str| json!({"verbs": ["get"], "apiGroups": [""], "resources": [resource]});
        let part = |name: &str, resources: &[&str]| {
            let rules: Vec<Value> = resources.iter().map(|r| rule(r)).collect();
            role(json!({"metadata": {"name": name, "labels": {"to": "whole"}}, "rules": rules}))
        };
        let selectors = json!([{"matchLabels": {"to": "whole"}}]);
        let whole = |rules: Value| {
            role(json!({
                "metadata": {"name": "whole", "labels": {"to": "whole"}},
                "aggregationRule": {"clusterRoleSelectors": selectors}, "rules": rules,
            }))
        };
        let empty = whole(json!([]));
        let other = role(json!({"metadata": {"name": "c"}, "rules": [rule("nodes")]}));
        let all = [part("b", &["pods", "secrets"]), part("a", &["pods"]), other, empty.clone()];
        let wanted = decide(&empty, &all).unwrap();
        let resources: Vec<_> = wanted.iter().map(|r| r.resources.clone().unwrap()[0].clone()).collect();
        assert_eq!(resources, ["pods", "secrets"]);
        let filled = whole(json!([rule("pods"), rule("secrets")]));
        assert_eq!(decide(&filled, &all), None, "nothing is written again");
        assert_eq!(decide(&all[0], &all), None, "a role of its own rules keeps them");
    }
}
