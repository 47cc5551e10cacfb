//! What this server serves, for clients that ask: group by group, or all at once.

use crate::registry::Table;
use ferrite_api::gvk::api_version;
use ferrite_api::resource::{Resource, Scope};
use serde_json::{Value, json};

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
    groups
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
    Some(json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": api_version(group, version),
        "resources": listed,
    }))
}

fn rows<'a>(table: &'a Table, group: &'a str, version: &'a str) -> impl Iterator<Item = &'a Resource> {
    table.rows().iter().map(|r| &**r).filter(move |r| r.group == group && r.version == version)
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
        value["shortNames"] = resource.short_names.to_vec().into();
    }
    if !resource.categories.is_empty() {
        value["categories"] = resource.categories.to_vec().into();
    }
    if resource.verbs.contains(&"list") {
        value["storageVersionHash"] = storage_hash(resource).into();
    }
    value
}

/// Tells clients when the stored version of a kind changes; any stable text of it will do.
fn storage_hash(resource: &Resource) -> String {
    use base64::Engine;
    let text = format!("{}/{}/{}", resource.group, resource.version, resource.kind);
    let hash =
        text.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    base64::engine::general_purpose::STANDARD.encode(hash.to_be_bytes())
}

/// Aggregated discovery: of the core group (`/api`) or all others (`/apis`).
pub(crate) fn aggregated(table: &Table, core: bool, beta: bool) -> Value {
    let items: Vec<Value> = groups(table)
        .iter()
        .filter(|(group, _)| group.is_empty() == core)
        .map(|(group, versions)| {
            let versions: Vec<Value> = versions
                .iter()
                .map(|version| {
                    let resources: Vec<Value> =
                        rows(table, group, version).map(aggregated_resource).collect();
                    json!({"version": version, "resources": resources, "freshness": "Current"})
                })
                .collect();
            let metadata = if group.is_empty() { json!({}) } else { json!({"name": group}) };
            json!({"metadata": metadata, "versions": versions})
        })
        .collect();
    json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": if beta { "apidiscovery.k8s.io/v2beta1" } else { "apidiscovery.k8s.io/v2" },
        "metadata": {},
        "items": items,
    })
}

fn aggregated_resource(resource: &Resource) -> Value {
    let kind =
        |group: &str, version: &str, kind: &str| json!({"group": group, "version": version, "kind": kind});
    let mut value = json!({
        "resource": resource.plural,
        "responseKind": kind(&resource.group, &resource.version, &resource.kind),
        "scope": if resource.scope == Scope::Namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": resource.singular,
        "verbs": resource.verbs,
    });
    if !resource.short_names.is_empty() {
        value["shortNames"] = resource.short_names.to_vec().into();
    }
    if !resource.categories.is_empty() {
        value["categories"] = resource.categories.to_vec().into();
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
