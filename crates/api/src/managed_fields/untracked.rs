//! Merges without owners: the configurations that a mutating admission policy applies.

use super::field_set::PathElement;
use super::node::Node;
use super::{ApplyError, Writer, validate, validate_custom, walk};
use crate::custom::Schema;
use crate::schema::TypeRef;
use ferrite_json::Value;
use jiff::Timestamp;
use thiserror::Error;

/// Why a patch cannot be merged, in upstream's words.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MergeError {
    /// The patch does not fit the schema.
    #[error("failed to convert patch object to typed object: {0}")]
    Typed(String),
    #[error("invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: {}", .0.join(", "))]
    Atomic(Vec<String>),
}

/// Merges `patch` into `live` as an apply does, without managers. Refuses a patch that would replace atomic parts: its
/// author may not know that the fields it does not name are lost.
pub fn merge(
    type_: Option<TypeRef>,
    custom: Option<&Schema>,
    live: &Value,
    patch: &Value,
) -> Result<Value, MergeError> {
    let checked = match (type_, custom) {
        (Some(type_), _) => validate(type_, patch, ""),
        (None, Some(schema)) => validate_custom(schema, patch, ""),
        (None, None) => Ok(()),
    };
    checked.map_err(|error| {
        MergeError::Typed(match error {
            ApplyError::Typed { problems, .. } => problems,
            other => other.to_string(),
        })
    })?;
    let writer = Writer {
        type_,
        custom,
        api_version: "",
        stored: None,
        others: None,
        manager: "",
        subresource: "",
        ignored: &[],
        now: Timestamp::UNIX_EPOCH,
    };
    let root = Node::root(&writer);
    let mut nulls = Vec::new();
    find_nulls(root, patch, "", &mut nulls);
    if let Some(first) = nulls.into_iter().next() {
        return Err(MergeError::Typed(first));
    }
    let mut atomic = Vec::new();
    find_atomic(root, patch, "", &mut atomic);
    if !atomic.is_empty() {
        return Err(MergeError::Atomic(atomic));
    }
    Ok(walk::merge(root, Some(live), Some(patch)).unwrap_or_else(|| live.clone()))
}

/// Finds the maps and lists that a patch sets to null. As upstream: null is a value of an expression, and no map or list.
fn find_nulls(node: Node<'_>, value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Null if node.is_map() => found.push(format!("{path}: expected map, got &{{NULL_VALUE}}")),
        Value::Null if node.is_list() => found.push(format!("{path}: expected list, got &{{NULL_VALUE}}")),
        Value::Object(members) => {
            for (name, value) in members {
                let step = PathElement::Field(name.clone());
                find_nulls(node.member(name), value, &format!("{path}{step}"), found);
            }
        }
        _ => {}
    }
}

/// Finds the atomic maps and lists that a patch has. As upstream: only fields of structs are looked into, not entries
/// of maps.
fn find_atomic(node: Node<'_>, value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            if !node.is_map() {
                found.push(path.to_owned());
                return;
            }
            for (name, value) in members.iter().filter(|(name, _)| node.declares(name)) {
                let step = PathElement::Field(name.clone());
                find_atomic(node.member(name), value, &format!("{path}{step}"), found);
            }
        }
        Value::Array(items) => {
            if !node.is_list() {
                found.push(path.to_owned());
                return;
            }
            for (index, value) in items.iter().enumerate() {
                find_atomic(node.element(), value, &format!("{path}[{index}]"), found);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn patches_are_merged_as_an_apply_merges() {
        let type_ = crate::schema::kind("apps", "v1", "Deployment");
        let live = json!({"spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "a", "image": "x"}]}}}});
        let merged = |patch: Value| merge(type_, None, &live, &patch);
        let patch = json!({"metadata": {"labels": {"l": "v"}}, "spec": {"template": {"spec": {"containers": [
            {"name": "b", "image": "y"}, {"name": "a", "env": [{"name": "E", "value": "1"}]}]}}}});
        assert_eq!(
            merged(patch),
            Ok(
                json!({"metadata": {"labels": {"l": "v"}}, "spec": {"replicas": 1, "template": {"spec": {"containers": [
                {"name": "b", "image": "y"}, {"name": "a", "image": "x", "env": [{"name": "E", "value": "1"}]}]}}}})
            ),
        );
        let containers =
            |container: Value| json!({"spec": {"template": {"spec": {"containers": [container]}}}});
        let refused = [
            (
                json!({"spec": {"nothing": 1}}),
                "failed to convert patch object to typed object: .spec.nothing: field not declared in schema",
            ),
            (
                containers(json!({"name": "a", "args": ["x"], "command": ["y"]})),
                "invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: .spec.template.spec.containers[0].args, .spec.template.spec.containers[0].command",
            ),
            (
                json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "u"}]}}),
                "invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: .metadata.ownerReferences[0]",
            ),
            (
                json!({"metadata": {"labels": null}}),
                "failed to convert patch object to typed object: .metadata.labels: expected map, got &{NULL_VALUE}",
            ),
            (
                json!({"spec": {"selector": {"matchLabels": {"a": "b"}}}}),
                "invalid ApplyConfiguration: may not mutate atomic arrays, maps or structs: .spec.selector",
            ),
        ];
        for (patch, expected) in refused {
            assert_eq!(merged(patch).unwrap_err().to_string(), expected);
        }
    }
}
