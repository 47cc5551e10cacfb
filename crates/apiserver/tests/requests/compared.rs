//! Answers that differed from upstream's when the two were compared request by request.

use crate::world::*;
use ferrite_json::json;
use ferrite_store::Store;
use http_body_util::BodyExt;
use std::sync::Arc;

#[tokio::test]
async fn the_server_tells_what_it_is_and_how_it_is_set_up() {
    let world = World::start().await;
    for (path, accept, code, content_type) in [
        ("/statusz", "text/plain", 200, "text/plain; charset=utf-8"),
        ("/flagz", "*/*", 200, "text/plain; charset=utf-8"),
        ("/statusz", "", 406, "application/json"),
        ("/statusz", "application/json", 406, "application/json"),
        ("/flagz", "application/json;v=v1beta1;g=config.k8s.io;as=Statusz", 406, "application/json"),
        (
            "/statusz",
            "application/json;v=v1beta1;g=config.k8s.io;as=Statusz",
            200,
            "application/json;g=config.k8s.io;v=v1beta1;as=Statusz",
        ),
        (
            "/flagz",
            "application/yaml;v=v1alpha1;g=config.k8s.io;as=Flagz",
            200,
            "application/yaml;g=config.k8s.io;v=v1alpha1;as=Flagz",
        ),
    ] {
        let reply = world.send("GET", path, &[("accept", accept)], b"").await;
        assert_eq!((reply.code, reply.header("content-type")), (code, content_type), "{path} {accept}");
        assert_eq!(reply.header("warning").contains("deprecated"), accept.contains("v1alpha1"), "{accept}");
    }
    let accept = "application/json;v=v1beta1;g=config.k8s.io;as=Flagz";
    let flags = world.send("GET", "/flagz", &[("accept", accept)], b"").await;
    assert_eq!(flags.at("/flags/max-requests-inflight"), "400");
    assert_eq!(flags.at("/kind"), "Flagz");
}

#[tokio::test]
async fn a_list_is_not_the_metadata_of_one_object() {
    let world = World::start().await;
    let accept = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io";
    let reply = world.send("GET", MAPS, &[("accept", accept)], b"").await;
    assert_eq!(reply.code, 406);
    assert_eq!(
        reply.at("/message"),
        "you requested PartialObjectMetadata, but the requested object is a list (*core.ConfigMapList)"
    );
}

#[tokio::test]
async fn the_first_versions_can_be_listed_but_not_watched() {
    let world = World::start().await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
    let exact = world.get(&format!("{MAPS}?resourceVersion=1&resourceVersionMatch=Exact")).await;
    assert_eq!((exact.code, exact.at("/items")), (200, json!([])));
    let page = world.get(&format!("{MAPS}?resourceVersion=1&limit=1")).await;
    assert_eq!((page.code, page.at("/items")), (200, json!([])));
    let watched = world.get(&format!("{MAPS}?watch=1&resourceVersion=1&timeoutSeconds=1")).await;
    assert_eq!(watched.at("/object/code"), 410);
    // Deletes go page by page: a version is that very version, at which there was nothing to delete.
    let deleted = world.delete(&format!("{MAPS}?resourceVersion=1")).await;
    assert_eq!((deleted.code, deleted.at("/items")), (200, json!([])));
    assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 200);
    let future = world.delete(&format!("{MAPS}?resourceVersion=99999999")).await;
    assert_eq!((future.code, future.header("retry-after")), (504, ""));
}

#[tokio::test]
async fn an_expired_version_refuses_the_delete_of_a_collection() {
    let store = Arc::new(Store::memory());
    let world = World::share(&store).await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
    store.compact(store.usage().revision).expect("the store compacts");
    let deleted = world.delete(&format!("{MAPS}?resourceVersion=1")).await;
    assert_eq!((deleted.code, deleted.at("/reason")), (410, json!("Expired")));
    assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 200);
}

#[tokio::test]
async fn yaml_is_read_as_upstream_reads_it() {
    let world = World::start().await;
    let yaml = [("content-type", "application/yaml")];
    for (body, code, why) in [
        (r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}} {"x":1}"#, 201, ""),
        ("a: b: c", 400, "yaml: mapping values are not allowed in this context ("),
        ("a: b\nc: d: e", 400, "yaml: line 2: mapping values are not allowed in this context ("),
        ("\t", 400, "yaml: found character that cannot start any token ("),
    ] {
        let reply = world.send("POST", MAPS, &yaml, body.as_bytes()).await;
        let message = reply.at("/message");
        assert_eq!(reply.code, code, "{body} {message}");
        assert!(message.as_str().unwrap_or_default().contains(why), "{body}: {message}");
    }
}

#[tokio::test]
async fn devices_for_administration_need_a_labelled_namespace() {
    const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
    let world = World::start().await;
    let claim = json!({"metadata": {"name": "c"}, "spec": {"devices": {"requests": [
        {"name": "r", "exactly": {"deviceClassName": "dc", "adminAccess": true, "allocationMode": "All"}},
    ]}}});
    let refused = world.post(CLAIMS, &claim).await;
    assert_eq!(refused.code, 422);
    assert_eq!(refused.at("/details/causes/0/field"), "spec.devices.requests[0].adminAccess");
    assert_eq!(refused.at("/details/causes/0/reason"), "FieldValueForbidden");
    let label = json!({"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}});
    assert_eq!(world.patch("merge", "/api/v1/namespaces/default", &label).await.code, 200);
    assert_eq!(world.post(CLAIMS, &claim).await.code, 201);
}

#[tokio::test]
async fn an_older_version_keeps_the_record_of_the_newer() {
    const V2: &str = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers";
    const V1: &str = "/apis/autoscaling/v1/namespaces/default/horizontalpodautoscalers";
    let world = World::start().await;
    let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
    let memory = json!([{"type": "Resource", "resource": {"name": "memory",
        "target": {"type": "Utilization", "averageUtilization": 50}}}]);
    let scaler = json!({"metadata": {"name": "h"},
        "spec": {"maxReplicas": 3, "scaleTargetRef": target, "metrics": memory}});
    assert_eq!(world.post(&format!("{V2}?fieldManager=new"), &scaler).await.code, 201);
    // The older version has no field for the metrics; without its annotation they are gone.
    let older = json!({"metadata": {"name": "h"}, "spec": {"maxReplicas": 3, "scaleTargetRef": target}});
    let written = world.put(&format!("{V1}/h?fieldManager=old"), &older).await;
    assert_eq!(written.code, 200);
    let found = world.get(&format!("{V2}/h")).await;
    let entries = found.at("/metadata/managedFields");
    let of_new = entries.as_array().unwrap().iter().find(|e| e["manager"] == "new").unwrap();
    assert!(of_new["fieldsV1"]["f:spec"]["f:metrics"].is_null(), "{of_new}");
    // A status that is as it was is nobody's.
    let status = world.put(&format!("{V1}/h/status?fieldManager=old"), &older).await;
    assert_eq!(status.code, 200);
    assert!(!status.at("/metadata/managedFields").to_string().contains("currentReplicas"));
}

#[tokio::test]
async fn applying_in_another_order_is_a_change() {
    let world = World::start().await;
    let apply = [("content-type", "application/apply-patch+yaml")];
    let with = |list: &str| {
        format!(r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"a","finalizers":[{list}]}}}}"#)
    };
    let path = |manager: &str| format!("{MAPS}/a?fieldManager={manager}");
    let first = world.send("PATCH", &path("m1"), &apply, with(r#""a.b/c","a.b/d""#).as_bytes()).await;
    assert_eq!(first.code, 201);
    let second = world.send("PATCH", &path("m2"), &apply, with(r#""a.b/d","a.b/c""#).as_bytes()).await;
    assert_eq!(second.code, 200);
    let entries = second.at("/metadata/managedFields");
    let own = entries.as_array().unwrap().iter().find(|e| e["manager"] == "m2").unwrap();
    assert!(own["time"].is_string(), "{own}");
}

#[tokio::test]
async fn metrics_tell_of_plugins_watches_and_impersonation() {
    let world = World::start().await;
    let mut watch =
        world.open(&format!("{MAPS}?watch=1&fieldSelector=metadata.name=measured")).await.into_body();
    assert_eq!(world.post(MAPS, &config_map("measured", json!({}))).await.code, 201);
    watch.frame().await.expect("an event").expect("a frame");
    let as_other = [("impersonate-user", "jane")];
    assert_eq!(world.send("GET", MAPS, &as_other, b"").await.code, 403);
    let text = String::from_utf8(world.get("/metrics").await.bytes.to_vec()).expect("text");
    for line in [
        r#"apiserver_admission_controller_admission_duration_seconds_count{name="NamespaceLifecycle",operation="CREATE",rejected="false",type="admit"}"#,
        r#"apiserver_watch_cache_events_received_total{group="",resource="configmaps"}"#,
        r#"apiserver_watch_cache_events_dispatched_total{group="",resource="configmaps"}"#,
        r#"apiserver_impersonation_attempts_total{decision="allowed",mode="user-info"}"#,
    ] {
        assert!(text.contains(line), "{line}");
    }
}

#[tokio::test]
async fn a_watch_of_one_node_sees_its_pods_come_and_go() {
    let world = World::start().await;
    let on = |name: &str, node: &str| {
        let mut pod = pod(name);
        pod["spec"]["nodeName"] = node.into();
        pod
    };
    let mut watch = world.open(&format!("{PODS}?watch=1&fieldSelector=spec.nodeName=n1")).await.into_body();
    assert_eq!(world.post(PODS, &on("other", "n2")).await.code, 201);
    assert_eq!(world.post(PODS, &on("nowhere", "")).await.code, 201);
    assert_eq!(world.post(PODS, &on("mine", "n1")).await.code, 201);
    let binding = json!({"metadata": {"name": "nowhere"}, "target": {"kind": "Node", "name": "n1"}});
    assert_eq!(world.post(&format!("{PODS}/nowhere/binding"), &binding).await.code, 201);
    assert_eq!(world.delete(&format!("{PODS}/mine?gracePeriodSeconds=0")).await.code, 200);
    let mut text = String::new();
    while text.lines().count() < 4 {
        let frame = watch.frame().await.expect("an event").expect("a frame");
        text.push_str(std::str::from_utf8(&frame.into_data().expect("data")).expect("text"));
    }
    let events: Vec<(String, String)> = text
        .lines()
        .map(|line| {
            let event: ferrite_json::Value = ferrite_json::from_str(line).expect("an event");
            let text = |value: &ferrite_json::Value| value.as_str().unwrap_or_default().to_owned();
            (text(&event["type"]), text(&event["object"]["metadata"]["name"]))
        })
        .collect();
    let expected = [("ADDED", "mine"), ("ADDED", "nowhere"), ("MODIFIED", "mine"), ("DELETED", "mine")];
    assert_eq!(events, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
}

#[tokio::test]
async fn finalizers_in_a_specification_hold_namespaces_alone() {
    let world = World::start().await;
    let definition = json!({
        "metadata": {"name": "wids.tested.example.com"},
        "spec": {"group": "tested.example.com", "scope": "Cluster",
            "names": {"plural": "wids", "singular": "wid", "kind": "Wid", "listKind": "WidList"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema":
                {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]},
    });
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    assert_eq!(world.post(definitions, &definition).await.code, 201);
    const WIDS: &str = "/apis/tested.example.com/v1/wids";
    let wid = json!({"apiVersion": "tested.example.com/v1", "kind": "Wid", "metadata": {"name": "w"},
        "spec": {"finalizers": ["a.b/c"]}});
    while world.post(WIDS, &wid).await.code == 404 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.delete(&format!("{WIDS}/w")).await.code, 200);
    assert_eq!(world.get(&format!("{WIDS}/w")).await.code, 404);
}

#[tokio::test]
async fn an_object_of_the_cluster_has_no_namespace_whatever_it_says() {
    let world = World::start().await;
    let class = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1,
        "metadata": {"name": "p", "namespace": "elsewhere"}});
    let made = world.post("/apis/scheduling.k8s.io/v1/priorityclasses", &class).await;
    assert_eq!((made.code, made.at("/metadata/namespace")), (201, json!(null)));
}

#[tokio::test]
async fn metadata_alone_leaves_out_an_annotation_that_stands_for_a_field() {
    let world = World::start().await;
    let sets = "/apis/apps/v1/namespaces/default/daemonsets";
    let set = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "d"}, "spec": {
        "selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    assert_eq!(world.post(sets, &set).await.code, 201);
    let one = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io";
    let list = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io";
    for (path, accept, place) in
        [(format!("{sets}/d"), one, "/metadata"), (sets.to_owned(), list, "/items/0/metadata")]
    {
        let reply = world.send("GET", &path, &[("accept", accept)], b"").await;
        assert_eq!(reply.at(&format!("{place}/name")), "d");
        assert_eq!(reply.at(&format!("{place}/annotations")), json!(null), "{accept}");
    }
}

#[tokio::test]
async fn an_object_that_a_patch_takes_the_version_from_has_no_name() {
    let world = World::start().await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
    let headers = [("content-type", "application/merge-patch+json")];
    let reply = world.send("PATCH", &format!("{MAPS}/a"), &headers, br#"{"apiVersion":null}"#).await;
    assert_eq!(reply.code, 400);
    assert_eq!(
        reply.at("/message"),
        "the name of the object (a based on URL) was undeterminable: name must be provided"
    );
}

#[tokio::test]
async fn yaml_that_cannot_be_read_is_refused_in_upstreams_words() {
    let world = World::start().await;
    let reply = world.send("POST", MAPS, &[("content-type", "application/yaml")], b"a: [").await;
    assert_eq!(reply.code, 400);
    assert_eq!(
        reply.at("/message"),
        "the object provided is unrecognized (must be of type ConfigMap): yaml: line 1: did not find expected node content (613a205b)"
    );
}

#[tokio::test]
async fn the_scale_of_a_controller_has_its_selector() {
    let world = World::start().await;
    let controllers = "/api/v1/namespaces/default/replicationcontrollers";
    let controller = json!({"apiVersion": "v1", "kind": "ReplicationController", "metadata": {"name": "r"}, "spec": {
        "selector": {"a": "b"}, "template": {"metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    assert_eq!(world.post(controllers, &controller).await.code, 201);
    let scale = world.get(&format!("{controllers}/r/scale")).await;
    assert_eq!(scale.at("/status/selector"), "a=b");
}

#[tokio::test]
async fn a_full_page_does_not_look_whether_more_is_selected() {
    let world = World::start().await;
    for name in ["a", "b"] {
        assert_eq!(world.post(MAPS, &config_map(name, json!({}))).await.code, 201);
    }
    let labels = br#"{"metadata":{"labels":{"l":"m"}}}"#;
    let headers = [("content-type", "application/merge-patch+json")];
    assert_eq!(world.send("PATCH", &format!("{MAPS}/a"), &headers, labels).await.code, 200);
    let page = world.get(&format!("{MAPS}?labelSelector=l%3Dm&limit=1")).await;
    assert_eq!(page.at("/items/0/metadata/name"), "a");
    assert!(page.at("/metadata/continue").is_string());
    let named = world.get(&format!("{MAPS}?fieldSelector=metadata.name%3Da&limit=1")).await;
    assert_eq!(named.at("/metadata/continue"), json!(null));
}

#[tokio::test]
async fn a_dry_run_gives_any_port_and_any_address_of_the_range() {
    let world = World::start().await;
    let services = "/api/v1/namespaces/default/services";
    let service = |spec: ferrite_json::Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": spec});
    let port = service(json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": 1}]}));
    assert_eq!(world.post(&format!("{services}?dryRun=All"), &port).await.code, 201);
    assert_eq!(world.post(services, &port).await.code, 422);
    let address = service(json!({"clusterIP": "192.0.2.1", "ports": [{"port": 80}]}));
    let refused = world.post(&format!("{services}?dryRun=All"), &address).await;
    let why = refused.at("/message");
    assert!(
        why.as_str().is_some_and(|why| why.contains("the provided IP (192.0.2.1) is not in the valid range")),
        "{why}"
    );
}
