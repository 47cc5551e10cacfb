//! The commands of `docs/installation.md`, as they stand, on two machines.

use crate::kubelet::remove_groups;
use crate::servers::block_on;
use crate::world::*;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const GUIDE: &str = include_str!("../../../../docs/installation.md");

/// Directories that a machine has for itself: where they are in the test's directory, and where the machine sees them.
const DIRECTORIES: &[(&str, &str)] = &[
    ("bin", "/usr/local/bin"),
    ("units", "/etc/systemd/system"),
    ("etcd", "/etc/etcd"),
    ("kubernetes", "/etc/kubernetes"),
    ("etc", "/etc/ferrite"),
    ("members", "/var/lib/etcd"),
    ("apiserver", "/var/lib/kube-apiserver"),
    ("kubelet", "/var/lib/kubelet"),
    ("ferrite", "/var/lib/ferrite"),
    ("run", "/run/ferrite"),
    ("pods", "/var/log/pods"),
    ("root", "/root"),
];

/// Starts units as systemd would, again when they fail. Two machines share one tree of control groups and one disk here,
/// which may be full.
const SYSTEMCTL: &str = r#"#!/bin/sh
units=
for argument; do
  case $argument in daemon-reload) exit 0 ;; enable | --*) ;; *) units="$units $argument" ;; esac
done
for unit in $units; do
  text=$(sed -e ':a' -e '/\\$/{N;s/\\\n//;ba' -e '}' "/etc/systemd/system/$unit.service")
  start=$(printf '%s\n' "$text" | sed -n 's/^ExecStart=//p')
  then=$(printf '%s\n' "$text" | sed -n 's/^ExecStartPost=//p')
  [ "$unit" != kubelet ] || start="$start --cgroup-root=$GROUP '--eviction-hard=memory.available<1Mi'"
  setsid sh -c "n=0; until $start; do n=\$((n + 1)); [ \$n -lt 60 ] || exit 1; sleep 1; done" \
    >> "$LOGS/$unit.log" 2>&1 < /dev/null &
  echo $! >> "$LOGS/started"
  [ -z "$then" ] || sh -c "$then"
done
"#;

/// A machine with a network, a name and directories of its own.
struct Machine<'a> {
    name: &'static str,
    directory: PathBuf,
    world: &'a World,
    /// Keeps the namespaces.
    holder: Child,
    _netns: Netns,
}

impl<'a> Machine<'a> {
    fn new(world: &'a World, name: &'static str, netns: Netns) -> Self {
        let directory = world.path(name);
        let mut script = format!("set -e; hostname {name}; ");
        for (ours, place) in DIRECTORIES {
            let ours = directory.join(ours);
            std::fs::create_dir_all(&ours).unwrap();
            script.push_str(&format!("mkdir -p {place}; mount --bind {} {place}; ", ours.display()));
        }
        script.push_str("mount --make-rshared /; echo ready; exec sleep infinity");
        std::fs::create_dir_all(directory.join("logs")).unwrap();
        std::fs::hard_link(ferrite(), directory.join("bin/ferrite"))
            .or_else(|_| std::fs::copy(ferrite(), directory.join("bin/ferrite")).map(drop))
            .unwrap();
        let systemctl = directory.join("bin/systemctl");
        std::fs::write(&systemctl, SYSTEMCTL).unwrap();
        assert!(Command::new("chmod").arg("755").arg(&systemctl).status().unwrap().success());
        let mut command = Command::new("unshare");
        command.args(["--mount", "--uts", "--propagation", "private", "sh", "-c", &script]);
        let mut holder = netns.enter(command.stdout(Stdio::piped())).spawn().unwrap();
        let mut ready = [0; 6];
        std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut ready).unwrap();
        Self { name, directory, world, holder, _netns: netns }
    }

    /// The control group above the pods of this machine, which nobody else has.
    fn group(&self) -> String {
        let world = self.world.path("x");
        format!("{}-{}", world.parent().unwrap().file_name().unwrap().to_string_lossy(), self.name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-m", "-u", "-n", "-t", &self.holder.id().to_string()]).args(arguments);
        command.env_clear().env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/root");
        command.env("LOGS", self.directory.join("logs")).env("GROUP", format!("/{}", self.group()));
        command.stdin(Stdio::null());
        command
    }

    /// Runs commands of the guide and returns their output. The first that fails ends the test.
    fn run(&self, commands: &str) -> String {
        let limited = ["timeout", "300", "bash", "-euo", "pipefail", "-c", commands];
        let output = self.command(&limited).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "on {}:\n{commands}\n{said}\n{errors}\n{}", self.name, self.logs());
        said
    }

    /// The end of each unit's log.
    fn logs(&self) -> String {
        let logs = std::fs::read_dir(self.directory.join("logs")).into_iter().flatten().flatten();
        let ends = logs.map(|log| {
            let text = std::fs::read_to_string(log.path()).unwrap_or_default();
            let last: Vec<&str> = text.lines().rev().take(5).collect();
            format!("{}:\n{}\n", log.path().display(), last.join("\n"))
        });
        ends.collect()
    }
}

impl Drop for Machine<'_> {
    fn drop(&mut self) {
        let started = std::fs::read_to_string(self.directory.join("logs/started")).unwrap_or_default();
        for unit in started.lines() {
            // Each unit is a session of its own.
            let _ = Command::new("kill").args(["--", &format!("-{unit}")]).stderr(Stdio::null()).status();
        }
        let down = self.command(&["ferrite", "down"]).output().unwrap();
        let _ = self.holder.kill();
        let _ = self.holder.wait();
        remove_groups(&self.group());
        if !down.status.success() && !std::thread::panicking() {
            panic!("down failed: {}", String::from_utf8_lossy(&down.stderr));
        }
    }
}

/// The blocks of the guide: the machine that each is for, and its commands.
fn blocks() -> Vec<(&'static str, &'static str)> {
    let blocks = GUIDE.split("```sh ").skip(1);
    blocks
        .map(|block| {
            let (machine, rest) = block.split_once('\n').unwrap();
            (machine, rest.split_once("\n```").unwrap().0)
        })
        .collect()
}

fn connect(world: &World, machines: &[(&'static str, &Netns, &'static str)]) {
    let cables: Vec<_> = machines
        .iter()
        .map(|(name, netns, address)| (*name, netns.path(), address.parse().unwrap()))
        .collect();
    world.netns.run(move || {
        block_on(async {
            let range = "192.0.2.0/24".parse().unwrap();
            let segment = ferrite_network::Segment::open("machines", range, "none").await.unwrap();
            for (name, netns, address) in cables {
                segment.attach(name, &netns, address).await.unwrap();
            }
        });
    });
}

#[test]
fn the_installation_guide_leads_to_a_cluster() {
    let world = World::prepare(&[]);
    let (first, second) = (Netns::new(), Netns::new());
    connect(&world, &[("one", &first, "192.0.2.11"), ("two", &second, "192.0.2.12")]);
    let one = Machine::new(&world, "one", first);
    let two = Machine::new(&world, "two", second);
    let blocks = blocks();
    assert!(blocks.len() > 10, "{blocks:?}");
    let mut last = String::new();
    for (machine, commands) in blocks {
        let archive = Path::new("root/two.tar");
        if machine == "two" && one.directory.join(archive).exists() {
            std::fs::copy(one.directory.join(archive), two.directory.join(archive)).unwrap();
            std::fs::remove_file(one.directory.join(archive)).unwrap();
        }
        last = match machine {
            "one" => one.run(commands),
            "two" => two.run(commands),
            "both" => one.run(commands) + &two.run(commands),
            other => panic!("the guide has no machine {other:?}"),
        };
    }
    // The log of the last pod, its page, and one of both pages through the Service.
    let lines: Vec<&str> = last.lines().rev().take(2).collect();
    assert!(["one web-one", "two web-two"].contains(&lines[0]) && lines[1] == "two web-two", "{last}");

    let admin = |arguments: &str| {
        one.run(&format!("kubectl --kubeconfig=/etc/kubernetes/admin.kubeconfig {arguments}"))
    };
    // The address says which node's range it is from: pods keep it on their way to the other node.
    assert!(admin("get pod web-two -o jsonpath={.status.podIP}").starts_with("10.244.2."));
    // Nobody gets into etcd with a certificate of the cluster, or without one.
    let endpoint = "--endpoints=https://192.0.2.11:2379 --cacert=/etc/etcd/etcd-ca.crt";
    let client = "--cert=/etc/kubernetes/admin.crt --key=/etc/kubernetes/admin.key";
    for credentials in ["", client] {
        one.run(&format!(
            "! ETCDCTL_API=3 etcdctl {endpoint} {credentials} --command-timeout=2s get / --prefix"
        ));
    }
    // The token lets a kubelet ask for certificates, and nothing else.
    let joining = "kubectl --kubeconfig=/etc/kubernetes/bootstrap.kubeconfig";
    two.run(&format!("! {joining} get secrets -A; ! {joining} get nodes"));
}
