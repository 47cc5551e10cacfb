//! `Status`: the one object in which the API reports an error, and the only place where it is made.

use crate::field::{FieldError, go_quote};
use ferrite_json::{Map, Value, json};
use std::borrow::Cow;
use std::fmt;

/// An error answer. Constructors mirror upstream's: same code, reason, details and message.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    pub code: u16,
    pub reason: Cow<'static, str>,
    pub message: String,
    pub details: Option<Box<Map>>,
    /// Where a list that could not go on may go on nevertheless.
    pub continue_token: Option<Box<str>>,
}

impl Status {
    pub fn new(code: u16, reason: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        Self { code, reason: reason.into(), message: message.into(), details: None, continue_token: None }
    }

    fn with_details(mut self, group: &str, kind: &str, name: &str) -> Self {
        let mut details = Map::new();
        for (key, value) in [("name", name), ("group", group), ("kind", kind)] {
            if !value.is_empty() {
                details.insert(key, value.into());
            }
        }
        self.details = Some(Box::new(details));
        self
    }

    /// `resource` is the plural name; messages spell it `deployments.apps "web"`.
    pub fn not_found(group: &str, resource: &str, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} {} not found", qualified(group, resource), go_quote(name)))
            .with_details(group, resource, name)
    }

    pub fn already_exists(group: &str, resource: &str, name: &str) -> Self {
        Self::new(
            409,
            "AlreadyExists",
            format!("{} {} already exists", qualified(group, resource), go_quote(name)),
        )
        .with_details(group, resource, name)
    }

    pub fn conflict(group: &str, resource: &str, name: &str, why: &str) -> Self {
        Self::new(
            409,
            "Conflict",
            format!(
                "Operation cannot be fulfilled on {} {}: {why}",
                qualified(group, resource),
                go_quote(name)
            ),
        )
        .with_details(group, resource, name)
    }

    pub fn forbidden(group: &str, resource: &str, name: &str, why: &str) -> Self {
        let subject = if name.is_empty() {
            qualified(group, resource)
        } else {
            format!("{} {}", qualified(group, resource), go_quote(name))
        };
        Self::new(403, "Forbidden", format!("{subject} is forbidden: {why}"))
            .with_details(group, resource, name)
    }

    /// Validation failed where upstream has no words for it: the errors alone, with no reason.
    pub fn bare(errors: &[FieldError]) -> Self {
        Self::new(500, "", aggregate(errors))
    }

    /// Validation failed. `kind` is the kind, not the resource, as upstream's.
    pub fn invalid(group: &str, kind: &str, name: &str, errors: &[FieldError]) -> Self {
        let text = aggregate(errors);
        let mut status = Self::new(
            422,
            "Invalid",
            format!("{} {} is invalid: {text}", qualified(group, kind), go_quote(name)),
        )
        .with_details(group, kind, name);
        let causes: Vec<Value> = errors
            .iter()
            .map(|e| json!({"reason": e.cause_reason(), "message": e.body(), "field": e.path.to_string()}))
            .collect();
        if let Some(details) = &mut status.details
            && !causes.is_empty()
        {
            details.insert("causes", causes.into());
        }
        status
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    /// No route of upstream's takes this method here.
    pub fn not_allowed() -> Self {
        Self::new(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
            .with_empty_details()
    }

    /// The same error with details that say nothing, as upstream sends with generic errors.
    pub fn with_empty_details(mut self) -> Self {
        self.details = Some(Box::default());
        self
    }

    /// The path names nothing this server knows.
    pub fn no_such_path() -> Self {
        let mut status = Self::new(404, "NotFound", "the server could not find the requested resource");
        status.details = Some(Box::new(Map::new()));
        status
    }

    pub fn not_acceptable(accepted: &str) -> Self {
        Self::new(406, "NotAcceptable", format!("only the following media types are accepted: {accepted}"))
    }

    pub fn unsupported_media_type(accepted: &str) -> Self {
        Self::new(
            415,
            "UnsupportedMediaType",
            format!(
                "the body of the request was in an unknown format - accepted media types include: {accepted}"
            ),
        )
    }

    pub fn too_large(limit: usize) -> Self {
        Self::new(413, "RequestEntityTooLarge", format!("Request entity too large: limit is {limit}"))
    }

    pub fn expired(message: impl Into<String>) -> Self {
        Self::new(410, "Expired", message)
    }

    pub fn gone(message: impl Into<String>) -> Self {
        Self::new(410, "Gone", message)
    }

    pub fn timeout(message: impl fmt::Display) -> Self {
        Self::new(504, "Timeout", format!("Timeout: {message}"))
    }

    pub fn too_many_requests(message: impl Into<String>) -> Self {
        Self::new(429, "TooManyRequests", message)
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(503, "ServiceUnavailable", message)
    }

    pub fn internal(message: impl fmt::Display) -> Self {
        let text = message.to_string();
        let mut status = Self::new(500, "InternalError", format!("Internal error occurred: {text}"));
        let mut details = Map::new();
        details.insert("causes", json!([{ "message": text }]));
        status.details = Some(Box::new(details));
        status
    }

    pub fn to_value(&self) -> Value {
        let mut object = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "code": self.code,
        });
        if let Some(token) = &self.continue_token {
            object["metadata"]["continue"] = token.to_string().into();
        }
        if !self.reason.is_empty() {
            object["reason"] = (*self.reason).into();
        }
        if let (Some(details), Some(map)) = (&self.details, object.as_object_mut()) {
            map.insert("details", Value::Object((**details).clone()));
        }
        object
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Status {}

/// The errors in one message, each once. The causes of a Status repeat them each time they were found.
fn aggregate(errors: &[FieldError]) -> String {
    let mut listed: Vec<String> = Vec::with_capacity(errors.len());
    for text in errors.iter().map(ToString::to_string) {
        if !listed.contains(&text) {
            listed.push(text);
        }
    }
    match listed.as_slice() {
        [] => String::from("<nil>"),
        [one] => one.clone(),
        many => format!("[{}]", many.join(", ")),
    }
}

/// `deployments.apps`, or `pods` for the core group.
fn qualified(group: &str, resource: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_as_in_go() {
        assert_eq!(Status::not_found("", "pods", "a\0").message, "pods \"a\\x00\" not found");
        let refused = Status::invalid("apps", "Deployment", "\u{1b}", &[]);
        assert!(refused.message.starts_with("Deployment.apps \"\\x1b\" is invalid"), "{}", refused.message);
    }
}
