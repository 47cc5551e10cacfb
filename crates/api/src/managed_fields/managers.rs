//! `metadata.managedFields`: the owners of fields.

use super::Writer;
use super::field_set::FieldSet;
use super::walk::Comparison;
use crate::{Gvk, schema};
use ferrite_json::{Map, Text, Value};
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::fmt;

/// The manager of fields that were there before the first apply to an object without managed fields.
pub(super) const BEFORE_FIRST_APPLY: &str = "before-first-apply";
/// Where the oldest updaters go when there are too many.
const ANCIENT_CHANGES: &str = "ancient-changes";
/// Upstream's limit on entries of updaters.
const MAX_UPDATERS: usize = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    Apply,
    Update,
}

/// The identity of an entry: one applier has one entry whatever version it uses.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Identity {
    pub(super) manager: String,
    pub(super) operation: Operation,
    /// Empty for appliers.
    pub(super) api_version: String,
    pub(super) subresource: String,
}

/// As upstream names a manager in conflicts.
impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.manager)?;
        if !self.subresource.is_empty() {
            write!(f, " with subresource {:?}", self.subresource)?;
        }
        if self.operation == Operation::Update {
            write!(f, " using {}", self.api_version)?;
        }
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Owned {
    pub(super) set: FieldSet,
    pub(super) api_version: String,
    pub(super) time: Option<String>,
    /// The fields as they are stored, if they were not read: then the set is empty.
    pub(super) unread: Option<Value>,
}

impl Owned {
    /// The place of an entry among the others.
    fn place<'a>(&'a self, id: &'a Identity) -> (Operation, Option<&'a str>, &'a str, &'a str, &'a str) {
        (id.operation, self.time.as_deref(), &id.manager, &self.api_version, &id.subresource)
    }
}

/// The entries of an object.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Managers(pub(super) BTreeMap<Identity, Owned>);

impl Managers {
    /// Entries that cannot be read make all of them unreadable, and upstream starts anew then.
    pub(super) fn decode(object: &Value) -> Self {
        let entries = object.pointer("/metadata/managedFields").and_then(Value::as_array);
        let entries = entries.map(Vec::as_slice).unwrap_or_default();
        let read = |entry| decode_entry(entry, |_, _| true);
        entries.iter().map(read).collect::<Option<_>>().map(Self).unwrap_or_default()
    }

    /// The managers of a stored object. Only those that the change of the writer concerns are read: all that is stored was
    /// read once, and has the form in which it is written.
    pub(super) fn decode_concerned(object: &Value, writer: &Identity, change: Option<&Comparison>) -> Self {
        let entries = object.pointer("/metadata/managedFields").and_then(Value::as_array);
        let entries = entries.map(Vec::as_slice).unwrap_or_default();
        let sets = change.into_iter().flat_map(|change| [&change.added, &change.modified, &change.removed]);
        let changed: Vec<Text> = sets.flat_map(FieldSet::first_steps).collect();
        // The oldest of too many are merged.
        let is_full = entries.len() >= MAX_UPDATERS;
        let is_concerned = |identity: &Identity, fields: &Map| {
            is_full || identity == writer || changed.iter().any(|step| fields.contains_key(step))
        };
        let read = |entry| decode_entry(entry, is_concerned);
        entries.iter().map(read).collect::<Option<_>>().map(Self).unwrap_or_default()
    }

    /// Returns true if the object asks to forget all managers: an empty list, or one empty entry.
    pub(super) fn is_reset(object: &Value) -> bool {
        let entries = object.pointer("/metadata/managedFields").and_then(Value::as_array);
        entries.is_some_and(|e| match e.as_slice() {
            [] => true,
            [Value::Object(only)] => only.is_empty(),
            _ => false,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Drops entries of versions that the object's kind does not have: their meaning is unknown.
    pub(super) fn forget_unknown_versions(&mut self, writer: &Writer<'_>, object: &Value) {
        let Some(kind) = object.get("kind").and_then(Value::as_str) else { return };
        let is_writers = |version: &str| writer.type_.is_some() && version == writer.api_version;
        self.0.retain(|_, owned| {
            is_writers(&owned.api_version)
                || Gvk::from_api_version(&owned.api_version, kind)
                    .is_some_and(|gvk| schema::of(&gvk).is_some())
        });
    }

    /// Drops entries without fields.
    pub(super) fn drop_empty(&mut self) {
        self.0.retain(|_, owned| owned.unread.is_some() || !owned.set.is_empty());
    }

    /// Upstream keeps at most ten updaters: the oldest are merged, per version, into one entry.
    pub(super) fn cap(&mut self) {
        let mut updaters: Vec<Identity> = self
            .0
            .keys()
            .filter(|id| id.operation == Operation::Update && id.subresource.is_empty())
            .cloned()
            .collect();
        if updaters.len() <= MAX_UPDATERS {
            return;
        }
        updaters.sort_by_cached_key(|id| {
            (self.0.get(id).and_then(|owned| owned.time.clone()), id.manager.clone())
        });
        let mut length = updaters.len();
        let mut first_of_version: BTreeMap<String, Identity> = BTreeMap::new();
        for id in updaters {
            if length <= MAX_UPDATERS {
                return;
            }
            let Some(first) = first_of_version.get(&id.api_version).cloned() else {
                first_of_version.insert(id.api_version.clone(), id);
                continue;
            };
            let bucket = Identity { manager: ANCIENT_CHANGES.into(), ..id.clone() };
            let Some(owned) = self.0.remove(&id) else { continue };
            let before = match self.0.remove(&bucket) {
                Some(before) => Some(before),
                None => self.0.remove(&first),
            };
            let set = match before {
                Some(before) => owned.set.union(before.set),
                None => owned.set,
            };
            self.0.insert(bucket, Owned { set, ..owned });
            length -= 1;
        }
    }

    pub(super) fn encode(self, object: &mut Value) {
        let mut entries: Vec<(Identity, Owned)> = self.0.into_iter().collect();
        entries.sort_by(|(id, owned), (other, others)| owned.place(id).cmp(&others.place(other)));
        let encode = |(id, owned): (Identity, Owned)| {
            let time = owned.time.as_deref().unwrap_or_default();
            let fields = owned.unread.unwrap_or_else(|| owned.set.to_fields_v1());
            encode_entry(&id, &owned.api_version, time, fields)
        };
        write_entries(object, entries.into_iter().map(encode).collect());
    }
}

/// The one entry of an object that is new, or none.
pub(super) fn write_first(object: &mut Value, identity: &Identity, time: &str, fields: Option<Value>) {
    let entry = fields.map(|fields| encode_entry(identity, &identity.api_version, time, fields));
    write_entries(object, entry.into_iter().collect());
}

fn write_entries(object: &mut Value, entries: Vec<Value>) {
    let metadata = crate::meta::metadata_mut(object);
    if entries.is_empty() {
        metadata.remove("managedFields");
    } else {
        metadata.insert("managedFields", Value::Array(entries));
    }
}

/// Reads an entry. The fields of one that is not concerned stay as they are stored.
fn decode_entry(entry: &Value, is_concerned: impl Fn(&Identity, &Map) -> bool) -> Option<(Identity, Owned)> {
    let text = |key: &str| entry.get(key).and_then(Value::as_str).unwrap_or_default();
    let operation = match text("operation") {
        "Apply" => Operation::Apply,
        "Update" => Operation::Update,
        _ => return None,
    };
    if text("fieldsType") != "FieldsV1" {
        return None;
    }
    let api_version = text("apiVersion").to_owned();
    let identity = Identity {
        manager: text("manager").to_owned(),
        operation,
        api_version: if operation == Operation::Apply { String::new() } else { api_version.clone() },
        subresource: text("subresource").to_owned(),
    };
    let (set, unread) = match entry.get("fieldsV1") {
        None | Some(Value::Null) => (FieldSet::default(), None),
        Some(Value::Object(fields)) if !fields.is_empty() && !is_concerned(&identity, fields) => {
            (FieldSet::default(), Some(Value::Object(fields.clone())))
        }
        Some(fields) => (FieldSet::from_fields_v1(fields)?, None),
    };
    let time = Some(text("time").to_owned()).filter(|time| !time.is_empty());
    Some((identity, Owned { set, api_version, time, unread }))
}

fn encode_entry(identity: &Identity, api_version: &str, time: &str, fields: Value) -> Value {
    let mut entry = Map::new();
    let operation = match identity.operation {
        Operation::Apply => "Apply",
        Operation::Update => "Update",
    };
    for (key, text) in [
        ("manager", identity.manager.as_str()),
        ("operation", operation),
        ("apiVersion", api_version),
        ("time", time),
        ("fieldsType", "FieldsV1"),
        ("subresource", &identity.subresource),
    ] {
        if !text.is_empty() {
            entry.insert(key, text.into());
        }
    }
    entry.insert("fieldsV1", fields);
    Value::Object(entry)
}

pub(super) fn format_time(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
