//! Tells kubelets how long they may keep secrets and config maps: the longer, the larger the cluster.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ferrite_client::{Api, Informer, ObjectKey, is_not_found};
use ferrite_json::json;
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Patch, PatchParams};

use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "ttl-controller";
const ANNOTATION: &str = "node.alpha.kubernetes.io/ttl";

/// Steps: the fewest and the most nodes, and the seconds. They overlap so that a cluster on the edge does not
/// change all its nodes with each that comes or goes.
const STEPS: [(usize, usize, u32); 5] =
    [(0, 100, 0), (90, 500, 15), (450, 1000, 30), (900, 2000, 60), (1800, usize::MAX, 300)];

/// The step for a number of nodes, given the current one.
fn step(current: usize, nodes: usize) -> usize {
    let mut step = current.min(STEPS.len() - 1);
    while nodes > STEPS[step].1 {
        step += 1;
    }
    while nodes < STEPS[step].0 {
        step -= 1;
    }
    step
}

pub(crate) fn start(context: &Context) {
    let nodes: Informer<Node> = context.informers.get();
    let client = context.client.clone();
    let current = Arc::new(AtomicUsize::new(0));
    let (known, at) = (nodes.clone(), current.clone());
    context
        .controller(NAME)
        .watches(&nodes, move |change, queue| {
            let before = at.load(Ordering::Relaxed);
            let now = step(before, known.len());
            at.store(now, Ordering::Relaxed);
            queue.add(ObjectKey::of(&**change.object()));
            if before != now {
                known.keys().iter().for_each(|node| queue.add((**node).clone()));
            }
        })
        .run(move |key: ObjectKey| {
            let wanted = STEPS[current.load(Ordering::Relaxed)].2.to_string();
            let differs = nodes.get(&key).is_some_and(|node| {
                node.metadata.annotations.as_ref().and_then(|a| a.get(ANNOTATION)) != Some(&wanted)
            });
            let client = client.clone();
            async move { if differs { annotate(&client, &key.name, &wanted).await } else { Ok(None) } }
        });
}

async fn annotate(client: &Client, node: &str, seconds: &str) -> Result<Option<Duration>, SyncError> {
    let patch = json!({"metadata": {"annotations": {ANNOTATION: seconds}}});
    let api: Api<Node> = Api::all(client.clone());
    match api.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => Ok(None),
        Err(error) if is_not_found(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("annotate node {node}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_overlap() {
        for (current, nodes, expected) in
            [(0, 1, 0), (0, 101, 1), (1, 95, 1), (1, 89, 0), (0, 5000, 4), (4, 10, 0)]
        {
            assert_eq!(step(current, nodes), expected, "{current} {nodes}");
        }
    }
}
