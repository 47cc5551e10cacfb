//! Subresources.

use crate::world::*;
use ferrite_apiserver::User;
use ferrite_json::{Value, json};

const BUDGETS: &str = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";
const TOKENS: &str = "/api/v1/namespaces/default/serviceaccounts/default/token";
const REVIEWS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

fn eviction(name: &str) -> Value {
    json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}})
}

async fn running(world: &World, name: &str) {
    let mut pod = pod(name);
    pod["metadata"]["labels"] = json!({"app": "x"});
    assert_eq!(world.post(PODS, &pod).await.code, 201);
    let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    assert_eq!(world.patch("merge", &format!("{PODS}/{name}/status"), &status).await.code, 200);
}

async fn budget(world: &World, name: &str, allowed: i64) {
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "x"}}},
    });
    assert_eq!(world.post(BUDGETS, &budget).await.code, 201);
    let status = json!({"status": {
        "disruptionsAllowed": allowed, "currentHealthy": 2, "desiredHealthy": 1, "expectedPods": 2,
        "observedGeneration": 1,
    }});
    assert_eq!(world.patch("merge", &format!("{BUDGETS}/{name}/status"), &status).await.code, 200);
}

#[tokio::test]
async fn an_eviction_takes_from_the_budget_until_nothing_is_left() {
    let world = World::start().await;
    running(&world, "a").await;
    running(&world, "b").await;
    budget(&world, "one", 1).await;
    let evict = |name: &'static str| {
        let world = &world;
        async move { world.post(&format!("{PODS}/{name}/eviction"), &eviction(name)).await }
    };
    let dry = world.post(&format!("{PODS}/a/eviction?dryRun=All"), &eviction("a")).await;
    assert_eq!(dry.code, 201);
    assert_eq!(world.get(&format!("{BUDGETS}/one")).await.at("/status/disruptionsAllowed"), 1);
    assert_eq!(evict("a").await.code, 201);
    let pod = world.get(&format!("{PODS}/a")).await;
    assert!(pod.at("/metadata/deletionTimestamp").is_string());
    assert_eq!(pod.at("/status/conditions/1/reason"), "EvictionByEvictionAPI");
    let after = world.get(&format!("{BUDGETS}/one")).await;
    assert_eq!(after.at("/status/disruptionsAllowed"), 0);
    assert!(after.at("/status/disruptedPods/a").is_string());
    let refused = evict("b").await;
    assert_eq!(
        (refused.code, refused.at("/details/causes/0/message")),
        (429, json!("The disruption budget one needs 1 healthy pods and has 2 currently"))
    );
    assert_eq!(refused.header("retry-after"), "");
    assert!(world.get(&format!("{PODS}/b")).await.at("/metadata/deletionTimestamp").is_null());
    budget(&world, "two", 1).await;
    assert_eq!(evict("b").await.code, 500, "two budgets are one too many");
}

#[tokio::test]
async fn a_running_pod_is_resized_within_its_class() {
    let world = World::start().await;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}});
    assert_eq!(world.post("/api/v1/nodes", &node).await.code, 201);
    let status = json!({"status": {"allocatable": {"cpu": "2", "memory": "1Gi"}}});
    assert_eq!(world.patch("merge", "/api/v1/nodes/n/status", &status).await.code, 200);
    let mut pod = pod("p");
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "100m"}});
    world.post(PODS, &pod).await;
    let resize = |resources: Value| {
        let world = &world;
        async move {
            let patch = json!({"spec": {"containers": [{"name": "c", "resources": resources}]}});
            world.patch("strategic-merge", &format!("{PODS}/p/resize"), &patch).await
        }
    };
    let grown = resize(json!({"requests": {"cpu": "200m"}})).await;
    assert_eq!((grown.code, grown.at("/spec/containers/0/resources/requests/cpu")), (200, json!("200m")));
    assert_eq!(grown.at("/metadata/generation"), 2);
    let refused = resize(
        json!({"requests": {"cpu": "200m", "memory": "1Gi"}, "limits": {"cpu": "200m", "memory": "1Gi"}}),
    )
    .await;
    assert_eq!(refused.code, 422, "the class would change");
}

#[tokio::test]
async fn a_whole_pod_is_resized_as_far_as_its_node_goes() {
    let world = World::start().await;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}});
    assert_eq!(world.post("/api/v1/nodes", &node).await.code, 201);
    let report = |features: Value| {
        let world = &world;
        async move {
            let status = json!({"status": {"allocatable": {"cpu": "2", "memory": "1Gi"}, "declaredFeatures": features}});
            assert_eq!(world.patch("merge", "/api/v1/nodes/n/status", &status).await.code, 200);
        }
    };
    let mut pod = pod("p");
    pod["spec"]["resources"] = json!({"requests": {"cpu": "100m"}});
    assert_eq!(world.post(PODS, &pod).await.code, 201);
    let resize = |cpu: &str| {
        let (world, patch) = (&world, json!({"spec": {"resources": {"requests": {"cpu": cpu}}}}));
        async move { world.patch("merge", &format!("{PODS}/p/resize"), &patch).await }
    };
    report(json!([])).await;
    let refused = resize("200m").await;
    assert_eq!(
        (refused.code, refused.at("/message")),
        (
            403,
            json!(
                "pods \"p\" is forbidden: pod update requires features InPlacePodLevelResourcesVerticalScaling which are not available on node \"n\""
            )
        )
    );
    report(json!(["InPlacePodLevelResourcesVerticalScaling"])).await;
    let grown = resize("200m").await;
    assert_eq!((grown.code, grown.at("/spec/resources/requests/cpu")), (200, json!("200m")));
    assert_eq!(grown.at("/metadata/generation"), 2);
    let refused = resize("2001m").await;
    assert_eq!(
        (refused.code, refused.at("/message")),
        (
            403,
            json!(
                "pods \"p\" is forbidden: node didn't have enough allocatable resources: cpu, requested: 2001, allocatable: 2000"
            )
        )
    );
    assert_eq!(refused.at("/details/causes/0/reason"), "NodeCapacity");
    assert_eq!(resize("2").await.code, 200);
}

#[tokio::test]
async fn certificates_are_approved_by_those_who_may() {
    let world = World::start().await;
    let request = json!({
        "apiVersion": "certificates.k8s.io/v1", "kind": "CertificateSigningRequest", "metadata": {"name": "r"},
        "spec": {"request": world.certificate_request(), "signerName": "example.com/s", "usages": ["client auth"],
            "username": "somebody else"},
    });
    let made = world.post(REQUESTS, &request).await;
    assert_eq!((made.code, made.at("/spec/username")), (201, json!("admin")), "{}", made.json());
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "csr"},
        "rules": [{"verbs": ["*"], "apiGroups": ["certificates.k8s.io"], "resources": [
            "certificatesigningrequests", "certificatesigningrequests/approval", "certificatesigningrequests/status"]}],
    });
    world.post("/apis/rbac.authorization.k8s.io/v1/clusterroles", &role).await;
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "csr"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "csr"},
        "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "bob"}],
    });
    world.post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", &binding).await;
    let bob = world.as_user(User::new("bob", Vec::<String>::new()));
    let approved = |kind: &str| {
        let mut object = made.json();
        object["metadata"].as_object_mut().unwrap().remove("resourceVersion");
        object["status"] = json!({"conditions": [{"type": kind, "status": "True", "reason": "R"}]});
        object
    };
    let path = format!("{REQUESTS}/r/approval");
    let refused = bob.put(&path, &approved("Approved")).await;
    assert_eq!(
        refused.at("/message"),
        r#"certificatesigningrequests.certificates.k8s.io "r" is forbidden: user not permitted to approve requests with signerName "example.com/s""#
    );
    assert_eq!(world.put(&path, &approved("Approved")).await.code, 200);
    assert_eq!(world.put(&path, &approved("Denied")).await.code, 422, "decided is decided");
    // The signer reports, and leaves the decision as it is.
    let status = path.replace("/approval", "/status");
    let mut reported = world.get(path.trim_end_matches("/approval")).await.json();
    reported["status"]["conditions"][0]["message"] = "changed".into();
    let stored = world.put(&status, &reported).await;
    assert_eq!(
        (stored.code, stored.at("/status/conditions/0/message")),
        (200, json!(null)),
        "{}",
        stored.json()
    );
    reported["status"] = json!({});
    let refused = world.put(&status, &reported).await;
    assert_eq!(refused.code, 422);
    let why = r#"status.conditions: Forbidden: updates may not remove a condition of type "Approved""#;
    assert!(refused.at("/message").as_str().is_some_and(|text| text.ends_with(why)), "{}", refused.json());
}

#[tokio::test]
async fn tokens_live_as_long_as_what_they_are_bound_to() {
    let world = World::start().await;
    world.post(PODS, &pod("p")).await;
    let request =
        |spec: Value| json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
    let bound = request(json!({"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "p"}}));
    let token = world.post(TOKENS, &bound).await;
    assert_eq!(token.code, 201, "{}", token.json());
    let token = token.at("/status/token").as_str().unwrap().to_owned();
    let review = || async {
        let review = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token},
        });
        world.post(REVIEWS, &review).await.at("/status")
    };
    let alive = review().await;
    assert_eq!(alive["user"]["username"], "system:serviceaccount:default:default");
    assert_eq!(alive["user"]["extra"]["authentication.kubernetes.io/pod-name"], json!(["p"]));
    assert_eq!(alive["user"]["extra"]["authentication.kubernetes.io/node-name"], json!(["n"]));
    assert_eq!(world.delete(&format!("{PODS}/p?gracePeriodSeconds=0")).await.code, 200);
    assert_eq!(review().await["error"], "[invalid bearer token, service account token has been invalidated]");
    for (spec, code) in [
        (json!({"expirationSeconds": 1}), 422),
        (json!({"boundObjectRef": {"kind": "ConfigMap", "apiVersion": "v1", "name": "x"}}), 400),
        (json!({"boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "absent"}}), 404),
        // Any version of the core group is taken.
        (json!({"boundObjectRef": {"kind": "Pod", "apiVersion": "v2", "name": "absent"}}), 404),
        (json!({"boundObjectRef": {"kind": "Pod", "apiVersion": "apps/v1", "name": "absent"}}), 400),
        (json!({"boundObjectRef": {"kind": "Pod", "apiVersion": "v1"}}), 400),
    ] {
        assert_eq!(world.post(TOKENS, &request(spec.clone())).await.code, code, "{spec}");
    }
}

/// The status of a review of a token for these audiences.
async fn reviewed(world: &World, token: &str, audiences: &[&str]) -> Value {
    let review = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "spec": {"token": token, "audiences": audiences},
    });
    world.post(REVIEWS, &review).await.at("/status")
}

#[tokio::test]
async fn tokens_without_an_audience_are_for_this_server_alone() {
    let world = World::start().await;
    let server = world.server();
    let issuer = server.config().service_account_issuer.as_str();
    let account = world.get("/api/v1/namespaces/default/serviceaccounts/default").await;
    let key = server.config().service_account_key.clone().expect("a key");
    let signer = ferrite_pki::TokenSigner::new(&key, issuer).expect("a signer");
    let claims = json!({
        "iss": ferrite_pki::LEGACY_ISSUER,
        "kubernetes.io/serviceaccount/namespace": "default",
        "kubernetes.io/serviceaccount/secret.name": "old",
        "kubernetes.io/serviceaccount/service-account.name": "default",
        "kubernetes.io/serviceaccount/service-account.uid": account.at("/metadata/uid"),
        "sub": "system:serviceaccount:default:default",
    });
    let legacy = signer.sign(&claims).expect("a token");
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token",
        "metadata": {"name": "old", "annotations": {"kubernetes.io/service-account.name": "default"}},
        "stringData": {"token": legacy},
    });
    assert_eq!(world.post("/api/v1/namespaces/default/secrets", &secret).await.code, 201);
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "bootstrap.kubernetes.io/token",
        "metadata": {"name": "bootstrap-token-abcdef"},
        "stringData": {"token-id": "abcdef", "token-secret": "0123456789abcdef",
                       "usage-bootstrap-authentication": "true"},
    });
    assert_eq!(world.post("/api/v1/namespaces/kube-system/secrets", &secret).await.code, 201);
    let rows = [
        (legacy.as_str(), "system:serviceaccount:default:default"),
        ("abcdef.0123456789abcdef", "system:bootstrap:abcdef"),
    ];
    for (token, user) in rows {
        for audiences in [&[][..], &[issuer], &["vault", issuer]] {
            let status = reviewed(&world, token, audiences).await;
            assert_eq!(status["user"]["username"], user, "{audiences:?}: {status}");
            assert_eq!(status["audiences"], json!([issuer]), "{audiences:?}");
        }
        let status = reviewed(&world, token, &["vault"]).await;
        assert_eq!((&status["user"], status.get("authenticated")), (&json!({}), None), "{user}: {status}");
        assert!(
            status["error"].as_str().is_some_and(|error| error.contains("invalid bearer token")),
            "{status}"
        );
    }
}

#[tokio::test]
async fn a_binding_brings_where_the_node_is() {
    let world = World::start().await;
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": "n", "labels": {"topology.kubernetes.io/zone": "z"}},
    });
    assert_eq!(world.post("/api/v1/nodes", &node).await.code, 201);
    let mut free = pod("p");
    free["spec"].as_object_mut().unwrap().remove("nodeName");
    world.post(PODS, &free).await;
    let binding = json!({
        "apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"},
    });
    assert_eq!(world.post(&format!("{PODS}/p/binding"), &binding).await.code, 201);
    let bound = world.get(&format!("{PODS}/p")).await;
    assert_eq!(bound.at("/metadata/labels/topology.kubernetes.io~1zone"), "z");
}

#[tokio::test]
async fn proxies_say_what_is_missing() {
    let world = World::start().await;
    world.post(PODS, &pod("p")).await;
    // A node that says it is the server, at the address of a Service.
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"},
        "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 443}}}});
    assert_eq!(world.post("/api/v1/nodes", &node).await.code, 201);
    for (path, code, message) in [
        ("/api/v1/nodes/n/proxy/api/v1/nodes", 400, "address not allowed"),
        ("/api/v1/namespaces/default/services/absent/proxy/", 404, r#"services "absent" not found"#),
        ("/api/v1/namespaces/default/services/ftp:a:b/proxy/", 400, r#"invalid service request "ftp:a:b""#),
        ("/api/v1/namespaces/default/pods/p/proxy/", 400, "address not allowed"),
        ("/api/v1/nodes/absent/proxy/metrics", 404, r#"nodes "absent" not found"#),
    ] {
        let reply = world.get(path).await;
        assert_eq!((reply.code, reply.at("/message")), (code, json!(message)), "{path}");
    }
}

#[tokio::test]
async fn who_may_only_read_through_a_node_gets_into_no_container() {
    let world = World::start().await;
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"},
        "status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}});
    assert_eq!(world.post("/api/v1/nodes", &node).await.code, 201);
    let rbac = "rbac.authorization.k8s.io";
    let role = json!({"apiVersion": format!("{rbac}/v1"), "kind": "ClusterRole", "metadata": {"name": "r"},
        "rules": [{"apiGroups": [""], "resources": ["nodes/proxy"], "verbs": ["get"]}]});
    let binding = json!({"apiVersion": format!("{rbac}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "r"},
        "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "r"},
        "subjects": [{"apiGroup": rbac, "kind": "User", "name": "reader"}]});
    for (kind, object) in [("clusterroles", role), ("clusterrolebindings", binding)] {
        assert_eq!(world.post(&format!("/apis/{rbac}/v1/{kind}"), &object).await.code, 201);
    }
    let reader = world.as_user(User::new("reader", Vec::<String>::new()));
    let path = "/api/v1/nodes/n/proxy/exec/default/p/c?command=id&output=1";
    assert_eq!(reader.get(path).await.at("/message"), json!("address not allowed"), "the node is asked");
    let upgrade = [("connection", "upgrade"), ("upgrade", "websocket")];
    let refused = reader.send("GET", path, &upgrade, b"").await;
    assert_eq!((refused.code, refused.at("/reason")), (403, json!("Forbidden")), "{}", refused.json());
}

#[tokio::test]
async fn rules_are_told_to_whom_they_hold_for() {
    let world = World::start().await;
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": "default"},
    });
    let path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews";
    let everything = json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]});
    let rules = |reply: &Reply| reply.at("/status/resourceRules").as_array().cloned().unwrap_or_default();
    assert!(rules(&world.post(path, &review).await).contains(&everything));
    let bob = world.as_user(User::new("bob", Vec::<String>::new()));
    let his = bob.post(path, &review).await;
    assert!(!rules(&his).is_empty() && !rules(&his).contains(&everything), "{}", his.json());
    assert_eq!(his.at("/status/incomplete"), false);
}
