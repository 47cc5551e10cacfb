//! Objects whose last write failed, and when each is due again.

use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Delay after the first failure. Each further failure doubles it.
const FIRST: Duration = Duration::from_secs(1);
/// The longest delay: a refusal may end at any time, and nothing reports that.
const LONGEST: Duration = Duration::from_secs(60);

/// The delay after so many failures in a row.
pub(crate) fn delay(failures: u32) -> Duration {
    FIRST.saturating_mul(2u32.saturating_pow(failures.saturating_sub(1))).min(LONGEST)
}

#[derive(Debug, Clone, Copy)]
struct Failed {
    due: Instant,
    failures: u32,
}

/// Back-off by name: an object whose writes are refused does not delay others.
#[derive(Debug, Default)]
pub(crate) struct Retries(BTreeMap<String, Failed>);

impl Retries {
    /// Records a failure.
    pub fn failed(&mut self, name: &str, now: Instant) {
        let failures = self.0.get(name).map_or(0, |known| known.failures).saturating_add(1);
        self.0.insert(name.to_owned(), Failed { due: now + delay(failures), failures });
    }

    /// Forgets the failures of a name: it was written, or is gone.
    pub fn succeeded(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Forgets the failures of all names but some.
    pub fn keep(&mut self, keeps: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| keeps(name));
    }

    /// Returns true if the name has failed and is not due yet.
    pub fn waits(&self, name: &str, now: Instant) -> bool {
        self.0.get(name).is_some_and(|known| known.due > now)
    }

    /// The time at which the first name is due; none where nothing failed.
    pub fn next(&self) -> Option<Instant> {
        self.0.values().map(|known| known.due).min()
    }

    /// The names that are due. They stay until [`Self::succeeded`].
    pub fn due(&self, now: Instant) -> Vec<String> {
        let due = self.0.iter().filter(|(_, known)| known.due <= now);
        due.map(|(name, _)| name.clone()).collect()
    }

    /// Waits until a name is due; without any, for ever.
    pub async fn wait(&self) {
        until(self.next()).await;
    }
}

/// Waits until an instant; without one, for ever.
pub(crate) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_a_limit() {
        for (failures, seconds) in [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (u32::MAX, 60)] {
            assert_eq!(delay(failures), Duration::from_secs(seconds), "{failures}");
        }
    }

    #[test]
    fn each_name_has_a_delay_of_its_own() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut retries = Retries::default();
        assert_eq!(retries.next(), None);
        retries.failed("a", start);
        retries.failed("b", after(1));
        retries.failed("a", after(1));
        assert_eq!(retries.next(), Some(after(2)));
        assert_eq!(retries.due(after(2)), ["b"]);
        assert!(retries.waits("a", after(2)) && !retries.waits("b", after(2)) && !retries.waits("c", start));
        assert_eq!(retries.due(after(3)), ["a", "b"]);
        retries.succeeded("a");
        assert_eq!((retries.due(after(9)), retries.next()), (vec!["b".to_owned()], Some(after(2))));
    }
}
