use crate::world::*;
use ferrite_json::{Value, json};

async fn with_three_maps() -> World {
    let world = World::start().await;
    for name in ["a", "b", "c"] {
        assert_eq!(world.post(MAPS, &config_map(name, json!({"k": name}))).await.code, 201);
    }
    world
}

fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().expect("items");
    items.iter().filter_map(|i| i["metadata"]["name"].as_str()).collect()
}

#[tokio::test]
async fn lists_come_in_pages_of_one_snapshot() {
    let world = with_three_maps().await;
    let first = world.get(&format!("{MAPS}?limit=2&labelSelector=t%3Dx")).await.json();
    assert_eq!(names(&first), ["a", "b"]);
    assert_eq!(first["metadata"].get("remainingItemCount"), None, "unknown with a selector");
    world.post(MAPS, &config_map("bb", json!({}))).await;
    let token = first["metadata"]["continue"].as_str().expect("a token");
    let second = world.get(&format!("{MAPS}?limit=2&labelSelector=t%3Dx&continue={token}")).await.json();
    assert_eq!(names(&second), ["c"], "what came later is not in the snapshot");
    assert_eq!(second["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
}

#[tokio::test]
async fn wrong_options_of_lists_are_named() {
    let world = World::start().await;
    let rows = [
        ("limit=x", 400, r#"strconv.ParseInt: parsing "x": invalid syntax"#),
        (
            "labelSelector=a+b",
            400,
            "unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt",
        ),
        (
            "fieldSelector=spec.x%3Dy",
            400,
            r#""spec.x" is not a known field selector: only "metadata.name", "metadata.namespace""#,
        ),
        (
            "resourceVersion=x",
            400,
            r#"invalid resource version: resourceVersion: Invalid value: "x": strconv.ParseUint: parsing "x": invalid syntax"#,
        ),
        (
            "resourceVersionMatch=Exact",
            422,
            r#"ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch: Forbidden: resourceVersionMatch is forbidden unless resourceVersion is provided"#,
        ),
        (
            "continue=e30",
            400,
            "invalid continue token: continue key is not valid: server does not recognize this encoded version ",
        ),
    ];
    for (query, code, message) in rows {
        let reply = world.get(&format!("{MAPS}?{query}")).await;
        assert_eq!(
            (reply.code, reply.at("/message").as_str().unwrap_or_default()),
            (code, message),
            "{query}"
        );
    }
}

#[tokio::test]
async fn objects_have_other_representations() {
    let world = with_three_maps().await;
    let path = format!("{MAPS}/a");
    let rows = [
        ("application/json;as=Table;v=v1;g=meta.k8s.io", "Table"),
        ("application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io", "PartialObjectMetadata"),
        ("application/json", "ConfigMap"),
    ];
    for (accept, kind) in rows {
        let reply = world.send("GET", &path, &[("accept", accept)], b"").await;
        assert_eq!(reply.at("/kind"), kind, "{accept}");
    }
    let accept = [("accept", "application/vnd.kubernetes.protobuf")];
    let protobuf = world.send("GET", &path, &accept, b"").await;
    assert!(protobuf.bytes.starts_with(b"k8s\0"));
    let headers = [accept[0], ("content-type", "application/vnd.kubernetes.protobuf")];
    let mut object =
        ferrite_api::codec::protobuf::decode(&protobuf.bytes).expect("protobuf").expect("a kind");
    object["metadata"]["name"] = "from-protobuf".into();
    object["metadata"]["resourceVersion"] = Value::Null;
    let body = ferrite_api::codec::protobuf::encode(&object).expect("encodes");
    assert_eq!(world.send("POST", MAPS, &headers, &body).await.code, 201);
    assert_eq!(world.get(&format!("{MAPS}/from-protobuf")).await.at("/data/k"), "a");
    let refused = world.send("GET", &path, &[("accept", "text/html")], b"").await;
    assert_eq!(refused.code, 406);
}

#[tokio::test]
async fn a_watch_tells_what_happens_after_a_version() {
    let world = with_three_maps().await;
    let version = world.get(MAPS).await.at("/metadata/resourceVersion");
    world.patch("merge", &format!("{MAPS}/b"), &json!({"data": {"k": "2"}})).await;
    world.patch("merge", &format!("{MAPS}/c"), &json!({"metadata": {"labels": {"t": null}}})).await;
    world.delete(&format!("{MAPS}/a")).await;
    let version = version.as_str().expect("a version");
    let path = format!("{MAPS}?watch=1&timeoutSeconds=1&resourceVersion={version}&labelSelector=t%3Dx");
    let reply = world.get(&path).await;
    let events: Vec<(String, String)> = reply
        .bytes
        .split(|b| *b == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            let event: Value = ferrite_json::from_slice(line).expect("an event");
            let text = |p: &str| event.pointer(p).and_then(Value::as_str).unwrap_or_default().to_owned();
            (text("/type"), text("/object/metadata/name"))
        })
        .collect();
    let expected = [("MODIFIED", "b"), ("DELETED", "c"), ("DELETED", "a")];
    assert_eq!(events, expected.map(|(t, n)| (t.to_owned(), n.to_owned())));
}

#[tokio::test]
async fn documents_tell_what_is_served() {
    let world = World::start().await;
    for (path, pointer, value) in [
        ("/version", "/major", json!("1")),
        ("/api", "/versions/0", json!("v1")),
        ("/apis/apps", "/preferredVersion/groupVersion", json!("apps/v1")),
        ("/openapi/v3/apis/apps/v1", "/openapi", json!("3.0.0")),
    ] {
        let reply = world.get(path).await;
        assert_eq!((reply.code, reply.at(pointer)), (200, value), "{path}");
    }
    // The server is ready when it has stored the APIServices of its own groups.
    while world.get("/readyz").await.code != 200 {
        tokio::task::yield_now().await;
    }
    assert_eq!(world.get("/readyz").await.bytes, "ok");
    assert_eq!(world.get("/readyz/bogus").await.code, 404);
    let tag = world.get("/openapi/v3/apis/apps/v1").await.header("etag").to_owned();
    let again = world.send("GET", "/openapi/v3/apis/apps/v1", &[("if-none-match", &tag)], b"").await;
    assert_eq!(again.code, 304);
}

#[tokio::test]
async fn documents_of_versions_come_as_json_and_protobuf() {
    let world = World::start().await;
    let path = "/openapi/v3/apis/apps/v1";
    let json = world.get(path).await;
    let schemas = json.at("/components/schemas");
    let strategy = &schemas["io.k8s.api.apps.v1.DeploymentStrategy"]["properties"]["type"];
    assert_eq!(strategy["enum"], json!(["Recreate", "RollingUpdate"]));
    let time = &schemas["io.k8s.apimachinery.pkg.apis.meta.v1.Time"];
    assert_eq!((&time["type"], &time["format"]), (&json!("string"), &json!("date-time")));
    assert!(strategy["description"].as_str().is_some_and(|text| text.contains("(default)")), "{strategy}");
    // Everything that is referred to is there.
    let text = String::from_utf8_lossy(&json.bytes).into_owned();
    for reference in text.split("#/components/schemas/").skip(1) {
        let name = reference.split('"').next().unwrap_or_default();
        assert!(schemas.get(name).is_some(), "{name}");
    }
    let accept = [("accept", "application/com.github.proto-openapi.spec.v3@v1.0+protobuf")];
    let protobuf = world.send("GET", path, &accept, b"").await;
    assert_eq!(protobuf.header("content-type"), "application/com.github.proto-openapi.spec.v3.v1.0+protobuf");
    assert!(protobuf.bytes.starts_with(b"\x0a\x053.0.0\x12"));
    assert_eq!(protobuf.header("etag"), json.header("etag"));
    let hash = json.header("etag").trim_matches('"').to_owned();
    let pinned = world.get(&format!("{path}?hash={hash}")).await;
    assert_eq!(pinned.header("cache-control"), "public, immutable");
    let old = world.get(&format!("{path}?hash=0")).await;
    assert_eq!((old.code, old.header("location")), (301, format!("{path}?hash={hash}").as_str()));
}

#[tokio::test]
async fn profiles_are_there_only_if_asked_for() {
    let world = World::start().await;
    assert_eq!(world.get("/debug/pprof/").await.code, 404);
    let world = World::start_with(ferrite_apiserver::Serving { profiling: true, ..Default::default() }).await;
    for (path, code) in
        [("", 200), ("cmdline", 200), ("heap", 501), ("profile?seconds=1", 501), ("nothing", 404)]
    {
        assert_eq!(world.get(&format!("/debug/pprof/{path}")).await.code, code, "{path}");
    }
    let somebody = world.as_user(ferrite_apiserver::User::new("eve", ["g"]));
    assert_eq!(somebody.get("/debug/pprof/cmdline").await.code, 403);
}

/// The documents and validation list allowed values separately: they must agree.
#[tokio::test]
async fn documents_list_every_value_that_is_accepted() {
    let world = World::start().await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"},
        "spec": {"containers": [{"name": "c", "image": "i", "ports": [{"containerPort": 1}]}], "tolerations": [{"key": "k"}]},
    });
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"ports": [{"port": 1}]},
    });
    let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": pod["spec"]});
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": template},
    });
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template},
    });
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "x"}, "spec": {},
    });
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "x"},
        "spec": {"accessModes": ["x"], "resources": {"requests": {"storage": "1Gi"}}},
    });
    let request = json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": "x"},
        "spec": {"request": world.certificate_request(), "signerName": "example.com/s", "usages": ["x"]},
    });
    let hook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "x"},
        "webhooks": [{"name": "a.b.c", "clientConfig": {"url": "https://x"}, "admissionReviewVersions": ["v1"]}],
    });
    let namespaced = |root: &str, plural: &str| format!("{root}/namespaces/default/{plural}");
    let (core, pods, services) =
        ("/api/v1", namespaced("/api/v1", "pods"), namespaced("/api/v1", "services"));
    let claims = namespaced(core, "persistentvolumeclaims");
    let deployments = namespaced("/apis/apps/v1", "deployments");
    let jobs = namespaced("/apis/batch/v1", "jobs");
    let budgets = namespaced("/apis/policy/v1", "poddisruptionbudgets");
    let requests = "/apis/certificates.k8s.io/v1/certificatesigningrequests".to_owned();
    let hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations".to_owned();
    for (path, object, field, type_) in [
        (&pods, &pod, "/spec/restartPolicy", "core.v1.PodSpec"),
        (&pods, &pod, "/spec/dnsPolicy", "core.v1.PodSpec"),
        (&pods, &pod, "/spec/containers/0/imagePullPolicy", "core.v1.Container"),
        (&pods, &pod, "/spec/containers/0/terminationMessagePolicy", "core.v1.Container"),
        (&pods, &pod, "/spec/containers/0/ports/0/protocol", "core.v1.ContainerPort"),
        (&pods, &pod, "/spec/tolerations/0/operator", "core.v1.Toleration"),
        (&pods, &pod, "/spec/tolerations/0/effect", "core.v1.Toleration"),
        (&services, &service, "/spec/type", "core.v1.ServiceSpec"),
        (&services, &service, "/spec/sessionAffinity", "core.v1.ServiceSpec"),
        (&services, &service, "/spec/internalTrafficPolicy", "core.v1.ServiceSpec"),
        (&services, &service, "/spec/ipFamilyPolicy", "core.v1.ServiceSpec"),
        (&services, &service, "/spec/ports/0/protocol", "core.v1.ServicePort"),
        (&claims, &claim, "/spec/accessModes/0", "core.v1.PersistentVolumeClaimSpec"),
        (&claims, &claim, "/spec/volumeMode", "core.v1.PersistentVolumeClaimSpec"),
        (&deployments, &deployment, "/spec/strategy/type", "apps.v1.DeploymentStrategy"),
        (&jobs, &job, "/spec/completionMode", "batch.v1.JobSpec"),
        (&budgets, &budget, "/spec/unhealthyPodEvictionPolicy", "policy.v1.PodDisruptionBudgetSpec"),
        (&requests, &request, "/spec/usages/0", "certificates.v1.CertificateSigningRequestSpec"),
        (&hooks, &hook, "/webhooks/0/failurePolicy", "admissionregistration.v1.ValidatingWebhook"),
        (&hooks, &hook, "/webhooks/0/matchPolicy", "admissionregistration.v1.ValidatingWebhook"),
        (&hooks, &hook, "/webhooks/0/sideEffects", "admissionregistration.v1.ValidatingWebhook"),
    ] {
        let mut object = object.clone();
        let (parent, name) = field.rsplit_once('/').expect("a pointer");
        match object.pointer_mut(parent) {
            Some(Value::Array(items)) => items[0] = "nonsense".into(),
            Some(parent) => parent[name] = "nonsense".into(),
            None => {
                let (owner, child) = parent.rsplit_once('/').expect("a pointer");
                object.pointer_mut(owner).expect("an owner")[child] = json!({name: "nonsense"});
            }
        }
        let refusal = world.post(path, &object).await.json();
        let causes = refusal["details"]["causes"].as_array().into_iter().flatten();
        let messages = causes.filter_map(|cause| cause["message"].as_str());
        let listed = messages
            .filter(|message| message.contains("nonsense"))
            .find_map(|message| message.split_once("supported values: "))
            .unwrap_or_else(|| panic!("{field}: {refusal}"))
            .1;
        let root = match object["apiVersion"].as_str() {
            Some("v1") => "api/v1".to_owned(),
            version => format!("apis/{}", version.expect("a version")),
        };
        let name = if name == "0" { parent.rsplit('/').next().unwrap_or_default() } else { name };
        let document = world.get(&format!("/openapi/v3/{root}")).await;
        let schema = document.at(&format!("/components/schemas/io.k8s.api.{type_}/properties/{name}"));
        let told = if schema["enum"].is_array() { &schema["enum"] } else { &schema["items"]["enum"] };
        let told = told.as_array().unwrap_or_else(|| panic!("{type_}.{name}: {schema}"));
        for value in listed.split('"').skip(1).step_by(2) {
            assert!(told.contains(&json!(value)), "{type_}.{name}: {value:?} is not in {told:?}: {refusal}");
        }
    }
}

#[tokio::test]
async fn components_say_how_they_are() {
    let world = World::start().await;
    world.server().hosts(ferrite_apiserver::Component::Scheduler, || Ok(()));
    world.server().hosts(ferrite_apiserver::Component::ControllerManager, || Err("it has stopped".into()));
    let list = world.get("/api/v1/componentstatuses").await.json();
    assert_eq!(list["metadata"], json!({}), "nothing of it is stored");
    let told: Vec<[&str; 3]> = list["items"]
        .as_array()
        .expect("items")
        .iter()
        .map(|item| {
            let text = |pointer: &str| item.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
            [text("/metadata/name"), text("/conditions/0/status"), text("/conditions/0/message")]
        })
        .collect();
    assert_eq!(
        told,
        [
            ["scheduler", "True", "ok"],
            ["controller-manager", "False", "it has stopped"],
            ["etcd-0", "True", "ok"],
        ]
    );
    let one = world.get("/api/v1/componentstatuses?fieldSelector=metadata.name%3Detcd-0").await.json();
    assert_eq!(names(&one), ["etcd-0"]);
    assert_eq!(world.get("/api/v1/componentstatuses/etcd-0").await.at("/kind"), "ComponentStatus");
    let missing = world.get("/api/v1/componentstatuses/x").await;
    assert_eq!((missing.code, missing.at("/message")), (404, json!("componentstatus \"x\" not found")));
}

#[tokio::test]
async fn empty_segments_of_a_path_are_empty_names() {
    let world = with_three_maps().await;
    let all = world.get("/api/v1/namespaces//configmaps?labelSelector=t%3Dx").await;
    assert_eq!(names(&all.json()), ["a", "b", "c"], "an empty namespace is every namespace");
    let rows = [
        ("/api/v1/namespaces//configmaps/a", 400, "Namespace parameter required."),
        ("/api/v1/nodes//status", 400, "name must be provided"),
        ("/api/v1//pods", 404, "the server could not find the requested resource"),
        (
            "/api/v1/watch/namespaces/default/pods/a/log",
            404,
            "the server could not find the requested resource",
        ),
        ("/api/v1/watch/componentstatuses", 404, "the server could not find the requested resource"),
    ];
    for (path, code, message) in rows {
        let reply = world.get(path).await;
        assert_eq!((reply.code, reply.at("/message")), (code, json!(message)), "{path}");
    }
    let nowhere = world.post("/api/v1/namespaces//configmaps", &config_map("d", json!({}))).await;
    assert_eq!((nowhere.code, nowhere.at("/details/causes/0/field")), (422, json!("metadata.namespace")));
    let everything = world.delete("/api/v1/namespaces//configmaps").await;
    assert_eq!((everything.code, everything.at("/message")), (400, json!("Namespace parameter required.")));
    assert_eq!(world.get(&format!("{MAPS}/a")).await.code, 200, "nothing was deleted");
    assert_eq!(world.get("/api/v1/watch/").await.code, 500);
    assert_eq!(world.get("/healthz/").await.code, 404);
}

#[tokio::test]
async fn pods_of_a_node_are_listed_as_they_move() {
    let world = World::start().await;
    let of_node = |node: &str| format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{node}");
    for name in ["a", "b", "c"] {
        let mut pod = pod(name);
        pod["spec"]["nodeName"] = if name == "a" { json!("n1") } else { json!("") };
        assert_eq!(world.post(PODS, &pod).await.code, 201);
    }
    assert_eq!(names(&world.get(&of_node("n1")).await.json()), ["a"]);
    assert_eq!(names(&world.get(&of_node("")).await.json()), ["b", "c"]);
    let before = world.version().await;
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "b"}, "target": {"kind": "Node", "name": "n1"}});
    assert_eq!(world.post(&format!("{PODS}/b/binding"), &binding).await.code, 201);
    assert_eq!(names(&world.get(&of_node("n1")).await.json()), ["a", "b"]);
    let past = format!("{}&resourceVersion={before}&resourceVersionMatch=Exact", of_node("n1"));
    assert_eq!(names(&world.get(&past).await.json()), ["a"], "as it was before");
    assert_eq!(world.delete(&format!("{PODS}/a?gracePeriodSeconds=0")).await.code, 200);
    assert_eq!(names(&world.get(&of_node("n1")).await.json()), ["b"]);
    assert_eq!(names(&world.get(&format!("{PODS}?fieldSelector=metadata.name%3Db")).await.json()), ["b"]);
}
