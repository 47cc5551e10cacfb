//! The runtimes that are compared, each in a process of its own behind its CRI socket.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferrite_cri::grpc::Client;
use ferrite_cri::v1::*;
use ferrite_cri::{ImageService, RuntimeService};

use crate::GROUP;

/// Where our runtime keeps its data, below the directory of the run.
pub const DATA: &str = "f";
/// Longest any start may take.
const LIMIT: Duration = Duration::from_secs(60);

/// One runtime and how to ask it.
pub struct Side {
    pub client: Client,
    name: &'static str,
    logs: PathBuf,
    /// Prefixes of the command lines of its processes; those of containers have others.
    commands: &'static [&'static str],
}

/// A pod with one container.
pub struct Pod {
    pub sandbox: String,
    pub container: String,
}

/// Whose network a pod has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Network {
    Host,
    Own,
}

impl Side {
    fn new(name: &'static str, socket: &Path, dir: &Path, commands: &'static [&'static str]) -> Self {
        let logs = dir.join(format!("logs-{name}"));
        std::fs::create_dir(&logs).unwrap();
        let client = Client::new(&format!("unix://{}", socket.display())).unwrap();
        Self { client, name, logs, commands }
    }

    pub async fn pull(&self, image: &str) {
        let request = PullImageRequest { image: Some(spec(image)), ..Default::default() };
        self.client.pull_image(request).await.unwrap();
    }

    fn sandbox_config(&self, name: &str, network: Network) -> PodSandboxConfig {
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: name.into(),
                uid: format!("uid-{name}"),
                namespace: "bench".into(),
                attempt: 0,
            }),
            hostname: if network == Network::Own { name.into() } else { String::new() },
            log_directory: self.logs.display().to_string(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: format!("{GROUP}/{}", self.name),
                security_context: Some(LinuxSandboxSecurityContext {
                    namespace_options: Some(namespaces(network)),
                    ..Default::default()
                }),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    pub async fn run_sandbox(&self, name: &str, network: Network) -> String {
        let config = Some(self.sandbox_config(name, network));
        let request = RunPodSandboxRequest { config, runtime_handler: String::new() };
        self.client.run_pod_sandbox(request).await.unwrap().pod_sandbox_id
    }

    /// Creates a container in a sandbox of that name and starts it: its program runs when this returns.
    pub async fn run_container(&self, sandbox: &str, name: &str, network: Network, image: &str) -> String {
        let security = LinuxContainerSecurityContext {
            namespace_options: Some(namespaces(network)),
            seccomp: Some(SecurityProfile::default()),
            ..Default::default()
        };
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(ContainerConfig {
                metadata: Some(ContainerMetadata { name: "app".into(), attempt: 0 }),
                image: Some(spec(image)),
                command: vec!["/bin/sleep".into(), "1000".into()],
                log_path: format!("{name}.log"),
                linux: Some(LinuxContainerConfig { resources: None, security_context: Some(security) }),
                ..Default::default()
            }),
            sandbox_config: Some(self.sandbox_config(name, network)),
        };
        let container_id = self.client.create_container(request).await.unwrap().container_id;
        let request = StartContainerRequest { container_id: container_id.clone() };
        self.client.start_container(request).await.unwrap();
        container_id
    }

    pub async fn run_pod(&self, name: &str, network: Network, image: &str) -> Pod {
        let sandbox = self.run_sandbox(name, network).await;
        let container = self.run_container(&sandbox, name, network, image).await;
        Pod { sandbox, container }
    }

    pub async fn remove_container(&self, container: &str) {
        let container_id = container.to_owned();
        let request = StopContainerRequest { container_id: container_id.clone(), timeout: 0 };
        self.client.stop_container(request).await.unwrap();
        self.client.remove_container(RemoveContainerRequest { container_id }).await.unwrap();
    }

    pub async fn remove_sandbox(&self, sandbox: &str) {
        let pod_sandbox_id = sandbox.to_owned();
        let request = StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() };
        self.client.stop_pod_sandbox(request).await.unwrap();
        self.client.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id }).await.unwrap();
    }

    pub async fn remove_pod(&self, pod: &Pod) {
        self.remove_container(&pod.container).await;
        self.remove_sandbox(&pod.sandbox).await;
    }

    pub async fn exec(&self, container: &str) {
        let cmd = vec!["/bin/true".into()];
        let request = ExecSyncRequest { container_id: container.to_owned(), cmd, timeout: 20 };
        assert_eq!(self.client.exec_sync(request).await.unwrap().exit_code, 0);
    }

    /// The runtime's own processes, and those that are there for each pod.
    pub fn processes(&self) -> Vec<i32> {
        processes()
            .filter(|(_, command)| self.commands.iter().any(|c| command.starts_with(c)))
            .map(|p| p.0)
            .collect()
    }
}

/// Every process of the run with its command line.
pub fn processes() -> impl Iterator<Item = (i32, String)> {
    std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let pid = entry.ok()?.file_name().to_str()?.parse::<i32>().ok()?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        Some((pid, String::from_utf8_lossy(&line).into_owned()))
    })
}

fn spec(image: &str) -> ImageSpec {
    ImageSpec { image: image.to_owned(), ..Default::default() }
}

fn namespaces(network: Network) -> NamespaceOption {
    let network = match network {
        Network::Host => NamespaceMode::Node,
        Network::Own => NamespaceMode::Pod,
    };
    NamespaceOption { network: network.into(), pid: NamespaceMode::Container.into(), ..Default::default() }
}

/// Our binary as a runtime alone.
pub struct Ferrite {
    pub side: Side,
    child: Child,
}

impl Ferrite {
    pub async fn start(dir: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_ferrite"))
            .args(["runtime", "--data-dir"])
            .arg(dir.join(DATA))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let socket = line.trim().strip_prefix("serving unix://").expect("the runtime says where it serves");
        let commands = &[env!("CARGO_BIN_EXE_ferrite"), "ferrite-supervisor"];
        Self { side: Side::new("ferrite", Path::new(socket), dir, commands), child }
    }
}

impl Drop for Ferrite {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Debian's containerd with runc.
pub struct Containerd {
    pub side: Side,
    child: Child,
}

impl Containerd {
    /// `None` where it is not installed.
    pub async fn start(dir: &Path, pause: &str) -> Option<Self> {
        let root = dir.join("c");
        std::fs::create_dir(&root).unwrap();
        let shown = root.display();
        let config = include_str!("../../../runtime/tests/containerd.toml")
            .replace("ROOT", &shown.to_string())
            .replace("PAUSE", pause);
        std::fs::write(root.join("config.toml"), config).unwrap();
        let log = std::fs::File::create(root.join("log")).unwrap();
        let mut command = Command::new("containerd");
        command.arg("--config").arg(root.join("config.toml")).stdout(Stdio::null()).stderr(log);
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("SKIPPED: containerd is not installed (package containerd)");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let commands = &["containerd\0", "/usr/bin/containerd-shim"];
        let side = Side::new("containerd", &root.join("containerd.sock"), dir, commands);
        let begin = Instant::now();
        while let Err(error) = side.client.version(VersionRequest::default()).await {
            assert!(begin.elapsed() < LIMIT, "containerd does not answer: {error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Some(Self { side, child })
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Removes a group and those below it from every hierarchy. The processes in them are gone.
pub fn remove_groups(group: &str) {
    fn remove(directory: &Path) {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                remove(&entry.path());
            }
        }
        let _ = std::fs::remove_dir(directory);
    }
    let top = Path::new("/sys/fs/cgroup");
    let hierarchies = std::fs::read_dir(top).unwrap().flatten().map(|entry| entry.path());
    for hierarchy in hierarchies.chain([top.to_owned()]) {
        remove(&hierarchy.join(group.trim_start_matches('/')));
    }
}
