//! Networks of containers without a cluster: made, joined, left, and the names on them.

use crate::docker::Engine;
use crate::world::eventually;
use ferrite_json::Value;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

fn get(engine: &Engine, from: &str, url: &str) -> Option<String> {
    let output = engine.run(&["exec", from, "busybox", "timeout", "3", "wget", "-qO-", url]);
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn members_find_each_other_by_name() {
    let engine = Engine::with_image();
    let id = engine.ok(&["network", "create", "--label", "a=b", "front"]);
    assert_eq!(id.trim_end().len(), 64, "{id}");
    let listed = engine.ok(&["network", "ls", "--format", "{{.Name}} {{.Driver}} {{.Scope}}"]);
    assert_eq!(listed, "bridge bridge local\nfront bridge local\nhost host local\nnone null local\n");
    assert_eq!(engine.ok(&["network", "ls", "-q", "--no-trunc", "--filter", "label=a"]), id);
    let (_, text) = engine.fails(&["network", "create", "front"]);
    assert!(text.contains("network with name front already exists"), "{text}");

    engine.ok(&["run", "-d", "--name", "one", "--network", "front", "--network-alias", "site", "web"]);
    engine.ok(&["run", "-d", "--name", "two", "--network", "front", "web"]);
    engine.ok(&["run", "-d", "--name", "alone", "web"]);
    for name in ["one", "site", &engine.inspect("one", "{{.Id}}")[..12]] {
        let page =
            eventually(&format!("{name} answers"), || get(&engine, "two", &format!("http://{name}:8080/")));
        assert_eq!(page, "hello");
    }
    assert!(get(&engine, "one", "http://two:8080/").is_some(), "who was there before knows who came");
    assert!(get(&engine, "two", "http://two:8080/").is_some(), "and everybody its own name");
    assert!(get(&engine, "alone", "http://one:8080/").is_none(), "names are the network's");
    let address = engine.inspect("one", "{{.NetworkSettings.Networks.front.IPAddress}}");
    assert!(address.starts_with("172.18.0."), "{address}");
    assert!(get(&engine, "alone", &format!("http://{address}:8080/")).is_none(), "networks are apart");
    let shared = ["run", "--rm", "--network", "container:one", "web", "cat", "/etc/hosts"];
    assert!(engine.ok(&shared).contains("\ttwo"), "who shares a network shares its names");

    engine.ok(&["rename", "one", "first"]);
    assert!(get(&engine, "two", "http://first:8080/").is_some());
    assert!(get(&engine, "two", "http://one:8080/").is_none());
    engine.ok(&["stop", "-t", "0", "first"]);
    assert!(!engine.ok(&["exec", "two", "cat", "/etc/hosts"]).contains("first"), "who left is forgotten");
    engine.ok(&["start", "first"]);
    eventually("it is back", || get(&engine, "two", "http://first:8080/"));

    let (_, text) = engine.fails(&["network", "rm", "front"]);
    assert!(text.contains("has active endpoints") && text.contains("first"), "{text}");
    let value: Value = ferrite_json::from_str(&engine.ok(&["network", "inspect", "front"])).unwrap();
    assert_eq!(value[0]["Containers"].as_object().map(ferrite_json::Map::len), Some(2), "{value}");
    assert_eq!(value[0]["IPAM"]["Config"][0]["Gateway"], "172.18.0.1");
    let on = engine.ok(&["ps", "--filter", "network=front", "--format", "{{.Names}} {{.Networks}}"]);
    assert_eq!(on, "two front\nfirst front\n");
    engine.ok(&["rm", "-f", "first", "two", "alone"]);
    assert_eq!(engine.ok(&["network", "rm", "front"]), "front\n");
    let links = engine.ok(&["run", "--rm", "--network", "host", "web", "ls", "/sys/class/net"]);
    assert!(!links.contains("br-"), "{links}");
    let (_, text) = engine.fails(&["network", "rm", "bridge"]);
    assert!(text.contains("pre-defined network"), "{text}");
}

#[test]
fn networks_are_joined_and_left_while_running() {
    let engine = Engine::with_image();
    engine.ok(&["network", "create", "--subnet", "10.77.0.0/24", "--internal", "back"]);
    let (_, text) = engine.fails(&["network", "create", "--subnet", "10.77.0.0/16", "other"]);
    assert!(text.contains("Pool overlaps"), "{text}");
    engine.ok(&["run", "-d", "--name", "db", "--network", "back", "--ip", "10.77.0.9", "web"]);
    engine.ok(&["run", "-d", "--name", "app", "web"]);
    assert!(get(&engine, "app", "http://10.77.0.9:8080/").is_none(), "not before it has joined");
    engine.ok(&["network", "connect", "--alias", "worker", "back", "app"]);
    eventually("it has joined", || get(&engine, "app", "http://db:8080/"));
    assert!(get(&engine, "db", "http://worker:8080/").is_some());
    assert_eq!(engine.ok(&["exec", "app", "ls", "/sys/class/net"]), "eth0\neth1\nlo\n");
    let route = |name: &str| engine.ok(&["exec", name, "busybox", "ip", "route"]);
    assert!(route("app").contains("default via 172.17.0.1"), "{}", route("app"));
    assert!(!route("db").contains("default"), "an internal network leads nowhere: {}", route("db"));
    let (_, text) = engine.fails(&["network", "connect", "back", "app"]);
    assert!(text.contains("already exists in network back"), "{text}");

    engine.ok(&["restart", "-t", "0", "app"]);
    eventually("it joins again by itself", || get(&engine, "app", "http://db:8080/"));
    engine.ok(&["network", "disconnect", "bridge", "app"]);
    assert_eq!(engine.ok(&["exec", "app", "ls", "/sys/class/net"]), "eth1\nlo\n");
    engine.ok(&["network", "disconnect", "back", "app"]);
    assert!(get(&engine, "app", "http://db:8080/").is_none());
    assert!(!engine.ok(&["exec", "db", "cat", "/etc/hosts"]).contains("app"));
    let (_, text) = engine.fails(&["network", "disconnect", "back", "app"]);
    assert!(text.contains("is not connected to network back"), "{text}");

    engine.ok(&["create", "--name", "later", "--network", "none", "web"]);
    let (_, text) = engine.fails(&["network", "connect", "back", "later"]);
    assert!(text.contains("private (none) mode"), "{text}");
    let (code, text) = engine.fails(&["run", "--network-alias", "x", "web"]);
    assert_eq!(code, 125);
    assert!(text.contains("only for containers in user defined networks"), "{text}");
    let (code, text) = engine.fails(&["run", "--network", "back", "--ip", "10.77.0.9", "web"]);
    assert_eq!(code, 125);
    assert!(text.contains("Address already in use"), "{text}");
    engine.ok(&["rm", "-f", "db", "app"]);
    engine.ok(&["network", "create", "unused"]);
    let pruned = engine.ok(&["network", "prune", "-f"]);
    assert!(pruned.starts_with("Deleted Networks:\n") && pruned.contains("unused"), "{pruned}");
}

#[test]
fn all_exposed_ports_and_datagrams() {
    let engine = Engine::with_image();
    engine.ok(&[
        "run",
        "-d",
        "--name",
        "both",
        "-P",
        "--expose",
        "8080",
        "-p",
        "127.0.0.1:19000:9000/udp",
        "web",
    ]);
    let pid = engine.inspect("both", "{{.State.Pid}}");
    // No program of the image serves datagrams: the test does, in the container's network.
    let namespace = std::fs::File::open(format!("/proc/{pid}/ns/net")).unwrap();
    let server = std::thread::spawn(move || {
        nix::sched::setns(&namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let socket = UdpSocket::bind("0.0.0.0:9000").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut buffer = [0; 16];
        let (count, sender) = socket.recv_from(&mut buffer).unwrap();
        socket.send_to(&buffer[..count], sender).unwrap();
    });
    let random = engine.ok(&["port", "both", "8080"]);
    let address: SocketAddr = random.trim_end().replace("0.0.0.0", "127.0.0.1").parse().unwrap();
    assert_eq!(eventually("the page is served", || engine.netns.http_get(address, "/").ok()), "hello");
    assert_eq!(engine.ok(&["port", "both", "9000/udp"]), "127.0.0.1:19000\n");
    let answer = engine.netns.run(|| {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        socket.connect("127.0.0.1:19000").unwrap();
        eventually("a datagram comes back", || {
            socket.send(b"ping").ok()?;
            let mut buffer = [0; 16];
            let count = socket.recv(&mut buffer).ok()?;
            Some(buffer[..count].to_vec())
        })
    });
    assert_eq!(answer, b"ping");
    server.join().unwrap();
}
