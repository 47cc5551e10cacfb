use crate::world::*;
use ferrite_json::json;

#[tokio::test]
async fn a_pod_is_marked_and_goes_when_its_node_says_so() {
    let world = World::start().await;
    assert_eq!(world.post(PODS, &pod("a")).await.code, 201);
    let path = format!("{PODS}/a");
    let marked = world.delete(&path).await;
    assert_eq!((marked.code, marked.at("/metadata/deletionGracePeriodSeconds")), (200, json!(30)));
    assert_eq!(world.get(&path).await.code, 200);
    let longer = world.delete(&format!("{path}?gracePeriodSeconds=60")).await;
    assert_eq!(longer.at("/metadata/deletionGracePeriodSeconds"), 30, "a later delete only shortens");
    assert_eq!(world.delete(&format!("{path}?gracePeriodSeconds=0")).await.code, 200);
    assert_eq!(world.get(&path).await.code, 404);
}

#[tokio::test]
async fn finalizers_hold_an_object() {
    let world = World::start().await;
    let mut map = config_map("a", json!({}));
    map["metadata"]["finalizers"] = json!(["example.com/hold"]);
    world.post(MAPS, &map).await;
    let path = format!("{MAPS}/a");
    assert!(world.delete(&path).await.at("/metadata/deletionTimestamp").is_string());
    assert_eq!(world.get(&path).await.code, 200);
    world.patch("merge", &path, &json!({"metadata": {"finalizers": null}})).await;
    assert_eq!(world.get(&path).await.code, 404);
}

#[tokio::test]
async fn preconditions_and_policies_are_checked() {
    let world = World::start().await;
    world.post(MAPS, &config_map("a", json!({}))).await;
    let path = format!("{MAPS}/a");
    let headers = [("content-type", "application/json")];
    let rows = [
        (json!({"preconditions": {"uid": "0"}}), 409, "Conflict"),
        (json!({"preconditions": {"resourceVersion": "1"}}), 409, "Conflict"),
        (json!({"propagationPolicy": "Bogus"}), 422, "Invalid"),
        (json!({"propagationPolicy": "Orphan", "orphanDependents": true}), 422, "Invalid"),
    ];
    for (options, code, reason) in rows {
        let reply = world.send("DELETE", &path, &headers, options.to_string().as_bytes()).await;
        assert_eq!((reply.code, reply.at("/reason")), (code, json!(reason)), "{options}");
    }
    let foreground = json!({"propagationPolicy": "Foreground"}).to_string();
    let marked = world.send("DELETE", &path, &headers, foreground.as_bytes()).await;
    assert_eq!(marked.at("/metadata/finalizers"), json!(["foregroundDeletion"]));
}

#[tokio::test]
async fn a_collection_is_deleted_by_selector() {
    let world = World::start().await;
    for name in ["a", "b"] {
        world.post(MAPS, &config_map(name, json!({}))).await;
    }
    world.patch("merge", &format!("{MAPS}/b"), &json!({"metadata": {"labels": {"t": "y"}}})).await;
    assert_eq!(world.delete(&format!("{MAPS}?labelSelector=t%3Dx")).await.code, 200);
    assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 404);
    assert_eq!(world.get(&format!("{MAPS}/b")).await.code, 200);
}

#[tokio::test]
async fn a_namespace_is_terminating_until_it_is_finalized() {
    let world = World::start().await;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x"}});
    world.post("/api/v1/namespaces", &namespace).await;
    let marked = world.delete("/api/v1/namespaces/x").await.json();
    assert_eq!(marked["status"]["phase"], "Terminating");
    let refused = world.post("/api/v1/namespaces/x/configmaps", &config_map("a", json!({}))).await;
    assert_eq!((refused.code, refused.at("/details/causes/0/reason")), (403, json!("NamespaceTerminating")));
    let mut finalized = marked;
    finalized["spec"]["finalizers"] = json!([]);
    assert_eq!(world.put("/api/v1/namespaces/x/finalize", &finalized).await.code, 200);
    assert_eq!(world.get("/api/v1/namespaces/x").await.code, 404);
    assert_eq!(world.delete("/api/v1/namespaces/default").await.code, 403);
}
