//! Our own plugins, in network namespaces that each test makes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ferrite_netlink::Netns;
use ferrite_network::cni::plugins::{Environment, Failure, run};
use serde_json::{Value, json};
use support::{TestNs, echo};

/// Calls a plugin with the node's namespace around it.
fn call(
    node: &TestNs,
    name: &str,
    environment: &Environment,
    config: &Value,
) -> Result<Option<Value>, Failure> {
    let (environment, input) = (environment.clone(), config.to_string());
    Netns::from_path(&node.path)
        .unwrap()
        .run(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(run(name, environment, input.as_bytes()))
        })
        .unwrap()
}

fn environment(command: &str, container: &str, netns: &Path) -> Environment {
    Environment {
        command: command.into(),
        container: container.into(),
        netns: netns.to_owned(),
        interface: "eth0".into(),
        ..Environment::default()
    }
}

fn address(result: &Value) -> String {
    result["ips"][0]["address"].as_str().unwrap().split('/').next().unwrap().to_owned()
}

struct Place {
    node: TestNs,
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { node: TestNs::new(), dir: tempfile::tempdir().unwrap() }
    }

    fn ipam(&self, subnet: &str) -> Value {
        json!({"type": "host-local", "dataDir": self.dir.path(), "ranges": [[{"subnet": subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}]})
    }

    fn config(&self, kind: &str, subnet: &str) -> Value {
        json!({"cniVersion": "1.0.0", "name": "net", "type": kind, "ipam": self.ipam(subnet)})
    }

    fn add(&self, config: &Value, container: &str, ns: &TestNs) -> Result<Value, Failure> {
        let kind = config["type"].as_str().unwrap();
        call(&self.node, kind, &environment("ADD", container, &ns.path), config).map(Option::unwrap)
    }

    fn del(&self, config: &Value, container: &str, netns: &Path) {
        call(&self.node, config["type"].as_str().unwrap(), &environment("DEL", container, netns), config)
            .unwrap();
    }

    fn check(&self, config: &Value, result: &Value, container: &str, ns: &TestNs) -> Result<(), Failure> {
        let mut config = config.clone();
        config["prevResult"] = result.clone();
        let environment = environment("CHECK", container, &ns.path);
        call(&self.node, config["type"].as_str().unwrap(), &environment, &config).map(drop)
    }

    fn leases(&self) -> BTreeSet<String> {
        let dir = self.dir.path().join("net");
        let names =
            std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.parse::<std::net::IpAddr>().is_ok()).collect()
    }
}

#[tokio::test]
async fn the_protocol() {
    let node = TestNs::new();
    let version =
        call(&node, "bridge", &environment("VERSION", "", Path::new("")), &json!({})).unwrap().unwrap();
    assert_eq!(version["supportedVersions"], json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]));
    let get = |command: &'static str, rest: bool| {
        move |name: &str| match name {
            "CNI_COMMAND" => Some(command.into()),
            "CNI_CONTAINERID" | "CNI_IFNAME" | "CNI_NETNS" if rest => Some("x".into()),
            "CNI_PATH" => Some("/a:/b".into()),
            _ => None,
        }
    };
    let read = |command, rest| Environment::read(get(command, rest));
    assert_eq!(read("ADD", true).unwrap().path, [PathBuf::from("/a"), PathBuf::from("/b")]);
    let missing = read("ADD", false).unwrap_err();
    assert_eq!((missing.code, missing.message.contains("CNI_NETNS")), (4, true));
    assert_eq!(read("FROB", true).unwrap_err().code, 4);
    assert_eq!(read("", true).unwrap_err().code, 4);
    let hostile =
        Environment::read(|name| Some(if name == "CNI_COMMAND" { "DEL" } else { "../../etc" }.into()));
    assert_eq!(hostile.unwrap_err().code, 4);
    let old = call(
        &node,
        "bridge",
        &environment("ADD", "a", &node.path),
        &json!({"cniVersion": "0.2.0", "name": "n"}),
    );
    assert_eq!(old.unwrap_err().code, 1);
    let environment = environment("CHECK", "a", &node.path);
    assert_eq!(
        call(&node, "loopback", &environment, &json!({"cniVersion": "1.0.0", "name": "n"})).unwrap_err().code,
        7
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_with_ports_and_limits() {
    let place = Place::new();
    let (a, b) = (TestNs::new(), TestNs::new());
    for ns in [&place.node, &a, &b] {
        let own = json!({"cniVersion": "0.4.0", "name": "lo", "type": "loopback"});
        call(&place.node, "loopback", &environment("ADD", "x", &ns.path), &own).unwrap();
    }
    let mut config = place.config("bridge", "10.50.0.0/24");
    config["isDefaultGateway"] = true.into();
    config["ipMasq"] = true.into();
    config["hairpinMode"] = true.into();
    let first = place.add(&config, "a", &a).unwrap();
    let second = place.add(&config, "b", &b).unwrap();
    assert_eq!((address(&first), address(&second)), ("10.50.0.2".into(), "10.50.0.3".into()));
    assert_eq!(first["interfaces"][2]["name"], "eth0");
    assert_eq!(echo(&a, &b, "10.50.0.3".parse().unwrap()), "ping from 10.50.0.2");
    assert_eq!(echo(&a, &place.node, "10.50.0.1".parse().unwrap()), "ping from 10.50.0.2");
    place.check(&config, &first, "a", &a).unwrap();

    // Plugins that add to the result.
    let chained = |kind: &str, capability: Value| json!({"cniVersion": "1.0.0", "name": "net", "type": kind, "prevResult": second, "runtimeConfig": capability});
    let ports = json!({"portMappings": [{"hostPort": 5080, "containerPort": 80, "protocol": "tcp"}]});
    let ports = chained("portmap", ports);
    assert_eq!(place.add(&ports, "b", &b).unwrap()["ips"], second["ips"]);
    let server = b.run(|| std::net::TcpListener::bind("0.0.0.0:80").unwrap());
    for (from, host) in
        [(&place.node, "127.0.0.1:5080"), (&place.node, "10.50.0.1:5080"), (&a, "10.50.0.1:5080")]
    {
        let target = host.parse().unwrap();
        from.run(|| {
            std::net::TcpStream::connect_timeout(&target, std::time::Duration::from_secs(10)).unwrap()
        });
        server.accept().unwrap();
    }
    let limits =
        chained("bandwidth", json!({"bandwidth": {"ingressRate": 8_000_000, "egressRate": 8_000_000}}));
    place.add(&limits, "b", &b).unwrap();
    place.check(&limits, &second, "b", &b).unwrap();
    place.del(&ports, "b", &b.path);
    let gone = place.node.run(|| std::net::TcpStream::connect("127.0.0.1:5080").unwrap_err().kind());
    assert_eq!(gone, std::io::ErrorKind::ConnectionRefused);

    // A pod leaves twice, also without its namespace.
    place.del(&config, "b", &b.path);
    place.del(&config, "b", Path::new("/gone"));
    assert!(place.check(&config, &second, "b", &b).is_err());
    assert_eq!(place.leases(), ["10.50.0.2".to_owned()].into());
}

#[tokio::test(flavor = "multi_thread")]
async fn point_to_point_and_flannel() {
    let place = Place::new();
    let (a, b, c) = (TestNs::new(), TestNs::new(), TestNs::new());
    let config = place.config("ptp", "10.60.0.0/24");
    let first = place.add(&config, "a", &a).unwrap();
    place.add(&config, "b", &b).unwrap();
    assert_eq!(echo(&a, &b, "10.60.0.3".parse().unwrap()), "ping from 10.60.0.2");
    place.check(&config, &first, "a", &a).unwrap();
    place.del(&config, "a", &a.path);
    assert!(place.check(&config, &first, "a", &a).is_err());

    let file = place.dir.path().join("subnet.env");
    let config = json!({"cniVersion": "1.0.0", "name": "net", "type": "flannel", "subnetFile": file,
        "dataDir": place.dir.path().join("flannel"), "ipam": {"dataDir": place.dir.path()},
        "delegate": {"isDefaultGateway": true, "bridge": "fl0"}});
    assert_eq!(place.add(&config, "c", &c).unwrap_err().code, 11, "the daemon has not leased a subnet yet");
    std::fs::write(&file, "FLANNEL_NETWORK=10.70.0.0/16\nFLANNEL_SUBNET=10.70.5.1/24\nFLANNEL_MTU=1400\n")
        .unwrap();
    let result = place.add(&config, "c", &c).unwrap();
    assert_eq!(address(&result), "10.70.5.2");
    let link = c.route().get_link_by_name("eth0").await.unwrap().unwrap();
    assert_eq!(link.mtu, Some(1400));
    assert_eq!(echo(&c, &place.node, "10.70.5.1".parse().unwrap()), "ping from 10.70.5.2");
    place.check(&config, &result, "c", &c).unwrap();
    place.del(&config, "c", &c.path);
    assert!(c.route().get_link_by_name("eth0").await.unwrap().is_none());
}

/// The address of a result that has this family.
fn of_family(result: &Value, v6: bool) -> std::net::IpAddr {
    let all = result["ips"].as_array().unwrap().iter();
    let address = |ip: &Value| ip["address"].as_str().unwrap().split('/').next().unwrap().parse().unwrap();
    all.map(address).find(|address: &std::net::IpAddr| address.is_ipv6() == v6).unwrap()
}

/// IPv6 alone and beside IPv4: traffic between containers and with the node, ports of the node, and no trace afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn both_families() {
    let kinds =
        [("bridge", json!({"isDefaultGateway": true, "ipMasq": true})), ("ptp", json!({"ipMasq": true}))];
    let four = json!([{"subnet": "10.90.0.0/24"}]);
    let six = json!([{"subnet": "fd00:90::/64"}]);
    for (kind, options) in kinds {
        for ranges in [json!([four, six]), json!([six])] {
            let place = Place::new();
            // The node reaches its own addresses of IPv6 by this link.
            place.node.route().set_link_up("lo").await.unwrap();
            let (a, b) = (TestNs::new(), TestNs::new());
            // As some runtimes make namespaces.
            b.run(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap());
            let mut config = place.config(kind, "");
            config["ipam"]["ranges"] = ranges.clone();
            config["ipam"]["routes"] = match kind {
                // The bridge is the default gateway of both families by itself.
                "bridge" => json!([]),
                _ => json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]),
            };
            for (option, value) in options.as_object().unwrap() {
                config[option] = value.clone();
            }
            if ranges.as_array().unwrap().len() == 1 && kind == "ptp" {
                config["ipam"]["routes"] = json!([{"dst": "::/0"}]);
            }
            let (first, second) =
                (place.add(&config, "a", &a).unwrap(), place.add(&config, "b", &b).unwrap());
            place.check(&config, &first, "a", &a).unwrap();
            let families: &[bool] =
                if ranges.as_array().unwrap().len() == 2 { &[false, true] } else { &[true] };
            for v6 in families {
                let (from, to) = (of_family(&first, *v6), of_family(&second, *v6));
                assert_eq!(echo(&a, &b, to), format!("ping from {from}"), "{kind} {ranges}");
                let gateway = if *v6 { "fd00:90::1" } else { "10.90.0.1" };
                assert_eq!(echo(&a, &place.node, gateway.parse().unwrap()), format!("ping from {from}"));
            }

            let mapping =
                json!({"portMappings": [{"hostPort": 5090, "containerPort": 80, "protocol": "tcp"}]});
            let mut ports =
                json!({"cniVersion": "1.0.0", "name": "net", "type": "portmap", "prevResult": second});
            ports["runtimeConfig"] = mapping;
            place.add(&ports, "b", &b).unwrap();
            place.check(&ports, &second, "b", &b).unwrap();
            let server = b.run(|| std::net::TcpListener::bind("[::]:80").unwrap());
            let target = "[fd00:90::1]:5090".parse().unwrap();
            for from in [&place.node, &a] {
                let connect =
                    || std::net::TcpStream::connect_timeout(&target, std::time::Duration::from_secs(10));
                from.run(connect).unwrap();
                assert!(server.accept().unwrap().1.is_ipv6());
            }
            place.del(&ports, "b", &b.path);
            let connect =
                || std::net::TcpStream::connect_timeout(&target, std::time::Duration::from_secs(10));
            let gone = place.node.run(|| connect().unwrap_err().kind());
            assert_eq!(gone, std::io::ErrorKind::ConnectionRefused, "{kind} {ranges}");

            place.del(&config, "a", &a.path);
            place.del(&config, "b", &b.path);
            assert!(place.check(&config, &first, "a", &a).is_err());
            assert!(place.leases().is_empty());
            let tables = place.node.ruleset().tables().unwrap();
            let tables: Vec<String> = tables.into_iter().map(|table| table.name).collect();
            assert!(tables.iter().all(|name| !name.starts_with("cni-ports-")), "{kind} {ranges}: {tables:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn flannel_with_both_families() {
    let place = Place::new();
    let (a, b) = (TestNs::new(), TestNs::new());
    let file = place.dir.path().join("subnet.env");
    let lease = "FLANNEL_NETWORK=10.71.0.0/16\nFLANNEL_SUBNET=10.71.5.1/24\nFLANNEL_IPV6_NETWORK=fd00:71::/56\nFLANNEL_IPV6_SUBNET=fd00:71:0:5::1/64\nFLANNEL_MTU=1400\n";
    std::fs::write(&file, lease).unwrap();
    let config = json!({"cniVersion": "1.0.0", "name": "net", "type": "flannel", "subnetFile": file,
        "dataDir": place.dir.path().join("flannel"), "ipam": {"dataDir": place.dir.path()},
        "delegate": {"bridge": "fl0"}});
    let (first, second) = (place.add(&config, "a", &a).unwrap(), place.add(&config, "b", &b).unwrap());
    assert_eq!(of_family(&first, true), "fd00:71:0:5::2".parse::<std::net::IpAddr>().unwrap());
    for v6 in [false, true] {
        let (from, to) = (of_family(&first, v6), of_family(&second, v6));
        assert_eq!(echo(&a, &b, to), format!("ping from {from}"));
    }
    place.del(&config, "a", &a.path);
    place.del(&config, "b", &b.path);
    assert!(place.leases().is_empty());
}

#[test]
fn addresses_of_many_callers() {
    let place = Place::new();
    let config = place.config("host-local", "10.80.0.0/24");
    let nowhere = Path::new("/x");
    let add = |container: &str| {
        call(&place.node, "host-local", &environment("ADD", container, nowhere), &config).map(Option::unwrap)
    };
    let given: BTreeSet<String> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..100).map(|n| scope.spawn(move || address(&add(&format!("c{n}")).unwrap()))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(given.len(), 100);
    assert!(!given.contains("10.80.0.1"), "the gateway is nobody's");
    assert!(add("c0").is_err(), "a container has one address");
    for n in 100..253 {
        add(&format!("c{n}")).unwrap();
    }
    let full = add("late").unwrap_err();
    assert_eq!((full.code, full.message.contains("no IP addresses available")), (11, true));

    place.del(&config, "c7", nowhere);
    add("late").unwrap();
    let mut gc = config.clone();
    gc["cniVersion"] = "1.1.0".into();
    gc["cni.dev/valid-attachments"] = json!([{"containerID": "late", "ifname": "eth0"}]);
    call(&place.node, "host-local", &environment("GC", "", Path::new("")), &gc).unwrap();
    assert_eq!(place.leases().len(), 1);
    place.del(&config, "late", nowhere);
    assert!(place.leases().is_empty());

    // Two families, and a range within a subnet.
    let mut both = config.clone();
    both["ipam"]["ranges"] = json!([
        [{"subnet": "10.81.0.0/16", "rangeStart": "10.81.2.10", "rangeEnd": "10.81.2.11", "gateway": "10.81.0.1"}],
        [{"subnet": "fd00:1::/64"}],
    ]);
    let result =
        call(&place.node, "host-local", &environment("ADD", "dual", nowhere), &both).unwrap().unwrap();
    assert_eq!(result["ips"][0], json!({"address": "10.81.2.10/16", "gateway": "10.81.0.1"}));
    assert_eq!(result["ips"][1], json!({"address": "fd00:1::2/64", "gateway": "fd00:1::1"}));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_would_have_no_effect_are_refused() {
    let (place, ns) = (Place::new(), TestNs::new());
    let previous = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.50.0.2/24"}]});
    let rows = [
        ("bridge", "macspoofchk", json!(true)),
        ("bridge", "vlan", json!(100)),
        ("bridge", "promiscMode", json!(true)),
        ("bridge", "runtimeConfig", json!({"mac": "02:00:00:00:00:01"})),
        (
            "host-local",
            "ipam",
            json!({"type": "host-local", "ranges": [[{"subnet": "10.50.0.0/24"}]], "resolvConf": "/etc/resolv.conf"}),
        ),
        ("host-local", "runtimeConfig", json!({"ips": ["10.50.0.9/24"]})),
        ("host-local", "args", json!({"cni": {"ips": ["10.50.0.9/24"]}})),
        ("bandwidth", "shapedSubnets", json!(["10.0.0.0/8"])),
        ("portmap", "snat", json!(false)),
        ("portmap", "markMasqBit", json!(5)),
    ];
    for (kind, key, value) in rows {
        let mut config = place.config(kind, "10.50.0.0/24");
        config["prevResult"] = previous.clone();
        config[key] = value;
        let refused = place.add(&config, "a", &ns).unwrap_err();
        assert_eq!(refused.code, 7, "{kind} {key}: {refused}");
        assert!(refused.message.contains(key), "{kind} {key}: {refused}");
        // The refused attempt made nothing; an earlier version may have made something.
        place.del(&config, "a", &ns.path);
    }
    let mut asked = environment("ADD", "a", &ns.path);
    asked.args = "IgnoreUnknown=1;IP=10.50.0.9".into();
    let refused = call(&place.node, "host-local", &asked, &place.config("host-local", "10.50.0.0/24"));
    assert_eq!(refused.unwrap_err().code, 7);

    let mut config = place.config("bridge", "10.50.0.0/24");
    for (key, value) in [("macspoofchk", json!(false)), ("vlan", json!(0)), ("promiscMode", json!(false))] {
        config[key] = value;
    }
    config["dns"] = json!({"nameservers": ["10.50.0.1"]});
    let result = place.add(&config, "a", &ns).unwrap();
    let own = ns.route().get_link_by_name("eth0").await.unwrap().unwrap().hardware.unwrap();
    let own: Vec<String> = own.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(result["interfaces"][2]["mac"], own.join(":"));
    assert!(result["interfaces"][0]["mac"].is_string() && result["interfaces"][1]["mac"].is_string());
    assert_eq!(result["dns"], json!({"nameservers": ["10.50.0.1"]}));
}
