//! Checks of the affinity that a configuration adds to every pod, as upstream's `nodeaffinity` package parses it.

use ferrite_api::field::{FieldError, Path};
use ferrite_api::meta_validation::{label_value, qualified_name};
use k8s_openapi::api::core::v1::{NodeAffinity, NodeSelectorRequirement, NodeSelectorTerm};

const OPERATORS: &[&str] = &["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"];
const FIELD_OPERATORS: &[&str] = &["In", "NotIn"];

pub(super) fn validate(affinity: &NodeAffinity, path: &Path) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if let Some(required) = &affinity.required_during_scheduling_ignored_during_execution {
        let path = path.child("requiredDuringSchedulingIgnoredDuringExecution").child("nodeSelectorTerms");
        for (index, term) in required.node_selector_terms.iter().enumerate() {
            validate_term(term, &path.index(index), &mut errors);
        }
    }
    let preferred = affinity.preferred_during_scheduling_ignored_during_execution.iter().flatten();
    let path = path.child("preferredDuringSchedulingIgnoredDuringExecution");
    // As upstream: a term without a weight is not looked at.
    for (index, term) in preferred.enumerate().filter(|(_, term)| term.weight != 0) {
        validate_term(&term.preference, &path.index(index), &mut errors);
    }
    errors
}

fn validate_term(term: &NodeSelectorTerm, path: &Path, errors: &mut Vec<FieldError>) {
    let expressions = path.child("matchExpressions");
    for (index, requirement) in term.match_expressions.iter().flatten().enumerate() {
        validate_labels(requirement, &expressions.index(index), errors);
    }
    let fields = path.child("matchFields");
    for (index, requirement) in term.match_fields.iter().flatten().enumerate() {
        let (path, operator) = (fields.index(index), requirement.operator.as_str());
        let values = requirement.values.as_deref().unwrap_or_default();
        if !FIELD_OPERATORS.contains(&operator) {
            errors.push(FieldError::not_supported(&path.child("operator"), operator, FIELD_OPERATORS));
        } else if values.len() != 1 {
            let path = path.child("values");
            errors.push(FieldError::invalid(&path, values.to_vec(), "must have one element"));
        }
    }
}

fn validate_labels(requirement: &NodeSelectorRequirement, path: &Path, errors: &mut Vec<FieldError>) {
    let (key, operator) = (requirement.key.as_str(), requirement.operator.as_str());
    let values = requirement.values.as_deref().unwrap_or_default();
    if !OPERATORS.contains(&operator) {
        return errors.push(FieldError::not_supported(&path.child("operator"), operator, OPERATORS));
    }
    let key_path = path.child("key");
    errors
        .extend(qualified_name(key).into_iter().map(|problem| FieldError::invalid(&key_path, key, problem)));
    let path = path.child("values");
    let problem = match operator {
        "In" | "NotIn" if values.is_empty() => Some("for 'in', 'notin' operators, values set can't be empty"),
        "Exists" | "DoesNotExist" if !values.is_empty() => {
            Some("values set must be empty for exists and does not exist")
        }
        "Gt" | "Lt" if values.len() != 1 => Some("for 'Gt', 'Lt' operators, exactly one value is required"),
        _ => None,
    };
    errors.extend(problem.map(|problem| FieldError::invalid(&path, values.to_vec(), problem)));
    for (index, value) in values.iter().enumerate() {
        let path = path.index(index);
        if matches!(operator, "Gt" | "Lt") && value.parse::<i64>().is_err() {
            let problem = "for 'Gt', 'Lt' operators, the value must be an integer";
            errors.push(FieldError::invalid(&path, value.as_str(), problem));
        }
        let problems = label_value(value).into_iter();
        errors.extend(problems.map(|problem| FieldError::invalid(&path, value.as_str(), problem)));
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn terms_that_cannot_be_parsed_are_refused() {
        let labels = |key: &str, operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
        let fields = |operator: &str, values: &[&str]| json!({"matchFields": [{"key": "metadata.name", "operator": operator, "values": values}]});
        for (term, expected) in [
            (labels("disk", "In", &["ssd"]), ""),
            (labels("disk", "Exists", &[]), ""),
            (labels("size", "Gt", &["5"]), ""),
            (fields("In", &["a"]), ""),
            (json!({}), ""),
            (labels("disk", "Near", &[]), "matchExpressions[0].operator: Unsupported value"),
            (labels("a b", "Exists", &[]), "matchExpressions[0].key: Invalid value"),
            (labels("disk", "In", &[]), "values set can't be empty"),
            (labels("disk", "Exists", &["x"]), "values set must be empty"),
            (labels("size", "Lt", &["1", "2"]), "exactly one value is required"),
            (labels("size", "Lt", &["x"]), "matchExpressions[0].values[0]: Invalid value"),
            (labels("disk", "In", &["a b"]), "matchExpressions[0].values[0]: Invalid value"),
            (fields("In", &["a", "b"]), "matchFields[0].values: Invalid value"),
            (fields("Exists", &[]), "matchFields[0].operator: Unsupported value"),
        ] {
            let required =
                json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}});
            let preferred = |weight: i32| json!({"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": weight, "preference": term}]});
            let problems = |affinity: ferrite_json::Value| -> String {
                let affinity: NodeAffinity = ferrite_json::from_value(affinity).unwrap();
                let errors = validate(&affinity, &Path::new("addedAffinity"));
                errors.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            };
            for text in [problems(required), problems(preferred(1))] {
                assert_eq!(text.is_empty(), expected.is_empty(), "{term}: {text}");
                assert!(text.contains(expected), "{term}: {text}");
            }
            assert_eq!(problems(preferred(0)), "", "{term}");
        }
    }
}
