//! Flags of upstream's scheduler that have nothing to act on here.

use crate::accepted::Values::{Only, Switch};
use crate::accepted::{Accepted, AcceptedTable, CLIENT, COMMON, row};

/// See [`ACCEPTED`] and the groups that components share.
#[derive(Debug, Clone, Default)]
pub struct SchedulerFlags;

impl AcceptedTable for SchedulerFlags {
    const GROUPS: &'static [&'static [Accepted]] = &[COMMON, CLIENT, ACCEPTED];
}

#[rustfmt::skip]
const ACCEPTED: &[Accepted] = &[
    row("contention-profiling", Switch, "the program is not profiled through its port"),
    row("write-config-to", Only(&[""]), "the configuration in use is at /configz"),
];
