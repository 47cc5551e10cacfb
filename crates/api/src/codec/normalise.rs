//! Gives a value the form that it has after a round trip through upstream's Go types.

use super::{scalar, time};
use crate::quantity::is_plainly_canonical;
use crate::schema::{Field, Kind, Presence, TypeRef};
use ferrite_json::{Map, Text, Value};

/// Brings `value` to the form in which upstream answers it.
///
/// - `null` is dropped;
/// - zero values of `omitempty` fields, empty lists and maps are dropped; an empty value behind a pointer
///   (`emptyDir: {}`, `replicas: 0`) stays, because there it differs from absent;
/// - fields without `omitempty` appear: `0`, `""`, `false`, `{}`, and `null` for lists, maps and times;
/// - `items` of a list is `[]` when there are none;
/// - times are UTC with the precision of their type, quantities are canonical.
///
/// Fields the schema does not know, and values of another shape than the schema's, are left alone: decoding
/// has dealt with them.
pub fn normalise(type_: TypeRef, value: &mut Value) {
    Normaliser { stored: false, keeps_empty: false }.root(type_, value);
}

/// [`normalise`] for an object that goes to the store. Upstream stores protobuf, which does not distinguish
/// an empty list from none: a client that sent `rules: []` may read back `rules: null`.
pub fn normalise_for_storage(type_: TypeRef, value: &mut Value) {
    Normaliser { stored: true, keeps_empty: false }.root(type_, value);
}

/// [`normalise_for_storage`], but lists and maps that a client has sent empty stay, as they do in the memory of
/// upstream's server until the object is stored.
pub fn normalise_as_sent(type_: TypeRef, value: &mut Value) {
    Normaliser { stored: false, keeps_empty: true }.root(type_, value);
}

/// Where a list or map is empty that other forms than [`normalise_as_sent`] may leave out, and which of both.
pub fn empty_places(type_: TypeRef, value: &Value) -> Vec<(Vec<Step>, Value)> {
    let mut search = Search { at: Vec::new(), found: Vec::new() };
    search.object(type_, value);
    search.found
}

/// A step down into a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    Key(Text),
    Index(usize),
}

struct Search {
    at: Vec<Step>,
    found: Vec<(Vec<Step>, Value)>,
}

impl Search {
    fn object(&mut self, type_: TypeRef, value: &Value) {
        for (name, value) in value.as_object().into_iter().flatten() {
            let Some(field) = type_.field(name) else { continue };
            if !matches!(field.kind, Kind::Struct(_) | Kind::List(_) | Kind::Map(_)) {
                continue;
            }
            self.at.push(Step::Key(Text::const_new(field.name)));
            self.value(&field.kind, value);
            self.at.pop();
        }
    }

    fn value(&mut self, kind: &Kind, value: &Value) {
        match (kind, value) {
            (Kind::Struct(type_), value) => self.object(type_, value),
            (Kind::List(_), Value::Array(list)) if list.is_empty() => {
                self.found.push((self.at.clone(), value.clone()));
            }
            (Kind::Map(_), Value::Object(map)) if map.is_empty() => {
                self.found.push((self.at.clone(), value.clone()));
            }
            (Kind::List(item), Value::Array(list)) => {
                for (index, value) in list.iter().enumerate() {
                    self.at.push(Step::Index(index));
                    self.value(item, value);
                    self.at.pop();
                }
            }
            (Kind::Map(item @ (Kind::Struct(_) | Kind::List(_) | Kind::Map(_))), Value::Object(map)) => {
                for (key, value) in map {
                    self.at.push(Step::Key(key.clone()));
                    self.value(item, value);
                    self.at.pop();
                }
            }
            _ => {}
        }
    }
}

#[derive(Clone, Copy)]
struct Normaliser {
    stored: bool,
    keeps_empty: bool,
}

impl Normaliser {
    fn root(self, type_: TypeRef, value: &mut Value) {
        if let Value::Object(map) = value {
            self.object(type_, map);
        }
    }

    fn object(self, type_: TypeRef, map: &mut Map) {
        // An object usually has fewer fields than its type.
        map.retain(|name, value| type_.field(name).is_none_or(|field| self.keep(type_, field, value)));
        for field in type_.written() {
            map.entry(Text::const_new(field.name)).or_insert_with(|| match field.presence {
                Presence::Always if is_items(type_, field) => Value::Array(Vec::new()),
                Presence::Always => zero(&field.kind),
                Presence::Nullable | Presence::Pointer | Presence::OmitEmpty => Value::Null,
            });
        }
    }

    /// Normalises the value of a field. Returns false if the field is to be removed.
    fn keep(self, type_: TypeRef, field: &Field, value: &mut Value) -> bool {
        if is_items(type_, field) && value.is_null() {
            *value = Value::Array(Vec::new());
        }
        self.value(&field.kind, value);
        // A zero that is written anyway needs no replacing, but for lists in the store.
        let stays = field.presence.is_pointer()
            || field.presence == Presence::Always && !self.stored
            || is_items(type_, field)
            || self.keeps_empty && matches!(field.kind, Kind::List(_) | Kind::Map(_));
        !value.is_null() && (stays || !is_zero(field, value))
    }

    fn value(self, kind: &Kind, value: &mut Value) {
        match (kind, value) {
            (
                Kind::Struct(type_)
                | Kind::SchemaOrArray(type_)
                | Kind::SchemaOrBool(type_)
                | Kind::SchemaOrStrings(type_),
                Value::Object(map),
            ) => self.object(type_, map),
            (Kind::List(item), Value::Array(list)) => {
                for value in list {
                    self.value(item, value);
                }
            }
            (Kind::SchemaOrArray(type_), Value::Array(list)) => {
                for value in list {
                    self.root(type_, value);
                }
            }
            (Kind::Map(item), Value::Object(map)) => {
                for value in map.values_mut() {
                    self.value(item, value);
                }
            }
            (Kind::Quantity, Value::String(text)) => {
                if !is_plainly_canonical(text)
                    && let Ok(canonical) = scalar::canonical_quantity(text)
                {
                    *text = canonical;
                }
            }
            (Kind::Time, Value::String(text)) => {
                if let Ok(time) = time::parse_time(text)
                    && !scalar::is_canonical_time(text)
                {
                    *text = scalar::format_time(time).into();
                }
            }
            (Kind::MicroTime, Value::String(text)) => {
                if let Ok(time) = time::parse_time(text) {
                    *text = scalar::format_micro_time(time).into();
                }
            }
            _ => {}
        }
    }
}

/// Upstream's list handlers make sure that clients never see `items: null`.
fn is_items(type_: TypeRef, field: &Field) -> bool {
    field.name == "items" && field.presence == Presence::Always && type_.name.ends_with("List")
}

fn is_zero(field: &Field, value: &Value) -> bool {
    match (&field.kind, value) {
        (_, Value::Null) => true,
        (Kind::String | Kind::Bytes, Value::String(text)) => text.is_empty(),
        (Kind::Bool, Value::Bool(flag)) => !flag,
        (Kind::Int32 | Kind::Int64 | Kind::Double, Value::Number(number)) => number.as_f64() == Some(0.0),
        (Kind::List(_) | Kind::Strings, Value::Array(list)) => list.is_empty(),
        (Kind::Map(_), Value::Object(map)) => map.is_empty(),
        _ => false,
    }
}

/// The zero value that Go writes for a field without `omitempty`.
fn zero(kind: &Kind) -> Value {
    match kind {
        Kind::String => "".into(),
        Kind::Bool => false.into(),
        Kind::Int32 | Kind::Int64 | Kind::Double | Kind::IntOrString => 0.into(),
        Kind::Quantity => "0".into(),
        Kind::Duration => "0s".into(),
        Kind::Struct(type_) => {
            let mut map = Map::new();
            Normaliser { stored: false, keeps_empty: false }.object(type_, &mut map);
            Value::Object(map)
        }
        _ => Value::Null,
    }
}
