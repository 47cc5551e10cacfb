//! The audit log of a server: each request's line is there before its response is.

use crate::hook::*;
use crate::world::*;
use ferrite_apiserver::{AuditFormat, AuditLog, AuditMode};
use ferrite_json::{Value, json};
use std::path::PathBuf;
use tempfile::TempDir;

const SECRETS: &str = "/api/v1/namespaces/default/secrets";

struct Audited {
    world: World,
    directory: TempDir,
}

fn log_in(directory: &TempDir, mode: AuditMode) -> AuditLog {
    AuditLog {
        path: Some(directory.path().join("audit.log")),
        max_age: 0,
        max_backups: 0,
        max_size: 100,
        compress: false,
        format: AuditFormat::Json,
        mode,
        truncate: None,
    }
}

impl Audited {
    async fn start(rules: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let log = log_in(&directory, AuditMode::Blocking);
        Self { world: World::start_audited(rules, log).await, directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("audit.log")
    }

    /// The events of a request, by its audit id.
    fn events(&self, id: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path()).expect("a log");
        let events = text.lines().map(|line| line.parse::<Value>().expect("a line of JSON"));
        events.filter(|event| event["auditID"] == id).collect()
    }

    async fn send(&self, id: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        let headers: Vec<_> = headers.iter().copied().chain([("audit-id", id)]).collect();
        self.world.send(method, path, &headers, body.as_bytes()).await
    }

    async fn post(&self, id: &str, path: &str, object: &Value) -> Reply {
        self.send(id, "POST", path, &[("content-type", "application/json")], &object.to_string()).await
    }
}

fn stages(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["stage"].as_str().unwrap_or_default()).collect()
}

#[tokio::test]
async fn events_tell_as_much_as_their_level_allows() {
    let audited = Audited::start(
        "rules:\n\
         - {level: Metadata, resources: [{resources: [secrets]}]}\n\
         - {level: RequestResponse, resources: [{resources: [configmaps]}], omitManagedFields: true}\n\
         - {level: Request, resources: [{resources: [pods]}], omitStages: [RequestReceived]}",
    )
    .await;
    let map = config_map("a", json!({"k": "v"}));
    assert_eq!(audited.post("create", MAPS, &map).await.code, 201);
    let events = audited.events("create");
    assert_eq!(stages(&events), ["RequestReceived", "ResponseComplete"]);
    assert_eq!(
        events[0]["objectRef"],
        json!({"resource": "configmaps", "namespace": "default", "apiVersion": "v1"})
    );
    assert!(events[0].get("requestObject").is_none() && events[0].get("responseStatus").is_none());
    let done = &events[1];
    assert_eq!(done["level"], "RequestResponse");
    assert_eq!((&done["verb"], &done["objectRef"]["name"]), (&json!("create"), &json!("a")));
    assert_eq!(
        done["user"],
        json!({"username": "admin", "groups": ["system:masters", "system:authenticated"]})
    );
    assert_eq!(done["responseStatus"], json!({"metadata": {}, "code": 201}));
    assert_eq!(done["requestObject"]["data"], json!({"k": "v"}));
    assert_eq!(done["responseObject"]["kind"], "ConfigMap");
    assert!(done["responseObject"]["metadata"].get("uid").is_some());
    assert!(done["responseObject"]["metadata"].get("managedFields").is_none());
    assert_eq!(done["annotations"]["authorization.k8s.io/decision"], "allow");
    assert_eq!(done["sourceIPs"], json!(["::1"]));
    assert_eq!(done["userAgent"], "tester/1");
    assert!(
        done["requestReceivedTimestamp"]
            .as_str()
            .is_some_and(|t| t.len() == "2026-01-01T00:00:00.000000Z".len())
    );

    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"k": "hidden"}});
    assert_eq!(audited.post("secret", SECRETS, &secret).await.code, 201);
    let list = audited.send("secrets", "GET", SECRETS, &[], "").await;
    assert_eq!(list.code, 200);
    assert!(audited.events("secret")[1].get("requestObject").is_none());
    assert_eq!(audited.events("secret")[1]["objectRef"]["name"], "s");
    let text = std::fs::read_to_string(audited.path()).unwrap();
    assert!(!text.contains("hidden") && !text.contains("aGlkZGVu"), "a secret is in the log");

    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    assert_eq!(audited.post("pod", "/api/v1/namespaces/default/pods", &pod).await.code, 201);
    let events = audited.events("pod");
    assert_eq!(stages(&events), ["ResponseComplete"]);
    // As upstream: with the defaults of its kind.
    assert_eq!(events[0]["requestObject"]["spec"]["restartPolicy"], "Always");
    assert!(events[0].get("responseObject").is_none());
    assert_eq!(events[0]["annotations"]["pod-security.kubernetes.io/enforce-policy"], "privileged:latest");

    assert!(audited.events("none").is_empty());
    audited.send("none", "GET", "/version", &[], "").await;
    assert!(audited.events("none").is_empty(), "no rule, no event");
}

#[tokio::test]
async fn every_verb_leaves_its_objects_and_its_status() {
    let audited = Audited::start("omitStages: [RequestReceived]\nrules: [{level: RequestResponse}]").await;
    audited.world.post(MAPS, &config_map("a", json!({"k": "v"}))).await;
    let path = format!("{MAPS}/a");
    let merge = [("content-type", "application/merge-patch+json")];
    audited.send("patch", "PATCH", &path, &merge, "{\"data\":\n {\"x\":\"y\"}}").await;
    let done = audited.events("patch").remove(0);
    assert_eq!(done["requestObject"], json!({"data": {"x": "y"}}));
    assert_eq!(done["responseObject"]["data"], json!({"k": "v", "x": "y"}));

    let json = [("content-type", "application/json")];
    audited.send("delete", "DELETE", &path, &json, "{\"propagationPolicy\":\"Background\"}").await;
    let done = audited.events("delete").remove(0);
    assert_eq!(done["requestObject"]["propagationPolicy"], "Background");
    assert_eq!(done["responseStatus"]["status"], "Success");
    assert_eq!(
        (&done["responseStatus"]["code"], &done["responseStatus"]["details"]["name"]),
        (&json!(200), &json!("a"))
    );

    audited.send("missing", "GET", &path, &[("accept", "application/vnd.kubernetes.protobuf")], "").await;
    let done = audited.events("missing").remove(0);
    assert_eq!(
        (&done["responseStatus"]["reason"], &done["responseStatus"]["code"]),
        (&json!("NotFound"), &json!(404))
    );
    assert_eq!(done["responseObject"]["kind"], "Status");

    let pretty = audited.send("pretty", "GET", &format!("{MAPS}?pretty=true"), &[], "").await;
    assert_eq!(pretty.code, 200);
    assert_eq!(audited.events("pretty")[0]["responseObject"]["kind"], "ConfigMapList");

    let watch = format!("{MAPS}?watch=true&timeoutSeconds=1");
    audited.send("watch", "GET", &watch, &[], "").await;
    let events = audited.events("watch");
    assert_eq!(stages(&events), ["ResponseStarted", "ResponseComplete"]);
    assert!(events.iter().all(|event| event.get("responseObject").is_none()));

    let old = audited.send("old", "GET", "/api/v1/namespaces/default/endpoints", &[], "").await;
    assert_eq!(old.code, 200);
    assert_eq!(audited.events("old")[0]["annotations"]["k8s.io/deprecated"], "true");
}

#[tokio::test]
async fn lists_in_pieces_are_told_whole() {
    let audited = Audited::start("omitStages: [RequestReceived]\nrules: [{level: RequestResponse}]").await;
    let text = "x".repeat(100_000);
    for index in 0..12 {
        audited.world.post(MAPS, &config_map(&format!("m{index}"), json!({"k": text}))).await;
    }
    let list = audited.send("list", "GET", MAPS, &[], "").await;
    let events = audited.events("list");
    assert_eq!(stages(&events), ["ResponseComplete"]);
    assert_eq!(events[0]["responseObject"], list.json());
}

#[tokio::test]
async fn users_are_told_also_those_that_are_impersonated_or_refused() {
    let audited = Audited::start("rules: [{level: Metadata}]").await;
    let as_jane = [("impersonate-user", "jane"), ("impersonate-group", "devs")];
    assert_eq!(audited.send("jane", "GET", MAPS, &as_jane, "").await.code, 403);
    let done = audited.events("jane").pop().expect("an event");
    assert_eq!(done["user"]["username"], "admin");
    assert_eq!(
        done["impersonatedUser"],
        json!({"username": "jane", "groups": ["devs", "system:authenticated"]})
    );
    assert_eq!(done["authenticationMetadata"]["impersonationConstraint"], "impersonate:user-info");
    assert_eq!(done["annotations"]["authorization.k8s.io/decision"], "forbid");
    assert_eq!(done["responseStatus"]["reason"], "Forbidden");

    // A request that ends before its user is known.
    assert_eq!(audited.send("hasty", "GET", &format!("{MAPS}?timeout=x"), &[], "").await.code, 400);
    let events = audited.events("hasty");
    assert_eq!(stages(&events), ["ResponseStarted"]);
    assert_eq!((&events[0]["user"], &events[0]["responseStatus"]["code"]), (&json!({}), &json!(400)));
}

#[tokio::test]
async fn admission_annotates_events() {
    let audited = Audited::start("omitStages: [RequestReceived]\nrules: [{level: Request}]").await;
    let hook = HookServer::start(|seen| match seen.body.pointer("/request/name") {
        Some(name) if *name == "refused" => deny(seen, "no"),
        _ => patch(seen, &json!([{"op": "add", "path": "/data/first", "value": "yes"}])),
    })
    .await;
    let configuration = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "m"},
        "webhooks": [{
            "name": "m.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "clientConfig": hook.config("/x"),
            "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}],
        }],
    });
    let path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
    assert_eq!(audited.world.post(path, &configuration).await.code, 201);
    assert_eq!(audited.post("hooked", MAPS, &config_map("a", json!({"k": "v"}))).await.code, 201);
    let annotations = audited.events("hooked").remove(0)["annotations"].clone();
    assert_eq!(
        annotations["mutation.webhook.admission.k8s.io/round_0_index_0"],
        "{\"configuration\":\"m\",\"webhook\":\"m.example.com\",\"mutated\":true}"
    );
    let patch = annotations["patch.webhook.admission.k8s.io/round_0_index_0"].as_str().unwrap_or_default();
    assert!(patch.contains("\"/data/first\"") && patch.contains("JSONPatch"), "{annotations}");
    assert_eq!(audited.post("stopped", MAPS, &config_map("refused", json!({}))).await.code, 403);
    assert_eq!(
        audited.events("stopped").remove(0)["annotations"]["mutation.webhook.admission.k8s.io/round_0_index_0"],
        "{\"configuration\":\"m\",\"webhook\":\"m.example.com\",\"mutated\":false}"
    );

    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "strict",
        "labels": {"pod-security.kubernetes.io/audit": "restricted"}}});
    assert_eq!(audited.world.post("/api/v1/namespaces", &namespace).await.code, 201);
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    audited.world.post("/api/v1/namespaces/strict/serviceaccounts", &account).await;
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "c", "image": "i"}]}});
    assert_eq!(audited.post("pod", "/api/v1/namespaces/strict/pods", &pod).await.code, 201);
    let told =
        audited.events("pod").remove(0)["annotations"]["pod-security.kubernetes.io/audit-violations"].clone();
    let told = told.as_str().unwrap_or_default();
    assert!(told.starts_with("would violate PodSecurity \"restricted:latest\": "), "{told}");
}

#[tokio::test]
async fn a_strict_server_serves_nothing_that_it_cannot_store() {
    let directory = tempfile::tempdir().expect("a directory");
    // No event fits into the file.
    for (mode, code) in [(AuditMode::Blocking, 200), (AuditMode::BlockingStrict, 500)] {
        let log = AuditLog { path: Some("/dev/full".into()), max_size: 0, ..log_in(&directory, mode) };
        let rules = "rules: [{level: Metadata, resources: [{resources: [configmaps]}]}]";
        let world = World::start_audited(rules, log).await;
        let reply = world.get(MAPS).await;
        assert_eq!(reply.code, code);
        if code == 500 {
            assert!(String::from_utf8_lossy(&reply.bytes).contains("failed to store audit event"));
        }
        assert_eq!(world.get("/version").await.code, 200);
    }
}

#[tokio::test]
async fn a_server_that_stops_stores_what_is_left() {
    let directory = tempfile::tempdir().expect("a directory");
    let batch = ferrite_apiserver::AuditBatch {
        buffer_size: 100,
        max_size: 50,
        max_wait: std::time::Duration::from_secs(3600),
        throttle: None,
    };
    let log = log_in(&directory, AuditMode::Batch(batch));
    let world = World::start_audited("rules: [{level: Metadata, verbs: [delete]}]", log).await;
    world.delete(&format!("{MAPS}/none")).await;
    let path = directory.path().join("audit.log");
    assert_eq!(std::fs::read(&path).expect("a log"), b"");
    world.stop().await;
    assert_eq!(std::fs::read_to_string(&path).expect("a log").lines().count(), 2);
}
