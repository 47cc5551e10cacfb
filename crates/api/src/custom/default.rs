//! Defaults of custom kinds.

use super::schema::Schema;
use ferrite_json::Value;

fn is_unset(value: &Value, schema: &Schema) -> bool {
    value.is_null() && !schema.nullable
}

/// Drops nulls where the schema allows none and has no default for them.
pub fn drop_nulls(value: &mut Value, schema: &Schema) {
    match value {
        Value::Object(map) => map.retain(|key, value| {
            let Some(below) = schema.member(key) else { return true };
            if is_unset(value, below) {
                return below.default.is_some();
            }
            drop_nulls(value, below);
            true
        }),
        Value::Array(list) => {
            let Some(items) = &schema.items else { return };
            list.iter_mut().for_each(|value| drop_nulls(value, items));
        }
        _ => {}
    }
}

/// Fills defaults. Idempotent.
pub fn fill(value: &mut Value, schema: &Schema) {
    match value {
        Value::Object(map) => {
            for (key, below) in schema.properties() {
                let Some(default) = &below.default else { continue };
                if map.get(key).is_none_or(|value| is_unset(value, below)) {
                    map.insert(key.clone(), default.clone());
                }
            }
            for (key, value) in map.iter_mut() {
                let Some(below) = schema.member(key) else { continue };
                take_default(value, below);
                fill(value, below);
            }
        }
        Value::Array(list) => {
            let Some(items) = &schema.items else { return };
            for value in list {
                take_default(value, items);
                fill(value, items);
            }
        }
        _ => {}
    }
}

/// A null of a map or a list that may not be null becomes the default.
fn take_default(value: &mut Value, schema: &Schema) {
    if is_unset(value, schema)
        && let Some(default) = &schema.default
    {
        *value = default.clone();
    }
}
