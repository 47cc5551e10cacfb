//! A structural schema, compiled from the OpenAPI v3 schema of a definition.

use super::format::is_known;
use super::regexp::Pattern;
use ferrite_json::{Map, Text, Value};

/// The type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    Object,
    Array,
    String,
    Integer,
    Number,
    Boolean,
}

impl Type {
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "object" => Self::Object,
            "array" => Self::Array,
            "string" => Self::String,
            "integer" => Self::Integer,
            "number" => Self::Number,
            "boolean" => Self::Boolean,
            _ => return None,
        })
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Object => "object",
            Self::Array => "array",
            Self::String => "string",
            Self::Integer => "integer",
            Self::Number => "number",
            Self::Boolean => "boolean",
        }
    }
}

/// `x-kubernetes-list-type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ListType {
    #[default]
    Atomic,
    Set,
    Map,
}

/// `additionalProperties`.
#[derive(Debug, Default)]
pub enum Additional {
    #[default]
    Unset,
    Allowed(bool),
    Schema(Box<Schema>),
}

/// A node of a schema. Descriptions are not part of it: they stay in the stored definition.
#[derive(Debug, Default)]
pub struct Schema {
    pub type_: Option<Type>,
    pub nullable: bool,
    /// `x-kubernetes-int-or-string`.
    pub int_or_string: bool,
    /// `x-kubernetes-preserve-unknown-fields`.
    pub preserve: bool,
    /// `x-kubernetes-embedded-resource`.
    pub embedded: bool,
    /// `x-kubernetes-map-type: atomic`.
    pub atomic_map: bool,
    pub list: ListType,
    /// `x-kubernetes-list-map-keys`.
    pub keys: Box<[Text]>,
    pub default: Option<Value>,
    /// Sorted by name.
    properties: Box<[(Text, Schema)]>,
    pub additional: Additional,
    pub items: Option<Box<Schema>>,
    pub checks: Option<Box<Checks>>,
}

/// A schema's constraints on a value beside its type.
#[derive(Debug, Default)]
pub struct Checks {
    pub enumeration: Box<[Value]>,
    pub format: Text,
    pub maximum: Option<f64>,
    pub exclusive_maximum: bool,
    pub minimum: Option<f64>,
    pub exclusive_minimum: bool,
    pub multiple_of: Option<f64>,
    pub max_length: Option<i64>,
    pub min_length: Option<i64>,
    pub pattern: Option<Pattern>,
    pub max_items: Option<i64>,
    pub min_items: Option<i64>,
    pub unique_items: bool,
    pub max_properties: Option<i64>,
    pub min_properties: Option<i64>,
    pub required: Box<[Text]>,
    pub all_of: Box<[Schema]>,
    pub any_of: Box<[Schema]>,
    pub one_of: Box<[Schema]>,
    pub not: Option<Box<Schema>>,
}

impl Schema {
    /// Compiles an OpenAPI schema. The caller has validated it ([`super::spec`]); members of a wrong type count as
    /// absent.
    pub fn compile(openapi: &Value) -> Self {
        let empty = Map::new();
        let source = openapi.as_object().unwrap_or(&empty);
        let text = |key: &str| source.get(key).and_then(Value::as_str).unwrap_or_default();
        let flag = |key: &str| source.get(key).and_then(Value::as_bool).unwrap_or_default();
        let properties = source.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let mut properties: Box<[(Text, Self)]> =
            properties.iter().map(|(name, schema)| (name.clone(), Self::compile(schema))).collect();
        properties.sort_by(|(a, _), (b, _)| a.cmp(b));
        Self {
            type_: Type::parse(text("type")),
            nullable: flag("nullable"),
            int_or_string: flag("x-kubernetes-int-or-string"),
            preserve: flag("x-kubernetes-preserve-unknown-fields"),
            embedded: flag("x-kubernetes-embedded-resource"),
            atomic_map: text("x-kubernetes-map-type") == "atomic",
            list: match text("x-kubernetes-list-type") {
                "set" => ListType::Set,
                "map" => ListType::Map,
                _ => ListType::Atomic,
            },
            keys: texts(source.get("x-kubernetes-list-map-keys")),
            default: source.get("default").filter(|value| !value.is_null()).cloned(),
            properties,
            additional: match source.get("additionalProperties") {
                Some(Value::Bool(allowed)) => Additional::Allowed(*allowed),
                Some(schema @ Value::Object(_)) => Additional::Schema(Box::new(Self::compile(schema))),
                _ => Additional::Unset,
            },
            items: source.get("items").filter(|i| i.is_object()).map(|i| Box::new(Self::compile(i))),
            checks: Checks::compile(source).map(Box::new),
        }
    }

    pub fn property(&self, name: &str) -> Option<&Self> {
        let at = self.properties.binary_search_by(|(known, _)| known.as_str().cmp(name)).ok()?;
        self.properties.get(at).map(|(_, schema)| schema)
    }

    pub fn properties(&self) -> &[(Text, Self)] {
        &self.properties
    }

    /// The schema of a member that [`Schema::property`] does not name.
    pub fn additional_schema(&self) -> Option<&Self> {
        match &self.additional {
            Additional::Schema(schema) => Some(schema),
            Additional::Unset | Additional::Allowed(_) => None,
        }
    }

    /// The schema of a member of an object.
    pub fn member(&self, name: &str) -> Option<&Self> {
        self.property(name).or_else(|| self.additional_schema())
    }
}

fn texts(value: Option<&Value>) -> Box<[Text]> {
    let list = value.and_then(Value::as_array).into_iter().flatten();
    list.filter_map(Value::as_str).map(Text::from).collect()
}

impl Checks {
    /// None when the schema demands nothing.
    fn compile(source: &Map) -> Option<Self> {
        const KEYS: &[&str] = &[
            "enum",
            "format",
            "maximum",
            "minimum",
            "multipleOf",
            "maxLength",
            "minLength",
            "pattern",
            "maxItems",
            "minItems",
            "uniqueItems",
            "maxProperties",
            "minProperties",
            "required",
            "allOf",
            "anyOf",
            "oneOf",
            "not",
        ];
        if !KEYS.iter().any(|key| source.contains_key(*key)) {
            return None;
        }
        let flag = |key: &str| source.get(key).and_then(Value::as_bool).unwrap_or_default();
        let number = |key: &str| source.get(key).and_then(Value::as_f64);
        let count = |key: &str| source.get(key).and_then(Value::as_i64);
        let list = |key: &str| source.get(key).and_then(Value::as_array).into_iter().flatten();
        let schemas = |key: &str| list(key).map(Schema::compile).collect();
        let text = |key: &str| source.get(key).and_then(Value::as_str).unwrap_or_default();
        // As upstream: a format that is not known for the type is none.
        let format = Some(text("format")).filter(|format| is_known(text("type"), format));
        let pattern = source.get("pattern").and_then(Value::as_str).filter(|p| !p.is_empty());
        Some(Self {
            enumeration: list("enum").cloned().collect(),
            format: format.unwrap_or_default().into(),
            maximum: number("maximum"),
            exclusive_maximum: flag("exclusiveMaximum"),
            minimum: number("minimum"),
            exclusive_minimum: flag("exclusiveMinimum"),
            multiple_of: number("multipleOf"),
            max_length: count("maxLength"),
            min_length: count("minLength"),
            pattern: pattern.map(Pattern::new),
            max_items: count("maxItems"),
            min_items: count("minItems"),
            unique_items: flag("uniqueItems"),
            max_properties: count("maxProperties"),
            min_properties: count("minProperties"),
            required: texts(source.get("required")),
            all_of: schemas("allOf"),
            any_of: schemas("anyOf"),
            one_of: schemas("oneOf"),
            not: source.get("not").filter(|n| n.is_object()).map(|n| Box::new(Schema::compile(n))),
        })
    }
}
