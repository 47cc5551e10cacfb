//! Reviews: questions about a user's identity and rights. Answered, not stored.

use crate::auth::{Action, Held, Mode, User, aggregate, decide, node, settled};
use crate::call::Call;
use crate::encode;
use crate::http::Response;
use crate::options::WriteOptions;
use crate::registry::metadata;
use crate::subresource::token::Rejected;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::selector::{FieldSelector, FieldTerm, LabelSelector, Requirement};
use ferrite_api::{Status, meta, schema};
use ferrite_json::{Map, Value, json};
use jiff::Timestamp;
use std::collections::BTreeMap;

pub(crate) async fn answer(
    call: &Call,
    mut review: Value,
    options: &WriteOptions,
) -> Result<Response, Status> {
    let resource = &call.resource;
    if resource.is_namespaced() {
        let given = meta::namespace(&review);
        if !given.is_empty() && given != call.namespace() {
            return Err(Status::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        meta::set_str(&mut review, "namespace", call.namespace());
    } else {
        meta::metadata_mut(&mut review).remove("namespace");
    }
    crate::registry::normalise(resource, &mut review);
    let mut errors = resource.strategy.validate(&review);
    let asks_access =
        resource.group == "authorization.k8s.io" && resource.plural != "selfsubjectrulesreviews";
    if asks_access || resource.plural == "tokenreviews" {
        crate::managed::on_write(resource, None, &mut review, options, None, Timestamp::now());
    }
    if asks_access {
        errors.extend(refuse_metadata(&review, resource.is_namespaced()));
    }
    let asked =
        review.pointer("/spec/resourceAttributes/namespace").and_then(Value::as_str).unwrap_or_default();
    if resource.is_namespaced()
        && asked != call.namespace()
        && review["spec"]["resourceAttributes"].is_object()
    {
        let path = Path::new("spec").child("resourceAttributes").child("namespace");
        let error = FieldError::invalid(&path, asked, "must match metadata.namespace");
        if !errors.contains(&error) {
            errors.push(error);
        }
    }
    if !errors.is_empty() {
        return Err(Status::invalid(&resource.group, "", "", &errors));
    }
    match &*resource.plural {
        "selfsubjectreviews" => {
            let now = metadata::time(Timestamp::now());
            // As upstream: the answer does not repeat the question.
            review["metadata"] = json!({"creationTimestamp": now});
            review["status"] = json!({"userInfo": user_info(&call.user)});
        }
        "tokenreviews" => {
            if review.pointer("/spec/token").and_then(Value::as_str).unwrap_or_default().is_empty() {
                return Err(Status::bad_request("token is required for TokenReview in authentication"));
            }
            let mut status = token_status(call, &review).await;
            if status["authenticated"] != true {
                // As upstream: a user that the client wrote itself stays if the token is nobody's.
                for key in ["user", "audiences"] {
                    if let Some(given) = review["status"].get(key).filter(|given| !given.is_null()) {
                        status[key] = given.clone();
                    }
                }
            }
            review["status"] = status;
        }
        "selfsubjectrulesreviews" => {
            if review["spec"]["namespace"].as_str().unwrap_or_default().is_empty() {
                return Err(Status::bad_request("no namespace on request"));
            }
            let status = rules_status(call, &review);
            // As above: nothing of the question is repeated.
            review["metadata"] = json!({});
            review["spec"] = json!({});
            review["status"] = status;
        }
        plural => {
            let user = if plural == "selfsubjectaccessreviews" {
                User::clone(&call.user)
            } else {
                asked_for(&review)
            };
            let (registry, action) = (&call.server.registry, action(&review));
            let decide = || decide(&registry.rbac, &registry.view(), &user, &action);
            let decision = settled(&registry.rbac, decide).await;
            let mut status = json!({"allowed": decision.allowed});
            if decision.denied {
                status["denied"] = true.into();
            }
            if !decision.reason.is_empty() {
                status["reason"] = decision.reason.into();
            }
            let mut problems: Vec<String> = decision.error.into_iter().collect();
            problems.extend(ignored_selectors(&review["spec"]["resourceAttributes"]));
            if !problems.is_empty() {
                status["evaluationError"] = problems.join("; ").into();
            }
            review["status"] = status;
        }
    }
    encode::object(201, resource, &review, call.representation, call.include_object()?)
}

/// An access review has no metadata except the server's own.
fn refuse_metadata(review: &Value, namespaced: bool) -> Option<FieldError> {
    let metadata = review["metadata"].as_object()?;
    let owned = |key: &str| key == "managedFields" || (namespaced && key == "namespace");
    let empty = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    };
    let given = metadata.iter().any(|(key, value)| !owned(key) && !empty(value));
    let why = if namespaced { "must be empty except for namespace" } else { "must be empty" };
    given.then(|| {
        let error = FieldError::invalid(&Path::new("metadata"), review["metadata"].clone(), why);
        match schema::named("meta.v1.ObjectMeta") {
            Some(type_) => error.rendered_as(crate::patch::render::declared(type_, &review["metadata"])),
            None => error,
        }
    })
}

fn user_info(user: &User) -> Value {
    let mut info = Map::new();
    info.insert("username", user.name.clone().into());
    if !user.uid.is_empty() {
        info.insert("uid", user.uid.clone().into());
    }
    info.insert("groups", user.groups.clone().into());
    if !user.extra.is_empty() {
        info.insert("extra", json!(user.extra));
    }
    Value::Object(info)
}

async fn token_status(call: &Call, review: &Value) -> Value {
    let text = review.pointer("/spec/token").and_then(Value::as_str).unwrap_or_default();
    let listed = review.pointer("/spec/audiences").and_then(Value::as_array).into_iter().flatten();
    let mut wanted: Vec<&str> = listed.filter_map(Value::as_str).collect();
    if wanted.is_empty() {
        wanted = call.server.config.audiences();
    }
    match call.server.any_token_user(text, &wanted).await {
        Ok((user, audiences)) => {
            json!({"authenticated": true, "user": user_info(&user), "audiences": audiences})
        }
        Err(Rejected::Unknown) => json!({"user": {}, "error": "invalid bearer token"}),
        Err(Rejected::Because(why)) => {
            json!({"user": {}, "error": format!("[invalid bearer token, {why}]")})
        }
    }
}

/// Everything the user may do in a namespace, as far as roles say it.
fn rules_status(call: &Call, review: &Value) -> Value {
    let namespace = review["spec"]["namespace"].as_str().unwrap_or_default();
    let Held { rules, missing } = call.server.registry.rbac.rules_for(&call.user, namespace);
    let (mut resources, mut paths) = (Vec::new(), Vec::new());
    for rule in rules {
        let (resource, path) = rule.to_value();
        resources.extend(resource);
        paths.extend(path);
    }
    let mut status = json!({"resourceRules": resources, "nonResourceRules": paths, "incomplete": false});
    let modes = call.server.registry.rbac.modes();
    let unknown = modes.iter().filter_map(|mode| match mode {
        // A node's rights beyond its roles depend on its pods.
        Mode::Node if node::name(&call.user).is_some() => Some("node"),
        Mode::Webhook(_) => Some("webhook"),
        _ => None,
    });
    let problem = |name| format!("{name} authorizer does not support user rule resolution");
    let mut problems: Vec<String> = unknown.map(problem).collect();
    if !problems.is_empty() {
        status["incomplete"] = true.into();
    }
    // As upstream: rules of absent roles are no gap in the list.
    problems.extend(missing);
    if let Some(problems) = aggregate(problems) {
        status["evaluationError"] = problems.into();
    }
    status
}

/// The user a review asks about.
fn asked_for(review: &Value) -> User {
    let spec = &review["spec"];
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let extra: BTreeMap<String, Vec<String>> = spec["extra"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(key, values)| (key.to_string(), strings(values)))
        .collect();
    User {
        name: spec["user"].as_str().unwrap_or_default().to_owned(),
        groups: strings(&spec["groups"]),
        uid: spec["uid"].as_str().unwrap_or_default().to_owned(),
        extra,
    }
}

fn action(review: &Value) -> Action {
    let text = |key: &str| {
        let pointer = format!("/spec/resourceAttributes/{key}");
        review.pointer(&pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    if let Some(url) = review.pointer("/spec/nonResourceAttributes").filter(|u| u.is_object()) {
        let text = |key: &str| url[key].as_str().unwrap_or_default().to_owned();
        return Action { verb: text("verb"), path: Some(text("path")), ..Action::default() };
    }
    Action {
        verb: text("verb"),
        group: text("group"),
        resource: text("resource"),
        subresource: text("subresource"),
        version: text("version"),
        namespace: text("namespace"),
        name: text("name"),
        fields: selected_fields(&review["spec"]["resourceAttributes"]["fieldSelector"]),
        labels: selected_labels(&review["spec"]["resourceAttributes"]["labelSelector"]),
        ..Action::default()
    }
}

/// The messages about selectors that cannot be parsed, or not wholly. As upstream: the check then ignores
/// them.
fn ignored_selectors(attributes: &Value) -> Vec<String> {
    let mut ignored = Vec::new();
    let mut tell = |key: &str, partially: &str| {
        ignored.push(format!("spec.resourceAttributes.{key} {partially}ignored due to parse error"));
    };
    let (fields, labels) = (&attributes["fieldSelector"], &attributes["labelSelector"]);
    if fields["rawSelector"].as_str().is_some_and(|raw| FieldSelector::parse(raw).is_err()) {
        tell("fieldSelector", "");
    }
    let requirements = fields["requirements"].as_array().map(Vec::as_slice).unwrap_or_default();
    // Fields can only be equal to a value or not.
    let readable = requirements.iter().filter(|r| {
        matches!(r["operator"].as_str(), Some("In" | "NotIn"))
            && r["values"].as_array().is_some_and(|v| v.len() == 1)
    });
    match readable.count() {
        all if all == requirements.len() => {}
        0 => tell("fieldSelector", ""),
        _ => tell("fieldSelector", "partially "),
    }
    if labels["rawSelector"].as_str().is_some_and(|raw| LabelSelector::parse(raw).is_err()) {
        tell("labelSelector", "");
    }
    let requirements = labels["requirements"].as_array().map(Vec::as_slice).unwrap_or_default();
    let readable =
        requirements.iter().filter(|r| LabelSelector::from_value(&json!({"matchExpressions": [r]})).is_ok());
    match readable.count() {
        all if all == requirements.len() => {}
        0 => tell("labelSelector", ""),
        _ => tell("labelSelector", "partially "),
    }
    ignored
}

/// Requirements for fields that a review narrows its question to.
fn selected_fields(selector: &Value) -> Vec<FieldTerm> {
    if let Some(raw) = selector["rawSelector"].as_str() {
        return FieldSelector::parse(raw).map(FieldSelector::into_terms).unwrap_or_default();
    }
    let requirements = selector["requirements"].as_array().into_iter().flatten();
    let readable = requirements.filter_map(|r| {
        let equal = match r["operator"].as_str()? {
            "In" => true,
            "NotIn" => false,
            _ => return None,
        };
        let [only] = r["values"].as_array()?.as_slice() else { return None };
        Some(FieldTerm { field: r["key"].as_str()?.to_owned(), value: only.as_str()?.to_owned(), equal })
    });
    readable.collect()
}

/// Requirements for labels that a review narrows its question to.
fn selected_labels(selector: &Value) -> Vec<Requirement> {
    if let Some(raw) = selector["rawSelector"].as_str() {
        return LabelSelector::parse(raw).map(|parsed| parsed.requirements().to_vec()).unwrap_or_default();
    }
    let requirements = selector["requirements"].as_array().into_iter().flatten();
    let parsed =
        requirements.filter_map(|r| LabelSelector::from_value(&json!({"matchExpressions": [r]})).ok());
    parsed.flat_map(|parsed| parsed.requirements().to_vec()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_that_cannot_be_read_are_told_of() {
        let requirement =
            |operator: &str, values: &[&str]| json!({"key": "k", "operator": operator, "values": values});
        for (attributes, told) in [
            (json!({}), vec![]),
            (
                json!({"fieldSelector": {"rawSelector": "a=b"}, "labelSelector": {"rawSelector": "a in (b,c)"}}),
                vec![],
            ),
            (
                json!({"fieldSelector": {"requirements": [requirement("In", &["a"]), requirement("NotIn", &["b"])]}}),
                vec![],
            ),
            (
                json!({"fieldSelector": {"rawSelector": "a"}}),
                vec!["spec.resourceAttributes.fieldSelector ignored due to parse error"],
            ),
            (
                json!({"fieldSelector": {"requirements": [requirement("In", &["a", "b"])]}}),
                vec!["spec.resourceAttributes.fieldSelector ignored due to parse error"],
            ),
            (
                json!({"fieldSelector": {"requirements": [requirement("In", &["a"]), requirement("Exists", &[])]}}),
                vec!["spec.resourceAttributes.fieldSelector partially ignored due to parse error"],
            ),
            (
                json!({"labelSelector": {"rawSelector": "a in ("}}),
                vec!["spec.resourceAttributes.labelSelector ignored due to parse error"],
            ),
        ] {
            assert_eq!(ignored_selectors(&attributes), told, "{attributes}");
        }
    }
}
