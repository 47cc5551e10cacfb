//! FlowSchemas.

use super::{prepare_status, validate_conditions};
use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{
    default_int, ensure_object, flag, int, list, object, present, strings, text,
};
use crate::kinds::common::cell;
use crate::kinds::common::check::complaints;
use crate::kinds::common::go;
use crate::kinds::common::row::{NAME, shown};
use crate::meta_validation::{dns1123_label, dns1123_subdomain};
use crate::resource::{Column, MetadataUse, StatusUse, Strategy};
use crate::table::NONE;
use ferrite_json::{Value, json};
use jiff::Timestamp;

const PRECEDENCE: i64 = 1000;
const PRECEDENCE_MAX: i64 = 10_000;
const VERBS: &[&str] =
    &["create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"];

pub(in crate::kinds) struct FlowSchemas;

impl Strategy for FlowSchemas {
    fn metadata_use(&self) -> MetadataUse {
        MetadataUse::Content
    }

    fn default(&self, object: &mut Value) {
        let spec = ensure_object(object, "spec");
        default_int(spec, "matchingPrecedence", PRECEDENCE);
        ensure_object(spec, "priorityLevelConfiguration");
    }

    fn status_use(&self) -> StatusUse {
        StatusUse::Alone
    }

    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        prepare_status(new, old);
    }

    fn validate(&self, object: &Value) -> FieldErrors {
        let (spec, path) = (&object["spec"], Path::new("spec"));
        let mut errors = Vec::new();
        let precedence = int(spec, "matchingPrecedence");
        let mut complain = |why: String| {
            errors.push(FieldError::invalid(&path.child("matchingPrecedence"), precedence, why));
        };
        if precedence <= 0 {
            complain("must be a positive value".to_owned());
        }
        if precedence > PRECEDENCE_MAX {
            complain(format!("must not be greater than {PRECEDENCE_MAX}"));
        }
        if precedence == 1 && crate::meta::name(object) != "exempt" {
            complain("only the schema named 'exempt' may have matchingPrecedence 1".to_owned());
        }
        if let Some(method) = self::object(spec, "distinguisherMethod")
            && !matches!(text(method, "type"), "ByNamespace" | "ByUser")
        {
            errors.push(
                FieldError::not_supported(
                    &path.child("distinguisherMethod").child("type"),
                    method.clone(),
                    &["ByNamespace", "ByUser"],
                )
                .rendered_as(go::compact("FlowDistinguisherMethod", method)),
            );
        }
        let level_path = path.child("priorityLevelConfiguration").child("name");
        match text(&spec["priorityLevelConfiguration"], "name") {
            "" => errors.push(FieldError::required(&level_path, "must reference a priority level")),
            name => errors.extend(complaints(&level_path, name, dns1123_subdomain(name))),
        }
        for (index, rule) in list(spec, "rules").iter().enumerate() {
            errors.extend(validate_rule(rule, &path.child("rules").index(index)));
        }
        let name = crate::meta::name(object);
        if mandatory(name)
            .is_some_and(|fixed| go::compact("FlowSchemaSpec", &fixed) != go::compact("FlowSchemaSpec", spec))
        {
            errors.push(
                FieldError::invalid(
                    &path,
                    spec.clone(),
                    format!("spec of '{name}' must equal the fixed value"),
                )
                .rendered_as(go::compact("FlowSchemaSpec", spec)),
            );
        }
        errors.extend(validate_conditions(&object["status"]));
        errors
    }

    fn validate_status_update(&self, new: &Value, _old: &Value) -> FieldErrors {
        validate_conditions(&new["status"])
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["spec"]
    }

    fn columns(&self) -> &'static [Column] {
        const {
            &[
                NAME,
                shown("PriorityLevel"),
                shown("MatchingPrecedence"),
                shown("DistinguisherMethod"),
                shown("Age"),
                shown("MissingPL"),
            ]
        }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let spec = &object["spec"];
        let dangling = list(&object["status"], "conditions")
            .iter()
            .find(|c| text(c, "type") == "Dangling")
            .map_or("?", |c| text(c, "status"));
        vec![
            cell::name(object),
            text(&spec["priorityLevelConfiguration"], "name").into(),
            int(spec, "matchingPrecedence").into(),
            cell::text_or(&spec["distinguisherMethod"], "type", NONE),
            cell::age(object, now),
            dangling.into(),
        ]
    }
}

/// The schemas without which some request would belong to no level.
fn mandatory(name: &str) -> Option<Value> {
    let schema = |precedence: i64, method: Value, groups: &[&str]| {
        let subjects: Vec<Value> =
            groups.iter().map(|group| json!({"kind": "Group", "group": {"name": group}})).collect();
        json!({
            "priorityLevelConfiguration": {"name": name},
            "matchingPrecedence": precedence,
            "distinguisherMethod": method,
            "rules": [{
                "subjects": subjects,
                "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": true,
                    "namespaces": ["*"]}],
                "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
            }],
        })
    };
    match name {
        "exempt" => Some(schema(1, Value::Null, &["system:masters"])),
        "catch-all" => Some(schema(
            PRECEDENCE_MAX,
            json!({"type": "ByUser"}),
            &["system:unauthenticated", "system:authenticated"],
        )),
        _ => None,
    }
}

fn validate_rule(rule: &Value, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let subjects = list(rule, "subjects");
    if subjects.is_empty() {
        errors
            .push(FieldError::required(&path.child("subjects"), "subjects must contain at least one value"));
    }
    for (index, subject) in subjects.iter().enumerate() {
        errors.extend(validate_subject(subject, &path.child("subjects").index(index)));
    }
    let (resources, urls) = (list(rule, "resourceRules"), list(rule, "nonResourceRules"));
    if resources.is_empty() && urls.is_empty() {
        errors.push(FieldError::required(
            path,
            "at least one of resourceRules and nonResourceRules has to be non-empty",
        ));
    }
    for (index, rule) in resources.iter().enumerate() {
        errors.extend(validate_resource_rule(rule, &path.child("resourceRules").index(index)));
    }
    for (index, rule) in urls.iter().enumerate() {
        errors.extend(validate_url_rule(rule, &path.child("nonResourceRules").index(index)));
    }
    errors
}

fn validate_subject(subject: &Value, path: &Path) -> FieldErrors {
    const KINDS: [(&str, &str); 3] =
        [("ServiceAccount", "serviceAccount"), ("User", "user"), ("Group", "group")];
    let kind = text(subject, "kind");
    let Some((_, key)) = KINDS.iter().find(|(name, _)| *name == kind) else {
        return vec![FieldError::not_supported(
            &path.child("kind"),
            kind,
            &["Group", "ServiceAccount", "User"],
        )];
    };
    let mut errors = Vec::new();
    match object(subject, key) {
        None => errors.push(FieldError::required(
            &path.child(key),
            format!("{key} is required when subject kind is '{kind}'"),
        )),
        Some(named) => errors.extend(validate_named(named, kind, &path.child(key))),
    }
    for (other, field) in KINDS.iter().filter(|(name, _)| *name != kind) {
        if present(subject, field) {
            errors.push(FieldError::forbidden(
                &path.child(field),
                format!("{field} is forbidden when subject kind is not '{other}'"),
            ));
        }
    }
    errors
}

fn validate_named(named: &Value, kind: &str, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    let name = text(named, "name");
    if name.is_empty() {
        errors.push(FieldError::required(&path.child("name"), ""));
    }
    if kind != "ServiceAccount" {
        return errors;
    }
    if !name.is_empty() && name != "*" {
        errors.extend(complaints(&path.child("name"), name, dns1123_subdomain(name)));
    }
    match text(named, "namespace") {
        "" => errors.push(FieldError::required(
            &path.child("namespace"),
            "must specify namespace for service account",
        )),
        namespace => errors.extend(complaints(&path.child("namespace"), namespace, dns1123_label(namespace))),
    }
    errors
}

fn validate_verbs(rule: &Value, path: &Path) -> Option<FieldError> {
    let verbs = strings(rule, "verbs");
    let path = path.child("verbs");
    if verbs.is_empty() {
        return Some(FieldError::required(&path, "verbs must contain at least one value"));
    }
    if verbs.contains(&"*") {
        return (verbs.len() > 1)
            .then(|| FieldError::invalid(&path, verbs, "if '*' is present, must not specify other verbs"));
    }
    let known = verbs.iter().all(|v| VERBS.contains(v));
    (!known).then(|| FieldError::not_supported(&path, verbs, VERBS))
}

fn validate_resource_rule(rule: &Value, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors = validate_verbs(rule, path).into_iter().collect();
    for (key, one, what) in [("apiGroups", "api group", "api groups"), ("resources", "resource", "resources")]
    {
        let values = strings(rule, key);
        if values.is_empty() {
            errors.push(FieldError::required(
                &path.child(key),
                format!("resource rules must supply at least one {one}"),
            ));
        } else if values.len() > 1 && values.contains(&"*") {
            errors.push(FieldError::invalid(
                &path.child(key),
                values,
                format!("if '*' is present, must not specify other {what}"),
            ));
        }
    }
    let (namespaces, path) = (strings(rule, "namespaces"), path.child("namespaces"));
    if namespaces.is_empty() && !flag(rule, "clusterScope") {
        errors.push(FieldError::required(
            &path,
            "resource rules that are not cluster scoped must supply at least one namespace",
        ));
    } else if namespaces.contains(&"*") {
        if namespaces.len() > 1 {
            errors.push(FieldError::invalid(
                &path,
                namespaces,
                "if '*' is present, must not specify other namespaces",
            ));
        }
    } else {
        for (index, namespace) in namespaces.into_iter().enumerate() {
            let problems = dns1123_label(namespace)
                .into_iter()
                .map(|p| format!("each member of this list must be '*' or a DNS-1123 label; {p}"))
                .collect();
            errors.extend(complaints(&path.index(index), namespace, problems));
        }
    }
    errors
}

fn validate_url_rule(rule: &Value, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors = validate_verbs(rule, path).into_iter().collect();
    let (urls, path) = (strings(rule, "nonResourceURLs"), path.child("nonResourceURLs"));
    if urls.is_empty() {
        errors.push(FieldError::required(&path, "nonResourceURLs must contain at least one value"));
    } else if urls.contains(&"*") {
        if urls.len() > 1 {
            errors.push(FieldError::invalid(
                &path,
                urls,
                "if '*' is present, must not specify other non-resource URLs",
            ));
        }
    } else {
        for (index, url) in urls.into_iter().enumerate() {
            errors.extend(url_problem(url).map(|why| FieldError::invalid(&path.index(index), url, why)));
        }
    }
    errors
}

fn url_problem(url: &str) -> Option<&'static str> {
    let stars = url.matches('*').count();
    match url {
        "" => Some("must not be empty"),
        "/" => None,
        _ if !url.starts_with('/') => Some("must start with slash"),
        _ if url.contains(' ') => Some("must not contain white-space"),
        _ if url.contains("//") => Some("must not contain double slash"),
        _ if stars > 1 || (stars == 1 && !url.ends_with("/*")) => {
            Some("wildcard can only do suffix matching")
        }
        _ => None,
    }
}
