//! One task per pod: observe, decide, act, report; then wait for the next event.

use super::backoff::BackOff;
use super::context::Context;
use super::decide::{self, Actions, KillCause};
use super::ending::EndSignal;
use super::model::{self, PodId};
use super::observe::observe;
use super::resize::{self, Allocation};
use super::restart_all;
use super::runtime_pod::{Instance, RunState, RuntimePod};
use super::start::SandboxError;
use super::status::{self, StatusInputs, Verdict, WaitingReason};
use super::writer::StatusWriter;
use crate::clock;
use crate::container::resources::PodResources;
use crate::images::PullState;
use crate::probe::ProbeSet;
use crate::volumes::PodVolumes;
use ferrite_client::{Backoff, EventType, Scope};
use ferrite_cri::v1::{RemoveContainerRequest, RemovePodSandboxRequest};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// A critical pod waits for those that make room for it; their ends are looked for this often.
const AFTER_PREEMPTION: Duration = Duration::from_secs(1);

/// The state of a pod that the API asks for.
#[derive(Debug, Clone)]
pub(crate) enum Desired {
    /// It exists; with a deletion timestamp it must end.
    Present(Arc<Pod>),
    /// It is gone from the API: whatever is left must go too.
    Gone(Arc<Pod>),
}

impl Desired {
    pub(crate) fn pod(&self) -> &Arc<Pod> {
        match self {
            Desired::Present(pod) | Desired::Gone(pod) => pod,
        }
    }

    pub(super) fn must_end(&self) -> bool {
        match self {
            Desired::Present(pod) => model::is_deleting(pod),
            Desired::Gone(_) => true,
        }
    }
}

/// Why a round could not be completed.
#[derive(Debug, thiserror::Error)]
pub(super) enum SyncError {
    #[error("{0}")]
    Runtime(#[from] ferrite_cri::Error),
    #[error("{0}")]
    Sandbox(#[from] SandboxError),
    #[error("prepare dynamic resources: {0}")]
    Prepare(crate::claims::ClaimError),
    #[error("unprepare dynamic resources: {0}")]
    Unprepare(crate::claims::ClaimError),
    #[error("{0}")]
    Volume(#[from] crate::volumes::VolumeError),
    #[error("{0}")]
    Objects(#[from] crate::objects::ObjectError),
    #[error("the record of the pod's resources: {0}")]
    Allocation(std::io::Error),
    #[error("pod cgroup: {0}")]
    Cgroup(std::io::Error),
    #[error(
        "clean-up of the pod's directory: {0}; it is tried again. If that does not help, see what is mounted in or uses \
         the directory (`findmnt -R`, `fuser -vm`)"
    )]
    CleanUp(crate::volumes::TearDownError),
    #[error("network is not ready: {0}")]
    Network(String),
    /// The pod must end now: nothing more is started.
    #[error("interrupted")]
    Interrupted,
}

/// The trigger of a sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// The pod changed in the API, and nothing else is known to have happened.
    Api,
    Anything,
}

/// Tells if the states between the beginning and the end of a sync are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Shown,
    Hidden,
}

pub(super) struct Worker {
    pub(super) context: Arc<Context>,
    pub(super) id: PodId,
    pub(super) local: bool,
    pub(super) desired: watch::Receiver<Desired>,
    pub(super) wake: Arc<Notify>,
    pub(super) objects_changed: Arc<AtomicBool>,
    pub(super) ordered: watch::Receiver<Option<Verdict>>,
    pub(super) released: Arc<AtomicBool>,
    pub(super) probes: ProbeSet,
    pub(super) writer: StatusWriter,
    pub(super) backoff: BackOff,
    pub(super) pulls: PullState,
    /// Starts the runtime refused are not tried again before this.
    pub(super) refused_until: HashMap<String, Timestamp>,
    pub(super) waiting: HashMap<String, WaitingReason>,
    pub(super) verdict: Option<Verdict>,
    pub(super) volumes: Option<PodVolumes>,
    pub(super) allocation: Allocation,
    pub(super) resize: resize::Progress,
    /// The restart counts of containers whose earlier instances were removed.
    pub(super) attempts: BTreeMap<String, u32>,
    /// Those instances, by container: their ends are shown.
    pub(super) removed: BTreeMap<String, Instance>,
    /// The resources that the pod's cgroup has.
    pub(super) cgroup_of: Option<PodResources>,
    /// The part of the pod its volumes show; when it changes they are written again.
    pub(super) volumes_of: Option<k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta>,
    admitted: bool,
    /// The pod's containers have ended for good and were cleaned up.
    finished: bool,
    /// Termination messages by container, kept when the pod is over.
    messages: HashMap<String, String>,
}

/// The inputs of a worker.
pub(crate) struct Inputs {
    pub id: PodId,
    /// A static pod: the API neither wants it nor knows it by its UID.
    pub local: bool,
    pub desired: watch::Receiver<Desired>,
    pub wake: Arc<Notify>,
    pub objects_changed: Arc<AtomicBool>,
    /// Set when the kubelet ends the pod for the sake of others.
    pub ordered: watch::Receiver<Option<Verdict>>,
    /// Set by the worker when the pod holds nothing of the node any more.
    pub released: Arc<AtomicBool>,
}

/// Starts the worker of a pod; it ends when nothing of the pod is left.
pub(crate) fn start(
    context: Arc<Context>,
    inputs: Inputs,
    scope: &Scope,
    done: impl FnOnce() + Send + 'static,
) {
    let scope = scope.child();
    let Inputs { id, local, desired, wake, objects_changed, ordered, released } = inputs;
    let writer = match local {
        true => StatusWriter::local(context.pods.local().clone(), &id),
        false => StatusWriter::start(context.clone(), id.clone(), &scope),
    };
    let probes = ProbeSet::new(context.probes.clone(), &scope, wake.clone());
    let allocation = Allocation::load(&context.volumes.pod_dir(&id.uid)).unwrap_or_default();
    let backoff = context.restart_backoff.clone();
    let worker = Worker {
        context,
        id,
        local,
        desired,
        wake,
        objects_changed,
        ordered,
        released,
        probes,
        writer,
        backoff,
        pulls: PullState::default(),
        refused_until: HashMap::new(),
        waiting: HashMap::new(),
        verdict: None,
        volumes: None,
        allocation,
        resize: resize::Progress::default(),
        cgroup_of: None,
        volumes_of: None,
        admitted: false,
        finished: false,
        attempts: BTreeMap::new(),
        removed: BTreeMap::new(),
        messages: HashMap::new(),
    };
    let ended = scope.clone();
    scope.spawn(async move {
        worker.run().await;
        done();
        // The status writer has nothing more to say.
        ended.cancel();
    });
}

impl Worker {
    async fn run(mut self) {
        let mut retry = Backoff::new(Duration::from_millis(500), Duration::from_secs(30), 0.1);
        let mut next: Option<Timestamp> = None;
        let mut seen: Option<Arc<Pod>> = None;
        let mut cause = Cause::Anything;
        loop {
            let desired = self.desired.borrow_and_update().clone();
            let desired = match desired {
                Desired::Present(pod) if self.local => Desired::Present(self.with_own_status(&pod)),
                other => other,
            };
            let echo = cause == Cause::Api
                && seen.as_ref().is_some_and(|old| only_status_differs(old, desired.pod()));
            seen = Some(desired.pod().clone());
            let round = if desired.must_end() {
                match Box::pin(self.terminate(&desired)).await {
                    Ok(()) => return,
                    Err(e) => Err(e),
                }
            } else if echo && !model::is_finished(desired.pod()) {
                self.reconcile(desired.pod()).await.map(|at| [at, next].into_iter().flatten().min())
            } else {
                Box::pin(self.sync(desired.pod())).await
            };
            next = match round {
                Ok(at) => {
                    retry.reset();
                    at
                }
                // Nobody is left to say what is wanted.
                Err(SyncError::Interrupted) if self.desired.has_changed().is_err() => return,
                Err(SyncError::Interrupted) => continue,
                Err(e) => {
                    let delay = retry.next_delay();
                    tracing::warn!(pod = %self.id, error = %e, "pod sync failed; will try again");
                    if !matches!(e, SyncError::Volume(_) | SyncError::Network(_) | SyncError::Prepare(_)) {
                        let message = format!("error determining status: {e}");
                        self.context.event(desired.pod(), EventType::Warning, "FailedSync", message);
                    }
                    Some(clock::add(self.context.clock.now(), delay))
                }
            };
            let sleep = next.map(|at| clock::since(self.context.clock.now(), at));
            cause = tokio::select! {
                changed = self.desired.changed() => match changed {
                    Ok(()) => Cause::Api,
                    Err(_) => return,
                },
                () = self.wake.notified() => Cause::Anything,
                () = tokio::time::sleep(sleep.unwrap_or(Duration::MAX)), if sleep.is_some() => Cause::Anything,
            };
        }
    }

    /// Only the status changed, by our own hand or another's: nothing to do but to see that it is right.
    async fn reconcile(&mut self, pod: &Arc<Pod>) -> Result<Option<Timestamp>, SyncError> {
        let runtime = self.observe().await?;
        // A pod that is over for good stays so while the API server does not know it yet.
        self.publish(pod, &runtime, self.finished, self.finished);
        Ok(deadline(pod))
    }

    /// One sync of a pod that should run. Returns the time of the next sync if nothing happens before.
    async fn sync(&mut self, pod: &Arc<Pod>) -> Result<Option<Timestamp>, SyncError> {
        let context = self.context.clone();
        let now = context.clock.now();
        let runtime = self.observe().await?;
        self.probes.recall(pod, &runtime);
        if self.finished || model::is_finished(pod) {
            self.finish(pod, &runtime).await?;
            return Ok(None);
        }
        if self.verdict.is_none() {
            self.verdict = self.ordered.borrow_and_update().clone();
        }
        if !self.admitted && self.verdict.is_none() {
            // A pod with sandboxes was admitted before: a restart of the kubelet takes nothing away.
            if runtime.is_empty() && !self.admit_unless_ended(pod).await? {
                self.publish(pod, &runtime, false, false);
                return Ok(Some(clock::add(now, AFTER_PREEMPTION)));
            }
            self.admitted = true;
        }
        let deadline = deadline(pod);
        if self.verdict.is_none() && deadline.is_some_and(|at| at <= now) {
            let message = "Pod was active on the node longer than the specified deadline";
            let reason = "DeadlineExceeded".to_owned();
            self.verdict =
                Some(Verdict { reason, message: message.to_owned(), disruption: None, grace: None });
            context.event(pod, EventType::Normal, "DeadlineExceeded", message);
        }
        if self.verdict.is_some() {
            self.finish(pod, &runtime).await?;
            return Ok(None);
        }
        self.allocation.begin(pod, &runtime);
        self.recall_cgroup(pod, &runtime);
        let pod = &self.allocate(pod, &runtime).await?;
        self.publish(pod, &runtime, false, false);
        if !model::is_host_network(pod) && runtime.sandbox().is_none() {
            let problem = context.readiness.borrow().network_problem.clone();
            if let Some(problem) = problem {
                let error = SyncError::Network(problem);
                context.event(pod, EventType::Warning, "NetworkNotReady", error.to_string());
                return Err(error);
            }
        }
        self.ensure_cgroup(pod, &runtime).await?;
        self.ensure_volumes(pod).await?;
        self.ensure_claims(pod, &runtime).await?;
        let mut actions = self.decide(pod, &runtime);
        if actions.finished {
            self.finish(pod, &runtime).await?;
            return Ok(None);
        }
        let mut acted = Box::pin(self.apply(pod, &runtime, &actions, Progress::Shown)).await;
        let mut runtime = self.observe().await?;
        // As upstream: a container whose definition changed is replaced within one round, so that nobody sees the time
        // between the two.
        let replaced = actions.kill.iter().any(|kill| kill.cause == KillCause::SpecChanged);
        if acted.is_ok() && (replaced || !actions.reset.is_empty()) {
            let next = self.decide(pod, &runtime);
            if !next.finished {
                acted = Box::pin(self.apply(pod, &runtime, &next, Progress::Hidden)).await;
                runtime = self.observe().await?;
                actions = next;
            }
        }
        self.end_resize(pod, &runtime).await?;
        self.publish(pod, &runtime, false, false);
        let ip = self.pod_ip(pod, &runtime);
        self.probes.update(pod, &model::containers(pod), &runtime, &ip);
        self.collect_garbage(&runtime).await;
        let retry = acted?;
        let refresh = self.volumes.as_ref().and_then(|v| v.refresh_at);
        Ok([actions.wake_at(), retry, deadline, refresh, self.resize_again_at()].into_iter().flatten().min())
    }

    fn decide(&self, pod: &Pod, runtime: &RuntimePod) -> Actions {
        let (probes, now) = (self.probes.results(), self.context.clock.now());
        let attempts = restart_all::attempts(pod, &self.attempts);
        decide::decide(&decide::Inputs {
            pod,
            runtime,
            probes: &probes,
            backoff: &self.backoff,
            now,
            attempts: &attempts,
        })
    }

    /// Admission may wait for a device plugin; a pod that must end does not.
    async fn admit_unless_ended(&mut self, pod: &Pod) -> Result<bool, SyncError> {
        let mut ending = self.end_signal();
        tokio::select! {
            admitted = self.admit(pod) => Ok(admitted),
            () = ending.begun() => Err(SyncError::Interrupted),
        }
    }

    pub(super) fn end_signal(&self) -> EndSignal {
        EndSignal { desired: self.desired.clone(), ordered: self.ordered.clone() }
    }

    pub(super) fn pod_ip(&self, pod: &Pod, runtime: &RuntimePod) -> String {
        if model::is_host_network(pod) {
            return self.context.host_ips.first().cloned().unwrap_or_default();
        }
        runtime.sandbox().and_then(|s| s.ips.first()).cloned().unwrap_or_default()
    }

    /// The status of a static pod is here and not in the API.
    fn with_own_status(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        match self.local {
            true => self.context.pods.local().with_status(pod),
            false => pod.clone(),
        }
    }

    /// Computes and publishes the status.
    pub(super) fn publish(&self, pod: &Arc<Pod>, runtime: &RuntimePod, terminating: bool, terminated: bool) {
        let context = &self.context;
        let probes = self.probes.results();
        let pod = &self.with_own_status(pod);
        let status = status::pod_status(&StatusInputs {
            pod: &self.allocation.of(pod, runtime),
            resize: &self.resize,
            group: self.cgroup_of,
            devices: &|container| {
                let mut shown = context.devices.statuses(&self.id.uid, container);
                shown.extend(context.claims.statuses(pod, container));
                shown
            },
            runtime,
            removed: &self.removed,
            probes: &probes,
            waiting: &self.waiting,
            verdict: self.verdict.as_ref(),
            terminating,
            terminated,
            host_ips: &context.host_ips,
            runtime_name: &context.runtime_name,
            now: context.clock.now(),
        });
        self.writer.publish(status, pod.clone());
    }

    /// The pod has run its course, or may not run: stop its remaining containers, free its resources, keep
    /// its records.
    async fn finish(&mut self, pod: &Arc<Pod>, runtime: &RuntimePod) -> Result<(), SyncError> {
        if runtime.running().next().is_some() || runtime.sandboxes.iter().any(|s| s.ready) {
            self.probes.keep_readiness();
            self.kill_all(&Desired::Present(pod.clone())).await?;
        }
        self.probes.stop();
        let runtime = self.observe().await?;
        self.publish(pod, &runtime, true, true);
        if !self.finished {
            self.release().await?;
            // The files of the termination messages go with the pod's directory: the messages are on record first.
            self.until_gone_or(self.writer.flushed()).await;
            self.context.volumes.tear_down(&self.id.uid).await.map_err(SyncError::CleanUp)?;
            self.context.userns.release(&self.id.uid);
            self.finished = true;
        }
        Ok(())
    }

    /// Everything the runtime has for the pod. Whatever is published comes from here: termination messages are
    /// read from files that go with the pod's directory, so each is kept once it was read.
    pub(super) async fn observe(&mut self) -> ferrite_cri::Result<RuntimePod> {
        let mut runtime = observe(&*self.context.runtime, &self.id.uid).await?;
        self.allocation.note(&mut runtime);
        self.keep_messages(&mut runtime);
        Ok(runtime)
    }

    fn keep_messages(&mut self, runtime: &mut RuntimePod) {
        for instance in runtime.instances.iter_mut().filter(|i| i.state == RunState::Exited) {
            match self.messages.get(&instance.id) {
                Some(message) => instance.message.clone_from(message),
                None if instance.message.is_empty() => {}
                None => {
                    self.messages.insert(instance.id.clone(), instance.message.clone());
                }
            }
        }
    }

    /// Keeps, of each container, the newest instance and the newest dead one before it.
    async fn collect_garbage(&self, runtime: &RuntimePod) {
        let mut kept: HashMap<&str, u32> = HashMap::new();
        let mut removed = Vec::new();
        for instance in &runtime.instances {
            let count = kept.entry(&instance.name).or_default();
            *count += 1;
            if *count > 2 && instance.state == RunState::Exited {
                removed.push((&instance.name, &instance.id));
            }
        }
        for (name, id) in &removed {
            self.context.log_links.remove(&self.id, name, id).await;
            let request = RemoveContainerRequest { container_id: (*id).clone() };
            if let Err(e) = self.context.runtime.remove_container(request).await {
                tracing::warn!(pod = %self.id, container = %id, error = %e, "could not remove a dead container");
            }
        }
        for sandbox in runtime.sandboxes.iter().skip(1).filter(|s| !s.ready) {
            let in_use = runtime
                .instances
                .iter()
                .any(|i| i.sandbox_id == sandbox.id && !removed.iter().any(|(_, id)| **id == i.id));
            if !in_use {
                let request = RemovePodSandboxRequest { pod_sandbox_id: sandbox.id.clone() };
                if let Err(e) = self.context.runtime.remove_pod_sandbox(request).await {
                    tracing::warn!(pod = %self.id, sandbox = %sandbox.id, error = %e, "could not remove a dead sandbox");
                }
            }
        }
    }
}

fn only_status_differs(old: &Pod, new: &Pod) -> bool {
    let plain = |pod: &Pod| {
        let mut meta = pod.metadata.clone();
        meta.resource_version = None;
        meta.managed_fields = None;
        meta
    };
    old.spec == new.spec && plain(old) == plain(new)
}

/// When the pod has been active for as long as it may.
fn deadline(pod: &Pod) -> Option<Timestamp> {
    let seconds = u64::try_from(model::spec(pod).active_deadline_seconds?).ok()?;
    let started = pod.status.as_ref()?.start_time.as_ref()?;
    Some(clock::add(started.0, Duration::from_secs(seconds)))
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
