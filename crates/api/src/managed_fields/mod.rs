//! Field managers and server-side apply.
//!
//! Every write records in `metadata.managedFields` the manager of each field. [`update`] keeps that record
//! on ordinary writes; [`apply`] merges a manager's configuration into an object, refuses to take fields
//! from other managers unless forced, and removes fields that the manager applied before and no longer
//! does.
//!
//! Objects passed in are normalised ([`crate::codec::normalise`]). The result of [`apply`] is merged JSON
//! that the caller brings under its type, defaults and normalises as it does any decoded object.

mod field_set;
mod first;
mod managers;
mod node;
#[cfg(test)]
mod tests;
mod untracked;
mod validate;
mod versions;
mod walk;

pub use field_set::{FieldSet, PathElement};
pub use untracked::{MergeError, merge};
pub use validate::{validate, validate_custom};
pub use versions::OtherVersions;

use crate::custom::Schema;
use crate::resource::Storage;
use crate::schema::TypeRef;
use ferrite_json::{Map, Value};
use jiff::Timestamp;
use managers::{BEFORE_FIRST_APPLY, Identity, Managers, Operation, Owned};
use node::Node;
use std::sync::LazyLock;
use thiserror::Error;
use versions::{Changes, Unconverted};
use walk::Comparison;

/// The writer and the form of its write.
#[derive(Debug, Clone, Copy)]
pub struct Writer<'a> {
    /// The object's type; `None` for an object without a schema (objects granular, lists atomic).
    pub type_: Option<TypeRef>,
    /// The schema of a custom kind, which has no type.
    pub custom: Option<&'a Schema>,
    /// The version in which the request speaks: `apps/v1`.
    pub api_version: &'a str,
    /// The stored form, where it is of another version than the request.
    pub stored: Option<Storage>,
    /// The other versions of a custom kind, where a webhook converts between them and some manager wrote in another.
    pub others: Option<&'a dyn OtherVersions>,
    /// The field manager.
    pub manager: &'a str,
    /// `status`, `scale` …; empty for the main resource.
    pub subresource: &'a str,
    /// Dotted paths that this endpoint resets and whose ownership it therefore does not record: `status` for
    /// the main resource of most kinds, `spec` and `metadata.labels` for their status.
    pub ignored: &'a [&'a str],
    pub now: Timestamp,
}

/// Fields another manager owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The other manager as upstream names it: `"kubectl" using apps/v1`.
    pub manager: String,
    /// `.spec.replicas`.
    pub path: String,
}

/// Why an apply is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ApplyError {
    #[error("metadata.managedFields must be nil")]
    ManagedFieldsGiven,
    /// The configuration does not fit the schema: upstream answers 500 with this text.
    #[error("failed to create typed patch object ({object}): {problems}")]
    Typed { object: String, problems: String },
    /// An object has to be converted first: see [`OtherVersions::convert`].
    #[error("an object is not converted to the version of another manager yet")]
    Unconverted,
    /// Another manager owns the fields: 409, one cause per conflict.
    #[error("{}", conflict_message(.0))]
    Conflicts(Vec<Conflict>),
}

fn conflict_message(conflicts: &[Conflict]) -> String {
    if let [only] = conflicts {
        return format!("Apply failed with 1 conflict: conflict with {}: {}", only.manager, only.path);
    }
    let mut lines = Vec::new();
    let mut current = None;
    for conflict in conflicts {
        if current != Some(&conflict.manager) {
            lines.push(format!("conflicts with {}:", conflict.manager));
            current = Some(&conflict.manager);
        }
        lines.push(format!("- {}", conflict.path));
    }
    format!("Apply failed with {} conflicts: {}", conflicts.len(), lines.join("\n"))
}

/// Metadata nobody owns.
static STRIPPED: LazyLock<FieldSet> = LazyLock::new(|| {
    FieldSet::of_fields(&[
        "apiVersion",
        "kind",
        "metadata",
        "metadata.name",
        "metadata.namespace",
        "metadata.creationTimestamp",
        "metadata.selfLink",
        "metadata.uid",
        "metadata.clusterName",
        "metadata.generation",
        "metadata.managedFields",
        "metadata.resourceVersion",
    ])
});

impl Writer<'_> {
    fn identity(&self, operation: Operation) -> Identity {
        Identity {
            manager: self.manager.to_owned(),
            operation,
            api_version: match operation {
                Operation::Apply => String::new(),
                Operation::Update => self.api_version.to_owned(),
            },
            subresource: self.subresource.to_owned(),
        }
    }

    /// The object that upstream compares a new object with: one of its type with nothing set.
    fn blank(&self) -> Value {
        let mut blank = Value::Object(Map::new());
        if let Some(type_) = self.type_ {
            crate::codec::normalise(type_, &mut blank);
        }
        blank
    }
}

/// Records in `new` the owners of its fields after a create (`live` is `None`) or an update.
///
/// A client may give managed fields of its own in an update of the main resource, and one empty entry
/// forgets them all, as upstream.
pub fn update(writer: &Writer<'_>, live: Option<&Value>, new: &mut Value) {
    let node = Node::root(writer);
    let is_reset = writer.subresource.is_empty() && Managers::is_reset(new);
    if let Some(live) = live
        && !is_reset
        && writer.stored.is_none()
        && writer.others.is_none()
        && (!writer.subresource.is_empty() || entries(new).is_none_or(|given| entries(live) == Some(given)))
    {
        return update_stored(writer, node, live, new);
    }
    let mut managers = if is_reset {
        Managers::default()
    } else {
        let given = if writer.subresource.is_empty() { Managers::decode(new) } else { Managers::default() };
        if given.is_empty() { live.map(Managers::decode).unwrap_or_default() } else { given }
    };
    if writer.custom.is_none() {
        managers.forget_unknown_versions(writer, new);
    }
    if live.is_some() && managers.is_empty() {
        // As upstream: an object whose fields nobody tracks stays so until the first apply.
        managers.encode(new);
        return;
    }
    if live.is_none() && managers.is_empty() {
        let time = managers::format_time(writer.now);
        let fields = first::fields(writer, new);
        managers::write_first(new, &writer.identity(Operation::Update), &time, fields);
        return;
    }
    let blank;
    let old = match live {
        Some(live) => live,
        None => {
            blank = writer.blank();
            &blank
        }
    };
    record_update(writer, node, old, new, &mut managers);
    managers.cap();
    managers.encode(new);
}

fn entries(object: &Value) -> Option<&Value> {
    object.pointer("/metadata/managedFields")
}

/// As [`update`], where the managers are those of the stored object and all speak the request's version. Most of them own
/// nothing that this write changes: their entries are copied and not read.
fn update_stored(writer: &Writer<'_>, node: Node<'_>, live: &Value, new: &mut Value) {
    let comparison = tracked_comparison(writer, node, live, new);
    let identity = writer.identity(Operation::Update);
    let mut managers = Managers::decode_concerned(live, &identity, comparison.as_ref());
    if writer.custom.is_none() {
        managers.forget_unknown_versions(writer, new);
    }
    if !managers.is_empty()
        && let Some(comparison) = comparison
    {
        let changes = Changes::new(comparison);
        take_from_others(&mut managers, None, &changes);
        give_to_writer(writer, changes.into_own(), &mut managers);
    }
    managers.cap();
    managers.encode(new);
}

/// The version in which a scale is written, whatever it is the scale of.
const SCALE_VERSION: &str = "autoscaling/v1";
const REPLICAS: &[&str] = &["spec.replicas"];

/// Records in `new` the owners of its fields after its scale was written, as upstream does in two steps:
/// owners of the
/// replicas become owners of the scale's replicas and back. Updaters on the way back are others than before, because
/// they wrote another version: they own the replicas in an entry of its own, and without a time.
pub fn update_scale(writer: &Writer<'_>, live: &Value, new: &mut Value) {
    let replicas = FieldSet::of_fields(REPLICAS);
    let parent = Managers::decode(live);
    let mut scale = Managers::default();
    for (identity, owned) in &parent.0 {
        if owned.set.intersection(&replicas).is_empty() {
            continue;
        }
        let api_version = match identity.operation {
            Operation::Apply => String::new(),
            Operation::Update => SCALE_VERSION.to_owned(),
        };
        let owned = Owned {
            set: replicas.clone(),
            api_version: writer.api_version.to_owned(),
            time: None,
            unread: None,
        };
        scale.0.insert(Identity { api_version, ..identity.clone() }, owned);
    }
    // A scale to nothing is a scale without replicas.
    let count = |object: &Value| object.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(0);
    let (was, is) = (count(live), count(new));
    if was != is && !scale.is_empty() {
        scale.0.clear();
        if is != 0 {
            let identity =
                Identity { api_version: SCALE_VERSION.to_owned(), ..writer.identity(Operation::Update) };
            let owned = Owned {
                set: replicas.clone(),
                api_version: writer.api_version.to_owned(),
                time: None,
                unread: None,
            };
            scale.0.insert(identity, owned);
        }
    }
    let mut managers = Managers::default();
    for (identity, owned) in parent.0 {
        let set = match scale.0.remove(&identity) {
            Some(_) => owned.set,
            None => owned.set.difference(&replicas),
        };
        managers.0.insert(identity, Owned { set, ..owned });
    }
    managers.0.extend(scale.0);
    managers.drop_empty();
    managers.encode(new);
}

fn record_update(writer: &Writer<'_>, node: Node<'_>, old: &Value, new: &Value, managers: &mut Managers) {
    let Some(comparison) = tracked_comparison(writer, node, old, new) else { return };
    // Where a conversion is missing, the operation is repeated.
    if let Ok(changes) = Changes::of_managers(writer, managers, comparison, old, new) {
        take_from_others(managers, None, &changes);
        give_to_writer(writer, changes.into_own(), managers);
    }
}

/// The fields that differ. As upstream: nobody keeps track of an object whose lists have elements that cannot be told
/// apart by their keys.
fn tracked_comparison(writer: &Writer<'_>, node: Node<'_>, old: &Value, new: &Value) -> Option<Comparison> {
    if !walk::is_tracked(node, new) || !walk::is_tracked(node, old) {
        return None;
    }
    Some(walk::compare(node, old, new).without(&FieldSet::of_fields(writer.ignored)))
}

/// The writer owns what came or changed.
fn give_to_writer(writer: &Writer<'_>, comparison: Comparison, managers: &mut Managers) {
    let taken = comparison.modified.union(comparison.added).difference(&STRIPPED);
    if !taken.is_empty() {
        let identity = writer.identity(Operation::Update);
        let set = match managers.0.remove(&identity) {
            Some(before) => taken.union(before.set),
            None => taken,
        };
        let time = Some(managers::format_time(writer.now));
        let owned = Owned { set, api_version: writer.api_version.to_owned(), time, unread: None };
        managers.0.insert(identity, owned);
    }
    managers.drop_empty();
}

/// Changed fields leave their other owners, removed fields leave every owner.
fn take_from_others(managers: &mut Managers, writer: Option<&Identity>, changes: &Changes) {
    for (identity, owned) in &mut managers.0 {
        if Some(identity) != writer {
            let Comparison { modified, added, removed } = changes.of(&owned.api_version);
            let set = std::mem::take(&mut owned.set);
            owned.set = set.difference(modified).difference(added).difference(removed);
        }
    }
}

/// The outcome of an apply.
#[derive(Debug, Clone, PartialEq)]
pub struct Applied {
    /// The merged object with its managed fields.
    pub object: Value,
    /// True if anything but managed fields differs from the live object.
    pub changed: bool,
}

/// Merges `config` into `live` (`None` when the object does not exist) for the writer.
pub fn apply(
    writer: &Writer<'_>,
    live: Option<&Value>,
    config: &Value,
    force: bool,
) -> Result<Applied, ApplyError> {
    let given = config.pointer("/metadata/managedFields");
    if given.and_then(Value::as_array).is_some_and(|entries| !entries.is_empty()) {
        return Err(ApplyError::ManagedFieldsGiven);
    }
    if let Some(type_) = writer.type_ {
        validate(type_, config, writer.api_version)?;
    }
    if let Some(schema) = writer.custom {
        validate_custom(schema, config, writer.api_version)?;
    }
    let node = Node::root(writer);
    let blank = writer.blank();
    let mut managers = live.map(Managers::decode).unwrap_or_default();
    if let Some(live) = live
        && managers.is_empty()
    {
        let before = Writer { manager: BEFORE_FIRST_APPLY, ..*writer };
        record_update(&before, node, &blank, live, &mut managers);
    }
    if writer.custom.is_none() {
        managers.forget_unknown_versions(writer, config);
    }
    let live = live.unwrap_or(&blank);

    let identity = writer.identity(Operation::Apply);
    let ignored = FieldSet::of_fields(writer.ignored);
    let former = managers.0.remove(&identity);
    let set = walk::field_set(node, config).recursive_difference(&ignored);
    managers.0.insert(
        identity.clone(),
        Owned {
            set,
            api_version: writer.api_version.to_owned(),
            time: former.as_ref().and_then(|f| f.time.clone()),
            unread: None,
        },
    );

    let mut merged = walk::merge(node, Some(live), Some(config)).unwrap_or_else(|| blank.clone());
    let wanted = managers.0.get(&identity).map(|owned| &owned.set);
    if let (Some(former), Some(wanted)) = (&former, wanted)
        && !former.set.clone().difference(wanted).is_empty()
    {
        let former = (&former.set, &*former.api_version);
        merged = versions::prune(writer, &merged, &managers, former).map_err(|_| ApplyError::Unconverted)?;
    }
    // As upstream: values are compared as they were applied, so that `1.5Gi` is not `1536Mi`.
    let comparison = walk::compare(node, live, &merged).without(&ignored);
    let changes = Changes::of_managers(writer, &managers, comparison, live, &merged)
        .map_err(|Unconverted| ApplyError::Unconverted)?;
    if !force {
        let conflicts = conflicts(&managers, &identity, &changes, writer.subresource == "scale");
        if !conflicts.is_empty() {
            return Err(ApplyError::Conflicts(conflicts));
        }
    }
    // The order of a set and fields that this endpoint resets are changes, too.
    let changed = merged != *live;
    let mut object = merged;
    if let Some(type_) = writer.type_ {
        crate::codec::normalise(type_, &mut object);
    }
    take_from_others(&mut managers, Some(&identity), &changes);

    if let Some(owned) = managers.0.get_mut(&identity) {
        owned.set = std::mem::take(&mut owned.set).difference(&STRIPPED);
        if changed {
            owned.time = Some(managers::format_time(writer.now));
        }
    }
    managers.drop_empty();
    managers.encode(&mut object);
    Ok(Applied { object, changed })
}

/// As upstream: the conflicts of an applied scale name other managers as if they had written a scale, too.
fn conflicts(managers: &Managers, writer: &Identity, changes: &Changes, of_scale: bool) -> Vec<Conflict> {
    managers
        .0
        .iter()
        .filter(|(identity, _)| *identity != writer)
        .flat_map(|(identity, owned)| {
            let manager = match of_scale && identity.operation == Operation::Update {
                true => Identity { api_version: SCALE_VERSION.to_owned(), ..identity.clone() }.to_string(),
                false => identity.to_string(),
            };
            let Comparison { modified, added, .. } = changes.of(&owned.api_version);
            let changed = modified.clone().union(added.clone());
            let paths = owned.set.intersection(&changed).paths();
            paths.into_iter().map(move |path| Conflict { manager: manager.clone(), path })
        })
        .collect()
}
