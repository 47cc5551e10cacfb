//! What the pod network does for pods besides carrying their packets.

use crate::world::*;

/// A web server with a host port.
fn published(name: &str, node: &str, host_ip: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  nodeName: {node}
  containers:
  - name: c
    image: {TOOLS}
    command: [/ferrite, tools, http, --text=hello]
    ports: [{{containerPort: 8080, hostPort: 54323, hostIP: {host_ip}}}]
"#
    )
}

#[test]
fn host_ports_of_one_node_differ_by_address() {
    let world = World::start_with(&["--nodes", "2"]);
    let node = world.watch(&["node", "node-2"], |node| condition(node, "Ready") == Some("True"));
    let address = node["status"]["addresses"][0]["address"].as_str().unwrap().to_owned();
    world.create(&published("one", "node-2", "127.0.0.1"));
    world.create(&published("two", "node-2", &address));
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: on-the-node}}
spec:
  nodeName: node-2
  hostNetwork: true
  containers:
  - {{name: c, image: {TOOLS}, command: [/ferrite, tools, sleep]}}
"#
    ));
    for pod in ["one", "two", "on-the-node"] {
        world.wait_ready(pod);
    }
    let get = |pod: &str, host: &str| {
        let url = format!("http://{host}:54323/");
        world.kubectl(&["exec", pod, "--", "/ferrite", "tools", "get", &url])
    };
    assert!(get("on-the-node", "127.0.0.1").contains("one"));
    assert!(get("on-the-node", &address).contains("two"));
    assert!(get("one", &address).contains("two"), "from a pod");

    // The kubelet takes no pod whose port is taken.
    world.create(&published("late", "node-2", "0.0.0.0"));
    let late = world.watch(&["pod", "late"], |pod| pod["status"]["phase"] == "Failed");
    assert_eq!(late["status"]["reason"], "NodePorts");
}

/// A web server that can also ask others.
fn member(name: &str, node: &str) -> String {
    let app = name.split('-').next().unwrap();
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {app}}}}}
spec:
  nodeName: {node}
  containers:
  - name: c
    image: {TOOLS}
    command: [/ferrite, tools, http, --text=hello]
    ports: [{{name: web, containerPort: 8080}}]
    readinessProbe: {{httpGet: {{path: /healthz, port: web}}, periodSeconds: 1}}
---
"#
    )
}

#[test]
fn policies_hold_between_pods_of_one_node_and_of_two() {
    let world = World::start_with(&["--nodes", "2"]);
    // The policy is there before the first pod.
    world.create(
        r#"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: server}
spec:
  podSelector: {matchLabels: {app: server}}
  policyTypes: [Ingress, Egress]
  ingress:
  - from: [{podSelector: {matchLabels: {app: friend}}}]
    ports: [{port: web}]
---
apiVersion: v1
kind: Service
metadata: {name: server}
spec:
  selector: {app: server}
  ports: [{port: 80, targetPort: web}]
"#,
    );
    let names = ["server", "friend-1", "friend-2", "stranger-1", "stranger-2"];
    let nodes = ["node-2", "node", "node-2", "node", "node-2"];
    let all: String = names.iter().zip(nodes).map(|(name, node)| member(name, node)).collect();
    world.create(&all);
    for name in names {
        // The probe of the server is the node's: it is let through.
        world.wait_ready(name);
    }
    let ip = |pod: &str| world.kubectl(&["get", "pod", pod, "-o", "jsonpath={.status.podIP}"]);
    let service = world.kubectl(&["get", "service", "server", "-o", "jsonpath={.spec.clusterIP}"]);
    let reaches = |pod: &str, host: &str| {
        let url = format!("http://{host}/");
        let get = ["exec", pod, "--", "/ferrite", "tools", "get", "--timeout=1", &url];
        world.try_kubectl(&get).status.success()
    };
    let server = format!("{}:8080", ip("server"));
    for friend in ["friend-1", "friend-2"] {
        // Nodes learn of a pod's address a moment after it has one.
        eventually(&format!("the server answers {friend}"), || reaches(friend, &server).then_some(()));
        eventually(&format!("the Service answers {friend}"), || reaches(friend, &service).then_some(()));
    }
    for stranger in ["stranger-1", "stranger-2"] {
        assert!(!reaches(stranger, &server), "{stranger}");
        assert!(!reaches(stranger, &service), "{stranger} by the Service");
        assert!(!reaches("server", &format!("{}:8080", ip(stranger))), "egress to {stranger}");
        assert!(reaches("friend-1", &format!("{}:8080", ip(stranger))), "nothing selects {stranger}");
    }

    // Labels decide from one moment to the next, without a restart of anything.
    world.kubectl(&["label", "pod", "stranger-1", "app=friend", "--overwrite"]);
    eventually("the server answers its new friend", || reaches("stranger-1", &server).then_some(()));
    world.kubectl(&["delete", "networkpolicy", "server"]);
    eventually("the server answers everybody", || reaches("stranger-2", &server).then_some(()));
}
