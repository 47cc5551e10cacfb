//! The managed fields of a new object: its creator owns all of them.
//!
//! The same as comparing the object with a blank one and recording added and modified fields, without the
//! sets of paths in between: most objects are only ever written this way.

use super::field_set::{FieldSet, PathElement};
use super::node::Node;
use super::walk::{is_map_or_nothing, is_tracked, list_of};
use super::{STRIPPED, Writer};
use ferrite_json::{Map, Text, Value};

/// The fields that the maker of an object owns, as `fieldsV1` has them; `None` if there are none.
pub(super) fn fields(writer: &Writer<'_>, object: &Value) -> Option<Value> {
    let ignored = FieldSet::of_fields(writer.ignored);
    let skipped = Skipped { ignored: Some(&ignored), stripped: Some(&STRIPPED) };
    let part = part(Node::root(writer), Some(&writer.blank()), object, skipped);
    (!part.below.is_empty() && !part.untracked).then(|| Value::Object(Map::from_members(part.below)))
}

/// The fields that nobody owns, seen from a part of the object. Neither reaches deep.
#[derive(Clone, Copy)]
struct Skipped<'a> {
    /// Fields that do not count, with all below them.
    ignored: Option<&'a FieldSet>,
    /// Fields that do not count themselves.
    stripped: Option<&'a FieldSet>,
}

impl Skipped<'_> {
    const NOTHING: Self = Self { ignored: None, stripped: None };
}

/// The owned fields of a part of the object.
#[derive(Default)]
struct Part {
    /// The part itself.
    member: bool,
    /// The owned fields below, in the form of `fieldsV1`.
    below: Vec<(Text, Value)>,
    /// A list below has elements without their keys. As upstream: nobody keeps track of such an object.
    untracked: bool,
}

impl Part {
    fn put(&mut self, key: Text, part: Self) {
        let Self { member, mut below, untracked } = part;
        self.untracked |= untracked;
        if member && !below.is_empty() {
            below.insert(0, (Text::const_new("."), Value::Object(Map::new())));
        }
        if member || !below.is_empty() {
            self.below.push((key, Value::Object(Map::from_members(below))));
        }
    }
}

/// The fields of a part that belong to the writer who made `new` of `old`, which is the blank object's
/// part.
fn part(node: Node<'_>, old: Option<&Value>, new: &Value, skipped: Skipped<'_>) -> Part {
    let came = old.is_none();
    if node.is_map() && is_map_or_nothing(old) && is_map_or_nothing(Some(new)) {
        let (old_map, new_map) = (old.and_then(Value::as_object), new.as_object());
        let empty = |map: Option<&Map>| map.is_none_or(Map::is_empty);
        if !(empty(old_map) && empty(new_map)) {
            return members(node, old_map, new_map, came, skipped);
        }
    }
    if node.is_list()
        && let (Some(old_list), Some(new_list)) = (list_of(node, old), list_of(node, Some(new)))
        && !(old_list.is_empty() && new_list.is_empty())
    {
        return elements(node, &old_list, new_list, came);
    }
    let untracked = node.is_list() && list_of(node, Some(new)).is_none();
    Part { member: came || old != Some(new), below: Vec::new(), untracked }
}

fn members(node: Node<'_>, old: Option<&Map>, new: Option<&Map>, came: bool, skipped: Skipped<'_>) -> Part {
    let mut out = Part { member: came, below: Vec::with_capacity(new.map_or(0, Map::len)), untracked: false };
    for (name, after) in new.into_iter().flatten() {
        let before = old.and_then(|map| map.get(name));
        if before == Some(after) {
            continue;
        }
        let mut below = Skipped::NOTHING;
        let mut stripped = false;
        if skipped.ignored.is_some() || skipped.stripped.is_some() {
            let element = PathElement::Field(name.clone());
            let ignored = skipped.ignored.and_then(|set| set.get(&element));
            if ignored.is_some_and(|entry| entry.member) {
                out.untracked |= !is_tracked(node.member(name), after);
                continue;
            }
            let entry = skipped.stripped.and_then(|set| set.get(&element));
            stripped = entry.is_some_and(|entry| entry.member);
            below = Skipped { ignored: ignored.map(|e| &e.below), stripped: entry.map(|e| &e.below) };
        }
        let (key, member) = node.keyed_member(name);
        let mut part = part(member, before, after, below);
        part.member &= !stripped;
        out.put(key, part);
    }
    out
}

fn elements(
    node: Node<'_>,
    old: &[(PathElement, &Value)],
    mut new: Vec<(PathElement, &Value)>,
    came: bool,
) -> Part {
    let mut out = Part { member: came, below: Vec::with_capacity(new.len()), untracked: false };
    new.sort_by(|(a, _), (b, _)| a.cmp(b));
    for same in new.chunk_by(|(a, _), (b, _)| a == b) {
        let Some((element, first)) = same.first() else { continue };
        let before: Vec<&Value> = old.iter().filter(|(e, _)| e == element).map(|(_, v)| *v).collect();
        if before.iter().eq(same.iter().map(|(_, v)| v)) {
            continue;
        }
        let part = match (before.as_slice(), same) {
            (before @ ([] | [_]), [_]) => {
                part(node.element(), before.first().copied(), first, Skipped::NOTHING)
            }
            // Elements that cannot be told apart come and change together.
            _ => Part {
                member: true,
                untracked: !same.iter().all(|(_, value)| is_tracked(node.element(), value)),
                ..Part::default()
            },
        };
        out.put(element.encode(), part);
    }
    out
}
