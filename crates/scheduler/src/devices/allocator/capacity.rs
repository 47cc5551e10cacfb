//! Consumable capacity: the amounts that a request takes of a device, alone or beside other shares.

use std::collections::BTreeMap;

use ferrite_api::quantity::{Format, Quantity};

use super::Amounts;
use super::inventory::{Capacity, Device, Policy, Range};

/// The amounts that the request takes of the device's capacities.
pub(super) fn consumed(requested: &Amounts, capacities: &BTreeMap<String, Capacity>) -> Amounts {
    capacities
        .iter()
        .map(|(name, capacity)| (name.clone(), consumed_of(requested.get(name).copied(), capacity)))
        .collect()
}

/// A request that names no amount gets the default, or everything.
fn consumed_of(requested: Option<Quantity>, capacity: &Capacity) -> Quantity {
    let policy = capacity.policy.as_ref();
    let Some(requested) = requested else {
        return policy.and_then(|policy| policy.default).unwrap_or(capacity.value);
    };
    match policy {
        Some(Policy { range: Some(range), .. }) => round_up(requested, range),
        Some(Policy { values, .. }) if !values.is_empty() => {
            values.iter().copied().find(|value| requested <= *value).unwrap_or(requested)
        }
        _ => requested,
    }
}

/// A step of zero is none; the API refuses it.
fn step_of(range: &Range) -> Option<i128> {
    range.step.map(|step| i128::from(step.value())).filter(|step| *step > 0)
}

fn round_up(requested: Quantity, range: &Range) -> Quantity {
    if requested < range.min {
        return range.min;
    }
    let Some(step) = step_of(range) else { return requested };
    let min = i128::from(range.min.value());
    let above = i128::from(requested.value()) - min;
    let rounded = min + (above + step - 1).div_euclid(step) * step;
    Quantity::from_value(i64::try_from(rounded).unwrap_or(i64::MAX), Format::BinarySi)
}

fn is_allowed(amount: Quantity, policy: &Policy) -> bool {
    if policy.default == Some(amount) {
        return true;
    }
    if let Some(range) = &policy.range {
        let above = i128::from(amount.value()) - i128::from(range.min.value());
        return range.max.is_none_or(|max| amount <= max)
            && step_of(range).is_none_or(|step| above.rem_euclid(step) == 0);
    }
    policy.values.is_empty() || policy.values.contains(&amount)
}

/// True if the device has room for the request beside the amounts in `taken`.
pub(super) fn has_room(device: &Device, requested: &Amounts, taken: &[&Amounts]) -> bool {
    if requested.keys().any(|name| !device.capacity.contains_key(name)) {
        return false;
    }
    device.capacity.iter().all(|(name, capacity)| {
        let own = consumed_of(requested.get(name).copied(), capacity);
        if capacity.policy.as_ref().is_some_and(|policy| !is_allowed(own, policy)) {
            return false;
        }
        let taken = taken.iter().filter_map(|amounts| amounts.get(name)).fold(own, |sum, more| sum + *more);
        taken <= capacity.value
    })
}
