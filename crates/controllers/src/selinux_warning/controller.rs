//! The part of the selinux-warning controller that watches and reports.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_client::{Change, EventRecorder, EventType, Informer, ObjectKey, WorkQueue};
use ferrite_component::metrics::{Family, Gauge, registry};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Volume};
use k8s_openapi::api::storage::v1::CSIDriver;

use super::decide::{effective, labels, shared};
use super::volumes::{Changes, Conflict, Volumes};
use crate::Context;
use crate::error::SyncError;
use crate::pods::{is_finished, phase};
use crate::volume::objects::{
    PODS_BY_CLAIM, claim_index, claim_key, claim_ref, is_bound_to, name, volume_name,
};

const NAME: &str = "selinux-warning-controller";
/// The source of events, as upstream's.
const SOURCE: &str = "selinux_warning";

static CONFLICTS: LazyLock<Arc<Family<Gauge>>> = LazyLock::new(|| {
    registry().gauge(
        "selinux_warning_controller_selinux_volume_conflict",
        "Conflict between two Pods using the same volume.",
        &[
            "property",
            "pod1_namespace",
            "pod1_name",
            "pod1_value",
            "pod2_namespace",
            "pod2_name",
            "pod2_value",
        ],
    )
});

struct Warner {
    pods: Informer<Pod>,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    drivers: Informer<CSIDriver>,
    known: Mutex<Volumes>,
    recorder: EventRecorder,
}

pub(crate) fn start(context: &Context) {
    let warner = Arc::new(Warner {
        pods: context.informers.get(),
        claims: context.informers.get(),
        volumes: context.informers.get(),
        drivers: context.informers.get(),
        known: Mutex::default(),
        recorder: context.events.recorder(SOURCE, None),
    });
    warner.pods.add_index(PODS_BY_CLAIM, claim_index);
    let (of_claims, of_volumes, of_drivers) = (warner.clone(), warner.clone(), warner.clone());
    context
        .controller(NAME)
        .watches(&warner.pods, |change, queue| {
            // Volumes and labels of a pod never change: only its start and its end matter.
            let matters = match change {
                Change::Updated { old, new } => phase(old) != phase(new) && is_finished(new),
                Change::Added(_) | Change::Deleted(_) => true,
            };
            if matters {
                queue.add(ObjectKey::of(&**change.object()));
            }
        })
        .watches(&warner.claims, move |change, queue| {
            let bound = match change {
                Change::Added(claim) => !volume_name(claim).is_empty(),
                Change::Updated { old, new } => volume_name(old) != volume_name(new),
                Change::Deleted(_) => false,
            };
            if bound {
                of_claims.wake(&ObjectKey::of(&**change.object()), queue);
            }
        })
        .watches(&warner.volumes, move |change, queue| {
            let uid =
                |volume: &PersistentVolume| claim_ref(volume).and_then(|reference| reference.uid.clone());
            let bound = match change {
                Change::Added(_) => true,
                Change::Updated { old, new } => uid(old) != uid(new),
                Change::Deleted(_) => false,
            };
            if bound && let Some(reference) = claim_ref(change.object()) {
                of_volumes.wake(&claim_key(reference), queue);
            }
        })
        .watches(&warner.drivers, move |change, queue| {
            let changed = match change {
                Change::Updated { old, new } => can_mount(old) != can_mount(new),
                Change::Added(_) | Change::Deleted(_) => true,
            };
            if changed {
                let users = of_drivers.known().users_of(name(&change.object().metadata));
                users.into_iter().for_each(|pod| queue.add(pod));
            }
        })
        .run_with(warner.clone(), |warner, key| async move {
            warner.sync(&key);
            Ok::<_, SyncError>(None::<Duration>)
        });
}

fn can_mount(driver: &CSIDriver) -> bool {
    driver.spec.se_linux_mount == Some(true)
}

impl Warner {
    fn known(&self) -> MutexGuard<'_, Volumes> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, claim: &ObjectKey, queue: &WorkQueue<ObjectKey>) {
        for pod in self.pods.by_index(PODS_BY_CLAIM, &claim.to_string()) {
            queue.add(ObjectKey::of(&*pod));
        }
    }

    fn sync(&self, key: &ObjectKey) {
        let Some(pod) = self.pods.get(key).filter(|pod| !is_finished(pod)) else {
            let changes = self.known().remove(key);
            self.tell(changes);
            return;
        };
        let spec = pod.spec.as_ref();
        for volume in spec.and_then(|spec| spec.volumes.as_ref()).into_iter().flatten() {
            let Some(labels) = labels(&pod, &volume.name) else { continue };
            let Some(shared) = shared(volume, self.bound(key, volume).as_deref()) else { continue };
            if labels.len() > 1 {
                let message = format!(
                    "Volume {:?} is mounted twice with different SELinux labels inside this pod",
                    volume.name
                );
                self.recorder.event_for(&*pod, EventType::Warning, "MultipleSELinuxLabels", message);
                continue;
            }
            let driver = shared.driver.as_deref();
            let mountable = driver.is_none_or(|driver| {
                self.drivers.get(&ObjectKey::cluster(driver)).is_some_and(|driver| can_mount(&driver))
            });
            let label = labels.into_iter().next().unwrap_or_default();
            let (label, policy) = effective(&pod, label, mountable);
            let changes = self.known().add(&shared.name, driver, key, &label, policy);
            self.tell(changes);
        }
    }

    /// The PersistentVolume behind a volume of a pod, once it is bound.
    fn bound(&self, pod: &ObjectKey, volume: &Volume) -> Option<Arc<PersistentVolume>> {
        let claim = match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(source), _) => source.claim_name.clone(),
            (None, Some(_)) => format!("{}-{}", pod.name, volume.name),
            (None, None) => return None,
        };
        let claim = self.claims.get(&ObjectKey::new(&*pod.namespace, claim))?;
        let found = self.volumes.get(&ObjectKey::cluster(volume_name(&claim)))?;
        is_bound_to(&found, &claim).then_some(found)
    }

    fn tell(&self, changes: Changes) {
        for conflict in changes.gone {
            CONFLICTS.remove(&metric(&conflict));
        }
        for conflict in changes.new {
            CONFLICTS.with(&metric(&conflict)).set(1);
            // A conflict with a pod that is gone has solved itself.
            if let Some(pod) = self.pods.get(&conflict.pod) {
                let (reason, message) = (conflict.property.reason(), conflict.message());
                self.recorder.event_for(&*pod, EventType::Normal, reason, message);
            }
        }
    }
}

fn metric(conflict: &Conflict) -> [&str; 7] {
    let Conflict { property, pod, value, other, other_value } = conflict;
    [property.as_str(), &pod.namespace, &pod.name, value, &other.namespace, &other.name, other_value]
}
