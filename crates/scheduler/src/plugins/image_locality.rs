//! Prefers nodes that have the pod's images already, the more the larger the images are.

use std::sync::Arc;

use crate::framework::{CycleState, Handle, Interest, MAX_SCORE, Made, Plugin, PluginArgs, PreScore, Score};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

const MEBIBYTE: i64 = 1024 * 1024;
/// Images smaller than this are no reason.
const LEAST: i64 = 23 * MEBIBYTE;
/// More than this for each container is no better reason.
const MOST_EACH: i64 = 1000 * MEBIBYTE;

struct ImageLocality;

pub(super) fn new(args: &PluginArgs, _: &Handle) -> Made {
    super::no_args(args)?;
    Ok(Arc::new(ImageLocality))
}

/// The pod's images that some node has, with the share of the nodes that have each.
#[derive(Clone)]
struct Shares(Arc<Vec<(String, f64)>>);

impl Plugin for ImageLocality {
    fn name(&self) -> &'static str {
        "ImageLocality"
    }

    fn pre_score(&self) -> Option<&dyn PreScore> {
        Some(self)
    }

    fn score(&self) -> Option<&dyn Score> {
        Some(self)
    }
}

impl PreScore for ImageLocality {
    fn pre_score(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
        _feasible: &[Arc<NodeInfo>],
    ) -> Interest {
        let nodes = snapshot.nodes().len() as f64;
        let shares: Vec<_> = pod
            .images
            .iter()
            .filter_map(|image| Some((image.clone(), *snapshot.images.get(image)? as f64 / nodes)))
            .collect();
        if shares.is_empty() {
            return Interest::Skip;
        }
        state.put(Shares(Arc::new(shares)));
        Interest::Needed
    }
}

/// The score of a sum of sizes.
fn score_of(sum: i64, containers: usize) -> i64 {
    let most = MOST_EACH.saturating_mul(i64::try_from(containers.max(1)).unwrap_or(i64::MAX));
    MAX_SCORE * (sum.clamp(LEAST, most) - LEAST) / (most - LEAST)
}

impl Score for ImageLocality {
    fn score(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(Shares(shares)) = state.get::<Shares>() else { return 0 };
        let images =
            node.node.status.as_ref().and_then(|status| status.images.as_deref()).unwrap_or_default();
        let mut sum = 0;
        for (name, share) in shares.iter() {
            let found = images.iter().find(|image| image.names.iter().flatten().any(|other| other == name));
            // As upstream: an image on few nodes weighs less, so that they do not draw all pods.
            let size = found.and_then(|image| image.size_bytes).unwrap_or(0) as f64;
            sum += (size * share) as i64;
        }
        score_of(sum, pod.containers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_become_scores() {
        for (mebibytes, containers, expected) in
            [(0, 1, 0), (23, 1, 0), (1000, 1, 100), (5000, 1, 100), (500, 2, 24)]
        {
            assert_eq!(score_of(mebibytes * MEBIBYTE, containers), expected, "{mebibytes} {containers}");
        }
    }
}
