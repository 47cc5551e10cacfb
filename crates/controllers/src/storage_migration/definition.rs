//! Tells the definition of a custom resource that its objects are migrated, and that its old versions are gone.

use ferrite_client::{Api, is_not_found};
use ferrite_json::{Value, json};
use kube::Client;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;

use super::{GroupResource, RUNNER};
use crate::error::{During, SyncError};

const CONDITION: &str = "StorageMigrating";

pub(super) async fn mark_running(
    client: &Client,
    resource: &GroupResource,
    migration: &str,
) -> Result<(), SyncError> {
    let Some(definition) = read(client, resource).await? else { return Ok(()) };
    let message = format!("Migration {migration} is running");
    let status = json!({"conditions": [condition(&definition, "True", "MigrationRunning", &message)]});
    apply(client, resource, &definition, status).await
}

pub(super) async fn mark_finished(
    client: &Client,
    resource: &GroupResource,
    has_succeeded: bool,
) -> Result<(), SyncError> {
    let Some(definition) = read(client, resource).await? else { return Ok(()) };
    apply(client, resource, &definition, finished(&definition, has_succeeded)).await
}

/// Old versions are taken from the definition if it has not changed since the migration began: otherwise objects may have
/// been written in another version meanwhile.
fn finished(definition: &DynamicObject, has_succeeded: bool) -> Value {
    let known = definition.data.pointer("/status/conditions").and_then(|conditions| conditions.as_array());
    let began = known.into_iter().flatten().find(|known| known["type"] == CONDITION);
    let is_same = began.is_some_and(|began| {
        began["observedGeneration"].as_i64().is_some_and(|seen| Some(seen) == definition.metadata.generation)
    });
    let (reason, message) = match (has_succeeded, is_same) {
        (true, true) => {
            ("MigrationSucceeded", "The migration has succeeded and the stored versions have been updated")
        }
        (true, false) => (
            "MigrationSucceeded",
            "The migration has succeeded but the stored versions have not been updated due to a generation mismatch",
        ),
        (false, _) => ("MigrationFailed", "The migration has failed"),
    };
    let mut status = json!({"conditions": [condition(definition, "False", reason, message)]});
    let versions = definition.data.pointer("/spec/versions").and_then(|versions| versions.as_array());
    let stored = versions.into_iter().flatten().find(|version| version["storage"] == true);
    if let Some(stored) = stored.filter(|_| has_succeeded && is_same) {
        status["storedVersions"] = json!([stored["name"].as_str()]);
    }
    status
}

fn condition(definition: &DynamicObject, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": CONDITION, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        "observedGeneration": definition.metadata.generation})
}

fn api(client: &Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
    Api::all_with(client.clone(), &ApiResource::from_gvk(&kind))
}

/// The definition of the resource; none for a built-in one.
async fn read(client: &Client, resource: &GroupResource) -> Result<Option<DynamicObject>, SyncError> {
    api(client).get_opt(&resource.to_string()).await.during(|| format!("read the definition of {resource}"))
}

/// Nothing is written if the definition has changed since it was read: the conflict is an error.
async fn apply(
    client: &Client,
    resource: &GroupResource,
    definition: &DynamicObject,
    status: Value,
) -> Result<(), SyncError> {
    let name = resource.to_string();
    let object = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": name, "resourceVersion": definition.metadata.resource_version},
        "status": status,
    });
    let params = PatchParams::apply(RUNNER).force();
    match api(client).patch_status_unread(&name, &params, &Patch::Apply(object)).await {
        Err(error) if !is_not_found(&error) => {
            Err(error).during(|| format!("write the status of the definition {name}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_go_only_if_nothing_changed_meanwhile() {
        let definition = |observed: i64| -> DynamicObject {
            let value = json!({
                "metadata": {"name": "r.g", "generation": 2},
                "spec": {"versions": [{"name": "v1", "storage": false}, {"name": "v2", "storage": true}]},
                "status": {"storedVersions": ["v1", "v2"], "conditions": [
                    {"type": "StorageMigrating", "status": "True", "observedGeneration": observed}]},
            });
            ferrite_json::from_value(value).unwrap()
        };
        for (observed, has_succeeded, versions, message) in [
            (2, true, Some("v2"), "have been updated"),
            (1, true, None, "have not been updated"),
            (2, false, None, "has failed"),
        ] {
            let status = finished(&definition(observed), has_succeeded);
            assert_eq!(status["storedVersions"][0].as_str(), versions, "{message}");
            let condition = &status["conditions"][0];
            assert!(condition["message"].as_str().unwrap().contains(message), "{condition}");
            assert_eq!(condition["status"], "False");
        }
    }
}
