//! Custom kinds in OpenAPI: their schemas are those of their definitions, with the fields that every object
//! has.

use super::descriptions;
use super::schemas::{Dialect, Schemas};
use ferrite_api::resource::Resource;
use ferrite_api::schema::named;
use ferrite_json::{Map, Value, json};

/// The schema of a custom resource, from its definition.
pub(crate) type SchemaOf<'a> = &'a dyn Fn(&Resource) -> Option<Value>;

/// Groups and versions that have `DeleteOptions`, as upstream lists them beside custom kinds.
const OPTIONS: &[(&str, &[&str])] = &[
    ("", &["v1"]),
    ("admissionregistration.k8s.io", &["v1", "v1alpha1", "v1beta1"]),
    ("apps", &["v1", "v1beta1", "v1beta2"]),
    ("authentication.k8s.io", &["v1", "v1alpha1", "v1beta1"]),
    ("authorization.k8s.io", &["v1", "v1beta1"]),
    ("autoscaling", &["v1", "v2"]),
    ("batch", &["v1", "v1beta1"]),
    ("certificates.k8s.io", &["v1", "v1alpha1", "v1beta1"]),
    ("coordination.k8s.io", &["v1", "v1alpha2", "v1beta1"]),
    ("discovery.k8s.io", &["v1", "v1beta1"]),
    ("events.k8s.io", &["v1", "v1beta1"]),
    ("extensions", &["v1beta1"]),
    ("flowcontrol.apiserver.k8s.io", &["v1", "v1beta1", "v1beta2", "v1beta3"]),
    ("internal.apiserver.k8s.io", &["v1alpha1"]),
    ("networking.k8s.io", &["v1", "v1beta1"]),
    ("node.k8s.io", &["v1", "v1alpha1", "v1beta1"]),
    ("policy", &["v1", "v1beta1"]),
    ("rbac.authorization.k8s.io", &["v1", "v1alpha1", "v1beta1"]),
    ("resource.k8s.io", &["v1", "v1alpha3", "v1beta1", "v1beta2"]),
    ("scheduling.k8s.io", &["v1", "v1alpha2", "v1beta1"]),
    ("storage.k8s.io", &["v1", "v1alpha1", "v1beta1"]),
    ("storagemigration.k8s.io", &["v1beta1"]),
];

/// Groups that only the document of everything lists.
const ELSEWHERE: &[(&str, &[&str])] = &[
    ("admission.k8s.io", &["v1", "v1beta1"]),
    ("apiextensions.k8s.io", &["v1", "v1beta1"]),
    ("apiregistration.k8s.io", &["v1", "v1beta1"]),
    ("imagepolicy.k8s.io", &["v1alpha1"]),
];

fn of_groups(kind: &str, mut groups: Vec<&(&str, &[&str])>) -> Value {
    groups.sort();
    let kinds = groups.into_iter().flat_map(|(group, versions)| {
        versions.iter().map(move |version| json!({"group": group, "kind": kind, "version": version}))
    });
    kinds.collect()
}

/// The kinds that `DeleteOptions` is in a document of custom kinds.
pub(super) fn delete_options() -> Value {
    of_groups("DeleteOptions", OPTIONS.iter().collect())
}

/// The kinds that a type of every group is in the document of everything.
pub(super) fn of_all_groups(kind: &str) -> Value {
    of_groups(kind, OPTIONS.iter().chain(ELSEWHERE).collect())
}

/// `com.example.stable.v1.CronTab`: the group from its end.
fn name(resource: &Resource, kind: &str) -> String {
    let mut parts: Vec<&str> = resource.group.rsplit('.').collect();
    parts.extend([&*resource.version, kind]);
    parts.join(".")
}

fn refers(dialect: Dialect, name: &str) -> Value {
    match dialect {
        Dialect::V2 => json!({"$ref": format!("#/definitions/{name}")}),
        Dialect::V3 => json!({"$ref": format!("#/components/schemas/{name}")}),
    }
}

/// Adds the schemas of a custom resource and of its list. Returns references to them.
pub(super) fn add(schemas: &mut Schemas, resource: &Resource, schema_of: SchemaOf<'_>) -> (Value, Value) {
    let dialect = schemas.dialect();
    let (own, list) = (name(resource, &resource.kind), name(resource, &resource.list_kind()));
    let references = (refers(dialect, &own), refers(dialect, &list));
    if schemas.done.contains_key(&own) {
        return references;
    }
    let of = |kind: &str| json!([{"group": resource.group, "version": resource.version, "kind": kind}]);
    let mut schema = schema_of(resource).unwrap_or_else(|| json!({"type": "object"}));
    // As upstream: the older document says nothing of an object that may have any field.
    if dialect == Dialect::V2 && schema["x-kubernetes-preserve-unknown-fields"] == true {
        schema = json!({});
    } else {
        if dialect == Dialect::V2 {
            simplify(&mut schema);
        }
        complete(schemas, &mut schema, true);
    }
    // Only fields that take anything lose their type.
    schema["type"] = "object".into();
    schema["x-kubernetes-group-version-kind"] = of(&resource.kind);
    let selectable = selectable_fields(resource);
    let mut of_list = Map::new();
    add_type(&mut of_list);
    of_list.insert("metadata", described(meta_reference(schemas, "ListMeta"), dialect, "Standard list metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds"));
    of_list.insert(
        "items",
        json!({
            "description": format!("List of {}. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md", resource.plural),
            "type": "array",
            "items": references.0,
        }),
    );
    let mut list_schema = json!({
        "description": format!("{} is a list of {}", resource.list_kind(), resource.kind),
        "type": "object",
        "required": ["items"],
        "properties": of_list,
        "x-kubernetes-group-version-kind": of(&resource.list_kind()),
    });
    if let Some(fields) = selectable {
        schema["x-kubernetes-selectable-fields"] = fields.clone();
        list_schema["x-kubernetes-selectable-fields"] = fields;
    }
    schemas.done.insert(own, schema);
    schemas.done.insert(list, list_schema);
    references
}

/// The fields by which a definition lets its objects be selected; none if it names none.
fn selectable_fields(resource: &Resource) -> Option<Value> {
    let selectable = &resource.custom.as_ref()?.version().selectable;
    let fields: Vec<Value> = selectable.iter().map(|(path, _)| json!({"fieldPath": &**path})).collect();
    (!fields.is_empty()).then(|| fields.into())
}

fn meta_reference(schemas: &mut Schemas, kind: &str) -> Value {
    named(&format!("meta.v1.{kind}"))
        .map_or_else(|| json!({"type": "object"}), |type_| schemas.reference(type_))
}

/// A reference with a description: in OpenAPI v3 nothing else may stand beside a reference.
fn described(reference: Value, dialect: Dialect, text: &str) -> Value {
    match dialect {
        Dialect::V2 => {
            let mut reference = reference;
            reference["description"] = text.into();
            reference
        }
        Dialect::V3 => json!({"allOf": [reference], "description": text}),
    }
}

/// `apiVersion` and `kind`, described as every kind describes them.
fn add_type(properties: &mut Map) {
    for key in ["apiVersion", "kind"] {
        let mut made = json!({"type": "string"});
        if let Some(type_) = named("core.v1.ConfigMap")
            && let Some(field) = type_.field(key)
            && let Some(text) = descriptions::of_field(type_, field)
        {
            made["description"] = text.into();
        }
        properties.insert(key, made);
    }
}

/// Adds kind, version and metadata to the schema of a resource and of those embedded in it.
fn complete(schemas: &mut Schemas, schema: &mut Value, root: bool) {
    for key in ["items", "additionalProperties"] {
        if let Some(below) = schema.get_mut(key).filter(|below| below.is_object()) {
            complete(schemas, below, false);
        }
    }
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        properties.values_mut().for_each(|below| complete(schemas, below, false));
    }
    let v2 = schemas.dialect() == Dialect::V2;
    let preserves = schema["x-kubernetes-preserve-unknown-fields"] == true;
    if !v2 && schema["x-kubernetes-int-or-string"] == true && schema.get("anyOf").is_none() {
        schema["anyOf"] = json!([{"type": "integer"}, {"type": "string"}]);
    }
    let embedded = schema["x-kubernetes-embedded-resource"] == true && !(v2 && preserves);
    if embedded && !root {
        let mut required = vec![Value::from("kind"), "apiVersion".into()];
        required.extend(schema["required"].as_array().into_iter().flatten().cloned());
        schema["required"] = required.into();
    }
    if root || embedded {
        if !schema["properties"].is_object() {
            schema["properties"] = json!({});
        }
        let dialect = schemas.dialect();
        let metadata = meta_reference(schemas, "ObjectMeta");
        let Some(properties) = schema["properties"].as_object_mut() else { return };
        add_type(properties);
        let text = "Standard object's metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata";
        properties.insert("metadata", described(metadata, dialect, text));
    }
}

/// Removes parts of a schema that OpenAPI v2 cannot express, as upstream does for clients that only know
/// it.
fn simplify(schema: &mut Value) {
    let Some(map) = schema.as_object_mut() else { return };
    for key in ["allOf", "anyOf", "oneOf", "not", "default"] {
        map.remove(key);
    }
    let is = |map: &Map, key: &str| map.get(key).is_some_and(|value| *value == true);
    if is(map, "nullable") {
        for key in ["type", "nullable", "items", "properties"] {
            map.remove(key);
        }
    }
    if is(map, "x-kubernetes-int-or-string") {
        map.remove("type");
    }
    if is(map, "x-kubernetes-preserve-unknown-fields") {
        for key in ["type", "items", "properties"] {
            map.remove(key);
        }
    }
    for key in ["items", "additionalProperties"] {
        if let Some(below) = map.get_mut(key) {
            simplify(below);
        }
    }
    if let Some(properties) = map.get_mut("properties").and_then(Value::as_object_mut) {
        properties.values_mut().for_each(simplify);
    }
}
