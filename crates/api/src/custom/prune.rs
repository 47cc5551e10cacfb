//! Pruning: fields that a schema does not name are dropped.

use super::schema::{Additional, Schema};
use ferrite_json::Value;
use std::fmt::Write as _;

const META: [&str; 3] = ["apiVersion", "kind", "metadata"];

/// Drops unknown fields from a whole object and answers their paths, sorted. Kind, version and metadata stay.
pub fn prune(object: &mut Value, schema: &Schema) -> Vec<String> {
    let mut pruner = Pruner { path: String::new(), unknown: Vec::new() };
    pruner.value(object, Some(schema), true, schema.preserve);
    pruner.unknown.sort_unstable();
    pruner.unknown
}

/// As [`prune`], for a default. Kind, version and metadata stay where the schema is of an embedded resource.
pub(super) fn prune_part(value: &mut Value, schema: &Schema) {
    Pruner { path: String::new(), unknown: Vec::new() }.value(
        value,
        Some(schema),
        schema.embedded,
        schema.preserve,
    );
}

struct Pruner {
    path: String,
    unknown: Vec<String>,
}

impl Pruner {
    fn key(&mut self, key: &str) -> usize {
        let end = self.path.len();
        if end > 0 {
            self.path.push('.');
        }
        self.path.push_str(key);
        end
    }

    fn index(&mut self, index: usize) -> usize {
        let end = self.path.len();
        let _ = write!(self.path, "[{index}]");
        end
    }

    fn record(&mut self, key: &str) {
        let end = self.key(key);
        self.unknown.push(self.path.clone());
        self.path.truncate(end);
    }

    /// `resource`: kind, version and metadata stay. `preserve`: unknown fields stay; items of a list take it from the
    /// list.
    fn value(&mut self, value: &mut Value, schema: Option<&Schema>, resource: bool, preserve: bool) {
        match value {
            Value::Object(map) => map.retain(|key, value| {
                if resource && META.contains(&key.as_str()) {
                    return true;
                }
                let below = schema.and_then(|schema| schema.property(key));
                let known = below.is_some()
                    || schema.is_some_and(|schema| !matches!(schema.additional, Additional::Unset));
                if known {
                    let below = below.or_else(|| schema.and_then(Schema::additional_schema));
                    if preserve && below.is_none() {
                        return true;
                    }
                    let end = self.key(key);
                    let (embedded, preserve) = below.map_or((false, false), |b| (b.embedded, b.preserve));
                    self.value(value, below, embedded, preserve);
                    self.path.truncate(end);
                    return true;
                }
                let at_root = self.path.is_empty() && META.contains(&key.as_str());
                if !preserve && !at_root {
                    self.record(key);
                }
                preserve
            }),
            Value::Array(list) => {
                let items = schema.and_then(|schema| schema.items.as_deref());
                if preserve && items.is_none() {
                    return;
                }
                for (index, value) in list.iter_mut().enumerate() {
                    let end = self.index(index);
                    let (embedded, own) = items.map_or((false, false), |i| (i.embedded, i.preserve));
                    self.value(value, items, embedded, preserve || own);
                    self.path.truncate(end);
                }
            }
            _ => {}
        }
    }
}
