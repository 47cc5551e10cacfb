//! The probes of one pod: a task with a timer for each probe of each running container.

use super::machine::{Machine, Step, Thresholds};
use super::{Checker, Outcome, ProbeCounts, ProbeKind, ProbeResults, Target};
use crate::clock::{self, Clock};
use crate::pod::model::{self, PodContainer};
use crate::pod::runtime_pod::RuntimePod;
use ferrite_client::{EventRecorder, EventType, Scope};
use k8s_openapi::api::core::v1::{ObjectReference, Pod, Probe};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;
use tokio::time::{Duration, Instant};

/// A check that could not be made is repeated this often before its turn is over.
const ATTEMPTS: usize = 3;

#[derive(Clone)]
pub(crate) struct ProbeContext {
    pub checker: Checker,
    pub recorder: EventRecorder,
    pub clock: Clock,
    pub counts: ProbeCounts,
}

/// Probes of one pod. Dropping it ends them.
pub(crate) struct ProbeSet {
    context: ProbeContext,
    scope: Scope,
    running: HashMap<(String, ProbeKind), Scope>,
    /// The pod whose probes these are, once one was started.
    uid: Option<String>,
    results: Arc<Mutex<ProbeResults>>,
    recalled: bool,
    changed: Arc<Notify>,
}

impl ProbeSet {
    /// `changed` is notified when a verdict changes.
    pub(crate) fn new(context: ProbeContext, scope: &Scope, changed: Arc<Notify>) -> Self {
        Self {
            context,
            scope: scope.child(),
            running: HashMap::new(),
            uid: None,
            results: Arc::default(),
            recalled: false,
            changed,
        }
    }

    pub(crate) fn results(&self) -> ProbeResults {
        self.results.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes over what an earlier kubelet found out, once.
    pub(crate) fn recall(&mut self, pod: &Pod, runtime: &RuntimePod) {
        if !std::mem::replace(&mut self.recalled, true) {
            let containers = model::containers(pod);
            self.results.lock().unwrap_or_else(PoisonError::into_inner).recall(pod, &containers, runtime);
        }
    }

    /// Starts the probes that should run now and ends the rest.
    pub(crate) fn update(
        &mut self,
        pod: &Pod,
        containers: &[PodContainer],
        runtime: &RuntimePod,
        pod_ip: &str,
    ) {
        self.uid.clone_from(&pod.metadata.uid);
        let results = self.results();
        let mut wanted = HashMap::new();
        for c in containers {
            let Some(instance) = runtime.latest(c.name()).filter(|i| i.is_running()) else { continue };
            let started = results.started(&c.spec, &instance.id);
            for kind in ProbeKind::ALL {
                // Until the container has started, only its startup probe speaks; afterwards it is silent.
                let now = (kind == ProbeKind::Startup) != started;
                if let Some(probe) = kind.of(&c.spec).filter(|_| now) {
                    wanted.insert((instance.id.clone(), kind), (c, instance, probe));
                }
            }
        }
        self.running.retain(|key, scope| {
            let keep = wanted.contains_key(key);
            if !keep {
                scope.cancel();
            }
            keep
        });
        self.results
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|id| runtime.running().any(|i| i.id == id));
        for (key, (container, instance, probe)) in wanted {
            if self.running.contains_key(&key) {
                continue;
            }
            let task = ProbeTask {
                context: self.context.clone(),
                kind: key.1,
                probe: probe.clone(),
                target: Target {
                    container_id: instance.id.clone(),
                    pod_ip: pod_ip.to_string(),
                    container: container.spec.clone(),
                },
                about: model::reference(pod, Some(container.field_path())),
                running_for: instance
                    .started_at
                    .map_or(Duration::ZERO, |at| clock::since(at, self.context.clock.now())),
                results: self.results.clone(),
                changed: self.changed.clone(),
            };
            let scope = self.scope.child();
            scope.spawn(task.run());
            self.running.insert(key, scope);
        }
    }

    /// Ends the probes that could restart a container. As upstream, a pod that ends may still become unready.
    pub(crate) fn keep_readiness(&mut self) {
        self.running.retain(|(_, kind), scope| {
            let keep = *kind == ProbeKind::Readiness;
            if !keep {
                scope.cancel();
            }
            keep
        });
    }

    /// Ends the probes of containers that run no more.
    pub(crate) fn keep_running(&mut self, runtime: &RuntimePod) {
        self.running.retain(|(id, _), scope| {
            let keep = runtime.running().any(|instance| instance.id == *id);
            if !keep {
                scope.cancel();
            }
            keep
        });
    }

    /// Ends every probe.
    pub(crate) fn stop(&mut self) {
        self.running.drain().for_each(|(_, scope)| scope.cancel());
    }
}

impl Drop for ProbeSet {
    fn drop(&mut self) {
        self.scope.cancel();
        if let Some(uid) = &self.uid {
            self.context.counts.forget(uid);
        }
    }
}

struct ProbeTask {
    context: ProbeContext,
    kind: ProbeKind,
    probe: Probe,
    target: Target,
    about: ObjectReference,
    running_for: Duration,
    results: Arc<Mutex<ProbeResults>>,
    changed: Arc<Notify>,
}

impl ProbeTask {
    async fn run(self) {
        let thresholds = Thresholds::of(&self.probe);
        let mut machine = Machine::new(self.kind, thresholds.clone());
        let mut next = Instant::now() + thresholds.initial_delay.saturating_sub(self.running_for);
        loop {
            tokio::time::sleep_until(next).await;
            let outcome = self.attempt(thresholds.timeout).await;
            self.context.counts.count(&self.about, &self.target.container.name, self.kind, &outcome);
            self.tell(&outcome);
            match machine.observe(&outcome) {
                Step::Continue => {}
                Step::Verdict(success) => self.set(success),
                Step::Last(success) => return self.set(success),
            }
            // Checks keep their rhythm however long one took; missed turns are not made up.
            next = (next + thresholds.period).max(Instant::now());
        }
    }

    async fn attempt(&self, limit: Duration) -> Outcome {
        let mut outcome = Outcome::Error(String::new());
        for _ in 0..ATTEMPTS {
            outcome = self.context.checker.check(&self.probe, &self.target, limit).await;
            if !matches!(outcome, Outcome::Error(_)) {
                break;
            }
        }
        outcome
    }

    fn tell(&self, outcome: &Outcome) {
        let kind = self.kind.as_str();
        let (reason, message) = match outcome {
            Outcome::Success => return,
            Outcome::Warning(output) => ("ProbeWarning", format!("{kind} probe warning: {output}")),
            Outcome::Failure(output) => ("Unhealthy", format!("{kind} probe failed: {output}")),
            Outcome::Error(error) => ("Unhealthy", format!("{kind} probe errored: {error}")),
        };
        self.context.recorder.event(&self.about, EventType::Warning, reason, message);
    }

    fn set(&self, success: bool) {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        if results.set(&self.target.container_id, self.kind, success) {
            drop(results);
            self.changed.notify_one();
        }
    }
}
