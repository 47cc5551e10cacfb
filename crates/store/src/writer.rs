//! The one thread that makes changes durable and publishes them.

use crate::entry::Revision;
use crate::leases::Leases;
use crate::log::{self, Log, Record};
use crate::shared::{Pending, Shared, Wish};
use crate::store::StoreError;
use crate::txn::Durability;
use std::time::{Duration, Instant};

/// Takes all that is pending, makes it durable with one synchronisation, publishes it, answers. Between batches it
/// writes what was deferred when its time has come, and lets history grow old.
pub(crate) fn write_loop(shared: &Shared, log: Option<Log>) {
    let mut writer = Writer { shared, log, before: 0, history_ends: None };
    while writer.write_one() {}
}

/// What the writer takes from the head at once.
struct Batch {
    pending: Vec<Pending>,
    /// How far the head had come.
    revision: Revision,
    leases: Leases,
}

/// No longer does a transaction wait for others to be written with it.
const GATHER: Duration = Duration::from_micros(50);

struct Writer<'a> {
    shared: &'a Shared,
    log: Option<Log>,
    /// How many transactions the last batch had.
    before: usize,
    /// When history has to be looked at again.
    history_ends: Option<Instant>,
}

impl Writer<'_> {
    /// Waits for work and does it. Answers whether more can follow.
    fn write_one(&mut self) -> bool {
        let flush_at = self.log.as_ref().and_then(Log::flush_at);
        let (batch, wishes, closing) = self.take(flush_at);
        let flush = !wishes.is_empty() || flush_at.is_some_and(|at| at <= Instant::now());
        if let Some(Err(error)) = self.log.as_mut().map(|log| persist(log, &batch.pending, flush)) {
            let error = refusal(error);
            if let Some(log) = &mut self.log {
                log.postpone(Instant::now());
            }
            fail(self.shared, batch.pending, &error);
            wishes.into_iter().for_each(|wish| drop(wish.send(Err(error.clone()))));
            // Not one byte more into a log whose end nobody knows.
            return !closing && !matches!(error, StoreError::Failed(_));
        }
        self.history_ends = publish(self.shared, batch);
        if let Some(log) = &mut self.log {
            let due = log.checkpoint_due() && !log.has_deferred();
            if due || !wishes.is_empty() {
                let notice: log::Notice = Box::new(move |result| {
                    for wish in wishes {
                        let _ = wish.send(result.clone().map_err(StoreError::Write));
                    }
                });
                log.checkpoint(self.shared.contents(), Some(notice));
            }
        } else {
            wishes.into_iter().for_each(|wish| drop(wish.send(Ok(()))));
        }
        if closing && self.shared.head().pending.is_empty() {
            let revision = self.shared.published().snapshot.revision;
            if let Some(Err(error)) = self.log.as_mut().map(|log| log.close(revision)) {
                tracing::error!(error = %refusal(error), "the store could not be closed cleanly");
            }
            return false;
        }
        true
    }

    /// Waits until there is something to do.
    ///
    /// Those who have just been answered are likely to come back with more. Were the first of them written at once,
    /// alone, all others would wait for the disk twice. So the writer waits a moment for half of them: then one half is
    /// written while the other is being answered and prepares what comes next.
    fn take(&mut self, flush_at: Option<Instant>) -> (Batch, Vec<Wish>, bool) {
        let wake = [flush_at, self.history_ends].into_iter().flatten().min();
        let is_time = |at: Option<Instant>| at.is_some_and(|at| at <= Instant::now());
        let mut head = self.shared.head();
        head.enough = 1;
        while !head.has_work() && !is_time(wake) {
            head = head.sleep(wake);
        }
        head.enough = if self.log.is_some() { (self.before / 2).max(1) } else { 1 };
        let gathered = (!head.has_work()).then(|| Instant::now() + GATHER);
        while !head.has_work() && !is_time(gathered) {
            head = head.sleep(gathered);
        }
        self.before = head.pending.len();
        head.state.forget(self.shared.published().snapshot.revision);
        let batch = Batch {
            pending: std::mem::take(&mut head.pending),
            revision: head.state.revision,
            leases: head.state.leases.clone(),
        };
        (batch, std::mem::take(&mut head.wishes), head.refused.is_some())
    }
}

/// Brings a batch to the disk, or puts it off where it may be.
fn persist(log: &mut Log, batch: &[Pending], flush: bool) -> Result<(), log::AppendError> {
    let written = || batch.iter().map(|p| &p.applied).filter(|a| !a.record.is_empty());
    let records: Vec<&Record> = written().map(|a| &a.record).collect();
    let durable = written().any(|a| a.durability == Durability::Durable);
    let relaxed = written().any(|a| a.durability == Durability::Relaxed);
    let Some(last) = records.last() else {
        // Nothing new, but the window of something old may be over.
        return if flush && log.has_deferred() { log.append(&[], true) } else { Ok(()) };
    };
    if flush || durable || !log.may_defer(last.revision) {
        let reserve = relaxed || log.has_deferred();
        return log.append(&records, reserve);
    }
    log.defer(records.into_iter().cloned(), Instant::now());
    Ok(())
}

/// Shows a batch to readers and answers those who made it. Answers when history has to be looked at again.
fn publish(shared: &Shared, batch: Batch) -> Option<Instant> {
    let mut changes = Vec::with_capacity(batch.pending.len());
    let mut answers = Vec::with_capacity(batch.pending.len());
    for mut pending in batch.pending {
        changes.append(&mut pending.applied.record.changes);
        answers.push((pending.done, pending.applied.outcome));
    }
    let (history_ends, past) = {
        let mut published = shared.published_mut();
        let now = Instant::now();
        if !changes.is_empty() {
            changes.iter().for_each(|change| published.show(change.clone()));
            published.snapshot.revision = batch.revision;
            published.history.mark(now, batch.revision);
        }
        let past = std::mem::replace(&mut published.leases, batch.leases);
        (published.history.expire(now), past)
    };
    shared.ring(&changes);
    for (done, outcome) in answers {
        // The caller may have gone away; the change is made all the same.
        let _ = done.send(Ok(outcome));
    }
    // What only the past held is freed while others read and prepare what comes next.
    drop(past);
    history_ends
}

fn refusal(error: log::AppendError) -> StoreError {
    match error {
        log::AppendError::Undone(e) => StoreError::Write(e.to_string()),
        log::AppendError::Unknown(e) => StoreError::Failed(e.to_string()),
    }
}

/// The batch did not reach the disk: everything that was numbered since the last published state is undone,
/// because later transactions were compared with it.
fn fail(shared: &Shared, batch: Vec<Pending>, error: &StoreError) {
    tracing::error!(%error, "the store could not write");
    let mut head = shared.head();
    {
        let published = shared.published();
        head.state.undo(published.snapshot.revision, published.leases.clone());
    }
    if matches!(error, StoreError::Failed(_)) {
        head.refused.get_or_insert(error.clone());
    }
    let undone = std::mem::take(&mut head.pending);
    drop(head);
    for pending in batch.into_iter().chain(undone) {
        let _ = pending.done.send(Err(error.clone()));
    }
}
