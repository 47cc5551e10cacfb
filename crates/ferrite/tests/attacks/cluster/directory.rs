//! `down` and `up` in directories that are not, or not only, a cluster's.

use crate::world::*;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Output, Stdio};

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
    let mut server = world
        .ferrite(&["kube-apiserver", "--port", "0", "--bind-address", "127.0.0.1"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line.starts_with("export KUBECONFIG")));
    let refused = complaint(&world.ferrite(&["down"]).output().unwrap());
    assert!(refused.contains(&format!("in use by process {}", server.id())), "{refused}");
    let kubeconfig = world.data().join("config/admin.kubeconfig");
    let kubeconfig = kubeconfig.to_str().unwrap();
    world.kubectl(&["--kubeconfig", kubeconfig, "create", "configmap", "kept"]);
    world.kubectl(&["--kubeconfig", kubeconfig, "get", "configmap", "kept"]);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(server.id() as i32), nix::sys::signal::Signal::SIGTERM)
        .unwrap();
    assert!(server.wait().unwrap().success());
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
