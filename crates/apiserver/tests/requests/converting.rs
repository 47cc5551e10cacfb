//! Conversion webhooks: one kind, two versions that differ in more than their names.

use crate::hook::*;
use crate::world::*;
use ferrite_json::{Value, json};
use http_body_util::BodyExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const V1: &str = "/apis/example.com/v1/namespaces/default/endpoints";
const V2: &str = "/apis/example.com/v2/namespaces/default/endpoints";

/// `v1` has `hostPort`, `v2` has `host` and `port`.
fn definition(client_config: Value, storage: &str) -> Value {
    let version = |name: &str, properties: Value| {
        json!({
            "name": name, "served": true, "storage": name == storage, "subresources": {"status": {}},
            "selectableFields": if name == "v2" { json!([{"jsonPath": ".host"}]) } else { json!([]) },
            "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
        })
    };
    let text = json!({"type": "string"});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "endpoints.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced", "names": {"plural": "endpoints", "kind": "Endpoint"},
            "conversion": {"strategy": "Webhook", "webhook": {
                "conversionReviewVersions": ["v1", "v1beta1"], "clientConfig": client_config}},
            "versions": [version("v1", json!({"hostPort": text})), version("v2", json!({"host": text, "port": text}))],
        },
    })
}

fn converted(object: &Value, desired: &str) -> Value {
    let mut object = object.clone();
    let map = object.as_object_mut().expect("a map");
    if desired.ends_with("v2") {
        let both =
            map.remove("hostPort").and_then(|both| both.as_str().map(str::to_owned)).unwrap_or_default();
        let (host, port) = both.split_once(':').unwrap_or((&both, ""));
        map.insert("host", host.into());
        map.insert("port", port.into());
    } else {
        let mut part =
            |key: &str| map.remove(key).and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
        let both = format!("{}:{}", part("host"), part("port"));
        map.insert("hostPort", both.into());
    }
    object["apiVersion"] = desired.into();
    object
}

fn convert(seen: &Seen) -> Says {
    let request = &seen.body["request"];
    let desired = request["desiredAPIVersion"].as_str().expect("a version");
    let objects: Vec<Value> = request["objects"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|object| converted(object, desired))
        .collect();
    Says::Json(json!({
        "kind": "ConversionReview", "apiVersion": "apiextensions.k8s.io/v1",
        "response": {"uid": request["uid"], "result": {"status": "Success"}, "convertedObjects": objects},
    }))
}

async fn serve(world: &World, definition: &Value) {
    let created = world.post(DEFINITIONS, definition).await;
    assert_eq!(created.code, 201, "{}", created.json());
    let wait = async {
        while world.get(V1).await.code == 404 || world.get(V2).await.code == 404 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), wait).await.expect("it is served");
}

fn v1(name: &str, host_port: &str) -> Value {
    json!({"apiVersion": "example.com/v1", "kind": "Endpoint", "metadata": {"name": name}, "hostPort": host_port})
}

fn v2(name: &str, host: &str, port: &str) -> Value {
    json!({
        "apiVersion": "example.com/v2", "kind": "Endpoint", "metadata": {"name": name}, "host": host, "port": port,
    })
}

#[tokio::test]
async fn every_verb_shows_the_version_that_was_asked_for() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    assert_eq!(world.post(V1, &v1("a", "localhost:80")).await.code, 201);
    assert!(hook.seen("/convert").is_empty(), "nothing to convert");
    // Written in another version than the stored one.
    let created = world.post(V2, &v2("b", "example", "443")).await;
    assert_eq!(
        (created.code, created.at("/host"), created.at("/apiVersion")),
        (201, "example".into(), "example.com/v2".into())
    );
    assert_eq!(world.get(&format!("{V1}/b")).await.at("/hostPort"), "example:443");
    let read = world.get(&format!("{V2}/a")).await;
    assert_eq!(
        (read.at("/host"), read.at("/port"), read.at("/hostPort")),
        ("localhost".into(), "80".into(), Value::Null)
    );
    let asked = hook.seen("/convert").last().expect("a question").body.clone();
    assert_eq!(
        (&asked["kind"], &asked["apiVersion"]),
        (&json!("ConversionReview"), &json!("apiextensions.k8s.io/v1"))
    );
    assert_eq!(asked["request"]["desiredAPIVersion"], "example.com/v2");
    let metrics = world.get("/metrics").await;
    let metrics = String::from_utf8_lossy(&metrics.bytes).into_owned();
    for series in [
        r#"apiserver_conversion_webhook_duration_seconds_count{failure_type="",result="success"}"#,
        r#"apiserver_crd_conversion_webhook_duration_seconds_count{crd_name="endpoints.example.com",from_version="v1",succeeded="true",to_version="v2"}"#,
    ] {
        assert!(metrics.contains(series), "{series}");
    }
    // Updates, patches, and parts of the object.
    let patched = world.patch("merge", &format!("{V2}/a"), &json!({"port": "81"})).await;
    assert_eq!((patched.code, patched.at("/port")), (200, "81".into()), "{}", patched.json());
    assert_eq!(world.get(&format!("{V1}/a")).await.at("/hostPort"), "localhost:81");
    assert_eq!(world.get(&format!("{V2}/a/status")).await.at("/port"), "81");
    // Lists, pages and selectors read the version of the request.
    let hosts = |list: &Reply| -> Vec<Value> {
        list.at("/items").as_array().into_iter().flatten().map(|item| item["host"].clone()).collect()
    };
    let before = hook.seen("/convert").len();
    let list = world.get(V2).await;
    assert_eq!(hosts(&list), ["localhost", "example"]);
    assert_eq!(hook.seen("/convert").len() - before, 1, "one question for the whole list");
    assert_eq!(hosts(&world.get(&format!("{V2}?fieldSelector=host%3Dexample")).await), ["example"]);
    let page = world.get(&format!("{V2}?limit=1")).await;
    let token = page.at("/metadata/continue").as_str().expect("a token").to_owned();
    assert_eq!(hosts(&page), ["localhost"]);
    assert_eq!(hosts(&world.get(&format!("{V2}?limit=1&continue={token}")).await), ["example"]);
    // Deletes answer in it, too.
    assert_eq!(world.delete(&format!("{V2}/a")).await.code, 200);
    assert_eq!(world.get(&format!("{V1}/a")).await.code, 404);
}

#[tokio::test]
async fn watches_are_converted() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    assert_eq!(world.post(V1, &v1("a", "one:1")).await.code, 201);
    let mut watch = world.open(&format!("{V2}?watch=true")).await.into_body();
    let mut next = async || -> Value {
        let frame = watch.frame().await.expect("a frame").expect("no error").into_data().expect("data");
        ferrite_json::from_slice(&frame).expect("an event")
    };
    let shown = |event: &Value| (event["type"].clone(), event["object"]["host"].clone());
    assert_eq!(shown(&next().await), ("ADDED".into(), "one".into()));
    assert_eq!(world.post(V1, &v1("b", "two:2")).await.code, 201);
    assert_eq!(shown(&next().await), ("ADDED".into(), "two".into()));
    assert_eq!(world.delete(&format!("{V1}/b")).await.code, 200);
    assert_eq!(shown(&next().await), ("DELETED".into(), "two".into()));
}

#[tokio::test]
async fn a_watch_begins_with_the_objects_that_are_selected_after_conversion() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    for (name, place) in [("a", "here:80"), ("b", "there:80")] {
        assert_eq!(world.post(V1, &v1(name, place)).await.code, 201);
    }
    let query =
        "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let mut watch = world.open(&format!("{V2}?{query}&fieldSelector=host%3Dthere")).await.into_body();
    let mut names = Vec::new();
    loop {
        let frame = watch.frame().await.expect("a frame").expect("no error").into_data().expect("data");
        let event: Value = ferrite_json::from_slice(&frame).expect("an event");
        if event["type"] == "BOOKMARK" {
            break;
        }
        names.push(event["object"]["metadata"]["name"].clone());
    }
    assert_eq!(names, ["b"]);
}

#[tokio::test]
async fn objects_stored_in_two_versions_are_listed_in_one() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    assert_eq!(world.post(V1, &v1("a", "one:1")).await.code, 201);
    let path = format!("{DEFINITIONS}/endpoints.example.com");
    let storage = json!([
        {"op": "replace", "path": "/spec/versions/0/storage", "value": false},
        {"op": "replace", "path": "/spec/versions/1/storage", "value": true},
    ]);
    let changed = world.patch("json", &path, &storage).await;
    assert_eq!(changed.code, 200, "{}", changed.json());
    // The object in the old version stays until it is written again.
    let wait = async {
        let stored = json!(["v1", "v2"]);
        while world.get(&path).await.at("/status/storedVersions") != stored {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), wait).await.expect("both versions are stored");
    assert_eq!(world.post(V2, &v2("b", "two", "2")).await.code, 201);
    let list = |reply: Reply, key: &str| -> Vec<Value> {
        reply.at("/items").as_array().into_iter().flatten().map(|item| item[key].clone()).collect()
    };
    assert_eq!(list(world.get(V1).await, "hostPort"), ["one:1", "two:2"]);
    assert_eq!(list(world.get(V2).await, "host"), ["one", "two"]);
    // A write that changes nothing stores the object in the new version, once.
    let version = |reply: &Reply| reply.at("/metadata/resourceVersion").clone();
    let before = version(&world.get(&format!("{V1}/a")).await);
    let written = world.patch("merge", &format!("{V1}/a"), &json!({})).await;
    assert_ne!(version(&written), before);
    assert_eq!(written.at("/hostPort"), "one:1");
    let again = world.patch("merge", &format!("{V1}/a"), &json!({})).await;
    assert_eq!(version(&again), version(&written));
}

#[tokio::test]
async fn a_webhook_that_lies_or_fails_changes_nothing() {
    let broken = Arc::new(AtomicBool::new(false));
    let breaks = Arc::clone(&broken);
    let hook = HookServer::start(move |seen| {
        if !breaks.load(Ordering::SeqCst) {
            return convert(seen);
        }
        let Says::Json(mut answer) = convert(seen) else { return Says::Nothing };
        let objects = &mut answer["response"]["convertedObjects"];
        for object in objects.as_array_mut().into_iter().flatten() {
            object["metadata"]["uid"] = "another".into();
        }
        Says::Json(answer)
    })
    .await;
    let world = World::start().await;
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    assert_eq!(world.post(V1, &v1("a", "one:1")).await.code, 201);
    broken.store(true, Ordering::SeqCst);
    for reply in [
        world.get(&format!("{V2}/a")).await,
        world.get(V2).await,
        world.post(V2, &v2("b", "two", "2")).await,
        world.patch("merge", &format!("{V2}/a"), &json!({"port": "2"})).await,
    ] {
        let text = reply.at("/message").as_str().unwrap_or_default().to_owned();
        assert_eq!(reply.code, 500, "{text}");
        assert!(text.starts_with("conversion webhook for example.com/"), "{text}");
        assert!(text.contains("must have the same UID"), "{text}");
    }
    // The stored version is served all the while.
    assert_eq!(world.get(&format!("{V1}/a")).await.at("/hostPort"), "one:1");
    assert_eq!(world.get(&format!("{V1}/b")).await.code, 404);
    broken.store(false, Ordering::SeqCst);
    assert_eq!(world.get(&format!("{V2}/a")).await.at("/host"), "one");
}

#[tokio::test]
async fn admission_webhooks_of_another_version_see_converted_objects() {
    let hook = HookServer::start(|seen| match seen.path.as_str() {
        "/convert" => convert(seen),
        _ => patch(seen, &json!([{"op": "replace", "path": "/port", "value": "9"}])),
    })
    .await;
    let world = World::start().await;
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    let webhook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "m"},
        "webhooks": [{
            "name": "m.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "clientConfig": hook.config("/admit"),
            "rules": [{"operations": ["CREATE"], "apiGroups": ["example.com"], "apiVersions": ["v2"], "resources": ["endpoints"]}],
        }],
    });
    let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
    assert_eq!(world.post(path, &webhook).await.code, 201);
    let created = world.post(V1, &v1("a", "one:1")).await;
    assert_eq!((created.code, created.at("/hostPort")), (201, "one:9".into()), "{}", created.json());
    let request = hook.seen("/admit")[0].body["request"].clone();
    assert_eq!(
        (&request["kind"]["version"], &request["requestKind"]["version"]),
        (&json!("v2"), &json!("v1"))
    );
    assert_eq!(request["object"]["host"], "one");
}

fn admission(kind: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": "p"}, "spec": spec,
    })
}

/// The rules of a policy about one version of the endpoints.
fn endpoints_of(version: &str) -> Value {
    json!({"resourceRules": [{
        "apiGroups": ["example.com"], "apiVersions": [version], "resources": ["endpoints"],
        "operations": ["CREATE", "UPDATE"],
    }]})
}

#[tokio::test]
async fn policies_of_another_version_see_and_change_converted_objects() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    let group = "/apis/admissionregistration.k8s.io/v1";
    let validating = json!({"matchConstraints": endpoints_of("v2"), "validations": [
        {"expression": "object.host != 'forbidden' && (oldObject == null || oldObject.port != '99')"}]});
    let bound = json!({"policyName": "p", "validationActions": ["Deny"]});
    let mutating = json!({
        "matchConstraints": endpoints_of("v2"), "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression":
            "object.port == '1' ? [JSONPatch{op: 'replace', path: '/port', value: '2'}] : []"}}]});
    for (plural, object) in [
        ("validatingadmissionpolicies", admission("ValidatingAdmissionPolicy", &validating)),
        ("validatingadmissionpolicybindings", admission("ValidatingAdmissionPolicyBinding", &bound)),
        ("mutatingadmissionpolicies", admission("MutatingAdmissionPolicy", &mutating)),
        (
            "mutatingadmissionpolicybindings",
            admission("MutatingAdmissionPolicyBinding", &json!({"policyName": "p"})),
        ),
    ] {
        let created = world.post(&format!("{group}/{plural}"), &object).await;
        assert_eq!(created.code, 201, "{}", created.json());
    }
    let refused = world.post(V1, &v1("a", "forbidden:5")).await;
    assert_eq!(refused.code, 422, "{}", refused.json());
    let created = world.post(V1, &v1("b", "one:1")).await;
    assert_eq!((created.code, created.at("/hostPort")), (201, "one:2".into()), "{}", created.json());
    let changed = world.patch("merge", &format!("{V1}/b"), &json!({"hostPort": "one:99"})).await;
    assert_eq!(changed.code, 200, "{}", changed.json());
    let old = world.patch("merge", &format!("{V1}/b"), &json!({"hostPort": "one:98"})).await;
    assert_eq!(old.code, 422, "the stored object is converted, too");
}

#[tokio::test]
async fn parameters_of_policies_are_converted() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    assert_eq!(world.post(V1, &v1("limits", "host:7")).await.code, 201);
    let group = "/apis/admissionregistration.k8s.io/v1";
    let maps = json!({"resourceRules": [{
        "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"], "operations": ["CREATE"]}]});
    let spec = json!({
        "matchConstraints": maps, "paramKind": {"apiVersion": "example.com/v2", "kind": "Endpoint"},
        "validations": [{"expression": "object.data.port == params.port"}]});
    let policy = admission("ValidatingAdmissionPolicy", &spec);
    assert_eq!(world.post(&format!("{group}/validatingadmissionpolicies"), &policy).await.code, 201);
    let bindings = format!("{group}/validatingadmissionpolicybindings");
    let by = |reference: Value| {
        let spec = json!({"policyName": "p", "validationActions": ["Deny"], "paramRef": reference});
        admission("ValidatingAdmissionPolicyBinding", &spec)
    };
    for (name, reference) in [
        ("a", json!({"name": "limits", "parameterNotFoundAction": "Deny"})),
        ("b", json!({"selector": {}, "parameterNotFoundAction": "Deny"})),
    ] {
        assert_eq!(world.post(&bindings, &by(reference)).await.code, 201);
        let refused = world.post(MAPS, &config_map(name, json!({"port": "8"}))).await;
        assert_eq!(refused.code, 422, "{}", refused.json());
        let created = world.post(MAPS, &config_map(name, json!({"port": "7"}))).await;
        assert_eq!(created.code, 201, "{}", created.json());
        assert_eq!(world.delete(&format!("{bindings}/p")).await.code, 200);
    }
}

/// The fields of a manager in the version in which it wrote them.
fn owned_by<'o>(object: &'o Value, manager: &str) -> Option<(&'o str, &'o Value)> {
    let entries = object.pointer("/metadata/managedFields")?.as_array()?;
    let entry = entries.iter().find(|entry| entry["manager"] == *manager)?;
    Some((entry["apiVersion"].as_str()?, &entry["fieldsV1"]))
}

#[tokio::test]
async fn managers_of_two_versions_lose_what_the_other_changes() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    let mut made = v1("a", "one:1");
    made["metadata"]["labels"] = json!({"kept": "yes"});
    assert_eq!(world.post(&format!("{V1}?fieldManager=maker"), &made).await.code, 201);
    let path = format!("{V2}/a?fieldManager=changer");
    let changed = world.patch("merge", &path, &json!({"port": "2"})).await;
    assert_eq!(changed.code, 200, "{}", changed.json());
    let changed = changed.json();
    assert_eq!(owned_by(&changed, "changer"), Some(("example.com/v2", &json!({"f:port": {}}))));
    let labels = json!({"f:metadata": {"f:labels": {".": {}, "f:kept": {}}}});
    assert_eq!(owned_by(&changed, "maker"), Some(("example.com/v1", &labels)));
}

#[tokio::test]
async fn applies_of_two_versions_conflict() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    let by =
        |base: &str, manager: &str, force: bool| format!("{base}/a?fieldManager={manager}&force={force}");
    assert_eq!(world.patch("apply", &by(V1, "first", false), &v1("a", "one:1")).await.code, 201);
    let second = v2("a", "one", "2");
    let refused = world.patch("apply", &by(V2, "second", false), &second).await;
    assert_eq!(refused.code, 409, "{}", refused.json());
    let cause = refused.at("/details/causes/0");
    assert_eq!(
        (&cause["field"], &cause["message"]),
        (&json!(".hostPort"), &json!(r#"conflict with "first""#))
    );
    let forced = world.patch("apply", &by(V2, "second", true), &second).await;
    assert_eq!((forced.code, forced.at("/port")), (200, "2".into()), "{}", forced.json());
    let forced = forced.json();
    assert_eq!(owned_by(&forced, "first"), None);
    assert_eq!(owned_by(&forced, "second"), Some(("example.com/v2", &json!({"f:host": {}, "f:port": {}}))));
    // The same manager goes on in the other version; what it applied is compared there.
    let again = world.patch("apply", &by(V1, "second", false), &v1("a", "three:3")).await;
    assert_eq!((again.code, again.at("/hostPort")), (200, "three:3".into()), "{}", again.json());
    assert_eq!(owned_by(&again.json(), "second"), Some(("example.com/v1", &json!({"f:hostPort": {}}))));
}

/// The next event of a watch.
async fn next_event(body: &mut ferrite_apiserver::Body) -> Value {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        let frame = body.frame().await.expect("the watch goes on").expect("a frame");
        line.extend_from_slice(&frame.into_data().unwrap_or_default());
    }
    ferrite_json::from_slice(&line).expect("an event")
}

#[tokio::test]
async fn readers_share_what_was_converted() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    let path = format!("{V2}?watch=1&resourceVersion={}", world.version().await);
    let (mut first, mut second) = (world.open(&path).await.into_body(), world.open(&path).await.into_body());
    assert_eq!(world.post(V1, &v1("a", "one:1")).await.code, 201);
    let (first, second) = tokio::join!(next_event(&mut first), next_event(&mut second));
    for event in [first, second] {
        assert_eq!((&event["type"], &event["object"]["host"]), (&json!("ADDED"), &json!("one")));
    }
    assert_eq!(world.get(&format!("{V2}/a")).await.at("/port"), "1");
    assert_eq!(world.get(V2).await.at("/items/0/port"), "1");
    assert_eq!(hook.seen("/convert").len(), 1);
    assert_eq!(world.patch("merge", &format!("{V1}/a"), &json!({"hostPort": "two:2"})).await.code, 200);
    assert_eq!(world.get(&format!("{V2}/a")).await.at("/host"), "two", "another state is converted anew");
}

#[tokio::test]
async fn watches_of_converted_kinds_have_bookmarks() {
    let (world, hook) = (World::start().await, HookServer::start(convert).await);
    serve(&world, &definition(hook.config("/convert"), "v1")).await;
    let version = world.version().await;
    tokio::time::pause();
    let path = format!("{V2}?watch=1&allowWatchBookmarks=true&resourceVersion={version}");
    let mut watch = world.open(&path).await.into_body();
    assert_eq!(next_event(&mut watch).await["type"], "BOOKMARK");
}
