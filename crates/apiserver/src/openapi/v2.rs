//! The v2 document: definitions of all kinds, and their paths in short.

use super::schemas::{Dialect, Schemas};
use super::{SchemaOf, path_of};
use crate::registry::Table;
use ferrite_api::resource::Resource;
use ferrite_json::{Map, Value, json};

pub(super) fn make(table: &Table, schema_of: SchemaOf<'_>) -> Value {
    let mut schemas = Schemas::new(Dialect::V2);
    let mut paths = Map::new();
    for resource in table.rows() {
        add(&mut paths, &mut schemas, resource, schema_of);
    }
    schemas.add_reachable("", "v1");
    json!({
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": super::api_version()},
        "paths": paths,
        "definitions": schemas.done,
        "securityDefinitions": super::security_schemes(),
        "security": [{"BearerToken": []}],
    })
}

/// Clients look here for the parameters a kind's operations take; bodies are in the definitions.
fn add(paths: &mut Map, schemas: &mut Schemas, resource: &Resource, schema_of: SchemaOf<'_>) {
    let root = format!("/{}", path_of(&resource.group, &resource.version));
    let scope = if resource.is_namespaced() { "/namespaces/{namespace}" } else { "" };
    let collection = format!("{root}{scope}/{}", resource.plural);
    let (body, list) = schemas.bodies(resource, schema_of);
    let operation = |action: &str| {
        let mut response = json!({"description": "OK"});
        if let Some(reference) = if action == "list" { &list } else { &body } {
            response["schema"] = reference.clone();
        }
        let parameters: &[&str] = match action {
            "post" | "put" => &["dryRun", "fieldManager", "fieldValidation"],
            "patch" => &["dryRun", "fieldManager", "fieldValidation", "force"],
            _ => &[],
        };
        let parameters: Vec<Value> = parameters
            .iter()
            .map(|name| json!({"name": name, "in": "query", "type": "string", "uniqueItems": true}))
            .collect();
        json!({
            "parameters": parameters,
            "responses": {"200": response},
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind":
                {"group": resource.group, "version": resource.version, "kind": resource.kind},
        })
    };
    let mut place = |path: String, rows: &[(&str, &str, &str)]| {
        let operations: Map = rows
            .iter()
            .filter(|(verb, _, _)| resource.verbs.contains(verb))
            .map(|(_, method, action)| ((*method).to_owned(), operation(action)))
            .collect();
        if !operations.is_empty() {
            paths.insert(path, Value::Object(operations));
        }
    };
    place(collection.clone(), &[("list", "get", "list"), ("create", "post", "post")]);
    place(
        format!("{collection}/{{name}}"),
        &[
            ("get", "get", "get"),
            ("update", "put", "put"),
            ("patch", "patch", "patch"),
            ("delete", "delete", "delete"),
        ],
    );
}
