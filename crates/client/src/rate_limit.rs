//! A limit of requests per second, as client-go's token bucket: the caller waits for its turn.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Requests a second, after a burst of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateLimit {
    pub qps: f64,
    pub burst: u32,
}

#[derive(Debug)]
struct Bucket {
    /// Negative while callers wait.
    tokens: f64,
    counted: Instant,
}

/// Lets requests pass at a rate.
#[derive(Debug)]
pub struct RateLimiter {
    limit: RateLimit,
    bucket: Mutex<Bucket>,
}

impl RateLimiter {
    pub fn new(limit: RateLimit) -> Self {
        let bucket = Bucket { tokens: f64::from(limit.burst), counted: Instant::now() };
        Self { limit, bucket: Mutex::new(bucket) }
    }

    /// Waits for the caller's turn. Callers are served in the order in which they came.
    pub async fn turn(&self) {
        let wait = self.take(Instant::now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }

    fn take(&self, now: Instant) -> Duration {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let new = now.saturating_duration_since(bucket.counted).as_secs_f64() * self.limit.qps;
        bucket.tokens = (bucket.tokens + new).min(f64::from(self.limit.burst)) - 1.0;
        bucket.counted = now;
        match bucket.tokens < 0.0 && self.limit.qps > 0.0 {
            true => Duration::try_from_secs_f64(-bucket.tokens / self.limit.qps).unwrap_or(Duration::MAX),
            false => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
