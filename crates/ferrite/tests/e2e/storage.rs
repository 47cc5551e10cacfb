//! Claims: from `kubectl apply` to a directory of the node and back.

use crate::archive;
use crate::world::*;
use ferrite_json::Value;

const SHELL: &str = "example.com/shell:v1";

fn with_shell() -> World {
    let world = World::start();
    let archive = world.path("shell.tar");
    archive::image(&archive, SHELL, "page", &["/bin/busybox", "sleep", "100000"]);
    world.import(&archive);
    world
}

fn claim(name: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {name}}}
spec:
  accessModes: [ReadWriteOnce]
  resources: {{requests: {{storage: 16Mi}}}}
"#
    )
}

fn pod(name: &str, volume: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - name: c
    image: {SHELL}
    volumeMounts:
    - {{name: data, mountPath: /data}}
    - {{name: data, mountPath: /sub, subPath: below}}
  volumes:
  - name: data
    {volume}
"#
    )
}

fn sh(world: &World, pod: &str, script: &str) -> String {
    world.kubectl(&["exec", pod, "--", "/bin/busybox", "sh", "-c", script])
}

/// The directories of the node's volumes.
fn directories(world: &World) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(world.data().join("volumes")) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn volume_of(world: &World, claim: &str) -> String {
    let claim = world.watch(&["pvc", claim], |claim| claim["status"]["phase"] == "Bound");
    claim["spec"]["volumeName"].as_str().unwrap().to_owned()
}

#[test]
fn data_lives_as_long_as_its_claim() {
    let world = with_shell();
    world.create(&claim("disk"));
    let waiting = world.watch(&["pvc", "disk"], |claim| claim["status"]["phase"] == "Pending");
    assert_eq!(waiting["spec"]["storageClassName"], "local-path", "the default class");
    world.create(&pod("one", "persistentVolumeClaim: {claimName: disk}"));
    world.wait_ready("one");
    sh(&world, "one", "echo kept > /data/file; echo deep > /sub/file; chmod 600 /data/file");
    let volume = volume_of(&world, "disk");
    let object: Value = world.get(&["pv", &volume]);
    assert_eq!(object["status"]["phase"], "Bound");
    assert_eq!(object["spec"]["persistentVolumeReclaimPolicy"], "Delete");
    assert_eq!(directories(&world), std::slice::from_ref(&volume));

    world.kubectl(&["delete", "pod", "one"]);
    assert_eq!(directories(&world), std::slice::from_ref(&volume), "the data is the claim's, not the pod's");
    world.create(&pod("two", "persistentVolumeClaim: {claimName: disk, readOnly: true}"));
    world.wait_ready("two");
    assert_eq!(sh(&world, "two", "cat /data/file /data/below/file"), "kept\ndeep\n");
    let refused = world.try_kubectl(&["exec", "two", "--", "/bin/busybox", "touch", "/data/new"]);
    assert!(!refused.status.success(), "the claim is mounted read-only");

    // A claim in use stays until its last pod is gone.
    world.kubectl(&["delete", "pvc", "disk", "--wait=false"]);
    assert_eq!(sh(&world, "two", "cat /data/file"), "kept\n");
    world.kubectl(&["delete", "pod", "two"]);
    world.kubectl(&["wait", "--for=delete", "pvc/disk", "--timeout=60s"]);
    world.kubectl(&["wait", "--for=delete", &format!("pv/{volume}"), "--timeout=60s"]);
    assert!(directories(&world).is_empty(), "the data goes before the volume");
}

#[test]
fn replicas_of_a_stateful_set_have_their_own_volumes() {
    let world = with_shell();
    world.create(&format!(
        r#"
apiVersion: apps/v1
kind: StatefulSet
metadata: {{name: db}}
spec:
  serviceName: db
  replicas: 2
  selector: {{matchLabels: {{app: db}}}}
  template:
    metadata: {{labels: {{app: db}}}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: c
        image: {SHELL}
        volumeMounts: [{{name: data, mountPath: /data}}]
  volumeClaimTemplates:
  - metadata: {{name: data}}
    spec: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 1Mi}}}}}}
"#
    ));
    let ready = |count: i64| move |set: &Value| set["status"]["readyReplicas"].as_i64().unwrap_or(0) == count;
    world.watch(&["statefulset", "db"], ready(2));
    for name in ["db-0", "db-1"] {
        sh(&world, name, "hostname > /data/name");
    }
    world.kubectl(&["scale", "statefulset", "db", "--replicas=1"]);
    world.kubectl(&["wait", "--for=delete", "pod/db-1", "--timeout=60s"]);
    world.kubectl(&["scale", "statefulset", "db", "--replicas=2"]);
    world.watch(&["statefulset", "db"], |set| {
        set["status"]["replicas"] == 2 && set["status"]["readyReplicas"] == 2
    });
    assert_eq!(sh(&world, "db-1", "cat /data/name"), "db-1\n", "a replica that comes back finds its data");
    assert_eq!(directories(&world).len(), 2);
}

#[test]
fn an_ephemeral_volume_goes_with_its_pod() {
    let world = with_shell();
    let template = "ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Mi}}}}}";
    world.create(&pod("p", template));
    world.wait_ready("p");
    let volume = volume_of(&world, "p-data");
    assert_eq!(directories(&world), std::slice::from_ref(&volume));
    world.kubectl(&["delete", "pod", "p"]);
    world.kubectl(&["wait", "--for=delete", "pvc/p-data", "--timeout=60s"]);
    world.kubectl(&["wait", "--for=delete", &format!("pv/{volume}"), "--timeout=60s"]);
    assert!(directories(&world).is_empty());
}

#[test]
fn without_local_storage_claims_wait() {
    let world = World::start_with(&["--disable", "local-storage"]);
    world.create(&claim("disk"));
    let claim = world.watch(&["pvc", "disk"], |claim| claim["status"]["phase"] == "Pending");
    assert!(claim["spec"]["storageClassName"].is_null());
    assert_eq!(world.get(&["storageclass"])["items"].as_array().map(Vec::len), Some(0));
}
