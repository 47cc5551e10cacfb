//! Networks by plugins: a shell script as the plugin, real namespaces, and plugins that misbehave.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferrite_network::cni::{CniConfig, CniNetwork};
use ferrite_network::{Bandwidth, HostPort, PodNetwork, PodRef, PortProtocol};
use serde_json::{Value, json};
use support::{TestNs, echo, pod};

struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap() };
        for name in ["net.d", "bin", "log"] {
            fs::create_dir(world.path(name)).unwrap();
        }
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A plugin that is a shell script. `$DIR` is this world's directory.
    fn plugin(&self, name: &str, script: &str) {
        let path = self.path("bin").join(name);
        let text = format!("#!/bin/sh\nDIR={}\n{script}\n", self.dir.path().display());
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// A plugin that records its inputs and answers with an address.
    fn recorder(&self, name: &str) {
        self.plugin(
            name,
            &format!(
                r#"n=$(ls $DIR/log | wc -l)
printf '%s\n' "$CNI_COMMAND" "{name}" "$CNI_CONTAINERID" "$CNI_IFNAME" "$CNI_NETNS" "$CNI_ARGS" > $DIR/log/$(printf %03d $n)
cat >> $DIR/log/$(printf %03d $n)
[ "$CNI_COMMAND" = ADD ] && echo '{{"cniVersion":"1.1.0","ips":[{{"address":"10.9.0.2/24"}}],"by":"{name}"}}'
exit 0"#
            ),
        );
    }

    fn configure(&self, file: &str, config: &Value) {
        fs::write(self.path("net.d").join(file), config.to_string()).unwrap();
    }

    fn network(&self) -> CniNetwork {
        CniNetwork::new(CniConfig {
            configurations: self.path("net.d"),
            programs: vec![self.path("none"), self.path("bin")],
            cache: self.path("cache"),
            patience: Duration::from_secs(20),
        })
    }

    /// The recorded calls: command, plugin, the lines after them, and the configuration. Clears the log.
    fn calls(&self) -> Vec<(String, String, Vec<String>, Value)> {
        let mut files: Vec<PathBuf> =
            fs::read_dir(self.path("log")).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let read = |path: &PathBuf| {
            let text = fs::read_to_string(path).unwrap();
            fs::remove_file(path).unwrap();
            let mut parts = text.splitn(7, '\n').map(str::to_owned);
            let (command, name) = (parts.next().unwrap(), parts.next().unwrap());
            let mut rest: Vec<String> = parts.collect();
            let config = serde_json::from_str(&rest.pop().unwrap()).unwrap();
            (command, name, rest, config)
        };
        files.iter().map(read).collect()
    }
}

fn names(calls: &[(String, String, Vec<String>, Value)]) -> Vec<String> {
    calls.iter().map(|(command, name, ..)| format!("{command} {name}")).collect()
}

#[tokio::test]
async fn a_chain_of_plugins_is_called_as_the_specification_says() {
    let world = World::new();
    world.recorder("first");
    world.recorder("second");
    let chain = |version: &str| {
        json!({"cniVersion": version, "name": "net", "plugins": [
            {"type": "first", "some": "key"},
            {"type": "second", "capabilities": {"portMappings": true, "bandwidth": true}},
        ]})
    };
    world.configure("10-net.conflist", &chain("1.1.0"));
    let (network, ns) = (world.network(), TestNs::new());
    let request = PodRef {
        host_ports: vec![HostPort {
            host_ip: None,
            host_port: 80,
            container_port: 8080,
            protocol: PortProtocol::Tcp,
        }],
        bandwidth: Bandwidth { ingress: Some(8_000_000), egress: None },
        ..pod("web")
    };
    let got = network.attach("box", &ns.path, &request).await.unwrap();
    assert_eq!(got.ips, ["10.9.0.2".parse::<std::net::IpAddr>().unwrap()]);
    let calls = world.calls();
    assert_eq!(names(&calls), ["ADD first", "ADD second"]);
    let (_, _, told, config) = &calls[0];
    assert_eq!(told[..3], ["box".to_owned(), "eth0".into(), ns.path.display().to_string()]);
    assert_eq!(
        told[3],
        "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=box;K8S_POD_UID=uid-web"
    );
    assert_eq!(*config, json!({"cniVersion": "1.1.0", "name": "net", "type": "first", "some": "key"}));
    let config = &calls[1].3;
    assert_eq!(config["prevResult"]["by"], "first");
    assert_eq!(
        config["runtimeConfig"],
        json!({
            "portMappings": [{"hostPort": 80, "containerPort": 8080, "protocol": "tcp", "hostIP": ""}],
            "bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 800_000},
        })
    );

    network.check("box").await.unwrap();
    network.ask_status().await.unwrap();
    network.ready().unwrap();
    network.collect_garbage(&["box".into()]).await.unwrap();
    let calls = world.calls();
    assert_eq!(
        names(&calls),
        ["CHECK first", "CHECK second", "STATUS first", "STATUS second", "GC first", "GC second"]
    );
    assert_eq!(calls[0].3["prevResult"]["by"], "second");
    assert_eq!(calls[4].3["cni.dev/valid-attachments"], json!([{"containerID": "box", "ifname": "eth0"}]));

    // Another configuration does not change how a pod leaves. A new process knows it from the cache.
    world.configure("05-other.conf", &json!({"cniVersion": "0.3.1", "name": "other", "type": "first"}));
    let network = world.network();
    network.detach("box", &ns.path).await.unwrap();
    let calls = world.calls();
    assert_eq!(names(&calls), ["DEL second", "DEL first"]);
    assert_eq!(calls[0].3["prevResult"]["by"], "second");
    network.detach("box", Path::new("/gone")).await.unwrap();
    assert!(world.calls().is_empty(), "a second detachment has nothing to do");

    network.attach("next", &ns.path, &pod("next")).await.unwrap();
    assert_eq!(names(&world.calls()), ["ADD first"], "the new file counts for the next pod");
    network.check("next").await.unwrap();
    network.collect_garbage(&["next".into()]).await.unwrap();
    assert!(world.calls().is_empty(), "0.3.1 knows neither CHECK nor GC");
    CniNetwork::purge(&world.path("cache")).await.unwrap();
    assert_eq!(names(&world.calls()), ["DEL first"]);
}

#[tokio::test]
async fn plugins_that_fail() {
    let world = World::new();
    let (network, ns) = (world.network(), TestNs::new());
    let attach = async || {
        let error = network.attach("box", &ns.path, &pod("web")).await.unwrap_err();
        let all: &dyn std::error::Error = &error;
        std::iter::successors(Some(all), |error| error.source())
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(": ")
    };
    let no_network = network.ready().unwrap_err();
    assert!(no_network.to_string().contains("no network configuration"), "{no_network}");
    world.configure("10-net.conf", &json!({"cniVersion": "1.1.0", "name": "net", "type": "bad"}));
    network.ready().unwrap();
    assert!(attach().await.contains("plugin \"bad\" is in none of"));

    for (script, want) in [
        (
            "echo '{\"cniVersion\":\"1.1.0\",\"code\":11,\"msg\":\"try again\",\"details\":\"later\"}'; exit 1",
            "try again; later",
        ),
        ("echo no way >&2; exit 3", "no way"),
        ("echo hello", "something else than a result"),
        ("cat >/dev/null", "no address"),
        ("head -c 3000000 /dev/zero", "failed (ADD)"),
    ] {
        // A pod that could not come leaves; the plugin lets it.
        world.plugin("bad", &format!("[ $CNI_COMMAND = DEL ] && exit 0\n{script}"));
        let seen = attach().await;
        assert!(seen.contains(want), "{script}: {seen}");
        network.detach("box", &ns.path).await.unwrap();
    }
    world.plugin(
        "bad",
        "[ $CNI_COMMAND = STATUS ] || exit 0\necho '{\"code\":50,\"msg\":\"not now\"}'; exit 1",
    );
    network.ask_status().await.unwrap();
    assert!(network.ready().unwrap_err().to_string().contains("not now"));
    assert!(network.attach("../x", &ns.path, &pod("web")).await.is_err(), "a name that is none");
}

#[tokio::test]
async fn a_pod_that_nobody_would_cover_is_refused_before_its_plugins_are_called() {
    let world = World::new();
    world.recorder("lan");
    world.configure("10-net.conf", &json!({"cniVersion": "1.0.0", "name": "net", "type": "lan"}));
    let (network, ns) = (world.network(), TestNs::new());
    network.require_guard();
    let refused = network.attach("box", &ns.path, &pod("web")).await;
    assert!(matches!(refused, Err(ferrite_network::NetworkError::Guard { .. })), "{refused:?}");
    assert!(network.ready().unwrap_err().to_string().contains("network policies"));
    assert!(world.calls().is_empty());
}

#[tokio::test]
async fn a_plugin_that_is_gone_does_not_keep_other_pods_from_leaving() {
    let world = World::new();
    let (network, ns) = (world.network(), TestNs::new());
    for (sandbox, kind) in [("a", "gone"), ("b", "lan"), ("c", "gone"), ("d", "lan")] {
        world.recorder(kind);
        world.configure("10-net.conf", &json!({"cniVersion": "1.0.0", "name": "net", "type": kind}));
        network.attach(sandbox, &ns.path, &pod(sandbox)).await.unwrap();
    }
    fs::remove_file(world.path("bin").join("gone")).unwrap();
    world.calls();
    let failed = network.collect_garbage(&[]).await.unwrap_err();
    let ferrite_network::NetworkError::Several { failed, .. } = failed else { panic!("{failed}") };
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert_eq!(names(&world.calls()), ["DEL lan", "DEL lan"]);
    // The others are tried again the next time.
    world.recorder("gone");
    CniNetwork::purge(&world.path("cache")).await.unwrap();
    assert_eq!(names(&world.calls()), ["DEL gone", "DEL gone"]);
}

#[tokio::test]
async fn a_plugin_that_never_answers_is_ended_with_what_it_started() {
    let world = World::new();
    // It waits for a line that nobody writes, in a child that holds its output open.
    world.plugin("stuck", "mkfifo $DIR/pipe\n(read line < $DIR/pipe) &\necho $! > $DIR/child\nwait");
    world.configure("10-net.conf", &json!({"cniVersion": "1.0.0", "name": "net", "type": "stuck"}));
    let network = CniNetwork::new(CniConfig {
        configurations: world.path("net.d"),
        programs: vec![world.path("bin")],
        cache: world.path("cache"),
        patience: Duration::from_millis(300),
    });
    let ns = TestNs::new();
    let error = network.attach("box", &ns.path, &pod("web")).await.unwrap_err();
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(format!("{error} {source}").contains("did not answer ADD"), "{error} {source}");
    let child = fs::read_to_string(world.path("child")).unwrap();
    let stat = format!("/proc/{}/stat", child.trim());
    // The kernel ends it a moment after the signal.
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z")) {
        assert!(std::time::Instant::now() < deadline, "the plugin's child goes on");
        tokio::task::yield_now().await;
    }
}

/// The plugin of docs/cni.md, word for word.
fn documented_plugin() -> String {
    let text = include_str!("../../../docs/cni.md");
    let (_, rest) = text.split_once("```sh\n#!/bin/sh\n").unwrap();
    rest.split_once("\n```").unwrap().0.to_owned()
}

/// Two pods of one network reach each other and the node, and addresses come back. Plugins work in the namespace of the
/// caller: the node's.
async fn two_pods(network: CniNetwork, first_address: &str, second_address: &str, gateway: &str) {
    let (node, a, b) = (TestNs::new(), TestNs::new(), TestNs::new());
    let node_path = node.path.clone();
    let (first, second, again) = {
        // As the plugin's process sees them.
        let seen = |ns: &TestNs| {
            let path = ns.path.display().to_string();
            PathBuf::from(path.replace("/proc/self", &format!("/proc/{}", std::process::id())))
        };
        let (a, b) = (seen(&a), seen(&b));
        tokio::task::spawn_blocking(move || {
            ferrite_netlink::Netns::from_path(&node_path)
                .unwrap()
                .run(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async {
                        let first = network.attach("a", &a, &pod("a")).await.unwrap();
                        let second = network.attach("b", &b, &pod("b")).await.unwrap();
                        network.check("a").await.unwrap();
                        network.detach("b", &b).await.unwrap();
                        let again = network.attach("b", &b, &pod("b")).await.unwrap();
                        assert_ne!(again.ips, first.ips);
                        (first.ips[0], second.ips[0], again.ips[0])
                    })
                })
                .unwrap()
        })
        .await
        .unwrap()
    };
    assert_eq!((first.to_string(), second.to_string()), (first_address.into(), second_address.into()));
    assert_eq!(echo(&a, &b, again), format!("ping from {first}"));
    assert_eq!(echo(&a, &node, gateway.parse().unwrap()), format!("ping from {first}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shell_script_of_the_documentation_is_a_plugin() {
    let world = World::new();
    world.plugin("script", &documented_plugin());
    let config = json!({"cniVersion": "0.4.0", "name": "lan", "type": "script", "bridge": "script0",
        "subnet": "10.77.0", "leases": world.path("leases")});
    world.configure("10-script.conf", &config);
    two_pods(world.network(), "10.77.0.2", "10.77.0.3", "10.77.0.1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unmodified_plugins_of_others_work() {
    let debian = Path::new("/usr/lib/cni");
    assert!(debian.join("bridge").exists(), "install containernetworking-plugins");
    let world = World::new();
    let config = json!({"cniVersion": "1.0.0", "name": "lan", "plugins": [
        {"type": "bridge", "bridge": "lan0", "isGateway": true, "isDefaultGateway": true,
            "ipam": {"type": "host-local", "dataDir": world.path("leases"), "ranges": [[{"subnet": "10.79.0.0/24"}]]}},
        {"type": "tuning"},
    ]});
    world.configure("10-lan.conflist", &config);
    let network = CniNetwork::new(CniConfig {
        configurations: world.path("net.d"),
        programs: vec![debian.to_owned()],
        cache: world.path("cache"),
        patience: Duration::from_secs(60),
    });
    two_pods(network, "10.79.0.2", "10.79.0.3", "10.79.0.1").await;
}
