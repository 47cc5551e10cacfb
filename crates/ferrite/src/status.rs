//! What is known about a cluster on this machine: who runs it and how it was started.

use crate::apiserver::BoxError;
use crate::paths::Paths;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::ExitCode;

/// Kept in the data directory from the first start until `down`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// The process that runs the cluster; none when it was stopped in order.
    pub pid: Option<i32>,
    /// When that process started, in the kernel's ticks: a recycled number is not mistaken for it.
    #[serde(default)]
    pub started: u64,
    pub url: String,
    pub node: String,
    /// The user's kubeconfig we have written to.
    pub kubeconfig: Option<PathBuf>,
    /// The context that was current before ours.
    pub previous_context: Option<String>,
    #[serde(default)]
    pub insecure_registries: Vec<String>,
    /// The socket of the runtime that has our pods; none when it is our own.
    #[serde(default)]
    pub runtime_endpoint: Option<String>,
}

impl State {
    pub fn new(_paths: &Paths, url: &str, node: &str) -> Self {
        let pid = std::process::id() as i32;
        Self {
            pid: Some(pid),
            started: start_time(pid).unwrap_or(0),
            url: url.into(),
            node: node.into(),
            kubeconfig: None,
            previous_context: None,
            insecure_registries: Vec::new(),
            runtime_endpoint: None,
        }
    }

    /// Remembers which file has our context, and what was current before the first start.
    pub fn remember_kubeconfig(&mut self, paths: &Paths, file: PathBuf, before: Option<String>) {
        let earlier = Self::load(paths).filter(|s| s.kubeconfig.as_ref() == Some(&file));
        self.previous_context = before.or_else(|| earlier.and_then(|s| s.previous_context));
        self.kubeconfig = Some(file);
    }

    pub fn load(paths: &Paths) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(paths.state()).ok()?).ok()
    }

    pub fn save(&self, paths: &Paths) -> Result<(), BoxError> {
        let temporary = paths.state().with_extension("tmp");
        std::fs::write(&temporary, serde_json::to_vec_pretty(self)?)?;
        std::fs::rename(&temporary, paths.state())?;
        Ok(())
    }

    /// The process ended in order; everything else stays known.
    pub fn stopped(paths: &Paths) -> Result<(), BoxError> {
        if let Some(mut state) = Self::load(paths) {
            state.pid = None;
            state.save(paths)?;
        }
        Ok(())
    }

    /// The process that runs the cluster, if it still does.
    pub fn running(&self) -> Option<i32> {
        self.pid.filter(|pid| start_time(*pid) == Some(self.started))
    }

    pub fn refuse_if_running(paths: &Paths) -> Result<(), BoxError> {
        let Some(pid) = Self::load(paths).and_then(|s| s.running()) else { return Ok(()) };
        Err(format!(
            "the cluster in {} is already run by process {pid}: stop it with `kill {pid}` or remove it with `ferrite down`, or start another with --data-dir",
            paths.data.display()
        )
        .into())
    }
}

/// Field 22 of /proc/<pid>/stat. The command name before it may hold anything, so it is read from the end.
fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    if fields.next() == Some("Z") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// `ferrite status`.
pub fn show(paths: &Paths) -> Result<ExitCode, BoxError> {
    let Some(state) = State::load(paths) else {
        println!("no cluster in {}: start one with `ferrite up`", paths.data.display());
        return Ok(ExitCode::from(3));
    };
    match state.running() {
        Some(pid) => {
            println!("running   process {pid}");
            println!("API       {}", state.url);
            println!("node      {}", state.node);
        }
        None => println!("stopped   its containers go on; `ferrite up` takes them up again"),
    }
    println!("data      {}", paths.data.display());
    println!("access    {}", paths.admin_kubeconfig().display());
    if let Some(file) = &state.kubeconfig {
        println!("context   {} in {}", paths.cluster, file.display());
    }
    Ok(if state.running().is_some() { ExitCode::SUCCESS } else { ExitCode::from(3) })
}
