//! Users of the node.

use super::*;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Runs a program as an ordinary user of the node.
fn as_user(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).uid(1000).gid(1000);
    command.output().unwrap().status.success()
}

#[test]
fn users_of_the_node_reach_no_data() {
    let mut world = World::prepare(&[]);
    // Everything above is open; directories that an earlier version made are repaired.
    let open = |path: &std::path::Path| {
        std::fs::create_dir_all(path).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    open(world.data().parent().unwrap());
    let private = ["images", "images/layers", "kubelet", "runtime", "logs/pods", "network", "run/runtime"];
    for name in private {
        open(&world.data().join(name));
    }
    open(&world.data());
    world.up();
    import_shell(&world);
    world.kubectl(&["create", "secret", "generic", "s", "--from-literal=key=hidden"]);
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  securityContext: {{runAsUser: 1000}}
  containers:
  - {{name: c, image: {SHELL}, volumeMounts: [{{name: s, mountPath: /s}}, {{name: v, mountPath: /v, subPath: x}}]}}
  volumes: [{{name: s, secret: {{secretName: s}}}}, {{name: v, emptyDir: {{}}}}]
"#
    ));
    let pod = world.wait_ready("p");
    // The container's own user has everything.
    assert_eq!(sh(&world, "p", "cat /s/key && echo -n y > /v/f && cat /v/f && id -u"), "hiddeny1000\n");
    for name in private {
        let path = world.data().join(name);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700, "{name}");
        assert!(!as_user("/bin/ls", &[path.to_str().unwrap()]), "{name}");
    }
    let secret = pod_dir(&world, &pod).join("volumes/kubernetes.io~secret/s/key");
    assert!(secret.exists() && !as_user("/bin/cat", &[secret.to_str().unwrap()]));
    // A program of an image, by its full path.
    let layers = std::fs::read_dir(world.data().join("images/layers")).unwrap().flatten();
    let busybox = layers.map(|l| l.path().join("fs/bin/busybox")).find(|p| p.exists()).unwrap();
    std::fs::set_permissions(&busybox, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let mut run = Command::new(&busybox);
    assert!(run.arg("id").uid(1000).gid(1000).output().is_err(), "{}", busybox.display());
}
