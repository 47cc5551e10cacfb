//! Any value.

use std::borrow::Cow;
use std::fmt;
use std::ops;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

use crate::map::MapVisitor;
use crate::{Error, Map, Number, Text};

/// A JSON value.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub enum Value {
    #[default]
    Null,
    Bool(bool),
    Number(Number),
    String(Text),
    Array(Vec<Value>),
    Object(Map),
}

static NULL: Value = Value::Null;

/// An index into a value: the key of a member, or the position of an item.
pub trait Index {
    fn find<'v>(&self, value: &'v Value) -> Option<&'v Value>;
    fn find_mut<'v>(&self, value: &'v mut Value) -> Option<&'v mut Value>;
    /// The place itself; a missing member is made, null at first.
    fn place<'v>(&self, value: &'v mut Value) -> &'v mut Value;
}

impl Index for str {
    fn find<'v>(&self, value: &'v Value) -> Option<&'v Value> {
        value.as_object()?.get(self)
    }

    fn find_mut<'v>(&self, value: &'v mut Value) -> Option<&'v mut Value> {
        value.as_object_mut()?.get_mut(self)
    }

    fn place<'v>(&self, value: &'v mut Value) -> &'v mut Value {
        if value.is_null() {
            *value = Value::Object(Map::new());
        }
        match value {
            Value::Object(map) => map.entry(self).or_default(),
            other => panic!("cannot access key {self:?} in JSON {}", other.kind()),
        }
    }
}

impl Index for usize {
    fn find<'v>(&self, value: &'v Value) -> Option<&'v Value> {
        value.as_array()?.get(*self)
    }

    fn find_mut<'v>(&self, value: &'v mut Value) -> Option<&'v mut Value> {
        value.as_array_mut()?.get_mut(*self)
    }

    fn place<'v>(&self, value: &'v mut Value) -> &'v mut Value {
        match value {
            Value::Array(items) => &mut items[*self],
            other => panic!("cannot access index {self} of JSON {}", other.kind()),
        }
    }
}

/// Implements `Index` for pointers to an index.
macro_rules! index_through {
    ($([$($t:ident)?] $type:ty => $to:ty;)+) => {$(
        impl $(<$t: Index + ?Sized>)? Index for $type {
            fn find<'v>(&self, value: &'v Value) -> Option<&'v Value> {
                <$to as Index>::find(self, value)
            }

            fn find_mut<'v>(&self, value: &'v mut Value) -> Option<&'v mut Value> {
                <$to as Index>::find_mut(self, value)
            }

            fn place<'v>(&self, value: &'v mut Value) -> &'v mut Value {
                <$to as Index>::place(self, value)
            }
        }
    )+};
}

index_through! {
    [] String => str;
    [] Text => str;
    [T] &T => T;
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "boolean",
            Self::Number(_) => "number",
            Self::String(_) => "string",
            Self::Array(_) => "array",
            Self::Object(_) => "object",
        }
    }

    pub fn get<I: Index>(&self, index: I) -> Option<&Self> {
        index.find(self)
    }

    pub fn get_mut<I: Index>(&mut self, index: I) -> Option<&mut Self> {
        index.find_mut(self)
    }

    /// The value that a JSON pointer (RFC 6901) names.
    pub fn pointer(&self, pointer: &str) -> Option<&Self> {
        tokens(pointer)?.try_fold(self, |value, token| match value {
            Self::Object(map) => map.get(token.as_ref()),
            Self::Array(items) => items.get(place_in_list(&token)?),
            _ => None,
        })
    }

    /// As [`Value::pointer`].
    pub fn pointer_mut(&mut self, pointer: &str) -> Option<&mut Self> {
        tokens(pointer)?.try_fold(self, |value, token| match value {
            Self::Object(map) => map.get_mut(token.as_ref()),
            Self::Array(items) => items.get_mut(place_in_list(&token)?),
            _ => None,
        })
    }

    /// The value itself; null stays in its place.
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// The number of values in this one, itself included; none if containers are nested more than `levels` deep.
    ///
    /// Safe for a value of any depth: it goes down `levels` and no further.
    pub fn count_within(&self, levels: usize) -> Option<usize> {
        let below = |sum: usize, value: &Self| {
            let levels = levels.checked_sub(1)?;
            // Most values are scalars; they need no call of their own.
            match value {
                Self::Array(_) | Self::Object(_) => Some(sum + value.count_within(levels)?),
                _ => Some(sum + 1),
            }
        };
        match self {
            Self::Array(_) | Self::Object(_) if levels == 0 => None,
            Self::Array(items) => items.iter().try_fold(1, below),
            Self::Object(map) => map.values().try_fold(1, below),
            _ => Some(1),
        }
    }

    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    pub fn is_boolean(&self) -> bool {
        matches!(self, Self::Bool(_))
    }

    pub fn is_number(&self) -> bool {
        matches!(self, Self::Number(_))
    }

    pub fn is_i64(&self) -> bool {
        matches!(self, Self::Number(number) if number.is_i64())
    }

    pub fn is_u64(&self) -> bool {
        matches!(self, Self::Number(number) if number.is_u64())
    }

    pub fn is_f64(&self) -> bool {
        matches!(self, Self::Number(number) if number.is_f64())
    }

    pub fn is_string(&self) -> bool {
        matches!(self, Self::String(_))
    }

    pub fn is_array(&self) -> bool {
        matches!(self, Self::Array(_))
    }

    pub fn is_object(&self) -> bool {
        matches!(self, Self::Object(_))
    }

    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(truth) => Some(*truth),
            _ => None,
        }
    }

    pub fn as_number(&self) -> Option<&Number> {
        match self {
            Self::Number(number) => Some(number),
            _ => None,
        }
    }

    pub fn as_i64(&self) -> Option<i64> {
        self.as_number()?.as_i64()
    }

    pub fn as_u64(&self) -> Option<u64> {
        self.as_number()?.as_u64()
    }

    pub fn as_f64(&self) -> Option<f64> {
        self.as_number()?.as_f64()
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<&Vec<Self>> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    pub fn as_array_mut(&mut self) -> Option<&mut Vec<Self>> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    pub fn as_object(&self) -> Option<&Map> {
        match self {
            Self::Object(map) => Some(map),
            _ => None,
        }
    }

    pub fn as_object_mut(&mut self) -> Option<&mut Map> {
        match self {
            Self::Object(map) => Some(map),
            _ => None,
        }
    }
}

/// The parts of a JSON pointer; none if it is not one.
fn tokens(pointer: &str) -> Option<impl Iterator<Item = Cow<'_, str>>> {
    if !pointer.is_empty() && !pointer.starts_with('/') {
        return None;
    }
    Some(pointer.split('/').skip(1).map(|token| match token.contains('~') {
        true => Cow::Owned(token.replace("~1", "/").replace("~0", "~")),
        false => Cow::Borrowed(token),
    }))
}

fn place_in_list(token: &str) -> Option<usize> {
    if token.starts_with('+') || (token.starts_with('0') && token.len() > 1) {
        return None;
    }
    token.parse().ok()
}

impl<I: Index> ops::Index<I> for Value {
    type Output = Self;

    fn index(&self, index: I) -> &Self {
        index.find(self).unwrap_or(&NULL)
    }
}

impl<I: Index> ops::IndexMut<I> for Value {
    fn index_mut(&mut self, index: I) -> &mut Self {
        index.place(self)
    }
}

/// As JSON; indented when asked for with `#`.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = if f.alternate() { crate::to_string_pretty(self) } else { crate::to_string(self) };
        f.write_str(&text.map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("Null"),
            Self::Bool(truth) => write!(f, "Bool({truth})"),
            Self::Number(number) => write!(f, "Number({number})"),
            Self::String(text) => write!(f, "String({:?})", text.as_str()),
            Self::Array(items) => {
                f.write_str("Array ")?;
                items.fmt(f)
            }
            Self::Object(map) => {
                f.write_str("Object ")?;
                map.fmt(f)
            }
        }
    }
}

impl FromStr for Value {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        crate::from_str(text)
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(truth) => serializer.serialize_bool(*truth),
            Self::Number(number) => number.serialize(serializer),
            Self::String(text) => serializer.serialize_str(text),
            Self::Array(items) => items.serialize(serializer),
            Self::Object(map) => map.serialize(serializer),
        }
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any valid JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        Value::deserialize(deserializer)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Value, E> {
        Ok(Value::Bool(truth))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<Value, A::Error> {
        MapVisitor.visit_map(access).map(Value::Object)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::String(text.into())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::String(text.into())
    }
}

impl From<&String> for Value {
    fn from(text: &String) -> Self {
        Self::String(text.into())
    }
}

impl From<Text> for Value {
    fn from(text: Text) -> Self {
        Self::String(text)
    }
}

impl From<&Text> for Value {
    fn from(text: &Text) -> Self {
        Self::String(text.clone())
    }
}

impl From<Cow<'_, str>> for Value {
    fn from(text: Cow<'_, str>) -> Self {
        Self::String(text.into())
    }
}

impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

impl From<Number> for Value {
    fn from(number: Number) -> Self {
        Self::Number(number)
    }
}

impl From<f64> for Value {
    /// A number that JSON cannot express becomes null.
    fn from(number: f64) -> Self {
        Number::from_f64(number).map_or(Self::Null, Self::Number)
    }
}

impl From<Map> for Value {
    fn from(map: Map) -> Self {
        Self::Object(map)
    }
}

impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(items: Vec<T>) -> Self {
        items.into_iter().collect()
    }
}

impl<T: Into<Value>, const N: usize> From<[T; N]> for Value {
    fn from(items: [T; N]) -> Self {
        items.into_iter().collect()
    }
}

impl<T: Clone + Into<Value>> From<&[T]> for Value {
    fn from(items: &[T]) -> Self {
        items.iter().cloned().collect()
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl From<()> for Value {
    fn from((): ()) -> Self {
        Self::Null
    }
}

impl<T: Into<Value>> FromIterator<T> for Value {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        Self::Array(items.into_iter().map(Into::into).collect())
    }
}

impl<K: Into<Text>, V: Into<Value>> FromIterator<(K, V)> for Value {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(members: I) -> Self {
        Self::Object(members.into_iter().map(|(key, value)| (key, value.into())).collect())
    }
}

macro_rules! integers {
    ($($type:ty)+) => {$(
        impl From<$type> for Value {
            fn from(number: $type) -> Self {
                Self::Number(number.into())
            }
        }
    )+};
}

integers!(i8 i16 i32 i64 isize u8 u16 u32 u64 usize);

/// Values compare with the types that they may hold, on either side.
macro_rules! equal {
    ($($type:ty: $this:ident, $other:ident => $same:expr;)+) => {$(
        impl PartialEq<$type> for Value {
            fn eq(&self, $other: &$type) -> bool {
                let $this = self;
                $same
            }
        }

        impl PartialEq<Value> for $type {
            fn eq(&self, other: &Value) -> bool {
                *other == *self
            }
        }
    )+};
}

equal! {
    str: value, other => value.as_str() == Some(other);
    &str: value, other => value.as_str() == Some(*other);
    String: value, other => value.as_str() == Some(other);
    Text: value, other => value.as_str() == Some(other);
    bool: value, other => value.as_bool() == Some(*other);
    f64: value, other => value.as_f64() == Some(*other);
    i32: value, other => value.as_i64() == Some(i64::from(*other));
    i64: value, other => value.as_i64() == Some(*other);
    u8: value, other => value.as_u64() == Some(u64::from(*other));
    u16: value, other => value.as_u64() == Some(u64::from(*other));
    u32: value, other => value.as_u64() == Some(u64::from(*other));
    u64: value, other => value.as_u64() == Some(*other);
    usize: value, other => value.as_u64() == u64::try_from(*other).ok();
}

/// A reference compares with a number as the value does.
macro_rules! equal_by_reference {
    ($($type:ty)+) => {$(
        impl PartialEq<$type> for &Value {
            fn eq(&self, other: &$type) -> bool {
                **self == *other
            }
        }
    )+};
}

equal_by_reference!(bool f64 i32 i64 u8 u16 u32 u64 usize);
