//! A configuration that changes while the server runs, and values that could not be read at first.

use crate::transformers::{Active, Encryption, read};
use ferrite_component::metrics::{Counter, Family, registry};
use ferrite_store::Store;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// Values that cannot be read are tried again this often.
const AGAIN: Duration = Duration::from_secs(5);

static RELOADS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    registry().counter(
        "apiserver_encryption_config_controller_automatic_reloads_total",
        "Reloads of the encryption configuration, by status.",
        &["status"],
    )
});

/// A service of a new configuration is not well.
struct Unwell;

impl Encryption {
    /// Follows the file, where that is asked for, and tries again what could not be read. Runs until it is dropped.
    pub async fn run(&self, store: &Store) {
        let mut followed = self.followed();
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
        let mut active = match read(file, true).and_then(|new| Active::new(&new, Some(&self.active()))) {
            Ok(active) => active,
            Err(error) => {
                RELOADS.with(&["failure"]).increment();
                tracing::error!(%error, "error processing encryption config file: the configuration stays as it was");
                // The next change may be better.
                return Ok(());
            }
        };
        for kms in &active.kms {
            if let Err(error) = kms.check().await {
                RELOADS.with(&["failure"]).increment();
                tracing::error!(
                    error,
                    "health check for new transformers failed: the encryption configuration stays as it was"
                );
                return Err(Unwell);
            }
        }
        active.follow_services();
        self.replace(active);
        RELOADS.with(&["success"]).increment();
        tracing::info!(file = %file.display(), "loaded a new encryption configuration");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EncryptionOptions, GroupResource, StoredAt};
    use bytes::Bytes;
    use ferrite_store::{Key, Op, Txn};

    const KEY: &str = "/registry/secrets/default/a";

    fn configuration(cipher: &str, name: &str) -> String {
        format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n- resources: [secrets]\n  providers:\n  - {cipher}: {{keys: [{{name: {name}, secret: YWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWE=}}]}}\n  - identity: {{}}\n"
        )
    }

    async fn stored(store: &Store) -> Bytes {
        let put = Op::put(Key::from(KEY), Bytes::from_static(b"{}"));
        store.commit(Txn::default().then(put)).await.unwrap();
        store.snapshot().get(KEY.as_bytes()).unwrap().value.clone()
    }

    #[tokio::test]
    async fn files_are_followed_and_bad_ones_change_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("encryption.yaml");
        std::fs::write(&file, configuration("aescbc", "one")).unwrap();
        let options =
            EncryptionOptions { file: Some(file.clone()), reload: true, etcd_prefix: "/registry".into() };
        let secrets = StoredAt { path: "secrets".into(), resource: GroupResource::new("", "secrets") };
        let encryption = Encryption::open(options, [secrets]).await.unwrap();
        let store = Arc::new(Store::memory());
        store.set_transformer(Arc::clone(&encryption) as _);
        assert!(stored(&store).await.starts_with(b"k8s:enc:aescbc:v1:one:"));
        let follows = (Arc::clone(&encryption), Arc::clone(&store));
        let following = tokio::spawn(async move { follows.0.run(&follows.1).await });
        let failures = || RELOADS.with(&["failure"]).get();
        for bad in ["", "apiVersion: v1\nkind: Pod\n", &configuration("aescbc", "one")[..120]] {
            let before = failures();
            std::fs::write(&file, bad).unwrap();
            let noticed = async {
                while failures() == before {
                    tokio::task::yield_now().await;
                }
            };
            tokio::time::timeout(Duration::from_secs(30), noticed).await.expect("a bad file is noticed");
            assert!(stored(&store).await.starts_with(b"k8s:enc:aescbc:v1:one:"));
        }
        std::fs::write(&file, configuration("secretbox", "two")).unwrap();
        let reloaded = async {
            while !stored(&store).await.starts_with(b"k8s:enc:secretbox:v1:two:") {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), reloaded).await.expect("the new file counts");
        following.abort();
    }
}
