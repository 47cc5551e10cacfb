//! Flags of upstream's controller manager that have nothing to act on here.

use crate::accepted::Values::{Any, Only, Switch};
use crate::accepted::{Accepted, AcceptedTable, CLIENT, COMMON, row};

const EVENTS: &str = "changes arrive as events, nothing is synced by time";
const CLOUD: &str = "there is no cloud provider in this manager";
const RECYCLER: &str = "nobody recycles volumes";

/// See [`ACCEPTED`] and the groups that components share.
#[derive(Debug, Clone, Default)]
pub struct ControllerManagerFlags;

impl AcceptedTable for ControllerManagerFlags {
    const GROUPS: &'static [&'static [Accepted]] = &[COMMON, CLIENT, ACCEPTED];
}

#[rustfmt::skip]
const ACCEPTED: &[Accepted] = &[
    row("allow-untagged-cloud", Switch, CLOUD),
    row("attach-detach-reconcile-sync-period", Any, EVENTS),
    row("cidr-allocator-type", Only(&["RangeAllocator"]), CLOUD),
    row("cloud-config", Only(&[""]), CLOUD),
    row("cloud-provider", Only(&["", "external"]), CLOUD),
    row("cluster-name", Any, CLOUD),
    row("concurrent-service-syncs", Any, CLOUD),
    row("configure-cloud-routes", Switch, CLOUD),
    row("contention-profiling", Only(&["false"]), "the program is not profiled through its port"),
    row("controller-shutdown-timeout", Any, "controllers end at once: nothing is lost by that"),
    row("controller-start-interval", Any, "controllers start together"),
    row("disable-attach-detach-reconcile-sync", Switch, EVENTS),
    row("enable-hostpath-provisioner", Only(&["false"]), "the provisioner of local volumes is part of `ferrite up`"),
    row("enable-leader-migration", Only(&["false"]), "there is one lease for all controllers"),
    row("endpoint-updates-batch-period", Only(&["0s", "0"]), "changes are written at once"),
    row("endpointslice-updates-batch-period", Only(&["0s", "0"]), "changes are written at once"),
    row("external-cloud-volume-plugin", Only(&[""]), CLOUD),
    row("flex-volume-plugin-dir", Any, "controllers call no FlexVolume plugins"),
    row("leader-migration-config", Only(&[""]), "there is one lease for all controllers"),
    row("min-resync-period", Any, EVENTS),
    row("mirroring-endpointslice-updates-batch-period", Only(&["0s", "0"]), "changes are written at once"),
    row("namespace-sync-period", Any, EVENTS),
    row("node-monitor-period", Any, EVENTS),
    row("node-sync-period", Any, EVENTS),
    row("pv-recycler-increment-timeout-nfs", Any, RECYCLER),
    row("pv-recycler-minimum-timeout-hostpath", Any, RECYCLER),
    row("pv-recycler-minimum-timeout-nfs", Any, RECYCLER),
    row("pv-recycler-pod-template-filepath-hostpath", Any, RECYCLER),
    row("pv-recycler-pod-template-filepath-nfs", Any, RECYCLER),
    row("pv-recycler-timeout-increment-hostpath", Any, RECYCLER),
    row("pvclaimbinder-sync-period", Any, EVENTS),
    row("route-reconciliation-period", Any, CLOUD),
];
