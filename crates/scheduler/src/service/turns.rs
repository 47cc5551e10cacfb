//! Keeps writes to one pod in the order in which they were decided.
//!
//! Writes run in the background. Without an order, the report that a pod found no node could arrive after the pod was
//! bound, and its condition would say for ever that it has no node.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_client::ObjectKey;
use tokio::sync::watch;

/// The newest write of each pod that has one under way.
#[derive(Debug, Clone, Default)]
pub(super) struct Turns {
    newest: Arc<Mutex<Newest>>,
}

#[derive(Debug, Default)]
struct Newest {
    of: HashMap<ObjectKey, (u64, watch::Receiver<()>)>,
    number: u64,
}

/// One write's place. The next write of the pod may start when this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Turns,
    pod: ObjectKey,
    number: u64,
    before: Option<watch::Receiver<()>>,
    /// Closed by dropping it.
    _end: watch::Sender<()>,
}

async fn ended(mut turn: watch::Receiver<()>) {
    while turn.changed().await.is_ok() {}
}

impl Turns {
    /// Takes the place after all writes of the pod so far. Call it when the write is decided, not in its task.
    pub(super) fn take(&self, pod: &ObjectKey) -> Turn {
        let (end, receiver) = watch::channel(());
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.number += 1;
        let number = newest.number;
        let before = newest.of.insert(pod.clone(), (number, receiver)).map(|(_, before)| before);
        Turn { turns: self.clone(), pod: pod.clone(), number, before, _end: end }
    }

    /// Waits for the writes of the pod that are under way.
    pub(super) async fn settled(&self, pod: &ObjectKey) {
        let newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner).of.get(pod).cloned();
        if let Some((_, turn)) = newest {
            ended(turn).await;
        }
    }
}

impl Turn {
    /// Waits for the writes before this one.
    pub(super) async fn come(&mut self) {
        if let Some(before) = self.before.take() {
            ended(before).await;
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut newest = self.turns.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.of.get(&self.pod).is_some_and(|(number, _)| *number == self.number) {
            newest.of.remove(&self.pod);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn writes_of_a_pod_wait_for_one_another() {
        let (a, b) = (ObjectKey::new("ns", "a"), ObjectKey::new("ns", "b"));
        let turns = Turns::default();
        let first = turns.take(&a);
        let mut second = turns.take(&a);
        assert!(second.come().now_or_never().is_none());
        assert!(turns.settled(&a).now_or_never().is_none());
        assert!(turns.settled(&b).now_or_never().is_some());
        assert!(turns.take(&b).come().now_or_never().is_some());
        drop(first);
        assert!(second.come().now_or_never().is_some());
        assert!(turns.settled(&a).now_or_never().is_none());
        drop(second);
        assert!(turns.settled(&a).now_or_never().is_some());
        assert!(turns.newest.lock().unwrap().of.is_empty());
    }
}
