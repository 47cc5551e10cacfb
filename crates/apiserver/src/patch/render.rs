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

/// Where a JSON patch puts a value of another place, and the type that the value had there: it is printed as one of that type.
pub(super) type Moved = Vec<(Vec<String>, &'static Kind)>;

pub(super) fn moved(type_: TypeRef, operations: &Value) -> Moved {
    let steps = |path: &str| -> Vec<String> {
        path.split('/').skip(1).take(MAX_DEPTH).map(|t| t.replace("~1", "/").replace("~0", "~")).collect()
    };
    let kind_at = |path: &str| {
        let mut steps = steps(path).into_iter();
        let first = &type_.field(&steps.next()?)?.kind;
        steps.try_fold(first, |kind, step| match kind {
            Kind::Struct(type_) => type_.field(&step).map(|field| &field.kind),
            Kind::List(item) | Kind::Map(item) => Some(*item),
            _ => None,
        })
    };
    let moves = operations.as_array().into_iter().flatten();
    moves
        .filter_map(|operation| {
            let text = |key: &str| operation.get(key)?.as_str();
            matches!(text("op"), Some("copy" | "move")).then_some(())?;
            Some((steps(text("path")?), kind_at(text("from")?)?))
        })
        .collect()
}

pub(super) fn object(type_: TypeRef, value: &Value, touched: &Value, moved: &Moved) -> String {
    let mut out = String::new();
    put(Some(&Kind::Struct(type_)), value, Some(touched), &mut Place { moved, at: Vec::new() }, &mut out);
    out
}

/// A value of a type with its fields in the order in which the type declares them.
pub(crate) fn declared(type_: TypeRef, value: &Value) -> String {
    object(type_, value, &Value::Null, &Moved::new())
}

/// The place of a value that is being printed.
struct Place<'a> {
    moved: &'a Moved,
    at: Vec<String>,
}

impl Place<'_> {
    /// The type of the value here, if it came from elsewhere.
    fn kind(&self) -> Option<&'static Kind> {
        self.moved.iter().rfind(|(path, _)| *path == self.at).map(|(_, kind)| *kind)
    }
}

fn put(kind: Option<&Kind>, value: &Value, touched: Option<&Value>, place: &mut Place<'_>, out: &mut String) {
    // A merge patch touches the lists that it brings, too.
    let touched = touched.filter(|t| t.is_object() || t.is_array());
    let kind = place.kind().or(kind);
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
                place.at.push(name.to_string());
                put(inner, &map[name], touched.and_then(|t| t.get(name)), place, out);
                place.at.pop();
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
                place.at.push(index.to_string());
                let below = touched.and_then(|t| t.get(index).or_else(|| t.get(index.to_string())));
                put(inner, item, below, place, out);
                place.at.pop();
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
    fn lists_of_a_merge_patch_are_sorted_within() {
        let type_ = schema::named("core.v1.PodSpec").expect("a type");
        let containers = json!([{"name": "c", "image": "i", "foo": 1}]);
        let value = json!({"containers": containers});
        let printed = |touched: &Value| object(type_, &value, touched, &Moved::new());
        assert_eq!(printed(&value), r#"{"containers":[{"foo":1,"image":"i","name":"c"}]}"#);
        assert_eq!(printed(&Value::Null), r#"{"containers":[{"name":"c","image":"i","foo":1}]}"#);
    }

    #[test]
    fn what_a_patch_touched_is_sorted_and_the_rest_is_as_declared() {
        let type_ = schema::kind("", "v1", "ConfigMap").expect("ConfigMap");
        let value = json!({"kind": "ConfigMap", "apiVersion": "v1", "data": {"x": 5},
            "metadata": {"name": "a", "labels": {"t": "x"}, "annotations": {}, "uid": "u"}});
        let path = touched(&json!([{"op": "add", "path": "/data/x", "value": 5}]));
        assert_eq!(
            object(type_, &value, &path, &Moved::new()),
            r#"{"apiVersion":"v1","data":{"x":5},"kind":"ConfigMap","metadata":{"name":"a","uid":"u","labels":{"t":"x"},"annotations":{}}}"#
        );
        // A value from another place is printed as one of the type that it had there.
        let copy = json!([{"op": "copy", "from": "/metadata", "path": "/data/m"}]);
        let value = json!({"data": {"m": {"annotations": {}, "name": "a", "uid": "u"}}});
        assert_eq!(
            object(type_, &value, &touched(&copy), &moved(type_, &copy)),
            r#"{"data":{"m":{"name":"a","uid":"u","annotations":{}}}}"#
        );
    }
}
