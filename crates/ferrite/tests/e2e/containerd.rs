//! Our kubelet with Debian's containerd in the place of our own runtime.

use crate::archive::image;
use crate::world::*;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const IMAGE: &str = "ferrite.test/box:v1";
const PAUSE: &str = "ferrite.test/pause:v1";

/// A containerd on a directory, a socket and a network of its own.
struct Containerd {
    child: Child,
    dir: tempfile::TempDir,
}

impl Containerd {
    fn start(netns: &Netns) -> Self {
        let dir = tempfile::Builder::new().prefix("fc").tempdir().unwrap();
        let root = dir.path().display();
        let config = include_str!("../../../runtime/tests/containerd.toml")
            .replace("ROOT", &root.to_string())
            .replace("PAUSE", PAUSE);
        std::fs::write(dir.path().join("config.toml"), config).unwrap();
        // containerd says that its network is not ready without a configuration; pods here use the node's network.
        std::fs::create_dir(dir.path().join("cni")).unwrap();
        let network = r#"{"cniVersion":"0.4.0","name":"none","plugins":[{"type":"none"}]}"#;
        std::fs::write(dir.path().join("cni/10-none.conflist"), network).unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new("containerd");
        command.arg("--config").arg(dir.path().join("config.toml")).stdout(Stdio::null()).stderr(log);
        let child = netns.enter(&mut command).spawn().expect("containerd can be run (package containerd)");
        let containerd = Self { child, dir };
        eventually("containerd answers", || containerd.ctr(&["version"]).status.success().then_some(()));
        for (name, command) in [(PAUSE, ["/bin/sleep", "100000"]), (IMAGE, ["/bin/sleep", "1000"])] {
            let archive = containerd.dir.path().join("image.tar");
            image(&archive, name, "page", &command);
            let imported = containerd.ctr(&["images", "import", archive.to_str().unwrap()]);
            assert!(imported.status.success(), "{}", String::from_utf8_lossy(&imported.stderr));
        }
        containerd
    }

    fn socket(&self) -> String {
        format!("unix://{}/containerd.sock", self.dir.path().display())
    }

    /// containerd's own client, in the namespace that CRI uses.
    fn ctr(&self, arguments: &[&str]) -> std::process::Output {
        let socket = self.dir.path().join("containerd.sock");
        let mut command = Command::new("ctr");
        command.arg("-a").arg(socket).args(["-n", "k8s.io"]).args(arguments).output().unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- containerd\n{}", self.log());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let directory = self.dir.path().to_str().unwrap().to_owned();
        // Shims outlive containerd by design; those of ours name our socket. Ending one ends its processes
        // only if its pod was removed before, so whatever lives below our directory is ended too.
        for pid in processes() {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let root = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
            let ours = root.lines().next().is_some_and(|line| line.contains(&directory));
            if ours || String::from_utf8_lossy(&line).contains(&directory) {
                let _ = nix::sys::signal::kill(
                    nix::unistd::Pid::from_raw(pid),
                    nix::sys::signal::Signal::SIGKILL,
                );
            }
        }
        unmount_below(Path::new(&directory));
    }
}

fn unmount_below(directory: &Path) {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    for mount in mounts.lines().rev().filter_map(|line| line.split(' ').nth(4)) {
        if Path::new(mount).starts_with(directory) {
            let _ = nix::mount::umount2(mount, nix::mount::MntFlags::MNT_DETACH);
        }
    }
}

#[test]
fn a_pod_in_containerd_has_logs_and_exec() {
    let world = World::prepare(&[]);
    let containerd = Containerd::start(&world.netns);
    // Bound last, dropped first: the cluster takes its pods out of containerd before that ends.
    let mut world = world;
    world.start_in(&["--container-runtime-endpoint", &containerd.socket()]);
    let node = world.get(&["node", "node"]);
    let version = node["status"]["nodeInfo"]["containerRuntimeVersion"].as_str().unwrap();
    assert!(version.starts_with("containerd://"), "{version}");
    let images = world.ferrite(&["image", "list"]).output().unwrap();
    assert!(String::from_utf8_lossy(&images.stderr).contains("ctr -n k8s.io"), "{images:?}");

    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: box}}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 0
  containers:
  - name: c
    image: {IMAGE}
    command: [sh, -c, "echo started as $NAME; exec sleep 1000"]
    env: [{{name: NAME, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}]
    resources: {{limits: {{memory: 64Mi}}}}
"#
    ));
    let pod = world.wait_ready("box");
    assert!(container_status(&pod)["containerID"].as_str().unwrap().starts_with("containerd://"));
    assert_eq!(pod["status"]["podIP"], pod["status"]["hostIP"]);
    assert_eq!(world.kubectl(&["logs", "box"]), "started as box\n");
    assert_eq!(world.kubectl(&["exec", "box", "--", "sh", "-c", "echo from $NAME"]), "from box\n");
    let failed = world.try_kubectl(&["exec", "box", "--", "sh", "-c", "exit 7"]);
    assert_eq!(failed.status.code(), Some(7));
    let mut fed = world.kubectl_command(&["exec", "-i", "box", "--", "cat"]);
    let mut child = fed.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"through and back\n").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"through and back\n");

    // containerd of this age sends no events: the kubelet sees the end of a container all the same.
    world.kubectl(&[
        "run",
        "short",
        "--image",
        IMAGE,
        "--restart=Never",
        "--overrides",
        r#"{"apiVersion":"v1","spec":{"hostNetwork":true}}"#,
        "--command",
        "--",
        "sh",
        "-c",
        "echo done; exit 3",
    ]);
    let short = world.watch(&["pod", "short"], |p| p["status"]["phase"] == "Failed");
    assert_eq!(container_status(&short)["state"]["terminated"]["exitCode"], 3);
    assert_eq!(world.kubectl(&["logs", "-f", "short"]), "done\n");

    // The cluster goes, with a pod that has ended, and comes back without the runtime's address on its
    // command line: the same container goes on.
    world.kill();
    let moved = ["up", "--container-runtime-endpoint", "unix:///run/other.sock"];
    let refused = world.ferrite(&moved).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains(&containerd.socket()), "{said}");
    world.start_again();
    let again = world.wait_ready("box");
    assert_eq!(container_status(&again)["containerID"], container_status(&pod)["containerID"]);
    let down = world.down(&[]);
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    let left = containerd.ctr(&["containers", "list", "-q"]);
    assert_eq!(String::from_utf8_lossy(&left.stdout), "", "down leaves nothing in containerd");
}
