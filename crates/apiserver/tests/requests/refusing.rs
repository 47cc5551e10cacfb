//! Requests that upstream refuses, with the code, the reason and the words it has for them.

use crate::world::*;
use ferrite_json::{Value, json};

/// Method, path, body; code, reason, message.
type Row = (&'static str, String, Value, u16, &'static str, &'static str);

#[tokio::test]
async fn what_contradicts_itself_is_refused() {
    let world = World::start().await;
    let held = json!({"metadata": {"name": "held", "uid": "", "finalizers": ["example.com/hold"]}});
    assert_eq!(world.post(MAPS, &held).await.code, 201);
    assert_eq!(world.delete(&format!("{MAPS}/held")).await.code, 200);
    assert_eq!(world.post(PODS, &pod("p")).await.code, 201);
    let at = |name: &str| format!("{MAPS}/{name}");
    let binding = |name: &str, target: Value| json!({"metadata": {"name": name}, "target": target});
    let pods = |rest: &str| format!("{PODS}/p/{rest}");
    let reviews = "/apis/authentication.k8s.io/v1/tokenreviews".to_owned();
    let class = "/apis/scheduling.k8s.io/v1/priorityclasses/system-node-critical".to_owned();
    let rows: Vec<Row> = vec![
        (
            "PUT",
            at("absent"),
            json!({"metadata": {"name": "other"}}),
            400,
            "BadRequest",
            "the name of the object (other) does not match the name on the URL (absent)",
        ),
        (
            "PUT",
            at("absent"),
            json!({"metadata": {"name": "absent", "namespace": "other"}}),
            400,
            "BadRequest",
            "the namespace of the provided object does not match the namespace sent on the request",
        ),
        (
            "PUT",
            at("absent"),
            json!({"metadata": {}}),
            400,
            "BadRequest",
            "the name of the object (absent based on URL) was undeterminable: name must be provided",
        ),
        (
            "PUT",
            at("absent"),
            json!({"metadata": {"name": "absent", "uid": "u"}}),
            404,
            "NotFound",
            "configmaps \"absent\" not found",
        ),
        (
            "PUT",
            at("absent"),
            config_map("absent", json!({})),
            404,
            "NotFound",
            "configmaps \"absent\" not found",
        ),
        (
            "PUT",
            "/api/v1/namespaces/default/finalize".into(),
            json!({"metadata": {"name": "other"}}),
            400,
            "BadRequest",
            "the name of the object (other) does not match the name on the URL (default)",
        ),
        (
            "POST",
            MAPS.into(),
            json!({"metadata": {"name": "new", "resourceVersion": "5"}}),
            500,
            "",
            "resourceVersion should not be set on objects to be created",
        ),
        (
            "POST",
            MAPS.into(),
            held,
            409,
            "AlreadyExists",
            "object is being deleted: configmaps \"held\" already exists",
        ),
        (
            "POST",
            pods("binding"),
            binding("other", json!({"name": "n"})),
            400,
            "BadRequest",
            "name in URL does not match name in Binding object",
        ),
        (
            "POST",
            pods("binding"),
            binding("p", json!({"kind": "Pod"})),
            500,
            "",
            "[target.kind: Unsupported value: \"Pod\": supported values: \"Node\", \"<empty>\", target.name: Required value]",
        ),
        (
            "GET",
            pods("log?sinceSeconds=0&sinceTime=2020-01-01T00:00:00Z"),
            Value::Null,
            422,
            "Invalid",
            "PodLogOptions \"p\" is invalid: []: Forbidden: at most one of `sinceTime` or `sinceSeconds` may be specified",
        ),
        (
            "POST",
            reviews,
            json!({"spec": {}}),
            400,
            "BadRequest",
            "token is required for TokenReview in authentication",
        ),
        (
            "DELETE",
            class,
            Value::Null,
            403,
            "Forbidden",
            "priorityclasses.scheduling.k8s.io \"system-node-critical\" is forbidden: this is a system priority class and cannot be deleted",
        ),
    ];
    for (method, path, body, code, reason, message) in rows {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let reply = world.send(method, &path, &[("content-type", "application/json")], body.as_bytes()).await;
        let text = |at: &str| reply.at(at).as_str().unwrap_or_default().to_owned();
        assert_eq!(
            (reply.code, &*text("/reason"), &*text("/message")),
            (code, reason, message),
            "{method} {path}"
        );
    }
    // A client that would have replaced an object of that version makes a new one.
    let lease = json!({"metadata": {"name": "new", "resourceVersion": "5"}});
    let path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/new";
    assert_eq!(world.put(path, &lease).await.code, 201);
    // It is no fault when the request is only tried.
    let tried = json!({"metadata": {"name": "new", "resourceVersion": "5"}});
    assert_eq!(world.post(&format!("{MAPS}?dryRun=All"), &tried).await.code, 201);
}

#[tokio::test]
async fn a_patch_has_the_shape_of_its_kind() {
    let world = World::start().await;
    assert_eq!(world.post(MAPS, &config_map("a", json!({"k": "v"}))).await.code, 201);
    let refused = |code: u16, message: &'static str| (code, message);
    let nothing = refused(200, "");
    let rows = [
        (
            "json",
            "",
            "{}",
            refused(
                400,
                "error decoding patch: json: cannot unmarshal object into Go value of type []handlers.jsonPatchOp",
            ),
        ),
        (
            "json",
            "Ignore",
            "{}",
            refused(400, "json: cannot unmarshal object into Go value of type jsonpatch.Patch"),
        ),
        (
            "json",
            "",
            "[1]",
            refused(
                400,
                "error decoding patch: json: cannot unmarshal number into Go value of type handlers.jsonPatchOp",
            ),
        ),
        ("json", "", "[", refused(400, "error decoding patch: unexpected end of JSON input")),
        ("json", "", "null", nothing),
        (
            "merge",
            "",
            "[]",
            refused(
                400,
                "error decoding patch: json: cannot unmarshal array into Go value of type map[string]interface {}",
            ),
        ),
        ("merge", "", "{", refused(400, "error decoding patch: unexpected end of JSON input")),
        ("merge", "Ignore", "{", refused(400, "Invalid JSON Patch")),
        ("merge", "", "null", refused(400, "Invalid JSON Patch")),
        (
            "merge",
            "",
            r#"{"metadata": null}"#,
            refused(400, "the name of the object (a based on URL) was undeterminable: name must be provided"),
        ),
        (
            "strategic-merge",
            "",
            "5",
            refused(400, "json: cannot unmarshal number into Go value of type map[string]interface {}"),
        ),
        ("strategic-merge", "", "null", nothing),
    ];
    for (kind, validation, body, (code, message)) in rows {
        let path = format!("{MAPS}/a?fieldValidation={validation}");
        let content_type = format!("application/{kind}-patch+json");
        let reply = world.send("PATCH", &path, &[("content-type", &content_type)], body.as_bytes()).await;
        let told = reply.at("/message").as_str().unwrap_or_default().to_owned();
        assert_eq!((reply.code, &*told), (code, message), "{kind} {validation} {body}");
    }
    let twice = r#"{"data": {"k": "1", "k": "2"}}"#;
    let merge = [("content-type", "application/merge-patch+json")];
    let warned = world.send("PATCH", &format!("{MAPS}/a"), &merge, twice.as_bytes()).await;
    assert_eq!((warned.code, warned.header("warning")), (200, r#"299 - "duplicate field \"data.k\"""#));
    let strict =
        world.send("PATCH", &format!("{MAPS}/a?fieldValidation=Strict"), &merge, twice.as_bytes()).await;
    assert_eq!(strict.code, 422);
    // A missing object is reported first.
    let missed = world.send("PATCH", &format!("{MAPS}/b"), &merge, b"[").await;
    assert_eq!(missed.code, 404);
}

#[tokio::test]
async fn not_every_path_takes_every_method() {
    let world = World::start().await;
    let rows = [
        ("PUT", MAPS, 405),
        ("PATCH", MAPS, 405),
        ("POST", "/api/v1/configmaps", 405),
        ("DELETE", "/api/v1/configmaps", 405),
        ("GET", "/api/v1/configmaps", 200),
        ("HEAD", MAPS, 405),
        ("OPTIONS", MAPS, 405),
        ("DELETE", "/api/v1", 405),
        ("POST", "/version", 405),
        ("GET", "/version", 200),
        ("POST", "/livez", 200),
    ];
    for (method, path, code) in rows {
        let json = [("content-type", "application/merge-patch+json")];
        let reply = world.send(method, path, &json, b"{}").await;
        assert_eq!(reply.code, code, "{method} {path}: {}", reply.json());
        if code == 405 {
            assert_eq!(
                reply.at("/message"),
                "the server does not allow this method on the requested resource"
            );
        }
    }
}

#[tokio::test]
async fn namespaces_have_words_of_their_own_for_preconditions() {
    let world = World::start().await;
    let delete = |path: &str, preconditions: Value| {
        let (path, body) = (path.to_owned(), json!({"preconditions": preconditions}).to_string());
        let world = &world;
        async move { world.send("DELETE", &path, &[("content-type", "application/json")], body.as_bytes()).await }
    };
    let space = "/api/v1/namespaces/default";
    let uid = world.get(space).await.at("/metadata/uid");
    let reply = delete(space, json!({"uid": "u"})).await;
    let why = format!(
        "Operation cannot be fulfilled on namespaces \"default\": Precondition failed: UID in precondition: u, UID in object meta: {}",
        uid.as_str().unwrap_or_default()
    );
    assert_eq!((reply.code, reply.at("/message")), (409, json!(why)));
    world.post(MAPS, &config_map("a", json!({}))).await;
    let reply = delete(&format!("{MAPS}/a"), json!({"uid": "u"})).await;
    assert!(
        reply
            .at("/message")
            .as_str()
            .is_some_and(|m| m.starts_with("Operation cannot be fulfilled on ConfigMap \"a\"")),
        "{}",
        reply.json()
    );
}

#[tokio::test]
async fn an_eviction_may_be_of_the_older_version() {
    let world = World::start().await;
    assert_eq!(world.post(PODS, &pod("p")).await.code, 201);
    let eviction = json!({"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": "p"}});
    assert_eq!(world.post(&format!("{PODS}/p/eviction"), &eviction).await.code, 201);
    assert!(world.get(&format!("{PODS}/p")).await.at("/metadata/deletionTimestamp").is_string());
}

#[tokio::test]
async fn what_is_still_to_come_can_be_waited_for_but_not_listed() {
    let world = World::start().await;
    let listed = world.get(&format!("{MAPS}?resourceVersion=9999999")).await;
    assert_eq!((listed.code, listed.at("/reason")), (504, json!("Timeout")));
    assert!(
        listed
            .at("/message")
            .as_str()
            .is_some_and(|m| m.starts_with("Timeout: Too large resource version: 9999999, current: ")),
        "{}",
        listed.json()
    );
    let watched = world.get(&format!("{MAPS}?watch=1&resourceVersion=9999999&timeoutSeconds=1")).await;
    assert_eq!((watched.code, watched.bytes.len()), (200, 0));
}

#[tokio::test]
async fn paths_at_which_nothing_is_served_are_missed() {
    let world = World::start().await;
    let reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    for (method, path, code) in [
        ("GET", "/api/v1/bindings".to_owned(), 404),
        ("POST", "/api/v1/bindings".to_owned(), 404),
        ("GET", "/api/v1/namespaces/default/bindings".to_owned(), 405),
        ("GET", "/api/v1/namespaces/default/bindings/x".to_owned(), 404),
        ("GET", format!("{reviews}/x"), 404),
        ("GET", reviews.to_owned(), 405),
        ("POST", "/api/v2".to_owned(), 404),
        ("POST", "/apis/apps/v9".to_owned(), 404),
        ("POST", "/apis/apps/v1".to_owned(), 405),
        ("POST", "/api/v1/configmaps".to_owned(), 405),
    ] {
        assert_eq!(world.send(method, &path, &[], b"").await.code, code, "{method} {path}");
    }
}

#[tokio::test]
async fn parts_belong_where_their_path_says() {
    let world = World::start().await;
    world.post(PODS, &pod("p")).await;
    let elsewhere = json!({"metadata": {"name": "p", "namespace": "other"}, "target": {"name": "n"}});
    for part in ["binding", "eviction"] {
        let reply = world.post(&format!("{PODS}/p/{part}"), &elsewhere).await;
        assert_eq!((reply.code, reply.at("/reason")), (400, json!("BadRequest")), "{part}");
    }
    for (key, value) in [("uid", "x"), ("resourceVersion", "1")] {
        let stale = json!({"metadata": {"name": "p", key: value}, "target": {"name": "m"}});
        let reply = world.post(&format!("{PODS}/p/binding"), &stale).await;
        assert_eq!((reply.code, reply.at("/details/kind")), (409, json!("pods")), "{key}");
    }
    let kept = world.get(&format!("{PODS}/p")).await;
    assert_eq!(kept.at("/spec/nodeName"), "n");
}

#[tokio::test]
async fn questions_about_access_have_no_metadata() {
    let world = World::start().await;
    let asked = |metadata: Value| json!({"metadata": metadata, "spec": {"user": "u", "resourceAttributes": {"verb": "get", "resource": "pods"}}});
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let refused = world.post(path, &asked(json!({"name": "x"}))).await;
    assert_eq!((refused.code, refused.at("/details/causes/0/field")), (422, json!("metadata")));
    let answered = world.post(path, &asked(json!({"namespace": "x"}))).await;
    assert_eq!((answered.code, answered.at("/metadata/namespace")), (201, Value::Null));
}

#[tokio::test]
async fn pages_of_allowed_origins_may_read_responses() {
    use ferrite_apiserver::{CorsOrigins, Serving, TransportSecurity};
    let serving = Serving {
        cors_origins: CorsOrigins::parse(["^https://console.example(:|$)"]).expect("origins"),
        transport_security: TransportSecurity::parse(&["max-age=60".to_owned()]).expect("directives"),
        ..Serving::default()
    };
    let world = World::start_with(serving).await;
    let send = async |method: &str, origin: &str| world.send(method, MAPS, &[("origin", origin)], b"").await;
    let allowed = send("GET", "https://console.example").await;
    assert_eq!(
        (allowed.code, allowed.header("access-control-allow-origin")),
        (200, "https://console.example")
    );
    assert_eq!(allowed.header("access-control-allow-credentials"), "true");
    assert_eq!(allowed.header("access-control-expose-headers"), "Date");
    assert_eq!(allowed.header("strict-transport-security"), "max-age=60");
    let other = send("GET", "https://evil.example").await;
    assert_eq!((other.code, other.header("access-control-allow-origin")), (200, ""));
    // A question before the request itself, which shows no credentials.
    let asked = send("OPTIONS", "https://console.example").await;
    assert_eq!((asked.code, asked.bytes.len()), (204, 0));
    assert_eq!(asked.header("access-control-allow-methods"), "POST, GET, OPTIONS, PUT, DELETE, PATCH");
    assert_eq!(send("OPTIONS", "https://evil.example").await.code, 405);
    // Refusals can be read, too.
    let stranger = world.as_user(ferrite_apiserver::User::new("stranger", ["none"]));
    let refused = stranger.send("GET", MAPS, &[("origin", "https://console.example")], b"").await;
    assert_eq!(
        (refused.code, refused.header("access-control-allow-origin")),
        (403, "https://console.example")
    );
    world.stop().await;
}
