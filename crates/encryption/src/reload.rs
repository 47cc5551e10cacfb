//! A configuration that changes while the server runs, and values that could not be read at first.

use crate::transformers::{Active, Encryption, read};
use ferrite_component::FollowedFiles;
use ferrite_component::metrics::registry;
use ferrite_store::Store;
use std::time::Duration;

/// Values that cannot be read are tried again this often.
const AGAIN: Duration = Duration::from_secs(5);

/// A service of a new configuration is not well.
struct Unwell;

impl Encryption {
    /// Follows the file, where that is asked for, and tries again what could not be read. Runs until it is dropped.
    pub async fn run(&self, store: &Store) {
        let mut followed = match (&self.options().file, self.options().reload) {
            (Some(file), true) => Some(FollowedFiles::new(vec![file.clone()])),
            _ => None,
        };
        // A new configuration waits for its services.
        let mut waits = false;
        loop {
            let changed = async {
                match &mut followed {
                    Some(followed) => followed.changed().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = changed => waits = self.reload().await.is_err(),
                () = tokio::time::sleep(AGAIN) => {
                    if waits {
                        waits = self.reload().await.is_err();
                    } else if !store.has_unreadable() {
                        continue;
                    }
                }
            }
            store.reveal_all().await;
        }
    }

    /// As upstream: a file that cannot be used, or whose services are not well, leaves everything as it was.
    async fn reload(&self) -> Result<(), Unwell> {
        let Some(file) = &self.options().file else { return Ok(()) };
        let outcome = registry().counter(
            "apiserver_encryption_config_controller_automatic_reloads_total",
            "Reloads of the encryption configuration, by status.",
            &["status"],
        );
        let mut active = match read(file, true).and_then(|new| Active::new(&new, Some(&self.active()))) {
            Ok(active) => active,
            Err(error) => {
                outcome.with(&["failure"]).increment();
                tracing::error!(%error, "error processing encryption config file: the configuration stays as it was");
                // The next change may be better.
                return Ok(());
            }
        };
        for kms in &active.kms {
            if let Err(error) = kms.check().await {
                outcome.with(&["failure"]).increment();
                tracing::error!(
                    error,
                    "health check for new transformers failed: the encryption configuration stays as it was"
                );
                return Err(Unwell);
            }
        }
        active.follow_services();
        self.replace(active);
        outcome.with(&["success"]).increment();
        tracing::info!(file = %file.display(), "loaded a new encryption configuration");
        Ok(())
    }
}
