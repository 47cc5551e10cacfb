//! OpenAPI v3: one document per group and version, made from the schema when somebody asks.

use crate::http::{self, Answer, JSON};
use crate::options::Query;
use crate::registry::Table;
use ::http::{HeaderMap, HeaderValue, header};
use bytes::Bytes;
use ferrite_api::resource::Resource;
use ferrite_api::schema::{self, Field, Kind, Merge, TypeRef};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

/// Documents made so far, by group and version.
#[derive(Default)]
pub(crate) struct Documents {
    made: Mutex<BTreeMap<(String, String), Document>>,
}

#[derive(Clone)]
struct Document {
    hash: String,
    bytes: Bytes,
}

impl Documents {
    /// `/openapi/v3`: where the documents are. The hash in the address changes with the content.
    pub fn root(&self, table: &Table) -> Answer {
        let mut paths = Map::new();
        for (group, version) in group_versions(table) {
            let Some(document) = self.get(table, &group, &version) else { continue };
            let path = path_of(&group, &version);
            let url = format!("/openapi/v3/{path}?hash={}", document.hash);
            paths.insert(path, json!({"serverRelativeURL": url}));
        }
        http::json(200, &json!({"paths": paths}))
    }

    pub fn document(
        &self,
        table: &Table,
        group: &str,
        version: &str,
        headers: &HeaderMap,
        query: &Query,
    ) -> Answer {
        let Some(document) = self.get(table, group, version) else {
            return http::text(404, "404 page not found\n");
        };
        let tag = format!("\"{}\"", document.hash);
        let mut answer = if headers.get(header::IF_NONE_MATCH).is_some_and(|v| v.as_bytes() == tag.as_bytes())
        {
            http::answer(304, JSON, Bytes::new())
        } else {
            http::answer(200, JSON, document.bytes)
        };
        if let Ok(tag) = HeaderValue::from_str(&tag) {
            answer.headers_mut().insert(header::ETAG, tag);
        }
        if query.get("hash").is_some_and(|h| h == document.hash) {
            let forever = HeaderValue::from_static("public, immutable");
            answer.headers_mut().insert(header::CACHE_CONTROL, forever);
        }
        answer
    }

    fn get(&self, table: &Table, group: &str, version: &str) -> Option<Document> {
        let key = (group.to_owned(), version.to_owned());
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(document) = made.get(&key) {
            return Some(document.clone());
        }
        let resources: Vec<&Resource> =
            table.rows().iter().map(|r| &**r).filter(|r| r.group == group && r.version == version).collect();
        if resources.is_empty() {
            return None;
        }
        let bytes = Bytes::from(make(&resources, group, version).to_string());
        let document = Document { hash: hash(&bytes), bytes };
        made.insert(key, document.clone());
        Some(document)
    }
}

fn group_versions(table: &Table) -> BTreeSet<(String, String)> {
    table.rows().iter().map(|r| (r.group.to_string(), r.version.to_string())).collect()
}

fn path_of(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

fn hash(bytes: &[u8]) -> String {
    let digest = bytes.iter().fold([0xcbf2_9ce4_8422_2325u64, 0x8422_2325_cbf2_9ce4], |[a, b], byte| {
        [(a ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3), (b ^ a).wrapping_mul(0x100_0000_01b3)]
    });
    format!("{:016X}{:016X}", digest[0], digest[1])
}

fn make(resources: &[&Resource], group: &str, version: &str) -> Value {
    let mut schemas = Schemas::default();
    let mut paths = Map::new();
    for resource in resources {
        add_paths(&mut paths, &mut schemas, resource);
    }
    schemas.add_reachable();
    json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": crate::version::KUBERNETES_VERSION},
        "paths": paths,
        "components": {"schemas": schemas.done},
        "x-group-version": ferrite_api::gvk::api_version(group, version),
    })
}

fn add_paths(paths: &mut Map<String, Value>, schemas: &mut Schemas, resource: &Resource) {
    let root = format!("/{}", path_of(&resource.group, &resource.version));
    let collection = if resource.is_namespaced() {
        format!("{root}/namespaces/{{namespace}}/{}", resource.plural)
    } else {
        format!("{root}/{}", resource.plural)
    };
    let kind = json!({"group": resource.group, "version": resource.version, "kind": resource.kind});
    let body = schema::of(&resource.gvk());
    let list = schema::kind(&resource.group, &resource.version, &format!("{}List", resource.kind));
    let has = |verb: &str| resource.verbs.contains(&verb);
    let mut at_collection = Map::new();
    let mut at_object = Map::new();
    for (verb, method, action, on_object) in [
        ("list", "get", "list", false),
        ("create", "post", "post", false),
        ("deletecollection", "delete", "deletecollection", false),
        ("get", "get", "get", true),
        ("update", "put", "put", true),
        ("patch", "patch", "patch", true),
        ("delete", "delete", "delete", true),
    ] {
        if has(verb) {
            let answer = if verb == "list" { list } else { body };
            let operation = operation(schemas, &kind, action, verb, body, answer);
            let place = if on_object { &mut at_object } else { &mut at_collection };
            place.insert(method.into(), operation);
        }
    }
    if resource.is_namespaced() && has("list") {
        let operation = operation(schemas, &kind, "list", "list", body, list);
        paths.insert(format!("{root}/{}", resource.plural), json!({"get": operation}));
    }
    if !at_collection.is_empty() {
        paths.insert(collection.clone(), Value::Object(at_collection));
    }
    if !at_object.is_empty() {
        paths.insert(format!("{collection}/{{name}}"), Value::Object(at_object));
    }
    for sub in resource.subresources.iter() {
        let (group, version, name) = sub.body.unwrap_or((&resource.group, &resource.version, &resource.kind));
        let kind = json!({"group": group, "version": version, "kind": name});
        let body = schema::kind(group, version, name);
        let mut operations = Map::new();
        for (verb, method, action) in [
            ("get", "get", "get"),
            ("create", "post", "post"),
            ("update", "put", "put"),
            ("patch", "patch", "patch"),
        ] {
            if sub.verbs.contains(&verb) {
                operations.insert(method.into(), operation(schemas, &kind, action, verb, body, body));
            }
        }
        paths.insert(format!("{collection}/{{name}}/{}", sub.name), Value::Object(operations));
    }
}

/// Parameters of writes; clients look here to find out whether the server knows them.
const WRITE_PARAMETERS: [&str; 3] = ["dryRun", "fieldManager", "fieldValidation"];

fn operation(
    schemas: &mut Schemas,
    kind: &Value,
    action: &str,
    verb: &str,
    body: Option<TypeRef>,
    answer: Option<TypeRef>,
) -> Value {
    let mut operation = json!({"x-kubernetes-group-version-kind": kind, "x-kubernetes-action": action});
    let content = |schemas: &mut Schemas, type_: TypeRef| {
        let reference = schemas.reference(type_);
        json!({"application/json": {"schema": reference}, "application/yaml": {"schema": reference},
            "application/vnd.kubernetes.protobuf": {"schema": reference}})
    };
    let code = if verb == "create" { "201" } else { "200" };
    let mut response = json!({"description": "OK"});
    if let Some(type_) = answer {
        response["content"] = content(schemas, type_);
    }
    operation["responses"] = json!({code: response});
    let parameters: Vec<Value> = match verb {
        "create" | "update" | "patch" => {
            let force = (verb == "patch").then_some("force");
            WRITE_PARAMETERS.into_iter().chain(force).map(query_parameter).collect()
        }
        "delete" | "deletecollection" => {
            ["dryRun", "gracePeriodSeconds", "propagationPolicy"].map(query_parameter).to_vec()
        }
        _ => Vec::new(),
    };
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if let Some(type_) = body.filter(|_| matches!(verb, "create" | "update")) {
        operation["requestBody"] = json!({"content": content(schemas, type_), "required": true});
    }
    operation
}

fn query_parameter(name: &str) -> Value {
    json!({"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": true}})
}

/// Schemas used by a document; each type once.
#[derive(Default)]
struct Schemas {
    wanted: BTreeMap<String, TypeRef>,
    done: Map<String, Value>,
}

/// The group a type's short name begins with, and what upstream's names begin with instead.
const PREFIXES: &[(&str, &str)] = &[
    ("meta.", "io.k8s.apimachinery.pkg.apis."),
    ("runtime.", "io.k8s.apimachinery.pkg."),
    ("apiextensions.", "io.k8s.apiextensions-apiserver.pkg.apis."),
    ("apiregistration.", "io.k8s.kube-aggregator.pkg.apis."),
];

fn full_name(type_: TypeRef) -> String {
    let prefix =
        PREFIXES.iter().find(|(p, _)| type_.name.starts_with(p)).map_or("io.k8s.api.", |(_, full)| full);
    format!("{prefix}{}", type_.name)
}

impl Schemas {
    fn reference(&mut self, type_: TypeRef) -> Value {
        let name = full_name(type_);
        let reference = json!({"$ref": format!("#/components/schemas/{name}")});
        if !self.done.contains_key(&name) {
            self.wanted.insert(name, type_);
        }
        reference
    }

    fn add_reachable(&mut self) {
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
            if let Some(kinds) = kinds.get(type_.name) {
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
            made = json!({"allOf": [made]});
        }
        match field.kind {
            Kind::List(_) => {
                let list_type = match field.merge {
                    Merge::Keyed => Some("map"),
                    Merge::Set => Some("set"),
                    Merge::Atomic => Some("atomic"),
                    Merge::Default => None,
                };
                if let Some(list_type) = list_type {
                    made["x-kubernetes-list-type"] = list_type.into();
                }
                if !field.keys.is_empty() {
                    made["x-kubernetes-list-map-keys"] = field.keys.into();
                }
            }
            _ if field.merge == Merge::Atomic => made["x-kubernetes-map-type"] = "atomic".into(),
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
