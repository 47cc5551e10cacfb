//! The kinds that the server serves: where a target's scale and an object's metrics are.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrite_json::Value;
use kube::Client;
use tokio::time::Instant;

use crate::discovery;

/// The version of the custom metrics API to speak, the better one first.
const CUSTOM_VERSIONS: &[&str] = &["v1beta2", "v1beta1"];
pub(crate) const CUSTOM_METRICS: &str = "custom.metrics.k8s.io";

/// One version of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) group: String,
    pub(crate) version: String,
    pub(crate) plural: String,
    pub(crate) has_scale: bool,
}

impl Mapping {
    /// The resource as a path below another API names it, and as errors do.
    pub(crate) fn group_resource(&self) -> String {
        match self.group.as_str() {
            "" => self.plural.clone(),
            group => format!("{}.{group}", self.plural),
        }
    }

    /// Where objects of a namespace are.
    pub(crate) fn path(&self, namespace: &str) -> String {
        let Self { group, version, plural, .. } = self;
        match group.as_str() {
            "" => format!("/api/{version}/namespaces/{namespace}/{plural}"),
            group => format!("/apis/{group}/{version}/namespaces/{namespace}/{plural}"),
        }
    }
}

/// Every kind by group and name, with its versions in the order that the server prefers.
#[derive(Debug, Default)]
pub(crate) struct Kinds {
    by_kind: BTreeMap<(String, String), Vec<Mapping>>,
    custom_metrics: Option<&'static str>,
}

impl Kinds {
    /// The mapping of a kind in one version.
    pub(crate) fn mapping(&self, group: &str, version: &str, kind: &str) -> Option<&Mapping> {
        self.mappings(group, kind).iter().find(|mapping| mapping.version == version)
    }

    pub(crate) fn mappings(&self, group: &str, kind: &str) -> &[Mapping] {
        self.by_kind.get(&(group.to_owned(), kind.to_owned())).map_or(&[], Vec::as_slice)
    }

    /// The version of the custom metrics API that is served, if any.
    pub(crate) fn custom_metrics(&self) -> Option<&'static str> {
        self.custom_metrics
    }

    /// Reads lists of aggregated discovery.
    pub(crate) fn of(lists: &[Value]) -> Self {
        let mut kinds = Self::default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        for list in lists {
            for item in array(&list["items"]) {
                let group = text(&item["metadata"]["name"]);
                for entry in array(&item["versions"]) {
                    let version = text(&entry["version"]);
                    if group == CUSTOM_METRICS {
                        let rank = |version: &str| CUSTOM_VERSIONS.iter().position(|known| *known == version);
                        let better = rank(&version)
                            .filter(|new| kinds.custom_metrics.and_then(rank).is_none_or(|old| *new < old));
                        kinds.custom_metrics =
                            better.map_or(kinds.custom_metrics, |at| Some(CUSTOM_VERSIONS[at]));
                        continue;
                    }
                    for resource in array(&entry["resources"]) {
                        let kind = text(&resource["responseKind"]["kind"]);
                        let parts = array(&resource["subresources"]);
                        let mapping = Mapping {
                            group: group.clone(),
                            version: version.clone(),
                            plural: text(&resource["resource"]),
                            has_scale: parts.iter().any(|part| part["subresource"] == "scale"),
                        };
                        kinds.by_kind.entry((group.clone(), kind)).or_default().push(mapping);
                    }
                }
            }
        }
        kinds
    }
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], |items| items.as_slice())
}

/// The kinds as they were not long ago.
pub(crate) struct Discovery {
    client: Client,
    /// As upstream: kinds are looked up anew in every sync period.
    keep: Duration,
    known: Mutex<Option<(Instant, Arc<Kinds>)>>,
}

impl Discovery {
    pub(crate) fn new(client: Client, keep: Duration) -> Self {
        Self { client, keep, known: Mutex::new(None) }
    }

    pub(crate) async fn kinds(&self) -> Result<Arc<Kinds>, kube::Error> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, kinds)) = known.filter(|(at, _)| at.elapsed() < self.keep) {
            return Ok(kinds);
        }
        let kinds = Arc::new(Kinds::of(&discovery::documents(&self.client).await?));
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((Instant::now(), Arc::clone(&kinds)));
        Ok(kinds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn kinds_are_found_with_their_versions_in_order() {
        let resource = |name: &str, kind: &str, scales: bool| {
            let parts =
                if scales { json!([{"subresource": "status"}, {"subresource": "scale"}]) } else { json!([]) };
            json!({"resource": name, "responseKind": {"kind": kind}, "subresources": parts})
        };
        let core = json!({"items": [{"metadata": {}, "versions": [
            {"version": "v1", "resources": [resource("replicationcontrollers", "ReplicationController", true)]}]}]});
        let groups = json!({"items": [
            {"metadata": {"name": "a.example"}, "versions": [
                {"version": "v2", "resources": [resource("widgets", "Widget", true)]},
                {"version": "v1", "resources": [resource("widgets", "Widget", false), 7]}]},
            {"metadata": {"name": CUSTOM_METRICS}, "versions": [
                {"version": "v1beta1", "resources": []}, {"version": "v1beta2"}, {"version": "v9"}]},
            "nonsense"]});
        let kinds = Kinds::of(&[core, groups]);
        let widgets = kinds.mappings("a.example", "Widget");
        assert_eq!(
            widgets.iter().map(|m| (&*m.version, m.has_scale)).collect::<Vec<_>>(),
            [("v2", true), ("v1", false)]
        );
        assert_eq!(widgets[0].path("ns"), "/apis/a.example/v2/namespaces/ns/widgets");
        assert_eq!(widgets[0].group_resource(), "widgets.a.example");
        let controllers = kinds.mappings("", "ReplicationController");
        assert_eq!(controllers[0].path("ns"), "/api/v1/namespaces/ns/replicationcontrollers");
        assert_eq!(kinds.custom_metrics(), Some("v1beta2"));
        assert!(kinds.mappings("", "Widget").is_empty());
        assert_eq!(Kinds::of(&[]).custom_metrics(), None);
    }
}
