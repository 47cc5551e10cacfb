//! The `Retry-After` of refused clients: longer while many are refused.

/// Refusals of one level, second by second.
#[derive(Debug)]
pub(super) struct RetryAfter {
    /// Seconds since some beginning, and the refusals in each; older ones than needed are dropped.
    history: Vec<(u64, u64)>,
    second: u64,
    refused: u64,
    seconds: u64,
    raised: Option<u64>,
}

impl Default for RetryAfter {
    fn default() -> Self {
        Self { history: Vec::new(), second: 0, refused: 0, seconds: 1, raised: None }
    }
}

/// The longest that is asked for.
const LONGEST: u64 = 32;

impl RetryAfter {
    /// Counts a refusal, and says after how many seconds to try again.
    pub fn refuse(&mut self, second: u64) -> u64 {
        if second != self.second {
            if self.refused > 0 {
                self.history.push((self.second, self.refused));
            }
            let needed = (2 * self.seconds).min(LONGEST);
            self.history.retain(|(then, _)| second.saturating_sub(*then) <= needed);
            (self.second, self.refused) = (second, 0);
            self.adjust(second);
        }
        self.refused += 1;
        self.seconds
    }

    /// Doubles the wait when three clients a second were refused over its length, and shortens it by a second when
    /// fewer than one were.
    fn adjust(&mut self, now: u64) {
        let recent = self.history.iter().filter(|(then, _)| now - then <= self.seconds);
        let refused: u64 = recent.map(|(_, count)| count).sum();
        let settled = self.raised.is_none_or(|raised| now - raised >= self.seconds);
        if settled && refused >= 3 * self.seconds {
            self.seconds = (2 * self.seconds).min(LONGEST);
            self.raised = Some(now);
        } else if refused < self.seconds && self.seconds > 1 {
            self.seconds -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_grows_with_refusals_and_shrinks_again() {
        let mut retry = RetryAfter::default();
        let mut asked = Vec::new();
        for second in 100..140 {
            for _ in 0..50 {
                asked.push(retry.refuse(second));
            }
        }
        assert_eq!((asked[0], asked[49], asked[50]), (1, 1, 2));
        assert_eq!(asked.iter().max(), Some(&32), "{asked:?}");
        let mut last = 0;
        for second in (1000..3000).step_by(40) {
            last = retry.refuse(second);
        }
        assert_eq!(last, 1);
    }
}
