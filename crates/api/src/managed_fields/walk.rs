//! Walks over objects: which fields are set, how two objects differ, merging and removing.

use super::field_set::{Entry, FieldSet, PathElement};
use super::node::Node;
use ferrite_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// The differences between a new object and an old one.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct Comparison {
    pub(super) added: FieldSet,
    pub(super) modified: FieldSet,
    pub(super) removed: FieldSet,
}

impl Comparison {
    pub(super) fn without(self, ignored: &FieldSet) -> Self {
        Self {
            added: self.added.recursive_difference(ignored),
            modified: self.modified.recursive_difference(ignored),
            removed: self.removed.recursive_difference(ignored),
        }
    }
}

/// True if all elements of the granular lists below have what identifies them.
pub(super) fn is_tracked(node: Node<'_>, value: &Value) -> bool {
    match value {
        Value::Object(map) if node.is_map() => map.iter().all(|(name, value)| {
            !value.is_object() && !value.is_array() || is_tracked(node.member(name), value)
        }),
        Value::Array(list) if node.is_list() => {
            list.iter().all(|item| node.is_identified(item) && is_tracked(node.element(), item))
        }
        _ => true,
    }
}

/// The fields an applied configuration sets.
pub(super) fn field_set(node: Node<'_>, value: &Value) -> FieldSet {
    entry(node, value).below
}

fn entry(node: Node<'_>, value: &Value) -> Entry {
    let mut below = Vec::new();
    match value {
        Value::Object(map) if node.is_map() => {
            for (name, value) in map {
                let (element, member) = node.step(name);
                let mut entry = entry(member, value);
                let empty = value.is_null() || value.as_object().is_some_and(Map::is_empty);
                entry.member |=
                    empty || !node.declares(name) && !matches!(node, Node::Deduced | Node::DeducedRoot);
                below.push((element, entry));
            }
            Entry { member: false, below: FieldSet::of_entries(below) }
        }
        Value::Array(list) if node.is_list() => {
            for item in list {
                let Some(element) = node.identify(item) else { continue };
                let mut entry = entry(node.element(), item);
                entry.member = true;
                below.push((element, entry));
            }
            Entry { member: false, below: FieldSet::of_entries(below) }
        }
        Value::Null if node.is_map() || node.is_list() => Entry::default(),
        _ => Entry { member: true, below: FieldSet::default() },
    }
}

pub(super) fn compare(node: Node<'_>, old: &Value, new: &Value) -> Comparison {
    let Difference { added, modified, removed } = difference(node, Some(old), Some(new));
    Comparison { added: added.below, modified: modified.below, removed: removed.below }
}

/// The differences in a part of an object.
#[derive(Default)]
struct Difference {
    added: Entry,
    modified: Entry,
    removed: Entry,
}

impl Difference {
    /// Puts the difference below one step in its place.
    fn put(&mut self, element: PathElement, below: Self) {
        let parts = [
            (&mut self.added, below.added),
            (&mut self.modified, below.modified),
            (&mut self.removed, below.removed),
        ];
        let mut differing = parts.into_iter().filter(|(_, theirs)| !theirs.is_empty());
        let Some((ours, theirs)) = differing.next() else { return };
        for (ours, theirs) in differing {
            ours.below.put(element.clone(), theirs);
        }
        ours.below.put(element, theirs);
    }

    /// The part itself comes, goes or changes.
    fn note(&mut self, came: bool, went: bool, changed: bool) {
        self.added.member |= came;
        self.removed.member |= went;
        self.modified.member |= changed;
    }
}

fn difference(node: Node<'_>, old: Option<&Value>, new: Option<&Value>) -> Difference {
    let mut out = Difference::default();
    let (came, went) = (old.is_none() && new.is_some(), old.is_some() && new.is_none());
    if node.is_map() {
        // A part without a schema may be an object before or after only. As upstream: it changes as a whole, and its
        // fields come or go, too.
        let reshaped = !is_map_or_nothing(old) || !is_map_or_nothing(new);
        let (old_map, new_map) = (old.and_then(Value::as_object), new.and_then(Value::as_object));
        let empty = |map: Option<&Map>| map.is_none_or(Map::is_empty);
        if !(empty(old_map) && empty(new_map)) {
            let gone = old_map
                .into_iter()
                .flatten()
                .filter(|(name, _)| new_map.is_none_or(|m| !m.contains_key(*name)));
            let gone = gone.map(|(name, before)| (name, Some(before), None));
            let here = new_map.into_iter().flatten();
            let here = here.map(|(name, after)| (name, old_map.and_then(|m| m.get(name)), Some(after)));
            for (name, before, after) in here.chain(gone).filter(|(_, before, after)| before != after) {
                let (element, member) = node.step(name);
                out.put(element, difference(member, before, after));
            }
            // A granular object or list that appears or goes is itself such a field.
            out.note(came, went, reshaped && !came && !went);
            return out;
        }
    }
    if node.is_list() {
        let (old_list, new_list) = (list_of(node, old), list_of(node, new));
        if let (Some(old_list), Some(new_list)) = (old_list, new_list)
            && !(old_list.is_empty() && new_list.is_empty())
        {
            let mut elements: BTreeMap<PathElement, (Vec<&Value>, Vec<&Value>)> = BTreeMap::new();
            old_list.into_iter().for_each(|(e, v)| elements.entry(e).or_default().0.push(v));
            new_list.into_iter().for_each(|(e, v)| elements.entry(e).or_default().1.push(v));
            for (element, (before, after)) in elements.into_iter().filter(|(_, (b, a))| a != b) {
                let below = match (before.as_slice(), after.as_slice()) {
                    (before @ ([] | [_]), after @ ([] | [_])) => {
                        difference(node.element(), before.first().copied(), after.first().copied())
                    }
                    // Elements that cannot be told apart come, change and go together. As upstream: one that stays
                    // alone comes anew, and one that others join goes.
                    (before, after) => {
                        let alone = |list: &[&'_ Value]| list.len() == 1;
                        let mut together = match (alone(before), alone(after)) {
                            (false, true) => difference(node.element(), None, after.first().copied()),
                            (true, false) => difference(node.element(), before.first().copied(), None),
                            _ => Difference::default(),
                        };
                        let (came, went) = (before.len() < 2, after.len() < 2);
                        together.note(came, went, !came && !went);
                        together
                    }
                };
                out.put(element, below);
            }
            out.note(came, went, false);
            return out;
        }
    }
    out.note(came, went, old.is_some() && new.is_some() && old != new);
    out
}

pub(super) fn is_map_or_nothing(value: Option<&Value>) -> bool {
    matches!(value, None | Some(Value::Null | Value::Object(_)))
}

pub(super) fn list_of<'v>(node: Node<'_>, value: Option<&'v Value>) -> Option<Vec<(PathElement, &'v Value)>> {
    match value {
        None | Some(Value::Null) => Some(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(|item| Some((node.identify(item)?, item))).collect(),
        Some(_) => None,
    }
}

/// Lays `config` over `live`: granular parts are merged, the rest is the configuration's.
pub(super) fn merge(node: Node<'_>, live: Option<&Value>, config: Option<&Value>) -> Option<Value> {
    match (live, config) {
        (live, None) => live.cloned(),
        (None, Some(config)) => Some(config.clone()),
        (Some(Value::Object(live)), Some(config @ (Value::Object(_) | Value::Null))) if node.is_map() => {
            let mut merged = live.clone();
            for (name, value) in config.as_object().into_iter().flatten() {
                let value = merge(node.member(name), live.get(name), Some(value));
                merged.insert(name.clone(), value.unwrap_or(Value::Null));
            }
            Some(Value::Object(merged))
        }
        (Some(Value::Array(live)), Some(Value::Null)) if node.is_list() => Some(Value::Array(live.clone())),
        (Some(Value::Array(live)), Some(Value::Array(config))) if node.is_list() => {
            match (node.elements(live), node.elements(config)) {
                (Some(live), Some(config)) => Some(Value::Array(merge_lists(node, &live, &config))),
                _ => Some(Value::Array(config.clone())),
            }
        }
        (_, Some(config)) => Some(config.clone()),
    }
}

/// Shared elements take the configuration's order; others stay where they were relative to them.
fn merge_lists(
    node: Node<'_>,
    live: &[(PathElement, &Value)],
    config: &[(PathElement, &Value)],
) -> Vec<Value> {
    let live_at: BTreeMap<&PathElement, &Value> = live.iter().map(|(e, v)| (e, *v)).collect();
    let configured: BTreeSet<&PathElement> = config.iter().map(|(e, _)| e).collect();
    let mut shared = config.iter().map(|(e, _)| e).filter(|e| live_at.contains_key(e)).peekable();
    let mut merged: BTreeSet<&PathElement> = BTreeSet::new();
    let mut out = Vec::with_capacity(live.len() + config.len());
    let push = |out: &mut Vec<Value>, old: Option<&Value>, new: Option<&Value>| {
        out.extend(merge(node.element(), old, new));
    };
    let (mut l, mut c) = (0, 0);
    while l < live.len() || c < config.len() {
        if let Some((element, old)) = live.get(l) {
            if let Some((wanted, new)) = config.get(c) {
                if element == wanted {
                    merged.insert(element);
                    push(&mut out, Some(old), Some(new));
                    (l, c) = (l + 1, c + 1);
                    shared.next();
                    continue;
                }
                if configured.contains(element) && shared.peek().is_some_and(|next| *next != element) {
                    l += 1;
                    continue;
                }
            }
            if !configured.contains(element) {
                push(&mut out, Some(old), None);
                l += 1;
                continue;
            }
            if merged.contains(element) {
                l += 1;
                continue;
            }
        }
        if let Some((element, new)) = config.get(c) {
            merged.insert(element);
            push(&mut out, live_at.get(element).copied(), Some(new));
            c += 1;
            if shared.peek() == Some(&element) {
                shared.next();
            }
        }
    }
    out
}

/// The value without the fields and elements in `unwanted`. A part that becomes empty is null.
pub(super) fn remove(node: Node<'_>, value: &Value, unwanted: &FieldSet) -> Value {
    match value {
        Value::Object(map) if node.is_map() => {
            let mut kept = Map::new();
            for (name, value) in map {
                let (element, member) = node.step(name);
                match unwanted.get(&element) {
                    Some(entry) if entry.member => {}
                    Some(entry) => {
                        kept.insert(name.clone(), remove(member, value, &entry.below));
                    }
                    None => {
                        kept.insert(name.clone(), value.clone());
                    }
                }
            }
            if kept.is_empty() { Value::Null } else { Value::Object(kept) }
        }
        Value::Array(list) if node.is_list() => {
            let mut kept = Vec::new();
            for value in list {
                match node.identify(value).and_then(|e| unwanted.get(&e)) {
                    Some(entry) if entry.member => {}
                    Some(entry) => kept.push(remove(node.element(), value, &entry.below)),
                    None => kept.push(value.clone()),
                }
            }
            if kept.is_empty() { Value::Null } else { Value::Array(kept) }
        }
        other => other.clone(),
    }
}

/// Makes fields of structs members when something below them is, so that removing them removes the struct.
pub(super) fn with_named_fields(node: Node<'_>, set: &FieldSet) -> FieldSet {
    let mut out = FieldSet::default();
    for (element, entry) in &set.entries {
        let named = matches!(element, PathElement::Field(name) if node.declares(name));
        let has_below = !entry.below.is_empty();
        out.put(
            element.clone(),
            Entry {
                member: entry.member || named && has_below,
                below: with_named_fields(node.below(element), &entry.below),
            },
        );
    }
    out
}
