//! ResourceQuotas.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{ensure_object, list, map, strings, text};
use crate::kinds::common::cell;
use crate::kinds::common::check::{IMMUTABLE, NOT_NEGATIVE};
use crate::kinds::common::row::{NAME, shown};
use crate::kinds::core::pod::defaults::default_resource_list;
use crate::kinds::core::pod::resources::{
    amounts, is_integer_resource, is_quota_resource, validate_quota_resource_name,
};
use crate::quantity::Quantity;
use crate::resource::{Column, StatusUse, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;
use std::collections::BTreeSet;

const ZERO: &str = "0";

pub(in crate::kinds) struct ResourceQuotas;

/// The resources of which both requests and limits can be limited.
const REQUESTED: [&str; 4] = ["cpu", "memory", "storage", "ephemeral-storage"];

/// Requests that may be larger than the limits are never used up.
fn warnings_of(hard: &Value) -> Vec<String> {
    let amount = |name: String| {
        let amount = Quantity::parse(hard[name.as_str()].as_str()?).ok()?;
        Some((name, amount))
    };
    let wider = |name: &str| {
        let bare = || matches!(name, "cpu" | "memory").then(|| amount(name.to_owned())).flatten();
        let (request, requested) = amount(format!("requests.{name}")).or_else(bare)?;
        let (limit, limited) = amount(format!("limits.{name}"))?;
        (requested > limited)
            .then(|| format!("ResourceQuota {request} ({requested}) should be less than {limit} ({limited})"))
    };
    REQUESTED.iter().filter_map(|name| wider(name)).collect()
}

impl Strategy for ResourceQuotas {
    fn warnings_on_create(&self, object: &Value) -> Vec<String> {
        warnings_of(&object["spec"]["hard"])
    }

    fn default(&self, object: &mut Value) {
        if let Some(hard) = ensure_object(object, "spec").get_mut("hard") {
            default_resource_list(hard);
        }
        let status = ensure_object(object, "status");
        for key in ["hard", "used"] {
            if let Some(amounts) = status.get_mut(key) {
                default_resource_list(amounts);
            }
        }
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::WithMetadata
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = validate_amounts(spec, "hard", &path);
        errors.extend(validate_scopes(spec, &path.child("scopes")));
        if spec["scopeSelector"].is_object() {
            errors.extend(validate_scope_selector(
                spec,
                &path.child("scopeSelector").child("matchExpressions"),
            ));
        }
        errors
    }

    fn validate_update(&self, new: &Value, old: &Value) -> FieldErrors {
        let mut errors = self.validate(new);
        let scopes = |quota: &Value| -> BTreeSet<String> {
            strings(&quota["spec"], "scopes").into_iter().map(str::to_owned).collect()
        };
        if scopes(new) != scopes(old) {
            let given = new["spec"]["scopes"].clone();
            errors.push(FieldError::invalid(&Path::new("spec").child("scopes"), given, IMMUTABLE));
        }
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        let path = Path::new("status");
        ["hard", "used"].iter().flat_map(|key| validate_amounts(&new["status"], key, &path)).collect()
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Request"), shown("Limit"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let status = &object["status"];
        let used = map(status, "used");
        let (mut requests, mut limits) = (Vec::new(), Vec::new());
        for (name, hard) in map(status, "hard").into_iter().flatten() {
            let used = used.and_then(|u| u.get(name)).and_then(Value::as_str).unwrap_or(ZERO);
            let shown = format!("{name}: {used}/{}", hard.as_str().unwrap_or(ZERO));
            if name.starts_with("limits") { limits.push(shown) } else { requests.push(shown) }
        }
        vec![cell::name(object), requests.join(", ").into(), limits.join(", ").into(), cell::age(object, now)]
    }

    fn returns_deleted(&self) -> bool {
        true
    }
}

fn validate_amounts(parent: &Value, key: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    for (name, amount) in amounts(parent, key) {
        let path = path.child(key).key(&name);
        errors.extend(validate_quota_resource_name(&name, &path));
        errors.extend(validate_amount(&name, amount, &path));
    }
    errors
}

fn validate_amount(name: &str, amount: Quantity, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if amount.is_negative() {
        errors.push(FieldError::invalid(path, amount.to_string(), NOT_NEGATIVE));
    }
    if is_integer_resource(name) && !amount.is_integer() {
        errors.push(FieldError::invalid(path, amount.to_string(), "must be an integer"));
    }
    errors
}

const COMPUTE: &[&str] = &["cpu", "memory", "limits.cpu", "limits.memory", "requests.cpu", "requests.memory"];
const CONFLICTS: [[&str; 2]; 2] = [["BestEffort", "NotBestEffort"], ["Terminating", "NotTerminating"]];

fn is_scope(scope: &str) -> bool {
    matches!(
        scope,
        "Terminating"
            | "NotTerminating"
            | "BestEffort"
            | "NotBestEffort"
            | "PriorityClass"
            | "CrossNamespacePodAffinity"
            | "VolumeAttributesClass"
    )
}

/// Returns true if a scope applies to a resource.
fn applies(scope: &str, resource: &str) -> bool {
    match scope {
        "BestEffort" => resource == "pods",
        "VolumeAttributesClass" => matches!(resource, "persistentvolumeclaims" | "requests.storage"),
        _ if is_scope(scope) => resource == "pods" || COMPUTE.contains(&resource),
        _ => true,
    }
}

/// The limited resources a scope says nothing about.
fn unsuited(spec: &Value, scope: &str) -> usize {
    map(spec, "hard")
        .into_iter()
        .flatten()
        .filter(|(name, _)| is_quota_resource(name) && !applies(scope, name))
        .count()
}

fn validate_scopes(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let scopes = strings(spec, "scopes");
    let mut complain = |why: &str| errors.push(FieldError::invalid(path, scopes.clone(), why));
    for scope in &scopes {
        if !is_scope(scope) {
            complain("unsupported scope");
        }
        for _ in 0..unsuited(spec, scope) {
            complain("unsupported scope applied to resource");
        }
    }
    for pair in CONFLICTS {
        if pair.iter().all(|scope| scopes.contains(scope)) {
            complain("conflicting scopes");
        }
    }
    errors
}

fn validate_scope_selector(spec: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let expressions = list(&spec["scopeSelector"], "matchExpressions");
    let whole = |why: &str| {
        FieldError::invalid(path, spec["scopeSelector"].clone(), why)
            .rendered_as(render_selector(expressions))
    };
    for expression in expressions {
        let (scope, operator) = (text(expression, "scopeName"), text(expression, "operator"));
        let values = list(expression, "values");
        if !is_scope(scope) {
            errors.push(FieldError::invalid(&path.child("scopeName"), scope, "unsupported scope"));
        }
        for _ in 0..unsuited(spec, scope) {
            errors.push(whole("unsupported scope applied to resource"));
        }
        let only_exists = is_scope(scope) && !matches!(scope, "PriorityClass" | "VolumeAttributesClass");
        if only_exists && operator != "Exists" {
            errors.push(FieldError::invalid(
                &path.child("operator"),
                operator,
                "must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, ResourceQuotaScopeNotTerminating, \
                 ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or \
                 ResourceQuotaScopeCrossNamespacePodAffinity",
            ));
        }
        match operator {
            "In" | "NotIn" if values.is_empty() => errors.push(FieldError::required(
                &path.child("values"),
                "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector",
            )),
            "Exists" | "DoesNotExist" if !values.is_empty() => errors.push(FieldError::invalid(
                &path.child("values"),
                values.to_vec(),
                "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector",
            )),
            "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
            other => {
                errors.push(FieldError::invalid(
                    &path.child("operator"),
                    other,
                    "not a valid selector operator",
                ));
            }
        }
    }
    let has = |scope: &&str| expressions.iter().any(|e| text(e, "scopeName") == *scope);
    for pair in CONFLICTS {
        if pair.iter().all(has) {
            errors.push(FieldError::invalid(path, strings(spec, "scopes"), "conflicting scopes"));
        }
    }
    errors
}

fn render_selector(expressions: &[Value]) -> String {
    let parts: Vec<String> = expressions
        .iter()
        .map(|e| {
            let values = list(e, "values");
            let values = if values.is_empty() { Value::Null } else { values.to_vec().into() };
            format!(
                "{{\"ScopeName\":{:?},\"Operator\":{:?},\"Values\":{values}}}",
                text(e, "scopeName"),
                text(e, "operator")
            )
        })
        .collect();
    format!("{{\"MatchExpressions\":[{}]}}", parts.join(","))
}
