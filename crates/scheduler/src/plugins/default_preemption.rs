//! Says what preemption could do. Choosing and removing victims is not implemented yet: the pod waits for room.

use std::collections::BTreeMap;

use crate::cycle::histogram;
use crate::framework::{Plugin, PostFilter, Reason, Rejection};
use crate::snapshot::{PodInfo, Snapshot};

pub(super) struct DefaultPreemption;

impl Plugin for DefaultPreemption {
    fn name(&self) -> &'static str {
        "DefaultPreemption"
    }

    fn post_filter(&self) -> Option<&dyn PostFilter> {
        Some(self)
    }
}

impl PostFilter for DefaultPreemption {
    fn post_filter(
        &self,
        pod: &PodInfo,
        snapshot: &Snapshot,
        rejections: &[(usize, Rejection)],
    ) -> Option<String> {
        let policy = pod.placement.preemption_policy.as_deref();
        if policy == Some("Never") {
            return Some("preemption: not eligible due to preemptionPolicy=Never.".to_owned());
        }
        let mut reasons: BTreeMap<Reason, usize> = BTreeMap::new();
        for (_, rejection) in rejections {
            let reason = match rejection {
                Rejection::Unschedulable(_) => "No preemption victims found for incoming pod",
                Rejection::Unresolvable(_) => "Preemption is not helpful for scheduling",
            };
            *reasons.entry(reason.into()).or_default() += 1;
        }
        Some(format!("preemption: 0/{} nodes are available:{}", snapshot.nodes().len(), histogram(&reasons)))
    }
}
