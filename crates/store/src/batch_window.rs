//! How long the writer waits for company.
//!
//! Clients that were answered together come back together. A writer that takes what is there at once splits them in two
//! halves for good: each waits through the other's synchronisation. Waiting for all of them costs the time they need to
//! come back and saves a synchronisation, as long as they are few enough to be back sooner than the disk.

use std::time::Duration;

/// More clients than this take longer to come back than a disk takes, and their work is better done while it writes.
const MOST: usize = 96;
/// The longest wait, for disks that are slow.
const LONGEST: Duration = Duration::from_millis(1);
/// Shorter waits are not worth going to sleep.
const SHORTEST: Duration = Duration::from_micros(20);
/// How many batches in a row are taken as they are at most, after clients did not come back.
const MOST_SKIPPED: u32 = 64;

/// What is known of those who may come back.
#[derive(Debug, Default)]
pub(crate) struct BatchWindow {
    /// Who may be there together next: those the last batch answers, and those who waited already.
    expected: usize,
    /// How long the last batch was with the disk.
    took: Duration,
    /// So many batches are taken as they are.
    skip: u32,
    /// How many will be when clients do not come back once more.
    next_skip: u32,
}

/// How many to wait for, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    pub wanted: usize,
    pub longest: Duration,
}

impl BatchWindow {
    /// Notes that a batch was written and is about to be answered, while so many others wait already.
    pub fn answering(&mut self, count: usize, waiting: usize, took: Duration) {
        (self.expected, self.took) = (count + waiting, took);
    }

    /// Whether to wait, with so many transactions there by now.
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
        // Most of them are enough: who was late this time is there the next.
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
