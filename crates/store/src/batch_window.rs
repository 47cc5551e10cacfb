//! Decides how long the writer waits for more transactions before it writes a batch.
//!
//! Clients whose transactions were answered together send the next ones at about the same time. A writer
//! that takes the first arrivals at once splits the clients into two halves for good, and each half waits
//! through the other's fsync. Waiting for all of them costs the time until they return and saves one fsync.
//! This pays as long as the clients are few enough to return before the disk would be done.

use std::time::Duration;

/// More clients than this take longer to come back than a disk takes, and their work is better done while it writes.
const MOST: usize = 96;
/// The longest wait, for disks that are slow.
const LONGEST: Duration = Duration::from_millis(1);
/// Shorter waits are not worth going to sleep.
const SHORTEST: Duration = Duration::from_micros(20);
/// Most batches in a row that are written without a wait after clients did not return.
const MOST_SKIPPED: u32 = 64;

/// The estimate of how many clients return after a batch.
#[derive(Debug, Default)]
pub(crate) struct BatchWindow {
    /// Number of clients expected next: those that the last batch answered plus those already waiting.
    expected: usize,
    /// Time that the disk needed for the last batch.
    took: Duration,
    /// Number of batches still to write without a wait.
    skip: u32,
    /// The next value of `skip` if clients do not return once more.
    next_skip: u32,
}

/// The number of transactions to wait for, and the longest wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    pub wanted: usize,
    pub longest: Duration,
}

impl BatchWindow {
    /// Records that a batch of `count` transactions was written and is about to be answered, while
    /// `waiting` others are queued.
    pub fn answering(&mut self, count: usize, waiting: usize, took: Duration) {
        (self.expected, self.took) = (count + waiting, took);
    }

    /// Decides whether to wait for more transactions when `waiting` are queued already.
    pub fn wait(&mut self, waiting: usize) -> Option<Wait> {
        let wanted = std::mem::take(&mut self.expected);
        let longest = (self.took / 2).min(LONGEST);
        if wanted <= waiting.max(1) || wanted > MOST || longest < SHORTEST {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        Some(Wait { wanted, longest })
    }

    /// Notes how many there were in the end.
    pub fn came(&mut self, wait: Wait, count: usize) {
        // Most of them are enough: a client that is late this time is there the next.
        if count >= wait.wanted - wait.wanted / 4 {
            self.next_skip = 0;
        } else {
            self.next_skip = (self.next_skip * 2).clamp(1, MOST_SKIPPED);
            self.skip = self.next_skip;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Duration = Duration::from_micros(150);

    #[test]
    fn waits_for_who_was_answered_if_that_can_pay() {
        // Answered, waiting before and after that, time of the disk in microseconds: how many to wait for.
        let rows = [
            (0, 0, 0, 150, None),
            (0, 5, 5, 150, None),
            // A single client is no company for itself.
            (1, 0, 0, 150, None),
            (1, 1, 1, 150, Some(2)),
            (32, 32, 32, 150, Some(64)),
            // Some are back already.
            (32, 32, 40, 150, Some(64)),
            (32, 32, 64, 150, None),
            (64, 0, 0, 150, Some(64)),
            (96, 0, 0, 150, Some(96)),
            // Too many to wait for.
            (97, 0, 0, 150, None),
            (128, 128, 128, 300, None),
            // Nothing was written: there is nothing to save.
            (32, 32, 32, 0, None),
            (32, 32, 32, 30, None),
        ];
        for row in rows {
            let (answered, before, after, took, wanted) = row;
            let mut gather = BatchWindow::default();
            gather.answering(answered, before, Duration::from_micros(took));
            assert_eq!(gather.wait(after).map(|w| w.wanted), wanted, "{row:?}");
        }
    }

    #[test]
    fn waits_no_longer_than_half_of_what_the_disk_takes() {
        for (took, longest) in [(150, 75), (1000, 500), (20_000, 1000)] {
            let mut gather = BatchWindow::default();
            gather.answering(4, 0, Duration::from_micros(took));
            assert_eq!(gather.wait(0).unwrap().longest, Duration::from_micros(longest));
        }
    }

    #[test]
    fn who_was_answered_is_expected_once() {
        let mut gather = BatchWindow::default();
        gather.answering(4, 0, DISK);
        assert!(gather.wait(0).is_some());
        assert_eq!(gather.wait(0), None);
    }

    #[test]
    fn clients_that_do_not_come_back_are_waited_for_less_and_less() {
        let mut gather = BatchWindow::default();
        let mut waits = |came: usize, batches: usize| {
            let mut waits = Vec::new();
            for batch in 0..batches {
                gather.answering(8, 0, DISK);
                if let Some(wait) = gather.wait(0) {
                    waits.push(batch);
                    gather.came(wait, came);
                }
            }
            waits
        };
        assert_eq!(waits(5, 20), [0, 2, 5, 10, 19]);
        assert_eq!(waits(5, 1000).len(), 16, "one in 65 in the end");
        // The first that is tried and meets its clients is followed by the next.
        assert!(waits(6, 200).len() > 130);
        assert_eq!(waits(8, 100).len(), 100);
    }
}
