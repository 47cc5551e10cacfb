//! Names, as pods and the node see them.

use crate::world::*;
use std::net::UdpSocket;
use std::process::Command;

/// Knows one address for every name in two domains, and no other records. It ends with the test's process.
fn outside_resolver(world: &World) {
    let socket = world.netns.run(|| UdpSocket::bind("127.0.0.1:53").unwrap());
    std::thread::spawn(move || {
        let mut buffer = [0; 1500];
        while let Ok((size, client)) = socket.recv_from(&mut buffer) {
            let query = &buffer[..size];
            // The header, the labels of the name, then type and class.
            let mut end = 12;
            while query[end] != 0 {
                end += usize::from(query[end]) + 1;
            }
            let name = query[12..end].to_ascii_lowercase();
            let known = name.ends_with(b"\x07outside\x04test") || name.ends_with(b"\x04corp\x04test");
            let address = known && [query[end + 1], query[end + 2]] == [0, 1];
            end += 5;
            let mut reply = query[..end].to_vec();
            reply[2..4].copy_from_slice(&[0x81, if known { 0x80 } else { 0x83 }]);
            reply[6..12].copy_from_slice(&[0, u8::from(address), 0, 0, 0, 0]);
            if address {
                reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 1, 0, 0, 4, 192, 0, 2, 80]);
            }
            let _ = socket.send_to(&reply, client);
        }
    });
}

/// The addresses of a name as a pod resolves it; empty if the pod does not find the name.
fn lookup(world: &World, pod: &str, name: &str) -> Vec<String> {
    let output = world.try_kubectl(&["exec", pod, "--", "/ferrite", "tools", "dns", name]);
    let mut found: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    found.sort();
    found.dedup();
    found
}

fn dig(world: &World, arguments: &[&str]) -> String {
    let output = world.command("dig", &[&["+tries=1", "+time=5"], arguments].concat()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

const SERVICES: &str = "
apiVersion: v1
kind: Service
metadata: {name: peers}
spec: {clusterIP: None, selector: {app: peer}, ports: [{name: http, port: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: early}
spec: {clusterIP: None, publishNotReadyAddresses: true, selector: {app: late}, ports: [{port: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: patient}
spec: {clusterIP: None, selector: {app: late}, ports: [{port: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: elsewhere}
spec: {type: ExternalName, externalName: www.outside.test}
";

fn peer(name: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: peer}}}}
spec:
  hostname: {name}
  subdomain: peers
  terminationGracePeriodSeconds: 0
  containers: [{{name: c, image: {TOOLS}, args: [http]}}]
"
    )
}

const LATE: &str = "
apiVersion: v1
kind: Pod
metadata: {name: late, labels: {app: late}}
spec:
  containers:
  - {name: c, image: ferrite.local/tools, args: [http, --ready-file=/never], readinessProbe: {httpGet: {path: /readyz, port: 8080}}}
";

#[test]
fn pods_resolve_names() {
    let mut world = World::prepare(&[]);
    outside_resolver(&world);
    let resolv_conf = world.write("resolv.conf", "nameserver 127.0.0.1\nsearch example.test\n");
    world.start_in(&["--resolv-conf", resolv_conf.to_str().unwrap()]);
    world.create(SERVICES);
    world.create(&[peer("one"), peer("two"), LATE.to_owned()].join("---"));
    world.kubectl(&["run", "client", "--image", TOOLS, "--", "sleep"]);
    world.wait_ready("client");
    let lookup = |name: &str| lookup(&world, "client", name);

    let configured = world.kubectl(&["exec", "client", "--", "/ferrite", "tools", "cat", "/etc/resolv.conf"]);
    let mut lines: Vec<&str> = configured.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "nameserver 10.96.0.10",
            "options ndots:5",
            "search default.svc.cluster.local svc.cluster.local cluster.local example.test",
        ]
    );
    for name in ["kubernetes", "kubernetes.default", "kubernetes.default.svc.cluster.local"] {
        assert_eq!(lookup(name), ["10.96.0.1"], "{name}");
    }
    eventually("the server knows its own Service", || {
        (lookup("kube-dns.kube-system") == ["10.96.0.10"]).then_some(())
    });

    // A headless service has the addresses of its ready pods, and their names.
    let one = pod_ip(&world.wait_ready("one")).to_string();
    let two = pod_ip(&world.wait_ready("two")).to_string();
    let mut both = vec![one.clone(), two.clone()];
    both.sort();
    eventually("both are known", || (lookup("peers") == both).then_some(()));
    assert_eq!(lookup("one.peers"), [one.as_str()]);
    assert_eq!(lookup("two.peers.default.svc.cluster.local"), [two.as_str()]);
    assert_eq!(lookup(&format!("{}.default.pod.cluster.local", one.replace('.', "-"))), [one.as_str()]);
    let late = world.watch(&["pod", "late"], |pod| !pod["status"]["podIP"].is_null());
    let late = vec![pod_ip(&late).to_string()];
    eventually("a pod that is not ready is published", || (lookup("early") == late).then_some(()));
    assert!(lookup("patient").is_empty());
    world.kubectl(&["delete", "pod", "two"]);
    eventually("a pod that is gone is not known", || (lookup("peers") == [one.clone()]).then_some(()));
    assert!(lookup("two.peers").is_empty());

    // Names of others.
    assert_eq!(lookup("www.outside.test"), ["192.0.2.80"]);
    assert_eq!(lookup("elsewhere"), ["192.0.2.80"]);
    assert!(lookup("nothing.default.svc.cluster.local").is_empty());

    // The node asks the same server, by the address of the Service and by that of its endpoint.
    for server in ["@10.96.0.10", "@10.244.0.1"] {
        assert_eq!(dig(&world, &[server, "+short", "kubernetes.default.svc.cluster.local"]), "10.96.0.1\n");
        assert_eq!(
            dig(&world, &[server, "+short", "+tcp", "-x", &one]),
            "one.peers.default.svc.cluster.local.\n"
        );
    }
    let srv = dig(&world, &["@10.96.0.10", "+short", "_http._tcp.peers.default.svc.cluster.local", "SRV"]);
    assert_eq!(srv, "0 100 8080 one.peers.default.svc.cluster.local.\n");

    let metrics = world.kubectl(&[
        "exec",
        "client",
        "--",
        "/ferrite",
        "tools",
        "get",
        "http://10.244.0.1:9153/metrics",
    ]);
    assert!(metrics.contains("coredns_dns_requests_total{"), "{metrics}");
}

#[test]
fn the_dns_service_is_there_and_its_account_may_only_read_names() {
    let mut world = World::start();
    let service = world.watch(&["-n", "kube-system", "service", "kube-dns"], |_| true);
    world.watch(&["-n", "kube-system", "endpointslice", "kube-dns"], |_| true);
    assert_eq!(service["spec"]["clusterIP"], "10.96.0.10");
    assert_eq!(service["metadata"]["labels"]["k8s-app"], "kube-dns");
    assert_eq!(service["metadata"]["labels"]["kubernetes.io/name"], "CoreDNS");
    let slices =
        world.get(&["endpointslices", "-n", "kube-system", "-l", "kubernetes.io/service-name=kube-dns"]);
    let slices = slices["items"].as_array().unwrap();
    assert_eq!(slices.len(), 1);
    assert_eq!(slices[0]["endpoints"][0]["addresses"][0], "10.244.0.1");
    let may = |verb: &str, what: &str| {
        let account = "--as=system:serviceaccount:kube-system:coredns";
        let output = world.try_kubectl(&["auth", "can-i", verb, what, "-A", account]);
        String::from_utf8_lossy(&output.stdout).trim() == "yes"
    };
    for what in ["services", "namespaces", "endpointslices.discovery.k8s.io"] {
        assert!(may("list", what) && may("watch", what) && !may("update", what), "{what}");
    }
    assert!(!may("list", "secrets") && !may("list", "pods"));
    // Another start finds everything as it is.
    world.kill();
    world.start_again();
    assert_eq!(
        dig(&world, &["@10.96.0.10", "+short", "kube-dns.kube-system.svc.cluster.local"]),
        "10.96.0.10\n"
    );
}

#[test]
fn pods_resolve_as_the_node_does_without_cluster_dns() {
    let world = World::start_with(&["--no-dns"]);
    world.kubectl(&["run", "client", "--image", TOOLS, "--", "sleep"]);
    world.wait_ready("client");
    let configured = world.kubectl(&["exec", "client", "--", "/ferrite", "tools", "cat", "/etc/resolv.conf"]);
    assert!(!configured.contains("10.96.0.10") && !configured.contains("cluster.local"), "{configured}");
    assert!(
        dig(&world, &["@10.244.0.1", "kubernetes.default.svc.cluster.local"]).contains("connection refused")
    );
}

#[test]
fn the_domain_and_the_resolvers_of_others_can_be_chosen() {
    let mut world = World::prepare(&["--cluster-domain", "example.internal"]);
    outside_resolver(&world);
    let empty = world.write("resolv.conf", "");
    world.start_in(&["--resolv-conf", empty.to_str().unwrap(), "--dns-stub-domain", "corp.test=127.0.0.1"]);
    world.kubectl(&["run", "client", "--image", TOOLS, "--", "sleep"]);
    world.wait_ready("client");
    assert_eq!(lookup(&world, "client", "kubernetes.default.svc.example.internal"), ["10.96.0.1"]);
    assert_eq!(lookup(&world, "client", "kubernetes.default"), ["10.96.0.1"]);
    assert_eq!(lookup(&world, "client", "git.corp.test"), ["192.0.2.80"]);
    let failed = dig(&world, &["@10.96.0.10", "www.outside.test"]);
    assert!(failed.contains("status: SERVFAIL"), "there is no resolver for other names: {failed}");
    // The file is read again when it changes, by the server and for new pods.
    world.write("resolv.conf", "nameserver 127.0.0.1\nsearch late.test\n");
    assert_eq!(dig(&world, &["@10.96.0.10", "+short", "later.outside.test"]), "192.0.2.80\n");
    world.kubectl(&["run", "later", "--image", TOOLS, "--", "sleep"]);
    world.wait_ready("later");
    let configured = world.kubectl(&["exec", "later", "--", "/ferrite", "tools", "cat", "/etc/resolv.conf"]);
    assert!(configured.contains("svc.example.internal example.internal late.test\n"), "{configured}");
}

#[test]
fn two_clusters_on_one_machine_do_not_disturb_each_other() {
    let first = World::start();
    let mut second = World::prepare(&[
        "--pod-cidr=10.245.0.0/16",
        "--service-cluster-ip-range=10.200.0.0/16",
        "--port=7443",
        "--kubelet-port=10251",
    ]);
    second.netns = first.netns.clone();
    second.up();
    for (world, name) in [(&first, "one"), (&second, "other")] {
        world.kubectl(&["create", "service", "clusterip", name, "--tcp=80"]);
        world.kubectl(&["run", "client", "--image", TOOLS, "--", "sleep"]);
        world.wait_ready("client");
    }
    for (world, own, foreign) in [(&first, "one", "other"), (&second, "other", "one")] {
        let service = world.get(&["service", own]);
        assert_eq!(lookup(world, "client", own), [service["spec"]["clusterIP"].as_str().unwrap()]);
        assert!(lookup(world, "client", foreign).is_empty());
    }
    // Programs of the node reach both by their own addresses.
    let known = |server: &str, name: &str| {
        !dig(&first, &[server, "+short", &format!("{name}.default.svc.cluster.local")]).is_empty()
    };
    for (server, own, foreign) in [("@10.244.0.1", "one", "other"), ("@10.245.0.1", "other", "one")] {
        assert!(known(server, own) && !known(server, foreign), "{server}");
    }
}

/// Runs `ip` in a namespace.
fn ip(netns: &Netns, arguments: &str) {
    let mut command = Command::new("ip");
    command.args(arguments.split_whitespace());
    let output = netns.enter(&mut command).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn machines_beside_this_one_get_no_answer() {
    let world = World::start();
    // A neighbour on a network of its own with the node, with a route to the cluster's addresses.
    let neighbour = Netns::new();
    let place = neighbour.run(|| std::fs::File::open("/proc/thread-self/ns/net").unwrap());
    let fd = std::os::fd::AsRawFd::as_raw_fd(&place);
    let link =
        format!("link add outside type veth peer name eth0 netns /proc/{}/fd/{fd}", std::process::id());
    ip(&world.netns, &link);
    ip(&world.netns, "addr add 192.0.2.1/24 dev outside");
    ip(&world.netns, "link set outside up");
    ip(&neighbour, "addr add 192.0.2.2/24 dev eth0");
    ip(&neighbour, "link set eth0 up");
    ip(&neighbour, "route add 10.0.0.0/8 via 192.0.2.1");
    let ask = |server: &str, transport: &str| {
        let mut command = Command::new("dig");
        command.args([server, transport, "+tries=1", "+time=3", "kubernetes.default.svc.cluster.local"]);
        let output = neighbour.enter(&mut command).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    // There is no socket for packets from there: the kernel itself refuses them.
    for server in ["@10.96.0.10", "@10.244.0.1"] {
        for transport in ["+notcp", "+tcp"] {
            let reply = ask(server, transport);
            assert!(!reply.contains("status:") && reply.contains("connection refused"), "{reply}");
        }
    }
    assert_eq!(
        dig(&world, &["@10.96.0.10", "+short", "kubernetes.default.svc.cluster.local"]),
        "10.96.0.1\n"
    );
}
