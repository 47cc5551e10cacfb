//! `ferrite kubelet`: a kubelet in a process of its own, with a runtime and an API server of their own.

use crate::server::{Server, kubectl};
use crate::world::*;
use ferrite_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The address of the node: no certificate is signed for a loopback one, and the API server asks none.
const NODE_IP: &str = "192.0.2.2";

/// A process that ends with this value.
struct Process(Child);

impl Process {
    /// Starts it and waits until it says that it serves.
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let serving = lines.by_ref().any(|line| line.starts_with("serving"));
        std::thread::spawn(move || lines.for_each(drop));
        let process = Self(child);
        assert!(serving, "{command:?} did not start");
        process
    }

    fn end(mut self) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A machine with our runtime on a socket, and the kubelet's directories.
struct Machine<'a> {
    world: &'a World,
    _runtime: Process,
}

impl<'a> Machine<'a> {
    fn new(world: &'a World) -> Self {
        std::fs::create_dir_all(world.path("manifests")).unwrap();
        let address = ["addr", "add", &format!("{NODE_IP}/32"), "dev", "lo"];
        assert!(world.command("ip", &address).status().unwrap().success());
        let mut command = world.command(ferrite().to_str().unwrap(), &["runtime", "--data-dir"]);
        let runtime = Process::start(command.arg(world.path("rt")).stderr(Stdio::null()));
        Self { world, _runtime: runtime }
    }

    fn socket(&self) -> String {
        format!("unix://{}", self.world.path("rt/run/cri.sock").display())
    }

    /// A control group that nobody else has.
    fn group(&self) -> String {
        self.world.path("x").parent().unwrap().file_name().unwrap().to_string_lossy().into_owned()
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.world.path("manifests").join(name)
    }

    /// A static pod that serves on the node's own network.
    fn write_web(&self, name: &str, port: u16) {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"hostNetwork": true, "terminationGracePeriodSeconds": 1, "containers": [{
                "name": "c", "image": TOOLS,
                "command": ["/ferrite", "tools", "http", "--text=static", &format!("--port={port}")]}]},
        });
        std::fs::write(self.manifest(&format!("{name}.yaml")), pod.to_string()).unwrap();
    }

    fn configuration(&self, more: Value) -> PathBuf {
        let mut configuration = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "staticPodPath": self.world.path("manifests").to_str().unwrap(),
            "podLogsDir": self.world.path("pod-logs").to_str().unwrap(),
            "containerRuntimeEndpoint": self.socket(),
            "cgroupRoot": format!("/{}", self.group()),
            "failSwapOn": false, "failCgroupV1": false, "address": NODE_IP,
            // The disk of the machine that runs tests may be full.
            "evictionHard": {"memory.available": "1Mi"},
        });
        for (key, value) in more.as_object().unwrap() {
            configuration[key.as_str()] = value.clone();
        }
        self.world.write("kubelet.yaml", &configuration.to_string())
    }

    fn kubelet(&self, configuration: &Path, more: &[&str]) -> Process {
        let mut command = self.world.command(ferrite().to_str().unwrap(), &["kubelet", "-v=2"]);
        command.arg("--config").arg(configuration).args(["--hostname-override=alone", "--node-ip", NODE_IP]);
        command
            .arg("--root-dir")
            .arg(self.world.path("kubelet"))
            .arg("--cert-dir")
            .arg(self.world.path("pki"));
        let log = std::fs::File::options().create(true).append(true).open(self.world.path("up.log")).unwrap();
        Process::start(command.args(more).stderr(log))
    }

    fn web(&self, port: u16) -> String {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        eventually("the static pod serves", || self.world.netns.http_get(address, "/").ok())
    }

    fn until_silent(&self, port: u16) {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        eventually("the static pod has ended", || {
            self.world.netns.http_get(address, "/").is_err().then_some(())
        });
    }
}

impl Drop for Machine<'_> {
    fn drop(&mut self) {
        let mut command = self.world.command(ferrite().to_str().unwrap(), &["down", "--data-dir"]);
        let _ = self._runtime.0.kill();
        let _ = self._runtime.0.wait();
        let down = command.arg(self.world.path("rt")).output().unwrap();
        remove_groups(&self.group());
        if !down.status.success() && !std::thread::panicking() {
            panic!("down failed: {}", String::from_utf8_lossy(&down.stderr));
        }
    }
}

/// The kubelet leaves the groups above its pods, as upstream does.
pub fn remove_groups(name: &str) {
    fn remove(directory: &Path) {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                remove(&entry.path());
            }
        }
        let _ = std::fs::remove_dir(directory);
    }
    let root = Path::new("/sys/fs/cgroup");
    remove(&root.join(name));
    for controller in std::fs::read_dir(root).into_iter().flatten().flatten() {
        remove(&controller.path().join(name));
    }
}

fn get(world: &World, arguments: &[&str]) -> Option<Value> {
    let kubeconfig = world.data().join("config/admin.kubeconfig");
    let output = world
        .command("kubectl", &[&["get", "--ignore-not-found", "-o", "json"], arguments].concat())
        .env("KUBECONFIG", kubeconfig)
        .output()
        .unwrap();
    ferrite_json::from_slice(&output.stdout).ok()
}

fn mirror(world: &World, name: &str) -> Value {
    eventually(&format!("the mirror of {name} is ready"), || get(world, &["pod", name]).filter(is_ready))
}

/// The response of the kubelet's own port.
fn ask(world: &World, token: &str, path: &str) -> (String, String) {
    let url = format!("https://{NODE_IP}:10250{path}");
    let header = format!("Authorization: Bearer {token}");
    let mut arguments = vec!["-sk", "-w", "\n%{http_code}", &url];
    if !token.is_empty() {
        arguments.extend(["-H", &header]);
    }
    let output = world.command("curl", &arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (body, code) = text.rsplit_once('\n').unwrap();
    (code.to_owned(), body.to_owned())
}

/// A kubeconfig with which nodes ask for their first certificate.
fn bootstrap_kubeconfig(world: &World) -> PathBuf {
    let token = crate::server::succeeds(world, &["token", "create"]);
    let token = token.trim().split_once('.').unwrap().1.to_owned();
    let ca = world.data().join("pki/ca.crt");
    world.write(
        "bootstrap.kubeconfig",
        &json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:6443", "certificate-authority": ca.to_str().unwrap()}}],
            "users": [{"name": "c", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        })
        .to_string(),
    )
}

fn create(world: &World, pod: &Value) {
    let file = world.write("pod.json", &pod.to_string());
    eventually("there is an account for the pod", || {
        get(world, &["serviceaccount", "default"]).filter(|a| a.is_object())
    });
    kubectl(world, &["create", "-f", file.to_str().unwrap()]);
}

#[test]
fn a_node_that_runs_short_says_so_and_evicts() {
    let world = World::prepare(&[]);
    let machine = Machine::new(&world);
    let serve = ["--advertise-address", "127.0.0.1"];
    let server = Server::try_run(&world, "server", &serve).unwrap();
    let bootstrap = bootstrap_kubeconfig(&world);
    let kubeconfig = world.path("kubelet.kubeconfig");
    let joining =
        ["--bootstrap-kubeconfig", bootstrap.to_str().unwrap(), "--kubeconfig", kubeconfig.to_str().unwrap()];
    let pod = |name: &str, spec: Value| {
        let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec});
        pod["spec"]["nodeName"] = "alone".into();
        pod["spec"]["terminationGracePeriodSeconds"] = 0.into();
        pod["spec"]["containers"][0]["name"] = "c".into();
        pod["spec"]["containers"][0]["image"] = TOOLS.into();
        pod["spec"]["containers"][0]["command"] = json!(["/ferrite", "tools", "sleep", "1000"]);
        pod
    };
    let failed = |name: &str| {
        eventually(&format!("{name} has failed"), || {
            get(&world, &["pod", name]).filter(|pod| pod["status"]["phase"] == "Failed")
        })
    };

    // No machine has that much: the node is short of memory for good.
    let starved = machine.configuration(json!({"evictionHard": {"memory.available": "1000Ti"}}));
    let kubelet = machine.kubelet(&starved, &joining);
    let node = eventually("the node is short of memory", || {
        get(&world, &["node", "alone"]).filter(|node| condition(node, "MemoryPressure") == Some("True"))
    });
    assert_eq!(condition(&node, "DiskPressure"), Some("False"));
    eventually("the scheduler is warned", || {
        let node = get(&world, &["node", "alone"])?;
        let taints = node["spec"]["taints"].as_array()?.clone();
        taints.iter().any(|t| t["key"] == "node.kubernetes.io/memory-pressure").then_some(())
    });
    create(&world, &pod("best-effort", json!({"containers": [{}]})));
    let refused = failed("best-effort");
    assert_eq!(refused["status"]["reason"], "Evicted");
    assert_eq!(refused["status"]["message"], "Pod was rejected: The node had condition: [MemoryPressure]. ");
    let asking = json!({"requests": {"cpu": "1m"}});
    create(&world, &pod("burstable", json!({"containers": [{"resources": asking}]})));
    let evicted = failed("burstable");
    assert_eq!(evicted["status"]["reason"], "Evicted");
    let message = evicted["status"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("The node was low on resource: memory. Threshold quantity: 1000Ti"),
        "{message}"
    );
    assert_eq!(condition(&evicted, "DisruptionTarget"), Some("True"));
    kubelet.end();

    // With enough of everything, a pod that writes more than it may is evicted all the same.
    let plenty = machine.configuration(json!({}));
    let kubelet = machine.kubelet(&plenty, &joining);
    eventually("the node has enough memory again", || {
        get(&world, &["node", "alone"]).filter(|node| condition(node, "MemoryPressure") == Some("False"))
    });
    let volumes = json!([{"name": "v", "emptyDir": {"sizeLimit": "1Mi"}}]);
    let container = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    create(&world, &pod("writer", json!({"volumes": volumes, "containers": [container]})));
    let writer = eventually("the writer is ready", || get(&world, &["pod", "writer"]).filter(is_ready));
    let uid = writer["metadata"]["uid"].as_str().unwrap();
    let volume = world.path("kubelet/pods").join(uid).join("volumes/kubernetes.io~empty-dir/v");
    std::fs::write(volume.join("file"), vec![1; 2 << 20]).unwrap();
    let evicted = failed("writer");
    assert_eq!(evicted["status"]["reason"], "Evicted");
    assert_eq!(evicted["status"]["message"], "Usage of EmptyDir volume \"v\" exceeds the limit \"1Mi\". ");
    kubectl(&world, &["delete", "pods", "--all", "--now"]);
    kubelet.end();
    server.stop();
}

#[test]
fn a_kubelet_of_its_own_joins_runs_pods_and_outlives_its_server() {
    let world = World::prepare(&[]);
    let machine = Machine::new(&world);
    let serve = ["--advertise-address", "127.0.0.1"];
    let server = Server::try_run(&world, "server", &serve).unwrap();
    let bootstrap = bootstrap_kubeconfig(&world);
    let ca = world.data().join("pki/ca.crt");
    let configuration = machine.configuration(json!({
        "rotateCertificates": true, "serverTLSBootstrap": true,
        "authentication": {"x509": {"clientCAFile": ca.to_str().unwrap()}},
    }));
    let kubeconfig = world.path("kubelet.kubeconfig");
    let joining =
        ["--bootstrap-kubeconfig", bootstrap.to_str().unwrap(), "--kubeconfig", kubeconfig.to_str().unwrap()];
    let kubelet = machine.kubelet(&configuration, &joining);
    eventually("the node is ready", || {
        get(&world, &["node", "alone"]).filter(|node| condition(node, "Ready") == Some("True"))
    });
    assert!(world.path("pki/kubelet-client-current.pem").exists());
    assert_eq!(world.netns.http_get("127.0.0.1:10248".parse().unwrap(), "/healthz"), Ok("ok".to_owned()));

    // A pod of the API: its log and a command in it come through the port whose certificate the cluster signed.
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain"},
        "spec": {"nodeName": "alone", "terminationGracePeriodSeconds": 0, "containers": [{
            "name": "c", "image": TOOLS, "command": ["/ferrite", "tools", "http", "--text=plain"]}]},
    });
    create(&world, &pod);
    eventually("the pod is ready", || get(&world, &["pod", "plain"]).filter(is_ready));
    eventually("the cluster has signed the kubelet's own certificate", || {
        world.path("pki/kubelet-server-current.pem").exists().then_some(())
    });
    assert!(kubectl(&world, &["logs", "plain"]).contains("serving"));
    let said =
        kubectl(&world, &["exec", "plain", "--", "/ferrite", "tools", "get", "http://127.0.0.1:8080/"]);
    assert!(said.contains("plain"), "{said}");

    // The API server decides about callers of the kubelet and their rights.
    kubectl(&world, &["create", "serviceaccount", "scraper"]);
    let scraper = kubectl(&world, &["create", "token", "scraper"]).trim().to_owned();
    assert_eq!(ask(&world, "", "/metrics").0, "401");
    assert_eq!(ask(&world, "made-up", "/metrics").0, "401");
    let (code, said) = ask(&world, &scraper, "/metrics/resource");
    assert_eq!(code, "403");
    assert_eq!(
        said,
        "Forbidden (user=system:serviceaccount:default:scraper, verb=get, resource=nodes, subresource(s)=[metrics])\n"
    );
    kubectl(&world, &["create", "clusterrole", "scrape", "--verb=get", "--resource=nodes/stats,nodes/pods"]);
    kubectl(
        &world,
        &[
            "create",
            "clusterrolebinding",
            "scrape",
            "--clusterrole=scrape",
            "--serviceaccount=default:scraper",
        ],
    );
    assert_eq!(ask(&world, &scraper, "/stats/summary").0, "200");
    let (code, pods) = ask(&world, &scraper, "/pods");
    assert_eq!(code, "200");
    assert!(pods.contains("\"plain\""), "{pods}");
    assert_eq!(ask(&world, &scraper, "/configz").0, "403");

    // A static pod and its mirror, which comes back as often as it is deleted.
    machine.write_web("web", 8091);
    assert!(machine.web(8091).contains("static"));
    let first = mirror(&world, "web-alone");
    assert_eq!(first["metadata"]["ownerReferences"][0]["name"], "alone");
    kubectl(&world, &["delete", "pod", "web-alone", "--wait=false"]);
    let again = eventually("another mirror", || {
        get(&world, &["pod", "web-alone"])
            .filter(|p| is_ready(p) && p["metadata"]["uid"] != first["metadata"]["uid"])
    });
    assert_eq!(container_status(&again)["containerID"], container_status(&first)["containerID"]);

    // The API server goes: pods of the directory run all the same, and are shown when the server is back.
    server.stop();
    machine.write_web("later", 8092);
    assert!(machine.web(8092).contains("static"));
    std::fs::remove_file(machine.manifest("web.yaml")).unwrap();
    machine.until_silent(8091);
    let server = Server::try_run(&world, "server", &serve).unwrap();
    mirror(&world, "later-alone");
    eventually("the mirror of what is gone", || match get(&world, &["pod", "web-alone"]) {
        Some(pod) if pod.is_object() => None,
        _ => Some(()),
    });

    // A restart needs no bootstrap, and everything runs on.
    kubelet.end();
    std::fs::remove_file(&bootstrap).unwrap();
    let before = container_pid(&get(&world, &["pod", "plain"]).unwrap());
    let kubelet = machine.kubelet(&configuration, &["--kubeconfig", kubeconfig.to_str().unwrap()]);
    mirror(&world, "later-alone");
    assert_eq!(container_pid(&get(&world, &["pod", "plain"]).unwrap()), before);

    std::fs::remove_file(machine.manifest("later.yaml")).unwrap();
    machine.until_silent(8092);
    kubectl(&world, &["delete", "pod", "plain"]);
    kubelet.end();
    server.stop();
}

#[test]
fn a_kubelet_without_an_api_server_runs_its_directory() {
    let world = World::prepare(&[]);
    let machine = Machine::new(&world);
    let standalone = json!({
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "readOnlyPort": 10255,
        "tlsMinVersion": "VersionTLS13",
        // As much as the threshold of eviction.
        "memoryManagerPolicy": "Static",
        "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Mi"}}],
    });
    let configuration = machine.configuration(standalone);
    machine.write_web("web", 8091);
    std::fs::write(machine.manifest("half.yaml"), "apiVersion: v1\nkind: Pod\nmetadata: {na").unwrap();
    let kubelet = machine.kubelet(&configuration, &[]);
    assert!(machine.web(8091).contains("static"));
    let pods = eventually("the pod is told", || {
        let (_, body) = ask(&world, "", "/pods");
        let pods: Value = ferrite_json::from_str(&body).ok()?;
        (pods["items"][0]["status"]["phase"] == "Running").then_some(pods)
    });
    assert_eq!(pods["items"].as_array().unwrap().len(), 1);
    assert_eq!(pods["items"][0]["metadata"]["name"], "web-alone");
    let running = ask(&world, "", "/runningpods/").1;
    assert!(running.contains("\"web-alone\""), "{running}");
    assert_eq!(ask(&world, "", "/containerLogs/default/web-alone/c").0, "200");
    assert!(world.log().contains("half.yaml"), "{}", world.log());
    let (status, page) = ask(&world, "", "/statusz");
    assert!(
        status == "200" && page.contains("kubelet statusz") && page.contains("Emulation version: 1.36"),
        "{page}"
    );
    assert!(ask(&world, "", "/flagz").1.contains("\nread-only-port=10255\n"));

    // The read-only port shows, and runs nothing.
    let open =
        |path: &str| world.netns.http_get((NODE_IP.parse::<std::net::IpAddr>().unwrap(), 10255).into(), path);
    assert!(open("/pods").unwrap().contains("web-alone"));
    assert!(open("/metrics").unwrap().contains("kubelet_running_pods"));
    assert!(open("/stats/summary").is_ok() && open("/healthz").is_ok());
    for closed in ["/configz", "/containerLogs/default/web-alone/c", "/runningpods/", "/statusz"] {
        assert!(open(closed).is_err(), "{closed}");
    }
    let memory = std::fs::read_to_string(world.path("kubelet/memory_manager_state")).unwrap();
    assert!(
        memory.contains(r#""policyName":"Static""#) && memory.contains(r#""systemReserved":1048576"#),
        "{memory}"
    );

    // Killed and started anew, it adopts the running pods.
    drop(kubelet);
    let kubelet = machine.kubelet(&configuration, &[]);
    let restarts = eventually("it is adopted", || {
        let pods: Value = ferrite_json::from_str(&ask(&world, "", "/pods").1).ok()?;
        container_status(&pods["items"][0])["restartCount"].as_i64()
    });
    assert_eq!(restarts, 0);
    std::fs::remove_file(machine.manifest("web.yaml")).unwrap();
    machine.until_silent(8091);
    eventually("nothing is left", || {
        ask(&world, "", "/runningpods/").1.contains("\"items\":[]").then_some(())
    });
    kubelet.end();
}

/// The processors that a container may use, as the kernel says.
fn processors(pod: &Value) -> std::collections::BTreeSet<u32> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", container_pid(pod))).unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let range = |part: &str| {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        first.parse::<u32>().unwrap()..=last.parse().unwrap()
    };
    list.split(',').flat_map(range).collect()
}

#[test]
fn a_guaranteed_pod_has_its_processors_for_itself() {
    if std::thread::available_parallelism().unwrap().get() < 2 {
        return;
    }
    let world = World::prepare(&[]);
    let machine = Machine::new(&world);
    let configuration = machine.configuration(json!({
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "cpuManagerPolicy": "static", "reservedSystemCPUs": "0", "topologyManagerPolicy": "single-numa-node",
    }));
    machine.write_web("shared", 8092);
    let kubelet = machine.kubelet(&configuration, &[]);
    machine.web(8092);
    let found = |name: &str| {
        let pods: Value = ferrite_json::from_str(&ask(&world, "", "/pods").1).ok()?;
        let pod = pods["items"].as_array()?.iter().find(|pod| pod["metadata"]["name"] == name)?.clone();
        container_status(&pod)["state"]["running"].is_object().then_some(pod)
    };
    let shared = eventually("the pod is told", || found("shared-alone"));
    let before = processors(&shared);
    assert!(before.contains(&0) && before.len() > 1, "{before:?}");

    // A pod with a whole processor gets one, and the others leave it.
    let amounts = json!({"cpu": "1", "memory": "64Mi"});
    let own = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "own"},
        "spec": {"hostNetwork": true, "terminationGracePeriodSeconds": 1, "containers": [{
            "name": "c", "image": TOOLS, "resources": {"requests": &amounts, "limits": &amounts},
            "command": ["/ferrite", "tools", "http", "--text=own", "--port=8093"]}]},
    });
    std::fs::write(machine.manifest("own.yaml"), own.to_string()).unwrap();
    machine.web(8093);
    let own = eventually("the pod is told", || found("own-alone"));
    let its = processors(&own);
    assert!(its.len() == 1 && !its.contains(&0), "{its:?}");
    eventually("the others share the rest", || {
        let rest: std::collections::BTreeSet<u32> = before.difference(&its).copied().collect();
        (processors(&shared) == rest).then_some(())
    });

    // A kubelet that was killed knows whose the processor is; with the pod it is everybody's again.
    drop(kubelet);
    let kubelet = machine.kubelet(&configuration, &[]);
    let again = eventually("it is adopted", || found("own-alone"));
    assert_eq!((processors(&again), container_status(&again)["restartCount"].as_i64()), (its, Some(0)));
    std::fs::remove_file(machine.manifest("own.yaml")).unwrap();
    machine.until_silent(8093);
    eventually("the processor is everybody's", || (processors(&shared) == before).then_some(()));
    let state = std::fs::read_to_string(world.path("kubelet/cpu_manager_state")).unwrap();
    assert!(state.contains("\"policyName\":\"static\""), "{state}");
    kubelet.end();

    // Another policy does not go with the state of this one.
    let none = machine.configuration(json!({
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
    }));
    let mut command = world.command(ferrite().to_str().unwrap(), &["kubelet", "--config"]);
    command.arg(none).arg("--root-dir").arg(world.path("kubelet")).arg("--cert-dir").arg(world.path("pki"));
    let output = command.args(["--hostname-override=alone", "--node-ip", NODE_IP]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("please drain this node"), "{said}");
}

#[test]
fn mistakes_of_the_kubelets_owner_are_named() {
    let world = World::prepare(&[]);
    let config = |name: &str, text: &str| {
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nfailSwapOn: false\nfailCgroupV1: false\n";
        world.write(name, &format!("{head}{text}")).to_str().unwrap().to_owned()
    };
    let unknown = config("a.yaml", "maxPosd: 3\n");
    let inert = config("b.yaml", "cgroupsPerQOS: false\n");
    let fine = config("c.yaml", "");
    for (arguments, said) in [
        (vec!["--max-pdos=3"], "unknown flag: --max-pdos (did you mean --max-pods?)"),
        (vec!["--config", &unknown], "unknown field \"maxPosd\": did you mean \"maxPods\"?"),
        (vec!["--config", &inert], "cgroupsPerQOS cannot be false: pods have control groups by their class"),
        (vec!["--config", "/none.yaml"], "cannot read /none.yaml"),
        (vec!["--config", &fine], "no client provided, cannot use webhook authentication"),
        (
            vec!["--config", &fine, "--kubeconfig", "/none", "--node-ip=192.0.2.2"],
            "give --bootstrap-kubeconfig",
        ),
        (vec!["--config", &fine, "--max-pods=x"], "\"x\" is not a number"),
    ] {
        let pki = world.path("pki");
        let mut command = world.command(ferrite().to_str().unwrap(), &["kubelet", "--cert-dir"]);
        let output = command.arg(&pki).args(&arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(said), "{arguments:?}: {text}");
    }
    let help = world.command(ferrite().to_str().unwrap(), &["kubelet", "--help"]).output().unwrap();
    assert!(String::from_utf8_lossy(&help.stdout).contains("--config-dir"));
}
