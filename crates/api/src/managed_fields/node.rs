//! The schema as server-side apply sees it: granular and atomic parts, and the keys of list elements.

use super::Writer;
use super::field_set::PathElement;
use crate::custom::{ListType, Schema, Type};
use crate::schema::{Field, Kind, Merge, TypeRef, named};
use ferrite_json::{Text, Value};
use std::borrow::Cow;

#[derive(Clone, Copy)]
pub(super) enum Node<'a> {
    /// Owned as a whole.
    Leaf,
    Struct(TypeRef),
    /// A granular map of these.
    Map(&'static Kind),
    Set,
    Keyed {
        keys: &'static [&'static str],
        item: TypeRef,
    },
    /// An object of a custom kind, or a part of one.
    Custom(&'a Schema),
    /// A whole object of a custom kind.
    CustomRoot(&'a Schema),
    /// A list of a custom kind whose items have keys.
    CustomKeyed(&'a Schema),
    /// A part of an object of a custom kind that nothing describes: objects are granular.
    Untyped,
    /// No schema: objects are granular, everything else is owned as a whole.
    Deduced,
    /// An object without a schema but with metadata.
    DeducedRoot,
}

impl<'a> Node<'a> {
    pub(super) fn root(writer: &Writer<'a>) -> Self {
        match (writer.type_, writer.custom) {
            (Some(type_), _) => Self::Struct(type_),
            (None, Some(schema)) => Self::CustomRoot(schema),
            (None, None) => Self::DeducedRoot,
        }
    }

    /// The node of a whole object of a custom kind.
    pub(super) fn of_root(schema: &'a Schema) -> Self {
        Self::CustomRoot(schema)
    }

    /// The node of a value of a custom kind.
    pub(super) fn of_schema(schema: &'a Schema) -> Self {
        match (schema.type_, schema.list) {
            (Some(Type::Object), _) if !schema.atomic_map => Self::Custom(schema),
            (Some(Type::Array), ListType::Set) => Self::Set,
            (Some(Type::Array), ListType::Map) if !schema.keys.is_empty() => Self::CustomKeyed(schema),
            (None, _) if schema.preserve && !schema.int_or_string => Self::Untyped,
            _ => Self::Leaf,
        }
    }

    /// The node of a member of an object of a custom kind.
    fn of_member(schema: &'a Schema, root: bool, name: &str) -> Self {
        match name {
            "metadata" if root || schema.embedded => {
                named("meta.v1.ObjectMeta").map_or(Self::Deduced, Self::Struct)
            }
            "apiVersion" | "kind" if root || schema.embedded => Self::Leaf,
            name => schema.member(name).map_or(Self::Untyped, Self::of_schema),
        }
    }

    fn of_field(field: &'static Field) -> Self {
        match (&field.kind, field.merge) {
            (_, Merge::Atomic) => Self::Leaf,
            (Kind::Struct(type_), Merge::Granular) => Self::Struct(type_),
            (Kind::List(_) | Kind::Strings, Merge::Set) => Self::Set,
            (Kind::List(Kind::Struct(item)), Merge::Keyed) => Self::Keyed { keys: field.keys, item },
            (kind, _) => Self::of_kind(kind),
        }
    }

    fn of_kind(kind: &'static Kind) -> Self {
        match kind {
            Kind::Struct(type_) if !type_.atomic => Self::Struct(type_),
            Kind::Map(item) => Self::Map(item),
            _ => Self::Leaf,
        }
    }

    pub(super) fn is_map(self) -> bool {
        matches!(
            self,
            Self::Struct(_)
                | Self::Map(_)
                | Self::Custom(_)
                | Self::CustomRoot(_)
                | Self::Untyped
                | Self::Deduced
                | Self::DeducedRoot
        )
    }

    pub(super) fn is_list(self) -> bool {
        matches!(self, Self::Set | Self::Keyed { .. } | Self::CustomKeyed(_))
    }

    /// The node of a member of a map.
    pub(super) fn member(self, name: &str) -> Self {
        match self {
            Self::Struct(type_) => type_.field(name).map_or(Self::Deduced, Self::of_field),
            Self::Map(item) => Self::of_kind(item),
            Self::Custom(schema) => Self::of_member(schema, false, name),
            Self::CustomRoot(schema) => Self::of_member(schema, true, name),
            Self::Untyped => Self::Untyped,
            Self::DeducedRoot if name == "metadata" => {
                named("meta.v1.ObjectMeta").map_or(Self::Deduced, Self::Struct)
            }
            _ => Self::Deduced,
        }
    }

    /// The step to a member of a map, and the member's node.
    pub(super) fn step(self, name: &str) -> (PathElement, Self) {
        if let Self::Struct(type_) = self
            && let Some(field) = type_.field(name)
        {
            return (PathElement::Field(Text::const_new(field.name)), Self::of_field(field));
        }
        (PathElement::Field(name.into()), self.member(name))
    }

    /// The key of a member in `fieldsV1`, and the member's node.
    pub(super) fn keyed_member(self, name: &str) -> (Text, Self) {
        if let Self::Struct(type_) = self
            && let Some(field) = type_.field(name)
        {
            return (Text::const_new(field.key), Self::of_field(field));
        }
        (PathElement::field_key(name), self.member(name))
    }

    /// The node of a list's element.
    pub(super) fn element(self) -> Self {
        match self {
            Self::Keyed { item, .. } if !item.atomic => Self::Struct(item),
            Self::CustomKeyed(schema) => schema.items.as_deref().map_or(Self::Leaf, Self::of_schema),
            _ => Self::Leaf,
        }
    }

    /// The member is a field of a struct, which exists by its type and not by being set.
    pub(super) fn declares(self, name: &str) -> bool {
        let meta = matches!(name, "apiVersion" | "kind" | "metadata");
        match self {
            Self::Struct(type_) => type_.field(name).is_some(),
            Self::Custom(schema) => schema.property(name).is_some() || schema.embedded && meta,
            Self::CustomRoot(schema) => schema.property(name).is_some() || meta,
            _ => false,
        }
    }

    /// The node below a step of a path.
    pub(super) fn below(self, element: &PathElement) -> Self {
        match element {
            PathElement::Field(name) => self.member(name),
            _ => self.element(),
        }
    }

    /// The names of the fields that identify an element of this list.
    pub(super) fn keys(self) -> Vec<&'a str> {
        match self {
            Self::Keyed { keys, .. } => keys.to_vec(),
            Self::CustomKeyed(schema) => schema.keys.iter().map(|key| key.as_str()).collect(),
            _ => Vec::new(),
        }
    }

    /// True if this element of the list has an identity.
    pub(super) fn is_identified(self, item: &Value) -> bool {
        match self {
            // Most lists have one key, a name.
            Self::Keyed { keys: [key], .. } if item.get(*key).is_some_and(Value::is_string) => true,
            _ => self.identify(item).is_some(),
        }
    }

    /// The identity of this element of the list; `None` if it has none of the list's keys.
    pub(super) fn identify(self, item: &Value) -> Option<PathElement> {
        match self {
            Self::Set => Some(PathElement::value(item)),
            Self::Keyed { keys, item: type_ } => {
                // Most lists have one key, a name.
                if let [key] = keys
                    && let Some(name) = item.get(*key).and_then(Value::as_str)
                {
                    return Some(PathElement::named(key, name));
                }
                let value = |key: &'static str| match item.get(key).filter(|v| !v.is_null()) {
                    Some(value) => Some((key, Cow::Borrowed(value))),
                    None => {
                        let default = type_.field(key).map(|f| ferrite_json::from_str(f.default));
                        Some((key, Cow::Owned(default?.ok()?)))
                    }
                };
                let mut found: Vec<(&str, Cow<'_, Value>)> = keys.iter().copied().filter_map(value).collect();
                found.sort_unstable_by_key(|(key, _)| *key);
                (!found.is_empty()).then(|| PathElement::key(found.into_iter()))
            }
            Self::CustomKeyed(schema) => {
                let value = |key: &'a str| {
                    let default = || schema.items.as_ref()?.property(key)?.default.as_ref();
                    let given = item.get(key).filter(|value| !value.is_null());
                    Some((key, Cow::Borrowed(given.or_else(default)?)))
                };
                let keys = schema.keys.iter().map(|key| key.as_str());
                let mut found: Vec<(&str, Cow<'_, Value>)> = keys.filter_map(value).collect();
                found.sort_unstable_by_key(|(key, _)| *key);
                (!found.is_empty()).then(|| PathElement::key(found.into_iter()))
            }
            _ => None,
        }
    }

    /// The elements of a list by identity. `None` when some have none or two have the same.
    pub(super) fn elements(self, list: &[Value]) -> Option<Vec<(PathElement, &Value)>> {
        let mut out: Vec<(PathElement, &Value)> = Vec::with_capacity(list.len());
        let mut seen = std::collections::BTreeSet::new();
        for item in list {
            let element = self.identify(item)?;
            if !seen.insert(element.clone()) {
                return None;
            }
            out.push((element, item));
        }
        Some(out)
    }
}
