//! Custom resources: from a definition to its last object.

use crate::world::*;
use ferrite_apiserver::Serving;
use ferrite_json::{Value, json};
use ferrite_store::Store;
use http_body_util::BodyExt;
use std::sync::Arc;

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const WIDS: &str = "/apis/stable.example.com/v1/namespaces/default/wids";

fn definition(schema: Value) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "wids.stable.example.com"},
        "spec": {
            "group": "stable.example.com", "scope": "Namespaced",
            "names": {"plural": "wids", "singular": "wid", "kind": "Wid", "listKind": "WidList",
                "shortNames": ["wd"], "categories": ["all"]},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema},
                "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.replicas",
                    "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".status.sel"}},
                "selectableFields": [{"jsonPath": ".spec.color"}],
                "additionalPrinterColumns": [{"name": "Color", "type": "string", "jsonPath": ".spec.color"}]}],
        },
    })
}

fn schema() -> Value {
    json!({"type": "object", "properties": {
        "spec": {"type": "object", "properties": {
            "color": {"type": "string", "default": "red"},
            "replicas": {"type": "integer", "minimum": 0},
            "list": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                "items": {"type": "object", "required": ["k"],
                    "properties": {"k": {"type": "string"}, "v": {"type": "integer"}}}},
        }, "x-kubernetes-validations":
            [{"rule": "!has(self.replicas) || self.replicas != 13", "message": "13 is unlucky"}]},
        "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
    }})
}

fn wid(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "stable.example.com/v1", "kind": "Wid", "metadata": {"name": name}, "spec": spec})
}

/// Follows a collection until an object, or its deletion, satisfies the test.
pub async fn wait_for(world: &World, path: &str, mut seen: impl FnMut(&str, &Value) -> bool) {
    let mut body = world.open(&format!("{path}?watch=1")).await.into_body();
    let mut buffer = Vec::new();
    while let Some(frame) = body.frame().await {
        buffer.extend_from_slice(&frame.expect("a frame").into_data().unwrap_or_default());
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            let event: Value = ferrite_json::from_slice(&line).expect("an event");
            if seen(event["type"].as_str().unwrap_or_default(), &event["object"]) {
                return;
            }
        }
    }
    panic!("the watch of {path} ended");
}

pub fn has_condition(object: &Value, type_: &str, status: &str) -> bool {
    let conditions =
        object.pointer("/status/conditions").and_then(Value::as_array).cloned().unwrap_or_default();
    conditions.iter().any(|condition| condition["type"] == *type_ && condition["status"] == *status)
}

pub async fn establish(world: &World, definition: &Value) {
    let created = world.post(DEFINITIONS, definition).await;
    assert_eq!(created.code, 201, "{}", created.json());
    let name = definition["metadata"]["name"].clone();
    wait_for(world, DEFINITIONS, |_, object| {
        object["metadata"]["name"] == name && has_condition(object, "Established", "True")
    })
    .await;
}

async fn start(schema: Value) -> World {
    let world = World::start().await;
    establish(&world, &definition(schema)).await;
    world
}

#[tokio::test]
async fn an_object_lives_as_one_of_a_built_in_kind() {
    let world = start(schema()).await;
    let created = world.post(WIDS, &wid("a", json!({"replicas": 1, "bogus": 1}))).await;
    assert_eq!(created.code, 201, "{}", created.json());
    assert_eq!(created.at("/spec"), json!({"color": "red", "replicas": 1}));
    assert_eq!(created.at("/metadata/generation"), 1);
    assert_eq!(created.header("warning"), r#"299 - "unknown field \"spec.bogus\"""#);
    assert_eq!(world.get(&format!("{WIDS}/a")).await.json(), created.json());

    let strict = world.post(&format!("{WIDS}?fieldValidation=Strict"), &wid("b", json!({"bogus": 1}))).await;
    assert_eq!(strict.code, 400);
    let told = strict.at("/message");
    assert!(
        told.as_str().unwrap_or_default().contains(r#"strict decoding error: unknown field "spec.bogus""#),
        "{told}"
    );

    let patched = world.patch("merge", &format!("{WIDS}/a"), &json!({"spec": {"color": "blue"}})).await;
    assert_eq!((patched.code, patched.at("/spec/color")), (200, json!("blue")));
    assert_eq!(patched.at("/metadata/generation"), 2);
    let operations = json!([{"op": "replace", "path": "/spec/replicas", "value": 2}]);
    assert_eq!(world.patch("json", &format!("{WIDS}/a"), &operations).await.at("/spec/replicas"), 2);
    assert_eq!(world.patch("strategic-merge", &format!("{WIDS}/a"), &json!({})).await.code, 415);

    let unlucky = world.patch("merge", &format!("{WIDS}/a"), &json!({"spec": {"replicas": 13}})).await;
    assert_eq!(unlucky.code, 422);
    assert_eq!(unlucky.at("/details/causes/0/field"), "spec");
    let negative = world.patch("merge", &format!("{WIDS}/a"), &json!({"spec": {"replicas": -1}})).await;
    let told = "spec.replicas in body should be greater than or equal to 0";
    assert!(
        negative.at("/message").as_str().unwrap_or_default().contains(told),
        "{}",
        negative.at("/message")
    );

    let list = world.get(&format!("{WIDS}?fieldSelector=spec.color%3Dblue")).await;
    assert_eq!((list.at("/kind"), list.at("/items/0/kind")), (json!("WidList"), json!("Wid")));
    assert_eq!(world.get(&format!("{WIDS}?fieldSelector=spec.color%3Dred")).await.at("/items"), json!([]));
    assert_eq!(world.get(&format!("{WIDS}?fieldSelector=spec.x%3Dy")).await.code, 400);

    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let table = world.send("GET", WIDS, &[("accept", table)], b"").await;
    assert_eq!(table.at("/columnDefinitions/1/name"), "Color");
    assert_eq!(table.at("/rows/0/cells"), json!(["a", "blue"]));
    let partial = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";
    assert_eq!(world.send("GET", WIDS, &[("accept", partial)], b"").await.at("/items/0/metadata/name"), "a");

    assert_eq!(world.delete(&format!("{WIDS}/a")).await.code, 200);
    assert_eq!(world.get(&format!("{WIDS}/a")).await.code, 404);
}

#[tokio::test]
async fn status_and_scale_are_parts_of_their_own() {
    let world = start(schema()).await;
    world.post(WIDS, &wid("a", json!({"replicas": 1}))).await;
    let path = format!("{WIDS}/a");
    let ignored = world.patch("merge", &path, &json!({"status": {"replicas": 9}})).await;
    assert_eq!(ignored.at("/status"), Value::Null);
    let status = json!({"spec": {"replicas": 5}, "status": {"replicas": 1, "sel": "a=b"}});
    let status = world.patch("merge", &format!("{path}/status"), &status).await;
    assert_eq!((status.at("/spec/replicas"), status.at("/status/replicas")), (json!(1), json!(1)));
    assert_eq!(status.at("/metadata/generation"), 1);
    let scale = world.get(&format!("{path}/scale")).await;
    assert_eq!((scale.at("/spec/replicas"), scale.at("/status/selector")), (json!(1), json!("a=b")));
    let scaled = world.patch("merge", &format!("{path}/scale"), &json!({"spec": {"replicas": 4}})).await;
    assert_eq!((scaled.code, scaled.at("/spec/replicas")), (200, json!(4)));
    assert_eq!(world.get(&path).await.at("/spec/replicas"), 4);
}

#[tokio::test]
async fn applied_lists_merge_by_their_keys() {
    let world = start(schema()).await;
    let path = |manager: &str| format!("{WIDS}/a?fieldManager={manager}");
    let first = world.patch("apply", &path("m1"), &wid("a", json!({"list": [{"k": "x", "v": 1}]}))).await;
    assert_eq!(first.code, 201, "{}", first.json());
    let second = world.patch("apply", &path("m2"), &wid("a", json!({"list": [{"k": "y", "v": 2}]}))).await;
    assert_eq!(second.at("/spec/list"), json!([{"k": "x", "v": 1}, {"k": "y", "v": 2}]));
    let conflict = world.patch("apply", &path("m2"), &wid("a", json!({"list": [{"k": "x", "v": 3}]}))).await;
    assert_eq!(conflict.code, 409);
    assert_eq!(conflict.at("/details/causes/0/field"), r#".spec.list[k="x"].v"#);
    let undeclared = world.patch("apply", &path("m1"), &wid("a", json!({"bogus": 1}))).await;
    assert!(
        undeclared
            .at("/message")
            .as_str()
            .unwrap_or_default()
            .ends_with(".spec.bogus: field not declared in schema")
    );
}

#[tokio::test]
async fn a_kind_is_in_discovery_and_openapi_while_it_is_served() {
    let world = start(schema()).await;
    let list = world.get("/apis/stable.example.com/v1").await;
    assert_eq!(list.at("/resources/0/shortNames"), json!(["wd"]));
    let listed = |reply: Reply| reply.json()["resources"].as_array().map_or(0, Vec::len);
    assert_eq!(listed(list), 3);
    let root = world.get("/openapi/v3").await;
    let url = root.json()["paths"]["apis/stable.example.com/v1"]["serverRelativeURL"].clone();
    let document = world.get(url.as_str().expect("an address")).await;
    let kind = &document.json()["components"]["schemas"]["com.example.stable.v1.Wid"];
    assert_eq!(kind["properties"]["spec"]["properties"]["color"]["default"], "red");
    assert_eq!(
        world.get("/openapi/v2").await.json()["definitions"]["com.example.stable.v1.WidList"]["required"],
        json!(["items"])
    );
}

/// The server's figures of requests for the resource and of their writes. Watches are left out: one that ends with its
/// kind is counted at an instant of its own.
async fn metrics_of_wids(world: &World) -> Vec<String> {
    let text = String::from_utf8(world.get("/metrics").await.bytes.to_vec()).expect("text");
    let is_counted =
        |line: &&str| ["apiserver_request", "etcd_request"].iter().any(|of| line.starts_with(of));
    let of_wids = text.lines().filter(is_counted).filter(|line| line.contains(r#"resource="wids""#));
    of_wids.filter(|line| !line.contains(r#"verb="WATCH""#)).map(str::to_owned).collect()
}

#[tokio::test]
async fn a_definition_goes_after_its_objects() {
    let world = start(schema()).await;
    assert_eq!(world.get(WIDS).await.code, 200);
    assert_ne!(metrics_of_wids(&world).await, Vec::<String>::new());
    let mut held = wid("held", json!({}));
    held["metadata"]["finalizers"] = json!(["example.com/hold"]);
    assert_eq!(world.post(WIDS, &held).await.code, 201);
    world.post(WIDS, &wid("free", json!({}))).await;
    let version = world.version().await;
    assert_eq!(world.delete(&format!("{DEFINITIONS}/wids.stable.example.com")).await.code, 200);
    // Its objects are asked to go, and the one that is held stays.
    wait_for(&world, WIDS, |_, object| {
        object["metadata"]["name"] == "held" && !object["metadata"]["deletionTimestamp"].is_null()
    })
    .await;
    let refused = world.post(WIDS, &wid("late", json!({}))).await;
    assert_eq!(refused.code, 403, "{}", refused.json());
    let released = json!({"metadata": {"finalizers": null}});
    assert_eq!(world.patch("merge", &format!("{WIDS}/held"), &released).await.code, 200);
    let path = format!("{DEFINITIONS}?resourceVersion={version}&watch=1");
    let mut body = world.open(&path).await.into_body();
    let mut buffer = String::new();
    while !buffer.contains(r#""type":"DELETED""#) {
        let frame = body.frame().await.expect("the watch goes on").expect("a frame");
        buffer.push_str(&String::from_utf8_lossy(&frame.into_data().unwrap_or_default()));
    }
    // The task that follows definitions has this event too; the next definition shows that it is done with
    // it.
    let mut other = definition(schema());
    other["metadata"]["name"] = "oids.stable.example.com".into();
    other["spec"]["names"] =
        json!({"plural": "oids", "singular": "oid", "kind": "Oid", "listKind": "OidList"});
    establish(&world, &other).await;
    // No figure of the kind is left: otherwise each kind that ever was would keep its series.
    assert_eq!(metrics_of_wids(&world).await, Vec::<String>::new());
    assert_eq!(world.get(WIDS).await.code, 404);
    assert_eq!(world.get("/apis/stable.example.com/v1/oids").await.code, 200);
}

#[tokio::test]
async fn two_versions_are_one_object() {
    let world = World::start().await;
    let mut two = definition(schema());
    let mut second = two["spec"]["versions"][0].clone();
    second["name"] = "v2".into();
    second["storage"] = false.into();
    second["deprecated"] = true.into();
    two["spec"]["versions"].as_array_mut().expect("versions").push(second);
    establish(&world, &two).await;
    world.post(WIDS, &wid("a", json!({"color": "blue"}))).await;
    let in_v2 = world.get(&format!("{}/a", WIDS.replace("/v1/", "/v2/"))).await;
    assert_eq!(
        (in_v2.at("/apiVersion"), in_v2.at("/spec/color")),
        (json!("stable.example.com/v2"), json!("blue"))
    );
    assert_eq!(in_v2.header("warning"), r#"299 - "stable.example.com/v2 Wid is deprecated""#);
    let group = world.get("/apis/stable.example.com").await;
    assert_eq!(group.at("/preferredVersion/version"), "v2");
}

#[tokio::test]
async fn a_server_that_starts_again_serves_what_was_established() {
    let store = Arc::new(Store::memory());
    let first = World::share(&store).await;
    establish(&first, &definition(schema())).await;
    assert_eq!(first.post(WIDS, &wid("a", json!({}))).await.code, 201);
    // For clients, a second server on the same store is like a restart.
    let second = World::share(&store).await;
    assert_eq!(second.get(&format!("{WIDS}/a")).await.at("/spec/color"), "red");
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_changed_schema_holds_at_once_and_ends_watches_of_its_own_kind_only() {
    let world = start(schema()).await;
    let mut other = definition(schema());
    other["metadata"]["name"] = "oids.stable.example.com".into();
    other["spec"]["names"] =
        json!({"plural": "oids", "singular": "oid", "kind": "Oid", "listKind": "OidList"});
    establish(&world, &other).await;
    world.post(WIDS, &wid("a", json!({}))).await;
    let mut watch = world.open(&format!("{WIDS}?watch=1")).await.into_body();
    watch.frame().await.expect("an event").expect("a frame");
    let mut others = world.open("/apis/stable.example.com/v1/oids?watch=1").await.into_body();
    let change = json!([{"op": "add",
        "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/size",
        "value": {"type": "string", "default": "large"}}]);
    let changed = world.patch("json", &format!("{DEFINITIONS}/wids.stable.example.com"), &change).await;
    assert_eq!(changed.code, 200, "{}", changed.json());
    assert!(watch.frame().await.is_none(), "a watch ends when its definition changes");
    assert_eq!(world.get(&format!("{WIDS}/a")).await.at("/spec/size"), "large");
    let mut oid = wid("o", json!({}));
    oid["kind"] = "Oid".into();
    assert_eq!(world.post("/apis/stable.example.com/v1/namespaces/default/oids", &oid).await.code, 201);
    assert!(others.frame().await.is_some(), "watches of other kinds go on");
}

#[tokio::test]
async fn what_cannot_be_served_is_refused() {
    let world = World::start_with(Serving::default()).await;
    let bad = definition(json!({"type": "object", "properties": {"spec": {"type": "object",
        "x-kubernetes-validations": [{"rule": "self.nothing"}]}}}));
    let refused = world.post(DEFINITIONS, &bad).await;
    assert_eq!(refused.code, 422);
    let told = refused.at("/message");
    assert!(told.as_str().unwrap_or_default().contains("compilation failed: ERROR"), "{told}");
}
