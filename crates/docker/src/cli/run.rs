//! `run`, `create`, `start` and `attach`.

use clap::Args;
use ferrite_runtime::standalone::{Ending, Task};

use super::image::pull_for_run;
use super::options::ContainerOptions;
use super::streams::{self, Left, Session, Sized, Wanted, forward_signals, parse_keys, pipes};
use super::{Failure, Outcome, say};
use crate::engine::{Engine, EngineError};

/// Exit code of `run` for a failure of the engine itself.
const ENGINE_FAILED: u8 = 125;

#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Run {
    /// Run container in background and print container ID
    #[arg(short, long)]
    detach: bool,
    /// Attach to STDIN, STDOUT or STDERR
    #[arg(short, long, value_parser = ["stdin", "stdout", "stderr", "STDIN", "STDOUT", "STDERR"])]
    attach: Vec<String>,
    /// Proxy received signals to the process
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    sig_proxy: bool,
    #[command(flatten)]
    options: ContainerOptions,
}

#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Create {
    #[command(flatten)]
    options: ContainerOptions,
}

#[derive(Debug, Args)]
pub struct Start {
    /// Attach STDOUT/STDERR and forward signals
    #[arg(short, long)]
    attach: bool,
    /// Attach container's STDIN
    #[arg(short, long)]
    interactive: bool,
    /// Override the key sequence for detaching a container
    #[arg(long, default_value = "ctrl-p,ctrl-q")]
    detach_keys: String,
    #[arg(required = true)]
    containers: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Attach {
    /// Do not attach STDIN
    #[arg(long)]
    no_stdin: bool,
    /// Proxy all received signals to the process
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    sig_proxy: bool,
    /// Override the key sequence for detaching a container
    #[arg(long, default_value = "ctrl-p,ctrl-q")]
    detach_keys: String,
    container: String,
}

fn failed(error: &EngineError) -> Failure {
    let code = match error {
        EngineError::Start(text) => match crate::engine_start_code(text) {
            code @ (126 | 127) => code as u8,
            _ => ENGINE_FAILED,
        },
        _ => ENGINE_FAILED,
    };
    Failure {
        message: format!("docker: Error response from daemon: {error}.\nSee 'docker run --help'."),
        code,
    }
}

fn misused(message: String) -> Failure {
    Failure { message: format!("docker: {message}.\nSee 'docker run --help'."), code: ENGINE_FAILED }
}

/// Makes the container, fetching its image if that is allowed and needed.
async fn create(engine: &Engine, options: &ContainerOptions, attached: bool) -> Result<String, Failure> {
    let request = options.request(attached).map_err(misused)?;
    if let Some(path) = &options.cidfile
        && path.exists()
    {
        let message = format!(
            "Container ID file found, make sure the other container isn't running or delete {}",
            path.display()
        );
        return Err(misused(message));
    }
    let platform = options.platform.as_deref();
    if options.pull == "always" {
        pull_for_run(engine, &options.image, platform).await?;
    }
    let (id, warnings) = match engine.create(request.clone()).await {
        Err(EngineError::NoSuchImage(_)) if options.pull == "missing" => {
            let image = &options.image;
            let tagged =
                image.contains('@') || image.rsplit('/').next().is_some_and(|last| last.contains(':'));
            let shown = if tagged { image.clone() } else { format!("{image}:latest") };
            complain!("Unable to find image '{shown}' locally");
            pull_for_run(engine, image, platform).await?;
            engine.create(request).await
        }
        result => result,
    }
    .map_err(|error| failed(&error))?;
    for warning in warnings {
        complain!("WARNING: {warning}");
    }
    if let Some(path) = &options.cidfile {
        std::fs::write(path, &id)
            .map_err(|error| misused(format!("Failed to create the container ID file: {error}")))?;
    }
    Ok(id)
}

impl Create {
    pub async fn run(self, engine: &Engine) -> Outcome {
        let id = create(engine, &self.options, true).await?;
        say(&id)?;
        Ok(0)
    }
}

impl Run {
    pub async fn run(self, engine: &Engine) -> Outcome {
        if self.detach && !self.attach.is_empty() {
            return Err(misused("Conflicting options: -a and -d".into()));
        }
        let options = &self.options;
        let keys = parse_keys(&options.detach_keys).map_err(misused)?;
        if !self.detach && options.tty && options.interactive && !streams::input_is_terminal() {
            return Err(Failure { message: "the input device is not a TTY".into(), code: 1 });
        }
        if self.detach {
            let id = create(engine, options, false).await?;
            engine.start(&id, None).await.map_err(|error| failed(&error))?;
            say(&id)?;
            return Ok(0);
        }
        let asked = |name: &str| self.attach.iter().any(|stream| stream.eq_ignore_ascii_case(name));
        let all = self.attach.is_empty();
        let wanted = Wanted {
            stdin: options.interactive && (all || asked("stdin")),
            stdout: all || asked("stdout"),
            stderr: (all || asked("stderr")) && !options.tty,
        };
        let id = create(engine, options, true).await?;
        let session =
            Foreground { engine, id: &id, wanted, tty: options.tty, keys, sig_proxy: self.sig_proxy };
        session.start().await
    }
}

/// A container started with us at its streams.
struct Foreground<'a> {
    engine: &'a Engine,
    id: &'a str,
    wanted: Wanted,
    tty: bool,
    keys: Vec<u8>,
    sig_proxy: bool,
}

impl Foreground<'_> {
    async fn start(self) -> Outcome {
        let (theirs, ours) = pipes(self.wanted)?;
        let (task, ending) =
            self.engine.start(self.id, Some(theirs)).await.map_err(|error| failed(&error))?;
        let keys = self.wanted.stdin.then_some(self.keys);
        let session = Session::start(ours, self.tty, keys.filter(|_| self.tty));
        follow(self.engine, self.id, (&task, ending), session, self.tty, self.sig_proxy).await
    }
}

/// Stays with a container until it ends or the user leaves it.
async fn follow(
    engine: &Engine,
    id: &str,
    (task, ending): (&Task, Ending),
    session: Session,
    tty: bool,
    sig_proxy: bool,
) -> Outcome {
    let resize = async {
        if tty {
            Sized::Container(task.clone()).follow().await;
        }
        std::future::pending::<()>().await;
    };
    let signals = async {
        if sig_proxy && !tty {
            let _ = forward_signals(task).await;
        }
        std::future::pending::<()>().await;
    };
    let left = tokio::select! {
        left = session.wait() => left,
        () = resize => Left::Finished,
        () = signals => Left::Finished,
    };
    if matches!(left, Left::Detached) {
        return Ok(0);
    }
    // Output may end before the program does.
    let ended = engine.wait_settled(id, ending);
    let signals = async {
        if sig_proxy && !tty {
            let _ = forward_signals(task).await;
        }
        std::future::pending::<()>().await;
    };
    let exit = tokio::select! {
        exit = ended => exit?,
        () = signals => None,
    };
    Ok(exit.map_or(255, |exit| exit.code as u8))
}

impl Start {
    pub async fn run(self, engine: &Engine) -> Outcome {
        if !self.attach && !self.interactive {
            return super::each(&self.containers, async |name| {
                engine.start(name, None).await.map(|_| name.clone())
            })
            .await;
        }
        let [name] = self.containers.as_slice() else {
            return Err("you cannot start and attach multiple containers at once".into());
        };
        let view = engine.find(name)?;
        let config = &view.container.config;
        let wanted =
            Wanted { stdin: self.interactive && config.open_stdin, stdout: true, stderr: !config.tty };
        let keys = parse_keys(&self.detach_keys)?;
        let id = view.container.id.as_str();
        Foreground { engine, id, wanted, tty: config.tty, keys, sig_proxy: true }.start().await
    }
}

impl Attach {
    pub async fn run(self, engine: &Engine) -> Outcome {
        let (view, task) = engine.task(&self.container).map_err(|error| match error {
            EngineError::Conflict(_) => {
                Failure::from("You cannot attach to a stopped container, start it first")
            }
            other => other.into(),
        })?;
        if view.state.status == crate::record::Status::Paused {
            return Err("You cannot attach to a paused container, unpause it first".into());
        }
        let config = &view.container.config;
        let wanted = Wanted { stdin: !self.no_stdin && config.open_stdin, stdout: true, stderr: !config.tty };
        let keys = parse_keys(&self.detach_keys)?;
        let (theirs, ours) = pipes(wanted)?;
        let ending = task.ending().await;
        task.attach(theirs).await.map_err(EngineError::from)?;
        let session = Session::start(ours, config.tty, Some(keys).filter(|_| config.tty));
        follow(engine, &view.container.id, (&task, ending), session, config.tty, self.sig_proxy).await
    }
}
