//! Operations of resources.

use super::path_of;
use super::schemas::Schemas;
use ferrite_api::resource::Resource;
use ferrite_api::schema::{self, TypeRef};
use ferrite_json::{Map, Value, json};

/// Adds the paths of a resource and its subresources.
pub(super) fn add_paths(paths: &mut Map, schemas: &mut Schemas, resource: &Resource) {
    let root = format!("/{}", path_of(&resource.group, &resource.version));
    let collection = if resource.is_namespaced() {
        format!("{root}/namespaces/{{namespace}}/{}", resource.plural)
    } else {
        format!("{root}/{}", resource.plural)
    };
    let kind = json!({"group": resource.group, "version": resource.version, "kind": resource.kind});
    let body = resource.schema;
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
            place.insert(method, operation);
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
    add_watches(paths, schemas, resource, &root, &kind);
    for sub in resource.subresources.iter() {
        let (group, version, name) = sub.body.unwrap_or((&resource.group, &resource.version, &resource.kind));
        let kind = json!({"group": group, "version": version, "kind": name});
        let body = schema::kind(group, version, name);
        let path = format!("{collection}/{{name}}/{}", sub.name);
        if CONNECT.contains(&sub.name) {
            let methods: &[&str] = match sub.name {
                "proxy" => &["get", "put", "post", "delete", "options", "head", "patch"],
                _ => &["get", "post"],
            };
            let connect: Map = methods
                .iter()
                .map(|m| ((*m).to_owned(), operation(schemas, &kind, "connect", "connect", None, None)))
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
                operations.insert(method, operation(schemas, &kind, action, verb, body, body));
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
    let event = schema::named("meta.v1.WatchEvent");
    let plural = &resource.plural;
    let mut add = |path: String, action: &str| {
        let operation = operation(schemas, kind, action, "watch", None, event);
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
