//! Label selectors.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::Labels;

/// A condition on one label.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Requirement {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    DoesNotExist(String),
    /// A condition that cannot be understood matches nothing.
    Never,
}

/// Labels that meet all conditions. Without conditions, all labels do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Selector(Vec<Requirement>);

impl Selector {
    pub fn of(selector: &LabelSelector) -> Self {
        let equal = selector.match_labels.iter().flatten();
        let equal = equal.map(|(key, value)| Requirement::In(key.clone(), vec![value.clone()]));
        let expressions = selector.match_expressions.iter().flatten().map(|expression| {
            let (key, mut values) = (expression.key.clone(), expression.values.clone().unwrap_or_default());
            values.sort();
            match expression.operator.as_str() {
                "In" => Requirement::In(key, values),
                "NotIn" => Requirement::NotIn(key, values),
                "Exists" => Requirement::Exists(key),
                "DoesNotExist" => Requirement::DoesNotExist(key),
                _ => Requirement::Never,
            }
        });
        let mut all: Vec<Requirement> = equal.chain(expressions).collect();
        // Selectors that say the same in another order are one.
        all.sort();
        all.dedup();
        Self(all)
    }

    pub fn matches(&self, labels: &Labels) -> bool {
        self.0.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => labels.get(key).is_some_and(|value| values.contains(value)),
            Requirement::NotIn(key, values) => !labels.get(key).is_some_and(|value| values.contains(value)),
            Requirement::Exists(key) => labels.contains_key(key),
            Requirement::DoesNotExist(key) => !labels.contains_key(key),
            Requirement::Never => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn selectors() {
        let labels: Labels =
            [("app".to_owned(), "web".to_owned()), ("tier".to_owned(), "1".to_owned())].into();
        for (want, selector) in [
            (true, json!({})),
            (true, json!({"matchLabels": {"app": "web"}})),
            (false, json!({"matchLabels": {"app": "web", "zone": "a"}})),
            (true, json!({"matchExpressions": [{"key": "app", "operator": "In", "values": ["x", "web"]}]})),
            (false, json!({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]})),
            (true, json!({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]})),
            (true, json!({"matchExpressions": [{"key": "tier", "operator": "Exists"}]})),
            (false, json!({"matchExpressions": [{"key": "tier", "operator": "DoesNotExist"}]})),
            (false, json!({"matchExpressions": [{"key": "tier", "operator": "Gt", "values": ["0"]}]})),
        ] {
            let parsed = Selector::of(&serde_json::from_value(selector.clone()).unwrap());
            assert_eq!(parsed.matches(&labels), want, "{selector}");
        }
    }
}
