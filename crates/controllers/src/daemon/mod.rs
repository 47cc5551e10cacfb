//! Runs one pod of a DaemonSet on each node that is eligible.

mod controller;
mod decide;
mod failed_pods;
mod placement;
mod placements;
mod rollout;
mod sync;
#[cfg(test)]
mod tests;

pub(crate) use controller::start;

use k8s_openapi::api::apps::v1::{DaemonSet, RollingUpdateDaemonSet};

use crate::intstr::scaled;

/// The annotation in which the server counts the changes of the template.
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";
/// The label of pods with that count.
const GENERATION_LABEL: &str = "pod-template-generation";

fn min_ready_seconds(set: &DaemonSet) -> i32 {
    set.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0)
}

/// The count of template changes, in the form that pods are labelled with.
fn template_generation(set: &DaemonSet) -> Option<String> {
    let text = set.metadata.annotations.as_ref()?.get(TEMPLATE_GENERATION)?;
    text.parse::<i64>().ok().map(|generation| generation.to_string())
}

fn is_rolling_update(set: &DaemonSet) -> bool {
    let strategy = set.spec.as_ref().and_then(|spec| spec.update_strategy.as_ref());
    strategy.and_then(|strategy| strategy.type_.as_deref()).unwrap_or("RollingUpdate") == "RollingUpdate"
}

fn rolling(set: &DaemonSet) -> Option<&RollingUpdateDaemonSet> {
    if !is_rolling_update(set) {
        return None;
    }
    set.spec.as_ref()?.update_strategy.as_ref()?.rolling_update.as_ref()
}

/// The number of nodes that may have two pods while `desired` nodes are updated.
fn max_surge(set: &DaemonSet, desired: i32) -> i32 {
    rolling(set)
        .and_then(|rolling| rolling.max_surge.as_ref())
        .map_or(0, |surge| scaled(surge, desired, true))
}

/// The number of nodes that may be without an available pod while `desired` nodes are updated.
fn max_unavailable(set: &DaemonSet, desired: i32) -> i32 {
    let unavailable = rolling(set).and_then(|rolling| rolling.max_unavailable.as_ref());
    unavailable.map_or(0, |unavailable| scaled(unavailable, desired, true))
}

/// Returns true if a node may have two pods of the set.
fn allows_surge(set: &DaemonSet) -> bool {
    max_surge(set, 1) > 0
}
