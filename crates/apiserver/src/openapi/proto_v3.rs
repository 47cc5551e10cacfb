//! A v3 document in its protobuf form.
//!
//! The numbers are those of the messages in `openapi.v3` (Document, Schema, Operation …).

use super::proto::{Message, extensions, members};
use ferrite_json::Value;

/// Encodes a document made by [`super::make_at`].
pub(super) fn encode(document: &Value) -> Vec<u8> {
    let mut out = Message::default();
    out.text(1, &document["openapi"]);
    out.message(2, |info| {
        info.text(1, &document["info"]["title"]);
        info.text(6, &document["info"]["version"]);
    });
    out.message(4, |paths| {
        named(paths, &document["paths"], path_item);
    });
    out.message(5, |components| {
        components.message(1, |schemas| named(schemas, &document["components"]["schemas"], schema));
        components.message(7, |schemes| {
            named(schemes, &document["components"]["securitySchemes"], |item, scheme| {
                item.message(1, |out| {
                    for (tag, key) in [(1, "type"), (2, "description"), (3, "name"), (4, "in")] {
                        out.text(tag, &scheme[key]);
                    }
                });
            });
        });
    });
    out.0
}

/// A map, as a list of names with their values.
fn named(out: &mut Message, map: &Value, put: fn(&mut Message, &Value)) {
    for (name, value) in members(map) {
        out.message(1, |pair| {
            pair.string(1, name);
            pair.message(2, |out| put(out, value));
        });
    }
}

const METHODS: [(&str, u32); 7] =
    [("get", 4), ("put", 5), ("post", 6), ("delete", 7), ("options", 8), ("head", 9), ("patch", 10)];

fn path_item(out: &mut Message, item: &Value) {
    for (method, tag) in METHODS {
        if let Some(made) = item.get(method) {
            out.message(tag, |out| operation(out, made));
        }
    }
    parameters(out, 13, &item["parameters"]);
}

fn parameters(out: &mut Message, tag: u32, list: &Value) {
    for parameter in list.as_array().into_iter().flatten() {
        out.message(tag, |item| {
            item.message(1, |out| {
                out.text(1, &parameter["name"]);
                out.text(2, &parameter["in"]);
                out.text(3, &parameter["description"]);
                out.flag(4, parameter["required"] == true);
                out.message(10, |out| schema(out, &parameter["schema"]));
            });
        });
    }
}

fn operation(out: &mut Message, operation: &Value) {
    for tag in operation["tags"].as_array().into_iter().flatten() {
        out.text(1, tag);
    }
    out.text(3, &operation["description"]);
    out.text(5, &operation["operationId"]);
    parameters(out, 6, &operation["parameters"]);
    if let Some(body) = operation.get("requestBody") {
        out.message(7, |item| {
            item.message(1, |out| {
                out.message(2, |content| named(content, &body["content"], media_type));
                out.flag(3, body["required"] == true);
            });
        });
    }
    out.message(8, |responses| {
        for (code, response) in members(&operation["responses"]) {
            responses.message(2, |pair| {
                pair.string(1, code);
                pair.message(2, |item| {
                    item.message(1, |out| {
                        out.text(1, &response["description"]);
                        if response["content"].is_object() {
                            out.message(3, |content| named(content, &response["content"], media_type));
                        }
                    });
                });
            });
        }
    });
    extensions(out, 13, operation);
}

fn media_type(out: &mut Message, media_type: &Value) {
    out.message(1, |out| schema(out, &media_type["schema"]));
}

/// A schema or a reference to one.
fn schema(out: &mut Message, made: &Value) {
    match made.get("$ref") {
        Some(reference) => out.message(2, |out| out.text(1, reference)),
        None => out.message(1, |out| inline(out, made)),
    }
}

fn inline(out: &mut Message, made: &Value) {
    out.flag(20, made["uniqueItems"] == true);
    for name in made["required"].as_array().into_iter().flatten() {
        out.text(23, name);
    }
    for value in made["enum"].as_array().into_iter().flatten() {
        out.message(24, |any| any.string(2, &value.to_string()));
    }
    out.text(25, &made["type"]);
    for (key, tag) in [("allOf", 26), ("oneOf", 27)] {
        for one in made[key].as_array().into_iter().flatten() {
            out.message(tag, |out| schema(out, one));
        }
    }
    if let Some(items) = made.get("items") {
        out.message(30, |item| item.message(1, |out| schema(out, items)));
    }
    if made["properties"].is_object() {
        out.message(31, |properties| named(properties, &made["properties"], schema));
    }
    if let Some(additional) = made.get("additionalProperties") {
        out.message(32, |item| item.message(1, |out| schema(out, additional)));
    }
    // Only simple defaults have a form here.
    match &made["default"] {
        Value::String(text) => out.message(33, |default| default.string(3, text)),
        Value::Bool(set) => out.message(33, |default| default.boolean(2, *set)),
        Value::Number(number) => {
            out.message(33, |default| default.double(1, number.as_f64().unwrap_or_default()));
        }
        _ => {}
    }
    out.text(34, &made["description"]);
    out.text(35, &made["format"]);
    extensions(out, 36, made);
}
