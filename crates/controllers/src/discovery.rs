//! Which resources there are, as aggregated discovery lists them.
//!
//! A group whose extension API server is down is marked as stale and left out: one such server must not stop the
//! controllers that work on all resources.

use std::collections::BTreeSet;

use ferrite_client::read_document;
use ferrite_json::Value;
use kube::Client;
use kube::api::ApiResource;

use crate::error::{During, SyncError};

const ACCEPT: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
/// Far more than the resources of any cluster take.
const LARGEST: usize = 32 << 20;

/// A resource in the version the server prefers, and its verbs.
#[derive(Debug, Clone)]
pub(crate) struct Served {
    pub(crate) resource: ApiResource,
    namespaced: bool,
    verbs: Vec<String>,
}

impl Served {
    pub(crate) fn can(&self, verbs: &[&str]) -> bool {
        verbs.iter().all(|verb| self.verbs.iter().any(|known| known == verb))
    }

    pub(crate) fn is_namespaced(&self) -> bool {
        self.namespaced
    }
}

/// The result of a discovery.
#[derive(Debug, Clone, Default)]
pub(crate) struct Discovered {
    /// Every resource of a version that is not stale, once, in its preferred version.
    pub(crate) served: Vec<Served>,
    /// Versions of groups, as `group/version`, whose resources are unknown at present.
    pub(crate) stale: BTreeSet<String>,
}

impl Discovered {
    /// Upstream's error about the versions that are stale, if there are any.
    pub(crate) fn failure(&self) -> Option<String> {
        if self.stale.is_empty() {
            return None;
        }
        let failures =
            self.stale.iter().map(|version| format!("{version}: stale GroupVersion discovery: {version}"));
        let failures = failures.collect::<Vec<_>>().join(", ");
        Some(format!("unable to retrieve the complete list of server APIs: {failures}"))
    }

    /// Returns true if a version of the group is stale.
    pub(crate) fn is_stale(&self, group: &str) -> bool {
        self.stale.iter().any(|version| version.split_once('/').is_some_and(|(of, _)| of == group))
    }

    /// Reads lists of aggregated discovery.
    fn of(lists: &[Value]) -> Self {
        let mut found = Self::default();
        for list in lists {
            for item in array(&list["items"]) {
                found.add_group(item);
            }
        }
        found.served.sort_by(|a, b| {
            (&a.resource.group, &a.resource.plural).cmp(&(&b.resource.group, &b.resource.plural))
        });
        found
    }

    /// The versions come in the order of preference. As upstream: the resources that only a later version has count, too.
    fn add_group(&mut self, item: &Value) {
        let group = text(&item["metadata"]["name"]);
        let mut known: BTreeSet<&str> = BTreeSet::new();
        for entry in array(&item["versions"]) {
            let version = text(&entry["version"]);
            let api_version =
                if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
            if text(&entry["freshness"]) == "Stale" {
                self.stale.insert(api_version);
                continue;
            }
            for resource in array(&entry["resources"]) {
                let (plural, kind) = (text(&resource["resource"]), text(&resource["responseKind"]["kind"]));
                // A name with a slash would be a path of something else.
                if plural.is_empty() || plural.contains('/') || kind.is_empty() || !known.insert(plural) {
                    continue;
                }
                self.served.push(Served {
                    resource: ApiResource {
                        group: group.to_owned(),
                        version: version.to_owned(),
                        api_version: api_version.clone(),
                        kind: kind.to_owned(),
                        plural: plural.to_owned(),
                    },
                    namespaced: text(&resource["scope"]) == "Namespaced",
                    verbs: array(&resource["verbs"]).iter().map(|verb| text(verb).to_owned()).collect(),
                });
            }
        }
    }
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], |items| items.as_slice())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The lists of aggregated discovery: of the core group and of all others.
pub(crate) async fn documents(client: &Client) -> Result<[Value; 2], kube::Error> {
    let core = read_document(client, "/api", ACCEPT, LARGEST).await?;
    let groups = read_document(client, "/apis", ACCEPT, LARGEST).await?;
    Ok([core, groups])
}

/// Reads which resources the server has.
pub(crate) async fn discover(client: &Client) -> Result<Discovered, SyncError> {
    let lists = documents(client).await.during(|| "discover resources".to_owned())?;
    if lists.iter().any(|list| !list["items"].is_array()) {
        return Err(SyncError::Other("the server does not serve aggregated discovery".to_owned()));
    }
    Ok(Discovered::of(&lists))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ferrite_json::json;

    /// A resource as aggregated discovery lists it.
    pub(crate) fn listed(plural: &str, kind: &str, scope: &str, verbs: &[&str]) -> Value {
        json!({"resource": plural, "responseKind": {"kind": kind}, "scope": scope, "verbs": verbs})
    }

    pub(crate) fn found(lists: &[Value]) -> Discovered {
        Discovered::of(lists)
    }

    #[test]
    fn resources_are_found_once_and_stale_versions_are_left_out() {
        let all = ["delete", "list", "watch"];
        let core = json!({"items": [{"metadata": {}, "versions": [{"version": "v1", "freshness": "Current",
            "resources": [listed("pods", "Pod", "Namespaced", &all), listed("nodes", "Node", "Cluster", &["list"])]}]}]});
        let groups = json!({"items": [
            {"metadata": {"name": "a.example"}, "versions": [
                {"version": "v3", "freshness": "Stale", "resources": [listed("widgets", "Widget", "Namespaced", &all)]},
                {"version": "v2", "freshness": "Current", "resources": [listed("widgets", "Widget", "Namespaced", &all)]},
                {"version": "v1", "freshness": "Current", "resources": [
                    listed("widgets", "Widget", "Namespaced", &all), listed("olds", "Old", "Cluster", &all), 7,
                    listed("../x", "X", "Cluster", &all), {"resource": "kindless"}]}]},
            {"metadata": {"name": "down.example"}, "versions": [{"version": "v1", "freshness": "Stale"}]},
            "nonsense"]});
        let found = found(&[core, groups]);
        let names: Vec<_> = found
            .served
            .iter()
            .map(|s| format!("{} {} {}", s.resource.api_version, s.resource.plural, s.is_namespaced()))
            .collect();
        assert_eq!(
            names,
            ["v1 nodes false", "v1 pods true", "a.example/v1 olds false", "a.example/v2 widgets true"]
        );
        assert!(found.served[1].can(&["delete", "watch"]) && !found.served[0].can(&["delete"]));
        assert!(found.is_stale("down.example") && found.is_stale("a.example") && !found.is_stale(""));
        assert_eq!(
            found.failure().as_deref(),
            Some(
                "unable to retrieve the complete list of server APIs: \
                 a.example/v3: stale GroupVersion discovery: a.example/v3, \
                 down.example/v1: stale GroupVersion discovery: down.example/v1"
            )
        );
        assert_eq!(Discovered::of(&[]).failure(), None);
    }
}
