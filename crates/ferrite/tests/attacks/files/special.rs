//! FIFOs and links where the kubelet expects a file.

use super::*;
use crate::world::{container_status, eventually};

/// Ends with a FIFO at its termination message path.
fn with_fifo(name: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  restartPolicy: Never
  securityContext: {{runAsUser: 1000}}
  initContainers:
  - name: make
    image: {SHELL}
    command: [/bin/busybox, mkfifo, /v/pipe]
    volumeMounts: [{{name: v, mountPath: /v}}]
  containers:
  - name: c
    image: {SHELL}
    command: [/bin/busybox, "true"]
    terminationMessagePath: /message
    volumeMounts: [{{name: v, mountPath: /message, subPath: pipe}}]
  volumes: [{{name: v, emptyDir: {{}}}}]
"#
    )
}

#[test]
fn a_fifo_as_termination_log_stops_nobody() {
    let mut world = world_with_shell();
    // One for each worker, and one more.
    for name in ["one", "two", "three"] {
        world.create(&with_fifo(name));
    }
    for name in ["one", "two", "three"] {
        let pod = world.watch(&["pod", name], |p| p["status"]["phase"] == "Succeeded");
        let message = container_status(&pod)["state"]["terminated"]["message"].as_str().unwrap_or_default();
        assert!(message.ends_with("is not a regular file"), "{}", pod["status"]);
    }
    assert!(world.terminate(), "SIGTERM is obeyed");
    world.start_again();
    world.kubectl(&["run", "after", "--image", SHELL]);
    world.wait_ready("after");
    world.kubectl(&["delete", "pod", "one", "two", "three", "--grace-period=0", "--force"]);
    assert!(!world.log().contains("stuck"), "{}", world.log());
}

#[test]
fn termination_messages_are_read_and_limited() {
    let world = world_with_shell();
    let manifest = |name: &str, script: &str, policy: &str| {
        format!(
            r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  restartPolicy: Never
  securityContext: {{runAsUser: 1000}}
  containers:
  - name: c
    image: {SHELL}
    command: [/bin/busybox, sh, -c, '{script}']
    terminationMessagePolicy: {policy}
"#
        )
    };
    let long =
        "i=0; while [ $i -lt 1000 ]; do echo 012345678; i=$((i+1)); done > /dev/termination-log; exit 1";
    for (name, script, policy, length, end) in [
        ("said", "echo -n bye > /dev/termination-log", "File", 3, "bye"),
        ("long", long, "File", 4096, "012345678\n"),
        ("logged", "echo from the log; exit 3", "FallbackToLogsOnError", 13, "from the log\n"),
    ] {
        world.create(&manifest(name, script, policy));
        let ended = |p: &Value| matches!(p["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let pod = world.watch(&["pod", name], ended);
        let message = container_status(&pod)["state"]["terminated"]["message"].as_str().unwrap_or_default();
        assert_eq!((message.len(), message.ends_with(end)), (length, true), "{name}: {message}");
    }
    // The pods' directories are gone, the messages are not.
    eventually("the directories are gone", || {
        (std::fs::read_dir(world.data().join("kubelet/pods")).unwrap().count() == 0).then_some(())
    });
    for (name, end) in [("said", "bye"), ("logged", "from the log\n")] {
        world.kubectl(&["label", "pod", name, "seen=again"]);
        let synced = |p: &Value| p["metadata"]["labels"]["seen"] == "again";
        let pod = world.watch(&["pod", name], synced);
        assert_eq!(container_status(&pod)["state"]["terminated"]["message"], end);
    }
}

/// A container of upstream's conformance tests and the termination message that it must leave.
struct LastWords {
    script: &'static str,
    path: &'static str,
    policy: &'static str,
    user: u32,
    message: &'static str,
}

const LAST_WORDS: [LastWords; 4] = [
    LastWords {
        script: "echo -n DONE; exit 1",
        path: "/dev/termination-log",
        policy: "FallbackToLogsOnError",
        user: 0,
        message: "DONE",
    },
    LastWords {
        script: "echo -n OK > /dev/termination-log; echo DONE",
        path: "/dev/termination-log",
        policy: "FallbackToLogsOnError",
        user: 0,
        message: "OK",
    },
    LastWords {
        script: "echo -n DONE > /dev/termination-custom-log",
        path: "/dev/termination-custom-log",
        policy: "File",
        user: 1000,
        message: "DONE",
    },
    LastWords {
        script: "echo -n DONE",
        path: "/dev/termination-log",
        policy: "FallbackToLogsOnError",
        user: 0,
        message: "",
    },
];

#[test]
fn no_termination_message_is_lost_when_many_pods_end_at_once() {
    let world = world_with_shell();
    let pods: Vec<(String, &LastWords)> =
        LAST_WORDS.iter().cycle().take(52).enumerate().map(|(i, words)| (format!("p{i}"), words)).collect();
    let manifests = pods.iter().map(|(name, words)| {
        let LastWords { script, path, policy, user, .. } = words;
        format!(
            r#"---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, labels: {{app: words}}}}
spec:
  restartPolicy: Never
  containers:
  - name: c
    image: {SHELL}
    command: [/bin/busybox, sh, -c, '{script}']
    terminationMessagePath: {path}
    terminationMessagePolicy: {policy}
    securityContext: {{runAsUser: {user}}}
"#
        )
    });
    world.create(&manifests.collect::<String>());
    for (name, words) in &pods {
        let ended = |p: &Value| matches!(p["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let pod = world.watch(&["pod", name], ended);
        let message = &container_status(&pod)["state"]["terminated"]["message"];
        assert_eq!(message.as_str().unwrap_or_default(), words.message, "{name}: {}", pod["status"]);
    }
    // Nothing that comes later takes a message away.
    world.kubectl(&["label", "pod", "-l", "app=words", "seen=again"]);
    for (name, words) in &pods {
        let pod = world.watch(&["pod", name], |p| p["metadata"]["labels"]["seen"] == "again");
        let message = &container_status(&pod)["state"]["terminated"]["message"];
        assert_eq!(message.as_str().unwrap_or_default(), words.message, "{name}: {}", pod["status"]);
    }
}

#[test]
fn a_log_that_is_no_file_is_not_read() {
    let world = world_with_shell();
    world.kubectl(&[
        "run",
        "p",
        "--image",
        SHELL,
        "--",
        "/bin/busybox",
        "sh",
        "-c",
        "echo hello; sleep 100000",
    ]);
    let pod = world.wait_ready("p");
    assert_eq!(world.kubectl(&["logs", "p"]), "hello\n");
    let log = world.data().join(format!("logs/pods/default_p_{}/p/0.log", uid(&pod)));
    for kind in ["pipe", "link"] {
        std::fs::remove_file(&log).unwrap();
        match kind {
            "pipe" => nix::unistd::mkfifo(&log, nix::sys::stat::Mode::S_IRWXU).unwrap(),
            _ => std::os::unix::fs::symlink("/etc/passwd", &log).unwrap(),
        }
        // More than there are threads for blocking calls.
        for _ in 0..20 {
            let said = world.try_kubectl(&["logs", "p", "--request-timeout=20s"]);
            assert!(!String::from_utf8_lossy(&said.stdout).contains("root:"), "{kind}");
        }
    }
    world.kubectl(&["run", "after", "--image", SHELL]);
    world.wait_ready("after");
    world.kubectl(&["delete", "pod", "p", "--grace-period=0", "--force"]);
    let logs = log.parent().unwrap().parent().unwrap().to_owned();
    eventually("the logs are removed", || (!logs.exists()).then_some(()));
    assert!(std::path::Path::new("/etc/passwd").exists());
}

#[test]
fn seccomp_profiles_come_from_the_kubelets_directory() {
    let world = world_with_shell();
    let profile = r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[
        {"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO","errnoRet":95}]}"#;
    let root = world.data().join("kubelet/seccomp");
    std::fs::create_dir_all(root.join("good")).unwrap();
    std::fs::write(root.join("good/profile.json"), profile).unwrap();
    let outside = world.write("outside.json", profile);
    std::os::unix::fs::symlink(&outside, root.join("link.json")).unwrap();
    nix::unistd::mkfifo(&root.join("pipe.json"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let create = |name: &str, profile: &str| {
        world.create(&format!(
            r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  securityContext: {{seccompProfile: {{type: Localhost, localhostProfile: {profile}}}}}
  containers: [{{name: c, image: {SHELL}}}]
"#
        ));
    };
    create("good", "good/profile.json");
    world.wait_ready("good");
    let said = sh(&world, "good", "/bin/busybox mkdir /tmp/x");
    assert!(said.contains("not supported"), "{said}");
    // A file of this name is in the directory the program was started in.
    for (name, profile) in [("cwd", "Cargo.toml"), ("link", "link.json"), ("pipe", "pipe.json")] {
        create(name, profile);
        let waiting = |p: &Value| container_status(p)["state"]["waiting"]["reason"] == "CreateContainerError";
        let pod = world.watch(&["pod", name], waiting);
        let message = container_status(&pod)["state"]["waiting"]["message"].as_str().unwrap();
        assert!(message.contains("cannot load seccomp profile"), "{message}");
    }
}
