//! What this server serves, for clients that ask: group by group, or all at once.

use crate::negotiate::Format;
use crate::registry::Table;
use ferrite_api::gvk::api_version;
use ferrite_api::resource::{Resource, Scope};
use ferrite_json::{Value, json};

/// The media type of [`aggregated`].
/// The media type of aggregated discovery.
pub(crate) fn aggregated_type(format: Format) -> &'static str {
    match format {
        Format::Json => "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
        Format::Yaml => "application/yaml;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
        Format::Protobuf => {
            "application/vnd.kubernetes.protobuf;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
        }
    }
}

/// `/api`
pub(crate) fn core_versions(address: &str) -> Value {
    json!({
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": address}],
    })
}

/// Groups in upstream's order, each with its versions, preferred first.
fn groups(table: &Table) -> Vec<(String, Vec<String>)> {
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    for resource in table.rows() {
        let versions = match groups.iter_mut().find(|(group, _)| *group == resource.group) {
            Some((_, versions)) => versions,
            None => {
                groups.push((resource.group.to_string(), Vec::new()));
                &mut groups.last_mut().expect("pushed above").1
            }
        };
        if !versions.iter().any(|v| *v == resource.version) {
            versions.push(resource.version.to_string());
        }
    }
    groups.sort_by_key(|(group, _)| ORDER.iter().position(|g| g == group).unwrap_or(ORDER.len()));
    for (_, versions) in &mut groups {
        versions.sort_by_key(|v| std::cmp::Reverse(maturity(v)));
    }
    groups
}

/// Groups in the order of upstream's priorities; others follow.
const ORDER: &[&str] = &[
    "",
    "apiregistration.k8s.io",
    "apps",
    "events.k8s.io",
    "authentication.k8s.io",
    "authorization.k8s.io",
    "autoscaling",
    "batch",
    "certificates.k8s.io",
    "networking.k8s.io",
    "policy",
    "rbac.authorization.k8s.io",
    "storage.k8s.io",
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "scheduling.k8s.io",
    "coordination.k8s.io",
    "node.k8s.io",
    "discovery.k8s.io",
    "resource.k8s.io",
    "flowcontrol.apiserver.k8s.io",
];

/// How versions compare: stable before beta before alpha, higher numbers first.
fn maturity(version: &str) -> (u8, u32, u32) {
    let text = version.strip_prefix('v').unwrap_or(version);
    let (stage, word) = if text.contains("alpha") {
        (0, "alpha")
    } else if text.contains("beta") {
        (1, "beta")
    } else {
        (2, "beta")
    };
    let (major, minor) = text.split_once(word).unwrap_or((text, "0"));
    (stage, major.parse().unwrap_or(0), minor.parse().unwrap_or(0))
}

fn group_value(group: &str, versions: &[String]) -> Value {
    let listed: Vec<Value> =
        versions.iter().map(|v| json!({"groupVersion": api_version(group, v), "version": v})).collect();
    json!({"name": group, "versions": listed, "preferredVersion": listed.first()})
}

/// `/apis`
pub(crate) fn group_list(table: &Table) -> Value {
    let listed: Vec<Value> = groups(table)
        .iter()
        .filter(|(group, _)| !group.is_empty())
        .map(|(group, versions)| group_value(group, versions))
        .collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
}

/// `/apis/<group>`
pub(crate) fn group(table: &Table, name: &str) -> Option<Value> {
    let groups = groups(table);
    let (group, versions) = groups.iter().find(|(group, _)| group == name && !name.is_empty())?;
    let mut value = group_value(group, versions);
    value["kind"] = "APIGroup".into();
    value["apiVersion"] = "v1".into();
    Some(value)
}

/// `/api/v1`, `/apis/<group>/<version>`
pub(crate) fn resources(table: &Table, group: &str, version: &str) -> Option<Value> {
    let mut listed: Vec<Value> = Vec::new();
    for resource in rows(table, group, version) {
        listed.push(resource_value(resource));
        for sub in resource.subresources.iter() {
            let mut value = json!({
                "name": format!("{}/{}", resource.plural, sub.name),
                "singularName": "",
                "namespaced": resource.is_namespaced(),
                "kind": sub.body.map_or(&*resource.kind, |(_, _, kind)| kind),
                "verbs": sub.verbs,
            });
            if let Some((group, version, _)) = sub.body
                && (group, version) != (&*resource.group, &*resource.version)
            {
                value["group"] = group.into();
                value["version"] = version.into();
            }
            listed.push(value);
        }
    }
    if listed.is_empty() {
        return None;
    }
    let mut list = json!({
        "kind": "APIResourceList",
        "groupVersion": api_version(group, version),
        "resources": listed,
    });
    if !group.is_empty() {
        // As upstream: the core group's list does not say its own version.
        list["apiVersion"] = "v1".into();
    }
    Some(list)
}

fn rows<'a>(table: &'a Table, group: &str, version: &str) -> Vec<&'a Resource> {
    let mut rows: Vec<&Resource> =
        table.rows().iter().map(|r| &**r).filter(|r| r.group == group && r.version == version).collect();
    rows.sort_by(|a, b| a.plural.cmp(&b.plural));
    rows
}

fn texts(names: &[std::borrow::Cow<'static, str>]) -> Value {
    names.iter().map(|name| Value::from(&**name)).collect()
}

fn resource_value(resource: &Resource) -> Value {
    let mut value = json!({
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.is_namespaced(),
        "kind": resource.kind,
        "verbs": resource.verbs,
    });
    if !resource.short_names.is_empty() {
        value["shortNames"] = texts(&resource.short_names);
    }
    if !resource.categories.is_empty() {
        value["categories"] = texts(&resource.categories);
    }
    if resource.verbs.contains(&"list") && resource.kind != "ComponentStatus" {
        value["storageVersionHash"] = storage_hash(resource).into();
    }
    value
}

/// Kinds whose objects upstream stores in another version than the one served: group, kind, and what it stores.
const STORED_AS: &[(&str, &str, &str)] = &[
    ("events.k8s.io", "Event", "/v1"),
    ("autoscaling", "HorizontalPodAutoscaler", "autoscaling/v2"),
    ("admissionregistration.k8s.io", "MutatingAdmissionPolicy", "admissionregistration.k8s.io/v1beta1"),
    (
        "admissionregistration.k8s.io",
        "MutatingAdmissionPolicyBinding",
        "admissionregistration.k8s.io/v1beta1",
    ),
    ("apiextensions.k8s.io", "CustomResourceDefinition", "apiextensions.k8s.io/v1beta1"),
];

/// Tells clients when the stored version of a kind changes; the same text as upstream's, which is eight bytes of a
/// SHA-256.
fn storage_hash(resource: &Resource) -> String {
    use base64::Engine;
    let elsewhere =
        STORED_AS.iter().find(|(group, kind, _)| *group == resource.group && *kind == resource.kind);
    let text = match elsewhere {
        Some((_, kind, version)) => format!("{version}/{kind}"),
        None => format!("{}/{}/{}", resource.group, resource.storage_gvk().version, resource.kind),
    };
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    base64::engine::general_purpose::STANDARD.encode(&digest.as_ref()[..8])
}

/// Aggregated discovery: of the core group (`/api`) or all others (`/apis`).
pub(crate) fn aggregated(table: &Table, core: bool) -> Value {
    let items: Vec<Value> = groups(table)
        .iter()
        .filter(|(group, _)| group.is_empty() == core)
        .map(|(group, versions)| {
            let versions: Vec<Value> = versions
                .iter()
                .map(|version| {
                    let resources: Vec<Value> =
                        rows(table, group, version).into_iter().map(aggregated_resource).collect();
                    json!({"version": version, "resources": resources, "freshness": "Current"})
                })
                .collect();
            let metadata = if group.is_empty() { json!({}) } else { json!({"name": group}) };
            json!({"metadata": metadata, "versions": versions})
        })
        .collect();
    json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": items,
    })
}

fn aggregated_resource(resource: &Resource) -> Value {
    // As upstream: the resource's own group and version are told by saying neither.
    let kind = |group: &str, version: &str, kind: &str| {
        let own = (group, version) == (&*resource.group, &*resource.version);
        let (group, version) = if own || group.is_empty() { ("", "") } else { (group, version) };
        json!({"group": group, "version": version, "kind": kind})
    };
    let mut value = json!({
        "resource": resource.plural,
        "responseKind": kind(&resource.group, &resource.version, &resource.kind),
        "scope": if resource.scope == Scope::Namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": resource.singular,
        "verbs": resource.verbs,
    });
    if !resource.short_names.is_empty() {
        value["shortNames"] = texts(&resource.short_names);
    }
    if !resource.categories.is_empty() {
        value["categories"] = texts(&resource.categories);
    }
    let subresources: Vec<Value> = resource
        .subresources
        .iter()
        .map(|sub| {
            let (group, version, name) =
                sub.body.unwrap_or((&resource.group, &resource.version, &resource.kind));
            json!({"subresource": sub.name, "responseKind": kind(group, version, name), "verbs": sub.verbs})
        })
        .collect();
    if !subresources.is_empty() {
        value["subresources"] = subresources.into();
    }
    value
}
