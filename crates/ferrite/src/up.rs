//! `ferrite up`: a cluster on this machine, in the foreground or detached.

use crate::apiserver::BoxError;
use crate::cli::{Cli, DataDir, interrupted};
use crate::cluster::{Cluster, ClusterOptions};
use crate::control_planes::{self, ControlPlanes};
use crate::data_dir::DataDirectory;
use crate::kubeconfig;
use crate::machines::Machines;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::status::State;
use clap::CommandFactory;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

/// Options of `ferrite up`.
#[derive(Debug, Clone, clap::Args)]
pub struct Up {
    #[command(flatten)]
    data: DataDir,
    #[command(flatten)]
    cluster: ClusterOptions,
    /// Go on in the background once the node is ready.
    #[arg(long, short = 'd')]
    detach: bool,
    /// Leave the kubeconfig of the user alone.
    #[arg(long)]
    no_kubeconfig: bool,
    /// Set in the process that goes on in the background.
    #[arg(long, hide = true)]
    detached: bool,
}

impl Up {
    pub fn run(self) -> Result<ExitCode, BoxError> {
        let paths = self.data.paths();
        check_machine()?;
        State::refuse_if_running(&paths)?;
        if self.detach && !self.detached {
            return detach(&paths);
        }
        crate::cli::block_on(self.foreground(paths))
    }

    async fn foreground(mut self, paths: Paths) -> Result<ExitCode, BoxError> {
        let endpoint = &mut self.cluster.container_runtime_endpoint;
        *endpoint = State::choose_runtime(State::load(&paths).as_ref(), endpoint.as_deref())?;
        let progress = Progress::new(false);
        let _claimed = DataDirectory::claim(&paths)?;
        if self.detached {
            crate::logging::log_to(&paths.log())?;
        }
        create_private(&paths)?;
        if let Some(count) = control_planes::count(&paths, self.cluster.control_planes)? {
            return Box::pin(self.control_planes(&paths, count, &progress)).await;
        }
        if self.cluster.nodes.is_none() && !Machines::list(&paths).is_empty() {
            // The nodes are still there: the cluster goes on with them.
            self.cluster.nodes = Some(1);
        }
        let cluster = Box::pin(Cluster::start(&paths, &self.cluster, &progress)).await?;
        cluster.listen(&paths)?;
        let mut state = State::new(&paths, &cluster.api.url, &cluster.node_name);
        state.insecure_registries = self.cluster.insecure_registry.clone();
        state.runtime_endpoint = self.cluster.container_runtime_endpoint.clone();
        if !self.no_kubeconfig
            && let Some(file) = kubeconfig::user_file()
        {
            let before =
                cluster.api.with_admin(|access| Ok(kubeconfig::install(&file, &paths.cluster, access)?))?;
            state.remember_kubeconfig(&paths, file, before);
        }
        state.save(&paths)?;
        tokio::select! {
            ready = cluster.ready(&paths, &progress) => ready?,
            signal = interrupted() => {
                signal?;
                cluster.stop().await;
                return Ok(ExitCode::FAILURE);
            }
        }
        for name in std::iter::once(&cluster.node_name).chain(&cluster.others) {
            progress.done("node", &format!("{name} is Ready"));
        }
        progress.line(&next_steps(&paths, &state));
        if self.detached {
            forget_terminal()?;
        }
        interrupted().await?;
        tracing::info!("stopping; containers go on");
        Machines::stop_agents(&paths).await?;
        cluster.stop().await;
        State::stopped(&paths)?;
        Ok(ExitCode::SUCCESS)
    }
}

impl Up {
    /// The same with a control plane of several machines.
    async fn control_planes(
        self,
        paths: &Paths,
        count: usize,
        progress: &Progress,
    ) -> Result<ExitCode, BoxError> {
        let arguments = control_planes::server_arguments(&Cli::command(), std::env::args_os())?;
        let cluster = ControlPlanes::start(paths, &self.cluster, count, arguments, progress).await?;
        let mut state = State::new(paths, &cluster.url, "");
        state.insecure_registries = self.cluster.insecure_registry.clone();
        if !self.no_kubeconfig
            && let Some(file) = kubeconfig::user_file()
        {
            let before =
                cluster.with_admin(|access| Ok(kubeconfig::install(&file, &paths.cluster, access)?))?;
            state.remember_kubeconfig(paths, file, before);
        }
        state.save(paths)?;
        let started = tokio::select! {
            ready = cluster.ready(paths, progress) => {
                ready?;
                true
            }
            signal = interrupted() => {
                signal?;
                false
            }
        };
        if started {
            for name in &cluster.nodes {
                progress.done("node", &format!("{name} is Ready"));
            }
            progress.line(&next_steps(paths, &state));
            if self.detached {
                forget_terminal()?;
            }
            interrupted().await?;
        }
        tracing::info!("stopping; containers go on");
        Machines::stop_agents(paths).await?;
        cluster.stop().await;
        State::stopped(paths)?;
        Ok(if started { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// The words that a cluster is ready with.
const IS_UP: &str = "The cluster is up.";

/// The next commands to type, exactly.
fn next_steps(paths: &Paths, state: &State) -> String {
    let mut text = format!("\n{IS_UP} Try:\n\n");
    if state.kubeconfig.is_none() {
        text.push_str(&format!("  export KUBECONFIG={}\n", quoted(&paths.admin_kubeconfig())));
    }
    let data = if paths.cluster == "ferrite" {
        String::new()
    } else {
        format!(" --data-dir {}", quoted(&paths.data))
    };
    text.push_str("  kubectl get nodes\n");
    text.push_str("  kubectl create deployment web --image=ferrite.local/tools --replicas=3 -- http\n");
    text.push_str("  kubectl get pods -o wide --watch\n\n");
    text.push_str(&format!("`ferrite down{data}` removes every trace of it.\n"));
    text
}

/// A path as a shell takes it.
pub fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@%,=".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

/// Checks the machine before anything is made.
pub fn check_machine() -> Result<(), BoxError> {
    if !nix::unistd::geteuid().is_root() {
        return Err("running containers needs root: try `sudo ferrite up`".into());
    }
    if ferrite_cgroup::Layout::detect().is_err() {
        return Err("no control groups are mounted at /sys/fs/cgroup, and containers cannot be limited without them: run `mount -t cgroup2 none /sys/fs/cgroup`, or start the machine with a kernel that has them".into());
    }
    let filesystems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !filesystems.contains("overlay") {
        // The kernel may still load it as a module when it is first used.
        tracing::warn!(
            "overlayfs is not listed in /proc/filesystems; if containers do not start, run `modprobe overlay`"
        );
    }
    Ok(())
}

/// The directories hold keys and secrets.
pub fn create_private(paths: &Paths) -> Result<(), BoxError> {
    for dir in [&paths.run, &paths.config] {
        ferrite_hostfs::private_dir(dir).map_err(|e| format!("cannot create {}: {e}", dir.display()))?;
    }
    Ok(())
}

/// Starts the same command in a session of its own and shows its output until it is ready.
fn detach(paths: &Paths) -> Result<ExitCode, BoxError> {
    // The log is in it. The process in the background claims the directory again and keeps it.
    drop(DataDirectory::claim(paths)?);
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(paths.log())?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).arg("--detached");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    // SAFETY: setsid is async-signal-safe and touches nothing of the parent.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(Into::into));
    }
    let mut child = command.spawn()?;
    let mut said = child.stdout.take().ok_or("the background process has no output")?;
    let mut buffer = [0; 4096];
    let mut printed = Vec::new();
    let mut out = std::io::stdout();
    // The child closes its output once it is ready, or by ending.
    loop {
        let read = said.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        out.write_all(&buffer[..read])?;
        out.flush()?;
        printed.extend_from_slice(&buffer[..read]);
    }
    if String::from_utf8_lossy(&printed).contains(IS_UP) {
        return Ok(ExitCode::SUCCESS);
    }
    // Without these words it is about to end, if it has not ended yet.
    match child.wait()? {
        status if status.success() => Ok(ExitCode::SUCCESS),
        _ => {
            let text = std::fs::read_to_string(paths.log()).unwrap_or_default();
            let last = text.lines().last().unwrap_or("it said nothing");
            Err(format!("the cluster did not start: {last} (more in {})", paths.log().display()).into())
        }
    }
}

/// Closes the terminal's pipe, which signals to the waiting process that we are ready.
fn forget_terminal() -> Result<(), BoxError> {
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    nix::unistd::dup2_stdout(&null)?;
    Ok(())
}
