//! Device plugins: the example `device_plugin`, a process beside the cluster.

use crate::archive;
use crate::world::*;
use ferrite_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::mpsc;

const SHELL: &str = "example.com/shell:v1";
const RESOURCE: &str = "example.com/device";

/// The plugin, ended with the test.
struct Plugin {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Cargo puts examples beside the binary.
fn program() -> PathBuf {
    ferrite().parent().unwrap().join("examples/device_plugin")
}

impl Plugin {
    fn start(world: &World) -> Self {
        assert!(program().exists(), "build it with: cargo build -p ferrite-devices --example device_plugin");
        let kubelet = world.data().join("kubelet");
        let mut command = world.command(
            program().to_str().unwrap(),
            &[
                "--kubelet",
                kubelet.to_str().unwrap(),
                "--resource",
                RESOURCE,
                "--device",
                "one=/dev/null",
                "--device",
                "two=/dev/zero",
            ],
        );
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let plugin = Self { child, lines };
        plugin.wait_for(world, "registered");
        plugin
    }

    /// Waits until the plugin writes the line.
    fn wait_for(&self, world: &World, line: &str) {
        let found = self.lines.iter().any(|said| said == line);
        assert!(found, "the plugin never said {line:?}:\n{}", world.log());
    }

    fn order(&mut self, order: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{order}").unwrap();
    }
}

fn node(world: &World, capacity: &str, allocatable: &str) {
    world.watch(&["node", "node"], |node| {
        let amount = |list: &str| node["status"][list][RESOURCE].clone();
        amount("capacity") == capacity && amount("allocatable") == allocatable
    });
}

fn pod(name: &str, count: usize) -> String {
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
    resources: {{limits: {{{RESOURCE}: {count}}}}}
"#
    )
}

fn sh(world: &World, pod: &str, script: &str) -> String {
    world.kubectl(&["exec", pod, "--", "/bin/busybox", "sh", "-c", script])
}

#[test]
fn a_pod_has_the_devices_that_it_asks_for() {
    let mut world = World::start();
    let archive = world.path("shell.tar");
    archive::image(&archive, SHELL, "page", &["/bin/busybox", "sleep", "100000"]);
    world.import(&archive);
    let mut plugin = Plugin::start(&world);
    node(&world, "2", "2");

    // The plugin prefers the last one. It is a device node, and no other is there.
    world.create(&pod("first", 1));
    let first = world.wait_ready("first");
    plugin.wait_for(&world, "a container starts with two");
    assert_eq!(
        sh(&world, "first", "echo $DEVICES; head -c 3 /dev/two | wc -c; ls /dev/one 2>&1 | wc -l"),
        "two\n3\n1\n"
    );
    let health = |pod: &Value| container_status(pod)["allocatedResourcesStatus"].clone();
    let shown =
        |health: &str| json!([{"name": RESOURCE, "resources": [{"health": health, "resourceID": "two"}]}]);
    assert_eq!(health(&first), shown("Healthy"));

    // A sick device is reported, and not given away.
    plugin.order("sick two");
    node(&world, "2", "1");
    world.watch(&["pod", "first"], |pod| health(pod) == shown("Unhealthy"));
    plugin.order("well two");
    node(&world, "2", "2");

    // Two are not left; one is.
    world.create(&pod("waits", 2));
    world.watch(&["pod", "waits"], |pod| condition(pod, "PodScheduled") == Some("False"));
    world.kubectl(&["delete", "pod", "waits"]);

    // The plugin goes and comes again.
    drop(plugin);
    node(&world, "2", "0");
    let plugin = Plugin::start(&world);
    node(&world, "2", "2");
    world.create(&pod("second", 1));
    world.wait_ready("second");
    plugin.wait_for(&world, "a container starts with one");

    // The kubelet is killed and starts again: the plugin registers by itself, and pods go on and keep their
    // devices.
    world.kill();
    world.up();
    plugin.wait_for(&world, "registered");
    node(&world, "2", "2");
    for name in ["first", "second"] {
        let pod = world.wait_ready(name);
        assert_eq!(container_status(&pod)["restartCount"], 0, "{name}");
    }
    world.create(&pod("third", 1));
    world.watch(&["pod", "third"], |pod| condition(pod, "PodScheduled") == Some("False"));
    world.kubectl(&["delete", "pod", "second"]);
    world.wait_ready("third");
    assert_eq!(sh(&world, "third", "echo $DEVICES"), "one\n");
}
