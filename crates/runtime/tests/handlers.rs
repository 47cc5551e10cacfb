//! Containers made by Debian's runc and crun under our supervisor. Those not installed are passed over.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use ferrite_cri::v1::*;
use ferrite_cri::{Code, RuntimeService};
use world::{World, limited, own_pid, secure, shell, traces};

async fn sandbox(world: &World, handler: &str) -> String {
    let request =
        RunPodSandboxRequest { config: Some(world.sandbox_config()), runtime_handler: handler.to_owned() };
    world.runtime().run_pod_sandbox(request).await.unwrap().pod_sandbox_id
}

async fn life(handler: &str) {
    let mut world = World::new().await;
    if !world.config.handlers.contains_key(handler) {
        eprintln!("SKIPPED: {handler} is not installed");
        return;
    }
    let sandbox = sandbox(&world, handler).await;
    let resources =
        LinuxContainerResources { memory_limit_in_bytes: 64 << 20, cpu_shares: 512, ..Default::default() };
    let config =
        secure(limited(shell("a", "hostname; id -u; echo err >&2; exec sleep 1000"), resources), |s| {
            s.run_as_user = Some(Int64Value { value: 101 });
            s.seccomp = Some(SecurityProfile::default());
        });
    let id = world.create(&sandbox, config).await;
    world.try_start(&id).await.unwrap();
    let pid = world.pid(&id).await;
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(!String::from_utf8_lossy(&command).contains(handler), "the process is the container's own");
    assert_eq!(world.exec_out(&id, "id -u; cat /proc/1/cmdline | tr '\\0' ' '").await, "101\nsleep 1000 ");
    let stats = ContainerStatsRequest { container_id: id.clone() };
    let stats = world.runtime().container_stats(stats).await.unwrap().stats.unwrap();
    assert!(stats.memory.unwrap().usage_bytes.unwrap().value > 0);
    // It outlives the runtime like any other.
    world.reopen().await;
    assert_eq!(world.status(&id).await.state(), ContainerState::ContainerRunning);
    world.stop(&id, 0).await;
    let status = world.status(&id).await;
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 137));
    let mut lines: Vec<String> = world.output(&id).await.lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["101", "err", "pod-host"]);

    // One that ends at once, and its code.
    let (status, output) = world.run(&sandbox, shell("b", "echo out; exit 7")).await;
    assert_eq!((status.exit_code, output.as_str()), (7, "out\n"));
    // A terminal.
    let mut config = shell("t", "tty; stty size | wc -l");
    config.tty = true;
    let (status, output) = world.run(&sandbox, config).await;
    assert_eq!(status.exit_code, 0, "{output}");
    assert!(output.starts_with("/dev/pts/"), "{output}");
    // What cannot be run says why.
    let id = world.create(&sandbox, world::container("c", &["/no/such"])).await;
    let error = world.try_start(&id).await.unwrap_err();
    assert!(error.message.contains("/no/such") || error.message.contains("no such file"), "{error}");
    assert_eq!(world.status(&id).await.reason, "StartError");
    // Another container's processes.
    let target = world.start(&sandbox, shell("d", "exec sleep 2000")).await;
    let seeing = |name: &str, options: NamespaceOption| {
        secure(shell(name, "ps; echo done"), |s| s.namespace_options = Some(options))
    };
    let options = NamespaceOption {
        pid: NamespaceMode::Target.into(),
        target_id: target.clone(),
        ..Default::default()
    };
    let (_, output) = world.run(&sandbox, seeing("e", options)).await;
    assert!(output.contains("sleep 2000") && output.contains("done"), "{output}");
    // An image as a volume.
    let mut config = shell("f", "cat /image/etc/group; touch /image/x 2>/dev/null || echo read-only");
    config.mounts.push(Mount {
        container_path: "/image".into(),
        image: Some(ImageSpec { image: "busybox".into(), ..Default::default() }),
        ..Default::default()
    });
    let (status, output) = world.run(&sandbox, config).await;
    assert_eq!(status.exit_code, 0, "{output}");
    assert!(output.contains("web:x:102:") && output.ends_with("read-only\n"), "{output}");
    // The pod's processes.
    let mut pod = world.sandbox_config();
    pod.metadata.as_mut().unwrap().attempt = 1;
    let shared = NamespaceOption { pid: NamespaceMode::Pod.into(), ..Default::default() };
    pod.linux.as_mut().unwrap().security_context.as_mut().unwrap().namespace_options = Some(shared.clone());
    let request = RunPodSandboxRequest { config: Some(pod), runtime_handler: handler.to_owned() };
    let second = world.runtime().run_pod_sandbox(request).await.unwrap().pod_sandbox_id;
    let sleeper = secure(shell("g", "exec sleep 3000"), |s| s.namespace_options = Some(shared.clone()));
    world.start(&second, sleeper).await;
    let (_, output) = world.run(&second, seeing("h", shared)).await;
    assert!(output.contains("sleep 3000"), "{output}");
    world.runtime().remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: second }).await.unwrap();
    // What is not supported is refused.
    let mut pod = world.sandbox_config();
    pod.metadata.as_mut().unwrap().attempt = 2;
    let map = |_| IdMapping { host_id: 100_000, container_id: 0, length: 65_536 };
    let user = UserNamespace { mode: NamespaceMode::Pod.into(), uids: vec![map(())], gids: vec![map(())] };
    let options = NamespaceOption { userns_options: Some(user), ..own_pid() };
    pod.linux.as_mut().unwrap().security_context.as_mut().unwrap().namespace_options = Some(options);
    let request = RunPodSandboxRequest { config: Some(pod), runtime_handler: handler.to_owned() };
    assert_eq!(world.runtime().run_pod_sandbox(request).await.unwrap_err().code, Code::Unimplemented);
    world.runtime().remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await.unwrap();
    let state = world.config.run.join("oci").join(handler);
    let left: Vec<_> = std::fs::read_dir(&state).into_iter().flatten().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    world.close().await;
    let config = world.config.clone();
    drop(world);
    assert_eq!(traces(&config), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn runc() {
    life("runc").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn crun() {
    life("crun").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn handlers_nobody_configured() {
    let world = World::new().await;
    let request =
        RunPodSandboxRequest { config: Some(world.sandbox_config()), runtime_handler: "kata".into() };
    let error = world.runtime().run_pod_sandbox(request).await.unwrap_err();
    assert!(error.code == Code::InvalidArgument && error.message.contains("kata"), "{error}");
    let status = world.runtime().status(StatusRequest::default()).await.unwrap();
    assert_eq!(status.runtime_handlers.len(), 1 + world.config.handlers.len());
}
