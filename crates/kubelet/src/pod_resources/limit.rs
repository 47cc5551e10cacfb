//! A limit for requests: a number at once, and a number in a second.

use std::time::Duration;

/// A token bucket. Times are counted from its creation.
#[derive(Debug)]
pub(crate) struct Limit {
    rate: f64,
    burst: f64,
    tokens: f64,
    at: Duration,
}

impl Limit {
    pub(crate) fn new(rate: u32, burst: u32) -> Self {
        Self { rate: rate.into(), burst: burst.into(), tokens: burst.into(), at: Duration::ZERO }
    }

    /// Returns true if one more request is taken now.
    pub(crate) fn take(&mut self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.at);
        self.at = self.at.max(now);
        self.tokens = (self.tokens + passed.as_secs_f64() * self.rate).min(self.burst);
        let is_taken = self.tokens >= 1.0;
        if is_taken {
            self.tokens -= 1.0;
        }
        is_taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_the_rate() {
        let mut limit = Limit::new(100, 10);
        let at = Duration::from_millis;
        assert_eq!((0..50).filter(|_| limit.take(at(0))).count(), 10);
        assert!(!limit.take(at(9)));
        assert!(limit.take(at(20)));
        assert_eq!((0..1000).filter(|n| limit.take(at(20 + n))).count(), 100);
        assert_eq!(
            (0..50).filter(|_| limit.take(at(60_000))).count(),
            10,
            "no more than the burst is saved up"
        );
        assert!(!limit.take(at(0)), "a clock that steps back gives nothing");
    }
}
