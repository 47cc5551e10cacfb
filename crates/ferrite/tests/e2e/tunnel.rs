//! Agents whose ports and pods nobody reaches: exec, logs, port-forward, proxies, webhooks and metrics go through the agents' own
//! connections.

use crate::servers::{Fleet, WORKER, Worker, create_pod, echo, wait_ready};
use crate::world::*;
use base64::Engine;
use ferrite_json::Value;
use ferrite_pki::{Authority, Identity, Purpose, Subject};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

/// Lets nobody begin a connection with the machine.
const WALL: &str = "table inet wall {
  chain input {
    type filter hook input priority -10; policy accept;
    iif lo accept
    ct state established,related accept
    iifname != \"fe*\" meta l4proto tcp drop
  }
}";

fn build_wall(worker: &Worker) {
    let mut nft = Command::new("nft");
    let nft = nft.args(["-f", "-"]).stdin(Stdio::piped());
    let mut nft = worker.netns.enter(nft).spawn().expect("nft is installed");
    nft.stdin.take().unwrap().write_all(WALL.as_bytes()).unwrap();
    assert!(nft.wait().unwrap().success());
}

fn kubectl_at(fleet: &Fleet, n: usize, arguments: &[&str]) -> Command {
    let machine = &fleet.machines[n];
    let server = format!("--server=https://{}:6443", machine.address);
    let mut command = fleet.world.command("kubectl", &[&[server.as_str()], arguments].concat());
    command.env("KUBECONFIG", machine.data.join("config/admin.kubeconfig"));
    command
}

/// A page of the pod through `kubectl port-forward`.
fn forwarded_page(fleet: &Fleet, n: usize, pod: &str) -> String {
    let mut command = kubectl_at(fleet, n, &["port-forward", &format!("pod/{pod}"), ":8080"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    let mut line = String::new();
    // It stays open: kubectl reports each connection.
    let mut output = BufReader::new(child.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    // Forwarding from 127.0.0.1:40123 -> 8080
    let address = line.split_whitespace().nth(2).unwrap_or_else(|| panic!("no port: {line:?}"));
    let page = fleet.world.netns.http_get(address.parse().unwrap(), "/");
    let _ = child.kill();
    let _ = child.wait();
    page.unwrap()
}

/// Everything that a server asks a kubelet for.
fn assert_reaches_kubelet(fleet: &Fleet, n: usize, pod: &str) {
    eventually("the agent has a tunnel to the server", || {
        kubectl_at(fleet, n, &["exec", pod, "--", "/ferrite", "tools", "echo", "here"])
            .output()
            .unwrap()
            .status
            .success()
            .then_some(())
    });
    assert_eq!(echo(fleet, n, pod).trim(), "here");
    assert!(fleet.kubectl(n, &["logs", pod]).contains("serving on port 8080"));
    assert!(forwarded_page(fleet, n, pod).contains(pod));
    assert_eq!(fleet.kubectl(n, &["get", "--raw", "/api/v1/nodes/worker/proxy/healthz"]), "ok");
    let metrics = fleet.kubectl(n, &["get", "--raw", "/api/v1/nodes/worker/proxy/metrics/resource"]);
    assert!(metrics.contains("node_cpu_usage_seconds_total"), "{metrics}");
    let top = eventually("kubectl top knows the node", || {
        let output = kubectl_at(fleet, n, &["top", "node", "worker"]).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    });
    assert!(top.contains("worker"), "{top}");
}

/// The code and the body of a response to a request for a tunnel.
fn ask(fleet: &Fleet, credentials: &[&str]) -> String {
    let url = format!("https://{}:6443/ferrite/v1/tunnel", fleet.machines[0].address);
    let upgrade = ["-H", "Connection: Upgrade", "-H", "Upgrade: ferrite-tunnel-v1"];
    let fixed = ["-sk", "--http1.1", "--max-time", "5", "-w", " %{http_code}", &url];
    let mut command = fleet.world.command("curl", &[&fixed, &upgrade[..], credentials].concat());
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

#[test]
fn servers_reach_kubelets_behind_a_wall() {
    let mut fleet = Fleet::new(2);
    fleet.start(0, &[]);
    fleet.join(1);
    fleet.wait_for_endpoints(1, &[0, 1]);
    let worker = Worker::new(&fleet);
    build_wall(&worker);
    let agent = worker.join(&fleet, 1);
    create_pod(&fleet, 0, "web");
    wait_ready(&fleet, 1, "pod", "web");

    // Nobody gets through the wall.
    let mut curl = Command::new("curl");
    curl.args(["-sk", "--max-time", "2", &format!("https://{WORKER}:10250/healthz")]);
    let direct = fleet.machines[0].netns.enter(&mut curl).output().unwrap();
    assert_eq!(direct.status.code(), Some(28), "the wall has a hole: {direct:?}");

    assert_reaches_kubelet(&fleet, 0, "web");
    assert_reaches_kubelet(&fleet, 1, "web");
    let open = fleet.kubectl(0, &["get", "--raw", "/metrics"]);
    assert!(open.contains("ferrite_apiserver_agent_tunnels 1"), "one tunnel of one agent");

    // Tunnels are for nodes, each for its own.
    let pki = |n: usize, file: &str| fleet.machines[n].data.join("pki").join(file).display().to_string();
    let (certificate, key) = (pki(0, "admin.crt"), pki(0, "admin.key"));
    let admin = ["--cert", &certificate, "--key", &key];
    let refused = ask(&fleet, &admin);
    assert!(refused.ends_with(" 403") && refused.contains("this user is no node"), "{refused}");
    let node = ["-H", "Impersonate-User: system:node:worker", "-H", "Impersonate-Group: system:nodes"];
    let refused = ask(&fleet, &[&admin[..], &node].concat());
    assert!(refused.ends_with(" 403") && refused.contains("as somebody else"), "{refused}");
    fleet.kubectl(0, &["create", "serviceaccount", "stranger"]);
    let bearer =
        format!("Authorization: Bearer {}", fleet.kubectl(0, &["create", "token", "stranger"]).trim());
    for credentials in [&["-H", &bearer][..], &[]] {
        let refused = ask(&fleet, credentials);
        assert!(refused.ends_with(" 403"), "{refused}");
    }

    // A tunnel is opened again when its server comes back, and when its agent does.
    fleet.kill(0);
    fleet.start(0, &[]);
    assert_reaches_kubelet(&fleet, 0, "web");
    drop(agent);
    let _agent = worker.agent(&[]);
    assert_reaches_kubelet(&fleet, 1, "web");
}

#[test]
fn streams_outlive_the_certificate_of_their_tunnel() {
    let mut fleet = Fleet::new(1);
    fleet.start(0, &["--cluster-signing-duration", "30s"]);
    let worker = Worker::new(&fleet);
    build_wall(&worker);
    let _agent = worker.join(&fleet, 0);
    create_pod(&fleet, 0, "web");
    wait_ready(&fleet, 0, "pod", "web");
    let mut command = kubectl_at(&fleet, 0, &["exec", "-i", "web", "--", "/ferrite", "tools", "cat"]);
    let mut cat = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = cat.stdin.take().unwrap();
    let mut output = BufReader::new(cat.stdout.take().unwrap());
    let mut say = |line: &str| {
        writeln!(input, "{line}").unwrap();
        let mut heard = String::new();
        output.read_line(&mut heard).unwrap();
        assert_eq!(heard.trim(), line);
    };
    say("first");
    let opened = || worker.log().matches("a tunnel to an API server is open").count();
    let before = opened();
    eventually("a tunnel with another certificate is open", || (opened() > before).then_some(()));
    say("second");
    eventually("one more is open", || (opened() > before + 1).then_some(()));
    say("third");
    assert_eq!(echo(&fleet, 0, "web").trim(), "here");
    assert!(!worker.log().contains("no tunnel to an API server"), "none was lost meanwhile");
    let _ = cat.kill();
    let _ = cat.wait();
}

/// Takes every way to pods from the machine of a server.
fn cut_off_pods(fleet: &Fleet, n: usize) {
    let mut ip = Command::new("ip");
    ip.args(["rule", "add", "to", "10.244.0.0/16", "unreachable", "priority", "1"]);
    assert!(fleet.machines[n].netns.enter(&mut ip).status().unwrap().success());
}

/// An admission webhook with the network of a pod: it refuses ConfigMaps that are called `bad`. Ended with this value.
struct Webhook(Child);

impl Webhook {
    fn start(fleet: &Fleet, pod: &Value, identity: &Identity) -> Self {
        let [certificate, key, script] = [
            ("hook.crt", identity.certificate.as_str()),
            ("hook.key", identity.key.as_str()),
            ("admission_webhook.py", include_str!("admission_webhook.py")),
        ]
        .map(|(name, text)| fleet.world.write(name, text));
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &container_pid(pod).to_string(), "python3"]);
        command.args([&script, &certificate, &key]).arg("8443");
        let mut child = command.stdout(Stdio::piped()).spawn().expect("nsenter and python3 are installed");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "serving\n");
        Self(child)
    }
}

impl Drop for Webhook {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn servers_reach_pods_without_a_route() {
    let mut fleet = Fleet::new(1);
    fleet.start(0, &[]);
    let worker = Worker::new(&fleet);
    let agent = worker.join(&fleet, 0);
    create_pod(&fleet, 0, "web");
    let pod = wait_ready(&fleet, 0, "pod", "web");
    cut_off_pods(&fleet, 0);
    let mut curl = Command::new("curl");
    curl.args(["-s", "--max-time", "5", &format!("http://{}:8080/", pod_ip(&pod))]);
    let direct = fleet.machines[0].netns.enter(&mut curl).output().unwrap();
    assert_eq!(direct.status.code(), Some(7), "there is a way to the pod: {direct:?}");

    // Pods and Services.
    let raw = |path: &str| {
        let output = kubectl_at(&fleet, 0, &["get", "--raw", path]).output().unwrap();
        let text = if output.status.success() { output.stdout } else { output.stderr };
        (output.status.success(), String::from_utf8(text).unwrap())
    };
    let page = "/api/v1/namespaces/default/pods/web:8080/proxy/";
    let (reached, text) =
        eventually("the agent knows its pods", || Some(raw(page)).filter(|(reached, _)| *reached));
    assert!(reached && text.contains("web"), "{text}");
    fleet.kubectl(0, &["label", "pod", "web", "app=web"]);
    fleet.kubectl(0, &["create", "service", "clusterip", "web", "--tcp=80:8080"]);
    let service = "/api/v1/namespaces/default/services/web:80/proxy/";
    let (_, text) =
        eventually("the Service has endpoints", || Some(raw(service)).filter(|(reached, _)| *reached));
    assert!(text.contains("web"), "{text}");
    let (reached, text) = raw("/api/v1/namespaces/default/pods/web:9/proxy/");
    assert!(!reached && text.contains("the agent of node worker cannot connect to the pod"), "{text}");

    // A webhook in a pod behind a Service.
    let authority = Authority::create("hooks").unwrap();
    let subject =
        Subject { common_name: "hook".into(), organization: None, names: vec!["hook.default.svc".into()] };
    let identity = authority.issue(&subject, Purpose::Server).unwrap();
    create_pod(&fleet, 0, "hook");
    let pod = wait_ready(&fleet, 0, "pod", "hook");
    fleet.kubectl(0, &["label", "pod", "hook", "app=hook"]);
    fleet.kubectl(0, &["create", "service", "clusterip", "hook", "--tcp=443:8443"]);
    let webhook = Webhook::start(&fleet, &pod, &identity);
    let bundle = base64::engine::general_purpose::STANDARD.encode(authority.certificate());
    let configuration = format!(
        r#"
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {{name: hook}}
webhooks:
- name: hook.example.com
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {{service: {{name: hook, namespace: default, path: /validate}}, caBundle: {bundle}}}
  rules: [{{operations: [CREATE], apiGroups: [""], apiVersions: [v1], resources: [configmaps]}}]
  namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: default}}}}
"#
    );
    let path = fleet.world.write("hook.yaml", &configuration);
    fleet.kubectl(0, &["create", "-f", path.to_str().unwrap()]);
    let create = |name: &str| {
        let output = kubectl_at(&fleet, 0, &["create", "configmap", name]).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    eventually("the webhook lets a ConfigMap through", || create("good").0.then_some(()));
    let (made, why) = create("bad");
    assert!(!made && why.contains("hook.example.com") && why.contains("this one is bad"), "{why}");

    // Without the webhook and without the agent, errors name the cause.
    drop(webhook);
    let (made, why) = create("late");
    assert!(!made && why.contains("failed calling webhook"), "{why}");
    drop(agent);
    eventually("the server has no way to the pod left", || {
        let (reached, text) = raw(page);
        (!reached && text.contains("error trying to reach service")).then_some(())
    });
}
