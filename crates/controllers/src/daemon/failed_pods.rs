//! Backoff for deleting failed daemon pods. A deletion lets a new pod come; a pod that fails each time must
//! not be replaced without end.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(15 * 60);
/// A pod that failed so long ago no longer counts.
const FORGOTTEN: Duration = Duration::from_secs(2 * 15 * 60);
/// Entries that are looked through at most each time for some to forget.
const SWEEP_EVERY: Duration = Duration::from_secs(60);

/// A DaemonSet by UID and observed generation, and a node. A new generation starts without delay.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct FailureKey {
    pub(super) set: String,
    pub(super) generation: i64,
    pub(super) node: String,
}

struct Entry {
    delay: Duration,
    since: Instant,
}

struct State {
    entries: HashMap<FailureKey, Entry>,
    swept: Instant,
}

/// Delays that double with each failure on a node.
pub(super) struct FailedPods {
    state: Mutex<State>,
}

impl FailedPods {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State { entries: HashMap::new(), swept: Instant::now() }) }
    }

    /// Allows the deletion of one failed pod, or returns the delay before it.
    pub(super) fn delete_now(&self, key: FailureKey) -> Result<(), Duration> {
        let now = Instant::now();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if now - state.swept > SWEEP_EVERY {
            state.entries.retain(|_, entry| now - entry.since <= FORGOTTEN);
            state.swept = now;
        }
        match state.entries.get_mut(&key).filter(|entry| now - entry.since <= FORGOTTEN) {
            Some(entry) if now - entry.since < entry.delay => Err(entry.delay),
            Some(entry) => {
                *entry = Entry { delay: (entry.delay * 2).min(LONGEST), since: now };
                Ok(())
            }
            None => {
                state.entries.insert(key, Entry { delay: FIRST, since: now });
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(generation: i64) -> FailureKey {
        FailureKey { set: "u".into(), generation, node: "n".into() }
    }

    #[tokio::test(start_paused = true)]
    async fn delays_double_for_each_failure_and_start_again_for_a_new_generation() {
        let failed = FailedPods::new();
        assert_eq!(failed.delete_now(key(1)), Ok(()));
        for delay in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 900, 900] {
            let delay = Duration::from_secs(delay);
            assert_eq!(failed.delete_now(key(1)), Err(delay));
            tokio::time::advance(delay).await;
            assert_eq!(failed.delete_now(key(1)), Ok(()));
        }
        assert_eq!(failed.delete_now(key(2)), Ok(()), "another generation");
        tokio::time::advance(FORGOTTEN + Duration::from_secs(1)).await;
        assert_eq!(failed.delete_now(key(1)), Ok(()), "forgotten");
        assert_eq!(failed.delete_now(key(1)), Err(FIRST));
        assert_eq!(failed.state.lock().unwrap().entries.len(), 1, "the other generation was swept");
    }
}
