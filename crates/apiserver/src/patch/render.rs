//! A patched object as upstream prints it when it cannot be read: the part that the patch touched has
//! sorted keys, the rest has its fields in the order in which their type declares them.

use ferrite_api::codec::MAX_DEPTH;
use ferrite_api::schema::{Kind, TypeRef};
use ferrite_json::{Value, json};

/// The objects a JSON patch goes through, as a document of their paths.
pub(super) fn touched(operations: &Value) -> Value {
    let mut root = json!({});
    for operation in operations.as_array().into_iter().flatten() {
        for path in ["path", "from"].iter().filter_map(|k| operation.get(k)?.as_str()) {
            let mut at = &mut root;
            let parents = path.split('/').skip(1).collect::<Vec<_>>();
            // A test of a missing path may name any number of parents; no object has more than the decoder lets in.
            for token in parents.iter().take(parents.len().saturating_sub(1).min(MAX_DEPTH)) {
                let name = token.replace("~1", "/").replace("~0", "~");
                let Some(map) = at.as_object_mut() else { break };
                at = map.entry(name).or_insert_with(|| json!({}));
            }
        }
    }
    root
}

pub(super) fn object(type_: TypeRef, value: &Value, touched: &Value) -> String {
    let mut out = String::new();
    put(Some(&Kind::Struct(type_)), value, Some(touched), &mut out);
    out
}

fn put(kind: Option<&Kind>, value: &Value, touched: Option<&Value>, out: &mut String) {
    let touched = touched.filter(|t| t.is_object());
    match value {
        Value::Object(map) => {
            let type_ = match kind {
                Some(Kind::Struct(type_)) => Some(*type_),
                _ => None,
            };
            let mut names: Vec<&ferrite_json::Text> = map.keys().collect();
            if let (Some(type_), None) = (type_, touched) {
                names.sort_by_key(|name| type_.field(name).map_or(u16::MAX, |f| f.declared));
            }
            out.push('{');
            for (index, name) in names.into_iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                out.push_str(&Value::String(name.clone()).to_string());
                out.push(':');
                let inner = match kind {
                    Some(Kind::Struct(type_)) => type_.field(name).map(|f| &f.kind),
                    Some(Kind::Map(item)) => Some(*item),
                    _ => None,
                };
                put(inner, &map[name], touched.and_then(|t| t.get(name)), out);
            }
            out.push('}');
        }
        Value::Array(list) => {
            let inner = match kind {
                Some(Kind::List(item)) => Some(*item),
                _ => None,
            };
            out.push('[');
            for (index, item) in list.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                put(inner, item, touched.and_then(|t| t.get(index.to_string())), out);
            }
            out.push(']');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_api::schema;

    #[test]
    fn a_long_path_makes_no_deep_document() {
        let path = "/a".repeat(1_000_000);
        let document = touched(&json!([{"op": "test", "path": path, "value": null}]));
        assert!(document.count_within(MAX_DEPTH + 1).is_some());
    }

    #[test]
    fn what_a_patch_touched_is_sorted_and_the_rest_is_as_declared() {
        let type_ = schema::kind("", "v1", "ConfigMap").expect("ConfigMap");
        let value = json!({"kind": "ConfigMap", "apiVersion": "v1", "data": {"x": 5},
            "metadata": {"name": "a", "labels": {"t": "x"}, "annotations": {}, "uid": "u"}});
        let path = touched(&json!([{"op": "add", "path": "/data/x", "value": 5}]));
        assert_eq!(
            object(type_, &value, &path),
            r#"{"apiVersion":"v1","data":{"x":5},"kind":"ConfigMap","metadata":{"name":"a","uid":"u","labels":{"t":"x"},"annotations":{}}}"#
        );
    }
}
