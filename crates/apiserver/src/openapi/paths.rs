//! Operations of resources.

use super::schemas::Schemas;
use super::{SchemaOf, path_of};
use ferrite_api::resource::Resource;
use ferrite_api::schema;
use ferrite_json::{Map, Value, json};

/// Adds the paths of a resource and its subresources.
pub(super) fn add_paths(
    paths: &mut Map,
    schemas: &mut Schemas,
    resource: &Resource,
    schema_of: SchemaOf<'_>,
) {
    let root = format!("/{}", path_of(&resource.group, &resource.version));
    let collection = if resource.is_namespaced() {
        format!("{root}/namespaces/{{namespace}}/{}", resource.plural)
    } else {
        format!("{root}/{}", resource.plural)
    };
    let kind = json!({"group": resource.group, "version": resource.version, "kind": resource.kind});
    let (body, list) = schemas.bodies(resource, schema_of);
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
            let answer = if verb == "list" { &list } else { &body };
            let operation = operation(&kind, action, verb, body.as_ref(), answer.as_ref());
            let place = if on_object { &mut at_object } else { &mut at_collection };
            place.insert(method, operation);
        }
    }
    if resource.is_namespaced() && has("list") {
        let operation = operation(&kind, "list", "list", body.as_ref(), list.as_ref());
        paths.insert(format!("{root}/{}", resource.plural), json!({"get": operation}));
    }
    if !at_collection.is_empty() {
        paths.insert(collection.clone(), Value::Object(at_collection));
    }
    if !at_object.is_empty() {
        paths.insert(format!("{collection}/{{name}}"), Value::Object(at_object));
    }
    if resource.custom.is_none() {
        add_watches(paths, schemas, resource, &root, &kind);
    }
    for sub in resource.subresources.iter() {
        let (group, version, name) = sub.body.unwrap_or((&resource.group, &resource.version, &resource.kind));
        let kind = json!({"group": group, "version": version, "kind": name});
        let body = match (&resource.custom, sub.body) {
            (Some(_), None) => body.clone(),
            _ => schema::kind(group, version, name).map(|type_| schemas.reference(type_)),
        };
        let path = format!("{collection}/{{name}}/{}", sub.name);
        if CONNECT.contains(&sub.name) {
            let methods: &[&str] = match sub.name {
                "proxy" => &["get", "put", "post", "delete", "options", "head", "patch"],
                _ => &["get", "post"],
            };
            let connect: Map = methods
                .iter()
                .map(|m| ((*m).to_owned(), operation(&kind, "connect", "connect", None, None)))
                .collect();
            if sub.name == "proxy" {
                paths.insert(format!("{path}/{{path}}"), Value::Object(connect.clone()));
            }
            paths.insert(path, Value::Object(connect));
            continue;
        }
        let mut operations = Map::new();
        for (verb, method, action) in [
            ("get", "get", "get"),
            ("create", "post", "post"),
            ("update", "put", "put"),
            ("patch", "patch", "patch"),
        ] {
            if sub.verbs.contains(&verb) {
                operations.insert(method, operation(&kind, action, verb, body.as_ref(), body.as_ref()));
            }
        }
        paths.insert(path, Value::Object(operations));
    }
}

/// Subresources that are a connection rather than an object.
const CONNECT: [&str; 4] = ["attach", "exec", "portforward", "proxy"];

/// The old paths for watches, which clients still find here.
fn add_watches(paths: &mut Map, schemas: &mut Schemas, resource: &Resource, root: &str, kind: &Value) {
    if !resource.verbs.contains(&"watch") {
        return;
    }
    let event = schema::named("meta.v1.WatchEvent").map(|type_| schemas.reference(type_));
    let plural = &resource.plural;
    let mut add = |path: String, action: &str| {
        let operation = operation(kind, action, "watch", None, event.as_ref());
        paths.insert(path, json!({"get": operation}));
    };
    add(format!("{root}/watch/{plural}"), "watchlist");
    if resource.is_namespaced() {
        add(format!("{root}/watch/namespaces/{{namespace}}/{plural}"), "watchlist");
        add(format!("{root}/watch/namespaces/{{namespace}}/{plural}/{{name}}"), "watch");
    } else {
        add(format!("{root}/watch/{plural}/{{name}}"), "watch");
    }
}

/// Parameters of writes; clients look here to find out whether the server knows them.
const WRITE_PARAMETERS: [&str; 3] = ["dryRun", "fieldManager", "fieldValidation"];

fn operation(kind: &Value, action: &str, verb: &str, body: Option<&Value>, answer: Option<&Value>) -> Value {
    let mut operation = json!({"x-kubernetes-group-version-kind": kind, "x-kubernetes-action": action});
    let content = |reference: &Value| {
        json!({"application/json": {"schema": reference}, "application/yaml": {"schema": reference},
            "application/vnd.kubernetes.protobuf": {"schema": reference}})
    };
    let code = if verb == "create" { "201" } else { "200" };
    let mut response = json!({"description": "OK"});
    if let Some(reference) = answer {
        response["content"] = content(reference);
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
    if let Some(reference) = body.filter(|_| matches!(verb, "create" | "update")) {
        operation["requestBody"] = json!({"content": content(reference), "required": true});
    }
    operation
}

fn query_parameter(name: &str) -> Value {
    json!({"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": true}})
}
