//! Our CRI client against Debian's containerd on directories and a socket of its own.
//!
//! Skipped, with a message, where containerd, runc or docker-registry is not installed.

// Helpers of tests may unwrap as tests do.
#![allow(clippy::unwrap_used)]

mod docker_registry;
mod image_fixtures;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use docker_registry::Registry;
use ferrite_cri::grpc::Client;
use ferrite_cri::v1::*;
use ferrite_cri::{Code, ImageService, RuntimeService};
use image_fixtures::{TestImage, gzip, tar};

/// Longest any single wait may take.
const LIMIT: Duration = Duration::from_secs(60);

struct Containerd {
    child: Child,
    directory: tempfile::TempDir,
    group: String,
}

impl Containerd {
    fn start(pause: &str) -> Self {
        let directory = tempfile::Builder::new().prefix("ferrite-containerd-").tempdir().unwrap();
        let root = directory.path().display();
        let config =
            include_str!("containerd.toml").replace("ROOT", &root.to_string()).replace("PAUSE", pause);
        std::fs::write(directory.path().join("config.toml"), config).unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let spawned = Command::new("containerd")
            .arg("--config")
            .arg(directory.path().join("config.toml"))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let child = spawned.expect("containerd can be run: `cargo xtask test --install` installs it");
        let group = format!("/ferrite-test-containerd-{}", std::process::id());
        Self { child, directory, group }
    }

    /// Waits until CRI answers.
    async fn client(&self) -> Client {
        let client =
            Client::new(&format!("unix://{}/containerd.sock", self.directory.path().display())).unwrap();
        let begin = Instant::now();
        loop {
            match client.version(VersionRequest::default()).await {
                Ok(_) => return client,
                Err(error) if begin.elapsed() > LIMIT => {
                    panic!("containerd does not answer: {error}\n{}", self.log())
                }
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let directory = self.directory.path().display().to_string();
        // Shims outlive containerd by design; those of ours name our socket.
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&directory) || groups.contains(&self.group) {
                let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
            }
        }
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        for mount in mounts.lines().rev().filter_map(|line| line.split(' ').nth(4)) {
            if mount.starts_with(&directory) {
                let _ = Command::new("umount").args(["-l", mount]).status();
            }
        }
        for hierarchy in std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
            remove_groups(&hierarchy.path().join(self.group.trim_start_matches('/')));
        }
    }
}

fn remove_groups(directory: &std::path::Path) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_groups(&entry.path());
        }
    }
    let _ = std::fs::remove_dir(directory);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_in_containerd() {
    let registry = Registry::start(false);
    let busybox = std::fs::read("/bin/busybox").expect("busybox-static is installed");
    let layer = tar(&[("bin/sh", &busybox), ("bin/sleep", &busybox), ("bin/id", &busybox)]);
    let image = TestImage::new(vec![layer.clone()], gzip);
    let mut pause = TestImage::new(vec![layer], gzip);
    let text = String::from_utf8(pause.config).unwrap();
    pause.config = text.replace("[\"/bin/sh\"]", "[\"/bin/sleep\",\"100000\"]").into_bytes();
    registry.push("test/pause", &pause, "v1");
    registry.push("test/app", &image, "v1");
    let containerd = Containerd::start(&format!("{}/test/pause:v1", registry.address));
    let cri = containerd.client().await;
    let name = format!("{}/test/app:v1", registry.address);
    let spec = ImageSpec { image: name.clone(), ..Default::default() };
    let request = PullImageRequest { image: Some(spec.clone()), ..Default::default() };
    cri.pull_image(request).await.unwrap_or_else(|error| panic!("{error}\n{}", containerd.log()));
    let found =
        cri.image_status(ImageStatusRequest { image: Some(spec.clone()), verbose: false }).await.unwrap();
    assert_eq!(found.image.unwrap().id, image.id().to_string());

    let host = NamespaceOption {
        network: NamespaceMode::Node.into(),
        pid: NamespaceMode::Container.into(),
        ..Default::default()
    };
    let sandbox_config = PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: "pod".into(),
            uid: "uid".into(),
            namespace: "default".into(),
            attempt: 0,
        }),
        log_directory: containerd.directory.path().join("logs").display().to_string(),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: containerd.group.clone(),
            security_context: Some(LinuxSandboxSecurityContext {
                namespace_options: Some(host.clone()),
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    };
    std::fs::create_dir(containerd.directory.path().join("logs")).unwrap();
    let request =
        RunPodSandboxRequest { config: Some(sandbox_config.clone()), runtime_handler: String::new() };
    let sandbox = cri
        .run_pod_sandbox(request)
        .await
        .unwrap_or_else(|error| panic!("{error}\n{}", containerd.log()))
        .pod_sandbox_id;
    let request = CreateContainerRequest {
        pod_sandbox_id: sandbox.clone(),
        config: Some(ContainerConfig {
            metadata: Some(ContainerMetadata { name: "app".into(), attempt: 0 }),
            image: Some(spec),
            command: vec!["/bin/sh".into(), "-c".into(), "echo from $A; exec sleep 1000".into()],
            log_path: "app.log".into(),
            linux: Some(LinuxContainerConfig {
                resources: None,
                security_context: Some(LinuxContainerSecurityContext {
                    namespace_options: Some(host),
                    ..Default::default()
                }),
            }),
            ..Default::default()
        }),
        sandbox_config: Some(sandbox_config),
    };
    let id = cri.create_container(request).await.unwrap().container_id;
    cri.start_container(StartContainerRequest { container_id: id.clone() }).await.unwrap();
    let request =
        ExecSyncRequest { container_id: id.clone(), cmd: vec!["id".into(), "-u".into()], timeout: 20 };
    assert_eq!(cri.exec_sync(request).await.unwrap().stdout, b"1000\n", "the image's user");
    let stats = cri.list_container_stats(ListContainerStatsRequest::default()).await.unwrap().stats;
    assert_eq!(stats.len(), 1);
    cri.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 0 }).await.unwrap();
    let request = ContainerStatusRequest { container_id: id.clone(), verbose: false };
    let status = cri.container_status(request).await.unwrap().status.unwrap();
    assert_eq!((status.state(), status.exit_code), (ContainerState::ContainerExited, 137));
    let log = std::fs::read_to_string(&status.log_path).unwrap();
    assert!(log.ends_with("stdout F from b\n"), "{log}");
    cri.remove_container(RemoveContainerRequest { container_id: id.clone() }).await.unwrap();
    let request = ContainerStatusRequest { container_id: id, verbose: false };
    assert_eq!(cri.container_status(request).await.unwrap_err().code, Code::NotFound);
    cri.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }).await.unwrap();
    cri.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await.unwrap();
}
