//! Tests of less common pod settings: user namespaces, image volumes, devices by name, profiles, sysctls,
//! statistics.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod world;

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use ferrite_cri::v1::*;
use ferrite_cri::{Code, ImageService, RuntimeService};
use world::{World, list_with, own_pid, secure, shell};

const BASE: u32 = 3_000_000;

fn user_namespace() -> UserNamespace {
    let range = IdMapping { container_id: 0, host_id: BASE, length: 65536 };
    UserNamespace { mode: NamespaceMode::Pod.into(), uids: vec![range], gids: vec![range] }
}

fn with_user(mut config: PodSandboxConfig) -> PodSandboxConfig {
    let linux = config.linux.get_or_insert_default();
    let security = linux.security_context.get_or_insert_default();
    security.namespace_options.get_or_insert_default().userns_options = Some(user_namespace());
    config
}

fn user_shell(name: &str, script: &str) -> ContainerConfig {
    secure(shell(name, script), |s| {
        s.namespace_options = Some(NamespaceOption { userns_options: Some(user_namespace()), ..own_pid() });
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_in_a_user_namespace() {
    let world = World::new().await;
    let sandbox = world.run_sandbox(with_user(world.sandbox_config())).await;
    let data = world.directory.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::write(data.join("old"), "content").unwrap();
    std::fs::set_permissions(data.join("old"), PermissionsExt::from_mode(0o600)).unwrap();
    let mut config = user_shell(
        "a",
        "id -u; cat /proc/self/uid_map | tr -s ' '; \
         ls -ln /bin/busybox | tr -s ' ' | cut -d' ' -f3; \
         echo x >/made && ls -ln /made | tr -s ' ' | cut -d' ' -f3; \
         cat /data/old; echo; echo y >/data/new && ls -ln /data/new | tr -s ' ' | cut -d' ' -f3; \
         touch /dev/shm/x && touch /tmp/y && echo shm ok; echo to-stdout >/dev/stdout; \
         hostname other && hostname; echo 1 >/proc/sys/vm/drop_caches; : >/data/done; exec sleep 1000",
    );
    config = secure(config, |s| {
        s.capabilities =
            Some(Capability { add_capabilities: vec!["SYS_ADMIN".into()], ..Default::default() });
    });
    let ids = user_namespace();
    config.mounts = vec![Mount {
        container_path: "/data".into(),
        host_path: data.display().to_string(),
        uid_mappings: ids.uids,
        gid_mappings: ids.gids,
        ..Default::default()
    }];
    let id = world.start(&sandbox, config).await;
    let pid = world.pid(&id).await;
    // Inside root, outside nobody in particular.
    assert_eq!(std::fs::metadata(format!("/proc/{pid}")).unwrap().uid(), BASE);
    let out = world.exec_out(&id, "while ! [ -e /data/done ]; do :; done; id -u; cat /data/new; mount -t tmpfs t /tmp && echo mounted").await;
    assert_eq!(out, "0\ny\nmounted\n", "root inside, and it may mount in its own namespace");
    assert_eq!(std::fs::metadata(data.join("new")).unwrap().uid(), 0, "the volume keeps its own identities");
    let terminal = ExecSyncRequest {
        container_id: id.clone(),
        cmd: vec!["sh".into(), "-c".into(), "echo 1 >/proc/sys/kernel/domainname".into()],
        timeout: 10,
    };
    let refused = world.runtime().exec_sync(terminal).await.unwrap();
    assert_ne!(refused.exit_code, 0, "the kernel's settings are the host's");
    world.stop(&id, 0).await;
    let lines = world.output(&id).await;
    let lines: Vec<&str> = lines.lines().map(str::trim).collect();
    assert_eq!(
        lines[..9],
        ["0", &format!("0 {BASE} 65536"), "0", "0", "content", "0", "shm ok", "to-stdout", "other"],
        "{lines:?}"
    );
    assert!(lines[9].contains("Permission denied") || lines[9].contains("Read-only"), "{lines:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_at_dev_stays_as_it_is() {
    let world = World::new().await;
    let sandbox = world.run_sandbox(with_user(world.sandbox_config())).await;
    // It could be the node's /dev.
    let devices = world.directory.path().join("devices");
    std::fs::create_dir(&devices).unwrap();
    std::fs::write(devices.join("null"), "").unwrap();
    let mut config = user_shell("a", "echo ran");
    let host_path = devices.display().to_string();
    config.mounts.push(Mount { container_path: "/dev".into(), host_path, ..Default::default() });
    let (status, output) = world.run(&sandbox, config).await;
    assert_eq!((status.exit_code, output.as_str()), (0, "ran\n"));
    assert_eq!(std::fs::metadata(devices.join("null")).unwrap().uid(), 0);
    for made in ["zero", "tty", "fd", "core"] {
        assert!(devices.join(made).symlink_metadata().is_err(), "{made} was made in a volume");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_shared_in_a_user_namespace() {
    let world = World::new().await;
    let shared = NamespaceOption {
        pid: NamespaceMode::Pod.into(),
        userns_options: Some(user_namespace()),
        ..Default::default()
    };
    let mut config = world.sandbox_config();
    config.linux.as_mut().unwrap().security_context.as_mut().unwrap().namespace_options =
        Some(shared.clone());
    let sandbox = world.run_sandbox(config).await;
    let member = |name, script| secure(shell(name, script), |s| s.namespace_options = Some(shared.clone()));
    let sleeper = world.start(&sandbox, member("a", "exec sleep 1000")).await;
    let (_, output) = world.run(&sandbox, member("b", &(list_with("sleep 1000") + "; id -u"))).await;
    assert!(output.contains("sleep 1000") && output.ends_with("\n0\n"), "{output}");
    assert_eq!(world.exec_out(&sleeper, "id -u").await, "0\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn user_namespaces_that_make_no_sense() {
    let world = World::new().await;
    let mut config = with_user(world.sandbox_config());
    let security = config.linux.as_mut().unwrap().security_context.as_mut().unwrap();
    let options = security.namespace_options.as_mut().unwrap();
    options.userns_options.as_mut().unwrap().uids[0].length = 0;
    let request = RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
    let error = world.runtime().run_pod_sandbox(request).await.unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument, "{error}");
    // A mount with mappings of its own in a pod without a namespace.
    let sandbox = world.sandbox().await;
    let mut config = shell("a", "true");
    config.mounts = vec![Mount {
        container_path: "/data".into(),
        host_path: "/tmp".into(),
        uid_mappings: user_namespace().uids,
        gid_mappings: user_namespace().gids,
        ..Default::default()
    }];
    let request =
        CreateContainerRequest { pod_sandbox_id: sandbox, config: Some(config), sandbox_config: None };
    let error = world.runtime().create_container(request).await.unwrap_err();
    assert_eq!(error.code, Code::Unimplemented, "{error}");
}

fn image_mount(path: &str, sub_path: &str) -> Mount {
    Mount {
        container_path: path.into(),
        image: Some(ImageSpec { image: "busybox".into(), ..Default::default() }),
        image_sub_path: sub_path.into(),
        readonly: true,
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn image_volumes() {
    let world = World::with(|root, images| {
        let top = root.parent().unwrap().join("top");
        std::fs::create_dir_all(top.join("share/docs")).unwrap();
        std::fs::write(top.join("share/docs/readme"), "from the image\n").unwrap();
        std::os::unix::fs::symlink("/etc", top.join("share/escape")).unwrap();
        images.layers.insert(0, top);
    })
    .await;
    let sandbox = world.sandbox().await;
    let mut config = shell(
        "a",
        "cat /vol/share/docs/readme /docs/readme /one/file; ls /docs; \
         echo x >/vol/x; /vol/bin/busybox true; cat /vol/bin/not-a-program; ls /esc | head -1",
    );
    config.mounts = vec![
        image_mount("/docs", "share/docs"),
        image_mount("/vol", ""),
        image_mount("/one/file", "share/docs/readme"),
        image_mount("/esc", "share/escape"),
    ];
    let (status, output) = world.run(&sandbox, config).await;
    assert_eq!(status.exit_code, 0, "{output}");
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines[..4], ["from the image", "from the image", "from the image", "readme"]);
    assert!(lines.iter().any(|line| line.contains("Read-only file system")), "{output}");
    assert!(
        lines.iter().any(|line| line.contains("Permission denied")),
        "nothing in it can be run: {output}"
    );
    // Errors come through another pipe: they may be read before the last line of the output, or after it.
    assert!(
        lines.iter().any(|line| line.ends_with("group")),
        "a link leads to the image's /etc, not the host's: {output}"
    );
    // The image is in use as long as the container is there.
    let image = Some(ImageSpec { image: "busybox".into(), ..Default::default() });
    let error = world.runtime().remove_image(RemoveImageRequest { image }).await.unwrap_err();
    assert_eq!(error.code, Code::FailedPrecondition);
    // A sub path the image does not have.
    let mut config = shell("b", "true");
    config.mounts = vec![image_mount("/docs", "nowhere")];
    let id = world.create(&sandbox, config).await;
    let error = world.try_start(&id).await.unwrap_err();
    assert!(error.message.contains("nowhere"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn image_volumes_in_a_user_namespace() {
    let world = World::new().await;
    let sandbox = world.run_sandbox(with_user(world.sandbox_config())).await;
    let mut config = user_shell("a", "ls -ln /vol/bin/busybox | tr -s ' ' | cut -d' ' -f3");
    config.mounts = vec![image_mount("/vol", "")];
    let (_, output) = world.run(&sandbox, config).await;
    assert_eq!(output, "0\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn seccomp_profiles_from_files() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let path = world.directory.path().join("profile.json");
    let profile = r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[
        {"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO","errnoRet":95}]}"#;
    std::fs::write(&path, profile).unwrap();
    let with = |name: &str, path: &Path| {
        secure(shell(name, "mkdir /x; echo went on"), |s| {
            s.seccomp = Some(SecurityProfile {
                profile_type: security_profile::ProfileType::Localhost.into(),
                localhost_ref: path.display().to_string(),
            });
        })
    };
    let (_, output) = world.run(&sandbox, with("a", &path)).await;
    assert!(output.contains("Operation not supported") && output.contains("went on"), "{output}");
    let in_world = |name: &str| world.directory.path().join(name);
    std::fs::write(in_world("broken"), "{").unwrap();
    std::fs::write(in_world("odd"), r#"{"defaultAction":"SCMP_ACT_DANCE"}"#).unwrap();
    std::fs::write(in_world("large"), vec![b' '; 2 << 20]).unwrap();
    std::os::unix::fs::symlink(&path, in_world("link")).unwrap();
    nix::unistd::mkfifo(&in_world("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for name in ["broken", "odd", "large", "link", "pipe", "missing"] {
        let path = in_world(name);
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.clone(),
            config: Some(with(name, &path)),
            sandbox_config: None,
        };
        let error = world.runtime().create_container(request).await.unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument, "{error}");
        assert!(error.message.contains("seccomp"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sysctls_belong_to_the_pod() {
    let world = World::new().await;
    let sysctls = BTreeMap::from([
        ("net.ipv4.ip_unprivileged_port_start".to_owned(), "80".to_owned()),
        ("kernel/shm_rmid_forced".to_owned(), "1".to_owned()),
    ]);
    let here = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start").unwrap();
    let mut config = world.sandbox_config();
    config.linux.as_mut().unwrap().sysctls = sysctls;
    let sandbox = world.run_sandbox(config).await;
    let script = "cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/kernel/shm_rmid_forced";
    let (_, output) = world.run(&sandbox, shell("a", script)).await;
    assert_eq!(output, "80\n1\n");
    assert_eq!(
        std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start").unwrap(),
        here,
        "the node's stay as they were"
    );
    for name in ["net.no.such", "net..x", "../../etc/x"] {
        let mut config = world.sandbox_config();
        config.metadata.as_mut().unwrap().attempt = 1;
        config.linux.as_mut().unwrap().sysctls = BTreeMap::from([(name.to_owned(), "1".to_owned())]);
        let request = RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        let error = world.runtime().run_pod_sandbox(request).await.unwrap_err();
        assert!(error.message.contains(name), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_can_see_anothers_processes() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let target = world.start(&sandbox, shell("a", "exec sleep 1234")).await;
    let debugger =
        secure(shell("debug", &(list_with("sleep 1234") + "; cat /proc/1/root/etc/passwd | head -1")), |s| {
            s.namespace_options = Some(NamespaceOption {
                pid: NamespaceMode::Target.into(),
                target_id: target.clone(),
                ..Default::default()
            });
        });
    let (_, output) = world.run(&sandbox, debugger).await;
    assert!(output.contains("sleep 1234") && output.contains("root:x:0:0"), "{output}");
    assert_eq!(world.status(&target).await.state(), ContainerState::ContainerRunning);
    let lost = secure(shell("lost", "true"), |s| {
        s.namespace_options = Some(NamespaceOption {
            pid: NamespaceMode::Target.into(),
            target_id: "nobody".into(),
            ..Default::default()
        });
    });
    let request =
        CreateContainerRequest { pod_sandbox_id: sandbox, config: Some(lost), sandbox_config: None };
    assert_eq!(world.runtime().create_container(request).await.unwrap_err().code, Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_of_pods_and_layers() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let id = world
        .start(&sandbox, shell("a", "dd if=/dev/zero of=/big bs=1024k count=3; echo ok; exec sleep 1000"))
        .await;
    // The exec waits for the file by name; the shell's own output says that it is complete.
    let wait = "while ! ls -l /big | grep -q 3145728; do :; done";
    world.exec_out(&id, wait).await;
    let request = ContainerStatsRequest { container_id: id.clone() };
    let stats = world.runtime().container_stats(request).await.unwrap().stats.unwrap();
    let layer = stats.writable_layer.unwrap();
    assert!(layer.used_bytes.unwrap().value >= 3 << 20, "{layer:?}");
    assert!(layer.inodes_used.unwrap().value >= 1);
    let request = PodSandboxStatsRequest { pod_sandbox_id: sandbox };
    let pod = world.runtime().pod_sandbox_stats(request).await.unwrap().stats.unwrap().linux.unwrap();
    assert_eq!(pod.containers.len(), 1);
    assert!(pod.process.unwrap().process_count.unwrap().value >= 1);
    assert!(pod.memory.unwrap().usage_bytes.unwrap().value > 0);
    assert!(pod.network.unwrap().interfaces.is_empty(), "this test's network has loopback only");
    let metrics = world.runtime().list_pod_sandbox_metrics(ListPodSandboxMetricsRequest {}).await.unwrap();
    let names = world.runtime().list_metric_descriptors(ListMetricDescriptorsRequest {}).await.unwrap();
    assert!(metrics.pod_metrics[0].metrics.iter().any(|m| m.name == "container_processes"));
    let metrics = &metrics.pod_metrics[0].container_metrics[0].metrics;
    assert!(metrics.len() >= 4);
    assert!(metrics.iter().all(|m| names.descriptors.iter().any(|d| d.name == m.name)));
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_this_machine_may_lack() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let huge = LinuxContainerResources {
        hugepage_limits: vec![HugepageLimit { page_size: "2MB".into(), limit: 0 }],
        ..Default::default()
    };
    let (status, _) = world.run(&sandbox, world::limited(shell("huge", "true"), huge)).await;
    assert_eq!(status.exit_code, 0, "without huge page accounting a container still runs");
    if Path::new("/sys/fs/cgroup/memory").exists() {
        let unified = LinuxContainerResources {
            unified: BTreeMap::from([("memory.high".to_owned(), "1000000".to_owned())]),
            ..Default::default()
        };
        let config = world::limited(shell("unified", "true"), unified);
        let request =
            CreateContainerRequest { pod_sandbox_id: sandbox, config: Some(config), sandbox_config: None };
        let error = world.runtime().create_container(request).await.unwrap_err();
        assert!(error.code == Code::InvalidArgument && error.message.contains("version 1"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bidirectional_mounts_need_a_shared_source() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let place = world.directory.path().join("private");
    std::fs::create_dir(&place).unwrap();
    struct Mounted(std::path::PathBuf);
    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
        }
    }
    let none = None::<&str>;
    nix::mount::mount(Some("t"), &place, Some("tmpfs"), nix::mount::MsFlags::empty(), none).unwrap();
    let mounted = Mounted(place.clone());
    nix::mount::mount(none, &place, none, nix::mount::MsFlags::MS_PRIVATE, none).unwrap();
    let mut config = shell("a", "true");
    config.mounts = vec![Mount {
        container_path: "/m".into(),
        host_path: place.display().to_string(),
        propagation: MountPropagation::PropagationBidirectional.into(),
        ..Default::default()
    }];
    let request =
        CreateContainerRequest { pod_sandbox_id: sandbox, config: Some(config), sandbox_config: None };
    let error = world.runtime().create_container(request).await.unwrap_err();
    assert!(error.message.contains("not a shared mount"), "{error}");
    drop(mounted);
}

#[tokio::test(flavor = "multi_thread")]
async fn standard_output_can_be_opened_by_any_user() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let config = secure(shell("a", "echo one >/dev/stdout; echo two >/dev/stderr"), |s| {
        s.run_as_user = Some(Int64Value { value: 4321 });
    });
    let (status, output) = world.run(&sandbox, config).await;
    assert_eq!((status.exit_code, output.as_str()), (0, "one\ntwo\n"));
}
