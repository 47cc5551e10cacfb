//! Containers made by Debian's runc and crun under our supervisor. Those not installed are passed over.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use ferrite_cri::v1::*;
use ferrite_cri::{Code, RuntimeService};
use world::{World, limited, list_with, secure, shell, traces};

/// Asks a namespace for the user namespace it belongs to.
const NS_GET_USERNS: libc::c_ulong = 0xb701;

async fn sandbox(world: &World, handler: &str) -> String {
    let request =
        RunPodSandboxRequest { config: Some(world.sandbox_config()), runtime_handler: handler.to_owned() };
    world.runtime().run_pod_sandbox(request).await.unwrap().pod_sandbox_id
}

async fn life(handler: &str) {
    let mut world = World::new().await;
    let known = world.config.handlers.contains_key(handler);
    assert!(known, "{handler} is not installed: run `cargo xtask test --install`");
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
    let script = "while ! tr '\\0' ' ' </proc/1/cmdline | grep -q '^sleep'; do :; done; id -u; cat /proc/1/cmdline | tr '\\0' ' '";
    assert_eq!(world.exec_out(&id, script).await, "101\nsleep 1000 ");
    // `start` of these programs returns before their process becomes the container's; by now it has.
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(!String::from_utf8_lossy(&command).contains(handler), "the process is the container's own");
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
    // A failed start reports its cause.
    let id = world.create(&sandbox, world::container("c", &["/no/such"])).await;
    let error = world.try_start(&id).await.unwrap_err();
    assert!(error.message.contains("/no/such") || error.message.contains("no such file"), "{error}");
    assert_eq!(world.status(&id).await.reason, "StartError");
    // Another container's processes.
    let target = world.start(&sandbox, shell("d", "exec sleep 2000")).await;
    let seeing = |name: &str, arguments: &str, options: NamespaceOption| {
        secure(shell(name, &list_with(arguments)), |s| s.namespace_options = Some(options))
    };
    let options = NamespaceOption {
        pid: NamespaceMode::Target.into(),
        target_id: target.clone(),
        ..Default::default()
    };
    let (_, output) = world.run(&sandbox, seeing("e", "sleep 2000", options)).await;
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
    let (_, output) = world.run(&second, seeing("h", "sleep 3000", shared)).await;
    assert!(output.contains("sleep 3000"), "{output}");
    world.runtime().remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: second }).await.unwrap();
    world.runtime().remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await.unwrap();
    leaves_nothing(world, handler).await;
}

async fn leaves_nothing(mut world: World, handler: &str) {
    let state = world.config.run.join("oci").join(handler);
    let left: Vec<_> = std::fs::read_dir(&state).into_iter().flatten().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    world.close().await;
    let config = world.config.clone();
    drop(world);
    assert_eq!(traces(&config), Vec::<String>::new());
}

const BASE: u32 = 3_000_000;

fn user_namespace(pid: NamespaceMode) -> NamespaceOption {
    let range = IdMapping { container_id: 0, host_id: BASE, length: 65_536 };
    let user = UserNamespace { mode: NamespaceMode::Pod.into(), uids: vec![range], gids: vec![range] };
    NamespaceOption { pid: pid.into(), userns_options: Some(user), ..Default::default() }
}

fn user_shell(name: &str, script: &str, pid: NamespaceMode) -> ContainerConfig {
    secure(shell(name, script), |s| s.namespace_options = Some(user_namespace(pid)))
}

fn mapped(path: &str, host: &std::path::Path) -> Mount {
    let user = user_namespace(NamespaceMode::Container).userns_options.unwrap();
    Mount {
        container_path: path.into(),
        host_path: host.display().to_string(),
        uid_mappings: user.uids,
        gid_mappings: user.gids,
        ..Default::default()
    }
}

async fn user_sandbox(world: &World, handler: &str, attempt: u32, pid: NamespaceMode) -> String {
    let mut config = world.sandbox_config();
    config.metadata.as_mut().unwrap().attempt = attempt;
    config.linux.as_mut().unwrap().security_context.as_mut().unwrap().namespace_options =
        Some(user_namespace(pid));
    let request = RunPodSandboxRequest { config: Some(config), runtime_handler: handler.to_owned() };
    world.runtime().run_pod_sandbox(request).await.unwrap().pod_sandbox_id
}

/// A pod whose root is nobody in particular outside, as with `hostUsers: false`.
async fn users(handler: &str) {
    let mut world = World::new().await;
    let known = world.config.handlers.contains_key(handler);
    assert!(known, "{handler} is not installed: run `cargo xtask test --install`");
    let status = world.runtime().status(StatusRequest::default()).await.unwrap();
    let features = status.runtime_handlers.into_iter().find(|h| h.name == handler).unwrap().features.unwrap();
    assert!(features.user_namespaces);

    let data = world.directory.path().join("data");
    std::fs::create_dir(&data).unwrap();
    for (name, mode) in [("old", 0o600), ("plain", 0o600)] {
        std::fs::write(data.join(name), name).unwrap();
        std::fs::set_permissions(data.join(name), PermissionsExt::from_mode(mode)).unwrap();
    }
    let sandbox = user_sandbox(&world, handler, 0, NamespaceMode::Container).await;
    let script = "id -u; cat /proc/self/uid_map | tr -s ' '; \
         ls -ln /bin/busybox | tr -s ' ' | cut -d' ' -f3; \
         echo x >/made && ls -ln /made | tr -s ' ' | cut -d' ' -f3; \
         cat /data/old; echo; ls -ln /data/old | tr -s ' ' | cut -d' ' -f3; \
         touch /read-only/x || echo read-only; cat /plain || echo not ours; \
         touch /dev/shm/x && touch /tmp/y && echo writable; echo to-stdout >/dev/stdout; \
         hostname; cat /etc/resolv.conf; ls -ln /image/bin/busybox | tr -s ' ' | cut -d' ' -f3; \
         echo y >/data/new; exec sleep 1000";
    let mut config = user_shell("a", script, NamespaceMode::Container);
    config.linux.as_mut().unwrap().resources =
        Some(LinuxContainerResources { memory_limit_in_bytes: 64 << 20, ..Default::default() });
    let plain = Mount {
        container_path: "/plain".into(),
        host_path: data.join("plain").display().to_string(),
        ..Default::default()
    };
    let image = Mount {
        container_path: "/image".into(),
        image: Some(ImageSpec { image: "busybox".into(), ..Default::default() }),
        ..Default::default()
    };
    let read_only = Mount { readonly: true, ..mapped("/read-only", &data) };
    config.mounts = vec![mapped("/data", &data), read_only, plain, image];
    let id = world.start(&sandbox, config).await;
    let pid = world.pid(&id).await;
    assert_eq!(std::fs::metadata(format!("/proc/{pid}")).unwrap().uid(), BASE, "root inside, not outside");
    let out = world.exec_out(&id, "while ! [ -s /data/new ]; do :; done; id -u; cat /data/new").await;
    assert_eq!(out, "0\ny\n");
    assert_eq!(std::fs::metadata(data.join("new")).unwrap().uid(), 0, "the volume has its own identities");
    // The namespaces belong to the pod's, so that its root has root's rights there.
    let owner = |kind: &str| {
        let namespace = std::fs::File::open(format!("/proc/{pid}/ns/{kind}")).unwrap();
        // SAFETY: the request takes no argument and returns a descriptor.
        let owner = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_USERNS) };
        assert!(owner >= 0, "{kind}");
        // SAFETY: just returned by the kernel.
        let owner = unsafe { OwnedFd::from_raw_fd(owner) };
        std::fs::File::from(owner).metadata().unwrap().ino()
    };
    let own = std::fs::metadata(format!("/proc/{pid}/ns/user")).unwrap().ino();
    for kind in ["net", "ipc", "uts", "pid", "mnt"] {
        assert_eq!(owner(kind), own, "{kind}");
    }
    world.reopen().await;
    assert_eq!(world.exec_out(&id, "id -u").await, "0\n");
    world.stop(&id, 0).await;
    let output = world.output(&id).await;
    let lines: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.contains(": ")).collect();
    let map = format!("0 {BASE} 65536");
    assert_eq!(
        lines,
        [
            "0",
            &map,
            "0",
            "0",
            "old",
            "0",
            "read-only",
            "not ours",
            "writable",
            "to-stdout",
            "pod-host",
            "nameserver 10.0.0.10",
            "0"
        ],
        "{output}"
    );

    // A plain user, at a terminal.
    let mut config = user_shell("t", "id -u; tty", NamespaceMode::Container);
    config.tty = true;
    let config = secure(config, |s| s.run_as_user = Some(Int64Value { value: 101 }));
    let (status, output) = world.run(&sandbox, config).await;
    assert_eq!(status.exit_code, 0, "{output}");
    assert!(output.starts_with("101\r\n/dev/pts/") || output.starts_with("101\n/dev/pts/"), "{output:?}");
    // Another container's processes.
    let target = world.start(&sandbox, user_shell("d", "exec sleep 2000", NamespaceMode::Container)).await;
    let mut config = user_shell("e", &list_with("sleep 2000"), NamespaceMode::Target);
    config
        .linux
        .as_mut()
        .unwrap()
        .security_context
        .as_mut()
        .unwrap()
        .namespace_options
        .as_mut()
        .unwrap()
        .target_id = target;
    let (_, output) = world.run(&sandbox, config).await;
    assert!(output.contains("sleep 2000") && output.contains("done"), "{output}");
    // The node's processes are not for a pod like this.
    let request = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(user_shell("n", "true", NamespaceMode::Node)),
        sandbox_config: None,
    };
    assert_eq!(world.runtime().create_container(request).await.unwrap_err().code, Code::Unimplemented);
    // The pod's processes.
    let second = user_sandbox(&world, handler, 1, NamespaceMode::Pod).await;
    world.start(&second, user_shell("g", "exec sleep 3000", NamespaceMode::Pod)).await;
    let (_, output) = world.run(&second, user_shell("h", &list_with("sleep 3000"), NamespaceMode::Pod)).await;
    assert!(output.contains("sleep 3000") && output.contains("done"), "{output}");
    for pod_sandbox_id in [sandbox, second] {
        world.runtime().remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id }).await.unwrap();
    }
    leaves_nothing(world, handler).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_namespaces_under_runc() {
    users("runc").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn user_namespaces_under_crun() {
    users("crun").await;
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
