//! Runs the numbered pods of a StatefulSet, each with its own name and claims.

mod actions;
mod claims;
mod controller;
mod decide;
mod identity;
mod status;
mod sync;
#[cfg(test)]
mod tests;

pub(crate) use controller::start;

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetUpdateStrategy};

fn name(set: &StatefulSet) -> &str {
    set.metadata.name.as_deref().unwrap_or_default()
}

fn min_ready_seconds(set: &StatefulSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0)
}

fn replicas(set: &StatefulSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1).max(0)
}

/// The ordinal of the first pod.
fn start_ordinal(set: &StatefulSet) -> i32 {
    let ordinals = set.spec.as_ref().and_then(|spec| spec.ordinals.as_ref());
    ordinals.and_then(|ordinals| ordinals.start).unwrap_or(0).max(0)
}

/// Returns true if the set should have a pod of this ordinal.
fn in_range(set: &StatefulSet, ordinal: i32) -> bool {
    let start = start_ordinal(set);
    ordinal >= start && i64::from(ordinal) < i64::from(start) + i64::from(replicas(set))
}

/// Returns true if pods are created and deleted without waiting for one another.
fn is_parallel(set: &StatefulSet) -> bool {
    set.spec.as_ref().and_then(|spec| spec.pod_management_policy.as_deref()) == Some("Parallel")
}

fn strategy(set: &StatefulSet) -> Option<&StatefulSetUpdateStrategy> {
    set.spec.as_ref()?.update_strategy.as_ref()
}

fn is_rolling_update(set: &StatefulSet) -> bool {
    strategy(set).and_then(|strategy| strategy.type_.as_deref()).unwrap_or("RollingUpdate") == "RollingUpdate"
}

/// The index below which pods keep the current revision; none without settings of a rolling update.
fn partition(set: &StatefulSet) -> Option<i32> {
    let rolling = strategy(set)?.rolling_update.as_ref()?;
    Some(rolling.partition.unwrap_or(0))
}
