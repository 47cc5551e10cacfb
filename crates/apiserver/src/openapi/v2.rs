//! The v2 document: everything in one.

use super::operations::{self, Body, Operation, PathItem, reason};
use super::parameters::{self, OPTIONS_BODY, PATCH_BODY};
use super::schemas::{Dialect, Schemas};
use super::{SchemaOf, documents};
use crate::registry::ResourceMap;
use ferrite_json::{Map, Value, json};

pub(super) fn make(table: &ResourceMap, schema_of: SchemaOf<'_>) -> Value {
    let mut schemas = Schemas::new(Dialect::V2);
    let mut paths = Map::new();
    for item in documents::all(table, &mut schemas) {
        put(&mut paths, &item);
    }
    for resource in table.rows() {
        for item in operations::of(resource, &mut schemas, schema_of) {
            put(&mut paths, &item);
        }
    }
    schemas.add_reachable("", "v1");
    json!({
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": super::api_version()},
        "paths": paths,
        "definitions": schemas.done,
        "parameters": parameters::shared_v2(),
        "securityDefinitions": super::security_schemes(),
        "security": [{"BearerToken": []}],
    })
}

fn put(paths: &mut Map, item: &PathItem) {
    let mut made: Map =
        item.operations.iter().map(|made| (made.method.to_owned(), operation(made))).collect();
    if !item.parameters.is_empty() {
        made.insert("parameters", item.parameters.iter().map(|parameter| parameter.v2()).collect());
    }
    paths.insert(item.path.clone(), made.into());
}

fn operation(operation: &Operation) -> Value {
    let mut made = json!({
        "description": operation.text,
        "produces": operation.produces,
        "schemes": ["https"],
        "tags": [operation.tag],
        "operationId": operation.id,
    });
    if !operation.consumes.is_empty() {
        made["consumes"] = operation.consumes.into();
    }
    let shared = |name: &str| json!({"$ref": format!("#/parameters/{name}")});
    let body = match &operation.body {
        Body::None => None,
        Body::DeleteOptions(_) => Some(shared(OPTIONS_BODY)),
        Body::Patch(_) => Some(shared(PATCH_BODY)),
        Body::Object(schema) => {
            Some(json!({"name": "body", "in": "body", "required": true, "schema": schema}))
        }
    };
    let parameters: Vec<Value> =
        body.into_iter().chain(operation.parameters.iter().map(|parameter| parameter.v2())).collect();
    if !parameters.is_empty() {
        made["parameters"] = parameters.into();
    }
    let mut responses = Map::new();
    for (code, schema) in &operation.responses {
        responses.insert(*code, json!({"description": reason(code), "schema": schema}));
    }
    responses.insert("401", json!({"description": reason("401")}));
    made["responses"] = responses.into();
    if let Some((action, kind)) = &operation.about {
        made["x-kubernetes-action"] = (*action).into();
        made["x-kubernetes-group-version-kind"] = kind.clone();
    }
    made
}
