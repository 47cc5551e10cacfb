//! Components in processes of their own: the controllers and the scheduler against an API server alone.

use crate::server::{Server, kubectl};
use crate::world::*;
use ferrite_json::Value;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A process that ends with this value.
struct Component(Child);

impl Component {
    fn start(world: &World, arguments: &[&str]) -> Self {
        let kubeconfig = world.data().join("config/admin.kubeconfig");
        let mut command: Command = world.command(ferrite().to_str().unwrap(), arguments);
        command.arg("--kubeconfig").arg(kubeconfig).args(["--bind-address", "127.0.0.1"]);
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Component {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(world: &World, arguments: &[&str]) -> Value {
    let text = kubectl(world, &[&["get", "-o", "json"], arguments].concat());
    ferrite_json::from_str(&text).unwrap()
}

fn holder(world: &World, lease: &str) -> Option<String> {
    let leases = get(world, &["leases", "-n", "kube-system"]);
    let lease = leases["items"].as_array()?.iter().find(|item| item["metadata"]["name"] == lease)?;
    Some(lease["spec"]["holderIdentity"].as_str()?.to_owned()).filter(|holder| !holder.is_empty())
}

#[test]
fn controllers_and_scheduler_work_alone_and_hand_over() {
    let world = World::prepare(&[]);
    let _server = Server::start(&world, &[]);
    let times = [
        "--leader-elect-lease-duration=3s",
        "--leader-elect-renew-deadline=2s",
        "--leader-elect-retry-period=1s",
    ];
    let manager = |port: &'static str| {
        let fixed = ["kube-controller-manager", "--use-service-account-credentials", "--secure-port", port];
        Component::start(&world, &[&fixed[..], &times].concat())
    };
    let first = manager("10257");
    let leader = eventually("a manager leads", || holder(&world, "kube-controller-manager"));
    let _second = manager("10258");
    let _scheduler = Component::start(&world, &["kube-scheduler"]);

    kubectl(&world, &["create", "deployment", "web", "--image=none", "--replicas=2"]);
    eventually("the pods are made, and the scheduler says why they wait", || {
        let pods = get(&world, &["pods", "-l", "app=web"]);
        let pods = pods["items"].as_array()?;
        let waits = |pod: &Value| condition(pod, "PodScheduled") == Some("False");
        (pods.len() == 2 && pods.iter().all(waits)).then_some(())
    });
    // Each controller acts as its own account, whose name stands in the fields that it wrote.
    let accounts = kubectl(&world, &["get", "serviceaccounts", "-n", "kube-system", "-o", "name"]);
    assert!(accounts.contains("serviceaccount/replicaset-controller"), "{accounts}");

    // Health is for everybody, metrics are not.
    let page = |arguments: &[&str], path: &str| {
        let url = format!("https://127.0.0.1:10257{path}");
        let output = world.command("curl", &[arguments, &["-sk", &url]].concat()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(page(&[], "/healthz"), "ok");
    assert_eq!(page(&[], "/metrics"), "forbidden: User \"system:anonymous\" cannot get path \"/metrics\"");
    kubectl(&world, &["create", "serviceaccount", "scraper"]);
    let graph = "/debug/controllers/garbage-collector-controller/graph";
    let paths = ["--non-resource-url=/metrics", "--non-resource-url", graph];
    kubectl(&world, &[&["create", "clusterrole", "scrape", "--verb=get"], &paths[..]].concat());
    let binding = [
        "create",
        "clusterrolebinding",
        "scrape",
        "--clusterrole=scrape",
        "--serviceaccount=default:scraper",
    ];
    kubectl(&world, &binding);
    let token = kubectl(&world, &["create", "token", "scraper"]);
    let header = format!("Authorization: Bearer {}", token.trim());
    let metrics = page(&["-H", &header], "/metrics");
    assert!(metrics.contains("workqueue_adds_total{name=\"replicaset\"}"), "{metrics}");
    assert_eq!(page(&["-H", "Authorization: Bearer wrong"], "/metrics"), "Unauthorized");
    let deployment = get(&world, &["deployment", "web"]);
    let query = format!("{graph}?uid={}", deployment["metadata"]["uid"].as_str().unwrap());
    eventually("the graph of the deployment", || {
        let page = page(&["-H", &header], &query);
        (page.starts_with("strict digraph full {") && page.contains("Pod.v1/web-")).then_some(())
    });
    assert!(page(&[], &query).starts_with("forbidden"), "not for everybody");

    // The leader dies without a word; the other takes over and works.
    drop(first);
    eventually("the other manager leads", || {
        holder(&world, "kube-controller-manager").filter(|holder| *holder != leader)
    });
    kubectl(&world, &["scale", "deployment", "web", "--replicas=3"]);
    eventually("the new leader scales", || {
        let pods = get(&world, &["pods", "-l", "app=web"]);
        (pods["items"].as_array()?.len() == 3).then_some(())
    });
}

#[test]
fn a_configuration_that_cannot_be_had_is_refused() {
    let world = World::prepare(&[]);
    let config = |name: &str, text: &str| {
        let head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n";
        world.write(name, &format!("{head}{text}"))
    };
    let refused = |arguments: &[&str]| {
        let output = world.command(ferrite().to_str().unwrap(), arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let typo = text(&config("typo.yaml", "leaderElecton: {}\n"));
    let message = refused(&["kube-scheduler", "--config", &typo]);
    assert!(
        message.contains("unknown field \"leaderElecton\": did you mean \"leaderElection\"?"),
        "{message}"
    );
    let twice = text(&config("twice.yaml", "profiles: [{schedulerName: a}, {schedulerName: a}]\n"));
    let message = refused(&["kube-scheduler", "--config", &twice]);
    let expected = "profiles[1].schedulerName: Duplicate value: \"profiles[0].schedulerName\"";
    assert!(message.contains(expected), "{message}");
    let arguments =
        "profiles: [{pluginConfig: [{name: InterPodAffinity, args: {hardPodAffinityWeight: 101}}]}]\n";
    let message = refused(&["kube-scheduler", "--config", &text(&config("weight.yaml", arguments))]);
    let expected =
        "profiles[0].pluginConfig[0].args.hardPodAffinityWeight: Invalid value: 101: not in valid range";
    assert!(message.contains(expected), "{message}");
    let message = refused(&["kube-scheduler", "--feature-gates", "NoSuchGate=true"]);
    assert!(message.contains("unrecognized feature gate: NoSuchGate"), "{message}");
    let message = refused(&["kube-controller-manager", "--kubeconfig", "/nonexistent"]);
    assert!(message.contains("cannot read the kubeconfig /nonexistent"), "{message}");
}
