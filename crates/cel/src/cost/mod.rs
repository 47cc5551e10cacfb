//! Costs: the estimated cost of an expression, from its text and the sizes of its variables, and its actual
//! cost.

mod calls;
pub(crate) mod estimate;
pub(crate) mod runtime;

/// The least and the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Range {
    pub min: u64,
    pub max: u64,
}

impl Range {
    /// A size about which nothing is known.
    pub const UNKNOWN: Self = Self { min: 0, max: u64::MAX };

    pub const fn fixed(value: u64) -> Self {
        Self { min: value, max: value }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self { min: self.min.saturating_add(other.min), max: self.max.saturating_add(other.max) }
    }

    pub(crate) fn times(self, other: Self) -> Self {
        Self { min: self.min.saturating_mul(other.min), max: self.max.saturating_mul(other.max) }
    }

    /// Multiplied by a factor and rounded up.
    pub(crate) fn scaled(self, factor: f64) -> Self {
        Self { min: scale(self.min, factor), max: scale(self.max, factor) }
    }

    pub(crate) fn union(self, other: Self) -> Self {
        Self { min: self.min.min(other.min), max: self.max.max(other.max) }
    }
}

/// The factor for walking through a string.
pub(crate) const STRING_FACTOR: f64 = 0.1;
/// The factor for the length of a regular expression.
pub(crate) const REGEX_FACTOR: f64 = 0.25;

pub(crate) fn scale(value: u64, factor: f64) -> u64 {
    // The conversion saturates.
    (value as f64 * factor).ceil() as u64
}
