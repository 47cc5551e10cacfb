//! Which families a Service's addresses are of.

use ferrite_api::field::{FieldError, Path};
use ferrite_api::kinds::validate_cluster_ips;
use ferrite_json::{Value, json};
use std::fmt;

/// A family of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    /// The family of an address in its text form.
    pub fn of(address: &str) -> Self {
        if address.contains(':') { Self::V6 } else { Self::V4 }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    fn other(name: &str) -> &'static str {
        if name == "IPv4" { "IPv6" } else { "IPv4" }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

pub(super) fn text<'a>(spec: &'a Value, key: &str) -> &'a str {
    spec.get(key).and_then(Value::as_str).unwrap_or_default()
}

pub(super) fn listed(spec: &Value, key: &str) -> Vec<String> {
    let list = spec.get(key).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Returns true if a Service prefers two families and its addresses stay as they are. It neither gains nor
/// loses an address just because the cluster has changed.
pub(super) fn is_settled(spec: &Value, old: &Value) -> bool {
    let prefers = |spec: &Value, unset: bool| match spec.get("ipFamilyPolicy").and_then(Value::as_str) {
        Some(policy) => policy == "PreferDualStack",
        None => unset,
    };
    let same = |key: &str| listed(spec, key) == listed(old, key);
    prefers(spec, false)
        && prefers(old, true)
        && text(spec, "type") == text(old, "type")
        && text(spec, "clusterIP") == text(old, "clusterIP")
        && same("clusterIPs")
        && same("ipFamilies")
}

/// Decides on families and policy of a Service that has addresses or none by its own will (`None`). `cluster` are
/// the families the cluster has, the primary one first.
pub(super) fn settle(
    spec: &mut Value,
    old: Option<&Value>,
    cluster: &[Family],
) -> Result<(), Vec<FieldError>> {
    let path = Path::new("spec");
    let selects = spec.get("selector").and_then(Value::as_object).is_some_and(|s| !s.is_empty());
    // Nobody but its endpoints' author knows the families of such a Service.
    let is_free = text(spec, "clusterIP") == "None" && !selects;
    let given = spec.get("ipFamilyPolicy").and_then(Value::as_str);
    let policy = match (given, old.map(|old| text(old, "ipFamilyPolicy"))) {
        (None, Some(before)) if !before.is_empty() => before.to_owned(),
        (None, _) if is_free => "RequireDualStack".to_owned(),
        (None, _) => "SingleStack".to_owned(),
        // An empty one is none of those there are, and refused as such.
        (Some(policy), _) => policy.to_owned(),
    };
    spec["ipFamilyPolicy"] = policy.as_str().into();
    let errors = validate_cluster_ips(spec);
    if !errors.is_empty() {
        return Err(errors);
    }
    let single = policy == "SingleStack";
    let mut addresses = listed(spec, "clusterIPs");
    let mut families = listed(spec, "ipFamilies");
    let mut errors = Vec::new();
    let mut refuse_policy =
        |why: &str| errors.push(FieldError::invalid(&path.child("ipFamilyPolicy"), policy.as_str(), why));
    if let Some(old) = old {
        let (addresses_before, families_before) = (listed(old, "clusterIPs"), listed(old, "ipFamilies"));
        if single {
            // A wish for one family, said by the policy alone, drops the second of both.
            if addresses == addresses_before {
                addresses.truncate(1);
            }
            if families == families_before {
                families.truncate(1);
            }
        } else {
            let fewer = |now: &[String], before: &[String]| !now.is_empty() && now.len() < before.len();
            if fewer(&addresses, &addresses_before) {
                refuse_policy("must be 'SingleStack' to release the secondary cluster IP");
            }
            if fewer(&families, &families_before) {
                refuse_policy("must be 'SingleStack' to release the secondary IP family");
            }
        }
    }
    const BOTH: &str = "must be 'RequireDualStack' or 'PreferDualStack' when multiple";
    if single && addresses.len() == 2 {
        refuse_policy(&format!("{BOTH} cluster IPs are specified"));
    }
    if single && families.len() == 2 {
        refuse_policy(&format!("{BOTH} IP families are specified"));
    }
    let configured = |name: &str| cluster.iter().any(|family| family.as_str() == name);
    for (index, address) in addresses.iter().enumerate().take_while(|(_, a)| *a != "None") {
        let family = Family::of(address);
        if index < families.len() {
            continue;
        }
        if configured(family.as_str()) {
            families.push(family.to_string());
        } else {
            let why = format!("{family} is not configured on this cluster");
            errors.push(FieldError::invalid(&path.child("clusterIPs").index(index), json!(addresses), why));
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    if !is_free {
        if policy == "RequireDualStack" && cluster.len() < 2 {
            let why = "this cluster is not configured for dual-stack services";
            errors.push(FieldError::invalid(&path.child("ipFamilyPolicy"), policy.as_str(), why));
        }
        for (index, family) in families.iter().enumerate().filter(|(_, f)| !configured(f)) {
            let path = path.child("ipFamilies").index(index);
            errors.push(FieldError::invalid(&path, family.as_str(), "not configured on this cluster"));
        }
        if !errors.is_empty() {
            return Err(errors);
        }
    }
    if families.is_empty() {
        families.extend(cluster.first().map(Family::to_string));
    }
    if !single && families.len() == 1 && (is_free || cluster.len() == 2) {
        families.push(Family::other(&families[0]).to_owned());
    }
    spec["ipFamilies"] = families.into();
    if !addresses.is_empty() {
        spec["clusterIPs"] = addresses.into();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUAL: &[Family] = &[Family::V4, Family::V6];

    /// The families and the policy decided on, or the error.
    fn settled(spec: Value, old: Option<Value>, cluster: &[Family]) -> String {
        let mut spec = spec;
        match settle(&mut spec, old.as_ref(), cluster) {
            Ok(()) => format!("{} {}", listed(&spec, "ipFamilies").join(","), text(&spec, "ipFamilyPolicy")),
            Err(errors) => {
                errors.iter().map(|e| format!("{}: {}", e.path, e.body())).collect::<Vec<_>>().join("; ")
            }
        }
    }

    #[test]
    fn a_new_service_gets_the_families_it_asks_for() {
        let v6: &[Family] = &[Family::V6];
        let v6_first: &[Family] = &[Family::V6, Family::V4];
        for (cluster, spec, expected) in [
            (DUAL, json!({}), "IPv4 SingleStack"),
            (v6_first, json!({}), "IPv6 SingleStack"),
            (v6, json!({}), "IPv6 SingleStack"),
            (DUAL, json!({"ipFamilyPolicy": "PreferDualStack"}), "IPv4,IPv6 PreferDualStack"),
            (v6_first, json!({"ipFamilyPolicy": "PreferDualStack"}), "IPv6,IPv4 PreferDualStack"),
            (v6, json!({"ipFamilyPolicy": "PreferDualStack"}), "IPv6 PreferDualStack"),
            (
                DUAL,
                json!({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6"]}),
                "IPv6,IPv4 RequireDualStack",
            ),
            (
                v6,
                json!({"ipFamilyPolicy": "RequireDualStack"}),
                "spec.ipFamilyPolicy: Invalid value: \"RequireDualStack\": this cluster is not configured for dual-stack services",
            ),
            (DUAL, json!({"ipFamilies": ["IPv6"]}), "IPv6 SingleStack"),
            (
                v6,
                json!({"ipFamilies": ["IPv4"]}),
                "spec.ipFamilies[0]: Invalid value: \"IPv4\": not configured on this cluster",
            ),
            (
                DUAL,
                json!({"ipFamilies": ["IPv4", "IPv6"]}),
                "spec.ipFamilyPolicy: Invalid value: \"SingleStack\": must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified",
            ),
            (DUAL, json!({"clusterIP": "fd00::5", "clusterIPs": ["fd00::5"]}), "IPv6 SingleStack"),
            (
                DUAL,
                json!({"clusterIP": "fd00::5", "clusterIPs": ["fd00::5"], "ipFamilyPolicy": "PreferDualStack"}),
                "IPv6,IPv4 PreferDualStack",
            ),
            (
                DUAL,
                json!({"clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5", "fd00::5"]}),
                "spec.ipFamilyPolicy: Invalid value: \"SingleStack\": must be 'RequireDualStack' or 'PreferDualStack' when multiple cluster IPs are specified",
            ),
            (
                DUAL,
                json!({"clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5", "10.0.0.6"], "ipFamilyPolicy": "PreferDualStack"}),
                "spec.clusterIPs: Invalid value: [\"10.0.0.5\",\"10.0.0.6\"]: may specify no more than one IP for each IP family",
            ),
            (
                DUAL,
                json!({"clusterIP": "fd00::5", "clusterIPs": ["fd00::5"], "ipFamilies": ["IPv4"]}),
                "spec.clusterIPs[0]: Invalid value: \"fd00::5\": expected an IPv4 value as indicated by `ipFamilies[0]`",
            ),
            (
                v6,
                json!({"clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5"]}),
                "spec.clusterIPs[0]: Invalid value: [\"10.0.0.5\"]: IPv4 is not configured on this cluster",
            ),
            // Without a selector a headless Service may have both families on any cluster.
            (v6, json!({"clusterIP": "None", "clusterIPs": ["None"]}), "IPv6,IPv4 RequireDualStack"),
            (
                v6,
                json!({"clusterIP": "None", "clusterIPs": ["None"], "ipFamilyPolicy": "SingleStack"}),
                "IPv6 SingleStack",
            ),
            (
                v6,
                json!({"clusterIP": "None", "clusterIPs": ["None"], "ipFamilies": ["IPv4"]}),
                "IPv4,IPv6 RequireDualStack",
            ),
            (
                DUAL,
                json!({"clusterIP": "None", "clusterIPs": ["None"], "selector": {"a": "b"}}),
                "IPv4 SingleStack",
            ),
            (
                DUAL,
                json!({"clusterIP": "None", "clusterIPs": ["None"], "selector": {"a": "b"}, "ipFamilyPolicy": "PreferDualStack"}),
                "IPv4,IPv6 PreferDualStack",
            ),
        ] {
            assert_eq!(settled(spec.clone(), None, cluster), expected, "{spec}");
        }
    }

    #[test]
    fn an_update_widens_and_narrows_only_as_told() {
        let one = || json!({"clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5"], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"});
        let two = || json!({"clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5", "fd00::5"], "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack"});
        let with = |base: Value, changes: Value| {
            let mut spec = base;
            for (key, value) in changes.as_object().expect("changes") {
                spec[key] = value.clone();
            }
            spec
        };
        for (old, changes, expected) in [
            (one(), json!({"ipFamilyPolicy": "PreferDualStack"}), "IPv4,IPv6 PreferDualStack"),
            (
                one(),
                json!({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}),
                "IPv4,IPv6 RequireDualStack",
            ),
            (two(), json!({"ipFamilyPolicy": "SingleStack"}), "IPv4 SingleStack"),
            (two(), json!({"ipFamilyPolicy": null}), "IPv4,IPv6 RequireDualStack"),
            (
                two(),
                json!({"ipFamilyPolicy": "SingleStack", "clusterIPs": ["10.0.0.5"], "ipFamilies": ["IPv4"]}),
                "IPv4 SingleStack",
            ),
            (
                two(),
                json!({"clusterIPs": ["10.0.0.5"]}),
                "spec.ipFamilyPolicy: Invalid value: \"RequireDualStack\": must be 'SingleStack' to release the secondary cluster IP",
            ),
            (
                two(),
                json!({"ipFamilies": ["IPv4"]}),
                "spec.ipFamilyPolicy: Invalid value: \"RequireDualStack\": must be 'SingleStack' to release the secondary IP family",
            ),
        ] {
            assert_eq!(settled(with(old.clone(), changes.clone()), Some(old), DUAL), expected, "{changes}");
        }
        let preferring = with(two(), json!({"ipFamilyPolicy": "PreferDualStack"}));
        assert!(is_settled(&preferring, &preferring));
        assert!(!is_settled(&two(), &two()));
        assert!(!is_settled(&preferring, &two()));
    }
}
