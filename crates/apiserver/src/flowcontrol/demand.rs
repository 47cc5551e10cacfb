//! The demand for seats over a time.

use std::time::Instant;

/// A number of seats, followed over time.
pub(super) struct Demand {
    seats: u32,
    most: u32,
    since: Instant,
    at: Instant,
    /// Seat-seconds.
    sum: f64,
    /// Seats times seats times seconds.
    squares: f64,
}

/// The demand over a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Observed {
    pub average: f64,
    pub deviation: f64,
    pub most: u32,
}

impl Demand {
    pub fn new(now: Instant) -> Self {
        Self { seats: 0, most: 0, since: now, at: now, sum: 0.0, squares: 0.0 }
    }

    fn advance(&mut self, now: Instant) {
        let (elapsed, seats) = (now.saturating_duration_since(self.at).as_secs_f64(), f64::from(self.seats));
        self.sum += seats * elapsed;
        self.squares += seats * seats * elapsed;
        self.at = self.at.max(now);
    }

    pub fn set(&mut self, seats: u32, now: Instant) {
        self.advance(now);
        self.seats = seats;
        self.most = self.most.max(seats);
    }

    /// The demand since the last call.
    pub fn take(&mut self, now: Instant) -> Observed {
        self.advance(now);
        let seconds = self.at.duration_since(self.since).as_secs_f64();
        let (average, square) =
            if seconds > 0.0 { (self.sum / seconds, self.squares / seconds) } else { (0.0, 0.0) };
        let observed = Observed {
            average,
            deviation: (square - average * average).max(0.0).sqrt(),
            most: self.most.max(self.seats),
        };
        *self = Self { seats: self.seats, most: self.seats, ..Self::new(self.at) };
        observed
    }
}

/// The demand of a level, smoothed over the last minutes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Smoothed {
    pub average: f64,
    pub deviation: f64,
    pub most: u32,
    pub smoothed: f64,
}

impl Smoothed {
    /// Upstream's factor for ten seconds: half of the past is forgotten after five minutes.
    const KEPT: f64 = 0.977;

    pub fn add(&mut self, observed: Observed) {
        let envelope = observed.average + observed.deviation;
        let decayed = Self::KEPT * self.smoothed + (1.0 - Self::KEPT) * envelope;
        *self = Self {
            average: observed.average,
            deviation: observed.deviation,
            most: observed.most,
            smoothed: envelope.max(decayed),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn averages_are_over_time() {
        let start = Instant::now();
        let mut demand = Demand::new(start);
        demand.set(10, start);
        demand.set(0, start + Duration::from_secs(1));
        let observed = demand.take(start + Duration::from_secs(2));
        assert_eq!((observed.average, observed.deviation, observed.most), (5.0, 5.0, 10));
        let observed = demand.take(start + Duration::from_secs(4));
        assert_eq!((observed.average, observed.most), (0.0, 0), "a new time begins");
    }

    #[test]
    fn peaks_count_at_once_and_fade_slowly() {
        let mut smoothed = Smoothed::default();
        smoothed.add(Observed { average: 100.0, deviation: 0.0, most: 100 });
        assert_eq!(smoothed.smoothed, 100.0);
        for _ in 0..30 {
            smoothed.add(Observed { average: 0.0, deviation: 0.0, most: 0 });
        }
        assert!((49.0..51.0).contains(&smoothed.smoothed), "{smoothed:?}");
    }
}
