//! Objects as upstream's internal structures print: its messages show them field by field, in the order of
//! their declaration and with unset fields spelled out, and clients read those messages.
//!
//! The declarations are in `layouts.txt`: a line without indent names a structure, the lines below it are its
//! fields, `GoName[=jsonName] shape`. Shapes: `s` text, `i` number, `b` truth value, `p` anything that is
//! `null` when not set, `o` anything that is left out when not set, `m` the metadata's own fields, `T` a
//! structure, `?T` one that may be missing, `~T` one that is then left out, `[]T` a list of them. `n` is a number or a text,
//! zero when not set.

mod diff;

pub use diff::diff;

use crate::kinds::common::access::{ensure_object, remove};
use ferrite_json::{Text, Value};
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::LazyLock;

static LAYOUTS: LazyLock<HashMap<&'static str, Vec<Field>>> =
    LazyLock::new(|| parse(include_str!("layouts.txt")));

struct Field {
    name: &'static str,
    json: String,
    shape: &'static str,
}

fn parse(text: &'static str) -> HashMap<&'static str, Vec<Field>> {
    let mut layouts: HashMap<&'static str, Vec<Field>> = HashMap::new();
    let mut current = "";
    for line in text.lines().filter(|l| !l.trim().is_empty()) {
        let Some(field) = line.strip_prefix(' ') else {
            current = line;
            layouts.insert(current, Vec::new());
            continue;
        };
        let Some((name, shape)) = field.split_once(' ') else { continue };
        let (name, json) = match name.split_once('=') {
            Some((name, json)) => (name, json.to_owned()),
            None => {
                let (first, rest) = name.split_at(1);
                (name, first.to_lowercase() + rest)
            }
        };
        layouts.entry(current).or_default().push(Field { name, json, shape });
    }
    layouts
}

/// An object on its way to text, with its fields in order.
#[derive(Debug, Clone, PartialEq)]
enum Node {
    Leaf(String),
    Object(Vec<(Text, Node)>),
    List(Vec<Node>),
}

const NULL: &str = "null";

fn raw(value: &Value) -> Node {
    match value {
        Value::Object(map) => Node::Object(map.iter().map(|(k, v)| (k.clone(), raw(v))).collect()),
        Value::Array(items) => Node::List(items.iter().map(raw).collect()),
        other => Node::Leaf(other.to_string()),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

fn structure(layout: &str, value: &Value) -> Node {
    let mut fields = Vec::new();
    for field in LAYOUTS.get(layout).map(Vec::as_slice).unwrap_or_default() {
        let found = &value[field.json.as_str()];
        let node = match field.shape {
            "s" => Node::Leaf(Value::from(found.as_str().unwrap_or_default()).to_string()),
            "i" => Node::Leaf(found.as_i64().unwrap_or(0).to_string()),
            "b" => Node::Leaf(found.as_bool().unwrap_or(false).to_string()),
            // A number or a text; not set, it is the number zero.
            "n" => {
                if found.is_null() {
                    Node::Leaf("0".to_owned())
                } else {
                    raw(found)
                }
            }
            // An empty list or map that a client has sent differs from none.
            "p" => raw(found),
            "o" if is_empty(found) || found.as_str() == Some("") => continue,
            "o" => raw(found),
            "m" => {
                if let Node::Object(metadata) = structure("ObjectMeta", found) {
                    fields.extend(metadata);
                }
                continue;
            }
            shape if shape.starts_with('~') => match found.is_object() {
                true => structure(&shape[1..], found),
                false => continue,
            },
            shape => match (shape.strip_prefix('?'), shape.strip_prefix("[]")) {
                (Some(name), _) if found.is_object() => structure(name, found),
                (_, Some(name)) => match found.as_array() {
                    Some(items) => Node::List(items.iter().map(|item| structure(name, item)).collect()),
                    None => Node::Leaf(NULL.to_owned()),
                },
                (Some(_), _) => Node::Leaf(NULL.to_owned()),
                _ => structure(shape, found),
            },
        };
        fields.push((field.name.to_owned().into(), node));
    }
    Node::Object(fields)
}

fn write_compact(node: &Node, out: &mut String) {
    match node {
        Node::Leaf(text) => out.push_str(text),
        Node::Object(fields) => {
            out.push('{');
            for (index, (name, value)) in fields.iter().enumerate() {
                let comma = if index == 0 { "" } else { "," };
                let _ = write!(out, "{comma}{name:?}:");
                write_compact(value, out);
            }
            out.push('}');
        }
        Node::List(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_compact(item, out);
            }
            out.push(']');
        }
    }
}

/// The lines of a node printed with an indent of one space; the first continues the line it stands in.
fn write_lines(node: &Node, depth: usize, out: &mut String) {
    let indent = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', depth));
    };
    match node {
        Node::Object(fields) if !fields.is_empty() => {
            out.push('{');
            for (index, (name, value)) in fields.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                indent(out, depth + 1);
                let _ = write!(out, "{name:?}: ");
                write_lines(value, depth + 1, out);
            }
            indent(out, depth);
            out.push('}');
        }
        Node::List(items) if !items.is_empty() => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                indent(out, depth + 1);
                write_lines(item, depth + 1, out);
            }
            indent(out, depth);
            out.push(']');
        }
        other => write_compact(other, out),
    }
}

/// A value in one line, as error messages show it.
pub fn compact(layout: &str, value: &Value) -> String {
    let mut out = String::new();
    write_compact(&structure(layout, value), &mut out);
    out
}

/// A list of values in one line.
pub fn compact_list(layout: &str, values: &[Value]) -> String {
    let items: Vec<String> = values.iter().map(|v| compact(layout, v)).collect();
    format!("[{}]", items.join(","))
}

fn lines(layout: &str, value: &Value) -> String {
    let mut out = String::new();
    write_lines(&structure(layout, value), 0, &mut out);
    out
}

/// A claim's specification, over many lines.
pub fn claim_spec(spec: &Value) -> String {
    lines("PersistentVolumeClaimSpec", spec)
}

/// Where a PersistentVolume is, over many lines.
pub fn volume_source(source: &Value) -> String {
    lines("PersistentVolumeSource", source)
}

/// A pod's specification, over many lines.
pub fn pod_spec(spec: &Value) -> String {
    lines("PodSpec", &internal_pod_spec(spec))
}

/// An ephemeral container, over many lines.
pub fn ephemeral_container(container: &Value) -> String {
    lines("EphemeralContainer", container)
}

/// A pod's specification in one line.
pub fn pod_spec_in_line(spec: &Value) -> String {
    compact("PodSpec", &internal_pod_spec(spec))
}

/// A template of pods in one line.
pub fn pod_template(template: &Value) -> String {
    let mut template = template.clone();
    let spec = internal_pod_spec(&template["spec"]);
    ensure_object(&mut template, "spec");
    template["spec"] = spec;
    compact("PodTemplateSpec", &template)
}

/// The internal form keeps a specification's settings of host namespaces in the security context.
fn internal_pod_spec(spec: &Value) -> Value {
    let mut spec = spec.clone();
    for key in ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "hostUsers"] {
        if let Some(value) = remove(&mut spec, key) {
            ensure_object(&mut spec, "securityContext")[key] = value;
        }
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn what_is_not_set_is_spelled_out() {
        for (layout, value, text) in [
            (
                "Toleration",
                json!({"key": "a", "operator": "Exists"}),
                r#"{"Key":"a","Operator":"Exists","Value":"","Effect":"","TolerationSeconds":null}"#,
            ),
            (
                "StatefulSetUpdateStrategy",
                json!({"type": "x", "rollingUpdate": {"partition": 1}}),
                r#"{"Type":"x","RollingUpdate":{"Partition":1,"MaxUnavailable":null}}"#,
            ),
        ] {
            assert_eq!(compact(layout, &value), text);
        }
        let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"hostNetwork": true}});
        let text = pod_template(&template);
        assert!(text.starts_with(r#"{"labels":{"a":"b"},"Spec":{"Volumes":null,"#), "{text}");
        assert!(text.contains(r#""SecurityContext":{"HostNetwork":true,"HostPID":false"#), "{text}");
    }

    #[test]
    fn every_shape_is_known() {
        for (layout, fields) in &*LAYOUTS {
            for field in fields {
                let name = field.shape.trim_start_matches(['?', '~', '[', ']']);
                let known =
                    matches!(name, "s" | "i" | "b" | "n" | "p" | "o" | "m") || LAYOUTS.contains_key(name);
                assert!(known, "{layout}.{} is {}", field.name, field.shape);
            }
        }
    }

    #[test]
    fn a_change_is_shown_with_its_surroundings() {
        let claim = |mode: &str| {
            claim_spec(
                &json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "volumeMode": mode}),
            )
        };
        let expected = "@@ -11,7 +11,7 @@\n  },\n  \"VolumeName\": \"\",\n  \"StorageClassName\": null,\n- \"VolumeMode\": \"Filesystem\",\n+ \"VolumeMode\": \"Block\",\n  \"DataSource\": null,\n  \"DataSourceRef\": null,\n  \"VolumeAttributesClassName\": null\n";
        assert_eq!(diff(&claim("Filesystem"), &claim("Block")), expected);
    }
}
