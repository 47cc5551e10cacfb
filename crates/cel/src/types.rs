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

    /// The type as upstream's `Type.String` writes it.
    pub fn declared(&self) -> Declared<'_> {
        Declared(self)
    }

    /// The type that a variable of a policy has whose expression is of this type. As upstream: only simple types, lists
    /// and maps keep theirs.
    pub fn of_policy_variable(&self) -> Self {
        match self {
            Self::List(element) => Self::list(element.of_policy_variable()),
            Self::Map(of) => Self::map(of.0.of_policy_variable(), of.1.of_policy_variable()),
            Self::Type(_)
            | Self::Param(_)
            | Self::Wrapper(_)
            | Self::Struct(_)
            | Self::Opaque(..)
            | Self::Error => Self::Dyn,
            simple => simple.clone(),
        }
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

/// A type as upstream's `Type.String` writes it, which a few messages show: by the names that values have at run time.
#[derive(Debug, Clone, Copy)]
pub struct Declared<'t>(&'t Type);

impl fmt::Display for Declared<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = MAX_SHOWN;
        self.show(f, &mut left)
    }
}

impl Declared<'_> {
    fn show(self, f: &mut fmt::Formatter<'_>, left: &mut usize) -> fmt::Result {
        match left.checked_sub(1) {
            Some(less) => *left = less,
            None => return f.write_str("..."),
        }
        let params: Vec<&Type> = match self.0 {
            Type::List(element) => vec![element],
            Type::Map(of) => vec![&of.0, &of.1],
            Type::Type(Some(of)) => vec![of],
            Type::Opaque(_, params) => params.iter().collect(),
            Type::Wrapper(of) => return write!(f, "wrapper({})", of.runtime_name()),
            _ => Vec::new(),
        };
        f.write_str(self.0.runtime_name())?;
        for (i, param) in params.iter().enumerate() {
            f.write_str(if i > 0 { ", " } else { "(" })?;
            Declared(param).show(f, left)?;
        }
        f.write_str(if params.is_empty() { "" } else { ")" })
    }
}

/// Parts of a type that a message shows. Types share their parts: written out, they can grow without bound.
const MAX_SHOWN: usize = 256;

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = MAX_SHOWN;
        self.show(f, &mut left)
    }
}

impl Type {
    fn show(&self, f: &mut fmt::Formatter<'_>, left: &mut usize) -> fmt::Result {
        match left.checked_sub(1) {
            Some(less) => *left = less,
            None => return f.write_str("..."),
        }
        let (name, params): (&str, &[&Self]) = match self {
            Self::List(element) => ("list", &[&**element]),
            Self::Map(of) => ("map", &[&of.0, &of.1]),
            Self::Type(Some(of)) => ("type", &[&**of]),
            Self::Wrapper(of) => ("wrapper", &[&**of]),
            Self::Opaque(name, params) if !params.is_empty() => {
                return Self::show_call(name, &params.iter().collect::<Vec<_>>(), f, left);
            }
            Self::Struct(name) | Self::Param(name) | Self::Opaque(name, _) => return f.write_str(name),
            Self::Error => return f.write_str("!error!"),
            Self::Null => return f.write_str("null"),
            Self::Any => return f.write_str("any"),
            Self::Timestamp => return f.write_str("timestamp"),
            Self::Duration => return f.write_str("duration"),
            simple => return f.write_str(simple.runtime_name()),
        };
        Self::show_call(name, params, f, left)
    }

    fn show_call(name: &str, params: &[&Self], f: &mut fmt::Formatter<'_>, left: &mut usize) -> fmt::Result {
        write!(f, "{name}(")?;
        for (i, param) in params.iter().enumerate() {
            f.write_str(if i > 0 { ", " } else { "" })?;
            param.show(f, left)?;
        }
        f.write_str(")")
    }
}
