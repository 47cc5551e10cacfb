//! Sets of processors, written as the kernel writes them: `0,2-3`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Processors above this number are none of any machine's.
const HIGHEST: u32 = 65_535;

#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CpuSet(BTreeSet<u32>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no list of processors such as 0,2-3")]
pub struct CpuSetError(String);

/// Number of processors in a list such as `0,2-3`.
pub fn cpu_count(list: &str) -> Result<usize, CpuSetError> {
    list.parse::<CpuSet>().map(|set| set.len())
}

impl CpuSet {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    pub(crate) fn union(&self, other: &Self) -> Self {
        Self(self.0.union(&other.0).copied().collect())
    }

    pub(crate) fn intersection(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    pub(crate) fn difference(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }

    pub(crate) fn is_subset(&self, other: &Self) -> bool {
        self.0.is_subset(&other.0)
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;

    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        let bad = || CpuSetError(text.chars().take(100).collect());
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').map(str::trim).filter(|_| !text.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.parse::<u32>().ok().filter(|n| *n <= HIGHEST).ok_or_else(bad);
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad());
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        let text = |(first, last): &(u32, u32)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        f.write_str(&ranges.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_read_and_written() {
        for (text, written) in
            [("", ""), ("0", "0"), ("0-3", "0-3"), ("3,1,2", "1-3"), ("0,2-3,5", "0,2-3,5"), (" 1 ", "1")]
        {
            assert_eq!(text.parse::<CpuSet>().unwrap().to_string(), written, "{text}");
        }
        for bad in ["a", "1-", "-1", "3-1", "0,,1", "99999", "0-99999999"] {
            assert!(bad.parse::<CpuSet>().is_err(), "{bad}");
        }
    }
}
