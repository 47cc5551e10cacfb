//! Dynamic resources: the example `dra_driver`, a process beside the cluster.

use crate::archive;
use crate::world::*;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc;

const SHELL: &str = "example.com/shell:v1";

/// The driver, ended with the test.
struct Driver {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A test that failed half-way leaves claims prepared.
        for file in std::fs::read_dir("/var/run/cdi").into_iter().flatten().flatten() {
            if file.file_name().to_string_lossy().starts_with("dra.example.com-") {
                let _ = std::fs::remove_file(file.path());
            }
        }
    }
}

/// Cargo puts examples beside the binary.
fn program() -> PathBuf {
    ferrite().parent().unwrap().join("examples/dra_driver")
}

impl Driver {
    fn start(world: &World) -> Self {
        assert!(program().exists(), "build it with: cargo build -p ferrite-devices --example dra_driver");
        let kubelet = world.data().join("kubelet");
        let arguments = ["--kubelet", kubelet.to_str().unwrap(), "--node", "node", "--devices", "2"];
        let mut command = world.command(program().to_str().unwrap(), &arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let driver = Self { child, lines };
        driver.wait_for(world, "registered");
        driver
    }

    /// Waits until the driver writes a line that begins so.
    fn wait_for(&self, world: &World, start: &str) {
        let found = self.lines.iter().any(|said| said.starts_with(start));
        assert!(found, "the driver never said {start:?}:\n{}", world.log());
    }
}

const CLASS: &str = r#"
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: example}
spec:
  extendedResourceName: example.com/claimed
  selectors:
  - cel: {expression: "device.driver == 'dra.example.com'"}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one}
spec:
  spec:
    devices:
      requests:
      - name: device
        exactly: {deviceClassName: example}
"#;

fn deployment(replicas: usize) -> String {
    format!(
        r#"
apiVersion: apps/v1
kind: Deployment
metadata: {{name: users}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: users}}}}
  template:
    metadata: {{labels: {{app: users}}}}
    spec:
      terminationGracePeriodSeconds: 0
      resourceClaims: [{{name: mine, resourceClaimTemplateName: one}}]
      containers:
      - name: c
        image: {SHELL}
        resources: {{claims: [{{name: mine}}]}}
"#
    )
}

fn device(world: &World, pod: &str) -> String {
    let script = "echo $DRA_DEVICE";
    world.kubectl(&["exec", pod, "--", "/bin/busybox", "sh", "-c", script]).trim().to_owned()
}

fn pods(world: &World) -> Vec<String> {
    let names =
        world.kubectl(&["get", "pods", "-l", "app=users", "-o", "jsonpath={.items[*].metadata.name}"]);
    names.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn pods_have_the_devices_of_their_claims() {
    let mut world = World::start();
    let archive = world.path("shell.tar");
    archive::image(&archive, SHELL, "page", &["/bin/busybox", "sleep", "100000"]);
    world.import(&archive);
    let driver = Driver::start(&world);
    world.create(CLASS);
    world.create(&deployment(2));
    world.watch(&["deployment", "users"], |found| found["status"]["readyReplicas"] == 2);
    let running = pods(&world);
    let mut devices: Vec<String> = running.iter().map(|pod| device(&world, pod)).collect();
    devices.sort();
    assert_eq!(devices, ["device-0", "device-1"]);

    // No device is left: the next pod waits, and is told why.
    let extended = format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: third}}\nspec:\n  terminationGracePeriodSeconds: 0\n  containers:\n  - name: c\n    \
         image: {SHELL}\n    resources: {{limits: {{example.com/claimed: 1}}}}\n"
    );
    world.create(&extended);
    world.watch(&["pod", "third"], |pod| condition(pod, "PodScheduled") == Some("False"));
    let told = world.kubectl(&["get", "pod", "third", "-o", "jsonpath={.status.conditions[0].message}"]);
    assert!(told.starts_with("0/1 nodes are available: 1 cannot allocate all claims."), "{told}");

    // The kubelet is killed and starts again: pods go on with what they have.
    world.kill();
    world.up();
    driver.wait_for(&world, "registered");
    for name in &running {
        let pod = world.wait_ready(name);
        assert_eq!(container_status(&pod)["restartCount"], 0, "{name}");
    }

    // A pod goes, and with it its claim: the device is the next pod's, by an extended resource this time.
    world.kubectl(&["scale", "deployment", "users", "--replicas=1"]);
    driver.wait_for(&world, "unprepared");
    world.wait_ready("third");
    let left = pods(&world);
    let mut devices = vec![device(&world, "third"), device(&world, &left[0])];
    devices.sort();
    assert_eq!(devices, ["device-0", "device-1"]);
    world.kubectl(&["delete", "deployment", "users"]);
    world.kubectl(&["delete", "pod", "third"]);
    driver.wait_for(&world, "unprepared");
    driver.wait_for(&world, "unprepared");
}
