//! A limit of requests per second, as client-go's token bucket: the caller waits for its turn.

use ferrite_component::{Rate, TokenBucket};
use std::sync::{Mutex, PoisonError};
use tokio::time::Instant;

/// Requests a second, after a burst of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateLimit {
    pub qps: f64,
    pub burst: u32,
}

/// Lets requests pass at a rate.
#[derive(Debug)]
pub struct RateLimiter {
    rate: Rate,
    bucket: Mutex<TokenBucket<std::time::Instant>>,
}

impl RateLimiter {
    pub fn new(limit: RateLimit) -> Self {
        let rate = Rate { per_second: limit.qps, burst: limit.burst.into() };
        Self { rate, bucket: Mutex::new(TokenBucket::full(rate, Instant::now().into_std())) }
    }

    /// Waits for the caller's turn. Callers are served in the order in which they came.
    pub async fn turn(&self) {
        let now = Instant::now().into_std();
        let wait = self.bucket.lock().unwrap_or_else(PoisonError::into_inner).reserve(self.rate, now);
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_and_the_rest_waits() {
        let limiter = RateLimiter::new(RateLimit { qps: 2.0, burst: 3 });
        let began = Instant::now();
        for (request, after) in [(1, 0), (2, 0), (3, 0), (4, 500), (5, 1000)] {
            limiter.turn().await;
            assert_eq!(began.elapsed().as_millis(), after, "request {request}");
        }
        tokio::time::sleep(Duration::from_secs(60)).await;
        let began = Instant::now();
        for _ in 0..3 {
            limiter.turn().await;
        }
        assert_eq!(began.elapsed(), Duration::ZERO, "no more than a burst is saved up");
        limiter.turn().await;
        assert_eq!(began.elapsed().as_millis(), 500);
    }
}
