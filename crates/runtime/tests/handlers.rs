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
    match world.try_start(&id).await {
        Ok(_) => {}
        Err(error) if error.message.contains("hybrid mode not supported") => {
            eprintln!("SKIPPED: {handler} does not work with this machine's control groups: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    }
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
    // What is not supported is refused.
    let config = secure(shell("d", "true"), |s| {
        s.namespace_options = Some(NamespaceOption { pid: NamespaceMode::Pod.into(), ..own_pid() });
    });
    let request = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(config),
        sandbox_config: None,
    };
    assert_eq!(world.runtime().create_container(request).await.unwrap_err().code, Code::Unimplemented);
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
