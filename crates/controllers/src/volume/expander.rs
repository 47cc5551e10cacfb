//! Records which component must grow a claim.
//!
//! Upstream's controller grows volumes of plugins that are built into it. No such plugin is left that a node of ours
//! mounts, so every volume is grown by the driver's own resizer, and the claim says that it waits for it.

use ferrite_client::{Change, EventRecorder, EventType, Informer, ObjectKey};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use std::sync::Arc;
use std::time::Duration;

use super::objects::{
    PRE_RESIZE_CAPACITY, annotation, claim_capacity, claim_phase, claim_ref, ref_uid, requested, uid,
    volume_name,
};
use crate::Context;
use crate::error::SyncError;

const NAME: &str = "persistentvolume-expander-controller";
/// The source of events, as upstream's.
const SOURCE: &str = "volume_expand";

struct Expander {
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(Expander {
        claims: context.informers.get(),
        volumes: context.informers.get(),
        recorder: context.events.recorder(SOURCE, None),
    });
    context
        .controller(NAME)
        .watches(&controller.claims, |change, queue| {
            let grown = match change {
                Change::Updated { old, new } => requested(old) < requested(new),
                Change::Added(_) => true,
                Change::Deleted(_) => false,
            };
            if grown && claim_phase(change.object()) == "Bound" {
                queue.add(ObjectKey::of(&**change.object()));
            }
        })
        .reads(&controller.volumes)
        .run_with(controller.clone(), |controller, key| async move { controller.sync(&key) });
}

/// Returns true if the claim wants more than it has.
fn must_grow(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    let bound = claim_ref(volume).is_some_and(|reference| ref_uid(reference) == uid(&claim.metadata));
    let larger = claim_capacity(claim).is_none_or(|capacity| requested(claim) > capacity);
    bound && (larger || annotation(&volume.metadata, PRE_RESIZE_CAPACITY).is_some())
}

impl Expander {
    fn sync(&self, key: &ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(claim) = self.claims.get(key) else { return Ok(None) };
        let Some(volume) = self.volumes.get(&ObjectKey::cluster(volume_name(&claim))) else {
            return Ok(None);
        };
        if must_grow(&claim, &volume) {
            let message = "waiting for an external controller to expand this PVC";
            self.recorder.event_for(&*claim, EventType::Normal, "ExternalExpanding", message);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn only_a_bound_claim_that_wants_more_waits() {
        for (what, wanted, has, claim_uid, annotation, expected) in [
            ("as large", "1Gi", json!("1Gi"), "u", None, false),
            ("larger", "2Gi", json!("1Gi"), "u", None, true),
            ("another claim's volume", "2Gi", json!("1Gi"), "x", None, false),
            ("a node has yet to grow it", "1Gi", json!("1Gi"), "u", Some("1Gi"), true),
        ] {
            let claim: PersistentVolumeClaim = ferrite_json::from_value(json!({
                "metadata": {"uid": claim_uid},
                "spec": {"resources": {"requests": {"storage": wanted}}},
                "status": {"capacity": {"storage": has}},
            }))
            .unwrap();
            let volume: PersistentVolume = ferrite_json::from_value(json!({
                "metadata": {"annotations": annotation.map(|size| json!({PRE_RESIZE_CAPACITY: size}))},
                "spec": {"claimRef": {"uid": "u"}},
            }))
            .unwrap();
            assert_eq!(must_grow(&claim, &volume), expected, "{what}");
        }
    }
}
