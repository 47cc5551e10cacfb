//! Writes a combination of devices down as a claim's status has it.

use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceAllocationResult, DeviceRequestAllocationResult,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::request::ClaimPlan;
use super::search::{Chosen, Found};

pub(super) fn write(plan: &ClaimPlan<'_>, found: &Found<'_>, node: &Node) -> AllocationResult {
    let results = found.devices.iter().map(|chosen| result(plan, chosen)).collect();
    let config = configuration(plan, found);
    AllocationResult {
        devices: Some(DeviceAllocationResult {
            results: Some(results),
            config: Some(config).filter(|config| !config.is_empty()),
        }),
        node_selector: node_selector(found, node),
        allocation_timestamp: None,
    }
}

fn result(plan: &ClaimPlan<'_>, chosen: &Chosen<'_>) -> DeviceRequestAllocationResult {
    let alternative = &plan.requests[chosen.request].alternatives[chosen.alternative];
    let (device, id) = (chosen.device.spec(), &chosen.device.id);
    let consumed = chosen.consumed.iter().map(|(name, amount)| (name.clone(), Quantity(amount.to_string())));
    DeviceRequestAllocationResult {
        request: alternative.reference.clone(),
        driver: id.driver.clone(),
        pool: id.pool.clone(),
        device: id.device.clone(),
        admin_access: alternative.is_admin.then_some(true),
        tolerations: alternative.tolerations.cloned(),
        share_id: chosen.share_id.clone(),
        consumed_capacity: (!chosen.consumed.is_empty()).then(|| consumed.collect()),
        binding_conditions: device.binding_conditions.clone(),
        binding_failure_conditions: device.binding_failure_conditions.clone(),
    }
}

/// The configurations of classes, each class once, then those of the claim that apply to what was chosen.
fn configuration(plan: &ClaimPlan<'_>, found: &Found<'_>) -> Vec<DeviceAllocationConfiguration> {
    let mut all: Vec<DeviceAllocationConfiguration> = Vec::new();
    let mut classes: Vec<(Option<&str>, std::ops::Range<usize>)> = Vec::new();
    let chosen = || plan.requests.iter().zip(&found.alternatives).map(|(r, at)| &r.alternatives[*at]);
    for alternative in chosen() {
        let name = alternative.class.metadata.name.as_deref();
        if let Some((_, known)) = classes.iter().find(|(class, _)| *class == name) {
            for config in &mut all[known.clone()] {
                config.requests.get_or_insert_default().push(alternative.reference.clone());
            }
            continue;
        }
        let start = all.len();
        for config in alternative.class.spec.config.iter().flatten() {
            all.push(DeviceAllocationConfiguration {
                source: "FromClass".to_owned(),
                requests: Some(vec![alternative.reference.clone()]),
                opaque: config.opaque.clone(),
            });
        }
        classes.push((name, start..all.len()));
    }
    let of_claim = plan.claim.spec.devices.as_ref().and_then(|devices| devices.config.as_ref());
    for config in of_claim.into_iter().flatten() {
        let requests = config.requests.as_deref().unwrap_or_default();
        let applies = |name: &str| requests.iter().any(|request| request == name);
        let count = if requests.is_empty() {
            1
        } else {
            // As upstream: once for each request that it applies to.
            plan.requests
                .iter()
                .zip(chosen())
                .filter(|(r, a)| applies(r.name) || applies(&a.reference))
                .count()
        };
        for _ in 0..count {
            all.push(DeviceAllocationConfiguration {
                source: "FromClaim".to_owned(),
                requests: config.requests.clone(),
                opaque: config.opaque.clone(),
            });
        }
    }
    all
}

/// The nodes that can use all devices; `None` is every node.
fn node_selector(found: &Found<'_>, node: &Node) -> Option<NodeSelector> {
    let mut term = NodeSelectorTerm::default();
    for chosen in &found.devices {
        let (slice, device) = (chosen.device.slice(), chosen.device.spec());
        let (name, selector) = if slice.per_device_node_selection == Some(true) {
            (&device.node_name, &device.node_selector)
        } else {
            (&slice.node_name, &slice.node_selector)
        };
        if name.is_some() || device.binds_to_node == Some(true) {
            let requirement = NodeSelectorRequirement {
                key: "metadata.name".to_owned(),
                operator: "In".to_owned(),
                values: node.metadata.name.clone().map(|name| vec![name]),
            };
            let term = NodeSelectorTerm { match_fields: Some(vec![requirement]), match_expressions: None };
            return Some(NodeSelector { node_selector_terms: vec![term] });
        }
        // The API allows one term.
        if let Some(other) = selector.as_ref().and_then(|selector| selector.node_selector_terms.first()) {
            extend(&mut term.match_fields, other.match_fields.as_deref());
            extend(&mut term.match_expressions, other.match_expressions.as_deref());
        }
    }
    let has_some = term.match_fields.is_some() || term.match_expressions.is_some();
    has_some.then(|| NodeSelector { node_selector_terms: vec![term] })
}

fn extend(to: &mut Option<Vec<NodeSelectorRequirement>>, from: Option<&[NodeSelectorRequirement]>) {
    let values = |requirement: &NodeSelectorRequirement| {
        let mut values = requirement.values.clone().unwrap_or_default();
        values.sort_unstable();
        values.dedup();
        values
    };
    for requirement in from.unwrap_or_default() {
        let list = to.get_or_insert_default();
        let is_known = list.iter().any(|known| {
            known.key == requirement.key
                && known.operator == requirement.operator
                && values(known) == values(requirement)
        });
        if !is_known {
            list.push(requirement.clone());
        }
    }
}
