//! Scale: the body of a subresource, never stored.

use crate::kinds::common::access::int;
use crate::kinds::common::cell;
use crate::kinds::common::row::{number, shown};
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
