//! Maps and objects.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Str, Value};
use crate::error::EvalError;
use crate::escape;
use crate::schema::Schema;

/// Maps of more entries than this have an index.
const LINEAR: usize = 8;

/// A map: a JSON object with its schema, or entries that an expression made.
#[derive(Clone, Debug)]
pub enum Map<'a> {
    Json {
        members: &'a ferrite_json::Map,
        schema: Option<&'a Schema>,
    },
    Shared(Arc<Entries<'a>>),
    /// Entries where the index of a key that is not there gives an empty map. The key is still not `in` the map.
    Nested(Arc<Entries<'a>>),
}

/// The entries of a map, in the order in which they were added.
#[derive(Clone, Debug, Default)]
pub struct Entries<'a> {
    entries: Vec<(Value<'a>, Value<'a>)>,
    index: HashMap<Key, usize>,
}

/// A key such that keys that are equal in CEL are equal here: numbers of all types that denote one integer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Null,
    Bool(bool),
    Integer(i128),
    Double(u64),
    String(Arc<str>),
    Bytes(Arc<[u8]>),
    Other(String),
}

impl Key {
    fn of(value: &Value<'_>) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(value) => Self::Bool(*value),
            Value::Int(value) => Self::Integer((*value).into()),
            Value::Uint(value) => Self::Integer((*value).into()),
            Value::Double(value) if value.fract() == 0.0 && value.abs() < 1e30 => {
                Self::Integer(*value as i128)
            }
            Value::Double(value) => Self::Double(value.to_bits()),
            Value::String(Str::Shared(text)) => Self::String(text.clone()),
            Value::String(Str::Borrowed(text)) => Self::String((*text).into()),
            Value::Bytes(bytes) => Self::Bytes(bytes.clone()),
            other => Self::Other(format!("{other:?}")),
        }
    }
}

fn same_key(a: &Value<'_>, b: &Value<'_>) -> bool {
    match (a, b) {
        (Value::String(a), Value::String(b)) => **a == **b,
        (Value::Int(a), Value::Int(b)) => a == b,
        (Value::String(_), _) | (_, Value::String(_)) => false,
        (a, b) => Key::of(a) == Key::of(b),
    }
}

impl<'a> Entries<'a> {
    fn position(&self, key: &Value<'_>) -> Option<usize> {
        if self.entries.len() <= LINEAR {
            return self.entries.iter().position(|(own, _)| same_key(own, key));
        }
        self.index.get(&Key::of(key)).copied()
    }

    /// Adds an entry. False, and no change, if there is one with this key.
    pub(crate) fn insert(&mut self, key: Value<'a>, value: Value<'a>) -> bool {
        if self.position(&key).is_some() {
            return false;
        }
        if self.entries.len() == LINEAR {
            self.index = self.entries.iter().enumerate().map(|(i, (key, _))| (Key::of(key), i)).collect();
        }
        if self.entries.len() >= LINEAR {
            self.index.insert(Key::of(&key), self.entries.len());
        }
        self.entries.push((key, value));
        true
    }

    /// Adds an entry or replaces the value of the one with this key.
    pub(crate) fn set(&mut self, key: Value<'a>, value: Value<'a>) {
        match self.position(&key) {
            Some(at) => self.entries[at].1 = value,
            None => {
                self.insert(key, value);
            }
        }
    }
}

impl<'a> Map<'a> {
    /// A map of `entries`; of several with one key the last counts.
    pub fn new(entries: impl IntoIterator<Item = (Value<'a>, Value<'a>)>) -> Self {
        let mut made = Entries::default();
        for (key, value) in entries {
            made.set(key, value);
        }
        Self::Shared(Arc::new(made))
    }

    pub(crate) fn from_entries(entries: Entries<'a>) -> Self {
        Self::Shared(Arc::new(entries))
    }

    pub fn len(&self) -> usize {
        match self {
            Self::Json { members, .. } => members.len(),
            Self::Shared(entries) | Self::Nested(entries) => entries.entries.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn schema(&self) -> Option<&'a Schema> {
        match self {
            Self::Json { schema, .. } => *schema,
            Self::Shared(_) | Self::Nested(_) => None,
        }
    }

    /// A map of maps, where the index of a key that is not there gives an empty map.
    pub(crate) fn nested(entries: impl IntoIterator<Item = (Value<'a>, Value<'a>)>) -> Self {
        match Self::new(entries) {
            Self::Shared(entries) => Self::Nested(entries),
            other => other,
        }
    }

    /// The value that the index `key` gives.
    pub(crate) fn index(&self, key: &Value<'_>) -> Result<Option<Value<'a>>, EvalError> {
        let found = self.get(key)?;
        Ok(match self {
            Self::Nested(_) => found.or_else(|| Some(Value::Map(Self::new([])))),
            _ => found,
        })
    }

    /// The value of `key`. Errors are those of values that do not fit their schema.
    pub fn get(&self, key: &Value<'_>) -> Result<Option<Value<'a>>, EvalError> {
        match self {
            Self::Shared(entries) | Self::Nested(entries) => {
                Ok(entries.position(key).map(|at| entries.entries[at].1.clone()))
            }
            Self::Json { members, schema } => {
                let Value::String(key) = key else {
                    return match schema {
                        Some(_) => Err(crate::error::NO_SUCH_OVERLOAD),
                        None => Ok(None),
                    };
                };
                get_json(members, *schema, key)
            }
        }
    }

    pub fn get_str(&self, key: &str) -> Result<Option<Value<'a>>, EvalError> {
        match self {
            Self::Json { members, schema } => get_json(members, *schema, key),
            Self::Shared(_) | Self::Nested(_) => self.get(&Value::from(key)),
        }
    }

    /// The keys, as a loop sees them.
    pub fn keys(&self) -> Vec<Value<'a>> {
        match self {
            Self::Shared(entries) | Self::Nested(entries) => {
                entries.entries.iter().map(|(key, _)| key.clone()).collect()
            }
            Self::Json { members, schema } => members
                .keys()
                .filter_map(|key| match schema {
                    None => Some(Value::from(key.as_str())),
                    Some(schema) => {
                        schema.property(key)?;
                        if !schema.is_object() {
                            return Some(Value::from(key.as_str()));
                        }
                        match escape::escape(key) {
                            Some(escaped) if escaped == key.as_str() => Some(Value::from(key.as_str())),
                            Some(escaped) => Some(Value::from(escaped)),
                            None => Some(Value::from(key.as_str())),
                        }
                    }
                })
                .collect(),
        }
    }

    /// Keys and values. Values that do not fit their schema are left out.
    pub fn entries(&self) -> Vec<(Value<'a>, Value<'a>)> {
        match self {
            Self::Shared(entries) | Self::Nested(entries) => entries.entries.clone(),
            Self::Json { .. } => self
                .keys()
                .into_iter()
                .filter_map(|key| {
                    let value = self.get(&key).ok().flatten()?;
                    Some((key, value))
                })
                .collect(),
        }
    }

    /// The map as entries that can be changed, without a copy if nobody else holds it.
    pub(crate) fn into_entries(self) -> Entries<'a> {
        match self {
            Self::Shared(entries) | Self::Nested(entries) => {
                Arc::try_unwrap(entries).unwrap_or_else(|shared| (*shared).clone())
            }
            json => {
                let mut made = Entries::default();
                for (key, value) in json.entries() {
                    made.set(key, value);
                }
                made
            }
        }
    }
}

fn get_json<'a>(
    members: &'a ferrite_json::Map,
    schema: Option<&'a Schema>,
    key: &str,
) -> Result<Option<Value<'a>>, EvalError> {
    let Some(schema) = schema else {
        return members.get(key).map(|value| Value::from_json(value, None)).transpose();
    };
    let unescaped;
    let name = if schema.is_object() {
        match escape::unescape(key) {
            Some(name) => {
                unescaped = name;
                &*unescaped
            }
            None => return Ok(None),
        }
    } else {
        key
    };
    match members.get(name) {
        Some(value) if value.is_null() && schema.is_object() => Ok(None),
        Some(value) => match schema.property(name) {
            Some(property) => Value::from_json(value, Some(property)).map(Some),
            None => Ok(None),
        },
        None => Ok(None),
    }
}

/// An object that an expression made.
#[derive(Clone, Debug)]
pub struct Object<'a> {
    pub type_name: Arc<str>,
    pub fields: Vec<(Arc<str>, Value<'a>)>,
}

impl<'a> Object<'a> {
    pub fn get(&self, name: &str) -> Option<&Value<'a>> {
        self.fields.iter().find(|(own, _)| &**own == name).map(|(_, value)| value)
    }
}
