//! Rights that nobody gets by writing roles, bindings, headers or tokens.

use crate::world::*;
use ferrite_apiserver::User;
use ferrite_json::{Value, json};
use ferrite_store::Store;
use std::sync::Arc;

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";

fn object(kind: &str, name: &str, rest: Value) -> Value {
    let mut object = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": {"name": name},
    });
    for (key, value) in rest.as_object().expect("members") {
        object[key.as_str()] = value.clone();
    }
    object
}

/// A user with these rules in the whole cluster.
async fn user(world: &World, name: &str, rules: Value) -> World {
    let role = object("ClusterRole", name, json!({"rules": rules}));
    assert_eq!(world.post(&format!("{RBAC}/clusterroles"), &role).await.code, 201);
    let binding = object(
        "ClusterRoleBinding",
        name,
        json!({
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": name}],
        }),
    );
    assert_eq!(world.post(&format!("{RBAC}/clusterrolebindings"), &binding).await.code, 201);
    world.as_user(User::new(name, Vec::<String>::new()))
}

fn on_roles(verbs: &[&str]) -> Value {
    json!({"verbs": verbs, "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["clusterroles"]})
}

#[tokio::test]
async fn who_writes_roles_does_not_gather_rules() {
    let world = World::start().await;
    let roles = format!("{RBAC}/clusterroles");
    let all = json!({"aggregationRule": {"clusterRoleSelectors": [{}]}});
    let writer =
        user(&world, "writer", json!([on_roles(&["get", "create", "update", "patch", "delete"])])).await;
    let refused = writer.post(&roles, &object("ClusterRole", "all", all.clone())).await;
    assert_eq!(refused.code, 403);
    assert!(
        refused
            .at("/message")
            .as_str()
            .unwrap()
            .ends_with("must have cluster-admin privileges to use the aggregationRule"),
        "{}",
        refused.at("/message")
    );
    assert_eq!(writer.post(&roles, &object("ClusterRole", "mine", json!({}))).await.code, 201);
    let mine = format!("{roles}/mine");
    for kind in ["merge", "strategic-merge"] {
        assert_eq!(writer.patch(kind, &mine, &all).await.code, 403, "{kind}");
    }
    let add = json!([{"op": "add", "path": "/aggregationRule", "value": all["aggregationRule"]}]);
    assert_eq!(writer.patch("json", &mine, &add).await.code, 403);
    let applied = object("ClusterRole", "applied", all.clone());
    for name in ["applied", "mine"] {
        let applied = object("ClusterRole", name, all.clone());
        let path = format!("{roles}/{name}?fieldManager=m&force=true");
        assert_eq!(writer.patch("apply", &path, &applied).await.code, 403, "{name}");
    }
    assert_eq!(writer.put(&format!("{roles}/applied"), &applied).await.code, 403);
    // A role that has one stays as it is, and a label adds no role to another.
    assert_eq!(
        writer.patch("merge", &format!("{roles}/edit"), &json!({"aggregationRule": null})).await.code,
        403
    );
    let label = json!({"metadata": {"labels": {"rbac.authorization.k8s.io/aggregate-to-view": "true"}}});
    assert_eq!(writer.patch("merge", &format!("{roles}/cluster-admin"), &label).await.code, 403);
    // Nothing keeps the garbage collector from its work.
    let finalizer = json!({"metadata": {"finalizers": ["example.com/f"]}});
    assert_eq!(writer.patch("merge", &format!("{roles}/cluster-admin"), &finalizer).await.code, 200);
    assert_eq!(world.post(&roles, &applied).await.code, 201, "an administrator may");
}

#[tokio::test]
async fn a_right_to_escalate_some_names_creates_none_of_them() {
    let world = World::start().await;
    let mut named = on_roles(&["escalate"]);
    named["resourceNames"] = json!(["mine"]);
    let escalator = user(&world, "escalator", json!([on_roles(&["get", "create", "update"]), named])).await;
    let roles = format!("{RBAC}/clusterroles");
    let secrets = json!({"rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"]}]});
    let mine = object("ClusterRole", "mine", secrets);
    assert_eq!(escalator.post(&roles, &mine).await.code, 403);
    assert_eq!(escalator.post(&roles, &object("ClusterRole", "mine", json!({}))).await.code, 201);
    assert_eq!(escalator.put(&format!("{roles}/mine"), &mine).await.code, 200);
    assert_eq!(
        escalator.put(&format!("{roles}/other"), &object("ClusterRole", "other", json!({}))).await.code,
        201
    );
}

#[tokio::test]
async fn an_update_that_creates_needs_create() {
    let world = World::start().await;
    let updater = user(&world, "updater", json!([on_roles(&["get", "update", "patch"])])).await;
    let role = object("ClusterRole", "new", json!({}));
    let path = format!("{RBAC}/clusterroles/new");
    for reply in [
        updater.put(&path, &role).await,
        updater.patch("apply", &format!("{path}?fieldManager=m"), &role).await,
    ] {
        assert_eq!(reply.code, 403);
        let message = reply.at("/message");
        assert!(message.as_str().unwrap().contains("cannot create resource \"clusterroles\""), "{message}");
    }
}

#[tokio::test]
async fn constrained_impersonation_has_limits() {
    let world = World::start().await;
    let in_group = |verbs: &[&str], resources: &[&str]| json!({"verbs": verbs, "apiGroups": ["authentication.k8s.io"], "resources": resources});
    let on = |mode: &str| json!({"verbs": [format!("impersonate-on:{mode}:list")], "apiGroups": [""], "resources": ["configmaps"]});
    let proxy = user(
        &world,
        "proxy",
        json!([
            in_group(&["impersonate:user-info"], &["users", "groups", "uids", "userextras/*"]),
            in_group(&["impersonate:serviceaccount"], &["serviceaccounts"]),
            in_group(&["impersonate:arbitrary-node"], &["nodes"]),
            on("user-info"),
            on("serviceaccount"),
            on("arbitrary-node"),
        ]),
    )
    .await;
    let as_ = |headers: &'static [(&'static str, &'static str)]| {
        let proxy = &proxy;
        async move {
            let reply = proxy.send("GET", MAPS, headers, b"").await;
            (reply.code, reply.at("/message").as_str().unwrap_or_default().to_owned())
        }
    };
    let (code, why) = as_(&[("impersonate-user", "jane"), ("impersonate-group", "system:masters")]).await;
    assert_eq!(code, 403);
    assert!(why.ends_with("impersonating the system:masters group is not allowed"), "{why}");
    for headers in [
        &[("impersonate-user", "system:node:n"), ("impersonate-uid", "u")] as &'static [_],
        &[("impersonate-user", "system:node:n"), ("impersonate-extra-a.b%2fc", "x")],
        &[("impersonate-user", "system:node:n"), ("impersonate-group", "system:masters")],
        &[("impersonate-user", "system:serviceaccount:default:a"), ("impersonate-group", "system:masters")],
    ] {
        let (code, why) = as_(headers).await;
        // No constrained mode serves these, so it is the old right that is missing.
        assert!(code == 403 && why.contains("\"proxy\" cannot impersonate resource"), "{headers:?} {why}");
    }
    // These impersonate, and are refused as the impersonated user.
    for headers in [
        &[("impersonate-user", "jane"), ("impersonate-group", "developers")] as &'static [_],
        &[("impersonate-user", "system:serviceaccount:default:a")],
        &[("impersonate-user", "system:node:n")],
    ] {
        let (code, why) = as_(headers).await;
        assert!(code == 403 && why.contains(&format!("User {:?} cannot list", headers[0].1)), "{why}");
    }
}

#[tokio::test]
async fn a_stream_that_begins_with_a_get_needs_create() {
    let world = World::start().await;
    let rule = |verbs: &[&str]| {
        json!([{"verbs": verbs, "apiGroups": [""],
            "resources": ["pods", "pods/exec", "pods/attach", "pods/portforward"]}])
    };
    let reader = user(&world, "reader", rule(&["get"])).await;
    let operator = user(&world, "operator", rule(&["get", "create"])).await;
    assert_eq!(world.post(PODS, &pod("p")).await.code, 201);
    for stream in ["exec?command=id&stdout=1", "attach?stdout=1", "portforward?ports=80"] {
        let path = format!("{PODS}/p/{stream}");
        let refused = reader.get(&path).await;
        assert_eq!(
            (refused.code, refused.at("/message")),
            (403, json!("pods \"p\" is forbidden: ")),
            "{stream}"
        );
        // There is no node to stream from.
        assert_eq!(operator.get(&path).await.code, 404, "{stream}");
    }
}

#[tokio::test]
async fn a_node_asks_for_tokens_that_its_pods_use() {
    let world = World::start_admitting(&["NodeRestriction"]).await;
    let node = world.as_user(User::new("system:node:n", ["system:nodes"]));
    let mut pod = pod("p");
    pod["spec"]["nodeName"] = json!("n");
    pod["spec"]["serviceAccountName"] = json!("default");
    pod["spec"]["volumes"] = json!([{"name": "v", "projected": {"sources": [
        {"serviceAccountToken": {"path": "t", "audience": "vault", "expirationSeconds": 600}},
    ]}}]);
    let created = world.post(PODS, &pod).await;
    assert_eq!(created.code, 201);
    let ask = |audiences: Value| {
        let uid = created.at("/metadata/uid");
        let node = &node;
        async move {
            let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {
                "audiences": audiences, "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid},
            }});
            node.post("/api/v1/namespaces/default/serviceaccounts/default/token", &request).await
        }
    };
    assert_eq!(ask(json!(["vault"])).await.code, 201);
    let refused = ask(json!(["https://bank.example.com"])).await;
    assert_eq!(refused.code, 403);
    let message = refused.at("/message");
    assert!(
        message.as_str().unwrap().ends_with(
            "audience \"https://bank.example.com\" not found in pod spec volume, system:node:n is not authorized to request tokens for this audience"
        ),
        "{message}"
    );
    assert_eq!(ask(json!(["vault", "other"])).await.code, 403);
    // A role may let nodes have more.
    let rule = json!([{"verbs": ["request-serviceaccounts-token-audience"], "apiGroups": [""],
        "resources": ["https://bank.example.com"]}]);
    user(&world, "system:node:n", rule).await;
    assert_eq!(ask(json!(["https://bank.example.com"])).await.code, 201);
}

#[tokio::test]
async fn default_roles_are_brought_up_to_date_at_every_start() {
    let store = Arc::new(Store::memory());
    let world = World::share(&store).await;
    let path = |plural: &str, name: &str| format!("{RBAC}/{plural}/{name}");
    let before = world.get(&path("clusterroles", "system:node-proxier")).await.at("/rules");
    let count = before.as_array().unwrap().len();
    // Somebody takes rights away, adds others, deletes, rebinds, and protects one.
    let own = json!({"verbs": ["get"], "apiGroups": ["example.com"], "resources": ["things"]});
    world.patch("merge", &path("clusterroles", "system:node-proxier"), &json!({"rules": [own]})).await;
    world.delete(&path("clusterroles", "system:kube-dns")).await;
    world.patch("merge", &path("clusterrolebindings", "system:basic-user"), &json!({"subjects": []})).await;
    let protect = json!({"metadata": {"annotations": {"rbac.authorization.kubernetes.io/autoupdate": "false"}},
        "rules": [own]});
    world.patch("merge", &path("clusterroles", "system:discovery"), &protect).await;
    world.delete(&path("clusterrolebindings", "system:discovery")).await;
    let other = object(
        "ClusterRoleBinding",
        "system:discovery",
        json!({
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        }),
    );
    assert_eq!(world.post(&format!("{RBAC}/clusterrolebindings"), &other).await.code, 201);
    let aggregated = world.get(&path("clusterroles", "edit")).await.at("");

    let world = World::share(&store).await;
    let rules = world.get(&path("clusterroles", "system:node-proxier")).await.at("/rules");
    let rules = rules.as_array().unwrap();
    assert!(rules.contains(&own) && rules.len() > count, "{rules:?}");
    assert_eq!(world.get(&path("clusterroles", "system:kube-dns")).await.code, 200);
    let subjects = world.get(&path("clusterrolebindings", "system:basic-user")).await.at("/subjects/0/name");
    assert_eq!(subjects, json!("system:authenticated"));
    assert_eq!(world.get(&path("clusterroles", "system:discovery")).await.at("/rules"), json!([own]));
    let binding = world.get(&path("clusterrolebindings", "system:discovery")).await;
    assert_eq!(binding.at("/roleRef/name"), json!("system:discovery"));
    assert_eq!(
        world.get(&path("clusterroles", "edit")).await.at(""),
        aggregated,
        "nothing to do, nothing written"
    );
}

/// Upstream's gate `DRAResourceClaimGranularStatusAuthorization`.
#[tokio::test]
async fn who_writes_the_status_of_claims_binds_none_and_speaks_for_no_driver() {
    let world = World::start().await;
    let claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
    let claim = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"},
        "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "gpu"}}]}}});
    assert_eq!(world.post(claims, &claim).await.code, 201);
    let on = |resource: &str, verbs: &[&str]| json!({"verbs": verbs, "apiGroups": ["resource.k8s.io"], "resources": [resource]});
    let status_only = on("resourceclaims/status", &["get", "update", "patch"]);
    let writer = user(&world, "writer", json!([status_only])).await;
    let binder = user(&world, "binder", json!([status_only, on("resourceclaims/binding", &["patch"])])).await;
    let mut driver_rule = on("resourceclaims/driver", &["arbitrary-node:patch"]);
    driver_rule["resourceNames"] = json!(["d.example"]);
    let driver = user(&world, "driver", json!([status_only, driver_rule])).await;
    let status = format!("{claims}/c/status");
    let allocation = |driver: &str| {
        json!({"status": {"allocation": {"devices": {"results": [
        {"request": "r", "driver": driver, "pool": "p", "device": "dev"}]}}}})
    };
    let report = |driver: &str| json!({"status": {"devices": [{"driver": driver, "pool": "p", "device": "dev", "data": {"a": 1}}]}});
    let refused = writer.patch("merge", &status, &allocation("d.example")).await;
    assert_eq!(refused.code, 422);
    let message = refused.at("/message").as_str().unwrap().to_owned();
    assert!(
        message.contains("requires resource=\"resourceclaims/binding\", verb=\"patch\" permission"),
        "{message}"
    );
    assert_eq!(driver.patch("merge", &status, &allocation("d.example")).await.code, 422);
    assert_eq!(binder.patch("merge", &status, &allocation("d.example")).await.code, 200);
    // The right to patch is none to update.
    let mut whole = world.get(&format!("{claims}/c")).await.json();
    whole["status"]["reservedFor"] = json!([{"resource": "pods", "name": "p", "uid": "u"}]);
    assert_eq!(binder.put(&status, &whole).await.code, 422);
    for (who, name) in [(&writer, "writer"), (&binder, "binder")] {
        let refused = who.patch("merge", &status, &report("d.example")).await;
        assert_eq!(refused.code, 422, "{name}");
        let message = refused.at("/message").as_str().unwrap().to_owned();
        assert!(message.contains("verb=\"[arbitrary-node:patch]\" permission"), "{message}");
    }
    assert_eq!(driver.patch("merge", &status, &report("d.example")).await.code, 200);
    // Nobody takes a report back but its driver, and metadata of the status needs no such right.
    assert_eq!(writer.patch("merge", &status, &json!({"status": {"devices": null}})).await.code, 422);
    assert_eq!(binder.patch("merge", &status, &json!({"status": null})).await.code, 200);
}
