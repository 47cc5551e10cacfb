//! The store itself: numbering at the head, durability in the middle, publication at the end.

use crate::entry::{Entry, Key, Lease, LeaseId, Revision};
use crate::history::{Change, History, HistoryLimits};
use crate::log::{self, Log, LogOptions, Record};
use crate::replica::{Map, Snapshot};
use crate::txn::{Op, Outcome, Txn};
use crate::watch::{Subscriber, Watch, WatchEnd};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use tokio::sync::{Notify, oneshot};

/// Why the store could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("another process holds the store in {path}")]
    Held { path: String },
    #[error("cannot open the store in {path}")]
    Io {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error(transparent)]
    Corrupt(#[from] log::CorruptError),
}

/// Why a commit or a read did not happen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Writing failed in a way that can pass (no space): nothing of this transaction happened.
    #[error("the change could not be written: {0}")]
    Write(String),
    /// The disk did not confirm what was written. The store takes no more changes until it is opened anew.
    #[error("the store has stopped taking changes: {0}")]
    Failed(String),
    #[error("the store is closed")]
    Closed,
    #[error("revision {wanted} has been compacted, the oldest retained is {oldest}")]
    Compacted { wanted: Revision, oldest: Revision },
    #[error("revision {wanted} is in the future, the store is at {current}")]
    Future { wanted: Revision, current: Revision },
    #[error("lease {} does not exist", .0.0)]
    NoSuchLease(LeaseId),
}

/// What readers see. Replaced as a whole under a short write lock.
#[derive(Debug)]
pub(crate) struct Published {
    pub snapshot: Snapshot,
    pub history: History,
}

/// What the next transaction is compared with: everything numbered, durable or not.
#[derive(Debug)]
struct Head {
    map: Map,
    revision: Revision,
    leases: BTreeMap<LeaseId, Lease>,
    pending: Vec<Pending>,
    /// Set once the log can no longer be trusted or the store is closing; refuses every further commit.
    refused: Option<StoreError>,
}

/// A numbered transaction on its way to the disk.
#[derive(Debug)]
struct Pending {
    /// None for a transaction that changed nothing: it only waits for what it has seen to become durable.
    record: Option<Record>,
    changes: Vec<Change>,
    outcome: Outcome,
    done: oneshot::Sender<Result<Outcome, StoreError>>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    head: Mutex<Head>,
    work: Condvar,
    published: RwLock<Published>,
    subscribers: Mutex<Vec<Subscriber>>,
}

impl Shared {
    fn head(&self) -> MutexGuard<'_, Head> {
        // A panic while the head was locked would have been a bug in pure code; the state is still whole
        // because every change to it is made after the last point that can fail.
        self.head.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn published(&self) -> RwLockReadGuard<'_, Published> {
        self.published.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.head().refused == Some(StoreError::Closed)
    }

    fn ring(&self, changes: &[Change]) {
        let mut subscribers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        subscribers.retain(|s| match s.bell.upgrade() {
            None => false,
            Some(bell) => {
                if changes.iter().any(|c| c.key.as_bytes().starts_with(&s.prefix)) {
                    bell.notify_one();
                }
                true
            }
        });
    }

    fn ring_all(&self) {
        let subscribers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
        subscribers.iter().filter_map(|s| s.bell.upgrade()).for_each(|bell| bell.notify_one());
    }
}

/// A handle to the store. Dropping the last one writes what is pending and closes it.
#[derive(Debug)]
pub struct Store {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

impl Store {
    /// A store that lives in memory alone, for tests.
    pub fn memory() -> Self {
        Self::start(log::Recovered::default(), None, HistoryLimits::default())
    }

    /// Opens or creates the store in the directory `path` and recovers what it holds.
    pub fn open(path: &Path, options: LogOptions, limits: HistoryLimits) -> Result<Self, OpenError> {
        let (log, recovered) = Log::open(path, options)?;
        Ok(Self::start(recovered, Some(log), limits))
    }

    fn start(recovered: log::Recovered, log: Option<Log>, limits: HistoryLimits) -> Self {
        let mut history = History::new(limits, recovered.base);
        recovered.changes.into_iter().for_each(|c| history.push(c));
        let snapshot = Snapshot { map: recovered.map.clone(), revision: recovered.revision };
        let shared = Arc::new(Shared {
            head: Mutex::new(Head {
                map: recovered.map,
                revision: recovered.revision,
                leases: recovered.leases,
                pending: Vec::new(),
                refused: None,
            }),
            work: Condvar::new(),
            published: RwLock::new(Published { snapshot, history }),
            subscribers: Mutex::new(Vec::new()),
        });
        let for_writer = Arc::clone(&shared);
        let writer = std::thread::Builder::new()
            .name("store-writer".into())
            .stack_size(256 << 10)
            .spawn(move || write_loop(&for_writer, log))
            .expect("the operating system can start one more thread");
        Self { shared, writer: Some(writer) }
    }

    /// Commits a transaction. When it answers, the outcome is durable and visible to every reader.
    pub async fn commit(&self, txn: Txn) -> Result<Outcome, StoreError> {
        let (done, answer) = oneshot::channel();
        {
            let mut head = self.shared.head();
            if let Some(refusal) = &head.refused {
                return Err(refusal.clone());
            }
            for op in &txn.ops {
                if let Op::Put { lease, .. } = op
                    && *lease != LeaseId::NONE
                    && !head.leases.contains_key(lease)
                {
                    return Err(StoreError::NoSuchLease(*lease));
                }
            }
            let pending = head.apply(txn, done);
            head.pending.push(pending);
        }
        self.shared.work.notify_one();
        answer.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Makes a lease that ends at `expires_at` (seconds since the epoch), durably.
    pub async fn grant(&self, expires_at: u64) -> Result<LeaseId, StoreError> {
        let (done, answer) = oneshot::channel();
        let id = {
            let mut head = self.shared.head();
            if let Some(refusal) = &head.refused {
                return Err(refusal.clone());
            }
            let id = LeaseId(head.leases.last_key_value().map_or(1, |(id, _)| id.0 + 1));
            let lease = Lease { id, expires_at };
            head.leases.insert(id, lease);
            let revision = head.revision;
            head.pending.push(Pending {
                record: Some(Record { revision, ops: Vec::new(), granted: Some(lease), revoked: None }),
                changes: Vec::new(),
                outcome: Outcome::Committed { revision },
                done,
            });
            id
        };
        self.shared.work.notify_one();
        answer.await.unwrap_or(Err(StoreError::Closed)).map(|_| id)
    }

    /// Ends a lease and deletes the keys attached to it, together.
    pub async fn revoke(&self, id: LeaseId) -> Result<Outcome, StoreError> {
        let (done, answer) = oneshot::channel();
        {
            let mut head = self.shared.head();
            if let Some(refusal) = &head.refused {
                return Err(refusal.clone());
            }
            if head.leases.remove(&id).is_none() {
                return Err(StoreError::NoSuchLease(id));
            }
            let attached: Vec<Op> = head
                .map
                .iter()
                .filter(|(_, e)| e.lease == id)
                .map(|(k, _)| Op::Delete { key: k.clone() })
                .collect();
            let mut pending = head.apply(Txn { compares: Vec::new(), ops: attached }, done);
            let revision = head.revision;
            let record = pending.record.get_or_insert(Record { revision, ..Record::default() });
            record.revoked = Some(id);
            head.pending.push(pending);
        }
        self.shared.work.notify_one();
        answer.await.unwrap_or(Err(StoreError::Closed))
    }

    /// The leases, soonest end first.
    pub fn leases(&self) -> Vec<Lease> {
        let mut leases: Vec<Lease> = self.shared.head().leases.values().copied().collect();
        leases.sort_by_key(|l| l.expires_at);
        leases
    }

    /// The committed state now.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.published().snapshot.clone()
    }

    /// The state as it was at `revision`, as long as the history reaches back to it.
    pub fn snapshot_at(&self, revision: Revision) -> Result<Snapshot, StoreError> {
        let published = self.shared.published();
        let current = published.snapshot.revision;
        if revision > current {
            return Err(StoreError::Future { wanted: revision, current });
        }
        let oldest = published.history.compacted();
        if revision < oldest {
            return Err(StoreError::Compacted { wanted: revision, oldest });
        }
        let mut map = published.snapshot.map.clone();
        for change in published.history.after(revision).rev() {
            match &change.previous {
                Some(previous) => map.insert(change.key.clone(), Arc::clone(previous)),
                None => map.remove(change.key.as_bytes()),
            };
        }
        Ok(Snapshot { map, revision })
    }

    /// Watches the keys under `prefix` for what happens after `after`.
    pub fn watch(&self, prefix: &[u8], after: Revision) -> Result<Watch, WatchEnd> {
        let oldest = self.shared.published().history.compacted();
        if after < oldest {
            return Err(WatchEnd::Compacted { wanted: after.next(), oldest: oldest.next() });
        }
        let bell = Arc::new(Notify::new());
        let subscriber = Subscriber { prefix: prefix.to_vec(), bell: Arc::downgrade(&bell) };
        self.shared.subscribers.lock().unwrap_or_else(PoisonError::into_inner).push(subscriber);
        Ok(Watch { shared: Arc::clone(&self.shared), prefix: prefix.to_vec(), bell, position: after })
    }

    /// Forgets the history up to and including `revision`.
    pub fn compact(&self, revision: Revision) -> Result<(), StoreError> {
        let mut published = self.shared.published.write().unwrap_or_else(PoisonError::into_inner);
        let current = published.snapshot.revision;
        if revision > current {
            return Err(StoreError::Future { wanted: revision, current });
        }
        published.history.drop_through(revision);
        Ok(())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.head().refused.get_or_insert(StoreError::Closed);
        self.shared.work.notify_one();
        if let Some(writer) = self.writer.take() {
            // The writer only ends by returning; a panic in it has been reported on standard error.
            let _ = writer.join();
        }
        self.shared.ring_all();
    }
}

impl Head {
    /// Compares, applies and numbers a transaction.
    fn apply(&mut self, txn: Txn, done: oneshot::Sender<Result<Outcome, StoreError>>) -> Pending {
        let failed = txn.compares.iter().find(|c| !c.holds(self.get(c.key()).map(|e| &**e)));
        if let Some(failed) = failed {
            let current = self.get(failed.key()).cloned();
            let outcome = Outcome::Conflict { revision: self.revision, current };
            return Pending { record: None, changes: Vec::new(), outcome, done };
        }
        let revision = self.revision.next();
        let mut changes = Vec::with_capacity(txn.ops.len());
        let mut ops = Vec::with_capacity(txn.ops.len());
        for op in txn.ops {
            let previous = self.get(op.key()).cloned();
            let key = op.key().clone();
            match &op {
                Op::Put { value, lease, .. } => {
                    let entry = Arc::new(Entry {
                        value: value.clone(),
                        created: previous.as_ref().map_or(revision, |p| p.created),
                        modified: revision,
                        version: previous.as_ref().map_or(1, |p| p.version + 1),
                        lease: *lease,
                    });
                    self.map.insert(key.clone(), Arc::clone(&entry));
                    changes.push(Change { revision, key, entry: Some(entry), previous });
                }
                Op::Delete { .. } if previous.is_none() => continue,
                Op::Delete { .. } => {
                    self.map.remove(key.as_bytes());
                    changes.push(Change { revision, key, entry: None, previous });
                }
            }
            ops.push(op);
        }
        if changes.is_empty() {
            let outcome = Outcome::Committed { revision: self.revision };
            return Pending { record: None, changes, outcome, done };
        }
        self.revision = revision;
        let record = Some(Record { revision, ops, granted: None, revoked: None });
        Pending { record, changes, outcome: Outcome::Committed { revision }, done }
    }

    fn get(&self, key: &Key) -> Option<&Arc<Entry>> {
        self.map.get(key.as_bytes())
    }
}

/// Takes all that is pending, makes it durable with one synchronisation, publishes it, answers.
fn write_loop(shared: &Shared, mut log: Option<Log>) {
    loop {
        let (batch, map, revision, leases) = {
            let mut head = shared.head();
            while head.pending.is_empty() {
                if head.refused.is_some() {
                    return;
                }
                head = shared.work.wait(head).unwrap_or_else(PoisonError::into_inner);
            }
            (std::mem::take(&mut head.pending), head.map.clone(), head.revision, head.leases.clone())
        };
        let records: Vec<&Record> = batch.iter().filter_map(|p| p.record.as_ref()).collect();
        if let Some(log) = &mut log
            && !records.is_empty()
            && let Err(error) = log.append(&records)
        {
            fail(shared, batch, error);
            continue;
        }
        let snapshot = Snapshot { map, revision };
        if let Some(log) = &mut log {
            log.checkpoint_if_due(&snapshot, &leases);
        }
        let mut changes = Vec::with_capacity(batch.len());
        let mut answers = Vec::with_capacity(batch.len());
        for mut pending in batch {
            changes.append(&mut pending.changes);
            answers.push((pending.done, pending.outcome));
        }
        {
            let mut published = shared.published.write().unwrap_or_else(PoisonError::into_inner);
            changes.iter().for_each(|c| published.history.push(c.clone()));
            published.snapshot = snapshot;
        }
        shared.ring(&changes);
        for (done, outcome) in answers {
            // The caller may have gone away; the change is made all the same.
            let _ = done.send(Ok(outcome));
        }
    }
}

/// The batch did not reach the disk: everything that was numbered since the last durable state is undone,
/// because later transactions were compared with it.
fn fail(shared: &Shared, batch: Vec<Pending>, error: log::AppendError) {
    let error = match error {
        log::AppendError::Undone(e) => StoreError::Write(e.to_string()),
        log::AppendError::Unknown(e) => StoreError::Failed(e.to_string()),
    };
    tracing::error!(%error, "the store could not write");
    let mut head = shared.head();
    let published = shared.published();
    head.map = published.snapshot.map.clone();
    head.revision = published.snapshot.revision;
    if matches!(error, StoreError::Failed(_)) {
        head.refused.get_or_insert(error.clone());
    }
    let undone = std::mem::take(&mut head.pending);
    for granted in batch.iter().chain(&undone).filter_map(|p| p.record.as_ref()?.granted) {
        head.leases.remove(&granted.id);
    }
    drop(published);
    drop(head);
    for pending in batch.into_iter().chain(undone) {
        let _ = pending.done.send(Err(error.clone()));
    }
}

#[cfg(test)]
mod tests;
