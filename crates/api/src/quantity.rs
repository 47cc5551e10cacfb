//! Quantities in objects.

pub use ferrite_quantity::{Format, Quantity, QuantityError, is_plainly_canonical};

use ferrite_json::Value;

/// Rewrites the quantity at `value` in canonical form; numbers, which clients may send, become strings.
/// Other values are left for validation to refuse.
pub fn canonicalise(value: &mut Value) {
    let parsed = match &*value {
        Value::String(text) if is_plainly_canonical(text) => return,
        Value::String(text) => Quantity::parse(text),
        Value::Number(number) => Quantity::parse(&number.to_string()),
        _ => return,
    };
    if let Ok(quantity) = parsed {
        *value = quantity.to_string().into();
    }
}

/// Rewrites the quantities at `places`, each a path of keys in which `*` stands for every key or element:
/// `["spec", "containers", "*", "resources", "limits", "*"]`.
pub fn canonicalise_at(object: &mut Value, places: &[&[&str]]) {
    for place in places {
        visit(object, place);
    }
}

fn visit(value: &mut Value, path: &[&str]) {
    let Some((step, rest)) = path.split_first() else {
        canonicalise(value);
        return;
    };
    match value {
        Value::Array(items) if *step == "*" => items.iter_mut().for_each(|item| visit(item, rest)),
        Value::Object(map) if *step == "*" => map.values_mut().for_each(|item| visit(item, rest)),
        Value::Object(map) => {
            if let Some(item) = map.get_mut(*step) {
                visit(item, rest);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_rewritten_and_others_left() {
        let mut object = ferrite_json::json!({"spec": {"list": [{"limits": {"cpu": 0.5, "memory": "1024Ki"}}],
            "other": "1000m"}});
        canonicalise_at(&mut object, &[&["spec", "list", "*", "limits", "*"], &["spec", "absent"]]);
        let expected = ferrite_json::json!({"spec": {"list": [{"limits": {"cpu": "500m", "memory": "1Mi"}}],
            "other": "1000m"}});
        assert_eq!(object, expected);
    }
}
