//! Exponential back-off with jitter.

use std::time::Duration;

/// Delays that double from `base` up to `cap`, each lengthened by up to `jitter` of itself so that many clients
/// that failed together do not come back together.
#[derive(Debug, Clone)]
pub struct Backoff {
    base: Duration,
    cap: Duration,
    jitter: f64,
    next: Duration,
}

impl Backoff {
    pub fn new(base: Duration, cap: Duration, jitter: f64) -> Self {
        Self { base, cap, jitter, next: base }
    }

    /// The delay before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (self.next * 2).min(self.cap);
        delay.mul_f64(1.0 + self.jitter * rand::random::<f64>())
    }

    /// Starts again from `base`, after success.
    pub fn reset(&mut self) {
        self.next = self.base;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_to_the_cap_and_starts_again() {
        let mut backoff = Backoff::new(Duration::from_millis(800), Duration::from_secs(3), 0.0);
        let delays: Vec<_> = (0..4).map(|_| backoff.next_delay().as_millis()).collect();
        assert_eq!(delays, [800, 1600, 3000, 3000]);
        backoff.reset();
        assert_eq!(backoff.next_delay().as_millis(), 800);
    }
}
