//! Exponential back-off per key: 10 s, doubling to 300 s, forgotten after 10 minutes without trouble.

use crate::clock;
use jiff::Timestamp;
use std::collections::HashMap;
use std::time::Duration;

/// As upstream: a container that ran for so long begins anew, whatever its longest delay is.
const HEALTHY: Duration = Duration::from_secs(600);

/// Most keys of one pod: containers and images of its spec, with room to spare.
const LIMIT: usize = 4096;

#[derive(Debug, Clone, Copy)]
struct Entry {
    delay: Duration,
    updated: Timestamp,
}

/// Back-off state of one pod.
#[derive(Debug, Clone)]
pub(crate) struct BackOff {
    initial: Duration,
    max: Duration,
    entries: HashMap<String, Entry>,
}

impl Default for BackOff {
    fn default() -> Self {
        Self::new(Duration::from_secs(10), Duration::from_secs(300))
    }
}

impl BackOff {
    /// Between restarts of a container, of at most this length.
    pub(crate) fn of_restarts(max: Duration) -> Self {
        Self::new(Duration::from_secs(10).min(max), max)
    }

    pub(crate) fn new(initial: Duration, max: Duration) -> Self {
        Self { initial, max, entries: HashMap::new() }
    }

    /// The delay in force for a failure at `failed_at`, and the moment it ends, when that is after `now`.
    pub(crate) fn blocked(
        &self,
        key: &str,
        failed_at: Timestamp,
        now: Timestamp,
    ) -> Option<(Duration, Timestamp)> {
        let entry = self.entries.get(key).filter(|e| !Self::expired(e, failed_at))?;
        let until = clock::add(failed_at, entry.delay);
        (until > now).then_some((entry.delay, until))
    }

    /// Notes one more attempt after a failure at `failed_at`: the next failure waits twice as long.
    pub(crate) fn next(&mut self, key: &str, failed_at: Timestamp, now: Timestamp) {
        if self.entries.len() >= LIMIT && !self.entries.contains_key(key) {
            self.entries.clear();
        }
        let delay = match self.entries.get(key) {
            Some(e) if !Self::expired(e, failed_at) => (e.delay * 2).min(self.max),
            _ => self.initial,
        };
        self.entries.insert(key.to_string(), Entry { delay, updated: now });
    }

    pub(crate) fn forget(&mut self, key: &str) {
        self.entries.remove(key);
    }

    fn expired(entry: &Entry, at: Timestamp) -> bool {
        clock::since(entry.updated, at) > HEALTHY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    #[test]
    fn a_short_delay_is_remembered_as_long_as_a_long_one() {
        let mut backoff = BackOff::of_restarts(Duration::from_secs(1));
        backoff.next("c", at(0), at(0));
        assert!(backoff.blocked("c", at(600), at(600)).is_some());
        assert!(backoff.blocked("c", at(601), at(601)).is_none());
    }

    #[test]
    fn doubles_to_the_maximum_and_is_forgotten_after_a_healthy_while() {
        let mut backoff = BackOff::default();
        let mut now = 0;
        assert!(backoff.blocked("c", at(now), at(now)).is_none(), "the first failure restarts at once");
        for expected in [10, 20, 40, 80, 160, 300, 300] {
            backoff.next("c", at(now), at(now));
            let (delay, until) = backoff.blocked("c", at(now), at(now)).unwrap();
            assert_eq!((delay.as_secs(), until), (expected, at(now + expected as i64)));
            now += expected as i64;
            assert!(backoff.blocked("c", at(now - expected as i64), at(now)).is_none());
        }
        let later = now + 601;
        assert!(backoff.blocked("c", at(later), at(later)).is_none());
        backoff.next("c", at(later), at(later));
        assert_eq!(backoff.blocked("c", at(later), at(later)).unwrap().0.as_secs(), 10);
    }
}
