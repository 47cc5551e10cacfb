//! The one thread that makes changes durable and publishes them.

use crate::log::{self, Contents, Log, Record};
use crate::replica::Snapshot;
use crate::store::{Pending, Shared, StoreError};
use crate::txn::Durability;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// A batch this large says that many write at once.
const MANY: usize = 8;
/// No pause is longer.
const MAX_PAUSE: Duration = Duration::from_millis(1);

/// How long to wait for those who were just answered to come back with their next change, so that it goes to the
/// disk with the others': without it, one half of the writers always misses the synchronisation of the other half.
/// A fraction of what a synchronisation takes, and nothing where few write.
fn pause(answered: usize, took: Duration) -> Option<Duration> {
    (answered >= MANY).then(|| (took / 4).min(MAX_PAUSE))
}

/// Takes all that is pending, makes it durable with one synchronisation, publishes it, answers. Between batches it
/// writes what was deferred when its time has come, and lets history grow old.
pub(crate) fn write_loop(shared: &Shared, mut log: Option<Log>) {
    let mut history_ends: Option<Instant> = None;
    let mut again = None;
    loop {
        if let Some((answered, pause)) = again.take() {
            gather(shared, answered, Instant::now() + pause);
        }
        let (mut batch, snapshot, leases, wishes, closing) = {
            let mut head = shared.head();
            loop {
                let now = Instant::now();
                let flush_at = log.as_ref().and_then(Log::flush_at);
                let wake = [flush_at, history_ends].into_iter().flatten().min();
                if !head.pending.is_empty() || !head.wishes.is_empty() || head.refused.is_some() {
                    break;
                }
                head = match wake {
                    Some(at) if at <= now => break,
                    Some(at) => {
                        let timed = shared.work.wait_timeout(head, at - now);
                        timed.unwrap_or_else(PoisonError::into_inner).0
                    }
                    None => shared.work.wait(head).unwrap_or_else(PoisonError::into_inner),
                };
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
        let begun = Instant::now();
        match log.as_mut().map_or(Ok(()), |log| persist(log, &mut batch, flush)) {
            Ok(()) => {
                let answered = batch.len();
                let took = begun.elapsed();
                again = log.as_ref().and_then(|_| pause(answered, took)).map(|pause| (answered, pause));
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

/// Waits until as many changes as were just answered have come in, or the time is over, or there is something else
/// to do.
fn gather(shared: &Shared, answered: usize, until: Instant) {
    let mut head = shared.head();
    head.worth_waking = head.pending.len() + answered;
    while head.pending.len() < head.worth_waking && head.wishes.is_empty() && head.refused.is_none() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        head = shared.work.wait_timeout(head, left).unwrap_or_else(PoisonError::into_inner).0;
    }
    head.worth_waking = 0;
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
    let history_ends = {
        let mut published = shared.published_mut();
        let now = Instant::now();
        if !changes.is_empty() {
            changes.iter().for_each(|c| published.history.push(c.clone()));
            published.history.mark(now, contents.snapshot.revision());
        }
        let old = std::mem::replace(&mut published.snapshot, contents.snapshot.clone());
        let old_leases = std::mem::replace(&mut published.leases, contents.leases.clone());
        let history_ends = published.history.expire(now);
        drop(published);
        // What only the old state held is freed after the lock, not under it.
        drop((old, old_leases));
        history_ends
    };
    shared.ring(&changes);
    for (done, outcome) in answers {
        // The caller may have gone away; the change is made all the same.
        let _ = done.send(Ok(outcome));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_many_writers_are_waited_for_and_never_long() {
        let ms = Duration::from_millis;
        let rows = [
            (1, ms(2), None),
            (MANY - 1, ms(2), None),
            (MANY, ms(2), Some(Duration::from_micros(500))),
            (200, ms(100), Some(MAX_PAUSE)),
        ];
        for (answered, took, expected) in rows {
            assert_eq!(pause(answered, took), expected, "{answered} after {took:?}");
        }
    }
}
