//! What kinds that make pods from a template have in common.

use super::access::{ensure_object, list, text};
use super::pod::defaults::default_spec;
use crate::selector::LabelSelector;
use crate::table::NONE;
use serde_json::Value;

/// Defaults of `spec.template`.
pub fn default_template(spec: &mut Value) {
    let template = ensure_object(spec, "template");
    ensure_object(template, "metadata");
    default_spec(ensure_object(template, "spec"));
}

/// The wide cells: names and images of the containers, and the selector.
pub fn wide_cells(spec: &Value) -> [Value; 3] {
    let containers = list(&spec["template"]["spec"], "containers");
    let join = |key: &str| containers.iter().map(|c| text(c, key)).collect::<Vec<_>>().join(",").into();
    [join("name"), join("image"), selector_cell(&spec["selector"]).into()]
}

/// A label selector in its string form.
pub fn selector_cell(selector: &Value) -> String {
    match LabelSelector::from_value(selector) {
        Ok(selector) if selector.is_empty() => NONE.to_owned(),
        Ok(selector) => selector.to_string(),
        Err(_) => "<error>".to_owned(),
    }
}
