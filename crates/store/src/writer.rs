//! The one thread that makes changes durable and publishes them.

use crate::batch_window::BatchWindow;
use crate::entry::{Entry, Revision};
use crate::history::Change;
use crate::leases::Leases;
use crate::log::{self, Contents, Log};
use crate::pace::Pace;
use crate::shared::{Batch, Pending, Published, Shared};
use crate::store::StoreError;
use crate::txn::Durability;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// More than this is not held back for company.
const MOST_HELD: usize = 64;

/// Takes all that is pending, makes it durable with one synchronisation, publishes it, answers. Between
/// batches it writes deferred records when their time has come, and trims the history.
pub(crate) fn write_loop(shared: &Shared, mut log: Option<Log>) {
    let mut history_ends: Option<Instant> = None;
    let mut batch = Batch::new(log.is_some());
    let (mut gather, mut pace) = (BatchWindow::default(), Pace::default());
    loop {
        let (revision, leases, wishes, closing) = {
            let mut head = shared.head();
            let held = if log.is_some() { pace.wait() } else { Duration::ZERO };
            if let Some(wait) = gather.wait(head.batch.pending.len())
                && held.is_zero()
            {
                let until = Instant::now() + wait.longest;
                while head.batch.pending.len() < wait.wanted && !head.is_urgent() && Instant::now() < until {
                    head = head.sleep(wait.wanted, Some(until));
                }
                gather.came(wait, head.batch.pending.len());
            }
            loop {
                let flush_at = log.as_ref().and_then(Log::flush_at);
                let confirm_at = log.as_ref().and_then(Log::confirm_at);
                let wake = [flush_at, confirm_at, history_ends].into_iter().flatten().min();
                if head.has_work() || wake.is_some_and(|at| at <= Instant::now()) {
                    break;
                }
                head = head.sleep(1, wake);
            }
            if !held.is_zero() && head.batch.has(Durability::Durable) {
                let until = Instant::now() + held;
                while head.batch.pending.len() < MOST_HELD && !head.is_urgent() && Instant::now() < until {
                    head = head.sleep(MOST_HELD, Some(until));
                }
            }
            std::mem::swap(&mut head.batch, &mut batch);
            let (revision, leases) = (head.state.revision, head.state.leases.clone());
            (revision, leases, std::mem::take(&mut head.wishes), head.refused.is_some())
        };
        let flush =
            !wishes.is_empty() || log.as_ref().and_then(Log::flush_at).is_some_and(|at| at <= Instant::now());
        let (begun, count) = (Instant::now(), batch.pending.len());
        match log.as_mut().map_or(Ok(()), |log| persist(log, &mut batch, flush)) {
            Ok(()) => {
                let written = Instant::now();
                gather.answering(count, shared.waiting(), written - begun);
                if count > 0 {
                    pace.wrote(count, written);
                    shared.note_write(None);
                }
                history_ends = publish(shared, &mut batch, revision, leases);
            }
            Err(error) => {
                let error = refusal(error);
                if let Some(log) = &mut log {
                    log.postpone(Instant::now());
                }
                fail(shared, &mut batch, &error);
                wishes.into_iter().for_each(|wish| drop(wish.send(Err(error.clone()))));
                if closing || matches!(error, StoreError::Failed(_)) {
                    // Not one byte more into a log whose end nobody knows.
                    return;
                }
                continue;
            }
        }
        if let Some(log) = &mut log {
            if log.confirm_at().is_some_and(|at| at <= Instant::now()) {
                log.confirm();
            }
            let due = log.checkpoint_due() && !log.has_deferred();
            if due || !wishes.is_empty() {
                let notice: log::Notice = Box::new(move |result| {
                    for wish in wishes {
                        let _ = wish.send(result.clone().map_err(StoreError::Write));
                    }
                });
                let contents = {
                    let published = shared.published();
                    Contents { snapshot: published.snapshot.clone(), leases: published.leases.clone() }
                };
                log.checkpoint(contents, Some(notice));
            }
        } else {
            wishes.into_iter().for_each(|wish| drop(wish.send(Ok(()))));
        }
        if closing && shared.head().batch.pending.is_empty() {
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
fn persist(log: &mut Log, batch: &mut Batch, flush: bool) -> Result<(), log::AppendError> {
    let (durable, relaxed) = (batch.has(Durability::Durable), batch.has(Durability::Relaxed));
    let Some(records) = &mut batch.records else { return Ok(()) };
    let Some(last) = records.last() else {
        // Nothing new, but the window of something old may be over.
        return if flush && log.has_deferred() { log.append(records, true) } else { Ok(()) };
    };
    if flush || durable || !log.may_defer(last) {
        let reserve = relaxed || log.has_deferred();
        return log.append(records, reserve);
    }
    log.defer(records, Instant::now());
    Ok(())
}

/// Number of transactions published and answered together: the first clients go on while the last are still
/// being served, and readers never wait long.
const TOGETHER: usize = 16;

/// Publishes a batch to readers and answers its callers. Returns the time at which the history must be
/// trimmed next.
///
/// Readers have a map of their own, not the head's: its nodes are changed in place as long as nobody holds
/// a snapshot. A map shared with the head would be copied for each batch.
fn publish(shared: &Shared, batch: &mut Batch, revision: Revision, leases: Leases) -> Option<Instant> {
    let Batch { pending, changes, .. } = batch;
    // Leases are shown as they are after the whole batch, and nobody may see half of it.
    let leased = pending.iter().any(|p| p.applied.record.as_ref().is_some_and(|r| !r.leases.is_empty()));
    let together = if leased { pending.len() } else { TOGETHER };
    // Before the lock: readers do not wait for a cipher.
    for Change { key, entry, .. } in &*changes {
        entry.iter().for_each(|entry| shared.reveal(key, entry));
    }
    let mut past = Vec::new();
    let mut unseen = &changes[..];
    while pending.len() > together {
        let count =
            pending[..together].iter().filter_map(|p| p.applied.record.as_ref()).map(|r| r.changes).sum();
        let seen;
        (seen, unseen) = unseen.split_at(count);
        show(&mut shared.published_mut(), seen, &mut past);
        answer(pending.drain(..together), &mut past);
    }
    let history_ends = {
        let mut published = shared.published_mut();
        show(&mut published, unseen, &mut past);
        published.snapshot.revision = revision;
        published.leases = leases;
        let now = Instant::now();
        if !changes.is_empty() {
            published.history.mark(now, revision);
        }
        published.history.expire(now)
    };
    shared.dispatch(changes, revision);
    answer(pending.drain(..), &mut past);
    batch.clear();
    history_ends
}

/// Shows changes to readers.
fn show(published: &mut Published, changes: &[Change], past: &mut Vec<Arc<Entry>>) {
    let Published { snapshot, history, .. } = published;
    for change in changes {
        match (&change.entry, snapshot.map.get_mut(change.key.as_bytes())) {
            (Some(entry), Some(place)) => *place = Arc::clone(entry),
            (Some(entry), None) => drop(snapshot.map.insert(change.key.clone(), Arc::clone(entry))),
            (None, _) => drop(snapshot.map.remove(change.key.as_bytes())),
        }
        snapshot.index.update(&change.key, change.previous.as_deref(), change.entry.as_deref());
        history.push_keeping(change.clone(), past);
        snapshot.revision = change.revision;
    }
}

/// Answers the callers of published changes, and gives each an old entry to free.
fn answer(pending: impl Iterator<Item = Pending>, past: &mut Vec<Arc<Entry>>) {
    for Pending { applied, done } in pending {
        // The caller may have gone away; the change is made all the same.
        let _ = done.send((Ok(applied.outcome), past.pop()));
    }
}

fn refusal(error: log::AppendError) -> StoreError {
    match error {
        log::AppendError::Undone(e) => StoreError::Write(e.to_string()),
        log::AppendError::Unknown(e) => StoreError::Failed(e.to_string()),
    }
}

/// The batch did not reach the disk: everything that was numbered since the last published state is undone,
/// because later transactions were compared with it.
fn fail(shared: &Shared, batch: &mut Batch, error: &StoreError) {
    tracing::error!(%error, "the store could not write");
    shared.note_write(Some(error.clone()));
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
    let undone = std::mem::take(&mut head.batch.pending);
    head.batch.clear();
    drop(head);
    for pending in batch.pending.drain(..).chain(undone) {
        let _ = pending.done.send((Err(error.clone()), None));
    }
    batch.clear();
}
