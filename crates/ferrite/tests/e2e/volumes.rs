//! Volumes that need neither claim nor driver: images, files of variables, sub-paths by expression.

use crate::archive;
use crate::world::*;

const SHELL: &str = "example.com/shell:v1";

fn with_shell() -> World {
    let world = World::start();
    let archive = world.path("shell.tar");
    archive::image(&archive, SHELL, "a page", &["/bin/busybox", "sleep", "100000"]);
    world.import(&archive);
    world
}

#[test]
fn images_and_files_of_variables_are_volumes() {
    let world = with_shell();
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: p}}
spec:
  terminationGracePeriodSeconds: 0
  initContainers:
  - name: writer
    image: {SHELL}
    command: [/bin/busybox, sh, -c, "echo \"COLOUR='red' # as the shell\" > /env/file; echo \"DIR='deep'\" >> /env/file"]
    volumeMounts: [{{name: env, mountPath: /env}}]
  containers:
  - name: c
    image: {SHELL}
    env:
    - {{name: COLOUR, valueFrom: {{fileKeyRef: {{volumeName: env, path: file, key: COLOUR}}}}}}
    - {{name: DIR, valueFrom: {{fileKeyRef: {{volumeName: env, path: file, key: DIR}}}}}}
    - {{name: NONE, valueFrom: {{fileKeyRef: {{volumeName: env, path: file, key: NONE, optional: true}}}}}}
    volumeMounts:
    - {{name: image, mountPath: /whole}}
    - {{name: image, mountPath: /part, subPath: www}}
    - {{name: env, mountPath: /by-variable, subPathExpr: $(DIR)}}
  volumes:
  - {{name: env, emptyDir: {{}}}}
  - {{name: image, image: {{reference: "{SHELL}", pullPolicy: IfNotPresent}}}}
"#
    ));
    world.wait_ready("p");
    let sh = |script: &str| world.kubectl(&["exec", "p", "--", "/bin/busybox", "sh", "-c", script]);
    assert_eq!(sh("echo $COLOUR ${NONE-unset}"), "red unset\n");
    assert_eq!(
        sh("cat /part/index.html; /bin/busybox test -x /whole/bin/busybox && echo there"),
        "a pagethere\n"
    );
    assert!(!world.try_kubectl(&["exec", "p", "--", "/bin/busybox", "touch", "/whole/x"]).status.success());
    sh("echo x > /by-variable/file");
    let uid = world.get(&["pod", "p"])["metadata"]["uid"].as_str().unwrap().to_owned();
    let below = format!("kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/env/deep/file");
    assert_eq!(std::fs::read_to_string(world.data().join(below)).unwrap(), "x\n");
    world.kubectl(&["delete", "pod", "p"]);
}

#[test]
fn what_is_missing_is_said() {
    let world = with_shell();
    let pod = |name: &str, container: &str, volume: &str| {
        world.create(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: 0\n  \
             containers: [{{name: c, image: \"{SHELL}\", {container}}}]\n  volumes: [{{name: v, {volume}}}]\n"
        ));
    };
    pod(
        "image",
        "volumeMounts: [{name: v, mountPath: /v}]",
        "image: {reference: \"example.com/none:v1\", pullPolicy: Never}",
    );
    pod(
        "variable",
        "env: [{name: A, value: \"\"}], volumeMounts: [{name: v, mountPath: /v, subPathExpr: $(A)/$(B)}]",
        "emptyDir: {}",
    );
    pod(
        "file",
        "env: [{name: A, valueFrom: {fileKeyRef: {volumeName: v, path: none, key: A}}}]",
        "emptyDir: {}",
    );
    for (name, reason, message) in [
        ("image", "ErrImageNeverPull", "is not present with pull policy of Never"),
        ("variable", "CreateContainerConfigError", "missing value for A, B"),
        ("file", "CreateContainerConfigError", "couldn't parse env file"),
    ] {
        let pod = world.watch(&["pod", name], |pod| {
            pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == reason
        });
        let said = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"].to_string();
        assert!(said.contains(message), "{name}: {said}");
    }
}
