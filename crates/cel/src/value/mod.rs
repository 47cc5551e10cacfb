//! Values of variables and of expressions.
//!
//! A value borrows from the object it was made of for `'a`: reading a field of a JSON object copies nothing. A value
//! that an expression makes owns its parts and shares them.

mod compare;
mod json;
mod list;
mod map;

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

pub(crate) use compare::{compare, equals};
pub use list::List;
pub(crate) use map::Entries;
pub use map::{Map, Object};

use crate::error::EvalError;
use crate::time::{Duration, Timestamp};
use crate::types::Type;

/// A value of an expression.
#[derive(Clone)]
pub enum Value<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(Str<'a>),
    Bytes(Arc<[u8]>),
    Timestamp(Timestamp),
    Duration(Duration),
    List(List<'a>),
    Map(Map<'a>),
    /// An object that an expression made, such as `Object{...}`.
    Object(Arc<Object<'a>>),
    Type(Type),
    Optional(Option<Arc<Value<'a>>>),
    /// A value of a Kubernetes library: a quantity, an address, an authorizer.
    Opaque(Arc<dyn Opaque>),
    /// An object whose fields are computed when they are first read.
    Lazy(&'a (dyn LazyObject + 'a)),
    /// JSON that its schema keeps without describing it. It can only be compared.
    Preserved(&'a ferrite_json::Value),
}

/// A string: borrowed from the object that holds it, or shared.
#[derive(Clone)]
pub enum Str<'a> {
    Borrowed(&'a str),
    Shared(Arc<str>),
}

/// A value of a type whose content is visible only through its functions.
pub trait Opaque: Send + Sync + fmt::Debug {
    /// The type's name, as `type(value)` gives it.
    fn type_name(&self) -> &'static str;
    fn equals(&self, other: &dyn Opaque) -> bool;
    fn as_any(&self) -> &dyn Any;
    /// The value as text, as messages show it.
    fn text(&self) -> String;
    /// The size that costs are computed from, for types that have one.
    fn size(&self) -> Option<u64> {
        None
    }
}

/// An object whose fields are computed on demand, such as `variables` of an admission policy.
pub trait LazyObject: Send + Sync {
    /// The field's value; `None` if there is no such field.
    fn get(&self, field: &str) -> Option<Result<Value<'_>, EvalError>>;
}

impl Deref for Str<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        match self {
            Self::Borrowed(text) => text,
            Self::Shared(text) => text,
        }
    }
}

impl fmt::Debug for Str<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl<'a> Str<'a> {
    pub fn into_owned(self) -> Str<'static> {
        Str::Shared(match self {
            Self::Borrowed(text) => text.into(),
            Self::Shared(text) => text,
        })
    }
}

impl<'a> Value<'a> {
    pub fn string(text: impl Into<Arc<str>>) -> Self {
        Self::String(Str::Shared(text.into()))
    }

    pub fn bytes(bytes: impl Into<Arc<[u8]>>) -> Self {
        Self::Bytes(bytes.into())
    }

    pub fn list(items: Vec<Value<'a>>) -> Self {
        Self::List(List::new(items))
    }

    pub fn some(value: Value<'a>) -> Self {
        Self::Optional(Some(Arc::new(value)))
    }

    pub const NONE: Self = Self::Optional(None);

    pub(crate) fn opaque(value: impl Opaque + 'static) -> Self {
        Self::Opaque(Arc::new(value))
    }

    /// The opaque value of type `T`.
    pub(crate) fn downcast<T: 'static>(&self) -> Option<&T> {
        match self {
            Self::Opaque(value) => value.as_any().downcast_ref(),
            _ => None,
        }
    }

    /// The type that `type(value)` gives.
    pub fn type_of(&self) -> Type {
        match self {
            Self::Null => Type::Null,
            Self::Bool(_) => Type::Bool,
            Self::Int(_) => Type::Int,
            Self::Uint(_) => Type::Uint,
            Self::Double(_) => Type::Double,
            Self::String(_) => Type::String,
            Self::Bytes(_) => Type::Bytes,
            Self::Timestamp(_) => Type::Timestamp,
            Self::Duration(_) => Type::Duration,
            Self::List(_) => Type::list(Type::Dyn),
            Self::Map(_) => Type::map(Type::Dyn, Type::Dyn),
            Self::Object(object) => Type::Struct(object.type_name.clone()),
            Self::Type(_) => Type::Type(None),
            Self::Optional(_) => Type::optional(Type::Dyn),
            Self::Opaque(value) => Type::Struct(value.type_name().into()),
            Self::Lazy(_) => Type::map(Type::String, Type::Dyn),
            Self::Preserved(_) => Type::Struct("unknown".into()),
        }
    }

    /// The type's name, as messages show it.
    pub(crate) fn type_name(&self) -> String {
        self.type_of().runtime_name().to_owned()
    }

    /// The name of upstream's Go type, which a few messages show.
    pub(crate) fn go_type(&self) -> &'static str {
        match self {
            Self::Null => "types.Null",
            Self::Bool(_) => "types.Bool",
            Self::Int(_) => "types.Int",
            Self::Uint(_) => "types.Uint",
            Self::Double(_) => "types.Double",
            Self::String(_) => "types.String",
            Self::Bytes(_) => "types.Bytes",
            Self::Timestamp(_) => "types.Timestamp",
            Self::Duration(_) => "types.Duration",
            Self::List(_) => "*types.baseList",
            Self::Map(_) | Self::Lazy(_) => "*types.baseMap",
            Self::Object(_) => "*types.protoObj",
            Self::Type(_) => "*types.Type",
            Self::Optional(_) => "*types.Optional",
            Self::Opaque(_) | Self::Preserved(_) => "types.Opaque",
        }
    }

    /// The size that costs are computed from: code points, bytes, entries.
    pub(crate) fn cost_size(&self) -> u64 {
        self.size().unwrap_or(1)
    }

    /// The size, for values that have one.
    pub(crate) fn size(&self) -> Option<u64> {
        Some(match self {
            Self::String(text) => code_points(text),
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::List(list) => list.len() as u64,
            Self::Map(map) => map.len() as u64,
            Self::Opaque(value) => return value.size(),
            _ => return None,
        })
    }

    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(value) => Some(*value),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_int(&self) -> Option<i64> {
        match self {
            Self::Int(value) => Some(*value),
            _ => None,
        }
    }
}

/// The count of code points of `text`.
pub(crate) fn code_points(text: &str) -> u64 {
    if text.is_ascii() { text.len() as u64 } else { text.chars().count() as u64 }
}

impl fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Uint(value) => write!(f, "{value}u"),
            Self::Double(value) => write!(f, "{value:?}"),
            Self::String(text) => write!(f, "{text:?}"),
            Self::Bytes(bytes) => write!(f, "b{bytes:?}"),
            Self::Timestamp(time) => write!(f, "timestamp({time})"),
            Self::Duration(duration) => write!(f, "duration({duration})"),
            Self::List(list) => f.debug_list().entries(list.iter()).finish(),
            Self::Map(map) => f.debug_map().entries(map.entries()).finish(),
            Self::Object(object) => write!(f, "{object:?}"),
            Self::Type(of) => write!(f, "{of}"),
            Self::Optional(None) => f.write_str("optional.none()"),
            Self::Optional(Some(value)) => write!(f, "optional.of({value:?})"),
            Self::Opaque(value) => write!(f, "{}({})", value.type_name(), value.text()),
            Self::Lazy(_) => f.write_str("lazy object"),
            Self::Preserved(json) => write!(f, "{json:?}"),
        }
    }
}

macro_rules! from {
    ($($type:ty => $variant:ident),+ $(,)?) => {$(
        impl From<$type> for Value<'_> {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }
    )+};
}

from! { bool => Bool, i64 => Int, u64 => Uint, f64 => Double, Timestamp => Timestamp, Duration => Duration, Type => Type }

impl<'a> From<&'a str> for Value<'a> {
    fn from(text: &'a str) -> Self {
        Self::String(Str::Borrowed(text))
    }
}

impl From<String> for Value<'_> {
    fn from(text: String) -> Self {
        Self::string(text)
    }
}
