//! Rotation of container logs.

use ferrite_cri::RuntimeService;
use ferrite_cri::v1::{
    ContainerFilter, ContainerState, ContainerStateValue, ContainerStatusRequest, ListContainersRequest,
    ReopenContainerLogRequest,
};
use futures_util::StreamExt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// When logs are rotated, and how many are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogLimits {
    /// A log of this many bytes is rotated.
    pub max_size: u64,
    /// Files that are kept of a container's log, the one that is written included.
    pub max_files: usize,
    /// Logs that are rotated at a time.
    pub workers: usize,
    /// The interval at which the sizes of logs are checked.
    pub interval: Duration,
}

impl Default for LogLimits {
    fn default() -> Self {
        Self { max_size: 10 << 20, max_files: 5, workers: 1, interval: Duration::from_secs(10) }
    }
}

/// Looks at the logs of running containers now and then and rotates those that are too large.
pub(crate) async fn run(runtime: Arc<dyn RuntimeService>, limits: LogLimits) {
    let mut ticks = tokio::time::interval(limits.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(e) = pass(&*runtime, limits).await {
            tracing::warn!(error = %e, "could not rotate container logs");
        }
    }
}

async fn pass(runtime: &dyn RuntimeService, limits: LogLimits) -> ferrite_cri::Result<()> {
    let state = ContainerStateValue { state: ContainerState::ContainerRunning.into() };
    let filter = ContainerFilter { state: Some(state), ..ContainerFilter::default() };
    let listed = runtime.list_containers(ListContainersRequest { filter: Some(filter) }).await?;
    let containers = futures_util::stream::iter(listed.containers);
    containers
        .for_each_concurrent(limits.workers.max(1), |container| async move {
            if let Err(error) = check(runtime, &container.id, limits).await {
                tracing::warn!(container = %container.id, %error, "could not rotate a log");
            }
        })
        .await;
    Ok(())
}

/// Why a log was not rotated.
#[derive(Debug, thiserror::Error)]
enum RotateError {
    #[error("the runtime: {0}")]
    Runtime(#[from] ferrite_cri::Error),
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
}

async fn check(runtime: &dyn RuntimeService, id: &str, limits: LogLimits) -> Result<(), RotateError> {
    let request = ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
    let Ok(answer) = runtime.container_status(request).await else { return Ok(()) };
    let Some(status) = answer.status.filter(|s| !s.log_path.is_empty()) else { return Ok(()) };
    let path = PathBuf::from(status.log_path);
    let reopen = || ReopenContainerLogRequest { container_id: id.to_owned() };
    match tokio::fs::symlink_metadata(&path).await {
        Ok(log) if log.is_file() && log.len() >= limits.max_size => {}
        Ok(_) => return Ok(()),
        // Somebody moved it away: the runtime writes to a file without a name.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            runtime.reopen_container_log(reopen()).await?;
            return Ok(());
        }
        Err(source) => return Err(RotateError::File { path, source }),
    }
    let rotating = path.clone();
    let rotated = tokio::task::spawn_blocking(move || rotate_files(&rotating, limits.max_files)).await;
    let moved = rotated.unwrap_or_else(|e| Err(io::Error::other(e)));
    let moved = moved.map_err(|source| RotateError::File { path: path.clone(), source })?;
    if let Err(error) = runtime.reopen_container_log(reopen()).await {
        // The runtime still writes to the old file: give it its name back.
        let _ = tokio::fs::rename(&moved, &path).await;
        return Err(error.into());
    }
    Ok(())
}

/// Moves the log aside and removes the oldest of the earlier files. Returns the new name.
fn rotate_files(path: &Path, max_files: usize) -> io::Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let dir = path.parent().unwrap_or(Path::new("/"));
    let prefix = format!("{name}.");
    let mut old: Vec<PathBuf> = std::fs::read_dir(dir)?
        .flatten()
        .filter(|e| e.file_name().to_string_lossy().starts_with(&prefix))
        .map(|e| e.path())
        .collect();
    // Names end in the time of rotation, so they sort by age.
    old.sort();
    let keep = max_files.saturating_sub(2);
    let excess = old.len().saturating_sub(keep);
    for file in &old[..excess] {
        std::fs::remove_file(file)?;
    }
    let stamp = jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S");
    let mut target = dir.join(format!("{prefix}{stamp}"));
    if target.exists() {
        target = dir.join(format!("{prefix}{stamp}-{:08x}", rand::random::<u32>()));
    }
    std::fs::rename(path, &target)?;
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_files_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        for _ in 0..6 {
            std::fs::write(&path, "x").unwrap();
            rotate_files(&path, 3).unwrap();
        }
        std::fs::write(&path, "x").unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
    }
}
