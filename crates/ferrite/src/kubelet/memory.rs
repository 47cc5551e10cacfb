//! The settings of the memory manager.

use super::settings::{Settings, SettingsError};
use ferrite_api::quantity::Quantity;
use ferrite_json::{Value, json};
use ferrite_kubelet::{MemoryPolicy, NumaReservation};
use serde::Deserialize;
use std::collections::BTreeMap;

fn bad(field: &'static str, problem: impl Into<String>) -> SettingsError {
    SettingsError::Value { field, problem: problem.into() }
}

/// The reservations of a flag, as the configuration has them. None if one is no reservation.
pub(super) fn flag_reservations(text: &str) -> Option<Value> {
    let mut list = Vec::new();
    for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
        let (node, amounts) = part.split_once(':')?;
        let node: u32 = node.trim().parse().ok()?;
        let mut limits = json!({});
        for amount in amounts.split(',').map(str::trim).filter(|amount| !amount.is_empty()) {
            let (resource, amount) = amount.split_once('=')?;
            limits[resource.trim()] = json!(amount.trim());
        }
        list.push(json!({"numaNode": node, "limits": limits}));
    }
    (!list.is_empty()).then(|| json!(list))
}

pub(super) fn policy(settings: &Settings) -> Result<MemoryPolicy, SettingsError> {
    match settings.text("memoryManagerPolicy").as_str() {
        "None" => Ok(MemoryPolicy::None),
        "Static" => Ok(MemoryPolicy::Static),
        _ => Err(bad("memoryManagerPolicy", "it is neither None nor Static")),
    }
}

/// One entry of `reservedMemory`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    numa_node: u32,
    #[serde(default)]
    limits: BTreeMap<String, Value>,
}

/// Memory of each NUMA node that no container gets.
pub(super) fn reservations(settings: &Settings) -> Result<Vec<NumaReservation>, SettingsError> {
    const FIELD: &str = "reservedMemory";
    let entries: Vec<Entry> =
        ferrite_json::from_value(settings.value(FIELD)).map_err(|error| bad(FIELD, error.to_string()))?;
    let mut read: Vec<NumaReservation> = Vec::new();
    for entry in entries {
        let mut amounts = BTreeMap::new();
        for (resource, amount) in entry.limits {
            let node = entry.numa_node;
            let is_page =
                resource.strip_prefix("hugepages-").is_some_and(|size| Quantity::parse(size).is_ok());
            if resource != "memory" && !is_page {
                let problem = format!(
                    "the limit type {resource:?} for NUMA node {node} is not supported; name memory or hugepages-<size>"
                );
                return Err(bad(FIELD, problem));
            }
            let text = amount.as_str().map_or_else(|| amount.to_string(), str::to_owned);
            let amount = Quantity::parse(&text).map(|quantity| quantity.value()).unwrap_or(0);
            if amount <= 0 {
                return Err(bad(FIELD, format!("{text:?} for NUMA node {node} and {resource} is no amount")));
            }
            let known = read.iter().any(|r| r.numa_node == node && r.limits.contains_key(&resource));
            if known {
                let problem = format!("there are two values for NUMA node {node} and resource {resource:?}");
                return Err(bad(FIELD, problem));
            }
            amounts.insert(resource, amount);
        }
        read.push(NumaReservation { numa_node: entry.numa_node, limits: amounts });
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet::settings::testing::settings;

    #[test]
    fn reservations_of_files_and_flags() {
        let reservation = |numa_node, limits: &[(&str, i64)]| NumaReservation {
            numa_node,
            limits: limits.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect(),
        };
        let expected = vec![
            reservation(0, &[("memory", 1 << 30), ("hugepages-2Mi", 4 << 20)]),
            reservation(1, &[("memory", 5)]),
        ];
        let file = "[{numaNode: 0, limits: {memory: 1Gi, hugepages-2Mi: 4Mi}}, {numaNode: 1, limits: {memory: '5'}}]";
        let flag = flag_reservations("0:memory=1Gi,hugepages-2Mi=4Mi; 1:memory=5").unwrap().to_string();
        for text in [file, &flag] {
            let read = reservations(&settings(&format!("reservedMemory: {text}\n"))).unwrap();
            assert_eq!(read, expected, "{text}");
        }
        assert!(reservations(&settings("")).unwrap().is_empty());
        for text in ["", "memory=1Gi", "a:memory=1", "0:memory"] {
            assert_eq!(flag_reservations(text), None, "{text}");
        }
        for (text, part) in [
            ("[{numaNode: 0, limits: {cpu: '1'}}]", "not supported"),
            ("[{numaNode: 0, limits: {hugepages-x: '1'}}]", "not supported"),
            ("[{numaNode: 0, limits: {memory: '0'}}]", "no amount"),
            ("[{numaNode: -1, limits: {memory: '1'}}]", "invalid"),
            ("[{numaNode: 0, limits: {memory: '1'}}, {numaNode: 0, limits: {memory: '1'}}]", "two values"),
        ] {
            let said = reservations(&settings(&format!("reservedMemory: {text}\n"))).unwrap_err().to_string();
            assert!(said.contains(part), "{text}: {said}");
        }
    }

    #[test]
    fn policies() {
        assert_eq!(policy(&settings("")).unwrap(), MemoryPolicy::None);
        assert_eq!(policy(&settings("memoryManagerPolicy: Static\n")).unwrap(), MemoryPolicy::Static);
        assert!(policy(&settings("memoryManagerPolicy: static\n")).is_err());
    }
}
