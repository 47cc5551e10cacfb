//! Structural schemas: the types of custom resources and other objects, as expressions see them.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferrite_json::Value as Json;
use thiserror::Error;

use crate::escape;
use crate::types::Type;

/// Bytes of the largest request, from which sizes without a limit are estimated.
const MAX_REQUEST_SIZE: i64 = 3 * 1024 * 1024;
/// Levels that a schema may have.
const MAX_DEPTH: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Kind {
    /// No type: only with `x-kubernetes-int-or-string` or `x-kubernetes-preserve-unknown-fields`.
    #[default]
    None,
    Object,
    Array,
    String,
    Number,
    Integer,
    Boolean,
}

/// The meaning of a list's order and of items that are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ListType {
    #[default]
    Atomic,
    Set,
    Map,
}

/// The part of an OpenAPI v3 schema that expressions need.
#[derive(Debug, Clone, Default)]
pub struct Schema {
    pub kind: Kind,
    pub format: String,
    pub nullable: bool,
    pub int_or_string: bool,
    pub preserve_unknown: bool,
    pub embedded_resource: bool,
    pub list_type: ListType,
    pub list_map_keys: Vec<String>,
    pub properties: Option<BTreeMap<String, Schema>>,
    pub additional_properties: Option<Box<Schema>>,
    pub items: Option<Box<Schema>>,
    pub required: Vec<String>,
    pub has_default: bool,
    pub max_length: Option<i64>,
    pub max_items: Option<i64>,
    pub max_properties: Option<i64>,
    /// Lengths of the enumerated strings.
    enum_lengths: Vec<i64>,
}

/// A schema that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SchemaError {
    #[error("the schema is not an object")]
    NotAnObject,
    #[error("the schema is nested more than {MAX_DEPTH} levels deep")]
    TooDeep,
    #[error("unknown type {0:?}")]
    UnknownType(String),
    #[error("invalid x-kubernetes-list-type, expected 'map', 'set' or 'atomic' but got {0}")]
    UnknownListType(String),
}

impl Schema {
    /// Reads an OpenAPI v3 schema with Kubernetes' extensions.
    pub fn from_openapi(json: &Json) -> Result<Self, SchemaError> {
        Self::read(json, MAX_DEPTH)
    }

    fn read(json: &Json, levels: usize) -> Result<Self, SchemaError> {
        let levels = levels.checked_sub(1).ok_or(SchemaError::TooDeep)?;
        let members = json.as_object().ok_or(SchemaError::NotAnObject)?;
        let text = |key: &str| members.get(key).and_then(Json::as_str).unwrap_or_default();
        let flag = |key: &str| members.get(key).and_then(Json::as_bool).unwrap_or_default();
        let number = |key: &str| members.get(key).and_then(Json::as_i64);
        let strings = |key: &str| -> Vec<String> {
            let items = members.get(key).and_then(Json::as_array).into_iter().flatten();
            items.filter_map(|item| item.as_str().map(str::to_owned)).collect()
        };
        let kind = match text("type") {
            "" => Kind::None,
            "object" => Kind::Object,
            "array" => Kind::Array,
            "string" => Kind::String,
            "number" => Kind::Number,
            "integer" => Kind::Integer,
            "boolean" => Kind::Boolean,
            other => return Err(SchemaError::UnknownType(other.to_owned())),
        };
        let list_type = match text("x-kubernetes-list-type") {
            "" | "atomic" => ListType::Atomic,
            "set" => ListType::Set,
            "map" => ListType::Map,
            other => return Err(SchemaError::UnknownListType(other.to_owned())),
        };
        let below = |key: &str| -> Result<Option<Box<Self>>, SchemaError> {
            match members.get(key) {
                Some(schema @ Json::Object(_)) => Ok(Some(Box::new(Self::read(schema, levels)?))),
                _ => Ok(None),
            }
        };
        let properties = match members.get("properties") {
            Some(Json::Object(properties)) => Some(
                properties
                    .iter()
                    .map(|(name, schema)| Ok((name.to_string(), Self::read(schema, levels)?)))
                    .collect::<Result<_, SchemaError>>()?,
            ),
            _ => None,
        };
        let mut schema = Self {
            kind,
            format: text("format").to_owned(),
            nullable: flag("nullable"),
            int_or_string: flag("x-kubernetes-int-or-string"),
            preserve_unknown: flag("x-kubernetes-preserve-unknown-fields"),
            embedded_resource: flag("x-kubernetes-embedded-resource"),
            list_type,
            list_map_keys: strings("x-kubernetes-list-map-keys"),
            properties,
            additional_properties: below("additionalProperties")?,
            items: below("items")?,
            required: strings("required"),
            has_default: members.get("default").is_some_and(|value| !value.is_null()),
            max_length: number("maxLength"),
            max_items: number("maxItems"),
            max_properties: number("maxProperties"),
            enum_lengths: members
                .get("enum")
                .and_then(Json::as_array)
                .into_iter()
                .flatten()
                .map(|value| value.as_str().map_or(0, |text| text.len() as i64))
                .collect(),
        };
        if schema.embedded_resource {
            schema.add_type_and_object_meta();
        }
        Ok(schema)
    }

    /// Adds the fields that every resource has: `apiVersion`, `kind`, and the names of its metadata.
    pub fn add_type_and_object_meta(&mut self) {
        let string = || Self { kind: Kind::String, ..Self::default() };
        let has = |properties: &BTreeMap<String, Self>, name: &str, kind: Kind| {
            properties.get(name).is_some_and(|schema| schema.kind == kind)
        };
        let properties = self.properties.get_or_insert_default();
        let complete = has(properties, "kind", Kind::String)
            && has(properties, "apiVersion", Kind::String)
            && has(properties, "metadata", Kind::Object)
            && properties["metadata"].properties.as_ref().is_some_and(|metadata| {
                has(metadata, "name", Kind::String) && has(metadata, "generateName", Kind::String)
            });
        if complete {
            return;
        }
        let metadata = [("name".to_owned(), string()), ("generateName".to_owned(), string())];
        let metadata =
            Self { kind: Kind::Object, properties: Some(metadata.into_iter().collect()), ..Self::default() };
        properties.insert("kind".into(), string());
        properties.insert("apiVersion".into(), string());
        properties.insert("metadata".into(), metadata);
    }

    /// Does the schema name fields, as opposed to a map of any keys?
    pub(crate) fn is_object(&self) -> bool {
        self.properties.is_some()
    }

    /// The schema of the member `name`.
    pub(crate) fn property(&self, name: &str) -> Option<&Self> {
        match (&self.properties, &self.additional_properties) {
            (Some(properties), _) => properties.get(name),
            (None, Some(additional)) => Some(additional),
            (None, None) => None,
        }
    }

    /// The type that expressions see; `None` if they do not see values of this schema.
    pub fn decl_type(&self, is_resource_root: bool) -> Option<DeclType> {
        if is_resource_root {
            let mut root = self.clone();
            root.add_type_and_object_meta();
            return root.declare();
        }
        self.declare()
    }

    fn declare(&self) -> Option<DeclType> {
        let simple =
            |kind: Type, min_size: i64| DeclType { cel: kind, shape: Shape::Simple, max: None, min_size };
        let any_length = MAX_REQUEST_SIZE - 2;
        let positive = |value: i64| value.max(0);
        if self.int_or_string {
            let max = self.max_length.map_or(any_length, |max| positive(max) * 4);
            return Some(DeclType { max: Some(max), ..simple(Type::Dyn, 1) });
        }
        match self.kind {
            Kind::Array => {
                let item = self.items.as_ref()?.declare()?;
                let max =
                    self.max_items.map_or_else(|| (MAX_REQUEST_SIZE - 2) / (item.min_size + 1), positive);
                Some(DeclType::list(item, max))
            }
            Kind::Object => match &self.additional_properties {
                Some(additional) => {
                    let value = additional.declare()?;
                    let max = self
                        .max_properties
                        .map_or_else(|| (MAX_REQUEST_SIZE - 2) / (value.min_size + 6), positive);
                    Some(DeclType::map(value, max))
                }
                None => Some(self.declare_object()),
            },
            Kind::String => Some(match self.format.as_str() {
                "byte" => DeclType {
                    max: Some(self.max_length.map_or(any_length, positive)),
                    ..simple(Type::Bytes, 2)
                },
                "duration" => DeclType { max: Some(32), ..simple(Type::Duration, 3) },
                "date" => DeclType { max: Some(12), ..simple(Type::Timestamp, 12) },
                "date-time" => DeclType { max: Some(32), ..simple(Type::Timestamp, 21) },
                _ => {
                    let max = match (self.max_length, self.enum_lengths.iter().max()) {
                        (Some(max), _) => positive(max) * 4,
                        (None, Some(longest)) => *longest,
                        (None, None) => any_length,
                    };
                    DeclType { max: Some(max), ..simple(Type::String, 2) }
                }
            }),
            Kind::Boolean => Some(simple(Type::Bool, 4)),
            Kind::Number => Some(simple(Type::Double, 1)),
            Kind::Integer => Some(simple(Type::Int, 1)),
            Kind::None => None,
        }
    }

    fn declare_object(&self) -> DeclType {
        let mut fields = BTreeMap::new();
        let mut min_size = 2;
        for (name, property) in self.properties.iter().flatten() {
            let Some(field) = property.declare() else { continue };
            if self.required.contains(name) && !property.has_default {
                min_size += name.len() as i64 + field.min_size + 4;
            }
            if let Some(escaped) = escape::escape(name) {
                fields.insert(escaped, field);
            }
        }
        DeclType { cel: Type::object("object"), shape: Shape::Object(fields), max: None, min_size }
    }
}

/// A type with the sizes that its values can have.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclType {
    pub(crate) cel: Type,
    pub(crate) shape: Shape,
    /// The most code points, bytes, items or entries.
    pub(crate) max: Option<i64>,
    /// The fewest bytes of JSON.
    min_size: i64,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Shape {
    Simple,
    List(Box<DeclType>),
    Map(Box<DeclType>),
    /// Fields by their escaped names.
    Object(BTreeMap<String, DeclType>),
}

impl DeclType {
    fn list(item: Self, max: i64) -> Self {
        Self {
            cel: Type::list(item.cel.clone()),
            shape: Shape::List(Box::new(item)),
            max: Some(max),
            min_size: 2,
        }
    }

    fn map(value: Self, max: i64) -> Self {
        Self {
            cel: Type::map(Type::String, value.cel.clone()),
            shape: Shape::Map(Box::new(value)),
            max: Some(max),
            min_size: 2,
        }
    }

    /// A type of a kind that this crate declares itself, without limits of size.
    pub fn simple(cel: Type) -> Self {
        Self { cel, shape: Shape::Simple, max: None, min_size: 0 }
    }

    /// A list of at most `max` items.
    pub fn list_of(item: Self, max: i64) -> Self {
        Self::list(item, max)
    }

    /// A map from strings, of at most `max` entries.
    pub fn map_of(value: Self, max: i64) -> Self {
        Self::map(value, max)
    }

    /// A string of at most `max` code points.
    pub fn string_of(max: i64) -> Self {
        Self { max: Some(max), ..Self::simple(Type::String) }
    }

    /// An object type with fields by their identifiers.
    pub fn object(name: &str, fields: impl IntoIterator<Item = (String, Self)>) -> Self {
        let shape = Shape::Object(fields.into_iter().collect());
        Self { cel: Type::object(name), shape, max: None, min_size: 2 }
    }

    /// The fewest bytes that a value takes in a request.
    pub fn min_size(&self) -> i64 {
        self.min_size
    }

    pub fn cel_type(&self) -> &Type {
        &self.cel
    }

    /// Gives each object type without a name of its own one that begins with `name`.
    pub fn with_name(self, name: &str) -> Self {
        let Self { cel, shape, max, min_size } = self;
        match shape {
            Shape::Simple => Self { cel, shape, max, min_size },
            Shape::List(item) => {
                Self { min_size, ..Self::list(item.with_name(&format!("{name}.@idx")), max.unwrap_or(0)) }
            }
            Shape::Map(value) => {
                Self { min_size, ..Self::map(value.with_name(&format!("{name}.@elem")), max.unwrap_or(0)) }
            }
            Shape::Object(fields) => {
                let own: Arc<str> = match &cel {
                    Type::Struct(own) if &**own != "object" => own.clone(),
                    _ => name.into(),
                };
                let fields = fields
                    .into_iter()
                    .map(|(field, of)| {
                        let name = format!("{own}.{field}");
                        (field, of.with_name(&name))
                    })
                    .collect();
                Self { cel: Type::Struct(own), shape: Shape::Object(fields), max, min_size }
            }
        }
    }

    /// The largest size of values at `path`, as cost estimates spell paths: fields, `@items`, `@values`, `@keys`.
    pub(crate) fn max_at<'p>(&self, path: impl Iterator<Item = &'p str>) -> Option<u64> {
        let mut at = self;
        let mut key = false;
        for step in path {
            if key {
                return None;
            }
            match (step, &at.shape) {
                ("@items" | "@values", Shape::List(below) | Shape::Map(below)) => at = below,
                ("@keys", Shape::Map(_)) => key = true,
                (field, Shape::Object(fields)) => at = fields.get(field)?,
                _ => return None,
            }
        }
        // As upstream: the size of values without a limit, and of keys, counts as 0.
        Some(if key { 0 } else { at.max.unwrap_or(0).max(0) as u64 })
    }

    /// Calls `visit` for each object type within this one.
    pub(crate) fn objects<'t>(&'t self, visit: &mut dyn FnMut(&'t str, &'t BTreeMap<String, DeclType>)) {
        match (&self.shape, &self.cel) {
            (Shape::List(below) | Shape::Map(below), _) => below.objects(visit),
            (Shape::Object(fields), Type::Struct(name)) => {
                visit(name, fields);
                fields.values().for_each(|field| field.objects(visit));
            }
            _ => {}
        }
    }
}
