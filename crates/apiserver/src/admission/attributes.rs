//! The facts about a request that plugins and stages get.

use crate::auth::{Action, Rbac, User, decide};
use crate::options::WriteOptions;
use crate::registry::View;
use ferrite_api::resource::Resource;
use ferrite_api::{Gvk, Status};
use ferrite_json::Value;
use std::sync::Arc;

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Create,
    Update,
    Delete,
    /// A request that becomes a stream: exec, attach, port-forward and proxy.
    Connect,
}

impl Operation {
    pub fn name(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
            Self::Connect => "CONNECT",
        }
    }
}

/// The facts about a request that a plugin gets.
#[derive(Clone, Copy)]
pub(crate) struct Attributes<'a> {
    pub operation: Operation,
    pub resource: &'a Resource,
    pub subresource: Option<&'a str>,
    pub namespace: &'a str,
    pub name: &'a str,
    /// The request does not name the object: it has no name yet and `name` is the prefix that it will be drawn from, or it
    /// is deleted with its collection.
    pub unnamed: bool,
    pub user: &'a User,
    /// The stored object; none for a create.
    pub old: Option<&'a Value>,
    pub options: &'a WriteOptions,
    pub rbac: &'a Arc<Rbac>,
}

impl<'a> Attributes<'a> {
    /// The name as webhooks and policies see it: none while it is not drawn.
    pub fn given_name(&self) -> &'a str {
        if self.unnamed { "" } else { self.name }
    }
    /// The namespace as webhooks and policies see it. As upstream: a Namespace is in itself.
    pub fn given_namespace(&self) -> &'a str {
        match self.resource.group.is_empty() && self.resource.plural == "namespaces" {
            true => self.given_name(),
            false => self.namespace,
        }
    }
    /// Group, version and kind of the object: that of the body where a subresource has one of its own.
    pub fn kind(&self) -> Gvk {
        let body = self.subresource.and_then(|name| self.resource.subresource(name)).and_then(|sub| sub.body);
        match body {
            Some((group, version, kind)) => Gvk::new(group, version, kind),
            None => self.resource.gvk(),
        }
    }

    /// Returns true if the request is about the resource itself, not one of its subresources.
    pub(super) fn is(&self, group: &str, plural: &str) -> bool {
        self.is_sub(group, plural, None)
    }

    pub(super) fn is_sub(&self, group: &str, plural: &str, subresource: Option<&str>) -> bool {
        self.subresource == subresource && self.resource.group == group && self.resource.plural == plural
    }

    /// Returns true if the request creates or updates an object of a core resource, not one of its
    /// subresources.
    pub(super) fn writes(&self, plural: &str) -> bool {
        matches!(self.operation, Operation::Create | Operation::Update) && self.is("", plural)
    }

    /// Returns true if the request creates an object of a core resource, not one of its subresources.
    pub(super) fn creates(&self, plural: &str) -> bool {
        self.creates_in("", plural)
    }

    pub(super) fn creates_in(&self, group: &str, plural: &str) -> bool {
        self.operation == Operation::Create && self.is(group, plural)
    }

    /// A refusal of this request.
    pub(super) fn forbid(&self, why: impl AsRef<str>) -> Status {
        // As upstream: deletes of a collection do not name their objects.
        let unnamed = self.unnamed && self.operation == Operation::Delete;
        let name = if unnamed { "Unknown" } else { self.name };
        Status::forbidden(&self.resource.group, &self.resource.plural, name, why.as_ref())
    }

    /// Tells the client something that does not stop the request.
    pub(super) fn warn(&self, text: impl Into<String>) {
        self.options.warnings.add(text);
    }

    /// Annotates the audit of the request.
    pub(super) fn annotate(&self, key: impl AsRef<str>, value: impl Into<String>) {
        self.options.warnings.annotate(key, value);
    }

    /// Returns true if the user may also do another action.
    pub(super) fn may(&self, view: &View, action: &Action) -> bool {
        decide(self.rbac, view, self.user, action).allowed
    }
}
