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
pub(crate) struct Gather {
    /// How many the last batch answered.
    answered: usize,
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

impl Gather {
    /// Notes that a batch was written and answered.
    pub fn answered(&mut self, count: usize, took: Duration) {
        (self.answered, self.took) = (count, took);
    }

    /// Whether to wait, with so many transactions there already.
    pub fn wait(&mut self, waiting: usize) -> Option<Wait> {
        let wanted = waiting + std::mem::take(&mut self.answered);
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
        // Answered, time of the disk in microseconds, waiting already: how many to wait for.
        let rows = [
            (0, 150, 0, None),
            (0, 150, 5, None),
            // A single client is no company for itself.
            (1, 150, 0, None),
            (1, 150, 1, Some(2)),
            (32, 150, 32, Some(64)),
            (64, 150, 0, Some(64)),
            (96, 150, 0, Some(96)),
            // Too many to wait for.
            (97, 150, 0, None),
            (128, 300, 128, None),
            // Nothing was written: there is nothing to save.
            (32, 0, 32, None),
            (32, 30, 32, None),
        ];
        for (answered, took, waiting, wanted) in rows {
            let mut gather = Gather::default();
            gather.answered(answered, Duration::from_micros(took));
            let wait = gather.wait(waiting);
            assert_eq!(wait.map(|w| w.wanted), wanted, "{answered} answered, {waiting} waiting");
        }
    }

    #[test]
    fn waits_no_longer_than_half_of_what_the_disk_takes() {
        for (took, longest) in [(150, 75), (1000, 500), (20_000, 1000)] {
            let mut gather = Gather::default();
            gather.answered(4, Duration::from_micros(took));
            assert_eq!(gather.wait(0).unwrap().longest, Duration::from_micros(longest));
        }
    }

    #[test]
    fn who_was_answered_is_expected_once() {
        let mut gather = Gather::default();
        gather.answered(4, DISK);
        assert!(gather.wait(0).is_some());
        assert_eq!(gather.wait(0), None);
    }

    #[test]
    fn clients_that_do_not_come_back_are_waited_for_less_and_less() {
        let mut gather = Gather::default();
        let mut waits = |came: usize, batches: usize| {
            let mut waits = Vec::new();
            for batch in 0..batches {
                gather.answered(8, DISK);
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
