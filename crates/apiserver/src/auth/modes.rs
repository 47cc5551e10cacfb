//! The authorizers that are asked, in their order: `--authorization-mode`.

use super::{Action, User, WebhookAuthorizer};
use ferrite_json::Value;
use std::sync::Arc;

/// One authorizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    AlwaysAllow,
    AlwaysDeny,
    /// Roles and bindings.
    Rbac,
    /// Kubelets, by the pods that are bound to them.
    Node,
    /// Rules from a file.
    Abac(Arc<AbacPolicy>),
    /// Another server.
    Webhook(Arc<WebhookAuthorizer>),
}

/// The authorizers of a server whose flags say nothing.
pub(crate) fn usual() -> Vec<Mode> {
    vec![Mode::Node, Mode::Rbac]
}

/// A policy file of attribute-based access control: one rule in JSON a line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct AbacPolicy(Vec<AbacRule>);

#[derive(Debug, Default, PartialEq, Eq)]
struct AbacRule {
    user: String,
    group: String,
    read_only: bool,
    api_group: String,
    resource: String,
    namespace: String,
    path: String,
}

/// A line that is no rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyFileError {
    #[error("line {line} of the policy file is no JSON object: {why}")]
    Json { line: usize, why: String },
    #[error(
        "line {line} of the policy file is of {found:?}: only Policy of abac.authorization.kubernetes.io/v1beta1 is read"
    )]
    Kind { line: usize, found: String },
}

impl AbacPolicy {
    pub fn parse(text: &str) -> Result<Self, PolicyFileError> {
        let mut rules = Vec::new();
        let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        for (line, content) in lines.filter(|(_, content)| !content.is_empty() && !content.starts_with('#')) {
            let value: Value = ferrite_json::from_slice(content.as_bytes())
                .map_err(|error| PolicyFileError::Json { line, why: error.to_string() })?;
            let kind = format!(
                "{}/{}",
                value["apiVersion"].as_str().unwrap_or_default(),
                value["kind"].as_str().unwrap_or_default()
            );
            if kind != "abac.authorization.kubernetes.io/v1beta1/Policy" {
                return Err(PolicyFileError::Kind { line, found: kind });
            }
            let text = |key: &str| value["spec"][key].as_str().unwrap_or_default().to_owned();
            rules.push(AbacRule {
                user: text("user"),
                group: text("group"),
                read_only: value["spec"]["readonly"].as_bool().unwrap_or(false),
                api_group: text("apiGroup"),
                resource: text("resource"),
                namespace: text("namespace"),
                path: text("nonResourcePath"),
            });
        }
        Ok(Self(rules))
    }

    pub(crate) fn allows(&self, user: &User, action: &Action) -> bool {
        self.0.iter().any(|rule| rule.is_about(user) && rule.allows(action))
    }
}

impl AbacRule {
    /// A rule names a user, a group, or both; both must then hold.
    fn is_about(&self, user: &User) -> bool {
        let everybody = |name: &str| match name {
            "*" => true,
            // As upstream: these stand for all authenticated users, and for all others.
            "system:authenticated" | "system:unauthenticated" => user.is_in(name),
            _ => false,
        };
        let by_name = self.user.is_empty() || everybody(&self.user) || self.user == user.name;
        let by_group = self.group.is_empty() || everybody(&self.group) || user.is_in(&self.group);
        !(self.user.is_empty() && self.group.is_empty()) && by_name && by_group
    }

    fn allows(&self, action: &Action) -> bool {
        if self.read_only && !matches!(action.verb.as_str(), "get" | "list" | "watch") {
            return false;
        }
        let is = |pattern: &str, value: &str| pattern == "*" || pattern == value;
        match &action.path {
            Some(path) => match self.path.strip_suffix('*') {
                Some(prefix) => path.starts_with(prefix),
                None => !self.path.is_empty() && self.path == *path,
            },
            None => {
                is(&self.namespace, &action.namespace)
                    && is(&self.resource, &action.resource)
                    && is(&self.api_group, &action.group)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(spec: &str) -> String {
        format!(
            r#"{{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{spec}}}"#
        )
    }

    fn on(verb: &str, resource: &str, namespace: &str) -> Action {
        Action {
            verb: verb.into(),
            resource: resource.into(),
            namespace: namespace.into(),
            ..Action::default()
        }
    }

    #[test]
    fn rules_allow_what_they_name() {
        let at = |path: &str| Action { verb: "get".into(), path: Some(path.into()), ..Action::default() };
        let rows = [
            (
                r#"{"user":"u","namespace":"*","resource":"*","apiGroup":"*"}"#,
                on("create", "pods", "a"),
                true,
            ),
            (
                r#"{"user":"v","namespace":"*","resource":"*","apiGroup":"*"}"#,
                on("create", "pods", "a"),
                false,
            ),
            (r#"{"group":"g","namespace":"a","resource":"pods"}"#, on("get", "pods", "a"), true),
            (r#"{"group":"g","namespace":"a","resource":"pods"}"#, on("get", "pods", "b"), false),
            (r#"{"user":"u","group":"h","namespace":"*","resource":"*"}"#, on("get", "pods", "b"), false),
            (
                r#"{"user":"u","namespace":"*","resource":"*","readonly":true}"#,
                on("delete", "pods", "b"),
                false,
            ),
            (
                r#"{"user":"u","namespace":"*","resource":"*","readonly":true}"#,
                on("watch", "pods", "b"),
                true,
            ),
            (r#"{"namespace":"*","resource":"*"}"#, on("get", "pods", "b"), false),
            (r#"{"user":"u","nonResourcePath":"/api*"}"#, at("/apis"), true),
            (r#"{"user":"u","nonResourcePath":"/api"}"#, at("/apis"), false),
            (r#"{"user":"u","namespace":"*","resource":"*"}"#, at("/healthz"), false),
            (r#"{"group":"system:authenticated","nonResourcePath":"*"}"#, at("/healthz"), true),
        ];
        for (spec, action, expected) in rows {
            let policy = AbacPolicy::parse(&rule(spec)).expect("a policy");
            assert_eq!(policy.allows(&User::new("u", ["g"]), &action), expected, "{spec} {action:?}");
        }
    }

    #[test]
    fn lines_that_are_no_rules_are_named() {
        let text = format!("# a comment\n\n{}\n{{", rule("{}"));
        assert!(matches!(AbacPolicy::parse(&text), Err(PolicyFileError::Json { line: 4, .. })));
        assert!(matches!(AbacPolicy::parse(r#"{"user":"u"}"#), Err(PolicyFileError::Kind { line: 1, .. })));
    }
}
