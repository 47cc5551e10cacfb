//! Manifests in a directory, or in one file. The kernel reports changes; now and then everything is read anew.

use super::manifest::{self, MAX_BYTES, ManifestError, Origin};
use super::{LocalPods, Source};
use crate::clock::Clock;
use ferrite_component::Watcher;
use k8s_openapi::api::core::v1::Pod;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Manifests of one directory.
const MAX_FILES: usize = 1000;

/// Why a file is no static pod.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("{0}")]
    Read(#[from] io::Error),
    #[error("{0}")]
    Manifest(#[from] ManifestError),
}

/// Reads manifests and remembers the last content of each file.
pub(crate) struct DirectorySource {
    path: PathBuf,
    node: String,
    period: Duration,
    clock: Clock,
    files: BTreeMap<PathBuf, Pod>,
    /// The last complaint about each file, so that each is logged once.
    complaints: BTreeMap<PathBuf, String>,
}

impl DirectorySource {
    pub(crate) fn new(path: PathBuf, node: &str, period: Duration, clock: Clock) -> Self {
        let (files, complaints) = Default::default();
        Self { path, node: node.to_owned(), period, clock, files, complaints }
    }

    /// Reads everything and publishes the pods that should run, again and again.
    pub(crate) async fn run(mut self, pods: Arc<LocalPods>) {
        loop {
            // Watch before reading, so that a change in between is not missed.
            let watcher = Watcher::closed_files(self.directory());
            let read = tokio::task::spawn_blocking(move || {
                let wanted = self.read();
                (self, wanted)
            });
            let Ok((source, wanted)) = read.await else { return };
            self = source;
            if let Some(wanted) = wanted {
                pods.set(Source::File, wanted);
            }
            let changed = async {
                match watcher {
                    Ok(mut watcher) => drop(watcher.changed().await),
                    // There is no directory: it is looked for again.
                    Err(_) => std::future::pending().await,
                }
            };
            let _ = tokio::time::timeout(self.period, changed).await;
        }
    }

    fn directory(&self) -> &Path {
        match self.path.is_file() {
            true => self.path.parent().unwrap_or(&self.path),
            false => &self.path,
        }
    }

    /// The pods of all files. None when nothing could be read: that takes no pod away.
    fn read(&mut self) -> Option<Vec<Pod>> {
        let paths = match self.paths() {
            Ok(paths) => paths,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.complain(&self.path.clone(), "path does not exist, ignoring");
                Vec::new()
            }
            Err(e) => {
                self.complain(&self.path.clone(), &e.to_string());
                return None;
            }
        };
        self.files.retain(|path, _| paths.contains(path));
        self.complaints.retain(|path, _| paths.contains(path) || *path == self.path);
        for path in &paths {
            match self.read_file(path) {
                Ok(pod) => {
                    self.complaints.remove(path);
                    // The same manifest keeps the time at which it was first seen.
                    if self.files.get(path).is_none_or(|known| known.metadata.uid != pod.metadata.uid) {
                        self.files.insert(path.clone(), pod);
                    }
                }
                Err(FileError::Read(e)) if e.kind() == io::ErrorKind::NotFound => {
                    self.files.remove(path);
                }
                // A file that is being written is not the wish to stop the pod.
                Err(e) => self.complain(path, &e.to_string()),
            }
        }
        Some(self.files.values().cloned().collect())
    }

    fn complain(&mut self, path: &Path, problem: &str) {
        if self.complaints.get(path).map(String::as_str) != Some(problem) {
            tracing::error!(path = %path.display(), problem, "cannot use the manifest of static pods");
            self.complaints.insert(path.to_owned(), problem.to_owned());
        }
    }

    /// The files, in the order of their names; hidden ones are none of ours.
    fn paths(&self) -> io::Result<Vec<PathBuf>> {
        if !std::fs::symlink_metadata(&self.path)?.is_dir() {
            return Ok(vec![self.path.clone()]);
        }
        let names = ferrite_hostfs::Dir::open(&self.path)?.names(MAX_FILES)?;
        let visible = names.into_iter().filter(|name| !name.to_string_lossy().starts_with('.'));
        let mut paths: Vec<PathBuf> = visible.map(|name| self.path.join(name)).collect();
        paths.sort();
        Ok(paths)
    }

    fn read_file(&self, path: &Path) -> Result<Pod, FileError> {
        let data = ferrite_hostfs::read_head(path, MAX_BYTES + 1)?;
        let place = path.to_string_lossy();
        let origin = Origin { source: Source::File, place: &place, node: &self.node, seen: self.clock.now() };
        let mut pods = manifest::decode(&data, &origin)?;
        pods.pop().ok_or(FileError::Manifest(ManifestError::NoName))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn manifest(name: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: c, image: i}}]}}\n"
        )
    }

    fn names(pods: Option<Vec<Pod>>) -> String {
        let names: Vec<String> = pods.unwrap().into_iter().filter_map(|p| p.metadata.name).collect();
        names.join(" ")
    }

    #[test]
    fn files_come_change_and_go_and_hostile_ones_do_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut source =
            DirectorySource::new(dir.path().to_owned(), "n", Duration::from_secs(20), Clock::System);
        assert_eq!(names(source.read()), "");
        fs::write(path("b.yaml"), manifest("b")).unwrap();
        fs::write(path("a.json"), manifest("a")).unwrap();
        fs::write(path(".hidden"), manifest("hidden")).unwrap();
        fs::create_dir(path("sub")).unwrap();
        fs::write(path("sub/c.yaml"), manifest("c")).unwrap();
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("zero")).unwrap();
        fs::File::create(path("huge")).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(names(source.read()), "a-n b-n");
        let first = source.read().unwrap();
        assert_eq!(first, source.read().unwrap(), "the same manifest is the same pod");
        fs::write(path("a.json"), &manifest("a")[..40]).unwrap();
        assert_eq!(source.read().unwrap(), first, "a half-written file changes nothing");
        fs::write(path("a.json"), manifest("other")).unwrap();
        assert_eq!(names(source.read()), "other-n b-n");
        fs::remove_file(path("b.yaml")).unwrap();
        assert_eq!(names(source.read()), "other-n");
        fs::remove_dir_all(dir.path()).unwrap();
        assert_eq!(names(source.read()), "");
    }

    #[tokio::test]
    async fn a_change_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let pods = Arc::new(LocalPods::new([Source::File]));
        let mut wanted = pods.wanted_changes();
        let source =
            DirectorySource::new(dir.path().to_owned(), "n", Duration::from_secs(3600), Clock::System);
        let task = tokio::spawn(source.run(pods.clone()));
        pods.ready().await;
        wanted.borrow_and_update();
        fs::write(dir.path().join("a.yaml"), manifest("a")).unwrap();
        wanted.changed().await.unwrap();
        assert_eq!(pods.list().len(), 1);
        task.abort();
    }
}
