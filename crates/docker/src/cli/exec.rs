//! `exec`.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use clap::Args;
use ferrite_runtime::standalone::{ExecOptions, Running};

use super::options::{parse_env, parse_env_file};
use super::streams::{self, Left, Pipes, Session, Sized, Wanted, parse_keys, pipes};
use super::{Failure, Outcome};
use crate::engine::{Engine, EngineError};

#[derive(Debug, Args)]
pub struct Exec {
    /// Detached mode: run command in the background
    #[arg(short, long)]
    detach: bool,
    /// Keep STDIN open even if not attached
    #[arg(short, long)]
    interactive: bool,
    /// Allocate a pseudo-TTY
    #[arg(short, long)]
    tty: bool,
    /// Set environment variables
    #[arg(short, long)]
    env: Vec<String>,
    /// Read in a file of environment variables
    #[arg(long)]
    env_file: Vec<String>,
    /// Username or UID (format: <name|uid>[:<group|gid>])
    #[arg(short, long, default_value = "")]
    user: String,
    /// Working directory inside the container
    #[arg(short, long, default_value = "")]
    workdir: String,
    /// Give extended privileges to the command
    #[arg(long)]
    privileged: bool,
    /// Override the key sequence for detaching a container
    #[arg(long, default_value = "ctrl-p,ctrl-q")]
    detach_keys: String,
    container: String,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

fn failed(error: &ferrite_cri::Error) -> Failure {
    let text = error.to_string();
    let code = match crate::engine_start_code(&text) {
        code @ (126 | 127) => code as u8,
        _ => 126,
    };
    let text = text.strip_prefix("failed to exec in container: ").unwrap_or(&text);
    Failure { message: format!("OCI runtime exec failed: exec failed: {text}: unknown"), code }
}

impl Exec {
    pub async fn run(self, engine: &Engine) -> Outcome {
        let (view, task) = engine.task(&self.container)?;
        if view.state.status == crate::record::Status::Paused {
            let id = view.container.id;
            return Err(EngineError::Conflict(format!(
                "Container {id} is paused, unpause the container before exec"
            ))
            .into());
        }
        if self.tty && self.interactive && !self.detach && !streams::input_is_terminal() {
            return Err("the input device is not a TTY".into());
        }
        let keys = parse_keys(&self.detach_keys)?;
        let host = |name: &str| std::env::var(name).ok();
        let mut env = Vec::new();
        for path in &self.env_file {
            let text = std::fs::read_to_string(path).map_err(|error| format!("open {path}: {error}"))?;
            env.extend(parse_env_file(&text, &host)?);
        }
        for entry in &self.env {
            env.extend(parse_env(entry, &host)?);
        }
        let options = ExecOptions {
            args: self.command.clone(),
            env,
            user: self.user.clone(),
            working_dir: self.workdir.clone(),
            privileged: self.privileged,
        };
        if self.tty && !self.detach {
            let running = task.exec(options, None).await.map_err(|error| failed(&error))?;
            return at_terminal(running, self.interactive, keys).await;
        }
        let null = || -> Result<OwnedFd, Failure> {
            Ok(std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?.into())
        };
        if self.detach {
            let streams = [null()?, null()?, null()?];
            task.exec(options, Some(streams)).await.map_err(|error| failed(&error))?;
            return Ok(0);
        }
        let (theirs, ours) = pipes(Wanted { stdin: self.interactive, stdout: true, stderr: true })?;
        let stdin = match theirs.stdin {
            Some(stdin) => stdin,
            None => null()?,
        };
        let (Some(stdout), Some(stderr)) = (theirs.stdout, theirs.stderr) else { return Ok(1) };
        let mut running =
            task.exec(options, Some([stdin, stdout, stderr])).await.map_err(|error| failed(&error))?;
        let session = Session::start(ours, false, None);
        let code = running.exit_code().await.map_err(EngineError::from)?;
        // A process that it left may hold the pipes for ever: take what is in them now.
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), session.wait()).await;
        Ok(code as u8)
    }
}

async fn at_terminal(mut running: Running, interactive: bool, keys: Vec<u8>) -> Outcome {
    let Some(terminal) = running.terminal.take() else { return Err("the command has no terminal".into()) };
    let size = Sized::Terminal(Arc::new(terminal.try_clone()?));
    let ours = Pipes {
        stdin: if interactive { Some(terminal.try_clone()?.into()) } else { None },
        stdout: Some(terminal.into()),
        stderr: None,
    };
    let session = Session::start(ours, true, Some(keys));
    let work = async {
        let left = session.wait().await;
        match left {
            Left::Detached => Ok(0),
            Left::Finished => running.exit_code().await.map(|code| code as u8).map_err(EngineError::from),
        }
    };
    tokio::select! {
        code = work => Ok(code?),
        () = async { size.follow().await; std::future::pending::<()>().await } => Ok(0),
    }
}
