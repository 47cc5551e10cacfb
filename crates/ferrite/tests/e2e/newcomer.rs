//! The program as a new user meets it, after reading the first page of the manual.

use crate::docker::Engine;
use crate::world::*;

fn exit_code(pod: &ferrite_json::Value) -> Option<i64> {
    container_status(pod)["state"]["terminated"]["exitCode"].as_i64()
}

#[test]
fn the_built_in_image_does_what_its_programs_are_called() {
    let world = World::start();
    for (name, arguments, code) in [
        ("yes", &["--", "true"][..], 0),
        ("no", &["--", "false"], 1),
        ("command", &["--command", "--", "echo", "hello"], 0),
    ] {
        let run = ["run", name, "--image", TOOLS, "--restart=Never"];
        world.kubectl(&[&run[..], arguments].concat());
        let pod = world.watch(&["pod", name], |pod| exit_code(pod).is_some());
        assert_eq!(exit_code(&pod), Some(code), "{name}");
    }
    assert_eq!(world.kubectl(&["logs", "command"]), "hello\n");
    world.kubectl(&["run", "t", "--image", TOOLS, "--", "sleep", "60"]);
    world.wait_ready("t");
    assert!(world.kubectl(&["exec", "t", "--", "cat", "/etc/passwd"]).starts_with("root:"));
    world.kubectl(&["create", "deployment", "web", "--image", TOOLS, "--", "http"]);
    world.wait_rolled_out("web", 1);
    let pod = world.pods("app=web").remove(0);
    assert!(world.page(&pod).starts_with("ferrite web-"));
}

#[test]
fn the_built_in_image_is_there_without_a_cluster() {
    let engine = Engine::new();
    assert_eq!(engine.ok(&["run", "--rm", TOOLS, "echo", "hi"]), "hi\n");
    assert_eq!(engine.ok(&["run", "--rm", "--entrypoint", "echo", TOOLS, "hi"]), "hi\n");
    assert_eq!(engine.fails(&["run", "--rm", TOOLS, "false"]).0, 1);
}

#[test]
fn a_cluster_of_ones_own_listens_to_nobody_else() {
    let world = World::start();
    let table = world.netns.run(|| std::fs::read_to_string("/proc/thread-self/net/tcp").unwrap());
    // Address and port in hexadecimal, then the peer's, then the state: 0A listens.
    let listening: Vec<&str> = table
        .lines()
        .filter(|line| line.split_whitespace().nth(3) == Some("0A"))
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect();
    assert!(
        !listening.is_empty() && listening.iter().all(|local| !local.starts_with("00000000:")),
        "{listening:?}"
    );
    world.kubectl(&["run", "t", "--image", TOOLS, "--", "tick", "10"]);
    world.wait_ready("t");
    eventually("logs are read through the kubelet", || {
        world.kubectl(&["logs", "t"]).contains("tick 1").then_some(())
    });
}

#[test]
fn the_data_directory_is_taken_wherever_it_is_named() {
    let world = World::start();
    let data = world.data();
    let data = data.to_str().unwrap();
    for arguments in [["image", "--data-dir", data, "list"], ["image", "list", "--data-dir", data]] {
        let output = world.command(ferrite().to_str().unwrap(), &arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains("ferrite.local/tools:latest"), "{arguments:?}: {text}");
    }
}
