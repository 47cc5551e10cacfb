//! Brings API changes and runtime events to the workers, one per pod.

use super::context::Context;
use super::ending::{self, Ordered};
use super::labels;
use super::model::PodId;
use super::status::Verdict;
use super::terminate::{from_labels, remove_logs};
use super::worker::{self, Desired};
use crate::sources::mirror;
use ferrite_client::{Backoff, Change, Scope};
use ferrite_cri::v1::{GetEventsRequest, ListContainersRequest, ListPodSandboxRequest};
use ferrite_cri::{Code, RuntimeService};
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// The interval at which the manager shows that it goes on.
const BEAT: Duration = Duration::from_secs(10);

struct Handle {
    /// Of a static pod.
    local: bool,
    desired: watch::Sender<Desired>,
    wake: Arc<Notify>,
    objects_changed: Arc<AtomicBool>,
    ordered_end: watch::Sender<Option<Verdict>>,
    released: Arc<AtomicBool>,
}

/// Workers by pod UID.
#[derive(Default)]
pub(crate) struct Workers {
    handles: Mutex<HashMap<String, Handle>>,
    count: watch::Sender<usize>,
    /// When the manager last showed that it goes on.
    beat: Mutex<Option<Instant>>,
}

impl Workers {
    /// Something happened to the pod in the runtime.
    pub(crate) fn wake(&self, uid: &str) {
        if let Some(handle) = self.lock().get(uid) {
            handle.wake.notify_one();
        }
    }

    pub(crate) fn wake_all(&self) {
        self.lock().values().for_each(|h| h.wake.notify_one());
    }

    /// A ConfigMap or Secret the pod uses changed.
    pub(crate) fn objects_changed(&self, uid: &str) {
        if let Some(handle) = self.lock().get(uid) {
            handle.objects_changed.store(true, Ordering::Release);
            handle.wake.notify_one();
        }
    }

    /// Ends a pod for the sake of others.
    pub(crate) fn end(&self, uid: &str, verdict: Verdict) -> Ordered {
        let handles = self.lock();
        let Some(handle) = handles.get(uid) else { return Ordered::Unchanged };
        let mut effect = Ordered::Unchanged;
        handle.ordered_end.send_if_modified(|current| {
            effect = ending::order(current, verdict);
            effect != Ordered::Unchanged
        });
        if effect != Ordered::Unchanged {
            handle.wake.notify_one();
        }
        effect
    }

    /// True for a pod whose worker has given everything back. A pod without a worker may not have begun yet.
    pub(crate) fn has_released(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|handle| handle.released.load(Ordering::Acquire))
    }

    /// True when the pod holds nothing of the node any more: its containers ended, its volumes are gone. The API may
    /// not know it yet.
    pub(crate) fn is_released(&self, uid: &str) -> bool {
        self.lock().get(uid).is_none_or(|handle| handle.released.load(Ordering::Acquire))
    }

    /// True if the pod is gone from the API, and its remains are being removed.
    pub(crate) fn is_gone(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|handle| matches!(&*handle.desired.borrow(), Desired::Gone(_)))
    }

    /// Number of pods that have a worker, now and as it changes.
    pub(crate) fn count(&self) -> watch::Receiver<usize> {
        self.count.subscribe()
    }

    /// Notes that the workers can be reached. A lock that is never given back shows as silence, as does a stuck runtime of
    /// tasks.
    fn show_life(&self) {
        drop(self.lock());
        *self.beat.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub(crate) fn last_beat(&self) -> Option<Instant> {
        *self.beat.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Handle>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the desired state to the pod's worker, and starts one if there is none.
    fn dispatch(self: &Arc<Self>, context: &Arc<Context>, desired: Desired, local: bool, scope: &Scope) {
        let id = PodId::of(desired.pod());
        let mut handles = self.lock();
        if let Some(handle) = handles.get(&id.uid) {
            handle.desired.send_modify(|current| {
                // Once gone, always gone; deletion cannot be taken back either.
                let ended = matches!(current, Desired::Gone(_));
                let revived = current.must_end()
                    && matches!(&desired, Desired::Present(p) if !super::model::is_deleting(p));
                if !ended && !revived {
                    *current = desired;
                }
            });
            return;
        }
        let (sender, receiver) = watch::channel(desired);
        let handle = Handle {
            local,
            desired: sender,
            wake: Arc::default(),
            objects_changed: Arc::default(),
            ordered_end: watch::Sender::new(None),
            released: Arc::default(),
        };
        let (wake, objects_changed) = (handle.wake.clone(), handle.objects_changed.clone());
        let (ordered, released) = (handle.ordered_end.subscribe(), handle.released.clone());
        handles.insert(id.uid.clone(), handle);
        self.count.send_replace(handles.len());
        drop(handles);
        let (workers, uid, ended) = (self.clone(), id.uid.clone(), context.clone());
        let done = move || {
            let mut handles = workers.lock();
            handles.remove(&uid);
            workers.count.send_replace(handles.len());
            drop(handles);
            if local {
                ended.pods.local().forget(&uid);
            }
        };
        let inputs =
            worker::Inputs { id, local, desired: receiver, wake, objects_changed, ordered, released };
        worker::start(context.clone(), inputs, scope, done);
    }

    /// The static pods that have a worker.
    fn local(&self) -> Vec<Arc<Pod>> {
        let handles = self.lock();
        handles.values().filter(|h| h.local).map(|h| h.desired.borrow().pod().clone()).collect()
    }

    /// Namespaces and names of static pods that have a worker.
    pub(crate) fn local_names(&self) -> BTreeSet<(String, String)> {
        self.local().iter().map(|pod| full_name(pod)).collect()
    }

    /// Starts and ends static pods. A pod waits until the one whose name it takes over has ended.
    fn sync_local(self: &Arc<Self>, context: &Arc<Context>, scope: &Scope) {
        let (wanted, running) = (context.pods.local().list(), self.local());
        let has = |pods: &[Arc<Pod>], pod: &Pod| pods.iter().any(|p| p.metadata.uid == pod.metadata.uid);
        for pod in running.iter().filter(|pod| !has(&wanted, pod)) {
            self.dispatch(context, Desired::Gone(pod.clone()), true, scope);
        }
        for pod in wanted.iter().filter(|pod| !has(&running, pod)) {
            if !running.iter().any(|old| full_name(old) == full_name(pod)) {
                self.dispatch(context, Desired::Present(pod.clone()), true, scope);
            }
        }
    }
}

fn full_name(pod: &Pod) -> (String, String) {
    let id = PodId::of(pod);
    (id.namespace, id.name)
}

/// Runs static pods and listens to the runtime. None of that needs the API.
pub(crate) fn start_local(context: &Arc<Context>, workers: &Arc<Workers>, scope: &Scope) {
    scope.spawn(follow_events(context.clone(), workers.clone()));
    let (mut readiness, woken) = (context.readiness.clone(), workers.clone());
    scope.spawn(async move {
        while readiness.changed().await.is_ok() {
            woken.wake_all();
        }
    });
    let alive = workers.clone();
    scope.spawn(async move {
        let mut ticks = tokio::time::interval(BEAT);
        loop {
            ticks.tick().await;
            alive.show_life();
        }
    });
    // Waits for the API by itself.
    let ending = workers.clone();
    scope.spawn(mirror::run(context.clone(), move || ending.local_names()));
    let (context, workers, owned) = (context.clone(), workers.clone(), scope.clone());
    scope.spawn(async move {
        let (mut wanted, mut count) = (context.pods.local().wanted_changes(), workers.count());
        loop {
            wanted.borrow_and_update();
            count.borrow_and_update();
            workers.sync_local(&context, &owned);
            let changed = tokio::select! {
                changed = wanted.changed() => changed,
                changed = count.changed() => changed,
            };
            if changed.is_err() {
                return;
            }
        }
    });
}

/// Starts following the API. Returns once pods that were deleted while we were away are being
/// cleaned up.
pub(crate) async fn start(
    context: Arc<Context>,
    workers: Arc<Workers>,
    scope: &Scope,
) -> ferrite_cri::Result<()> {
    context.services.synced().await;
    context.node.synced().await;
    let (told, following, owned) = (context.clone(), workers.clone(), scope.clone());
    context.pods.api().subscribe(move |change: &Change<Pod>| {
        // A mirror shows a static pod; there is nothing to run.
        if mirror::is_mirror(change.object()) {
            return;
        }
        let desired = match change {
            Change::Added(pod) => Desired::Present(pod.clone()),
            Change::Updated { new, .. } => Desired::Present(new.clone()),
            Change::Deleted(pod) => Desired::Gone(pod.clone()),
        };
        let known = following.lock().contains_key(&PodId::of(desired.pod()).uid);
        // Nothing is left of a pod whose worker has ended.
        if known || matches!(desired, Desired::Present(_)) {
            following.dispatch(&told, desired, false, &owned);
        }
    });
    context.pods.api().synced().await;
    context.pods.local().ready().await;
    clean_orphans(&context, &workers, scope).await
}

/// Wakes the worker of each pod the runtime speaks of. When the stream breaks, everybody looks for himself.
async fn follow_events(context: Arc<Context>, workers: Arc<Workers>) {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10), 0.1);
    loop {
        match context.runtime.get_container_events(GetEventsRequest {}).await {
            Ok(mut events) => {
                backoff.reset();
                workers.wake_all();
                while let Some(event) = events.next().await {
                    let sandbox = event.pod_sandbox_status.as_ref();
                    let uid = sandbox
                        .and_then(|s| {
                            s.labels
                                .get(labels::POD_UID)
                                .cloned()
                                .or(s.metadata.as_ref().map(|m| m.uid.clone()))
                        })
                        .or_else(|| {
                            event
                                .containers_statuses
                                .iter()
                                .find_map(|c| c.labels.get(labels::POD_UID).cloned())
                        });
                    match uid {
                        Some(uid) => workers.wake(&uid),
                        None => workers.wake_all(),
                    }
                }
            }
            Err(e) if e.code == Code::Unimplemented => {
                tracing::info!("the runtime tells no events; looking every second");
                let e = relist(&*context.runtime, &workers).await;
                tracing::warn!(error = %e, "could not list what runs; will try again");
            }
            Err(e) => tracing::warn!(error = %e, "could not subscribe to runtime events; will try again"),
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

/// Interval between lists of a runtime without events, as upstream.
const RELIST_PERIOD: Duration = Duration::from_secs(1);

/// The state of each sandbox and container, by the pod's UID and its own id.
type Seen = BTreeMap<(String, String), i32>;

/// Wakes the workers of pods of which something changed, until the runtime cannot be asked.
async fn relist(runtime: &dyn RuntimeService, workers: &Workers) -> ferrite_cri::Error {
    let mut before = Seen::new();
    let mut ticks = tokio::time::interval(RELIST_PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let now = match list_states(runtime).await {
            Ok(now) => now,
            Err(e) => return e,
        };
        for uid in changed_pods(&before, &now) {
            workers.wake(uid);
        }
        before = now;
    }
}

async fn list_states(runtime: &dyn RuntimeService) -> ferrite_cri::Result<Seen> {
    let sandboxes = runtime.list_pod_sandbox(ListPodSandboxRequest { filter: None }).await?.items;
    let containers = runtime.list_containers(ListContainersRequest { filter: None }).await?.containers;
    let uid = |labels: &BTreeMap<String, String>| labels.get(labels::POD_UID).cloned().unwrap_or_default();
    let sandboxes = sandboxes.into_iter().map(|s| ((uid(&s.labels), s.id), s.state));
    Ok(sandboxes.chain(containers.into_iter().map(|c| ((uid(&c.labels), c.id), c.state))).collect())
}

/// Pods that have something new, changed or gone.
fn changed_pods<'a>(before: &'a Seen, now: &'a Seen) -> BTreeSet<&'a str> {
    let differs = |one: &'a Seen, other: &'a Seen| {
        one.iter().filter(|(key, state)| other.get(*key) != Some(state)).map(|((uid, _), _)| uid.as_str())
    };
    differs(before, now).chain(differs(now, before)).collect()
}

/// Ends the runtime's remains of pods that the API no longer knows, and removes their directories.
async fn clean_orphans(
    context: &Arc<Context>,
    workers: &Arc<Workers>,
    scope: &Scope,
) -> ferrite_cri::Result<()> {
    let mut orphans: BTreeMap<String, Pod> = BTreeMap::new();
    let known: BTreeSet<String> = context.pods.list().iter().filter_map(|p| p.metadata.uid.clone()).collect();
    let mut note = |of: &BTreeMap<String, String>, with: &BTreeMap<String, String>| {
        let Some(uid) = of.get(labels::POD_UID).filter(|uid| !known.contains(*uid)) else { return };
        let text = |key: &str| of.get(key).map(String::as_str).unwrap_or_default();
        let grace = with.get(labels::TERMINATION_GRACE).and_then(|g| g.parse().ok());
        let pod = from_labels(text(labels::POD_NAMESPACE), text(labels::POD_NAME), uid, grace);
        orphans.entry(uid.clone()).or_insert(pod);
    };
    let sandboxes = context.runtime.list_pod_sandbox(ListPodSandboxRequest { filter: None }).await?;
    sandboxes.items.iter().for_each(|s| note(&s.labels, &s.annotations));
    let containers = context.runtime.list_containers(ListContainersRequest { filter: None }).await?;
    containers.containers.iter().for_each(|c| note(&c.labels, &c.annotations));
    for (_, pod) in orphans.iter() {
        tracing::info!(pod = %PodId::of(pod), "cleaning up a pod the API no longer has");
        workers.dispatch(context, Desired::Gone(Arc::new(pod.clone())), false, scope);
    }
    let live: BTreeSet<String> = known.iter().cloned().chain(orphans.into_keys()).collect();
    let leftovers: Vec<String> =
        context.volumes.known_pods().into_iter().filter(|uid| !live.contains(uid)).collect();
    context.resources.retain(&live).await;
    context.claims.retain(&live);
    let logs = orphaned_logs(&context.log_dir, &live);
    // A tree that takes long or cannot be removed must not keep the kubelet from starting.
    context.volumes.csi().release_unused();
    scope.spawn(remove_leftovers(context.clone(), leftovers, logs));
    Ok(())
}

/// Log directories of pods that are gone.
fn orphaned_logs(log_dir: &Path, live: &BTreeSet<String>) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(log_dir).into_iter().flatten().flatten();
    let orphaned = |name: &str| {
        let uid = name.rsplit('_').next().unwrap_or_default();
        name.split('_').count() == 3 && !live.contains(uid)
    };
    entries.filter(|e| orphaned(&e.file_name().to_string_lossy())).map(|e| e.path()).collect()
}

/// Pods whose leftovers are removed at the same time.
const REMOVED_AT_A_TIME: usize = 16;

/// Removes the remains of a pod that is gone. Returns its UID when that fails.
async fn remove_pod(context: &Context, uid: String) -> Option<String> {
    let removed = context.volumes.tear_down(&uid).await;
    context.userns.release(&uid);
    let _ = context.cgroups.remove(&uid).await;
    let Err(e) = removed else { return None };
    let path = context.volumes.pod_dir(&uid);
    tracing::warn!(path = %path.display(), error = %e,
        "could not remove the directory of a pod that is gone; will try again. See what is mounted there with `findmnt -R`");
    Some(uid)
}

/// Removes the remains of pods that are gone, and tries again where that fails.
async fn remove_leftovers(context: Arc<Context>, mut uids: Vec<String>, mut logs: Vec<PathBuf>) {
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300), 0.1);
    let mut is_swept = false;
    loop {
        // Several at a time: a storage driver that does not answer holds up only its own pods.
        let left = futures_util::stream::iter(uids)
            .map(|uid| remove_pod(&context, uid))
            .buffer_unordered(REMOVED_AT_A_TIME);
        let left: Vec<String> = left.filter_map(std::future::ready).collect().await;
        let mut left_logs = Vec::new();
        for path in logs {
            if let Err(e) = remove_logs(path.clone()).await {
                tracing::warn!(path = %path.display(), error = %e, "could not remove the logs of a pod that is gone; will try again");
                left_logs.push(path);
            }
        }
        // Links lead nowhere once their logs are gone.
        if !std::mem::replace(&mut is_swept, true) || left_logs.is_empty() {
            context.log_links.sweep().await;
        }
        if left.is_empty() && left_logs.is_empty() {
            return;
        }
        (uids, logs) = (left, left_logs);
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_of_which_something_changed() {
        let seen = |rows: &[(&str, &str, i32)]| -> Seen {
            rows.iter().map(|(uid, id, state)| ((uid.to_string(), id.to_string()), *state)).collect()
        };
        let before = seen(&[("a", "1", 0), ("a", "2", 1), ("b", "3", 1), ("c", "4", 1)]);
        for (now, expected) in [
            (before.clone(), vec![]),
            (seen(&[("a", "1", 0), ("a", "2", 2), ("b", "3", 1), ("c", "4", 1)]), vec!["a"]),
            (seen(&[("a", "1", 0), ("a", "2", 1), ("c", "4", 1), ("d", "5", 1)]), vec!["b", "d"]),
            (seen(&[]), vec!["a", "b", "c"]),
        ] {
            assert_eq!(changed_pods(&before, &now).into_iter().collect::<Vec<_>>(), expected);
        }
    }
}
