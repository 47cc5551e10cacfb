//! Discovery: the served resources, group by group, or all at once.

use crate::aggregation::{Aggregator, ApiServices};
use crate::negotiate::Format;
use crate::registry::ResourceMap;
use ferrite_api::gvk::api_version;
use ferrite_api::resource::{Connect, Resource, Scope};
use ferrite_json::{Value, json};
use std::collections::HashMap;

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
fn groups(table: &ResourceMap, services: &ApiServices) -> Vec<(String, Vec<String>)> {
    let local = table.rows().iter().map(|row| (&*row.group, &*row.version));
    let remote = services.all().filter(|api| api.remote.is_some() || api.mounted.is_some());
    let remote = remote.map(|api| (api.group.as_str(), api.version.as_str()));
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for (group, version) in local.chain(remote) {
        let place = *places.entry(group).or_insert(groups.len());
        match groups.get_mut(place) {
            Some((_, versions)) if versions.iter().any(|known| known == version) => {}
            Some((_, versions)) => versions.push(version.to_owned()),
            None => groups.push((group.to_owned(), vec![version.to_owned()])),
        }
    }
    services.sort(&mut groups);
    groups
}

fn group_value(group: &str, versions: &[String]) -> Value {
    let listed: Vec<Value> =
        versions.iter().map(|v| json!({"groupVersion": api_version(group, v), "version": v})).collect();
    json!({"name": group, "versions": listed, "preferredVersion": listed.first()})
}

/// `/apis`
pub(crate) fn group_list(table: &ResourceMap, services: &ApiServices) -> Value {
    let listed: Vec<Value> = groups(table, services)
        .iter()
        .filter(|(group, _)| !group.is_empty())
        .map(|(group, versions)| group_value(group, versions))
        .collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
}

/// `/apis/<group>`
pub(crate) fn group(table: &ResourceMap, services: &ApiServices, name: &str) -> Option<Value> {
    let groups = groups(table, services);
    let (group, versions) = groups.iter().find(|(group, _)| group == name && !name.is_empty())?;
    let mut value = group_value(group, versions);
    value["kind"] = "APIGroup".into();
    value["apiVersion"] = "v1".into();
    Some(value)
}

/// `/api/v1`, `/apis/<group>/<version>`
pub(crate) fn resources(table: &ResourceMap, group: &str, version: &str) -> Option<Value> {
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

fn rows<'a>(table: &'a ResourceMap, group: &str, version: &str) -> Vec<&'a Resource> {
    let mut rows: Vec<&Resource> =
        table.rows().iter().map(|r| &**r).filter(|r| r.group == group && r.version == version).collect();
    rows.sort_by(|a, b| a.plural.cmp(&b.plural));
    rows
}

/// The rows of every group and version, each list in the order of the names.
fn rows_by_version(table: &ResourceMap) -> HashMap<(&str, &str), Vec<&Resource>> {
    let mut all: HashMap<(&str, &str), Vec<&Resource>> = HashMap::new();
    for row in table.rows() {
        all.entry((&row.group, &row.version)).or_default().push(row);
    }
    all.values_mut().for_each(|rows| rows.sort_by(|a, b| a.plural.cmp(&b.plural)));
    all
}

fn texts(names: &[std::borrow::Cow<'static, str>]) -> Value {
    names.iter().map(|name| Value::from(&**name)).collect()
}

/// The verbs of a resource as documents list them.
fn verbs(resource: &Resource) -> &[&'static str] {
    resource.custom.as_ref().map_or(&*resource.verbs, |custom| custom.listed_verbs())
}

fn resource_value(resource: &Resource) -> Value {
    let mut value = json!({
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.is_namespaced(),
        "kind": resource.kind,
        "verbs": verbs(resource),
    });
    if !resource.short_names.is_empty() {
        value["shortNames"] = texts(&resource.short_names);
    }
    if !resource.categories.is_empty() {
        value["categories"] = texts(&resource.categories);
    }
    if resource.verbs.contains(&"list") && resource.hooks.connect != Some(Connect::ComponentStatus) {
        value["storageVersionHash"] = storage_hash(resource).into();
    }
    value
}

/// Kinds whose objects upstream stores in another version than the one served: group, kind, and the stored
/// version.
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
pub(crate) fn aggregated(table: &ResourceMap, aggregator: &Aggregator, core: bool) -> Value {
    let (services, discovered) = (aggregator.services(), aggregator.discovered());
    let local = rows_by_version(table);
    let items: Vec<Value> = groups(table, &services)
        .iter()
        .filter(|(group, _)| group.is_empty() == core)
        .map(|(group, versions)| {
            let versions: Vec<Value> = versions
                .iter()
                .map(|version| {
                    if let Some(mounted) = services.mounted_of(group, version) {
                        let resources = crate::aggregation::mounted::aggregated(&**mounted);
                        return json!({"version": version, "resources": resources, "freshness": "Current"});
                    }
                    let Some(remote) = services.remote_of(group, version) else {
                        let rows = local.get(&(group.as_str(), version.as_str())).into_iter().flatten();
                        let resources: Vec<Value> = rows.map(|row| aggregated_resource(row)).collect();
                        return json!({"version": version, "resources": resources, "freshness": "Current"});
                    };
                    let known = discovered.get(&(group.clone(), version.clone()));
                    let resources = known.map(|known| known.resources.clone()).unwrap_or_default();
                    let fresh = remote.available && known.is_some();
                    let freshness = if fresh { "Current" } else { "Stale" };
                    match known {
                        Some(_) => {
                            json!({"version": version, "resources": resources, "freshness": freshness})
                        }
                        None => json!({"version": version, "freshness": freshness}),
                    }
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
    // As upstream: an empty group and version stand for the resource's own.
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
        "verbs": verbs(resource),
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
