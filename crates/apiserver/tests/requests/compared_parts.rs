//! Answers that differed from upstream's for parts of objects, old versions of custom kinds and watches.

use crate::custom::establish;
use crate::world::*;
use ferrite_json::{Value, json};

const GROUP: &str = "parts.example.com";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// A definition of the kind Wid: `v1` with a scale, `v1beta1` and `v1alpha1` are deprecated.
fn definition() -> Value {
    let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let version =
        |name: &str| json!({"name": name, "served": true, "storage": name == "v1", "schema": schema});
    let mut versions = ["v1", "v2alpha1", "v1beta1", "v1alpha1"].map(version);
    let paths = json!({"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"});
    versions[0]["subresources"] = json!({"scale": paths});
    for old in &mut versions[2..] {
        old["deprecated"] = true.into();
    }
    versions[3]["deprecationWarning"] = "do not use".into();
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("wids.{GROUP}")},
        "spec": {"group": GROUP, "scope": "Namespaced", "versions": Value::from(versions.to_vec()),
            "names": {"plural": "wids", "singular": "wid", "kind": "Wid", "listKind": "WidList"}},
    })
}

fn wids(version: &str) -> String {
    format!("/apis/{GROUP}/{version}/namespaces/default/wids")
}

#[tokio::test]
async fn old_versions_of_custom_kinds_name_a_better_one() {
    let world = World::start().await;
    establish(&world, &definition()).await;
    let object = json!({"apiVersion": format!("{GROUP}/v1"), "kind": "Wid", "metadata": {"name": "w"},
        "spec": {"replicas": 1}});
    assert_eq!(world.post(&wids("v1"), &object).await.code, 201);
    let better = format!("299 - \"{GROUP}/v1beta1 Wid is deprecated; use {GROUP}/v1 Wid\"");
    for (version, part, code, warning) in [
        ("v1", "/w", 200, ""),
        ("v1beta1", "/w", 200, better.as_str()),
        ("v1alpha1", "/w", 200, "299 - \"do not use\""),
        // Also where the version has no such part.
        ("v1alpha1", "/w/status", 404, "299 - \"do not use\""),
        ("v1", "/w/status", 404, ""),
    ] {
        let reply = world.get(&format!("{}{part}", wids(version))).await;
        assert_eq!((reply.code, reply.header("warning")), (code, warning), "{version} {part}");
    }
    let scale = format!("{}/w/scale", wids("v1"));
    assert_eq!(world.get(&scale).await.at("/spec/replicas"), 1);
    assert_eq!(world.send("GET", &scale, &[("accept", PROTOBUF)], b"").await.code, 406);
}

#[tokio::test]
async fn a_part_that_takes_no_patches_does_not_look_at_their_kind() {
    let world = World::start().await;
    assert_eq!(world.post(PODS, &pod("p")).await.code, 201);
    for (part, code) in [("log", 405), ("binding", 405), ("status", 415)] {
        let reply = world.send("PATCH", &format!("{PODS}/p/{part}"), &[], b"{}").await;
        assert_eq!(reply.code, code, "{part}");
    }
}

#[tokio::test]
async fn a_watch_has_objects_one_by_one() {
    let world = World::start().await;
    let first = world.post(MAPS, &config_map("a", json!({}))).await.at("/metadata/resourceVersion");
    assert_eq!(world.post(MAPS, &config_map("b", json!({}))).await.code, 201);
    let from = first.as_str().unwrap_or_default();
    let path = format!("{MAPS}?watch=1&timeoutSeconds=1&resourceVersion={from}");
    let accept = |kind: &str| format!("application/json;as={kind};v=v1;g=meta.k8s.io");
    let lists = world.send("GET", &path, &[("accept", &accept("PartialObjectMetadataList"))], b"").await;
    assert_eq!((lists.code, lists.bytes.len()), (200, 0));
    let unknown = world.send("GET", &path, &[("accept", &accept("Odd"))], b"").await;
    let told = String::from_utf8_lossy(&unknown.bytes).into_owned();
    assert!(unknown.code == 406 && !told.contains("stream=watch"), "{told}");
    // A token that is of no use to a watch does no harm.
    let tokened = world.send("GET", &format!("{path}&continue=x"), &[], b"").await;
    assert!(String::from_utf8_lossy(&tokened.bytes).contains("\"ADDED\""), "{}", tokened.code);
}

#[tokio::test]
async fn a_negative_port_for_health_checks_is_refused() {
    let world = World::start().await;
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {
        "type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": -1, "ports": [{"port": 80}]}});
    let reply = world.post("/api/v1/namespaces/default/services", &service).await;
    assert_eq!(
        (reply.code, reply.at("/details/causes/0/message")),
        (422, json!("Invalid value: -1: must be between 1 and 65535, inclusive"))
    );
}

#[tokio::test]
async fn the_status_of_an_absent_service_makes_one_without_an_address() {
    let world = World::start().await;
    let services = "/api/v1/namespaces/default/services";
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}});
    let made = world.put(&format!("{services}/s/status"), &service).await;
    assert_eq!(made.code, 201, "{}", made.json());
    assert_eq!((made.at("/spec/clusterIP"), made.at("/metadata/managedFields")), (Value::Null, Value::Null));
    assert_eq!(world.get(&format!("{services}/s")).await.at("/spec/type"), "ClusterIP");
    let patched = world.patch("merge", &format!("{services}/absent/status"), &json!({})).await;
    assert_eq!(patched.code, 404);
}
