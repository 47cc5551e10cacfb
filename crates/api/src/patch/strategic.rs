//! Strategic merge patch: a merge patch that knows, from the schema, how lists merge, and that carries
//! directives of its own (`$patch`, `$retainKeys`, `$setElementOrder/…`, `$deleteFromPrimitiveList/…`).

use super::{PatchError, go_format, go_type};
use crate::schema::{Kind, Patch, TypeRef};
use ferrite_json::{Map, Text, Value};
use std::collections::{HashMap, HashSet};

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const SET_ELEMENT_ORDER: &str = "$setElementOrder/";
const DELETE_FROM_PRIMITIVE_LIST: &str = "$deleteFromPrimitiveList/";

type Object = Map;

/// Merges `patch` into `target`, an object of `type_`.
pub fn strategic_merge(type_: TypeRef, target: &mut Value, patch: &Value) -> Result<(), PatchError> {
    let Value::Object(patch) = patch else {
        let found = super::json_name(patch);
        return Err(PatchError::Malformed(format!(
            "json: cannot unmarshal {found} into Go value of type map[string]interface {{}}"
        )));
    };
    let original = std::mem::take(target);
    let original = match original {
        Value::Object(map) => map,
        _ => Object::new(),
    };
    *target = Value::Object(merge_map(original, patch.clone(), Node::Struct(type_))?);
    fit_struct(type_, target);
    Ok(())
}

/// Makes the numbers of a merged object fit their fields. As upstream: a whole number of any form becomes an integer, and
/// one that is too large is cut.
fn fit_struct(type_: TypeRef, value: &mut Value) {
    for (name, member) in value.as_object_mut().into_iter().flat_map(Map::iter_mut) {
        if let Some(field) = type_.field(name) {
            fit(&field.kind, member);
        }
    }
}

fn fit(kind: &Kind, value: &mut Value) {
    match (kind, &mut *value) {
        (Kind::Int32 | Kind::Int64, Value::Number(number)) => {
            let Some(whole) = number.as_i64().or_else(|| cut(number.as_f64()?)) else { return };
            *value = match kind {
                Kind::Int32 => i64::from(whole as i32).into(),
                _ => whole.into(),
            };
        }
        (Kind::Struct(type_), value) => fit_struct(type_, value),
        (Kind::List(item), Value::Array(list)) => list.iter_mut().for_each(|value| fit(item, value)),
        (Kind::Map(item), Value::Object(map)) => map.iter_mut().for_each(|(_, value)| fit(item, value)),
        _ => {}
    }
}

/// A whole number as Go converts it on most processors: one that does not fit becomes the least.
fn cut(number: f64) -> Option<i64> {
    const LIMIT: f64 = i64::MAX as f64;
    (number.trunc() == number).then(|| if number.abs() < LIMIT { number as i64 } else { i64::MIN })
}

/// Where in the schema a map stands.
#[derive(Clone, Copy)]
enum Node {
    Struct(TypeRef),
    Map(&'static Kind),
    /// A RawExtension, which upstream cannot look into.
    Raw,
    /// Something the schema does not describe: merged as plain JSON.
    Unknown,
}

const NO_PATCH: Patch = Patch { merge: false, replace: false, retain_keys: false, merge_key: "" };

impl Node {
    fn of(kind: &Kind) -> Self {
        match kind {
            Kind::Struct(type_)
            | Kind::SchemaOrArray(type_)
            | Kind::SchemaOrBool(type_)
            | Kind::SchemaOrStrings(type_) => Self::Struct(type_),
            Kind::Map(item) => Self::Map(item),
            Kind::Raw => Self::Raw,
            _ => Self::Unknown,
        }
    }

    /// The schema of member `key`: the node of its map or its elements, and its patch strategy.
    fn member(self, key: &str) -> (Self, Patch) {
        let (kind, patch) = match self {
            Self::Struct(type_) => match type_.field(key) {
                Some(field) => (&field.kind, field.patch),
                None => return (Self::Unknown, NO_PATCH),
            },
            Self::Map(item) => (item, NO_PATCH),
            Self::Unknown | Self::Raw => return (Self::Unknown, NO_PATCH),
        };
        let element = match kind {
            Kind::List(item) => item,
            Kind::SchemaOrArray(_) => kind,
            other => other,
        };
        (Self::of(element), patch)
    }
}

fn directive(text: impl Into<String>) -> PatchError {
    PatchError::Directive(text.into())
}

fn no_field(type_: &str, name: &str) -> PatchError {
    directive(format!("unable to find api field in struct {type_} for the json field {name:?}"))
}

fn malformed(text: impl Into<String>) -> PatchError {
    PatchError::Malformed(text.into())
}

fn not_a_list(value: &Value) -> PatchError {
    let received = match go_type(value) {
        "<nil>" => "untyped nil",
        other => other,
    };
    directive(format!("expected a []interface {{}}, but received a {received}"))
}

fn no_merge_key(element: &Value, merge_key: &str) -> PatchError {
    directive(format!("map: {} does not contain declared merge key: {merge_key}", go_format(element)))
}

/// Lists that merge hold elements of one type.
fn check_element_types(original: &[Value], patch: &[Value]) -> Result<(), PatchError> {
    let mut types = original.iter().chain(patch).map(go_type);
    let Some(first) = types.next() else { return Err(directive("no elements in any of the given slices")) };
    if types.all(|other| other == first) {
        return Ok(());
    }
    let lists = Value::Array(vec![Value::Array(original.to_vec()), Value::Array(patch.to_vec())]);
    Err(directive(format!("list element types are not identical: {}", go_format(&lists))))
}

fn unknown_patch_type(patch_type: &Value, map: &Object) -> PatchError {
    let map = go_format(&Value::Object(map.clone()));
    directive(format!("unknown patch type: {} in map: {map}", go_format(patch_type)))
}

fn merge_map(mut original: Object, mut patch: Object, node: Node) -> Result<Object, PatchError> {
    if let Some(patch_type) = patch.get(PATCH) {
        return match patch_type.as_str() {
            Some("replace") => {
                patch.remove(PATCH);
                Ok(patch)
            }
            Some("delete") => Ok(Object::new()),
            _ => Err(unknown_patch_type(patch_type, &patch)),
        };
    }
    apply_retain_keys(&mut original, &mut patch)?;
    apply_element_order(&mut original, &mut patch, node)?;

    for (key, patch_value) in patch {
        let (key, deleting) = match key.strip_prefix(DELETE_FROM_PRIMITIVE_LIST) {
            Some(list) => (Text::from(list), true),
            None => (key, false),
        };
        if patch_value.is_null() {
            original.remove(&key);
            continue;
        }
        let (below, strategy) = node.member(&key);
        let merged = match (original.remove(&key), patch_value) {
            (Some(Value::Object(old)), Value::Object(new)) if !deleting => {
                if let Node::Raw = node {
                    return Err(no_field("RawExtension", &key));
                }
                if strategy.replace { Value::Object(new) } else { Value::Object(merge_map(old, new, below)?) }
            }
            (Some(Value::Array(_)), Value::Array(_)) if matches!(node, Node::Raw) => {
                return Err(no_field("RawExtension", &key));
            }
            (Some(Value::Array(old)), Value::Array(new)) => {
                Value::Array(merge_list(old, new, below, strategy, deleting)?)
            }
            (Some(old), _) if deleting => old,
            (None, _) if deleting => continue,
            (_, new) => match without_directives(new) {
                Some(new) => new,
                None => continue,
            },
        };
        original.insert(key, merged);
    }
    Ok(original)
}

/// `$retainKeys`: whatever is not named goes.
fn apply_retain_keys(original: &mut Object, patch: &mut Object) -> Result<(), PatchError> {
    let Some(retained) = patch.remove(RETAIN_KEYS) else { return Ok(()) };
    let invalid = || malformed("invalid patch format of retainKeys");
    let retained = retained.as_array().ok_or_else(invalid)?;
    let keeps = |key: &str| retained.iter().any(|v| v.as_str() == Some(key));
    for (key, value) in patch.iter() {
        let exempt = value.is_null()
            || key.starts_with(DELETE_FROM_PRIMITIVE_LIST)
            || key.starts_with(SET_ELEMENT_ORDER);
        if !exempt && !keeps(key) {
            return Err(invalid());
        }
    }
    original.retain(|key, _| keeps(key));
    Ok(())
}

/// `$setElementOrder/x`: merges list `x` and puts its elements into the order given.
fn apply_element_order(original: &mut Object, patch: &mut Object, node: Node) -> Result<(), PatchError> {
    let orders: Vec<Text> = patch.keys().filter(|k| k.starts_with(SET_ELEMENT_ORDER)).cloned().collect();
    for directive_key in orders {
        let Some(order) = patch.remove(&directive_key) else { continue };
        let Value::Array(order) = order else { return Err(not_a_list(&order)) };
        let name = directive_key.trim_start_matches(SET_ELEMENT_ORDER).to_owned();
        let (below, strategy) = node.member(&name);
        let list = |value: Option<Value>| match value {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(not_a_list(&other)),
        };
        let old = list(original.get(&name).cloned())?;
        let new = list(patch.remove(&name))?;
        if let Node::Struct(type_) = node
            && type_.field(&name).is_none()
        {
            return Err(no_field(type_.go_name(), &name));
        }
        check_order(new.as_deref().unwrap_or_default(), &order, strategy.merge_key)?;
        let patched = new.clone();
        let merged = match (old.clone(), new) {
            (None, None) => continue,
            (Some(old), None) => old,
            (None, Some(new)) => elements_without_directives(new),
            (Some(old), Some(new)) => merge_list(old, new, below, strategy, false)?,
        };
        check_order_elements(&merged, &order, strategy.merge_key)?;
        check_element_types(old.as_deref().unwrap_or_default(), patched.as_deref().unwrap_or_default())?;
        let ordered = in_order(merged, &order, old.as_deref().unwrap_or_default(), strategy.merge_key);
        original.insert(name, Value::Array(ordered));
    }
    Ok(())
}

/// A list of maps is ordered by maps that have its merge key.
fn check_order_elements(merged: &[Value], order: &[Value], merge_key: &str) -> Result<(), PatchError> {
    if merge_key.is_empty() || merged.is_empty() {
        return Ok(());
    }
    for (index, element) in order.iter().enumerate() {
        if !element.is_object() {
            return Err(directive(format!("value for key {index} is not a map")));
        }
        if element.get(merge_key).is_none() {
            return Err(no_merge_key(element, merge_key));
        }
    }
    Ok(())
}

/// The elements of a patch must stand in the order that `$setElementOrder` gives.
fn check_order(patch: &[Value], order: &[Value], merge_key: &str) -> Result<(), PatchError> {
    if patch.is_empty() || order.is_empty() {
        return Ok(());
    }
    let mut rest = order.iter();
    for element in patch.iter().filter(|e| e.get(PATCH).is_none()) {
        let wanted = identity(element, merge_key);
        if !rest.any(|ordered| wanted.is_some() && identity(ordered, merge_key) == wanted) {
            return Err(directive(format!(
                "The order in patch list:\n{}\n doesn't match $setElementOrder list:\n{}\n",
                go_format(&Value::Array(patch.to_vec())),
                go_format(&Value::Array(order.to_vec())),
            )));
        }
    }
    Ok(())
}

/// Text that two elements of a list share exactly when they are the same element: the merge key, or the value where there
/// is none. An element without its merge key is like no other.
fn identity(value: &Value, merge_key: &str) -> Option<String> {
    if merge_key.is_empty() { Some(value.to_string()) } else { value.get(merge_key).map(key_text) }
}

/// Where each element is first. A list may be as long as a request's body, so that nobody searches it for each of its own.
fn places(list: &[Value], merge_key: &str) -> HashMap<String, usize> {
    let mut places = HashMap::with_capacity(list.len());
    for (at, value) in list.iter().enumerate() {
        if let Some(identity) = identity(value, merge_key) {
            places.entry(identity).or_insert(at);
        }
    }
    places
}

/// Upstream compares merge keys by their printed form, so that `80` and `"80"` are one.
fn key_text(value: &Value) -> String {
    go_format(value)
}

fn merge_list(
    original: Vec<Value>,
    patch: Vec<Value>,
    node: Node,
    strategy: Patch,
    deleting: bool,
) -> Result<Vec<Value>, PatchError> {
    // As upstream: a list that is replaced is taken as it is. Directives in it are fields that the type does not know.
    if !strategy.merge && !deleting {
        return Ok(patch);
    }
    if original.is_empty() && patch.is_empty() {
        return Ok(original);
    }
    check_element_types(&original, &patch)?;
    let of_maps = original.iter().chain(&patch).any(Value::is_object);
    if !of_maps {
        if deleting {
            let deleted: HashSet<String> = patch.iter().map(Value::to_string).collect();
            return Ok(original.into_iter().filter(|v| !deleted.contains(&v.to_string())).collect());
        }
        let mut seen = HashSet::new();
        let all = original.iter().chain(&patch);
        let merged: Vec<Value> = all.filter(|value| seen.insert(value.to_string())).cloned().collect();
        return Ok(in_order(merged, &patch, &original, ""));
    }
    let merge_key = strategy.merge_key;
    if merge_key.is_empty() {
        return Err(directive("cannot merge lists without merge key for type Slice"));
    }
    let (base, patch) = apply_element_directives(original.clone(), patch, merge_key)?;
    let Some(patch) = patch else { return Ok(base) };
    let mut merged = base;
    let server_order = merged.clone();
    let mut known = places(&merged, merge_key);
    for element in &patch {
        let Value::Object(map) = element else {
            return Err(directive(format!("invalid object type in list: {}", go_format(element))));
        };
        let Some(key) = map.get(merge_key) else { return Err(no_merge_key(element, merge_key)) };
        let key = key_text(key);
        match known.get(&key).and_then(|at| merged.get_mut(*at)) {
            Some(slot) => {
                let old = match std::mem::take(slot) {
                    Value::Object(old) => old,
                    _ => Object::new(),
                };
                *slot = Value::Object(merge_map(old, map.clone(), node)?);
            }
            None => {
                known.insert(key, merged.len());
                merged.push(element.clone());
            }
        }
    }
    Ok(in_order(merged, &patch, &server_order, merge_key))
}

/// Handles `$patch` in elements. Returns the list to merge into, and the elements to merge, or none when a
/// `$patch: replace` makes the former the outcome.
fn apply_element_directives(
    mut original: Vec<Value>,
    patch: Vec<Value>,
    merge_key: &str,
) -> Result<(Vec<Value>, Option<Vec<Value>>), PatchError> {
    let mut plain = Vec::new();
    let mut replace = false;
    let mut deleted = HashSet::new();
    for element in patch {
        let Some(patch_type) = element.get(PATCH) else {
            plain.push(element);
            continue;
        };
        match patch_type.as_str() {
            Some("delete") => {
                let key = element.get(merge_key).map(key_text);
                let key = key.ok_or_else(|| no_merge_key(&element, merge_key))?;
                deleted.insert(key);
            }
            Some("replace") => replace = true,
            Some("merge") => {
                return Err(directive("merging lists cannot yet be specified in the patch"));
            }
            _ => {
                let map = element.as_object().cloned().unwrap_or_default();
                return Err(unknown_patch_type(patch_type, &map));
            }
        }
    }
    if !deleted.is_empty() {
        original.retain(|e| e.get(merge_key).is_none_or(|k| !deleted.contains(&key_text(k))));
    }
    if replace { Ok((plain, None)) } else { Ok((original, Some(plain))) }
}

/// Elements named by `order` in that order; the others keep the server's order and go before a patched
/// element only where the server had them before it.
fn in_order(merged: Vec<Value>, order: &[Value], server: &[Value], merge_key: &str) -> Vec<Value> {
    let (order, server) = (places(order, merge_key), places(server, merge_key));
    let place = |places: &HashMap<String, usize>, value: &Value| {
        identity(value, merge_key).and_then(|identity| places.get(&identity).copied())
    };
    let (mut patched, mut others): (Vec<Value>, Vec<Value>) =
        merged.into_iter().partition(|value| place(&order, value).is_some());
    patched.sort_by_cached_key(|value| place(&order, value));
    others.sort_by_cached_key(|value| place(&server, value));

    let mut out = Vec::with_capacity(patched.len() + others.len());
    let (mut patched, mut others) = (patched.into_iter().peekable(), others.into_iter().peekable());
    loop {
        let other_first = match (others.peek(), patched.peek()) {
            (None, None) => return out,
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (Some(other), Some(patch)) => match (place(&server, other), place(&server, patch)) {
                (Some(other), Some(patch)) => other < patch,
                _ => false,
            },
        };
        out.extend(if other_first { others.next() } else { patched.next() });
    }
}

/// A patch's value where the object has none: maps with `$patch` are left out whole, and nulls have nothing to
/// remove. Other directives stay, as upstream: they are fields that the type does not know.
fn without_directives(value: Value) -> Option<Value> {
    Some(match value {
        Value::Object(map) if map.get(PATCH).is_some() => return None,
        Value::Object(map) => Value::Object(
            map.into_iter()
                .filter(|(_, value)| !value.is_null())
                .filter_map(|(key, value)| Some((key, without_directives(value)?)))
                .collect(),
        ),
        Value::Array(list) => Value::Array(elements_without_directives(list)),
        other => other,
    })
}

fn elements_without_directives(list: Vec<Value>) -> Vec<Value> {
    list.into_iter().filter_map(without_directives).collect()
}
