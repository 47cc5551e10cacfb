//! Pods that come and go in numbers, and a cluster that is killed at every step: nothing is left of them.

use crate::world::*;
use std::collections::BTreeSet;
use std::path::Path;

/// The parts of the machine that pods of a cluster use.
#[derive(Debug, PartialEq, Eq)]
struct InUse {
    mounts: BTreeSet<String>,
    groups: BTreeSet<String>,
    links: BTreeSet<String>,
    directories: BTreeSet<String>,
}

impl InUse {
    fn of(world: &World) -> Self {
        let data = world.data().to_string_lossy().into_owned();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let links = world.netns.run(|| std::fs::read_to_string("/proc/thread-self/net/dev").unwrap());
        let below = |path: std::path::PathBuf| -> BTreeSet<String> {
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        Self {
            mounts: mounts
                .lines()
                .filter_map(|line| line.split(' ').nth(4))
                .filter(|path| path.starts_with(&data))
                .map(str::to_owned)
                .collect(),
            groups: pod_groups(world),
            links: links.lines().filter_map(|l| Some(l.split_once(':')?.0.trim().to_owned())).collect(),
            directories: below(world.data().join("kubelet/pods")),
        }
    }
}

/// The control groups of pods, below those of this cluster.
fn pod_groups(world: &World) -> BTreeSet<String> {
    fn walk(directory: &Path, depth: usize, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if !path.is_dir() || depth > 5 {
                continue;
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("pod") && path.to_string_lossy().contains("kubepods") {
                found.insert(path.to_string_lossy().into_owned());
            } else {
                walk(&path, depth + 1, found);
            }
        }
    }
    let mut found = BTreeSet::new();
    let group = crate::lifecycle::cluster_name(world);
    for hierarchy in std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        walk(&hierarchy.path().join(&group), 0, &mut found);
    }
    walk(&Path::new("/sys/fs/cgroup").join(&group), 0, &mut found);
    found
}

fn pid(world: &World) -> i32 {
    let data = world.data().to_string_lossy().into_owned();
    let is_ours = |pid: &i32| {
        let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<String> =
            command.split(|b| *b == 0).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
        words.get(1).is_some_and(|word| word == "up") && words.contains(&data)
    };
    processes().into_iter().find(is_ours).expect("the cluster runs")
}

fn descriptors(world: &World) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", pid(world))).unwrap().count()
}

fn deployment(replicas: usize) -> String {
    format!(
        r#"
apiVersion: v1
kind: ConfigMap
metadata: {{name: text}}
data: {{file: text}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: many}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: many}}}}
  template:
    metadata: {{labels: {{app: many}}}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: c
        image: {TOOLS}
        args: [sleep]
        volumeMounts: [{{name: memory, mountPath: /m}}, {{name: text, mountPath: /t}}]
      volumes:
      - {{name: memory, emptyDir: {{medium: Memory}}}}
      - {{name: text, configMap: {{name: text}}}}
"#
    )
}

fn scale(world: &World, replicas: usize) {
    world.kubectl(&["scale", "deployment/many", &format!("--replicas={replicas}")]);
    world.wait_rolled_out("many", i64::try_from(replicas).unwrap());
    if replicas == 0 {
        eventually("the pods are gone", || world.pods("app=many").is_empty().then_some(()));
    }
}

/// Waits until the pods' parts of the machine are those of before.
fn settled(world: &World, before: &InUse) {
    eventually(&format!("everything is as before: {before:?}"), || {
        (InUse::of(world) == *before).then_some(())
    });
}

#[test]
fn hundreds_of_pods_leave_nothing_behind() {
    const PODS: usize = 20;
    const ROUNDS: usize = 6;
    let world = World::start();
    let before = InUse::of(&world);
    world.create(&deployment(PODS));
    world.wait_rolled_out("many", i64::try_from(PODS).unwrap());
    let during = InUse::of(&world);
    assert!(during.mounts.len() > before.mounts.len() + PODS, "{during:?}");
    assert!(during.links.len() >= before.links.len() + PODS, "{during:?}");
    assert!(during.groups.len() >= before.groups.len() + PODS, "{during:?}");
    assert_eq!(during.directories.len(), before.directories.len() + PODS);
    scale(&world, 0);
    settled(&world, &before);
    // Connections and caches of the first round stay; later rounds add nothing.
    let first = descriptors(&world);
    for _ in 1..ROUNDS {
        scale(&world, PODS);
        scale(&world, 0);
        settled(&world, &before);
    }
    let slack = PODS / 2;
    eventually("descriptors are closed", || (descriptors(&world) <= first + slack).then_some(()));
}

/// A moment in the life of pods at which the cluster is killed.
struct Moment {
    what: &'static str,
    /// Begins the change.
    begin: fn(&World),
    reached: fn(&World, &InUse) -> bool,
}

const MOMENTS: &[Moment] = &[
    Moment {
        what: "a directory",
        begin: up,
        reached: |world, before| InUse::of(world).directories.len() > before.directories.len(),
    },
    Moment {
        what: "a control group",
        begin: up,
        reached: |world, before| InUse::of(world).groups.len() > before.groups.len(),
    },
    Moment {
        what: "a mount",
        begin: up,
        reached: |world, before| InUse::of(world).mounts.len() > before.mounts.len(),
    },
    Moment {
        what: "a link",
        begin: up,
        reached: |world, before| InUse::of(world).links.len() > before.links.len(),
    },
    Moment {
        what: "a pod that runs",
        begin: up,
        reached: |world, _| world.pods("app=many").iter().any(is_ready),
    },
    Moment {
        what: "a resize",
        begin: resize,
        reached: |world, _| world.pods("app=many").iter().any(is_resized),
    },
    Moment {
        what: "a pod that ends",
        begin: down,
        reached: |world, _| world.living_pods("app=many").len() < 4,
    },
    Moment {
        what: "fewer mounts",
        begin: down_from_up,
        reached: |world, before| {
            let now = InUse::of(world).mounts.len();
            now < before.mounts.len() + 8
        },
    },
];

fn up(world: &World) {
    world.kubectl(&["scale", "deployment/many", "--replicas=4"]);
}

fn down(world: &World) {
    world.kubectl(&["scale", "deployment/many", "--replicas=0"]);
}

fn down_from_up(world: &World) {
    up(world);
    world.wait_rolled_out("many", 4);
    down(world);
}

fn is_resized(pod: &ferrite_json::Value) -> bool {
    pod["spec"]["containers"][0]["resources"]["requests"]["memory"] == "32Mi"
}

fn resize(world: &World) {
    world.wait_rolled_out("many", 4);
    let patch = r#"{"spec":{"containers":[{"name":"c","resources":{"requests":{"memory":"32Mi"}}}]}}"#;
    for pod in world.living_pods("app=many") {
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        world.kubectl(&["patch", "pod", &name, "--subresource=resize", "-p", patch]);
    }
}

#[test]
fn a_cluster_that_is_killed_at_every_step_leaves_nothing_behind() {
    let mut world = World::start();
    world.create(&deployment(0).replace("image:", "resources: {requests: {memory: 16Mi}}\n        image:"));
    let before = InUse::of(&world);
    for moment in MOMENTS {
        (moment.begin)(&world);
        eventually(moment.what, || (moment.reached)(&world, &before).then_some(()));
        world.kill();
        world.up();
        // The work goes on where it was.
        let wanted = world.get(&["deployment", "many"])["spec"]["replicas"].as_i64().unwrap();
        world.wait_rolled_out("many", wanted);
        if moment.what != "a pod that runs" && moment.what != "a resize" {
            scale(&world, 0);
            settled(&world, &before);
        }
    }
}
