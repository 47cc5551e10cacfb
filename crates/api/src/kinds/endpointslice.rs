//! EndpointSlices.

use super::access::{default_field, ensure_object, list, list_mut, text};
use super::endpoints::first_few;
use super::{NAME, shown};
use crate::resource::{Column, Strategy};
use crate::table::age;
use jiff::Timestamp;
use serde_json::Value;

pub(super) struct EndpointSlices;

impl Strategy for EndpointSlices {
    fn default(&self, object: &mut Value) {
        for port in list_mut(object, "ports") {
            default_field(port, "name", "");
            default_field(port, "protocol", "TCP");
        }
        for endpoint in list_mut(object, "endpoints") {
            ensure_object(endpoint, "conditions");
        }
        for key in ["endpoints", "ports"] {
            default_field(object, key, Value::Null);
        }
    }

    fn generation_fields(&self) -> &'static [&'static str] {
        &["addressType", "endpoints", "ports"]
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("AddressType"), shown("Ports"), shown("Endpoints"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let ports: Vec<String> = list(object, "ports")
            .iter()
            .map(|p| p["port"].as_i64().map_or_else(|| "*".to_owned(), |n| n.to_string()))
            .collect();
        let addresses: Vec<String> = list(object, "endpoints")
            .iter()
            .flat_map(|e| list(e, "addresses"))
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        let or_unset = |all: &[String]| if all.is_empty() { "<unset>".to_owned() } else { first_few(all) };
        vec![
            crate::meta::name(object).into(),
            text(object, "addressType").into(),
            or_unset(&ports).into(),
            or_unset(&addresses).into(),
            age(object, now).into(),
        ]
    }
}
