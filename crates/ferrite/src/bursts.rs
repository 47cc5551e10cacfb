//! When to return free memory to the system: once a burst of work is over, and from time to time.
//!
//! An allocator keeps freed memory in case it is needed again. After a burst that is more than all an idle process
//! uses, and no other process can use it.

use std::time::Duration;

/// Work of this much processor time leaves enough free memory behind to be worth the return.
const BURST: Duration = Duration::from_secs(1);
/// A burst is over when the process uses less than a tenth of one processor for so long.
const QUIET: Duration = Duration::from_secs(10);
/// Memory is returned at this interval in any case: the store forgets the history of a burst minutes after it, and some
/// processes never rest.
const LONGEST: Duration = Duration::from_secs(120);

/// The work of a process since it last returned memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bursts {
    /// Processor time of the process at the last look.
    used: Duration,
    spent: Duration,
    quiet: Duration,
    waited: Duration,
}

impl Bursts {
    /// A process that has just started. Its start counts as a burst.
    pub fn started() -> Self {
        Self { spent: BURST, ..Self::default() }
    }

    /// Takes one more look into account, `passed` after the last: the process has `used` so much processor time since
    /// it started. True if memory is to be returned now.
    pub fn is_over(&mut self, used: Duration, passed: Duration) -> bool {
        let work = used.saturating_sub(self.used);
        self.used = used;
        self.spent += work;
        self.waited += passed;
        self.quiet = if work < passed / 10 { self.quiet + passed } else { Duration::ZERO };
        let is_over = self.spent >= BURST && self.quiet >= QUIET || self.waited >= LONGEST;
        if is_over {
            *self = Self { used, ..Self::default() };
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds, counted from one, after which memory is returned, where each second has so many hundredths of work.
    fn returned_after(mut bursts: Bursts, work: impl Iterator<Item = u64>) -> Vec<usize> {
        let mut used = Duration::ZERO;
        let mut second = |work| {
            used += Duration::from_millis(work * 10);
            bursts.is_over(used, Duration::from_secs(1))
        };
        work.enumerate().filter_map(|(index, work)| second(work).then_some(index + 1)).collect()
    }

    #[test]
    fn memory_is_returned_once_after_each_burst() {
        let idle = || std::iter::repeat_n(1, 60);
        let busy = |seconds| std::iter::repeat_n(150, seconds);
        let rested = Bursts::default;
        assert_eq!(returned_after(Bursts::started(), idle()), [10], "the start is a burst");
        assert!(returned_after(rested(), idle()).is_empty(), "nothing happened");
        assert_eq!(returned_after(rested(), busy(1).chain(idle())), [11]);
        assert_eq!(
            returned_after(rested(), busy(3).chain(idle().take(5)).chain(busy(1)).chain(idle())),
            [19]
        );
        assert_eq!(returned_after(rested(), busy(300)), [120, 240], "a process that never rests");
        let mut after = busy(1).chain(std::iter::repeat_n(0, 300));
        assert_eq!(returned_after(rested(), &mut after), [11, 131, 251], "what a burst leaves goes later");
    }
}
