//! Tests of the pod network besides carrying packets.

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

/// The plugin of docs/cni.md.
fn documented_plugin() -> String {
    let text = include_str!("../../../../docs/cni.md");
    let (_, rest) = text.split_once("```sh\n").unwrap();
    rest.split_once("```").unwrap().0.to_owned()
}

#[test]
fn pods_have_their_network_from_a_plugin() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let (programs, configurations) = (dir.path().join("bin"), dir.path().join("net.d"));
    std::fs::create_dir(&programs).unwrap();
    std::fs::create_dir(&configurations).unwrap();
    let plugin = programs.join("script");
    std::fs::write(&plugin, documented_plugin()).unwrap();
    std::fs::set_permissions(&plugin, std::fs::Permissions::from_mode(0o755)).unwrap();

    let mut world = World::prepare(&[
        "--cni-conf-dir",
        configurations.to_str().unwrap(),
        "--cni-bin-dir",
        programs.to_str().unwrap(),
    ]);
    let leases = dir.path().join("leases");
    let config = ferrite_json::json!({"cniVersion": "0.4.0", "name": "lan", "type": "script", "bridge": "script0",
        "subnet": "10.77.0", "leases": leases.to_str().unwrap()});
    std::fs::write(configurations.join("10-script.conf"), config.to_string()).unwrap();
    world.up();
    world.create(&member("server", "node"));
    world.create(&member("client", "node"));
    world.wait_ready("server");
    world.wait_ready("client");
    let address = world.kubectl(&["get", "pod", "server", "-o", "jsonpath={.status.podIP}"]);
    assert!(address.starts_with("10.77.0."), "{address}");
    let url = format!("http://{address}:8080/");
    assert!(world.kubectl(&["exec", "client", "--", "/ferrite", "tools", "get", &url]).contains("server"));

    world.kubectl(&["delete", "pod", "server", "--now"]);
    let held = || std::fs::read_dir(&leases).unwrap().count();
    assert_eq!(held(), 1, "the plugin has taken the address back");

    // Without a network the node says so.
    std::fs::remove_file(configurations.join("10-script.conf")).unwrap();
    let node = world.watch(&["node", "node"], |node| condition(node, "Ready") == Some("False"));
    assert!(node.to_string().contains("no network configuration"), "{node}");
    drop(world);
    assert_eq!(held(), 0, "nothing is left");
}

#[test]
fn the_program_is_the_plugins_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let (programs, configurations) = (dir.path().join("bin"), dir.path().join("net.d"));
    std::fs::create_dir(&programs).unwrap();
    std::fs::create_dir(&configurations).unwrap();
    for name in ["bridge", "host-local", "portmap", "bandwidth"] {
        std::os::unix::fs::symlink(ferrite(), programs.join(name)).unwrap();
    }
    let config = ferrite_json::json!({"cniVersion": "1.1.0", "name": "pods", "plugins": [
        {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": true, "hairpinMode": true,
            "ipam": {"type": "host-local", "dataDir": dir.path().join("leases").to_str().unwrap(),
                "ranges": [[{"subnet": "10.78.0.0/24"}]]}},
        {"type": "portmap", "capabilities": {"portMappings": true}},
        {"type": "bandwidth", "capabilities": {"bandwidth": true}},
    ]});
    std::fs::write(configurations.join("10-pods.conflist"), config.to_string()).unwrap();
    let world = World::start_with(&[
        "--cni-conf-dir",
        configurations.to_str().unwrap(),
        "--cni-bin-dir",
        programs.to_str().unwrap(),
    ]);
    world.create(&published("one", "node", "127.0.0.1"));
    world.create(&member("client", "node"));
    world.wait_ready("one");
    world.wait_ready("client");
    let address = world.kubectl(&["get", "pod", "one", "-o", "jsonpath={.status.podIP}"]);
    assert!(address.starts_with("10.78.0."), "{address}");
    let url = format!("http://{address}:8080/");
    assert!(world.kubectl(&["exec", "client", "--", "/ferrite", "tools", "get", &url]).contains("one"));
    assert!(world.netns.http_get("127.0.0.1:54323".parse().unwrap(), "/").unwrap().contains("one"));

    // Policies hold for pods of plugins from their first packet on, where the kernel filters bridged packets.
    let filtered =
        world.netns.run(|| std::fs::read_to_string("/proc/sys/net/bridge/bridge-nf-call-iptables"));
    if filtered.is_ok_and(|value| value.trim() == "1") {
        world.create(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: quiet}\nspec: {podSelector: \
             {matchLabels: {run: quiet}}, policyTypes: [Egress]}\n",
        );
        for (name, phase) in [("loud", "Succeeded"), ("quiet", "Failed")] {
            let get = ["get", &url, "--timeout", "2"];
            world.kubectl(&[&["run", name, "--image", TOOLS, "--restart=Never", "--"], &get[..]].concat());
            world.watch(&["pod", name], |pod| {
                ["Succeeded", "Failed"].iter().any(|end| pod["status"]["phase"] == *end)
            });
            assert_eq!(world.get(&["pod", name])["status"]["phase"], phase, "{name}");
        }
    }
}

#[test]
fn a_second_cluster_on_the_same_addresses_is_refused() {
    let world = World::start();
    world.create(&member("server", "node"));
    let server = world.wait_ready("server");
    let second = world.path("second").display().to_string();
    let program = ferrite().display().to_string();
    let arguments =
        ["up", "--data-dir", &second, "--no-kubeconfig", "--port", "7443", "--kubelet-port", "11250"];
    let output = world.command(&program, &arguments).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && complaint.contains("overlaps with"), "{complaint}");
    assert!(complaint.contains("--cluster-cidr"), "{complaint}");
    assert!(world.page(&server).contains("hello"), "the first cluster is as it was");
}

#[test]
fn the_data_path_is_shown_as_the_kernel_has_it() {
    let world = World::start();
    world.create(
        r#"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: closed}
spec: {podSelector: {}, policyTypes: [Ingress]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: server}, ports: [{port: 80, targetPort: web}]}
---
apiVersion: v1
kind: Service
metadata: {name: nobody}
spec: {selector: {app: nobody}, ports: [{port: 80}]}
"#,
    );
    world.create(&member("server", "node"));
    world.create(&published("one", "node", "127.0.0.1"));
    world.wait_ready("server");
    world.wait_ready("one");
    let show = |target: &str| {
        let output = world.ferrite(&["network", target]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        text
    };
    let ip = world.kubectl(&["get", "pod", "server", "-o", "jsonpath={.status.podIP}"]);
    let service = world.kubectl(&["get", "service", "web", "-o", "jsonpath={.spec.clusterIP}"]);
    let way = format!("{service}:80/tcp goes to {ip}:8080 (pod default/server) by chain pick-1");
    // The proxy follows the API a moment later.
    eventually("the Service is in the kernel", || show("service/web").contains(&way).then_some(()));
    let server = show("pod/server");
    assert!(server.contains("ingress     what closed allow, by chain class-"), "{server}");
    assert!(server.contains("egress      everything is allowed"), "{server}");
    assert!(server.contains(&format!("service     default/web at {service}:80")), "{server}");
    let one = show("pod/one");
    assert!(one.contains("host port   54323/tcp at 127.0.0.1 leads to 8080"), "{one}");
    assert!(show("service/nobody").contains("is refused: no endpoint is ready"));
    let named = show("web.default.svc.cluster.local");
    assert!(named.contains(&service) && named.contains(&way), "{named}");
    let missing = world.ferrite(&["network", "pod/none"]).output().unwrap();
    assert!(String::from_utf8_lossy(&missing.stderr).contains("there is no pod default/none"));
}
