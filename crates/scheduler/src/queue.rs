//! Pods that wait: for a cycle (*active*), for their back-off to pass (*backoff*), or for something to change in the
//! cluster (*unschedulable*). Time is an argument; waiting is the caller's.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::ObjectKey;
use ferrite_json::Text;
use tokio::time::Instant;

use crate::framework::{ClusterEvent, SortKey};
use crate::measures;
use crate::snapshot::PodInfo;

/// A pod that nothing woke for this long is tried again, in case a hint was wrong.
pub const LONGEST_WAIT: Duration = Duration::from_secs(5 * 60);
/// As upstream, which looks for such pods once in this time: shorter waits would try pods without end.
const SHORTEST_WAIT: Duration = Duration::from_secs(30);
/// Events remembered for pods in flight; a pod that was in flight for more is tried again.
const REMEMBERED_EVENTS: usize = 4096;
/// Pods whose back-off ends within the same span of this length are ordered as in the active part.
const BACKOFF_WINDOW: Duration = Duration::from_secs(1);

/// The event of a pod whose attempt failed, as metrics name it.
const ATTEMPT_FAILED: &str = "ScheduleAttemptFailure";

/// The decisions about pods that the queue leaves to plugins.
pub trait QueuePolicy: Send + Sync {
    /// Names the plugin that keeps the pod out of the active part.
    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), &'static str>;

    fn sort_key(&self, pod: &PodInfo, queued: Instant) -> SortKey;

    /// True if an event may help a pod that these plugins rejected.
    fn queueing_hint(&self, pod: &PodInfo, rejected_by: &[&'static str], event: &ClusterEvent) -> bool;
}

/// The time that a pod waits after a failed attempt: doubled after each, up to a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackoffLimits {
    pub initial: Duration,
    pub max: Duration,
}

impl Default for BackoffLimits {
    fn default() -> Self {
        Self { initial: Duration::from_secs(1), max: Duration::from_secs(10) }
    }
}

impl BackoffLimits {
    fn after(self, failures: Failures) -> Duration {
        let doublings = failures.counted().saturating_sub(1).min(31);
        self.initial.saturating_mul(1 << doublings).min(self.max)
    }
}

/// The failed attempts of a pod, which decide on its back-off. As upstream: an error of the API after many rejections is
/// the first error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Failures {
    rejections: u32,
    /// Errors since the last rejection.
    errors: u32,
}

impl Failures {
    fn after_rejection(self) -> Self {
        Self { rejections: self.rejections.saturating_add(1), errors: 0 }
    }

    fn after_error(self) -> Self {
        Self { errors: self.errors.saturating_add(1), ..self }
    }

    fn counted(self) -> u32 {
        if self.errors > 0 { self.errors } else { self.rejections }
    }
}

/// A pod taken from the queue, to be given back by [`Queue::done`] or [`Queue::give_back`].
#[derive(Debug)]
pub struct Popped {
    pub pod: Arc<PodInfo>,
    pub attempts: u32,
    pub failures: Failures,
    /// When it first entered the active part.
    pub since: Instant,
    /// When this attempt began.
    pub started: Instant,
}

/// Active: order of the plugin. Backoff: end of the back-off, by window, then order of the plugin.
type ActiveKey = (SortKey, u64);
type BackoffKey = (Instant, SortKey, u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Active(ActiveKey),
    Backoff(BackoffKey),
    /// After an error, not a rejection: it is not taken before its time.
    ErrorBackoff((Instant, u64)),
    /// With the time at which it is tried again whatever happens.
    Unschedulable((Instant, u64)),
}

/// The plugins that rejected a pod, counted as long as it waits.
#[derive(Debug, Default)]
struct RejectedBy {
    plugins: Vec<&'static str>,
    _counted: measures::Counted,
}

impl RejectedBy {
    fn new(plugins: Vec<&'static str>, pod: &PodInfo) -> Self {
        let counted = measures::unschedulable(&plugins, pod.scheduler_name());
        Self { plugins, _counted: counted }
    }
}

#[derive(Debug)]
struct Waiting {
    pod: Arc<PodInfo>,
    attempts: u32,
    failures: Failures,
    /// When it first entered the active part; none while it is gated from the start.
    since: Option<Instant>,
    /// When it entered the queue, or came back from its last attempt. Pods of equal rank are taken in this order: a pod that
    /// was just tried comes after those that wait for their turn.
    queued: Instant,
    /// End of its back-off.
    ready_at: Instant,
    /// Its last attempt ended with an error.
    failed: bool,
    rejected_by: RejectedBy,
    /// A PreEnqueue plugin keeps it out, before its first attempt.
    gated: bool,
    /// Something helped it while it was held.
    helped: bool,
    place: Place,
}

#[derive(Debug)]
struct InFlight {
    /// Events with at least this number happened while it was in flight.
    from: u64,
    /// The newest version, if it changed meanwhile; the new pod of the same name, if the pod was deleted.
    latest: Option<Arc<PodInfo>>,
    uid: Option<Text>,
    deleted: bool,
}

pub struct Queue {
    policy: Box<dyn QueuePolicy>,
    backoff_limits: BackoffLimits,
    longest_wait: Duration,
    epoch: Instant,
    waiting: HashMap<ObjectKey, Waiting>,
    active: BTreeMap<ActiveKey, ObjectKey>,
    backoff: BTreeMap<BackoffKey, ObjectKey>,
    error_backoff: BTreeMap<(Instant, u64), ObjectKey>,
    unschedulable: BTreeMap<(Instant, u64), ObjectKey>,
    /// Pods that stay unschedulable until they are released, because room is being made for them.
    held: HashSet<ObjectKey>,
    /// Pods that are gated.
    gated: usize,
    in_flight: HashMap<ObjectKey, InFlight>,
    events: VecDeque<(u64, ClusterEvent)>,
    next_event: u64,
    sequence: u64,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("lengths", &self.lengths()).finish_non_exhaustive()
    }
}

impl Queue {
    pub fn new(policy: Box<dyn QueuePolicy>, backoff_limits: BackoffLimits) -> Self {
        Self {
            policy,
            backoff_limits,
            longest_wait: LONGEST_WAIT,
            epoch: Instant::now(),
            waiting: HashMap::new(),
            active: BTreeMap::new(),
            backoff: BTreeMap::new(),
            error_backoff: BTreeMap::new(),
            unschedulable: BTreeMap::new(),
            held: HashSet::new(),
            gated: 0,
            in_flight: HashMap::new(),
            events: VecDeque::new(),
            next_event: 0,
            sequence: 0,
        }
    }

    /// Replaces the time after which a pod that nothing woke is tried again.
    #[must_use]
    pub fn with_longest_wait(mut self, wait: Duration) -> Self {
        self.longest_wait = wait.max(SHORTEST_WAIT);
        self
    }

    /// The number of pods that are (active, backing off, unschedulable).
    pub fn lengths(&self) -> (usize, usize, usize) {
        (self.active.len(), self.backoff.len() + self.error_backoff.len(), self.unschedulable.len())
    }

    /// A pending pod was seen for the first time, or changed.
    pub fn set(&mut self, pod: Arc<PodInfo>, now: Instant) {
        let key = pod.key.clone();
        if let Some(flying) = self.in_flight.get_mut(&key) {
            flying.deleted |= flying.uid != pod.uid;
            flying.latest = Some(pod);
            return;
        }
        let Some(known) = self.waiting.get_mut(&key).filter(|known| known.pod.uid == pod.uid) else {
            self.remove(&key);
            return self.add(pod, now);
        };
        let changed = pod.differs_from(&known.pod);
        known.pod = pod;
        if changed && let Some(waiting) = self.take(&key) {
            self.enqueue(waiting, now, "PodUpdate");
        }
    }

    fn add(&mut self, pod: Arc<PodInfo>, now: Instant) {
        let waiting = Waiting {
            pod,
            attempts: 0,
            failures: Failures::default(),
            since: None,
            queued: now,
            ready_at: now,
            failed: false,
            rejected_by: RejectedBy::default(),
            gated: false,
            helped: false,
            place: Place::Unschedulable((now, 0)),
        };
        self.enqueue(waiting, now, "PodAdd");
    }

    /// The pod is gone, or has a node. False if the queue did not know it any more.
    pub fn remove(&mut self, key: &ObjectKey) -> bool {
        let mut is_known = false;
        if let Some(flying) = self.in_flight.get_mut(key) {
            is_known = !flying.deleted || flying.latest.is_some();
            flying.deleted = true;
            flying.latest = None;
        }
        self.held.remove(key);
        if self.take(key).is_some() {
            is_known = true;
            self.measure();
        }
        is_known
    }

    /// The pod whose turn it is. When no pod is active, one that backs off after a rejection is taken before its time:
    /// nobody else wants the cycle.
    pub fn pop(&mut self, now: Instant) -> Option<Popped> {
        self.promote(now);
        let key = match self.active.pop_first() {
            Some((_, key)) => key,
            None => {
                let (_, key) = self.backoff.pop_first()?;
                measures::incoming("active", "PopFromBackoffQ");
                key
            }
        };
        let waiting = self.waiting.remove(&key)?;
        let uid = waiting.pod.uid.clone();
        self.in_flight.insert(key, InFlight { from: self.next_event, latest: None, uid, deleted: false });
        self.measure();
        Some(Popped {
            pod: waiting.pod,
            attempts: waiting.attempts + 1,
            failures: waiting.failures,
            since: waiting.since.unwrap_or(now),
            started: now,
        })
    }

    /// When [`pop`](Queue::pop) could next have a pod without anything being added.
    pub fn next_due(&self) -> Option<Instant> {
        let backoff = self.backoff.first_key_value().map(|((at, ..), _)| *at);
        let failed = self.error_backoff.first_key_value().map(|((at, _), _)| *at);
        let unschedulable = self.unschedulable.first_key_value().map(|((at, _), _)| *at);
        backoff.into_iter().chain(failed).chain(unschedulable).min()
    }

    /// True if a pod in flight was deleted, or got a node, since it was taken.
    pub fn is_gone(&self, key: &ObjectKey) -> bool {
        self.in_flight.get(key).is_none_or(|flying| flying.deleted)
    }

    /// The pod was bound, or is of no interest any more. A new pod that took its name meanwhile enters the queue; true if
    /// there is one.
    pub fn done(&mut self, key: &ObjectKey, now: Instant) -> bool {
        let Some(flying) = self.in_flight.remove(key) else { return false };
        self.forget_events();
        let successor = flying.latest.filter(|_| flying.deleted);
        let has_successor = successor.is_some();
        if let Some(successor) = successor {
            self.add(successor, now);
        }
        has_successor
    }

    /// No node was found, or binding failed. It waits for an event that helps, unless one came already while it was
    /// in flight, or no plugin rejected it (`rejected_by` is empty): then only for its back-off.
    pub fn give_back(&mut self, popped: Popped, rejected_by: Vec<&'static str>, now: Instant) {
        let key = popped.pod.key.clone();
        if self.is_gone(&key) {
            self.done(&key, now);
            return;
        }
        let Some(flying) = self.in_flight.remove(&key) else { return };
        let changed = flying.latest.as_ref().is_some_and(|latest| latest.differs_from(&popped.pod));
        let forgot = self.events.front().map_or(self.next_event, |(number, _)| *number) > flying.from;
        let failed = rejected_by.is_empty();
        let helped = failed
            || changed
            || forgot
            || self
                .events
                .iter()
                .filter(|(number, _)| *number >= flying.from)
                .any(|(_, event)| self.policy.queueing_hint(&popped.pod, &rejected_by, event));
        let failures = if failed { popped.failures.after_error() } else { popped.failures.after_rejection() };
        let pod = flying.latest.unwrap_or(popped.pod);
        let waiting = Waiting {
            rejected_by: RejectedBy::new(rejected_by, &pod),
            pod,
            attempts: popped.attempts,
            failures,
            since: Some(popped.since),
            queued: now,
            ready_at: now + self.backoff_limits.after(failures),
            failed,
            gated: false,
            helped: false,
            place: Place::Unschedulable((now, 0)),
        };
        if helped {
            self.enqueue(waiting, now, ATTEMPT_FAILED);
        } else {
            self.park(waiting, now, ATTEMPT_FAILED);
        }
        self.forget_events();
    }

    /// Keeps the pod out of the active part until [`release`](Queue::release). Call it before the pod is given back.
    pub fn hold(&mut self, key: ObjectKey) {
        self.held.insert(key);
    }

    /// Ends a hold. The pod moves on if something helped it meanwhile, or if `retry`.
    pub fn release(&mut self, key: &ObjectKey, retry: bool, now: Instant) {
        self.held.remove(key);
        if self.waiting.get(key).is_some_and(|waiting| waiting.helped || retry)
            && let Some(waiting) = self.take(key)
        {
            self.enqueue(waiting, now, ATTEMPT_FAILED);
        }
    }

    /// As [`on_event`](Queue::on_event), with `except` left where it is: the event is about that pod itself.
    pub fn on_event_except(&mut self, event: ClusterEvent, except: &ObjectKey, now: Instant) {
        let kept = self.take(except);
        self.on_event(event, now);
        if let Some(mut waiting) = kept {
            match waiting.place {
                Place::Unschedulable(at) => {
                    waiting.place = Place::Unschedulable(at);
                    self.gated += usize::from(waiting.gated);
                    self.unschedulable.insert(at, except.clone());
                    self.waiting.insert(except.clone(), waiting);
                }
                _ => self.enqueue(waiting, now, ATTEMPT_FAILED),
            }
        }
    }

    /// Something happened in the cluster: pods it may help leave the unschedulable part.
    pub fn on_event(&mut self, event: ClusterEvent, now: Instant) {
        let helped: Vec<ObjectKey> = self
            .unschedulable
            .values()
            .filter(|key| {
                self.waiting.get(*key).is_some_and(|waiting| {
                    // A pod that is held and was helped moves on when it is released: more help changes nothing.
                    !waiting.helped
                        && self.policy.queueing_hint(&waiting.pod, &waiting.rejected_by.plugins, &event)
                })
            })
            .cloned()
            .collect();
        for key in helped {
            if let Some(waiting) = self.take(&key) {
                self.enqueue(waiting, now, event.name());
            }
        }
        if !self.in_flight.is_empty() {
            if self.events.len() == REMEMBERED_EVENTS {
                self.events.pop_front();
            }
            self.events.push_back((self.next_event, event));
        }
        self.next_event += 1;
    }

    fn forget_events(&mut self) {
        match self.in_flight.values().map(|flying| flying.from).min() {
            None => self.events.clear(),
            Some(oldest) => {
                while self.events.front().is_some_and(|(number, _)| *number < oldest) {
                    self.events.pop_front();
                }
            }
        }
    }

    /// To the active part, or to the backoff part until it may; to the unschedulable part if it is held or a plugin
    /// keeps it out.
    fn enqueue(&mut self, mut waiting: Waiting, now: Instant, event: &'static str) {
        let key = waiting.pod.key.clone();
        if self.held.contains(&key) {
            waiting.helped = true;
            return self.park(waiting, now, event);
        }
        if let Err(plugin) = self.policy.pre_enqueue(&waiting.pod) {
            waiting.rejected_by = RejectedBy::new(vec![plugin], &waiting.pod);
            waiting.gated = waiting.attempts == 0;
            return self.park(waiting, now, event);
        }
        waiting.helped = false;
        waiting.gated = false;
        self.sequence += 1;
        measures::incoming(if waiting.ready_at > now { "backoff" } else { "active" }, event);
        if waiting.ready_at > now {
            if waiting.failed {
                let at = (waiting.ready_at, self.sequence);
                waiting.place = Place::ErrorBackoff(at);
                self.error_backoff.insert(at, key.clone());
            } else {
                let order = self.policy.sort_key(&waiting.pod, waiting.queued);
                let at = (self.window_end(waiting.ready_at), order, self.sequence);
                waiting.place = Place::Backoff(at);
                self.backoff.insert(at, key.clone());
            }
        } else {
            waiting.since.get_or_insert(now);
            let at = (self.policy.sort_key(&waiting.pod, waiting.queued), self.sequence);
            waiting.place = Place::Active(at);
            self.active.insert(at, key.clone());
        }
        self.waiting.insert(key, waiting);
        self.measure();
    }

    fn measure(&self) {
        let (active, backoff, unschedulable) = self.lengths();
        measures::pending([active, backoff, unschedulable.saturating_sub(self.gated), self.gated]);
    }

    /// The end of the window that `at` lies in.
    fn window_end(&self, at: Instant) -> Instant {
        let windows = at.saturating_duration_since(self.epoch).as_nanos().div_ceil(BACKOFF_WINDOW.as_nanos());
        self.epoch + BACKOFF_WINDOW.saturating_mul(u32::try_from(windows).unwrap_or(u32::MAX))
    }

    fn park(&mut self, mut waiting: Waiting, now: Instant, event: &'static str) {
        measures::incoming("unschedulable", event);
        self.gated += usize::from(waiting.gated);
        self.sequence += 1;
        let at = (now + self.longest_wait, self.sequence);
        waiting.place = Place::Unschedulable(at);
        let key = waiting.pod.key.clone();
        self.unschedulable.insert(at, key.clone());
        self.waiting.insert(key, waiting);
        self.measure();
    }

    fn take(&mut self, key: &ObjectKey) -> Option<Waiting> {
        let waiting = self.waiting.remove(key)?;
        self.gated -= usize::from(waiting.gated);
        match waiting.place {
            Place::Active(at) => self.active.remove(&at),
            Place::Backoff(at) => self.backoff.remove(&at),
            Place::ErrorBackoff(at) => self.error_backoff.remove(&at),
            Place::Unschedulable(at) => self.unschedulable.remove(&at),
        };
        Some(waiting)
    }

    fn promote(&mut self, now: Instant) {
        let due = |part: &BTreeMap<(Instant, u64), ObjectKey>| -> Vec<ObjectKey> {
            part.iter().take_while(|((at, _), _)| *at <= now).map(|(_, key)| key.clone()).collect()
        };
        let backoff = self.backoff.iter().take_while(|((at, ..), _)| *at <= now);
        let backoff: Vec<ObjectKey> = backoff.map(|(_, key)| key.clone()).collect();
        let failed = due(&self.error_backoff);
        let backoff = backoff.into_iter().chain(failed).map(|key| (key, "BackoffComplete"));
        let others = due(&self.unschedulable).into_iter().map(|key| (key, "UnschedulableTimeout"));
        for (key, event) in backoff.chain(others).collect::<Vec<_>>() {
            if let Some(waiting) = self.take(&key) {
                self.enqueue(waiting, now, event);
            }
        }
    }
}

#[cfg(test)]
mod tests;
