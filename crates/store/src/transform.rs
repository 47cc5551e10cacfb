//! Values that are stored in another form than they are read in: encryption at rest.
//!
//! A [`Transformer`] stands at the border. A commit stores what it makes of a value, so that the log, checkpoints, the
//! etcd API over the store and a remote etcd have that form alone. The replica in memory has both forms: readers copy
//! from the plain one and pay nothing, and a checkpoint writes the stored one without asking a key service.

use crate::entry::{Entry, Key};
use crate::shared::Shared;
use crate::store::StoreError;
use crate::txn::{Op, Txn};
use bytes::Bytes;
use std::fmt::Debug;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Ends when a transformer has obtained what it needs.
pub type Prepared<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Why a value cannot be transformed. Never holds a part of the value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TransformError(pub String);

/// Makes the stored form of values, and reads it. Keys are the store's own.
pub trait Transformer: Debug + Send + Sync {
    /// The form in which a value is stored. None: as it is.
    fn seal(&self, key: &Key, value: &Bytes) -> Result<Option<Bytes>, TransformError>;

    /// The value that is stored in this form. None: the same. Does not wait: a value that needs an answer of another
    /// process is an error until [`Transformer::prepare`] has obtained the answer.
    fn unseal(&self, key: &Key, stored: &Bytes) -> Result<Option<Bytes>, TransformError>;

    /// Asks other processes for what these stored values need, within a time limit of its own.
    fn prepare<'a>(&'a self, stored: Vec<(Key, Bytes)>) -> Prepared<'a>;

    /// True if a value that is written now would be stored with another key or in another form.
    fn is_stale(&self, key: &Key, stored: &Bytes) -> bool;
}

impl Shared {
    /// Replaces the values of a transaction by their stored forms.
    pub fn seal(&self, txn: &mut Txn) -> Result<(), StoreError> {
        let Some(transformer) = self.transformer.get() else { return Ok(()) };
        for op in &mut txn.ops {
            if let Op::Put { key, value, .. } = op
                && let Some(stored) = transformer.seal(key, value)?
            {
                *value = stored;
            }
        }
        Ok(())
    }

    /// Finds the plain value of an entry, unless that has been done.
    pub fn reveal(&self, key: &Key, entry: &Entry) {
        let Some(transformer) = self.transformer.get() else { return };
        if entry.plain.is_revealed() {
            return;
        }
        match transformer.unseal(key, &entry.value) {
            Ok(value) => entry.plain.reveal(value),
            Err(_) => {
                entry.plain.hide();
                self.unreadable.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Finds the plain values of everything that readers and watches see.
    pub async fn reveal_all(&self) {
        let Some(transformer) = self.transformer.get() else { return };
        let snapshot = self.published().snapshot.clone();
        let history: Vec<(Key, Arc<Entry>)> = {
            let published = self.published();
            let entries = |change: &crate::Change| {
                let both = [change.entry.clone(), change.previous.clone()];
                both.into_iter().flatten().map(|entry| (change.key.clone(), entry)).collect::<Vec<_>>()
            };
            published.history.after(published.history.compacted()).flat_map(entries).collect()
        };
        let mut left = Vec::new();
        for (key, entry) in snapshot.map.iter().chain(history.iter().map(|(key, entry)| (key, entry))) {
            self.reveal(key, entry);
            if entry.is_unreadable() {
                left.push((key.clone(), Arc::clone(entry)));
            }
        }
        if !left.is_empty() {
            let stored = left.iter().map(|(key, entry)| (key.clone(), entry.value.clone())).collect();
            transformer.prepare(stored).await;
            left.iter().for_each(|(key, entry)| self.reveal(key, entry));
        }
        self.unreadable.store(left.iter().any(|(_, entry)| entry.is_unreadable()), Ordering::Relaxed);
    }
}

impl From<TransformError> for StoreError {
    fn from(error: TransformError) -> Self {
        Self::Transform(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HistoryLimits, LogOptions, Store};
    use std::sync::atomic::AtomicBool;

    /// Stores values backwards, and reads them only after it was asked to prepare.
    #[derive(Debug, Default)]
    struct Backwards {
        prepared: AtomicBool,
    }

    fn reversed(value: &Bytes) -> Bytes {
        value.iter().rev().copied().collect()
    }

    impl Transformer for Backwards {
        fn seal(&self, key: &Key, value: &Bytes) -> Result<Option<Bytes>, TransformError> {
            match key.as_bytes() {
                b"refused" => Err(TransformError("no key".into())),
                b"secret" => Ok(Some(reversed(value))),
                _ => Ok(None),
            }
        }

        fn unseal(&self, key: &Key, stored: &Bytes) -> Result<Option<Bytes>, TransformError> {
            match (key.as_bytes(), self.prepared.load(Ordering::Relaxed)) {
                (b"secret", true) => Ok(Some(reversed(stored))),
                (b"secret", false) => Err(TransformError("not prepared".into())),
                _ => Ok(None),
            }
        }

        fn prepare<'a>(&'a self, _: Vec<(Key, Bytes)>) -> Prepared<'a> {
            Box::pin(async { self.prepared.store(true, Ordering::Relaxed) })
        }

        fn is_stale(&self, _: &Key, _: &Bytes) -> bool {
            false
        }
    }

    fn put(key: &str, value: &'static str) -> Txn {
        Txn::default().then(Op::put(Key::from(key), Bytes::from_static(value.as_bytes())))
    }

    #[tokio::test]
    async fn what_is_stored_is_transformed_and_readers_see_the_value() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Store::open(dir.path(), LogOptions::default(), HistoryLimits::default()).unwrap();
        let store = open();
        store.set_transformer(Arc::new(Backwards { prepared: true.into() }));
        store.commit(put("secret", "classified")).await.unwrap();
        store.commit(put("open", "known")).await.unwrap();
        let refused = store.commit(put("refused", "x")).await;
        assert_eq!(refused, Err(StoreError::Transform(TransformError("no key".into()))));
        let entry = store.snapshot().get(b"secret").unwrap().clone();
        assert_eq!((&entry.value[..], &entry.plain()[..]), (&b"deifissalc"[..], &b"classified"[..]));
        assert_eq!(store.snapshot().get(b"open").unwrap().plain(), "known");
        store.checkpoint().await.unwrap();
        drop((entry, store));
        for file in std::fs::read_dir(dir.path()).unwrap() {
            let path = file.unwrap().path();
            let bytes = std::fs::read(&path).unwrap_or_default();
            assert!(!bytes.windows(10).any(|part| part == b"classified"), "{}", path.display());
        }

        // A transformer that has to ask others first.
        let store = open();
        assert!(!store.has_unreadable());
        let later = Arc::new(Backwards::default());
        store.set_transformer(Arc::clone(&later) as _);
        store.commit(put("secret", "classified again")).await.unwrap();
        let entry = store.snapshot().get(b"secret").unwrap().clone();
        assert!(entry.is_unreadable() && store.has_unreadable());
        store.reveal_all().await;
        assert!(!entry.is_unreadable() && !store.has_unreadable());
        assert_eq!(entry.plain(), "classified again");
    }

    #[tokio::test]
    async fn a_watch_from_before_a_restart_sees_values() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Store::open(dir.path(), LogOptions::default(), HistoryLimits::default()).unwrap();
        let store = open();
        store.set_transformer(Arc::new(Backwards { prepared: true.into() }));
        let begun = store.commit(put("open", "known")).await.unwrap().revision();
        store.commit(put("secret", "first")).await.unwrap();
        store.commit(put("secret", "second")).await.unwrap();
        drop(store);
        let store = open();
        store.set_transformer(Arc::new(Backwards::default()));
        store.reveal_all().await;
        let mut watch = store.watch(b"", begun).unwrap();
        let changes = watch.next().await.unwrap();
        let seen: Vec<_> = changes.iter().map(|change| change.entry.as_ref().unwrap().plain()).collect();
        assert_eq!(seen, ["first", "second"]);
        assert_eq!(changes[1].previous.as_ref().unwrap().plain(), "first");
    }
}
