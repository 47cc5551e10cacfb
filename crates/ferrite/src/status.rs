//! The state of a cluster on this machine: its process and its start options.

use crate::apiserver::BoxError;
use crate::machines::{Machines, Role};
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
    /// No runtime has pods of ours: `down` took them away and kept the data.
    #[serde(default)]
    pub vacant: bool,
}

/// The file is a few lines: more is not read.
const STATE_LIMIT: u64 = 1 << 20;

/// Another runtime than the one that has the pods was asked for.
#[derive(Debug, thiserror::Error)]
#[error(
    "the pods of this cluster run in {has}, which would be left with them: leave --container-runtime-endpoint out to go on with it, or run `ferrite down --keep-data` first to move to another"
)]
pub struct RuntimeInUse {
    has: String,
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
            vacant: false,
        }
    }

    /// The socket of the runtime for the pods: the one that has them, or with none there the one asked for. None
    /// is our own.
    pub fn choose_runtime(
        earlier: Option<&Self>,
        asked: Option<&str>,
    ) -> Result<Option<String>, RuntimeInUse> {
        let Some(earlier) = earlier.filter(|state| !state.vacant) else {
            return Ok(asked.map(str::to_owned));
        };
        match asked {
            Some(asked) if earlier.runtime_endpoint.as_deref() != Some(asked) => {
                let own = "ferrite's own runtime".to_owned();
                Err(RuntimeInUse { has: earlier.runtime_endpoint.clone().unwrap_or(own) })
            }
            _ => Ok(earlier.runtime_endpoint.clone()),
        }
    }

    /// Remembers the file with our context, and the context that was current before the first start.
    pub fn remember_kubeconfig(&mut self, paths: &Paths, file: PathBuf, before: Option<String>) {
        let earlier = Self::load(paths).filter(|s| s.kubeconfig.as_ref() == Some(&file));
        self.previous_context = before.or_else(|| earlier.and_then(|s| s.previous_context));
        self.kubeconfig = Some(file);
    }

    pub fn load(paths: &Paths) -> Option<Self> {
        ferrite_json::from_slice(&ferrite_hostfs::read_head(&paths.state(), STATE_LIMIT).ok()?).ok()
    }

    pub fn save(&self, paths: &Paths) -> Result<(), BoxError> {
        let temporary = paths.state().with_extension("tmp");
        std::fs::write(&temporary, ferrite_json::to_vec_pretty(self)?)?;
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

    /// The process ended and no runtime has our pods any more.
    pub fn emptied(paths: &Paths) -> Result<(), BoxError> {
        if let Some(state) = Self::load(paths) {
            Self { pid: None, runtime_endpoint: None, vacant: true, ..state }.save(paths)?;
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

/// The fields of `/proc/<pid>/stat` after the command name, which may hold anything: it is read from the end.
fn stat(pid: i32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')').map(|(_, rest)| rest.to_owned())
}

/// Returns true if a signal has stopped (suspended) the process.
pub fn is_stopped(pid: i32) -> bool {
    stat(pid).is_some_and(|fields| fields.split_whitespace().next() == Some("T"))
}

/// When the process started, in the kernel's ticks: field 22.
pub fn start_time(pid: i32) -> Option<u64> {
    let rest = stat(pid)?;
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
            if !state.node.is_empty() {
                println!("node      {}", state.node);
            }
            for machine in Machines::list(paths) {
                let what = match machine.role {
                    Role::Node => "node",
                    Role::ControlPlane => "server",
                };
                println!("{what:<9} {} ({})", machine.name, Machines::condition(paths, &machine));
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_stay_with_the_runtime_that_has_them() {
        let state = |endpoint: Option<&str>, vacant| State {
            runtime_endpoint: endpoint.map(str::to_owned),
            vacant,
            ..State::new(&Paths::new(std::path::Path::new("/x")), "", "")
        };
        let other = || Some("unix:///other".to_owned());
        for (earlier, asked, chosen) in [
            (None, None, Ok(None)),
            (None, Some("unix:///other"), Ok(other())),
            (Some(state(None, false)), None, Ok(None)),
            (Some(state(None, false)), Some("unix:///other"), Err("ferrite's own runtime")),
            (Some(state(Some("unix:///other"), false)), None, Ok(other())),
            (Some(state(Some("unix:///other"), false)), Some("unix:///other"), Ok(other())),
            (Some(state(Some("unix:///other"), false)), Some("unix:///third"), Err("unix:///other")),
            (Some(state(None, true)), Some("unix:///other"), Ok(other())),
            (Some(state(None, true)), None, Ok(None)),
        ] {
            let got = State::choose_runtime(earlier.as_ref(), asked);
            let got = got.as_ref().map_err(|e| e.has.as_str());
            assert_eq!(got, chosen.as_ref().map_err(|e| *e), "{earlier:?} {asked:?}");
        }
    }
}
