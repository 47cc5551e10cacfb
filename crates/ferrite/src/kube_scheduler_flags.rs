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
    row("pod-max-in-unschedulable-pods-duration", Only(&["5m0s", "5m", "300s"]), "pods that no node fits wait for a change, and five minutes at most"),
    row("write-config-to", Only(&[""]), "the configuration in use is at /configz"),
];
