//! ComponentStatuses: the remains of an old way to ask for the state of the control plane. Read only.

use crate::kinds::common::access::{list, text};
use crate::kinds::common::cell;
use crate::kinds::common::row::{NAME, shown};
use crate::resource::{Column, Strategy};
use ferrite_json::Value;
use jiff::Timestamp;

pub(in crate::kinds) struct ComponentStatuses;

impl Strategy for ComponentStatuses {
    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Status"), shown("Message"), shown("Error")] }
    }

    fn cells(&self, object: &Value, _now: Timestamp) -> Vec<Value> {
        let health = list(object, "conditions").iter().find(|c| text(c, "type") == "Healthy");
        let word = match health.map(|c| text(c, "status")) {
            Some("True") => "Healthy",
            Some(_) => "Unhealthy",
            None => "Unknown",
        };
        let detail = |key| health.map_or("", |c| text(c, key));
        vec![cell::name(object), word.into(), detail("message").into(), detail("error").into()]
    }
}
