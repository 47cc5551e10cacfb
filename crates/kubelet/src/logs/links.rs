//! Links to the logs of containers, by names that log agents read: `<pod>_<namespace>_<container>-<id>.log`.

use crate::pod::PodId;
use ferrite_hostfs::Dir;
use std::io;
use std::path::{Path, PathBuf};

/// The longest name of a file.
const MAX_NAME: usize = 255;
const SUFFIX: &str = ".log";
const DIRECTORY: &str = "containers";

/// Most names that are looked at for links to logs that are gone.
const MAX_LINKS: usize = 100_000;

/// The directory of the links, beside the logs of pods. None where that has another name than upstream's.
#[derive(Debug, Clone)]
pub(crate) struct LogLinks(Option<Place>);

#[derive(Debug, Clone)]
struct Place {
    parent: PathBuf,
}

impl LogLinks {
    pub(crate) fn beside(log_dir: &Path) -> Self {
        let parent = log_dir.parent().filter(|_| log_dir.ends_with("pods"));
        Self(parent.map(|parent| Place { parent: parent.to_owned() }))
    }

    /// Links to the log of a container. A failure is no reason to stop the container.
    pub(crate) async fn add(&self, pod: &PodId, container: &str, id: &str, log: PathBuf) {
        let name = name(pod, container, id);
        self.work("make", move |place| place.add(&name?, &log)).await;
    }

    pub(crate) async fn remove(&self, pod: &PodId, container: &str, id: &str) {
        let name = name(pod, container, id);
        self.work("remove", move |place| place.remove(&name?)).await;
    }

    /// Removes links to logs that are gone.
    pub(crate) async fn sweep(&self) {
        self.work("look through", |place| place.sweep()).await;
    }

    async fn work(&self, what: &str, work: impl FnOnce(Place) -> io::Result<()> + Send + 'static) {
        let Some(place) = self.0.clone() else { return };
        let done = tokio::task::spawn_blocking(move || work(place)).await;
        if let Err(error) = done.map_err(io::Error::other).flatten() {
            tracing::warn!(%error, "cannot {what} links to logs of containers");
        }
    }
}

/// As upstream: a name that is too long is cut before its suffix.
fn name(pod: &PodId, container: &str, id: &str) -> io::Result<String> {
    let name = format!("{}_{}_{container}-{id}", pod.name, pod.namespace);
    if name.contains(['/', '\0']) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let end = name.floor_char_boundary(MAX_NAME - SUFFIX.len());
    Ok(format!("{}{SUFFIX}", &name[..end]))
}

impl Place {
    /// The directory itself, never one that a link leads to.
    fn open(&self) -> io::Result<Dir> {
        match Dir::open(&self.parent.join(DIRECTORY)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Dir::open(&self.parent)?.ensure_dir(DIRECTORY, 0o755)
            }
            found => found,
        }
    }

    fn add(&self, name: &str, log: &Path) -> io::Result<()> {
        // A runtime may write no file.
        if log.symlink_metadata().is_err() {
            return Ok(());
        }
        match self.open()?.symlink(log, name) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            done => done,
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match self.open()?.remove_file(name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    }

    fn sweep(&self) -> io::Result<()> {
        let dir = self.open()?;
        for name in dir.names(MAX_LINKS)? {
            let Ok(target) = dir.read_link(&name) else { continue };
            let is_ours = Path::new(&name).extension().is_some_and(|end| end == "log");
            let is_gone = target.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
            if is_ours && is_gone {
                dir.remove_file(&name)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Harness;
    use ferrite_json::json;
    use std::fs;

    #[tokio::test]
    async fn links_are_beside_the_logs() {
        let root = tempfile::tempdir().unwrap();
        let id = PodId { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        let log = root.path().join("pods/n_p_u/c/0.log");
        fs::create_dir_all(log.parent().unwrap()).unwrap();
        fs::write(&log, "line").unwrap();
        let links = LogLinks::beside(&root.path().join("pods"));
        let link = root.path().join("containers/p_n_c-1f.log");
        for _ in 0..2 {
            links.add(&id, "c", "1f", log.clone()).await;
            assert_eq!(fs::read_to_string(&link).unwrap(), "line");
        }
        links.remove(&id, "c", "1f").await;
        assert!(link.symlink_metadata().is_err());
        links.add(&id, "c", "2f", root.path().join("none")).await;
        links.add(&id, "c", "../../x", log.clone()).await;
        assert_eq!(fs::read_dir(root.path().join("containers")).unwrap().count(), 0);
        // A kubelet that was killed leaves a link.
        links.add(&id, "c", "3f", log.clone()).await;
        fs::write(root.path().join("containers/other.log"), "not a link").unwrap();
        links.sweep().await;
        assert!(root.path().join("containers/p_n_c-3f.log").exists());
        fs::remove_file(&log).unwrap();
        links.sweep().await;
        let left: Vec<_> = fs::read_dir(root.path().join("containers")).unwrap().flatten().collect();
        assert_eq!((left.len(), left[0].file_name().to_str()), (1, Some("other.log")));
    }

    #[tokio::test(start_paused = true)]
    async fn a_container_has_a_link_for_as_long_as_it_exists() {
        let h = Harness::start().await;
        // The runtime in memory writes no logs.
        let log = h.dir.path().join("logs/pods/default_p_uid-p/c/0.log");
        fs::create_dir_all(log.parent().unwrap()).unwrap();
        fs::write(&log, "line").unwrap();
        h.create("p", json!({"containers": [{"name": "c", "image": "busybox:1"}]}));
        h.until("p", "running", |p| !p["status"]["containerStatuses"][0]["state"]["running"].is_null()).await;
        let link = h.dir.path().join("logs/containers/p_default_c-c2.log");
        assert_eq!(fs::read_link(&link).unwrap(), log);
        h.delete("p", 1);
        h.until_gone("p").await;
        assert!(link.symlink_metadata().is_err());
    }

    #[tokio::test]
    async fn no_link_is_followed_and_no_other_directory_used() {
        let root = tempfile::tempdir().unwrap();
        let id = PodId { namespace: "n".into(), name: "p".into(), uid: "u".into() };
        let victim = root.path().join("victim");
        fs::create_dir_all(&victim).unwrap();
        fs::create_dir_all(root.path().join("a/pods")).unwrap();
        fs::write(root.path().join("a/pods/log"), "").unwrap();
        std::os::unix::fs::symlink(&victim, root.path().join("a/containers")).unwrap();
        let log = root.path().join("a/pods/log");
        LogLinks::beside(&root.path().join("a/pods")).add(&id, "c", "1f", log.clone()).await;
        LogLinks::beside(&root.path().join("a/logs")).add(&id, "c", "1f", log).await;
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 0);
    }

    #[test]
    fn long_names_are_cut() {
        let id = PodId { namespace: "n".into(), name: "p".repeat(253), uid: "u".into() };
        let name = name(&id, "c", "1f").unwrap();
        assert!(name.len() == 255 && name.ends_with(".log"), "{name}");
    }
}
