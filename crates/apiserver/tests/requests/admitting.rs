//! Admission: fields that it sets, requests that it refuses, charges or warns of.

use crate::world::*;
use ferrite_apiserver::User;
use ferrite_json::{Value, json};

const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const QUOTAS: &str = "/api/v1/namespaces/default/resourcequotas";

fn sized(name: &str, resources: Value) -> Value {
    let mut pod = pod(name);
    pod["spec"]["containers"][0]["resources"] = resources;
    pod
}

fn claim(name: &str, size: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}},
    })
}

async fn label(world: &World, labels: Value) -> Reply {
    world.patch("merge", "/api/v1/namespaces/default", &json!({"metadata": {"labels": labels}})).await
}

#[tokio::test]
async fn a_limit_range_sets_and_bounds() {
    let world = World::start().await;
    let range = json!({
        "apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "r"},
        "spec": {"limits": [
            {"type": "Container", "default": {"cpu": "500m"}, "defaultRequest": {"cpu": "100m"}, "max": {"cpu": "1"}},
            {"type": "PersistentVolumeClaim", "max": {"storage": "1Gi"}},
        ]},
    });
    assert_eq!(world.post("/api/v1/namespaces/default/limitranges", &range).await.code, 201);
    let set = world.post(PODS, &pod("a")).await;
    assert_eq!(set.at("/spec/containers/0/resources/limits/cpu"), "500m");
    assert_eq!(set.at("/status/qosClass"), "Burstable", "the class follows from what was set");
    let refused = world.post(PODS, &sized("b", json!({"limits": {"cpu": "2"}}))).await;
    assert_eq!(
        (refused.code, refused.at("/message")),
        (403, json!(r#"pods "b" is forbidden: maximum cpu usage per Container is 1, but limit is 2"#))
    );
    assert_eq!(world.post(CLAIMS, &claim("c", "2Gi")).await.code, 403);
}

#[tokio::test]
async fn a_quota_is_charged_with_what_is_stored_and_never_exceeded() {
    let world = World::start().await;
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
        "spec": {"hard": {"count/configmaps": "5"}},
    });
    assert_eq!(world.post(QUOTAS, &quota).await.code, 201);
    let status = json!({"status": {"hard": {"count/configmaps": "5"}, "used": {"count/configmaps": "0"}}});
    assert_eq!(world.patch("merge", &format!("{QUOTAS}/q/status"), &status).await.code, 200);
    let tries = (0..20).map(|i| {
        let world = &world;
        async move { world.post(MAPS, &config_map(&format!("m{i}"), json!({}))).await.code }
    });
    let codes = futures_util::future::join_all(tries).await;
    assert_eq!(codes.iter().filter(|code| **code == 201).count(), 5, "{codes:?}");
    assert_eq!(codes.iter().filter(|code| **code == 403).count(), 15, "{codes:?}");
    let used = || async { world.get(&format!("{QUOTAS}/q")).await.at("/status/used/count~1configmaps") };
    assert_eq!(used().await, "5");
    assert_eq!(world.delete(&format!("{QUOTAS}/q")).await.code, 200);
    assert_eq!(world.post(MAPS, &config_map("free", json!({}))).await.code, 201);
}

#[tokio::test]
async fn a_write_that_fails_costs_nothing() {
    let world = World::start().await;
    assert_eq!(world.post(MAPS, &config_map("there", json!({}))).await.code, 201);
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
        "spec": {"hard": {"configmaps": "2"}},
    });
    world.post(QUOTAS, &quota).await;
    let status = json!({"status": {"hard": {"configmaps": "2"}, "used": {"configmaps": "1"}}});
    world.patch("merge", &format!("{QUOTAS}/q/status"), &status).await;
    assert_eq!(world.post(MAPS, &config_map("there", json!({}))).await.code, 409);
    assert_eq!(world.post(&format!("{MAPS}?dryRun=All"), &config_map("new", json!({}))).await.code, 201);
    assert_eq!(world.get(&format!("{QUOTAS}/q")).await.at("/status/used/configmaps"), "1");
    assert_eq!(world.post(MAPS, &config_map("new", json!({}))).await.code, 201);
    assert_eq!(world.get(&format!("{QUOTAS}/q")).await.at("/status/used/configmaps"), "2");
}

#[tokio::test]
async fn pod_security_refuses_and_warns() {
    let world = World::start().await;
    let mut hosted = pod("hosted");
    hosted["spec"]["hostNetwork"] = true.into();
    assert_eq!(world.post(PODS, &hosted).await.code, 201);
    let told = label(&world, json!({"pod-security.kubernetes.io/enforce": "baseline"})).await;
    assert_eq!(told.code, 200);
    let warnings: Vec<&str> =
        told.headers.get_all("warning").iter().filter_map(|w| w.to_str().ok()).collect();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[1].contains("hosted: host namespaces"), "{warnings:?}");
    hosted["metadata"]["name"] = "again".into();
    let refused = world.post(PODS, &hosted).await;
    assert_eq!(
        refused.at("/message"),
        r#"pods "again" is forbidden: violates PodSecurity "baseline:latest": host namespaces (hostNetwork=true)"#
    );
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": hosted["spec"]},
        },
    });
    let warned = world.post("/apis/apps/v1/namespaces/default/deployments", &deployment).await;
    assert_eq!(warned.code, 201, "templates are warned of, not refused");
    assert!(warned.header("warning").contains("would violate PodSecurity"), "{}", warned.header("warning"));
    assert_eq!(label(&world, json!({"pod-security.kubernetes.io/enforce": "bogus"})).await.code, 422);
}

#[tokio::test]
async fn classes_come_from_defaults_and_claims_grow_where_they_may() {
    let world = World::start().await;
    let class = |name: &str, default: bool| {
        json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": {
                "name": name,
                "annotations": {"storageclass.kubernetes.io/is-default-class": default.to_string()},
            },
            "provisioner": "example.com/p", "allowVolumeExpansion": default,
        })
    };
    for (name, default) in [("fast", true), ("rigid", false)] {
        assert_eq!(
            world.post("/apis/storage.k8s.io/v1/storageclasses", &class(name, default)).await.code,
            201
        );
    }
    let mut rigid = claim("rigid", "1Gi");
    rigid["spec"]["storageClassName"] = "rigid".into();
    assert_eq!(world.post(CLAIMS, &rigid).await.code, 201);
    assert_eq!(world.post(CLAIMS, &claim("fast", "1Gi")).await.at("/spec/storageClassName"), "fast");
    for (name, code) in [("fast", 200), ("rigid", 403)] {
        let path = format!("{CLAIMS}/{name}");
        world.patch("merge", &path, &json!({"spec": {"volumeName": "v"}})).await;
        let bound = json!({"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}});
        assert_eq!(world.patch("merge", &format!("{path}/status"), &bound).await.code, 200);
        let grow = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
        assert_eq!(world.patch("merge", &path, &grow).await.code, code, "{name}");
    }
}

#[tokio::test]
async fn a_runtime_class_costs_and_places() {
    let world = World::start().await;
    let mut pod = pod("p");
    pod["spec"]["runtimeClassName"] = "vm".into();
    let missing = world.post(PODS, &pod).await;
    assert_eq!(missing.at("/message"), r#"pods "p" is forbidden: pod rejected: RuntimeClass "vm" not found"#);
    let class = json!({
        "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "vm"}, "handler": "vm",
        "overhead": {"podFixed": {"cpu": "250m"}}, "scheduling": {"nodeSelector": {"vm": "yes"}},
    });
    assert_eq!(world.post("/apis/node.k8s.io/v1/runtimeclasses", &class).await.code, 201);
    let made = world.post(PODS, &pod).await;
    assert_eq!(
        (made.at("/spec/overhead/cpu"), made.at("/spec/nodeSelector/vm")),
        (json!("250m"), json!("yes"))
    );
}

#[tokio::test]
async fn plugins_that_are_off_work_when_turned_on() {
    let world =
        World::start_admitting(&["NodeRestriction", "AlwaysPullImages", "DenyServiceExternalIPs"]).await;
    assert_eq!(world.post(PODS, &pod("p")).await.at("/spec/containers/0/imagePullPolicy"), "Always");
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"},
        "spec": {"ports": [{"port": 80}], "externalIPs": ["203.0.113.1"]},
    });
    let refused = world.post("/api/v1/namespaces/default/services", &service).await;
    assert_eq!(
        refused.at("/message"),
        r#"services "s" is forbidden: Use of external IPs is denied by admission control."#
    );
    let node = world.as_user(User::new("system:node:n", ["system:nodes"]));
    let named = |name: &str| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
    assert_eq!(node.post("/api/v1/nodes", &named("n")).await.code, 201);
    let refused = node.post("/api/v1/nodes", &named("m")).await;
    assert_eq!(
        refused.at("/message"),
        r#"nodes "m" is forbidden: node "n" is not allowed to modify node "m""#
    );
    let labels = json!({"metadata": {"labels": {"node-restriction.kubernetes.io/x": "y"}}});
    assert_eq!(node.patch("merge", "/api/v1/nodes/n", &labels).await.code, 403);
    assert_eq!(node.post(PODS, &pod("mine")).await.code, 403, "only mirrors of static pods");
    // A mirror pod must not open objects to its node.
    let uid = world.get("/api/v1/nodes/n").await.at("/metadata/uid");
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": "n", "uid": uid, "controller": true});
    let mut mirror = pod("mirror");
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    mirror["metadata"]["ownerReferences"] = json!([owner]);
    mirror["spec"]["nodeName"] = "n".into();
    let claim =
        json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
    mirror["spec"]["volumes"] = json!([{"name": "data", "ephemeral": {"volumeClaimTemplate": claim}}]);
    let refused = node.post(PODS, &mirror).await;
    assert_eq!(refused.code, 403, "{}", refused.json());
    mirror["spec"]["volumes"] = json!([]);
    assert_eq!(node.post(PODS, &mirror).await.code, 201);
}

#[tokio::test]
async fn a_refusal_names_what_there_is_of_a_name() {
    let world = World::start().await;
    let mut drawn = pod("x");
    drawn["metadata"] = json!({"generateName": "web-"});
    drawn["spec"]["serviceAccountName"] = "absent".into();
    let message = world.post(PODS, &drawn).await.at("/message");
    assert!(message.as_str().is_some_and(|m| m.starts_with(r#"pods "web-" is forbidden"#)), "{message}");
}

#[tokio::test]
async fn a_default_priority_class_is_the_only_one() {
    let world = World::start().await;
    let path = "/apis/scheduling.k8s.io/v1/priorityclasses";
    let class = |name: &str| {
        json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name},
            "value": 5, "globalDefault": true,
        })
    };
    assert_eq!(world.post(path, &class("a")).await.code, 201);
    let second = world.post(path, &class("b")).await;
    assert_eq!(second.code, 403, "{}", second.json());
    assert_eq!(world.post(PODS, &pod("p")).await.at("/spec/priority"), 5);
}

#[tokio::test]
async fn a_namespace_is_made_for_who_needs_it() {
    let world = World::start_admitting(&["NamespaceAutoProvision", "NamespaceExists"]).await;
    let path = "/api/v1/namespaces/fresh/configmaps";
    let dry = world.post(&format!("{path}?dryRun=All"), &config_map("a", json!({}))).await;
    assert_eq!((dry.code, dry.at("/message")), (404, json!("namespaces \"fresh\" not found")));
    assert_eq!(world.post(path, &config_map("a", json!({}))).await.code, 201);
    assert_eq!(world.get("/api/v1/namespaces/fresh").await.at("/status/phase"), "Active");
    let plain = World::start().await;
    assert_eq!(plain.post(path, &config_map("a", json!({}))).await.code, 404);
}

#[tokio::test]
async fn events_come_only_so_fast() {
    let configuration = json!({
        "apiVersion": "eventratelimit.admission.k8s.io/v1alpha1", "kind": "Configuration",
        "limits": [{"type": "Namespace", "qps": 1, "burst": 2}],
    });
    let world = World::start_configured(&["EventRateLimit"], json!({"EventRateLimit": configuration})).await;
    let event = |name: &str| {
        json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": "default"},
            "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}})
    };
    let events = "/api/v1/namespaces/default/events";
    assert_eq!(world.post(events, &event("a")).await.code, 201);
    assert_eq!(world.post(&format!("{events}?dryRun=All"), &event("b")).await.code, 201);
    assert_eq!(world.post(events, &event("b")).await.code, 201);
    let refused = world.post(events, &event("c")).await;
    assert_eq!(
        (refused.code, refused.at("/reason"), refused.at("/message")),
        (
            429,
            json!("TooManyRequests"),
            json!("Too many requests: limit reached on type Namespace for key default")
        )
    );
    // Whatever else is written does not count.
    assert_eq!(world.post(MAPS, &config_map("m", json!({}))).await.code, 201);
}

#[tokio::test]
async fn what_is_limited_is_had_only_under_a_quota() {
    let configuration = json!({
        "apiVersion": "apiserver.config.k8s.io/v1", "kind": "ResourceQuotaConfiguration",
        "limitedResources": [
            {"resource": "configmaps", "matchContains": ["count/configmaps"]},
            {"resource": "pods", "matchScopes": [{"scopeName": "BestEffort", "operator": "Exists"}]},
        ],
    });
    let world = World::start_configured(&[], json!({"ResourceQuota": configuration})).await;
    let refused = world.post(MAPS, &config_map("a", json!({}))).await;
    assert_eq!(
        (refused.code, refused.at("/message")),
        (403, json!("configmaps \"a\" is forbidden: insufficient quota to consume: count/configmaps"))
    );
    let refused = world.post(PODS, &pod("a")).await;
    assert_eq!(
        (refused.code, refused.at("/reason"), refused.at("/message")),
        (500, json!(null), json!("insufficient quota to match these scopes: [{BestEffort Exists []}]"))
    );
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
        "spec": {"hard": {"count/configmaps": "1"}},
    });
    assert_eq!(world.post(QUOTAS, &quota).await.code, 201);
    let counted = json!({"status": {"hard": {"count/configmaps": "1"}, "used": {"count/configmaps": "0"}}});
    assert_eq!(world.patch("merge", &format!("{QUOTAS}/q/status"), &counted).await.code, 200);
    assert_eq!(world.post(MAPS, &config_map("a", json!({}))).await.code, 201);
}

#[tokio::test]
async fn tolerations_are_given_and_bounded() {
    let configuration = json!({
        "apiVersion": "podtolerationrestriction.admission.k8s.io/v1alpha1", "kind": "Configuration",
        "default": [{"key": "ours", "operator": "Exists"}],
        "whitelist": [{"key": "ours", "operator": "Exists"}, {"key": "node.kubernetes.io/not-ready", "operator": "Exists"},
            {"key": "node.kubernetes.io/unreachable", "operator": "Exists"}],
    });
    let configuration = json!({"PodTolerationRestriction": configuration});
    let plugins = &["PodTolerationRestriction", "LimitPodHardAntiAffinityTopology"];
    let world = World::start_configured(plugins, configuration).await;
    let made = world.post(PODS, &pod("a")).await;
    assert_eq!(made.at("/spec/tolerations/0"), json!({"key": "ours", "operator": "Exists"}));
    let mut greedy = pod("b");
    greedy["spec"]["tolerations"] = json!([{"key": "theirs", "operator": "Exists"}]);
    let refused = world.post(PODS, &greedy).await;
    assert!(
        refused.at("/message").as_str().is_some_and(|m| m.ends_with("conflict with its cluster whitelist")),
        "{}",
        refused.json()
    );
    let note = json!({"metadata": {"annotations": {
        "scheduler.alpha.kubernetes.io/tolerationsWhitelist": "[]", "scheduler.alpha.kubernetes.io/defaultTolerations": "[]"}}});
    assert_eq!(world.patch("merge", "/api/v1/namespaces/default", &note).await.code, 200);
    assert_eq!(world.post(PODS, &greedy).await.code, 201);
    let mut wide = pod("c");
    wide["spec"]["affinity"] = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "zone", "labelSelector": {}}]}});
    assert_eq!(world.post(PODS, &wide).await.code, 403);
}

#[tokio::test]
async fn pod_security_has_defaults_and_exemptions() {
    let configuration = json!({
        "apiVersion": "pod-security.admission.config.k8s.io/v1", "kind": "PodSecurityConfiguration",
        "defaults": {"enforce": "baseline"},
        "exemptions": {"usernames": ["trusted"], "namespaces": ["kube-system"], "runtimeClasses": ["sandboxed"]},
    });
    let world = World::start_configured(&[], json!({"PodSecurity": configuration})).await;
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
    world.post("/api/v1/namespaces/kube-system/serviceaccounts", &account).await;
    let mut open = pod("a");
    open["spec"]["hostNetwork"] = true.into();
    let refused = world.post(PODS, &open).await;
    assert!(
        refused
            .at("/message")
            .as_str()
            .is_some_and(|m| m.contains("violates PodSecurity \"baseline:latest\"")),
        "{}",
        refused.json()
    );
    assert_eq!(world.post("/api/v1/namespaces/kube-system/pods", &open).await.code, 201);
    let trusted = world.as_user(User::new("trusted", ["system:masters"]));
    assert_eq!(trusted.post(PODS, &open).await.code, 201);
}

#[tokio::test]
async fn an_account_may_bound_the_secrets_of_its_pods() {
    let world = World::start().await;
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "strict",
        "annotations": {"kubernetes.io/enforce-mountable-secrets": "true"}}, "secrets": [{"name": "own"}]});
    assert_eq!(world.post("/api/v1/namespaces/default/serviceaccounts", &account).await.code, 201);
    let with = |name: &str, secret: &str| {
        let mut pod = pod(name);
        pod["spec"]["serviceAccountName"] = "strict".into();
        pod["spec"]["volumes"] = json!([{"name": "v", "secret": {"secretName": secret}}]);
        pod
    };
    assert_eq!(world.post(PODS, &with("a", "own")).await.code, 201);
    let refused = world.post(PODS, &with("b", "other")).await;
    assert_eq!(
        (refused.code, refused.at("/message")),
        (
            403,
            json!(
                "pods \"b\" is forbidden: volume with secret.secretName=\"other\" is not allowed because service account strict does not reference that secret"
            )
        )
    );
    let mut mirror = pod("c");
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    mirror["spec"]["serviceAccountName"] = "strict".into();
    let refused = world.post(PODS, &mirror).await;
    assert!(
        refused
            .at("/message")
            .as_str()
            .is_some_and(|m| m.ends_with("a mirror pod may not reference service accounts"))
    );
}

#[tokio::test]
async fn a_refusal_names_what_was_drawn() {
    let world = World::start().await;
    let range = json!({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "r"},
        "spec": {"limits": [{"type": "Container", "max": {"cpu": "1"}}]}});
    assert_eq!(world.post("/api/v1/namespaces/default/limitranges", &range).await.code, 201);
    let mut drawn = sized("x", json!({"limits": {"cpu": "2"}}));
    drawn["metadata"] = json!({"generateName": "web-"});
    let refused = world.post(PODS, &drawn).await;
    let message = refused.at("/message");
    let name = message.as_str().and_then(|m| m.strip_prefix("pods \"web-")).and_then(|m| m.split_once('"'));
    assert!(name.is_some_and(|(suffix, _)| suffix.len() == 5), "{message}");
}

#[tokio::test]
async fn nodes_are_chosen_for_namespaces() {
    let told = json!({"podNodeSelectorPluginConfig": {"clusterDefaultNodeSelector": "pool=shared", "default": "pool=shared,disk=ssd"}});
    let world = World::start_configured(&["PodNodeSelector"], json!({"PodNodeSelector": told})).await;
    let selecting = |name: &str, selector: Value| {
        let mut pod = pod(name);
        pod["spec"]["nodeSelector"] = selector;
        pod
    };
    let made = world.post(PODS, &selecting("a", json!({"disk": "ssd"}))).await;
    assert_eq!((made.code, made.at("/spec/nodeSelector")), (201, json!({"disk": "ssd", "pool": "shared"})));
    for (selector, why) in [
        (json!({"pool": "own"}), "pod node label selector conflicts with its namespace node label selector"),
        (json!({"disk": "hdd"}), "pod node label selector labels conflict with its namespace whitelist"),
    ] {
        let refused = world.post(PODS, &selecting("b", selector)).await;
        assert_eq!(
            (refused.code, refused.at("/message")),
            (403, json!(format!("pods \"b\" is forbidden: {why}")))
        );
    }
}
