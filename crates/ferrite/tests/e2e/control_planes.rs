//! `ferrite up --control-planes 3`: servers with their etcd members killed, paused and cut off under a client that remembers
//! every acknowledged write.

use crate::lifecycle::Traces;
use crate::servers::{Clients, Watcher, Writer};
use crate::world::*;
use std::collections::BTreeSet;
use std::sync::Arc;

const MACHINES: [&str; 3] = ["control-plane-1", "control-plane-2", "control-plane-3"];

fn node(world: &World, arguments: &[&str]) -> String {
    let output = world.ferrite(&[&["node"], arguments].concat()).output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "node {arguments:?}: {text}");
    text
}

/// The machine that holds a lease. A request may meet a server that is about to be left.
fn leader(world: &World, lease: &str) -> Option<String> {
    let path = "jsonpath={.spec.holderIdentity}";
    let output = world.try_kubectl(&["get", "lease", "-n", "kube-system", lease, "-o", path]);
    let holder = String::from_utf8(output.stdout).ok()?;
    MACHINES.iter().find(|name| holder.starts_with(&format!("{name}_"))).map(|name| (*name).to_owned())
}

/// Waits until the `kubernetes` Service has so many servers.
fn wait_for_servers(world: &World, count: usize) {
    eventually(&format!("{count} servers are there"), || {
        let path = "jsonpath={.endpoints[*].addresses[0]}";
        let output = world.try_kubectl(&["get", "endpointslice", "kubernetes", "-o", path]);
        let listed = String::from_utf8(output.stdout).ok()?;
        (listed.split_whitespace().count() == count).then_some(())
    });
}

#[test]
fn one_of_three_control_planes_may_fail() {
    let mut world = World::prepare(&["--control-planes", "3", "--nodes", "1"]);
    let before = Traces::take(&world);
    world.up();
    let listed = node(&world, &["list"]);
    let running = |line: &&str| line.contains("control-plane-") && line.ends_with("running");
    assert_eq!(listed.lines().filter(running).count(), 3, "{listed}");
    wait_for_servers(&world, 3);
    world.create(&format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  containers:\n  - {{name: c, image: {TOOLS}, command: [/ferrite, tools, http]}}\n"
    ));
    world.wait_ready("web");

    // Members of the etcd trust nobody without a certificate of their own authority.
    let curl = world.command("curl", &["-sk", "--max-time", "5", "https://10.243.0.2:2379/version"]).output();
    assert!(!curl.unwrap().status.success(), "etcd answers a stranger");

    let clients = Arc::new(Clients {
        config: world.data().join("config/admin.kubeconfig"),
        urls: vec!["https://127.0.0.1:6443".into()],
        netns: world.netns.clone(),
    });
    let watcher = Watcher::start(&clients);
    eventually("the watch begins", || (watcher.seen.lock().unwrap().1 > 0).then_some(()));
    let writer = Writer::start(&clients);
    writer.more(20);
    let mut stopped = Vec::new();
    for failure in ["stop", "pause", "partition"] {
        let victim = eventually("a manager leads", || leader(&world, "kube-controller-manager"));
        node(&world, &[failure, &victim]);
        writer.more(20);
        for lease in ["kube-controller-manager", "kube-scheduler"] {
            eventually(&format!("{lease} leaves {victim} after {failure}"), || {
                leader(&world, lease).filter(|holder| *holder != victim)
            });
        }
        wait_for_servers(&world, 2);
        // The new leader works.
        world.kubectl(&["create", "deployment", failure, "--image=none", "--replicas=2"]);
        eventually("the deployment has its pods", || {
            let output = world.try_kubectl(&["get", "pods", "-l", &format!("app={failure}"), "-o", "name"]);
            (String::from_utf8_lossy(&output.stdout).lines().count() == 2).then_some(())
        });
        node(&world, &["start", &victim]);
        wait_for_servers(&world, 3);
        writer.more(20);
        if failure == "stop" {
            stopped.push(victim);
        }
    }
    // The watch may never have been at a leader. Now no server is left that was not stopped once.
    for machine in MACHINES.iter().filter(|name| !stopped.iter().any(|other| other == *name)) {
        node(&world, &["stop", machine]);
        writer.more(20);
        wait_for_servers(&world, 2);
        node(&world, &["start", machine]);
        wait_for_servers(&world, 3);
        writer.more(20);
    }
    let (acknowledged, failed) = writer.end();
    let (seen, watches) = watcher.end(acknowledged.len());
    let stored = world.get(&["configmaps", "-l", "by=writer"]);
    let stored: BTreeSet<&str> = stored["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|map| map["metadata"]["name"].as_str())
        .collect();
    let lost: Vec<&String> = acknowledged.iter().filter(|name| !stored.contains(name.as_str())).collect();
    assert!(lost.is_empty(), "lost writes: {lost:?}");
    assert_eq!(seen, acknowledged, "the watch saw each once, in order");
    assert!(watches >= 2, "the watch went on at another server");
    println!("{} writes, {failed} requests failed, {watches} watches", acknowledged.len());
    assert!(failed <= 60, "{failed} requests failed");
    assert_eq!(world.kubectl(&["exec", "web", "--", "/ferrite", "tools", "echo", "here"]).trim(), "here");

    // A program that dies is started again.
    let pid = |name: &str| {
        let log = std::fs::read_to_string(world.data().join("nodes").join(name).join("ferrite.log")).unwrap();
        let line = log.lines().rfind(|line| line.contains("started") && line.contains("program=\"etcd\""));
        let (_, rest) = line.unwrap().split_once("pid=").unwrap();
        rest.split_whitespace().next().unwrap().parse::<i32>().unwrap()
    };
    let first = pid(MACHINES[0]);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(first), nix::sys::signal::Signal::SIGKILL).unwrap();
    eventually("etcd runs again", || (pid(MACHINES[0]) != first).then_some(()));

    // Machines of the control plane are no nodes to delete, and their number stays.
    let refused = world.ferrite(&["node", "delete", MACHINES[0]]).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("member of its etcd"), "{refused:?}");

    // The cluster comes back with its data, also when the process has had no chance to end anything.
    assert!(world.terminate());
    world.start_again();
    assert_eq!(
        world.get(&["configmaps", "-l", "by=writer"])["items"].as_array().unwrap().len(),
        stored.len()
    );
    world.kill();
    let other = world.ferrite(&["up", "--control-planes", "5"]).output().unwrap();
    assert!(String::from_utf8_lossy(&other.stderr).contains("their number stays"), "{other:?}");
    world.up();
    assert!(world.down(&["--keep-data"]).status.success());
    world.up();
    world.wait_ready("web");
    assert_eq!(
        world.get(&["configmaps", "-l", "by=writer"])["items"].as_array().unwrap().len(),
        stored.len()
    );
    let output = world.down(&[]);
    assert!(output.status.success(), "{output:?}");
    let after = Traces::take(&world);
    assert_eq!(
        (&after.mounts, &after.links, &after.routes, &after.processes),
        (&before.mounts, &before.links, &before.routes, &before.processes)
    );
}
