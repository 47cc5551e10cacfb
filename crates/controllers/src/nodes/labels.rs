//! Labels that follow from others.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;

/// Labels and the older names under which clients still look for them.
const RECONCILED: &[(&str, &str)] =
    &[("kubernetes.io/os", "beta.kubernetes.io/os"), ("kubernetes.io/arch", "beta.kubernetes.io/arch")];
/// A node with this label does not count when a zone is checked for a disruption.
const EXCLUDED: &str = "node.kubernetes.io/exclude-disruption";

/// The older labels that are missing or wrong.
pub(super) fn to_reconcile(node: &Node) -> BTreeMap<&'static str, &str> {
    let Some(labels) = &node.metadata.labels else { return BTreeMap::new() };
    RECONCILED
        .iter()
        .filter_map(|(label, older)| Some((*older, labels.get(*label)?.as_str())))
        .filter(|(older, value)| labels.get(*older).is_none_or(|has| has != value))
        .collect()
}

pub(super) fn is_excluded(node: &Node) -> bool {
    node.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(EXCLUDED))
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    #[test]
    fn older_labels_follow_the_present_ones() {
        let node = |labels: Value| -> Node {
            ferrite_json::from_value(json!({"metadata": {"name": "n", "labels": labels}})).unwrap()
        };
        for (labels, expected) in [
            (json!(null), vec![]),
            (json!({"beta.kubernetes.io/os": "plan9"}), vec![]),
            (json!({"kubernetes.io/os": "linux", "beta.kubernetes.io/os": "linux"}), vec![]),
            (
                json!({"kubernetes.io/os": "linux", "beta.kubernetes.io/os": "plan9"}),
                vec![("beta.kubernetes.io/os", "linux")],
            ),
            (json!({"kubernetes.io/arch": "arm64"}), vec![("beta.kubernetes.io/arch", "arm64")]),
        ] {
            assert_eq!(to_reconcile(&node(labels)).into_iter().collect::<Vec<_>>(), expected);
        }
        assert!(is_excluded(&node(json!({EXCLUDED: ""}))) && !is_excluded(&node(json!({}))));
    }
}
