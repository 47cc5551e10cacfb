//! The one thread that makes changes durable and publishes them.

use crate::log::{self, Contents, Log, Record};
use crate::replica::Snapshot;
use crate::shared::{Pending, Shared};
use crate::store::StoreError;
use crate::txn::Durability;
use std::time::Instant;

/// Takes all that is pending, makes it durable with one synchronisation, publishes it, answers. Between batches it
/// writes what was deferred when its time has come, and lets history grow old.
pub(crate) fn write_loop(shared: &Shared, mut log: Option<Log>) {
    let mut history_ends: Option<Instant> = None;
    loop {
        let (mut batch, snapshot, leases, wishes, closing) = {
            let mut head = shared.head();
            loop {
                let flush_at = log.as_ref().and_then(Log::flush_at);
                let wake = [flush_at, history_ends].into_iter().flatten().min();
                if head.has_work() || wake.is_some_and(|at| at <= Instant::now()) {
                    break;
                }
                head = head.sleep(wake);
            }
            let state = &head.state;
            let snapshot = Snapshot { map: state.map.clone(), revision: state.revision };
            let leases = state.leases.clone();
            let closing = head.refused.is_some();
            (std::mem::take(&mut head.pending), snapshot, leases, std::mem::take(&mut head.wishes), closing)
        };
        let contents = Contents { snapshot, leases };
        let flush =
            !wishes.is_empty() || log.as_ref().and_then(Log::flush_at).is_some_and(|at| at <= Instant::now());
        match log.as_mut().map_or(Ok(()), |log| persist(log, &mut batch, flush)) {
            Ok(()) => {
                history_ends = publish(shared, batch, &contents);
            }
            Err(error) => {
                let error = refusal(error);
                if let Some(log) = &mut log {
                    log.postpone(Instant::now());
                }
                fail(shared, batch, &error);
                wishes.into_iter().for_each(|wish| drop(wish.send(Err(error.clone()))));
                if closing || matches!(error, StoreError::Failed(_)) {
                    // Not one byte more into a log whose end nobody knows.
                    return;
                }
                continue;
            }
        }
        if let Some(log) = &mut log {
            let due = log.checkpoint_due() && !log.has_deferred();
            if due || !wishes.is_empty() {
                let notice: log::Notice = Box::new(move |result| {
                    for wish in wishes {
                        let _ = wish.send(result.clone().map_err(StoreError::Write));
                    }
                });
                log.checkpoint(contents, Some(notice));
            }
        } else {
            wishes.into_iter().for_each(|wish| drop(wish.send(Ok(()))));
        }
        if closing && shared.head().pending.is_empty() {
            if let Some(log) = &mut log {
                let revision = shared.published().snapshot.revision;
                if let Err(error) = log.close(revision) {
                    tracing::error!(error = %refusal(error), "the store could not be closed cleanly");
                }
            }
            return;
        }
    }
}

/// Brings a batch to the disk, or puts it off where it may be.
fn persist(log: &mut Log, batch: &mut [Pending], flush: bool) -> Result<(), log::AppendError> {
    let records: Vec<&Record> = batch.iter().filter_map(|p| p.applied.record.as_ref()).collect();
    let written = || batch.iter().filter(|p| p.applied.record.is_some());
    let durable = written().any(|p| p.applied.durability == Durability::Durable);
    let relaxed = written().any(|p| p.applied.durability == Durability::Relaxed);
    let Some(last) = records.last() else {
        // Nothing new, but the window of something old may be over.
        return if flush && log.has_deferred() { log.append(&[], true) } else { Ok(()) };
    };
    if flush || durable || !log.may_defer(last.revision) {
        let reserve = relaxed || log.has_deferred();
        return log.append(&records, reserve);
    }
    log.defer(batch.iter_mut().filter_map(|p| p.applied.record.take()), Instant::now());
    Ok(())
}

/// Shows a batch to readers and answers those who made it. Answers when history has to be looked at again.
fn publish(shared: &Shared, batch: Vec<Pending>, contents: &Contents) -> Option<Instant> {
    let mut changes = Vec::with_capacity(batch.len());
    let mut answers = Vec::with_capacity(batch.len());
    for mut pending in batch {
        changes.append(&mut pending.applied.changes);
        answers.push((pending.done, pending.applied.outcome));
    }
    let (history_ends, past) = {
        let mut published = shared.published_mut();
        let now = Instant::now();
        if !changes.is_empty() {
            changes.iter().for_each(|c| published.history.push(c.clone()));
            published.history.mark(now, contents.snapshot.revision());
        }
        let snapshot = std::mem::replace(&mut published.snapshot, contents.snapshot.clone());
        let leases = std::mem::replace(&mut published.leases, contents.leases.clone());
        (published.history.expire(now), (snapshot, leases))
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
        head.state.map = published.snapshot.map.clone();
        head.state.revision = published.snapshot.revision;
        head.state.leases = published.leases.clone();
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
