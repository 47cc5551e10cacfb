//! The quota usage of an object of each resource.

use super::amounts::{Amounts, Side, amounts, list, present_total};
use super::limited::Limited;
use super::scopes;
use crate::kinds::core::pod::resources::is_native;
use crate::quantity::{Format, Quantity};
use ferrite_json::{Text, Value};
use std::collections::BTreeMap;

/// The rules for counting objects of one resource.
#[derive(Debug, Clone)]
pub struct Evaluator {
    /// `count/<plural>.<group>`
    count: String,
    /// Core resources that quotas know by their plain names too.
    plain: Option<&'static str>,
    rules: Option<&'static Rules>,
}

#[derive(Debug)]
struct Rules {
    group: &'static str,
    plural: &'static str,
    /// The usage of an object beside its count.
    usage: fn(&Value, &mut Amounts),
    /// Returns true if a quota's key is about this resource.
    tracks: fn(&str) -> bool,
    /// Returns true if a scope of a quota covers the object.
    in_scope: fn(&scopes::Scope, &Value) -> bool,
    /// The subresources whose updates count, with the empty one for the object itself.
    updates: &'static [&'static str],
    /// Returns true if an update moves the object from one scope to another.
    changes_scope: fn(&Value, &Value) -> bool,
}

const RULES: &[Rules] = &[
    Rules {
        group: "",
        plural: "pods",
        usage: pod_usage,
        tracks: pod_tracks,
        in_scope: scopes::pod_in_scope,
        updates: &["resize"],
        changes_scope: |old, new| scopes::is_terminating(old) != scopes::is_terminating(new),
    },
    Rules {
        group: "",
        plural: "services",
        usage: service_usage,
        tracks: |name| matches!(name, "services.nodeports" | "services.loadbalancers"),
        in_scope: |_, _| false,
        updates: &[""],
        changes_scope: |_, _| false,
    },
    Rules {
        group: "",
        plural: "persistentvolumeclaims",
        usage: claim_usage,
        tracks: |name| name == "requests.storage" || name.contains(CLASS),
        in_scope: scopes::claim_in_scope,
        updates: &[""],
        changes_scope: |_, _| false,
    },
    Rules {
        group: "resource.k8s.io",
        plural: "resourceclaims",
        usage: device_usage,
        tracks: |name| name.ends_with(DEVICES),
        in_scope: |_, _| false,
        updates: &[""],
        changes_scope: |_, _| false,
    },
];

/// Core resources that quotas know by their plain names.
const PLAIN: [&str; 7] = [
    "configmaps",
    "persistentvolumeclaims",
    "pods",
    "replicationcontrollers",
    "resourcequotas",
    "secrets",
    "services",
];

const CLASS: &str = ".storageclass.storage.k8s.io/";
const DEVICES: &str = ".deviceclass.resource.k8s.io/devices";

/// Under which key quotas count the objects of a resource.
pub(super) fn count_key(group: &str, plural: &str) -> String {
    match group {
        "" => format!("count/{plural}"),
        group => format!("count/{plural}.{group}"),
    }
}

/// The rules for counting objects of a namespaced resource. None for resources that are not counted.
pub fn evaluator(group: &str, plural: &str) -> Option<Evaluator> {
    // As upstream: events come and go by themselves, and reviews are never stored.
    let passing = plural == "events" && matches!(group, "" | "events.k8s.io");
    if passing || matches!(group, "authentication.k8s.io" | "authorization.k8s.io") {
        return None;
    }
    let plain = PLAIN.into_iter().find(|name| group.is_empty() && *name == plural);
    let rules = RULES.iter().find(|rules| rules.group == group && rules.plural == plural);
    Some(Evaluator { count: count_key(group, plural), plain, rules })
}

impl Evaluator {
    /// Returns true if an update of the object, or of one of its subresources, may change its usage.
    pub fn counts_updates(&self, subresource: Option<&str>) -> bool {
        self.rules.is_some_and(|rules| rules.updates.contains(&subresource.unwrap_or_default()))
    }

    /// Returns true if an update from `old` to `new` has to be counted.
    pub fn counts_update(&self, subresource: Option<&str>, old: Option<&Value>, new: &Value) -> bool {
        let changes_scope =
            || self.rules.is_some_and(|rules| old.is_some_and(|old| (rules.changes_scope)(old, new)));
        self.counts_updates(subresource) || (subresource.is_none() && changes_scope())
    }

    /// Returns true if a quota's key is about this resource.
    pub fn tracks(&self, name: &str) -> bool {
        name == self.count || self.plain == Some(name) || self.rules.is_some_and(|r| (r.tracks)(name))
    }

    /// Returns true if a quota that limits `hard` is about the object.
    pub fn matches(&self, quota: &Value, hard: &Amounts, object: &Value) -> bool {
        hard.keys().any(|name| self.tracks(name))
            && scopes::of(quota).iter().all(|scope| self.is_in(scope, object))
    }

    pub(super) fn is_in(&self, scope: &scopes::Scope, object: &Value) -> bool {
        self.rules.is_some_and(|rules| (rules.in_scope)(scope, object))
    }

    /// Returns true if the limit is about objects of this resource.
    pub(super) fn is_limited_by(&self, limited: &Limited) -> bool {
        limited.count == self.count
    }

    /// The usage of an object.
    pub fn usage(&self, object: &Value) -> Amounts {
        let mut usage = Amounts::from([(Text::from(&self.count), count(1))]);
        if let Some(plain) = self.plain {
            usage.insert(plain.into(), count(1));
        }
        if let Some(rules) = self.rules {
            (rules.usage)(object, &mut usage);
        }
        usage
    }

    /// As upstream: containers in a namespace with a quota for cpu or memory must state their amounts.
    /// Returns the missing ones.
    pub(super) fn missing(&self, tracked: &[&str], object: &Value) -> Option<String> {
        const REQUIRED: [&str; 6] =
            ["cpu", "limits.cpu", "limits.memory", "memory", "requests.cpu", "requests.memory"];
        if self.plain != Some("pods") {
            return None;
        }
        let spec = &object["spec"];
        let whole =
            computed(&amounts(&spec["resources"]["requests"]), &amounts(&spec["resources"]["limits"]));
        let mut missing: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for container in list(spec, "containers").iter().chain(list(spec, "initContainers")) {
            let side = |side: Side| amounts(&container["resources"][side.key()]);
            let says = computed(&side(Side::Requests), &side(Side::Limits));
            for name in REQUIRED.into_iter().filter(|name| tracked.contains(name)) {
                if !says.contains_key(name) && !whole.contains_key(name) {
                    missing.entry(name).or_default().push(container["name"].as_str().unwrap_or_default());
                }
            }
        }
        let texts: Vec<String> = missing
            .into_iter()
            .map(|(name, mut containers)| {
                containers.sort_unstable();
                containers.dedup();
                format!("{name} for: {}", containers.join(","))
            })
            .collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }
}

fn count(number: usize) -> Quantity {
    Quantity::from_value(i64::try_from(number).unwrap_or(i64::MAX), Format::DecimalSi)
}

fn pod_tracks(name: &str) -> bool {
    let bare = name.strip_prefix("requests.").or_else(|| name.strip_prefix("limits.")).unwrap_or(name);
    matches!(bare, "cpu" | "memory" | "ephemeral-storage")
        || (bare.starts_with("hugepages-") && !name.starts_with("limits."))
        || name.strip_prefix("requests.").is_some_and(is_extended)
}

fn is_extended(name: &str) -> bool {
    name.contains('/') && !is_native(name)
}

/// As upstream: a pod that has ended, or should have been gone by now, is only an object.
fn pod_usage(pod: &Value, usage: &mut Amounts) {
    let ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if ended || past_grace(pod) {
        usage.remove("pods");
        return;
    }
    usage.extend(computed(&present_total(pod, Side::Requests), &present_total(pod, Side::Limits)));
}

/// Returns true if the pod should be gone: as upstream, once its grace period is over a second time.
fn past_grace(pod: &Value) -> bool {
    let until = crate::meta::str(pod, "deletionTimestamp").parse::<jiff::Timestamp>();
    let grace = pod["metadata"]["deletionGracePeriodSeconds"].as_i64();
    let (Ok(until), Some(grace)) = (until, grace) else { return false };
    let until = until.checked_add(jiff::SignedDuration::from_secs(grace));
    until.is_ok_and(|until| until < jiff::Timestamp::now())
}

/// Requests and limits under the names that quotas give them.
fn computed(requests: &Amounts, limits: &Amounts) -> Amounts {
    let mut usage = Amounts::new();
    for (name, amount) in requests {
        let native = matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage");
        if native || name.starts_with("hugepages-") {
            usage.insert(name.clone(), *amount);
        }
        if native || name.starts_with("hugepages-") || is_extended(name) {
            usage.insert(format!("requests.{name}").into(), *amount);
        }
    }
    for (name, amount) in limits {
        if matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage") {
            usage.insert(format!("limits.{name}").into(), *amount);
        }
    }
    usage
}

fn service_usage(service: &Value, usage: &mut Amounts) {
    let spec = &service["spec"];
    let ports = list(spec, "ports");
    let (balancers, node_ports) = match spec["type"].as_str().unwrap_or_default() {
        "NodePort" => (0, ports.len()),
        "LoadBalancer" if spec["allocateLoadBalancerNodePorts"] == false => {
            let explicit = |port: &&Value| port["nodePort"].as_i64().is_some_and(|p| p != 0);
            (1, ports.iter().filter(explicit).count())
        }
        "LoadBalancer" => (1, ports.len()),
        _ => (0, 0),
    };
    usage.insert("services.loadbalancers".into(), count(balancers));
    usage.insert("services.nodeports".into(), count(node_ports));
}

fn claim_usage(claim: &Value, usage: &mut Amounts) {
    let class = claim
        .pointer("/metadata/annotations/volume.beta.kubernetes.io~1storage-class")
        .or_else(|| claim.pointer("/spec/storageClassName"))
        .and_then(Value::as_str)
        .filter(|class| !class.is_empty());
    if let Some(class) = class {
        usage.insert(format!("{class}{CLASS}persistentvolumeclaims").into(), count(1));
    }
    if let Some(storage) = amounts(&claim["spec"]["resources"]["requests"]).get("storage") {
        usage.insert("requests.storage".into(), *storage);
        if let Some(class) = class {
            usage.insert(format!("{class}{CLASS}requests.storage").into(), *storage);
        }
    }
}

/// The most devices one request may be given.
const ALL_DEVICES: usize = 32;

fn device_usage(claim: &Value, usage: &mut Amounts) {
    let wanted = |request: &Value| match request["allocationMode"].as_str().unwrap_or_default() {
        "All" => ALL_DEVICES,
        _ => request["count"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(1),
    };
    let mut devices: BTreeMap<String, usize> = BTreeMap::new();
    for request in list(&claim["spec"]["devices"], "requests") {
        // Of the alternatives one is given: the dearest of each class counts.
        let mut dearest: BTreeMap<&str, usize> = BTreeMap::new();
        let exactly = request.get("exactly").into_iter();
        for option in exactly.chain(list(request, "firstAvailable")) {
            let class = option["deviceClassName"].as_str().unwrap_or_default();
            let most = dearest.entry(class).or_default();
            *most = (*most).max(wanted(option));
        }
        for (class, number) in dearest {
            *devices.entry(class.to_owned()).or_default() += number;
        }
    }
    for (class, number) in devices {
        usage.insert(format!("{class}{DEVICES}").into(), count(number));
    }
}
