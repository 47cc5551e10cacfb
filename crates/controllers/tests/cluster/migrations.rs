use std::collections::BTreeSet;
use std::sync::Arc;

use ferrite_client::Api;
use ferrite_component::FeatureGates;
use ferrite_controllers::Config;
use ferrite_json::{Value, json};
use k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;

use crate::support::Cluster;

/// More than one page of a list.
const OBJECTS: usize = 620;

async fn start() -> Cluster {
    let feature_gates = FeatureGates::parse("StorageVersionMigrator=true").unwrap();
    Cluster::start_with(&[], Config { feature_gates, ..Config::default() }).await
}

/// A definition whose objects are stored in the version `stored`.
fn definition(stored: &str) -> Value {
    let version = |name: &str| {
        json!({"name": name, "served": true, "storage": name == stored,
            "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}})
    };
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "stones.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced", "versions": [version("v1"), version("v2")],
            "names": {"plural": "stones", "singular": "stone", "kind": "Stone", "listKind": "StoneList"}},
    })
}

fn definitions(cluster: &Cluster) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition");
    Api::all_with(cluster.client.clone(), &ApiResource::from_gvk(&kind))
}

async fn store_in(cluster: &Cluster, version: &str) {
    let patch = Patch::Apply(definition(version));
    let params = PatchParams::apply("test").force();
    definitions(cluster).patch("stones.example.com", &params, &patch).await.unwrap();
    cluster
        .eventually("the kind", |all: &[Arc<CustomResourceDefinition>]| {
            let status = all.first()?.status.as_ref()?;
            let is_served =
                status.conditions.iter().flatten().any(|c| c.type_ == "Established" && c.status == "True");
            let is_stored = status.stored_versions.iter().flatten().any(|stored| stored == version);
            (is_served && is_stored).then_some(())
        })
        .await;
}

async fn order(cluster: &Cluster, name: &str, group: &str, resource: &str) {
    let order =
        json!({"metadata": {"name": name}, "spec": {"resource": {"group": group, "resource": resource}}});
    let api: Api<StorageVersionMigration> = Api::all(cluster.client.clone());
    api.create(&PostParams::default(), &ferrite_json::from_value(order).unwrap()).await.unwrap();
}

/// Waits for the end of a migration, and returns its conditions.
async fn ended(cluster: &Cluster, name: &str) -> Vec<String> {
    cluster
        .eventually("the end of the migration", |all: &[Arc<StorageVersionMigration>]| {
            let migration = all.iter().find(|migration| migration.metadata.name.as_deref() == Some(name))?;
            let conditions = migration.status.as_ref()?.conditions.as_ref()?;
            let ended = conditions.iter().any(|c| c.type_ == "Running" && c.status == "False");
            ended.then(|| conditions.iter().map(|c| format!("{}={}", c.type_, c.status)).collect())
        })
        .await
}

/// The number of objects in the store, and their versions.
fn stored(cluster: &Cluster) -> (usize, BTreeSet<String>) {
    let snapshot = cluster.store.snapshot();
    let versions: Vec<String> = snapshot
        .range(b"/registry/example.com/stones/", None)
        .map(|(_, entry)| {
            let object: Value = ferrite_json::from_slice(&entry.value).unwrap();
            object["apiVersion"].as_str().unwrap().to_owned()
        })
        .collect();
    (versions.len(), versions.into_iter().collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_are_stored_anew_and_old_versions_forgotten() {
    let cluster = start().await;
    store_in(&cluster, "v1").await;
    let kind = GroupVersionKind::gvk("example.com", "v2", "Stone");
    let resource = ApiResource::from_gvk_with_plural(&kind, "stones");
    let stones: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), "default", &resource);
    for number in 0..OBJECTS {
        let stone = json!({"apiVersion": "example.com/v2", "kind": "Stone",
            "metadata": {"name": format!("stone-{number}")}, "spec": {"weight": number}});
        let stone = ferrite_json::from_value(stone).unwrap();
        stones.create(&PostParams::default(), &stone).await.unwrap();
    }
    store_in(&cluster, "v2").await;
    assert_eq!(stored(&cluster), (OBJECTS, ["example.com/v1".to_owned()].into()));

    order(&cluster, "first", "example.com", "stones").await;
    order(&cluster, "second", "example.com", "stones").await;
    assert_eq!(ended(&cluster, "first").await, ["Running=False", "Succeeded=True"]);
    assert_eq!(stored(&cluster), (OBJECTS, ["example.com/v2".to_owned()].into()));
    assert_eq!(ended(&cluster, "second").await, ["Running=False", "Succeeded=True"]);

    let definition = definitions(&cluster).get("stones.example.com").await.unwrap();
    assert_eq!(definition.data["status"]["storedVersions"].to_string(), r#"["v2"]"#);
    let conditions = definition.data["status"]["conditions"].as_array().unwrap();
    let migrating = conditions.iter().find(|condition| condition["type"] == "StorageMigrating").unwrap();
    assert_eq!(migrating["status"], "False");
    assert_eq!(migrating["reason"], "MigrationSucceeded");
    let stone = stones.get("stone-7").await.unwrap();
    assert_eq!(stone.data["spec"]["weight"], 7, "nothing else changed");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn built_in_kinds_are_migrated_and_others_fail() {
    let cluster = start().await;
    order(&cluster, "namespaces", "", "namespaces").await;
    assert_eq!(ended(&cluster, "namespaces").await, ["Running=False", "Succeeded=True"]);
    order(&cluster, "reviews", "authentication.k8s.io", "tokenreviews").await;
    assert_eq!(ended(&cluster, "reviews").await, ["Running=False", "Failed=True"]);
    cluster.stop().await;
}
