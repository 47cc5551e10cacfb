//! Types of expressions.

use std::fmt;
use std::sync::Arc;

/// The type of an expression, as the checker finds it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Type {
    Dyn,
    Any,
    Null,
    Bool,
    Int,
    Uint,
    Double,
    String,
    Bytes,
    Timestamp,
    Duration,
    List(Arc<Type>),
    Map(Arc<(Type, Type)>),
    /// The type of a type; without an argument that of any.
    Type(Option<Arc<Type>>),
    /// A parameter of a function's signature, or a type that is not yet known.
    Param(Arc<str>),
    /// A primitive type or null.
    Wrapper(Arc<Type>),
    /// An object type with fields, found by its name.
    Struct(Arc<str>),
    /// Another type with parameters of its own, such as `optional_type(T)`.
    Opaque(Arc<str>, Arc<[Type]>),
    /// The type of an expression that has an error; it goes with every other.
    Error,
}

/// Names of types without parameters, as values of type `type` and messages show them.
const NAMES: &[(&str, Type)] = &[
    ("dyn", Type::Dyn),
    ("any", Type::Any),
    ("null_type", Type::Null),
    ("bool", Type::Bool),
    ("int", Type::Int),
    ("uint", Type::Uint),
    ("double", Type::Double),
    ("string", Type::String),
    ("bytes", Type::Bytes),
    ("timestamp", Type::Timestamp),
    ("duration", Type::Duration),
    ("type", Type::Type(None)),
];

pub(crate) const OPTIONAL: &str = "optional_type";

impl Type {
    pub fn list(element: Self) -> Self {
        Self::List(Arc::new(element))
    }

    pub fn map(key: Self, value: Self) -> Self {
        Self::Map(Arc::new((key, value)))
    }

    pub fn optional(value: Self) -> Self {
        Self::Opaque(OPTIONAL.into(), [value].into())
    }

    pub fn object(name: &str) -> Self {
        Self::Struct(name.into())
    }

    pub fn type_of(of: Self) -> Self {
        Self::Type(Some(Arc::new(of)))
    }

    /// The type within an optional type.
    pub(crate) fn unwrap_optional(&self) -> Option<&Self> {
        match self {
            Self::Opaque(name, params) if &**name == OPTIONAL => params.first(),
            _ => None,
        }
    }

    pub(crate) fn is_dyn(&self) -> bool {
        matches!(self, Self::Dyn | Self::Any)
    }

    pub(crate) fn is_dyn_or_error(&self) -> bool {
        self.is_dyn() || matches!(self, Self::Error)
    }

    /// The name by which a value of this type answers `type(value)`.
    pub(crate) fn runtime_name(&self) -> &str {
        match self {
            Self::List(_) => "list",
            Self::Map(_) => "map",
            Self::Wrapper(of) => of.runtime_name(),
            Self::Struct(name) | Self::Opaque(name, _) | Self::Param(name) => name,
            Self::Timestamp => "google.protobuf.Timestamp",
            Self::Duration => "google.protobuf.Duration",
            Self::Any => "google.protobuf.Any",
            Self::Type(_) => "type",
            Self::Error => "!error!",
            simple => NAMES.iter().find(|(_, of)| of == simple).map_or("", |(name, _)| name),
        }
    }

    /// Reads a type as this crate's tables write it: `list(T)`, `map(K, V)`, `optional_type(T)`, a name.
    /// A single capital letter is a parameter. Other names of one part are objects.
    pub fn parse(text: &str) -> Option<Self> {
        let (parsed, rest) = parse(text.trim())?;
        rest.trim().is_empty().then_some(parsed)
    }
}

/// A type at the start of `text`, and the text after it.
fn parse(text: &str) -> Option<(Type, &str)> {
    let end = text.find(['(', ')', ',']).unwrap_or(text.len());
    let name = text[..end].trim();
    let mut rest = &text[end..];
    let mut params = Vec::new();
    if let Some(mut inner) = rest.strip_prefix('(') {
        loop {
            let (param, after) = parse(inner.trim_start())?;
            params.push(param);
            let after = after.trim_start();
            if let Some(next) = after.strip_prefix(',') {
                inner = next;
            } else {
                rest = after.strip_prefix(')')?;
                break;
            }
        }
    }
    let parsed = match (name, params.as_slice()) {
        ("", _) => return None,
        ("list", [element]) => Type::list(element.clone()),
        ("map", [key, value]) => Type::map(key.clone(), value.clone()),
        ("type", [of]) => Type::type_of(of.clone()),
        ("wrapper", [of]) => Type::Wrapper(Arc::new(of.clone())),
        ("param", [Type::Struct(name) | Type::Param(name)]) => Type::Param(name.clone()),
        ("null", []) => Type::Null,
        (letter, []) if letter.len() == 1 && letter.chars().all(|c| c.is_ascii_uppercase()) => {
            Type::Param(letter.into())
        }
        (name @ ("net.IP" | "net.CIDR"), []) => Type::Opaque(name.into(), [].into()),
        (name, []) => NAMES
            .iter()
            .find(|(known, _)| *known == name)
            .map_or_else(|| Type::Struct(name.into()), |(_, simple)| simple.clone()),
        (name, params) => Type::Opaque(name.into(), params.into()),
    };
    Some((parsed, rest))
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::List(element) => write!(f, "list({element})"),
            Self::Map(of) => write!(f, "map({}, {})", of.0, of.1),
            Self::Type(Some(of)) => write!(f, "type({of})"),
            Self::Wrapper(of) => write!(f, "wrapper({of})"),
            Self::Struct(name) | Self::Param(name) => f.write_str(name),
            Self::Opaque(name, params) if params.is_empty() => f.write_str(name),
            Self::Opaque(name, params) => {
                write!(f, "{name}(")?;
                for (i, param) in params.iter().enumerate() {
                    write!(f, "{}{param}", if i > 0 { ", " } else { "" })?;
                }
                f.write_str(")")
            }
            Self::Error => f.write_str("!error!"),
            Self::Null => f.write_str("null"),
            Self::Any => f.write_str("any"),
            Self::Timestamp => f.write_str("timestamp"),
            Self::Duration => f.write_str("duration"),
            simple => f.write_str(simple.runtime_name()),
        }
    }
}
