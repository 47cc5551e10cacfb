//! Limits of image pulls: at a time, and per second.

use ferrite_component::{Rate, TokenBucket};
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

/// The pull may not begin now.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("pull QPS exceeded")]
pub(super) struct PullQpsExceeded;

/// Lets pulls begin.
#[derive(Debug, Default)]
pub(super) struct PullGate {
    places: Option<Arc<Semaphore>>,
    rate: Option<(Rate, Mutex<TokenBucket<std::time::Instant>>)>,
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
        let rate = |qps: u32| {
            let rate = Rate { per_second: qps.into(), burst: limits.burst.into() };
            (rate, Mutex::new(TokenBucket::full(rate, Instant::now().into_std())))
        };
        Self {
            places: limits.parallel.map(|places| Arc::new(Semaphore::new(places.max(1)))),
            rate: limits.qps.filter(|qps| *qps > 0).map(rate),
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
        if let Some((rate, bucket)) = &self.rate
            && !bucket.lock().unwrap_or_else(PoisonError::into_inner).take(*rate, at.into_std())
        {
            return Err(PullQpsExceeded);
        }
        Ok(Begun { _place: place, at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pulls_beyond_the_rate_fail() {
        let gate = PullGate::new(PullLimits { qps: Some(2), burst: 1, ..PullLimits::default() });
        assert!(gate.enter().await.is_ok());
        assert_eq!(gate.enter().await.err(), Some(PullQpsExceeded));
        tokio::time::advance(Duration::from_millis(500)).await;
        assert!(gate.enter().await.is_ok());
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
