//! Paths as OpenAPI v3 writes them.

use super::operations::{Body, Operation, PathItem, reason};
use ferrite_json::{Map, Value, json};

pub(super) fn put(paths: &mut Map, item: &PathItem) {
    let mut made: Map =
        item.operations.iter().map(|made| (made.method.to_owned(), operation(made))).collect();
    if !item.parameters.is_empty() {
        made.insert("parameters", item.parameters.iter().map(|parameter| parameter.v3()).collect());
    }
    paths.insert(item.path.clone(), made.into());
}

fn content(types: &[&str], schema: &Value) -> Value {
    let each = types.iter().map(|type_| ((*type_).to_owned(), json!({"schema": schema})));
    each.collect::<Map>().into()
}

fn operation(operation: &Operation) -> Value {
    let mut made = json!({
        "tags": [operation.tag],
        "description": operation.text,
        "operationId": operation.id,
    });
    if !operation.parameters.is_empty() {
        made["parameters"] = operation.parameters.iter().map(|parameter| parameter.v3()).collect();
    }
    match &operation.body {
        Body::None => {}
        Body::DeleteOptions(options) => {
            made["requestBody"] = json!({"content": content(operation.consumes, options)});
        }
        Body::Object(schema) | Body::Patch(schema) => {
            made["requestBody"] = json!({"content": content(operation.consumes, schema), "required": true});
        }
    }
    let mut responses = Map::new();
    for (code, schema) in &operation.responses {
        let sent = content(operation.produces, schema);
        responses.insert(*code, json!({"description": reason(code), "content": sent}));
    }
    responses.insert("401", json!({"description": reason("401")}));
    made["responses"] = responses.into();
    if let Some((action, kind)) = &operation.about {
        made["x-kubernetes-action"] = (*action).into();
        made["x-kubernetes-group-version-kind"] = kind.clone();
    }
    made
}
