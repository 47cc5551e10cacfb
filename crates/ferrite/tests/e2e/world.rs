//! A cluster for one test: the real binary in a network namespace of its own, driven by a real kubectl.

use ferrite_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const PATIENCE: Duration = Duration::from_secs(60);
pub const TOOLS: &str = "ferrite.local/tools";

/// A network namespace without a way out: nothing a test sends leaves this machine.
#[derive(Clone)]
pub struct Netns(Arc<File>);

impl Netns {
    pub fn new() -> Self {
        let file = std::thread::spawn(|| {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("tests need root");
            bring_loopback_up();
            File::open("/proc/thread-self/ns/net").unwrap()
        })
        .join()
        .unwrap();
        Self(Arc::new(file))
    }

    /// Where others find it, for as long as it is there.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }

    /// Makes the command run inside.
    pub fn enter<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let fd: RawFd = self.0.as_raw_fd();
        // SAFETY: setns is async-signal-safe; the descriptor stays open in the parent until after the fork.
        unsafe {
            command.pre_exec(move || {
                if libc::setns(fd, libc::CLONE_NEWNET) == 0 {
                    Ok(())
                } else {
                    Err(std::io::Error::last_os_error())
                }
            })
        }
    }

    /// Runs a function on a thread inside.
    pub fn run<T: Send + 'static>(&self, task: impl FnOnce() -> T + Send + 'static) -> T {
        let file = Arc::clone(&self.0);
        std::thread::spawn(move || {
            nix::sched::setns(&*file, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            task()
        })
        .join()
        .unwrap()
    }

    /// The response's body, or the error.
    pub fn http_get(&self, address: SocketAddr, path: &str) -> Result<String, String> {
        let path = path.to_owned();
        self.run(move || http_get(address, &path))
    }
}

fn bring_loopback_up() {
    // SAFETY: a plain socket and one ioctl on a zeroed, correctly named request.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM, 0);
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
        assert_eq!(libc::ioctl(socket, libc::SIOCSIFFLAGS, &request), 0);
        libc::close(socket);
    }
}

/// A plain HTTP/1.0 request on the calling thread.
pub fn http_get(address: SocketAddr, path: &str) -> Result<String, String> {
    let text = |e: std::io::Error| format!("{address}: {e}");
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(3)).map_err(text)?;
    stream.set_read_timeout(Some(Duration::from_secs(3))).map_err(text)?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: test\r\n\r\n").map_err(text)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(text)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| format!("{address}: no answer"))?;
    if head.contains(" 200 ") { Ok(body.to_owned()) } else { Err(format!("{address}: {head}")) }
}

pub struct World {
    pub netns: Netns,
    dir: tempfile::TempDir,
    extra: Vec<String>,
    up: Option<Child>,
}

pub fn ferrite() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_ferrite"))
}

impl World {
    /// A cluster whose node is ready.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    pub fn start_with(extra: &[&str]) -> Self {
        let mut world = Self::prepare(extra);
        world.up();
        world
    }

    /// Starts the prepared cluster, with options that were not known before.
    pub fn start_in(&mut self, extra: &[&str]) {
        self.extra.extend(extra.iter().map(|a| (*a).to_owned()));
        self.up();
    }

    /// Starts the cluster once more, without the options it was first started with.
    pub fn start_again(&mut self) {
        self.extra.clear();
        self.up();
    }

    /// Everything but the cluster.
    pub fn prepare(extra: &[&str]) -> Self {
        assert!(nix::unistd::geteuid().is_root(), "the end-to-end tests run containers and need root");
        Self {
            netns: Netns::new(),
            dir: tempfile::Builder::new().prefix("fe").tempdir().unwrap(),
            extra: extra.iter().map(|a| (*a).to_owned()).collect(),
            up: None,
        }
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("d")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Starts the cluster and waits until it says that it is up.
    pub fn up(&mut self) {
        let mut command = self.ferrite(&["up", "-v", "2", "--node-name", "node"]);
        command.args(&self.extra).stdout(Stdio::piped());
        let log = File::options().create(true).append(true).open(self.path("up.log")).unwrap();
        let mut child = command.stderr(log).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let up = lines.by_ref().map_while(Result::ok).any(|line| line.contains("The cluster is up"));
        assert!(up, "the cluster did not start:\n{}", self.log());
        // Somebody must go on reading, or the process would get a broken pipe.
        std::thread::spawn(move || lines.for_each(drop));
        self.up = Some(child);
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("up.log")).unwrap_or_default()
    }

    /// kill -9: no chance to tidy up.
    pub fn kill(&mut self) {
        let mut child = self.up.take().expect("the cluster was started");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// SIGTERM; answers whether the process has ended by itself within the time that everything has.
    #[allow(dead_code, reason = "shared with the attacks")]
    pub fn terminate(&mut self) -> bool {
        let mut child = self.up.take().expect("the cluster was started");
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        let watchdog = Watchdog::start(child.id());
        let status = child.wait().unwrap();
        drop(watchdog);
        std::os::unix::process::ExitStatusExt::signal(&status).is_none()
    }

    /// A `ferrite` command for this cluster.
    pub fn ferrite(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(ferrite());
        command.args(&arguments[..1]);
        if !matches!(arguments[0], "version") {
            command.arg("--data-dir").arg(self.data());
        }
        command.args(&arguments[1..]);
        self.environment(&mut command);
        command
    }

    fn environment(&self, command: &mut Command) {
        command.env("HOME", self.dir.path()).env("KUBECONFIG", self.path("kubeconfig"));
        self.netns.enter(command);
    }

    /// Any command, in this world's network and with its files.
    pub fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments);
        self.environment(&mut command);
        command
    }

    pub fn kubectl_command(&self, arguments: &[&str]) -> Command {
        self.command("kubectl", arguments)
    }

    /// Runs kubectl, whatever comes of it.
    pub fn try_kubectl(&self, arguments: &[&str]) -> Output {
        self.kubectl_command(arguments).output().expect("kubectl can be run")
    }

    /// Runs kubectl and returns its output.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        let output = self.try_kubectl(arguments);
        assert!(
            output.status.success(),
            "kubectl {arguments:?} failed: {}{}\n--- log\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
            self.log()
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs kubectl, which must fail, and answers its complaint.
    pub fn kubectl_fails(&self, arguments: &[&str]) -> String {
        let output = self.try_kubectl(arguments);
        assert!(!output.status.success(), "kubectl {arguments:?} did not fail");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Creates the objects of a manifest.
    pub fn create(&self, manifest: &str) {
        let path = self.write("manifest.yaml", manifest);
        self.kubectl(&["create", "-f", path.to_str().unwrap()]);
    }

    pub fn get(&self, arguments: &[&str]) -> Value {
        let text = self.kubectl(&[&["get", "-o", "json"], arguments].concat());
        ferrite_json::from_str(&text).unwrap()
    }

    /// Watches one object until `accept` returns true. Waits for events; the time is only a bound.
    pub fn watch(&self, object: &[&str], mut accept: impl FnMut(&Value) -> bool) -> Value {
        let [flags @ .., kind, name] = object else { panic!("{object:?} names no object") };
        // Asked for one object by name, kubectl reads it, watches, and drops the first event of the watch: a change in
        // between is never shown. A list is watched from where it was read.
        let selector = format!("metadata.name={name}");
        let listed = ["get", kind, "--field-selector", &selector, "-w", "-o", "json"];
        let mut command = self.kubectl_command(&[flags, listed.as_slice()].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let watchdog = Watchdog::start(child.id());
        let mut last = Value::Null;
        let documents = ferrite_json::Deserializer::from_reader(BufReader::new(child.stdout.take().unwrap()));
        let mut found = None;
        for document in documents.into_iter::<Value>() {
            let Ok(document) = document else { break };
            last = document;
            if accept(&last) {
                found = Some(last.clone());
                break;
            }
        }
        drop(watchdog);
        let _ = child.kill();
        let mut complaint = String::new();
        let _ = child.stderr.take().unwrap().read_to_string(&mut complaint);
        let _ = child.wait();
        found.unwrap_or_else(|| {
            panic!(
                "{object:?} never came to be as expected; the watch told at last: {}\n{complaint}\n--- now\n{}\n--- events\n{}\n--- log\n{}",
                ferrite_json::to_string_pretty(&last["status"]).unwrap(),
                self.kubectl(&[&["get", "-o", "json"], object].concat()),
                self.kubectl(&["get", "events"]),
                self.log()
            )
        })
    }

    pub fn wait_ready(&self, pod: &str) -> Value {
        self.watch(&["pod", pod], is_ready)
    }

    /// The response of a pod's server. A pod without a probe is Ready as soon as its process runs, which
    /// may be before that listens.
    pub fn page(&self, pod: &Value) -> String {
        let address = (pod_ip(pod), 8080).into();
        eventually("the pod serves", || self.netns.http_get(address, "/").ok())
    }

    pub fn wait_rolled_out(&self, deployment: &str, replicas: i64) -> Value {
        self.watch(&["deployment", deployment], |d| {
            let status = |key: &str| d["status"][key].as_i64().unwrap_or(0);
            d["status"]["observedGeneration"] == d["metadata"]["generation"]
                && status("replicas") == replicas
                && status("updatedReplicas") == replicas
                && status("availableReplicas") == replicas
        })
    }

    pub fn pods(&self, selector: &str) -> Vec<Value> {
        self.get(&["pods", "-l", selector])["items"].as_array().unwrap().clone()
    }

    /// Pods that are not on their way out.
    pub fn living_pods(&self, selector: &str) -> Vec<Value> {
        let mut pods = self.pods(selector);
        pods.retain(|p| p["metadata"]["deletionTimestamp"].is_null());
        pods
    }

    /// Takes a `docker save` archive in.
    pub fn import(&self, archive: &Path) {
        let output = self.ferrite(&["image", "import", archive.to_str().unwrap()]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    pub fn down(&mut self, extra: &[&str]) -> Output {
        let output = self.ferrite(&[&["down"], extra].concat()).output().unwrap();
        if let Some(mut child) = self.up.take() {
            let _ = child.wait();
        }
        output
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log\n{}", self.log());
        }
        let output = self.down(&[]);
        if !output.status.success() && !std::thread::panicking() {
            panic!("down failed: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

/// Ends a process that has had its time.
struct Watchdog {
    /// Dropping it calls the watchdog off.
    _cancel: std::sync::mpsc::Sender<()>,
}

impl Watchdog {
    fn start(pid: u32) -> Self {
        let (cancel, cancelled) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            if let Err(std::sync::mpsc::RecvTimeoutError::Timeout) = cancelled.recv_timeout(PATIENCE) {
                let _ = nix::sys::signal::kill(
                    nix::unistd::Pid::from_raw(pid as i32),
                    nix::sys::signal::Signal::SIGKILL,
                );
            }
        });
        Self { _cancel: cancel }
    }
}

pub fn is_ready(pod: &Value) -> bool {
    condition(pod, "Ready") == Some("True")
}

pub fn condition<'a>(object: &'a Value, type_: &str) -> Option<&'a str> {
    object["status"]["conditions"].as_array()?.iter().find(|c| c["type"] == type_)?["status"].as_str()
}

pub fn pod_ip(pod: &Value) -> std::net::IpAddr {
    pod["status"]["podIP"].as_str().expect("the pod has an address").parse().unwrap()
}

pub fn container_status(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]
}

/// The process of a pod's first container, found by the container's id in its control group.
pub fn container_pid(pod: &Value) -> i32 {
    status_pid(container_status(pod))
}

/// The process of a container with this status.
pub fn status_pid(status: &Value) -> i32 {
    let id = status["containerID"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    processes()
        .into_iter()
        .find(|pid| std::fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|c| c.contains(&id)))
        .unwrap_or_else(|| panic!("no process in the control group of container {id}"))
}

pub fn processes() -> Vec<i32> {
    let mut pids: Vec<i32> = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    pids
}

/// Tries until it works; for changes without an event (a file, a socket of a process).
pub fn eventually<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(Instant::now() < deadline, "{what} did not happen");
        let (_keep, never) = std::sync::mpsc::channel::<()>();
        let _ = never.recv_timeout(Duration::from_millis(50));
    }
}
