//! Volumes of a CSI driver: the example `csi_hostpath`, a process beside the cluster.

use crate::archive;
use crate::world::*;
use ferrite_json::Value;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};

const SHELL: &str = "example.com/shell:v1";
const DRIVER: &str = "hostpath.csi.ferrite.io";
const OBJECTS: &str = r#"
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: hostpath.csi.ferrite.io}
spec:
  podInfoOnMount: true
  fsGroupPolicy: File
  volumeLifecycleModes: [Persistent, Ephemeral]
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: hostpath}
provisioner: hostpath.csi.ferrite.io
allowVolumeExpansion: true
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: disk}
spec:
  storageClassName: hostpath
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 1Gi}}
"#;

/// The driver, ended with the test.
struct Driver(Child);

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.0.id() as i32), Signal::SIGCONT);
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Cargo puts examples beside the binary.
fn program() -> PathBuf {
    ferrite().parent().unwrap().join("examples/csi_hostpath")
}

impl Driver {
    /// Starts the driver and waits until the kubelet has taken it.
    fn start(world: &World) -> Self {
        assert!(program().exists(), "build it with: cargo build -p ferrite-csi --example csi_hostpath");
        let (kubelet, data) = (world.data().join("kubelet"), world.path("csi"));
        let kubeconfig = world.path("kubeconfig");
        let mut command = world.command(
            program().to_str().unwrap(),
            &[
                "--node",
                "node",
                "--kubelet",
                kubelet.to_str().unwrap(),
                "--data",
                data.to_str().unwrap(),
                "--kubeconfig",
                kubeconfig.to_str().unwrap(),
            ],
        );
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let registered = lines.by_ref().map_while(Result::ok).any(|line| line == "registered");
        assert!(registered, "the kubelet did not take the driver:\n{}", world.log());
        std::thread::spawn(move || lines.for_each(drop));
        Self(child)
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }
}

fn cluster() -> (World, Driver) {
    let world = World::start();
    let archive = world.path("shell.tar");
    archive::image(&archive, SHELL, "page", &["/bin/busybox", "sleep", "100000"]);
    world.import(&archive);
    let driver = Driver::start(&world);
    world.create(OBJECTS);
    (world, driver)
}

fn pod(name: &str, volume: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  securityContext: {{fsGroup: 4321}}
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

/// The mounts of CSI volumes below the kubelet's directory, sub-paths included.
fn mounts(world: &World) -> Vec<String> {
    let kubelet = world.data().join("kubelet").canonicalize().unwrap();
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4));
    let points = points.filter(|point| point.contains("csi") || point.contains("volume-subpaths"));
    points.filter(|point| point.starts_with(kubelet.to_str().unwrap())).map(str::to_owned).collect()
}

fn in_use(world: &World) -> Vec<Value> {
    let node = world.get(&["node", "node"]);
    node["status"]["volumesInUse"].as_array().cloned().unwrap_or_default()
}

#[test]
fn a_claim_is_provisioned_attached_mounted_grown_and_removed() {
    let (world, _driver) = cluster();
    // The API has the driver's facts about the node.
    let node = world.watch(&["csinode", "node"], |node| node["spec"]["drivers"][0]["name"] == DRIVER);
    assert_eq!(node["spec"]["drivers"][0]["allocatable"]["count"], 100);
    assert_eq!(node["metadata"]["ownerReferences"][0]["kind"], "Node");
    let node = world.get(&["node", "node"]);
    assert_eq!(node["metadata"]["labels"]["topology.hostpath.csi.ferrite.io/node"], "node");

    let claim = world.watch(&["pvc", "disk"], |claim| claim["status"]["phase"] == "Bound");
    let volume = claim["spec"]["volumeName"].as_str().unwrap().to_owned();
    world.create(&pod("one", "persistentVolumeClaim: {claimName: disk}"));
    world.wait_ready("one");
    let attachment = world.get(&["volumeattachment"])["items"][0].clone();
    assert_eq!(attachment["spec"]["source"]["persistentVolumeName"], volume.as_str());
    assert_eq!(attachment["status"]["attached"], true);
    assert_eq!(in_use(&world), [format!("kubernetes.io/csi/{DRIVER}^{volume}").as_str()]);
    sh(&world, "one", "echo kept > /data/file; echo deep > /sub/file; chmod 600 /data/file");
    assert_eq!(sh(&world, "one", "stat -c %g /data"), "4321\n", "the driver leaves the group to the kubelet");
    assert_eq!(mounts(&world).len(), 3, "staged, published, and a sub-path: {:?}", mounts(&world));

    // The driver tells the space in the volume.
    let summary = world.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/stats/summary"]);
    let summary: Value = ferrite_json::from_str(&summary).unwrap();
    let stats = summary["pods"].as_array().unwrap().iter().find(|p| p["podRef"]["name"] == "one").unwrap();
    let volumes = stats["volume"].as_array().unwrap();
    let volume_stats = volumes.iter().find(|v| v["pvcRef"]["name"] == "disk").unwrap();
    assert!(volume_stats["capacityBytes"].as_u64().is_some_and(|bytes| bytes > 0), "{volume_stats}");
    let metrics = world.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/metrics"]);
    let line = r#"kubelet_volume_stats_capacity_bytes{namespace="default",persistentvolumeclaim="disk"}"#;
    assert!(metrics.contains(line), "{metrics}");

    // The claim grows: the driver's controller first, then the node.
    world.kubectl(&[
        "patch",
        "pvc",
        "disk",
        "-p",
        r#"{"spec":{"resources":{"requests":{"storage":"2Gi"}}}}"#,
    ]);
    world.watch(&["pvc", "disk"], |claim| {
        let conditions = claim["status"]["conditions"].as_array();
        conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "FileSystemResizePending"))
    });
    // A change of the pod makes the kubelet check its volumes now and not within a minute.
    world.kubectl(&["annotate", "pod", "one", "look=now"]);
    let grown = world.watch(&["pvc", "disk"], |claim| claim["status"]["capacity"]["storage"] == "2Gi");
    assert!(grown["status"]["conditions"].as_array().is_none_or(Vec::is_empty), "{}", grown["status"]);

    // The data is the claim's, not the pod's.
    world.kubectl(&["delete", "pod", "one"]);
    eventually("nothing is mounted", || mounts(&world).is_empty().then_some(()));
    eventually("the volume is detached", || {
        world.get(&["volumeattachment"])["items"].as_array().unwrap().is_empty().then_some(())
    });
    assert!(in_use(&world).is_empty());
    world.create(&pod("two", "persistentVolumeClaim: {claimName: disk, readOnly: true}"));
    world.wait_ready("two");
    assert_eq!(sh(&world, "two", "cat /data/file /data/below/file"), "kept\ndeep\n");
    assert!(
        !world.try_kubectl(&["exec", "two", "--", "/bin/busybox", "touch", "/data/new"]).status.success()
    );

    world.kubectl(&["delete", "pod", "two"]);
    world.kubectl(&["delete", "pvc", "disk"]);
    world.kubectl(&["wait", "--for=delete", &format!("pv/{volume}"), "--timeout=60s"]);
    assert!(mounts(&world).is_empty(), "{:?}", mounts(&world));
    let left = std::fs::read_dir(world.path("csi/volumes")).unwrap().count();
    assert_eq!(left, 0, "the data goes with the claim");
}

#[test]
fn a_volume_written_into_a_pod_goes_with_it() {
    let (world, _driver) = cluster();
    world.create(&pod("p", &format!("csi: {{driver: {DRIVER}}}")));
    world.wait_ready("p");
    sh(&world, "p", "echo x > /data/file");
    assert_eq!(std::fs::read_dir(world.path("csi/volumes")).unwrap().count(), 2, "the claim's and the pod's");
    assert!(world.get(&["volumeattachment"])["items"].as_array().unwrap().is_empty(), "nothing to attach");
    world.kubectl(&["delete", "pod", "p"]);
    eventually("nothing is mounted", || mounts(&world).is_empty().then_some(()));
    // The driver removes the files after it has unmounted them.
    let left = || std::fs::read_dir(world.path("csi/volumes")).unwrap().count();
    eventually("the claim's volume alone is left", || (left() == 1).then_some(()));
}

#[test]
fn pods_survive_a_driver_and_a_kubelet_that_restart() {
    let (mut world, driver) = cluster();
    world.watch(&["pvc", "disk"], |claim| claim["status"]["phase"] == "Bound");
    world.create(&pod("one", "persistentVolumeClaim: {claimName: disk}"));
    world.wait_ready("one");
    sh(&world, "one", "echo kept > /data/file");

    // A driver that hangs holds up its own volumes, and nothing else.
    driver.signal(Signal::SIGSTOP);
    world.create(&pod("waits", &format!("csi: {{driver: {DRIVER}}}")));
    world.create(&pod("runs", "emptyDir: {}"));
    world.wait_ready("runs");
    world.kubectl(&["delete", "pod", "runs"]);
    assert_eq!(world.get(&["pod", "waits"])["status"]["phase"], "Pending");
    drop(driver);

    // The kubelet is killed while the driver is away: the pod goes on, and its volume is still its own.
    world.kill();
    world.up();
    let pod = world.wait_ready("one");
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(sh(&world, "one", "cat /data/file"), "kept\n");
    assert_eq!(in_use(&world).len(), 1);

    let driver = Driver::start(&world);
    world.wait_ready("waits");
    world.kubectl(&["delete", "pod", "waits"]);
    drop(driver);

    // A pod that ends while the driver is away waits for it: its volume is taken back properly.
    world.kubectl(&["delete", "pod", "one", "--wait=false"]);
    let _driver = Driver::start(&world);
    world.kubectl(&["wait", "--for=delete", "pod/one", "--timeout=60s"]);
    eventually("nothing is mounted", || mounts(&world).is_empty().then_some(()));
}

#[test]
fn without_a_driver_pods_say_what_they_wait_for() {
    let world = World::start();
    world.create(OBJECTS);
    world.create(&pod("p", &format!("csi: {{driver: {DRIVER}}}")));
    let expected = format!("driver name {DRIVER} not found in the list of registered CSI drivers");
    eventually("the event", || world.kubectl(&["get", "events"]).contains(&expected).then_some(()));
    // A pod that waits can be deleted at once.
    world.kubectl(&["delete", "pod", "p", "--timeout=60s"]);
}
