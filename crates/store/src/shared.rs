//! State shared by callers and the writer: the head, the transactions that wait for it, and the published
//! snapshot.

use crate::entry::{Entry, Revision};
use crate::head::{Applied, Record, State};
use crate::history::{Change, History};
use crate::leases::Leases;
use crate::log::{Made, Records, Recovered};
use crate::replica::Snapshot;
use crate::store::StoreError;
use crate::subscribers::Subscribers;
use crate::transform::Transformer;
use crate::txn::{Durability, Outcome, Txn};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    TryLockError,
};
use std::time::Instant;
use tokio::sync::{Notify, oneshot, watch};

/// The outcome of a transaction, and an entry for its caller to free: one that the history dropped in
/// exchange. One thread that frees the memory of many others is slow and blocks them.
pub(crate) type Answer = (Result<Outcome, StoreError>, Option<Arc<Entry>>);

/// Receives the outcome of a transaction. The caller may have gone away; the transaction is applied all the
/// same.
pub(crate) type Done = oneshot::Sender<Answer>;

/// The state that readers see. Replaced as a whole under a short write lock.
#[derive(Debug)]
pub(crate) struct Published {
    pub snapshot: Snapshot,
    pub leases: Leases,
    pub history: History,
    /// Number of times a remote store went back to an earlier revision: positions of an earlier epoch are
    /// invalid.
    pub epoch: u64,
}

/// The newest state, and the batch that the writer takes next.
#[derive(Debug)]
pub(crate) struct Head {
    pub state: State,
    pub batch: Batch,
    /// Somebody asks for a checkpoint now.
    pub wishes: Vec<oneshot::Sender<Result<(), StoreError>>>,
    /// Set once the log can no longer be trusted or the store is closing; refuses every further commit.
    pub refused: Option<StoreError>,
    /// Empty; kept for its room.
    taken: Vec<Submitted>,
}

impl Head {
    /// Returns true if the writer has work to do.
    pub fn has_work(&self) -> bool {
        !self.batch.pending.is_empty() || self.is_urgent()
    }

    /// Returns true if the writer must not wait for more transactions.
    pub fn is_urgent(&self) -> bool {
        !self.wishes.is_empty() || self.refused.is_some()
    }

    fn number(&mut self, Submitted { txn, done, next }: Submitted) {
        if self.number_one(txn, done)
            && let Some((txn, done)) = next
        {
            self.number_one(txn, done);
        }
    }

    /// Returns true if the transaction's conditions hold.
    fn number_one(&mut self, txn: Txn, done: Done) -> bool {
        let applied = match &self.refused {
            Some(refusal) => Err(refusal.clone()),
            None => self.state.commit(txn, &mut self.batch.changes),
        };
        match applied {
            Ok(applied) => {
                let is_committed = matches!(applied.outcome, Outcome::Committed { .. });
                self.batch.push(applied, done);
                is_committed
            }
            Err(error) => {
                drop(done.send((Err(error), None)));
                false
            }
        }
    }
}

/// Transactions that go to the disk together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub pending: Vec<Pending>,
    /// Of all of them, in order.
    pub changes: Vec<Change>,
    /// The log records of the batch; `None` without a log.
    pub records: Option<Records>,
}

impl Batch {
    pub fn new(log: bool) -> Self {
        Self { records: log.then(Records::default), ..Self::default() }
    }

    /// Adds a transaction whose changes are the last.
    pub fn push(&mut self, applied: Applied, done: Done) {
        if let (Some(records), Some(Record { revision, changes, leases })) =
            (&mut self.records, &applied.record)
        {
            let own = &self.changes[self.changes.len() - changes..];
            records.push(&Made { revision: *revision, changes: own, leases });
        }
        self.pending.push(Pending { applied, done });
    }

    /// Returns true if the batch contains a change with this durability.
    pub fn has(&self, durability: Durability) -> bool {
        self.pending.iter().any(|p| p.applied.record.is_some() && p.applied.durability == durability)
    }

    /// Empties it but for its room.
    pub fn clear(&mut self) {
        self.pending.clear();
        self.changes.clear();
        self.records.iter_mut().for_each(Records::clear);
    }
}

/// A numbered transaction on its way to the disk.
#[derive(Debug)]
pub(crate) struct Pending {
    pub applied: Applied,
    pub done: Done,
}

/// A transaction that is not numbered yet.
#[derive(Debug)]
struct Submitted {
    txn: Txn,
    done: Done,
    /// Numbered right behind it if its conditions hold, and dropped otherwise.
    next: Option<(Txn, Done)>,
}

/// The queue of submitted transactions. Locked for moments only.
#[derive(Debug, Default)]
struct Inbox {
    submitted: Vec<Submitted>,
    /// The writer sleeps until this many transactions are pending. A writer that is awake checks the inbox
    /// by itself.
    asleep: Option<usize>,
}

/// The state of a store.
///
/// Transactions are numbered under the lock of the head. Many writers would queue up for it one by one, each going
/// to sleep and being woken. Instead they leave their transactions in the inbox, and the one that gets the
/// head numbers all that are there. The others can rely on the holder, which checks the inbox again after
/// it unlocks the head.
#[derive(Debug)]
pub(crate) struct Shared {
    inbox: Mutex<Inbox>,
    /// Why the last write failed; none once one succeeds.
    trouble: Mutex<Option<StoreError>>,
    work: Condvar,
    head: Mutex<Head>,
    published: RwLock<Published>,
    subscribers: Mutex<Subscribers>,
    /// [`Subscribers::dispatched`], for watches that look without the lock.
    dispatched: AtomicU64,
    /// Makes the stored form of values, where it is another.
    pub transformer: OnceLock<Arc<dyn Transformer>>,
    /// True if the transformer may have failed on something that readers see.
    pub unreadable: AtomicBool,
    /// Rings when a lease was granted or renewed.
    pub leased: Notify,
    /// The published revision, for callers that wait for one from elsewhere.
    pub reached: watch::Sender<Revision>,
}

impl Shared {
    /// With `log`, committed changes are written to the log.
    pub fn new(recovered: Recovered, log: bool) -> Self {
        let Recovered { map, revision, leases, mut history, .. } = recovered;
        history.mark(Instant::now(), revision);
        let snapshot = Snapshot::new(map.clone(), revision);
        Self {
            inbox: Mutex::default(),
            trouble: Mutex::default(),
            work: Condvar::new(),
            head: Mutex::new(Head {
                state: State { map, revision, leases: leases.clone() },
                batch: Batch::new(log),
                wishes: Vec::new(),
                refused: None,
                taken: Vec::new(),
            }),
            published: RwLock::new(Published { snapshot, leases, history, epoch: 0 }),
            subscribers: Mutex::new(Subscribers::new(revision)),
            dispatched: AtomicU64::new(revision.0),
            transformer: OnceLock::new(),
            unreadable: AtomicBool::new(false),
            leased: Notify::new(),
            reached: watch::Sender::new(revision),
        }
    }

    /// Remembers why the last write failed, or that it did not.
    pub fn note_write(&self, trouble: Option<StoreError>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    pub fn trouble(&self) -> Option<StoreError> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Numbers a transaction, and behind it another one if the conditions of the first hold, or leaves it to the
    /// holder of the head.
    pub fn submit(&self, txn: Txn, done: Done, next: Option<(Txn, Done)>) {
        let submitted = Submitted { txn, done, next };
        if let Some(mut head) = self.try_head() {
            self.number_all(&mut head);
            head.number(submitted);
            if !self.let_go(head) {
                return;
            }
        } else {
            self.inbox().submitted.push(submitted);
        }
        self.number();
    }

    /// Takes the head, with everything numbered that has come in.
    pub fn head(&self) -> HeadGuard<'_> {
        // A panic while the head was locked would have been a bug in pure code; the state is still whole
        // because every change to it is made after the last point that can fail.
        let mut head = self.head.lock().unwrap_or_else(PoisonError::into_inner);
        self.number_all(&mut head);
        HeadGuard { shared: self, head: Some(head) }
    }

    /// Number of transactions that wait for the writer.
    pub fn waiting(&self) -> usize {
        self.head().batch.pending.len()
    }

    /// Numbers the submitted transactions, unless another holder of the head will do it.
    fn number(&self) {
        while let Some(mut head) = self.try_head() {
            self.number_all(&mut head);
            if !self.let_go(head) {
                return;
            }
        }
    }

    fn try_head(&self) -> Option<MutexGuard<'_, Head>> {
        match self.head.try_lock() {
            Ok(head) => Some(head),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Unlocks the head and wakes the writer if there is something to do. Returns true if more has come in,
    /// from callers that relied on the head being held.
    fn let_go(&self, head: MutexGuard<'_, Head>) -> bool {
        let (pending, urgent) = (head.batch.pending.len(), head.is_urgent());
        drop(head);
        let mut inbox = self.inbox();
        if inbox.asleep.take_if(|wanted| urgent || pending >= *wanted).is_some() {
            self.work.notify_one();
        }
        !inbox.submitted.is_empty()
    }

    fn number_all(&self, head: &mut Head) {
        std::mem::swap(&mut self.inbox().submitted, &mut head.taken);
        let mut taken = std::mem::take(&mut head.taken);
        taken.drain(..).for_each(|submitted| head.number(submitted));
        head.taken = taken;
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn published(&self) -> RwLockReadGuard<'_, Published> {
        self.published.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn published_mut(&self) -> RwLockWriteGuard<'_, Published> {
        self.published.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_closed(&self) -> bool {
        self.head().refused == Some(StoreError::Closed)
    }

    pub fn subscribers(&self) -> MutexGuard<'_, Subscribers> {
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything up to here has been put into the mailboxes of watches.
    pub fn dispatched(&self) -> Revision {
        Revision(self.dispatched.load(Ordering::Acquire))
    }

    /// Brings changes that are published to the watches that they concern.
    pub fn dispatch(&self, changes: &[Change], revision: Revision) {
        let woken = {
            let mut subscribers = self.subscribers();
            let woken = subscribers.dispatch(changes, revision);
            self.dispatched.store(subscribers.dispatched.0, Ordering::Release);
            woken
        };
        woken.iter().for_each(|mailbox| mailbox.bell.notify_one());
    }

    /// Wakes every watch, to check the state of the store.
    pub fn ring_all(&self) {
        let all = {
            let subscribers = self.subscribers();
            self.dispatched.store(subscribers.dispatched.0, Ordering::Release);
            subscribers.all()
        };
        all.iter().for_each(|mailbox| mailbox.bell.notify_one());
    }
}

/// The head, locked. Unlocking wakes the writer where there is something to do, and numbers transactions
/// that have come in meanwhile.
pub(crate) struct HeadGuard<'a> {
    shared: &'a Shared,
    /// Always there but while it is being given up.
    head: Option<MutexGuard<'a, Head>>,
}

impl HeadGuard<'_> {
    /// Unlocks the head and sleeps until `wanted` transactions are pending, something is urgent, or `until`
    /// has passed. May return early.
    pub fn sleep(mut self, wanted: usize, until: Option<Instant>) -> Self {
        let shared = self.shared;
        let mut inbox = shared.inbox();
        if !inbox.submitted.is_empty() {
            drop(inbox);
            drop(self);
            return shared.head();
        }
        inbox.asleep = Some(wanted);
        // Released while the inbox is locked: a later submitter finds the head free, and the writer asleep.
        self.head = None;
        while inbox.asleep.is_some() {
            let Some(until) = until else {
                inbox = shared.work.wait(inbox).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                inbox.asleep = None;
                break;
            }
            inbox = shared.work.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(inbox);
        shared.head()
    }
}

impl Deref for HeadGuard<'_> {
    type Target = Head;

    fn deref(&self) -> &Head {
        self.head.as_ref().expect("held until it is dropped")
    }
}

impl DerefMut for HeadGuard<'_> {
    fn deref_mut(&mut self) -> &mut Head {
        self.head.as_mut().expect("held until it is dropped")
    }
}

impl Drop for HeadGuard<'_> {
    fn drop(&mut self) {
        let Some(head) = self.head.take() else { return };
        if self.shared.let_go(head) {
            self.shared.number();
        }
    }
}
