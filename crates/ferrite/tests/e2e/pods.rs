//! Pods: from `kubectl run` to a process and back.

use crate::archive::web_image;
use crate::resize::memory_limit;
use crate::world::*;
use ferrite_json::Value;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

#[test]
fn run_logs_exec_delete() {
    let world = World::start();
    world.kubectl(&["run", "web", "--image", TOOLS, "--", "http", "--text=hello"]);
    let pod = world.wait_ready("web");
    let pid = container_pid(&pod);
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    assert_eq!(command, b"/ferrite\0tools\0http\0--text=hello\0");
    assert!(world.page(&pod).starts_with("hello web"));

    assert_eq!(world.kubectl(&["logs", "web"]), "serving on port 8080\n");
    let environment = world.kubectl(&["exec", "web", "--", "/ferrite", "tools", "env"]);
    assert!(environment.contains("HOSTNAME=web"), "{environment}");
    assert!(environment.contains("KUBERNETES_SERVICE_HOST=10.96.0.1"), "{environment}");
    let failed = world.try_kubectl(&["exec", "web", "--", "/ferrite", "tools", "exit", "7"]);
    assert_eq!(failed.status.code(), Some(7));

    let mut fed = world.kubectl_command(&["exec", "-i", "web", "--", "/ferrite", "tools", "cat"]);
    let mut child = fed.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"through and back\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "through and back\n");

    let table = world.kubectl(&["get", "pods", "-o", "wide"]);
    let row = table.lines().nth(1).unwrap();
    assert!(row.contains("1/1") && row.contains("Running") && row.contains("node"), "{table}");
    world.kubectl(&["delete", "pod", "web"]);
    assert!(world.kubectl_fails(&["get", "pod", "web"]).contains("pods \"web\" not found"));
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn a_log_can_be_followed() {
    let world = World::start();
    world.kubectl(&["run", "tick", "--image", TOOLS, "--restart=Never", "--", "tick", "20", "--count=40"]);
    world.watch(&["pod", "tick"], |p| matches!(p["status"]["phase"].as_str(), Some("Running" | "Succeeded")));
    let mut follow = world.kubectl_command(&["logs", "-f", "tick"]);
    let mut child = follow.stdout(Stdio::piped()).spawn().unwrap();
    let lines: Vec<String> =
        BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok).collect();
    assert!(child.wait().unwrap().success());
    let expected: Vec<String> = (0..40).map(|n| format!("tick {n}")).collect();
    assert_eq!(lines, expected);
    assert_eq!(world.kubectl(&["logs", "--tail=1", "tick"]), "tick 39\n");
}

#[test]
fn pods_reach_each_other_and_addresses_are_used_again() {
    // Room for a gateway and five pods.
    let world = World::start_with(&["--pod-cidr", "10.244.0.0/29"]);
    world.kubectl(&["run", "server", "--image", TOOLS, "--", "http", "--text=from-server"]);
    let server = world.wait_ready("server");
    let url = format!("http://{}:8080/", pod_ip(&server));
    for number in 0..8 {
        let name = format!("client-{number}");
        world.kubectl(&["run", &name, "--image", TOOLS, "--restart=Never", "--", "get", &url]);
        world.watch(&["pod", &name], |p| p["status"]["phase"] == "Succeeded");
        assert!(world.kubectl(&["logs", &name]).starts_with("from-server"));
        world.kubectl(&["delete", "pod", &name]);
    }
    // Nobody owns this address: the packet dies on the node instead of leaving it.
    let nobody = world.netns.http_get("10.244.0.6:8080".parse().unwrap(), "/");
    assert!(nobody.is_err());
    let no_service = world.netns.http_get("10.97.0.9:80".parse().unwrap(), "/");
    assert!(no_service.is_err(), "an address that no Service has is not answered");
}

#[test]
fn limits_hold_and_an_oom_kill_is_told() {
    let world = World::start();
    let manifest = |name: &str, arguments: &str| {
        format!(
            r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  restartPolicy: Never
  containers:
  - name: c
    image: {TOOLS}
    args: {arguments}
    resources: {{limits: {{memory: 64Mi, cpu: 500m}}}}
"#
        )
    };
    world.create(&manifest("calm", "[sleep]"));
    let calm = world.wait_ready("calm");
    assert_eq!(calm["status"]["qosClass"], "Guaranteed");
    let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", container_pid(&calm))).unwrap();
    assert_eq!(memory_limit(&groups), "67108864");

    world.create(&manifest("hungry", "[eat, '300']"));
    let hungry = world.watch(&["pod", "hungry"], |p| p["status"]["phase"] == "Failed");
    let ended = &container_status(&hungry)["state"]["terminated"];
    assert_eq!((&ended["reason"], &ended["exitCode"]), (&Value::from("OOMKilled"), &Value::from(137)));
}

#[test]
fn a_crashing_container_backs_off() {
    let world = World::start();
    world.kubectl(&["run", "crash", "--image", TOOLS, "--", "exit", "3"]);
    let pod = world.watch(&["pod", "crash"], |p| {
        container_status(p)["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    });
    let status = container_status(&pod);
    assert_eq!(status["lastState"]["terminated"]["exitCode"], 3);
    assert_eq!(status["lastState"]["terminated"]["reason"], "Error");
    let message = status["state"]["waiting"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("back-off 10s restarting failed container=crash pod=crash_default("),
        "{message}"
    );
    let table = world.kubectl(&["get", "pod", "crash"]);
    assert!(table.contains("CrashLoopBackOff") || table.contains("Error"), "{table}");
}

#[test]
fn a_missing_image_is_told_and_retried() {
    let world = World::start();
    // Nothing listens on port 9 of the loopback interface.
    world.kubectl(&["run", "lost", "--image", "127.0.0.1:9/no/such:1"]);
    world
        .watch(&["pod", "lost"], |p| container_status(p)["state"]["waiting"]["reason"] == "ImagePullBackOff");
    // The first failure is over before a slow watcher sees it; the events report both.
    let events = world.kubectl(&["get", "events", "--field-selector", "involvedObject.name=lost"]);
    for expected in
        ["Failed to pull image", "Error: ErrImagePull", "Back-off pulling image", "Error: ImagePullBackOff"]
    {
        assert!(events.contains(expected), "{expected}: {events}");
    }
}

#[test]
fn images_of_the_user_run() {
    let world = World::start();
    let archive = world.path("web.tar");
    web_image(&archive, "example.com/web:v1", "page one\n");
    world.import(&archive);
    let listed = String::from_utf8(world.ferrite(&["image", "list"]).output().unwrap().stdout).unwrap();
    assert!(listed.contains("example.com/web:v1") && listed.contains("ferrite.local/tools"), "{listed}");
    world.create(
        r#"
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  containers:
  - name: web
    image: example.com/web:v1
    securityContext: {readOnlyRootFilesystem: true, runAsUser: 1000}
    readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
"#,
    );
    let pod = world.wait_ready("web");
    assert_eq!(world.page(&pod), "page one\n");
    assert!(world.kubectl(&["exec", "web", "--", "id"]).contains("uid=1000"));
    let refused = world.try_kubectl(&["exec", "web", "--", "touch", "/x"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("Read-only file system"));
    let in_use = world.ferrite(&["image", "rm", "example.com/web:v1"]).output().unwrap();
    assert!(!in_use.status.success());
    world.kubectl(&["delete", "pod", "web"]);
    let removed = world.ferrite(&["image", "rm", "example.com/web:v1"]).output().unwrap();
    assert!(removed.status.success(), "{}", String::from_utf8_lossy(&removed.stderr));
}
