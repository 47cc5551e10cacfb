//! Types of the schema as OpenAPI schemas.

use ferrite_api::schema::{self, Field, Kind, Merge, TypeRef};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Schemas used by a document; each type once.
pub(super) struct Schemas {
    dialect: Dialect,
    wanted: BTreeMap<String, TypeRef>,
    pub done: Map<String, Value>,
}

/// The two versions of OpenAPI differ in how a schema is referred to and in what a schema can say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    V2,
    V3,
}

/// The group a type's short name begins with, and what upstream's names begin with instead.
const PREFIXES: &[(&str, &str)] = &[
    ("meta.", "io.k8s.apimachinery.pkg.apis."),
    ("runtime.", "io.k8s.apimachinery.pkg."),
    ("apiextensions.", "io.k8s.apiextensions-apiserver.pkg.apis."),
    ("apiregistration.", "io.k8s.kube-aggregator.pkg.apis."),
];

/// Kinds that belong to no group; options and events are every group's as well.
const COMMON: &[&str] =
    &["APIGroup", "APIGroupList", "APIResourceList", "APIVersions", "DeleteOptions", "Status", "WatchEvent"];

fn full_name(type_: TypeRef) -> String {
    let prefix =
        PREFIXES.iter().find(|(p, _)| type_.name.starts_with(p)).map_or("io.k8s.api.", |(_, full)| full);
    format!("{prefix}{}", type_.name)
}

impl Schemas {
    pub fn new(dialect: Dialect) -> Self {
        Self { dialect, wanted: BTreeMap::new(), done: Map::new() }
    }

    pub fn reference(&mut self, type_: TypeRef) -> Value {
        let name = full_name(type_);
        let place = match self.dialect {
            Dialect::V2 => "definitions",
            Dialect::V3 => "components/schemas",
        };
        let reference = json!({"$ref": format!("#/{place}/{name}")});
        if !self.done.contains_key(&name) {
            self.wanted.insert(name, type_);
        }
        reference
    }

    /// Adds every schema that is referred to.
    pub fn add_reachable(&mut self, group: &str, version: &str) {
        let kinds: BTreeMap<&str, Vec<Value>> =
            schema::kinds().fold(BTreeMap::new(), |mut all, (gvk, type_)| {
                let (group, version, kind) = gvk;
                all.entry(type_.name)
                    .or_insert_with(Vec::new)
                    .push(json!({"group": group, "version": version, "kind": kind}));
                all
            });
        while let Some((name, type_)) = self.wanted.pop_first() {
            if self.done.contains_key(&name) {
                continue;
            }
            // Entered before its fields: a type may hold itself.
            self.done.insert(name.clone(), Value::Null);
            let mut made = self.object(type_);
            if let Some(kind) = type_.name.strip_prefix("meta.v1.").filter(|k| COMMON.contains(k)) {
                let of =
                    |group: &str, version: &str| json!({"group": group, "version": version, "kind": kind});
                let mut kinds = vec![of("", "v1")];
                if !group.is_empty() && matches!(kind, "DeleteOptions" | "WatchEvent") {
                    kinds.push(of(group, version));
                }
                made["x-kubernetes-group-version-kind"] = kinds.into();
            } else if let Some(kinds) = kinds.get(type_.name) {
                made["x-kubernetes-group-version-kind"] = kinds.clone().into();
            }
            self.done.insert(name, made);
        }
    }

    fn object(&mut self, type_: TypeRef) -> Value {
        let mut properties = Map::new();
        let mut required = Vec::new();
        for field in type_.fields {
            properties.insert(field.name.into(), self.property(field));
            if field.required {
                required.push(field.name);
            }
        }
        let mut made = json!({"type": "object"});
        if !properties.is_empty() {
            made["properties"] = Value::Object(properties);
        }
        if !required.is_empty() {
            made["required"] = required.into();
        }
        if type_.atomic {
            made["x-kubernetes-map-type"] = "atomic".into();
        }
        made
    }

    fn property(&mut self, field: &Field) -> Value {
        let mut made = self.kind(&field.kind);
        if made.get("$ref").is_some() {
            if self.dialect == Dialect::V2 {
                // Nothing may stand beside a reference.
                return made;
            }
            made = json!({"allOf": [made]});
        }
        match field.kind {
            Kind::List(_) => {
                let list_type = match field.merge {
                    Merge::Keyed => Some("map"),
                    Merge::Set => Some("set"),
                    Merge::Atomic => Some("atomic"),
                    Merge::Default | Merge::Granular => None,
                };
                if let Some(list_type) = list_type {
                    made["x-kubernetes-list-type"] = list_type.into();
                }
                if !field.keys.is_empty() {
                    made["x-kubernetes-list-map-keys"] = field.keys.into();
                }
            }
            _ if field.merge == Merge::Atomic => made["x-kubernetes-map-type"] = "atomic".into(),
            _ if field.merge == Merge::Granular => made["x-kubernetes-map-type"] = "granular".into(),
            _ => {}
        }
        let strategies: Vec<&str> = [
            (field.patch.merge, "merge"),
            (field.patch.replace, "replace"),
            (field.patch.retain_keys, "retainKeys"),
        ]
        .into_iter()
        .filter_map(|(set, name)| set.then_some(name))
        .collect();
        if !strategies.is_empty() {
            made["x-kubernetes-patch-strategy"] = strategies.join(",").into();
        }
        if !field.patch.merge_key.is_empty() {
            made["x-kubernetes-patch-merge-key"] = field.patch.merge_key.into();
        }
        if let Ok(default) = serde_json::from_str::<Value>(field.default) {
            made["default"] = default;
        }
        made
    }

    fn kind(&mut self, kind: &Kind) -> Value {
        match kind {
            Kind::String | Kind::Duration => json!({"type": "string"}),
            Kind::Bool => json!({"type": "boolean"}),
            Kind::Int32 => json!({"type": "integer", "format": "int32"}),
            Kind::Int64 => json!({"type": "integer", "format": "int64"}),
            Kind::Double => json!({"type": "number", "format": "double"}),
            Kind::Bytes => json!({"type": "string", "format": "byte"}),
            Kind::Quantity if self.dialect == Dialect::V2 => json!({"type": "string"}),
            Kind::IntOrString if self.dialect == Dialect::V2 => {
                json!({"type": "string", "format": "int-or-string"})
            }
            Kind::Quantity => json!({"oneOf": [{"type": "string"}, {"type": "number"}]}),
            Kind::IntOrString => {
                json!({"format": "int-or-string", "oneOf": [{"type": "integer"}, {"type": "string"}]})
            }
            Kind::Time | Kind::MicroTime => json!({"type": "string", "format": "date-time"}),
            Kind::Raw => json!({"type": "object"}),
            Kind::Strings => json!({"type": "array", "items": {"type": "string"}}),
            Kind::Struct(type_) => self.reference(type_),
            Kind::List(item) => json!({"type": "array", "items": self.kind(item)}),
            Kind::Map(value) => json!({"type": "object", "additionalProperties": self.kind(value)}),
            // A schema, or something simpler in its place: upstream leaves these open as well.
            Kind::SchemaOrArray(_) | Kind::SchemaOrBool(_) | Kind::SchemaOrStrings(_) => json!({}),
        }
    }
}
