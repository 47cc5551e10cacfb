//! Pods that wait: for a cycle (*active*), for their back-off to pass (*backoff*), or for something to change in the
//! cluster (*unschedulable*). Time is an argument; waiting is the caller's.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::ObjectKey;
use tokio::time::Instant;

use crate::framework::{ClusterEvent, SortKey};
use crate::measures;
use crate::snapshot::PodInfo;

/// A pod that nothing woke for this long is tried again, in case a hint was wrong.
const LONGEST_WAIT: Duration = Duration::from_secs(5 * 60);
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
    fn after(self, attempts: u32) -> Duration {
        let doublings = attempts.saturating_sub(1).min(31);
        self.initial.saturating_mul(1 << doublings).min(self.max)
    }
}

/// A pod taken from the queue, to be given back by [`Queue::done`] or [`Queue::give_back`].
#[derive(Debug)]
pub struct Popped {
    pub pod: Arc<PodInfo>,
    pub attempts: u32,
    /// When it first entered the queue.
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
    since: Instant,
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
    /// The newest version, if it changed meanwhile.
    latest: Option<Arc<PodInfo>>,
    deleted: bool,
}

pub struct Queue {
    policy: Box<dyn QueuePolicy>,
    backoff_limits: BackoffLimits,
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

    /// The number of pods that are (active, backing off, unschedulable).
    pub fn lengths(&self) -> (usize, usize, usize) {
        (self.active.len(), self.backoff.len() + self.error_backoff.len(), self.unschedulable.len())
    }

    /// A pending pod was seen for the first time, or changed.
    pub fn set(&mut self, pod: Arc<PodInfo>, now: Instant) {
        let key = pod.key.clone();
        if let Some(flying) = self.in_flight.get_mut(&key) {
            flying.latest = Some(pod);
            return;
        }
        let Some(known) = self.waiting.get_mut(&key) else {
            let waiting = Waiting {
                pod,
                attempts: 0,
                since: now,
                ready_at: now,
                failed: false,
                rejected_by: RejectedBy::default(),
                gated: false,
                helped: false,
                place: Place::Unschedulable((now, 0)),
            };
            self.enqueue(waiting, now, "PodAdd");
            return;
        };
        let changed = pod.differs_from(&known.pod);
        known.pod = pod;
        if changed && let Some(waiting) = self.take(&key) {
            self.enqueue(waiting, now, "PodUpdate");
        }
    }

    /// The pod is gone, or has a node.
    pub fn remove(&mut self, key: &ObjectKey) {
        if let Some(flying) = self.in_flight.get_mut(key) {
            flying.deleted = true;
        }
        self.held.remove(key);
        if self.take(key).is_some() {
            self.measure();
        }
    }

    /// The pod whose turn it is. When no pod is active, one that backs off after a rejection is taken before its time:
    /// nobody else wants the cycle.
    pub fn pop(&mut self, now: Instant) -> Option<Popped> {
        self.promote(now);
        let key = match self.active.pop_first() {
            Some((_, key)) => key,
            None => self.backoff.pop_first()?.1,
        };
        let waiting = self.waiting.remove(&key)?;
        let flying = InFlight { from: self.next_event, latest: None, deleted: false };
        self.in_flight.insert(key, flying);
        self.measure();
        Some(Popped { pod: waiting.pod, attempts: waiting.attempts + 1, since: waiting.since, started: now })
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

    /// The pod was bound, or is of no interest any more.
    pub fn done(&mut self, key: &ObjectKey) {
        self.in_flight.remove(key);
        self.forget_events();
    }

    /// No node was found, or binding failed. It waits for an event that helps, unless one came already while it was
    /// in flight, or no plugin rejected it (`rejected_by` is empty): then only for its back-off.
    pub fn give_back(&mut self, popped: Popped, rejected_by: Vec<&'static str>, now: Instant) {
        let key = popped.pod.key.clone();
        let Some(flying) = self.in_flight.remove(&key) else { return };
        if !flying.deleted {
            let changed = flying.latest.as_ref().is_some_and(|latest| latest.differs_from(&popped.pod));
            let forgot = self.events.front().map_or(self.next_event, |(number, _)| *number) > flying.from;
            let helped = rejected_by.is_empty()
                || changed
                || forgot
                || self
                    .events
                    .iter()
                    .filter(|(number, _)| *number >= flying.from)
                    .any(|(_, event)| self.policy.queueing_hint(&popped.pod, &rejected_by, event));
            let failed = rejected_by.is_empty();
            let pod = flying.latest.unwrap_or(popped.pod);
            let waiting = Waiting {
                rejected_by: RejectedBy::new(rejected_by, &pod),
                pod,
                attempts: popped.attempts,
                since: popped.since,
                ready_at: now + self.backoff_limits.after(popped.attempts),
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
                let order = self.policy.sort_key(&waiting.pod, waiting.since);
                let at = (self.window_end(waiting.ready_at), order, self.sequence);
                waiting.place = Place::Backoff(at);
                self.backoff.insert(at, key.clone());
            }
        } else {
            let at = (self.policy.sort_key(&waiting.pod, waiting.since), self.sequence);
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
        let at = (now + LONGEST_WAIT, self.sequence);
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
mod tests {
    use ferrite_json::json;

    use super::*;

    fn pod(name: &str, priority: i32, gates: &[&str]) -> Arc<PodInfo> {
        let gates: Vec<_> = gates.iter().map(|name| json!({"name": name})).collect();
        let pod = ferrite_json::from_value(json!({"metadata": {"name": name, "namespace": "ns"},
            "spec": {"containers": [], "priority": priority, "schedulingGates": gates}}));
        Arc::new(PodInfo::new(&pod.unwrap()))
    }

    /// Gates hold pods back; `Other` helps those that a plugin named "X" did not reject.
    struct Policy;

    impl QueuePolicy for Policy {
        fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), &'static str> {
            if pod.placement.is_gated { Err("SchedulingGates") } else { Ok(()) }
        }

        fn sort_key(&self, pod: &PodInfo, queued: Instant) -> SortKey {
            SortKey { rank: -i64::from(pod.priority), then: queued }
        }

        fn queueing_hint(&self, _: &PodInfo, rejected_by: &[&'static str], _: &ClusterEvent) -> bool {
            rejected_by != ["X"] && rejected_by != ["SchedulingGates"]
        }
    }

    fn queue() -> (Queue, Instant) {
        let queue = Queue::new(Box::new(Policy), BackoffLimits::default());
        let now = queue.epoch;
        (queue, now)
    }

    fn pop(queue: &mut Queue, now: Instant) -> Option<String> {
        queue.pop(now).map(|popped| popped.pod.key.name.to_string())
    }

    #[test]
    fn priority_then_age() {
        let (mut queue, now) = queue();
        for (name, priority, second) in [("old", 0, 0), ("young", 0, 1), ("high", 5, 2)] {
            queue.set(pod(name, priority, &[]), now + Duration::from_secs(second));
        }
        let later = now + Duration::from_secs(9);
        let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue, later)).collect();
        assert_eq!(order, ["high", "old", "young"]);
    }

    #[test]
    fn a_rejected_pod_waits_for_a_helpful_event_and_its_back_off() {
        let (mut queue, now) = queue();
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.give_back(popped, vec!["X"], now);
        queue.on_event(ClusterEvent::Other, now);
        assert_eq!(queue.lengths(), (0, 0, 1), "the event does not help");

        queue.set(pod("b", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.give_back(popped, vec!["NodeResourcesFit"], now);
        assert_eq!(queue.lengths(), (0, 0, 2));
        queue.on_event(ClusterEvent::Other, now);
        assert_eq!(queue.lengths(), (0, 1, 1), "its back-off of one second runs");
        assert_eq!(queue.next_due(), Some(now + Duration::from_secs(1)));
        queue.set(pod("c", -1, &[]), now);
        assert_eq!(
            pop(&mut queue, now).as_deref(),
            Some("c"),
            "active pods come first, whatever their priority"
        );
        assert_eq!(pop(&mut queue, now).as_deref(), Some("b"), "an idle cycle takes pods that back off");
    }

    #[test]
    fn pods_count_for_the_plugins_that_rejected_them_until_their_next_attempt() {
        let of_profile = |name: &str, gates: &[&str]| {
            let gates: Vec<_> = gates.iter().map(|name| json!({"name": name})).collect();
            let pod = ferrite_json::from_value(json!({"metadata": {"name": name, "namespace": "ns"},
                "spec": {"containers": [], "schedulerName": "counted", "schedulingGates": gates}}));
            Arc::new(PodInfo::new(&pod.unwrap()))
        };
        let counts = || {
            let gauge = |plugin: &str| measures::unschedulable_pods(plugin, "counted");
            [gauge("X"), gauge("NodeResourcesFit"), gauge("SchedulingGates")]
        };
        let (mut queue, now) = queue();
        queue.set(of_profile("a", &[]), now);
        queue.set(of_profile("gated", &["g"]), now);
        assert_eq!(counts(), [0, 0, 1]);
        let popped = queue.pop(now).unwrap();
        queue.give_back(popped, vec!["X", "NodeResourcesFit"], now);
        assert_eq!(counts(), [1, 1, 1], "a pod counts for each plugin");
        queue.on_event(ClusterEvent::Other, now);
        assert_eq!((queue.lengths(), counts()), ((0, 1, 1), [1, 1, 1]), "also while it backs off");
        let popped = queue.pop(now).unwrap();
        assert_eq!(counts(), [0, 0, 1]);
        queue.give_back(popped, vec!["X"], now);
        queue.set(of_profile("gated", &[]), now);
        assert_eq!(pop(&mut queue, now).as_deref(), Some("gated"));
        assert_eq!(counts(), [1, 0, 0]);
        queue.remove(&of_profile("a", &[]).key);
        assert_eq!(counts(), [0, 0, 0]);
    }

    #[test]
    fn after_an_error_the_whole_back_off_passes() {
        let (mut queue, now) = queue();
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.give_back(popped, Vec::new(), now);
        assert_eq!(queue.lengths(), (0, 1, 0));
        assert_eq!(pop(&mut queue, now), None);
        assert_eq!(queue.next_due(), Some(now + Duration::from_secs(1)));
        assert_eq!(pop(&mut queue, now + Duration::from_secs(1)).as_deref(), Some("a"));
    }

    #[test]
    fn pods_that_back_off_are_taken_by_window_then_by_priority() {
        let (mut queue, now) = queue();
        for (name, priority) in [("low", 0), ("high", 5)] {
            queue.set(pod(name, priority, &[]), now);
            let popped = queue.pop(now).unwrap();
            queue.give_back(popped, vec!["NodeResourcesFit"], now);
        }
        queue.on_event(ClusterEvent::Other, now);
        let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue, now)).collect();
        assert_eq!(order, ["high", "low"]);
    }

    #[test]
    fn a_held_pod_waits_for_its_release() {
        let (mut queue, now) = queue();
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        let key = popped.pod.key.clone();
        queue.hold(key.clone());
        queue.give_back(popped, vec!["NodeResourcesFit"], now);
        queue.release(&key, false, now);
        assert_eq!(queue.lengths(), (0, 0, 1), "nothing helped it");
        queue.hold(key.clone());
        queue.on_event(ClusterEvent::Other, now);
        assert_eq!(queue.lengths(), (0, 0, 1), "held");
        let parked: Vec<_> = queue.unschedulable.keys().copied().collect();
        queue.on_event(ClusterEvent::Other, now);
        assert!(queue.unschedulable.keys().eq(&parked), "helped once is enough");
        queue.release(&key, false, now);
        assert_eq!(queue.lengths(), (0, 1, 0), "the event is not lost");

        let popped = queue.pop(now).unwrap();
        queue.hold(key.clone());
        queue.give_back(popped, vec!["X"], now);
        queue.release(&key, true, now);
        assert_eq!(queue.lengths(), (0, 1, 0), "tried again although nothing helped");
    }

    #[test]
    fn events_during_the_cycle_are_not_missed() {
        let (mut queue, now) = queue();
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.on_event(ClusterEvent::Other, now);
        queue.give_back(popped, vec!["NodeResourcesFit"], now);
        assert_eq!(queue.lengths(), (0, 1, 0));
        assert!(queue.events.is_empty(), "nothing is in flight any more");
    }

    #[test]
    fn back_off_doubles_to_ten_seconds() {
        let seconds: Vec<_> =
            (1..7).map(|attempts| BackoffLimits::default().after(attempts).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 10, 10]);
    }

    #[test]
    fn forgotten_pods_are_tried_again_after_a_while() {
        let (mut queue, now) = queue();
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.give_back(popped, vec!["X"], now);
        assert_eq!(pop(&mut queue, now + LONGEST_WAIT).as_deref(), Some("a"));
    }

    #[test]
    fn gates_hold_a_pod_until_they_are_gone() {
        let (mut queue, now) = queue();
        queue.set(pod("a", 0, &["g"]), now);
        queue.on_event(ClusterEvent::Other, now);
        assert_eq!(pop(&mut queue, now + LONGEST_WAIT), None);
        queue.set(pod("a", 0, &[]), now);
        assert_eq!(pop(&mut queue, now).as_deref(), Some("a"));
    }

    #[test]
    fn changes_and_deletions_reach_pods_in_every_part() {
        let (mut queue, now) = queue();
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.set(pod("a", 7, &[]), now);
        queue.give_back(popped, vec!["X"], now);
        assert_eq!(queue.lengths(), (0, 1, 0), "it changed while in flight");
        queue.remove(&ObjectKey::new("ns", "a"));
        assert_eq!(queue.lengths(), (0, 0, 0));

        queue.set(pod("b", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.remove(&popped.pod.key.clone());
        queue.give_back(popped, vec!["X"], now);
        assert_eq!(queue.lengths(), (0, 0, 0), "deleted while in flight");
    }
}
