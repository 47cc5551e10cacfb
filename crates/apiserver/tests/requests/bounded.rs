//! Bodies that would make an object too deep or too large.

use crate::world::*;
use ferrite_json::{Value, json};

const REVISIONS: &str = "/apis/apps/v1/namespaces/default/controllerrevisions";

fn nested(levels: usize) -> Value {
    (0..levels).fold(json!(1), |inner, _| json!({"a": inner}))
}

fn revision(name: &str, data: Value) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": {"name": name}, "revision": 1, "data": data})
}

#[tokio::test]
async fn no_patch_nests_an_object_too_deeply() {
    let world = World::start().await;
    assert_eq!(world.post(REVISIONS, &revision("r", nested(2))).await.code, 201);
    let path = format!("{REVISIONS}/r");
    // Each copy of the whole into its innermost place doubles the depth.
    let mut operations = Vec::new();
    let mut depth = 2;
    for _ in 0..13 {
        operations
            .push(json!({"op": "copy", "from": "/data/a", "path": format!("/data{}", "/a".repeat(depth))}));
        depth = 2 * depth - 1;
    }
    let refused = world.patch("json", &path, &Value::Array(operations)).await;
    assert_eq!((refused.code, refused.at("/message")), (400, json!("exceeded max depth")));
    assert_eq!(world.patch("merge", &path, &json!({"data": nested(100)})).await.code, 400);
    // A strategic patch does not look into such data.
    assert_eq!(world.patch("strategic-merge", &path, &json!({"data": nested(100)})).await.code, 500);
    assert_eq!(world.post(REVISIONS, &revision("s", nested(99))).await.code, 201);
    let path = format!("{REVISIONS}/s");
    // The deepest allowed object can be read, patched and listed again, with the server's own additions.
    assert_eq!(world.get(&path).await.code, 200);
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    assert_eq!(world.patch("merge", &path, &label).await.code, 200);
    let stored: Value = world.get(&path).await.at("");
    assert_eq!(world.put(&path, &stored).await.code, 200);
    assert_eq!(world.get(REVISIONS).await.at("/items/0/metadata/name"), json!("r"));
    for levels in [100, 108, 120, 400] {
        assert_eq!(world.post(REVISIONS, &revision("t", nested(levels))).await.code, 400, "{levels}");
    }
}

#[tokio::test]
async fn a_patch_copies_no_more_than_a_body_may_hold() {
    let world = World::start().await;
    world.post(MAPS, &config_map("a", json!({"k": "x".repeat(400 << 10)}))).await;
    let copies: Vec<Value> =
        (0..20).map(|n| json!({"op": "copy", "from": "/data/k", "path": format!("/data/k{n}")})).collect();
    let refused = world.patch("json", &format!("{MAPS}/a"), &Value::Array(copies)).await;
    assert_eq!((refused.code, refused.at("/reason")), (413, json!("RequestEntityTooLarge")));
}

#[tokio::test]
async fn an_object_does_not_grow_beyond_what_a_store_takes() {
    let world = World::start().await;
    let path = "/api/v1/namespaces/default/services/big";
    let service = json!({"metadata": {"name": "big"}, "spec": {"ports": [{"port": 80}]}, "status": {}});
    assert_eq!(world.post("/api/v1/namespaces/default/services", &service).await.code, 201);
    // Each request is small enough; conditions have no limit in number.
    let grow = |round: usize| {
        let condition = |n: usize| {
            json!({"op": "add", "path": "/status/conditions/-", "value": {"type": format!("c-{round}-{n}"),
                "status": "True", "reason": "R", "lastTransitionTime": "2026-01-01T00:00:00Z", "message": "m".repeat(30_000)}})
        };
        Value::Array((0..30).map(condition).collect())
    };
    let first = json!({"type": "first", "status": "True", "reason": "R", "lastTransitionTime": "2026-01-01T00:00:00Z",
        "message": ""});
    let begin = json!([{"op": "add", "path": "/status/conditions", "value": [first]}]);
    assert_eq!(world.patch("json", &format!("{path}/status"), &begin).await.code, 200);
    let mut codes = Vec::new();
    for round in 0..5 {
        let answer = world.patch("json", &format!("{path}/status"), &grow(round)).await;
        codes.push(answer.code);
        if answer.code != 200 {
            assert_eq!(answer.at("/message"), json!("etcdserver: request is too large"));
            break;
        }
    }
    assert_eq!(codes, [200, 200, 200, 500]);
    // The stored object can be read and deleted.
    assert_eq!(world.get(path).await.at("/status/conditions").as_array().unwrap().len(), 91);
    assert_eq!(world.delete(path).await.code, 200);
}

#[tokio::test]
async fn a_path_of_any_length_does_no_harm() {
    let world = World::start().await;
    world.post(MAPS, &config_map("a", json!({}))).await;
    let long = "/a".repeat(1_000_000);
    let patch = json!([
        {"op": "test", "path": long, "value": null},
        {"op": "replace", "path": "/data", "value": "no map"},
    ]);
    let refused = world.patch("json", &format!("{MAPS}/a"), &patch).await;
    assert_eq!(refused.code, 422);
}

#[tokio::test]
async fn an_old_version_is_listed_as_it_was() {
    let world = World::start().await;
    for name in ["a", "b"] {
        world.post(MAPS, &config_map(name, json!({"v": "1"}))).await;
    }
    let then = world.version().await;
    world.post("/api/v1/namespaces/kube-system/configmaps", &config_map("other", json!({}))).await;
    world.patch("merge", &format!("{MAPS}/a"), &json!({"data": {"v": "2"}})).await;
    world.delete(&format!("{MAPS}/b")).await;
    world.post(MAPS, &config_map("c", json!({}))).await;
    let exact = format!("{MAPS}?resourceVersion={then}&resourceVersionMatch=Exact");
    let list = world.get(&exact).await;
    let items = list.at("/items");
    let told: Vec<(String, Value)> = items
        .as_array()
        .unwrap()
        .iter()
        .map(|item| (item["metadata"]["name"].as_str().unwrap().to_owned(), item["data"]["v"].clone()))
        .filter(|(name, _)| name != "kube-root-ca.crt")
        .collect();
    assert_eq!(told, [("a".to_owned(), json!("1")), ("b".to_owned(), json!("1"))]);
}
