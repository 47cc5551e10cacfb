//! ValidatingWebhookConfigurations and MutatingWebhookConfigurations.

use super::client_config::{default_service_port, validate_client_config, validate_review_versions};
use super::matching::{
    FAILURE_POLICIES, MATCH_POLICIES, default_matching, validate_conditions, validate_rule,
};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{default_field, list, list_mut, object_mut, present, strings, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::one_of_if_set;
use crate::kinds::common::row::{NAME, number, shown};
use crate::meta_validation::dns1123_subdomain;
use crate::resource::{Column, MetadataUse, Strategy};
use crate::selector::validate_label_selector;
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::HashSet;

const TIMEOUT: i64 = 10;

pub(in crate::kinds) struct WebhookConfigurations {
    pub mutating: bool,
}

impl Strategy for WebhookConfigurations {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Content
    }

    fn knows_finalizers(&self) -> bool {
        false
    }

    fn default(&self, object: &mut Value) {
        for webhook in list_mut(object, "webhooks").filter(|w| w.is_object()) {
            default_field(webhook, "failurePolicy", "Fail");
            default_matching(webhook, &["rules"]);
            default_field(webhook, "timeoutSeconds", TIMEOUT);
            if self.mutating {
                default_field(webhook, "reinvocationPolicy", "Never");
            }
            if let Some(config) = object_mut(webhook, "clientConfig") {
                default_service_port(config);
            }
        }
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let mut errors = Vec::new();
        let mut names = HashSet::new();
        for (index, webhook) in list(object, "webhooks").iter().enumerate() {
            let path = Path::new("webhooks").index(index);
            errors.extend(validate_webhook(webhook, self.mutating, &path));
            errors.extend(validate_review_versions(
                &strings(webhook, "admissionReviewVersions"),
                &path.child("admissionReviewVersions"),
            ));
            let name = text(webhook, "name");
            if !name.is_empty() && !names.insert(name) {
                errors.push(FieldError::duplicate(&path.child("name"), name));
            }
        }
        errors
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["webhooks"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, number("Webhooks"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![cell::name(object), cell::count(object, "webhooks"), cell::age(object, now)]
    }

    fn unconditional_update(&self) -> bool {
        false
    }
}

/// A domain of at least three parts.
fn validate_qualified_name(name: &str, path: &Path) -> FieldErrors {
    if name.is_empty() {
        return vec![FieldError::required(path, "")];
    }
    let problems = dns1123_subdomain(name);
    if !problems.is_empty() {
        return vec![FieldError::invalid(path, name, problems.join(","))];
    }
    if name.split('.').count() < 3 {
        return vec![FieldError::invalid(
            path,
            name,
            "should be a domain with at least three segments separated by dots",
        )];
    }
    Vec::new()
}

fn validate_webhook(webhook: &Value, mutating: bool, path: &Path) -> FieldErrors {
    let mut errors = validate_qualified_name(text(webhook, "name"), &path.child("name"));
    for (index, rule) in list(webhook, "rules").iter().enumerate() {
        errors.extend(validate_rule(rule, &path.child("rules").index(index)));
    }
    errors.extend(one_of_if_set(webhook, "failurePolicy", path, FAILURE_POLICIES));
    errors.extend(one_of_if_set(webhook, "matchPolicy", path, MATCH_POLICIES));
    if present(webhook, "sideEffects") {
        errors.extend(one_of_if_set(webhook, "sideEffects", path, &["None", "NoneOnDryRun"]));
    } else {
        errors
            .push(FieldError::required(&path.child("sideEffects"), "must specify one of None, NoneOnDryRun"));
    }
    if let Some(seconds) = webhook["timeoutSeconds"].as_i64().filter(|s| !(1..=30).contains(s)) {
        errors.push(FieldError::invalid(
            &path.child("timeoutSeconds"),
            seconds,
            "the timeout value must be between 1 and 30 seconds",
        ));
    }
    for key in ["namespaceSelector", "objectSelector"] {
        errors.extend(validate_label_selector(&webhook[key], &path.child(key)));
    }
    if mutating {
        errors.extend(one_of_if_set(webhook, "reinvocationPolicy", path, &["IfNeeded", "Never"]));
    }
    errors.extend(validate_client_config(&webhook["clientConfig"], &path.child("clientConfig")));
    let conditions = list(webhook, "matchConditions");
    errors.extend(validate_conditions(conditions, false, &path.child("matchConditions")));
    errors
}
