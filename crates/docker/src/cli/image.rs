//! `pull`, `load`, `save`, `tag` and `rmi`.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use clap::Args;
use ferrite_runtime::image::{Progress, ProgressEvent};

use super::{Failure, Outcome, say};
use crate::engine::{Engine, EngineError, Removed};

#[derive(Debug, Args)]
pub struct Pull {
    /// Suppress verbose output
    #[arg(short, long)]
    quiet: bool,
    /// Set platform if the image is multi-platform capable
    #[arg(long)]
    platform: Option<String>,
    name: String,
}

#[derive(Debug, Args)]
pub struct Load {
    /// Read from tar archive file, instead of STDIN
    #[arg(short, long)]
    input: Option<PathBuf>,
    /// Suppress the load output
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Debug, Args)]
pub struct Save {
    /// Write to a file, instead of STDOUT
    #[arg(short, long)]
    output: Option<PathBuf>,
    #[arg(required = true)]
    images: Vec<String>,
}

#[derive(Debug, Args)]
pub struct Tag {
    source_image: String,
    target_image: String,
}

#[derive(Debug, Args)]
pub struct Rmi {
    /// Force removal of the image
    #[arg(short, long)]
    force: bool,
    /// Do not delete untagged parents
    #[arg(long)]
    no_prune: bool,
    #[arg(required = true)]
    images: Vec<String>,
}

/// A tag that is not given is `latest`; that is said.
fn default_tag(name: &str) -> bool {
    !name.contains('@') && !name.rsplit('/').next().is_some_and(|last| last.contains(':'))
}

/// Pulls, telling what happens line by line.
async fn pull(
    engine: &Engine,
    name: &str,
    platform: Option<&str>,
    tell: fn(&str),
) -> Result<crate::engine::Pulled, EngineError> {
    if default_tag(name) {
        tell("Using default tag: latest");
    }
    let short = name.rsplit_once('@').map_or(name, |(name, _)| name);
    let tag = if default_tag(name) { "latest" } else { name.rsplit([':', '@']).next().unwrap_or("latest") };
    let repository = if default_tag(name) || name.contains('@') {
        short
    } else {
        name.rsplit_once(':').map_or(name, |(repository, _)| repository)
    };
    let reference: Option<ferrite_runtime::image::Reference> = name.parse().ok();
    let place = reference.map_or_else(
        || repository.to_owned(),
        |reference| match reference.registry() {
            "docker.io" => reference.repository().to_owned(),
            _ => reference.name(),
        },
    );
    tell(&format!("{tag}: Pulling from {place}"));
    let seen: Arc<Mutex<std::collections::BTreeSet<String>>> = Arc::default();
    let progress: Progress = Arc::new(move |event| {
        let once = |line: String| {
            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
            if seen.insert(line.clone()) {
                tell(&line);
            }
        };
        let short =
            |digest: &ferrite_runtime::image::Digest| digest.hex().chars().take(12).collect::<String>();
        match event {
            ProgressEvent::Downloading { digest, done, total } if done >= total => {
                once(format!("{}: Download complete", short(&digest)));
            }
            ProgressEvent::Downloading { digest, .. } => {
                once(format!("{}: Pulling fs layer", short(&digest)))
            }
            ProgressEvent::Present { chain_id } => once(format!("{}: Already exists", short(&chain_id))),
            ProgressEvent::Unpacked { chain_id } => once(format!("{}: Pull complete", short(&chain_id))),
            ProgressEvent::Resolved { .. } => {}
        }
    });
    let pulled = engine.pull(name, platform, progress).await?;
    tell(&format!("Digest: {}", pulled.digest));
    let shown = crate::engine_familiar(&pulled.name);
    tell(&if pulled.new {
        format!("Status: Downloaded newer image for {shown}")
    } else {
        format!("Status: Image is up to date for {shown}")
    });
    Ok(pulled)
}

/// Pulls the image for a container; all messages go to standard error.
pub async fn pull_for_run(engine: &Engine, name: &str, platform: Option<&str>) -> Result<(), Failure> {
    pull(engine, name, platform, |line| complain!("{line}")).await.map(drop).map_err(|error| Failure {
        message: format!("docker: Error response from daemon: {error}.\nSee 'docker run --help'."),
        code: 125,
    })
}

impl Pull {
    pub async fn run(self, engine: &Engine) -> Outcome {
        let platform = self.platform.as_deref();
        let tell: fn(&str) = if self.quiet { |_| {} } else { |line| drop(say(line)) };
        let pulled = pull(engine, &self.name, platform, tell).await?;
        say(&pulled.name)?;
        Ok(0)
    }
}

impl Load {
    pub async fn run(self, engine: &Engine) -> Outcome {
        let names = match &self.input {
            Some(path) => {
                let file =
                    std::fs::File::open(path).map_err(|error| format!("open {}: {error}", path.display()))?;
                engine.load(file).await?
            }
            None if std::io::stdin().is_terminal() => {
                return Err("requested load from stdin, but stdin is empty".into());
            }
            None => engine.load(std::io::stdin()).await?,
        };
        for name in names {
            if name.starts_with("sha256:") {
                say(&format!("Loaded image ID: {name}"))?;
            } else {
                say(&format!("Loaded image: {}", crate::engine_familiar(&name)))?;
            }
        }
        Ok(0)
    }
}

impl Save {
    pub fn run(self, engine: &Engine) -> Outcome {
        match &self.output {
            Some(path) => {
                // Complete or not there at all.
                let mut name = path.file_name().unwrap_or_default().to_owned();
                name.push(".partial");
                let partial = path.with_file_name(name);
                let file = std::fs::File::create(&partial)
                    .map_err(|error| format!("failed to save image: {}: {error}", path.display()))?;
                let saved = engine.save_images(&self.images, file);
                if saved.is_err() {
                    let _ = std::fs::remove_file(&partial);
                }
                saved?;
                std::fs::rename(&partial, path)?;
            }
            None if std::io::stdout().is_terminal() => {
                return Err("cowardly refusing to save to a terminal. Use the -o flag or redirect".into());
            }
            None => engine.save_images(&self.images, std::io::stdout().lock())?,
        }
        Ok(0)
    }
}

impl Tag {
    pub async fn run(self, engine: &Engine) -> Outcome {
        engine.tag(&self.source_image, &self.target_image).await?;
        Ok(0)
    }
}

impl Rmi {
    pub async fn run(self, engine: &Engine) -> Outcome {
        let mut code = 0;
        for name in &self.images {
            match engine.remove_image(name, self.force).await {
                Ok(removed) => {
                    for step in removed {
                        say(&match step {
                            Removed::Untagged(name) => format!("Untagged: {name}"),
                            Removed::Deleted(id) => format!("Deleted: {id}"),
                        })?;
                    }
                }
                Err(EngineError::NoSuchImage(_)) if self.force => {}
                Err(error) => {
                    complain!("Error response from daemon: {error}");
                    code = 1;
                }
            }
        }
        Ok(code)
    }
}
