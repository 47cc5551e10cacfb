//! Decides how long the writer delays a batch to collect more transactions.
//!
//! Every write to the disk also costs processor time. When the processor is the bottleneck, fewer and
//! larger writes leave more of it to the clients, and every client is answered sooner. Otherwise a delay is
//! a loss. The writer cannot know which of the two is the case, so it tries: for a moment it delays batches
//! a little longer, or a little less, and keeps the delay with the higher throughput.

use std::time::{Duration, Instant};

/// The delays to try, the shortest first.
const WAITS: [Duration; 4] =
    [Duration::ZERO, Duration::from_micros(400), Duration::from_millis(1), Duration::from_millis(2)];
/// Length of one measurement.
const WINDOW: Duration = Duration::from_millis(50);
/// Gain in throughput that a longer wait must bring, in percent: without a gain it is not worth waiting.
const GAIN: u64 = 2;
/// Fewer transactions in a window are no load to speak of.
const LEAST: u64 = 50;
/// Most windows between two trials.
const MOST_REST: u32 = 128;

/// Finds out which wait pays.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    level: usize,
    window: Window,
    /// Throughput in the window before the trial, at the level to return to.
    before: u64,
    trial: Trial,
    /// Number of windows until the next trial.
    rest: u32,
    /// The next value of `rest` if the trial changes nothing.
    next_rest: u32,
    /// The next trial is one of a shorter wait.
    down: bool,
}

#[derive(Debug, Default)]
struct Window {
    begun: Option<Instant>,
    batches: u64,
    transactions: u64,
}

/// Where a trial stands.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Trial {
    #[default]
    None,
    /// The other level has its window.
    Other { from: usize },
    /// The former level has another window, so that a change of the load is not taken for a gain.
    Again { other: usize, done: u64 },
}

impl Pace {
    /// The current delay of a batch.
    pub fn wait(&self) -> Duration {
        WAITS[self.level]
    }

    /// Notes a batch that was written.
    pub fn wrote(&mut self, transactions: usize, now: Instant) {
        let begun = *self.window.begun.get_or_insert(now);
        self.window.batches += 1;
        self.window.transactions += transactions as u64;
        let took = now.saturating_duration_since(begun);
        if took < WINDOW {
            return;
        }
        let Window { batches, transactions, .. } = std::mem::take(&mut self.window);
        self.window.begun = Some(now);
        // An idle window shows nothing, and clients that come one at a time need no wait.
        if took > 2 * WINDOW || transactions < LEAST || 10 * transactions < 11 * batches {
            *self = Self { window: std::mem::take(&mut self.window), ..Self::default() };
            return;
        }
        self.judge(transactions * 1_000_000 / took.as_micros().max(1) as u64);
    }

    /// Takes the next step after a window with a throughput of `done` transactions per second.
    fn judge(&mut self, done: u64) {
        match self.trial {
            Trial::None if self.rest > 0 => self.rest -= 1,
            Trial::None => {
                let from = self.level;
                self.down = (self.down && from > 0) || from + 1 == WAITS.len();
                self.level = if self.down { from - 1 } else { from + 1 };
                (self.before, self.trial) = (done, Trial::Other { from });
            }
            Trial::Other { from } => {
                let other = std::mem::replace(&mut self.level, from);
                self.trial = Trial::Again { other, done };
            }
            Trial::Again { other, done: tried } => {
                let former = self.before.midpoint(done);
                let (longer, shorter) = if other > self.level { (tried, former) } else { (former, tried) };
                let longer_pays = longer * 100 > shorter * (100 + GAIN);
                self.trial = Trial::None;
                if longer_pays == (other > self.level) {
                    (self.level, self.next_rest) = (other, 0);
                } else {
                    self.next_rest = (2 * self.next_rest).clamp(1, MOST_REST);
                    self.rest = self.next_rest;
                    self.down = !self.down;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clients that wait for their answers, before a disk and some processors.
    struct Load {
        clients: f64,
        /// Microseconds of processor for a transaction, and for a batch.
        each: f64,
        batch: f64,
        disk: f64,
    }

    impl Load {
        /// Transactions in a second and in a batch when batches are held back for a while.
        fn with(&self, wait: Duration) -> (f64, f64) {
            let wait = wait.as_micros() as f64;
            // Every client is either on its way or in a batch; the processor or the number of clients is
            // the limit.
            let (mut rate, mut size) = (1.0, 1.0);
            for _ in 0..50 {
                let processor = 1e6 / (self.each + self.batch / size);
                let cycle = self.each + wait + self.disk + self.batch;
                rate = f64::min(processor, self.clients * 1e6 / cycle);
                size = (rate * (wait + self.disk) / 1e6).clamp(1.0, self.clients);
            }
            (rate, size)
        }

        /// The delay after `windows` windows, and the share of the best throughput reached on the way.
        fn run(&self, pace: &mut Pace, windows: u32) -> (Duration, f64) {
            let mut now = Instant::now();
            let (mut done, mut possible, mut noted) = (0.0, 0.0, 0);
            let best = WAITS.iter().map(|wait| self.with(*wait).0).fold(0.0, f64::max);
            let end = now + WINDOW * windows;
            while now < end {
                let (rate, size) = self.with(pace.wait());
                let took = Duration::from_secs_f64(size / rate);
                now += took;
                done += size;
                pace.wrote(done as usize - noted, now);
                noted = done as usize;
                possible += best * took.as_secs_f64();
            }
            (pace.wait(), done / possible)
        }
    }

    #[test]
    fn what_gets_more_done_stays() {
        for (load, wait) in [
            // Many clients, and hardly enough processor.
            (Load { clients: 64.0, each: 80.0, batch: 60.0, disk: 150.0 }, 2000),
            // Enough processor: the clients would only wait.
            (Load { clients: 8.0, each: 10.0, batch: 20.0, disk: 150.0 }, 0),
            // Nobody to wait for.
            (Load { clients: 1.0, each: 80.0, batch: 60.0, disk: 150.0 }, 0),
            (Load { clients: 4.0, each: 80.0, batch: 60.0, disk: 150.0 }, 0),
        ] {
            let mut pace = Pace::default();
            let (found, _) = load.run(&mut pace, 40);
            assert_eq!(found.as_micros(), wait, "{} clients", load.clients);
            let (_, done) = load.run(&mut pace, 500);
            assert!(done > 0.97, "{} clients: {done}", load.clients);
        }
    }

    #[test]
    fn a_load_that_ends_leaves_nothing_behind() {
        let mut pace = Pace::default();
        Load { clients: 64.0, each: 80.0, batch: 60.0, disk: 150.0 }.run(&mut pace, 40);
        assert!(!pace.wait().is_zero());
        let later = Instant::now() + Duration::from_secs(60);
        pace.wrote(1, later);
        pace.wrote(1, later + WINDOW);
        assert_eq!(pace.wait(), Duration::ZERO);
    }
}
