//! Rotation of container logs.

use ferrite_cri::RuntimeService;
use ferrite_cri::v1::{
    ContainerFilter, ContainerState, ContainerStateValue, ContainerStatusRequest, ListContainersRequest,
    ReopenContainerLogRequest,
};
use futures_util::StreamExt;
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
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

/// The end of a compressed log's name, and of one that is being compressed.
const COMPRESSED: &str = ".gz";
const UNFINISHED: &str = ".tmp";

/// True if a log is not needed: an unfinished one, and one that was compressed.
fn is_unused(name: &str, all: &[String]) -> bool {
    let compressed = format!("{name}{COMPRESSED}");
    name.ends_with(UNFINISHED) || (!name.ends_with(COMPRESSED) && all.contains(&compressed))
}

/// Writes the log anew in a compressed form. A crash leaves the log, or both.
fn compress(dir: &Path, name: &str) -> io::Result<()> {
    let unfinished = dir.join(format!("{name}{UNFINISHED}"));
    let mut log = std::fs::File::options()
        .read(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
        .open(dir.join(name))?;
    let mode = log.metadata()?;
    if !mode.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a rotated log is no regular file"));
    }
    let file = std::fs::File::options()
        .create_new(true)
        .write(true)
        .mode(mode.permissions().mode() & 0o777)
        .open(&unfinished)?;
    let written = (|| {
        let mut writer = flate2::write::GzEncoder::new(file, flate2::Compression::default());
        io::copy(&mut log, &mut writer)?;
        writer.finish()?;
        std::fs::rename(&unfinished, dir.join(format!("{name}{COMPRESSED}")))
    })();
    if written.is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
    written?;
    std::fs::remove_file(dir.join(name))
}

/// Moves the log aside, removes the oldest of the earlier files and compresses the others. Returns the new name. As
/// upstream, the newest of the earlier files is compressed at the next rotation: somebody may still read it.
fn rotate_files(path: &Path, max_files: usize) -> io::Result<PathBuf> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let dir = path.parent().unwrap_or(Path::new("/"));
    let prefix = format!("{name}.");
    let all: Vec<String> = std::fs::read_dir(dir)?
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .filter(|name| name.starts_with(&prefix))
        .collect();
    let (unused, mut old): (Vec<String>, Vec<String>) =
        all.iter().cloned().partition(|name| is_unused(name, &all));
    // Names have the time of rotation in them, so they sort by age.
    old.sort();
    let excess = old.len().saturating_sub(max_files.saturating_sub(2));
    for file in unused.iter().chain(&old[..excess]) {
        std::fs::remove_file(dir.join(file))?;
    }
    for file in old[excess..].iter().filter(|file| !file.ends_with(COMPRESSED)) {
        compress(dir, file)?;
    }
    let stamp = jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S");
    let mut target = dir.join(format!("{prefix}{stamp}"));
    // A file whose compressed form is there is taken for a leftover.
    if target.exists() || dir.join(format!("{prefix}{stamp}{COMPRESSED}")).exists() {
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

    #[test]
    fn earlier_files_are_compressed() {
        use std::io::Read;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        // An unfinished one, and one that a crash left beside its compressed form.
        for name in ["0.log.20200101-000000.tmp", "0.log.20200102-000000", "0.log.20200102-000000.gz"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        for text in ["first", "second", "third"] {
            std::fs::write(&path, text).unwrap();
            rotate_files(&path, 10).unwrap();
        }
        let mut names: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let compressed: Vec<&String> = names.iter().filter(|name| name.ends_with(".gz")).collect();
        assert_eq!((names.len(), compressed.len()), (4, 3), "the newest is not compressed: {names:?}");
        let texts: Vec<String> = compressed[1..]
            .iter()
            .map(|name| {
                let mut text = String::new();
                let file = std::fs::File::open(dir.path().join(name)).unwrap();
                flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
                text
            })
            .collect();
        assert!(texts.contains(&"first".to_owned()) && texts.contains(&"second".to_owned()), "{texts:?}");
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("0.log.20300101-000000")).unwrap();
        std::fs::write(&path, "fourth").unwrap();
        assert!(rotate_files(&path, 10).is_err(), "a link is no log");
    }
}
