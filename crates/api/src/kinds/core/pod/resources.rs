//! The total requests of a pod, and the quality of service class that follows.

use crate::field::{FieldError, FieldErrors, Path};
use crate::kinds::common::access::{list, map, text};
use crate::kinds::common::check::{NOT_NEGATIVE, complaints};
use crate::meta_validation::{dns1123_label, qualified_name};
use crate::quantity::Quantity;
use ferrite_json::{Text, Value};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Amounts by resource name.
pub type Amounts = BTreeMap<Text, Quantity>;

/// A resource list of an object; an unreadable amount counts as nothing.
pub fn amounts(resources: &Value, kind: &str) -> Amounts {
    map(resources, kind)
        .into_iter()
        .flatten()
        .filter_map(|(name, amount)| Some((name.clone(), Quantity::parse(amount.as_str()?).ok()?)))
        .collect()
}

fn add(total: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        let sum = total.get(name).map_or(*amount, |t| *t + *amount);
        total.insert(name.clone(), sum);
    }
}

fn raise(total: &mut Amounts, other: &Amounts) {
    for (name, amount) in other {
        if total.get(name).is_none_or(|t| t < amount) {
            total.insert(name.clone(), *amount);
        }
    }
}

/// The sum of the containers' requests: those that run side by side add up; an init container needs its
/// share only while it runs, beside the sidecars started before it.
pub fn requests_of_containers(spec: &Value) -> Amounts {
    let mut total = Amounts::new();
    for container in list(spec, "containers") {
        add(&mut total, &amounts(&container["resources"], "requests"));
    }
    let mut sidecars = Amounts::new();
    let mut initial = Amounts::new();
    for container in list(spec, "initContainers") {
        let mut wanted = amounts(&container["resources"], "requests");
        if text(container, "restartPolicy") == "Always" {
            add(&mut total, &wanted);
            add(&mut sidecars, &wanted);
            wanted = sidecars.clone();
        } else {
            add(&mut wanted, &sidecars);
        }
        raise(&mut initial, &wanted);
    }
    raise(&mut total, &initial);
    total
}

/// `Guaranteed` when every container's cpu and memory are limited and requested alike, `BestEffort` when
/// none asks for any, else `Burstable`. Resources of the pod as a whole count instead of its containers'.
pub fn qos_class(spec: &Value) -> &'static str {
    let pod_level = spec.get("resources").filter(|r| r.is_object());
    let containers: Vec<&Value> = match pod_level {
        Some(resources)
            if !amounts(resources, "requests").is_empty() || !amounts(resources, "limits").is_empty() =>
        {
            vec![resources]
        }
        _ => ["containers", "initContainers"]
            .iter()
            .flat_map(|kind| list(spec, kind))
            .map(|container| &container["resources"])
            .collect(),
    };
    let (mut requests, mut limits, mut guaranteed) = ([None; 2], [None; 2], true);
    for resources in containers {
        let limited = compute_amounts(resources, "limits");
        guaranteed &= limited.iter().all(Option::is_some);
        for (total, amounts) in
            [(&mut requests, compute_amounts(resources, "requests")), (&mut limits, limited)]
        {
            for (total, amount) in total.iter_mut().zip(amounts) {
                *total = match (*total, amount) {
                    (Some(total), Some(amount)) => Some(total + amount),
                    (total, amount) => total.or(amount),
                };
            }
        }
    }
    match (requests, limits) {
        ([None, None], [None, None]) => "BestEffort",
        _ if guaranteed && requests == limits => "Guaranteed",
        _ => "Burstable",
    }
}

/// The amounts of cpu and memory; zero does not count.
fn compute_amounts(resources: &Value, kind: &str) -> [Option<Quantity>; 2] {
    ["cpu", "memory"].map(|name| {
        let amount = Quantity::parse(resources[kind][name].as_str()?).ok()?;
        (!amount.is_zero() && !amount.is_negative()).then_some(amount)
    })
}

/// Resource names that quotas know besides those of containers.
const STANDARD: &[&str] = &[
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
    "pods",
    "resourcequotas",
    "services",
    "replicationcontrollers",
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
    "storage",
    "requests.storage",
    "services.nodeports",
    "services.loadbalancers",
];

fn is_hugepages(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// Returns true if a name is one of the API's own rather than a vendor's.
pub fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}

/// Returns true if a resource may be overcommitted: not devices, nor huge pages.
pub fn may_overcommit(name: &str) -> bool {
    is_native(name) && !is_hugepages(name)
}

/// Validates the requests and limits of a container.
pub fn validate_resources(resources: &Value, claims: &HashSet<&str>, path: &Path) -> FieldErrors {
    validate_named_resources(resources, claims, path, validate_container_resource_name)
}

/// As [`validate_resources`], with the names that `validate_name` allows.
pub fn validate_named_resources(
    resources: &Value,
    claims: &HashSet<&str>,
    path: &Path,
    validate_name: fn(&str, &Path) -> FieldErrors,
) -> FieldErrors {
    let validate_amount = |name: &str, amount: Quantity, path: &Path| {
        let mut errors = validate_name(name, path);
        errors.extend(validate_amount(name, amount, path));
        errors
    };
    let mut errors = Vec::new();
    let (limits, requests) = (amounts(resources, "limits"), amounts(resources, "requests"));
    let (limits_path, requests_path) = (path.child("limits"), path.child("requests"));
    for (name, amount) in &limits {
        errors.extend(validate_amount(name, *amount, &limits_path.key(name)));
        errors.extend(indivisible_pages(name, *amount, &limits_path.key(name)));
    }
    for (name, amount) in &requests {
        errors.extend(validate_amount(name, *amount, &requests_path.key(name)));
        match limits.get(name) {
            Some(limit) if amount != limit && !may_overcommit(name) => errors.push(FieldError::invalid(
                &requests_path,
                amount.to_string(),
                format!("must be equal to {name} limit of {limit}"),
            )),
            Some(limit) if amount > limit => errors.push(FieldError::invalid(
                &requests_path,
                amount.to_string(),
                format!("must be less than or equal to {name} limit of {limit}"),
            )),
            None if !may_overcommit(name) => errors.push(FieldError::required(
                &limits_path,
                "Limit must be set for non overcommitable resources",
            )),
            _ => {}
        }
        errors.extend(indivisible_pages(name, *amount, &requests_path.key(name)));
    }
    let any = |wanted: fn(&str) -> bool| limits.keys().chain(requests.keys()).any(|name| wanted(name));
    if any(is_hugepages) && !any(|name| matches!(name, "cpu" | "memory")) {
        errors.push(FieldError::forbidden(path, "HugePages require cpu or memory"));
    }
    errors.extend(validate_claims(list(resources, "claims"), claims, &path.child("claims")));
    errors
}

/// Claims of the pod that a container uses: each whole, or some of its requests.
fn validate_claims(used: &[Value], claims: &HashSet<&str>, path: &Path) -> FieldErrors {
    const KNOWN: &str = "must be one of the names in pod.spec.resourceClaims";
    const CLAIMS_SHOWN: usize = 64;
    let mut errors = Vec::new();
    let mut names: HashSet<String> = HashSet::new();
    // The number of requests that are used of a claim.
    let mut parts: HashMap<&str, usize> = HashMap::new();
    for (index, claim) in used.iter().enumerate() {
        let path = path.index(index);
        let (name, request) = (text(claim, "name"), text(claim, "request"));
        if name.is_empty() {
            errors.push(FieldError::required(&path, ""));
            continue;
        }
        if names.contains(name) {
            errors.push(FieldError::duplicate(&path, name));
        } else {
            let mut key = name.to_owned();
            if !request.is_empty() {
                errors.extend(complaints(&path.child("request"), request, dns1123_label(request)));
                key = format!("{name}/{request}");
            }
            if names.contains(&key) {
                errors.push(FieldError::duplicate(&path, key.as_str()));
            } else if request.is_empty() {
                let parts = parts.get(name).copied().unwrap_or(0);
                errors.extend((0..parts).map(|_| FieldError::duplicate(&path, name)));
            }
            if names.insert(key) && !request.is_empty() {
                *parts.entry(name).or_default() += 1;
            }
        }
        if !claims.contains(name) {
            let mut known: Vec<&str> = claims.iter().copied().collect();
            known.sort_unstable();
            // Each error shows them.
            known.truncate(CLAIMS_SHOWN);
            let why = match known.is_empty() {
                true => format!("{KNOWN} which is empty"),
                false => format!("{KNOWN}: {}", known.join(", ")),
            };
            errors.push(FieldError::not_found(&path, name).with_detail(why));
        }
    }
    errors
}

fn validate_amount(name: &str, amount: Quantity, path: &Path) -> FieldErrors {
    let mut errors = Vec::new();
    if amount.is_negative() {
        errors.push(FieldError::invalid(path, amount.to_string(), NOT_NEGATIVE));
    }
    if !is_native(name) && !amount.is_integer() {
        errors.push(FieldError::invalid(path, amount.to_string(), "must be an integer"));
    }
    errors
}

/// Huge pages are allocated whole.
fn indivisible_pages(name: &str, amount: Quantity, path: &Path) -> Option<FieldError> {
    let size = name.strip_prefix("hugepages-")?;
    let whole = Quantity::parse(size)
        .is_ok_and(|size| size.value() > 0 && amount.value() % size.value() == 0 && !amount.is_negative());
    (!whole).then(|| {
        FieldError::invalid(
            path,
            amount.to_string(),
            format!("{amount} is not positive integer multiple of {name}"),
        )
    })
}

/// A name that is standard or has a prefix.
pub fn validate_resource_name(name: &str, path: &Path) -> FieldErrors {
    let mut errors: FieldErrors =
        qualified_name(name).into_iter().map(|p| FieldError::invalid(path, name, p)).collect();
    if errors.is_empty() && !name.contains('/') && !STANDARD.contains(&name) && !is_quota_hugepages(name) {
        errors.push(FieldError::invalid(path, name, "must be a standard resource type or fully qualified"));
    }
    errors
}

/// A name of something a container may ask for.
pub fn validate_container_resource_name(name: &str, path: &Path) -> FieldErrors {
    let mut errors = validate_resource_name(name, path);
    if !name.contains('/') {
        if !matches!(name, "cpu" | "memory" | "ephemeral-storage") && !is_hugepages(name) {
            errors.push(FieldError::invalid(path, name, "must be a standard resource for containers"));
        }
    } else if !is_native(name)
        && (name.starts_with("requests.") || !qualified_name(&format!("requests.{name}")).is_empty())
    {
        errors.push(FieldError::invalid(path, name, "doesn't follow extended resource name standard"));
    }
    errors
}

/// A resource that is not Kubernetes' own, with a name that fits into that of a quota.
pub fn is_extended_resource(name: &str) -> bool {
    !is_native(name)
        && !name.starts_with("requests.")
        && qualified_name(&format!("requests.{name}")).is_empty()
}

/// A name of something that can be limited by a quota.
pub fn validate_quota_resource_name(name: &str, path: &Path) -> FieldErrors {
    let mut errors = validate_resource_name(name, path);
    if !name.contains('/') && !is_quota_resource(name) {
        errors.push(FieldError::invalid(path, name, "must be a standard resource for quota"));
    }
    errors
}

/// Returns true if a quota knows a name without a prefix.
pub fn is_quota_resource(name: &str) -> bool {
    (STANDARD.contains(&name) && name != "storage") || is_quota_hugepages(name)
}

/// Returns true if only whole amounts of a resource make sense: objects, and resources of vendors.
pub fn is_integer_resource(name: &str) -> bool {
    const OBJECTS: &[&str] = &[
        "pods",
        "resourcequotas",
        "services",
        "replicationcontrollers",
        "secrets",
        "configmaps",
        "persistentvolumeclaims",
        "services.nodeports",
        "services.loadbalancers",
    ];
    OBJECTS.contains(&name) || (!is_native(name) && !name.starts_with("requests."))
}

fn is_quota_hugepages(name: &str) -> bool {
    is_hugepages(name) || name.starts_with("requests.hugepages-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn classes_of_service() {
        let both = json!({"cpu": "1", "memory": "1Gi"});
        for (resources, class) in [
            (json!([{}]), "BestEffort"),
            (json!([{"requests": {"example.com/x": "1"}}]), "BestEffort"),
            (json!([{"requests": {"cpu": "0"}}]), "BestEffort"),
            (json!([{"requests": {"cpu": "1"}}]), "Burstable"),
            (json!([{"limits": both, "requests": both}]), "Guaranteed"),
            (json!([{"limits": both, "requests": both}, {}]), "Burstable"),
            (json!([{"limits": both, "requests": {"cpu": "500m", "memory": "1Gi"}}]), "Burstable"),
            (json!([{"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}]), "Burstable"),
            (json!([{"limits": {"cpu": "1000m", "memory": "1024Mi"}, "requests": both}]), "Guaranteed"),
        ] {
            let containers: Vec<Value> =
                resources.as_array().unwrap().iter().map(|r| json!({"resources": r})).collect();
            assert_eq!(qos_class(&json!({"containers": containers})), class, "{resources}");
        }
    }

    #[test]
    fn init_containers_count_while_they_run() {
        let container = |cpu: &str| json!({"resources": {"requests": {"cpu": cpu}}});
        let sidecar = |cpu: &str| json!({"restartPolicy": "Always", "resources": {"requests": {"cpu": cpu}}});
        for (init, containers, cpu) in [
            (json!([]), json!([container("1"), container("2")]), "3"),
            (json!([container("5")]), json!([container("1")]), "5"),
            (json!([sidecar("1")]), json!([container("1")]), "2"),
            (json!([sidecar("1"), container("5")]), json!([container("1")]), "6"),
            (json!([container("5"), sidecar("1")]), json!([container("1")]), "5"),
        ] {
            let total = requests_of_containers(&json!({"initContainers": init, "containers": containers}));
            assert_eq!(total["cpu"].to_string(), cpu, "{init} {containers}");
        }
    }
}
