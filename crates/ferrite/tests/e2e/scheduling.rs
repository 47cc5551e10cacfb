//! Decisions of the scheduler on real nodes: affinity, spreading, gates, preemption, a second scheduler with an extender.

use crate::world::*;
use ferrite_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// A pod that sleeps, with more of its specification.
fn pod(name: &str, labels: &str, spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{{labels}}}}}\nspec:\n  terminationGracePeriodSeconds: 0\n{spec}\n"
    )
}

fn containers(resources: &str) -> String {
    format!(
        "  containers:\n  - {{name: c, image: {TOOLS}, command: [/ferrite, tools, sleep, '600'], resources: {resources}}}"
    )
}

fn node_of(pod: &Value) -> Option<&str> {
    pod["spec"]["nodeName"].as_str()
}

/// The node that the pod gets.
fn scheduled(world: &World, name: &str) -> String {
    let pod = world.watch(&["pod", name], |pod| node_of(pod).is_some());
    node_of(&pod).unwrap().to_owned()
}

/// The scheduler's message about a pod that fits nowhere.
fn rejected(world: &World, name: &str) -> String {
    let message = |pod: &Value| -> Option<String> {
        let conditions = pod["status"]["conditions"].as_array()?;
        let found =
            conditions.iter().find(|c| c["type"] == "PodScheduled" && c["reason"] == "Unschedulable")?;
        Some(found["message"].as_str()?.to_owned())
    };
    message(&world.watch(&["pod", name], |pod| message(pod).is_some())).unwrap()
}

#[test]
fn pods_get_the_nodes_that_they_ask_for() {
    let world = World::start_with(&["--nodes", "2"]);
    world.kubectl(&["label", "node", "node-2", "disk=ssd"]);
    affinity(&world);
    spreading(&world);
    gates(&world);
    preemption(&world);
}

fn affinity(world: &World) {
    let wanted = "  affinity:\n    nodeAffinity:\n      requiredDuringSchedulingIgnoredDuringExecution:\n        nodeSelectorTerms:\n        - matchExpressions: [{key: disk, operator: In, values: [ssd]}]\n";
    world.create(&pod("on-ssd", "app: ssd", &format!("{wanted}{}", containers("{}"))));
    assert_eq!(scheduled(world, "on-ssd"), "node-2");

    let apart = "  affinity:\n    podAntiAffinity:\n      requiredDuringSchedulingIgnoredDuringExecution:\n      - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: apart}}}\n";
    for name in ["apart-1", "apart-2", "apart-3"] {
        world.create(&pod(name, "app: apart", &format!("{apart}{}", containers("{}"))));
        if name != "apart-3" {
            scheduled(world, name);
        }
    }
    assert_ne!(scheduled(world, "apart-1"), scheduled(world, "apart-2"));
    let message = rejected(world, "apart-3");
    assert!(
        message.starts_with("0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules."),
        "{message}"
    );
    let arguments = ["explain-schedule", "pod/apart-3"];
    let output = world.command(ferrite().to_str().unwrap(), &arguments).output().unwrap();
    let explained = String::from_utf8(output.stdout).unwrap();
    for text in ["node-2", "InterPodAffinity", "didn't match pod anti-affinity rules"] {
        assert!(explained.contains(text), "no {text} in {explained}");
    }
    // The room of a pod that goes is the room of the one that waits.
    world.kubectl(&["delete", "pod", "apart-1", "--wait=false"]);
    scheduled(world, "apart-3");
}

fn spreading(world: &World) {
    let deployment = format!(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: spread}}\nspec:\n  replicas: 4\n  selector: {{matchLabels: {{app: spread}}}}\n  template:\n    metadata: {{labels: {{app: spread}}}}\n    spec:\n      topologySpreadConstraints:\n      - {{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {{matchLabels: {{app: spread}}}}}}\n      containers: [{{name: c, image: {TOOLS}, command: [/ferrite, tools, sleep, '600']}}]\n"
    );
    world.create(&deployment);
    let count = eventually("four pods have nodes", || {
        let mut count = BTreeMap::<String, usize>::new();
        for pod in world.pods("app=spread") {
            *count.entry(node_of(&pod)?.to_owned()).or_default() += 1;
        }
        (count.values().sum::<usize>() == 4).then_some(count)
    });
    assert_eq!(count.into_values().collect::<Vec<_>>(), [2, 2]);
}

fn gates(world: &World) {
    world.create(&pod(
        "gated",
        "app: gated",
        &format!("  schedulingGates: [{{name: example.com/wait}}]\n{}", containers("{}")),
    ));
    let gated = world.watch(&["pod", "gated"], |pod| condition(pod, "PodScheduled") == Some("False"));
    let conditions = gated["status"]["conditions"].as_array().unwrap();
    assert!(conditions.iter().any(|c| c["reason"] == "SchedulingGated"), "{gated}");
    assert_eq!(node_of(&gated), None);
    world.kubectl(&[
        "patch",
        "pod",
        "gated",
        "--type=json",
        "-p",
        r#"[{"op": "remove", "path": "/spec/schedulingGates"}]"#,
    ]);
    scheduled(world, "gated");
}

/// Each node has room for one pod of a kind. The more important pod takes the room of the one that no budget guards.
fn preemption(world: &World) {
    for node in ["node", "node-2"] {
        let slots = r#"{"status": {"capacity": {"example.com/slot": "1"}, "allocatable": {"example.com/slot": "1"}}}"#;
        world.kubectl(&["patch", "node", node, "--subresource=status", "-p", slots]);
        world.watch(&["node", node], |node| node["status"]["allocatable"]["example.com/slot"] == "1");
    }
    world.create(
        "apiVersion: scheduling.k8s.io/v1\nkind: PriorityClass\nmetadata: {name: urgent}\nvalue: 1000\n",
    );
    world.create("apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: guard}\nspec: {minAvailable: 1, selector: {matchLabels: {app: guarded}}}\n");
    let slot = containers("{limits: {example.com/slot: 1}, requests: {example.com/slot: 1}}");
    for name in ["guarded", "open"] {
        world.create(&pod(name, &format!("app: {name}"), &slot));
        world.wait_ready(name);
    }
    world.watch(&["pdb", "guard"], |pdb| {
        pdb["status"]["currentHealthy"] == 1 && pdb["status"]["disruptionsAllowed"] == 0
    });
    let room = scheduled(world, "open");
    world.create(&pod("urgent", "app: urgent", &format!("  priorityClassName: urgent\n{slot}")));
    world.wait_ready("urgent");
    assert_eq!(scheduled(world, "urgent"), room);
    assert!(is_ready(&world.get(&["pod", "guarded"])), "its budget guards it");
    let events = world.get(&["events", "--field-selector", "reason=Preempted"]);
    let events = events["items"].as_array().unwrap().clone();
    assert!(events.iter().any(|event| event["involvedObject"]["name"] == "open"), "{events:?}");
}

/// A process that ends with this value.
struct Started(Child);

impl Started {
    fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_second_scheduler_has_profiles_and_an_extender_of_its_own() {
    let world = World::start_with(&["--nodes", "2"]);
    let script = world.write("extender.py", include_str!("extender.py"));
    let mut extender =
        Started::start(&mut world.command("/usr/bin/python3", &[script.to_str().unwrap(), "8888", "node"]));
    let mut line = String::new();
    BufReader::new(extender.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "serving");

    let kubeconfig = world.data().join("config/admin.kubeconfig");
    let configuration = world.write(
        "scheduler.yaml",
        &format!(
            "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nleaderElection: {{leaderElect: false}}\n\
             clientConnection: {{kubeconfig: {}}}\nprofiles:\n- schedulerName: second\n- schedulerName: third\n  plugins: {{multiPoint: {{disabled: [{{name: ImageLocality}}]}}}}\n\
             extenders:\n- {{urlPrefix: 'http://127.0.0.1:8888', filterVerb: filter, nodeCacheCapable: true}}\n",
            kubeconfig.display()
        ),
    );
    let arguments = [
        "kube-scheduler",
        "--config",
        configuration.to_str().unwrap(),
        "--bind-address",
        "127.0.0.1",
        "--secure-port",
        "10359",
    ];
    let _scheduler = Started::start(&mut world.command(ferrite().to_str().unwrap(), &arguments));
    for name in ["second", "third"] {
        world.create(&pod(name, "app: other", &format!("  schedulerName: {name}\n{}", containers("{}"))));
        assert_eq!(scheduled(&world, name), "node-2", "the extender refuses the other node");
        world.wait_ready(name);
    }
    world.create(&pod(
        "nowhere",
        "app: other",
        &format!(
            "  schedulerName: second\n  nodeSelector: {{kubernetes.io/hostname: node}}\n{}",
            containers("{}")
        ),
    ));
    let message = rejected(&world, "nowhere");
    assert!(message.contains("the extender wants no pod here"), "{message}");
}
