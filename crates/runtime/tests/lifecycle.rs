//! Containers from creation to removal, on the real kernel.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use ferrite_cri::v1::*;
use ferrite_cri::{Code, RuntimeService};
use world::{World, container, limited, shell, traces};

#[tokio::test]
async fn a_container_runs_and_its_end_is_recorded() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let (status, output) = world.run(&sandbox, shell("a", "echo out; echo err >&2; exit 3")).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (3, "Error"));
    assert!(status.started_at >= status.created_at && status.finished_at >= status.started_at);
    assert!(output.contains("out\n") && output.contains("err\n"), "{output}");
    let (status, _) = world.run(&sandbox, container("b", &["true"])).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (0, "Completed"));
    let (status, _) = world.run(&sandbox, shell("c", "kill -9 $$; kill -SEGV $$; exec kill -9 1")).await;
    assert_eq!(status.exit_code, 0, "PID 1 is immune to signals from inside");
}

#[tokio::test]
async fn log_lines_have_time_stream_and_tag() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let script = "echo one; printf 'no newline'; head -c 20000 /dev/zero | tr '\\0' x >&2";
    let id = world.start(&sandbox, shell("a", script)).await;
    world.wait(&id).await;
    let log = world.log(&id).await;
    let lines: Vec<Vec<&str>> = log.lines().map(|line| line.splitn(4, ' ').collect()).collect();
    for line in &lines {
        let time: jiff::Timestamp = line[0].parse().expect("RFC 3339");
        assert!(time.as_second() > 1_600_000_000);
    }
    let stdout: Vec<_> = lines.iter().filter(|l| l[1] == "stdout").map(|l| (l[2], l[3])).collect();
    assert_eq!(stdout, [("F", "one"), ("P", "no newline")]);
    let stderr: Vec<_> = lines.iter().filter(|l| l[1] == "stderr").map(|l| (l[2], l[3].len())).collect();
    assert_eq!(stderr, [("P", 16384), ("P", 20000 - 16384)]);
}

#[tokio::test]
async fn the_log_can_be_rotated() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "echo before; read x < /tmp/go 2>/dev/null; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo after")).await;
    let path = world.status(&id).await.log_path;
    world.exec_out(&id, "true").await;
    std::fs::rename(&path, format!("{path}.1")).unwrap();
    world
        .runtime()
        .reopen_container_log(ReopenContainerLogRequest { container_id: id.clone() })
        .await
        .unwrap();
    world.exec_out(&id, "touch /tmp/go").await;
    world.wait(&id).await;
    assert!(std::fs::read_to_string(format!("{path}.1")).unwrap().contains("before"));
    let new = std::fs::read_to_string(&path).unwrap();
    assert!(new.contains("after") && !new.contains("before"), "{new}");
}

#[tokio::test]
async fn a_command_that_cannot_run_says_why() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    for (name, command, expected) in [
        ("a", vec!["foo"], "exec: \"foo\": executable file not found in $PATH"),
        ("b", vec!["/bin/nope"], "exec: \"/bin/nope\": stat /bin/nope: no such file or directory"),
        ("c", vec!["/bin/not-a-program"], "exec: \"/bin/not-a-program\": permission denied"),
        ("d", vec!["/etc"], "exec: \"/etc\": is a directory"),
    ] {
        let id = world.create(&sandbox, container(name, &command)).await;
        let error = world.try_start(&id).await.unwrap_err();
        assert!(error.message.ends_with(expected), "{error}");
        let status = world.status(&id).await;
        assert_eq!((status.exit_code, status.reason.as_str()), (128, "StartError"));
        assert_eq!(status.state(), ContainerState::ContainerExited);
        assert!(status.message.ends_with(expected));
    }
    let id = world.start(&sandbox, shell("e", "sleep 100")).await;
    let error = world.exec(&id, &["foo"], 5).await.unwrap_err();
    assert!(error.message.ends_with("exec: \"foo\": executable file not found in $PATH"), "{error}");
}

#[tokio::test]
async fn stopping_is_polite_first_and_final_in_the_end() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let polite = shell("a", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done");
    let id = world.start(&sandbox, polite).await;
    wait_for_log(&world, &id, "ready").await;
    world.stop(&id, 20).await;
    assert_eq!(world.status(&id).await.exit_code, 7);

    let deaf = shell("b", "trap '' TERM; echo ready; while :; do sleep 0.05; done");
    let id = world.start(&sandbox, deaf).await;
    wait_for_log(&world, &id, "ready").await;
    world.stop(&id, 1).await;
    let status = world.status(&id).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "Error"));
    world.stop(&id, 1).await;

    let mut config = shell("c", "trap 'exit 9' USR1; echo ready; while :; do sleep 0.05; done");
    config.stop_signal = Signal::Sigusr1.into();
    let id = world.start(&sandbox, config).await;
    wait_for_log(&world, &id, "ready").await;
    world.stop(&id, 20).await;
    assert_eq!(world.status(&id).await.exit_code, 9);
}

async fn wait_for_log(world: &World, id: &str, text: &str) {
    // The shell's own words are the event; exec is a round trip through container and supervisor.
    for _ in 0..500 {
        if world.log(id).await.contains(text) {
            return;
        }
        let _ = world.exec(id, &["true"], 5).await;
    }
    panic!("{text:?} never appeared in the log");
}

#[tokio::test]
async fn limits_are_in_the_control_files_and_memory_is_enforced() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let resources = LinuxContainerResources {
        cpu_shares: 512,
        cpu_quota: 50_000,
        cpu_period: 100_000,
        memory_limit_in_bytes: 32 << 20,
        ..Default::default()
    };
    let id = world.start(&sandbox, limited(shell("a", "sleep 100"), resources.clone())).await;
    let group = format!("{}/pods/pod1/{id}", world.config.cgroup_parent);
    let read = |controller: &str, v1: &str, v2: &str| {
        let old = format!("/sys/fs/cgroup/{controller}{group}/{v1}");
        let text = std::fs::read_to_string(old)
            .or_else(|_| std::fs::read_to_string(format!("/sys/fs/cgroup{group}/{v2}")));
        text.unwrap().trim().to_owned()
    };
    assert_eq!(read("memory", "memory.limit_in_bytes", "memory.max"), (32 << 20).to_string());
    assert!(["512", "20"].contains(&read("cpu", "cpu.shares", "cpu.weight").as_str()));
    assert!(["50000", "50000 100000"].contains(&read("cpu", "cpu.cfs_quota_us", "cpu.max").as_str()));

    let stats =
        world.runtime().container_stats(ContainerStatsRequest { container_id: id.clone() }).await.unwrap();
    let stats = stats.stats.unwrap();
    assert!(stats.cpu.unwrap().usage_core_nano_seconds.unwrap().value > 0);
    assert!(stats.memory.unwrap().working_set_bytes.unwrap().value > 0);

    let larger = LinuxContainerResources { memory_limit_in_bytes: 48 << 20, ..resources.clone() };
    let update = UpdateContainerResourcesRequest {
        container_id: id.clone(),
        linux: Some(larger),
        ..Default::default()
    };
    world.runtime().update_container_resources(update).await.unwrap();
    assert_eq!(read("memory", "memory.limit_in_bytes", "memory.max"), (48 << 20).to_string());

    let hungry = shell("b", "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo survived");
    let (status, output) = world.run(&sandbox, limited(hungry, resources)).await;
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "OOMKilled"), "{output}");
}

#[tokio::test]
async fn exec_sync_gives_output_and_code_and_obeys_its_timeout() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let mut config = shell("a", "sleep 100");
    config.envs.push(KeyValue { key: "COLOUR".into(), value: b"red".to_vec() });
    let id = world.start(&sandbox, config).await;
    let answer = world.exec(&id, &["/bin/sh", "-c", "echo $COLOUR; echo bad >&2; exit 4"], 10).await.unwrap();
    assert_eq!((answer.exit_code, answer.stdout, answer.stderr), (4, b"red\n".to_vec(), b"bad\n".to_vec()));

    // Even the command's background processes go.
    let error = world.exec(&id, &["/bin/sh", "-c", "sleep 77 & sleep 78"], 1).await.unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded);
    let mut left = String::new();
    for _ in 0..200 {
        left = world.exec_out(&id, "ps").await;
        if !left.contains("sleep 7") {
            break;
        }
    }
    assert!(!left.contains("sleep 7"), "{left}");
    world.stop(&id, 0).await;
    assert_eq!(world.exec(&id, &["true"], 1).await.unwrap_err().code, Code::FailedPrecondition);
}

#[tokio::test]
async fn containers_outlive_the_runtime_and_are_adopted() {
    let mut world = World::new().await;
    let sandbox = world.sandbox().await;
    let runs = world.start(&sandbox, shell("a", "sleep 1000")).await;
    let script = "while [ ! -e /shared/go ]; do sleep 0.02; done; echo late; exit 5";
    let mut config = shell("b", script);
    let shared = world.directory.path().join("shared");
    config.mounts.push(Mount {
        container_path: "/shared".into(),
        host_path: shared.display().to_string(),
        ..Default::default()
    });
    let ends = world.start(&sandbox, config).await;
    let created = world.create(&sandbox, shell("c", "echo hello")).await;
    let (pid, ending) = (world.pid(&runs).await, world.pid(&ends).await);
    world.close().await;

    // It ends while nobody is there; the record appears by the supervisor's hand.
    std::fs::write(shared.join("go"), "").unwrap();
    gone(ending).await;
    world.reopen().await;

    assert_eq!(world.pid(&runs).await, pid);
    assert_eq!(world.status(&runs).await.state(), ContainerState::ContainerRunning);
    let status = world.wait(&ends).await;
    assert_eq!(status.exit_code, 5);
    assert_eq!(world.output(&ends).await, "late\n");
    let record = world.config.root.join("sandboxes").join(&sandbox).join("c").join(&ends).join("exit.json");
    assert!(record.exists(), "the supervisor has put it on record");
    assert_eq!(world.status(&created).await.state(), ContainerState::ContainerCreated);
    world.try_start(&created).await.unwrap();
    assert_eq!(world.wait(&created).await.exit_code, 0);
    assert_eq!(world.exec_out(&runs, "echo still here").await, "still here\n");
    let list = world.runtime().list_pod_sandbox(ListPodSandboxRequest::default()).await.unwrap().items;
    assert_eq!(list[0].state(), PodSandboxState::SandboxReady);
}

/// Waits until a process has ended.
async fn gone(pid: i32) {
    let ended = tokio::task::spawn_blocking(move || {
        // SAFETY: no pointers; a descriptor or an error comes back.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as i32;
        if fd < 0 {
            return true;
        }
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd; the descriptor is ours to close.
        unsafe {
            let ready = libc::poll(&raw mut poll, 1, 30_000);
            libc::close(fd);
            ready == 1
        }
    });
    assert!(ended.await.unwrap(), "process {pid} does not end");
}

#[tokio::test]
async fn a_dead_supervisor_takes_its_pod_along() {
    let mut world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world.start(&sandbox, shell("a", "sleep 1000")).await;
    let pid = world.pid(&id).await;
    let identity = world.config.run.join("sandboxes").join(&sandbox).join("supervisor");
    let supervisor: i32 =
        std::fs::read_to_string(identity).unwrap().split(' ').next().unwrap().parse().unwrap();
    world.close().await;
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(supervisor), nix::sys::signal::SIGKILL).unwrap();
    world.reopen().await;
    let status = world.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 255));
    assert!(
        !std::path::Path::new(&format!("/proc/{pid}/ns")).join("mnt").exists(),
        "the container was killed"
    );
    let list = world.runtime().list_pod_sandbox(ListPodSandboxRequest::default()).await.unwrap().items;
    assert_eq!(list[0].state(), PodSandboxState::SandboxNotready);
    let request = RemovePodSandboxRequest { pod_sandbox_id: sandbox.clone() };
    world.runtime().remove_pod_sandbox(request.clone()).await.unwrap();
    world.runtime().remove_pod_sandbox(request).await.unwrap();
}

#[tokio::test]
async fn events_arrive_in_order() {
    use futures_util::StreamExt;
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let events = world.runtime().get_container_events(GetEventsRequest {}).await.unwrap();
    let (_, _) = world.run(&sandbox, container("a", &["true"])).await;
    let id = world.runtime().list_containers(ListContainersRequest::default()).await.unwrap().containers[0]
        .id
        .clone();
    world.runtime().remove_container(RemoveContainerRequest { container_id: id.clone() }).await.unwrap();
    let seen: Vec<_> = tokio::time::timeout(world::LIMIT, events.take(4).collect::<Vec<_>>()).await.unwrap();
    let kinds: Vec<_> = seen.iter().map(ContainerEventResponse::container_event_type).collect();
    assert_eq!(
        kinds,
        [
            ContainerEventType::ContainerCreatedEvent,
            ContainerEventType::ContainerStartedEvent,
            ContainerEventType::ContainerStoppedEvent,
            ContainerEventType::ContainerDeletedEvent
        ]
    );
    assert!(seen.iter().all(|event| event.container_id == id));
    assert_eq!(seen[2].containers_statuses[0].exit_code, 0);
    assert_eq!(seen[2].pod_sandbox_status.as_ref().unwrap().id, sandbox);
}

#[tokio::test]
async fn nothing_is_left_behind() {
    let mut world = World::new().await;
    let sandbox = world.sandbox().await;
    world.start(&sandbox, shell("a", "sleep 1000 & sleep 1000")).await;
    world.start(&sandbox, shell("b", "exit 1")).await;
    assert!(!traces(&world.config).is_empty());
    // Orderly: one sandbox stopped and removed.
    world
        .runtime()
        .stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() })
        .await
        .unwrap();
    world
        .runtime()
        .stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() })
        .await
        .unwrap();
    let left: Vec<_> = traces(&world.config)
        .into_iter()
        .filter(|t| !t.starts_with("files") && !t.starts_with("group"))
        .collect();
    assert_eq!(left, Vec::<String>::new());
    world.runtime().remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await.unwrap();

    // As after a crash: the runtime is gone, the pods are not.
    let mut config = world.sandbox_config();
    config.metadata.as_mut().unwrap().attempt = 1;
    let sandbox = world.run_sandbox(config).await;
    world.start(&sandbox, shell("c", "sleep 1000")).await;
    world.close().await;
    ferrite_runtime::destroy(world.config.clone()).await.unwrap();
    assert_eq!(traces(&world.config), Vec::<String>::new());
    ferrite_runtime::destroy(world.config.clone()).await.unwrap();
}
