//! Clusters with IPv6: beside IPv4 on two nodes, and alone.

use crate::nodes::{Worker, start_server};
use crate::world::*;
use ferrite_json::Value;

/// A web server on one node.
fn server(name: &str, node: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: {name}}}}}
spec:
  nodeName: {node}
  containers:
  - name: c
    image: {TOOLS}
    command: [/ferrite, tools, http, --text=hello]
    ports: [{{containerPort: 8080}}]
    readinessProbe: {{httpGet: {{path: /healthz, port: 8080}}, periodSeconds: 1}}
    env:
    - {{name: POD_IPS, valueFrom: {{fieldRef: {{fieldPath: status.podIPs}}}}}}
    - {{name: HOST_IPS, valueFrom: {{fieldRef: {{fieldPath: status.hostIPs}}}}}}
---
"#
    )
}

fn service(name: &str, policy: &str, families: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Service
metadata: {{name: {name}-{}}}
spec:
  type: NodePort
  selector: {{app: {name}}}
  ipFamilyPolicy: {policy}
  ipFamilies: {families}
  ports: [{{port: 80, targetPort: 8080}}]
---
"#,
        policy.to_lowercase()
    )
}

fn texts(list: &Value, field: &str) -> Vec<String> {
    let all = list.as_array().into_iter().flatten();
    let text = |entry: &Value| match field {
        "" => entry.as_str().map(str::to_owned),
        _ => entry[field].as_str().map(str::to_owned),
    };
    all.filter_map(text).collect()
}

fn in_url(address: &str) -> String {
    if address.contains(':') { format!("[{address}]") } else { address.to_owned() }
}

fn in_pod(world: &World, pod: &str, arguments: &[&str]) -> Option<String> {
    let command = [&["exec", pod, "--", "/ferrite", "tools"], arguments].concat();
    let output = world.try_kubectl(&command);
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

/// Destinations and links of the machine's routes of IPv6, without the end that the kernel gives each table.
fn routes(world: &World) -> Vec<String> {
    let text = world.netns.run(|| std::fs::read_to_string("/proc/thread-self/net/ipv6_route").unwrap());
    let row = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        format!("{}/{} {}", fields[0], fields[1], fields[9])
    };
    let mut rows: Vec<String> = text.lines().map(row).collect();
    rows.retain(|row| !row.ends_with("/00 lo"));
    rows.sort();
    rows
}

/// The answer that a pod gets from an address; the proxy and the names follow the API a moment later.
fn get(world: &World, pod: &str, url: &str) -> String {
    eventually(&format!("an answer of {url} for {pod}"), || in_pod(world, pod, &["get", url]))
}

#[test]
fn a_cluster_of_both_families_on_two_nodes() {
    let ranges = ["--cluster-cidr", "10.244.0.0/16,fd00:10:244::/56"];
    let services = ["--service-cluster-ip-range", "10.96.0.0/16,fd00:10:96::/108"];
    let mut world = World::prepare(&[&["--nodes", "2"][..], &ranges, &services].concat());
    let before = routes(&world);
    world.up();
    for (node, cidrs) in
        [("node", ["10.244.0.0/24", "fd00:10:244::/64"]), ("node-2", ["10.244.1.0/24", "fd00:10:244:1::/64"])]
    {
        let found = world.watch(&["node", node], |node| condition(node, "Ready") == Some("True"));
        assert_eq!(texts(&found["spec"]["podCIDRs"], ""), cidrs);
        let addresses = texts(&found["status"]["addresses"], "address");
        assert!(
            addresses[0].starts_with("10.243.0.") && addresses[1].starts_with("fd00:10:243::"),
            "{addresses:?}"
        );
    }
    // The policy is there before the first pod.
    world.create(
        r#"
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: guarded}
spec:
  podSelector: {matchLabels: {app: guarded}}
  ingress:
  - from: [{ipBlock: {cidr: "fd00:10:244::/56", except: ["fd00:10:244:1::/64"]}}]
"#,
    );
    let manifest = [server("one", "node"), server("two", "node-2"), server("guarded", "node")].concat();
    world.create(&manifest);
    let mut ips = std::collections::BTreeMap::new();
    for (pod, node) in [("one", "node"), ("two", "node-2")] {
        let found = world.wait_ready(pod);
        let pod_ips = texts(&found["status"]["podIPs"], "ip");
        let host_ips = texts(&found["status"]["hostIPs"], "ip");
        assert_eq!((pod_ips.len(), host_ips.len()), (2, 2), "{pod} on {node}");
        let environment = in_pod(&world, pod, &["env"]).unwrap();
        assert!(environment.contains(&format!("POD_IPS={}", pod_ips.join(","))), "{environment}");
        assert!(environment.contains(&format!("HOST_IPS={}", host_ips.join(","))), "{environment}");
        let hosts = in_pod(&world, pod, &["cat", "/etc/hosts"]).unwrap();
        assert!(pod_ips.iter().all(|ip| hosts.contains(&format!("{ip}\t{pod}"))), "{hosts}");
        ips.insert(pod, pod_ips);
    }
    for (from, to) in [("one", "two"), ("two", "one")] {
        for address in &ips[to] {
            let url = format!("http://{}:8080/", in_url(address));
            assert_eq!(get(&world, from, &url), format!("hello {to}"), "{from} to {url}");
        }
    }

    world.create(
        &[service("two", "RequireDualStack", "[IPv4, IPv6]"), service("two", "SingleStack", "[IPv6]")]
            .concat(),
    );
    let both = world.get(&["service", "two-requiredualstack"]);
    let addresses = texts(&both["spec"]["clusterIPs"], "");
    assert!(addresses[0].starts_with("10.96.") && addresses[1].starts_with("fd00:10:96::"), "{addresses:?}");
    let single = world.get(&["service", "two-singlestack"]);
    let six = texts(&single["spec"]["clusterIPs"], "");
    assert_eq!(six.len(), 1);
    for address in addresses.iter().chain(&six) {
        let url = format!("http://{}/", in_url(address));
        assert_eq!(get(&world, "one", &url), "hello two", "{url}");
        assert_eq!(get(&world, "two", &url), "hello two", "to itself: {url}");
    }
    let port = both["spec"]["ports"][0]["nodePort"].as_i64().unwrap();
    for address in texts(&world.get(&["node", "node-2"])["status"]["addresses"], "address").iter().take(2) {
        let url = format!("http://{}:{port}/", in_url(address));
        assert_eq!(get(&world, "one", &url), "hello two", "{url}");
    }
    // Names have records of both families.
    let found = eventually("both records", || {
        in_pod(&world, "one", &["dns", "two-requiredualstack"]).filter(|text| text.lines().count() >= 2)
    });
    assert!(addresses.iter().all(|address| found.lines().any(|line| line == address)), "{found}");
    assert_eq!(get(&world, "one", "http://two-singlestack/"), "hello two");

    // The block allows pods of the first node by IPv6, and nobody by IPv4.
    let guarded = texts(
        &world.watch(&["pod", "guarded"], |pod| pod["status"]["podIPs"][1]["ip"].is_string())["status"]["podIPs"],
        "ip",
    );
    let url = |address: &String| format!("http://{}:8080/", in_url(address));
    assert_eq!(get(&world, "one", &url(&guarded[1])), "hello guarded");
    let soon = |pod: &str, url: &str| in_pod(&world, pod, &["get", "--timeout", "1", url]);
    assert_eq!(soon("one", &url(&guarded[0])), None, "IPv4 is not in the block");
    assert_eq!(soon("two", &url(&guarded[1])), None, "the other node is excepted");

    let output = world.down(&[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(routes(&world), before);
}

#[test]
fn a_cluster_of_ipv6_alone() {
    let ranges = ["--cluster-cidr", "fd00:10:244::/56", "--service-cluster-ip-range", "fd00:10:96::/108"];
    let world = World::start_with(&ranges);
    let node = world.get(&["node", "node"]);
    assert_eq!(node["status"]["addresses"][0]["address"], "fd00:10:244::1");
    world.create(&server("one", "node"));
    world.create(&server("two", "node"));
    world.create(&service("two", "PreferDualStack", "[IPv6]"));
    world.wait_ready("one");
    let two = world.wait_ready("two");
    assert_eq!(texts(&two["status"]["podIPs"], "ip"), [two["status"]["podIP"].as_str().unwrap()]);
    assert_eq!(texts(&world.get(&["service", "two-preferdualstack"])["spec"]["ipFamilies"], ""), ["IPv6"]);
    let resolver = in_pod(&world, "one", &["cat", "/etc/resolv.conf"]).unwrap();
    assert!(resolver.contains("nameserver fd00:10:96::a"), "{resolver}");
    assert_eq!(get(&world, "one", "http://two-preferdualstack/"), "hello two");
    let kubernetes = world.get(&["service", "kubernetes"]);
    assert_eq!(kubernetes["spec"]["clusterIP"], "fd00:10:96::1");
    // The API server answers a pod at its Service, and reaches the pod's kubelet for its log.
    let version = eventually("the API server", || in_pod(&world, "one", &["api", "/version"]));
    assert!(version.contains("gitVersion"), "{version}");
    assert!(world.kubectl(&["logs", "two"]).contains("serving on port 8080"));
}

#[test]
fn two_nodes_of_ipv6_alone() {
    let ranges = ["--cluster-cidr", "fd00:10:244::/56", "--service-cluster-ip-range", "fd00:10:96::/108"];
    let nodes = ["--nodes", "2", "--node-cidr", "fd00:10:243::/64"];
    let mut world = World::prepare(&[&nodes[..], &ranges].concat());
    world.up();
    for (node, cidr) in [("node", "fd00:10:244::/64"), ("node-2", "fd00:10:244:1::/64")] {
        let found = world.watch(&["node", node], |node| condition(node, "Ready") == Some("True"));
        assert_eq!(texts(&found["spec"]["podCIDRs"], ""), [cidr]);
        assert!(texts(&found["status"]["addresses"], "address")[0].starts_with("fd00:10:243::"));
        world.create(
            &server(&format!("on-{node}"), node).replace("labels: {app: ", "labels: {all: web, app: "),
        );
    }
    let pods = ["on-node", "on-node-2"];
    for (from, to) in [(pods[0], pods[1]), (pods[1], pods[0])] {
        let ready = world.wait_ready(to);
        world.wait_ready(from);
        let url = format!("http://[{}]:8080/", ready["status"]["podIP"].as_str().unwrap());
        assert_eq!(get(&world, from, &url), format!("hello {to}"));
    }
    world.create(
        r"
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {all: web}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: v1
kind: Service
metadata: {name: sticky}
spec:
  selector: {all: web}
  sessionAffinity: ClientIP
  ports: [{port: 80, targetPort: 8080}]
",
    );
    // Connections go to both pods in the end, unless the client has a session.
    for pod in pods {
        for wanted in pods {
            eventually(&format!("an answer of {wanted} for {pod}"), || {
                in_pod(&world, pod, &["get", "http://web/"]).filter(|text| *text == format!("hello {wanted}"))
            });
        }
        let first = get(&world, pod, "http://sticky/");
        for _ in 0..12 {
            assert_eq!(get(&world, pod, "http://sticky/"), first);
        }
    }
    let output = world.down(&[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_server_with_agents_of_both_families() {
    let world = World::prepare(&[]);
    let segment = "192.0.2.0/24,2001:db8::/64";
    let workers = [("first", "192.0.2.2,2001:db8::2"), ("second", "192.0.2.3,2001:db8::3")]
        .map(|(name, addresses)| (name, addresses, Worker::on_segment(&world, segment, name, addresses)));
    let ranges = ["--cluster-cidr", "10.244.0.0/16,fd00:10:244::/56"];
    let services = ["--service-cluster-ip-range", "10.96.0.0/16,fd00:10:96::/108"];
    let _server = start_server(&world, &[ranges, services].concat());
    let token = world.ferrite(&["token", "create"]).output().unwrap();
    let token = String::from_utf8(token.stdout).unwrap();
    let join = ["--server", "https://192.0.2.1:6443", "--token", token.trim()];
    let agents =
        workers.each_ref().map(|(name, _, worker)| worker.agent(&world.path(&format!("{name}.log")), &join));
    for (name, addresses, _) in &workers {
        let node = world.watch(&["node", name], |node| condition(node, "Ready") == Some("True"));
        assert_eq!(texts(&node["spec"]["podCIDRs"], "").len(), 2, "{name}");
        let found = texts(&node["status"]["addresses"], "address");
        assert!(addresses.split(',').all(|address| found.iter().any(|known| known == address)), "{found:?}");
        world.create(&server(&format!("on-{name}"), name));
    }
    world.create(&service("on-second", "RequireDualStack", "[IPv6, IPv4]"));
    let pods = ["on-first", "on-second"].map(|pod| texts(&world.wait_ready(pod)["status"]["podIPs"], "ip"));
    let addresses = texts(&world.get(&["service", "on-second-requiredualstack"])["spec"]["clusterIPs"], "");
    assert_eq!((pods[0].len(), pods[1].len(), addresses.len()), (2, 2, 2));
    for (from, to, ips) in [("on-first", "on-second", &pods[1]), ("on-second", "on-first", &pods[0])] {
        for address in ips {
            let url = format!("http://{}:8080/", in_url(address));
            assert_eq!(get(&world, from, &url), format!("hello {to}"), "{from} to {url}");
        }
        for address in &addresses {
            let url = format!("http://{}/", in_url(address));
            assert_eq!(get(&world, from, &url), "hello on-second", "{from} to {url}");
        }
    }
    assert_eq!(get(&world, "on-first", "http://on-second-requiredualstack/"), "hello on-second");
    // The server reaches the pod through its agent, at its first address.
    let proxied = world.kubectl(&["get", "--raw", "/api/v1/namespaces/default/pods/on-second:8080/proxy/"]);
    assert!(proxied.contains("hello on-second"), "{proxied}");
    assert!(world.kubectl(&["logs", "on-second"]).contains("serving on port 8080"));
    drop(agents);
}
