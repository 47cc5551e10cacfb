//! Admission webhooks: a webhook server on loopback, and the effects of its responses on requests.

use crate::hook::*;
use crate::world::*;
use ferrite_apiserver::User;
use ferrite_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const VALIDATING: &str = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
const MUTATING: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

fn rule(operations: &[&str], group: &str, resources: &[&str]) -> Value {
    json!({"operations": operations, "apiGroups": [group], "apiVersions": ["v1"], "resources": resources})
}

fn maps(operations: &[&str]) -> Value {
    rule(operations, "", &["configmaps"])
}

/// A configuration with webhooks, each completed with the common fields.
fn configuration(kind: &str, name: &str, webhooks: &[Value]) -> Value {
    let complete = |(index, webhook): (usize, &Value)| {
        let mut whole = json!({
            "name": format!("{name}-{index}.example.com"), "sideEffects": "None", "admissionReviewVersions": ["v1"],
        });
        whole.as_object_mut().expect("a map").extend(webhook.as_object().expect("a map").clone());
        whole
    };
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name},
        "webhooks": webhooks.iter().enumerate().map(complete).collect::<Vec<_>>(),
    })
}

async fn validate(world: &World, name: &str, webhooks: &[Value]) {
    let reply =
        world.post(VALIDATING, &configuration("ValidatingWebhookConfiguration", name, webhooks)).await;
    assert_eq!(reply.code, 201, "{}", reply.json());
}

async fn mutate(world: &World, name: &str, webhooks: &[Value]) {
    let reply = world.post(MUTATING, &configuration("MutatingWebhookConfiguration", name, webhooks)).await;
    assert_eq!(reply.code, 201, "{}", reply.json());
}

fn message(reply: &Reply) -> String {
    reply.at("/message").as_str().unwrap_or_default().to_owned()
}

/// Answers by the last part of the path.
async fn by_path() -> HookServer {
    HookServer::start(|seen| match seen.path.as_str() {
        "/allow" => allow(seen),
        "/deny" => deny(seen, "not today"),
        "/warn" => allow_with(seen, json!({"warnings": ["mind the gap"], "auditAnnotations": {"k": "v"}})),
        "/first" => patch(seen, &json!([{"op": "add", "path": "/data/first", "value": "yes"}])),
        "/second" => {
            let saw = seen.body.pointer("/request/object/data/first").cloned().unwrap_or("no".into());
            patch(seen, &json!([{"op": "add", "path": "/data/second", "value": saw}]))
        }
        _ => Says::Bytes(404, "", Vec::new()),
    })
    .await
}

#[tokio::test]
async fn a_validating_webhook_is_asked_with_all_there_is_to_know() {
    let (world, hook) = (World::start().await, by_path().await);
    let all = maps(&["CREATE", "UPDATE", "DELETE"]);
    validate(
        &world,
        "v",
        &[json!({"clientConfig": hook.config("/allow"), "rules": [all], "timeoutSeconds": 7})],
    )
    .await;
    let path = format!("{MAPS}/a");
    assert_eq!(
        world.post(&format!("{MAPS}?fieldManager=me&dryRun=All"), &config_map("a", json!({}))).await.code,
        201
    );
    assert_eq!(world.post(MAPS, &config_map("a", json!({"k": "1"}))).await.code, 201);
    assert_eq!(world.put(&path, &config_map("a", json!({"k": "2"}))).await.code, 200);
    assert_eq!(world.send("DELETE", &path, &[], br#"{"gracePeriodSeconds": 3}"#).await.code, 200);
    let seen = hook.seen("/allow");
    let at = |index: usize, pointer: &str| seen[index].body.pointer(pointer).cloned().unwrap_or_default();
    assert_eq!(seen.len(), 4);
    assert_eq!(seen[0].query, "timeout=7s");
    assert_eq!(seen[0].body["apiVersion"], "admission.k8s.io/v1");
    let dry = &seen[0].body["request"];
    assert_eq!(dry["dryRun"], true);
    assert_eq!(
        dry["options"],
        json!({"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1", "dryRun": ["All"], "fieldManager": "me"})
    );
    let create = &seen[1].body["request"];
    assert_eq!(create["kind"], json!({"group": "", "version": "v1", "kind": "ConfigMap"}));
    assert_eq!(create["resource"], json!({"group": "", "version": "v1", "resource": "configmaps"}));
    assert_eq!((&create["requestKind"], &create["requestResource"]), (&create["kind"], &create["resource"]));
    assert_eq!((&create["name"], &create["namespace"]), (&json!("a"), &json!("default")));
    assert_eq!((&create["operation"], &create["dryRun"]), (&json!("CREATE"), &json!(false)));
    assert_eq!(create["userInfo"]["username"], "admin");
    assert_eq!((&create["object"]["data"]["k"], &create["oldObject"]), (&json!("1"), &Value::Null));
    assert!(create["object"]["metadata"]["uid"].is_string());
    assert_eq!(
        (at(2, "/request/object/data/k"), at(2, "/request/oldObject/data/k")),
        ("2".into(), "1".into())
    );
    assert_eq!((at(3, "/request/object"), at(3, "/request/oldObject/data/k")), (Value::Null, "2".into()));
    assert_eq!(at(3, "/request/options/gracePeriodSeconds"), 3);
    // One connection serves them all.
    assert_eq!((hook.connections(), seen[0].version), (1, http::Version::HTTP_2));
}

#[tokio::test]
async fn the_server_shows_itself_as_a_kubeconfig_says() {
    let dir = tempfile::tempdir().expect("a directory");
    let kubeconfig = dir.path().join("kubeconfig");
    std::fs::write(&kubeconfig, "users:\n- {name: '*', user: {token: secret}}\n").expect("a file");
    let configuration = json!({"ValidatingAdmissionWebhook": {
        "apiVersion": "apiserver.config.k8s.io/v1", "kind": "WebhookAdmissionConfiguration",
        "kubeConfigFile": kubeconfig.to_str().expect("text"),
    }});
    let (world, hook) = (World::start_configured(&[], configuration).await, by_path().await);
    let to = |path: &str| json!({"clientConfig": hook.config(path), "rules": [maps(&["CREATE"])]});
    validate(&world, "v", &[to("/allow")]).await;
    mutate(&world, "m", &[to("/first")]).await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({"k": "v"}))).await.code, 201);
    let sent = |path: &str| hook.seen(path)[0].headers.get("authorization").cloned();
    assert_eq!(sent("/allow").expect("a header"), "Bearer secret");
    assert_eq!(sent("/first"), None, "the other plugin is configured by itself");
}

#[tokio::test]
async fn connections_are_kept_without_http_2_too() {
    let world = World::start().await;
    let hook = HookServer::start_with(&["http/1.1"], allow).await;
    validate(&world, "v", &[json!({"clientConfig": hook.config("/"), "rules": [maps(&["CREATE"])]})]).await;
    for name in ["a", "b", "c"] {
        assert_eq!(world.post(MAPS, &config_map(name, json!({}))).await.code, 201);
    }
    assert_eq!((hook.seen("/").len(), hook.connections()), (3, 1));
}

#[tokio::test]
async fn refusals_warnings_and_their_order() {
    let (world, hook) = (World::start().await, by_path().await);
    let to = |path: &str| json!({"clientConfig": hook.config(path), "rules": [maps(&["CREATE"])]});
    validate(&world, "b", &[to("/deny")]).await;
    validate(&world, "a", &[to("/warn"), to("/deny")]).await;
    let reply = world.post(MAPS, &config_map("a", json!({}))).await;
    assert_eq!(reply.code, 403, "{}", reply.json());
    assert_eq!(message(&reply), "admission webhook \"a-1.example.com\" denied the request: not today");
    assert_eq!(reply.at("/reason"), "Forbidden");
    assert_eq!(reply.header("warning"), "299 - \"mind the gap\"");
    assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 404);
    // A webhook that is gone is not asked.
    assert_eq!(world.delete(&format!("{VALIDATING}/a")).await.code, 200);
    assert_eq!(world.delete(&format!("{VALIDATING}/b")).await.code, 200);
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
}

#[tokio::test]
async fn a_change_of_the_configuration_holds_at_once() {
    let (world, hook) = (World::start().await, by_path().await);
    let of = |operations: &[&str]| {
        let webhook = json!({"clientConfig": hook.config("/deny"), "rules": [maps(operations)]});
        configuration("ValidatingWebhookConfiguration", "v", &[webhook])
    };
    assert_eq!(world.post(VALIDATING, &of(&["CREATE"])).await.code, 201);
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 403);
    let path = format!("{VALIDATING}/v");
    let narrowed = json!([{"op": "replace", "path": "/webhooks/0/rules/0/operations", "value": ["UPDATE"]}]);
    assert_eq!(world.patch("json", &path, &narrowed).await.code, 200);
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
    assert_eq!(world.put(&format!("{MAPS}/a"), &config_map("a", json!({"k": "v"}))).await.code, 403);
}

#[tokio::test]
async fn mutating_webhooks_see_what_those_before_have_changed() {
    let (world, hook) = (World::start().await, by_path().await);
    let to = |path: &str| json!({"clientConfig": hook.config(path), "rules": [maps(&["CREATE", "UPDATE"])]});
    mutate(&world, "b", &[to("/second")]).await;
    mutate(&world, "a", &[to("/first")]).await;
    let reply = world.post(MAPS, &config_map("a", json!({"k": "v"}))).await;
    assert_eq!((reply.code, reply.at("/data")), (201, json!({"k": "v", "first": "yes", "second": "yes"})));
    // A mutating webhook sees a new object before it has a UID.
    assert!(hook.seen("/first")[0].body.pointer("/request/object/metadata/uid").is_none());
    // A generated name is drawn afterwards.
    let mut unnamed = config_map("", json!({"k": "v"}));
    unnamed["metadata"] = json!({"generateName": "drawn-"});
    let reply = world.post(MAPS, &unnamed).await;
    assert!(reply.at("/metadata/name").as_str().is_some_and(|name| name.len() > "drawn-".len()));
    let request = hook.seen("/first")[1].body["request"].clone();
    assert!(request.get("name").is_none() && request.pointer("/object/metadata/name").is_none(), "{request}");
    // An update keeps its identity whatever a webhook says.
    let reply = world.put(&format!("{MAPS}/a"), &config_map("a", json!({"k": "w"}))).await;
    assert_eq!((reply.code, reply.at("/data/second")), (200, "yes".into()));
}

#[tokio::test]
async fn patched_objects_get_defaults_and_are_validated() {
    let world = World::start().await;
    let hook = HookServer::start(|seen| match seen.path.as_str() {
        "/init" => patch(
            seen,
            &json!([{"op": "add", "path": "/spec/initContainers", "value": [{"name": "added", "image": "img"}]}]),
        ),
        _ => patch(seen, &json!([{"op": "add", "path": "/spec/initContainers", "value": [{"name": "Not A Name"}]}])),
    })
    .await;
    let pods = rule(&["CREATE"], "", &["pods"]);
    mutate(&world, "m", &[json!({"clientConfig": hook.config("/init"), "rules": [pods]})]).await;
    let reply = world.post(PODS, &pod("a")).await;
    assert_eq!(
        (reply.code, reply.at("/spec/initContainers/0/terminationMessagePolicy")),
        (201, "File".into())
    );
    assert_eq!(world.delete(&format!("{MUTATING}/m")).await.code, 200);
    mutate(&world, "m", &[json!({"clientConfig": hook.config("/bad"), "rules": [pods]})]).await;
    let reply = world.post(PODS, &pod("b")).await;
    assert_eq!((reply.code, reply.at("/reason")), (422, "Invalid".into()), "{}", reply.json());
}

#[tokio::test]
async fn webhooks_are_asked_again_after_later_changes() {
    let world = World::start().await;
    let hook = HookServer::start(|seen| match seen.path.as_str() {
        "/watching" | "/indifferent" => allow(seen),
        _ if seen.body.pointer("/request/object/data/done").is_some() => allow(seen),
        _ => patch(seen, &json!([{"op": "add", "path": "/data/done", "value": "yes"}])),
    })
    .await;
    let to = |path: &str, policy: &str| json!({"clientConfig": hook.config(path), "rules": [maps(&["CREATE"])], "reinvocationPolicy": policy});
    let hooks = [to("/watching", "IfNeeded"), to("/indifferent", "Never"), to("/changing", "Never")];
    mutate(&world, "m", &hooks).await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({"k": "v"}))).await.code, 201);
    let asked = |path: &str| hook.seen(path).len();
    assert_eq!((asked("/watching"), asked("/indifferent"), asked("/changing")), (2, 1, 1));
    let again = hook.seen("/watching")[1].body.pointer("/request/object/data/done").cloned();
    assert_eq!(again, Some("yes".into()));
}

#[tokio::test]
async fn failures_follow_the_failure_policy() {
    let (world, hook) = (World::start().await, by_path().await);
    let nobody = {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        json!({"url": format!("https://127.0.0.1:{}/", listener.local_addr().expect("an address").port())})
    };
    let untrusted = json!({"url": hook.url("/allow")});
    let other = HookServer::start(allow).await;
    let wrong_authority = json!({"url": hook.url("/allow"), "caBundle": other.config("/")["caBundle"]});
    let service = json!({"service": {"namespace": "default", "name": "nothing"}});
    for (config, expected) in [
        (nobody, "connection refused"),
        (untrusted, "tls: failed to verify certificate"),
        (wrong_authority, "tls: failed to verify certificate"),
        (hook.config("/missing"), "failed to call webhook: the server could not find the requested resource"),
        (service, "service \"nothing\" not found"),
    ] {
        for (policy, code) in [("Ignore", 201), ("Fail", 500)] {
            let webhook =
                json!({"clientConfig": config, "rules": [maps(&["CREATE"])], "failurePolicy": policy});
            validate(&world, "v", &[webhook]).await;
            let name = format!("a{}", policy.to_lowercase());
            let reply = world.post(MAPS, &config_map(&name, json!({}))).await;
            assert_eq!(reply.code, code, "{expected}: {}", reply.json());
            if code == 500 {
                let text = message(&reply);
                let start = "Internal error occurred: failed calling webhook \"v-0.example.com\": ";
                assert!(text.starts_with(start) && text.contains(expected), "{text}");
            }
            world.delete(&format!("{MAPS}/{name}")).await;
            world.delete(&format!("{VALIDATING}/v")).await;
        }
    }
}

#[tokio::test]
async fn answers_that_cannot_be_used_are_refused() {
    let world = World::start().await;
    let hook = HookServer::start(|seen| match seen.path.as_str() {
        "/garbage" => Says::Bytes(200, "", b"\x00\xff<html>".to_vec()),
        "/huge" => Says::Bytes(200, "", vec![b' '; 16 << 20]),
        "/redirect" => Says::Bytes(307, "/allow", Vec::new()),
        "/error" => Says::Bytes(500, "", b"out of order".to_vec()),
        "/empty" => Says::Bytes(200, "", Vec::new()),
        "/other-uid" => Says::Json(json!({
            "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
            "response": {"uid": "other", "allowed": true},
        })),
        "/breaks" => patch(seen, &json!([{"op": "replace", "path": "", "value": 7}])),
        "/unknown-place" => patch(seen, &json!([{"op": "remove", "path": "/nowhere/at/all"}])),
        "/wrong-type" => patch(seen, &json!([{"op": "replace", "path": "/data", "value": "text"}])),
        "/no-patch" => allow_with(seen, json!({"patch": "bm90IGpzb24=", "patchType": "JSONPatch"})),
        "/merge" => allow_with(seen, json!({"patch": "W3sib3AiOiJ0ZXN0In1d", "patchType": "MergePatch"})),
        "/renames" => {
            patch(seen, &json!([{"op": "replace", "path": "/metadata/namespace", "value": "kube-system"}]))
        }
        _ => allow(seen),
    })
    .await;
    for (path, code, expected) in [
        ("/garbage", 500, "couldn't get version/kind; json parse error"),
        ("/huge", 500, "the answer is larger than"),
        ("/redirect", 500, "the server responded with the status code 307"),
        (
            "/error",
            500,
            "an error on the server (\"out of order\") has prevented the request from succeeding",
        ),
        ("/empty", 500, "failed to call webhook"),
        ("/other-uid", 500, "received invalid webhook response: expected response.uid="),
        ("/breaks", 500, "Internal error occurred"),
        ("/unknown-place", 500, "Internal error occurred"),
        ("/wrong-type", 500, "Internal error occurred"),
        ("/no-patch", 500, "received undecodable patch in webhook response"),
        ("/merge", 500, "unsupported patch type \"MergePatch\""),
        ("/renames", 400, "the namespace of the provided object does not match"),
    ] {
        mutate(&world, "m", &[json!({"clientConfig": hook.config(path), "rules": [maps(&["CREATE"])]})])
            .await;
        let reply = world.post(MAPS, &config_map("a", json!({"k": "v"}))).await;
        assert_eq!(reply.code, code, "{path}: {}", reply.json());
        assert!(message(&reply).contains(expected), "{path}: {}", message(&reply));
        assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 404, "{path}");
        assert_eq!(world.delete(&format!("{MUTATING}/m")).await.code, 200);
    }
    assert!(hook.seen("/allow").is_empty(), "a redirect is not followed");
}

#[tokio::test]
async fn a_webhook_that_hangs_holds_nobody_else() {
    let world = World::start().await;
    let hook = HookServer::start(|seen| match seen.path.as_str() {
        "/slow" => Says::Trickle,
        _ => Says::Nothing,
    })
    .await;
    for (path, policy, code) in [("/never", "Fail", 500), ("/slow", "Fail", 500), ("/never", "Ignore", 201)] {
        let webhook = json!({
            "clientConfig": hook.config(path), "rules": [maps(&["CREATE"])], "timeoutSeconds": 1,
            "failurePolicy": policy,
        });
        validate(&world, "v", &[webhook]).await;
        let (held, object) =
            (world.as_user(User::new("admin", ["system:masters"])), config_map("a", json!({})));
        let (reply, others) = tokio::join!(held.post(MAPS, &object), async {
            let secrets = "/api/v1/namespaces/default/secrets";
            let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"generateName": "s"}});
            world.post(secrets, &secret).await
        });
        assert_eq!((reply.code, others.code), (code, 201), "{path}");
        assert!(code == 201 || message(&reply).ends_with("context deadline exceeded"), "{}", message(&reply));
        world.delete(&format!("{VALIDATING}/v")).await;
    }
}

#[tokio::test]
async fn dry_runs_spare_webhooks_with_side_effects() {
    let (world, hook) = (World::start().await, by_path().await);
    let webhook = json!({
        "clientConfig": hook.config("/allow"), "rules": [maps(&["CREATE"])], "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
    });
    validate(&world, "v", &[webhook]).await;
    let dry = format!("{MAPS}?dryRun=All");
    assert_eq!(world.post(&dry, &config_map("a", json!({}))).await.code, 201);
    assert_eq!(hook.seen("/allow").len(), 1);
}

#[tokio::test]
async fn webhook_configurations_are_nobodys_business() {
    let (world, hook) = (World::start().await, by_path().await);
    let everything = rule(&["*"], "*", &["*/*"]);
    let everything = {
        let mut rule = everything;
        rule["apiVersions"] = json!(["*"]);
        rule
    };
    validate(&world, "v", &[json!({"clientConfig": hook.config("/deny"), "rules": [everything]})]).await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 403);
    mutate(&world, "m", &[json!({"clientConfig": hook.config("/deny"), "rules": [everything]})]).await;
    assert_eq!(world.delete(&format!("{MUTATING}/m")).await.code, 200);
    assert_eq!(world.delete(&format!("{VALIDATING}/v")).await.code, 200);
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
}

#[tokio::test]
async fn match_conditions_choose_requests() {
    let (world, hook) = (World::start().await, by_path().await);
    let with = |conditions: Value, policy: &str| {
        json!({
            "clientConfig": hook.config("/deny"), "rules": [maps(&["CREATE"])], "failurePolicy": policy,
            "matchConditions": conditions,
        })
    };
    let one = |expression: &str| json!([{"name": "c", "expression": expression}]);
    for (conditions, policy, code) in [
        (one("object.metadata.name == 'a'"), "Fail", 403),
        (one("object.metadata.name == 'b'"), "Fail", 201),
        (one("request.operation == 'CREATE' && request.userInfo.username == 'admin'"), "Fail", 403),
        (one("oldObject != null"), "Fail", 201),
        (one("authorizer.group('').resource('pods').check('create').allowed()"), "Fail", 403),
        (one("!authorizer.requestResource.check('create').allowed()"), "Fail", 201),
        (one("object.nothing.at.all == 1"), "Fail", 403),
        (one("object.nothing.at.all == 1"), "Ignore", 201),
        (
            json!([{"name": "c", "expression": "object.nothing.at.all == 1"}, {"name": "d", "expression": "false"}]),
            "Fail",
            201,
        ),
    ] {
        validate(&world, "v", &[with(conditions.clone(), policy)]).await;
        let asked = hook.seen("/deny").len();
        let reply = world.post(MAPS, &config_map("a", json!({}))).await;
        assert_eq!(reply.code, code, "{conditions} {policy}: {}", reply.json());
        let errs = conditions[0]["expression"].as_str().is_some_and(|text| text.contains("nothing"));
        assert_eq!(hook.seen("/deny").len() - asked, usize::from(code == 403 && !errs), "{conditions}");
        world.delete(&format!("{MAPS}/a")).await;
        world.delete(&format!("{VALIDATING}/v")).await;
    }
}

#[tokio::test]
async fn selectors_spare_namespaces_and_objects() {
    let (world, hook) = (World::start().await, by_path().await);
    let skip = json!({"matchExpressions": [{"key": "skip", "operator": "DoesNotExist"}]});
    let webhook = json!({
        "clientConfig": hook.config("/deny"), "rules": [maps(&["CREATE", "UPDATE"])],
        "namespaceSelector": skip, "objectSelector": {"matchLabels": {"t": "x"}},
    });
    validate(&world, "v", &[webhook]).await;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "free", "labels": {"skip": "1"}}});
    assert_eq!(world.post("/api/v1/namespaces", &namespace).await.code, 201);
    assert_eq!(world.post("/api/v1/namespaces/free/configmaps", &config_map("a", json!({}))).await.code, 201);
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 403);
    let mut other = config_map("a", json!({}));
    other["metadata"]["labels"] = json!({"t": "other"});
    assert_eq!(world.post(MAPS, &other).await.code, 201);
    // The new labels count as well as the old.
    assert_eq!(world.put(&format!("{MAPS}/a"), &config_map("a", json!({}))).await.code, 403);
}

#[tokio::test]
async fn subresources_streams_and_collections_are_asked_about() {
    let (world, hook) = (World::start().await, by_path().await);
    let operations = &["CREATE", "UPDATE", "DELETE", "CONNECT"];
    let pods = rule(operations, "", &["pods/*"]);
    let deployments = rule(operations, "apps", &["deployments/scale"]);
    validate(&world, "v", &[json!({"clientConfig": hook.config("/allow"), "rules": [pods, deployments]})])
        .await;
    assert_eq!(world.post(PODS, &pod("a")).await.code, 201);
    let last = || hook.seen("/allow").last().expect("a call").body["request"].clone();
    world
        .send("POST", &format!("{PODS}/a/exec?command=ls&command=-l&stdout=true&container=c"), &[], b"")
        .await;
    let exec = last();
    assert_eq!((&exec["operation"], &exec["subResource"]), (&json!("CONNECT"), &json!("exec")));
    assert_eq!(exec["kind"]["kind"], "PodExecOptions");
    assert_eq!(
        exec["object"],
        json!({"kind": "PodExecOptions", "apiVersion": "v1", "stdout": true, "container": "c", "command": ["ls", "-l"]})
    );
    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "a"}});
    let before = hook.seen("/allow").len();
    assert_eq!(world.post(&format!("{PODS}/a/eviction?dryRun=All"), &eviction).await.code, 201);
    let asked = hook.seen("/allow");
    assert_eq!(asked.len() - before, 1, "the delete within is not asked about");
    let request = &asked[before].body["request"];
    assert_eq!((&request["kind"]["kind"], &request["operation"]), (&json!("Eviction"), &json!("CREATE")));
    assert_eq!(world.send("DELETE", PODS, &[], b"").await.code, 200);
    assert_eq!(last()["operation"], "DELETE");
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": {
            "metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "img"}]}}},
    });
    let path = "/apis/apps/v1/namespaces/default/deployments";
    assert_eq!(world.post(path, &deployment).await.code, 201);
    let patched = world.patch("merge", &format!("{path}/d/scale"), &json!({"spec": {"replicas": 3}})).await;
    assert_eq!(patched.code, 200, "{}", patched.json());
    let scale = last();
    assert_eq!(scale["kind"], json!({"group": "autoscaling", "version": "v1", "kind": "Scale"}));
    assert_eq!(
        (&scale["object"]["spec"]["replicas"], &scale["oldObject"]["spec"]["replicas"]),
        (&json!(3), &json!(1))
    );
}

#[tokio::test]
async fn a_refused_stream_or_collection_stays() {
    let (world, hook) = (World::start().await, by_path().await);
    let all = rule(&["DELETE", "CONNECT"], "", &["configmaps", "pods/attach"]);
    validate(&world, "v", &[json!({"clientConfig": hook.config("/deny"), "rules": [all]})]).await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
    assert_eq!(world.send("DELETE", MAPS, &[], b"").await.code, 403);
    assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 200);
    assert_eq!(world.post(PODS, &pod("p")).await.code, 201);
    let reply = world.send("POST", &format!("{PODS}/p/attach?stdout=true"), &[], b"").await;
    assert_eq!((reply.code, message(&reply).contains("denied the request: not today")), (403, true));
}

#[tokio::test]
async fn another_version_of_the_resource_is_converted() {
    let (world, hook) = (World::start().await, by_path().await);
    let rule = rule(&["CREATE"], "", &["events"]);
    validate(&world, "v", &[json!({"clientConfig": hook.config("/allow"), "rules": [rule]})]).await;
    let event = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": "e", "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z", "reportingController": "c.example/x", "reportingInstance": "i",
        "action": "Test", "reason": "Testing", "type": "Normal", "note": "hello",
        "regarding": {"kind": "Pod", "namespace": "default", "name": "p"},
    });
    let reply = world.post("/apis/events.k8s.io/v1/namespaces/default/events", &event).await;
    assert_eq!(reply.code, 201, "{}", reply.json());
    let request = hook.seen("/allow")[0].body["request"].clone();
    assert_eq!(request["kind"], json!({"group": "", "version": "v1", "kind": "Event"}));
    assert_eq!(request["requestKind"], json!({"group": "events.k8s.io", "version": "v1", "kind": "Event"}));
    assert_eq!(
        (&request["object"]["apiVersion"], &request["object"]["message"]),
        (&json!("v1"), &json!("hello"))
    );
}

fn widgets() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced", "names": {"plural": "widgets", "kind": "Widget"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "properties": {"data": {"type": "object", "properties": {
                    "start": {"type": "string"}, "stage-1": {"type": "string"},
                    "size": {"type": "string", "default": "small"}}}}}}}],
        },
    })
}

const WIDGETS: &str = "/apis/example.com/v1/namespaces/default/widgets";

/// Waits until a custom kind is served.
async fn served(world: &World, path: &str) {
    let wait = async {
        while world.get(path).await.code != 200 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), wait).await.expect("it is served");
}

#[tokio::test]
async fn custom_objects_are_mutated_pruned_and_refused() {
    let world = World::start().await;
    let hook = HookServer::start(|seen| match seen.path.as_str() {
        "/one" => patch(seen, &json!([{"op": "add", "path": "/data/stage-1", "value": "yes"}])),
        "/two" => patch(seen, &json!([{"op": "add", "path": "/data/stage-2", "value": "yes"}])),
        _ => deny(seen, "no widgets"),
    })
    .await;
    assert_eq!(world.post(DEFINITIONS, &widgets()).await.code, 201);
    served(&world, WIDGETS).await;
    let rule = rule(&["CREATE", "UPDATE", "DELETE"], "example.com", &["widgets"]);
    let to = |path: &str| json!({"clientConfig": hook.config(path), "rules": [rule]});
    mutate(&world, "m", &[to("/one"), to("/two")]).await;
    let widget = json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": "w"}, "data": {"start": "yes"}});
    let reply = world.post(WIDGETS, &widget).await;
    let expected = json!({"start": "yes", "stage-1": "yes", "size": "small"});
    assert_eq!((reply.code, reply.at("/data")), (201, expected), "{}", reply.json());
    assert_eq!(world.delete(&format!("{MUTATING}/m")).await.code, 200);
    validate(&world, "v", &[to("/deny")]).await;
    assert_eq!(world.delete(&format!("{WIDGETS}/w")).await.code, 403);
    let changed = world.patch("merge", &format!("{WIDGETS}/w"), &json!({"data": {"start": "no"}})).await;
    assert_eq!(changed.code, 403);
}

#[tokio::test]
async fn definitions_can_be_refused() {
    let (world, hook) = (World::start().await, by_path().await);
    let rule = rule(&["CREATE"], "apiextensions.k8s.io", &["customresourcedefinitions"]);
    validate(&world, "v", &[json!({"clientConfig": hook.config("/deny"), "rules": [rule]})]).await;
    assert_eq!(world.post(DEFINITIONS, &widgets()).await.code, 403);
}

#[tokio::test]
async fn an_update_that_loses_a_race_asks_again_about_the_new_state_only() {
    let world = World::start().await;
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let hook = HookServer::start(move |seen| {
        counted.fetch_add(1, Ordering::SeqCst);
        allow(seen)
    })
    .await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
    validate(&world, "v", &[json!({"clientConfig": hook.config("/"), "rules": [maps(&["UPDATE"])]})]).await;
    let path = format!("{MAPS}/a");
    for value in ["1", "2", "3"] {
        assert_eq!(world.patch("merge", &path, &json!({"data": {"k": value}})).await.code, 200);
    }
    assert_eq!(calls.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn calls_are_counted() {
    let (world, hook) = (World::start().await, by_path().await);
    let to = |path: &str, policy: &str| json!({"clientConfig": hook.config(path), "rules": [maps(&["CREATE"])], "failurePolicy": policy});
    validate(&world, "v", &[to("/deny", "Fail"), to("/missing", "Ignore")]).await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 403);
    let text = String::from_utf8(world.get("/metrics").await.bytes.to_vec()).expect("text");
    for line in [
        "apiserver_admission_webhook_request_total{code=\"403\",name=\"v-0.example.com\",operation=\"CREATE\",rejected=\"true\",type=\"validating\"} 1",
        "apiserver_admission_webhook_rejection_count{error_type=\"no_error\",name=\"v-0.example.com\",operation=\"CREATE\",rejection_code=\"403\",type=\"validating\"} 1",
        "apiserver_admission_webhook_fail_open_count{name=\"v-1.example.com\",type=\"validating\"} 1",
        "apiserver_admission_webhook_admission_duration_seconds_count{name=\"v-0.example.com\",operation=\"CREATE\",rejected=\"true\",type=\"validating\"} 1",
    ] {
        assert!(text.contains(line), "{line}");
    }
}
