//! Scale: the body of a subresource, never stored.

use crate::kinds::common::access::int;
use crate::kinds::common::cell;
use crate::kinds::common::row::{NAME, number, shown};
use crate::resource::{Column, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct Scales;

impl Strategy for Scales {
    fn columns(&self) -> &'static [Column] {
        const { &[shown("Name"), number("Desired"), number("Available"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![
            cell::name(object),
            int(&object["spec"], "replicas").into(),
            int(&object["status"], "replicas").into(),
            cell::age(object, now),
        ]
    }
}

/// Scales of custom kinds. As upstream: their columns are made like those of a definition.
pub(in crate::kinds) struct CustomScales;

impl Strategy for CustomScales {
    fn columns(&self) -> &'static [Column] {
        const { &[NAME, number("Desired"), number("Available"), Column::new("Age", "date", "", 0)] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let mut cells = Scales.cells(object, now);
        // No replicas are not written, and so not found.
        if int(&object["spec"], "replicas") == 0 {
            cells[1] = Value::Null;
        }
        cells
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn scales_of_custom_kinds_have_columns_of_their_own() {
        let scale = |replicas: i64| json!({"metadata": {"name": "a"}, "spec": {"replicas": replicas}, "status": {"replicas": 0}});
        let types = |columns: &[Column]| {
            columns.iter().map(|c| format!("{}:{}", c.type_, c.format)).collect::<Vec<_>>()
        };
        assert_eq!(types(Scales.columns()), ["string:", "integer:", "integer:", "string:"]);
        assert_eq!(types(CustomScales.columns()), ["string:name", "integer:", "integer:", "date:"]);
        for (replicas, built_in, custom) in [(2, json!(2), json!(2)), (0, json!(0), json!(null))] {
            let scale = scale(replicas);
            assert_eq!(Scales.cells(&scale, Timestamp::UNIX_EPOCH)[1], built_in);
            assert_eq!(CustomScales.cells(&scale, Timestamp::UNIX_EPOCH)[1], custom);
        }
    }
}
