//! The store itself: numbering at the head, durability in the middle, publication at the end.

use crate::entry::{Entry, Key, Lease, LeaseId, Revision};
use crate::head::{Applied, Draft, State};
use crate::history::Change;
use crate::history::HistoryLimits;
use crate::index::{Index, IndexedField};
use crate::leases::LeaseState;
use crate::log::{self, Log, LogOptions};
use crate::remote::{Feed, Remote};
use crate::replica::Snapshot;
use crate::shared::{Answer, Head, Shared};
use crate::subscribers::Trigger;
use crate::transform::{TransformError, Transformer};
use crate::txn::{Compare, Durability, Outcome, Txn};
use crate::watch::{Watch, WatchEnd};
use crate::writer::write_loop;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};

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
    /// The disk did not confirm a write. The store takes no more changes until it is opened anew.
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
    #[error("lease {} exists already", .0.0)]
    LeaseExists(LeaseId),
    #[error("the transaction has {size} bytes, the limit is {limit}")]
    TooLarge { size: usize, limit: usize },
    /// A value has no stored form, because its key is not available. Nothing of this transaction happened.
    #[error(transparent)]
    Transform(TransformError),
    /// A remote store cannot be reached or has no leader. Whether the change happened is not known.
    #[error("the store cannot be reached: {0}")]
    Unreachable(String),
}

/// Longest wait for a replica to show a change that was committed elsewhere.
const CATCH_UP: Duration = Duration::from_secs(30);
/// Longest wait for a remote store to respond.
const CHECK: Duration = Duration::from_secs(2);
/// No transaction may be larger.
pub const MAX_TXN: usize = 16 << 20;
/// Bytes of transactions that may be on their way to the disk together; more wait their turn.
const IN_FLIGHT: usize = 64 << 20;
/// The semaphore counts in these, so that its numbers stay small.
const UNIT: usize = 1 << 10;

/// Seconds since the Unix epoch, as leases count them.
pub fn now_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The part that numbers changes and makes them durable.
#[derive(Debug)]
enum Engine {
    /// This process: the log, or nothing in memory mode.
    Local {
        writer: Option<JoinHandle<()>>,
        /// Where the log is; none in memory mode.
        dir: Option<PathBuf>,
    },
    /// A remote store, which also feeds the replica.
    Remote(Box<dyn Remote>),
}

/// A handle to the store. Dropping the last one writes pending changes and closes it.
#[derive(Debug)]
pub struct Store {
    pub(crate) shared: Arc<Shared>,
    engine: Engine,
    in_flight: Semaphore,
}

/// Figures about a running store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    pub keys: usize,
    pub revision: Revision,
    /// The oldest revision that can be read.
    pub compacted: Revision,
    pub history_changes: usize,
    pub history_bytes: usize,
    pub leases: usize,
}

impl Store {
    /// A store that lives in memory alone, for tests.
    pub fn memory() -> Self {
        Self::memory_with(HistoryLimits::default())
    }

    /// A store that lives in memory alone, with a history of one's own choice.
    pub fn memory_with(limits: HistoryLimits) -> Self {
        Self::start(log::Recovered::empty(limits), None)
    }

    /// Opens or creates the store in the directory `path` and recovers its contents.
    pub fn open(path: &Path, options: LogOptions, limits: HistoryLimits) -> Result<Self, OpenError> {
        let (log, recovered) = Log::open(path, options, limits)?;
        Ok(Self::start(recovered, Some(log)))
    }

    pub(crate) fn start(recovered: log::Recovered, log: Option<Log>) -> Self {
        let shared = Arc::new(Shared::new(recovered, log.is_some()));
        let dir = log.as_ref().map(|log| log.dir().to_owned());
        let for_writer = Arc::clone(&shared);
        let writer = std::thread::Builder::new()
            .name("store-writer".into())
            .stack_size(256 << 10)
            .spawn(move || write_loop(&for_writer, log))
            .expect("the operating system can start one more thread");
        Self {
            shared,
            engine: Engine::Local { writer: Some(writer), dir },
            in_flight: Semaphore::new(IN_FLIGHT / UNIT),
        }
    }

    /// A store whose changes are made elsewhere. The remote side gets a [`Feed`] for the replica.
    pub fn remote(limits: HistoryLimits, connect: impl FnOnce(Feed) -> Box<dyn Remote>) -> Self {
        let shared = Arc::new(Shared::new(log::Recovered::empty(limits), false));
        let engine = Engine::Remote(connect(Feed::new(Arc::clone(&shared))));
        Self { shared, engine, in_flight: Semaphore::new(IN_FLIGHT / UNIT) }
    }

    /// Chooses the form in which commits store values. What is there already is revealed by [`Self::reveal_all`]. Only the
    /// first call counts.
    pub fn set_transformer(&self, transformer: Arc<dyn Transformer>) {
        let _ = self.shared.transformer.set(transformer);
    }

    /// Reads the stored form of everything that was not readable so far.
    pub async fn reveal_all(&self) {
        self.shared.reveal_all().await;
    }

    /// True if there may be entries that the transformer cannot read.
    pub fn has_unreadable(&self) -> bool {
        self.shared.unreadable.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Why the value of an entry cannot be read.
    pub fn unreadable_why(&self, key: &Key, entry: &Entry) -> Option<TransformError> {
        self.shared.transformer.get()?.unseal(key, &entry.value).err()
    }

    /// True if the value would be stored in another form now.
    pub fn is_stale(&self, key: &Key, entry: &Entry) -> bool {
        self.shared.transformer.get().is_some_and(|transformer| transformer.is_stale(key, &entry.value))
    }

    /// True if the changes are made elsewhere, so that other processes may make changes, too.
    pub fn is_remote(&self) -> bool {
        matches!(self.engine, Engine::Remote(_))
    }

    /// Waits until `size` more bytes may be in flight to the disk.
    async fn turn(&self, size: usize) -> Result<SemaphorePermit<'_>, StoreError> {
        if size > MAX_TXN {
            return Err(StoreError::TooLarge { size, limit: MAX_TXN });
        }
        let units = u32::try_from(size / UNIT + 1).unwrap_or(u32::MAX);
        self.in_flight.acquire_many(units).await.map_err(|_| StoreError::Closed)
    }

    /// Applies a change to the head and waits until it is durable and visible.
    async fn run<T>(
        &self,
        size: usize,
        apply: impl FnOnce(&mut State, &mut Vec<Change>) -> Result<(T, Applied), StoreError>,
    ) -> Result<(T, Outcome), StoreError> {
        let _turn = self.turn(size).await?;
        let (done, answer) = oneshot::channel();
        let value = {
            let mut head = self.shared.head();
            if let Some(refusal) = &head.refused {
                return Err(refusal.clone());
            }
            let Head { state, batch, .. } = &mut *head;
            let (value, applied) = apply(state, &mut batch.changes)?;
            batch.push(applied, done);
            value
        };
        Ok((value, told(answer).await?))
    }

    /// Commits a transaction, with values in their stored form. When it answers, the outcome is visible to every reader and, unless the transaction
    /// is relaxed, durable.
    pub async fn commit(&self, mut txn: Txn) -> Result<Outcome, StoreError> {
        self.shared.seal(&mut txn)?;
        if let Engine::Remote(remote) = &self.engine {
            let outcome = remote.commit(txn).await?;
            self.reach(outcome.revision()).await?;
            return Ok(outcome);
        }
        let _turn = self.turn(txn.size()).await?;
        let (done, answer) = oneshot::channel();
        self.shared.submit(txn, done, None);
        told(answer).await
    }

    /// Commits two transactions at two revisions, with one write to the disk. Readers may see the first alone. The second
    /// has no outcome if the conditions of the first do not hold. No other transaction of this process comes between
    /// them; in a remote store, the second fails if another process has written a key of the first in between.
    pub async fn commit_both(
        &self,
        mut first: Txn,
        mut second: Txn,
    ) -> Result<(Outcome, Option<Outcome>), StoreError> {
        self.shared.seal(&mut second)?;
        if let Engine::Remote(remote) = &self.engine {
            let keys: Vec<Key> = first.ops.iter().map(|op| op.key().clone()).collect();
            let outcome = self.commit(first).await?;
            let Outcome::Committed { revision } = outcome else { return Ok((outcome, None)) };
            let unchanged = keys.into_iter().map(|key| Compare::ModifiedAt(key, revision));
            second.compares.extend(unchanged);
            let second = remote.commit(second).await?;
            self.reach(second.revision()).await?;
            return Ok((outcome, Some(second)));
        }
        self.shared.seal(&mut first)?;
        let _turn = self.turn(first.size() + second.size()).await?;
        let ((done, answer), (next_done, next_answer)) = (oneshot::channel(), oneshot::channel());
        self.shared.submit(first, done, Some((second, next_done)));
        Ok(match told(answer).await? {
            committed @ Outcome::Committed { .. } => (committed, Some(told(next_answer).await?)),
            conflict @ Outcome::Conflict { .. } => (conflict, None),
        })
    }

    /// Lets `make` read the newest state and write to it as one transaction, whatever its conditions are.
    /// `size` is about the size of its writes. Returns the result of `make`, once it is durable, and the
    /// store's revision after it. An error of `make` leaves everything as it was. Only for a store of this
    /// process.
    pub async fn transact<T, E: From<StoreError>>(
        &self,
        size: usize,
        make: impl FnOnce(&mut Draft) -> Result<T, E>,
    ) -> Result<(T, Revision), E> {
        if let Engine::Remote(_) = &self.engine {
            return Err(StoreError::Failed("a remote store takes plain transactions only".into()).into());
        }
        let mut refused = None;
        let made = self
            .run(size, |head, changes| {
                head.transact(changes, make).map_err(|error| {
                    refused = Some(error);
                    StoreError::Closed
                })
            })
            .await;
        match (made, refused) {
            (_, Some(error)) => Err(error),
            (Ok((value, outcome)), None) => Ok((value, outcome.revision())),
            (Err(error), None) => Err(error.into()),
        }
    }

    /// Makes a lease that ends at `expires_at` (seconds since the epoch), durably.
    pub async fn grant(&self, expires_at: u64) -> Result<LeaseId, StoreError> {
        if let Engine::Remote(remote) = &self.engine {
            return remote.grant(expires_at).await;
        }
        self.grant_for(LeaseId::NONE, 0, expires_at).await
    }

    /// Makes a lease with an identifier of the caller's choice, or any when that is none, for `ttl` seconds.
    pub async fn grant_for(&self, id: LeaseId, ttl: u64, expires_at: u64) -> Result<LeaseId, StoreError> {
        let grant = |head: &mut State, _: &mut Vec<Change>| {
            let id = if id == LeaseId::NONE { head.leases.choose_id(now_seconds()) } else { id };
            if head.leases.contains(id) {
                return Err(StoreError::LeaseExists(id));
            }
            Ok((id, head.grant(Lease { id, expires_at }, ttl, Durability::Durable)))
        };
        let (id, _) = self.run(0, grant).await?;
        self.shared.leased.notify_waiters();
        Ok(id)
    }

    /// Moves the end of a lease, with relaxed durability. Returns the seconds it was granted for.
    pub async fn renew(&self, id: LeaseId, expires_at: impl FnOnce(u64) -> u64) -> Result<u64, StoreError> {
        let renew = |head: &mut State, _: &mut Vec<Change>| {
            let ttl = head.leases.get(id).ok_or(StoreError::NoSuchLease(id))?.ttl;
            let lease = Lease { id, expires_at: expires_at(ttl) };
            Ok((ttl, head.grant(lease, ttl, Durability::Relaxed)))
        };
        let (ttl, _) = self.run(0, renew).await?;
        self.shared.leased.notify_waiters();
        Ok(ttl)
    }

    /// Ends a lease and deletes the keys attached to it, together.
    pub async fn revoke(&self, id: LeaseId) -> Result<Outcome, StoreError> {
        if let Engine::Remote(remote) = &self.engine {
            let outcome = remote.revoke(id).await?;
            self.reach(outcome.revision()).await?;
            return Ok(outcome);
        }
        let ((), outcome) = self.run(0, |head, changes| Ok(((), head.revoke(id, changes)?))).await?;
        Ok(outcome)
    }

    /// The leases, soonest end first.
    pub fn leases(&self) -> Vec<Lease> {
        self.shared.published().leases.by_end()
    }

    /// One lease with the keys attached to it.
    pub fn lease(&self, id: LeaseId) -> Option<LeaseState> {
        self.shared.published().leases.get(id).cloned()
    }

    /// Waits until a lease is granted or renewed. Register before looking at [`Self::leases`].
    pub fn lease_changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.shared.leased.notified()
    }

    /// Deletes the keys of leases whose time is over, as it comes, for as long as it is polled.
    pub async fn expire_leases(&self) {
        loop {
            let changed = self.lease_changed();
            tokio::pin!(changed);
            // Registered before the leases are read: a grant in between is not missed.
            changed.as_mut().enable();
            let now = now_seconds();
            let leases = self.leases();
            let Some(next) = leases.first() else {
                changed.await;
                continue;
            };
            if next.expires_at > now {
                // A clock that is set while we wait is noticed within a minute.
                let nap = Duration::from_secs((next.expires_at - now).min(60));
                tokio::select! {
                    () = &mut changed => {}
                    () = tokio::time::sleep(nap) => {}
                }
                continue;
            }
            for lease in leases.iter().take_while(|lease| lease.expires_at <= now) {
                match self.run(0, |head, changes| Ok(((), head.expire(lease.id, now, changes)?))).await {
                    Ok(_) | Err(StoreError::NoSuchLease(_)) => {}
                    Err(error @ (StoreError::Closed | StoreError::Failed(_))) => {
                        tracing::debug!(%error, "leases are no longer ended");
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(%error, lease = lease.id.0, "a lease could not be ended; trying again");
                        tokio::time::sleep(Duration::from_secs(5)).await;
                        break;
                    }
                }
            }
        }
    }

    /// The committed state now, as far as this process knows.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.published().snapshot.clone()
    }

    /// Lets snapshots find entries by a field ([`Snapshot::find`]). Reads every entry below the prefix once, and holds up
    /// commits meanwhile: for the start. Asking again for the same field changes nothing.
    pub fn index(&self, field: IndexedField) {
        let mut published = self.shared.published_mut();
        let Snapshot { map, index, .. } = &mut published.snapshot;
        let is_same = |known: &IndexedField| known.field == field.field && known.prefix == field.prefix;
        if !index.fields().iter().any(is_same) {
            let fields = index.fields().iter().cloned().chain([field]);
            *index = Index::new(fields.collect::<Vec<_>>(), map);
        }
    }

    /// The committed state, with everything anybody was acknowledged before the call. Costs nothing for a store
    /// of this process, and one small request for a remote one.
    pub async fn latest(&self) -> Result<Snapshot, StoreError> {
        self.catch_up().await?;
        Ok(self.snapshot())
    }

    /// Waits until readers see everything anybody was acknowledged before the call: every [`Self::snapshot`] and
    /// every watch from then on has it. Costs as much as [`Self::latest`].
    pub async fn catch_up(&self) -> Result<(), StoreError> {
        match &self.engine {
            Engine::Local { .. } => Ok(()),
            Engine::Remote(remote) => self.reach(remote.revision().await?).await,
        }
    }

    /// Checks that the store takes changes. One of this process does unless its last write failed; then it does once a
    /// file can be written beside the log. A remote one has to answer in time.
    pub async fn check(&self) -> Result<(), StoreError> {
        let dir = match &self.engine {
            Engine::Remote(remote) => {
                return match tokio::time::timeout(CHECK, remote.revision()).await {
                    Ok(answer) => answer.map(drop),
                    Err(_) => Err(StoreError::Unreachable(format!("no answer within {CHECK:?}"))),
                };
            }
            Engine::Local { dir, .. } => dir.clone(),
        };
        if let Some(refusal) = &self.shared.head().refused {
            return Err(refusal.clone());
        }
        let (Some(trouble), Some(dir)) = (self.shared.trouble(), dir) else { return Ok(()) };
        match tokio::task::spawn_blocking(move || log::probe(&dir)).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(trouble),
        }
    }

    /// Waits until the replica has come to `revision`.
    async fn reach(&self, revision: Revision) -> Result<(), StoreError> {
        let mut reached = self.shared.reached.subscribe();
        match tokio::time::timeout(CATCH_UP, reached.wait_for(|r| *r >= revision)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(StoreError::Closed),
            Err(_) => {
                Err(StoreError::Unreachable(format!("the replica has not come to revision {revision}")))
            }
        }
    }

    /// The state as it was at `revision`, as long as the history reaches back to it.
    pub fn snapshot_at(&self, revision: Revision) -> Result<Snapshot, StoreError> {
        self.snapshot_under(b"", revision)
    }

    /// The keys under `prefix` as they were at `revision`, as long as the history reaches back to it. Other keys are as
    /// they are now: to undo what happened to them is work that a reader of the prefix does not need.
    pub fn snapshot_under(&self, prefix: &[u8], revision: Revision) -> Result<Snapshot, StoreError> {
        let (mut map, undo) = {
            let published = self.shared.published();
            let current = published.snapshot.revision;
            if revision > current {
                return Err(StoreError::Future { wanted: revision, current });
            }
            let oldest = published.history.compacted();
            if revision < oldest {
                return Err(StoreError::Compacted { wanted: revision, oldest });
            }
            // The first change of a key has the entry before it; later ones add nothing.
            let mut undo: HashMap<Key, Option<Arc<Entry>>> = HashMap::new();
            let changes = published.history.after(revision);
            for change in changes.filter(|change| change.key.as_bytes().starts_with(prefix)) {
                if !undo.contains_key(&change.key) {
                    undo.insert(change.key.clone(), change.previous.clone());
                }
            }
            (published.snapshot.map.clone(), undo)
        };
        for (key, previous) in undo {
            match previous {
                Some(previous) => map.insert(key, previous),
                None => map.remove(key.as_bytes()),
            };
        }
        Ok(Snapshot::new(map, revision))
    }

    /// Watches the keys under `prefix` for what happens after `after`.
    pub fn watch(&self, prefix: &[u8], after: Revision) -> Result<Watch, WatchEnd> {
        self.watch_selected(prefix, None, after)
    }

    /// As [`Store::watch`], of the changes that concern a trigger alone.
    pub fn watch_selected(
        &self,
        prefix: &[u8],
        trigger: Option<Trigger>,
        after: Revision,
    ) -> Result<Watch, WatchEnd> {
        let (oldest, epoch) = {
            let published = self.shared.published();
            (published.history.compacted(), published.epoch)
        };
        if after < oldest {
            return Err(WatchEnd::Compacted { wanted: after.next(), oldest: oldest.next() });
        }
        let (subscription, dispatched) = {
            let mut subscribers = self.shared.subscribers();
            (subscribers.add(prefix, trigger), subscribers.dispatched)
        };
        // Changes dispatched before the subscription are only in the history.
        let behind = after < dispatched;
        Ok(Watch { shared: Arc::clone(&self.shared), subscription, position: after, behind, epoch })
    }

    /// Forgets the history up to and including `revision`. The store itself drops changes beyond the limits
    /// given when it was opened.
    pub fn compact(&self, revision: Revision) -> Result<(), StoreError> {
        let mut published = self.shared.published_mut();
        let current = published.snapshot.revision;
        if revision > current {
            return Err(StoreError::Future { wanted: revision, current });
        }
        published.history.drop_through(revision);
        drop(published);
        self.shared.ring_all();
        Ok(())
    }

    /// Writes a checkpoint now, while commits go on, and removes the files that it makes superfluous.
    pub async fn checkpoint(&self) -> Result<(), StoreError> {
        let (done, answer) = oneshot::channel();
        {
            let mut head = self.shared.head();
            if let Some(refusal) = &head.refused {
                return Err(refusal.clone());
            }
            if let Engine::Remote(_) = &self.engine {
                return Ok(());
            }
            head.wishes.push(done);
        }
        answer.await.unwrap_or(Err(StoreError::Closed))
    }

    pub fn usage(&self) -> Usage {
        let published = self.shared.published();
        Usage {
            keys: published.snapshot.len(),
            revision: published.snapshot.revision,
            compacted: published.history.compacted(),
            history_changes: published.history.len(),
            history_bytes: published.history.bytes(),
            leases: published.leases.len(),
        }
    }
}

/// Waits for the outcome of a transaction.
async fn told(answer: oneshot::Receiver<Answer>) -> Result<Outcome, StoreError> {
    let Ok((outcome, past)) = answer.await else { return Err(StoreError::Closed) };
    drop(past);
    outcome
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.head().refused = Some(StoreError::Closed);
        if let Engine::Local { writer, .. } = &mut self.engine
            && let Some(writer) = writer.take()
        {
            // The writer only ends by returning; a panic in it has been reported on standard error.
            let _ = writer.join();
        }
        self.shared.ring_all();
    }
}

#[cfg(test)]
mod tests;
