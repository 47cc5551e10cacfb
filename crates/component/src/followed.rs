//! Files whose changes take effect while the process runs.

use crate::inotify::Watcher;
use std::hash::{DefaultHasher, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Files are read at least this often, as upstream: not every file system reports changes.
const AT_LEAST: Duration = Duration::from_secs(60);
/// No more of a file is compared.
const MAX_BYTES: u64 = 16 << 20;

/// Reports when the contents of one of several files have changed.
///
/// The directories of the files are watched, so that a file that is replaced by a rename is noticed, as is the exchange
/// of a link by which a mounted volume gets its new contents.
#[derive(Debug)]
pub struct FollowedFiles {
    paths: Vec<PathBuf>,
    watchers: Vec<Watcher>,
    last: u64,
}

impl FollowedFiles {
    /// Changes from now on.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let mut directories: Vec<&Path> = paths.iter().filter_map(|path| path.parent()).collect();
        directories.sort_unstable();
        directories.dedup();
        let watch = |directory: &&Path| {
            let here = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
            Watcher::directory(here)
                .inspect_err(
                    |error| tracing::debug!(%error, path = %here.display(), "cannot watch a directory"),
                )
                .ok()
        };
        let watchers = directories.iter().filter_map(watch).collect();
        let last = contents(&paths);
        Self { paths, watchers, last }
    }

    /// Waits until the contents differ from those at the last call. May be cancelled and called again.
    pub async fn changed(&mut self) {
        loop {
            let now = contents(&self.paths);
            if std::mem::replace(&mut self.last, now) != now {
                return;
            }
            self.event().await;
        }
    }

    async fn event(&mut self) {
        let any = self.watchers.iter_mut().map(|watcher| Box::pin(watcher.changed()));
        let any: Vec<_> = any.collect();
        let sleep = tokio::time::sleep(AT_LEAST);
        if any.is_empty() {
            return sleep.await;
        }
        tokio::select! {
            (result, ..) = first(any) => {
                if result.is_err() {
                    // A broken watch would report without end; the timer is left.
                    self.watchers.clear();
                }
            }
            () = sleep => {}
        }
    }
}

/// Waits for the first of several futures.
async fn first<F: Future + Unpin>(mut all: Vec<F>) -> (F::Output, usize) {
    std::future::poll_fn(|context| {
        for (index, one) in all.iter_mut().enumerate() {
            if let std::task::Poll::Ready(output) = std::pin::Pin::new(one).poll(context) {
                return std::task::Poll::Ready((output, index));
            }
        }
        std::task::Poll::Pending
    })
    .await
}

/// A hash of what the files hold. One that cannot be read counts as empty.
fn contents(paths: &[PathBuf]) -> u64 {
    let mut hash = DefaultHasher::new();
    for path in paths {
        let mut bytes = Vec::new();
        if let Ok(file) = std::fs::File::open(path) {
            let _ = file.take(MAX_BYTES).read_to_end(&mut bytes);
        }
        hash.write_usize(bytes.len());
        hash.write(&bytes);
    }
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changes_are_reported_however_they_are_made() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        std::fs::write(&one, "a").unwrap();
        let mut followed = FollowedFiles::new(vec![one.clone(), other.clone()]);
        let within = Duration::from_secs(20);
        let write = |path: &Path, text: &str| std::fs::write(path, text).unwrap();
        write(&one, "b");
        tokio::time::timeout(within, followed.changed()).await.expect("a file that was written");
        write(&dir.path().join("new"), "c");
        std::fs::rename(dir.path().join("new"), &one).unwrap();
        tokio::time::timeout(within, followed.changed()).await.expect("a file that was replaced");
        let later = tokio::spawn(async move {
            followed.changed().await;
            followed
        });
        write(&other, "d");
        let mut followed = tokio::time::timeout(within, later).await.expect("a file that appeared").unwrap();
        // The same contents are no change.
        write(&one, "c");
        let nothing = tokio::time::timeout(Duration::from_millis(50), followed.changed()).await;
        assert!(nothing.is_err());
    }
}
