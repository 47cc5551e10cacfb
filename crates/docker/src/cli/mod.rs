//! docker's command line.

/// A line on standard error, whether or not anybody listens.
macro_rules! complain {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod container;
mod exec;
mod image;
mod list;
mod network;
mod options;
mod run;
mod stats;
mod streams;
mod system;
mod table;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::engine::{Engine, EngineError};
use crate::paths::{DEFAULT_DATA, Paths};
use crate::template::TemplateError;

/// The command a supervisor runs when its container has ended.
pub(crate) const ENDED: &str = "internal-ended";
/// The command that serves published ports.
pub(crate) const PROXY: &str = "internal-proxy";

/// Containers on this machine, without a cluster: docker's commands.
///
/// No daemon runs: a container belongs to a small process of its own, and its records are files. Published
/// ports are served by one process per container.
#[derive(Debug, Parser)]
#[command(name = "docker", version, arg_required_else_help = true, disable_help_subcommand = true)]
struct Cli {
    /// Directory everything is kept under. Another one shares nothing with this one.
    #[arg(long, default_value = DEFAULT_DATA, env = "FERRITE_DATA_DIR", value_name = "DIR")]
    data_dir: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a command in a new container
    Run(Box<run::Run>),
    /// Create a new container
    Create(Box<run::Create>),
    /// Start one or more stopped containers
    Start(run::Start),
    /// Stop one or more running containers
    Stop(container::Stop),
    /// Restart one or more containers
    Restart(container::Restart),
    /// Kill one or more running containers
    Kill(container::Kill),
    /// Remove one or more containers
    Rm(container::Rm),
    /// Rename a container
    Rename(container::Rename),
    /// Pause all processes within one or more containers
    Pause(container::Names),
    /// Unpause all processes within one or more containers
    Unpause(container::Names),
    /// Block until one or more containers stop, then print their exit codes
    Wait(container::Names),
    /// List containers
    Ps(list::Ps),
    /// Fetch the logs of a container
    Logs(container::Logs),
    /// Run a command in a running container
    Exec(exec::Exec),
    /// Attach local standard input, output, and error streams to a running container
    Attach(run::Attach),
    /// Display the running processes of a container
    Top(container::Top),
    /// Display a live stream of container(s) resource usage statistics
    Stats(stats::Stats),
    /// List port mappings or a specific mapping for the container
    Port(container::Port),
    /// Copy files/folders between a container and the local filesystem
    Cp(container::Cp),
    /// Inspect changes to files or directories on a container's filesystem
    Diff(container::OneName),
    /// Export a container's filesystem as a tar archive
    Export(container::Export),
    /// Return low-level information on containers and images
    Inspect(system::Inspect),
    /// Get real time events from the engine
    Events(system::Events),
    /// List images
    Images(list::Images),
    /// Pull an image from a registry
    Pull(image::Pull),
    /// Load an image from a tar archive or STDIN
    Load(image::Load),
    /// Save one or more images to a tar archive (streamed to STDOUT by default)
    Save(image::Save),
    /// Create a tag TARGET_IMAGE that refers to SOURCE_IMAGE
    Tag(image::Tag),
    /// Remove one or more images
    Rmi(image::Rmi),
    /// Manage volumes
    #[command(subcommand)]
    Volume(system::VolumeCommand),
    /// Manage networks
    #[command(subcommand)]
    Network(network::NetworkCommand),
    /// Display system-wide information
    Info(system::Format),
    /// Show the version information
    Version(system::Format),
    /// Start containers that are to run always, after a reboot
    Restore,
    #[command(name = ENDED, hide = true)]
    Ended { id: String },
}

/// The failure of a command: its message and the exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    pub message: String,
    pub code: u8,
}

pub(crate) type Outcome = Result<u8, Failure>;

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        Self { message: format!("Error response from daemon: {error}"), code: 1 }
    }
}

impl From<TemplateError> for Failure {
    fn from(error: TemplateError) -> Self {
        Self { message: error.to_string(), code: 64 }
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self { message, code: 1 }
    }
}

impl From<&str> for Failure {
    fn from(message: &str) -> Self {
        message.to_owned().into()
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        error.to_string().into()
    }
}

/// The command's own parser, for help and completion elsewhere.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs a command line; the first argument is the program's name.
pub fn main(arguments: Vec<OsString>) -> ExitCode {
    if arguments.get(1).is_some_and(|first| first == PROXY) {
        let rest: Vec<String> =
            arguments.into_iter().skip(2).map(|argument| argument.to_string_lossy().into_owned()).collect();
        return crate::proxy::main(&rest);
    }
    let words: Vec<String> =
        arguments.iter().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect();
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => return wrong_usage(&error, &words),
    };
    if !nix::unistd::geteuid().is_root() {
        complain!("docker: containers need root: run it with sudo");
        return ExitCode::FAILURE;
    }
    if matches!(cli.command, Command::Ended { .. }) {
        // While there is one thread: a control group is left thread by thread.
        ferrite_runtime::standalone::leave_groups();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(16)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            complain!("docker: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(run(cli));
    // A thread that waits for input nobody will type must not keep the program.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if !failure.message.is_empty() {
                complain!("{}", failure.message);
            }
            ExitCode::from(failure.code)
        }
    }
}

/// Help goes to standard output; mistakes have the code the command's users expect.
fn wrong_usage(error: &clap::Error, words: &[String]) -> ExitCode {
    use clap::error::ErrorKind;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        ErrorKind::InvalidSubcommand => {
            let name = match error.get(clap::error::ContextKind::InvalidSubcommand) {
                Some(clap::error::ContextValue::String(name)) => name.as_str(),
                _ => "",
            };
            complain!("docker: '{name}' is not a docker command.\nSee 'docker --help'");
            return ExitCode::FAILURE;
        }
        _ => {}
    }
    let _ = error.print();
    let runs = words.iter().any(|word| matches!(word.as_str(), "run" | "create"));
    ExitCode::from(if runs { 125 } else { 1 })
}

async fn run(cli: Cli) -> Outcome {
    let engine = Engine::open(Paths::new(&cli.data_dir))?;
    if !matches!(cli.command, Command::Ended { .. } | Command::Restore) {
        engine.mend_restarts();
    }
    match cli.command {
        Command::Run(run) => run.run(&engine).await,
        Command::Create(create) => create.run(&engine).await,
        Command::Start(start) => start.run(&engine).await,
        Command::Stop(stop) => stop.run(&engine).await,
        Command::Restart(restart) => restart.run(&engine).await,
        Command::Kill(kill) => kill.run(&engine).await,
        Command::Rm(rm) => rm.run(&engine).await,
        Command::Rename(rename) => rename.run(&engine).await,
        Command::Pause(names) => names.pause(&engine, true).await,
        Command::Unpause(names) => names.pause(&engine, false).await,
        Command::Wait(names) => names.wait(&engine).await,
        Command::Ps(ps) => ps.run(&engine),
        Command::Logs(logs) => logs.run(&engine),
        Command::Exec(exec) => exec.run(&engine).await,
        Command::Attach(attach) => attach.run(&engine).await,
        Command::Top(top) => top.run(&engine),
        Command::Stats(stats) => stats.run(&engine).await,
        Command::Port(port) => port.run(&engine),
        Command::Cp(cp) => cp.run(&engine),
        Command::Diff(diff) => diff.diff(&engine),
        Command::Export(export) => export.run(&engine),
        Command::Inspect(inspect) => inspect.run(&engine),
        Command::Events(events) => events.run(&engine),
        Command::Images(images) => images.run(&engine),
        Command::Pull(pull) => pull.run(&engine).await,
        Command::Load(load) => load.run(&engine).await,
        Command::Save(save) => save.run(&engine),
        Command::Tag(tag) => tag.run(&engine).await,
        Command::Rmi(rmi) => rmi.run(&engine).await,
        Command::Volume(volume) => volume.run(&engine),
        Command::Network(network) => network.run(&engine).await,
        Command::Info(format) => system::info(&engine, &format),
        Command::Version(format) => system::version(&format),
        Command::Restore => {
            for name in engine.restore().await? {
                println!("{name}");
            }
            Ok(0)
        }
        Command::Ended { id } => {
            engine.ended(&id).await?;
            Ok(0)
        }
    }
}

/// Does something to each name; goes on after a failure and ends with one.
pub(crate) async fn each<'a, F, Fut>(names: &'a [String], mut action: F) -> Outcome
where
    F: FnMut(&'a String) -> Fut,
    Fut: Future<Output = Result<String, EngineError>>,
{
    let mut code = 0;
    for name in names {
        match action(name).await {
            Ok(line) if line.is_empty() => {}
            Ok(line) => say(&line)?,
            Err(error) => {
                complain!("Error response from daemon: {error}");
                code = 1;
            }
        }
    }
    Ok(code)
}

/// Prints a line on standard output. A reader that has closed it is no failure.
pub(crate) fn say(line: &str) -> Result<(), Failure> {
    use std::io::Write;
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            Err(Failure { message: String::new(), code: 0 })
        }
        result => Ok(result?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parser_is_sound() {
        Cli::command().debug_assert();
    }
}
