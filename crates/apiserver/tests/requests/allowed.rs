use crate::world::*;
use ferrite_apiserver::User;
use ferrite_json::json;

const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings";
const ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles";

fn bind(role: &str) -> ferrite_json::Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": role},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "bob"}],
    })
}

#[tokio::test]
async fn a_binding_gives_what_its_role_allows_and_no_more() {
    let world = World::start().await;
    let bob = world.as_user(User::new("bob", Vec::<String>::new()));
    let refused = bob.get(MAPS).await;
    assert_eq!(
        (refused.code, refused.at("/message")),
        (
            403,
            json!(
                r#"configmaps is forbidden: User "bob" cannot list resource "configmaps" in API group "" in the namespace "default""#
            )
        )
    );
    assert_eq!(world.post(BINDINGS, &bind("view")).await.code, 201);
    assert_eq!(bob.get(MAPS).await.code, 200);
    assert_eq!(bob.post(MAPS, &config_map("a", json!({}))).await.code, 403);
    assert_eq!(bob.get("/api/v1/namespaces/kube-system/configmaps").await.code, 403);
    assert_eq!(world.delete(&format!("{BINDINGS}/view")).await.code, 200);
    assert_eq!(bob.get(MAPS).await.code, 403, "the right ends with the binding");
}

#[tokio::test]
async fn nobody_grants_what_they_do_not_have() {
    let world = World::start().await;
    let bob = world.as_user(User::new("bob", Vec::<String>::new()));
    assert_eq!(world.post(BINDINGS, &bind("admin")).await.code, 201);
    let role = |resource: &str| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": resource},
            "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": [resource]}],
        })
    };
    assert_eq!(bob.post(ROLES, &role("pods")).await.code, 201);
    let refused = bob.post(ROLES, &role("nodes")).await;
    let message = refused.at("/message");
    assert!(
        message
            .as_str()
            .is_some_and(|m| m.ends_with("{APIGroups:[\"\"], Resources:[\"nodes\"], Verbs:[\"get\"]}")),
        "{message}"
    );
    assert_eq!(bob.post(BINDINGS, &bind("cluster-admin")).await.code, 403);
}

#[tokio::test]
async fn a_user_with_the_right_acts_as_another() {
    let world = World::start().await;
    let as_bob = [("impersonate-user", "bob")];
    assert_eq!(world.send("GET", MAPS, &as_bob, b"").await.code, 403);
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
    let headers = [as_bob[0], ("content-type", "application/json"), ("impersonate-group", "g")];
    let path = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
    let who = world.send("POST", path, &headers, review.to_string().as_bytes()).await;
    assert_eq!(who.at("/status/userInfo/groups"), json!(["g", "system:authenticated"]));
    let nobody = world.send("GET", MAPS, &[("impersonate-group", "g")], b"").await;
    assert_eq!(nobody.code, 400);
}

#[tokio::test]
async fn a_node_reads_what_its_pods_use() {
    let world = World::start().await;
    let node = world.as_user(User::new("system:node:n", ["system:nodes"]));
    for name in ["used", "other"] {
        world.post(MAPS, &config_map(name, json!({}))).await;
    }
    let mut pod = pod("p");
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "used"}}]);
    assert_eq!(world.post(PODS, &pod).await.code, 201);
    assert_eq!(node.get(&format!("{MAPS}/used")).await.code, 200);
    assert_eq!(node.get(&format!("{MAPS}/other")).await.code, 403);
    assert_eq!(node.get(MAPS).await.code, 403);
    // Credential provider plugins see the pods' accounts, and no others.
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    let other = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "other"}});
    assert_eq!(world.post(accounts, &other).await.code, 201);
    assert_eq!(node.get(&format!("{accounts}/default")).await.code, 200);
    assert_eq!(node.get(&format!("{accounts}/other")).await.code, 403);
}

#[tokio::test]
async fn a_node_reads_the_secrets_of_its_volumes() {
    let world = World::start().await;
    let node = world.as_user(User::new("system:node:n", ["system:nodes"]));
    let secrets = "/api/v1/namespaces/storage/secrets";
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "storage"}});
    assert_eq!(world.post("/api/v1/namespaces", &namespace).await.code, 201);
    for name in ["stage", "publish", "of-the-controller", "of-another"] {
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}});
        assert_eq!(world.post(secrets, &secret).await.code, 201);
    }
    let reference = |name: &str| json!({"namespace": "storage", "name": name});
    let volume = |claim: &str, stage: &str| {
        json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": claim}, "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
            "claimRef": {"namespace": "default", "name": claim},
            "csi": {"driver": "d.example.com", "volumeHandle": claim, "nodeStageSecretRef": reference(stage),
                "nodePublishSecretRef": reference("publish"),
                "controllerPublishSecretRef": reference("of-the-controller")}}})
    };
    for (claim, stage) in [("disk", "stage"), ("unused", "of-another")] {
        let made = world.post("/api/v1/persistentvolumes", &volume(claim, stage)).await;
        assert_eq!(made.code, 201, "{}", made.json());
    }
    assert_eq!(node.get(&format!("{secrets}/stage")).await.code, 403, "no pod uses the volume");
    let mut pod = pod("p");
    pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "disk"}}]);
    assert_eq!(world.post(PODS, &pod).await.code, 201);
    for (name, code) in [("stage", 200), ("publish", 200), ("of-the-controller", 403), ("of-another", 403)] {
        assert_eq!(node.get(&format!("{secrets}/{name}")).await.code, code, "{name}");
    }
    let other = world.as_user(User::new("system:node:m", ["system:nodes"]));
    assert_eq!(other.get(&format!("{secrets}/stage")).await.code, 403);
}

#[tokio::test]
async fn large_answers_are_compressed_and_requests_are_counted() {
    let world = World::start().await;
    let large = "x".repeat(200 << 10);
    assert_eq!(world.post(MAPS, &config_map("large", json!({"k": large}))).await.code, 201);
    let path = format!("{MAPS}/large");
    let reply = world.send("GET", &path, &[("accept-encoding", "gzip")], b"").await;
    assert_eq!(reply.header("content-encoding"), "gzip");
    assert!(reply.bytes.len() < 10 << 10, "{}", reply.bytes.len());
    assert_eq!(world.get(&path).await.header("content-encoding"), "");
    let metrics = world.get("/metrics").await;
    let text = String::from_utf8_lossy(&metrics.bytes);
    let line = r#"apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="configmaps",scope="resource",subresource="",verb="GET",version="v1"} 2"#;
    assert!(text.contains(line), "{text}");
}
