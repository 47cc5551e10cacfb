//! Changes as managers of other versions see them.

use super::managers::Managers;
use super::node::Node;
use super::walk::{self, Comparison};
use super::{FieldSet, Writer};
use crate::Gvk;
use crate::custom::Schema;
use ferrite_json::Value;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// The other versions of a custom kind whose objects a webhook converts.
pub trait OtherVersions: std::fmt::Debug + Sync {
    /// An object as of another version. None while that is not known: the caller of the operation converts the object
    /// then, and repeats the operation.
    fn convert(&self, object: &Value, api_version: &str) -> Option<Value>;
    /// The schema of a version; none of one that the kind does not have.
    fn schema(&self, api_version: &str) -> Option<&Schema>;
}

/// An object is not known in the version of some manager yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unconverted;

/// The same change in several versions.
pub(super) struct Changes {
    /// In the version of the request.
    own: Comparison,
    others: Vec<(String, Comparison)>,
}

impl Changes {
    /// The change for a manager that wrote in a version. A version that the kind does not have counts as the request's.
    pub(super) fn of(&self, api_version: &str) -> &Comparison {
        let other = self.others.iter().find(|(version, _)| version == api_version);
        other.map_or(&self.own, |(_, comparison)| comparison)
    }

    pub(super) fn new(own: Comparison) -> Self {
        Self { own, others: Vec::new() }
    }

    /// The change from `old` to `new` in the versions of all managers.
    pub(super) fn of_managers(
        writer: &Writer<'_>,
        managers: &Managers,
        own: Comparison,
        old: &Value,
        new: &Value,
    ) -> Result<Self, Unconverted> {
        let mut others: Vec<(String, Comparison)> = as_stored(writer, old, new).into_iter().collect();
        if let Some(versions) = writer.others {
            let ignored = FieldSet::of_fields(writer.ignored);
            let written: BTreeSet<&str> = managers.0.values().map(|owned| &*owned.api_version).collect();
            let mut is_unconverted = false;
            for version in written.into_iter().filter(|version| *version != writer.api_version) {
                let Some(schema) = versions.schema(version) else { continue };
                // Both are asked for before either is needed: they are converted together.
                let (old, new) = (versions.convert(old, version), versions.convert(new, version));
                match (old, new) {
                    (Some(old), Some(new)) => {
                        let node = Node::of_root(schema);
                        let comparison = walk::compare(node, &old, &new).without(&ignored);
                        others.push((version.to_owned(), comparison));
                    }
                    _ => is_unconverted = true,
                }
            }
            if is_unconverted {
                return Err(Unconverted);
            }
        }
        Ok(Self { own, others })
    }

    pub(super) fn into_own(self) -> Comparison {
        self.own
    }
}

/// The change as managers of the stored version see it, with that version; none where the request is of it.
/// As upstream: a field that the request's version lacks is a change of the other version all the same.
fn as_stored(writer: &Writer<'_>, old: &Value, new: &Value) -> Option<(String, Comparison)> {
    let storage = writer.stored?;
    let gvk = Gvk::new(storage.group, storage.version, storage.kind);
    let type_ = crate::schema::of(&gvk)?;
    let api_version = gvk.api_version();
    let converted = |object: &Value| {
        let mut object = object.clone();
        if let Some(own) = writer.type_ {
            crate::codec::normalise(own, &mut object);
        }
        (storage.to_storage)(&mut object);
        crate::codec::normalise(type_, &mut object);
        object
    };
    let of_stored = Writer { type_: Some(type_), api_version: &api_version, stored: None, ..*writer };
    let ignored = FieldSet::of_fields(writer.ignored);
    let comparison =
        walk::compare(Node::root(&of_stored), &converted(old), &converted(new)).without(&ignored);
    Some((api_version, comparison))
}

/// Removes the fields that a manager set the last time (`former`, in a version), does not set now, and nobody else owns.
pub(super) fn prune(
    writer: &Writer<'_>,
    merged: &Value,
    managers: &Managers,
    former: (&FieldSet, &str),
) -> Result<Value, Unconverted> {
    let version = former.1;
    if !in_other_version(writer, version) && writer.others.is_some_and(|_| version != writer.api_version) {
        // As upstream: fields of a version that the kind does not have any more are not removed.
        return Ok(merged.clone());
    }
    let merged = convert(writer, merged, version)?;
    let node = node_of(writer, version);
    let former = walk::with_named_fields(node, former.0);
    let mut pruned = walk::remove(node, &merged, &former);

    let mut owned: Vec<(&str, FieldSet)> = Vec::new();
    for manager in managers.0.values() {
        let known = in_other_version(writer, &manager.api_version);
        let version = if known { &*manager.api_version } else { writer.api_version };
        match owned.iter_mut().find(|(other, _)| *other == version) {
            Some((_, set)) => *set = std::mem::take(set).union(manager.set.clone()),
            None => owned.push((version, manager.set.clone())),
        }
    }
    for (version, set) in owned {
        let node = node_of(writer, version);
        let set_of = |value: &Value| walk::with_named_fields(node, &walk::field_set(node, value));
        let (merged, kept) = (convert(writer, &merged, version)?, convert(writer, &pruned, version)?);
        let owned = walk::with_named_fields(node, &set);
        let unowned = set_of(&merged).difference(&set_of(&kept).union(owned));
        pruned = walk::remove(node, &merged, &unowned);
    }

    // Values below a removed field that never belonged to the manager come back.
    let set_of = |value: &Value| walk::with_named_fields(node, &walk::field_set(node, value));
    let pruned = convert(writer, &pruned, version)?;
    let dangling = set_of(&merged).difference(&set_of(&pruned)).intersection(&former);
    let left = walk::remove(node, &merged, &dangling);
    convert(writer, &left, writer.api_version).map(Cow::into_owned)
}

/// Returns true if a version is another of the kind than the writer's.
fn in_other_version(writer: &Writer<'_>, api_version: &str) -> bool {
    api_version != writer.api_version
        && writer.others.is_some_and(|others| others.schema(api_version).is_some())
}

fn node_of<'a>(writer: &Writer<'a>, api_version: &str) -> Node<'a> {
    let other = writer.others.filter(|_| api_version != writer.api_version);
    match other.and_then(|others| others.schema(api_version)) {
        Some(schema) => Node::of_root(schema),
        None => Node::root(writer),
    }
}

fn convert<'v>(
    writer: &Writer<'_>,
    object: &'v Value,
    api_version: &str,
) -> Result<Cow<'v, Value>, Unconverted> {
    match writer.others {
        Some(others) if object["apiVersion"] != *api_version => {
            others.convert(object, api_version).map(Cow::Owned).ok_or(Unconverted)
        }
        _ => Ok(Cow::Borrowed(object)),
    }
}
