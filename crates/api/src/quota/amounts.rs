//! The total amounts that a pod asks for, over all its containers.

use crate::quantity::Quantity;
use ferrite_json::{Text, Value};
use std::collections::BTreeMap;

/// Amounts by the name of the resource.
pub type Amounts = BTreeMap<Text, Quantity>;

/// The amounts of a list of resources. Invalid quantities are left to validation.
pub fn amounts(list: &Value) -> Amounts {
    let pairs = list.as_object().into_iter().flatten();
    pairs
        .filter_map(|(name, amount)| {
            let text = amount.as_str().map_or_else(|| amount.to_string(), str::to_owned);
            Some((name.clone(), Quantity::parse(&text).ok()?))
        })
        .collect()
}

/// Requests or limits of containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Requests,
    Limits,
}

impl Side {
    pub fn key(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Limits => "limits",
        }
    }
}

pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// Resources that a pod may ask for as a whole.
fn is_pod_level(name: &str) -> bool {
    matches!(name, "cpu" | "memory") || name.starts_with("hugepages-")
}

/// The most that the whole pod may use at once: its containers together, or its init containers if they
/// need more.
pub fn pod_total(spec: &Value, side: Side) -> Amounts {
    total(spec, side, &|container| amounts(&container["resources"][side.key()]))
}

/// As [`pod_total`], for a pod that may be on its way from one size to another: the larger amount of each container counts.
/// The amounts that a resize asks for do not count if the node will never do it. As upstream, the amounts of the pod as a
/// whole are those of its spec.
pub fn present_total(pod: &Value, side: Side) -> Amounts {
    let (spec, status) = (&pod["spec"], &pod["status"]);
    let infeasible = list(status, "conditions")
        .iter()
        .any(|condition| condition["type"] == "PodResizePending" && condition["reason"] == "Infeasible");
    let statuses =
        || ["containerStatuses", "initContainerStatuses"].into_iter().flat_map(|key| list(status, key));
    let runs_on = |container: &Value| {
        // As upstream: a container that only initializes is not resized.
        container["restartPolicy"] == "Always"
            || list(spec, "containers").iter().any(|other| std::ptr::eq(other, container))
    };
    total(spec, side, &|container| {
        let asked = amounts(&container["resources"][side.key()]);
        let status =
            statuses().find(|status| status["name"] == container["name"] && status["resources"].is_object());
        let Some(status) = status.filter(|_| runs_on(container)) else { return asked };
        let mut held = amounts(&status["resources"][side.key()]);
        if side == Side::Requests {
            most(&mut held, &amounts(&status["allocatedResources"]));
        }
        if !infeasible {
            most(&mut held, &asked);
        }
        held
    })
}

fn total(spec: &Value, side: Side, of: &dyn Fn(&Value) -> Amounts) -> Amounts {
    let mut total = Amounts::new();
    for container in list(spec, "containers") {
        add(&mut total, &of(container));
    }
    let mut sidecars = Amounts::new();
    let mut starting = Amounts::new();
    for container in list(spec, "initContainers") {
        let own = of(container);
        if container["restartPolicy"] == "Always" {
            add(&mut total, &own);
            add(&mut sidecars, &own);
            most(&mut starting, &sidecars);
        } else {
            let mut together = sidecars.clone();
            add(&mut together, &own);
            most(&mut starting, &together);
        }
    }
    most(&mut total, &starting);
    for (name, amount) in amounts(&spec["resources"][side.key()]) {
        if is_pod_level(&name) {
            total.insert(name, amount);
        }
    }
    for (name, amount) in amounts(&spec["overhead"]) {
        // As upstream: overhead widens a limit but makes none.
        match total.get_mut(&name) {
            Some(sum) => *sum = *sum + amount,
            None if side == Side::Requests => {
                total.insert(name, amount);
            }
            None => {}
        }
    }
    total
}

pub fn add(sum: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        let entry = sum.entry(name.clone()).or_insert(Quantity::ZERO);
        *entry = *entry + *amount;
    }
}

fn most(sum: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        let entry = sum.entry(name.clone()).or_insert(*amount);
        *entry = (*entry).max(*amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_pod_needs_what_runs_together_or_what_it_takes_to_start() {
        let cpu = |amount: &str| json!({"requests": {"cpu": amount}});
        let rows = [
            (json!({"containers": [{"resources": cpu("1")}, {"resources": cpu("500m")}]}), "1500m"),
            (
                json!({
                    "containers": [{"resources": cpu("1")}],
                    "initContainers": [{"resources": cpu("3")}],
                }),
                "3",
            ),
            (
                json!({
                    "containers": [{"resources": cpu("1")}],
                    "initContainers": [
                        {"restartPolicy": "Always", "resources": cpu("2")},
                        {"resources": cpu("2")},
                    ],
                }),
                "4",
            ),
            (json!({"containers": [{"resources": cpu("1")}], "overhead": {"cpu": "250m"}}), "1250m"),
            (json!({"containers": [{"resources": cpu("1")}], "resources": cpu("2")}), "2"),
        ];
        for (spec, expected) in rows {
            assert_eq!(pod_total(&spec, Side::Requests)["cpu"].to_string(), expected, "{spec}");
        }
        let limited = json!({"containers": [{}], "overhead": {"cpu": "1"}});
        // A size on the way to another.
        let cpu_of = |present: &str, allocated: &str, asked: &str, reason: &str| {
            let pod = json!({
                "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": asked}, "limits": {"cpu": asked}}}]},
                "status": {"conditions": [{"type": "PodResizePending", "reason": reason}], "containerStatuses": [{"name": "c",
                    "resources": {"requests": {"cpu": present}, "limits": {"cpu": present}}, "allocatedResources": {"cpu": allocated}}]},
            });
            [Side::Requests, Side::Limits].map(|side| present_total(&pod, side)["cpu"].to_string())
        };
        assert_eq!(cpu_of("1", "1", "2", ""), ["2", "2"], "growing");
        assert_eq!(cpu_of("3", "2", "2", ""), ["3", "3"], "shrinking");
        assert_eq!(cpu_of("1", "3", "2", ""), ["3", "2"], "allocated");
        assert_eq!(cpu_of("1", "1", "2", "Infeasible"), ["1", "1"], "never");
        let whole = json!({"spec": {"resources": cpu("2"), "containers": [{"name": "c"}]},
            "status": {"resources": cpu("3"), "allocatedResources": {"cpu": "3"}}});
        assert_eq!(present_total(&whole, Side::Requests)["cpu"].to_string(), "2");
        assert!(pod_total(&limited, Side::Limits).is_empty());
    }
}
