//! The cluster itself: its process, detaching, and going away without a trace.

use crate::world::*;
use std::collections::BTreeSet;
use std::path::Path;

/// The parts of the machine that a cluster may change.
#[derive(Debug, PartialEq, Eq)]
pub struct Traces {
    pub mounts: BTreeSet<String>,
    pub cgroups: BTreeSet<String>,
    pub links: BTreeSet<String>,
    pub routes: BTreeSet<String>,
    pub processes: BTreeSet<String>,
    pub files: BTreeSet<String>,
}

impl Traces {
    /// Everything of this test's own: others run beside it, so only traces that mention our directory, our
    /// cluster or our namespace count.
    pub fn take(world: &World) -> Self {
        let root = world.path("");
        let ours = root.to_str().unwrap().trim_end_matches('/').to_owned();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let net = world.netns.run(|| {
            let links = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            let routes = std::fs::read_to_string("/proc/thread-self/net/route").unwrap();
            (links, routes)
        });
        Self {
            mounts: mounts
                .lines()
                .filter(|l| l.contains(&ours))
                .map(|l| l.split(' ').nth(4).unwrap().to_owned())
                .collect(),
            cgroups: cgroups(),
            links: net
                .0
                .lines()
                .filter_map(|l| l.split_once(':'))
                .map(|(name, _)| name.trim().to_owned())
                .collect(),
            routes: net.1.lines().skip(1).map(str::to_owned).collect(),
            processes: processes()
                .into_iter()
                .filter_map(|pid| {
                    let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
                    let command = String::from_utf8_lossy(&command).replace('\0', " ");
                    command.contains(&ours).then_some(command)
                })
                .collect(),
            files: std::fs::read_dir(&root)
                .unwrap()
                .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
                .filter(|n| !matches!(n.as_str(), "up.log" | ".kube" | "manifest.yaml"))
                .collect(),
        }
    }
}

/// Control groups of clusters in other directories than the default one, by name.
fn cgroups() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for hierarchy in std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        let mut places = vec![hierarchy.path()];
        places.push(Path::new("/sys/fs/cgroup").to_owned());
        for place in places {
            for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
                found.insert(entry.path().to_string_lossy().into_owned());
            }
        }
    }
    found.retain(|path| path.contains("/ferrite-"));
    found
}

#[test]
fn down_leaves_no_trace() {
    let mut world = World::prepare(&[]);
    let before = Traces::take(&world);
    world.up();
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
    ]);
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: volumes}}
spec:
  containers:
  - name: c
    image: {TOOLS}
    args: [sleep]
    volumeMounts: [{{name: memory, mountPath: /m}}]
  volumes: [{{name: memory, emptyDir: {{medium: Memory}}}}]
"#
    ));
    world.wait_rolled_out("web", 2);
    world.wait_ready("volumes");
    let cluster = format!("/{}", cluster_name(&world));
    let during = Traces::take(&world);
    assert!(during.mounts.len() > before.mounts.len());
    assert!(during.links.len() > before.links.len());
    assert!(during.cgroups.iter().any(|c| c.ends_with(&cluster)), "{during:?}");

    let output = world.down(&[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut after = Traces::take(&world);
    // Others come and go; ours must be gone.
    assert!(!after.cgroups.iter().any(|c| c.ends_with(&cluster)), "{:?}", after.cgroups);
    after.cgroups.clone_from(&before.cgroups);
    assert_eq!(after, before);
}

/// The name the cluster's cgroup has: the only one of its links says it.
pub fn cluster_name(world: &World) -> String {
    let kubeconfig = std::fs::read_to_string(world.path("kubeconfig")).unwrap();
    let line = kubeconfig.lines().find(|l| l.starts_with("current-context")).unwrap();
    line.rsplit(' ').next().unwrap().trim_matches('"').to_owned()
}

#[test]
fn detach_status_second_up_and_keeping_data() {
    let mut world = World::prepare(&[]);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let status = world.ferrite(&["status"]).output().unwrap();
    assert_eq!(status.status.code(), Some(3));
    assert!(text(&status.stdout).contains("ferrite up"));

    let up = world.ferrite(&["up", "--detach", "--node-name", "node"]).output().unwrap();
    assert!(up.status.success(), "{}", text(&up.stderr));
    assert!(text(&up.stdout).contains("kubectl get nodes"));
    let status = world.ferrite(&["status"]).output().unwrap();
    assert!(status.status.success() && text(&status.stdout).contains("running"), "{}", text(&status.stdout));

    let second = world.ferrite(&["up"]).output().unwrap();
    assert!(!second.status.success());
    assert!(text(&second.stderr).contains("is already run by process"), "{}", text(&second.stderr));

    world.kubectl(&["create", "configmap", "kept", "--from-literal=a=b"]);
    let down = world.down(&["--keep-data"]);
    assert!(down.status.success(), "{}", text(&down.stderr));
    world.up();
    assert_eq!(world.get(&["configmap", "kept"])["data"]["a"], "b");
}

#[test]
fn the_users_kubeconfig_is_kept() {
    let mut world = World::prepare(&[]);
    let own = "apiVersion: v1\nclusters:\n- cluster:\n    server: https://elsewhere.invalid\n  name: work\ncontexts:\n- context:\n    cluster: work\n    user: me\n  name: work\ncurrent-context: work\nkind: Config\nusers:\n- name: me\n  user:\n    token: secret\n";
    let path = world.write("kubeconfig", own);
    world.up();
    assert_eq!(world.kubectl(&["config", "current-context"]).trim(), cluster_name(&world));
    assert!(world.kubectl(&["get", "nodes"]).contains("Ready"));
    let contexts = world.kubectl(&["config", "get-contexts", "-o", "name"]);
    assert!(contexts.contains("work"), "{contexts}");
    world.down(&[]);
    let after = std::fs::read_to_string(path).unwrap();
    assert!(after.contains("current-context: work") && after.contains("token: secret"), "{after}");
    assert!(!after.contains("ferrite"), "{after}");
}

#[test]
fn nobody_anonymous_gets_in() {
    let world = World::start();
    let output = world
        .kubectl_command(&[
            "--kubeconfig=/dev/null",
            "--server=https://127.0.0.1:6443",
            "--insecure-skip-tls-verify",
            "--username=x",
            "--password=y",
            "get",
            "pods",
        ])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    // As upstream: a password is no credential that the server knows, so that nobody in particular asks.
    assert!(complaint.contains("Forbidden"), "{complaint}");
}
