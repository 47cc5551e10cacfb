//! Names that an expression may refer to.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::library::{Library, Overload};
use crate::types::Type;

/// The declarations of an environment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Declarations {
    /// The namespace in which names are looked up first.
    pub container: String,
    pub variables: HashMap<Arc<str>, Type>,
    pub functions: HashMap<Arc<str>, Vec<Arc<Overload>>>,
    pub objects: HashMap<Arc<str>, Fields>,
    /// Does a field name that is a reserved word find the field of the escaped name?
    pub keyword_fields: bool,
}

/// The fields of an object type.
#[derive(Debug, Clone)]
pub(crate) enum Fields {
    Named(BTreeMap<String, Type>),
    /// Any name is a field of type `dyn`.
    Any,
}

/// Identifiers that are types.
const TYPES: &[&str] = &[
    "bool",
    "bytes",
    "double",
    "int",
    "list",
    "map",
    "null_type",
    "string",
    "type",
    "uint",
    "google.protobuf.Timestamp",
    "google.protobuf.Duration",
    "optional_type",
    "net.IP",
    "net.CIDR",
    "kubernetes.URL",
    "kubernetes.Quantity",
    "kubernetes.Semver",
    "kubernetes.NamedFormat",
    "kubernetes.authorization.Authorizer",
    "kubernetes.authorization.PathCheck",
    "kubernetes.authorization.GroupCheck",
    "kubernetes.authorization.ResourceCheck",
    "kubernetes.authorization.Decision",
];

/// The type that `name` denotes.
pub(crate) fn named_type(name: &str) -> Option<Type> {
    if !TYPES.contains(&name) {
        return None;
    }
    Some(match name {
        "list" => Type::list(Type::Dyn),
        "map" => Type::map(Type::Dyn, Type::Dyn),
        "optional_type" => Type::optional(Type::Dyn),
        "google.protobuf.Timestamp" => Type::Timestamp,
        "google.protobuf.Duration" => Type::Duration,
        name => Type::parse(name)?,
    })
}

/// A name that was found.
pub(super) struct Ident {
    pub name: Arc<str>,
    pub type_: Type,
    /// The type, if the name denotes one.
    pub denotes: Option<Type>,
}

impl Declarations {
    pub fn add_library(&mut self, library: Library) {
        for (name, overload) in library.overloads() {
            self.functions.entry((*name).into()).or_default().push(overload.clone());
        }
    }

    /// The names that `name` may stand for in this container, the most specific first.
    pub fn candidates(&self, name: &str) -> Vec<String> {
        if let Some(absolute) = name.strip_prefix('.') {
            return vec![absolute.to_owned()];
        }
        let mut candidates = Vec::new();
        let mut container = self.container.as_str();
        while !container.is_empty() {
            candidates.push(format!("{container}.{name}"));
            container = container.rsplit_once('.').map_or("", |(outer, _)| outer);
        }
        candidates.push(name.to_owned());
        candidates
    }

    pub(super) fn ident(&self, locals: &[(Arc<str>, Type)], name: &str) -> Option<Ident> {
        self.candidates(name).iter().find_map(|candidate| {
            let local = locals.iter().rev().find(|(local, _)| **local == **candidate);
            if let Some((name, type_)) = local {
                return Some(Ident { name: name.clone(), type_: type_.clone(), denotes: None });
            }
            if let Some((name, type_)) = self.variables.get_key_value(candidate.as_str()) {
                return Some(Ident { name: name.clone(), type_: type_.clone(), denotes: None });
            }
            let of = if self.object(candidate).is_some() {
                Type::object(candidate)
            } else {
                named_type(candidate)?
            };
            let name: Arc<str> = candidate.as_str().into();
            Some(Ident { name, type_: Type::type_of(of.clone()), denotes: Some(of) })
        })
    }

    pub(super) fn function(&self, name: &str) -> Option<(Arc<str>, &[Arc<Overload>])> {
        self.candidates(name).iter().find_map(|candidate| {
            let (name, overloads) = self.functions.get_key_value(candidate.as_str())?;
            Some((name.clone(), overloads.as_slice()))
        })
    }

    /// The fields of the object type `name`. The types below `Object` are all the paths of its fields.
    pub(crate) fn object(&self, name: &str) -> Option<&Fields> {
        self.objects.get(name).or_else(|| match name.strip_prefix("Object.") {
            Some(path) if !path.is_empty() => self.objects.get("Object"),
            _ => None,
        })
    }

    /// The type of a field. `Err` if there is no such object type.
    pub(super) fn field(&self, object: &str, field: &str) -> Result<Option<Type>, ()> {
        match self.object(object).ok_or(())? {
            Fields::Any => Ok(Some(Type::Dyn)),
            Fields::Named(fields) => {
                let find = |name: &str| fields.get(name).cloned();
                Ok(find(field).or_else(|| {
                    let escaped = crate::escape::escape(field)?;
                    (self.keyword_fields && escaped == format!("__{field}__")).then(|| find(&escaped))?
                }))
            }
        }
    }
}
