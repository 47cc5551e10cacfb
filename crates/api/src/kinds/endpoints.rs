//! Endpoints, the older form of EndpointSlices.

use super::access::{default_text, list, list_mut, text};
use super::{NAME, shown};
use crate::resource::{Column, Strategy};
use crate::table::{NONE, age};
use jiff::Timestamp;
use serde_json::Value;

/// Addresses shown before the rest is only counted.
pub(super) const SHOWN: usize = 3;

pub(super) struct Endpoints;

impl Strategy for Endpoints {
    fn default(&self, object: &mut Value) {
        for subset in list_mut(object, "subsets") {
            for port in list_mut(subset, "ports") {
                default_text(port, "protocol", "TCP");
            }
        }
    }

    fn columns(&self) -> &'static [Column] {
        const { &[NAME, shown("Endpoints"), shown("Age")] }
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        vec![crate::meta::name(object).into(), addresses_cell(object).into(), age(object, now).into()]
    }

    fn create_on_update(&self) -> bool {
        true
    }
}

fn addresses_cell(endpoints: &Value) -> String {
    let subsets = list(endpoints, "subsets");
    if subsets.is_empty() {
        return NONE.to_owned();
    }
    let mut all = Vec::new();
    for subset in subsets {
        let addresses = || list(subset, "addresses").iter().map(|a| text(a, "ip"));
        let ports = list(subset, "ports");
        if ports.is_empty() {
            all.extend(addresses().map(str::to_owned));
        }
        for port in ports {
            let port = super::access::int(port, "port");
            all.extend(
                addresses().map(|ip| {
                    if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") }
                }),
            );
        }
    }
    first_few(&all)
}

/// The first few entries, and how many more there are.
pub(super) fn first_few(all: &[String]) -> String {
    let shown = all[..all.len().min(SHOWN)].join(",");
    match all.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} + {more} more..."),
    }
}
