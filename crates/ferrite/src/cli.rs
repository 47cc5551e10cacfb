//! The command line.

use crate::agent::Agent;
use crate::apiserver::BoxError;
use crate::explain_schedule::ExplainSchedule;
use crate::image::Image;
use crate::joining::token::TokenCommand;
use crate::kube_controller_manager::KubeControllerManager;
use crate::kube_proxy::KubeProxy;
use crate::kube_scheduler::KubeScheduler;
use crate::machines::command::NodeCommand;
use crate::network_cmd::NetworkCommand;
use crate::paths::{DEFAULT_DATA, Paths};
use crate::runtime::RuntimeAlone;
use crate::server::{AgentSettings, ServerPlace};
use crate::standalone::StandaloneOptions;
use crate::store_cmd::{SnapshotCommand, StoreCommand};
use crate::timeline::Timeline;
use crate::up::Up;
use crate::{down, kubelet, logging, status, tools, watchdog};
use clap::{Args, CommandFactory, Parser, Subcommand};
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

/// Kubernetes, all of it, in one binary.
#[derive(Debug, Parser)]
#[command(name = "ferrite", version = env!("CARGO_PKG_VERSION"), propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    /// Log verbosity, as klog counts: 0 quiet, 2 for operators, 4 and more for developers.
    #[arg(short = 'v', long = "v", global = true, default_value_t = 0, value_name = "LEVEL")]
    verbosity: u8,
    #[command(subcommand)]
    command: Command,
}

/// Where a cluster keeps its things.
#[derive(Debug, Clone, Args)]
pub struct DataDir {
    /// Directory of the cluster. Another one is another cluster.
    #[arg(long, global = true, default_value = DEFAULT_DATA, env = "FERRITE_DATA_DIR", value_name = "DIR")]
    pub data_dir: PathBuf,
}

impl DataDir {
    pub fn paths(&self) -> Paths {
        Paths::new(&self.data_dir)
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a cluster on this machine.
    Up(Box<Up>),
    /// Stop the cluster and remove everything it made.
    Down {
        #[command(flatten)]
        data: DataDir,
        /// Keep objects, certificates, images and local volumes.
        #[arg(long)]
        keep_data: bool,
    },
    /// Tell whether the cluster runs and how to reach it.
    Status {
        #[command(flatten)]
        data: DataDir,
    },
    /// Import, pull, list and remove images.
    Image(Image),
    /// Run containers without a cluster, with docker's commands.
    #[command(disable_help_flag = true)]
    Docker {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Print our version and the Kubernetes version served.
    Version,
    /// Run the API server alone, with its embedded store.
    #[command(args_override_self = true)]
    KubeApiserver {
        #[command(flatten)]
        place: ServerPlace,
        #[command(flatten)]
        standalone: Box<StandaloneOptions>,
        /// Controllers to run beside it, by upstream's names: `*` is all, `-name` all but that one.
        #[arg(long, value_delimiter = ',', allow_hyphen_values = true, value_name = "NAMES")]
        controllers: Vec<String>,
    },
    /// Run a control plane without a node: API server, controllers and scheduler. Agents join it.
    Server {
        #[command(flatten)]
        place: ServerPlace,
        #[command(flatten)]
        agents: Box<AgentSettings>,
        /// Controllers to run, by upstream's names: `*` is all, `-name` all but that one.
        #[arg(
            long,
            value_delimiter = ',',
            allow_hyphen_values = true,
            value_name = "NAMES",
            default_value = "*"
        )]
        controllers: Vec<String>,
    },
    /// Run a node that joins a cluster.
    Agent(Box<Agent>),
    /// Make, list and revoke the tokens with which nodes join.
    Token(TokenCommand),
    /// List, add, stop, start, pause, partition and delete nodes on this machine.
    Node(NodeCommand),
    /// Run the service proxy alone, for any cluster, with upstream's flags and configuration file.
    #[command(args_override_self = true)]
    KubeProxy(Box<KubeProxy>),
    /// Run the kubelet alone, against any API server and container runtime, with upstream's flags and configuration file.
    #[command(disable_help_flag = true)]
    Kubelet {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Run the controllers alone, against any API server.
    #[command(args_override_self = true)]
    KubeControllerManager(Box<KubeControllerManager>),
    /// Run the scheduler alone, against any API server.
    #[command(args_override_self = true)]
    KubeScheduler(Box<KubeScheduler>),
    /// Explain which node a pod gets and why: the plugin that rejects each node, every score, and the
    /// changes that would help.
    ExplainSchedule(ExplainSchedule),
    /// Show the life of an object step by step: each action on it and on its owners, with time and duration.
    Timeline(Timeline),
    /// Show the data path of a pod, a Service or a name, read back from the kernel.
    Network(NetworkCommand),
    /// Run the container runtime alone, for crictl and for any kubelet.
    Runtime(RuntimeAlone),
    /// Check, compact and measure the embedded store.
    #[command(subcommand)]
    Store(StoreCommand),
    /// Save and restore all objects.
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// Helpers that run inside pods (the image ferrite.local/tools).
    Tools(tools::Tools),
    /// Print a completion script for a shell.
    Completion { shell: clap_complete::Shell },
}

impl Cli {
    pub fn run(self) -> Result<ExitCode, BoxError> {
        let verbosity = match &self.command {
            Command::Kubelet { arguments } => self.verbosity.max(kubelet::verbosity(arguments)),
            Command::KubeProxy(proxy) => self.verbosity.max(proxy.verbosity()),
            _ => self.verbosity,
        };
        logging::start(verbosity);
        match self.command {
            Command::Up(up) => up.run(),
            Command::Down { data, keep_data } => block_on(down::run(&data.paths(), keep_data)),
            Command::Status { data } => status::show(&data.paths()),
            Command::Image(image) => block_on(image.run()),
            Command::Agent(agent) => block_on(agent.run()),
            Command::Token(token) => block_on(token.run()),
            Command::Node(node) => block_on(node.run()),
            Command::KubeProxy(proxy) => block_on(proxy.run()),
            Command::Docker { arguments } => {
                // Reached with our own options before the name; the usual way is in `main`.
                let name = std::iter::once("docker".into());
                Ok(ferrite_docker::cli::main(name.chain(arguments).collect()))
            }
            Command::Version => {
                println!("ferrite {}", env!("CARGO_PKG_VERSION"));
                println!("Kubernetes {}", ferrite_apiserver::KUBERNETES_VERSION);
                Ok(ExitCode::SUCCESS)
            }
            Command::KubeApiserver { place, standalone, controllers } => {
                block_on(Box::pin(place.serve(&controllers, None, *standalone)))
            }
            Command::Server { place, agents, controllers } => {
                let standalone = StandaloneOptions::default();
                block_on(Box::pin(place.serve(&controllers, Some(&*agents), standalone)))
            }
            Command::Kubelet { arguments } => block_on(Box::pin(kubelet::run(arguments))),
            Command::KubeControllerManager(manager) => block_on(manager.run()),
            Command::KubeScheduler(scheduler) => block_on(scheduler.run()),
            Command::ExplainSchedule(explain) => block_on(explain.run()),
            Command::Timeline(timeline) => block_on(timeline.run()),
            Command::Network(command) => block_on(command.run()),
            Command::Runtime(runtime) => block_on(runtime.run()),
            Command::Store(command) => block_on(command.run()),
            Command::Snapshot(command) => command.run(),
            Command::Tools(tools) => tools.run(),
            Command::Completion { shell } => {
                clap_complete::generate(shell, &mut Self::command(), "ferrite", &mut std::io::stdout());
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

/// Runs the asynchronous part of a command. Two workers are enough for a node and keep stacks few.
pub fn block_on<T>(task: impl Future<Output = Result<T, BoxError>>) -> Result<T, BoxError> {
    let workers = watchdog::Workers::default();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = workers.build(builder.max_blocking_threads(16).enable_all(), 2)?;
    let watch = watchdog::watch(workers, runtime.handle().clone())?;
    // One type for the executor, whatever the command.
    let task: Pin<Box<dyn Future<Output = Result<T, BoxError>> + '_>> = Box::pin(task);
    let result = runtime.block_on(task);
    drop(watch);
    // A call that blocks for good must not keep the process.
    runtime.shutdown_timeout(LEFT_BEHIND);
    result
}

/// Time limit of calls that are still in progress when a command is done.
const LEFT_BEHIND: Duration = Duration::from_secs(5);

/// Waits for SIGINT or SIGTERM. A signal that came between two calls ends the second one at once: commands wait for one
/// while they start, and again when they have started.
pub async fn interrupted() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    watchdog::bound_ending()?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // After the listeners are there: no signal falls between them and this.
    if watchdog::is_asked_to_end() {
        return Ok(());
    }
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}
