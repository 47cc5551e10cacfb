//! Watches StatefulSets and their pods, and wakes the StatefulSet concerned.

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{EventRecorder, Informer};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Client;
use kube::core::Selector;

use super::{is_parallel, min_ready_seconds};
use crate::Context;
use crate::history::History;
use crate::pod_owners::{PodOwner, PodOwners};

const NAME: &str = "statefulset-controller";

impl PodOwner for StatefulSet {
    const CLOCK_SLACK: Duration = Duration::ZERO;

    fn selector(&self) -> Option<Selector> {
        self.spec.as_ref()?.selector.clone().try_into().ok()
    }

    fn min_ready_seconds(&self) -> i32 {
        min_ready_seconds(self)
    }

    /// An ordered set changes one pod at a time: a delay of each change would add up.
    fn joins_changes(&self) -> bool {
        is_parallel(self)
    }
}

pub(super) struct StatefulSetController {
    pub(super) client: Client,
    pub(super) sets: PodOwners<StatefulSet>,
    pub(super) claims: Informer<PersistentVolumeClaim>,
    pub(super) history: History,
    pub(super) recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let kit = context.controller(NAME);
    let controller = Arc::new(StatefulSetController {
        client: context.client.clone(),
        sets: PodOwners::new(context, kit.queue().clone()),
        claims: context.informers.get(),
        history: History::new(context),
        recorder: context.events.recorder(NAME, None),
    });
    let (by_set, by_pod) = (controller.clone(), controller.clone());
    kit.about(&controller.sets.owners)
        .watches(&controller.sets.owners, move |change, _| by_set.sets.owner_changed(change))
        .watches(&controller.sets.pods, move |change, _| by_pod.sets.pod_changed(change))
        .reads(&controller.claims)
        .reads(controller.history.informer())
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
}
