//! The status of ValidatingAdmissionPolicies: type checks of their expressions against the kinds that they match.
//!
//! Schemas and resources come from the server's own documents, so that custom kinds are checked as built-in ones are, and
//! the controller works with any API server.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use ferrite_api::Gvk;
use ferrite_api::policy::param_kind;
use ferrite_api::policy::type_check::{KindType, Warning, check, kinds_to_check, type_of};
use ferrite_client::{Api, Informer, get_document, is_not_found};
use ferrite_json::{Map, Value, json};
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use kube::Client;
use kube::api::{Patch, PatchParams};

use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "validatingadmissionpolicy-status-controller";
const MANAGER: &str = "validatingadmissionpolicy-status";
const JSON: &str = "application/json";
const DISCOVERY: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

pub(crate) fn start(context: &Context) {
    let policies: Informer<ValidatingAdmissionPolicy> = context.informers.get();
    let client = context.client.clone();
    super::run(context.controller(NAME).reconciles(&policies), policies, move |policy| {
        sync(client.clone(), policy)
    });
}

/// The generation to report, if it is not reported yet.
fn decide(policy: &ValidatingAdmissionPolicy) -> Option<i64> {
    let reported = policy.status.as_ref().and_then(|status| status.observed_generation);
    policy.metadata.generation.filter(|generation| reported != Some(*generation))
}

async fn sync(client: Client, policy: Arc<ValidatingAdmissionPolicy>) -> Result<(), SyncError> {
    let (Some(observed), Some(name)) = (decide(&policy), &policy.metadata.name) else { return Ok(()) };
    let spec = ferrite_json::to_value(&policy.spec)
        .map_err(|error| SyncError::Other(format!("cannot read the policy {name}: {error}")))?;
    let warnings = warnings(&client, spec).await?;
    write(client, name, observed, &warnings).await
}

async fn write(client: Client, name: &str, observed: i64, warnings: &[Warning]) -> Result<(), SyncError> {
    let warnings: Vec<Value> = warnings
        .iter()
        .map(|warning| json!({"fieldRef": warning.field_ref, "warning": warning.warning}))
        .collect();
    let mut checking = json!({});
    if !warnings.is_empty() {
        checking["expressionWarnings"] = warnings.into();
    }
    let patch = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "status": {"observedGeneration": observed, "typeChecking": checking},
    });
    let api: Api<ValidatingAdmissionPolicy> = Api::all(client);
    match api.patch_status(name, &PatchParams::apply(MANAGER).force(), &Patch::Apply(patch)).await {
        Err(error) if is_not_found(&error) => Ok(()),
        other => other.map(drop).during(|| format!("write the status of ValidatingAdmissionPolicy {name}")),
    }
}

async fn warnings(client: &Client, spec: Value) -> Result<Vec<Warning>, SyncError> {
    let served = served(client).await?;
    let kinds =
        kinds_to_check(&spec, |group, version, resource| kinds_for(&served, group, version, resource));
    let params = param_kind(&spec).map(|(group, version, kind)| Gvk::new(group, version, kind));
    let mut documents = BTreeMap::new();
    for kind in kinds.iter().chain(&params) {
        let path = document_path(kind);
        let Entry::Vacant(unread) = documents.entry(path) else { continue };
        let document = match get_document(client, unread.key(), JSON).await {
            Err(error) if is_not_found(&error) => Value::Null,
            other => other.during(|| format!("read {}", unread.key()))?,
        };
        unread.insert(document);
    }
    // Large schemas take their time.
    let checked = tokio::task::spawn_blocking(move || {
        let of = |kind: &Gvk| {
            let schemas = documents.get(&document_path(kind))?.pointer("/components/schemas")?.as_object()?;
            type_of(schemas, kind)
        };
        let kinds: Vec<KindType> = kinds.iter().filter_map(of).collect();
        let params = params.as_ref().and_then(of).and_then(|(_, params)| params);
        check(&spec, &kinds, params.as_ref())
    });
    checked.await.map_err(|error| SyncError::Other(format!("cannot check the types of a policy: {error}")))
}

/// The path of the OpenAPI document that describes a kind.
fn document_path(kind: &Gvk) -> String {
    match kind.group.as_str() {
        "" => format!("/openapi/v3/api/{}", kind.version),
        group => format!("/openapi/v3/apis/{group}/{}", kind.version),
    }
}

/// A resource in one version, with its kind.
struct Served {
    group: String,
    version: String,
    plural: String,
    kind: Gvk,
}

async fn served(client: &Client) -> Result<Vec<Served>, SyncError> {
    let mut all = Vec::new();
    for path in ["/api", "/apis"] {
        let document = get_document(client, path, DISCOVERY).await.during(|| format!("read {path}"))?;
        all.extend(resources(&document));
    }
    Ok(all)
}

/// The resources of a discovery document.
fn resources(document: &Value) -> Vec<Served> {
    let list =
        |value: &'_ Value, key: &str| value.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
    let text =
        |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut all = Vec::new();
    for group in list(document, "items") {
        let name = group.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        for version in list(&group, "versions") {
            for resource in list(&version, "resources") {
                let kind =
                    resource.get("responseKind").and_then(Value::as_object).cloned().unwrap_or_else(Map::new);
                let kind = Value::Object(kind);
                // The kind's group and version are the resource's where the document leaves them out.
                let or = |key: &str, own: &str| match text(&kind, key) {
                    given if given.is_empty() => own.to_owned(),
                    given => given,
                };
                let own = text(&version, "version");
                all.push(Served {
                    group: name.to_owned(),
                    plural: text(&resource, "resource"),
                    kind: Gvk::new(&*or("group", name), &*or("version", &own), &*text(&kind, "kind")),
                    version: own,
                });
            }
        }
    }
    all
}

/// The kinds of a resource. As upstream: the empty group stands for any.
fn kinds_for(served: &[Served], group: &str, version: &str, resource: &str) -> Vec<Gvk> {
    let named = served.iter().filter(|known| {
        known.plural == resource && known.version == version && (group.is_empty() || known.group == group)
    });
    named.map(|known| known.kind.clone()).filter(|kind| !kind.kind.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_generation_is_reported_once() {
        let policy = |generation: i64, observed: Option<i64>| -> ValidatingAdmissionPolicy {
            ferrite_json::from_value(json!({"metadata": {"generation": generation},
                "status": {"observedGeneration": observed}}))
            .expect("a policy")
        };
        assert_eq!(decide(&policy(1, None)), Some(1));
        assert_eq!(decide(&policy(1, Some(1))), None);
        assert_eq!(decide(&policy(2, Some(1))), Some(2));
    }

    #[test]
    fn kinds_are_found_by_their_resources() {
        let of = |resource: &str, kind: &str| json!({"resource": resource, "responseKind": {"group": "", "version": "", "kind": kind}});
        let core = json!({"items": [{"metadata": {}, "versions": [
            {"version": "v1", "resources": [of("pods", "Pod"), of("events", "Event")]}]}]});
        let groups = json!({"items": [
            {"metadata": {"name": "events.k8s.io"}, "versions": [{"version": "v1", "resources": [of("events", "Event")]}]},
            {"metadata": {"name": "apps"}, "versions": [{"version": "v1", "resources": [of("deployments", "Deployment")]}]}]});
        let served: Vec<Served> = resources(&core).into_iter().chain(resources(&groups)).collect();
        /// Group, version and resource; the groups and kinds that are found.
        type Row = (&'static str, &'static str, &'static str, &'static [(&'static str, &'static str)]);
        let rows: [Row; 5] = [
            ("", "v1", "pods", &[("", "Pod")]),
            ("", "v1", "events", &[("", "Event"), ("events.k8s.io", "Event")]),
            ("events.k8s.io", "v1", "events", &[("events.k8s.io", "Event")]),
            ("apps", "v1", "deployments", &[("apps", "Deployment")]),
            ("apps", "v2", "deployments", &[]),
        ];
        for (group, version, resource, expected) in rows {
            let found = kinds_for(&served, group, version, resource);
            let found: Vec<(&str, &str)> = found.iter().map(|kind| (&*kind.group, &*kind.kind)).collect();
            assert_eq!(found, expected, "{group}/{version} {resource}");
        }
    }
}
