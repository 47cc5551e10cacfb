//! More answers that differed from upstream's.

use crate::world::*;
use ferrite_json::{Value, json};

const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

#[tokio::test]
async fn the_status_of_some_kinds_is_no_table() {
    let world = World::start().await;
    let service = json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
        "metadata": {"name": "v1.x.example"}, "spec": {"group": "x.example", "version": "v1",
        "groupPriorityMinimum": 1, "versionPriority": 1, "service": {"namespace": "a", "name": "b"}}});
    let services = "/apis/apiregistration.k8s.io/v1/apiservices";
    assert_eq!(world.post(services, &service).await.code, 201);
    assert_eq!(world.post(PODS, &pod("p")).await.code, 201);
    for (path, code) in [
        (format!("{services}/v1.x.example"), 200),
        (format!("{services}/v1.x.example/status"), 406),
        (format!("{PODS}/p/status"), 200),
    ] {
        let reply = world.send("GET", &path, &[("accept", TABLE)], b"").await;
        assert_eq!(reply.code, code, "{path}");
    }
}

#[tokio::test]
async fn another_grace_period_is_refused() {
    let world = World::start().await;
    let mut map = config_map("held", json!({}));
    map["metadata"]["finalizers"] = json!(["example.com/f"]);
    assert_eq!(world.post(MAPS, &map).await.code, 201);
    let path = format!("{MAPS}/held");
    assert_eq!(world.delete(&path).await.code, 200);
    let period = |seconds: Value| json!({"metadata": {"deletionGracePeriodSeconds": seconds}});
    let refused = world.patch("merge", &path, &period(json!(7))).await;
    assert_eq!(
        (refused.code, refused.at("/details/causes/0/field")),
        (422, json!("metadata.deletionGracePeriodSeconds"))
    );
    assert_eq!(world.patch("merge", &path, &period(json!(0))).await.code, 200);
    assert_eq!(world.patch("merge", &path, &period(json!(null))).await.code, 200);
}

#[tokio::test]
async fn annotations_of_an_older_version_are_not_in_its_metadata_alone() {
    const V1: &str = "/apis/autoscaling/v1/namespaces/default/horizontalpodautoscalers";
    const V2: &str = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers";
    let world = World::start().await;
    let scaler = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "h"},
        "spec": {"maxReplicas": 3, "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"},
        "behavior": {"scaleUp": {"selectPolicy": "Min"}}}});
    assert_eq!(world.post(V2, &scaler).await.code, 201);
    let path = format!("{V1}/h");
    let annotation = "/metadata/annotations/autoscaling.alpha.kubernetes.io~1behavior";
    assert!(world.get(&path).await.at(annotation).is_string());
    let accept = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io";
    let metadata = world.send("GET", &path, &[("accept", accept)], b"").await;
    assert_eq!((metadata.code, metadata.at("/metadata/annotations")), (200, json!(null)));
}

#[tokio::test]
async fn a_limit_range_without_a_name_gets_one() {
    let world = World::start().await;
    let ranges = "/api/v1/namespaces/default/limitranges";
    let range = json!({"apiVersion": "v1", "kind": "LimitRange", "spec": {"limits": []}});
    let mut names = Vec::new();
    for _ in 0..2 {
        let made = world.post(ranges, &range).await;
        assert_eq!((made.code, made.at("/metadata/name")), (201, made.at("/metadata/uid")));
        names.push(made.at("/metadata/name").as_str().expect("a name").to_owned());
    }
    for name in names {
        assert_eq!(world.get(&format!("{ranges}/{name}")).await.code, 200);
    }
}

#[tokio::test]
async fn requests_without_a_route_get_no_warning() {
    let world = World::start().await;
    let endpoints = "/api/v1/namespaces/default/endpoints";
    let object = json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "e"}});
    assert!(world.post(endpoints, &object).await.header("warning").contains("deprecated"));
    let refused = world.post(&format!("{endpoints}/e"), &object).await;
    assert_eq!((refused.code, refused.header("warning")), (405, ""));
}

#[tokio::test]
async fn a_users_own_status_of_a_token_stays() {
    let world = World::start().await;
    let reviews = "/apis/authentication.k8s.io/v1/tokenreviews";
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": "x"},
        "status": {"user": {"username": "q"}}});
    let reply = world.post(reviews, &review).await;
    assert_eq!((reply.code, reply.at("/status/user/username")), (201, json!("q")));
    assert_eq!(reply.at("/status/authenticated"), json!(null));
}

#[tokio::test]
async fn metadata_of_a_review_are_shown_as_declared() {
    let world = World::start().await;
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "metadata": {"labels": {"a": "b"}, "name": "x"}, "spec": {"user": "u", "resourceAttributes": {"verb": "get"}}});
    let refused = world.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", &review).await;
    let message = refused.at("/details/causes/0/message").as_str().unwrap_or_default().to_owned();
    let start = r#"Invalid value: {"name":"x","labels":{"a":"b"},"managedFields":[{"manager":"tester","operation":"Update","apiVersion":"#;
    assert!(message.starts_with(start), "{message}");
}

#[tokio::test]
async fn finalizers_of_a_namespace_are_names() {
    let world = World::start().await;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"},
        "spec": {"finalizers": ["bad one"]}});
    let refused = world.put("/api/v1/namespaces/default/finalize", &namespace).await;
    assert_eq!(refused.code, 422);
    assert_eq!(refused.at("/details/causes").as_array().map(Vec::len), Some(2));
}

#[tokio::test]
async fn a_patch_of_a_revision_is_checked_after_its_name() {
    let world = World::start().await;
    let revisions = "/apis/apps/v1/namespaces/default/controllerrevisions";
    let revision = json!({"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": {"name": "r"},
        "revision": 1, "data": {"apiVersion": "v1", "kind": "ConfigMap"}});
    assert_eq!(world.post(revisions, &revision).await.code, 201);
    let path = format!("{revisions}/r");
    assert_eq!(world.patch("merge", &path, &json!({"metadata": {"name": null}})).await.code, 400);
    let refused = world.patch("merge", &path, &json!({"metadata": {"uid": "x"}})).await;
    let fields: Vec<Value> =
        (0..3).map(|index| refused.at(&format!("/details/causes/{index}/field"))).collect();
    assert_eq!(fields, ["metadata.uid", "metadata.uid", "data"]);
}

#[tokio::test]
async fn the_objects_of_the_server_have_upstreams_managers() {
    let world = World::start().await;
    for (path, manager) in [
        (
            "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/exempt",
            "api-priority-and-fairness-config-producer-v1",
        ),
        (
            "/apis/flowcontrol.apiserver.k8s.io/v1/prioritylevelconfigurations/exempt",
            "api-priority-and-fairness-config-producer-v1",
        ),
        ("/apis/scheduling.k8s.io/v1/priorityclasses/system-node-critical", "kube-apiserver"),
    ] {
        assert_eq!(world.get(path).await.at("/metadata/managedFields/0/manager"), manager, "{path}");
    }
    let class = world.get("/apis/scheduling.k8s.io/v1/priorityclasses/system-cluster-critical").await;
    assert!(class.at("/description").is_string());
}

#[tokio::test]
async fn metadata_are_validated_as_often_as_the_kind_does() {
    let world = World::start().await;
    let map = config_map("m", json!({}));
    assert_eq!(world.post(MAPS, &map).await.code, 201);
    let budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    let budget = json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "m"}});
    assert_eq!(world.post(budgets, &budget).await.code, 201);
    let ranges = "/api/v1/namespaces/default/limitranges";
    let range = json!({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "m"}});
    assert_eq!(world.post(ranges, &range).await.code, 201);
    let leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "m"}});
    assert_eq!(world.post(leases, &lease).await.code, 201);
    let patches = [
        json!({"uid": "x"}),
        json!({"finalizers": ["x"]}),
        json!({"labels": {"a": "not valid!"}, "finalizers": ["x"]}),
    ];
    for (kind, causes) in [(MAPS, [2, 2, 6]), (ranges, [1, 1, 4]), (leases, [2, 0, 3]), (budgets, [1, 0, 2])]
    {
        for (patch, expected) in patches.iter().zip(causes) {
            let reply = world.patch("merge", &format!("{kind}/m"), &json!({"metadata": patch})).await;
            let found = reply.at("/details/causes").as_array().map_or(0, Vec::len);
            assert_eq!(found, expected, "{kind} {patch} {}", reply.json());
        }
    }
}
