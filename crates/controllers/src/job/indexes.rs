//! Sets of completion indexes, in the text form of a Job's status: `1,3-5,7`.

use std::fmt;

/// Ordered intervals of indexes that neither overlap nor touch. Both ends belong to an interval.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Indexes(Vec<(usize, usize)>);

impl Indexes {
    /// Parses the text form. Indexes from `completions` on are left out, and so is an interval that is not a number.
    pub(super) fn parse(text: &str, completions: usize) -> Self {
        let mut intervals: Vec<(usize, usize)> = Vec::new();
        for interval in text.split(',').filter(|interval| !interval.is_empty()) {
            let (first, last) = interval.split_once('-').unwrap_or((interval, interval));
            let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else { continue };
            if first >= completions {
                break;
            }
            let last = last.min(completions - 1);
            match intervals.last_mut() {
                Some(before) if before.1 + 1 == first => before.1 = last,
                _ => intervals.push((first, last)),
            }
        }
        Self(intervals)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of indexes.
    pub(super) fn total(&self) -> usize {
        self.0.iter().map(|(first, last)| last - first + 1).sum()
    }

    pub(super) fn has(&self, index: usize) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < index);
        self.0.get(at).is_some_and(|(first, _)| *first <= index)
    }

    pub(super) fn merge(&self, other: &Self) -> Self {
        let mut all = Vec::with_capacity(self.0.len() + other.0.len());
        all.extend(self.0.iter().chain(&other.0).copied());
        all.sort_unstable();
        let mut merged: Vec<(usize, usize)> = Vec::with_capacity(all.len());
        for (first, last) in all {
            match merged.last_mut() {
                Some(before) if first <= before.1 + 1 => before.1 = before.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        Self(merged)
    }

    /// The set with these indexes too.
    pub(super) fn with(&self, indexes: impl IntoIterator<Item = usize>) -> Self {
        self.merge(&indexes.into_iter().collect())
    }

    /// Number of indexes in both sets.
    pub(super) fn overlap(&self, other: &Self) -> usize {
        let (mut mine, mut theirs) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut common = 0;
        while let (Some(a), Some(b)) = (mine.peek(), theirs.peek()) {
            let (first, last) = (a.0.max(b.0), a.1.min(b.1));
            common += (last + 1).saturating_sub(first);
            let (end_a, end_b) = (a.1, b.1);
            if end_a <= end_b {
                mine.next();
            }
            if end_b <= end_a {
                theirs.next();
            }
        }
        common
    }

    /// The first `count` indexes below `completions` that are not in the set.
    pub(super) fn missing(&self, count: usize, completions: usize) -> Vec<usize> {
        let mut found = Vec::with_capacity(count.min(completions));
        let mut candidate = 0;
        for (first, last) in &self.0 {
            found.extend((candidate..(*first).min(completions)).take(count - found.len()));
            candidate = candidate.max(last + 1);
        }
        found.extend((candidate..completions).take(count - found.len()));
        found
    }
}

impl FromIterator<usize> for Indexes {
    fn from_iter<I: IntoIterator<Item = usize>>(indexes: I) -> Self {
        let single = Self(indexes.into_iter().map(|index| (index, index)).collect());
        single.merge(&Self::default())
    }
}

impl fmt::Display for Indexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, last)) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                1 => write!(f, "{comma}{first},{last}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts() {
        for (text, completions, expected) in [
            ("", 5, ""),
            ("1,3-5,7", 10, "1,3-5,7"),
            ("1,2,3", 10, "1-3"),
            ("0,1", 10, "0,1"),
            ("0-5", 3, "0-2"),
            ("0,5", 3, "0"),
            ("x,2", 3, "2"),
            ("0-x,2", 3, "2"),
        ] {
            assert_eq!(Indexes::parse(text, completions).to_string(), expected, "{text}");
        }
    }

    proptest! {
        /// Everything agrees with a plain set.
        #[test]
        fn as_a_set(a in prop::collection::btree_set(0usize..40, 0..30),
                    b in prop::collection::btree_set(0usize..40, 0..30), count in 0usize..50) {
            let (x, y): (Indexes, Indexes) = (a.iter().copied().collect(), b.iter().copied().collect());
            prop_assert_eq!(x.total(), a.len());
            prop_assert_eq!(x.overlap(&y), a.intersection(&b).count());
            let union: BTreeSet<_> = a.union(&b).copied().collect();
            let merged = x.merge(&y);
            prop_assert_eq!(merged.total(), union.len());
            prop_assert_eq!(&Indexes::parse(&merged.to_string(), 40), &merged);
            prop_assert_eq!(&x.with(b.iter().copied()), &merged);
            for index in 0..40 {
                prop_assert_eq!(x.has(index), a.contains(&index));
            }
            let missing: Vec<_> = (0..40).filter(|index| !a.contains(index)).take(count).collect();
            prop_assert_eq!(x.missing(count, 40), missing);
        }
    }
}
