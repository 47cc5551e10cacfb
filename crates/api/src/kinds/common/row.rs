//! Helpers for the rows of the table of kinds, and the printed columns.

use super::lifecycle;
use crate::resource::{Column, Connect, Hooks, Reservation, Resource, Scope, Storage, Strategy, Subresource};
use std::borrow::Cow;
use std::sync::Arc;

pub(in crate::kinds) const ALL_VERBS: &[&str] =
    &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
/// Namespaces are not deleted in bulk.
pub(in crate::kinds) const NAMESPACE_VERBS: &[&str] =
    &["create", "delete", "get", "list", "patch", "update", "watch"];
pub(in crate::kinds) const CREATE: &[&str] = &["create"];
pub(in crate::kinds) const CREATE_GET: &[&str] = &["create", "get"];
pub(in crate::kinds) const GET: &[&str] = &["get"];
pub(in crate::kinds) const GET_LIST: &[&str] = &["get", "list"];
pub(in crate::kinds) const UPDATE: &[&str] = &["update"];
pub(in crate::kinds) const GET_PATCH_UPDATE: &[&str] = &["get", "patch", "update"];
pub(in crate::kinds) const PROXY: &[&str] = &["create", "delete", "get", "patch", "update"];

/// A row of the table while it is being written: most resources differ from the usual in little.
pub(in crate::kinds) struct Row(Resource);

impl Row {
    pub(in crate::kinds) fn new(
        group: &'static str,
        version: &'static str,
        kind: &'static str,
        plural: &'static str,
        singular: &'static str,
    ) -> Self {
        Self(Resource {
            group: Cow::Borrowed(group),
            version: Cow::Borrowed(version),
            kind: Cow::Borrowed(kind),
            schema: crate::schema::kind(group, version, kind),
            plural: Cow::Borrowed(plural),
            singular: Cow::Borrowed(singular),
            short_names: Cow::Borrowed(&[]),
            categories: Cow::Borrowed(&[]),
            scope: Scope::Namespaced,
            verbs: Cow::Borrowed(ALL_VERBS),
            subresources: Cow::Borrowed(&[]),
            on_by_default: true,
            storage: None,
            strategy: Arc::new(Plain),
            hooks: Hooks::default(),
            custom: None,
        })
    }

    pub(in crate::kinds) fn core(kind: &'static str, plural: &'static str, singular: &'static str) -> Self {
        Self::new("", "v1", kind, plural, singular)
    }

    pub(in crate::kinds) fn cluster(mut self) -> Self {
        self.0.scope = Scope::Cluster;
        self
    }

    pub(in crate::kinds) fn verbs(mut self, verbs: &'static [&'static str]) -> Self {
        self.0.verbs = Cow::Borrowed(verbs);
        self
    }

    pub(in crate::kinds) fn short(mut self, names: &'static [&'static str]) -> Self {
        self.0.short_names = owned(names);
        self
    }

    /// Shown by `kubectl get all`.
    pub(in crate::kinds) fn all(mut self) -> Self {
        self.0.categories = owned(&["all"]);
        self
    }

    /// Listed under a category of its own.
    pub(in crate::kinds) fn category(mut self, categories: &'static [&'static str]) -> Self {
        self.0.categories = owned(categories);
        self
    }

    /// Served only when asked for.
    pub(in crate::kinds) fn off(mut self) -> Self {
        self.0.on_by_default = false;
        self
    }

    /// Kept in the form of another version.
    pub(in crate::kinds) fn stored(mut self, storage: Storage) -> Self {
        self.0.storage = Some(storage);
        self
    }

    /// Kept by the store in another place than the plural name's.
    pub(in crate::kinds) fn storage_prefix(mut self, prefix: &'static str) -> Self {
        self.0.hooks.storage_prefix = Some(prefix);
        self
    }

    /// Each use is warned of.
    pub(in crate::kinds) fn deprecated(mut self, warning: &'static str) -> Self {
        self.0.hooks.deprecation = Some(Cow::Borrowed(warning));
        self
    }

    /// Kept for as long as the server keeps events.
    pub(in crate::kinds) fn ttl(mut self) -> Self {
        self.0.hooks.ttl = true;
        self
    }

    /// Reserves something before it is created.
    pub(in crate::kinds) fn begin_create(mut self, reservation: Reservation) -> Self {
        self.0.hooks.begin_create = Some(reservation);
        self
    }

    /// Answered without the store.
    pub(in crate::kinds) fn connect(mut self, connect: Connect) -> Self {
        self.0.hooks.connect = Some(connect);
        self
    }

    /// Served only if this feature gate is on.
    pub(in crate::kinds) fn gate(mut self, gate: &'static str) -> Self {
        self.0.hooks.gate = Some(gate);
        self
    }

    /// With the `status` subresource and no other.
    pub(in crate::kinds) fn status(self) -> Self {
        self.subresources(&[sub("status", GET_PATCH_UPDATE)])
    }

    /// With `scale` and `status`.
    pub(in crate::kinds) fn scale(self) -> Self {
        self.subresources(&[
            body("scale", GET_PATCH_UPDATE, "autoscaling", "v1", "Scale"),
            sub("status", GET_PATCH_UPDATE),
        ])
    }

    pub(in crate::kinds) fn subresources(mut self, subresources: &[Subresource]) -> Self {
        self.0.subresources = Cow::Owned(subresources.to_vec());
        self
    }

    pub(in crate::kinds) fn build(mut self, strategy: impl Strategy) -> Resource {
        let Resource { group, version, kind, hooks, .. } = &mut self.0;
        if hooks.deprecation.is_none() {
            hooks.deprecation = lifecycle::deprecation(group, version, kind).map(Cow::Owned);
        }
        self.0.strategy = Arc::new(strategy);
        self.0
    }
}

/// Names of a row, which may come from a definition elsewhere.
fn owned(names: &'static [&'static str]) -> Cow<'static, [Cow<'static, str>]> {
    names.iter().map(|name| Cow::Borrowed(*name)).collect::<Vec<_>>().into()
}

/// The behaviour of a kind without specialities.
pub(in crate::kinds) struct Plain;

impl Strategy for Plain {}

pub(in crate::kinds) const fn sub(name: &'static str, verbs: &'static [&'static str]) -> Subresource {
    Subresource { name, verbs, body: None }
}

pub(in crate::kinds) const fn body(
    name: &'static str,
    verbs: &'static [&'static str],
    group: &'static str,
    version: &'static str,
    kind: &'static str,
) -> Subresource {
    Subresource { name, verbs, body: Some((group, version, kind)) }
}

/// The column that names the object.
pub(in crate::kinds) const NAME: Column = Column::new("Name", "string", "name", 0);

/// A text column that is always shown.
pub(in crate::kinds) const fn shown(name: &'static str) -> Column {
    Column::new(name, "string", "", 0)
}

/// A text column of `-o wide`.
pub(in crate::kinds) const fn wide(name: &'static str) -> Column {
    Column::new(name, "string", "", 1)
}

/// A number that is always shown.
pub(in crate::kinds) const fn number(name: &'static str) -> Column {
    Column::new(name, "integer", "", 0)
}

/// A truth value that is always shown.
pub(in crate::kinds) const fn boolean(name: &'static str) -> Column {
    Column::new(name, "boolean", "", 0)
}
