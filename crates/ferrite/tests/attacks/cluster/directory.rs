//! `down` and `up` in directories that are not, or not only, a cluster's.

use crate::server::*;
use crate::world::*;
use std::fs;
use std::process::Output;

fn complaint(output: &Output) -> String {
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn down_removes_no_directory_of_somebody_else() {
    let world = World::prepare(&[]);
    let home = world.data();
    fs::create_dir_all(home.join("images")).unwrap();
    fs::write(home.join("images/holiday.jpg"), "").unwrap();
    fs::write(home.join("thesis.tex"), "").unwrap();
    let refused = complaint(&world.ferrite(&["down"]).output().unwrap());
    assert!(refused.contains("thesis.tex"), "{refused}");
    let refused = complaint(&world.ferrite(&["up"]).output().unwrap());
    assert!(refused.contains("thesis.tex"), "{refused}");
    assert!(home.join("images/holiday.jpg").exists() && home.join("thesis.tex").exists());
    fs::remove_dir_all(&home).unwrap();
}

#[test]
fn down_is_refused_while_another_process_uses_the_directory() {
    let world = World::prepare(&[]);
    let server = Server::start(&world, &["--port", "0"]);
    let refused = complaint(&world.ferrite(&["down"]).output().unwrap());
    assert!(refused.contains(&format!("in use by process {}", server.0.id())), "{refused}");
    kubectl(&world, &["create", "configmap", "kept"]);
    kubectl(&world, &["get", "configmap", "kept"]);
    server.stop();
    assert!(world.ferrite(&["down"]).output().unwrap().status.success());
    assert!(!world.data().exists());
}

#[test]
fn a_cluster_in_a_directory_with_a_blank_goes_without_a_trace() {
    let world = World::prepare(&[]);
    let data = world.path("my cluster");
    let run = |arguments: &[&str]| {
        let mut command = world.command(ferrite().to_str().unwrap(), arguments);
        command.arg("--data-dir").arg(&data).output().unwrap()
    };
    let up = run(&["up", "--detach", "--node-name", "node"]);
    assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
    let hint = String::from_utf8_lossy(&up.stdout).into_owned();
    assert!(hint.contains(&format!("--data-dir '{}'", data.display())), "{hint}");
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: memory}}
spec:
  containers:
  - name: c
    image: {TOOLS}
    args: [sleep]
    volumeMounts: [{{name: memory, mountPath: /m}}]
  volumes: [{{name: memory, emptyDir: {{medium: Memory}}}}]
"#
    ));
    world.wait_ready("memory");
    let down = run(&["down"]);
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    assert!(!data.exists());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("my\\040cluster"), "{mounts}");
}
