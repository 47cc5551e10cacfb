//! Selectors of devices: compiled when they are written, to refuse those that cannot work.

use super::claim::EXPRESSION_MAX;
use crate::field::{FieldError, FieldErrors, Path};
use ferrite_cel::{DeviceSelector, DeviceSelectorError, limits};

/// Checks the expression of a selector, whose field is at `path`.
pub(super) fn validate(expression: &str, path: &Path) -> FieldErrors {
    if expression.len() > EXPRESSION_MAX {
        return vec![FieldError::too_long(path, EXPRESSION_MAX)];
    }
    let selector = match DeviceSelector::compile(expression) {
        Ok(selector) => selector,
        Err(error @ DeviceSelectorError::Program(_)) => {
            return vec![FieldError::internal(path, error.to_string())];
        }
        Err(error) => return vec![FieldError::invalid(path, expression, error.to_string())],
    };
    match selector.estimated_cost() {
        Some(cost) if cost.max > limits::DEVICE_SELECTOR => {
            vec![FieldError::forbidden(path, "too complex, exceeds cost limit")]
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_refused_in_upstreams_words() {
        let rows = [
            (r#"device.driver == "d""#, None),
            (r#"device.attributes["dra.example.com"].healthy"#, None),
            (r#"device.capacity["dra.example.com"].memory.isGreaterThan(quantity("1Gi"))"#, None),
            (r#"cel.bind(dra, device.attributes["d.example"], dra.a == "x" && dra.b)"#, None),
            ("device.allowMultipleAllocations", None),
            (
                "device.bogus",
                Some(
                    "compilation failed: ERROR: <input>:1:7: undefined field 'bogus'\n | device.bogus\n | ......^",
                ),
            ),
            (
                "other",
                Some(
                    "compilation failed: ERROR: <input>:1:1: undeclared reference to 'other' (in container '')\n | other\n | ^",
                ),
            ),
            ("-1", Some("must evaluate to bool or the unknown type, not int")),
        ];
        for (expression, expected) in rows {
            let errors = validate(expression, &Path::new("expression"));
            match expected {
                None => assert!(errors.is_empty(), "{expression}: {errors:?}"),
                Some(expected) => {
                    let found = errors[0].to_string();
                    assert!(found.contains(expected), "{expression}: {found}");
                }
            }
        }
        let deep = r#"device.attributes.all(a, device.attributes.all(b, device.attributes.all(c, device.attributes.all(d, device.attributes[a].e == "x"))))"#;
        let errors = validate(deep, &Path::new("expression"));
        assert!(errors[0].to_string().contains("too complex, exceeds cost limit"), "{errors:?}");
    }
}
