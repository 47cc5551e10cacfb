//! Notices that a log may have grown.

use ferrite_component::Watcher;
use std::path::Path;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Followers that the kernel notifies. It gives a user 128 instances of inotify by default, and root shares them with
/// every other service of the machine and with containers.
const NOTIFIED: usize = 32;
/// All others look this often.
const PERIOD: Duration = Duration::from_secs(1);

static PLACES: Semaphore = Semaphore::const_new(NOTIFIED);

/// Changes in one directory.
pub(super) struct Changes {
    watcher: Option<(Watcher, SemaphorePermit<'static>)>,
}

impl Changes {
    /// From now on.
    pub(super) fn of(directory: &Path) -> Self {
        let watch = |place| Some((Watcher::directory(directory).ok()?, place));
        Self { watcher: PLACES.try_acquire().ok().and_then(watch) }
    }

    /// Waits until something may have changed.
    pub(super) async fn next(&mut self) {
        let notified = match &mut self.watcher {
            Some((watcher, _)) => watcher.changed().await.is_ok(),
            None => false,
        };
        if !notified {
            self.watcher = None;
            tokio::time::sleep(PERIOD).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn many_followers_leave_the_kernels_watches_to_others() {
        let directory = tempfile::tempdir().unwrap();
        let mut all: Vec<Changes> = (0..200).map(|_| Changes::of(directory.path())).collect();
        let notified = all.iter().filter(|changes| changes.watcher.is_some()).count();
        assert!(notified <= NOTIFIED, "{notified}");
        // The others find changes all the same, and take no time of a machine whose clock stands still.
        let last = all.last_mut().unwrap();
        assert!(last.watcher.is_none());
        last.next().await;
    }
}
