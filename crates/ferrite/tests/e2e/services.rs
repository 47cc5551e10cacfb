//! Services: an address that leads to pods, from pods and from the node.

use crate::world::*;
use ferrite_nft::{OwnGenerations, Table};
use ferrite_proxy::model::IpFamily;
use std::collections::BTreeSet;
use std::net::SocketAddr;

fn cluster_ip(world: &World, service: &str) -> String {
    world.kubectl(&["get", "service", service, "-o", "jsonpath={.spec.clusterIP}"])
}

/// The first answer at `target`; the proxy learns of a Service a moment after the API does.
fn first_answer(world: &World, target: SocketAddr) -> String {
    eventually("an answer of the Service", || world.netns.http_get(target, "/").ok())
}

/// Deletes the proxy's table behind its back.
fn delete_table(world: &World) {
    world.netns.run(|| {
        let links = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        let names = links.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
        let bridge = names.into_iter().find(|name| name.starts_with("fe-")).unwrap();
        let table = format!("kube-proxy-{bridge}");
        Table::open(IpFamily::V4, &table, None, OwnGenerations::default()).unwrap().remove().unwrap();
    });
}

#[test]
fn a_cluster_ip_leads_to_every_pod_of_its_service() {
    let world = World::start();
    world.kubectl(&[
        "create",
        "deployment",
        "web",
        "--image",
        TOOLS,
        "--replicas=2",
        "--",
        "/ferrite",
        "tools",
        "http",
        "--text=hello",
    ]);
    world.wait_rolled_out("web", 2);
    world.kubectl(&["expose", "deployment", "web", "--port=80", "--target-port=8080", "--type=NodePort"]);
    let ip = cluster_ip(&world, "web");
    let target: SocketAddr = format!("{ip}:80").parse().unwrap();
    first_answer(&world, target);

    // The node's own processes: every pod has its share.
    let names: BTreeSet<String> = world
        .pods("app=web")
        .iter()
        .map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    let mut seen = BTreeSet::new();
    eventually("answers of both pods", || {
        let answer = world.netns.http_get(target, "/").unwrap();
        seen.extend(names.iter().filter(|name| answer.contains(name.as_str())).cloned());
        (seen == names).then_some(())
    });

    // Another pod, and a pod that may meet itself.
    let url = format!("http://{ip}/");
    world.kubectl(&["run", "client", "--image", TOOLS, "--restart=Never", "--", "get", &url]);
    world.watch(&["pod", "client"], |pod| pod["status"]["phase"] == "Succeeded");
    assert!(world.kubectl(&["logs", "client"]).starts_with("hello web-"));
    let one = names.first().unwrap();
    for _ in 0..8 {
        let answer = world.kubectl(&["exec", one, "--", "/ferrite", "tools", "get", &url]);
        assert!(answer.starts_with("hello web-"), "{answer}");
    }

    // The node port, at the node's address.
    let port = world.kubectl(&["get", "service", "web", "-o", "jsonpath={.spec.ports[0].nodePort}"]);
    let node_port: SocketAddr = format!("10.244.0.1:{port}").parse().unwrap();
    assert!(world.netns.http_get(node_port, "/").unwrap().starts_with("hello web-"));

    // Somebody deletes the table: it comes back.
    delete_table(&world);
    first_answer(&world, target);

    // Without pods, the client gets a rejection at once.
    world.kubectl(&["scale", "deployment", "web", "--replicas=0"]);
    eventually("a refusal", || {
        world.netns.http_get(target, "/").err().filter(|error| error.contains("refused"))
    });
    let health = world.netns.http_get("10.244.0.1:10256".parse().unwrap(), "/healthz").unwrap();
    assert!(health.contains("\"nodeEligible\":true,\"healthy\":true"), "{health}");
    world.kubectl(&["delete", "service", "web"]);
}

#[test]
fn a_load_balancer_answers_at_the_nodes_address() {
    let world = World::start();
    let program = ["--", "/ferrite", "tools", "http", "--text=hello"];
    let create = ["create", "deployment", "web", "--image", TOOLS];
    world.kubectl(&create.iter().chain(&program).copied().collect::<Vec<_>>());
    world.wait_rolled_out("web", 1);
    world.kubectl(&[
        "expose",
        "deployment",
        "web",
        "--port=8088",
        "--target-port=8080",
        "--type=LoadBalancer",
    ]);
    let service = world.watch(&["service", "web"], |service| {
        service["status"]["loadBalancer"]["ingress"][0]["ip"] == "10.244.0.1"
    });
    assert_eq!(service["metadata"]["finalizers"][0], "service.kubernetes.io/load-balancer-cleanup");
    assert!(world.kubectl(&["get", "service", "web"]).contains("10.244.0.1"), "the column EXTERNAL-IP");
    let target: SocketAddr = "10.244.0.1:8088".parse().unwrap();
    assert!(first_answer(&world, target).starts_with("hello web-"));
    // From a pod, too.
    world.kubectl(&[
        "run",
        "client",
        "--image",
        TOOLS,
        "--restart=Never",
        "--",
        "get",
        "http://10.244.0.1:8088/",
    ]);
    world.watch(&["pod", "client"], |pod| pod["status"]["phase"] == "Succeeded");

    // The API server's port stays the API server's.
    world.kubectl(&["expose", "deployment", "web", "--name=thief", "--port=6443", "--type=LoadBalancer"]);
    eventually("a refusal", || {
        let events = world.kubectl(&["get", "events", "--field-selector=involvedObject.name=thief"]);
        events.contains("SyncLoadBalancerFailed").then_some(())
    });
    world.kubectl(&["delete", "service", "thief"]);

    // Traffic that stays on the node, and no endpoint there: no address.
    world.kubectl(&["patch", "service", "web", "-p", r#"{"spec":{"externalTrafficPolicy":"Local"}}"#]);
    assert!(first_answer(&world, target).starts_with("hello web-"));
    world.kubectl(&["scale", "deployment", "web", "--replicas=0"]);
    world.watch(&["service", "web"], |service| service["status"]["loadBalancer"]["ingress"].is_null());

    // The finalizer keeps nobody from deleting it.
    world.kubectl(&["delete", "service", "web", "--timeout=60s"]);
    eventually("no answer", || world.netns.http_get(target, "/").err());
}

#[test]
fn a_pod_reaches_the_api_server_by_the_kubernetes_service() {
    let world = World::start();
    assert_eq!(cluster_ip(&world, "kubernetes"), "10.96.0.1");
    world.kubectl(&[
        "create",
        "clusterrolebinding",
        "look",
        "--clusterrole=view",
        "--serviceaccount=default:default",
    ]);
    let path = "/api/v1/namespaces/default/services/kubernetes";
    world.kubectl(&["run", "asks", "--image", TOOLS, "--restart=OnFailure", "--", "api", path]);
    world.watch(&["pod", "asks"], |pod| pod["status"]["phase"] == "Succeeded");
    let answer = world.kubectl(&["logs", "asks"]);
    assert!(answer.contains("\"clusterIP\":\"10.96.0.1\""), "{answer}");
    // The service account has no more rights through the Service.
    world.kubectl(&["run", "pries", "--image", TOOLS, "--restart=Never", "--", "api", "/api/v1/secrets"]);
    world.watch(&["pod", "pries"], |pod| pod["status"]["phase"] == "Failed");
    let refused = world.kubectl(&["logs", "pries"]);
    assert!(refused.contains("forbidden"), "{refused}");
}

#[test]
fn the_proxy_as_a_process() {
    let world = World::start();
    let kubeconfig = world.data().join("config").join("admin.kubeconfig");
    let config = world.write(
        "proxy.yaml",
        &format!(
            "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n\
             clientConnection:\n  kubeconfig: {}\nclusterCIDR: 10.244.0.0/16\nhealthzBindAddress: 127.0.0.1:11256\n\
             oomScoreAdj: 0\nconntrack: {{maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}}\n",
            kubeconfig.display()
        ),
    );
    let program = ferrite().display().to_string();
    let mut command = world.command(&program, &["kube-proxy", "--hostname-override=node", "--config"]);
    let mut proxy = command.arg(&config).spawn().unwrap();
    let table_exists = || {
        world.netns.run(|| {
            let own = OwnGenerations::default();
            Table::open(IpFamily::V4, "kube-proxy", None, own).unwrap().exists().unwrap()
        })
    };
    eventually("a table of the process", || table_exists().then_some(()));
    let get = |port: u16, path: &str| world.netns.http_get(SocketAddr::from(([127, 0, 0, 1], port)), path);
    eventually("a healthy proxy", || get(11256, "/healthz").ok());
    assert_eq!(get(10249, "/proxyMode").unwrap(), "nftables");
    let configz = get(10249, "/configz").unwrap();
    assert!(configz.contains(r#""nodePortAddresses":["primary"]"#), "{configz}");
    let metrics = get(10249, "/metrics").unwrap();
    assert!(
        metrics.contains("kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"}"),
        "{metrics}"
    );

    let pid = nix::unistd::Pid::from_raw(proxy.id().try_into().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(proxy.wait().unwrap().success());
    assert!(table_exists(), "Services work while the proxy restarts");
    assert!(world.command(&program, &["kube-proxy", "--cleanup"]).status().unwrap().success());
    assert!(!table_exists());
    let refused = world.command(&program, &["kube-proxy", "--proxy-mode=ipvs"]).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("has the mode nftables"));
}

#[test]
fn a_load_balancer_can_ask_the_node_about_a_service() {
    let world = World::start();
    world.kubectl(&["create", "deployment", "web", "--image", TOOLS, "--", "/ferrite", "tools", "http"]);
    world.wait_rolled_out("web", 1);
    world.create(
        "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {type: LoadBalancer, externalTrafficPolicy: Local, \
         trafficDistribution: PreferSameNode, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}\n",
    );
    let port = world.kubectl(&["get", "service", "web", "-o", "jsonpath={.spec.healthCheckNodePort}"]);
    let target: SocketAddr = format!("10.244.0.1:{port}").parse().unwrap();
    let answer = eventually("an endpoint on this node", || world.netns.http_get(target, "/").ok());
    assert_eq!(
        answer,
        "{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": 1,\n\t\"serviceProxyHealthy\": true\n}"
    );
    let hints = world.kubectl(&[
        "get",
        "endpointslices",
        "-l",
        "kubernetes.io/service-name=web",
        "-o",
        "jsonpath={.items[0].endpoints[0].hints}",
    ]);
    assert_eq!(hints, r#"{"forNodes":[{"name":"node"}]}"#);
    world.kubectl(&["scale", "deployment", "web", "--replicas=0"]);
    eventually("no endpoint on this node", || {
        world.netns.http_get(target, "/").err().filter(|error| error.contains(" 503 "))
    });
    world.kubectl(&["delete", "service", "web"]);
    eventually("a closed port", || {
        world.netns.http_get(target, "/").err().filter(|error| error.contains("refused"))
    });
}
