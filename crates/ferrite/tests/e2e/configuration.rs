//! Tests of a pod's configuration: environment, files, order of start, probes.

use crate::world::*;

#[test]
fn environment_and_volumes_come_from_objects() {
    let world = World::start();
    world.kubectl(&[
        "create",
        "configmap",
        "settings",
        "--from-literal=colour=blue",
        "--from-literal=file.txt=content",
    ]);
    world.kubectl(&["create", "secret", "generic", "hidden", "--from-literal=password=s3cret"]);
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: p, labels: {{app: x}}}}
spec:
  initContainers:
  - name: first
    image: {TOOLS}
    args: [echo, first]
  - name: second
    image: {TOOLS}
    args: [cat, /config/file.txt]
    volumeMounts: [{{name: config, mountPath: /config}}]
  containers:
  - name: main
    image: {TOOLS}
    args: [http, --text=$(COLOUR)]
    env:
    - {{name: COLOUR, valueFrom: {{configMapKeyRef: {{name: settings, key: colour}}}}}}
    - {{name: PASSWORD, valueFrom: {{secretKeyRef: {{name: hidden, key: password}}}}}}
    - {{name: POD, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}
    - {{name: IP, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}
    volumeMounts:
    - {{name: config, mountPath: /config}}
    - {{name: secret, mountPath: /secret, readOnly: true}}
    - {{name: scratch, mountPath: /scratch}}
    startupProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1}}
    livenessProbe: {{exec: {{command: [/ferrite, tools, get, "http://127.0.0.1:8080/healthz"]}}, periodSeconds: 1}}
    readinessProbe: {{httpGet: {{path: /healthz, port: 8080}}, periodSeconds: 1}}
  volumes:
  - {{name: config, configMap: {{name: settings}}}}
  - {{name: secret, secret: {{secretName: hidden}}}}
  - {{name: scratch, emptyDir: {{}}}}
"#
    ));
    let pod = world.wait_ready("p");
    let init: Vec<_> = pod["status"]["initContainerStatuses"].as_array().unwrap().iter().collect();
    let ended = |n: usize| init[n]["state"]["terminated"]["finishedAt"].as_str().unwrap().to_owned();
    assert!(ended(0) <= ended(1));
    assert_eq!(world.kubectl(&["logs", "p", "-c", "second"]), "content");
    assert!(world.page(&pod).starts_with("blue p"));
    let exec =
        |command: &[&str]| world.kubectl(&[&["exec", "p", "--", "/ferrite", "tools"], command].concat());
    assert_eq!(exec(&["cat", "/secret/password"]), "s3cret");
    let environment = exec(&["env"]);
    assert!(environment.contains("PASSWORD=s3cret") && environment.contains("POD=p"), "{environment}");
    assert!(environment.contains(&format!("IP={}", pod_ip(&pod))));

    // The file follows the object.
    let changed = r#"{"data":{"file.txt":"changed"}}"#;
    world.kubectl(&["patch", "configmap", "settings", "--type=merge", "-p", changed]);
    eventually("the mounted file follows the ConfigMap", || {
        (exec(&["cat", "/config/file.txt"]) == "changed").then_some(())
    });
}

#[test]
fn a_failing_liveness_probe_restarts_the_container() {
    let world = World::start();
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: sick}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: {TOOLS}
    args: [http]
    livenessProbe: {{httpGet: {{path: /nothing, port: 8080}}, periodSeconds: 1, failureThreshold: 2}}
"#
    ));
    world.watch(&["pod", "sick"], |p| container_status(p)["restartCount"].as_i64() >= Some(1));
    let events = world.kubectl(&["get", "events", "--field-selector", "involvedObject.name=sick"]);
    assert!(events.contains("Liveness probe failed: HTTP probe failed with statuscode: 404"), "{events}");
    assert!(events.contains("Container c failed liveness probe, will be restarted"), "{events}");
}

#[test]
fn a_pod_that_waits_for_a_config_map_starts_when_it_comes() {
    let world = World::start();
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: waiting}}
spec:
  containers:
  - name: c
    image: {TOOLS}
    args: [sleep]
    envFrom: [{{configMapRef: {{name: late}}}}]
"#
    ));
    world.watch(&["pod", "waiting"], |p| {
        container_status(p)["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    });
    world.kubectl(&["create", "configmap", "late", "--from-literal=A=b"]);
    world.wait_ready("waiting");
}

#[test]
fn a_namespace_takes_its_content_along() {
    let world = World::start();
    world.kubectl(&["create", "namespace", "shop"]);
    eventually("the namespace has its default service account", || {
        world.try_kubectl(&["get", "-n", "shop", "serviceaccount", "default"]).status.success().then_some(())
    });
    world.kubectl(&["-n", "shop", "run", "p", "--image", TOOLS, "--grace-period=1", "--", "sleep"]);
    world.watch(&["-n", "shop", "pod", "p"], is_ready);
    world.kubectl(&["delete", "namespace", "shop"]);
    assert!(world.kubectl_fails(&["get", "namespace", "shop"]).contains("not found"));
    assert!(world.get(&["pods", "-A"])["items"].as_array().unwrap().is_empty());
    assert!(world.kubectl_fails(&["delete", "namespace", "kube-system"]).contains("may not be deleted"));
}
