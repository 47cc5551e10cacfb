//! Sets and maps.

use std::fmt::Debug;
use std::hash::Hash;

use crate::IpFamily;

/// The names of a table's sets, with their shapes: an enum in the crate that has the table.
pub trait SetId: Debug + Copy + Eq + Hash + Ord + 'static {
    /// All sets of the table.
    const ALL: &'static [Self];

    fn shape(self) -> SetShape;
}

/// The sets of a table that has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NoSets {}

impl SetId for NoSets {
    const ALL: &'static [Self] = &[];

    fn shape(self) -> SetShape {
        match self {}
    }
}

/// A part of a key or value. Each takes whole 32-bit words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    Address,
    Protocol,
    Port,
    /// A number of ours, in the byte order of the machine.
    Number,
}

impl Field {
    /// Length in bytes without padding.
    pub fn len(self, family: IpFamily) -> u32 {
        match (self, family) {
            (Self::Address, IpFamily::V4) | (Self::Number, _) => 4,
            (Self::Address, IpFamily::V6) => 16,
            (Self::Protocol, _) => 1,
            (Self::Port, _) => 2,
        }
    }

    /// The id of the type in listings of `nft`.
    pub fn type_id(self, family: IpFamily) -> u32 {
        match (self, family) {
            (Self::Address, IpFamily::V4) => 7,
            (Self::Address, IpFamily::V6) => 8,
            (Self::Protocol, _) => 12,
            (Self::Port, _) => 13,
            (Self::Number, _) => 19,
        }
    }
}

/// The type of a set.
#[derive(Debug, Clone, Copy)]
pub struct SetShape {
    pub name: &'static str,
    pub key: &'static [Field],
    pub data: Data,
    /// The last field of the key is a range.
    pub ranges: bool,
    /// Rules add elements, which expire.
    pub dynamic: bool,
}

/// The values of a set's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    Nothing,
    Verdict,
    Fields(&'static [Field]),
}

impl SetShape {
    /// A set without values.
    pub const fn set(name: &'static str, key: &'static [Field]) -> Self {
        Self { name, key, data: Data::Nothing, ranges: false, dynamic: false }
    }

    /// A map to values of these fields.
    pub const fn map(name: &'static str, key: &'static [Field], data: &'static [Field]) -> Self {
        Self { data: Data::Fields(data), ..Self::set(name, key) }
    }

    /// A map to verdicts.
    pub const fn verdicts(name: &'static str, key: &'static [Field]) -> Self {
        Self { data: Data::Verdict, ..Self::set(name, key) }
    }

    /// The last field of the key is a range.
    #[must_use]
    pub const fn with_ranges(self) -> Self {
        Self { ranges: true, ..self }
    }
}
