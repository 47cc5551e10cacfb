//! Objects of requests and responses, as events have them: JSON on one line.

use super::event::ResponseStatus;
use ferrite_api::codec::{protobuf, yaml};
use ferrite_api::schema;
use ferrite_json::Value;
use std::sync::Arc;

/// An object of an event may be this long. A longer one is left out, and the event says so.
pub(super) const LIMIT: usize = 8 << 20;
/// Responses that may be a Status are decoded up to this length.
const STATUS_LIMIT: usize = 1 << 20;

/// The outcome of looking at an object.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Text {
    /// Nothing that events have.
    #[default]
    None,
    Object(Arc<str>),
    TooLarge,
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        if text.len() > LIMIT { Self::TooLarge } else { Self::Object(text.into()) }
    }
}

/// An object of ours.
pub(super) fn of_value(mut value: Value, omits_managed_fields: bool) -> Text {
    if omits_managed_fields {
        strip(&mut value);
    }
    value.to_string().into()
}

/// A body of the given media type.
pub(super) fn of_bytes(media_type: &str, bytes: &[u8], omits_managed_fields: bool) -> Text {
    if bytes.len() > LIMIT {
        return Text::TooLarge;
    }
    let bytes = bytes.trim_ascii_end();
    if !omits_managed_fields && is_json(media_type) && !bytes.contains(&b'\n') {
        return match std::str::from_utf8(bytes) {
            Ok(text) if text.starts_with('{') => Text::Object(text.into()),
            _ => Text::None,
        };
    }
    match decode(media_type, bytes) {
        Some(value) if value.is_object() => of_value(value, omits_managed_fields),
        _ => Text::None,
    }
}

/// A patch, which is JSON or YAML and of no kind.
pub(super) fn of_patch(bytes: &[u8]) -> Text {
    let json: Option<Value> = ferrite_json::from_slice(bytes).ok();
    let value = json.or_else(|| Some(yaml::decode_any(bytes).ok()?.value));
    value.map_or(Text::None, |value| value.to_string().into())
}

fn is_json(media_type: &str) -> bool {
    media_type.starts_with("application/json")
}

fn decode(media_type: &str, bytes: &[u8]) -> Option<Value> {
    match media_type.split(';').next().unwrap_or_default().trim() {
        "application/json" => ferrite_json::from_slice(bytes).ok(),
        "application/yaml" => Some(yaml::decode_any(bytes).ok()?.value),
        "application/vnd.kubernetes.protobuf" => from_protobuf(bytes),
        _ => None,
    }
}

/// Protobuf does not distinguish an empty list from none; JSON does.
fn from_protobuf(bytes: &[u8]) -> Option<Value> {
    let mut value = protobuf::decode(bytes).ok()??;
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default();
    if let Some(type_) = schema::of_api_version(text("apiVersion"), text("kind")) {
        ferrite_api::codec::normalise(type_, &mut value);
    }
    Some(value)
}

/// The Status that a response is. None for a response of another kind.
pub(super) fn status_of(media_type: &str, bytes: &[u8]) -> Option<ResponseStatus> {
    const KIND: &[u8] = b"Status";
    if bytes.len() > STATUS_LIMIT || !bytes.windows(KIND.len()).any(|window| window == KIND) {
        return None;
    }
    let value = decode(media_type, bytes).filter(|value| value["kind"] == "Status")?;
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    Some(ResponseStatus {
        status: text("status"),
        message: text("message"),
        reason: text("reason"),
        details: value.get("details").cloned(),
        code: value.get("code").and_then(Value::as_u64).and_then(|c| u16::try_from(c).ok()).unwrap_or(0),
    })
}

/// Removes managed fields from an object, from the items of a list, or from the rows of a table.
fn strip(value: &mut Value) {
    let remove = |object: &mut Value| {
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
        }
    };
    let list = value.get("kind").and_then(Value::as_str).is_some_and(|kind| kind.ends_with("List"));
    let table = value["kind"] == "Table";
    remove(value);
    if list && let Some(items) = value.get_mut("items").and_then(Value::as_array_mut) {
        items.iter_mut().for_each(remove);
    }
    if table && let Some(rows) = value.get_mut("rows").and_then(Value::as_array_mut) {
        rows.iter_mut().filter_map(|row| row.get_mut("object")).for_each(remove);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn text(text: Text) -> Value {
        match text {
            Text::Object(text) => {
                assert!(!text.contains('\n'), "{text}");
                text.parse().unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn objects_are_one_line_of_json_whatever_they_were() {
        let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
        let pretty = ferrite_json::to_vec_pretty(&object).unwrap();
        assert_eq!(text(of_bytes("application/json", &pretty, false)), object);
        assert_eq!(text(of_bytes("application/json", object.to_string().as_bytes(), false)), object);
        let wire = protobuf::encode(&object).unwrap();
        assert_eq!(text(of_bytes("application/vnd.kubernetes.protobuf", &wire, false)), object);
        let list = json!({"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {}, "items": []});
        let wire = protobuf::encode(&list).unwrap();
        assert_eq!(text(of_bytes("application/vnd.kubernetes.protobuf", &wire, false)), list);
        let yaml = yaml::encode(&object).unwrap();
        assert_eq!(text(of_bytes("application/yaml", yaml.as_bytes(), false)), object);
        assert_eq!(of_bytes("text/plain", b"ok", false), Text::None);
        assert_eq!(of_bytes("application/json", &vec![b' '; LIMIT + 1], false), Text::TooLarge);
        assert_eq!(text(of_patch(b"{\"a\": \"\\n\",\n\"b\":1}")), json!({"a": "\n", "b": 1}));
        assert_eq!(text(of_patch(b"a: 1\nb: [2]")), json!({"a": 1, "b": [2]}));
    }

    #[test]
    fn managed_fields_are_removed_from_objects_lists_and_tables() {
        let object = json!({"kind": "ConfigMap", "metadata": {"name": "a", "managedFields": [1]}});
        let plain = json!({"kind": "ConfigMap", "metadata": {"name": "a"}});
        let rows: [(Value, Value); 3] = [
            (object.clone(), plain.clone()),
            (
                json!({"kind": "ConfigMapList", "items": [object]}),
                json!({"kind": "ConfigMapList", "items": [plain]}),
            ),
            (
                json!({"kind": "Table", "rows": [{"object": object}]}),
                json!({"kind": "Table", "rows": [{"object": plain}]}),
            ),
        ];
        for (given, expected) in rows {
            assert_eq!(text(of_value(given.clone(), false)), given);
            assert_eq!(text(of_bytes("application/json", given.to_string().as_bytes(), true)), expected);
        }
    }

    #[test]
    fn a_status_is_found_in_every_format() {
        let status = ferrite_api::Status::not_found("", "pods", "p").to_value();
        let wire = protobuf::encode(&status).unwrap();
        for (media_type, bytes) in [
            ("application/json", status.to_string().into_bytes()),
            ("application/vnd.kubernetes.protobuf", wire),
        ] {
            let found = status_of(media_type, &bytes).expect("a status");
            assert_eq!((found.code, found.reason.as_str()), (404, "NotFound"), "{media_type}");
        }
        assert!(status_of("application/json", br#"{"kind":"Pod","status":{"x":"Status"}}"#).is_none());
    }
}
