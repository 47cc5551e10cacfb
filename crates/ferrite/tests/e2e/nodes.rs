//! Several real nodes on one machine, each with a network, mounts, control groups and a directory of its own.

use crate::lifecycle::Traces;
use crate::world::*;
use ferrite_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A web server on one node.
fn server_pod(node: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: on-{node}, labels: {{app: web, place: {node}}}}}
spec:
  nodeName: {node}
  containers:
  - {{name: c, image: {TOOLS}, command: [/ferrite, tools, http, --text=hello]}}
---
apiVersion: v1
kind: Service
metadata: {{name: at-{node}}}
spec:
  selector: {{place: {node}}}
  ports: [{{port: 80, targetPort: 8080}}]
"#
    )
}

fn start_pods(world: &World, nodes: &[&str]) {
    for node in nodes {
        world.create(&server_pod(node));
    }
    for node in nodes {
        world.wait_ready(&format!("on-{node}"));
    }
}

/// A pod's response from an address; the proxy and the names follow the API a moment later.
fn get(world: &World, pod: &str, url: &str) -> String {
    eventually(&format!("an answer of {url} for {pod}"), || {
        let output = world.try_kubectl(&["exec", pod, "--", "/ferrite", "tools", "get", url]);
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
    })
}

fn is_ready_node(node: &Value) -> bool {
    condition(node, "Ready") == Some("True")
}

fn record(world: &World, node: &str) -> Value {
    let path = world.data().join("nodes").join(format!("{node}.json"));
    ferrite_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn node_command(world: &World, arguments: &[&str]) -> String {
    let output = world.ferrite(&[&["node"], arguments].concat()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "node {arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// The log of an agent, for messages of a test that failed.
fn agent_log(world: &World, node: &str) -> String {
    std::fs::read_to_string(world.data().join("nodes").join(node).join("ferrite.log")).unwrap_or_default()
}

#[test]
fn two_nodes_are_one_network_and_leave_no_trace() {
    let mut world = World::prepare(&["--nodes", "2"]);
    let before = Traces::take(&world);
    world.up();
    let nodes = ["node", "node-2"];
    for node in nodes {
        let found = world.watch(&["node", node], is_ready_node);
        assert_eq!(found["status"]["addresses"][1]["address"], node);
    }
    let cidr = |node: &str| world.kubectl(&["get", "node", node, "-o", "jsonpath={.spec.podCIDR}"]);
    assert_eq!((cidr("node"), cidr("node-2")), ("10.244.0.0/24".into(), "10.244.1.0/24".into()));

    start_pods(&world, &nodes);
    for (from, to) in [("node", "node-2"), ("node-2", "node"), ("node-2", "node-2")] {
        let pod = format!("on-{from}");
        let address = pod_ip(&world.get(&["pod", &format!("on-{to}")]));
        let hello = format!("hello on-{to}");
        assert_eq!(get(&world, &pod, &format!("http://{address}:8080/")), hello, "{from} to {to} by address");
        let service =
            world.kubectl(&["get", "service", &format!("at-{to}"), "-o", "jsonpath={.spec.clusterIP}"]);
        assert_eq!(get(&world, &pod, &format!("http://{service}/")), hello, "{from} to {to} by Service");
        assert_eq!(get(&world, &pod, &format!("http://at-{to}/")), hello, "{from} to {to} by name");
        assert!(world.kubectl(&["logs", &pod]).contains("serving on port 8080"));
        assert_eq!(world.kubectl(&["exec", &pod, "--", "/ferrite", "tools", "echo", from]).trim(), from);
    }

    // Every node answers at a node port, also a node other than that of the client and its endpoint.
    let patch = r#"{"spec": {"type": "NodePort"}}"#;
    world.kubectl(&["patch", "service", "at-node-2", "-p", patch]);
    let port = world.kubectl(&["get", "service", "at-node-2", "-o", "jsonpath={.spec.ports[0].nodePort}"]);
    for node in nodes {
        let address = world.get(&["node", node])["status"]["addresses"][0]["address"].clone();
        let url = format!("http://{}:{port}/", address.as_str().unwrap());
        assert_eq!(get(&world, "on-node-2", &url), "hello on-node-2", "{url}");
    }

    // The node answers questions itself: its name server is an endpoint of its own.
    let slices = world.get(&["endpointslices", "-n", "kube-system", "-l", "k8s-app=kube-dns"]);
    let endpoints = slices["items"][0]["endpoints"].as_array().unwrap().clone();
    let told: Vec<(&str, &str)> = endpoints
        .iter()
        .map(|e| (e["nodeName"].as_str().unwrap(), e["addresses"][0].as_str().unwrap()))
        .collect();
    assert_eq!(told, [("node", "10.244.0.1"), ("node-2", "10.244.1.1")]);

    // An agent acts as its node and as nobody else.
    let agent = world.data().join("nodes/node-2");
    let ca = std::fs::read_to_string(agent.join("pki/ca.crt")).unwrap();
    assert_eq!(ca, std::fs::read_to_string(world.data().join("pki/ca.crt")).unwrap());
    assert!(!agent.join("pki/ca.key").exists(), "the authority's key stays with the server");
    let kubectl = |user: &str, arguments: &[&str]| {
        let file = |kind: &str| agent.join(format!("pki/{user}.{kind}")).to_str().unwrap().to_owned();
        let (certificate, key) =
            (format!("--client-certificate={}", file("crt")), format!("--client-key={}", file("key")));
        let authority = format!("--certificate-authority={}", file("crt").replace(user, "ca"));
        let empty = world.write("empty.kubeconfig", "");
        let config = format!("--kubeconfig={}", empty.display());
        let common = [config.as_str(), "--server=https://127.0.0.1:6443", &authority, &certificate, &key];
        let output = world.try_kubectl(&[&common, arguments].concat());
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    };
    for (user, arguments, good) in [
        ("kubelet-client", &["get", "node", "node-2"][..], true),
        ("kubelet-client", &["label", "node", "node", "x=y"], false),
        ("kubelet-client", &["get", "secrets", "-A"], false),
        ("kube-proxy", &["get", "services", "-A"], false),
        ("kube-proxy", &["get", "nodes"], true),
        ("kube-proxy", &["get", "secrets", "-A"], false),
        ("dns", &["get", "nodes"], false),
        ("dns", &["get", "secrets", "-n", "kube-system"], false),
    ] {
        let (succeeded, text) = kubectl(user, arguments);
        // `get` of a list by a user that may only list and watch works; the proxy may list Services.
        let good = good || (user == "kube-proxy" && arguments.contains(&"services"));
        assert_eq!(succeeded, good, "{user} {arguments:?}: {text}");
    }

    let holder = record(&world, "node-2")["holder"].as_i64().unwrap() as i32;
    let cgroup =
        std::fs::read_to_string(format!("/proc/{}/cgroup", container_pid(&world.get(&["pod", "on-node-2"]))));
    let cgroup = cgroup
        .unwrap()
        .lines()
        .find_map(|l| l.split("/ferrite-").nth(1)?.split('/').next().map(str::to_owned));
    let cgroup = format!("/ferrite-{}", cgroup.unwrap());
    let hostname = std::fs::read_link(format!("/proc/{holder}/ns/uts")).unwrap();
    assert_ne!(hostname, std::fs::read_link("/proc/self/ns/uts").unwrap());
    let output = world.down(&[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let after = Traces::take(&world);
    assert_eq!(after.links, before.links);
    assert_eq!(after.routes, before.routes);
    assert_eq!(after.mounts, before.mounts);
    assert_eq!(after.processes, before.processes);
    assert!(!world.data().exists(), "{:?}", after.files);
    assert!(!after.cgroups.iter().any(|path| path.contains(&cgroup)), "{cgroup} is left");
    // It was not ours to reap.
    eventually("the machine of the node ends", || {
        (!Path::new(&format!("/proc/{holder}")).exists()).then_some(())
    });
}

#[test]
fn nodes_come_fail_and_go() {
    let world = World::start_with(&["--nodes", "2", "--node-monitor-grace-period", "12s"]);
    start_pods(&world, &["node", "node-2"]);
    let routes = || {
        let text = world.netns.run(|| std::fs::read_to_string("/proc/thread-self/net/route").unwrap());
        // Destinations are numbers in the machine's order: 10.244.N.0.
        (1..4).filter(|n| text.contains(&format!("\t00{n:02X}F40A\t"))).collect::<Vec<u32>>()
    };
    assert_eq!(routes(), [1]);

    node_command(&world, &["add", "third"]);
    world.watch(&["node", "third"], is_ready_node);
    start_pods(&world, &["third"]);
    assert_eq!(
        get(&world, "on-node-2", "http://at-third/"),
        "hello on-third",
        "{}",
        agent_log(&world, "third")
    );
    assert_eq!(routes(), [1, 2]);
    let listed = node_command(&world, &["list"]);
    assert_eq!(
        listed.lines().skip(1).map(|l| l.split_whitespace().next().unwrap()).collect::<Vec<_>>(),
        ["node-2", "third"]
    );

    // Deleted: its object and its route are gone, and its range and its place are free again.
    node_command(&world, &["delete", "third"]);
    assert!(world.kubectl_fails(&["get", "node", "third"]).contains("NotFound"));
    eventually("the route of the node is gone", || (routes() == [1]).then_some(()));
    assert!(!world.data().join("nodes/third").exists());

    // Switched off: nobody speaks for it, and its containers have ended.
    let before = world.get(&["pod", "on-node-2"]);
    let pid = container_pid(&before);
    node_command(&world, &["stop", "node-2"]);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    assert!(node_command(&world, &["list"]).contains("off"));
    world.watch(&["node", "node-2"], |node| condition(node, "Ready") == Some("Unknown"));
    node_command(&world, &["start", "node-2"]);
    world.watch(&["node", "node-2"], is_ready_node);
    let earlier = container_status(&before)["containerID"].clone();
    world
        .watch(&["pod", "on-node-2"], |pod| is_ready(pod) && container_status(pod)["containerID"] != earlier);
    assert_eq!(get(&world, "on-node", "http://at-node-2/"), "hello on-node-2");

    // Cut off: its pods run and cannot be reached, until it is connected again.
    let pid = container_pid(&world.get(&["pod", "on-node-2"]));
    let address = pod_ip(&world.get(&["pod", "on-node-2"]));
    node_command(&world, &["partition", "node-2"]);
    assert!(node_command(&world, &["list"]).contains("cut off"));
    assert!(world.netns.http_get((address, 8080).into(), "/").is_err());
    assert!(Path::new(&format!("/proc/{pid}")).exists());
    node_command(&world, &["start", "node-2"]);
    eventually("the pod is reached again", || world.netns.http_get((address, 8080).into(), "/").ok());

    // Paused: the agent does not answer, its pods do.
    node_command(&world, &["pause", "node-2"]);
    assert!(node_command(&world, &["list"]).contains("paused"));
    assert!(world.netns.http_get((address, 8080).into(), "/").is_ok());
    node_command(&world, &["start", "node-2"]);
    assert_eq!(world.kubectl(&["exec", "on-node-2", "--", "/ferrite", "tools", "echo", "x"]).trim(), "x");
}

#[test]
fn a_cluster_goes_on_with_its_nodes() {
    let mut world = World::start_with(&["--nodes", "2"]);
    start_pods(&world, &["node", "node-2"]);
    let pid = container_pid(&world.get(&["pod", "on-node-2"]));
    // Ended at once, and started without a word about nodes: agents and containers were there all along.
    world.kill();
    world.start_again();
    world.watch(&["node", "node-2"], is_ready_node);
    assert_eq!(container_pid(&world.wait_ready("on-node-2")), pid);
    // Ended in order: the agent ends, too, its containers go on, and a new agent takes them up without a token.
    assert!(world.terminate());
    assert!(node_command(&world, &["list"]).contains("agent stopped"));
    assert!(Path::new(&format!("/proc/{pid}")).exists());
    world.start_again();
    world.watch(&["node", "node-2"], is_ready_node);
    assert_eq!(container_pid(&world.wait_ready("on-node-2")), pid);
    assert_eq!(get(&world, "on-node", "http://at-node-2/"), "hello on-node-2");
    let joined = world.get(&["csr"])["items"].as_array().unwrap().len();
    assert_eq!(joined, 4, "one time each: kubelet's client and serving, proxy, DNS");
}

#[test]
fn one_node_takes_no_others() {
    let world = World::start();
    let output = world.ferrite(&["token", "create"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--nodes"), "{output:?}");
    let output = world.ferrite(&["node", "add", "other"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("--nodes"), "{output:?}");
    // It still has the settings from before nodes could join.
    let node = world.get(&["node", "node"]);
    assert_eq!(node["status"]["addresses"][0]["address"], "10.244.0.1");
    assert_eq!(node["spec"]["podCIDR"], "10.244.0.0/24");
}

/// A `ferrite` process that ends with the test.
pub struct Process(Child);

impl Process {
    fn end(mut self) {
        self.terminate();
    }

    fn terminate(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.0.id() as i32);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.terminate();
    }
}

/// Another machine, with a cable to the first.
pub struct Worker {
    netns: Netns,
    data: PathBuf,
    name: &'static str,
    addresses: &'static str,
}

impl Worker {
    /// Connects both machines: the first has the address 192.0.2.1, the worker 192.0.2.2.
    fn new(world: &World) -> Self {
        Self::on_segment(world, "192.0.2.0/24", "worker", "192.0.2.2")
    }

    /// Connects a machine with a segment on which the first machine has the first address of each range.
    pub fn on_segment(
        world: &World,
        ranges: &'static str,
        name: &'static str,
        addresses: &'static str,
    ) -> Self {
        let netns = Netns::new();
        let path = netns.path();
        world.netns.run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let ranges = ranges.parse().unwrap();
                let segment = ferrite_network::Segment::open("machines", ranges, "none").await.unwrap();
                segment.attach(&format!("to-{name}"), &path, addresses.parse().unwrap()).await.unwrap();
            });
        });
        Self { netns, data: world.path(name), name, addresses }
    }

    fn ferrite(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(ferrite());
        command.args(arguments).arg("--data-dir").arg(&self.data);
        self.netns.enter(&mut command);
        command
    }

    pub fn agent(&self, log: &Path, extra: &[&str]) -> Process {
        let log = File::options().create(true).append(true).open(log).unwrap();
        let node = ["--node-name", self.name, "--node-ip", self.addresses];
        let mut command = self.ferrite(&[&["agent", "-v", "2"], &node[..]].concat());
        Process(command.args(extra).stdout(Stdio::null()).stderr(log).spawn().unwrap())
    }

    /// The error of an agent that cannot join.
    fn refused(&self, extra: &[&str]) -> String {
        let mut command = self.ferrite(&["agent", "--node-name", "worker", "--node-ip", "192.0.2.2"]);
        let output = command.args(extra).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let output = self.ferrite(&["down"]).output().unwrap();
        assert!(output.status.success() || std::thread::panicking(), "{output:?}");
    }
}

pub fn start_server(world: &World, extra: &[&str]) -> Process {
    let mut command = world.ferrite(&[&["server", "--advertise-address", "192.0.2.1"], extra].concat());
    let log = File::options().create(true).append(true).open(world.path("up.log")).unwrap();
    let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let up = lines.by_ref().map_while(Result::ok).any(|line| line.starts_with("serving"));
    let process = Process(child);
    assert!(up, "the server did not start:\n{}", world.log());
    std::fs::copy(world.data().join("config/admin.kubeconfig"), world.path("kubeconfig")).unwrap();
    std::thread::spawn(move || lines.for_each(drop));
    process
}

#[test]
fn an_agent_joins_a_server_with_a_token_and_needs_it_once() {
    let world = World::prepare(&[]);
    let worker = Worker::new(&world);
    let server = start_server(&world, &[]);
    let token = |arguments: &[&str]| {
        let output = world.ferrite(&[&["token"], arguments].concat()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let good = token(&["create", "--description", "for the worker"]);
    let url = ["--server", "https://192.0.2.1:6443"];

    // Another cluster's token, and one that was revoked.
    let (hash, secret) = good.split_once('.').unwrap();
    let stranger = format!("{}.{secret}", hash.chars().rev().collect::<String>());
    assert!(worker.refused(&[&url[..], &["--token", &stranger]].concat()).contains("another key"));
    assert!(worker.refused(&url).contains("--token"));
    let revoked = token(&["create", "--ttl", "1h"]);
    let id = revoked.split('.').nth(1).unwrap();
    assert!(token(&["list"]).contains(id));
    assert_eq!(token(&["revoke", id]), id);
    let listed = token(&["list"]);
    assert!(!listed.contains(id) && listed.contains("for the worker"), "{listed}");
    assert!(!listed.contains(secret.split_once('.').unwrap().1), "secrets are not shown");
    let refused = worker.refused(&[&url[..], &["--token", &revoked]].concat());
    assert!(refused.contains("Unauthorized") || refused.contains("refused"), "{refused}");

    let log = world.path("worker.log");
    let agent = worker.agent(&log, &[&url[..], &["--token", &good]].concat());
    world.watch(&["node", "worker"], is_ready_node);
    world.create(&server_pod("worker"));
    let pod = world.wait_ready("on-worker");
    assert_eq!(get(&world, "on-worker", "http://at-worker/"), "hello on-worker");
    assert!(world.kubectl(&["logs", "on-worker"]).contains("serving"));
    // The server reaches pods itself.
    let proxied = world.kubectl(&["get", "--raw", "/api/v1/namespaces/default/pods/on-worker:8080/proxy/"]);
    assert!(proxied.contains("hello on-worker"), "{proxied}");

    // Both start anew: no token, the same container.
    let pid = container_pid(&pod);
    agent.end();
    server.end();
    let _server = start_server(&world, &[]);
    token(&["revoke", good.split('.').nth(1).unwrap()]);
    let _agent = worker.agent(&log, &[]);
    world.watch(&["node", "worker"], is_ready_node);
    assert_eq!(
        world.kubectl(&["exec", "on-worker", "--", "/ferrite", "tools", "echo", "back"]).trim(),
        "back"
    );
    assert_eq!(container_pid(&world.wait_ready("on-worker")), pid);
}
