//! Rotation of container logs.

use crate::pod::context::Context;
use ferrite_cri::v1::{
    ContainerFilter, ContainerState, ContainerStateValue, ContainerStatusRequest, ListContainersRequest,
    ReopenContainerLogRequest,
};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// As upstream's containerLogMonitorInterval.
const INTERVAL: Duration = Duration::from_secs(10);

/// Looks at the logs of running containers now and then and rotates those that are too large.
pub(crate) async fn run(context: Arc<Context>, max_size: u64, max_files: usize) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(e) = pass(&context, max_size, max_files).await {
            tracing::warn!(error = %e, "could not rotate container logs");
        }
    }
}

async fn pass(context: &Context, max_size: u64, max_files: usize) -> ferrite_cri::Result<()> {
    let state = ContainerStateValue { state: ContainerState::ContainerRunning.into() };
    let filter = ContainerFilter { state: Some(state), ..ContainerFilter::default() };
    let listed = context.runtime.list_containers(ListContainersRequest { filter: Some(filter) }).await?;
    for container in listed.containers {
        let request = ContainerStatusRequest { container_id: container.id.clone(), verbose: false };
        let Ok(answer) = context.runtime.container_status(request).await else { continue };
        let Some(status) = answer.status.filter(|s| !s.log_path.is_empty()) else { continue };
        let path = PathBuf::from(status.log_path);
        let too_large =
            tokio::fs::symlink_metadata(&path).await.is_ok_and(|m| m.is_file() && m.len() > max_size);
        if !too_large {
            continue;
        }
        let rotating = path.clone();
        let rotated = tokio::task::spawn_blocking(move || rotate_files(&rotating, max_files)).await;
        match rotated.unwrap_or_else(|e| Err(io::Error::other(e))) {
            Ok(moved) => {
                let request = ReopenContainerLogRequest { container_id: container.id.clone() };
                if let Err(e) = context.runtime.reopen_container_log(request).await {
                    tracing::warn!(container = %container.id, error = %e, "the runtime could not reopen a log");
                    // The runtime still writes to the old file: give it its name back.
                    let _ = tokio::fs::rename(&moved, &path).await;
                }
            }
            Err(e) => tracing::warn!(path = %path.display(), error = %e, "could not rotate a log"),
        }
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
