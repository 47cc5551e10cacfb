//! A runtime on a temporary directory with a busybox image, and no trace of it afterwards.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use ferrite_cri::v1::*;
use ferrite_cri::{Error, ImageService, RuntimeService};
use ferrite_network::{Attachment, NetworkError, PodNetwork, PodRef};
use ferrite_runtime::{Config, ImageConfigView, Rootfs, RootfsError, Runtime};

/// Longest any single wait in these tests may take.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Loopback only: the supervisor raises it.
pub struct NoNetwork;

#[async_trait]
impl PodNetwork for NoNetwork {
    async fn attach(&self, _: &str, netns: &Path, _: &PodRef) -> Result<Attachment, NetworkError> {
        assert!(netns.exists(), "the network namespace is pinned");
        Ok(Attachment { ips: vec![IpAddr::from([127, 0, 0, 1])] })
    }

    async fn detach(&self, _: &str, _: &Path) -> Result<(), NetworkError> {
        Ok(())
    }

    fn ready(&self) -> Result<(), ferrite_network::NotReady> {
        Ok(())
    }
}

/// One image named `busybox`, in as many layers as asked for.
pub struct Images {
    pub layers: Vec<PathBuf>,
    pub view: ImageConfigView,
}

impl Images {
    pub fn busybox(root: &Path) -> Self {
        Self {
            layers: vec![root.to_owned()],
            view: ImageConfigView { id: "sha256:b0".into(), cmd: vec!["sh".into()], ..Default::default() },
        }
    }
}

/// A runtime that keeps everything below one directory and one control group.
pub fn configuration(directory: &Path, cgroup_parent: String, images: Images) -> Config {
    Config {
        root: directory.join("lib"),
        run: directory.join("run"),
        cgroup_parent,
        cgroup_driver: CgroupDriver::Cgroupfs,
        supervisor: env!("CARGO_BIN_EXE_ferrite-supervisor").into(),
        network: Arc::new(NoNetwork),
        images: Arc::new(images),
        handlers: ferrite_runtime::installed_handlers(),
        extras: ferrite_runtime::Extras::default(),
        streaming_address: ([127, 0, 0, 1], 0).into(),
    }
}

impl Rootfs for Images {
    fn image(&self, name: &str) -> Result<ImageConfigView, RootfsError> {
        if name == "busybox" || name == self.view.id {
            Ok(self.view.clone())
        } else {
            Err(RootfsError::NotFound(name.to_owned()))
        }
    }

    fn lower_dirs(&self, _: &str) -> Result<Vec<PathBuf>, RootfsError> {
        Ok(self.layers.clone())
    }
}

#[async_trait]
impl ImageService for Images {
    async fn list_images(&self, _: ListImagesRequest) -> ferrite_cri::Result<ListImagesResponse> {
        Ok(ListImagesResponse::default())
    }
    async fn image_status(&self, _: ImageStatusRequest) -> ferrite_cri::Result<ImageStatusResponse> {
        Ok(ImageStatusResponse::default())
    }
    async fn pull_image(&self, _: PullImageRequest) -> ferrite_cri::Result<PullImageResponse> {
        Err(Error::unimplemented("PullImage"))
    }
    async fn remove_image(&self, _: RemoveImageRequest) -> ferrite_cri::Result<RemoveImageResponse> {
        Ok(RemoveImageResponse {})
    }
    async fn image_fs_info(&self, _: ImageFsInfoRequest) -> ferrite_cri::Result<ImageFsInfoResponse> {
        Ok(ImageFsInfoResponse::default())
    }
}

pub struct World {
    pub directory: tempfile::TempDir,
    pub config: Config,
    pub runtime: Option<Arc<Runtime>>,
}

/// Makes a root with busybox and the few files an image has.
pub fn make_busybox(root: &Path) {
    for name in ["bin", "etc", "tmp", "root", "usr/bin", "var"] {
        std::fs::create_dir_all(root.join(name)).unwrap();
    }
    std::fs::copy("/bin/busybox", root.join("bin/busybox"))
        .expect("these tests need a static busybox at /bin/busybox (Debian: busybox-static)");
    for applet in [
        "sh", "cat", "echo", "sleep", "ls", "id", "mount", "true", "false", "kill", "ps", "dd", "hostname",
        "env", "pwd", "stty", "touch", "mkdir", "grep", "wc", "head", "tail", "readlink", "tty", "nc",
        "mknod", "chroot", "unshare", "yes", "tr", "printf", "cut",
    ] {
        std::os::unix::fs::symlink("/bin/busybox", root.join("bin").join(applet)).unwrap();
    }
    std::fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\nweb:x:101:102:w:/srv:/bin/sh\n")
        .unwrap();
    std::fs::write(root.join("etc/group"), "root:x:0:\nweb:x:102:\nlog:x:44:web\n").unwrap();
    std::fs::write(root.join("bin/not-a-program"), "text").unwrap();
}

impl World {
    pub async fn new() -> Self {
        Self::with(|_, _| {}).await
    }

    /// `change` may alter the image's root and its configuration before the runtime opens.
    pub async fn with(change: impl FnOnce(&Path, &mut Images)) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = tempfile::Builder::new().prefix("ferrite-runtime-").tempdir().unwrap();
        let root = directory.path().join("image");
        make_busybox(&root);
        let mut images = Images::busybox(&root);
        change(&root, &mut images);
        let config =
            configuration(directory.path(), format!("/ferrite-test-{}-{number}", std::process::id()), images);
        let runtime = Runtime::open(config.clone()).await.unwrap();
        Self { directory, config, runtime: Some(runtime) }
    }

    pub fn runtime(&self) -> &Arc<Runtime> {
        self.runtime.as_ref().expect("open")
    }

    pub async fn reopen(&mut self) {
        self.close().await;
        self.runtime = Some(Runtime::open(self.config.clone()).await.unwrap());
    }

    pub async fn close(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.close().await;
        }
    }

    pub fn sandbox_config(&self) -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: "pod".into(),
                uid: "uid".into(),
                namespace: "default".into(),
                attempt: 0,
            }),
            hostname: "pod-host".into(),
            log_directory: self.directory.path().join("logs").display().to_string(),
            dns_config: Some(DnsConfig { servers: vec!["10.0.0.10".into()], ..Default::default() }),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: format!("{}/pods/pod1", self.config.cgroup_parent),
                security_context: Some(LinuxSandboxSecurityContext {
                    namespace_options: Some(own_pid()),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    pub async fn sandbox(&self) -> String {
        self.run_sandbox(self.sandbox_config()).await
    }

    pub async fn run_sandbox(&self, config: PodSandboxConfig) -> String {
        let request = RunPodSandboxRequest { config: Some(config), runtime_handler: String::new() };
        self.runtime().run_pod_sandbox(request).await.unwrap().pod_sandbox_id
    }

    pub async fn create(&self, sandbox: &str, config: ContainerConfig) -> String {
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.into(),
            config: Some(config),
            sandbox_config: None,
        };
        self.runtime().create_container(request).await.unwrap().container_id
    }

    pub async fn try_start(&self, id: &str) -> ferrite_cri::Result<StartContainerResponse> {
        self.runtime().start_container(StartContainerRequest { container_id: id.into() }).await
    }

    pub async fn start(&self, sandbox: &str, config: ContainerConfig) -> String {
        let id = self.create(sandbox, config).await;
        self.try_start(&id).await.unwrap();
        id
    }

    pub async fn status(&self, id: &str) -> ContainerStatus {
        let request = ContainerStatusRequest { container_id: id.into(), verbose: true };
        self.runtime().container_status(request).await.unwrap().status.unwrap()
    }

    pub async fn pid(&self, id: &str) -> i32 {
        let request = ContainerStatusRequest { container_id: id.into(), verbose: true };
        let info = self.runtime().container_status(request).await.unwrap().info;
        info.get("pid").expect("a running container has a pid").parse().unwrap()
    }

    /// Waits for the container's end through the event stream, as the kubelet does.
    pub async fn wait(&self, id: &str) -> ContainerStatus {
        use futures_util::StreamExt;
        let mut events = self.runtime().get_container_events(GetEventsRequest {}).await.unwrap();
        tokio::time::timeout(LIMIT, async {
            loop {
                let status = self.status(id).await;
                if status.state() == ContainerState::ContainerExited {
                    return status;
                }
                events.next().await.expect("the runtime is open");
            }
        })
        .await
        .expect("the container ends")
    }

    /// Runs a shell script to its end and gives its status and output.
    pub async fn run(&self, sandbox: &str, config: ContainerConfig) -> (ContainerStatus, String) {
        let id = self.start(sandbox, config).await;
        let status = self.wait(&id).await;
        (status, self.output(&id).await)
    }

    pub async fn log(&self, id: &str) -> String {
        std::fs::read_to_string(self.status(id).await.log_path).unwrap()
    }

    /// The log without times and tags.
    pub async fn output(&self, id: &str) -> String {
        let log = self.log(id).await;
        log.lines().map(|line| line.splitn(4, ' ').nth(3).unwrap_or("").to_owned() + "\n").collect()
    }

    pub async fn exec(
        &self,
        id: &str,
        command: &[&str],
        timeout: i64,
    ) -> ferrite_cri::Result<ExecSyncResponse> {
        let request = ExecSyncRequest {
            container_id: id.into(),
            cmd: command.iter().map(|part| (*part).to_owned()).collect(),
            timeout,
        };
        self.runtime().exec_sync(request).await
    }

    pub async fn exec_out(&self, id: &str, script: &str) -> String {
        let answer = self.exec(id, &["/bin/sh", "-c", script], 20).await.unwrap();
        String::from_utf8(answer.stdout).unwrap() + &String::from_utf8(answer.stderr).unwrap()
    }

    pub async fn stop(&self, id: &str, timeout: i64) {
        let request = StopContainerRequest { container_id: id.into(), timeout };
        self.runtime().stop_container(request).await.unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.runtime = None;
        let config = self.config.clone();
        // A runtime of its own: the test's may be shutting down, and a panic may be under way.
        let cleared = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(ferrite_runtime::destroy(config))
        })
        .join();
        if !std::thread::panicking() {
            cleared.unwrap().unwrap();
        }
    }
}

pub fn own_pid() -> NamespaceOption {
    NamespaceOption { pid: NamespaceMode::Container.into(), ..Default::default() }
}

pub fn container(name: &str, command: &[&str]) -> ContainerConfig {
    ContainerConfig {
        metadata: Some(ContainerMetadata { name: name.into(), attempt: 0 }),
        image: Some(ImageSpec { image: "busybox".into(), ..Default::default() }),
        command: command.iter().map(|part| (*part).to_owned()).collect(),
        log_path: format!("{name}.log"),
        labels: BTreeMap::from([("name".to_owned(), name.to_owned())]),
        linux: Some(LinuxContainerConfig {
            resources: None,
            security_context: Some(LinuxContainerSecurityContext {
                namespace_options: Some(own_pid()),
                masked_paths: vec!["/proc/cpuinfo".into(), "/proc/scsi".into(), "/sys/firmware".into()],
                readonly_paths: vec!["/proc/sys".into(), "/proc/bus".into()],
                ..Default::default()
            }),
        }),
        ..Default::default()
    }
}

/// Lists the processes once the one with these arguments is among them: a container that was just started may still
/// be on its way to its program.
pub fn list_with(arguments: &str) -> String {
    let (first, rest) = arguments.split_at(1);
    format!("while ! ps | grep -q '[{first}]{rest}'; do :; done; ps; echo done")
}

pub fn shell(name: &str, script: &str) -> ContainerConfig {
    container(name, &["/bin/sh", "-c", script])
}

/// Changes a container's security settings.
pub fn secure(
    mut config: ContainerConfig,
    change: impl FnOnce(&mut LinuxContainerSecurityContext),
) -> ContainerConfig {
    let linux = config.linux.get_or_insert_default();
    change(linux.security_context.get_or_insert_default());
    config
}

pub fn limited(mut config: ContainerConfig, resources: LinuxContainerResources) -> ContainerConfig {
    config.linux.get_or_insert_default().resources = Some(resources);
    config
}

/// The traces that a runtime could leave on the machine: mounts, groups, processes below a name.
pub fn traces(config: &Config) -> Vec<String> {
    let mut found = Vec::new();
    let directory = config.root.parent().unwrap().display().to_string();
    for line in std::fs::read_to_string("/proc/self/mountinfo").unwrap().lines() {
        if line.contains(&directory) {
            found.push(format!("mount {line}"));
        }
    }
    for hierarchy in std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        let group = hierarchy.path().join(config.cgroup_parent.trim_start_matches('/'));
        if group.exists() {
            found.push(format!("group {}", group.display()));
        }
    }
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(&directory) && pid != std::process::id() as i32 {
            found.push(format!("process {pid}"));
        }
        let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        if groups.contains(&config.cgroup_parent) {
            found.push(format!("member {pid}"));
        }
    }
    for path in [&config.root, &config.run] {
        if path.exists() {
            found.push(format!("files {}", path.display()));
        }
    }
    found
}
