//! Trees that are hard to remove.

use super::*;
use crate::world::{container_pid, eventually};

#[test]
fn fifteen_thousand_directories_deep() {
    let mut world = world_with_shell();
    let manifest = |name: &str| {
        format!(
            r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {{name: c, image: {SHELL}, volumeMounts: [{{name: v, mountPath: /v}}]}}
  volumes: [{{name: v, emptyDir: {{}}}}]
"#
        )
    };
    world.create(&manifest("deep"));
    let pod = world.wait_ready("deep");
    // In the volume, and in the container's own layer.
    nest(open(&pod_dir(&world, &pod).join("volumes/kubernetes.io~empty-dir/v")), 15_000);
    nest(inside(container_pid(&pod), "tmp"), 3_000);
    world.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/stats/summary"]);

    // The next start finds the tree, too.
    world.kill();
    world.start_again();
    world.kubectl(&["delete", "pod", "deep"]);
    eventually("the pod's directory is gone", || (!pod_dir(&world, &pod).exists()).then_some(()));
    let sandboxes = world.data().join("runtime/sandboxes");
    eventually("its layers are gone", || (std::fs::read_dir(&sandboxes).unwrap().count() == 0).then_some(()));
    world.create(&manifest("next"));
    world.wait_ready("next");
    assert!(!world.log().contains("Too many open files"), "{}", world.log());
}

/// The kubelet starts although it cannot remove a pod's files, and tries again.
#[test]
fn a_clean_up_that_fails_holds_nothing_up() {
    let mut world = world_with_shell();
    world.kill();
    // The directory of a pod that is gone, with a file that even root cannot remove.
    let left = world.data().join("kubelet/pods/00000000-0000-0000-0000-000000000000");
    std::fs::create_dir_all(left.join("volumes")).unwrap();
    let stubborn = Immutable::make(left.join("volumes/stubborn"));
    world.start_again();
    world.kubectl(&["run", "p", "--image", SHELL]);
    world.wait_ready("p");
    eventually("the failure is told", || {
        world.log().contains("could not remove the directory").then_some(())
    });
    assert!(left.exists());
    drop(stubborn);
    eventually("the directory is removed after all", || (!left.exists()).then_some(()));
}

/// A file with the attribute that keeps everybody from removing it.
struct Immutable(PathBuf);

impl Immutable {
    fn make(path: PathBuf) -> Self {
        std::fs::write(&path, "").unwrap();
        assert!(std::process::Command::new("chattr").arg("+i").arg(&path).status().unwrap().success());
        Self(path)
    }
}

impl Drop for Immutable {
    fn drop(&mut self) {
        let _ = std::process::Command::new("chattr").arg("-i").arg(&self.0).status();
    }
}
