//! Bad input: a clear message each time, and nothing lost.

use crate::world::*;
use std::os::unix::process::CommandExt;
use std::process::Command;

#[test]
fn objects_that_are_wrong_are_refused_with_a_reason() {
    let world = World::start();
    let rows: &[(&str, &str)] = &[
        ("apiVersion: v1\nkind: Nonsense\nmetadata: {name: a}\n", "no matches for kind \"Nonsense\""),
        ("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a\n", "error"),
        ("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\nspec: {replicas: many}\n", "replicas"),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: Not_A_Label}\nspec: {containers: [{name: c, image: i}]}\n",
            "a lowercase RFC 1123 subdomain must consist of",
        ),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: []}\n", "spec.containers"),
        (
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\nunknownField: 1\n",
            "unknown field \"unknownField\"",
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\nspec:\n  selector: {matchLabels: {a: b}}\n  template:\n    metadata: {labels: {a: c}}\n    spec: {containers: [{name: c, image: i}]}\n",
            "`selector` does not match template `labels`",
        ),
    ];
    for (manifest, expected) in rows {
        let path = world.write("bad.yaml", manifest);
        let complaint = world.kubectl_fails(&["create", "-f", path.to_str().unwrap()]);
        assert!(complaint.contains(expected), "{expected}: {complaint}");
    }
    let big = format!(
        "{{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{{\"name\":\"big\"}},\"data\":{{\"a\":\"{}\"}}}}",
        "x".repeat(4 << 20)
    );
    let path = world.write("big.json", &big);
    let complaint = world.kubectl_fails(&["create", "--validate=false", "-f", path.to_str().unwrap()]);
    assert!(complaint.contains("Request entity too large: limit is 3145728"), "{complaint}");
    assert!(
        world.get(&["configmaps"])["items"]
            .as_array()
            .unwrap()
            .iter()
            .all(|c| c["metadata"]["name"] == "kube-root-ca.crt")
    );
    // After all that the server is well.
    assert_eq!(world.kubectl(&["get", "--raw", "/readyz"]), "ok");
}

#[test]
fn a_command_that_is_not_in_the_image_is_named() {
    let world = World::start();
    world.create(&format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: wrong}}
spec:
  restartPolicy: Never
  containers: [{{name: c, image: {TOOLS}, command: [no-such-program]}}]
"#
    ));
    let pod = world.watch(&["pod", "wrong"], |p| {
        let state = &container_status(p)["state"];
        state["terminated"].is_object() || state["waiting"]["reason"] == "RunContainerError"
    });
    let text = ferrite_json::to_string(container_status(&pod)).unwrap();
    assert!(
        text.contains("no-such-program") && text.contains("executable file not found in $PATH"),
        "{text}"
    );
}

#[test]
fn a_machine_that_cannot_run_a_cluster_says_why() {
    let world = World::prepare(&[]);
    let complaint = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let mut unprivileged = world.ferrite(&["up"]);
    // The binary may lie where only root can go; the test needs only its output.
    let copy = world.path("ferrite");
    std::fs::copy(ferrite(), &copy).unwrap();
    std::fs::set_permissions(world.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = Command::new(&copy);
    command.args(unprivileged.get_args()).uid(65534).gid(65534);
    drop(std::mem::replace(&mut unprivileged, command));
    let said = complaint(&mut unprivileged);
    assert!(said.contains("sudo ferrite up"), "{said}");

    let mut no_cgroups = world.ferrite(&["up"]);
    // SAFETY: unshare and mount are plain system calls and touch nothing of the parent.
    unsafe {
        no_cgroups.pre_exec(|| {
            use nix::mount::{MsFlags, mount};
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
            mount(Some("tmpfs"), "/sys/fs/cgroup", Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
            Ok(())
        });
    }
    let said = complaint(&mut no_cgroups);
    assert!(said.contains("no control groups are mounted"), "{said}");

    let netns = world.netns.clone();
    let taken = netns.run(|| std::net::TcpListener::bind("0.0.0.0:6443").unwrap());
    let said = complaint(&mut world.ferrite(&["up"]));
    assert!(said.contains("port 6443 is in use") && said.contains("--port"), "{said}");
    drop(taken);
}
