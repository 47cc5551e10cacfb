//! Authorization checks.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::{Entry, NO_MATCH, named};
use crate::error::EvalError;
use crate::value::{Opaque, Value};

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

/// Decides whether a user may do something. The caller of an expression provides it.
pub trait Authorizer: Send + Sync {
    /// Decides on `check`, for the user of the request or, if `check` names one, for a service account.
    fn authorize(&self, check: &Check) -> AuthorizationDecision;
}

/// A question of an expression to an [`Authorizer`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Check {
    /// The namespace and name of the service account to decide for; `None` for the user of the request.
    pub service_account: Option<(String, String)>,
    pub verb: String,
    /// The path of a check that is not of a resource.
    pub path: Option<String>,
    pub group: String,
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    pub name: String,
    pub field_selector: String,
    pub label_selector: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuthorizationDecision {
    pub allowed: bool,
    pub reason: String,
    pub error: Option<String>,
}

/// A value of one of the authorization types: a check that is not complete yet.
#[derive(Clone)]
pub struct AuthorizerValue {
    authorizer: Arc<dyn Authorizer>,
    check: Check,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Authorizer,
    Path,
    Group,
    Resource,
}

#[derive(Debug, Clone, PartialEq)]
struct Decision(AuthorizationDecision);

pub(super) const TABLE: &[Entry] = &[
    ("path", |_, args| {
        step(args, Stage::Authorizer, |value, path| {
            if path.trim().is_empty() {
                return Err(EvalError::text("path must not be empty"));
            }
            value.check.path = Some(path.into());
            value.stage = Stage::Path;
            Ok(())
        })
    }),
    ("serviceAccount", |_, args| service_account(args)),
    ("group", |_, args| {
        step(args, Stage::Authorizer, |value, group| {
            value.check.group = group.into();
            value.stage = Stage::Group;
            Ok(())
        })
    }),
    ("resource", |_, args| {
        step(args, Stage::Group, |value, resource| {
            if resource.trim().is_empty() {
                return Err(EvalError::text("resource must not be empty"));
            }
            value.check.resource = resource.into();
            value.stage = Stage::Resource;
            Ok(())
        })
    }),
    ("subresource", |_, args| field(args, |check| &mut check.subresource)),
    ("namespace", |_, args| field(args, |check| &mut check.namespace)),
    ("name", |_, args| field(args, |check| &mut check.name)),
    ("fieldSelector", |_, args| field(args, |check| &mut check.field_selector)),
    ("labelSelector", |_, args| field(args, |check| &mut check.label_selector)),
    ("check", |_, args| check(args)),
    ("allowed", |_, args| decision(args, |decision| Value::Bool(decision.allowed))),
    ("reason", |_, args| decision(args, |decision| Value::from(decision.reason.clone()))),
    ("errored", |_, args| decision(args, |decision| Value::Bool(decision.error.is_some()))),
    ("error", |_, args| decision(args, |decision| Value::from(decision.error.clone().unwrap_or_default()))),
];

fn step<'a>(
    args: &[Value<'a>],
    stage: Stage,
    change: fn(&mut AuthorizerValue, &str) -> std::result::Result<(), EvalError>,
) -> Result<'a> {
    let [value, Value::String(text)] = args else { return Err(NO_MATCH) };
    let value = value.downcast::<AuthorizerValue>().filter(|value| value.stage == stage).ok_or(NO_MATCH)?;
    let mut changed = value.clone();
    change(&mut changed, text)?;
    Ok(Value::opaque(changed))
}

fn field<'a>(args: &[Value<'a>], of: fn(&mut Check) -> &mut String) -> Result<'a> {
    let [value, Value::String(text)] = args else { return Err(NO_MATCH) };
    let value =
        value.downcast::<AuthorizerValue>().filter(|value| value.stage == Stage::Resource).ok_or(NO_MATCH)?;
    let mut changed = value.clone();
    *of(&mut changed.check) = text.to_string();
    Ok(Value::opaque(changed))
}

fn service_account<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [value, Value::String(namespace), Value::String(name)] = args else { return Err(NO_MATCH) };
    let value = value
        .downcast::<AuthorizerValue>()
        .filter(|value| value.stage == Stage::Authorizer)
        .ok_or(NO_MATCH)?;
    if !named::subdomain(name).is_empty() {
        return Err(EvalError::text("Invalid service account name"));
    }
    if !named::label(namespace).is_empty() {
        return Err(EvalError::text("Invalid service account namespace"));
    }
    let mut changed = value.clone();
    changed.check.service_account = Some((namespace.to_string(), name.to_string()));
    Ok(Value::opaque(changed))
}

fn check<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [value, Value::String(verb)] = args else { return Err(NO_MATCH) };
    let value = value
        .downcast::<AuthorizerValue>()
        .filter(|value| matches!(value.stage, Stage::Path | Stage::Resource))
        .ok_or(NO_MATCH)?;
    let check = Check { verb: verb.to_string(), ..value.check.clone() };
    Ok(Value::opaque(Decision(value.authorizer.authorize(&check))))
}

fn decision<'a>(args: &[Value<'a>], of: fn(&AuthorizationDecision) -> Value<'a>) -> Result<'a> {
    let [value] = args else { return Err(NO_MATCH) };
    value.downcast::<Decision>().map(|decision| of(&decision.0)).ok_or(NO_MATCH)
}

impl AuthorizerValue {
    /// The value of the variable `authorizer`.
    pub fn authorizer(authorizer: Arc<dyn Authorizer>) -> Value<'static> {
        Value::opaque(Self { authorizer, check: Check::default(), stage: Stage::Authorizer })
    }

    /// The value of the variable `authorizer.requestResource`: `check` names the resource of the request.
    pub fn request_resource(authorizer: Arc<dyn Authorizer>, check: Check) -> Value<'static> {
        Value::opaque(Self { authorizer, check, stage: Stage::Resource })
    }
}

impl fmt::Debug for AuthorizerValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthorizerValue").field("check", &self.check).field("stage", &self.stage).finish()
    }
}

impl Opaque for AuthorizerValue {
    fn type_name(&self) -> &'static str {
        match self.stage {
            Stage::Authorizer => "kubernetes.authorization.Authorizer",
            Stage::Path => "kubernetes.authorization.PathCheck",
            Stage::Group => "kubernetes.authorization.GroupCheck",
            Stage::Resource => "kubernetes.authorization.ResourceCheck",
        }
    }

    fn equals(&self, other: &dyn Opaque) -> bool {
        let other = other.as_any().downcast_ref::<Self>();
        other.is_some_and(|other| self.stage == other.stage && self.check == other.check)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn text(&self) -> String {
        self.type_name().to_owned()
    }
}

impl Opaque for Decision {
    fn type_name(&self) -> &'static str {
        "kubernetes.authorization.Decision"
    }

    fn equals(&self, other: &dyn Opaque) -> bool {
        other.as_any().downcast_ref::<Self>() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn text(&self) -> String {
        self.type_name().to_owned()
    }
}
