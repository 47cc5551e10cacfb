//! A limit of events: a number at once, and a number a second after that.

use std::time::{Duration, Instant};

/// Events a second, after a burst of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    pub per_second: f64,
    pub burst: f64,
}

/// A reading of a clock.
pub trait Moment: Copy {
    /// Zero if `earlier` is later.
    fn since(self, earlier: Self) -> Duration;
}

impl Moment for Instant {
    fn since(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }
}

/// The time since a point that the caller chooses.
impl Moment for Duration {
    fn since(self, earlier: Self) -> Duration {
        self.saturating_sub(earlier)
    }
}

/// The tokens of one limit: a burst at most, new ones with time. Each event takes one. The rate is the caller's, as
/// one rate may have many buckets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenBucket<T> {
    /// Negative while callers wait.
    tokens: f64,
    counted: T,
}

impl<T: Moment> TokenBucket<T> {
    /// A bucket with a whole burst.
    pub fn full(rate: Rate, now: T) -> Self {
        Self { tokens: rate.burst, counted: now }
    }

    /// The time of the last event.
    pub fn last(&self) -> T {
        self.counted
    }

    fn refill(&mut self, rate: Rate, now: T) {
        let passed = now.since(self.counted);
        // A clock that steps back gives nothing, now or when it has caught up.
        if !passed.is_zero() {
            self.counted = now;
        }
        self.tokens = (self.tokens + passed.as_secs_f64() * rate.per_second).min(rate.burst);
    }

    /// Takes a token, if there is one.
    pub fn take(&mut self, rate: Rate, now: T) -> bool {
        self.refill(rate, now);
        let is_taken = self.tokens >= 1.0;
        if is_taken {
            self.tokens -= 1.0;
        }
        is_taken
    }

    /// Takes a token that may come only later, and returns the time until then.
    pub fn reserve(&mut self, rate: Rate, now: T) -> Duration {
        self.refill(rate, now);
        self.tokens -= 1.0;
        match self.tokens < 0.0 && rate.per_second > 0.0 {
            true => Duration::try_from_secs_f64(-self.tokens / rate.per_second).unwrap_or(Duration::MAX),
            false => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { per_second: 2.0, burst: 3.0 };

    #[test]
    fn tokens_come_back_with_time() {
        let mut bucket = TokenBucket::full(RATE, Duration::ZERO);
        // Milliseconds since the start, and the result.
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
            (1, false),
            (60_000, false),
            (60_500, true),
        ] {
            assert_eq!(bucket.take(RATE, Duration::from_millis(at)), taken, "at {at} ms");
        }
    }

    #[test]
    fn a_burst_passes_and_the_rest_waits() {
        let mut bucket = TokenBucket::full(RATE, Duration::ZERO);
        for (at, wait) in [(0, 0), (0, 0), (0, 0), (0, 500), (0, 1000), (250, 1250), (60_000, 0)] {
            let found = bucket.reserve(RATE, Duration::from_millis(at));
            assert_eq!(found, Duration::from_millis(wait), "at {at} ms");
        }
        let unlimited = Rate { per_second: 0.0, burst: 1.0 };
        let mut bucket = TokenBucket::full(unlimited, Duration::ZERO);
        assert_eq!([(); 3].map(|()| bucket.reserve(unlimited, Duration::ZERO)), [Duration::ZERO; 3]);
    }
}
