//! Types of the schema as OpenAPI schemas.

use super::operations::capital;
use super::{SchemaOf, custom, descriptions, enums};
use ferrite_api::resource::Resource;
use ferrite_api::schema::{self, Field, Kind, Merge, TypeRef};
use ferrite_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Schemas used by a document; each type once.
pub(super) struct Schemas {
    dialect: Dialect,
    wanted: BTreeMap<String, TypeRef>,
    pub done: Map,
}

/// The two versions of OpenAPI differ in references to schemas and in the features of a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    V2,
    V3,
}

/// The group that a type's short name begins with, and the prefix of upstream's names instead.
const PREFIXES: &[(&str, &str)] = &[
    ("meta.", "io.k8s.apimachinery.pkg.apis."),
    ("runtime.", "io.k8s.apimachinery.pkg."),
    ("apiextensions.", "io.k8s.apiextensions-apiserver.pkg.apis."),
    ("apiregistration.", "io.k8s.kube-aggregator.pkg.apis."),
];

/// Kinds that belong to no group; options and events are every group's as well.
const COMMON: &[&str] =
    &["APIGroup", "APIGroupList", "APIResourceList", "APIVersions", "DeleteOptions", "Status", "WatchEvent"];

/// Fields that upstream's documents only refer with, as nothing is said of them.
const UNDESCRIBED: &[(&str, &str)] = &[
    ("networking.v1.IngressRule", "http"),
    ("apiextensions.v1.JSONSchemaProps", "additionalItems"),
    ("apiextensions.v1.JSONSchemaProps", "additionalProperties"),
    ("apiextensions.v1.JSONSchemaProps", "example"),
    ("apiextensions.v1.JSONSchemaProps", "externalDocs"),
    ("apiextensions.v1.JSONSchemaProps", "items"),
    ("apiextensions.v1.JSONSchemaProps", "not"),
];

/// Types of which one field is meant to be set: the field that says which one, if there is one, and the others.
const UNIONS: &[(&str, &str, &[&str])] = &[
    ("core.v1.AppArmorProfile", "type", &["localhostProfile"]),
    ("core.v1.PodSchedulingGroup", "", &["podGroupName"]),
    ("core.v1.SeccompProfile", "type", &["localhostProfile"]),
    ("flowcontrol.v1.LimitResponse", "type", &["queuing"]),
    ("flowcontrol.v1.PriorityLevelConfigurationSpec", "type", &["exempt", "limited"]),
    ("flowcontrol.v1.Subject", "kind", &["group", "serviceAccount", "user"]),
];

fn union(discriminator: &str, fields: &[&str]) -> Value {
    let fields: Map = fields.iter().map(|field| ((*field).to_owned(), capital(field).into())).collect();
    let mut made = json!({"fields-to-discriminateBy": fields});
    if !discriminator.is_empty() {
        made["discriminator"] = discriminator.into();
    }
    json!([made])
}

fn full_name(type_: TypeRef) -> String {
    let prefix =
        PREFIXES.iter().find(|(p, _)| type_.name.starts_with(p)).map_or("io.k8s.api.", |(_, full)| full);
    format!("{prefix}{}", type_.name)
}

impl Schemas {
    pub fn new(dialect: Dialect) -> Self {
        Self { dialect, wanted: BTreeMap::new(), done: Map::new() }
    }

    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// References to the schemas of a resource's objects and of their lists.
    pub fn bodies(&mut self, resource: &Resource, schema_of: SchemaOf<'_>) -> (Option<Value>, Option<Value>) {
        if resource.custom.is_some() {
            let (body, list) = custom::add(self, resource, schema_of);
            return (Some(body), Some(list));
        }
        let list = schema::kind(&resource.group, &resource.version, &format!("{}List", resource.kind));
        (resource.schema.map(|type_| self.reference(type_)), list.map(|type_| self.reference(type_)))
    }

    /// Refers to a type of `meta/v1`.
    pub fn meta(&mut self, kind: &str) -> Value {
        schema::named(&format!("meta.v1.{kind}"))
            .map_or_else(|| json!({"type": "object"}), |type_| self.reference(type_))
    }

    /// A reference to the body of a patch: anything.
    pub fn patch(&mut self) -> Value {
        let text = "The changes of a PATCH request, in the form that its content type names.";
        self.add("io.k8s.apimachinery.pkg.apis.meta.v1.Patch", json!({"type": "object", "description": text}))
    }

    /// Adds a schema that has no type of ours, and refers to it.
    pub fn add(&mut self, name: &str, made: Value) -> Value {
        self.done.insert(name.to_owned(), made);
        json!({"$ref": format!("#/{}/{name}", self.place())})
    }

    /// A text that is empty where nothing is said.
    pub fn default_text(&self) -> Value {
        match self.dialect {
            Dialect::V2 => json!({"type": "string"}),
            Dialect::V3 => json!({"type": "string", "default": ""}),
        }
    }

    /// The part of the document that holds the schemas.
    fn place(&self) -> &'static str {
        match self.dialect {
            Dialect::V2 => "definitions",
            Dialect::V3 => "components/schemas",
        }
    }

    pub fn reference(&mut self, type_: TypeRef) -> Value {
        let name = full_name(type_);
        let reference = json!({"$ref": format!("#/{}/{name}", self.place())});
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
                // One document of all groups names them all.
                let everywhere =
                    self.dialect == Dialect::V2 && matches!(kind, "DeleteOptions" | "WatchEvent");
                made["x-kubernetes-group-version-kind"] =
                    if everywhere { custom::of_all_groups(kind) } else { kinds.into() };
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
            properties.insert(field.name, self.property(type_, field));
            if field.required {
                required.push(field);
            }
        }
        required.sort_by_key(|field| field.declared);
        let required: Vec<&str> = required.iter().map(|field| field.name).collect();
        let mut made = json!({"type": "object"});
        if let Some(text) = descriptions::of_type(type_) {
            made["description"] = text.into();
        }
        if !properties.is_empty() {
            made["properties"] = Value::Object(properties);
        }
        if !required.is_empty() {
            made["required"] = required.into();
        }
        if type_.atomic {
            made["x-kubernetes-map-type"] = "atomic".into();
        }
        if let Some((_, discriminator, fields)) = UNIONS.iter().find(|(name, ..)| *name == type_.name) {
            made["x-kubernetes-unions"] = union(discriminator, fields);
        }
        made
    }

    fn property(&mut self, type_: TypeRef, field: &Field) -> Value {
        let mut made = self.kind(&field.kind, raw_name(type_, field));
        let refers = made.get("$ref").is_some();
        if refers && self.dialect == Dialect::V3 {
            if UNDESCRIBED.contains(&(type_.name, field.name)) {
                return made;
            }
            made = json!({"allOf": [made]});
        }
        if let Some(text) = descriptions::of_field(type_, field) {
            made["description"] = text.into();
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
            Kind::Bytes if field.merge == Merge::Atomic => made["x-kubernetes-list-type"] = "atomic".into(),
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
        // As upstream: the older document has no defaults.
        if self.dialect == Dialect::V3
            && let Ok(default) = ferrite_json::from_str::<Value>(field.default)
        {
            made["default"] = default;
        } else if self.dialect == Dialect::V3
            && matches!(field.kind, Kind::Struct(_))
            && !field.presence.is_pointer()
        {
            made["default"] = json!({});
        }
        if let Some(values) = enums::of(type_.name, field.name) {
            let place = match field.kind {
                Kind::List(_) | Kind::Strings => &mut made["items"],
                Kind::Map(_) => &mut made["additionalProperties"],
                _ => &mut made,
            };
            place["enum"] = values.into();
        }
        made
    }

    /// A schema of its own for a simple type with a name, as upstream names it.
    fn simple(&mut self, name: &str, mut made: Value) -> Value {
        if let Some(text) = descriptions::of_simple(name) {
            made["description"] = text.into();
        }
        let name = format!("io.k8s.{name}");
        let reference = json!({"$ref": format!("#/{}/{name}", self.place())});
        self.done.insert(name, made);
        reference
    }

    /// An item of a list or a value of a map. Upstream gives the default of an empty one.
    fn element(&mut self, kind: &Kind, raw: &str) -> Value {
        let made = self.kind(kind, raw);
        if self.dialect == Dialect::V2 {
            return made;
        }
        let default = match kind {
            Kind::Struct(_) => return json!({"default": {}, "allOf": [made]}),
            Kind::String => json!(""),
            Kind::Bool => json!(false),
            Kind::Int32 | Kind::Int64 | Kind::Double => json!(0),
            _ => return made,
        };
        let mut made = made;
        made["default"] = default;
        made
    }

    /// `raw` is the name of a type without further description.
    fn kind(&mut self, kind: &Kind, raw: &str) -> Value {
        const META: &str = "apimachinery.pkg.apis.meta.v1";
        const EXTENSIONS: &str = "apiextensions-apiserver.pkg.apis.apiextensions.v1";
        let v2 = self.dialect == Dialect::V2;
        let date_time = json!({"type": "string", "format": "date-time"});
        let (name, made) = match kind {
            Kind::String => return json!({"type": "string"}),
            Kind::Bool => return json!({"type": "boolean"}),
            Kind::Int32 => return json!({"type": "integer", "format": "int32"}),
            Kind::Int64 => return json!({"type": "integer", "format": "int64"}),
            Kind::Double => return json!({"type": "number", "format": "double"}),
            Kind::Bytes => return json!({"type": "string", "format": "byte"}),
            Kind::Strings => return json!({"type": "array", "items": self.element(&Kind::String, raw)}),
            Kind::Struct(type_) => return self.reference(type_),
            Kind::List(item) => return json!({"type": "array", "items": self.element(item, raw)}),
            Kind::Map(value) => {
                return json!({"type": "object", "additionalProperties": self.element(value, raw)});
            }
            Kind::Duration => (format!("{META}.Duration"), json!({"type": "string"})),
            Kind::Time => (format!("{META}.Time"), date_time),
            Kind::MicroTime => (format!("{META}.MicroTime"), date_time),
            Kind::Quantity => {
                let made = match v2 {
                    true => json!({"type": "string"}),
                    false => json!({"oneOf": [{"type": "string"}, {"type": "number"}]}),
                };
                ("apimachinery.pkg.api.resource.Quantity".into(), made)
            }
            Kind::IntOrString => {
                let made = match v2 {
                    true => json!({"type": "string", "format": "int-or-string"}),
                    false => {
                        json!({"format": "int-or-string", "oneOf": [{"type": "integer"}, {"type": "string"}]})
                    }
                };
                ("apimachinery.pkg.util.intstr.IntOrString".into(), made)
            }
            Kind::Raw => {
                (raw.into(), if raw.ends_with(".JSON") { json!({}) } else { json!({"type": "object"}) })
            }
            // A schema, or something simpler in its place: upstream leaves these open as well.
            Kind::SchemaOrArray(_) => (format!("{EXTENSIONS}.JSONSchemaPropsOrArray"), json!({})),
            Kind::SchemaOrBool(_) => (format!("{EXTENSIONS}.JSONSchemaPropsOrBool"), json!({})),
            Kind::SchemaOrStrings(_) => (format!("{EXTENSIONS}.JSONSchemaPropsOrStringArray"), json!({})),
        };
        self.simple(&name, made)
    }
}

/// Upstream's name for the type of a field whose content has no schema.
fn raw_name(type_: TypeRef, field: &Field) -> &'static str {
    match (type_.name, field.name) {
        (_, "fieldsV1") => "apimachinery.pkg.apis.meta.v1.FieldsV1",
        (name, _) if name.ends_with(".JSONSchemaProps") => {
            "apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON"
        }
        _ => "apimachinery.pkg.runtime.RawExtension",
    }
}
