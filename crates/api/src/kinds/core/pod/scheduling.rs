//! Validation of a pod's scheduling fields.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{int, list, map, present, strings, text};
use crate::kinds::common::check::{complaints, node_selector_term, one_of_if_set};
use crate::meta_validation::{dns1123_label, label_value, qualified_name};
use crate::selector::validate_label_selector;
use ferrite_json::{Map, Text, Value};
use std::collections::{HashMap, HashSet};

pub(super) const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
pub(super) const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

pub(super) fn validate_affinity(affinity: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if let Some(nodes) = affinity.get("nodeAffinity").filter(|a| a.is_object()) {
        errors.extend(validate_node_affinity(nodes, &path.child("nodeAffinity")));
    }
    for kind in ["podAffinity", "podAntiAffinity"] {
        if let Some(pods) = affinity.get(kind).filter(|a| a.is_object()) {
            errors.extend(validate_pod_affinity(pods, &path.child(kind)));
        }
    }
    errors
}

fn validate_node_affinity(affinity: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if let Some(required) = affinity.get(REQUIRED).filter(|r| r.is_object()) {
        errors.extend(validate_node_selector(required, &path.child(REQUIRED)));
    }
    for (index, preferred) in list(affinity, PREFERRED).iter().enumerate() {
        let path = path.child(PREFERRED).index(index);
        errors.extend(validate_weight(preferred, &path));
        errors.extend(node_selector_term(&preferred["preference"], true, &path.child("preference")));
    }
    errors
}

/// At least one term, each of which would do.
pub fn validate_node_selector(selector: &Value, path: &Path) -> FieldErrors {
    let path = path.child("nodeSelectorTerms");
    let terms = list(selector, "nodeSelectorTerms");
    if terms.is_empty() {
        return vec![FieldError::required(&path, "must have at least one node selector term")];
    }
    terms
        .iter()
        .enumerate()
        .flat_map(|(index, term)| node_selector_term(term, false, &path.index(index)))
        .collect()
}

fn validate_weight(preferred: &Value, path: &Path) -> Option<FieldError> {
    let weight = int(preferred, "weight");
    (!(1..=100).contains(&weight))
        .then(|| FieldError::invalid(&path.child("weight"), weight, "must be in the range 1-100"))
}

fn validate_pod_affinity(affinity: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (index, term) in list(affinity, REQUIRED).iter().enumerate() {
        errors.extend(validate_pod_affinity_term(term, &path.child(REQUIRED).index(index)));
    }
    for (index, preferred) in list(affinity, PREFERRED).iter().enumerate() {
        let path = path.child(PREFERRED).index(index);
        errors.extend(validate_weight(preferred, &path));
        errors.extend(validate_pod_affinity_term(
            &preferred["podAffinityTerm"],
            &path.child("podAffinityTerm"),
        ));
    }
    errors
}

fn validate_pod_affinity_term(term: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for key in ["labelSelector", "namespaceSelector"] {
        errors.extend(validate_label_selector(&term[key], &path.child(key)));
    }
    for name in list(term, "namespaces").iter().filter_map(Value::as_str) {
        errors.extend(complaints(&path.child("namespace"), name, dns1123_label(name)));
    }
    errors.extend(validate_label_keys(term, path));
    let key = text(term, "topologyKey");
    let path = path.child("topologyKey");
    if key.is_empty() {
        errors.push(FieldError::required(&path, "can not be empty"));
    }
    errors.extend(complaints(&path, key, qualified_name(key)));
    errors
}

/// Keys whose values the pod's own labels give. They have become part of the selector by now.
fn validate_label_keys(term: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for kind in ["matchLabelKeys", "mismatchLabelKeys"] {
        let keys = strings(term, kind);
        if !keys.is_empty() && !present(term, "labelSelector") {
            errors.push(FieldError::forbidden(
                &path.child(kind),
                "must not be specified when labelSelector is not set",
            ));
            continue;
        }
        for (index, key) in keys.into_iter().enumerate() {
            errors.extend(complaints(&path.child(kind).index(index), key, qualified_name(key)));
        }
    }
    let matched = strings(term, "matchLabelKeys");
    let mut seen: HashSet<&str> = map(&term["labelSelector"], "matchLabels")
        .into_iter()
        .flat_map(Map::keys)
        .map(Text::as_str)
        .collect();
    for expression in list(&term["labelSelector"], "matchExpressions") {
        let key = text(expression, "key");
        if !seen.insert(key)
            && let Some(index) = matched.iter().rposition(|matched| *matched == key)
        {
            // As upstream: the index is named without its list.
            errors.push(FieldError::invalid(
                &path.index(index),
                key,
                "exists in both matchLabelKeys and labelSelector",
            ));
        }
    }
    let mismatched = strings(term, "mismatchLabelKeys");
    for (index, key) in matched.iter().enumerate().filter(|(_, key)| mismatched.contains(key)) {
        errors.push(FieldError::invalid(
            &path.child("matchLabelKeys").index(index),
            *key,
            "exists in both matchLabelKeys and mismatchLabelKeys",
        ));
    }
    errors
}

pub fn validate_tolerations(tolerations: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (index, toleration) in tolerations.iter().enumerate() {
        let path = path.index(index);
        let (key, operator, value) =
            (text(toleration, "key"), text(toleration, "operator"), text(toleration, "value"));
        let effect = text(toleration, "effect");
        if !key.is_empty() {
            errors.extend(complaints(&path.child("key"), key, qualified_name(key)));
        }
        if key.is_empty() && operator != "Exists" {
            errors.push(FieldError::invalid(
                &path.child("operator"),
                operator,
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
            ));
        }
        if present(toleration, "tolerationSeconds") && effect != "NoExecute" {
            errors.push(FieldError::invalid(
                &path.child("effect"),
                effect,
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
            ));
        }
        match operator {
            "" | "Equal" => {
                if let Some(problem) = (!label_value(value).is_empty()).then(|| label_value(value).join(";"))
                {
                    errors.push(FieldError::invalid(&path.child("operator"), value, problem));
                }
            }
            "Exists" if !value.is_empty() => errors.push(FieldError::invalid(
                &path.child("operator"),
                value,
                "value must be empty when `operator` is 'Exists'",
            )),
            "Exists" => {}
            "Lt" | "Gt" => {
                let known = ["Equal", "Exists", "Lt", "Gt"];
                errors.push(FieldError::not_supported(&path.child("operator"), operator, &known));
            }
            other => {
                errors.push(FieldError::not_supported(&path.child("operator"), other, &["Equal", "Exists"]));
            }
        }
        if !effect.is_empty() {
            errors.extend(validate_taint_effect(effect, &path.child("effect")));
        }
    }
    errors
}

/// The effect of a taint or of a toleration.
pub fn validate_taint_effect(effect: &str, path: &Path) -> Option<FieldError> {
    let allowed = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
    (!allowed.contains(&effect)).then(|| FieldError::not_supported(path, effect, &allowed))
}

pub(super) fn validate_spread(constraints: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let identity = |constraint| (text(constraint, "topologyKey"), text(constraint, "whenUnsatisfiable"));
    let last: HashMap<(&str, &str), usize> =
        constraints.iter().enumerate().map(|(index, constraint)| (identity(constraint), index)).collect();
    for (index, constraint) in constraints.iter().enumerate() {
        let path = path.index(index);
        let skew = int(constraint, "maxSkew");
        if skew <= 0 {
            errors.push(FieldError::invalid(&path.child("maxSkew"), skew, "must be greater than zero"));
        }
        let (key, action) = identity(constraint);
        if key.is_empty() {
            errors.push(FieldError::required(&path.child("topologyKey"), "can not be empty"));
        }
        if !matches!(action, "DoNotSchedule" | "ScheduleAnyway") {
            errors.push(FieldError::not_supported(
                &path.child("whenUnsatisfiable"),
                action,
                &["DoNotSchedule", "ScheduleAnyway"],
            ));
        }
        // Named at the earlier of the two.
        if last.get(&(key, action)).is_some_and(|last| *last > index) {
            errors.push(FieldError::duplicate(
                &path.child("{topologyKey, whenUnsatisfiable}"),
                format!("{{{key}, {action}}}"),
            ));
        }
        if let Some(domains) = constraint["minDomains"].as_i64() {
            let path = path.child("minDomains");
            if domains <= 0 {
                errors.push(FieldError::invalid(&path, domains, "must be greater than zero"));
            }
            if action != "DoNotSchedule" {
                errors.push(FieldError::invalid(
                    &path,
                    domains,
                    format!("can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {action}"),
                ));
            }
        }
        for key in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
            errors.extend(one_of_if_set(constraint, key, &path, &["Honor", "Ignore"]));
        }
        errors.extend(validate_label_keys(constraint, &path));
        errors.extend(validate_label_selector(&constraint["labelSelector"], &path.child("labelSelector")));
    }
    errors
}

pub(super) fn validate_gates(gates: &[Value], path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    for (index, gate) in gates.iter().enumerate() {
        let path = path.index(index);
        let name = text(gate, "name");
        errors.extend(complaints(&path, name, qualified_name(name)));
        if !names.insert(name) {
            errors.push(FieldError::duplicate(&path, name));
        }
    }
    errors
}
