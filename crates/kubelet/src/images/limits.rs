//! Limits of image pulls: at a time, and per second.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Limits of pulls. The default has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PullLimits {
    /// Pulls at a time (`serializeImagePulls`, `maxParallelImagePulls`). Others wait in the order in which they came.
    pub parallel: Option<usize>,
    /// Pulls a second (`registryPullQPS`), after `burst` of them. Others fail and back off.
    pub qps: Option<u32>,
    pub burst: u32,
}

/// Tokens that a pull takes one of: `burst` at most, `qps` new ones each second.
#[derive(Debug)]
struct TokenBucket {
    qps: f64,
    burst: f64,
    tokens: f64,
    counted: Instant,
}

impl TokenBucket {
    fn new(qps: u32, burst: u32, now: Instant) -> Self {
        Self { qps: qps.into(), burst: burst.into(), tokens: burst.into(), counted: now }
    }

    fn take(&mut self, now: Instant) -> bool {
        let new = now.saturating_duration_since(self.counted).as_secs_f64() * self.qps;
        self.tokens = (self.tokens + new).min(self.burst);
        self.counted = now;
        let taken = self.tokens >= 1.0;
        if taken {
            self.tokens -= 1.0;
        }
        taken
    }
}

/// The pull may not begin now.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("pull QPS exceeded")]
pub(super) struct PullQpsExceeded;

/// Lets pulls begin.
#[derive(Debug, Default)]
pub(super) struct PullGate {
    places: Option<Arc<Semaphore>>,
    bucket: Option<Mutex<TokenBucket>>,
}

/// A pull that may go on until this is dropped.
#[derive(Debug)]
pub(super) struct Begun {
    _place: Option<OwnedSemaphorePermit>,
    at: Instant,
}

impl Begun {
    pub(super) fn elapsed(&self) -> Duration {
        self.at.elapsed()
    }
}

impl PullGate {
    pub(super) fn new(limits: PullLimits) -> Self {
        let bucket = |qps| Mutex::new(TokenBucket::new(qps, limits.burst, Instant::now()));
        Self {
            places: limits.parallel.map(|places| Arc::new(Semaphore::new(places.max(1)))),
            bucket: limits.qps.filter(|qps| *qps > 0).map(bucket),
        }
    }

    /// Waits for a place. As upstream, the rate is looked at after that.
    pub(super) async fn enter(&self) -> Result<Begun, PullQpsExceeded> {
        let place = match &self.places {
            // Nobody closes it.
            Some(places) => places.clone().acquire_owned().await.ok(),
            None => None,
        };
        let at = Instant::now();
        if let Some(bucket) = &self.bucket
            && !bucket.lock().unwrap_or_else(PoisonError::into_inner).take(at)
        {
            return Err(PullQpsExceeded);
        }
        Ok(Begun { _place: place, at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_with_time() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(2, 3, start);
        // Milliseconds since the start, and the answer.
        for (at, taken) in [
            (0, true),
            (0, true),
            (0, true),
            (0, false),
            (499, false),
            (500, true),
            (500, false),
            (60_000, true),
            (60_000, true),
            (60_000, true),
            (60_000, false),
        ] {
            assert_eq!(bucket.take(start + Duration::from_millis(at)), taken, "at {at} ms");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn places_are_given_in_order() {
        let gate = PullGate::new(PullLimits { parallel: Some(2), ..PullLimits::default() });
        let (one, two) = (gate.enter().await.unwrap(), gate.enter().await.unwrap());
        let mut three = std::pin::pin!(gate.enter());
        let mut four = std::pin::pin!(gate.enter());
        assert!(futures_util::poll!(three.as_mut()).is_pending());
        assert!(futures_util::poll!(four.as_mut()).is_pending());
        drop(one);
        assert!(futures_util::poll!(four.as_mut()).is_pending());
        assert!(futures_util::poll!(three.as_mut()).is_ready());
        drop(two);
        assert!(futures_util::poll!(four.as_mut()).is_ready());
        let open = PullGate::new(PullLimits::default());
        let many: Vec<_> = futures_util::future::join_all((0..100).map(|_| open.enter())).await;
        assert!(many.iter().all(Result::is_ok));
    }
}
