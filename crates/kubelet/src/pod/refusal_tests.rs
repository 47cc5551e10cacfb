//! Tests that each pod setting reaches the runtime, or the pod does not run.

use crate::node::RuntimeFeatures;
use crate::testing::Harness;
use ferrite_cri::v1::{NamespaceMode, UserNamespace};
use ferrite_json::{Value, json};
use std::collections::BTreeSet;

fn spec(extra: Value) -> Value {
    let container = json!({"name": "c", "image": "busybox:1", "imagePullPolicy": "IfNotPresent"});
    let mut spec = json!({"containers": [container]});
    for (key, value) in extra.as_object().unwrap() {
        spec[key] = value.clone();
    }
    spec
}

fn with_container(extra: Value) -> Value {
    let mut whole = spec(json!({}));
    for (key, value) in extra.as_object().unwrap() {
        whole["containers"][0][key] = value.clone();
    }
    whole
}

fn ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

fn users(h: &Harness, pod: &str) -> UserNamespace {
    let (config, _) = h.runtime.sandbox(pod).unwrap();
    let security = config.linux.unwrap().security_context.unwrap();
    security.namespace_options.unwrap().userns_options.unwrap()
}

#[tokio::test(start_paused = true)]
async fn users_of_their_own() {
    let h = Harness::start().await;
    let volume = json!([{"name": "v", "emptyDir": {}}]);
    for name in ["a", "b"] {
        let mut own = spec(json!({"hostUsers": false, "volumes": volume}));
        own["containers"][0]["name"] = json!(name);
        own["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
        h.create(name, own);
        h.until(name, "ready", ready).await;
    }
    h.create("node", spec(json!({})));
    h.until("node", "ready", ready).await;
    assert_eq!(users(&h, "node").mode(), NamespaceMode::Node);
    assert!(h.runtime.container_config("c").unwrap().mounts.iter().all(|m| m.uid_mappings.is_empty()));
    let ranges: BTreeSet<u32> = ["a", "b"].map(|name| users(&h, name).uids[0].host_id).into();
    assert!(ranges.len() == 2 && ranges.iter().all(|id| *id >= 65_536), "{ranges:?}");
    let of_a = users(&h, "a");
    assert_eq!(of_a.mode(), NamespaceMode::Pod);
    let config = h.runtime.container_config("a").unwrap();
    let own = config.linux.unwrap().security_context.unwrap().namespace_options.unwrap().userns_options;
    assert_eq!(own.as_ref(), Some(&of_a));
    let paths: Vec<&str> = config.mounts.iter().map(|m| m.container_path.as_str()).collect();
    assert_eq!(paths, ["/v", "/etc/hosts", "/dev/termination-log"]);
    assert!(config.mounts.iter().all(|m| m.uid_mappings == of_a.uids && m.gid_mappings == of_a.gids));

    // A kubelet that starts anew knows the range, also of a sandbox it makes again.
    let h = h.restart().await;
    h.runtime.kill_sandbox();
    h.until("a", "restarted", |p| ready(p) && p["status"]["containerStatuses"][0]["restartCount"] == 1).await;
    assert_eq!(users(&h, "a"), of_a);
    let file = h.dir.path().join("kubelet/pods/uid-a/userns");
    assert!(file.exists());
    h.delete("a", 1);
    h.until_gone("a").await;
    h.until_workers(2).await;
    assert!(!file.exists());
}

#[tokio::test(start_paused = true)]
async fn a_runtime_without_user_namespaces_runs_no_pod_that_asks_for_one() {
    let h = Harness::start().await;
    h.readiness.send_modify(|readiness| readiness.features = RuntimeFeatures::default());
    h.create("p", spec(json!({"hostUsers": false})));
    let message = h.until_event("FailedCreatePodSandBox", "hostUsers").await;
    assert!(message.ends_with("can't set `spec.hostUsers: false`, runtime does not support user namespaces"));
    assert!(h.runtime.is_empty());
    h.create("plain", spec(json!({})));
    h.until("plain", "ready", ready).await;
}

#[tokio::test(start_paused = true)]
async fn runtime_classes_name_their_handler() {
    let h = Harness::start().await;
    h.api.put("runtimeclasses", json!({"metadata": {"name": "fast"}, "handler": "crun"}));
    h.create("p", spec(json!({"runtimeClassName": "fast"})));
    h.until("p", "ready", ready).await;
    assert_eq!(h.runtime.sandbox("p").unwrap().1, "crun");
    h.create("q", spec(json!({"runtimeClassName": "none"})));
    h.until_event("FailedCreatePodSandBox", "runtimeclass.node.k8s.io \"none\" not found").await;
    h.create("r", spec(json!({"runtimeClassName": "fast", "hostUsers": false})));
    h.until_event("FailedCreatePodSandBox", "RuntimeClass handler \"crun\" does not support").await;
    assert!(h.runtime.sandbox("q").is_none() && h.runtime.sandbox("r").is_none());
}

/// One row for each verdict of `fields.rs` that keeps a pod or a container waiting.
#[tokio::test(start_paused = true)]
async fn what_cannot_be_had_is_not_left_out() {
    let volume = |source: &str, content: Value| spec(json!({"volumes": [{"name": "v", source: content}]}));
    let claim = json!({"name": "gpu", "resourceClaimName": "g"});
    let file =
        json!([{"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}}}]);
    let recursive =
        json!([{"name": "v", "mountPath": "/v", "readOnly": true, "recursiveReadOnly": "Enabled"}]);
    let mut read_only = with_container(json!({"volumeMounts": recursive}));
    read_only["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    for (what, spec, reason, part) in [
        (
            "claim",
            spec(json!({"resourceClaims": [claim]})),
            "FailedPrepareDynamicResources",
            "prepare dynamic resources: fetch ResourceClaim g",
        ),
        (
            "pvc",
            volume("persistentVolumeClaim", json!({"claimName": "x"})),
            "FailedMount",
            "error processing PVC default/x: failed to fetch PVC from API server",
        ),
        (
            "ephemeral",
            volume("ephemeral", json!({})),
            "FailedMount",
            "error processing PVC default/ephemeral-v",
        ),
        ("csi", volume("csi", json!({"driver": "x"})), "FailedMount", "driver x (no CSIDriver object)"),
        ("git", volume("gitRepo", json!({"repository": "x"})), "FailedMount", "no volume plugin matched"),
        (
            "huge",
            volume("emptyDir", json!({"medium": "HugePages"})),
            "FailedMount",
            "medium \"HugePages\": the pod's containers ask for no huge pages",
        ),
        (
            "device",
            with_container(json!({"volumeDevices": [{"name": "v", "devicePath": "/dev/x"}]})),
            "Failed",
            "cannot find volume \"v\" to pass into container \"c\"",
        ),
        (
            "file",
            with_container(json!({"env": file})),
            "Failed",
            "cannot find the volume \"v\" referenced by FileKeyRef",
        ),
        ("recursive", read_only, "Failed", "not supported by the runtime"),
        (
            "sysctl",
            spec(json!({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}})),
            "SysctlForbidden",
            "not allowlisted",
        ),
        (
            "apparmor",
            spec(json!({"securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}}})),
            "AppArmor",
            "Cannot enforce AppArmor: AppArmor is not enabled on the host",
        ),
    ] {
        let h = Harness::start().await;
        h.readiness.send_modify(|readiness| readiness.features = RuntimeFeatures::default());
        h.create(what, spec);
        h.until_event(reason, part).await;
        let calls = h.runtime.calls();
        assert!(!calls.iter().any(|call| call.starts_with("start:")), "{what}: {calls:?}");
        if matches!(reason, "SysctlForbidden" | "AppArmor") {
            let pod = h.until_phase(what, "Failed").await;
            assert_eq!(pod["status"]["reason"], reason, "{what}");
        }
    }
}
