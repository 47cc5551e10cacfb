//! Which nodes a pod may be placed on: node selectors, node affinity, taints and tolerations.
//!
//! The scheduler and the controllers that act on nodes must agree on these rules, so they stand here once.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Taint, Toleration,
};

/// Returns true if the toleration covers the taint.
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect || !key.is_empty() && key != taint.key {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => {
            toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default()
        }
        "Exists" => true,
        _ => false,
    }
}

/// Returns true if the node satisfies a pod's `nodeSelector` and its required node affinity.
pub fn matches_node(
    selector: Option<&BTreeMap<String, String>>,
    required: Option<&NodeSelector>,
    node: &Node,
) -> bool {
    let label = |key: &str| node.metadata.labels.as_ref().and_then(|labels| labels.get(key));
    selector.into_iter().flatten().all(|(key, value)| label(key) == Some(value))
        && required
            .is_none_or(|required| required.node_selector_terms.iter().any(|term| matches_term(term, node)))
}

/// Returns true if the node satisfies all requirements of the term. A term without requirements matches no
/// node.
pub fn matches_term(term: &NodeSelectorTerm, node: &Node) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let label =
        |key: &str| node.metadata.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
    let field = |key: &str| if key == "metadata.name" { node.metadata.name.as_deref() } else { None };
    expressions.iter().all(|requirement| satisfies(requirement, label(&requirement.key)))
        && fields.iter().all(|requirement| satisfies(requirement, field(&requirement.key)))
}

fn satisfies(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let contains = |value: &str| values.iter().any(|known| known == value);
    let number = |text: &str| text.parse::<i64>().ok();
    match requirement.operator.as_str() {
        "In" => value.is_some_and(contains),
        "NotIn" => value.is_none_or(|value| !contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        operator @ ("Gt" | "Lt") => {
            let [bound] = values else { return false };
            match (value.and_then(number), number(bound)) {
                (Some(value), Some(bound)) if operator == "Gt" => value > bound,
                (Some(value), Some(bound)) => value < bound,
                _ => false,
            }
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn requirements() {
        for (operator, values, value, expected) in [
            ("In", &["a", "b"][..], Some("a"), true),
            ("In", &["a"], None, false),
            ("NotIn", &["a"], Some("b"), true),
            ("NotIn", &["a"], None, true),
            ("Exists", &[], Some(""), true),
            ("DoesNotExist", &[], Some("x"), false),
            ("Gt", &["5"], Some("6"), true),
            ("Gt", &["5"], Some("5"), false),
            ("Lt", &["5"], Some("4"), true),
            ("Lt", &["5"], Some("x"), false),
            ("Nonsense", &[], Some("x"), false),
        ] {
            let requirement: NodeSelectorRequirement =
                ferrite_json::from_value(json!({"key": "k", "operator": operator, "values": values}))
                    .unwrap();
            assert_eq!(satisfies(&requirement, value), expected, "{operator} {values:?} {value:?}");
        }
    }

    #[test]
    fn an_empty_term_matches_nothing() {
        assert!(!matches_term(&NodeSelectorTerm::default(), &Node::default()));
    }
}
