//! Roles and ClusterRoles.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, object, strings};
use crate::meta_validation::path_segment;
use crate::resource::{MetadataUse, Strategy};
use crate::selector::{LabelSelector, validate_label_selector};
use ferrite_json::Value;

pub(in crate::kinds) struct Roles {
    pub namespaced: bool,
}

impl Strategy for Roles {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Everything
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = Vec::new();
        for (index, rule) in list(object, "rules").iter().enumerate() {
            errors.extend(validate_rule(rule, self.namespaced, &Path::new("rules").index(index)));
        }
        if let Some(aggregation) = self::object(object, "aggregationRule") {
            errors.extend(validate_aggregation(aggregation));
        }
        errors
    }

    fn validate_name(&self, name: &str) -> Vec<String> {
        path_segment(name)
    }

    fn create_on_update(&self) -> bool {
        true
    }
}

fn validate_rule(rule: &Value, namespaced: bool, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let any = |key: &str| !list(rule, key).is_empty();
    if !any("verbs") {
        errors.push(FieldError::required(&path.child("verbs"), "verbs must contain at least one value"));
    }
    if any("nonResourceURLs") {
        let mut complain = |why: &str| {
            let urls = strings(rule, "nonResourceURLs");
            errors.push(FieldError::invalid(&path.child("nonResourceURLs"), urls, why));
        };
        if namespaced {
            complain("namespaced rules cannot apply to non-resource URLs");
        }
        if any("apiGroups") || any("resources") || any("resourceNames") {
            complain("rules cannot apply to both regular resources and non-resource URLs");
        }
        return errors;
    }
    for (key, why) in [
        ("apiGroups", "resource rules must supply at least one api group"),
        ("resources", "resource rules must supply at least one resource"),
    ] {
        if !any(key) {
            errors.push(FieldError::required(&path.child(key), why));
        }
    }
    errors
}

fn validate_aggregation(rule: &Value) -> FieldErrors {
    let path = Path::new("aggregationRule").child("clusterRoleSelectors");
    let selectors = list(rule, "clusterRoleSelectors");
    if selectors.is_empty() {
        return vec![FieldError::required(
            &path,
            "at least one clusterRoleSelector required if aggregationRule is non-nil",
        )];
    }
    let mut errors = Vec::new();
    for (index, selector) in selectors.iter().enumerate() {
        let path = path.index(index);
        errors.extend(validate_label_selector(selector, &path));
        if LabelSelector::from_value(selector).is_err() {
            errors.push(FieldError::invalid(&path, Value::Null, "invalid label selector."));
        }
    }
    errors
}
